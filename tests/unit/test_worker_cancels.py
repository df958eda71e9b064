"""Workers that notice that messages of running handlers are cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fastness
from fastness import Plane, limits
from fastness.errors import MessageCancelled, NotAllowed, Unreachable
from fastness.handles.messages import AsyncMessage
from fastness.handles.sync.messages import Message
from fastness.handles.workers import consumers
from fastness.handles.workers.consumers import CancelQuestions
from fastness.limits import WORKER_CANCEL_SECONDS
from fastness.wire.queues import AckMessages, NackMessages, ReceiveMessages, WaitForCancel
from tests.support.waiting import eventually
from tests.unit.worker_fixtures import KINDS, PATIENCE_SECONDS, WorkerClock, working

NOT_RENEWED: dict[str, Any] = {"extend_for_seconds": 0}  # Without renewals, only a question finds a cancel.


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


class Handler:
    """A coroutine function that waits until it is cancelled, and then ends in the given way."""

    def __init__(self, end: str = "propagate") -> None:
        self.at_work = threading.Event()
        self.cancelled: list[Any] = []
        self.finished: list[Any] = []
        self._end = end

    async def __call__(self, message: AsyncMessage) -> None:
        if message.json() != "long":
            self.finished.append(message.json())
            return
        self.at_work.set()
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        except asyncio.CancelledError:
            self.cancelled.append(message.cancelled)
            if self._end == "raise":
                raise ValueError("while it cleaned up") from None
            if self._end == "propagate":
                raise
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.sleep(0.001)  # It may wait for something while it cleans up.


def check_cancelled(plane: Plane, running: Any) -> None:
    """The first message was cancelled and the second one handled, and nothing was settled for the first."""
    stats = running.stats
    assert (stats.cancelled, stats.handled, stats.failed, stats.deferred, stats.restarts) == (1, 1, 0, 0, 0)
    queue = plane.queue("jobs").stats()
    assert (queue.acked_total, queue.failed_total, queue.leased, queue.ready, queue.delayed) == (1, 0, 0, 0, 0)
    assert running.sent(NackMessages) == []
    acks = [ack for request in running.sent(AckMessages) for ack in request.packed]
    acks += [ack for request in running.sent(ReceiveMessages) for ack in request.acks]
    assert sum(ack.mask.bit_count() for ack in acks) == 1


@pytest.mark.parametrize("end", ["propagate", "return", "raise"])
def test_the_task_of_a_handler_is_cancelled_with_its_message(plane: Plane, end: str) -> None:
    jobs, handler, errors = plane.queue("jobs"), Handler(end), []
    receipt = jobs.put("long")

    async def handle(message: AsyncMessage) -> None:
        await handler(message)

    options: dict[str, Any] = {"on_error": lambda error, queue: errors.append(error), **NOT_RENEWED}
    with working("tasks", plane, handle, **options) as running:
        assert handler.at_work.wait(PATIENCE_SECONDS)
        jobs.cancel(receipt.id)
        eventually(lambda: running.stats.cancelled == 1)
        jobs.put("next")
        eventually(lambda: running.stats.handled == 1)
    assert (handler.cancelled, handler.finished, errors) == ([True], ["next"], [])
    check_cancelled(plane, running)


@pytest.mark.parametrize("end", ["raise_if_cancelled", "return", "raise", "ack"])
def test_a_thread_finds_that_its_message_is_cancelled(plane: Plane, end: str) -> None:
    jobs, errors, at_work = plane.queue("jobs"), [], threading.Event()
    receipt = jobs.put("long")

    def handle(message: Message) -> None:
        message.raise_if_cancelled()  # It is not yet.
        if message.json() == "next":
            return
        at_work.set()
        eventually(lambda: message.cancelled)
        if end == "raise_if_cancelled":
            message.raise_if_cancelled()
        elif end == "raise":
            raise ValueError("while it cleaned up")
        elif end == "ack":
            message.ack()

    options: dict[str, Any] = {"on_error": lambda error, queue: errors.append(error), **NOT_RENEWED}
    with working("threads", plane, handle, **options) as running:
        assert at_work.wait(PATIENCE_SECONDS)
        jobs.cancel(receipt.id)
        eventually(lambda: running.stats.cancelled == 1)
        jobs.put("next")
        eventually(lambda: running.stats.handled == 1)
    assert errors == []
    if end == "ack":
        assert (running.stats.cancelled, running.stats.failed) == (1, 0)
    else:
        check_cancelled(plane, running)


def test_a_message_that_is_cancelled_before_it_is_acknowledged_counts_as_cancelled(plane: Plane, kind: str) -> None:
    """The handler is too quick to be told; the ack of its message is refused."""
    jobs, errors = plane.queue("jobs"), []
    receipt = jobs.put("x")

    def handle(message: Any) -> None:
        jobs.cancel(receipt.id)

    with working(kind, plane, handle, on_error=lambda error, queue: errors.append(error)) as running:
        eventually(lambda: running.stats.cancelled == 1)
    assert (running.stats.handled, running.stats.failed, errors) == (0, 0, [])
    assert running.sent(WaitForCancel) == []


def test_nothing_is_asked_while_handlers_are_quick(plane: Plane, kind: str) -> None:
    jobs, clock = plane.queue("jobs"), WorkerClock()
    at_work, leave = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        at_work.set()
        assert leave.wait(PATIENCE_SECONDS)

    with working(kind, plane, handle, clock=clock) as running:
        jobs.put("x")
        assert at_work.wait(PATIENCE_SECONDS)
        clock.advance(WORKER_CANCEL_SECONDS - 0.01)
        threading.Event().wait(2 * WORKER_CANCEL_SECONDS)
        assert running.sent(WaitForCancel) == []
        clock.advance(0.02)
        eventually(lambda: running.sent(WaitForCancel))
        leave.set()
        eventually(lambda: running.stats.handled == 1)
        asked = len(running.sent(WaitForCancel))
        threading.Event().wait(2 * WORKER_CANCEL_SECONDS)
        assert len(running.sent(WaitForCancel)) == asked == 1


def test_one_call_waits_for_the_messages_of_all_long_handlers(plane: Plane, kind: str) -> None:
    jobs, clock = plane.queue("jobs"), WorkerClock()
    at_work, leave = threading.Semaphore(0), threading.Event()

    def handle(message: Any) -> None:
        at_work.release()
        assert leave.wait(PATIENCE_SECONDS)

    with working(kind, plane, handle, clock=clock, concurrency=8) as running:
        jobs.put_many(range(5))
        for _ in range(5):
            assert at_work.acquire(timeout=PATIENCE_SECONDS)
        clock.advance(WORKER_CANCEL_SECONDS)
        jobs.put("too short to ask about")
        assert at_work.acquire(timeout=PATIENCE_SECONDS)
        eventually(lambda: running.sent(WaitForCancel))
        leave.set()
        eventually(lambda: running.stats.handled == 6)
    assert [len(request.leases) for request in running.sent(WaitForCancel)] == [5]


def test_a_batch_goes_on_unless_all_its_messages_are_cancelled(plane: Plane) -> None:
    jobs, begun = plane.queue("jobs"), threading.Semaphore(0)
    held: list[list[AsyncMessage]] = []

    async def handle(messages: list[AsyncMessage]) -> None:
        held.append(messages)
        begun.release()
        if len(held) == 1:
            while not messages[1].cancelled:
                await asyncio.sleep(0.001)
        else:
            await messages[0].ack()
            await asyncio.sleep(PATIENCE_SECONDS)

    with working("tasks", plane, handle, batch=3, batch_wait_seconds=30, **NOT_RENEWED) as running:
        receipts = jobs.put_many(range(3))
        assert begun.acquire(timeout=PATIENCE_SECONDS)
        jobs.cancel(receipts[1].id)
        eventually(lambda: running.stats.handled == 2)
        assert (running.stats.cancelled, jobs.stats().acked_total) == (1, 2)
        receipts = jobs.put_many(range(3))
        assert begun.acquire(timeout=PATIENCE_SECONDS)
        for receipt in receipts[1:]:
            jobs.cancel(receipt.id)
        eventually(lambda: running.stats.cancelled == 3)
        eventually(lambda: running.stats.handled == 3)
    assert [[message.cancelled for message in messages] for messages in held] == [
        [False, True, False],
        [False, True, True],
    ]
    assert (jobs.stats().acked_total, jobs.stats().failed_total, running.stats.failed) == (3, 0, 0)


def test_a_worker_stops_asking_a_plane_that_does_not_answer(
    plane: Plane, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds out later then, when the renewal of the lease is refused."""
    monkeypatch.setattr(limits, "WORKER_CANCEL_WAIT_SECONDS", 0.1)
    jobs, errors = plane.queue("jobs"), []
    receipt = jobs.put("long", visibility_seconds=3)
    at_work, noticed = threading.Event(), threading.Event()

    def refuse(request: Any) -> None:
        if isinstance(request, WaitForCancel):
            raise NotAllowed("no")

    async def wait(message: AsyncMessage) -> None:
        at_work.set()
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        finally:
            noticed.set()

    def block(message: Message) -> None:
        at_work.set()
        eventually(lambda: message.cancelled)
        noticed.set()

    handle = wait if kind == "tasks" else block
    options: dict[str, Any] = {"on_call": refuse, "on_error": lambda error, queue: errors.append(error)}
    with working(kind, plane, handle, **options) as running:
        assert at_work.wait(PATIENCE_SECONDS)
        eventually(lambda: running.sent(WaitForCancel))
        jobs.cancel(receipt.id)
        assert noticed.wait(PATIENCE_SECONDS)
        eventually(lambda: running.stats.cancelled == 1)
    assert len(running.sent(WaitForCancel)) == 1
    assert (errors, running.stats.failed, running.stats.restarts, running.worker.error) == ([], 0, 0, None)


def test_a_worker_asks_again_after_an_error_that_may_pass(plane: Plane, kind: str) -> None:
    jobs, failures = plane.queue("jobs"), iter([Unreachable("gone")])
    receipt = jobs.put("long")
    handler, at_work = Handler(), threading.Event()

    def fail_once(request: Any) -> None:
        if isinstance(request, WaitForCancel):
            for error in failures:
                raise error

    async def wait(message: AsyncMessage) -> None:
        await handler(message)

    def block(message: Message) -> None:
        at_work.set()
        eventually(lambda: message.cancelled)

    with working(kind, plane, wait if kind == "tasks" else block, on_call=fail_once, **NOT_RENEWED) as running:
        assert (handler.at_work if kind == "tasks" else at_work).wait(PATIENCE_SECONDS)
        jobs.cancel(receipt.id)
        eventually(lambda: running.stats.cancelled == 1)
    assert len(running.sent(WaitForCancel)) == 2
    assert running.stats.failed == 0


def test_a_handler_that_is_drained_is_still_cancelled(plane: Plane) -> None:
    """And one that is not in time is returned as before."""
    jobs, handler = plane.queue("jobs"), Handler()
    receipt = jobs.put("long")

    async def handle(message: AsyncMessage) -> None:
        await handler(message)

    with working("tasks", plane, handle, drain_seconds=PATIENCE_SECONDS, **NOT_RENEWED) as running:
        assert handler.at_work.wait(PATIENCE_SECONDS)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        jobs.cancel(receipt.id)
        stopping.join(PATIENCE_SECONDS)
    assert (handler.cancelled, running.stats.cancelled, running.stats.deferred) == ([True], 1, 0)

    handler = Handler()
    with working("tasks", plane, handle, drain_seconds=0.01, **NOT_RENEWED) as running:
        jobs.put("long")
        assert handler.at_work.wait(PATIENCE_SECONDS)
    assert (handler.cancelled, running.stats.cancelled, running.stats.deferred) == ([False], 0, 1)
    assert jobs.stats().ready == 1


def test_within_a_second_a_worker_asks_about_every_message() -> None:
    questions: Any = CancelQuestions()
    assert questions.next([1, 2]) == ([1, 2], 1.0)
    held = list(range(600))
    asked = [questions.next(held) for _ in range(3)]
    assert sorted(number for numbers, _ in asked for number in numbers) == held
    assert sum(seconds for _, seconds in asked) == pytest.approx(1.0)
    assert max(len(numbers) for numbers, _ in asked) == 256


def test_raise_if_cancelled_names_the_message(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put("x")
    message = jobs.receive()
    assert message is not None
    message.raise_if_cancelled()
    jobs.cancel(message.id)
    message.raise_if_cancelled()  # It makes no call.
    assert jobs.wait_for_cancel([message], wait_seconds=0) == [message]
    with pytest.raises(MessageCancelled, match=message.id):
        message.raise_if_cancelled()
