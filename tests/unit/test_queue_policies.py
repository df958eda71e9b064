"""What policies say about delays, dead letters and retention, and calls that need an existing queue."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, QueuePolicy
from fastness.backends.memory import MemoryDatabase
from fastness.client.batching import BatchableCall, RequestBatcher
from fastness.errors import QueueMessageLeaseMismatch, QueueNotFound
from fastness.kv import Database, Pair, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.testing.clock import ManualClock
from fastness.wire.queues import (
    AckMessages,
    GetQueueStats,
    MessageLease,
    NewMessage,
    PutMessages,
    ReceiveMessages,
)
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    ack,
    lease,
    lease_one,
    lease_or_wait,
    nack,
    payloads,
    proof,
    put,
    reject,
)

DAY_MS = 86_400_000


def set_policy(database: Database, queue: QueueKey = JOBS, **fields: Any) -> None:
    database.transact(queues.set_policy, queue, QueuePolicy(**fields))


def stats(database: Database, queue: QueueKey = JOBS) -> tuple[int, int, int, int]:
    found = database.read(queues.stats, queue)
    return found.ready, found.delayed, found.leased, found.blocked


def sweep(database: Database, clock: ManualClock) -> None:
    """Process all that is due."""
    for _ in range(100):
        if database.transact(queues.sweep, JOBS) > clock.now_ms():
            return
    raise AssertionError("the sweep does not end")


def purge(database: Database, *, limit: int = 256, leased: bool = False) -> int:
    count, after = 0, b""
    while True:
        removed, following = database.transact(queues.purge, JOBS, after=after, limit=limit, leased=leased)
        count += removed
        if following is None:
            return count
        after = following


# Delays.


def test_a_put_without_a_delay_has_that_of_the_policy(database: Database, clock: ManualClock) -> None:
    set_policy(database, delay_seconds=5.0)
    put(database, b"later")
    put(database, b"now", delay_seconds=0.0)
    put(database, b"soon", delay_seconds=1.0)
    assert payloads(lease(database, 3)) == [b"now"]
    clock.advance_ms(1_000)
    assert payloads(lease(database, 3)) == [b"soon"]
    clock.advance_ms(4_000)
    assert payloads(lease(database, 3)) == [b"later"]


def test_the_delay_of_a_message_is_that_of_the_policy_when_it_was_put(database: Database, clock: ManualClock) -> None:
    put(database, b"before")
    set_policy(database, delay_seconds=5.0)
    assert payloads(lease(database)) == [b"before"]


# Dead letters by deliveries, or never.


def deliver_and_expire(database: Database, clock: ManualClock, times: int) -> None:
    for _ in range(times):
        lease_one(database, visibility_ms=1_000)
        clock.advance_ms(1_000)


def test_a_message_delivered_too_often_becomes_a_dead_letter_at_the_next_receive(
    database: Database, clock: ManualClock
) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=2)
    put(database, b"bad", max_attempts=9)
    deliver_and_expire(database, clock, 2)
    sweep(database, clock)
    assert stats(database) == (1, 0, 0, 0), "it is ready until a receive reaches it"
    put(database, b"good")
    assert payloads(lease(database)) == [b"good"]
    (letter,) = database.read(queues.peek, DEAD, limit=10)
    assert (letter.payload, letter.origin, letter.attempts) == (b"bad", "jobs", 2)
    assert database.read(queues.stats, JOBS).dead_total == 1


def test_deliveries_count_however_they_end(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=2)
    put(database, b"bad")
    nack(database, lease_one(database), counts=False)
    nack(database, lease_one(database), delay_seconds=0.0, error="boom")
    assert lease(database) == []
    (letter,) = database.read(queues.peek, DEAD, limit=10)
    assert letter.last_error == "boom"
    failures = database.read(queues.failures_of, DEAD, [letter])
    assert [each.message for each in failures[letter.id]] == ["boom"]


def test_a_changed_number_of_deliveries_counts_for_stored_messages(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=5)
    put(database, b"a")
    deliver_and_expire(database, clock, 2)
    set_policy(database, dead_letter_rule="deliveries", max_attempts=2)
    assert lease(database) == []
    assert payloads(database.read(queues.peek, DEAD, limit=10)) == [b"a"]


def test_a_redriven_message_is_delivered_as_often_as_a_new_one(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=1)
    put(database, b"a")
    first = lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    assert lease(database) == []
    assert database.transact(queues.redrive, JOBS) == 1
    again = lease_one(database, visibility_ms=1_000)
    assert again.attempts == 1
    assert again.fence > first.fence
    clock.advance_ms(1_000)
    assert lease(database) == []
    assert len(database.read(queues.peek, DEAD, limit=10)) == 1


def test_the_next_message_of_a_group_follows_one_that_was_delivered_too_often(
    database: Database, clock: ManualClock
) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=1)
    put(database, b"1", b"2", group="g")
    deliver_and_expire(database, clock, 1)
    assert payloads(lease(database)) == [b"2"]


def test_a_group_goes_on_before_less_urgent_messages(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=1)
    put(database, b"1", group="g", priority=9)
    put(database, b"2", group="g", priority=9)
    deliver_and_expire(database, clock, 1)
    sweep(database, clock)
    put(database, b"less urgent")
    assert payloads(lease(database, 2)) == [b"2", b"less urgent"]


def test_a_receive_of_many_keys_in_turns_is_not_cut_short(database: Database) -> None:
    set_policy(database, fair=True)
    for key in range(40):
        put(database, b"1", b"2", key=str(key))
    assert len(lease(database, 80)) == 80


def test_the_next_message_of_a_key_follows_one_that_was_delivered_too_often(
    database: Database, clock: ManualClock
) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=1, concurrency_per_key=1)
    put(database, b"1", b"2", key="k", keep_result=True)
    deliver_and_expire(database, clock, 1)
    assert payloads(lease(database)) == [b"2"]
    (letter,) = database.read(queues.peek, DEAD, limit=10)
    with pytest.raises(fastness.errors.MessageFailed, match="ended before it was settled"):
        database.read(queues.result, JOBS, queues.format_id(letter.id))


def test_a_receive_moves_a_bounded_number_of_dead_letters(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="deliveries", max_attempts=1)
    for _ in range(2):
        put(database, *[b"bad"] * 200)
    for _ in range(2):
        lease(database, 200, visibility_ms=1_000)
    clock.advance_ms(1_000)
    sweep(database, clock)
    put(database, b"good")
    found = lease_or_wait(database)
    assert (found.leases, found.retry_in_ms) == ([], 0)
    while not found.leases:
        found = lease_or_wait(database)
    assert payloads(found.messages) == [b"good"]
    assert stats(database, DEAD)[0] == 400


def test_without_dead_letters_a_message_is_delivered_for_ever(database: Database, clock: ManualClock) -> None:
    set_policy(database, dead_letter_rule="never", max_attempts=1, retry_delay_seconds=0.0)
    put(database, b"a", max_attempts=1)
    deliver_and_expire(database, clock, 3)
    for _ in range(3):
        nack(database, lease_one(database), error="boom")
    message = lease_one(database)
    assert (message.attempts, message.failures) == (7, 6)
    reject(database, message, "on purpose")
    assert payloads(database.read(queues.peek, DEAD, limit=10)) == [b"a"]


def test_a_message_that_failed_too_often_dies_when_failures_count_again(database: Database) -> None:
    set_policy(database, dead_letter_rule="never", retry_delay_seconds=0.0)
    put(database, b"a", max_attempts=1)
    nack(database, lease_one(database))
    set_policy(database, dead_letter_rule="failures", retry_delay_seconds=0.0)
    nack(database, lease_one(database))
    assert len(database.read(queues.peek, DEAD, limit=10)) == 1


def test_a_dead_letter_does_not_die_of_deliveries(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    reject(database, lease_one(database))
    set_policy(database, DEAD, dead_letter_rule="deliveries", max_attempts=1)
    for _ in range(3):
        nack(database, lease_one(database, queue=DEAD), DEAD, counts=False)


# Retention by age.


def by_age(database: Database, seconds: float = 60.0, **fields: Any) -> None:
    set_policy(database, retention_by_age=True, retention_seconds=seconds, **fields)


def test_a_message_that_is_too_old_is_not_delivered(database: Database, clock: ManualClock) -> None:
    by_age(database)
    put(database, b"old")
    clock.advance_ms(30_000)
    put(database, b"young")
    clock.advance_ms(29_999)
    assert payloads(database.read(queues.peek, JOBS, limit=9)) == [b"old", b"young"]
    clock.advance_ms(1)
    assert payloads(lease(database, 9)) == [b"young"]
    assert stats(database) == (0, 0, 1, 0)


def test_a_sweep_removes_old_messages_in_every_state(database: Database, clock: ManualClock) -> None:
    by_age(database, visibility_seconds=1_000.0, concurrency_per_key=1)
    put(database, b"leased", b"leased, too")
    held = lease(database, 2)
    put(database, b"ready", b"urgent" * 400)
    put(database, b"urgent", priority=9)
    put(database, b"delayed", delay_seconds=1_000.0)
    put(database, b"1", b"2", b"3", group="g")
    put(database, b"1", b"2", b"3", key="k", unique_key=None)
    assert stats(database) == (5, 1, 2, 4)
    clock.advance_ms(30_000)
    young = put(database, b"young", group="g")
    assert stats(database) == (5, 1, 2, 5)
    clock.advance_ms(30_000)
    sweep(database, clock)
    assert stats(database) == (1, 0, 0, 0)
    assert [queues.format_id(each.id) for each in lease(database, 9)] == [young[0].id]
    for each in held:
        with pytest.raises(QueueMessageLeaseMismatch):
            ack(database, each)
    assert database.read(bodies) == []


def bodies(tx: Transaction) -> list[Pair]:
    prefix = queues.keys_of(JOBS).body
    return tx.scan(prefix, prefix + b"\xff" * 17, limit=10)


def test_changing_the_retention_changes_when_stored_messages_end(database: Database, clock: ManualClock) -> None:
    by_age(database, 4 * 86_400.0)
    put(database, b"a")
    clock.advance_ms(3_600_000)
    put(database, b"b")
    by_age(database, 14 * 86_400.0)
    clock.advance_ms(13 * DAY_MS - 1)
    sweep(database, clock)
    assert stats(database) == (2, 0, 0, 0)
    by_age(database, 13 * 86_400.0)
    sweep(database, clock)
    assert payloads(database.read(queues.peek, JOBS, limit=9)) == [b"b"]


def test_retention_by_age_can_be_switched_on_and_off(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    clock.advance_ms(60_000)
    by_age(database)
    set_policy(database, retention_seconds=60.0)
    clock.advance_ms(DAY_MS)
    sweep(database, clock)
    assert stats(database) == (1, 0, 0, 0), "it was put without a TTL"
    by_age(database)
    assert lease(database) == []
    assert stats(database) == (0, 0, 0, 0)


def test_a_ttl_ends_a_message_before_its_age_does(database: Database, clock: ManualClock) -> None:
    by_age(database)
    put(database, b"a", ttl_seconds=5.0)
    put(database, b"b", ttl_seconds=DAY_MS / 1_000)
    clock.advance_ms(5_000)
    assert payloads(lease(database, 2, visibility_ms=1_000)) == [b"b"]
    clock.advance_ms(55_000)
    assert lease(database) == []


def test_a_redriven_message_is_kept_as_long_as_a_new_one(database: Database, clock: ManualClock) -> None:
    by_age(database)
    put(database, b"a", b"b")
    reject(database, lease_one(database))
    clock.advance_ms(59_000)
    database.transact(queues.redrive, JOBS)
    clock.advance_ms(1_000)
    sweep(database, clock)
    assert payloads(database.read(queues.peek, JOBS, limit=9)) == [b"a"]
    clock.advance_ms(58_999)
    sweep(database, clock)
    assert stats(database) == (1, 0, 0, 0)
    clock.advance_ms(1_001)
    sweep(database, clock)
    assert stats(database) == (0, 0, 0, 0)


def test_a_moved_message_is_kept_as_long_as_a_new_one(database: Database, clock: ManualClock) -> None:
    other = QueueKey("main", "other")
    (receipt,) = put(database, b"a", queue=other)
    by_age(database)
    clock.advance_ms(60_000)
    assert database.transact(queues.move_messages, other, [receipt.id], to=JOBS) == [None]
    clock.advance_ms(59_000)
    assert payloads(lease(database)) == [b"a"]


def test_a_sweep_of_many_old_messages_has_bounded_steps(database: Database, clock: ManualClock) -> None:
    by_age(database)
    for _ in range(3):
        put(database, *[b"old"] * 250)
    clock.advance_ms(1_000)
    put(database, *[b"young"] * 10)
    clock.advance_ms(59_000)
    assert database.transact(queues.sweep, JOBS) <= clock.now_ms()
    assert stats(database)[0] > 260
    sweep(database, clock)
    assert stats(database)[0] == 10


def test_an_idle_queue_is_seldom_looked_at(database: Database, clock: ManualClock) -> None:
    by_age(database, 4 * 86_400.0)
    sweep(database, clock)
    assert database.read(queues.next_due, JOBS) - clock.now_ms() == 4 * DAY_MS // 16
    put(database, b"a")
    ack(database, lease_one(database))
    assert database.read(queues.stats, JOBS).acked_total == 1


# Late acks.


def late(database: Database, lease: MessageLease) -> str:
    return database.transact(queues.ack, JOBS, lease, late=True)


@pytest.mark.parametrize("options", [{}, {"group": "g"}, {"key": "k"}], ids=["plain", "group", "key"])
def test_a_late_ack_succeeds_until_the_message_is_delivered_again(
    database: Database, clock: ManualClock, options: dict[str, Any]
) -> None:
    receipts = put(database, b"1" * 2_000, b"2", **options)
    first = lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    sweep(database, clock)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, first)
    assert late(database, proof(first)) == receipts[0].correlation_id
    assert late(database, proof(first)) == receipts[0].correlation_id, "it may be repeated"
    assert database.read(queues.stats, JOBS).acked_total == 1
    assert payloads(lease(database, 2)) == [b"2"]
    assert stats(database) == (0, 0, 1, 0)
    assert database.read(bodies) == []


def test_a_late_ack_succeeds_while_the_message_is_delayed(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    message = lease_one(database)
    nack(database, message, delay_seconds=5.0)
    late(database, proof(message))
    assert stats(database) == (0, 0, 0, 0)


def test_a_late_ack_is_refused_after_another_delivery(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    first = lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    second = lease_one(database, visibility_ms=1_000)
    with pytest.raises(QueueMessageLeaseMismatch):
        late(database, proof(first))
    clock.advance_ms(1_000)
    sweep(database, clock)
    with pytest.raises(QueueMessageLeaseMismatch):
        late(database, proof(first))
    assert stats(database) == (1, 0, 0, 0)
    late(database, proof(second))
    assert stats(database) == (0, 0, 0, 0)


def test_a_forged_late_ack_is_refused(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    message = lease_one(database, visibility_ms=1_000)
    clock.advance_ms(1_000)
    sweep(database, clock)
    for forged in (
        msgspec.structs.replace(proof(message), fence=7),
        msgspec.structs.replace(proof(message), lease_id="x"),
    ):
        with pytest.raises(QueueMessageLeaseMismatch):
            late(database, forged)
    assert stats(database) == (1, 0, 0, 0)


def test_late_acks_of_a_batch_are_answered_one_by_one(database: Database, clock: ManualClock) -> None:
    put(database, b"1", b"2", b"3")
    held = lease(database, 3, visibility_ms=1_000)
    ack(database, held[0])
    clock.advance_ms(1_000)
    lease_one(database)
    outcomes = database.transact(queues.ack_many, JOBS, [proof(each) for each in held], late=True)
    assert [isinstance(each, str) for each in outcomes] == [True, False, True]
    assert stats(database) == (0, 0, 1, 0)


# Purging leased messages.


def test_a_purge_takes_leased_messages_if_it_is_asked_to(database: Database, clock: ManualClock) -> None:
    put(database, *[b"a"] * 10)
    put(database, b"1", b"2", group="g")
    put(database, b"1", b"2", key="k")
    held = lease(database, 5) + lease(database, 9)
    put(database, b"delayed", delay_seconds=5.0)
    assert purge(database) == 2
    assert stats(database)[2] == len(held)
    assert purge(database, limit=2, leased=True) == len(held)
    assert stats(database) == (0, 0, 0, 0)
    for each in held:
        with pytest.raises(QueueMessageLeaseMismatch):
            late(database, proof(each))
    put(database, b"3", group="g")
    put(database, b"3", key="k")
    assert len(lease(database, 9)) == 2, "the group and the key are free"


def test_a_purge_of_leased_messages_leaves_schedules_alone(database: Database, clock: ManualClock) -> None:
    database.transact(
        queues.set_schedule, JOBS, "often", cron="* * * * *", timezone="UTC", message=NewMessage(b"scheduled")
    )
    for _ in range(70):
        put(database, b"a")
        lease_one(database, visibility_ms=600_000)
    assert purge(database, leased=True) == 70
    clock.advance_ms(60_000)
    assert payloads(lease(database)) == [b"scheduled"]


# Calls that need an existing queue.


def test_a_queue_exists_once_it_has_a_policy_or_was_used(database: Database) -> None:
    for work, options in (
        (queues.put, {"messages": [NewMessage(b"a")]}),
        (queues.lease_or_wait, {"owner": "ada"}),
        (queues.stats, {}),
    ):
        with pytest.raises(QueueNotFound, match="jobs does not exist"):
            database.transact(work, JOBS, must_exist=True, **options)
    assert database.read(queues.names, "main", after="", limit=10) == [], "nothing was written"
    put(database, b"a")
    assert payloads(lease_or_wait(database, must_exist=True).messages) == [b"a"]
    assert database.read(queues.stats, JOBS, must_exist=True).leased == 1
    set_policy(database, DEAD)
    assert lease_or_wait(database, must_exist=True).leases == []
    database.transact(queues.put, DEAD, [NewMessage(b"b")], must_exist=True)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


def test_requests_may_need_an_existing_queue(plane: Plane) -> None:
    transport: Any = plane._transport
    for request in (
        PutMessages("jobs", [NewMessage(b"a")], must_exist=True),
        ReceiveMessages("jobs", "ada", must_exist=True),
        ReceiveMessages("jobs", "ada", must_exist=True, wait_seconds=5.0),
        GetQueueStats("jobs", must_exist=True),
    ):
        with pytest.raises(QueueNotFound):
            transport.call(request)
    plane.queue("jobs").put(b"a")
    answer = plane._transport.call(ReceiveMessages("jobs", "ada", must_exist=True))
    assert answer.count == 1


def test_a_purge_of_a_handle_takes_leased_messages(plane: Plane) -> None:
    queue = plane.queue("jobs")
    queue.put(b"a")
    message = queue.receive()
    assert message is not None
    assert queue.purge() == 0
    assert queue.purge(leased=True) == 1
    with pytest.raises(QueueMessageLeaseMismatch):
        message.ack()


def test_a_receive_that_waits_ends_when_its_queue_is_deleted(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = {"memory": "memory:", "rocksdb": f"dir:{tmp_path / 'plane'}"}.get(backend)
    with fastness.open(url or request.getfixturevalue("postgres_url")) as plane:
        queue = plane.queue("jobs")
        queue.set_policy(QueuePolicy())
        errors: list[Exception] = []

        def wait() -> None:
            try:
                plane._transport.call(ReceiveMessages("jobs", "ada", must_exist=True, wait_seconds=60.0))
            except Exception as error:
                errors.append(error)

        waiting = [threading.Thread(target=wait) for _ in range(2)]
        for each in waiting:
            each.start()
        while queue.stats().waiting_consumers < 1:
            pass
        queue.delete()
        for each in waiting:
            each.join(30)
        assert [type(each) for each in errors] == [QueueNotFound] * 2


def test_a_client_batches_only_calls_with_the_same_options() -> None:
    sent: list[Any] = []

    def send(request: Any) -> Future[Any]:
        sent.append(request)
        return Future()

    batcher = RequestBatcher(send)
    proofs = [MessageLease("a", "b", 1)]
    for must_exist in (False, True, False, True):
        batcher.add(BatchableCall(PutMessages("jobs", [NewMessage(b"a")], must_exist=must_exist), Future()))
    for late in (False, True, True):
        batcher.add(BatchableCall(AckMessages("jobs", proofs, late=late), Future()))
    assert batcher.send() == 3
    assert [len(each.messages) for each in sent[:2]] == [2, 2]
    assert [each.must_exist for each in sent[:2]] == [False, True]
    assert [(len(each.leases), each.late) for each in sent[2:]] == [(1, False), (2, True)]


# Costs.


class CountedReads:
    """Counts the reads and writes of transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def run(self, work: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, int, int]:
        counts = (0, 0, 0)

        def counted(tx: Transaction) -> None:
            nonlocal counts
            counts = (0, 0, 0)
            gets, scans = tx.get, tx.scan
            seen = [0, 0]

            class Counted:
                def __getattr__(self, name: str) -> Any:
                    return getattr(tx, name)

                def get(self, key: bytes) -> bytes | None:
                    seen[0] += 1
                    return gets(key)

                def scan(self, *bounds: Any, **limits: Any) -> list[Pair]:
                    seen[1] += 1
                    return scans(*bounds, **limits)

            work(Counted(), *args, **options)
            counts = seen[0], seen[1], len(tx.writes)

        self._database.transact(counted)
        return counts


@pytest.mark.parametrize(
    "policy",
    [
        QueuePolicy(),
        QueuePolicy(dead_letter_rule="deliveries", retention_seconds=60.0, retention_by_age=True, delay_seconds=0.0),
    ],
    ids=["default", "by age and deliveries"],
)
def test_rules_by_age_and_deliveries_cost_nothing(clock: ManualClock, policy: QueuePolicy) -> None:
    with MemoryDatabase(clock=clock) as database:
        database.transact(queues.set_policy, JOBS, policy)
        put(database, b"first")
        sweep(database, clock)
        counted = CountedReads(database)
        assert counted.run(queues.put, JOBS, [NewMessage(b"a")]) == (2, 0, 2)
        assert counted.run(queues.put, JOBS, [NewMessage(b"a")], must_exist=True) == (2, 0, 2)
        assert counted.run(queues.lease_or_wait, JOBS, owner="ada", limit=3) == (2, 1, 5)
