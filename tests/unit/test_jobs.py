"""The life of a job, as its users see it: by id, results, unique keys, keys with limits, debounce."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import fastness
from fastness import NewMessage, Plane, QueuePolicy
from fastness.errors import (
    BatchTooLarge,
    BlobNotFound,
    FastnessError,
    Fenced,
    InvalidArgument,
    MessageCancelled,
    MessageFailed,
    MessageFinished,
    MessageLeased,
    MessageNotFound,
    PayloadTooLarge,
    QueueMessageLeaseMismatch,
    ResultNotKept,
    ResultNotReady,
)
from fastness.handles.sync.queues import Queue
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.limits import FIND_ENTRIES
from fastness.runtime.maintenance.health_checks import all_queues
from fastness.runtime.maintenance.queue_repair import repair_queues
from fastness.testing.clock import ManualClock
from fastness.wire.queues import AckMessages, MessageLease, NewResult, WaitForCancel
from fastness.wire.stored_messages import parse_id
from tests.support.failures import Failures
from tests.support.waiting import eventually
from tests.unit import queue_handle_fixtures
from tests.unit.queue_handle_fixtures import BLOB, received
from tests.unit.stored_pairs import everything

url = queue_handle_fixtures.url
plane = queue_handle_fixtures.plane
jobs = queue_handle_fixtures.jobs
threads = queue_handle_fixtures.threads
UNKNOWN_ID = "01900000-0000-7000-8000-000000000000"


def drained(queue: Queue) -> list[Any]:
    """Receives everything that is ready, and acknowledges it."""
    found = []
    for message in queue.receive_many(256, extend_for_seconds=0):
        found.append(message.json())
        message.ack()
    return found


def an_attempt_fails(queue: Queue, owner: str, reason: str) -> None:
    """Receives a message and fails."""
    message = received(queue, owner=owner)
    try:
        raise ValueError(reason)
    except ValueError as error:
        message.nack(error=error, delay_seconds=0)


# By id.


def test_get_says_where_a_message_is(jobs: Queue, clock: ManualClock) -> None:
    ready, delayed = jobs.put("ready"), jobs.put("delayed", delay_seconds=5)
    head, blocked = jobs.put("head", group="g"), jobs.put("blocked", group="g")
    states = [jobs.get(each.id).state for each in (ready, delayed, head, blocked)]
    assert states == ["ready", "delayed", "ready", "blocked"]
    assert jobs.get(delayed.id).due_ms == clock.now_ms() + 5_000
    message = received(jobs, owner="ada")
    info = jobs.get(ready.id)
    assert (info.state, info.owner, info.attempts, info.expires_ms) == ("leased", "ada", 1, message.expires_ms)
    assert (info.lease_id, info.fence) == (message.lease.lease_id, message.fence)


def test_get_shows_every_failed_attempt_with_its_traceback(jobs: Queue) -> None:
    receipt = jobs.put("x", max_attempts=2)
    for reason in ("first", "second"):
        message = received(jobs)
        try:
            raise ValueError(reason)
        except ValueError as error:
            message.nack(error=error, delay_seconds=0)
    info = jobs.get(receipt.id)
    assert (info.state, info.failure_attempts) == ("dead", 2)
    assert [each.message for each in info.failures] == ["first", "second"]
    assert all("ValueError" in (each.traceback or "") for each in info.failures)


def test_the_failed_attempts_of_a_message_are_known_as_long_as_its_outcome(jobs: Queue, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(result_ttl_seconds=60))
    receipt = jobs.put("x", keep_result=True)
    for owner, reason in (("ada", "first"), ("bob", "second")):
        an_attempt_fails(jobs, owner, reason)
    live = jobs.get(receipt.id)
    received(jobs, owner="eve").ack(result=42)
    info = jobs.get(receipt.id)
    assert (info.state, info.attempts, info.failure_attempts, info.owner) == ("done", 3, 2, "eve")
    assert [(each.attempt, each.owner, each.message) for each in info.failures] == [
        (1, "ada", "first"),
        (2, "bob", "second"),
    ]
    assert all("ValueError" in (each.traceback or "") for each in info.failures)
    assert info.failures == live.failures
    clock.advance_ms(60_000)
    with pytest.raises(MessageNotFound):
        jobs.get(receipt.id)


@pytest.mark.parametrize("is_leased", [True, False])
def test_a_cancelled_message_shows_its_failed_attempts(jobs: Queue, is_leased: bool) -> None:
    receipt = jobs.put("x")
    an_attempt_fails(jobs, "ada", "first")
    if is_leased:
        received(jobs, owner="bob")
    cancelled = jobs.cancel(receipt.id)
    assert [each.message for each in cancelled.failures] == ["first"]
    assert cancelled.owner == ("bob" if is_leased else None)
    assert jobs.get(receipt.id) == jobs.cancel(receipt.id) == cancelled


def test_a_redriven_message_that_is_done_shows_all_its_failed_attempts(jobs: Queue) -> None:
    receipt = jobs.put("x", max_attempts=1, keep_result=True)
    an_attempt_fails(jobs, "ada", "first")
    jobs.redrive([receipt.id])
    received(jobs).ack()
    info = jobs.get(receipt.id)
    assert (info.state, info.failure_attempts, [each.message for each in info.failures]) == ("done", 0, ["first"])


def test_nothing_is_left_of_the_failed_attempts_once_they_have_expired(
    jobs: Queue, plane: Plane, clock: ManualClock
) -> None:
    jobs.set_policy(QueuePolicy(result_ttl_seconds=60))
    kept, cancelled, plain = jobs.put("x", keep_result=True), jobs.put("x"), jobs.put("x")
    for message in jobs.receive_many(3):
        message.nack(error=ValueError("first"), delay_seconds=0)
    by_id = {message.id: message for message in jobs.receive_many(3)}
    by_id[kept.id].ack()
    by_id[plain.id].ack()
    jobs.cancel(cancelled.id)
    keys = queues.keys_of(QueueKey("main", "jobs"))

    def left() -> list[bytes]:
        found = plane.transact(lambda tx: tx.scan(keys.failures, keys.failures + b"\xff" * 17, limit=10))
        return sorted(key[len(keys.failures) :] for key, _ in found)

    assert left() == sorted(parse_id(each.id) for each in (kept, cancelled)), "without an outcome, nothing is kept"
    clock.advance_ms(200_000)
    jobs.receive()
    assert left() == []


@pytest.mark.parametrize("call", ["get", "cancel", "result", "update"])
def test_an_unknown_message_is_a_typed_error(jobs: Queue, call: str) -> None:
    options: dict[str, Any] = {"priority": 1} if call == "update" else {}
    with pytest.raises((MessageNotFound, ResultNotKept), match="keep_result=True"):
        getattr(jobs, call)(UNKNOWN_ID, **options)
    with pytest.raises(InvalidArgument, match="is not a message id"):
        getattr(jobs, call)("nonsense", **options)


@pytest.mark.parametrize("options", [{}, {"delay_seconds": 5}, {"key": "a"}, {"unique_key": "u"}, {"ttl_seconds": 60}])
def test_a_message_that_waits_is_cancelled_at_once(jobs: Queue, plane: Plane, options: dict[str, Any]) -> None:
    receipt = jobs.put("x" * 3_000, **options)
    assert jobs.cancel(receipt.id).state == "cancelled"
    assert jobs.receive() is None
    assert jobs.get(receipt.id).state == "cancelled"
    assert jobs.cancel(receipt.id).state == "cancelled"
    with pytest.raises(MessageCancelled):
        receipt.result()
    stats = jobs.stats()
    assert (stats.ready, stats.delayed, stats.blocked, stats.leased, stats.dead) == (0, 0, 0, 0, 0)


def test_cancelling_a_message_of_a_group_lets_the_next_one_pass(jobs: Queue) -> None:
    first, second, third = [jobs.put(n, group="g") for n in range(3)]
    assert jobs.cancel(second.id).state == "cancelled"
    assert jobs.cancel(first.id).state == "cancelled"
    assert drained(jobs) == [2]
    assert third.duplicate is False


@pytest.mark.parametrize("settle", ["ack", "nack", "reject", "extend", "ack_many", "receive_many", "with"])
def test_settling_a_cancelled_message_is_refused_as_that(jobs: Queue, settle: str) -> None:
    receipt = jobs.put("x", max_attempts=1)
    jobs.put("another")
    message, other = jobs.receive_many(2, extend_for_seconds=0)
    jobs.cancel(receipt.id)
    if settle == "receive_many":
        assert jobs.receive_many(1, ack=[message, other]) == []
        assert other.settled
    else:
        with pytest.raises(MessageCancelled, match="was cancelled"):
            if settle == "ack_many":
                jobs.ack_many([message])
            elif settle == "with":
                with message:
                    pass
            else:
                getattr(message, settle)()
    assert message.cancelled
    assert message.lost
    assert isinstance(MessageCancelled("x"), Fenced)
    assert jobs.get(receipt.id).state == "cancelled"
    assert jobs.dead_letters() == []


def test_a_message_that_was_extended_alone_is_cancelled(jobs: Queue) -> None:
    receipts = jobs.put_many(["a", "b"])
    first, second = jobs.receive_many(2, extend_for_seconds=0)
    second.extend(100)
    assert jobs.get(receipts[1].id).state == "leased"
    assert jobs.cancel(receipts[1].id).state == "cancelled"
    with pytest.raises(MessageCancelled):
        second.ack()
    first.ack()


def test_a_message_that_is_done_or_dead_is_not_cancelled(jobs: Queue) -> None:
    done, dead = jobs.put("done", keep_result=True), jobs.put("dead")
    for message in jobs.receive_many(2, extend_for_seconds=0):
        message.ack() if message.json() == "done" else message.reject("no")
    assert jobs.cancel(done.id).state == "done"
    assert jobs.cancel(dead.id).state == "dead"
    assert len(jobs.dead_letters()) == 1


def test_a_plain_message_is_found_behind_many_leases_and_delays(jobs: Queue, plane: Plane) -> None:
    """The search for a lease takes several transactions."""
    for _ in range(FIND_ENTRIES // 250 + 1):
        jobs.put_many([NewMessage(b"later", delay_seconds=10) for _ in range(250)])
    receipt = jobs.put("wanted")
    message = received(jobs, visibility_seconds=1_000)
    assert jobs.get(receipt.id).state == "leased"
    with pytest.raises(MessageLeased):
        jobs.update(receipt.id, priority=1)
    assert jobs.cancel(receipt.id).state == "cancelled"
    with pytest.raises(MessageCancelled):
        message.ack()


def test_what_became_of_a_message_is_known_while_there_are_many_leases_and_delays(jobs: Queue) -> None:
    """The search for a lease ends without one, and what is kept of the message is the answer."""
    done = jobs.put("done", keep_result=True)
    received(jobs).ack()
    for _ in range(FIND_ENTRIES // 250 + 1):
        jobs.put_many([NewMessage(b"later", delay_seconds=10) for _ in range(250)])
    jobs.put("leased")
    received(jobs, visibility_seconds=1_000)
    assert jobs.get(done.id).state == "done"
    assert jobs.cancel(done.id).state == "done"
    with pytest.raises(MessageNotFound, match="has no message"):
        jobs.get(UNKNOWN_ID)


def test_a_message_that_waits_changes_its_priority_and_its_delay(jobs: Queue, clock: ManualClock) -> None:
    first, second = jobs.put("first"), jobs.put("second", ttl_seconds=60)
    assert jobs.update(second.id, priority=9).priority == 9
    assert jobs.update(first.id, delay_seconds=3).state == "delayed"
    assert drained(jobs) == ["second"]
    assert jobs.update(first.id, priority=8).due_ms == clock.now_ms() + 3_000
    assert jobs.update(first.id, delay_seconds=0).state == "ready"
    assert drained(jobs) == ["first"]


def test_an_update_moves_the_ttl_with_the_message(jobs: Queue, clock: ManualClock) -> None:
    receipt = jobs.put("x", ttl_seconds=10)
    jobs.update(receipt.id, priority=9)
    clock.advance_ms(10_001)
    assert jobs.receive() is None
    assert jobs.stats().ready == 0


def test_a_message_that_does_not_wait_cannot_change(jobs: Queue) -> None:
    receipt = jobs.put("x", keep_result=True)
    message = received(jobs, owner="ada")
    with pytest.raises(MessageLeased, match="leased by ada"):
        jobs.update(receipt.id, priority=1)
    message.ack()
    with pytest.raises(MessageFinished, match="is done"):
        jobs.update(receipt.id, priority=1)


@pytest.mark.parametrize("options", [{}, {"priority": 10}, {"priority": -1}, {"delay_seconds": -1}])
def test_an_invalid_update_changes_nothing(jobs: Queue, plane: Plane, options: dict[str, Any]) -> None:
    receipt = jobs.put("x")
    before = everything(plane)
    with pytest.raises(InvalidArgument):
        jobs.update(receipt.id, **options)
    assert everything(plane) == before


# Results.


@pytest.mark.parametrize("value", [{"n": 1}, [1, None], "text", 0, False, b"", b"\xff" * 100, "x" * BLOB, b"x" * BLOB])
def test_a_result_is_what_the_ack_had(jobs: Queue, value: Any) -> None:
    receipt = jobs.put("x")
    received(jobs).ack(result=value)
    assert receipt.result() == value
    assert jobs.result(receipt.id) == value
    assert jobs.get(receipt.id).has_result


def test_a_kept_message_without_a_result_has_none(jobs: Queue) -> None:
    receipt = jobs.put("x", keep_result=True)
    received(jobs).ack()
    assert receipt.result() is None
    assert not jobs.get(receipt.id).has_result


def test_a_result_is_kept_for_its_time(jobs: Queue, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(result_ttl_seconds=60))
    receipt = jobs.put("x")
    received(jobs).ack(result=1)
    clock.advance_ms(59_999)
    assert receipt.result() == 1
    clock.advance_ms(1)
    with pytest.raises(ResultNotKept, match="keep_result=True"):
        receipt.result()


def test_nothing_is_left_of_results_that_have_expired(jobs: Queue, plane: Plane, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(result_ttl_seconds=60))
    jobs.put_many([NewMessage(b"x", keep_result=True) for _ in range(250)])
    jobs.put_many([NewMessage(b"x", keep_result=True) for _ in range(250)])
    for message in jobs.receive_many(256) + jobs.receive_many(256):
        message.ack(result=1)
    clock.advance_ms(200_000)
    for _ in range(4):
        jobs.receive()
    keys = queues.keys_of(QueueKey("main", "jobs"))
    left = plane.transact(
        lambda tx: [tx.scan(place, place + b"\xff", limit=1) for place in (keys.outcomes, keys.expiries, keys.due)]
    )
    assert left == [[], [], []]


def test_a_message_that_is_not_done_has_no_result_yet(jobs: Queue) -> None:
    receipt = jobs.put("x")
    with pytest.raises(ResultNotReady, match="not done yet"):
        receipt.result()
    message = received(jobs)
    with pytest.raises(ResultNotReady):
        receipt.result()
    message.ack()
    with pytest.raises(ResultNotKept):
        receipt.result()


@pytest.mark.parametrize("kept", [True, False])
def test_the_result_of_a_failed_message_is_its_last_failure(jobs: Queue, kept: bool) -> None:
    receipt = jobs.put("x", keep_result=kept)
    received(jobs).reject(ValueError("no such file"))
    with pytest.raises(MessageFailed, match="ValueError: no such file"):
        receipt.result()
    jobs.redrive([receipt.id])
    with pytest.raises(ResultNotReady):
        receipt.result()
    received(jobs).ack(result="at last")
    assert receipt.result() == "at last"


@pytest.mark.parametrize("how", ["ack", "reject", "cancel"])
def test_a_caller_that_waits_for_a_result_gets_it_with_the_commit(
    jobs: Queue, plane: Plane, threads: ThreadPoolExecutor, how: str
) -> None:
    """The clock stands still, so nothing but the commit can wake the caller."""
    receipt = jobs.put("x", keep_result=True)
    message = received(jobs)
    watches = plane._transport.services.database._watches  # type: ignore[attr-defined]
    before = watches.count
    waiting = threads.submit(receipt.result, wait_seconds=600)
    eventually(lambda: watches.count > before)
    if how == "ack":
        message.ack(result=7)
        assert waiting.result(30) == 7
        return
    message.reject("no") if how == "reject" else jobs.cancel(receipt.id)
    with pytest.raises(MessageFailed if how == "reject" else MessageCancelled):
        waiting.result(30)


async def test_a_task_waits_for_a_result(url: str) -> None:
    async with fastness.open_async(url) as plane:
        queue = plane.queue("jobs")
        receipt = await queue.put("x")
        waiting = asyncio.create_task(receipt.result(wait_seconds=30))
        message = await queue.receive()
        assert message is not None
        await message.ack(result={"n": 1})
        assert await waiting == {"n": 1}


def test_a_result_that_is_too_large_or_not_stored_settles_nothing(jobs: Queue, plane: Plane) -> None:
    jobs.put("x")
    message = received(jobs)
    before = everything(plane)
    refused: list[tuple[NewResult, type[FastnessError]]] = [
        (NewResult(b"x" * BLOB), PayloadTooLarge),
        (NewResult(b"x", blob="0" * 64), InvalidArgument),
        (NewResult(blob="0" * 64, blob_size=1), BlobNotFound),
    ]
    for result, error in refused:
        with pytest.raises(error):
            plane._transport.call(AckMessages("jobs", [message.lease], "main", results=[result]))
    with pytest.raises(InvalidArgument, match="give one for each"):
        plane._transport.call(AckMessages("jobs", [message.lease], "main", results=[None, None]))
    assert everything(plane) == before


def test_a_repeated_ack_keeps_the_first_result(jobs: Queue) -> None:
    receipt = jobs.put("x")
    message = received(jobs)
    message.ack(result=1)
    message.ack(result=2)
    assert receipt.result() == 1


# Unique keys.


def test_a_unique_key_has_one_message_until_that_is_done(jobs: Queue) -> None:
    first = jobs.put(1, unique_key="k")
    second = jobs.put(2, unique_key="k")
    assert (second.id, second.duplicate) == (first.id, True)
    message = received(jobs)
    assert jobs.put(3, unique_key="k").duplicate
    message.nack(delay_seconds=0)
    assert jobs.put(4, unique_key="k").duplicate
    received(jobs).ack()
    assert not jobs.put(5, unique_key="k").duplicate


@pytest.mark.parametrize("end", ["ack", "cancel", "reject", "purge", "ttl"])
def test_a_unique_key_is_free_once_its_message_is_gone(jobs: Queue, clock: ManualClock, end: str) -> None:
    first = jobs.put(1, unique_key="k", ttl_seconds=10)
    if end == "ack":
        received(jobs).ack()
    elif end == "reject":
        received(jobs).reject("no")
    elif end == "cancel":
        jobs.cancel(first.id)
    elif end == "purge":
        jobs.purge()
    else:
        clock.advance_ms(10_000)
        assert jobs.receive() is None
    assert not jobs.put(2, unique_key="k").duplicate


def test_a_unique_key_until_leased_is_free_then(jobs: Queue) -> None:
    first = jobs.put(1, unique_key="k", unique_until="leased")
    assert jobs.put(2, unique_key="k").duplicate
    message = received(jobs)
    second = jobs.put(3, unique_key="k")
    assert second.id != first.id
    message.ack()  # Does not free the key of the second one.
    assert jobs.put(4, unique_key="k").id == second.id


def test_a_unique_key_for_a_time_outlives_its_message(jobs: Queue, clock: ManualClock) -> None:
    first = jobs.put(1, unique_key="k", unique_until=60)
    received(jobs).ack()
    clock.advance_ms(59_999)
    assert jobs.put(2, unique_key="k").id == first.id
    clock.advance_ms(1)
    assert not jobs.put(3, unique_key="k").duplicate


def test_a_dead_letter_whose_unique_key_is_taken_is_not_redriven(jobs: Queue) -> None:
    first = jobs.put(1, unique_key="k")
    received(jobs).reject("no")
    second = jobs.put(2, unique_key="k")
    assert jobs.redrive() == 0
    assert jobs.redrive([first.id]) == 0
    jobs.cancel(second.id)
    assert jobs.redrive() == 1
    assert jobs.put(3, unique_key="k").id == first.id


def test_one_batch_has_a_unique_key_once(jobs: Queue) -> None:
    receipts = jobs.put_many([NewMessage(b"1", unique_key="k"), NewMessage(b"2", unique_key="k")])
    assert [each.duplicate for each in receipts] == [False, True]


# Debounce.


def test_only_the_last_of_a_burst_is_delivered(jobs: Queue, clock: ManualClock) -> None:
    receipts = []
    for n in range(5):
        receipts.append(jobs.put(n, debounce_key="page", debounce_seconds=2))
        clock.advance_ms(1_000)
    assert {each.id for each in receipts} == {receipts[0].id}
    assert [each.duplicate for each in receipts] == [False, True, True, True, True]
    assert jobs.receive() is None
    clock.advance_ms(1_000)
    assert drained(jobs) == [4]
    assert not jobs.put(9, debounce_key="page", debounce_seconds=2).duplicate


def test_a_burst_that_does_not_end_is_delivered_in_time(jobs: Queue, clock: ManualClock) -> None:
    delivered = []
    for n in range(12):
        jobs.put(n, debounce_key="page", debounce_seconds=2, debounce_max_seconds=5)
        clock.advance_ms(1_000)
        delivered += drained(jobs)
    assert delivered == [4, 9]


def test_a_debounced_message_takes_its_body_with_it(jobs: Queue, plane: Plane, clock: ManualClock) -> None:
    for body in (b"x" * 3_000, b"y" * BLOB, b"z"):
        jobs.put(body, debounce_key="page", debounce_seconds=2, ttl_seconds=60)
    clock.advance_ms(2_000)
    message = received(jobs)
    assert message.read() == b"z"
    message.ack()
    keys = queues.keys_of(QueueKey("main", "jobs"))
    places = (keys.body, keys.due, keys.debounced.prefix, keys.locations)
    left = plane.transact(lambda tx: [tx.scan(place, place + b"\xff", limit=1) for place in places])
    assert left == [[], [], [], []]


# Keys.


def test_a_key_has_at_most_so_many_leases(jobs: Queue) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=2))
    for n in range(4):
        jobs.put(["a", n], key="a")
    jobs.put(["b", 0], key="b")
    jobs.put(["none", 0])
    messages = jobs.receive_many(10, extend_for_seconds=0)
    assert [each.json() for each in messages] == [["a", 0], ["a", 1], ["b", 0], ["none", 0]]
    assert jobs.stats().blocked == 2
    messages[0].ack()
    messages[1].nack(delay_seconds=5)
    assert [each.json() for each in jobs.receive_many(10)] == [["a", 2], ["a", 3]]


def test_a_lease_that_ends_frees_its_slot(jobs: Queue, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=1))
    jobs.put_many([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    received(jobs)
    assert jobs.receive() is None
    clock.advance_ms(30_000)
    assert received(jobs).payload == b"1"


def test_a_key_keeps_its_rate(jobs: Queue, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(rate_per_key=2.0, burst_per_key=3))
    for n in range(6):
        jobs.put(n, key="a")
        jobs.put(n + 100, key="b")
    assert drained(jobs) == [0, 100, 1, 101, 2, 102]
    clock.advance_ms(499)
    assert drained(jobs) == []
    clock.advance_ms(1)
    assert drained(jobs) == [3, 103]
    clock.advance_ms(60_000)
    assert drained(jobs) == [4, 104, 5, 105]


def test_a_paused_key_goes_on_at_its_moment(jobs: Queue, clock: ManualClock) -> None:
    jobs.put_many([NewMessage(b"1", key="a"), NewMessage(b"2", key="b")])
    until_ms = clock.now_ms() + 10_000
    info = jobs.pause_key("a", datetime.fromtimestamp(until_ms / 1_000, UTC))
    assert (info.ready, info.blocked, info.paused_until_ms) == (0, 1, until_ms)
    assert [each.payload for each in jobs.receive_many(10)] == [b"2"]
    clock.advance_ms(9_999)
    assert jobs.receive() is None
    clock.advance_ms(1)
    assert received(jobs).payload == b"1"
    assert jobs.key("a").paused_until_ms is None


def test_a_paused_key_is_resumed(jobs: Queue) -> None:
    jobs.pause_key("a", 60)
    jobs.put(1, key="a")
    assert jobs.receive() is None
    assert jobs.resume_key("a").ready == 1
    assert drained(jobs) == [1]
    assert msgspec.structs.astuple(jobs.key("a")) == ("a", 0, 0, 0, None)


def test_priorities_count_within_a_key(jobs: Queue) -> None:
    for fair in (False, True):
        jobs.set_policy(QueuePolicy(fair=fair, concurrency_per_key=1))
        for priority in (5, 1, 9, 5):
            jobs.put(priority, key="a", priority=priority)
        order = []
        while message := jobs.receive(extend_for_seconds=0):
            order.append(message.json())
            message.ack()
        assert order == [9, 5, 5, 1]


def test_keys_take_turns(jobs: Queue) -> None:
    jobs.set_policy(QueuePolicy(fair=True))
    for n in range(4):
        jobs.put(f"a{n}", key="a", priority=9)
    jobs.put("b0", key="b")
    jobs.put("c0", key="c", priority=0)
    assert drained(jobs) == ["a0", "b0", "c0", "a1", "a2", "a3"]


def test_a_new_key_is_delivered_soon_beside_a_large_backlog(jobs: Queue) -> None:
    jobs.set_policy(QueuePolicy(fair=True))
    for _ in range(20):
        jobs.put_many([NewMessage(b"large", key="large") for _ in range(250)])
    for _ in range(50):
        received(jobs).ack()
    jobs.put(b"small", key="small")
    assert b"small" in [received(jobs).payload for _ in range(2)]


def test_a_key_and_a_group_work_together(jobs: Queue) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=1))
    jobs.put("g1", group="g", key="a")
    jobs.put("g2", group="g", key="a")
    jobs.put("h1", group="h", key="a")
    order = []
    while message := jobs.receive(extend_for_seconds=0):
        assert jobs.receive() is None
        order.append(message.json())
        message.ack()
    assert order in (["g1", "g2", "h1"], ["g1", "h1", "g2"])


def test_a_ttl_ends_messages_that_wait_for_their_key(jobs: Queue, clock: ManualClock) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=1))
    jobs.put_many([NewMessage(b"1", key="a"), NewMessage(b"2", key="a", ttl_seconds=5), NewMessage(b"3", key="a")])
    message = received(jobs)
    clock.advance_ms(5_000)
    message.ack()
    assert received(jobs).payload == b"3"
    assert jobs.stats().blocked == 0


def test_a_purge_takes_messages_that_wait_for_their_key(jobs: Queue) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=1))
    jobs.put_many([NewMessage(b"x", key="a") for _ in range(5)])
    message = received(jobs)
    assert jobs.purge() == 4
    message.ack()
    assert jobs.receive() is None
    jobs.put(b"new", key="a")
    assert received(jobs).payload == b"new"


def test_new_limits_apply_to_keys_that_wait(jobs: Queue, clock: ManualClock) -> None:
    """More keys than one transaction lets go on, each with a message that is leased and does not end."""
    jobs.set_policy(QueuePolicy(concurrency_per_key=1, visibility_seconds=600))
    keys = [f"key {number}" for number in range(70)]
    jobs.put_many([NewMessage(b"first", key=key) for key in keys])
    assert len(jobs.receive_many(256, visibility_seconds=600, extend_for_seconds=0)) == 70
    jobs.put_many([NewMessage(b"second", key=key) for key in keys])
    assert jobs.receive() is None
    jobs.set_policy(QueuePolicy(concurrency_per_key=2, rate_per_key=1.0))
    assert sum(len(jobs.receive_many(256, extend_for_seconds=0)) for _ in range(4)) == 70
    jobs.put(b"third", key=keys[0])
    jobs.set_policy(QueuePolicy(rate_per_key=0.01))
    assert jobs.receive() is None
    jobs.set_policy(QueuePolicy())
    assert received(jobs).payload == b"third"


def test_the_policy_is_checked(jobs: Queue, plane: Plane) -> None:
    before = everything(plane)
    for field, value in (
        ("concurrency_per_key", 0),
        ("rate_per_key", 0.0),
        ("burst_per_key", 0),
        ("result_ttl_seconds", 0.0),
    ):
        with pytest.raises(InvalidArgument, match=field):
            jobs.set_policy(msgspec.structs.replace(QueuePolicy(), **{field: value}))
    assert everything(plane) == before


def test_invalid_options_put_nothing(jobs: Queue, plane: Plane) -> None:
    failures = Failures()
    options: Any
    for options in [
        {"key": ""},
        {"key": "x" * 257},
        {"key": "\ud800"},
        {"key": 5},
        {"unique_key": ""},
        {"unique_key": "x" * 257},
        {"unique_key": "k", "unique_until": "later"},
        {"unique_key": "k", "unique_until": 0},
        {"unique_until": "leased"},
        {"debounce_seconds": 5},
        {"debounce_key": "k"},
        {"debounce_key": "k", "debounce_seconds": -1},
        {"debounce_key": "k", "debounce_seconds": 1, "group": "g"},
        {"debounce_key": "k", "debounce_seconds": 1, "unique_key": "u"},
        {"debounce_key": "k", "debounce_seconds": 1, "delay_seconds": 1},
        {"keep_result": "yes"},
    ]:
        with failures.of(options):
            before = everything(plane)
            with pytest.raises(InvalidArgument):
                jobs.put("x", **options)
            assert everything(plane) == before
    failures.check()


@pytest.mark.parametrize("until", [-1.0, 1e12])
def test_an_invalid_pause_changes_nothing(jobs: Queue, plane: Plane, until: float) -> None:
    before = everything(plane)
    with pytest.raises(InvalidArgument):
        jobs.pause_key("a", until)
    with pytest.raises(InvalidArgument):
        jobs.pause_key("", 5)
    assert everything(plane) == before


def test_too_many_leases_are_not_waited_for(plane: Plane) -> None:
    lease = MessageLease(UNKNOWN_ID, "x", 1)
    with pytest.raises(BatchTooLarge):
        plane._transport.call(WaitForCancel("jobs", [lease] * 257, 1.0, "main"))


def test_a_cancel_is_waited_for(jobs: Queue, plane: Plane, threads: ThreadPoolExecutor) -> None:
    jobs.put_many(["a", "b"])
    first, second = jobs.receive_many(2, extend_for_seconds=0)
    waiting = threads.submit(plane._transport.call, WaitForCancel("jobs", [first.lease, second.lease], 600.0, "main"))
    jobs.cancel(second.id)
    assert [each.code for each in waiting.result(30).outcomes] == [None, MessageCancelled.code]


def test_a_wait_for_a_cancel_ends_by_the_clock_of_the_plane(threads: ThreadPoolExecutor) -> None:
    clock = ManualClock()
    with fastness.open("memory:", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put("a")
        (message,) = jobs.receive_many(1, extend_for_seconds=0)
        waiting = threads.submit(plane._transport.call, WaitForCancel("jobs", [message.lease], 600.0, "main"))
        watches = plane._transport.services.database._watches  # type: ignore[attr-defined]
        eventually(lambda: watches.count)
        clock.advance_ms(600_000)
        (ended,) = waiting.result(30).outcomes
        assert ended.code == QueueMessageLeaseMismatch.code, "its lease has expired by then"


# Doctor and repair.


def test_the_doctor_finds_a_key_that_does_not_go_on_and_repair_mends_it(jobs: Queue, plane: Plane) -> None:
    jobs.set_policy(QueuePolicy(concurrency_per_key=1))
    jobs.put_many([NewMessage(str(n).encode(), key="a") for n in range(3)])
    database = plane._transport.services.database  # type: ignore[attr-defined]
    assert [each for each in all_queues(database) if not isinstance(each, int)] == []
    key = queues.keys_of(QueueKey("main", "jobs")).key_states.key("a")
    plane.transact(lambda tx: tx.delete(key))
    (found,) = [each for each in all_queues(database) if not isinstance(each, int)]
    assert "does not match its messages" in found.what
    assert [queue.name for queue in repair_queues(database)] == ["jobs"]
    assert [each for each in all_queues(database) if not isinstance(each, int)] == []
    order = []
    while message := jobs.receive(extend_for_seconds=0):
        order.append(message.payload)
        message.ack()
    assert order == [b"0", b"1", b"2"]


def test_a_search_ends_where_it_was_told(jobs: Queue, plane: Plane) -> None:
    queue = QueueKey("main", "jobs")
    assert plane.transact(lambda tx: queues.search_leases(tx, queue, [UNKNOWN_ID], after=b"")) == ({}, None)
