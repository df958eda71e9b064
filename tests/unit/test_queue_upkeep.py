"""Upkeep of queues that several processes write to: folded counters, and expired records."""

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from fastness.backends.postgres import PostgresDatabase
from fastness.clock import IdSource
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueDue
from fastness.layers.queues.counters import QueueCounters, load_counters, total_counters
from fastness.limits import COUNTERS_FOLDED_MAX, COUNTERS_UNFOLDED_MAX, EXPIRED_KEYS_BATCH_MAX
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage, QueuePolicy
from fastness.wire.stored_messages import encode
from tests.unit.queue_calls import JOBS, ack, lease, lease_one, nack, process_due, put, set_policy, stats

KEYS = queues.keys_of(JOBS)
OpenNode = Callable[..., PostgresDatabase]


@pytest.fixture
def open_node(postgres_url: str, clock: ManualClock) -> Iterator[OpenNode]:
    """Opens the key space as another process."""
    opened: list[PostgresDatabase] = []

    def open_one(seed: int | None = None) -> PostgresDatabase:
        opened.append(PostgresDatabase(postgres_url, clock=clock, ids=IdSource(seed)))
        return opened[-1]

    yield open_one
    for node in opened:
        node.close()


def records(database: Database) -> list[bytes]:
    return [key for key, _ in database.read(lambda tx: tx.scan(*KEYS.all_counters.range(), limit=10_000))]


def fold(database: Database) -> int:
    return database.transact(queues.fold, JOBS)


def counters_of(database: Database) -> QueueCounters:
    """The counters that a process works with."""
    return database.read(lambda tx: load_counters(tx, KEYS))


def total(database: Database) -> QueueCounters:
    return database.read(lambda tx: total_counters(tx, KEYS))


def test_folded_counters_have_the_same_sums(open_node: OpenNode) -> None:
    one, two = open_node(), open_node()
    put(one, b"a", b"b", priority=9)
    put(two, b"c", delay_seconds=5.0)
    ack(one, lease_one(two))  # Leased by one process and settled by the other: its own counts are negative.
    nack(two, lease_one(one), counts=True)
    before, summed = stats(one), total(one)
    assert len(records(one)) == 2
    assert fold(one) == 2
    assert records(one) == [KEYS.own_counters]
    assert stats(one) == stats(two) == before
    assert total(two) == summed
    put(two, b"d")
    put(one, b"e")
    assert (stats(one).put_total, stats(one).ready, stats(one).acked_total) == (5, before.ready + 2, 1)
    assert len(records(one)) == 3
    assert fold(two) == 2
    assert fold(two) == 0
    assert (stats(one).put_total, stats(one).acked_total) == (5, 1)


def test_messages_are_delivered_after_their_counters_were_folded(open_node: OpenNode, clock: ManualClock) -> None:
    one, two = open_node(), open_node()
    put(one, b"a")
    put(two, b"b", delay_seconds=5.0)
    held = lease_one(two)
    fold(one)
    clock.advance_ms(5_000)
    assert [message.payload for message in lease(one, 10)] == [b"b"]
    assert ack(one, held) == queues.format_id(held.id)
    fold(two)
    clock.advance_ms(600_000)
    process_due(one)
    assert stats(one).ready == 1


def test_ids_stay_in_order_and_unique_if_the_clock_is_set_back_before_a_fold(
    open_node: OpenNode, clock: ManualClock
) -> None:
    one = open_node(1)
    (newest,) = put(one, b"before")
    fold(one)
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    # Both continue after the same id: two processes that started when the clock was wrong.
    ids = [receipt.id for seed in (2, 3) for receipt in put(open_node(seed), *[b"after"] * 50)]
    assert len(set(ids)) == 100
    assert min(ids) > newest.id
    assert ids[:50] == sorted(ids[:50])
    assert stats(one).ready == 101


def test_ids_after_the_clock_was_set_back_do_not_run_ahead(open_node: OpenNode, clock: ManualClock) -> None:
    one = open_node()
    (newest,) = put(one, b"before")
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    other = open_node()
    fold(one)
    ids = []
    for _ in range(50):
        (receipt,) = put(other, b"after")
        ids.append(receipt.id)
        clock.advance_ms(1)
    assert ids == sorted(ids)
    assert int(ids[-1].replace("-", "")[:12], 16) - int(newest.id.replace("-", "")[:12], 16) <= 52


def test_leases_are_shortened_after_a_fold_if_the_clock_was_set_back(open_node: OpenNode, clock: ManualClock) -> None:
    one, two = open_node(), open_node()
    put(one, b"a")
    lease_one(one, visibility_ms=30_000)
    fold(one)
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    process_due(two)
    clock.advance_ms(30_000)
    assert [message.payload for message in lease(two)] == [b"a"]


def test_the_rate_is_that_of_all_processes_together_also_after_a_fold(open_node: OpenNode, clock: ManualClock) -> None:
    one, two = open_node(), open_node()
    set_policy(one, rate_per_second=2.0)
    put(one, *[b"x"] * 20)
    assert (len(lease(one, 1)), len(lease(two, 10)), len(lease(one, 10))) == (1, 1, 0)
    before = stats(one)
    clock.advance_ms(250)
    fold(two)
    assert stats(one) == replace(before, head_age_seconds=0.25)
    assert (len(lease(one, 10)), len(lease(two, 10))) == (0, 0)
    clock.advance_ms(250)
    assert (len(lease(two, 10)), len(lease(one, 10))) == (1, 0)
    fold(one)
    clock.advance_ms(3_600_000)
    fold(one)
    assert (len(lease(one, 10)), len(lease(two, 10))) == (2, 0)


def test_the_history_goes_on_after_a_fold(open_node: OpenNode) -> None:
    one, two = open_node(), open_node()
    put(one, b"unrecorded")
    fold(one)
    set_policy(two, history="durable")
    put(one, b"a")
    put(two, b"b")
    fold(one)
    put(two, b"c")
    assert [event.event for event in one.read(queues.read_history, JOBS).events] == ["put"] * 3
    two.transact(queues.set_policy, JOBS, QueuePolicy())
    put(one, b"d")
    fold(one)
    put(one, b"e")
    assert one.read(lambda tx: tx.scan(KEYS.history, KEYS.history + b"\xff", limit=1)) == []


def test_the_sweeper_is_told_of_due_times_after_another_process_has_processed_earlier_ones(
    open_node: OpenNode, clock: ManualClock
) -> None:
    one, two = open_node(), open_node()

    def due_times(tx: Transaction, work: Callable[..., object], *args: object, **options: object) -> list[int]:
        work(tx, JOBS, *args, **options)
        return [event.in_ms for event in tx.events if isinstance(event, QueueDue)]

    put(two, b"a")
    assert one.transact(due_times, queues.lease, owner="ada", visibility_ms=1_000) == [1_000]
    clock.advance_ms(1_000)
    process_due(two)
    assert one.transact(due_times, queues.put, [NewMessage()]) == []
    assert one.transact(due_times, queues.put, [NewMessage(delay_seconds=5.0)]) == [5_000]
    assert one.transact(due_times, queues.put, [NewMessage(delay_seconds=6.0)]) == []


def test_upkeep_folds_the_counters_of_more_than_a_few_processes(open_node: OpenNode) -> None:
    node = open_node()
    put(node, b"x")
    for _ in range(COUNTERS_UNFOLDED_MAX - 1):
        put(open_node(), b"x")
    assert not node.read(queues.needs_upkeep, JOBS)
    put(last := open_node(), b"x")
    assert last.read(queues.needs_upkeep, JOBS)
    last.transact(queues.run_upkeep, JOBS)
    assert not last.read(queues.needs_upkeep, JOBS)
    assert records(last) == [KEYS.own_counters]
    assert stats(node).ready == COUNTERS_UNFOLDED_MAX + 1


def test_the_counters_of_any_number_of_processes_are_summed_and_folded(open_node: OpenNode) -> None:
    node, count = open_node(), 10_050

    def add_writers(tx: Transaction) -> None:
        for number in range(count):
            tx.put(KEYS.counters_key(f"{number:012x}"), encode(QueueCounters(put=1, ready={5: 1})))

    node.transact(add_writers)
    assert stats(node).put_total == count
    transactions = 0
    while node.read(queues.needs_upkeep, JOBS):
        node.transact(queues.run_upkeep, JOBS)
        transactions += 1
    assert transactions == -(-count // (COUNTERS_FOLDED_MAX - 1))
    assert len(records(node)) <= COUNTERS_UNFOLDED_MAX
    assert stats(node).put_total == count


def test_upkeep_deletes_a_bounded_number_of_expired_records(open_node: OpenNode, clock: ManualClock) -> None:
    node, count = open_node(), EXPIRED_KEYS_BATCH_MAX + 1
    minute = clock.now_ms() // 60_000

    def add_acks(tx: Transaction) -> None:
        for number in range(count):
            tx.put(KEYS.ack_key(minute, number.to_bytes(16, "big")), b"")

    node.transact(add_acks)
    put(node, b"x", idempotency_key="k")
    assert not node.read(queues.needs_upkeep, JOBS)
    clock.advance_ms(3_600_000)
    put(node, b"plain")  # Shares the queue, and so deletes nothing.
    left = []
    while node.read(queues.needs_upkeep, JOBS):
        node.transact(queues.run_upkeep, JOBS)
        left.append(len(node.read(lambda tx: tx.scan(*KEYS.acks.range(), limit=10_000))))
    assert left == [1, 0]
    assert node.read(lambda tx: tx.scan(*KEYS.ids.range(), limit=1)) == []
    assert stats(node).ready == 2


def test_a_process_that_was_folded_knows_of_earlier_ids(open_node: OpenNode) -> None:
    node = open_node()
    put(node, b"x")
    last_id = counters_of(node).last_id
    fold(node)
    folded = counters_of(node)
    assert (folded.last_id, folded.put, folded.ready) == (last_id, 0, {})
    assert last_id != b""
