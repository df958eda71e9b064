"""Conformance checks for worlds: one history, one order of arrival, nothing lost and nothing duplicated.

    for check in WORLD_CHECKS:
        check(database)

Each check clears the universe that has its name, so checks can share a database and run again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, product
from typing import Any, Final, TypeVar

import cbor2
import msgspec

from fastness.errors import (
    CommitUnknown,
    CursorAdvanced,
    EffectNotFound,
    FencingMismatch,
    HeadAdvanced,
    InvalidArgument,
    MissingEntry,
)
from fastness.kv import Database, Pair, Subspace, Transaction, Work
from fastness.layers import (
    effect_leases,
    effects,
    inboxes,
    journal_records,
    journals,
    timer_firing,
    timers,
    worlds,
)
from fastness.layers.effects import EffectKey
from fastness.layers.worlds import World
from fastness.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, INBOX_INLINE_BYTES_MAX, READ_ENTRIES_MAX
from fastness.testing.conformance.workloads import in_threads, put_all, raises
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.wire.canonical import canonical
from fastness.wire.effects import EffectInfo
from fastness.wire.inboxes import Control, DomainEvent, Effect, EffectReceipt, InboxItem, Timer, TimerFired

Check = Callable[[Database], None]
Refusal = TypeVar("Refusal", bound=BaseException)

_FAR_MS: Final = 1 << 42  # Later than any clock of a test.
FAULTS: Final[tuple[Callable[[], BaseException], ...]] = (
    Crash,
    partial(CommitUnknown, "The answer is lost on purpose"),
)


def check_an_append_at_another_head_is_refused_and_writes_nothing(database: Database) -> None:
    world = _empty_world(database, check_an_append_at_another_head_is_refused_and_writes_nothing)
    database.transact(journals.append, world, _entries("a", 3), expected_head=0)
    before = _stored(database, world)
    for expected in (0, 2, 4, -1, 1 << 70):
        refusal = _refusal(database, HeadAdvanced, journals.append, world, _entries("b", 2), expected_head=expected)
        assert (refusal.expected, refusal.actual) == (expected, 3)
    assert _stored(database, world) == before


def check_readers_never_see_half_a_batch(database: Database) -> None:
    world = _empty_world(database, check_readers_never_see_half_a_batch)

    def check_read(tx: Transaction) -> None:
        found = journals.read_hot(tx, world, 0, READ_ENTRIES_MAX)
        assert len(found) == journals.head(tx, world)
        _assert_wgap_batches([record for _, record in found], size=4)

    def run_one(number: int) -> None:
        for step in range(12):
            if number % 2:
                _append_at_head(database, world, _entries(f"{number}.{step}", 4))
            else:
                database.read(check_read)
                database.transact(check_read)

    in_threads(4, run_one)
    assert database.read(journals.head, world) == 2 * 12 * 4


def check_concurrent_appends_lose_and_duplicate_no_batch(database: Database) -> None:
    world = _empty_world(database, check_concurrent_appends_lose_and_duplicate_no_batch)
    starts: dict[int, list[bytes]] = {}

    def append_many(thread: int) -> None:
        for step in range(10):
            batch = _entries(f"{thread}.{step}", 1 + (thread + step) % 4)
            starts[_append_at_head(database, world, batch)] = batch

    in_threads(8, append_many)
    assert len(starts) == 80
    journal = _journal(database, world)
    assert len(journal) == sum(map(len, starts.values()))
    assert min(starts) == 0
    for start, batch in starts.items():
        assert journal[start : start + len(batch)] == batch


def check_items_of_eight_writers_are_in_the_order_of_their_commits(database: Database) -> None:
    """One transaction puts an item into two inboxes: both must have the same order, and it must match real time."""
    world = _empty_world(database, check_items_of_eight_writers_are_in_the_order_of_their_commits)
    other = World(world.universe, "other")
    database.transact(worlds.create, other)
    ticks = count()
    spans: dict[int, tuple[int, int]] = {}  # Sequence -> the ticks of its writer's call and return.

    def put_both(tx: Transaction, item: InboxItem) -> tuple[int, int]:
        return inboxes.enqueue(tx, world, item), inboxes.enqueue(tx, other, item)

    def write(thread: int) -> None:
        for step in range(15):
            called = next(ticks)
            sequence, same = database.transact(put_both, Control(command=f"{thread}.{step}"))
            assert sequence == same
            spans[sequence] = (called, next(ticks))

    in_threads(8, write)
    assert sorted(spans) == list(range(8 * 15))
    assert _inbox(database, world) == _inbox(database, other)
    earliest_answer_behind = next(ticks)
    for sequence in reversed(range(8 * 15)):
        called, answered = spans[sequence]
        assert called < earliest_answer_behind, f"{sequence} was put after a later item had been acknowledged"
        earliest_answer_behind = min(earliest_answer_behind, answered)


def check_an_inbox_grows_only_at_its_end(database: Database) -> None:
    """After a reader has read an item, no item appears before it."""
    world = _empty_world(database, check_an_inbox_grows_only_at_its_end)

    def run_one(number: int) -> None:
        seen: list[tuple[int, InboxItem]] = []
        for step in range(15):
            if number % 2:
                database.transact(inboxes.enqueue, world, Control(command=f"{number}.{step}"))
            else:
                now = _inbox(database, world)
                assert now[: len(seen)] == seen
                assert [sequence for sequence, _ in now] == list(range(len(now)))
                seen = now

    in_threads(8, run_one)
    assert database.read(inboxes.arrivals, world) == 4 * 15


def check_the_cursor_moves_forward_by_compare_and_swap(database: Database) -> None:
    world = _empty_world(database, check_the_cursor_moves_forward_by_compare_and_swap)
    _put(database, world, _commands(5))

    def move(expected: int | None, new: int) -> None:
        database.transact(inboxes.commit_cursor, world, expected=expected, new=new)

    raises(CursorAdvanced, lambda: move(0, 1))
    raises(InvalidArgument, lambda: move(None, 5))
    assert database.read(inboxes.cursor, world) is None
    move(None, 0)
    move(0, 2)
    before = _stored(database, world)
    for expected in (None, 0, 3):
        refusal = _refusal(database, CursorAdvanced, inboxes.commit_cursor, world, expected=expected, new=4)
        assert (refusal.expected, refusal.actual) == (expected, 2)
    for new in (1, 2, 5):
        raises(InvalidArgument, partial(move, 2, new))
    assert _stored(database, world) == before


def check_exactly_one_of_many_cursor_moves_succeeds(database: Database) -> None:
    world = _empty_world(database, check_exactly_one_of_many_cursor_moves_succeeds)
    _put(database, world, _commands(8))
    winners: list[int] = []

    def move(new: int) -> None:
        with suppress(CursorAdvanced):
            database.transact(inboxes.commit_cursor, world, expected=None, new=new)
            winners.append(new)

    in_threads(8, move)
    assert winners == [database.read(inboxes.cursor, world)]


def check_concurrent_drainers_move_each_item_once(database: Database) -> None:
    """Concurrent appends move the head that a drain relies on: neither items nor entries may be lost."""
    world = _empty_world(database, check_concurrent_drainers_move_each_item_once)
    heights: list[int] = []

    def run_one(number: int) -> None:
        for step in range(15):
            if number % 3 == 0:
                database.transact(inboxes.enqueue, world, Control(command=f"{number}.{step}"))
            elif number % 3 == 1:
                heights.extend(database.transact(inboxes.drain, world, limit=1 + step % 3))
            else:
                _append_at_head(database, world, _entries(f"{number}.{step}", 2))

    in_threads(9, run_one)
    heights += _drain_all(database, world)
    _assert_drained(database, world, 3 * 15)
    journal = _journal(database, world)
    assert len(set(journal)) == len(journal) == 3 * 15 + 3 * 15 * 2
    assert sorted(heights) == [
        height for height, record in enumerate(journal) if record[1] == journal_records.Kind.INGRESS
    ]
    _assert_wgap_batches([record for record in journal if record[1] == journal_records.Kind.ENTRY], size=2)


def check_a_conflict_while_draining_loses_nothing(database: Database) -> None:
    """Head and cursor are checked before anything is written, so a refused drain loses no items."""
    world = _empty_world(database, check_a_conflict_while_draining_loses_nothing)
    _put(database, world, _commands(6))
    database.transact(inboxes.drain, world, limit=2)
    before = _stored(database, world)

    def drain_and_append(tx: Transaction) -> None:
        head = journals.head(tx, world)
        inboxes.drain(tx, world, limit=2)
        journals.append(tx, world, _entries("late", 1), expected_head=head)

    def continue_after_refusals(tx: Transaction) -> None:
        """A transaction that catches a refusal commits what was written before it, which must be nothing."""
        raises(HeadAdvanced, lambda: journals.append(tx, world, _entries("late", 1), expected_head=1))
        raises(CursorAdvanced, lambda: inboxes.commit_cursor(tx, world, expected=None, new=3))
        raises(InvalidArgument, lambda: inboxes.commit_cursor(tx, world, expected=1, new=0))
        raises(InvalidArgument, lambda: inboxes.drain(tx, world, limit=0))
        assert not tx.has_writes

    raises(HeadAdvanced, lambda: database.transact(drain_and_append))
    database.transact(continue_after_refusals)
    assert _stored(database, world) == before
    _drain_all(database, world)
    _assert_drained(database, world, 6)


def check_a_drain_retried_after_a_crash_leaves_the_same_state(database: Database) -> None:
    """A drain can simply be repeated: the cursor shows whether the first attempt was committed."""
    world = _empty_world(database, check_a_drain_retried_after_a_crash_leaves_the_same_state)
    _put(database, world, [*_commands(4), _item_with_requests(7)])

    def drain(faulty: Database, world: World) -> None:
        while faulty.transact(inboxes.drain, world, limit=2):
            pass

    _assert_faults_change_nothing(database, world, drain)
    _assert_drained(database, world, 5)


def check_an_append_retried_after_a_crash_leaves_the_same_state(database: Database) -> None:
    """An append is repeated after reading the head, which shows whether the first attempt was committed."""
    world = _empty_world(database, check_an_append_retried_after_a_crash_leaves_the_same_state)

    def append(faulty: Database, world: World) -> None:
        for step in range(faulty.read(journals.head, world) // 3, 3):
            faulty.transact(journals.append, world, _entries(str(step), 3), expected_head=step * 3)

    _assert_faults_change_nothing(database, world, append)
    assert len(_journal(database, world)) == 9


def check_a_drain_moves_at_most_one_batch(database: Database) -> None:
    world = _empty_world(database, check_a_drain_moves_at_most_one_batch)
    _put(database, world, _commands(BATCH_ENTRIES_MAX + 44))
    assert len(database.transact(inboxes.drain, world)) == BATCH_ENTRIES_MAX
    assert len(database.transact(inboxes.drain, world)) == 44
    large = DomainEvent(schema="large", payload=bytes(INBOX_INLINE_BYTES_MAX))
    _put(database, world, [large] * 70)
    start = BATCH_ENTRIES_MAX + 44
    heights = database.transact(inboxes.drain, world)
    rest = _drain_all(database, world)
    assert [*heights, *rest] == list(range(start, start + 70))
    sizes = [len(record) for record in _journal(database, world)[start:]]
    assert sum(sizes[: len(heights)]) <= BATCH_BYTES_MAX < sum(sizes[: len(heights) + 1])
    _assert_drained(database, world, start + 70)


def check_requests_are_indexed_by_the_drain_and_only_by_it(database: Database) -> None:
    world = _empty_world(database, check_requests_are_indexed_by_the_drain_and_only_by_it)
    requests = (Subspace("u", world.universe, "effects"), Subspace("u", world.universe, "timers"))

    def indexed() -> list[list[tuple[Any, ...]]]:
        return [
            [subspace.unpack(key) for key, _ in database.read(Transaction.scan, *subspace.range(), limit=100)]
            for subspace in requests
        ]

    def drain_and_fail(tx: Transaction) -> None:
        inboxes.drain(tx, world)
        raise LookupError("on purpose")

    _put(database, world, [Control(command="plain"), _item_with_requests(7), _item_with_requests(8)])
    assert indexed() == [[], []]
    raises(LookupError, lambda: database.transact(drain_and_fail))
    assert indexed() == [[], []]
    database.transact(inboxes.drain, world, limit=2)
    (due, pending), timers = _split(indexed()[0]), indexed()[1]
    assert pending == [("pending", "world", 1, 0), ("pending", "world", 1, 1)]
    assert [(kind, *where) for _, kind, _, *where in due] == [("mail", "world", 1, 0), ("mail", "world", 1, 1)]
    assert timers == [("due", 7, b"timer", "world")]
    database.transact(inboxes.drain, world)
    (due, pending), timers = _split(indexed()[0]), indexed()[1]
    assert pending == [("pending", "world", height, number) for height in (1, 2) for number in (0, 1)]
    assert sorted(where for _, _, _, *where in due) == [["world", height, number] for _, _, height, number in pending]
    assert timers == [("due", 8, b"timer", "world")]  # It replaces the timer with the same intent hash.


def check_concurrent_callers_complete_each_effect_once(database: Database) -> None:
    """Leases end at once, so that callers hold stale fences."""
    world = _empty_world(database, check_concurrent_callers_complete_each_effect_once)
    _put(database, world, [_item_with_requests(7)] * 10)
    _drain_all(database, world)
    completed: list[EffectKey] = []

    def run_one(number: int) -> None:
        while due := database.read(effects.due, world.universe, ["mail"], until_ms=_FAR_MS, limit=4):
            for info in database.transact(effect_leases.claim, world.universe, due, owner=str(number), lease_ms=0):
                key = EffectKey(info.world, info.height, info.number)
                with suppress(EffectNotFound, FencingMismatch):
                    database.transact(effect_leases.complete, world.universe, key, info.fence)
                    completed.append(key)

    in_threads(6, run_one)
    receipts = [item for _, item in _inbox(database, world) if isinstance(item, EffectReceipt)]
    assert len(receipts) == 20
    dead = [receipt for receipt in receipts if receipt.error is not None]
    assert len(set(completed)) == len(completed) == 20 - len(dead)
    assert database.read(effects.page, world.universe, None, after="", limit=1).effects == []


def check_concurrent_callers_fire_each_timer_once(database: Database) -> None:
    world = _empty_world(database, check_concurrent_callers_fire_each_timer_once)
    for number in range(40):
        database.transact(timers.set, world, 0, Timer(number, b"%d" % number))
    fired: list[int] = []

    def run_one(number: int) -> None:
        del number
        while due := database.read(timers.due, world.universe, until_ns=40, limit=5):
            fired.append(database.transact(timer_firing.fire, world.universe, due))

    in_threads(6, run_one)
    ids = [item.timer_id for _, item in _inbox(database, world) if isinstance(item, TimerFired)]
    assert sum(fired) == 40
    assert sorted(ids) == sorted(str(number) for number in range(40))


def check_an_effect_that_is_completed_again_after_a_crash_has_one_receipt(database: Database) -> None:
    """A caller that lost the answer learns from a repeated call that the effect is complete."""

    def ask() -> World:
        world = _empty_world(database, check_an_effect_that_is_completed_again_after_a_crash_has_one_receipt)
        database.transact(effects.request, world, 0, 0, Effect("mail", b"1"))
        return world

    def complete(faulty: Database, world: World) -> None:
        due = faulty.read(effects.due, world.universe, ["mail"], until_ms=_FAR_MS, limit=1)
        if due:
            faulty.transact(effect_leases.claim, world.universe, due, owner="ada", lease_ms=0)
        for info in faulty.read(effects.page, world.universe, None, after="", limit=1).effects:
            key = EffectKey(info.world, info.height, info.number)
            faulty.transact(effect_leases.complete, world.universe, key, info.fence, payload=b"done")

    counting = ChosenFault()
    complete(FaultyDatabase(database, counting), ask())
    for error, fail_at in product(FAULTS, range(len(counting.points))):
        world = ask()
        raises(type(error()), partial(complete, FaultyDatabase(database, ChosenFault(fail_at, error)), world))
        complete(database, world)
        (item,) = [item for _, item in _inbox(database, world)]
        assert isinstance(item, EffectReceipt)
        assert (item.payload, item.error) == (b"done", None)
        assert database.read(effects.page, world.universe, None, after="", limit=1).effects == []


def check_a_gap_in_a_journal_is_reported(database: Database) -> None:
    world = _empty_world(database, check_a_gap_in_a_journal_is_reported)
    database.transact(journals.append, world, _entries("n", 6), expected_head=0)
    for gap in (0, 3, 5):
        key = worlds.subspace(world).key("journal", "e") + gap.to_bytes(8, "big")
        record = database.read(Transaction.get, key)
        assert record is not None
        database.transact(Transaction.delete, key)
        raises(MissingEntry, lambda: database.read(journals.read_hot, world, 0, 10))
        raises(MissingEntry, partial(database.read, journals.read_hot, world, gap, 1))
        assert len(database.read(journals.read_hot, world, gap + 1, 10)) == 5 - gap
        database.transact(Transaction.put, key, record)
    assert len(database.read(journals.read_hot, world, 0, 10)) == 6


# Helpers.


def _empty_world(database: Database, check: Check) -> World:
    """An empty world in the universe that has the check's name."""
    world = World(check.__name__, "world")
    database.transact(Transaction.delete_range, *Subspace("u", world.universe).range())
    database.transact(worlds.create, world)
    return world


def _split(keys: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The keys of effects in the due index, and those of their records."""
    return [key for key in keys if key[0] == "due"], [key for key in keys if key[0] == "pending"]


def _stored(database: Database, world: World) -> list[Pair]:
    """All pairs of a world's universe."""
    return database.read(Transaction.scan, *Subspace("u", world.universe).range(), limit=10_000)


def _outcome(database: Database, world: World) -> tuple[list[Pair], list[EffectInfo]]:
    """The same, with effects as they are listed, without the time from which they can be claimed."""
    begin, end = Subspace("u", world.universe, "effects").range()
    pairs = [pair for pair in _stored(database, world) if not begin <= pair[0] < end]
    found = database.read(effects.page, world.universe, None, after="", limit=1_000).effects
    return pairs, [msgspec.structs.replace(each, due_ms=0) for each in found]


def _entries(name: str, number: int) -> list[bytes]:
    return [journal_records.entry(canonical([name, position])) for position in range(number)]


def _commands(number: int) -> list[InboxItem]:
    return [Control(command=f"command {position}") for position in range(number)]


def _item_with_requests(deliver_at_ns: int) -> InboxItem:
    effects = (Effect("mail", b"first"), Effect("mail", b"second"))
    return Control(command="ask", effects=effects, timers=(Timer(deliver_at_ns, b"timer"),))


def _put(database: Database, world: World, items: Sequence[InboxItem]) -> None:
    database.transact(lambda tx: [inboxes.enqueue(tx, world, item) for item in items])


def _journal(database: Database, world: World) -> list[bytes]:
    """All records, at heights that count from zero without a gap."""
    found = database.read(journals.read_hot, world, 0, READ_ENTRIES_MAX)
    assert [height for height, _ in found] == list(range(database.read(journals.head, world)))
    return [record for _, record in found]


def _inbox(database: Database, world: World) -> list[tuple[int, InboxItem]]:
    return database.read(inboxes.read, world, after=None, limit=READ_ENTRIES_MAX)


def _append_at_head(database: Database, world: World, batch: list[bytes]) -> int:
    """Append at the current head. Each refusal means that another append succeeded, so the attempts are bounded."""
    head = database.read(journals.head, world)
    for _ in range(1_000):
        try:
            return database.transact(journals.append, world, batch, expected_head=head)
        except HeadAdvanced as error:
            head = error.actual
    raise AssertionError("a thousand other appends came first")


def _refusal(database: Database, error: type[Refusal], work: Work[Any], *args: Any, **kwargs: Any) -> Refusal:
    try:
        database.transact(work, *args, **kwargs)
    except error as refusal:
        return refusal
    raise AssertionError(f"{error.__name__} was not raised")


def _drain_all(database: Database, world: World) -> list[int]:
    return [height for heights in iter(lambda: database.transact(inboxes.drain, world), []) for height in heights]


def _assert_drained(database: Database, world: World, number: int) -> None:
    """The first `number` items are in the journal, once each and in order, and the cursor is at the last."""
    found = map(cbor2.loads, _journal(database, world))
    sequences = [value["seq"] for kind, value in found if kind == journal_records.Kind.INGRESS]
    assert sequences == list(range(number))
    assert database.read(inboxes.cursor, world) == number - 1


def _assert_wgap_batches(batch: list[bytes], *, size: int) -> None:
    values = [cbor2.loads(record)[1] for record in batch]
    assert len(values) % size == 0
    for start in range(0, len(values), size):
        assert values[start : start + size] == [[values[start][0], position] for position in range(size)]


def _assert_faults_change_nothing(
    database: Database, world: World, protocol: Callable[[Database, World], None]
) -> None:
    """Fail at every point that the protocol passes, run it again, and find what a run without faults leaves."""
    counting = ChosenFault()
    prepared = _stored(database, world)
    protocol(FaultyDatabase(database, counting), world)
    expected = _outcome(database, world)
    for error, fail_at in product(FAULTS, range(len(counting.points))):
        database.transact(Transaction.delete_range, *Subspace("u", world.universe).range())
        database.transact(put_all, prepared)
        raises(type(error()), partial(protocol, FaultyDatabase(database, ChosenFault(fail_at, error)), world))
        protocol(database, world)
        assert _outcome(database, world) == expected, f"{error} at {counting.points[fail_at]}, number {fail_at}"


WORLD_CHECKS: Final[tuple[Check, ...]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
