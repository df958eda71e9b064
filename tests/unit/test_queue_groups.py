"""Messages of a group that one receive leases together, and leases that end sooner or later than they would."""

from collections.abc import Callable
from functools import partial

import pytest

from fastness.errors import InvalidArgument, MessageCancelled, QueueMessageLeaseMismatch
from fastness.kv import Database, Pair, Transaction
from fastness.kv.contract import View
from fastness.layers import queues
from fastness.layers.queues import QueueKey, StoredMessage
from fastness.testing.clock import ManualClock
from fastness.wire.queues import VisibilityChange
from tests.unit.queue_calls import (
    JOBS,
    ack,
    lease,
    lease_one,
    lease_or_wait,
    nack,
    payloads,
    process_due,
    proof,
    put,
    reject,
    set_policy,
    stats,
)


def change(database: Database, message: StoredMessage, seconds: float) -> StoredMessage:
    (answer,) = database.transact(queues.change_visibility, JOBS, [VisibilityChange(proof(message), seconds)])
    if isinstance(answer, StoredMessage):
        return answer
    raise answer


@pytest.fixture
def batches(database: Database) -> Database:
    """A database whose queue leases messages of a group together."""
    set_policy(database, group_batches=True, max_attempts=3, retry_delay_seconds=0.0)
    return database


def test_without_the_policy_a_receive_has_one_message_of_a_group(database: Database) -> None:
    put(database, b"1", b"2", b"3", group="a")
    assert payloads(lease(database, 10)) == [b"1"]


def test_one_receive_leases_messages_of_a_group_in_order(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    put(batches, b"4", group="b")
    put(batches, b"5", b"6", group="a")
    assert payloads(lease(batches, 4)) == [b"1", b"2", b"3", b"5"]
    assert payloads(lease(batches, 10)) == [b"4"]


def test_a_receive_goes_on_with_the_next_group(batches: Database) -> None:
    put(batches, b"1", b"2", group="a")
    put(batches, b"3", b"4", b"5", group="b")
    put(batches, b"6")
    assert payloads(lease(batches, 4)) == [b"1", b"2", b"3", b"4"]
    found = lease_or_wait(batches, limit=4)
    assert payloads(found.messages) == [b"6"]


def test_a_receive_that_a_group_has_filled_says_that_more_is_ready(batches: Database) -> None:
    put(batches, b"1", b"2", group="a")
    put(batches, b"3")
    found = lease_or_wait(batches, limit=2)
    assert payloads(found.messages) == [b"1", b"2"]
    assert found.more
    assert payloads(lease(batches, 2)) == [b"3"]


def test_a_group_is_locked_until_all_its_messages_are_acknowledged(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    for message in (second, first):  # In any order.
        assert lease(batches) == []
        ack(batches, message)
    assert payloads(lease(batches, 10)) == [b"3"]


def test_a_message_that_is_put_meanwhile_waits(batches: Database) -> None:
    put(batches, b"1", b"2", group="a")
    found = lease(batches, 10)
    put(batches, b"3", group="a")
    assert lease(batches) == []
    assert stats(batches).blocked == 1
    for message in found:
        ack(batches, message)
    assert payloads(lease(batches)) == [b"3"]


def test_a_returned_message_is_delivered_again_while_later_ones_are_leased(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, second, third = lease(batches, 3)
    ack(batches, first)
    nack(batches, second)
    (again,) = lease(batches, 10)
    assert again.payload == b"2"  # And not the fourth one: the third one is still leased.
    ack(batches, again)
    assert lease(batches) == []
    ack(batches, third)
    assert payloads(lease(batches, 10)) == [b"4"]


def test_a_returned_message_waits_for_those_before_it(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, second, _third = lease(batches, 3)
    change(batches, second, 0)
    assert lease(batches) == []
    change(batches, first, 0)
    assert payloads(lease(batches, 10)) == [b"1", b"2"]


def test_returned_messages_that_are_leased_again_hold_their_group_with_the_others(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, second, third = lease(batches, 3)
    for message in (first, second):
        change(batches, message, 0)
    again = lease(batches, 10)
    assert payloads(again) == [b"1", b"2"]
    ack(batches, third)
    ack(batches, again[0])
    assert lease(batches) == []
    ack(batches, again[1])
    assert payloads(lease(batches, 10)) == [b"4"]


def test_all_messages_of_an_expired_batch_are_delivered_again_in_order(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    lease(batches, 2)
    clock.advance_ms(30_000)
    again = lease(batches, 10)
    assert payloads(again) == [b"1", b"2", b"3"]
    assert [message.attempts for message in again] == [2, 2, 1]


def test_a_message_whose_lease_ends_later_holds_the_later_ones_of_its_group(
    batches: Database, clock: ManualClock
) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    _, second, _ = lease(batches, 3)
    change(batches, second, 60)
    clock.advance_ms(30_000)
    assert payloads(lease(batches, 10)) == [b"1"]
    assert stats(batches).blocked == 2
    ack(batches, second)
    clock.advance_ms(30_000)
    assert payloads(lease(batches, 10)) == [b"1", b"3", b"4"]


def test_a_dead_letter_of_a_batch_does_not_hold_its_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    reject(batches, first)
    assert lease(batches) == []
    ack(batches, second)
    assert payloads(lease(batches)) == [b"3"]


def test_a_redriven_message_goes_before_the_blocked_ones_of_its_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, second, third = lease(batches, 3)
    reject(batches, first)
    assert batches.transact(queues.redrive, JOBS) == 1
    ack(batches, second)
    nack(batches, third)
    assert payloads(lease(batches, 10)) == [b"1", b"3", b"4"]


def test_a_redriven_message_does_not_wait_for_leased_ones_after_it(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, _second, _third = lease(batches, 3)
    reject(batches, first)
    assert batches.transact(queues.redrive, JOBS) == 1
    assert payloads(lease(batches, 10)) == [b"1"]


def test_a_redriven_message_goes_alone_after_a_younger_head(batches: Database) -> None:
    """The head may have been delivered before, so it keeps its place."""
    put(batches, b"1", b"2", b"3", group="a")
    reject(batches, lease_one(batches))
    batches.transact(queues.redrive, JOBS)
    (second,) = lease(batches, 10)
    assert second.payload == b"2"
    ack(batches, second)
    assert payloads(lease(batches, 10)) == [b"1", b"3"]


def test_a_message_that_is_nacked_with_a_delay_holds_its_group(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    nack(batches, first, delay_seconds=5)
    ack(batches, second)
    assert lease(batches, 10) == []
    assert stats(batches).delayed == 1
    clock.advance_ms(5_000)
    assert payloads(lease(batches, 10)) == [b"1", b"3"]


def test_a_delayed_message_ends_a_batch_and_then_holds_its_group(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", b"2", group="a")
    put(batches, b"3", group="a", delay_seconds=5)
    put(batches, b"4", group="a")
    found = lease(batches, 10)
    assert payloads(found) == [b"1", b"2"]
    for message in found:
        ack(batches, message)
    assert lease(batches) == []
    clock.advance_ms(5_000)
    assert payloads(lease(batches, 10)) == [b"3", b"4"]


def test_a_cancelled_message_of_a_batch_does_not_hold_its_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    batches.transact(queues.cancel, JOBS, queues.format_id(first.id))
    ack(batches, second)
    assert payloads(lease(batches)) == [b"3"]
    with pytest.raises(MessageCancelled):
        ack(batches, first)


def test_a_purge_leaves_the_leased_messages_of_a_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    assert batches.transact(queues.purge, JOBS, after=b"", limit=10) == (1, b"")
    put(batches, b"4", group="a")
    ack(batches, first)
    assert lease(batches) == []
    nack(batches, second)
    assert payloads(lease(batches, 10)) == [b"2", b"4"]


def test_a_moved_message_goes_before_the_later_ones_of_its_group(batches: Database) -> None:
    other = QueueKey("main", "other")
    set_policy(batches, other, group_batches=True)
    (receipt,) = put(batches, b"1", group="a")
    put(batches, b"2", b"3", b"4", group="a", queue=other)
    second, third = lease(batches, 2, queue=other)
    assert batches.transact(queues.move_messages, JOBS, [receipt.id], to=other) == [None]
    ack(batches, second, queue=other)
    nack(batches, third, queue=other, delay_seconds=0)
    assert payloads(lease(batches, 10, queue=other)) == [b"1", b"3", b"4"]


def test_a_message_whose_ttl_has_expired_is_left_out(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", group="a")
    put(batches, b"2", group="a", ttl_seconds=1)
    put(batches, b"3", group="a")
    clock.advance_ms(1_000)
    assert payloads(lease(batches, 10)) == [b"1", b"3"]


def test_a_message_of_a_batch_that_was_delivered_too_often_is_a_dead_letter(
    batches: Database, clock: ManualClock
) -> None:
    set_policy(batches, group_batches=True, dead_letter_rule="deliveries", max_attempts=2)
    put(batches, b"1", b"2", b"3", b"4", group="a")
    change(batches, lease_one(batches), 0)
    lease(batches, 2)
    clock.advance_ms(30_000)
    assert payloads(lease(batches, 10)) == [b"2", b"3", b"4"]
    assert stats(batches).dead == 1
    clock.advance_ms(30_000)
    assert payloads(lease(batches, 10)) == [b"3", b"4"]


def test_messages_of_a_group_that_are_too_old_are_left_out(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", b"2", group="a")
    clock.advance_ms(5_000)
    put(batches, b"3", b"4", group="a")
    set_policy(batches, group_batches=True, retention_seconds=5.0, retention_by_age=True)
    assert payloads(lease(batches, 10)) == [b"3", b"4"]


def test_a_purge_of_leased_messages_opens_their_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    lease(batches, 2)
    work = queues.Work()
    while not work.is_done:
        work = batches.transact(queues.step, JOBS, partial(queues.purge_step, leased=True), work, None)
    assert work.count == 3
    put(batches, b"4", group="a")
    assert payloads(lease(batches, 10)) == [b"4"]


def test_a_late_ack_of_a_message_that_waits_behind_its_group_leaves_it_waiting(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    change(batches, second, 0)
    batches.transact(queues.ack, JOBS, proof(second), late=True)
    assert lease(batches) == []
    ack(batches, first)
    assert payloads(lease(batches, 10)) == [b"3"]


def test_a_message_with_a_key_is_delivered_alone(batches: Database) -> None:
    """The limits of its key apply to it."""
    put(batches, b"1", b"2", group="a")
    put(batches, b"3", group="a", key="k")
    put(batches, b"4", group="a")
    for expected in ([b"1", b"2"], [b"3"], [b"4"]):
        found = lease(batches, 10)
        assert payloads(found) == expected
        for message in found:
            ack(batches, message)


def test_messages_with_job_options_of_a_batch_are_found(batches: Database) -> None:
    put(batches, b"1", group="a")
    (kept,) = put(batches, b"2", group="a", keep_result=True)
    first, second = lease(batches, 2)
    info = batches.read(queues.get, JOBS, kept.id)
    assert getattr(info, "state", None) == "leased"
    nack(batches, second)
    assert getattr(batches.read(queues.get, JOBS, kept.id), "state", None) == "blocked"
    ack(batches, first)
    assert getattr(batches.read(queues.get, JOBS, kept.id), "state", None) == "ready"


def test_a_policy_that_changes_does_not_unlock_a_group(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", b"4", group="a")
    first, second = lease(batches, 2)
    set_policy(batches, group_batches=False)
    ack(batches, second)
    assert lease(batches) == []
    nack(batches, first, delay_seconds=0)
    for expected in (b"1", b"3", b"4"):
        found = lease(batches, 10)
        assert payloads(found) == [expected]
        ack(batches, found[0])


def test_a_group_leaves_nothing_behind(batches: Database) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    for message in lease(batches, 10):
        ack(batches, message)
    assert batches.read(lambda tx: tx.scan(*queues.keys_of(JOBS).head.range(), limit=1)) == []


def test_messages_of_a_group_in_several_leases_hold_it_together(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", group="a", visibility_seconds=20)
    put(batches, b"2", group="a", visibility_seconds=5)
    put(batches, b"3", group="a")
    assert len(lease(batches, 2)) == 2
    clock.advance_ms(5_000)
    assert lease(batches) == []
    clock.advance_ms(15_000)
    assert payloads(lease(batches, 10)) == [b"1", b"2", b"3"]


def test_a_lock_survives_a_restart(open_database: Callable[..., Database], backend: str, clock: ManualClock) -> None:
    if backend == "memory":
        pytest.skip("a plane in memory keeps nothing for a second process")
    with open_database(clock=clock) as database:
        set_policy(database, group_batches=True)
        put(database, b"1", b"2", b"3", group="a")
        first, second = lease(database, 2)
    with open_database(clock=clock) as database:
        ack(database, first)
        assert lease(database) == []
        ack(database, second)
        assert payloads(lease(database)) == [b"3"]


class RecordedReads:
    """The committed pairs of a transaction, and which keys it has read."""

    def __init__(self, view: View) -> None:
        self.view, self.keys = view, list[bytes]()

    def get(self, key: bytes) -> bytes | None:
        self.keys.append(key)
        return self.view.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        self.keys.append(begin)
        return self.view.scan(begin, end, limit, reverse)


@pytest.mark.parametrize("batches", [False, True])
def test_a_receive_reads_nothing_of_groups_that_block_no_message(database: Database, batches: bool) -> None:
    if database.read(lambda tx: tx.writer):
        pytest.skip("several processes have counters of their own, so none of them knows that no message is blocked")
    set_policy(database, group_batches=batches)
    put(database, b"1", group="a")
    put(database, b"2", group="b")

    def lease_and_record(tx: Transaction) -> list[bytes]:
        tx.view = reads = RecordedReads(tx.view)
        assert payloads(queues.lease(tx, JOBS, owner="ada", limit=2)) == [b"1", b"2"]
        return reads.keys

    keys = queues.keys_of(JOBS)
    read = database.transact(lease_and_record)
    assert keys.policy in read
    assert not [key for key in read if key.startswith((keys.head.prefix, keys.waiting.prefix))]


# Visibility.


@pytest.mark.parametrize("seconds", [0.5, 5, 300])
def test_a_lease_ends_when_its_consumer_says(database: Database, clock: ManualClock, seconds: float) -> None:
    put(database, b"1")
    message = lease_one(database)
    assert change(database, message, seconds).due_ms == clock.now_ms() + seconds * 1_000
    clock.advance_ms(round(seconds * 1_000) - 1)
    assert lease(database) == []
    clock.advance_ms(1)
    assert lease_one(database).attempts == 2


def test_zero_returns_a_message_at_once_without_counting_a_failure(database: Database) -> None:
    set_policy(database, max_attempts=1)
    put(database, b"1")
    for delivery in (1, 2, 3):
        message = lease_one(database)
        assert (message.attempts, message.failures) == (delivery, 0)
        assert change(database, message, 0).lease_ref == b""
        with pytest.raises(QueueMessageLeaseMismatch):
            ack(database, message)
    assert (stats(database).ready, stats(database).leased) == (1, 0)


def test_one_message_of_a_lease_changes_alone(database: Database, clock: ManualClock) -> None:
    put(database, b"1", b"2", b"3")
    first, second, third = lease(database, 3)
    change(database, second, 5)
    change(database, third, 0)
    clock.advance_ms(5_000)
    assert payloads(lease(database, 3)) == [b"2", b"3"]
    clock.advance_ms(24_999)
    ack(database, first)


def test_several_changes_are_answered_one_by_one(database: Database, clock: ManualClock) -> None:
    put(database, b"1", b"2", b"3", b"4")
    messages = lease(database, 4)
    ack(database, messages[3])
    wanted = [VisibilityChange(proof(each), seconds) for each, seconds in zip(messages, (10, 0, -1, 5), strict=True)]
    answers = database.transact(queues.change_visibility, JOBS, wanted)
    assert isinstance(answers[0], StoredMessage)
    assert answers[0].due_ms == clock.now_ms() + 10_000
    assert isinstance(answers[1], StoredMessage)
    assert isinstance(answers[2], InvalidArgument)
    assert isinstance(answers[3], QueueMessageLeaseMismatch)
    assert (stats(database).leased, stats(database).ready) == (2, 1)


def test_a_whole_lease_changes_in_one_record(database: Database, clock: ManualClock) -> None:
    put(database, b"1", b"2", b"3")
    messages = lease(database, 3)
    database.transact(queues.change_visibility, JOBS, [VisibilityChange(proof(each), 5) for each in messages])
    keys = queues.keys_of(JOBS)
    assert len(database.read(lambda tx: tx.scan(*keys.due_range(0), limit=10))) == 1
    clock.advance_ms(5_000)
    assert payloads(lease(database, 3)) == [b"1", b"2", b"3"]


def test_of_several_changes_of_a_message_the_last_counts(database: Database, clock: ManualClock) -> None:
    put(database, b"1")
    message = lease_one(database)
    wanted = [VisibilityChange(proof(message), seconds) for seconds in (0, 60, 7)]
    database.transact(queues.change_visibility, JOBS, wanted)
    clock.advance_ms(6_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"1"]


def test_a_lease_that_has_ended_does_not_change(database: Database, clock: ManualClock) -> None:
    """Whether its end was processed or not."""
    put(database, b"1")
    message = lease_one(database)
    clock.advance_ms(30_000)
    for _ in range(2):
        with pytest.raises(QueueMessageLeaseMismatch):
            change(database, message, 60)
        process_due(database)
    assert stats(database).ready == 1


def change_late(database: Database, message: StoredMessage, seconds: float) -> StoredMessage:
    wanted = [VisibilityChange(proof(message), seconds)]
    (answer,) = database.transact(queues.change_visibility, JOBS, wanted, late_owner="ada")
    if isinstance(answer, StoredMessage):
        return answer
    raise answer


@pytest.mark.parametrize("is_processed", [False, True], ids=["before the end is processed", "after that"])
def test_a_lease_that_has_ended_changes_for_a_late_owner(
    database: Database, clock: ManualClock, is_processed: bool
) -> None:
    set_policy(database, retry_delay_seconds=0.0)
    put(database, b"1")
    message = lease_one(database)
    clock.advance_ms(30_000)
    if is_processed:
        process_due(database)
    assert change_late(database, message, 60).due_ms == clock.now_ms() + 60_000
    assert (stats(database).leased, stats(database).ready) == (1, 0)
    clock.advance_ms(59_999)
    assert lease(database) == []
    assert change(database, message, 1).attempts == 1  # It is leased as before.
    clock.advance_ms(1_000)
    assert lease_one(database).attempts == 2


def test_a_late_owner_gets_no_message_that_another_consumer_has(database: Database, clock: ManualClock) -> None:
    set_policy(database, retry_delay_seconds=0.0)
    put(database, b"1")
    message = lease_one(database)
    clock.advance_ms(30_000)
    again = lease_one(database)
    with pytest.raises(QueueMessageLeaseMismatch):
        change_late(database, message, 0)
    ack(database, again)
    with pytest.raises(QueueMessageLeaseMismatch):
        change_late(database, message, 60)
    assert (stats(database).leased, stats(database).ready) == (0, 0)


def test_a_message_that_is_leased_again_to_a_late_owner_holds_its_group(batches: Database, clock: ManualClock) -> None:
    put(batches, b"1", b"2", b"3", group="a")
    first, second = lease(batches, 2)
    change(batches, first, 40)
    clock.advance_ms(30_000)
    process_due(batches)  # The second one waits for the first one.
    change_late(batches, second, 60)
    clock.advance_ms(10_000)
    (again,) = lease(batches, 10)
    assert again.payload == b"1"
    ack(batches, again)
    assert lease(batches) == []
    ack(batches, second)
    assert payloads(lease(batches, 10)) == [b"3"]


def test_a_late_owner_can_return_a_message_at_once(database: Database, clock: ManualClock) -> None:
    set_policy(database, retry_delay_seconds=0.0)
    put(database, b"1")
    message = lease_one(database)
    clock.advance_ms(30_000)
    process_due(database)
    wanted = [VisibilityChange(proof(message), seconds) for seconds in (60, 0)]
    database.transact(queues.change_visibility, JOBS, wanted, late_owner="ada")
    assert (stats(database).leased, stats(database).ready) == (0, 1)
    assert lease_one(database).attempts == 2


@pytest.mark.parametrize("seconds", [-0.001, 43_200.001, float("nan")])
def test_a_visibility_out_of_range_is_refused(database: Database, seconds: float) -> None:
    put(database, b"1")
    with pytest.raises(InvalidArgument, match="0 to 43200 s"):
        change(database, lease_one(database), seconds)


def test_a_message_with_an_expired_ttl_is_removed_when_it_returns(database: Database, clock: ManualClock) -> None:
    put(database, b"1", ttl_seconds=1)
    message = lease_one(database)
    clock.advance_ms(1_000)
    assert change(database, message, 0).lease_ref == b""
    assert (stats(database).ready, stats(database).leased) == (0, 0)
