"""Rare cases of queues: clocks that are set back, lost records, calls that cross, and records that expire."""

from collections.abc import Iterator
from functools import partial

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import MessageNotFound, QueueMessageLeaseMismatch
from fastness.kv import Database, Transaction, prefix_range
from fastness.layers import blobs, queues
from fastness.layers.blobs import Blob
from fastness.layers.queues import dead_letters, expiry
from fastness.testing.clock import ManualClock
from fastness.wire.queues import LEASE_BYTES, MessageInfo, MessageLease, NewMessage, NewResult
from fastness.wire.stored_messages import format_lease_id
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    ack,
    counts,
    extend,
    lease,
    lease_one,
    leased,
    payloads,
    process_due,
    proof,
    put,
    reject,
    remaining_keys,
    set_policy,
)

KEYS = queues.keys_of(JOBS)


@pytest.fixture
def database(clock: ManualClock) -> Iterator[Database]:
    with MemoryDatabase(clock=clock) as database:
        yield database


def lose(database: Database, begin: bytes, end: bytes) -> None:
    """Delete the only pair of a range, as a lost commit would."""

    def delete(tx: Transaction) -> None:
        [(key, _)] = tx.scan(begin, end, limit=2)
        tx.delete(key)

    database.transact(delete)


def has_any(database: Database, prefix: bytes) -> bool:
    return bool(database.read(lambda tx: tx.scan(*prefix_range(prefix), limit=1)))


def state_of(database: Database, id: str) -> str:
    found = database.read(queues.get, JOBS, id)
    assert isinstance(found, MessageInfo)
    return found.state


# The clock is set back.


def test_what_ends_no_later_than_it_was_to_last_keeps_its_end_if_the_clock_is_set_back(
    database: Database, clock: ManualClock
) -> None:
    start_ms = clock.now_ms()
    put(database, b"leased")
    lease(database, visibility_ms=1_000_000)
    put(database, b"delayed", delay_seconds=1_000)
    put(database, b"expires", ttl_seconds=1_000)
    clock.advance_ms(500_000)
    put(database, b"soon", delay_seconds=10, priority=9)
    clock.jump_to_ms(start_ms + 100_000)
    process_due(database)
    clock.advance_ms(10_000)
    ack(database, lease_one(database))
    clock.jump_to_ms(start_ms + 999_999)
    assert counts(database) == {"ready": 1, "delayed": 1, "leased": 1}
    process_due(database)
    assert counts(database) == {"ready": 1, "delayed": 1, "leased": 1}
    clock.advance_ms(1)
    assert payloads(lease(database, 10)) == [b"leased", b"delayed"]


def test_the_rate_of_a_key_counts_from_now_on_if_the_clock_is_set_back(database: Database, clock: ManualClock) -> None:
    start_ms = clock.now_ms()
    set_policy(database, rate_per_key=0.01)
    clock.advance_ms(500_000)
    put(database, b"first", b"second", key="host")
    ack(database, lease_one(database))
    clock.jump_to_ms(start_ms)
    process_due(database)
    clock.advance_ms(99_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"second"]


def test_delays_are_shortened_from_the_first_one_on_each_time_that_the_clock_is_set_back(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "DUE_BATCH_MAX", 2)
    start_ms = clock.now_ms()
    clock.advance_ms(1_000_000)
    for seconds in (100, 200, 300):
        put(database, b"%d" % seconds, delay_seconds=seconds)
    clock.jump_to_ms(start_ms)
    process_due(database)  # It shortens two of the three.
    clock.jump_to_ms(start_ms + 1_000_000)
    for message in lease(database, 2):
        ack(database, message)
    put(database, b"50", delay_seconds=50)
    clock.jump_to_ms(start_ms)
    for _ in range(2):
        process_due(database)
    clock.advance_ms(50_000)
    assert payloads(lease(database, 2)) == [b"50"]


def test_messages_behind_their_group_wait_no_longer_than_their_delay_if_the_clock_is_set_back(
    database: Database, clock: ManualClock
) -> None:
    start_ms = clock.now_ms()
    clock.advance_ms(86_400_000)
    put(database, b"first", b"second", group="g")
    put(database, b"third", group="g", delay_seconds=10)
    first = lease_one(database)
    clock.jump_to_ms(start_ms)
    ack(database, first)
    second = lease_one(database)
    assert payloads([second]) == [b"second"]
    ack(database, second)
    clock.advance_ms(9_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"third"]


def test_a_lease_that_ends_again_when_it_first_was_to_end_is_found(database: Database, clock: ManualClock) -> None:
    start_ms = clock.now_ms()
    put(database, b"1")
    message = lease_one(database, visibility_ms=10_000)
    extend(database, message, by_ms=15_000)
    assert has_any(database, KEYS.moved)
    clock.jump_to_ms(start_ms - 5_000)
    process_due(database)
    assert not has_any(database, KEYS.moved)
    assert leased(database).messages[0].expires_ms == start_ms + 10_000
    ack(database, message)
    assert remaining_keys(database) == []


# Several things are due in one transaction.


def test_a_delay_that_a_schedule_restarts_does_not_end_at_its_old_time(database: Database, clock: ManualClock) -> None:
    put(database, b"first", debounce_key="d", debounce_seconds=60)
    message = NewMessage(b"tick", debounce_key="d", debounce_seconds=90)
    database.transact(queues.set_schedule, JOBS, "each minute", cron="* * * * *", timezone="UTC", message=message)
    clock.advance_ms(70_000)
    assert lease(database) == []
    database.transact(queues.remove_schedule, JOBS, "each minute")
    clock.advance_ms(89_999)
    assert lease(database) == []
    clock.advance_ms(1)
    assert payloads(lease(database)) == [b"tick"]


def test_a_key_that_was_to_go_on_waits_longer_by_a_lower_rate(database: Database, clock: ManualClock) -> None:
    set_policy(database, rate_per_key=0.1)
    put(database, b"first", b"second", key="host")
    ack(database, lease_one(database))
    clock.advance_ms(5_000)
    set_policy(database, rate_per_key=0.05)
    clock.advance_ms(5_000)
    assert lease(database) == []
    clock.advance_ms(10_000)
    assert payloads(lease(database)) == [b"second"]


def test_an_expired_message_does_not_use_up_the_limit_of_its_key(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "DUE_BATCH_MAX", 1)
    set_policy(database, concurrency_per_key=1)
    put(database, b"expires first", ttl_seconds=1)
    put(database, b"expires", key="host", ttl_seconds=1)
    put(database, b"next", key="host")
    clock.advance_ms(1_000)
    assert payloads(lease(database, 10)) == [b"next"]
    assert database.read(queues.key_info, JOBS, "host").leased == 1


# Keys and groups.


def test_a_message_that_becomes_ready_is_delivered_before_later_ones_of_the_same_call(database: Database) -> None:
    put(database, b"1", b"2", key="host")
    put(database, b"3")
    assert payloads(lease(database, 3)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("group", [None, "g"])
def test_a_message_that_waits_for_its_key_or_its_group_is_cancelled(database: Database, group: str | None) -> None:
    _, second = put(database, b"1", b"2", key="host", group=group)
    assert state_of(database, second.id) == "blocked"
    database.transact(queues.cancel, JOBS, second.id)
    assert counts(database) == {"ready": 1}
    assert database.read(queues.key_info, JOBS, "host").blocked == 0
    ack(database, lease_one(database))
    assert lease(database) == []
    assert state_of(database, second.id) == "cancelled"


# Leases.


def test_a_message_that_was_extended_alone_is_found_and_settled(database: Database) -> None:
    receipts = put(database, b"1", b"2", keep_result=True)
    first, second = lease(database, 2, visibility_ms=10_000)
    extend(database, first, by_ms=20_000)
    assert [state_of(database, each.id) for each in receipts] == ["leased", "leased"]
    ack(database, first)
    assert [state_of(database, each.id) for each in receipts] == ["done", "leased"]
    ack(database, second)
    assert counts(database) == {}


def test_a_large_message_that_was_extended_alone_stays_whole(database: Database, clock: ManualClock) -> None:
    attributes = {"text": "x" * 4_000}
    put(database, b"1", b"2", attributes=attributes)
    first, second = lease(database, 2, visibility_ms=10_000)
    extend(database, first, by_ms=20_000)
    ack(database, second)
    clock.advance_ms(20_000)
    again = lease_one(database)
    assert (again.payload, again.attributes) == (b"1", attributes)
    ack(database, again)
    assert remaining_keys(database) == []


def test_leased_messages_are_listed_after_one_that_left_its_lease(database: Database) -> None:
    put(database, b"1", b"2", b"3")
    first, second = lease(database, 2, visibility_ms=10_000)
    third = lease_one(database, visibility_ms=60_000)
    extend(database, first, by_ms=30_000)
    expected = [second.lease_id, first.lease_id, third.lease_id]
    assert [each.lease_id for each in leased(database).messages] == expected
    for message in (first, second):
        assert [each.lease_id for each in leased(database, after=message.lease_id).messages] == expected[
            expected.index(message.lease_id) + 1 :
        ]
    ack(database, first)
    ack(database, second)
    for message in (first, second):
        assert [each.lease_id for each in leased(database, after=message.lease_id).messages] == [third.lease_id]


def test_a_repeated_ack_of_another_message_of_the_lease_is_refused(database: Database) -> None:
    put(database, b"1", b"2")
    first, second = lease(database, 2)
    for message in (first, second):
        ack(database, message)
    assert ack(database, second) == queues.format_id(second.id)
    ref = first.lease_ref
    assert len(ref) == LEASE_BYTES + 1
    mixed = MessageLease(queues.format_id(second.id), format_lease_id(second.id, second.fence, ref), second.fence)
    with pytest.raises(QueueMessageLeaseMismatch):
        database.transact(queues.ack, JOBS, mixed)


def test_some_of_several_acks_have_results(database: Database) -> None:
    ids = [each.id for each in put(database, b"1", b"2")]
    proofs = [proof(message) for message in lease(database, 2)]
    assert database.transact(queues.ack_many, JOBS, proofs, [None, NewResult(b"done")]) == ids
    found = [database.read(queues.result, JOBS, id) for id in ids]
    assert found[0] is None
    assert found[1] is not None
    assert found[1].value == b"done"


# Lost records: the next call works, and `repair` counts again.


def test_a_message_whose_record_is_lost_is_not_found(database: Database) -> None:
    (receipt,) = put(database, b"1", keep_result=True)
    lease(database)
    lose(database, *prefix_range(KEYS.due))
    with pytest.raises(MessageNotFound):
        database.read(queues.get, JOBS, receipt.id)
    _, second = put(database, b"1", b"2", key="host")
    lose(database, *prefix_range(KEYS.lanes.prefix))
    with pytest.raises(MessageNotFound):
        database.read(queues.get, JOBS, second.id)


def test_a_queue_delivers_nothing_in_place_of_a_lost_message(database: Database) -> None:
    put(database, b"1")
    lose(database, *KEYS.ready_range())
    assert lease(database) == []


def test_a_key_goes_on_after_its_ready_message_was_lost(database: Database, clock: ManualClock) -> None:
    put(database, b"1", key="host")
    lose(database, *KEYS.ready_range())
    paused = database.transact(queues.pause_key, JOBS, "host", until_ms=clock.now_ms() + 1_000)
    assert (paused.ready, paused.blocked) == (0, 0)
    put(database, b"2", key="host")
    clock.advance_ms(1_000)
    assert payloads(lease(database)) == [b"2"]


def test_a_key_goes_on_after_a_waiting_message_was_lost(database: Database) -> None:
    set_policy(database, concurrency_per_key=1)
    put(database, b"1", b"2", key="host")
    lose(database, *prefix_range(KEYS.lanes.prefix))
    ack(database, lease_one(database))
    assert lease(database) == []
    put(database, b"3", key="host")
    assert payloads(lease(database)) == [b"3"]


def test_a_schedule_that_was_lost_does_not_run(database: Database, clock: ManualClock) -> None:
    database.transact(queues.set_schedule, JOBS, "s", cron="* * * * *", timezone="UTC", message=NewMessage(b"tick"))
    lose(database, *KEYS.schedules.range())
    clock.advance_ms(60_000)
    assert lease(database) == []
    assert not has_any(database, KEYS.due)


# Outcomes and unique keys expire. The clock of the tests starts at 20 seconds past a minute.


def test_an_outcome_that_was_kept_again_expires_at_its_new_time(database: Database, clock: ManualClock) -> None:
    set_policy(database, result_ttl_seconds=60)
    (receipt,) = put(database, b"1", keep_result=True)
    reject(database, lease_one(database))
    clock.advance_ms(50_000)
    assert database.transact(queues.redrive, JOBS) == 1
    database.transact(queues.ack, JOBS, proof(lease_one(database)), NewResult(b"done"))
    clock.advance_ms(50_000)
    process_due(database)
    found = database.read(queues.result, JOBS, receipt.id)
    assert found is not None
    assert found.value == b"done"
    clock.advance_ms(60_000)
    process_due(database)
    assert remaining_keys(database) == []


def test_the_outcome_of_a_dead_letter_that_was_redriven_is_gone_before_it_expires(
    database: Database, clock: ManualClock
) -> None:
    set_policy(database, result_ttl_seconds=60)
    put(database, b"1", keep_result=True)
    reject(database, lease_one(database))
    database.transact(queues.redrive, JOBS)
    assert has_any(database, KEYS.expiries)
    clock.advance_ms(100_000)
    process_due(database)
    assert not has_any(database, KEYS.expiries)
    assert counts(database) == {"ready": 1}


def test_a_unique_key_that_was_claimed_again_expires_at_its_new_time(database: Database, clock: ManualClock) -> None:
    put(database, b"1", unique_key="u", unique_until=60)
    clock.advance_ms(70_000)
    (second,) = put(database, b"2", unique_key="u", unique_until=60)
    assert not second.duplicate
    for message in lease(database, 2):
        ack(database, message)
    clock.advance_ms(30_000)
    process_due(database)
    assert put(database, b"3", unique_key="u")[0].id == second.id
    clock.advance_ms(60_000)
    process_due(database)
    assert remaining_keys(database) == []


def test_the_blob_of_a_result_is_released_when_the_result_expires(database: Database, clock: ManualClock) -> None:
    digest = bytes(32)
    database.transact(blobs.record, "main", digest, Blob(size=5, inline=b"12345"))
    set_policy(database, result_ttl_seconds=60)
    put(database, b"1")
    result = NewResult(blob=digest.hex(), blob_size=5)
    database.transact(queues.ack, JOBS, proof(lease_one(database)), result)
    assert database.read(blobs.mark_of, "main", digest) is None
    clock.advance_ms(100_000)
    process_due(database)
    assert database.read(blobs.mark_of, "main", digest) is not None


def test_the_record_of_a_cancelled_lease_expires(database: Database, clock: ManualClock) -> None:
    set_policy(database, result_ttl_seconds=60)
    (receipt,) = put(database, b"1")
    lease(database)
    database.transact(queues.cancel, JOBS, receipt.id)
    assert has_any(database, KEYS.cancelled)
    clock.advance_ms(100_000)
    process_due(database)
    assert remaining_keys(database) == []


# Dead letters, deletion and upkeep.


def test_only_dead_letters_that_are_still_ready_are_dropped(database: Database) -> None:
    put(database, b"1", b"2")
    for message in lease(database, 2):
        reject(database, message)
    letters, _ = database.read(dead_letters.sizes, DEAD, limit=10)
    lease(database, queue=DEAD)

    def drop_the_leased_one(tx: Transaction) -> tuple[int, bool]:
        return dead_letters.drop(tx, DEAD, letters[:1]), tx.has_writes

    assert database.transact(drop_the_leased_one) == (0, False)
    count = database.transact(dead_letters.drop, DEAD, letters)
    assert (count, counts(database)) == (1, {"dead": 1})


def test_a_dead_letter_whose_failures_are_not_kept_is_redriven(database: Database) -> None:
    set_policy(database, failures_kept=0)
    put(database, b"1")
    reject(database, lease_one(database), "wrong")
    assert database.transact(queues.redrive, JOBS) == 1
    ack(database, lease_one(database))
    assert remaining_keys(database) == []


def test_a_deletion_removes_messages_that_are_put_meanwhile(database: Database) -> None:
    put(database, b"1")
    work, do = queues.Work(), partial(queues.delete_step, force=False)
    while work.after is not None:
        work = database.transact(queues.step, JOBS, do, work, None)
    put(database, b"2")
    while not work.is_done:
        work = database.transact(queues.step, JOBS, do, work, None)
    assert work.count == 2
    assert not has_any(database, KEYS.prefix)


def test_an_embedded_queue_needs_no_upkeep_of_the_sweeper(database: Database, clock: ManualClock) -> None:
    put(database, b"1", idempotency_key="once")
    clock.advance_ms(86_400_000)
    assert not database.read(queues.needs_upkeep, JOBS)
