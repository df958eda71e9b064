"""Workers whose handlers get batches of messages."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fastness
from fastness import AsyncWorker, Plane, QueuePolicy, Worker
from fastness.errors import InvalidArgument, Unreachable
from fastness.handles.messages import AsyncMessage
from fastness.handles.sync.messages import Message
from fastness.handles.workers import consumers
from fastness.handles.workers.consumers import Window
from fastness.limits import WORKER_CANCEL_SECONDS
from fastness.wire.queues import AckMessages, NackMessages, ReceiveMessages, WaitForCancel
from tests.support.waiting import eventually
from tests.unit.worker_fixtures import KINDS, PATIENCE_SECONDS, WorkerClock, working


@pytest.fixture(autouse=True)
def short_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for messages finds soon that its worker is stopped."""
    monkeypatch.setattr(consumers, "WAIT_SECONDS", 0.1)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asks_for(running: Any, count: int) -> bool:
    """Whether the worker has buffered all but this many messages of a batch, and asks for these."""
    return [request.max_messages for request in running.sent(ReceiveMessages)][-1:] == [count]


class Handler:
    """Records the batches that it gets."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, messages: list[Any]) -> None:
        self.batches.append([message.json() for message in messages])

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    @property
    def seen(self) -> list[Any]:
        return [body for batch in self.batches for body in batch]


def test_a_handler_gets_full_batches_at_once_and_the_rest_after_the_wait(plane: Plane, kind: str) -> None:
    jobs, handler, clock = plane.queue("jobs"), Handler(), WorkerClock()
    jobs.put_many(range(250))
    with working(kind, plane, handler, clock=clock, batch=100, batch_wait_seconds=60) as running:
        eventually(lambda: running.stats.handled == 200)
        eventually(lambda: asks_for(running, 50))
        clock.advance(59.9)
        jobs.put(250)
        jobs.put(251)
        eventually(lambda: asks_for(running, 48))
        assert handler.sizes == [100, 100]
        clock.advance(0.2)  # The receive waits for the 0.1 s that were left.
        eventually(lambda: running.stats.handled == 252)
    assert handler.batches == [list(range(100)), list(range(100, 200)), list(range(200, 252))]
    assert (jobs.stats().acked_total, jobs.stats().leased, running.stats.failed) == (252, 0, 0)


def test_a_batch_that_is_not_full_is_handled_after_the_wait(plane: Plane, kind: str) -> None:
    """With the real clock: nothing else happens that would end the wait."""
    jobs, handler = plane.queue("jobs"), Handler()
    jobs.put_many(range(3))
    with working(kind, plane, handler, batch=100, batch_wait_seconds=0.05, concurrency=2) as running:
        eventually(lambda: running.stats.handled == 3)
    assert handler.batches == [[0, 1, 2]]
    # A receive waits only until the batch is ready: its thread may be the only one.
    assert any(0 < request.wait_seconds <= 0.05 for request in running.sent(ReceiveMessages))


def test_without_a_wait_a_batch_is_what_one_receive_returned(plane: Plane, kind: str) -> None:
    jobs, handler = plane.queue("jobs"), Handler()
    jobs.put_many(range(30))
    with working(kind, plane, handler, batch=100) as running:
        eventually(lambda: running.stats.handled == 30)
        jobs.put("later")
        eventually(lambda: running.stats.handled == 31)
    assert handler.batches == [list(range(30)), ["later"]]


def test_concurrency_is_the_number_of_batches_at_a_time(plane: Plane, kind: str) -> None:
    """A batch that is not full takes a slot, too."""
    jobs = plane.queue("jobs")
    at_work, leave = threading.Semaphore(0), threading.Event()

    def handle(messages: list[Any]) -> None:
        at_work.release()
        assert leave.wait(PATIENCE_SECONDS)

    with working(kind, plane, handle, batch=10, concurrency=3) as running:
        for size in (10, 4, 1):
            jobs.put_many(range(size))
            assert at_work.acquire(timeout=PATIENCE_SECONDS)
        assert {request.max_messages for request in running.sent(ReceiveMessages)} == {30, 20, 10}
        jobs.put_many(range(25))
        assert (jobs.stats().leased, jobs.stats().ready) == (15, 25)
        leave.set()
        eventually(lambda: running.stats.handled == 40)


def test_a_batch_is_acknowledged_in_the_call_that_receives_the_next_one(plane: Plane, kind: str) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(250))
    with working(kind, plane, Handler(), clock=WorkerClock(), batch=50) as running:
        eventually(lambda: running.stats.handled == 250)
    receives = [request for request in running.sent(ReceiveMessages) if request.acks]
    acked = [sum(ack.mask.bit_count() for ack in request.acks) for request in receives]
    assert acked == [50] * 5
    assert running.sent(AckMessages) == []


def test_batches_that_are_buffered_do_not_delay_acks(plane: Plane) -> None:
    """All threads are busy, so none of them receives."""
    jobs, leave, clock = plane.queue("jobs"), threading.Event(), WorkerClock()
    jobs.put_many(range(40))

    def handle(messages: list[Message]) -> None:
        if messages[0].json() > 0:
            clock.advance(1)
            assert leave.wait(PATIENCE_SECONDS)

    with working("threads", plane, handle, clock=clock, batch=10, prefetch=30) as running:
        eventually(lambda: running.stats.handled == 10)
        assert (jobs.stats().acked_total, jobs.stats().leased) == (10, 30)
        leave.set()
        eventually(lambda: running.stats.handled == 40)


# Settling.


def test_a_batch_whose_handler_raises_is_nacked_in_one_call_and_retried_one_by_one(plane: Plane, kind: str) -> None:
    jobs = plane.queue("jobs")
    jobs.set_policy(QueuePolicy(max_attempts=3))
    jobs.put_many(range(20))
    sizes: list[int] = []
    errors: list[str] = []

    def handle(messages: list[Any]) -> None:
        sizes.append(len(messages))
        if any(message.json() == 7 for message in messages):
            raise ValueError("seven")

    options: dict[str, Any] = {
        "retry_delay_seconds": lambda failures: 0.0,
        "on_error": lambda error, queue: errors.append(str(error)),
    }
    with working(kind, plane, handle, batch=20, **options) as running:
        eventually(lambda: running.stats.handled == 19 and jobs.stats().dead == 1)
    assert sizes == [20] + [1] * 21
    assert [len(request.leases) for request in running.sent(NackMessages) if request.intent == "failure"] == [20, 1, 1]
    assert (errors, running.stats.failed) == (["seven"] * 3, 22)
    (letter,) = jobs.dead_letters()
    assert [(failure.error_type, failure.message) for failure in letter.failures] == [("ValueError", "seven")] * 3


def check_settled(jobs: Any, stats: Any) -> None:
    queue = jobs.stats()
    assert (queue.acked_total, queue.dead, queue.delayed, queue.leased) == (4, 1, 5, 0)
    assert queue.failed_total == 6  # The reject and five nacks.
    assert (stats.handled, stats.failed) == (5, 5)


def test_a_handler_may_settle_messages_of_its_batch(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(10))

    def handle(messages: list[Message]) -> None:
        messages[0].ack()
        jobs.ack_many(messages[1:4])
        messages[4].reject("no")
        raise ValueError("the others")

    with working("threads", plane, handle, batch=10, retry_delay_seconds=lambda failures: 600) as running:
        eventually(lambda: jobs.stats().delayed == 5)
    check_settled(jobs, running.stats)
    assert len(running.sent(NackMessages)) == 1


def test_an_async_handler_may_settle_messages_of_its_batch(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(10))

    async def handle(messages: list[AsyncMessage]) -> None:
        await messages[0].ack()
        for message in messages[1:4]:
            await message.ack()
        await messages[4].reject("no")
        raise ValueError("the others")

    with working("tasks", plane, handle, batch=10, retry_delay_seconds=lambda failures: 600) as running:
        eventually(lambda: jobs.stats().delayed == 5)
    check_settled(jobs, running.stats)
    assert len(running.sent(NackMessages)) == 1


def test_what_a_handler_has_settled_is_not_acknowledged_again(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(10))

    def handle(messages: list[Message]) -> None:
        jobs.nack_many(messages[:5], intent="defer", delay_seconds=600)

    with working("threads", plane, handle, batch=10) as running:
        eventually(lambda: running.stats.handled == 10)
    assert (jobs.stats().acked_total, jobs.stats().delayed, running.stats.failed) == (5, 5, 0)


def test_a_batch_that_cannot_be_acknowledged_is_reported_and_delivered_again(plane: Plane, kind: str) -> None:
    jobs, handler = plane.queue("jobs"), Handler()
    jobs.put_many(range(10))
    errors: list[Exception] = []
    is_down = True

    def refuse_acks(request: Any) -> None:
        if is_down and (isinstance(request, AckMessages) or (isinstance(request, ReceiveMessages) and request.acks)):
            raise Unreachable("gone")

    options: dict[str, Any] = {
        "visibility_seconds": 0.2,
        "extend_for_seconds": 0,
        "on_error": lambda error, queue: errors.append(error),
    }
    with working(kind, plane, handler, on_call=refuse_acks, batch=10, **options) as running:
        eventually(lambda: errors)
        assert (running.stats.handled, running.stats.failed, running.stats.restarts) == (0, 1, 1)
        is_down = False
        eventually(lambda: jobs.stats().acked_total == 10)
    assert handler.batches[0] == list(range(10))
    assert set(handler.sizes[1:]) == {1}
    assert sorted(set(handler.seen)) == list(range(10))
    assert jobs.stats().expired_total >= 10


# Messages that were delivered before.


def test_messages_that_were_delivered_before_are_received_and_handled_alone(plane: Plane, kind: str) -> None:
    """One of them may end its process, which counts as a failure of all that the process holds."""
    jobs = plane.queue("jobs")
    jobs.put_many(range(8))
    jobs.nack_many(jobs.receive_many(8), delay_seconds=0)
    jobs.put_many(range(100, 105))
    leased: list[int] = []
    handler = Handler()

    def handle(messages: list[Any]) -> None:
        leased.append(jobs.stats().leased)
        handler(messages)

    with working(kind, plane, handle, batch=10) as running:
        eventually(lambda: running.stats.handled == 13)
    assert [batch for batch in handler.batches if batch[0] < 100] == [[n] for n in range(8)]
    assert sorted(handler.seen) == [*range(8), *range(100, 105)]
    # While one of them is handled, no other one is held.
    held_beside = [held - 1 for held, batch in zip(leased, handler.batches, strict=True) if batch[0] < 100]
    assert max(held_beside) <= 5  # Only new messages, which can fail once with it.
    assert running.stats.failed == 0
    assert jobs.stats().failed_total == 8  # Only those of this test.


def test_a_window_of_batches_holds_one_message_a_slot_while_they_were_delivered_before() -> None:
    window = Window(2, None, 100)
    assert (window.prefetch, window.is_used, window.is_automatic) == (0, True, False)
    assert [window.room(held) for held in (0, 100, 150, 200, 300)] == [200, 100, 50, 0, 0]
    window.received([1, 2])
    assert [window.room(held, busy) for held, busy in ((0, 0), (100, 1), (30, 0), (200, 2))] == [2, 1, 2, 0]
    window.received([1, 1])
    assert window.room(100, 1) == 100
    window.record(0.0)  # Quick handlers do not make it prefetch.
    assert window.room(0) == 200
    assert Window(4, 50, 100).room(400) == 50


def test_more_messages_that_were_delivered_before_than_slots_are_returned_uncounted(plane: Plane, kind: str) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(6))
    jobs.nack_many(jobs.receive_many(6), delay_seconds=0)
    at_work, leave = threading.Semaphore(0), threading.Event()

    def handle(messages: list[Any]) -> None:
        assert len(messages) == 1
        at_work.release()
        assert leave.wait(PATIENCE_SECONDS)

    with working(kind, plane, handle, batch=10, concurrency=2) as running:
        for _ in range(2):
            assert at_work.acquire(timeout=PATIENCE_SECONDS)
        assert (jobs.stats().leased, jobs.stats().ready, running.stats.deferred) == (2, 4, 4)
        leave.set()
        eventually(lambda: running.stats.handled == 6)
    assert jobs.stats().failed_total == 6


# Waiting messages.


def test_messages_that_are_lost_or_cancelled_while_they_wait_are_not_handled(plane: Plane, kind: str) -> None:
    jobs, handler, clock = plane.queue("jobs"), Handler(), WorkerClock()
    receipts = jobs.put_many(range(4))
    errors: list[str] = []
    options: dict[str, Any] = {"extend_for_seconds": 0, "on_error": lambda error, queue: errors.append(str(error))}
    with working(kind, plane, handler, clock=clock, batch=6, batch_wait_seconds=60, **options) as running:
        eventually(lambda: asks_for(running, 2))
        assert jobs.cancel(receipts[1].id).state == "cancelled"
        clock.advance(WORKER_CANCEL_SECONDS)
        eventually(lambda: len(running.sent(WaitForCancel)) > 1)
        assert [len(request.leases) for request in running.sent(WaitForCancel)][:2] == [4, 3]
        if kind == "threads":
            list(running.worker._queues[0].buffered)[2].mark_lost()
        jobs.put_many([4, 5])
        eventually(lambda: running.stats.handled >= 4)
    lost = [2] if kind == "threads" else []
    assert handler.seen == [n for n in range(6) if n != 1 and n not in lost]
    assert (running.stats.cancelled, running.stats.failed, len(errors)) == (1, len(lost), len(lost))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_stopping_returns_waiting_messages_uncounted_and_drains_a_running_batch(
    plane: Plane, kind: str, concurrency: int
) -> None:
    jobs = plane.queue("jobs")
    at_work, leave = threading.Event(), threading.Event()

    def handle(messages: list[Any]) -> None:
        at_work.set()
        assert leave.wait(PATIENCE_SECONDS)

    options: dict[str, Any] = {"batch": 10, "batch_wait_seconds": 60, "concurrency": concurrency, "prefetch": 10}
    with working(kind, plane, handle, **options) as running:
        jobs.put_many(range(14))
        assert at_work.wait(PATIENCE_SECONDS)
        eventually(lambda: jobs.stats().leased == 14)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        eventually(lambda: jobs.stats().leased == 10)
        leave.set()
        stopping.join(PATIENCE_SECONDS)
    # A thread that waits for messages may receive them again, and return them again.
    assert (running.stats.handled, running.stats.deferred >= 4, running.stats.failed) == (10, True, 0)
    stats = jobs.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (10, 4, 0, 0)
    assert [message.failure_attempts for message in jobs.receive_many(4)] == [0] * 4


@pytest.mark.parametrize("after", range(0, 60, 6))
def test_a_stopped_worker_with_batches_leaves_no_leases(plane: Plane, kind: str, after: int) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(100))
    options: dict[str, Any] = {"batch": 7, "batch_wait_seconds": 0.01, "concurrency": 3, "prefetch": 5}
    with working(kind, plane, Handler(), **options) as running:
        eventually(lambda: running.stats.handled >= after)
    stats = jobs.stats()
    assert (stats.leased, stats.failed_total, stats.ready + stats.acked_total) == (0, 0, 100)
    assert stats.acked_total == running.stats.handled


# Options.


def test_options_of_batches_are_checked(plane: Plane) -> None:
    for batch in (0, 257, -1):
        with pytest.raises(InvalidArgument, match=f"batch is {batch}; give 1 to 256"):
            Worker(plane, {"jobs": print}, batch=batch)
    for seconds in (-0.1, 60.1, float("nan")):
        with pytest.raises(InvalidArgument, match=r"batch_wait_seconds is .*; give 0 to 60"):
            Worker(plane, {"jobs": print}, batch=2, batch_wait_seconds=seconds)
    with pytest.raises(InvalidArgument, match="without batch"):
        Worker(plane, {"jobs": print}, batch_wait_seconds=1)  # type: ignore[call-overload]


async def test_options_of_async_batches_are_checked() -> None:
    async def handle(messages: list[AsyncMessage]) -> None:
        await asyncio.sleep(0)

    async with fastness.open_async("memory:") as plane:
        with pytest.raises(InvalidArgument, match="batch is 0; give 1 to 256"):
            AsyncWorker(plane, {"jobs": handle}, batch=0)
        with pytest.raises(InvalidArgument, match="without batch"):
            AsyncWorker(plane, {"jobs": handle}, batch_wait_seconds=1)  # type: ignore[call-overload]
