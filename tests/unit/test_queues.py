"""Queues, as functions over a transaction, on every backend."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.backends.postgres import PostgresDatabase
from fastness.errors import (
    InvalidArgument,
    QueueInUse,
    QueueMessageLeaseMismatch,
)
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import Prefetched, QueueKey, StoredMessage, expiry
from fastness.plane.executor import execute
from fastness.testing.clock import START_MS, ManualClock
from fastness.tiers import Tier
from fastness.wire.deliveries import delivery_at, delivery_of
from fastness.wire.queues import (
    Deliveries,
    Delivery,
    ExtendMessages,
    Failure,
    LeasedMessage,
    LeasedMessages,
    MessageLease,
    NewMessage,
    PackedAck,
    PackedLease,
    QueuePolicy,
    RefusedAck,
    SidecarState,
    bits_of,
)
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    SIZES,
    ack,
    counts,
    everything,
    extend,
    lease,
    lease_one,
    lease_or_wait,
    leased,
    nack,
    payloads,
    peek,
    process_due,
    proof,
    purge,
    put,
    reject,
    remaining_keys,
    set_policy,
    stats,
)

OTHER = QueueKey("main", "other")


def test_receipt_has_the_message_id_and_the_durability(database: Database) -> None:
    (receipt,) = put(database, b"a", correlation_id="because")
    assert (receipt.durability, receipt.duplicate, receipt.correlation_id) == (Tier.CRITICAL, False, "because")
    (message,) = lease(database)
    assert (queues.format_id(message.id), message.payload, message.correlation_id) == (receipt.id, b"a", "because")
    (receipt,) = database.transact(lambda tx: queues.put(tx, JOBS, [NewMessage()], tier=Tier.IMPORTANT))
    assert receipt.durability is Tier.IMPORTANT


def test_correlation_id_defaults_to_the_message_id(database: Database) -> None:
    (receipt,) = put(database, b"a")
    assert receipt.correlation_id == receipt.id
    assert lease_one(database).correlation_id == receipt.id


def test_delivered_message_has_all_fields_of_the_put(database: Database, clock: ManualClock) -> None:
    put(database, b"a", content_type="text/plain", attributes={"kind": "ü"}, priority=7, group="Orders", max_attempts=3)
    message = lease_one(database, txn_id="t-1")
    assert (message.content_type, message.attributes) == ("text/plain", {"kind": "ü"})
    assert (message.priority, message.group, message.max_attempts) == (7, "Orders", 3)
    assert (message.created_ms, message.size, message.blob) == (clock.now_ms(), 1, None)
    assert (message.attempts, message.failures, message.fence) == (1, 0, 1)
    assert (message.owner, message.txn_id, message.last_error, message.origin) == ("ada", "t-1", None, None)


def test_keys_take_turns_before_less_urgent_messages(database: Database) -> None:
    """Also within one batch: the next message of a key becomes ready when the one before it is leased."""
    set_policy(database, fair=True)
    put(database, b"first")
    put(database, b"less urgent", priority=1)
    put(database, b"a0", b"a1", key="a")
    assert payloads(lease(database, 4)) == [b"first", b"a0", b"a1", b"less urgent"]


def test_delivery_order_is_priority_then_age(database: Database) -> None:
    for name, priority in (("e", 0), ("c", 5), ("a", 9), ("d", 5), ("b", 9)):
        put(database, name.encode(), priority=priority)
    assert payloads(peek(database)) == [b"a", b"b", b"c", b"d", b"e"]
    assert payloads(lease(database, 2) + lease(database, 10)) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_more_urgent_message_is_delivered_before_prefetched_ones(database: Database) -> None:
    prefetched = Prefetched()
    put(database, b"b", b"c", b"e")
    put(database, b"d", priority=4)
    found = lease(database, prefetched=prefetched)
    put(database, b"a", priority=6)
    nack(database, found[0], delay_seconds=0)
    found = [message for _ in range(6) for message in lease(database, prefetched=prefetched)]
    assert payloads(found) == [b"a", b"b", b"c", b"e", b"d"]


def test_a_message_that_becomes_ready_among_prefetched_ones_is_not_skipped(
    database: Database, clock: ManualClock
) -> None:
    """It sorts after the front and before the prefetched ones: if skipped, it would be hidden for ever."""
    prefetched = Prefetched()
    put(database, b"a")
    put(database, b"b", delay_seconds=5)
    put(database, b"c", b"d")
    found = lease(database, prefetched=prefetched)
    clock.advance_ms(5_000)
    found += [message for _ in range(4) for message in lease(database, prefetched=prefetched)]
    assert payloads(found) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("how", ["lease", "purge", "expire"])
def test_a_prefetched_message_that_left_the_queue_is_not_delivered(
    database: Database, clock: ManualClock, how: str
) -> None:
    prefetched = Prefetched()
    put(database, b"a")
    put(database, b"b", ttl_seconds=5)
    put(database, b"c")
    lease(database, prefetched=prefetched)
    if how == "lease":
        assert payloads(lease(database)) == [b"b"]
    elif how == "purge":
        assert purge(database) == 2
    else:
        clock.advance_ms(5_000)
    put(database, b"d")
    found = [message for _ in range(4) for message in lease(database, prefetched=prefetched, visibility_ms=60_000)]
    assert payloads(found) == ([b"d"] if how == "purge" else [b"c", b"d"])


def test_prefetched_messages_stay_valid_after_a_failed_commit(database: Database) -> None:
    prefetched = Prefetched()
    put(database, *(bytes((number,)) for number in range(6)))

    def lease_and_fail(tx: Transaction) -> None:
        queues.lease(tx, JOBS, owner="ada", prefetched=prefetched)
        raise LookupError("on purpose")

    found = lease(database, prefetched=prefetched)
    for _ in range(2):
        with pytest.raises(LookupError):
            database.transact(lease_and_fail)
        found += lease(database, prefetched=prefetched)
    found += lease(database, 10, prefetched=prefetched)
    assert payloads(found) == [bytes((number,)) for number in range(6)]


def test_more_messages_than_one_prefetch_are_delivered_in_order(database: Database) -> None:
    prefetched = Prefetched()
    expected = [bytes((number,)) for number in range(150)]
    put(database, *expected)
    found: list[StoredMessage] = []
    while batch := lease(database, 7, prefetched=prefetched):
        found += batch
    assert payloads(found) == expected


def test_a_delayed_message_is_delivered_after_its_delay(database: Database, clock: ManualClock) -> None:
    put(database, b"later", delay_seconds=5)
    put(database, b"now")
    assert counts(database) == {"ready": 1, "delayed": 1}
    assert payloads(lease(database, 2)) == [b"now"]
    clock.advance_ms(4_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"later"]


def test_a_message_is_removed_when_its_ttl_expires(database: Database, clock: ManualClock) -> None:
    put(database, b"ready", ttl_seconds=5)
    put(database, b"delayed", ttl_seconds=5, delay_seconds=60)
    put(database, b"first", b"second", ttl_seconds=5, group="g")
    clock.advance_ms(4_999)
    process_due(database)
    assert counts(database) == {"ready": 2, "delayed": 1, "blocked": 1}
    clock.advance_ms(1)
    assert lease(database, 10) == []
    assert counts(database) == {}
    assert remaining_keys(database) == []


def test_a_blocked_message_is_removed_when_its_ttl_expires(database: Database, clock: ManualClock) -> None:
    put(database, b"first", b"third", group="g", visibility_seconds=60)
    put(database, b"second", group="g", ttl_seconds=5)
    first = lease_one(database)
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {"leased": 1, "blocked": 1}
    ack(database, first)
    ack(database, lease_one(database))
    assert (counts(database), remaining_keys(database)) == ({}, [])


def test_an_expired_message_is_not_delivered_before_its_due_entry_is_processed(
    database: Database, clock: ManualClock
) -> None:
    """One lease call processes a bounded number of due entries, and more may be due."""
    for ttl in (1, 2):
        put(database, *[b""] * 64, ttl_seconds=ttl)
    put(database, b"stays")
    clock.advance_ms(2_000)
    assert payloads(lease(database, 256)) == [b"stays"]


def test_a_leased_message_can_be_settled_after_its_ttl(database: Database, clock: ManualClock) -> None:
    put(database, b"acked", b"returned", b"expires", ttl_seconds=5)
    acked, returned, _ = lease(database, 3, visibility_ms=10_000)
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {"leased": 3}
    ack(database, acked)
    nack(database, returned, delay_seconds=0)
    assert counts(database) == {"leased": 1}
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {}
    assert remaining_keys(database) == []


def test_the_ttl_defaults_to_the_policy_retention(database: Database, clock: ManualClock) -> None:
    set_policy(database, retention_seconds=5)
    put(database, b"of the policy")
    put(database, b"of its own", ttl_seconds=10)
    clock.advance_ms(5_000)
    process_due(database)
    assert payloads(peek(database)) == [b"of its own"]


def test_due_entries_are_processed_in_bounded_batches(database: Database, clock: ManualClock) -> None:
    put(database, *(bytes((number,)) for number in range(150)), delay_seconds=1)
    clock.advance_ms(1_000)
    ready = []
    while process_due(database) <= clock.now_ms():
        ready.append(stats(database).ready)
    assert ready == [64, 128]
    assert counts(database) == {"ready": 150}


def test_an_idempotency_key_suppresses_duplicates_for_five_minutes(database: Database, clock: ManualClock) -> None:
    (first,) = put(database, b"a", idempotency_key="k", correlation_id="because")
    ack(database, lease_one(database))
    clock.advance_ms(299_999)
    put(database, b"other")
    (again,) = put(database, b"b", idempotency_key="k")
    assert (again.id, again.duplicate, again.correlation_id) == (first.id, True, "because")
    assert stats(database).put_total == 2
    clock.advance_ms(1)
    (later,) = put(database, b"c", idempotency_key="k")
    assert (later.id != first.id, later.duplicate) == (True, False)
    assert payloads(lease(database, 10)) == [b"other", b"c"]


def test_a_batch_that_repeats_a_key_enqueues_one_message(database: Database) -> None:
    first, second = put(database, b"a", b"b", idempotency_key="k")
    assert (first.duplicate, second.duplicate, first.id) == (False, True, second.id)
    assert payloads(lease(database, 10)) == [b"a"]


def test_expired_idempotency_keys_are_deleted(database: Database, clock: ManualClock) -> None:
    for number in range(12):
        put(database, b"", idempotency_key=f"k-{number}")
        clock.advance_ms(61_000)
    purge(database)
    ids = queues.keys_of(JOBS).ids.prefix
    assert 5 <= len([key for key in remaining_keys(database) if key.startswith(ids)]) <= 11


def test_messages_of_a_group_are_delivered_one_at_a_time_in_order(database: Database) -> None:
    put(database, b"a1", b"a2", b"a3", group="a")
    put(database, b"b1", b"b2", group="b")
    put(database, b"none")
    assert counts(database) == {"ready": 3, "blocked": 3}
    found = lease(database, 10)
    assert payloads(found) == [b"a1", b"b1", b"none"]
    assert lease(database, 10) == []
    ack(database, found[0])
    second = lease_one(database)
    nack(database, second, delay_seconds=0)
    assert payloads(lease(database, 10)) == [b"a2"]


def test_priority_does_not_change_the_order_within_a_group(database: Database) -> None:
    put(database, b"first", group="g", priority=0)
    put(database, b"second", group="g", priority=9)
    first = lease_one(database)
    ack(database, first)
    assert payloads([first, *lease(database)]) == [b"first", b"second"]


def test_a_group_waits_for_the_delay_of_its_head(database: Database, clock: ManualClock) -> None:
    put(database, b"first", group="g", delay_seconds=5)
    put(database, b"second", group="g")
    put(database, b"third", group="g", delay_seconds=20)
    assert counts(database) == {"delayed": 1, "blocked": 2}
    clock.advance_ms(5_000)
    first = lease_one(database)
    nack(database, first, delay_seconds=5)
    assert lease(database) == []
    clock.advance_ms(5_000)
    ack(database, lease_one(database))
    second = lease_one(database)
    ack(database, second)
    assert (second.payload, counts(database)) == (b"second", {"delayed": 1})
    clock.advance_ms(10_000)
    assert payloads(lease(database)) == [b"third"]


@pytest.mark.parametrize("leave", ["ack", "reject", "nack", "lease expiry", "message expiry"])
def test_a_group_advances_however_its_head_leaves(database: Database, clock: ManualClock, leave: str) -> None:
    put(database, b"first", group="g", max_attempts=1, ttl_seconds=1 if leave == "message expiry" else None)
    put(database, b"second", group="g")
    if leave != "message expiry":
        first = lease_one(database, visibility_ms=1_000)
        if leave != "lease expiry":
            settle: dict[str, Callable[..., object]] = {"ack": ack, "reject": reject, "nack": nack}
            settle[leave](database, first)
    clock.advance_ms(1_000)
    assert payloads(lease(database, 10)) == [b"second"]


def test_a_leased_message_is_invisible_until_its_lease_expires(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    first = lease_one(database, owner="ada")
    assert first.due_ms == clock.now_ms() + 30_000
    clock.advance_ms(29_999)
    assert lease(database, owner="bob") == []
    clock.advance_ms(1)
    second = lease_one(database, owner="bob")
    assert (second.attempts, second.failures, second.fence) == (2, 1, 2)
    assert second.lease_id != first.lease_id
    assert second.last_error == "The lease of ada ended before it was settled"


def test_an_expired_lease_can_settle_until_its_expiry_is_processed(database: Database, clock: ManualClock) -> None:
    put(database, b"acked", b"returned", b"extended", b"noticed")
    acked, returned, extended, noticed = lease(database, 4)
    clock.advance_ms(60_000)
    ack(database, acked)
    nack(database, returned, counts=False)
    assert extend(database, extended, 1_000).due_ms == clock.now_ms() + 1_000
    process_due(database)
    for settle in (ack, nack, reject):
        with pytest.raises(QueueMessageLeaseMismatch, match="stop working on it"):
            settle(database, noticed)
    with pytest.raises(QueueMessageLeaseMismatch):
        extend(database, noticed, 1_000)
    assert counts(database) == {"ready": 2, "leased": 1}


def test_check_refuses_an_expired_lease(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    message = lease_one(database)
    database.read(queues.check, JOBS, proof(message))
    clock.advance_ms(29_999)
    database.read(queues.check, JOBS, proof(message))
    clock.advance_ms(1)
    with pytest.raises(QueueMessageLeaseMismatch):
        database.read(queues.check, JOBS, proof(message))


def test_a_lease_is_extended_and_never_gets_shorter(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    message = lease_one(database)
    clock.advance_ms(20_000)
    assert extend(database, message, 1_000).due_ms == START_MS + 30_000
    assert extend(database, message, 30_000).due_ms == START_MS + 50_000
    clock.advance_ms(29_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert lease_one(database).fence == 2


def test_an_acknowledged_message_is_never_delivered_again(database: Database, clock: ManualClock) -> None:
    (receipt,) = put(database, b"a")
    message = lease_one(database)
    assert ack(database, message) == receipt.correlation_id
    clock.advance_ms(3_600_000)
    assert lease(database) == []
    assert (stats(database).acked_total, counts(database)) == (1, {})


def test_a_repeated_ack_succeeds_for_five_minutes(database: Database, clock: ManualClock) -> None:
    # Embedded, a put deletes expired ack records, and the upkeep finds none.
    put(database, b"a")
    message = lease_one(database)
    clock.advance_ms(
        59_999 - clock.now_ms() % 60_000
    )  # Acks are stored by minute; the end of a minute is the edge case.
    ack(database, message)
    for _ in range(5):
        clock.advance_ms(60_000)
        put(database, b"other")
        database.transact(queues.run_upkeep, JOBS)
        assert ack(database, message) == queues.format_id(message.id)
    clock.advance_ms(60_000)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, message)
    assert stats(database).acked_total == 1
    clock.advance_ms(600_000)
    put(database, b"other")
    database.transact(queues.run_upkeep, JOBS)
    acks = queues.keys_of(JOBS).acks.prefix
    assert [key for key, _ in everything(database) if key.startswith(acks)] == []


@pytest.mark.parametrize("settle", [ack, nack, reject])
def test_a_wrong_lease_proof_settles_nothing(database: Database, settle: Callable[..., Any]) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    before = everything(database)
    for wrong in (
        MessageLease(queues.format_id(first.id), second.lease_id, first.fence),
        MessageLease(queues.format_id(first.id), first.lease_id, first.fence + 1),
        MessageLease(queues.format_id(first.id), "", first.fence),
        MessageLease("00000000-0000-7000-8000-000000000000", first.lease_id, first.fence),
    ):
        with pytest.raises(QueueMessageLeaseMismatch):
            database.transact(getattr(queues, settle.__name__), JOBS, wrong)
    with pytest.raises(InvalidArgument, match="not a message id"):
        database.transact(getattr(queues, settle.__name__), JOBS, MessageLease("nonsense", first.lease_id, 1))
    with pytest.raises(QueueMessageLeaseMismatch):
        database.transact(getattr(queues, settle.__name__), DEAD, proof(first))
    assert everything(database) == before


def test_a_nacked_message_is_delivered_again_after_its_delay(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    nack(database, second, error="boom", delay_seconds=0)
    nack(database, first, delay_seconds=0.5, error="bang")
    (again,) = lease(database, 2)
    assert (again.payload, again.failures, again.last_error) == (b"b", 1, "boom")
    clock.advance_ms(499)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"a"]
    assert stats(database).failed_total == 2


def test_a_deferred_message_counts_no_failure(database: Database) -> None:
    put(database, b"a", max_attempts=1)
    for attempt in range(1, 6):
        message = lease_one(database)
        assert (message.attempts, message.failures, message.fence) == (attempt, 0, attempt)
        nack(database, message, counts=False, error="is not kept")
    assert (peek(database)[0].last_error, stats(database).failed_total) == (None, 0)


def test_a_long_error_is_truncated_and_invalid_text_is_replaced(database: Database) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    nack(database, first, error="ü" * 5_000, delay_seconds=0)
    nack(database, second, error="odd \ud800", delay_seconds=0)
    assert [message.last_error for message in peek(database)] == ["ü" * 2_048, "odd ?"]


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_stays_with_its_message_in_every_state(database: Database, clock: ManualClock, size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    put(database, payload, max_attempts=3)
    assert payloads(peek(database)) == [payload]
    message = lease_one(database)
    assert (message.payload, message.size) == (payload, size)
    extend(database, message, 60_000)
    nack(database, message, delay_seconds=0)
    message = lease_one(database)
    assert message.payload == payload
    clock.advance_ms(30_000)
    message = lease_one(database)
    assert message.payload == payload
    nack(database, message, error="boom", delay_seconds=0)
    assert payloads(peek(database, DEAD)) == [payload]
    letter = lease_one(database, queue=DEAD)
    assert letter.payload == payload
    nack(database, letter, DEAD, delay_seconds=0)
    assert database.transact(queues.redrive, JOBS) == 1
    message = lease_one(database)
    assert (message.payload, message.size) == (payload, size)
    ack(database, message)
    assert remaining_keys(database) == []


@pytest.mark.parametrize("size", [1, 1_025])
@pytest.mark.parametrize(
    "options",
    [{}, {"ttl_seconds": 60}, {"delay_seconds": 5}, {"group": "g"}, {"group": "g", "ttl_seconds": 60}],
    ids=str,
)
def test_a_removed_message_leaves_no_keys(
    database: Database, clock: ManualClock, size: int, options: dict[str, Any]
) -> None:
    """Only counters and the ack record stay: no payload, due entry, group, state or lease on the state."""
    put(database, b"x" * size, b"y" * size, **options)
    clock.advance_ms(5_000)
    for _ in range(2):
        message = lease_one(database, with_state=True)
        extend(database, message, 40_000)
        ack(database, message)
    assert remaining_keys(database) == []
    put(database, b"x" * size, b"y" * size, **options)
    clock.advance_ms(5_000)
    for _ in range(2):
        reject(database, lease_one(database, with_state=True))
    assert purge(database, DEAD) == 2
    assert remaining_keys(database) == []


def test_the_visibility_of_a_put_is_the_default_of_its_deliveries(database: Database) -> None:
    """A delivery uses its own timeout, then the message's, then the policy's."""
    set_policy(database, visibility_seconds=7)
    put(database, b"of the policy")
    put(database, b"of its own", b"of the delivery", visibility_seconds=3)
    assert [message.due_ms for message in lease(database, 2)] == [START_MS + 7_000, START_MS + 3_000]
    assert lease_one(database, visibility_ms=1_000).due_ms == START_MS + 1_000


def test_a_lease_cannot_be_extended_by_zero(database: Database, clock: ManualClock) -> None:
    """Extending by zero would expire the lease while the message stays invisible."""
    put(database, b"a")
    message = lease_one(database)
    before = everything(database)
    for seconds in (0.0, -1.0):
        with pytest.raises(InvalidArgument, match="nack it"):
            database.transact(execute, ExtendMessages("jobs", [proof(message)], seconds))
    assert everything(database) == before
    clock.advance_ms(30_000)
    assert lease_one(database).fence == 2


def test_a_repeated_ack_succeeds_and_one_of_an_older_lease_does_not(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    first = lease_one(database)
    clock.advance_ms(30_000)
    second = lease_one(database)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, first)
    ack(database, second)
    assert (ack(database, second), ack(database, second)) == (second.correlation_id, second.correlation_id)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, first)
    for settle in (nack, reject):
        with pytest.raises(QueueMessageLeaseMismatch):
            settle(database, second)
    assert stats(database).acked_total == 1


def test_a_repeated_ack_has_the_correlation_id(database: Database) -> None:
    put(database, b"a", correlation_id="because of 7")
    message = lease_one(database)
    assert [ack(database, message) for _ in range(3)] == ["because of 7"] * 3


# Leased messages.


def test_leased_messages_are_listed_with_owner_attempt_and_expiry(database: Database, clock: ManualClock) -> None:
    assert leased(database) == LeasedMessages([], None)
    put(database, b"a", b"b", correlation_id="why")
    put(database, b"later", delay_seconds=60)
    nack(database, lease_one(database), delay_seconds=0)
    clock.advance_ms(7)
    lease(database, 2, owner="bob", visibility_ms=5_000, txn_id="t-1")
    first, second = leased(database).messages
    assert msgspec.structs.replace(first, id="", lease_id="") == LeasedMessage(
        id="",
        owner="bob",
        attempts=2,
        failure_attempts=1,
        max_attempts=5,
        expires_ms=START_MS + 5_007,
        created_ms=START_MS,
        lease_id="",
        fence=2,
        priority=5,
        group=None,
        correlation_id="why",
        txn_id="t-1",
    )
    assert (second.attempts, second.failure_attempts, second.fence) == (1, 0, 1)
    assert database.transact(queues.ack, JOBS, MessageLease(first.id, first.lease_id, first.fence)) == "why"
    clock.advance_ms(5_000)
    assert [each.id for each in leased(database).messages] == [second.id], "until its expiry is processed"
    process_due(database)
    assert leased(database).messages == []


def test_leased_messages_are_listed_in_pages(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page reads a bounded number of due entries, most of which may be delays."""
    monkeypatch.setattr("fastness.layers.queues.admin.LEASED_SCAN_MAX", 4)
    monkeypatch.setattr("fastness.layers.queues.admin.DUE_BATCH_MAX", 2)
    for number in range(12):
        put(database, b"x", delay_seconds=0 if number % 5 == 0 else 10 if number < 6 else 60)
    held = [queues.format_id(message.id) for message in (*lease(database, 2), *lease(database, 12))]
    for limit in (1, 2, 12):
        found, pages = list[str](), 0
        after: str | None = ""
        while after is not None:
            page = leased(database, after=after, limit=limit)
            found += [each.id for each in page.messages]
            after, pages = page.next, pages + 1
        assert (found, pages <= 6) == (held, True)
    with pytest.raises(InvalidArgument):
        leased(database, after="nonsense")


# Deletion.


def delete(database: Database, queue: QueueKey = JOBS, *, force: bool = False, steps: int = 1_000) -> int:
    """Delete a queue, or stop after some steps."""
    work, do = queues.Work(), partial(queues.delete_step, force=force)
    while not work.is_done and steps:
        work = database.transact(queues.step, queue, do, work, None)
        steps -= 1
    return work.count


def populate(database: Database) -> None:
    """A queue with messages in every state, a policy and a schedule."""
    set_policy(database, max_attempts=3)
    for _ in range(2):
        put(database, *[b"x"] * 150)
    put(database, bytes(2_000), bytes(2_000), group="g", ttl_seconds=600)
    put(database, b"delayed", delay_seconds=60)
    put(database, b"keyed", idempotency_key="k")
    ack(database, lease_one(database))
    database.transact(
        queues.set_schedule, JOBS, "nightly", cron="0 3 * * *", timezone="UTC", message=NewMessage(payload=b"x")
    )


def test_a_deleted_queue_leaves_nothing_but_its_dead_letters(database: Database) -> None:
    put(database, b"other", queue=OTHER)
    before = everything(database)
    populate(database)
    reject(database, lease_one(database))
    assert delete(database) == 302
    assert [key for key, _ in everything(database) if key.startswith(queues.keys_of(JOBS).prefix)] == []
    assert (counts(database), stats(database).put_total) == ({"dead": 1}, 0)
    assert delete(database) == 0, "deleting it again is fine"
    assert delete(database, DEAD) == 1
    assert everything(database) == before
    assert database.transact(queues.policy_of, JOBS) == QueuePolicy()
    assert put(database, b"new", idempotency_key="k")[0].duplicate is False
    assert payloads(lease(database, 2)) == [b"new"]


def test_a_queue_with_leased_messages_is_deleted_only_by_force(database: Database) -> None:
    populate(database)
    held = lease(database, 2, with_state=True)
    before = everything(database)
    with pytest.raises(QueueInUse, match="Queue jobs has 2 leased messages"):
        delete(database)
    assert everything(database) == before
    assert delete(database, force=True) == 303
    assert everything(database) == []
    for message in held:
        with pytest.raises(QueueMessageLeaseMismatch):
            ack(database, message)


@pytest.mark.parametrize("steps", range(6))
def test_an_interrupted_deletion_leaves_a_valid_queue_and_can_be_repeated(database: Database, steps: int) -> None:
    populate(database)
    first = lease_one(database)
    removed = delete(database, force=True, steps=steps)
    assert sum(counts(database).values()) == 303 - removed
    if steps == 1:
        nack(database, first, delay_seconds=0)
        assert lease_one(database).id == first.id
    put(database, b"meanwhile")
    assert removed + delete(database, force=True) == 304
    assert everything(database) == []


@pytest.mark.parametrize("backend", ["rocksdb"], indirect=True)
def test_no_message_is_hidden_by_dead_letters_that_return_to_a_deleted_queue(
    open_database: Callable[..., Database], clock: ManualClock
) -> None:
    """The newest id is forgotten with the queue. If the clock was set back, a new id could be between the others."""
    with open_database(clock=clock) as database:
        for name in (b"first", b"last"):
            put(database, name)
            reject(database, lease_one(database))
            clock.advance_ms(2_000)
        delete(database)
    clock.jump_to_ms(clock.now_ms() - 3_000)
    with open_database(clock=clock) as database:
        database.transact(queues.redrive, JOBS)
        prefetched = Prefetched()
        assert payloads(lease(database, prefetched=prefetched)) == [b"first"]
        put(database, b"new")
        assert [lease_one(database, prefetched=prefetched).payload for _ in range(2)] == [b"last", b"new"]


def test_an_empty_lease_returns_when_something_will_be_due(database: Database, clock: ManualClock) -> None:
    """A consumer waits for the due time of a delayed message instead of polling."""
    assert lease_or_wait(database).retry_in_ms == queues.NEVER_MS - START_MS
    put(database, b"a", delay_seconds=5)
    put(database, b"b", delay_seconds=3)
    assert (lease_or_wait(database).retry_in_ms, database.read(queues.next_due, JOBS)) == (3_000, START_MS + 3_000)
    clock.advance_ms(3_000)
    found = lease_or_wait(database, visibility_ms=1_000)
    assert (payloads(found.messages), found.retry_in_ms) == ([b"b"], 1_000)
    clock.advance_ms(1_000)
    found = lease_or_wait(database)
    assert (payloads(found.messages), found.retry_in_ms) == ([b"b"], 1_000)
    ack(database, found.messages[0])
    clock.advance_ms(1_000)
    assert payloads(lease_or_wait(database).messages) == [b"a"]


def test_stats_count_messages_by_state(database: Database, clock: ManualClock) -> None:
    (first,) = put(database, b"a")
    clock.advance_ms(1_500)
    put(database, b"b", b"c", b"d")
    put(database, b"e", delay_seconds=60)
    put(database, b"f", b"g", group="g")
    found = stats(database)
    assert (found.queue, found.head_message_id, found.head_age_seconds) == ("jobs", first.id, 1.5)
    assert (found.ready, found.delayed, found.blocked, found.put_total) == (5, 1, 1, 7)
    acked, returned, rejected, _ = lease(database, 4)
    ack(database, acked)
    nack(database, returned, delay_seconds=0)
    reject(database, rejected)
    assert counts(database) == {"ready": 2, "delayed": 1, "leased": 1, "blocked": 1, "dead": 1}
    clock.advance_ms(30_000)
    process_due(database)
    found = stats(database)
    assert (found.delivered_total, found.acked_total, found.failed_total) == (4, 1, 2)
    assert (found.expired_total, found.dead_total, found.paused) == (1, 1, False)
    assert stats(database, QueueKey("main", "nothing")).head_message_id is None
    assert database.read(queues.names, "main", after="", limit=10) == ["jobs", "jobs.dlq"]
    assert database.read(queues.names, "main", after="jobs", limit=10) == ["jobs.dlq"]


def test_a_paused_queue_accepts_messages_and_delivers_none(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    lease_one(database)
    set_policy(database, paused=True)
    put(database, b"b")
    clock.advance_ms(30_000)
    assert lease(database, 10) == []
    assert (counts(database), stats(database).paused) == ({"ready": 2}, True)
    set_policy(database)
    assert payloads(lease(database, 10)) == [b"a", b"b"]


def test_a_purge_removes_all_messages_that_are_not_leased(database: Database) -> None:
    put(database, b"held", ttl_seconds=60)
    held = lease_one(database)
    for _ in range(2):
        put(database, *[b"x" * 2_000] * 150, ttl_seconds=60)
    put(database, b"later", b"later", delay_seconds=60)
    assert purge(database) == 302
    assert counts(database) == {"leased": 1}
    assert purge(database) == 0
    ack(database, held)
    assert remaining_keys(database) == []


def test_a_purge_removes_blocked_messages(database: Database) -> None:
    """Whether the head of the group is ready, delayed or leased; a leased head stays."""
    put(database, b"leased", b"behind", b"behind", group="a")
    held = lease_one(database)
    put(database, b"delayed", group="b", delay_seconds=5)
    put(database, b"behind", group="b")
    put(database, b"behind", group="b", delay_seconds=60)
    put(database, b"ready", b"behind", group="c")
    assert purge(database) == 7
    assert counts(database) == {"leased": 1}
    ack(database, held)
    assert lease(database) == []
    assert remaining_keys(database) == []


def test_a_message_put_after_the_clock_was_set_back_is_delivered(
    open_database: Callable[..., Database], clock: ManualClock, backend: str
) -> None:
    """Ids contain the time. A new process continues after the newest stored id, because a lower id would sort below the
    front and stay hidden."""
    if backend == "memory":
        pytest.skip("a plane in memory keeps nothing for a second process")
    with open_database(clock=clock) as database:
        put(database, b"before", b"waits")
        ack(database, lease_one(database))
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    with open_database(clock=clock) as database:
        put(database, b"after", b"and after")
        assert stats(database).ready == 3
        expected = {b"waits", b"after", b"and after"}
        assert set(payloads(peek(database))) == expected
        found = lease(database, 10)
        assert set(payloads(found)) == expected
        if backend == "rocksdb":
            assert payloads(found) == [b"waits", b"after", b"and after"]


def test_a_lease_call_over_the_rate_limit_writes_nothing(database: Database) -> None:
    """A write would wake the waiting consumer itself, which would poll in a loop."""
    set_policy(database, rate_per_second=0.1)
    put(database, b"a", b"b")
    assert payloads(lease_or_wait(database).messages) == [b"a"]

    def lease_again(tx: Transaction) -> bool:
        assert not queues.lease_or_wait(tx, JOBS, owner="ada").messages
        return tx.has_writes

    assert not database.transact(lease_again)


def test_the_rate_limits_deliveries(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_second=2)
    put(database, *[b""] * 20)
    found = lease_or_wait(database, limit=10)
    assert (len(found.messages), found.retry_in_ms) == (2, 500)
    assert lease_or_wait(database).messages == []
    clock.advance_ms(499)
    assert lease_or_wait(database).messages == []
    clock.advance_ms(1)
    assert len(lease_or_wait(database, limit=10).messages) == 1
    clock.advance_ms(1_500)
    assert len(lease_or_wait(database, limit=10).messages) == 2
    clock.advance_ms(10_000)
    assert len(lease_or_wait(database, limit=10).messages) == 2
    set_policy(database)
    assert len(lease_or_wait(database, limit=256).messages) == 13


def test_an_empty_queue_with_a_rate_is_not_polled(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_second=2)
    assert lease_or_wait(database).retry_in_ms == queues.NEVER_MS - clock.now_ms()


def test_a_rate_below_one_per_second_delivers_single_messages(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_second=0.1)
    put(database, *[b""] * 3)
    assert len(lease_or_wait(database, limit=10).messages) == 1
    found = lease_or_wait(database)
    assert (found.messages, found.retry_in_ms) == ([], 10_000)
    clock.advance_ms(9_999)
    assert lease_or_wait(database).messages == []
    clock.advance_ms(1)
    assert len(lease_or_wait(database, limit=10).messages) == 1


def test_leases_and_delays_from_a_clock_that_was_ahead_end_in_time(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the correction, each lasts as long as it was granted for, not until the clock has caught up."""
    monkeypatch.setattr(expiry, "DUE_BATCH_MAX", 3)  # Several transactions shorten them.
    now_ms = clock.now_ms()
    clock.advance_ms(7_200_000)
    put(database, *[b"leased"] * 4)
    put(database, *[b"delayed"] * 4, delay_seconds=40)
    first, *others = lease(database, 4, visibility_ms=30_000)
    extend(database, first, 50_000)
    clock.jump_to_ms(now_ms)
    answers = [lease_or_wait(database) for _ in range(4)]
    assert [found.messages for found in answers] == [[]] * 4
    monkeypatch.undo()
    assert answers[-1].retry_in_ms == 30_000
    assert {each.expires_ms - now_ms for each in leased(database).messages} == {30_000, 50_000}
    assert counts(database) == {"leased": 4, "delayed": 4}
    extend(database, others[0], 35_000)  # Its holder keeps it, and can extend it.
    clock.advance_ms(29_999)
    assert lease(database, 10) == []
    clock.advance_ms(1)
    assert [message.id for message in lease(database, 10)] == [message.id for message in others[1:]]
    clock.advance_ms(10_000)
    assert Counter(payloads(lease(database, 10))) == {b"delayed": 4, b"leased": 1}
    clock.advance_ms(10_000)
    assert first.id in [message.id for message in lease(database, 10)]


@pytest.fixture
def nodes(postgres_url: str, clock: ManualClock) -> Iterator[tuple[Database, Database]]:
    with PostgresDatabase(postgres_url, clock=clock) as one, PostgresDatabase(postgres_url, clock=clock) as other:
        yield one, other


def test_the_counters_of_two_writers_are_summed(nodes: tuple[Database, Database], clock: ManualClock) -> None:
    one, other = nodes
    put(one, b"a", b"b", b"c", b"d")
    clock.advance_ms(1)  # Within one millisecond, ids of two processes are unordered.
    put(other, b"e", delay_seconds=60)
    put(other, b"f", b"g", group="g")
    found = lease(other, 4)
    assert payloads(found) == [b"a", b"b", b"c", b"d"]
    ack(one, found[0])
    nack(one, found[1], delay_seconds=0)
    reject(one, found[2])
    for node in nodes:
        assert counts(node) == {"ready": 2, "delayed": 1, "leased": 1, "blocked": 1, "dead": 1}
        assert payloads(peek(node)) == [b"b", b"f"]
        totals = stats(node)
        assert (totals.put_total, totals.delivered_total, totals.acked_total) == (7, 4, 1)
        assert (totals.failed_total, totals.dead_total) == (2, 1)
    clock.advance_ms(30_000)
    assert process_due(one) == process_due(other)
    assert other.transact(queues.redrive, JOBS) == 1
    for node in nodes:
        assert counts(node) == {"ready": 4, "delayed": 1, "blocked": 1}
        assert stats(node).expired_total == 1


def test_an_idempotency_key_applies_to_all_nodes(nodes: tuple[Database, Database]) -> None:
    one, other = nodes
    assert put(one, b"a", idempotency_key="k")[0].id == put(other, b"a", idempotency_key="k")[0].id
    assert len(lease(other, 10)) == 1


def with_keywords(message: StoredMessage, state: SidecarState | None, failures: list[Failure] | None) -> Delivery:
    is_leased = message.owner is not None
    return Delivery(
        id=queues.format_id(message.id),
        payload=message.payload,
        blob=message.blob,
        size=message.size,
        content_type=message.content_type,
        attributes=message.attributes,
        correlation_id=message.correlation_id,
        priority=message.priority,
        group=message.group,
        created_ms=message.created_ms,
        attempts=message.attempts,
        failure_attempts=message.failures,
        max_attempts=message.max_attempts,
        last_error=message.last_error,
        origin=message.origin,
        died_ms=message.died_ms,
        lease_id=message.lease_id if is_leased else "",
        fence=message.fence,
        expires_ms=message.due_ms if is_leased else 0,
        visibility_ms=message.visibility_ms,
        state=state,
        failures=failures or [],
    )


@given(st.builds(StoredMessage), st.none() | st.builds(SidecarState), st.none() | st.lists(st.builds(Failure)))
def test_a_delivery_by_position_is_the_same_with_keywords(
    message: StoredMessage, state: SidecarState | None, failures: list[Failure] | None
) -> None:
    message.id = bytes(16)
    fast = delivery_of(message, state, failures)
    assert fast == with_keywords(message, state, failures)
    assert msgspec.structs.asdict(fast)["fence"] == message.fence


# Packed deliveries and acks.


def unpacked(packed: list[PackedLease]) -> list[Delivery]:
    """The deliveries of packed leases that were sent to another process."""
    answer = msgspec.msgpack.decode(msgspec.msgpack.encode(Deliveries([], packed)), type=Deliveries)
    return [delivery_at(lease, position) for lease in answer.packed for position in lease.positions]


def packed_ack(lease: PackedLease, *positions: int) -> PackedAck:
    return PackedAck(
        lease.id, lease.fence, lease.fences, bits_of(sum(1 << position for position in positions or lease.positions))
    )


def ack_packed(database: Database, *acks: PackedAck) -> list[tuple[int, str]]:
    """The positions that were refused, with the codes."""
    return [(each.position, each.code) for each in database.transact(queues.ack_packed, JOBS, acks)]


def lease_packed(database: Database, limit: int, **options: Any) -> PackedLease:
    (packed,) = queues.packed_of(lease_or_wait(database, limit=limit, **options))
    return packed


MISMATCH = QueueMessageLeaseMismatch.code


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_messages_are_the_same_deliveries(database: Database, with_state: bool) -> None:
    for size in SIZES:
        put(database, b"x" * size, attributes={"size": str(size)}, correlation_id=f"of {size}", visibility_seconds=9)
    put(database, b"grouped", group="g", visibility_seconds=9)
    put(database, b"other", visibility_seconds=70)
    nack(database, lease_one(database), error="once", delay_seconds=0)
    found = lease_or_wait(database, limit=256, with_state=with_state)
    assert len(found.leases) == 2, "messages that are leased for different times have different leases"
    expected = queues.deliveries_of(found)
    packed = queues.packed_of(found)
    assert [each.attempts for each in expected] == [2, 1, 1, 1, 1, 1, 1]
    assert expected[0].failures
    assert (expected[0].state is not None) == with_state
    assert unpacked(packed) == expected
    for count in (1, 5, 6):
        assert unpacked(Deliveries([], packed).first(count).packed) == expected[:count]
        assert Deliveries(expected).leases()[:count] == Deliveries([], packed).first(count).leases()


def test_packed_acks_settle_messages_by_position(database: Database) -> None:
    put(database, *[b"x"] * 5)
    found = lease_packed(database, 5)
    assert ack_packed(database, packed_ack(found, 0, 2)) == []
    assert ack_packed(database, packed_ack(found, 0, 2)) == [], "acknowledging twice is fine"
    assert counts(database)["leased"] == 3
    assert stats(database).acked_total == 2
    assert ack_packed(database, packed_ack(found)) == []
    assert remaining_keys(database) == []
    assert ack_packed(database, packed_ack(found)) == [], "the acks of an ended lease are remembered"
    assert stats(database).acked_total == 5


def test_a_delivery_is_kept_with_the_acks_that_came_with_it(database: Database) -> None:
    """Also if they were made before: that ack may have been made at IMPORTANT, and is not synced yet."""
    put(database, b"x", b"y", b"z")
    ack = packed_ack(lease_packed(database, 1))

    def is_kept(tx: Transaction, acks: list[PackedAck]) -> bool:
        queues.lease_or_wait(tx, JOBS, owner="ada", acks=acks)
        return tx.is_kept

    assert [database.transact(is_kept, acks) for acks in ([], [ack], [ack])] == [False, True, True]


def test_a_packed_ack_finds_messages_that_were_extended_alone(database: Database, clock: ManualClock) -> None:
    put(database, *[b"x"] * 3)
    found = lease_packed(database, 3)
    database.transact(queues.extend, JOBS, found.lease_at(1), by_ms=90_000)
    clock.advance_ms(60_000)
    process_due(database)
    assert ack_packed(database, packed_ack(found)) == [(0, MISMATCH), (2, MISMATCH)]
    assert ack_packed(database, packed_ack(found, 1)) == [], "that ack is remembered"
    assert stats(database).acked_total == 1


def test_a_packed_ack_needs_the_lease_and_its_fences(database: Database) -> None:
    put(database, b"a", b"b")
    nack(database, lease_one(database), counts=False)
    found = lease_packed(database, 2)
    assert len(set(found.fences)) == 2
    others = (
        msgspec.structs.replace(packed_ack(found), fence=found.fence + 1),
        msgspec.structs.replace(packed_ack(found), fences=[]),
        msgspec.structs.replace(packed_ack(found), lease=bytes(16)),
        msgspec.structs.replace(packed_ack(found), lease=found.id + b"\x00"),
        msgspec.structs.replace(packed_ack(found), lease=b""),
    )
    for other in others:
        assert ack_packed(database, other) == [(0, MISMATCH), (1, MISMATCH)]
    assert ack_packed(database, packed_ack(found, 2, 255)) == [(2, MISMATCH), (255, MISMATCH)]
    with pytest.raises(InvalidArgument, match="at most 256 messages"):
        ack_packed(database, packed_ack(found, 256))
    assert counts(database)["leased"] == 2
    assert ack_packed(database, packed_ack(found)) == []
    assert database.transact(queues.ack_packed, JOBS, others[1:2]) == [
        RefusedAck(found.id, 0, MISMATCH),
        RefusedAck(found.id, 1, MISMATCH),
    ]


def test_packed_acks_release_groups_and_remove_what_is_stored_apart(database: Database) -> None:
    put(database, b"first", b"second", group="g")
    put(database, b"x" * 16_384, correlation_id="large")
    found = lease_packed(database, 5, with_state=True)
    assert ack_packed(database, packed_ack(found)) == []
    assert payloads(lease(database, 5)) == [b"second"]


# Settling and receiving in one call.


def call_named(name: bytes) -> KeyedCall:
    return KeyedCall(name, b"same", lambda: False)


def lease_keyed(database: Database, call: KeyedCall, *acks: PackedAck) -> Any:
    return database.transact(queues.lease_keyed, JOBS, call=call, owner="ada", limit=9, acks=acks)


def test_acks_are_committed_with_the_next_lease(database: Database, clock: ManualClock) -> None:
    put(database, b"lost", visibility_seconds=1, max_attempts=1)
    put(database, b"done", group="g")
    put(database, b"next", group="g")
    first = [each.packed() for each in lease_or_wait(database, limit=9).leases]
    clock.advance_ms(2_000)
    process_due(database)
    following = lease_or_wait(database, limit=9, acks=[packed_ack(each) for each in first])
    assert payloads(following.messages) == [b"next"], "the ack has released the next message of the group"
    assert following.refused == [RefusedAck(first[0].id, 0, MISMATCH)]
    assert stats(database).acked_total == 1
    assert lease_or_wait(database, acks=[packed_ack(following.leases[0].packed())]).leases == []
    assert stats(database).acked_total == 2, "acks are committed also if there is nothing to lease"


def test_a_repeated_call_acknowledges_once_and_keeps_its_answer(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b")
    put(database, b"lost", visibility_seconds=1, max_attempts=1)
    found, lost = [each.packed() for each in lease_or_wait(database, limit=3).leases]
    clock.advance_ms(2_000)
    process_due(database)
    acks, call = (packed_ack(found), packed_ack(lost)), call_named(b"call")
    refused = [RefusedAck(lost.id, 0, MISMATCH)]
    empty = lease_keyed(database, call, *acks)
    assert (empty.leases, empty.refused) == ([], refused)
    # Longer than a repeated ack is recognised by itself. The client still repeats the call.
    clock.advance_ms(400_000)
    put(database, b"c")
    for _ in range(2):
        again = lease_keyed(database, call, *acks)
        assert (payloads(again.messages), again.refused) == ([b"c"], refused)
    assert stats(database).acked_total == 2
    stored = database.transact(queues.stored_lease, JOBS, call=call, with_state=False)
    assert stored is not None
    assert stored.refused == refused


def test_a_call_that_waits_acknowledges_once(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b")
    acks, call = [packed_ack(lease_packed(database, 2))], call_named(b"call")
    for _ in range(2):
        refused = database.transact(queues.ack_keyed, JOBS, call=call, acks=acks)
        assert refused == []
        assert database.transact(queues.stored_lease, JOBS, call=call, with_state=False) is None
        clock.advance_ms(400_000)
    put(database, b"c")
    leased_now = lease_keyed(database, call, *acks)
    assert (payloads(leased_now.messages), leased_now.refused) == ([b"c"], [])
    assert stats(database).acked_total == 2


def test_the_acks_of_a_call_stay_when_its_messages_are_released(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b")
    acks, call = [packed_ack(lease_packed(database, 1))], call_named(b"call")
    undelivered = database.transact(
        queues.lease_keyed, JOBS, call=KeyedCall(b"call", b"same", lambda: True), owner="ada", limit=9, acks=acks
    )
    database.transact(queues.release_undelivered, JOBS, undelivered.proofs(), call)
    assert counts(database)["ready"] == 1
    clock.advance_ms(400_000)
    again = lease_keyed(database, call, *acks)
    assert (payloads(again.messages), again.refused) == ([b"b"], [])
    assert stats(database).acked_total == 1
