"""Queue handles: putting, receiving, with blocks, payloads, administration and atomic lists."""

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, Tier
from fastness.errors import (
    BatchTooLarge,
    BlobNotFound,
    CasMismatch,
    EmptyBatch,
    FastnessError,
    Fenced,
    HeadAdvanced,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    MessageCancelled,
    PayloadTooLarge,
    QueueInUse,
    QueueMessageLeaseMismatch,
)
from fastness.handles.sync.messages import packed_acks
from fastness.handles.sync.queues import Queue
from fastness.handles.workers import RestartPolicy
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.queues import AckMessages, MessageLease, NewMessage, PutMessages, QueuePolicy
from fastness.wire.requests import Request
from tests.support.waiting import eventually
from tests.unit import queue_handle_fixtures
from tests.unit.queue_handle_fixtures import (
    BLOB,
    LONG,
    PATIENCE_SECONDS,
    STREAMED,
    Bench,
    counts,
    mark,
    received,
    served,
    waiting,
)
from tests.unit.stored_pairs import everything

url = queue_handle_fixtures.url
plane = queue_handle_fixtures.plane
jobs = queue_handle_fixtures.jobs
threads = queue_handle_fixtures.threads


# Putting and receiving.


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 100_000 + b"]" * 100_000])
def test_a_payload_that_cannot_be_read_as_json_is_a_typed_error(jobs: Queue, payload: bytes) -> None:
    jobs.put(payload)
    with received(jobs) as message, pytest.raises(InvalidValue, match="is not JSON"):
        message.json()


def test_a_body_that_nests_too_deep_is_refused_and_nothing_is_put(jobs: Queue) -> None:
    body: list[Any] = []
    for _ in range(100_000):
        body = [body]
    with pytest.raises(InvalidValue, match="cannot be JSON"):
        jobs.put(body)
    assert jobs.stats().put_total == 0


@pytest.mark.parametrize("body", [{"n": 1, "text": "ü"}, [1, 2.5, None], "text", 5, None, True])
def test_a_body_is_json_unless_it_is_bytes(jobs: Queue, body: Any) -> None:
    jobs.put(body)
    message = received(jobs)
    assert (message.json(), message.delivery.content_type) == (body, "application/json")


@pytest.mark.parametrize("body", [b"", b"\x00\xff", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_received_unchanged(jobs: Queue, body: Any) -> None:
    jobs.put(body)
    message = received(jobs)
    assert (message.payload, message.delivery.content_type) == (bytes(body), "application/octet-stream")


@pytest.mark.parametrize(
    "body",
    [
        object(),
        {"a": object()},
        "\ud800",
        float,
        float("nan"),
        {"a": [None, {"b": float("-inf")}]},
        (1, float("inf")),
        RestartPolicy(first_seconds=float("nan")),
    ],
    ids=[
        "an object",
        "an object inside",
        "half a character",
        "a class",
        "NaN",
        "minus infinity inside",
        "infinity in a tuple",
        "NaN in a struct",
    ],
)
def test_a_body_that_cannot_be_json_is_refused(plane: Plane, jobs: Queue, body: Any) -> None:
    ada = plane.mailbox("ada")
    for call in (
        lambda: jobs.put(body),
        lambda: jobs.put_many([1, body]),
        lambda: jobs.schedule("s", "* * * * *", body),
        lambda: ada.send("bob", body),
        lambda: plane.atomic().put(jobs, body),
        lambda: plane.atomic().send(ada, "bob", body),
        lambda: plane.activity.log("session", {"value": body}),
    ):
        with pytest.raises(InvalidValue, match="cannot be JSON"):
            call()
    assert everything(plane) == []


def test_a_batch_is_acknowledged_by_lease(jobs: Queue, clock: ManualClock) -> None:
    jobs.put_many([NewMessage(b"%d" % number) for number in range(5)])
    first, second = jobs.receive_many(3), jobs.receive_many(2)
    sent = []
    call = jobs._transport.call

    def record(request: Any) -> Any:
        sent.append(request)
        return call(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs._transport, "call", record)
        jobs.ack_many([second[1], *first[1:], second[1]])
    (request,) = sent
    assert (request.leases, [each.mask for each in request.packed]) == ([], [0b10, 0b110])
    assert [message.settled for message in (*first, *second)] == [False, True, True, False, True]
    jobs.extend_many(first[:1], 90)
    held = jobs.held(first[0].id, lease_id=first[0].lease.lease_id, fence=first[0].fence)
    clock.advance_ms(60_000)
    assert received(jobs).id == second[0].id
    with pytest.raises(QueueMessageLeaseMismatch, match=f"1 of 2 messages are not leased any more.*{second[0].id}"):
        jobs.ack_many([held, second[0]])
    assert (held.settled, second[0].lost) == (True, True)
    with pytest.raises(QueueMessageLeaseMismatch, match=f"Message {second[0].id} is not leased as"):
        jobs.ack_many([second[0]])


def test_messages_are_acknowledged_with_the_next_receive(
    jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    jobs.put_many([1, 2, 3, 4])
    first = jobs.receive_many(2)
    second = jobs.receive_many(2, ack=first)
    assert [message.json() for message in second] == [3, 4]
    assert all(message.settled for message in first)
    assert (counts(jobs.stats()), jobs.stats().acked_total) == ({"leased": 2}, 2)
    waiters = []
    for line, message in enumerate(second, 1):  # The second one waits behind the first.
        waiters.append(threads.submit(jobs.receive_many, 1, wait_seconds=LONG, ack=[message]))
        eventually(lambda: jobs.stats().waiting_consumers == line)  # noqa: B023
        assert jobs.stats().acked_total == 2 + line, "the ack does not wait for a message"
    jobs.put_many([5, 6])
    assert sorted(message.json() for waiter in waiters for message in waiter.result(30)) == [5, 6]
    assert all(message.settled for message in second)
    with pytest.raises(InvalidArgument, match="is not a received message"):
        jobs.receive_many(ack=["no message"])  # type: ignore[list-item]


def test_a_message_that_is_lost_when_it_is_acknowledged_with_a_receive_is_marked(
    jobs: Queue, clock: ManualClock
) -> None:
    jobs.put(1, max_attempts=1)
    late = received(jobs)
    clock.advance_ms(60_000)
    assert jobs.receive() is None
    assert jobs.receive_many(ack=[late]) == []
    assert (late.settled, late.lost) == (False, True)


@pytest.mark.parametrize("size", [10, 2_000, 20_000])
def test_what_came_with_a_message_is_decoded_when_it_is_used(jobs: Queue, size: int) -> None:
    body = b"x" * size
    jobs.put(body, attributes={"a": "1"}, correlation_id="c", visibility_seconds=9)
    (peeked,) = jobs.peek()
    with received(jobs, with_state=True) as message:
        delivery = message.delivery
        assert (message.id, message.payload, message.read()) == (peeked.id, body, body)
        assert (message.attributes, message.correlation_id) == ({"a": "1"}, "c")
        assert (message.attempts, message.fence) == (delivery.attempts, delivery.fence) == (1, 1)
        assert message.lease == MessageLease(delivery.id, delivery.lease_id, delivery.fence)
        assert message.expires_ms == delivery.expires_ms == START_MS + 9_000
        message.save_state({"step": 1})
        assert message.state == {"step": 1}
        same = {"id": message.id, "lease_id": delivery.lease_id, "expires_ms": delivery.expires_ms}
        assert (
            msgspec.structs.replace(peeked, **same, payload=body, attempts=1, fence=1, state=delivery.state) == delivery
        )


@pytest.mark.parametrize("bodies", [{"a": 1}, "text", b"bytes", bytearray(b"bytes")], ids=repr)
def test_put_many_refuses_a_single_body(plane: Plane, jobs: Queue, bodies: Any) -> None:
    """Its keys, characters or numbers would become messages."""
    with pytest.raises(InvalidArgument, match=r"put_many\(\[body, …\]\), or put\(body\)"):
        jobs.put_many(bodies)
    assert everything(plane) == []


def test_a_message_changes_when_its_lease_ends(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("work")
    message = jobs.receive_many(1, extend_for_seconds=0)[0]
    assert message.change_visibility(5) == message.expires_ms == START_MS + 5_000
    assert not message.settled
    clock.advance_ms(4_999)
    assert jobs.receive() is None
    clock.advance_ms(1)
    with pytest.raises(QueueMessageLeaseMismatch):
        message.change_visibility(5)
    assert message.lost
    again = received(jobs)
    assert again.change_visibility(0) == 0
    assert again.settled
    assert received(jobs).failure_attempts == 1  # The lease that has ended; to return the message is no failure.
    with pytest.raises(InvalidArgument, match="0 to 43200 s"):
        again.change_visibility(-1)


# Settling many.


def test_many_messages_are_settled_in_one_commit(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    commits = []
    jobs.put_many(range(8))
    database = plane._transport.services.database  # type: ignore[attr-defined]
    stop = database.subscribe(lambda keys, ranges: commits.append(len(keys)))
    first, second, third, fourth = (jobs.receive_many(2, extend_for_seconds=0) for _ in range(4))
    commits.clear()
    jobs.extend_many(first, 90)
    assert {message.expires_ms for message in first} == {START_MS + 90_000}
    assert not any(message.settled for message in first)
    jobs.ack_many(iter(first))
    jobs.nack_many(second, delay_seconds=5, intent="defer", error="ignored")
    jobs.nack_many(third, delay_seconds=0, error=ValueError("boom"))
    jobs.reject_many(fourth, "bad")
    stop()
    assert len(commits) == 5
    assert all(message.settled and not message.lost for message in (*first, *second, *third, *fourth))
    assert counts(jobs.stats()) == {"ready": 2, "delayed": 2, "dead": 2}
    assert {each.last_error for each in jobs.peek()} == {"ValueError: boom"}
    assert {each.failures[-1].error_type for each in jobs.peek()} == {"ValueError"}
    jobs.ack_many(first)  # Acknowledging twice is fine.


def test_messages_that_were_lost_do_not_keep_the_others_from_being_settled(jobs: Queue, clock: ManualClock) -> None:
    jobs.put_many(range(4))
    short = jobs.receive_many(2, visibility_seconds=1, extend_for_seconds=0)
    clock.advance_ms(1_000)
    kept = jobs.receive_many(4, visibility_seconds=90, extend_for_seconds=0)  # The same two again, and the others.
    with pytest.raises(QueueMessageLeaseMismatch, match="2 of 5 messages") as lost:
        jobs.ack_many([short[0], *kept[:3], short[1]])
    assert all(message.id in str(lost.value) for message in short)
    assert kept[1].id in str(lost.value), "it is one of the short ones, delivered again"
    assert [(message.settled, message.lost) for message in short] == [(False, True)] * 2
    assert [(message.settled, message.lost) for message in kept] == [(True, False)] * 3 + [(False, False)]
    for settle in (jobs.nack_many, jobs.reject_many, lambda messages: jobs.extend_many(messages, 5)):
        with pytest.raises(QueueMessageLeaseMismatch, match="not leased"):
            settle([kept[0], kept[3]])
        with pytest.raises(QueueMessageLeaseMismatch):
            settle([kept[0]])
    assert (kept[0].settled, kept[0].lost) == (True, False)


def test_a_message_of_another_queue_or_too_many_settle_nothing(plane: Plane, jobs: Queue) -> None:
    other, elsewhere = plane.queue("other"), Plane(plane._transport, "elsewhere").queue("jobs")
    for queue in (jobs, other, elsewhere):
        queue.put("a")
    mine, theirs, far = (received(queue) for queue in (jobs, other, elsewhere))
    before = everything(plane)
    wrong: Any
    for wrong in ([mine, theirs], [mine, far], [mine, "a message"], mine):
        with pytest.raises(InvalidArgument):
            jobs.ack_many(wrong)
    many = [jobs.held(str(uuid.UUID(int=n)), lease_id=f"{n:032x}-1", fence=1) for n in range(256)]
    with pytest.raises(BatchTooLarge, match="256"):
        jobs.ack_many([mine, *many])
    with pytest.raises(EmptyBatch):
        jobs.ack_many([])
    with pytest.raises(InvalidArgument, match="delay_seconds"):
        jobs.nack_many([mine], delay_seconds=-1)
    assert (everything(plane), mine.settled, mine.lost) == (before, False, False)


async def test_tasks_settle_many_messages(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(3))
        messages = await jobs.receive_many(3, extend_for_seconds=0)
        await jobs.extend_many(messages, 60)
        await jobs.ack_many(messages[:2])
        await jobs.nack_many(messages[2:], delay_seconds=0)
        assert (counts(await jobs.stats()), [message.settled for message in messages]) == ({"ready": 1}, [True] * 3)


# Leased messages and deletion.


def test_leased_messages_are_listed(jobs: Queue) -> None:
    jobs.put_many(range(5))
    held = jobs.receive_many(4, owner="ada", extend_for_seconds=0)
    found = jobs.leased()
    assert [(each.id, each.lease_id, each.fence, each.expires_ms) for each in found] == [
        (each.id, each.lease.lease_id, each.fence, each.expires_ms) for each in held
    ]
    assert {(each.owner, each.attempts) for each in found} == {("ada", 1)}
    assert jobs.leased(2) + jobs.leased(100, after=jobs.leased(2)[-1].lease_id) == found


def test_a_queue_is_deleted_and_created_again_by_the_next_put(
    plane: Plane, jobs: Queue, threads: ThreadPoolExecutor
) -> None:
    waiter = waiting(threads, jobs)
    plane.queue("busy").put_many(range(3))
    message = received(plane.queue("busy"))
    with pytest.raises(QueueInUse, match="force") as refused:
        plane.queue("busy").delete()
    assert refused.value.retry == "later"
    assert (plane.queue("busy").delete(force=True), plane.queues()) == (3, [])
    with pytest.raises(QueueMessageLeaseMismatch):
        message.ack()
    jobs.set_policy(QueuePolicy(max_attempts=2))
    assert (jobs.delete(), jobs.policy(), plane.queues()) == (0, QueuePolicy(), [])
    assert jobs.stats().waiting_consumers == 1
    jobs.put("again")
    assert served(waiter) == "again"


def test_a_message_has_its_properties(jobs: Queue) -> None:
    receipt = jobs.put(
        {"n": 1},
        priority=7,
        group="g",
        attributes={"kind": "x"},
        correlation_id="because",
        max_attempts=2,
        visibility_seconds=7,
        content_type="text/x",
        tier=Tier.IMPORTANT,
    )
    assert (receipt.durability, receipt.duplicate, receipt.correlation_id) == (Tier.IMPORTANT, False, "because")
    message = received(jobs, owner="ada")
    assert (message.id, message.queue, message.attributes) == (receipt.id, "jobs", {"kind": "x"})
    assert (message.attempts, message.failure_attempts, message.fence) == (1, 0, 1)
    assert (message.correlation_id, message.state, message.settled, message.lost) == ("because", None, False, False)
    assert message.expires_ms == START_MS + 7_000
    delivery = message.delivery
    assert (delivery.priority, delivery.group, delivery.max_attempts) == (7, "g", 2)
    assert (delivery.content_type, delivery.created_ms) == ("text/x", START_MS)
    assert repr(message) == f"<message {receipt.id} of jobs, attempt 1, fence 1>"


def test_options_of_a_put_take_effect(jobs: Queue, clock: ManualClock) -> None:
    first = jobs.put("later", delay_seconds=5, idempotency_key="k")
    assert jobs.put("again", idempotency_key="k") == msgspec.structs.replace(first, duplicate=True)
    jobs.put("short", ttl_seconds=1)
    assert counts(jobs.stats()) == {"ready": 1, "delayed": 1}
    clock.advance_ms(1_000)
    assert jobs.receive() is None
    clock.advance_ms(4_000)
    assert received(jobs).json() == "later"


def test_put_many_is_one_commit(plane: Plane, jobs: Queue) -> None:
    receipts = jobs.put_many(["a", b"b", NewMessage(payload=b"c", priority=9)])
    assert [message.payload for message in jobs.receive_many(10, extend_for_seconds=0)] == [b"c", b'"a"', b"b"]
    assert len({receipt.id for receipt in receipts}) == 3
    before = everything(plane)
    with pytest.raises(InvalidArgument):
        jobs.put_many(["fine", NewMessage(priority=10)])
    with pytest.raises(EmptyBatch):
        jobs.put_many([])
    with pytest.raises(BatchTooLarge):
        jobs.put_many(range(257))
    assert everything(plane) == before


def test_receive_many_returns_at_most_max_messages(jobs: Queue) -> None:
    jobs.put_many(range(30))
    batches = [jobs.receive_many(extend_for_seconds=0), jobs.receive_many(256, wait_seconds=LONG, extend_for_seconds=0)]
    assert [[message.json() for message in batch] for batch in batches] == [list(range(10)), list(range(10, 30))]
    assert jobs.receive_many() == []
    for wrong in (0, -1, 257):
        with pytest.raises(InvalidArgument):
            jobs.receive_many(wrong)


def test_names_keep_their_case_and_are_checked(plane: Plane) -> None:
    plane.queue("Jobs").put("a")
    assert plane.queue("jobs").receive() is None
    assert received(plane.queue("Jobs")).json() == "a"
    assert plane.queues() == ["Jobs"]
    for wrong in ("", "a b", "x" * 256, "..", "a/b"):
        with pytest.raises(InvalidName):
            plane.queue(wrong)
    with pytest.raises(InvalidArgument, match="251 characters"):
        plane.queue("x" * 252).put("a")


def test_universes_have_separate_queues(url: str) -> None:
    with fastness.open(url, universe="one") as one:
        one.queue("jobs").put("a")
        other = Plane(one._transport, "other")
        assert other.queue("jobs").receive() is None
        assert (one.queues(), other.queues()) == (["jobs"], [])
        assert received(one.queue("jobs")).json() == "a"


def test_messages_survive_reopening_a_directory(tmp_path: Path, clock: ManualClock) -> None:
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        plane.queue("jobs").put_many(["held", "ready"])
        held = received(plane.queue("jobs"))
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        assert received(plane.queue("jobs")).json() == "ready"
        clock.advance_ms(30_000)
        again = received(plane.queue("jobs"))
        assert (again.id, again.fence) == (held.id, 2)


@pytest.mark.parametrize(
    "wrong",
    [{"wait_seconds": -1}, {"wait_seconds": 3_601}, {"wait_seconds": float("nan")}]
    + [{"visibility_seconds": seconds} for seconds in (-1, 43_201, 0.0001, float("nan"))]
    + [{"owner": "x" * 257}],
    ids=str,
)
def test_a_receive_with_invalid_arguments_is_refused(jobs: Queue, wrong: dict[str, Any]) -> None:
    jobs.put("a")
    with pytest.raises(InvalidArgument):
        jobs.receive(**wrong)
    assert counts(jobs.stats()) == {"ready": 1}


# With blocks.


def test_a_with_block_acknowledges_at_its_end(jobs: Queue) -> None:
    jobs.put("a")
    with received(jobs) as message:
        assert counts(jobs.stats()) == {"leased": 1}
    assert message.settled
    assert (counts(jobs.stats()), jobs.stats().acked_total) == ({}, 1)


def test_a_with_block_that_raises_nacks_with_the_error(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    with pytest.raises(ZeroDivisionError), received(jobs):
        raise ZeroDivisionError("by nothing")
    clock.advance_ms(1_100)
    message = received(jobs)
    assert (message.attempts, message.failure_attempts) == (2, 1)
    assert message.delivery.last_error == "ZeroDivisionError: by nothing"


def test_a_with_block_that_fails_again_and_again_backs_off(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a", max_attempts=4)
    for number, seconds in enumerate((1, 2, 4), 1):
        with pytest.raises(ZeroDivisionError), received(jobs, owner="ada"):
            raise ZeroDivisionError(f"failure {number}")
        clock.advance_ms(seconds * 900 - 1)
        assert jobs.receive() is None
        clock.advance_ms(seconds * 200 + 2)
    message = received(jobs)
    assert (message.failure_attempts, message.attempts) == (3, 4)
    assert [(each.attempt, each.owner, each.outcome, each.error_type, each.message) for each in message.failures] == [
        (number, "ada", "failed", "ZeroDivisionError", f"failure {number}") for number in (1, 2, 3)
    ]
    assert message.failures[0].leased_ms == message.failures[0].failed_ms == START_MS
    assert message.delivery.last_error == "ZeroDivisionError: failure 3"


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("how", ["nack", "reject", "atomic nack", "atomic reject"])
def test_an_exception_is_kept_with_its_type_and_traceback(plane: Plane, jobs: Queue, how: str) -> None:
    jobs.put("a", max_attempts=1)
    message = received(jobs)
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise ValueError("boom \udcff") from cause
    except ValueError as caught:
        error = caught
    if how.startswith("atomic"):
        atomic = plane.atomic()
        (atomic.nack(message, error=error) if "nack" in how else atomic.reject(message, error)).commit()
    else:
        getattr(message, how)(error=error)
    [letter] = jobs.dead_letters()
    assert letter.last_error == "ValueError: boom ?"
    [failure] = letter.failures
    assert (failure.outcome, failure.error_type, failure.message) == (
        "rejected" if "reject" in how else "failed",
        "ValueError",
        "boom ?",
    )
    assert failure.traceback is not None
    assert failure.traceback.startswith("Traceback (most recent call last)")
    assert "KeyError: 'cause'" in failure.traceback
    assert failure.traceback.endswith("ValueError: boom ?\n")


def test_an_exception_without_a_text_is_kept(jobs: Queue) -> None:
    jobs.put("a", max_attempts=1)
    with pytest.raises(_Unprintable), received(jobs):
        raise _Unprintable
    assert [letter.failures[0].error_type for letter in jobs.dead_letters()] == ["_Unprintable"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_shutdown_does_not_count_a_failure(jobs: Queue, stop: type[BaseException]) -> None:
    jobs.put("a", max_attempts=1)
    with pytest.raises(stop), received(jobs):
        raise stop
    message = received(jobs)
    assert (message.attempts, message.failure_attempts, message.delivery.last_error) == (2, 0, None)
    assert jobs.stats().failed_total == 0


async def test_a_cancelled_task_does_not_count_a_failure(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        await jobs.put("a", max_attempts=1)
        working = asyncio.Event()

        async def work() -> None:
            message = await jobs.receive(extend_for_seconds=0)
            assert message is not None
            async with message:
                working.set()
                await asyncio.sleep(LONG)

        worker = asyncio.create_task(work())
        await working.wait()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker
        message = await jobs.receive(extend_for_seconds=0)
        assert message is not None
        assert (message.attempts, message.failure_attempts) == (2, 0)


def test_a_with_block_of_a_cancelled_message_does_not_settle_it(jobs: Queue, caplog: pytest.LogCaptureFixture) -> None:
    jobs.put_many(["raises", "returns"])
    for_raise, for_return = received(jobs), received(jobs)
    for message in (for_raise, for_return):
        jobs.cancel(message.id)
    with pytest.raises(MessageCancelled, match=for_raise.id), for_raise:
        for_raise.raise_if_cancelled()  # It makes no call, so it knows nothing yet.
        assert jobs.wait_for_cancel([for_raise], wait_seconds=0) == [for_raise]
        for_raise.raise_if_cancelled()
    with pytest.raises(MessageCancelled, match=for_return.id), for_return:
        pass
    assert (for_return.cancelled, for_return.lost, for_return.settled) == (True, True, False)
    assert caplog.records == []
    assert counts(jobs.stats()) == {}


def test_waiting_for_a_cancel_marks_the_messages(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    jobs.put_many(range(4))
    messages = jobs.receive_many(4, extend_for_seconds=0)
    assert jobs.wait_for_cancel(messages, wait_seconds=0) == []
    messages[0].ack()
    waiting = threads.submit(jobs.wait_for_cancel, messages, wait_seconds=LONG)
    jobs.cancel(messages[2].id)
    assert waiting.result(PATIENCE_SECONDS) == [messages[2]]
    assert [(message.cancelled, message.lost) for message in messages] == [
        (False, False),
        (False, False),
        (True, True),
        (False, False),
    ]
    wrong: Any
    for wrong, error in (([], EmptyBatch), (messages[1:2] * 257, BatchTooLarge), (messages[1], InvalidArgument)):
        with pytest.raises(error):
            jobs.wait_for_cancel(wrong, wait_seconds=0)
    jobs.ack_many([messages[1], messages[3]])


async def test_waiting_for_a_cancel_on_an_event_loop(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane, asyncio.timeout(PATIENCE_SECONDS):
        jobs = plane.queue("jobs")
        await jobs.put_many(range(3))
        messages = await jobs.receive_many(3, extend_for_seconds=0)
        waiting = asyncio.create_task(jobs.wait_for_cancel(messages, wait_seconds=LONG))
        await asyncio.sleep(0)
        await jobs.cancel(messages[1].id)
        assert await waiting == [messages[1]]
        with pytest.raises(MessageCancelled):
            messages[1].raise_if_cancelled()
        messages[0].raise_if_cancelled()


def test_a_with_block_does_not_settle_twice(jobs: Queue) -> None:
    jobs.put_many(["acked", "given back", "rejected"])
    with received(jobs) as message:
        message.ack()
    with received(jobs) as message:
        message.nack(delay_seconds=60, error="not now")
    with pytest.raises(LookupError), received(jobs) as message:
        message.reject("hopeless")
        raise LookupError
    assert counts(jobs.stats()) == {"delayed": 1, "dead": 1}
    assert [letter.last_error for letter in jobs.dead_letters()] == ["hopeless"]


def test_a_with_block_whose_lease_ended_raises(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    with pytest.raises(QueueMessageLeaseMismatch), received(jobs):
        clock.advance_ms(30_000)
        second = received(jobs)
    second.ack()


def test_the_error_of_a_with_block_is_not_hidden(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    with pytest.raises(ZeroDivisionError), received(jobs):
        clock.advance_ms(30_000)
        second = received(jobs)
        raise ZeroDivisionError
    second.ack()


def test_only_an_ack_may_be_repeated(jobs: Queue) -> None:
    jobs.put_many(["a", "b"])
    acked, given_back = jobs.receive_many(2, extend_for_seconds=0)
    acked.ack()
    acked.ack()
    given_back.nack(delay_seconds=0)
    for settle in (given_back.nack, given_back.ack, given_back.reject, acked.nack):
        with pytest.raises(QueueMessageLeaseMismatch):
            settle()
    with pytest.raises(InvalidArgument, match="give 'failure' or 'defer'"):
        acked.nack(intent="nonsense")


@pytest.mark.parametrize("how", ["ack", "nack", "reject", "atomic"])
def test_a_message_of_another_process_is_settled_by_its_lease(plane: Plane, jobs: Queue, how: str) -> None:
    jobs.put(1)
    received = jobs.receive(extend_for_seconds=0)
    held = plane.queue("jobs").held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert (held.id, held.fence, held.lease, held.queue) == (received.id, received.fence, received.lease, "jobs")
    if how == "atomic":
        plane.atomic().ack(held).commit()
    else:
        getattr(held, how)()
    stats = jobs.stats()
    settled = {"ack": (0, 0), "nack": (1, 0), "reject": (0, 1), "atomic": (0, 0)}[how]
    assert (stats.delayed, stats.dead, stats.leased) == (*settled, 0)


def test_a_message_of_another_process_is_extended(jobs: Queue, clock: ManualClock) -> None:
    jobs.put(1)
    received = jobs.receive(visibility_seconds=5, extend_for_seconds=0)
    held = jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert held.extend() == clock.now_ms() + 30_000
    assert held.extend(60) == held.expires_ms == clock.now_ms() + 60_000
    clock.advance_ms(59_999)
    assert jobs.receive() is None
    clock.advance_ms(1)
    with jobs.receive(), pytest.raises(QueueMessageLeaseMismatch):
        held.ack()


def test_a_message_of_another_process_has_no_payload(jobs: Queue) -> None:
    jobs.put(1)
    received = jobs.receive(extend_for_seconds=0)
    held = jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert held.payload is None
    for look in (held.json, held.read, held.open):
        with pytest.raises(InvalidArgument, match="another process"):
            look()
    for wrong in ({"lease_id": "x", "fence": 1}, {"lease_id": received.lease.lease_id, "fence": 9}):
        with pytest.raises(QueueMessageLeaseMismatch):
            jobs.held(received.id, **wrong).ack()


async def test_a_message_of_another_process_is_settled_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        jobs = plane.queue("jobs")
        await jobs.put(1)
        received = await jobs.receive(extend_for_seconds=0)
        await jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence).ack()
        assert (await jobs.stats()).leased == 0


def test_a_lease_is_extended_by_more_than_zero(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a", visibility_seconds=7)
    message = received(jobs)
    clock.advance_ms(1_000)
    for wrong in (0, -1, 0.0001, 43_201, float("nan")):
        with pytest.raises(InvalidArgument):
            message.extend(wrong)
    assert message.extend(10) == message.expires_ms == START_MS + 11_000
    clock.advance_ms(9_000)
    assert message.extend() == START_MS + 17_000
    assert message.extend(1) == START_MS + 17_000


# Large payloads.


@pytest.mark.parametrize("size", [BLOB - 1, BLOB, STREAMED - 1])
def test_payloads_up_to_1_mib_come_with_the_delivery(jobs: Queue, size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    jobs.put_many([payload, b"small"])
    message = received(jobs)
    assert (message.payload, message.delivery.size) == (payload, size)
    assert (message.delivery.blob is not None) == (size >= BLOB)
    assert (message.read(), b"".join(message.open())) == (payload, payload)


def test_a_large_payload_is_read_or_streamed(jobs: Queue) -> None:
    payload = b'"' + b"x" * (STREAMED - 2) + b'"'
    jobs.put("x" * (STREAMED - 2))
    message = received(jobs)
    assert (message.payload, message.delivery.size) == (None, STREAMED)
    with pytest.raises(FastnessError, match="read"):
        message.json()
    assert message.read() == payload
    chunks = list(message.open())
    assert (b"".join(chunks), len(chunks) > 0) == (payload, True)
    message.reject()
    assert [(letter.payload, letter.blob) for letter in jobs.dead_letters()] == [(None, message.delivery.blob)]
    jobs.redrive()
    assert received(jobs).read() == payload


def test_a_message_whose_blob_is_not_stored_is_refused_with_its_batch(jobs: Queue) -> None:
    with pytest.raises(BlobNotFound, match="put it first"):
        jobs.put_many([b"fine", NewMessage(blob="0" * 64, blob_size=20_000)])
    assert jobs.receive() is None


async def test_large_payloads_are_read_and_streamed_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        jobs = plane.queue("jobs")
        for size in (0, 5, BLOB, STREAMED):
            await jobs.put(bytes(size))
            message = await jobs.receive(extend_for_seconds=0)
            assert message is not None
            assert len(await message.read()) == size
            assert sum([len(chunk) async for chunk in await message.open()]) == size
            await message.ack()


# Administration.


def test_peek_consumes_nothing(jobs: Queue) -> None:
    jobs.put_many(["a", b"x" * 2_000])
    for _ in range(2):
        found = jobs.peek()
        assert [each.payload for each in found] == [b'"a"', b"x" * 2_000]
        assert [(each.lease_id, each.expires_ms, each.attempts) for each in found] == [("", 0, 0)] * 2
    assert len(jobs.peek(1)) == 1
    with pytest.raises(InvalidArgument):
        jobs.peek(0)


def test_purge_removes_all_but_leased_messages(jobs: Queue) -> None:
    jobs.put("held")
    held = received(jobs)
    for _ in range(3):
        jobs.put_many(range(200))
    jobs.put("later", delay_seconds=60)
    assert (jobs.purge(), jobs.purge()) == (601, 0)
    assert counts(jobs.stats()) == {"leased": 1}
    held.ack()


def test_a_policy_sets_defaults_of_messages(jobs: Queue) -> None:
    assert jobs.policy() == QueuePolicy()
    policy = jobs.set_policy(QueuePolicy(visibility_seconds=7, max_attempts=1, dead_letter_queue="Graveyard"))
    assert jobs.policy() == policy
    jobs.pause()
    assert jobs.policy() == msgspec.structs.replace(policy, paused=True)
    jobs.resume()
    jobs.put("a")
    message = received(jobs)
    assert message.expires_ms == START_MS + 7_000
    message.nack(error="boom", delay_seconds=0)
    assert [(letter.last_error, letter.origin) for letter in jobs.dead_letters()] == [("boom", "jobs")]
    assert jobs.redrive() == 1
    with pytest.raises(InvalidArgument):
        jobs.set_policy(QueuePolicy(max_attempts=0))


def test_dead_letters_are_listed_and_redriven(plane: Plane, jobs: Queue) -> None:
    jobs.put_many(range(5), tier=Tier.IMPORTANT)
    for message in jobs.receive_many(5, extend_for_seconds=0):
        message.reject(f"error {message.json()}")
    letters = jobs.dead_letters()
    assert [(letter.last_error, letter.origin) for letter in letters] == [(f"error {n}", "jobs") for n in range(5)]
    assert len(jobs.dead_letters(2)) == 2
    assert received(plane.queue("jobs.dlq")).json() == 0
    assert jobs.redrive([letters[0].id, letters[3].id]) == 1
    assert (jobs.redrive(limit=1), jobs.redrive(), jobs.redrive()) == (1, 2, 0)
    assert counts(jobs.stats()) == {"ready": 4, "dead": 1}
    for wrong in ({"ids": ["nonsense"]}, {"limit": 0}):
        with pytest.raises(InvalidArgument):
            jobs.redrive(**wrong)


def test_redrive_moves_several_batches_and_given_ids(jobs: Queue) -> None:
    for _ in range(2):
        jobs.put_many(range(200))
    for _ in range(2):
        for message in jobs.receive_many(200, extend_for_seconds=0):
            message.reject()
    ids = [letter.id for letter in jobs.dead_letters(400)]
    unknown = [str(uuid.uuid4()) for _ in range(256)]
    assert jobs.redrive([*unknown, ids[0], *unknown, ids[1]]) == 2
    assert jobs.redrive(limit=300) == 300
    assert jobs.redrive() == 98
    assert counts(jobs.stats()) == {"ready": 400}


def test_a_schedule_is_set_listed_triggered_and_removed(jobs: Queue, clock: ManualClock) -> None:
    report = jobs.schedule("report", "*/5 * * * *", {"n": 1}, priority=9)
    assert (report.name, report.next_ms, report.timezone) == ("report", START_MS + 100_000, "UTC")
    assert jobs.schedule("other", "0 9 * * *", b"b", timezone="Europe/Berlin").message.payload == b"b"
    assert [each.name for each in jobs.schedules()] == ["other", "report"]
    clock.advance_ms(100_000)
    message = received(jobs)
    assert (message.json(), message.delivery.priority) == ({"n": 1}, 9)
    assert (jobs.unschedule("report"), jobs.unschedule("report")) == (True, False)
    clock.advance_ms(3_600_000)
    message.ack()
    assert jobs.receive() is None
    for cron, timezone in (("nonsense", "UTC"), ("* * * * *", "Mars/Base")):
        with pytest.raises(InvalidArgument):
            jobs.schedule("report", cron, 1, timezone=timezone)
    with pytest.raises(InvalidName):
        jobs.schedule("a b", "* * * * *", 1)
    with pytest.raises(PayloadTooLarge):
        jobs.schedule("report", "* * * * *", bytes(BLOB))


# Workflow state.


def test_workflow_state_passes_to_the_next_consumer(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a", correlation_id="because")
    first = received(jobs, with_state=True)
    assert first.state is None
    first.save_state({"step": 1})
    assert first.state == {"step": 1}
    clock.advance_ms(30_000)
    second = received(jobs, with_state=True)
    assert second.state == {"step": 1}
    with pytest.raises(Fenced):
        first.save_state({"step": 0})
    second.save_state({"step": 2})
    document = plane.state(f"q/jobs/state/{second.id}").get()
    assert document is not None
    assert (document.value, document.correlation_id) == ({"step": 2}, "because")
    second.ack()
    assert plane.state(f"q/jobs/state/{second.id}").get() is None


def test_saving_state_needs_with_state(jobs: Queue) -> None:
    jobs.put("a")
    with pytest.raises(InvalidArgument, match="with_state=True"):
        received(jobs).save_state(1)


# One commit.


def test_complete_commits_the_work_and_the_ack_together(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    message = received(jobs)
    before = everything(plane)
    with pytest.raises(LookupError):
        message.complete(mark, b"work", True)
    assert (everything(plane), message.settled) == (before, False)
    clock.advance_ms(30_000)
    second = received(jobs)
    before = everything(plane)
    with pytest.raises(QueueMessageLeaseMismatch):
        message.complete(mark, b"work")
    assert (everything(plane), message.settled) == (before, False)
    assert second.complete(mark, b"work") == "result"
    assert (second.settled, plane.pairs.get(b"work"), counts(jobs.stats())) == (True, b"done", {})


async def test_complete_works_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        jobs = plane.queue("jobs")
        await jobs.put("a")
        message = await jobs.receive()
        assert message is not None
        with pytest.raises(LookupError):
            await message.complete(mark, b"work", True)
        assert await plane.pairs.get(b"work") is None
        assert await message.complete(mark, b"work") == "result"
        assert counts(await jobs.stats()) == {}


def test_an_atomic_list_commits_all_operations(plane: Plane, clock: ManualClock) -> None:
    bench = Bench(plane, clock)
    answers = bench.commit()
    assert len(answers) == 9
    assert answers[1].receipts[0].id == received(bench.done).id
    assert (bench.acked.settled, bench.given_back.settled, bench.rejected.settled) == (True, True, True)
    assert counts(bench.jobs.stats()) == {"ready": 1, "dead": 1}
    assert (bench.world.head(), len(bench.world.inbox.read())) == (bench.head + 1, 1)
    document = bench.state.get()
    assert document is not None
    assert document.value == {"n": 1}


FAILURES: dict[str, type[FastnessError]] = {
    "ack": QueueMessageLeaseMismatch,
    "put": InvalidArgument,
    "append": HeadAdvanced,
    "update": CasMismatch,
    "nack": QueueMessageLeaseMismatch,
    "reject": QueueMessageLeaseMismatch,
    "deliver": FastnessError,
    "check": Fenced,
}


@pytest.mark.parametrize("wrong", FAILURES)
def test_an_atomic_list_with_a_failing_operation_writes_nothing(plane: Plane, clock: ManualClock, wrong: str) -> None:
    bench = Bench(plane, clock)
    if wrong in ("ack", "nack", "reject"):
        message = {"ack": bench.acked, "nack": bench.given_back, "reject": bench.rejected}[wrong]
        message.nack(intent="defer")
        message.settled = False
    elif wrong == "check":
        bench.lease.release()
    before = everything(plane)
    with pytest.raises(FAILURES[wrong]):
        bench.commit(wrong=wrong)
    assert everything(plane) == before
    assert [each.settled for each in (bench.acked, bench.given_back, bench.rejected)] == [False] * 3


def test_an_atomic_list_has_1_to_256_operations(plane: Plane, jobs: Queue) -> None:
    with pytest.raises(InvalidArgument, match="has no operations"):
        plane.atomic().commit()
    atomic = plane.atomic()
    for _ in range(257):
        atomic.put(jobs, "a")
    with pytest.raises(BatchTooLarge, match="at most 256"):
        atomic.commit()
    assert everything(plane) == []


def test_an_atomic_list_stores_large_payloads_and_results_as_blobs(plane: Plane, jobs: Queue) -> None:
    receipt = jobs.put("a")
    message, body, result = received(jobs), bytes(BLOB), {"text": "x" * BLOB}
    plane.atomic().ack(message, result=result).put(jobs, body).commit()
    assert message.settled
    assert receipt.result() == result
    assert received(jobs).read() == body


def test_an_atomic_list_that_checks_a_message_is_not_repeated(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    done = plane.queue("done")
    jobs.put("a")
    message = received(jobs)
    for expected in (1, 2):  # A repeated ack alone succeeds.
        plane.atomic().ack(message).put(done, "a").commit()
        assert done.stats().ready == expected
    with pytest.raises(QueueMessageLeaseMismatch):
        plane.atomic().check(message).ack(message).put(done, "a").commit()
    jobs.put("b", visibility_seconds=1)
    late = received(jobs, extend_for_seconds=0)
    clock.advance_ms(1_000)
    with pytest.raises(QueueMessageLeaseMismatch):
        plane.atomic().check(late).ack(late).put(done, "b").commit()
    assert done.stats().ready == 2
    assert not late.settled


def test_an_atomic_list_with_a_refused_packed_ack_writes_nothing(plane: Plane, jobs: Queue) -> None:
    jobs.put("a")
    message = received(jobs)
    [ack] = packed_acks([message])[0]
    message.nack(intent="defer", delay_seconds=LONG)
    steps: list[Request[Any]] = [PutMessages("done", [NewMessage(b"x")]), AckMessages("jobs", [], packed=[ack])]
    before = everything(plane)
    with pytest.raises(QueueMessageLeaseMismatch, match="Nothing was committed"):
        plane._transport.call(CommitAtomic(steps))
    assert everything(plane) == before


async def test_an_atomic_list_commits_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        jobs, done = plane.queue("jobs"), plane.queue("done")
        await jobs.put("a")
        message = await jobs.receive()
        assert message is not None
        with pytest.raises(InvalidArgument):
            await plane.atomic().ack(message).put(done, "b", priority=10).commit()
        assert counts(await jobs.stats()) == {"leased": 1}
        await plane.atomic().ack(message).put(done, "b").commit(tier=Tier.IMPORTANT)
        assert (counts(await jobs.stats()), counts(await done.stats())) == ({}, {"ready": 1})
