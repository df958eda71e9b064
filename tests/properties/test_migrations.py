"""A migration copies any key space, however often it is interrupted with any changes in between.

Queue counters of several writers are among the keys; they must be merged into one record with their sums.
"""

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from fastness.backends.memory import MemoryDatabase
from fastness.kv import Transaction
from fastness.layers import migrations
from fastness.layers.migrations import BEGIN, END, State
from fastness.layers.queues.counters import QueueCounters
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.runtime.maintenance import migrations as moving
from fastness.runtime.maintenance.migrations import Migrator, PlaneStores
from fastness.wire import stored_messages

QUEUE_KEYS = [keys_of(QueueKey("main", name)) for name in ("a", "b")]
RAW = st.binary(min_size=1, max_size=4)
COUNTER_KEYS = st.builds(
    lambda queue, writer: queue.counters_key(writer),
    st.sampled_from(QUEUE_KEYS),
    st.sampled_from(["", "w1", "w2", "w3"]),
)
NEAR = st.builds(lambda queue, tail: queue.prefix + tail, st.sampled_from(QUEUE_KEYS), RAW)
COUNTS = st.builds(
    lambda ready, delayed, put: stored_messages.encode(QueueCounters(ready={5: ready}, delayed=delayed, put=put)),
    st.integers(-5, 5),
    st.integers(-5, 5),
    st.integers(0, 9),
)
PAIRS = st.one_of(st.tuples(st.one_of(RAW, NEAR), st.binary(max_size=8)), st.tuples(COUNTER_KEYS, COUNTS))
CHANGES = st.lists(PAIRS | st.tuples(RAW, st.none()), max_size=3)


class Killed(BaseException):
    """Not caught by any handler, like a kill."""


def changed(tx: Transaction, changes: list[tuple[bytes, bytes | None]]) -> None:
    for key, value in changes:
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)


def expected(source: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The expected target: counters as sums, everything else unchanged."""
    target = dict(source)
    for queue in QUEUE_KEYS:
        keys = [key for key in source if key in {queue.counters_key(writer) for writer in ("", "w1", "w2", "w3")}]
        if not keys or keys == [queue.own_counters]:
            continue
        all_counters = [migrations._decode_counters(source[key]) for key in keys]
        for key in keys:
            del target[key]
        target[queue.own_counters] = b"sum of %d, %d, %d" % tuple(
            sum(part)
            for part in zip(*((each.ready_total(), each.delayed, each.put) for each in all_counters), strict=True)
        )
    return target


def summed(target: dict[bytes, bytes], source: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """A target with its merged counters in the form of `expected`."""
    found = dict(target)
    for queue in QUEUE_KEYS:
        if queue.own_counters in found and found[queue.own_counters] != source.get(queue.own_counters):
            counters = migrations._decode_counters(found[queue.own_counters])
            found[queue.own_counters] = b"sum of %d, %d, %d" % (counters.ready_total(), counters.delayed, counters.put)
    return found


@settings(max_examples=400)
@given(
    st.lists(PAIRS, max_size=20),
    st.lists(st.tuples(st.integers(0, 20), CHANGES), max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_target_equals_the_source_after_any_interruptions(
    pairs: list[tuple[bytes, bytes]],
    interruptions: list[tuple[int, list[tuple[bytes, bytes | None]]]],
    batch: int,
    span: int,
) -> None:
    sizes: dict[str, Any] = {"MIGRATION_BATCH_PAIRS": batch, "MIGRATION_RANGE_PAIRS": span, "MIGRATION_PAGE_PAIRS": 3}
    with MemoryDatabase() as source, MemoryDatabase() as target, mock.patch.multiple(moving, **sizes):
        source.transact(changed, pairs)
        for steps, changes in interruptions:
            left = steps

            def step(_steps: int) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1

            migrator = Migrator(PlaneStores(source), PlaneStores(target), "source")
            try:
                if migrator.begin():
                    migrator.copy_keys(step)
                    migrator.compare_keys(step)
            except Killed:
                """The next run resumes."""
            if migrator.progress.at < END or migrator.progress.state is State.COPYING:
                source.transact(changed, changes)
        migrator = Migrator(PlaneStores(source), PlaneStores(target), "source")
        migrator.begin()
        migrator.copy_keys(lambda _steps: None)
        migrator.compare_keys(lambda _steps: None)
        moved = migrator.finish()
        source_pairs, target_pairs = (dict(moving._pairs_of(each, BEGIN, END)) for each in (source, target))
        assert summed(target_pairs, source_pairs) == expected(source_pairs)
        assert moved.keys == len(target_pairs) or interruptions
