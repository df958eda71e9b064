"""Whatever a key space holds, however often a migration stops, and whatever changes in between: it comes out the same.

Tallies of several writers are among the keys; they must be one in the end, with their sum.
"""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.memory import MemoryDatabase
from holdfast.kv import Transaction
from holdfast.layers import migrations
from holdfast.layers.migrations import BEGIN, END, State
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues.counters import QueueCounters
from holdfast.layers.queues.keys import QueueKey, keys_of
from holdfast.runtime.maintenance import migrations as moving
from holdfast.runtime.maintenance.migrations import Migrator, Side

ROOMS = [keys_of(QueueKey("main", name)) for name in ("a", "b")]
RAW = st.binary(min_size=1, max_size=4)
TALLIES = st.builds(
    lambda room, writer: room.counters_key(writer), st.sampled_from(ROOMS), st.sampled_from(["", "w1", "w2", "w3"])
)
NEAR = st.builds(lambda room, tail: room.prefix + tail, st.sampled_from(ROOMS), RAW)
COUNTS = st.builds(
    lambda ready, delayed, put: queue_keys.encode(QueueCounters(ready={5: ready}, delayed=delayed, put=put)),
    st.integers(-5, 5),
    st.integers(-5, 5),
    st.integers(0, 9),
)
PAIRS = st.one_of(st.tuples(st.one_of(RAW, NEAR), st.binary(max_size=8)), st.tuples(TALLIES, COUNTS))
CHANGES = st.lists(PAIRS | st.tuples(RAW, st.none()), max_size=3)


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def changed(tx: Transaction, changes: list[tuple[bytes, bytes | None]]) -> None:
    for key, value in changes:
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)


def expected(source: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """What a plain reading of the rule makes of a key space: tallies as sums, everything else as it is."""
    target = dict(source)
    for room in ROOMS:
        keys = [key for key in source if key in {room.counters_key(writer) for writer in ("", "w1", "w2", "w3")}]
        if not keys or keys == [room.own_counters]:
            continue
        all_counters = [migrations._decode_counters(source[key]) for key in keys]
        for key in keys:
            del target[key]
        target[room.own_counters] = b"sum of %d, %d, %d" % tuple(
            sum(part)
            for part in zip(*((each.ready_total(), each.delayed, each.put) for each in all_counters), strict=True)
        )
    return target


def summed(target: dict[bytes, bytes], source: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """A target with the tallies that were united in the words of `expected`."""
    found = dict(target)
    for room in ROOMS:
        if room.own_counters in found and found[room.own_counters] != source.get(room.own_counters):
            counters = migrations._decode_counters(found[room.own_counters])
            found[room.own_counters] = b"sum of %d, %d, %d" % (counters.ready_total(), counters.delayed, counters.put)
    return found


@settings(max_examples=400)
@given(
    st.lists(PAIRS, max_size=20),
    st.lists(st.tuples(st.integers(0, 20), CHANGES), max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_target_is_the_source_however_it_came_to_be(
    pairs: list[tuple[bytes, bytes]],
    interruptions: list[tuple[int, list[tuple[bytes, bytes | None]]]],
    batch: int,
    span: int,
) -> None:
    sizes = {"MIGRATION_BATCH_PAIRS": batch, "MIGRATION_RANGE_PAIRS": span, "MIGRATION_PAGE_PAIRS": 3}
    with MemoryDatabase() as source, MemoryDatabase() as target, mock.patch.multiple(moving, **sizes):
        source.transact(changed, pairs)
        for steps, changes in interruptions:
            left = steps

            def step(_steps: int) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1

            mover = Migrator(Side(source), Side(target), "here")
            try:
                if mover.begin():
                    mover.copy_keys(step)
                    mover.compare_keys(step)
            except Killed:
                """The next one goes on."""
            if mover.now.at < END or mover.now.state is State.COPYING:
                source.transact(changed, changes)
        mover = Migrator(Side(source), Side(target), "here")
        mover.begin()
        mover.copy_keys(lambda _steps: None)
        mover.compare_keys(lambda _steps: None)
        moved = mover.finish()
        here, there = (dict(moving._plain(each, BEGIN, END)) for each in (source, target))
        assert summed(there, here) == expected(here)
        assert moved.keys == len(there) or interruptions
