"""Queues, as functions over a transaction, on every backend."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import cbor2
import pytest

from holdfast.backends.postgres import PostgresDatabase
from holdfast.errors import (
    BatchTooLarge,
    Busy,
    EmptyBatch,
    HoldfastError,
    InvalidArgument,
    InvalidName,
    LeaseConflict,
    LeaseExpired,
    LeaseRequired,
    PayloadTooLarge,
    QueueMessageLeaseMismatch,
)
from holdfast.kv import Database, Transaction
from holdfast.layers import leases, queues, states
from holdfast.layers.leases import LeaseKey
from holdfast.layers.queues import Ahead, Leased, QueueKey, StoredMessage, enqueue
from holdfast.testing.clock import START_MS, ManualClock
from holdfast.testing.faults import ChosenFault, Crash, FaultyDatabase
from holdfast.tiers import Tier
from holdfast.wire.queues import MessageLease, NewMessage, QueuePolicy, QueueStats, Receipt

JOBS = QueueKey("main", "jobs")
DEAD = QueueKey("main", "jobs.dlq")
SIZES = [0, 1, 1_024, 1_025, 16_384]  # Up to 1,024 bytes travel with their message; more are stored beside it.


def put(database: Database, *payloads: bytes, queue: QueueKey = JOBS, **options: Any) -> list[Receipt]:
    return database.transact(queues.put, queue, [NewMessage(payload=payload, **options) for payload in payloads])


def lease(database: Database, limit: int = 1, *, queue: QueueKey = JOBS, **options: Any) -> list[StoredMessage]:
    return database.transact(queues.lease, queue, **{"owner": "ada", "limit": limit, **options})


def lease_one(database: Database, **options: Any) -> StoredMessage:
    (message,) = lease(database, **options)
    return message


def look(database: Database, **options: Any) -> Leased:
    return database.transact(queues.lease_or_wait, JOBS, **{"owner": "ada", **options})


def payloads(messages: list[StoredMessage]) -> list[bytes | None]:
    return [message.payload for message in messages]


def proof(message: StoredMessage) -> MessageLease:
    return MessageLease(queues.text_of(message.id), message.lease_id, message.fence)


def ack(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> str | None:
    return database.transact(queues.ack, queue, proof(message))


def nack(database: Database, message: StoredMessage, queue: QueueKey = JOBS, **options: Any) -> str:
    return database.transact(queues.nack, queue, proof(message), **options)


def reject(database: Database, message: StoredMessage, error: str | None = None) -> str:
    return database.transact(queues.reject, JOBS, proof(message), error=error)


def extend(database: Database, message: StoredMessage, by_ms: int) -> StoredMessage:
    return database.transact(queues.extend, JOBS, proof(message), by_ms=by_ms)


def process_due(database: Database, queue: QueueKey = JOBS) -> int:
    return database.transact(queues.process_due_of, queue)


def set_policy(database: Database, queue: QueueKey = JOBS, **options: Any) -> QueuePolicy:
    return database.transact(queues.set_policy, queue, QueuePolicy(**options))


def stats(database: Database, queue: QueueKey = JOBS) -> QueueStats:
    return database.read(queues.stats, queue)


def peek(database: Database, queue: QueueKey = JOBS, limit: int = 100) -> list[StoredMessage]:
    return database.read(queues.peek, queue, limit=limit)


def counts(database: Database, queue: QueueKey = JOBS) -> dict[str, int]:
    """How many messages are where, of those places that have any."""
    found = stats(database, queue)
    places = ("ready", "delayed", "leased", "blocked", "dead")
    return {place: getattr(found, place) for place in places if getattr(found, place)}


def purge(database: Database, queue: QueueKey = JOBS) -> int:
    removed, after = 0, b""
    while True:
        count, following = database.transact(queues.purge, queue, after=after, limit=256)
        removed += count
        if following is None:
            return removed
        after = following


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def left(database: Database) -> list[bytes]:
    """The keys of the whole key space but those that a queue keeps for ever or for a while: tally, policy, acks."""
    kept = tuple(
        prefix
        for room in map(queues.keys_of, (JOBS, DEAD))
        for prefix in (room.all_counters.prefix, room.policy, room.acks.prefix)
    )
    return [key for key, _ in everything(database) if not key.startswith(kept)]


# Putting.


def test_a_receipt_names_the_message_and_the_promise(database: Database) -> None:
    (receipt,) = put(database, b"a", correlation_id="because")
    assert (receipt.durability, receipt.duplicate, receipt.correlation_id) == (Tier.CRITICAL, False, "because")
    (message,) = lease(database)
    assert (queues.text_of(message.id), message.payload, message.correlation_id) == (receipt.id, b"a", "because")
    (receipt,) = database.transact(lambda tx: queues.put(tx, JOBS, [NewMessage()], tier=Tier.IMPORTANT))
    assert receipt.durability is Tier.IMPORTANT


def test_a_message_that_nobody_gave_a_correlation_id_is_its_own(database: Database) -> None:
    (receipt,) = put(database, b"a")
    assert receipt.correlation_id == receipt.id
    assert lease_one(database).correlation_id == receipt.id


def test_a_message_comes_as_it_was_put(database: Database, clock: ManualClock) -> None:
    put(database, b"a", content_type="text/plain", attributes={"kind": "ü"}, priority=7, group="Orders", max_attempts=3)
    message = lease_one(database, txn_id="t-1")
    assert (message.content_type, message.attributes) == ("text/plain", {"kind": "ü"})
    assert (message.priority, message.group, message.max_attempts) == (7, "orders", 3)
    assert (message.created_ms, message.size, message.blob) == (clock.now_ms(), 1, None)
    assert (message.attempts, message.failures, message.fence) == (1, 0, 1)
    assert (message.owner, message.txn_id, message.last_error, message.origin) == ("ada", "t-1", None, None)


def test_the_most_urgent_comes_first_then_the_oldest(database: Database) -> None:
    for name, priority in (("e", 0), ("c", 5), ("a", 9), ("d", 5), ("b", 9)):
        put(database, name.encode(), priority=priority)
    assert payloads(peek(database)) == [b"a", b"b", b"c", b"d", b"e"]
    assert payloads(lease(database, 2) + lease(database, 10)) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_more_urgent_message_overtakes_what_was_read_ahead(database: Database) -> None:
    ahead = Ahead()
    put(database, b"b", b"c", b"e")
    put(database, b"d", priority=4)
    found = lease(database, ahead=ahead)
    put(database, b"a", priority=6)
    nack(database, found[0])
    found = [message for _ in range(6) for message in lease(database, ahead=ahead)]
    assert payloads(found) == [b"a", b"b", b"c", b"e", b"d"]


def test_a_message_that_becomes_ready_among_those_read_ahead_is_not_passed_over(
    database: Database, clock: ManualClock
) -> None:
    """It sorts behind the front, and before what is read ahead: passed over, it would be hidden for ever."""
    ahead = Ahead()
    put(database, b"a")
    put(database, b"b", delay_seconds=5)
    put(database, b"c", b"d")
    found = lease(database, ahead=ahead)
    clock.advance_ms(5_000)
    found += [message for _ in range(4) for message in lease(database, ahead=ahead)]
    assert payloads(found) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("how", ["lease", "purge", "outlive"])
def test_what_was_read_ahead_and_taken_by_another_way_does_not_come(
    database: Database, clock: ManualClock, how: str
) -> None:
    ahead = Ahead()
    put(database, b"a")
    put(database, b"b", ttl_seconds=5)
    put(database, b"c")
    lease(database, ahead=ahead)
    if how == "lease":
        assert payloads(lease(database)) == [b"b"]
    elif how == "purge":
        assert purge(database) == 2
    else:
        clock.advance_ms(5_000)
    put(database, b"d")
    found = [message for _ in range(4) for message in lease(database, ahead=ahead, visibility_ms=60_000)]
    assert payloads(found) == ([b"d"] if how == "purge" else [b"c", b"d"])


def test_a_delivery_that_was_not_committed_leaves_what_was_read_ahead_usable(database: Database) -> None:
    ahead = Ahead()
    put(database, *(bytes((number,)) for number in range(6)))

    def lease_and_fail(tx: Transaction) -> None:
        queues.lease(tx, JOBS, owner="ada", ahead=ahead)
        raise LookupError("on purpose")

    found = lease(database, ahead=ahead)
    for _ in range(2):
        with pytest.raises(LookupError):
            database.transact(lease_and_fail)
        found += lease(database, ahead=ahead)
    found += lease(database, 10, ahead=ahead)
    assert payloads(found) == [bytes((number,)) for number in range(6)]


def test_more_messages_than_one_look_reads_ahead_come_in_order(database: Database) -> None:
    ahead = Ahead()
    expected = [bytes((number,)) for number in range(150)]
    put(database, *expected)
    found: list[StoredMessage] = []
    while batch := lease(database, 7, ahead=ahead):
        found += batch
    assert payloads(found) == expected


def test_a_delayed_message_comes_when_its_delay_is_over(database: Database, clock: ManualClock) -> None:
    put(database, b"later", delay_seconds=5)
    put(database, b"now")
    assert counts(database) == {"ready": 1, "delayed": 1}
    assert payloads(lease(database, 2)) == [b"now"]
    clock.advance_ms(4_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"later"]


def test_a_message_whose_time_to_live_is_over_is_gone(database: Database, clock: ManualClock) -> None:
    put(database, b"ready", ttl_seconds=5)
    put(database, b"delayed", ttl_seconds=5, delay_seconds=60)
    put(database, b"first", b"second", ttl_seconds=5, group="g")
    clock.advance_ms(4_999)
    process_due(database)
    assert counts(database) == {"ready": 2, "delayed": 1, "blocked": 1}
    clock.advance_ms(1)
    assert lease(database, 10) == []
    assert counts(database) == {}
    assert left(database) == []


def test_a_message_that_outlives_its_wait_behind_a_group_is_gone(database: Database, clock: ManualClock) -> None:
    put(database, b"first", b"third", group="g", visibility_seconds=60)
    put(database, b"second", group="g", ttl_seconds=5)
    first = lease_one(database)
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {"leased": 1, "blocked": 1}
    ack(database, first)
    ack(database, lease_one(database))
    assert (counts(database), left(database)) == ({}, [])


def test_a_message_is_not_delivered_after_its_time_although_nobody_has_noticed(
    database: Database, clock: ManualClock
) -> None:
    """One look attends to a bounded number of moments, and there may be more."""
    for ttl in (1, 2):
        put(database, *[b""] * 64, ttl_seconds=ttl)
    put(database, b"stays")
    clock.advance_ms(2_000)
    assert payloads(lease(database, 256)) == [b"stays"]


def test_whoever_leases_a_message_may_finish_it_after_its_time_to_live(database: Database, clock: ManualClock) -> None:
    put(database, b"acked", b"given back", b"expires", ttl_seconds=5)
    acked, given_back, _ = lease(database, 3, visibility_ms=10_000)
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {"leased": 3}
    ack(database, acked)
    nack(database, given_back)
    assert counts(database) == {"leased": 1}
    clock.advance_ms(5_000)
    process_due(database)
    assert counts(database) == {}
    assert left(database) == []


def test_a_message_without_a_time_to_live_has_that_of_the_policy(database: Database, clock: ManualClock) -> None:
    set_policy(database, retention_seconds=5)
    put(database, b"of the policy")
    put(database, b"of its own", ttl_seconds=10)
    clock.advance_ms(5_000)
    process_due(database)
    assert payloads(peek(database)) == [b"of its own"]


def test_many_moments_at_once_are_attended_to_a_bounded_number_at_a_time(
    database: Database, clock: ManualClock
) -> None:
    put(database, *(bytes((number,)) for number in range(150)), delay_seconds=1)
    clock.advance_ms(1_000)
    ready = []
    while process_due(database) <= clock.now_ms():
        ready.append(stats(database).ready)
    assert ready == [64, 128]
    assert counts(database) == {"ready": 150}


# Idempotency keys.


def test_a_key_that_was_used_puts_nothing_for_five_minutes(database: Database, clock: ManualClock) -> None:
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


def test_a_batch_that_uses_a_key_twice_puts_one_message(database: Database) -> None:
    first, second = put(database, b"a", b"b", idempotency_key="k")
    assert (first.duplicate, second.duplicate, first.id) == (False, True, second.id)
    assert payloads(lease(database, 10)) == [b"a"]


def test_keys_are_forgotten_in_time(database: Database, clock: ManualClock) -> None:
    for number in range(12):
        put(database, b"", idempotency_key=f"k-{number}")
        clock.advance_ms(61_000)
    purge(database)
    ids = queues.keys_of(JOBS).ids.prefix
    assert 5 <= len([key for key in left(database) if key.startswith(ids)]) <= 11


# Groups.


def test_messages_of_a_group_come_one_at_a_time_in_order(database: Database) -> None:
    put(database, b"a1", b"a2", b"a3", group="a")
    put(database, b"b1", b"b2", group="b")
    put(database, b"none")
    assert counts(database) == {"ready": 3, "blocked": 3}
    found = lease(database, 10)
    assert payloads(found) == [b"a1", b"b1", b"none"]
    assert lease(database, 10) == []
    ack(database, found[0])
    second = lease_one(database)
    nack(database, second)
    assert payloads(lease(database, 10)) == [b"a2"]


def test_an_urgent_message_does_not_overtake_its_group(database: Database) -> None:
    put(database, b"first", group="g", priority=0)
    put(database, b"second", group="g", priority=9)
    first = lease_one(database)
    ack(database, first)
    assert payloads([first, *lease(database)]) == [b"first", b"second"]


def test_a_group_waits_for_the_delay_of_its_first(database: Database, clock: ManualClock) -> None:
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


@pytest.mark.parametrize("leave", ["ack", "reject", "nack", "expire", "outlive"])
def test_a_group_goes_on_however_its_first_leaves(database: Database, clock: ManualClock, leave: str) -> None:
    put(database, b"first", group="g", max_attempts=1, ttl_seconds=1 if leave == "outlive" else None)
    put(database, b"second", group="g")
    if leave != "outlive":
        first = lease_one(database, visibility_ms=1_000)
        if leave != "expire":
            {"ack": ack, "reject": reject, "nack": nack}[leave](database, first)
    clock.advance_ms(1_000)
    assert payloads(lease(database, 10)) == [b"second"]


def test_a_dead_letter_is_put_back_before_those_of_its_group_that_wait(database: Database) -> None:
    put(database, b"first", b"second", b"third", group="g")
    reject(database, lease_one(database))
    second = lease_one(database)
    assert database.transact(queues.redrive, JOBS) == 1
    assert counts(database) == {"leased": 1, "blocked": 2}
    ack(database, second)
    found = []
    for _ in range(2):
        found += lease(database, 10)
        ack(database, found[-1])
    assert payloads(found) == [b"first", b"third"]
    assert left(database) == []


@pytest.mark.parametrize("by_ids", [False, True])
def test_dead_letters_of_a_group_are_put_back_in_their_order(database: Database, by_ids: bool) -> None:
    """Whatever their priorities, and in whatever order they are named."""
    ids = [
        put(database, name, group="g", priority=priority)[0].id for name, priority in ((b"first", 1), (b"second", 9))
    ]
    for _ in ids:
        reject(database, lease_one(database))
    assert database.transact(queues.redrive, JOBS, ids=ids[::-1] if by_ids else None) == 2
    assert payloads(lease(database, 2)) == [b"first"]


# Leases on messages.


def test_a_leased_message_is_hidden_until_its_lease_ends(database: Database, clock: ManualClock) -> None:
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


def test_whoever_comes_late_is_heard_until_somebody_has_noticed(database: Database, clock: ManualClock) -> None:
    put(database, b"acked", b"given back", b"extended", b"noticed")
    acked, given_back, extended, noticed = lease(database, 4)
    clock.advance_ms(60_000)
    ack(database, acked)
    nack(database, given_back, counts=False)
    assert extend(database, extended, 1_000).due_ms == clock.now_ms() + 1_000
    process_due(database)
    for settle in (ack, nack, reject):
        with pytest.raises(QueueMessageLeaseMismatch, match="whoever has it now will settle it"):
            settle(database, noticed)
    with pytest.raises(QueueMessageLeaseMismatch):
        extend(database, noticed, 1_000)
    assert counts(database) == {"ready": 2, "leased": 1}


def test_what_is_done_under_a_lease_is_refused_when_its_time_is_over(database: Database, clock: ManualClock) -> None:
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


def test_a_message_is_acknowledged_once_and_for_all(database: Database, clock: ManualClock) -> None:
    (receipt,) = put(database, b"a")
    message = lease_one(database)
    assert ack(database, message) == receipt.correlation_id
    clock.advance_ms(3_600_000)
    assert lease(database) == []
    assert (stats(database).acked_total, counts(database)) == (1, {})


def test_an_ack_is_remembered_for_five_minutes_and_not_for_ever(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    message = lease_one(database)
    clock.advance_ms(59_999 - clock.now_ms() % 60_000)  # The end of a minute is the hardest moment to remember.
    ack(database, message)
    for _ in range(5):
        clock.advance_ms(60_000)
        put(database, b"other")  # Which sweeps what is too old.
        assert ack(database, message) is None
    clock.advance_ms(60_000)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, message)
    assert stats(database).acked_total == 1
    clock.advance_ms(600_000)
    put(database, b"other")
    acks = queues.keys_of(JOBS).acks.prefix
    assert [key for key, _ in everything(database) if key.startswith(acks)] == []


@pytest.mark.parametrize("settle", [ack, nack, reject])
def test_what_is_no_proof_settles_nothing(database: Database, settle: Callable[..., Any]) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    before = everything(database)
    for wrong in (
        MessageLease(queues.text_of(first.id), second.lease_id, first.fence),
        MessageLease(queues.text_of(first.id), first.lease_id, first.fence + 1),
        MessageLease(queues.text_of(first.id), "", first.fence),
        MessageLease("00000000-0000-7000-8000-000000000000", first.lease_id, first.fence),
    ):
        with pytest.raises(QueueMessageLeaseMismatch):
            database.transact(getattr(queues, settle.__name__), JOBS, wrong)
    with pytest.raises(InvalidArgument, match="no id of a message"):
        database.transact(getattr(queues, settle.__name__), JOBS, MessageLease("nonsense", first.lease_id, 1))
    with pytest.raises(QueueMessageLeaseMismatch):
        database.transact(getattr(queues, settle.__name__), DEAD, proof(first))
    assert everything(database) == before


def test_a_message_that_is_given_back_comes_again_after_its_delay(database: Database, clock: ManualClock) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    nack(database, second, error="boom")
    nack(database, first, delay_seconds=0.5, error="bang")
    (again,) = lease(database, 2)
    assert (again.payload, again.failures, again.last_error) == (b"b", 1, "boom")
    clock.advance_ms(499)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"a"]
    assert stats(database).failed_total == 2


def test_a_message_that_is_deferred_has_not_failed(database: Database) -> None:
    put(database, b"a", max_attempts=1)
    for attempt in range(1, 6):
        message = lease_one(database)
        assert (message.attempts, message.failures, message.fence) == (attempt, 0, attempt)
        nack(database, message, counts=False, error="is not kept")
    assert (peek(database)[0].last_error, stats(database).failed_total) == (None, 0)


def test_a_long_error_is_cut_and_a_strange_one_is_kept_as_far_as_it_goes(database: Database) -> None:
    put(database, b"a", b"b")
    first, second = lease(database, 2)
    nack(database, first, error="ü" * 5_000)
    nack(database, second, error="odd \ud800")
    assert [message.last_error for message in peek(database)] == ["ü" * 2_048, "odd ?"]


# Dead letters.


def test_a_message_that_failed_as_often_as_it_may_is_a_dead_letter(database: Database, clock: ManualClock) -> None:
    put(database, b"a", max_attempts=2, correlation_id="because", priority=7, attributes={"kind": "x"})
    nack(database, lease_one(database), error="first")
    clock.advance_ms(1_000)
    nack(database, lease_one(database), error="second", delay_seconds=60)
    assert counts(database) == {"dead": 1}
    (letter,) = peek(database, DEAD)
    assert (letter.payload, letter.attempts, letter.failures, letter.fence) == (b"a", 2, 2, 2)
    assert (letter.last_error, letter.origin, letter.died_ms) == ("second", "jobs", clock.now_ms())
    assert (letter.correlation_id, letter.priority, letter.attributes) == ("because", 7, {"kind": "x"})
    assert (stats(database).dead_total, stats(database).failed_total) == (1, 2)


def test_a_rejected_message_is_a_dead_letter_at_once(database: Database) -> None:
    put(database, b"a")
    reject(database, lease_one(database), "hopeless")
    (letter,) = peek(database, DEAD)
    assert (letter.failures, letter.last_error) == (1, "hopeless")


def test_a_dead_letter_never_dies_again(database: Database, clock: ManualClock) -> None:
    """Neither by failing, nor by being forgotten, nor by being rejected."""
    put(database, b"a", max_attempts=1)
    reject(database, lease_one(database), "boom")
    nack(database, lease_one(database, queue=DEAD), DEAD)
    lease_one(database, queue=DEAD)
    clock.advance_ms(30_000)
    database.transact(queues.reject, DEAD, proof(lease_one(database, queue=DEAD)), error="bang")
    assert (counts(database), counts(database, DEAD)) == ({"dead": 1}, {"ready": 1})
    assert [(letter.origin, letter.failures) for letter in peek(database, DEAD)] == [("jobs", 4)]
    assert database.transact(queues.redrive, JOBS) == 1


def test_a_dead_letter_that_is_put_back_is_as_if_it_had_never_failed(database: Database, clock: ManualClock) -> None:
    put(database, b"a", max_attempts=2)
    reject(database, lease_one(database), "boom")
    clock.advance_ms(1_000)
    assert database.transact(queues.redrive, JOBS) == 1
    assert database.transact(queues.redrive, JOBS) == 0
    message = lease_one(database)
    assert (message.failures, message.origin, message.died_ms) == (0, None, 0)
    assert (message.attempts, message.fence) == (2, 2)
    nack(database, message)
    assert counts(database) == {"ready": 1}
    nack(database, lease_one(database))
    assert counts(database) == {"dead": 1}


def test_a_dead_letter_that_is_put_back_lives_as_long_as_the_policy_says(
    database: Database, clock: ManualClock
) -> None:
    put(database, b"a", b"b", ttl_seconds=60)
    first, second = lease(database, 2)
    reject(database, first)
    database.transact(queues.redrive, JOBS)
    reject(database, second)
    set_policy(database, retention_seconds=5)
    database.transact(queues.redrive, JOBS)
    clock.advance_ms(5_000)
    process_due(database)
    assert payloads(peek(database)) == [b"a"]
    clock.advance_ms(1_209_600_000)
    process_due(database)
    assert payloads(peek(database)) == [b"a"]


def test_dead_letters_are_put_back_by_name_or_a_few_at_a_time(database: Database) -> None:
    ids = [receipt.id for receipt in put(database, b"a", b"b", b"c", b"d")]
    for message in lease(database, 4):
        reject(database, message)
    held = lease_one(database, queue=DEAD)
    assert database.transact(queues.redrive, JOBS, ids=[ids[0], ids[2], ids[2]]) == 1
    assert database.transact(queues.redrive, JOBS, limit=1) == 1
    assert payloads(peek(database)) == [b"b", b"c"]
    ack(database, held, DEAD)
    assert payloads(peek(database, DEAD)) == [b"d"]
    assert database.transact(queues.redrive, JOBS, ids=[]) == 0


def test_queues_may_share_a_queue_for_their_dead_letters(database: Database) -> None:
    other, graveyard = QueueKey("main", "other"), QueueKey("main", "graveyard")
    for queue in (JOBS, other):
        assert set_policy(database, queue, dead_letter_queue="Graveyard").dead_letter_queue == "graveyard"
        put(database, queue.name.encode(), queue=queue)
        message = lease_one(database, queue=queue)
        database.transact(queues.reject, queue, proof(message))
    assert payloads(peek(database, graveyard)) == [b"jobs", b"other"]
    assert database.transact(queues.redrive, other) == 1
    assert payloads(lease(database, 10, queue=other)) == [b"other"]
    assert payloads(peek(database, graveyard)) == [b"jobs"]


def test_dead_letters_are_kept_as_long_as_the_policy_says(database: Database, clock: ManualClock) -> None:
    put(database, b"short")
    message = lease_one(database)
    set_policy(database, dead_letter_retention_seconds=5)
    reject(database, message)
    set_policy(database)
    put(database, b"long")
    reject(database, lease_one(database))
    clock.advance_ms(5_000)
    process_due(database, DEAD)
    assert payloads(peek(database, DEAD)) == [b"long"]
    clock.advance_ms(1_209_600_000)
    process_due(database, DEAD)
    assert counts(database) == {}
    assert left(database) == []


# Payloads.


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_goes_everywhere_with_its_message(database: Database, clock: ManualClock, size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    put(database, payload, max_attempts=3)
    assert payloads(peek(database)) == [payload]
    message = lease_one(database)
    assert (message.payload, message.size) == (payload, size)
    extend(database, message, 60_000)
    nack(database, message)
    message = lease_one(database)
    assert message.payload == payload
    clock.advance_ms(30_000)
    message = lease_one(database)
    assert message.payload == payload
    nack(database, message, error="boom")
    assert payloads(peek(database, DEAD)) == [payload]
    letter = lease_one(database, queue=DEAD)
    assert letter.payload == payload
    nack(database, letter, DEAD)
    assert database.transact(queues.redrive, JOBS) == 1
    message = lease_one(database)
    assert (message.payload, message.size) == (payload, size)
    ack(database, message)
    assert left(database) == []


# What is left behind.


@pytest.mark.parametrize("size", [1, 1_025])
@pytest.mark.parametrize(
    "options",
    [{}, {"ttl_seconds": 60}, {"delay_seconds": 5}, {"group": "g"}, {"group": "g", "ttl_seconds": 60}],
    ids=str,
)
def test_a_message_that_is_gone_leaves_nothing_behind(
    database: Database, clock: ManualClock, size: int, options: dict[str, Any]
) -> None:
    """But its queue's tally and the memory of its ack: neither its payload, nor the notes of its moments, nor its
    group, nor its state with the lease on it."""
    put(database, b"x" * size, b"y" * size, **options)
    clock.advance_ms(5_000)
    for _ in range(2):
        message = lease_one(database, with_state=True)
        extend(database, message, 40_000)
        ack(database, message)
    assert left(database) == []
    put(database, b"x" * size, b"y" * size, **options)
    clock.advance_ms(5_000)
    for _ in range(2):
        reject(database, lease_one(database, with_state=True))
    assert purge(database, DEAD) == 2
    assert left(database) == []


# Workflow state.


def state_of(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> Any:
    found = database.read(states.get, "main", f"q/{queue.name}/state/{queues.text_of(message.id)}")
    return None if found is None else (cbor2.loads(found.value), found.correlation_id)


def holder_of(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> tuple[str, int] | None:
    """Who holds the lease on a message's state, and until when."""
    key = LeaseKey("main", f"q/{queue.name}/state/{queues.text_of(message.id)}")
    grant, held = database.read(leases.look, key)
    return (grant.owner, grant.expires_ms) if grant is not None and held else None


def save(database: Database, found: Leased, value: Any) -> None:
    sidecar = found.states[0]
    assert sidecar is not None
    database.transact(states.update, "main", sidecar.lease.key, cbor2.dumps(value), lease=sidecar.lease)


def test_a_state_begins_empty_with_the_first_delivery_that_asks_for_it(database: Database) -> None:
    put(database, b"a", correlation_id="because")
    message = lease_one(database)
    assert state_of(database, message) is None
    nack(database, message)
    found = look(database, with_state=True)
    (message,) = found.messages
    assert state_of(database, message) == (None, "because")
    assert holder_of(database, message) == ("ada", message.due_ms)
    sidecar = found.states[0]
    assert sidecar is not None
    assert (cbor2.loads(sidecar.value), sidecar.expires_ms) == (None, message.due_ms)


def test_a_state_is_written_by_whoever_has_the_message_and_found_by_the_next(
    database: Database, clock: ManualClock
) -> None:
    put(database, b"a")
    first = look(database, with_state=True)
    save(database, first, {"step": 1})
    with pytest.raises(LeaseRequired):
        database.transact(states.update, "main", first.states[0].lease.key, b"\xf6")
    clock.advance_ms(30_000)
    second = look(database, with_state=True, owner="bob")
    sidecar = second.states[0]
    assert sidecar is not None
    assert cbor2.loads(sidecar.value) == {"step": 1}
    with pytest.raises((LeaseConflict, LeaseExpired)):
        save(database, first, {"step": 0})
    save(database, second, {"step": 2})
    assert state_of(database, second.messages[0]) == ({"step": 2}, second.messages[0].correlation_id)


def test_the_lease_on_a_state_ends_with_that_on_its_message(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    found = look(database, with_state=True, visibility_ms=1_000)
    (message,) = found.messages
    clock.advance_ms(500)
    extend(database, message, 2_000)
    assert holder_of(database, message) == ("ada", clock.now_ms() + 2_000)
    clock.advance_ms(1_999)
    save(database, found, "in time")
    clock.advance_ms(1)
    assert holder_of(database, message) is None
    with pytest.raises(LeaseExpired):
        save(database, found, "late")


def test_a_message_that_is_given_back_gives_its_state_back(database: Database) -> None:
    put(database, b"a")
    found = look(database, with_state=True)
    save(database, found, 1)
    nack(database, found.messages[0], delay_seconds=60)
    assert holder_of(database, found.messages[0]) is None
    assert state_of(database, found.messages[0])[0] == 1
    with pytest.raises(LeaseExpired):
        save(database, found, 2)


def test_a_state_goes_to_the_dead_letters_and_back(database: Database) -> None:
    put(database, b"a", correlation_id="because")
    found = look(database, with_state=True)
    save(database, found, {"step": 1})
    (message,) = found.messages
    reject(database, message)
    assert (state_of(database, message), state_of(database, message, DEAD)) == (None, ({"step": 1}, "because"))
    assert holder_of(database, message) is None
    with pytest.raises((LeaseConflict, LeaseExpired)):
        save(database, found, {"step": 2})
    letter = lease_one(database, queue=DEAD, with_state=True)
    assert holder_of(database, letter, DEAD) == ("ada", letter.due_ms)
    nack(database, letter, DEAD)
    database.transact(queues.redrive, JOBS)
    assert (state_of(database, message, DEAD), state_of(database, message)) == (None, ({"step": 1}, "because"))
    found = look(database, with_state=True)
    save(database, found, {"step": 3})
    ack(database, found.messages[0])
    assert left(database) == []


# The lessons of the original queue.


def test_a_message_that_kills_its_consumers_becomes_a_dead_letter(database: Database, clock: ManualClock) -> None:
    """Lesson 7: a consumer that crashed never drove its message to the DLQ: only explicit failures counted."""
    put(database, b"a", max_attempts=3)
    for attempt in range(1, 4):
        message = lease_one(database, owner=f"victim-{attempt}")
        assert (message.attempts, message.failures) == (attempt, attempt - 1)
        clock.advance_ms(30_000)
    assert lease(database) == []
    (letter,) = peek(database, DEAD)
    assert (letter.failures, letter.attempts) == (3, 3)
    assert letter.last_error == "The lease of victim-3 ended before it was settled"
    assert (stats(database).expired_total, stats(database).dead_total) == (3, 1)


def test_the_visibility_of_a_put_holds_for_deliveries_that_give_none(database: Database) -> None:
    """Lesson 8: the visibility timeout given at enqueue was never used: dequeue always substituted the default."""
    set_policy(database, visibility_seconds=7)
    put(database, b"of the policy")
    put(database, b"of its own", b"of the delivery", visibility_seconds=3)
    assert [message.due_ms for message in lease(database, 2)] == [START_MS + 7_000, START_MS + 3_000]
    assert lease_one(database, visibility_ms=1_000).due_ms == START_MS + 1_000


def test_a_lease_cannot_be_extended_by_nothing(database: Database, clock: ManualClock) -> None:
    """Lesson 9: extending by zero expired the lease while the message stayed hidden."""
    put(database, b"a")
    message = lease_one(database)
    before = everything(database)
    for by_ms in (0, -1):
        with pytest.raises(InvalidArgument, match="nack it"):
            extend(database, message, by_ms)
    assert everything(database) == before
    clock.advance_ms(30_000)
    assert lease_one(database).fence == 2


@pytest.mark.parametrize("point", [0, 1, 2])
@pytest.mark.parametrize("how", ["nack", "reject", "expire"])
def test_a_crash_on_the_way_to_the_dead_letters_leaves_the_message_in_one_place(
    database: Database, clock: ManualClock, how: str, point: int
) -> None:
    """Lesson 10: moving to the DLQ was not idempotent: after a crash in the middle, every later scan failed."""
    put(database, b"x" * 2_000, max_attempts=1)
    put(database, b"next")
    message = lease_one(database, with_state=True)
    faulty = FaultyDatabase(database, ChosenFault(point, Crash))
    if how == "expire":
        clock.advance_ms(30_000)
    with pytest.raises(Crash):
        if how == "expire":
            faulty.transact(queues.process_due_of, JOBS)
        else:
            faulty.transact(getattr(queues, how), JOBS, proof(message))
    has_happened = point == 2
    assert counts(database) == ({"ready": 1, "dead": 1} if has_happened else {"ready": 1, "leased": 1})
    if how == "expire":
        process_due(database)
    elif has_happened:
        with pytest.raises(QueueMessageLeaseMismatch):
            database.transact(getattr(queues, how), JOBS, proof(message))
    else:
        database.transact(getattr(queues, how), JOBS, proof(message))
    assert payloads(peek(database, DEAD)) == [b"x" * 2_000]
    assert payloads(lease(database, 10)) == [b"next"]
    assert stats(database).dead_total == 1


@pytest.mark.parametrize("end", ["nack", "reject"])
def test_whoever_says_nothing_leaves_the_last_error_standing(database: Database, end: str) -> None:
    """Lesson 11: the move to the dead letters overwrote it."""
    put(database, b"a", max_attempts=2)
    nack(database, lease_one(database), error="boom")
    message = lease_one(database)
    assert message.last_error == "boom"
    database.transact(getattr(queues, end), JOBS, proof(message))
    (letter,) = peek(database, DEAD)
    assert (letter.last_error, letter.failures) == ("boom", 2)
    database.transact(queues.reject, DEAD, proof(lease_one(database, queue=DEAD)))
    assert [each.last_error for each in peek(database, DEAD)] == ["boom"]


def test_the_last_error_goes_to_the_dead_letters(database: Database) -> None:
    """Lesson 11: the DLQ move overwrote the last error."""
    put(database, b"a", max_attempts=2)
    for error in ("first", "second"):
        nack(database, lease_one(database), error=error)
    assert [letter.last_error for letter in peek(database, DEAD)] == ["second"]
    nack(database, lease_one(database, queue=DEAD), DEAD, counts=False)
    database.transact(queues.redrive, JOBS)
    assert lease_one(database).last_error == "second"


def test_a_state_is_removed_with_a_message_whose_time_to_live_is_over(database: Database, clock: ManualClock) -> None:
    """Lesson 11: TTL expiry left the workflow state behind."""
    put(database, b"ready", b"leased", ttl_seconds=60)
    first, second = lease(database, 2, with_state=True, visibility_ms=90_000)
    nack(database, first)
    clock.advance_ms(60_000)
    process_due(database)
    assert (state_of(database, first), state_of(database, second)) == (None, (None, second.correlation_id))
    clock.advance_ms(30_000)
    process_due(database)
    assert left(database) == []


def test_a_repeated_ack_succeeds_and_that_of_another_lease_does_not(database: Database, clock: ManualClock) -> None:
    """Lesson 11: a repeated ack was a 404."""
    put(database, b"a")
    first = lease_one(database)
    clock.advance_ms(30_000)
    second = lease_one(database)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, first)
    ack(database, second)
    assert (ack(database, second), ack(database, second)) == (None, None)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, first)
    for settle in (nack, reject):
        with pytest.raises(QueueMessageLeaseMismatch):
            settle(database, second)
    assert stats(database).acked_total == 1


def test_dead_letters_are_listed_and_put_back_and_a_batch_is_a_batch(database: Database) -> None:
    """Lesson 12: no way to list or redrive the DLQ. Batch dequeue was silently clamped to one."""
    put(database, *(bytes((number,)) for number in range(256)))
    found = lease(database, 256)
    assert len(found) == 256
    for message in found[:5]:
        reject(database, message, f"error {message.payload!r}")
    assert [letter.last_error for letter in peek(database, DEAD)] == [f"error {bytes((n,))!r}" for n in range(5)]
    assert database.transact(queues.redrive, JOBS, ids=[queues.text_of(found[3].id)]) == 1
    assert database.transact(queues.redrive, JOBS) == 4
    assert payloads(lease(database, 256)) == [bytes((number,)) for number in range(5)]


def test_whoever_waits_is_told_when_something_will_be_due(database: Database, clock: ManualClock) -> None:
    """Lesson 13: delayed messages waited for the next poll; a due-time heap fixed it."""
    assert look(database).again_in_ms == queues.NEVER_MS - START_MS
    put(database, b"a", delay_seconds=5)
    put(database, b"b", delay_seconds=3)
    assert (look(database).again_in_ms, database.read(queues.next_due, JOBS)) == (3_000, START_MS + 3_000)
    clock.advance_ms(3_000)
    found = look(database, visibility_ms=1_000)
    assert (payloads(found.messages), found.again_in_ms) == ([b"b"], 1_000)
    clock.advance_ms(1_000)
    found = look(database)
    assert (payloads(found.messages), found.again_in_ms) == ([b"b"], 1_000)
    ack(database, found.messages[0])
    clock.advance_ms(1_000)
    assert payloads(look(database).messages) == [b"a"]


# Refusals.


def test_an_empty_batch_is_refused(database: Database) -> None:
    with pytest.raises(EmptyBatch, match="nothing to put"):
        database.transact(queues.put, JOBS, [])
    assert everything(database) == []


def test_a_batch_has_at_most_256_messages(database: Database) -> None:
    with pytest.raises(BatchTooLarge, match="at most 256 messages, not 257"):
        put(database, *[b""] * 257)
    assert everything(database) == []
    assert len(put(database, *[b""] * 256)) == 256


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"payload": bytes(16_385)}, PayloadTooLarge),
        *[({"priority": priority}, InvalidArgument) for priority in (-1, 10)],
        *[({"delay_seconds": delay}, InvalidArgument) for delay in (-0.001, 31_536_001, float("nan"), float("inf"))],
        *[({"ttl_seconds": ttl}, InvalidArgument) for ttl in (0, -1, 0.0001, 1e10, float("nan"), float("inf"))],
        *[({"max_attempts": attempts}, InvalidArgument) for attempts in (0, -1, 1_001)],
        *[({"visibility_seconds": seconds}, InvalidArgument) for seconds in (0, -1, 43_201, float("nan"))],
        *[({"correlation_id": text}, InvalidArgument) for text in ("", "x" * 129, "ü", "a\nb", "\x7f")],
        ({"attributes": {str(number): "" for number in range(65)}}, InvalidArgument),
        ({"attributes": {"a": "x" * 8_192}}, InvalidArgument),
        *[({"idempotency_key": key}, InvalidArgument) for key in ("", "x" * 257, "ü" * 129)],
        *[({"group": name}, InvalidName) for name in ("", "a b", "x" * 129, "ü")],
        ({"payload": b"a", "blob": "0" * 64}, InvalidArgument),
        ({"blob": "no hash"}, InvalidArgument),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_message_that_asks_for_what_none_can_have_is_refused_with_its_batch(
    database: Database, wrong: dict[str, Any], error: type[HoldfastError]
) -> None:
    with pytest.raises(error):
        database.transact(queues.put, JOBS, [NewMessage(payload=b"fine"), NewMessage(**wrong)])
    assert everything(database) == []


@pytest.mark.parametrize(
    "right",
    [
        {"payload": bytes(16_384)},
        {"priority": 0},
        {"priority": 9},
        {"delay_seconds": 31_536_000},
        {"ttl_seconds": 0.001},
        {"ttl_seconds": 315_360_000},
        {"max_attempts": 1_000},
        {"visibility_seconds": 43_200},
        {"correlation_id": "x" * 128},
        {"attributes": {str(number): "" for number in range(64)}},
        {"idempotency_key": "ü" * 128},
        {"group": "x" * 128},
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("backend", ["memory"])
def test_the_bounds_themselves_are_taken(database: Database, right: dict[str, Any]) -> None:
    assert not database.transact(queues.put, JOBS, [NewMessage(**right)])[0].duplicate


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": True},
        {"priority": 5.0},
        {"max_attempts": True},
        {"max_attempts": 2.5},
        {"content_type": 5},
        {"content_type": "\ud800"},
        {"attributes": {b"a": b"b"}},
        {"attributes": {"a": b"b"}},
        {"attributes": {"a": 1}},
        {"attributes": {"a": "\ud800"}},
        {"attributes": {"\ud800": "a"}},
        {"attributes": [("a", "b")]},
        {"payload": "text"},
        {"blob": 5},
        {"blob": "0" * 64, "blob_size": -1},
        {"blob": "0" * 64, "blob_size": "1"},
        {"idempotency_key": 5},
        {"idempotency_key": "\ud800"},
        {"correlation_id": 5},
        {"delay_seconds": "1"},
        {"ttl_seconds": "1"},
        {"visibility_seconds": "1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["memory"])
def test_a_message_that_could_not_be_read_again_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    """One part of the wrong type, stored as it is, would make the whole queue unreadable."""
    with pytest.raises(InvalidArgument):
        database.transact(queues.put, JOBS, [NewMessage(**wrong)])
    assert everything(database) == []
    put(database, b"next")
    assert payloads(lease(database, 2)) == [b"next"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 2.5},
        {"max_attempts": True},
        {"max_attempts": 0},
        {"max_attempts": 1_001},
        {"paused": 1},
        {"rate_per_second": True},
        {"rate_per_second": 0},
        {"rate_per_second": 1_000_001},
        {"retention_seconds": True},
        {"retention_seconds": 0},
        {"visibility_seconds": True},
        {"visibility_seconds": 0},
        {"visibility_seconds": 43_201},
        {"dead_letter_retention_seconds": None},
        {"dead_letter_retention_seconds": 0},
        {"dead_letter_queue": "jobs"},
        {"dead_letter_queue": "Jobs"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["memory"])
def test_a_policy_that_no_queue_can_have_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        database.transact(queues.set_policy, JOBS, QueuePolicy(**wrong))
    assert everything(database) == []
    assert database.read(queues.policy_of, JOBS) == QueuePolicy()


@pytest.mark.parametrize("backend", ["memory"])
def test_a_name_is_short_enough_for_its_dead_letters_to_have_one(database: Database) -> None:
    assert queues.queue_name("X" * 124) == "x" * 124
    assert queues.queue_name("x" * 124 + ".dlq") == "x" * 124 + ".dlq"
    with pytest.raises(InvalidArgument, match="at most 124 characters, not 125"):
        queues.queue_name("x" * 125)
    for wrong in ("", "a b", 5, None, "x" * 129):
        with pytest.raises(InvalidName):
            queues.queue_name(wrong)
    with pytest.raises(InvalidName):
        set_policy(database, dead_letter_queue="a b")


@pytest.mark.parametrize(
    "wrong",
    [{"owner": ""}, {"owner": "x" * 257}, {"owner": 5}, {"owner": None}, {"txn_id": ""}]
    + [{"limit": limit} for limit in (0, -1, 257)],
    ids=str,
)
def test_a_delivery_that_nobody_can_have_is_refused(database: Database, wrong: dict[str, Any]) -> None:
    put(database, b"a")
    before = everything(database)
    with pytest.raises(InvalidArgument):
        lease(database, **wrong)
    assert everything(database) == before


def test_other_bounds_are_kept_too(database: Database) -> None:
    put(database, b"a")
    message = lease_one(database)
    before = everything(database)
    for delay in (-1, 31_536_001, float("nan")):
        with pytest.raises(InvalidArgument, match="delay_seconds"):
            nack(database, message, delay_seconds=delay)
    for options in ({"limit": 0}, {"limit": 257}, {"ids": [queues.text_of(message.id)] * 257}, {"ids": ["nonsense"]}):
        with pytest.raises(InvalidArgument):
            database.transact(queues.redrive, JOBS, **options)
    for limit in (0, 10_001):
        with pytest.raises(InvalidArgument):
            peek(database, limit=limit)
        with pytest.raises(InvalidArgument):
            database.read(queues.names, "main", after="", limit=limit)
    assert everything(database) == before


# Looking after a queue.


def test_stats_tell_where_everything_is(database: Database, clock: ManualClock) -> None:
    (first,) = put(database, b"a")
    clock.advance_ms(1_500)
    put(database, b"b", b"c", b"d")
    put(database, b"e", delay_seconds=60)
    put(database, b"f", b"g", group="g")
    found = stats(database)
    assert (found.queue, found.head_message_id, found.head_age_seconds) == ("jobs", first.id, 1.5)
    assert (found.ready, found.delayed, found.blocked, found.put_total) == (5, 1, 1, 7)
    acked, given_back, rejected, _ = lease(database, 4)
    ack(database, acked)
    nack(database, given_back)
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


def test_a_paused_queue_takes_and_attends_but_does_not_deliver(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    lease_one(database)
    set_policy(database, paused=True)
    put(database, b"b")
    clock.advance_ms(30_000)
    assert lease(database, 10) == []
    assert (counts(database), stats(database).paused) == ({"ready": 2}, True)
    set_policy(database)
    assert payloads(lease(database, 10)) == [b"a", b"b"]


def test_a_purge_removes_all_that_nobody_holds(database: Database) -> None:
    put(database, b"held", ttl_seconds=60)
    held = lease_one(database)
    for _ in range(2):
        put(database, *[b"x" * 2_000] * 150, ttl_seconds=60)
    put(database, b"later", b"later", delay_seconds=60)
    assert purge(database) == 302
    assert counts(database) == {"leased": 1}
    assert purge(database) == 0
    ack(database, held)
    assert left(database) == []


def test_a_purge_removes_what_waits_behind_its_group(database: Database) -> None:
    """Whether the first of the group is ready, delayed, or in somebody's hands, who may go on."""
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
    assert left(database) == []


def test_a_message_that_is_put_after_the_clock_was_set_back_is_delivered(
    open_database: Callable[..., Database], clock: ManualClock, backend: str
) -> None:
    """Lesson 23: keys came from the wall clock, which can go back. Another process knows no ids of the one before it:
    were its own to sort below the front of a queue, its messages would be hidden there."""
    if backend == "memory":
        pytest.skip("nothing of it is left to be opened again")
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


# The rate of a queue.


def test_a_look_that_the_rate_does_not_let_through_writes_nothing(database: Database) -> None:
    """Whoever waits for the rate would be woken by its own look, and look again, for as long as it waits."""
    set_policy(database, rate_per_second=0.1)
    put(database, b"a", b"b")
    assert payloads(look(database).messages) == [b"a"]

    def look_again(tx: Transaction) -> bool:
        assert not queues.lease_or_wait(tx, JOBS, owner="ada").messages
        return tx.wrote

    assert not database.transact(look_again)


def test_a_queue_delivers_no_faster_than_its_rate(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_second=2)
    put(database, *[b""] * 20)
    found = look(database, limit=10)
    assert (len(found.messages), found.again_in_ms) == (2, 500)
    assert look(database).messages == []
    clock.advance_ms(499)
    assert look(database).messages == []
    clock.advance_ms(1)
    assert len(look(database, limit=10).messages) == 1
    clock.advance_ms(1_500)
    assert len(look(database, limit=10).messages) == 2
    clock.advance_ms(10_000)
    assert len(look(database, limit=10).messages) == 2
    set_policy(database)
    assert len(look(database, limit=256).messages) == 13


def test_a_slow_queue_delivers_one_at_a_time(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_second=0.1)
    put(database, *[b""] * 3)
    assert len(look(database, limit=10).messages) == 1
    found = look(database)
    assert (found.messages, found.again_in_ms) == ([], 10_000)
    clock.advance_ms(9_999)
    assert look(database).messages == []
    clock.advance_ms(1)
    assert len(look(database, limit=10).messages) == 1


# Schedules.


def schedule(database: Database, cron: str, name: str = "report", timezone: str = "UTC", **options: Any) -> int:
    message = NewMessage(payload=name.encode(), **options)
    set_schedule = queues.set_schedule
    return database.transact(set_schedule, JOBS, name, cron=cron, timezone=timezone, message=message).next_ms


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def test_a_schedule_strikes_once_at_each_of_its_times(database: Database, clock: ManualClock) -> None:
    assert schedule(database, "*/5 * * * *", priority=7, delay_seconds=1, correlation_id="c") == ms("2023-11-14T22:15")
    clock.jump_to_ms(ms("2023-11-14T22:15") - 1)
    assert process_due(database) == ms("2023-11-14T22:15")
    assert counts(database) == {}
    for minute in (15, 20, 25):
        clock.jump_to_ms(ms(f"2023-11-14T22:{minute}"))
        for _ in range(3):
            assert lease(database) == []
        assert counts(database) == {"delayed": 1}
        clock.advance_ms(1_000)
        message = lease_one(database)
        assert (message.payload, message.priority, message.correlation_id) == (b"report", 7, "c")
        ack(database, message)
    (found,) = database.read(queues.schedules_of, JOBS)
    assert (found.name, found.cron, found.next_ms) == ("report", "*/5 * * * *", ms("2023-11-14T22:30"))
    assert stats(database).put_total == 3


def test_times_that_passed_while_nobody_looked_count_once(database: Database, clock: ManualClock) -> None:
    schedule(database, "0 * * * *")
    clock.jump_to_ms(ms("2023-11-15T09:30"))
    assert payloads(lease(database, 10)) == [b"report"]
    assert [each.next_ms for each in database.read(queues.schedules_of, JOBS)] == [ms("2023-11-15T10:00")]


def test_a_schedule_keeps_to_the_clock_of_its_time_zone(database: Database, clock: ManualClock) -> None:
    """Also when that one is put forward: half past nine in Berlin is an hour earlier in summer."""
    clock.jump_to_ms(ms("2024-03-29T12:00"))
    assert schedule(database, "30 9 * * *", timezone="Europe/Berlin") == ms("2024-03-30T08:30")
    clock.jump_to_ms(ms("2024-03-30T08:30"))
    process_due(database)
    assert [each.next_ms for each in database.read(queues.schedules_of, JOBS)] == [ms("2024-03-31T07:30")]
    assert schedule(database, "30 9 * * *", timezone="America/New_York") == ms("2024-03-30T13:30")


@pytest.mark.parametrize(
    ("cron", "timezone"),
    [(cron, "UTC") for cron in ("", "nonsense", "* * * *", "61 * * * *", "* * * * * * *", "0 0 30 2 *")]
    + [("* * * * *", zone) for zone in ("", "Mars/Base", "../etc/passwd", "/etc/passwd", "\x00", "Europe")],
)
def test_a_schedule_that_is_not_understood_is_refused(database: Database, cron: Any, timezone: str) -> None:
    with pytest.raises(InvalidArgument):
        schedule(database, cron, timezone=timezone)
    assert everything(database) == []


@pytest.mark.parametrize(("cron", "timezone"), [(5, "UTC"), (None, "UTC"), ("* * * * *", 5), ("* * * * *", None)])
@pytest.mark.parametrize("backend", ["memory"])
def test_a_schedule_that_is_no_text_is_refused(database: Database, cron: Any, timezone: Any) -> None:
    with pytest.raises(InvalidArgument):
        schedule(database, cron, timezone=timezone)


def test_a_schedule_of_a_message_that_none_can_be_is_refused(database: Database) -> None:
    with pytest.raises(InvalidArgument):
        schedule(database, "* * * * *", priority=10)
    assert everything(database) == []


def test_a_schedule_that_was_removed_never_strikes(database: Database, clock: ManualClock) -> None:
    schedule(database, "* * * * *")
    schedule(database, "* * * * *", name="other")
    remove = queues.remove_schedule
    assert (database.transact(remove, JOBS, "report"), database.transact(remove, JOBS, "report")) == (True, False)
    clock.advance_ms(600_000)
    assert payloads(lease(database, 10)) == [b"other"]
    database.transact(remove, JOBS, "other")
    clock.advance_ms(600_000)
    ack(database, lease_one(database))
    assert left(database) == []


def test_a_schedule_of_the_same_name_takes_the_place_of_the_first(database: Database, clock: ManualClock) -> None:
    schedule(database, "* * * * *")
    assert schedule(database, "0 23 * * *") == ms("2023-11-14T23:00")
    clock.jump_to_ms(ms("2023-11-14T22:59"))
    assert lease(database) == []
    clock.jump_to_ms(ms("2023-11-14T23:00"))
    assert len(lease(database, 10)) == 1


def test_a_queue_has_as_many_schedules_as_it_may(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "SCHEDULES_MAX", 2)
    schedule(database, "* * * * *", name="b")
    schedule(database, "* * * * *", name="a")
    with pytest.raises(Busy, match="2 schedules"):
        schedule(database, "* * * * *", name="c")
    schedule(database, "0 * * * *", name="b")
    assert [each.name for each in database.read(queues.schedules_of, JOBS)] == ["a", "b"]


# Several processes on one PostgreSQL.


@pytest.fixture
def nodes(postgres_url: str, clock: ManualClock) -> Iterator[tuple[Database, Database]]:
    with PostgresDatabase(postgres_url, clock=clock) as one, PostgresDatabase(postgres_url, clock=clock) as other:
        yield one, other


def test_the_tallies_of_two_writers_sum_up(nodes: tuple[Database, Database], clock: ManualClock) -> None:
    one, other = nodes
    put(one, b"a", b"b", b"c", b"d")
    clock.advance_ms(1)  # Within a millisecond, ids of two processes are in no order.
    put(other, b"e", delay_seconds=60)
    put(other, b"f", b"g", group="g")
    found = lease(other, 4)
    assert payloads(found) == [b"a", b"b", b"c", b"d"]
    ack(one, found[0])
    nack(one, found[1])
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


def test_a_schedule_strikes_once_however_many_look(nodes: tuple[Database, Database], clock: ManualClock) -> None:
    one, other = nodes
    schedule(one, "* * * * *")
    clock.advance_ms(60_000)
    assert payloads(lease(other, 10) + lease(one, 10) + lease(other, 10)) == [b"report"]


def test_an_idempotency_key_holds_for_all_nodes(nodes: tuple[Database, Database]) -> None:
    one, other = nodes
    assert put(one, b"a", idempotency_key="k")[0].id == put(other, b"a", idempotency_key="k")[0].id
    assert len(lease(other, 10)) == 1
