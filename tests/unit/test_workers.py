"""Workers: handling, errors, restarts and shutdown."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, AsyncWorker, Delivery, Plane, QueuePolicy, Worker
from fastness.errors import (
    Closed,
    DamagedDatabase,
    FastnessError,
    InvalidArgument,
    InvalidName,
    NotAllowed,
    Unreachable,
    rebuild,
)
from fastness.handles.messages import AsyncMessage
from fastness.handles.queues import AsyncQueue
from fastness.handles.sync.messages import Message
from fastness.handles.sync.queues import Queue
from fastness.handles.workers import RestartPolicy
from fastness.handles.workers.consumers import Window, batches, is_final
from fastness.limits import WORKER_BUFFERED_SECONDS_MAX, WORKER_WINDOW_SECONDS
from fastness.wire.queues import AckMessages, NackMessages, ReceiveMessages


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


class HandlerClock:
    """The monotonic clock of a worker; its handlers take as long as the test says."""

    def __init__(self, worker: Worker | AsyncWorker) -> None:
        self.now = 0.0
        worker._monotonic = lambda: self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def calls(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that were sent to `plane`."""
    return recorded(plane, monkeypatch)


def recorded(plane: Plane | AsyncPlane, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that are sent to `plane` from now on."""
    sent: list[Any] = []
    transport = plane.queue("jobs")._transport
    call = transport.call

    def record(request: Any) -> Any:
        sent.append(request)
        return call(request)

    monkeypatch.setattr(transport, "call", record)
    return sent


def delay_calls(plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch, turns: int, kind: type = object) -> None:
    """Make calls of this kind to `plane` wait for some turns of the event loop, as over a network."""
    transport = plane.queue("jobs")._transport
    call = transport.call

    async def delayed(request: Any) -> Any:
        for _ in range(turns if isinstance(request, kind) else 0):
            await asyncio.sleep(0)
        return await call(request)

    monkeypatch.setattr(transport, "call", delayed)


def settling(requests: list[Any]) -> dict[str, int]:
    """How many calls settled messages, by kind."""
    kinds = [
        "receive" if isinstance(request, ReceiveMessages) else type(request).__name__
        for request in list(requests)
        if isinstance(request, AckMessages | NackMessages)
        or (isinstance(request, ReceiveMessages) and (request.acks or request.wait_seconds == 0))
    ]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@asynccontextmanager
async def working(worker: AsyncWorker) -> AsyncIterator[None]:
    """Run a worker for the length of the block, and stop it."""
    async with asyncio.timeout(60):
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            await running


async def eventually_async(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def eventually(condition: Callable[[], object]) -> None:
    """Return once `condition` holds."""
    done = threading.Event()
    for _ in range(12_000):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("it never came true")


def test_a_worker_handles_every_message_and_acknowledges_it(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(50))
    seen: list[int] = []
    worker = Worker(plane, {"jobs": lambda message: seen.append(message.json())}, concurrency=4)
    worker.start()
    eventually(lambda: worker.stats.handled == 50)
    worker.stop()
    assert sorted(seen) == list(range(50))
    assert jobs.stats().acked_total == 50


def test_a_thread_without_prefetch_acknowledges_with_its_next_receive(plane: Plane, calls: list[Any]) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(20))
    worker = Worker(plane, {"jobs": lambda message: None}, prefetch=0)
    worker.start()
    eventually(lambda: worker.stats.handled == 20)
    worker.stop()
    assert settling(calls) == {"receive": 20}
    assert (jobs.stats().acked_total, jobs.stats().leased) == (20, 0)


# Prefetch.


@pytest.mark.parametrize(
    ("concurrency", "seconds", "prefetch"),
    [
        (1, [], 0),
        (1, [0.0], 32),
        (1, [0.001], 20),
        (1, [0.006], 3),
        (1, [0.0199], 1),
        (1, [0.02], 0),
        (64, [0.03], 0),
        (8, [0.005], 32),
        (8, [0.0], 256),
        (64, [0.001], 256),
        (1, [0.001, 10.0], 0),
        (1, [0.001, 10.0, *[0.001] * 20], 0),
        (1, [0.001, 10.0, *[0.001] * 100], 19),
    ],
)
def test_a_window_is_as_long_as_quick_handlers_need_20_ms(
    concurrency: int, seconds: list[float], prefetch: int
) -> None:
    window = Window(concurrency, None)
    for each in seconds:
        window.record(each)
    assert window.prefetch == prefetch
    assert window.room(0) == min(concurrency + prefetch, 256)
    assert window.room(concurrency + prefetch - 1) == 1
    assert window.room(concurrency + prefetch + 5) == 0


def test_messages_that_were_delivered_before_are_received_one_by_one(plane: Plane, calls: list[Any]) -> None:
    """One of them may end its process, which counts as a failure of all that the process holds."""
    jobs = plane.queue("jobs")
    jobs.put_many(range(5))
    jobs.nack_many(jobs.receive_many(5), delay_seconds=0)
    worker = Worker(plane, {"jobs": lambda message: None})
    HandlerClock(worker)
    calls.clear()
    worker.start()
    eventually(lambda: worker.stats.handled == 5)
    jobs.put_many(range(5))
    eventually(lambda: worker.stats.handled == 10)
    worker.stop()
    receives = [each for each in calls if isinstance(each, ReceiveMessages)]
    assert [each.max_messages for each in receives if each.acks][:4] == [1, 1, 1, 1]
    window = Window(1, None)
    window.record(0.001)
    for attempts, prefetch in (([2], 0), ([1, 1, 3], 0), ([1, 1], 20)):
        window.received(attempts)
        assert window.prefetch == prefetch


def test_a_given_prefetch_does_not_depend_on_handlers(plane: Plane) -> None:
    window = Window(2, 5)
    window.record(60.0)
    assert (window.prefetch, window.room(0), window.room(7), window.is_used, Window(2, 0).is_used) == (
        5,
        7,
        0,
        True,
        False,
    )
    for wrong in (-1, 257):
        with pytest.raises(InvalidArgument, match=f"prefetch is {wrong}; give 0 to 256"):
            Worker(plane, {"jobs": print}, prefetch=wrong)
    assert [len(each) for each in batches(range(600))] == [256, 256, 88]


def test_one_thread_with_quick_handlers_makes_one_call_for_a_window(plane: Plane, calls: list[Any]) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(200))
    seen: list[int] = []
    worker = Worker(plane, {"jobs": lambda message: seen.append(message.json())})
    HandlerClock(worker)
    worker.start()
    eventually(lambda: worker.stats.handled == 200)
    worker.stop()
    assert seen == list(range(200))
    # Windows of 1, six of 33, and 1; then one call that acknowledges the last one.
    assert settling(calls) == {"receive": 8}
    assert (jobs.stats().acked_total, jobs.stats().leased) == (200, 0)


async def test_64_slots_with_quick_handlers_make_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        for _ in range(10):
            await jobs.put_many(range(200))
        calls = recorded(plane, monkeypatch)
        at_work = most = 0

        async def handle(message: AsyncMessage) -> None:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            await asyncio.sleep(0)
            at_work -= 1

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=64)
        HandlerClock(worker)
        async with working(worker):
            await eventually_async(lambda: worker.stats.handled == 2_000)
        assert most == 64
        assert sum(settling(calls).values()) <= 20
        assert ((await jobs.stats()).acked_total, (await jobs.stats()).leased) == (2_000, 0)


@pytest.mark.parametrize("seconds", [0.025, 60.0])
def test_slow_handlers_leave_the_rest_to_other_workers(plane: Plane, calls: list[Any], seconds: float) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(40))
    blocked, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        clock.advance(seconds)
        if message.json() == 9:
            blocked.set()
            assert leave.wait(60)

    slow = Worker(plane, {"jobs": handle})
    clock = HandlerClock(slow)
    slow.start()
    assert blocked.wait(60)
    assert {request.max_messages for request in calls if isinstance(request, ReceiveMessages)} == {1}
    others: list[int] = []
    second = Worker(plane, {"jobs": lambda message: others.append(message.json())})
    second.start()
    eventually(lambda: second.stats.handled == 30)
    leave.set()
    for worker in (slow, second):
        worker.stop()
    assert others == list(range(10, 40))
    assert (jobs.stats().acked_total, slow.stats.deferred) == (40, 0)


async def test_slow_async_handlers_leave_the_rest_to_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(40))
        calls = recorded(plane, monkeypatch)
        leave, at_work = asyncio.Event(), 0

        async def handle(message: AsyncMessage) -> None:
            nonlocal at_work
            clock.advance(0.025)
            if message.json() >= 8:
                at_work += 1
                await leave.wait()

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=4)
        clock = HandlerClock(worker)
        async with working(worker):
            await eventually_async(lambda: (worker.stats.handled, at_work) == (8, 4))
            assert max(request.max_messages for request in calls if isinstance(request, ReceiveMessages)) == 4
            assert len(await jobs.receive_many(100)) == 28
            leave.set()
        assert (await jobs.stats()).acked_total == 12


def test_what_waits_for_a_handler_that_became_slow_is_settled_by_itself(plane: Plane, calls: list[Any]) -> None:
    """Handled messages are acknowledged after 20 ms, and buffered ones returned after 500 ms."""
    jobs = plane.queue("jobs")
    jobs.put_many(range(20))
    blocked, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.json() == 5:
            blocked.set()
            assert leave.wait(60)

    worker = Worker(plane, {"jobs": handle})
    clock = HandlerClock(worker)
    worker.start()
    assert blocked.wait(60)
    assert (worker.stats.handled, jobs.stats().leased) == (1, 19)
    clock.advance(WORKER_WINDOW_SECONDS)
    eventually(lambda: worker.stats.handled == 5)
    assert (jobs.stats().leased, jobs.stats().ready) == (15, 0)
    clock.advance(WORKER_BUFFERED_SECONDS_MAX)
    eventually(lambda: worker.stats.deferred == 14)
    assert settling(calls) == {"AckMessages": 1, "NackMessages": 1, "receive": 1}
    others = jobs.receive_many(20, extend_for_seconds=0)
    assert [(message.json(), message.failure_attempts) for message in others] == [(n, 0) for n in range(6, 20)]
    leave.set()
    eventually(lambda: worker.stats.handled == 6)
    worker.stop()


async def test_what_waits_for_an_async_handler_that_became_slow_is_settled_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(20))
        calls = recorded(plane, monkeypatch)
        blocked, leave = asyncio.Event(), asyncio.Event()

        async def handle(message: AsyncMessage) -> None:
            if message.json() == 5:
                blocked.set()
                await leave.wait()

        worker = AsyncWorker(plane, {"jobs": handle})
        clock = HandlerClock(worker)
        async with working(worker):
            await blocked.wait()
            assert (worker.stats.handled, (await jobs.stats()).leased) == (1, 19)
            clock.advance(WORKER_WINDOW_SECONDS)
            await eventually_async(lambda: worker.stats.handled == 5)
            clock.advance(WORKER_BUFFERED_SECONDS_MAX)
            await eventually_async(lambda: worker.stats.deferred == 14)
            assert settling(calls) == {"AckMessages": 1, "NackMessages": 1, "receive": 1}
            others = await jobs.receive_many(20, extend_for_seconds=0)
            assert [(message.json(), message.failure_attempts) for message in others] == [(n, 0) for n in range(6, 20)]
            leave.set()
        assert worker.stats.handled == 6


def test_a_given_prefetch_is_kept_while_a_handler_runs(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(20))
    blocked, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        blocked.set()
        assert leave.wait(60)

    worker = Worker(plane, {"jobs": handle}, prefetch=5)
    clock = HandlerClock(worker)
    worker.start()
    assert blocked.wait(60)
    clock.advance(60)
    threading.Event().wait(2 * WORKER_WINDOW_SECONDS)
    assert (jobs.stats().leased, jobs.stats().ready, worker.stats.deferred) == (6, 14, 0)
    leave.set()
    eventually(lambda: worker.stats.handled == 20)
    worker.stop()


def test_stopping_returns_buffered_messages_in_one_call(plane: Plane, calls: list[Any]) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(20))
    fences: list[int] = []

    def handle(message: Message) -> None:
        fences.append(message.fence)
        if message.json() == 5:
            worker._stopping.set()

    worker = Worker(plane, {"jobs": handle}, on_error=lambda error, queue: pytest.fail(str(error)))
    HandlerClock(worker)
    worker.start()
    eventually(worker._stopping.is_set)
    worker.stop()
    assert (worker.stats.handled, worker.stats.deferred, worker.stats.failed) == (6, 14, 0)
    assert settling(calls) == {"AckMessages": 1, "NackMessages": 1, "receive": 1}
    again = jobs.receive_many(20)
    assert [message.json() for message in again] == list(range(6, 20))
    assert {(message.attempts, message.failure_attempts) for message in again} == {(2, 0)}
    assert min(message.fence for message in again) > max(fences)


async def test_stopping_returns_buffered_messages_of_an_async_worker_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(20))
        calls = recorded(plane, monkeypatch)

        async def handle(message: AsyncMessage) -> None:
            if message.json() == 5:
                worker.stop()

        worker = AsyncWorker(plane, {"jobs": handle})
        HandlerClock(worker)
        async with asyncio.timeout(60):
            await worker.run()
        assert (worker.stats.handled, worker.stats.deferred, worker.stats.failed) == (6, 14, 0)
        assert settling(calls) == {"AckMessages": 1, "NackMessages": 1, "receive": 1}
        again = await jobs.receive_many(20)
        assert [message.json() for message in again] == list(range(6, 20))
        assert {(message.attempts, message.failure_attempts) for message in again} == {(2, 0)}


def test_a_message_of_a_window_that_is_lost_is_reported_and_the_others_settle(plane: Plane) -> None:
    """One is lost while it is handled, and one while it is buffered, which is not handled."""
    jobs = plane.queue("jobs")
    jobs.put_many(range(20))
    errors: list[str] = []
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.json())
        if message.json() == 3:
            taken = message.lease
            jobs.held(taken.id, lease_id=taken.lease_id, fence=taken.fence).reject("taken away")
            list(worker._queues[0].buffered)[5].mark_lost()

    worker = Worker(plane, {"jobs": handle}, on_error=lambda error, queue: errors.append(str(error)))
    HandlerClock(worker)
    worker.start()
    eventually(lambda: worker.stats.handled == 18)
    worker.stop()
    assert seen == [n for n in range(20) if n != 9]
    assert len(errors) == worker.stats.failed == 2
    assert all("is not leased as" in error for error in errors)
    assert (jobs.stats().acked_total, jobs.stats().dead) == (18, 1)


async def test_a_message_of_an_async_batch_that_is_lost_is_reported_and_the_others_settle() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(20))
        errors: list[str] = []

        async def handle(message: AsyncMessage) -> None:
            if message.json() == 3:
                taken = message.lease
                await jobs.held(taken.id, lease_id=taken.lease_id, fence=taken.fence).reject("taken away")

        worker = AsyncWorker(
            plane, {"jobs": handle}, concurrency=4, on_error=lambda error, queue: errors.append(str(error))
        )
        async with working(worker):
            await eventually_async(lambda: worker.stats.handled == 19)
        assert len(errors) == worker.stats.failed == worker.stats.restarts == 1
        assert "is not leased as" in errors[0]
        assert ((await jobs.stats()).acked_total, (await jobs.stats()).dead) == (19, 1)


def test_handlers_of_a_window_may_settle_messages_themselves_or_raise(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(60))

    def handle(message: Message) -> None:
        if message.json() % 3 == 1:
            message.ack()
        elif message.json() % 3 == 2:
            raise ValueError("no")

    worker = Worker(plane, {"jobs": handle}, concurrency=2, prefetch=16, retry_delay_seconds=lambda failures: 600)
    worker.start()
    eventually(lambda: (worker.stats.handled, worker.stats.failed) == (40, 20))
    worker.stop()
    stats = jobs.stats()
    assert (stats.acked_total, stats.delayed, stats.leased, stats.failed_total) == (40, 20, 0, 20)


async def test_async_handlers_of_a_window_may_settle_messages_themselves_or_raise() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(60))

        async def handle(message: AsyncMessage) -> None:
            if message.json() % 3 == 1:
                await message.ack()
            elif message.json() % 3 == 2:
                raise ValueError("no")

        worker = AsyncWorker(
            plane, {"jobs": handle}, concurrency=2, prefetch=16, retry_delay_seconds=lambda failures: 600
        )
        async with working(worker):
            await eventually_async(lambda: (worker.stats.handled, worker.stats.failed) == (40, 20))
        stats = await jobs.stats()
        assert (stats.acked_total, stats.delayed, stats.leased, stats.failed_total) == (40, 20, 0, 20)


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("busy", [1, 2])
async def test_an_async_worker_holds_at_most_its_slots_and_the_prefetch(
    monkeypatch: pytest.MonkeyPatch, prefetch: int, busy: int
) -> None:
    """Messages that are being acknowledged count until they are settled.

    With one busy slot, a receive waits for messages when its message is handled. With two, and no prefetch, the second
    one is handled while a receive acknowledges the first one, and finds nothing.
    """
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(-busy, 0))
        leave, most = [asyncio.Event(), asyncio.Event()], 0

        async def handle(message: AsyncMessage) -> None:
            nonlocal most
            if message.json() < 0:
                await leave[message.json()].wait()
            for _ in range(10):
                most = max(most, (await jobs.stats()).leased)
                await asyncio.sleep(0)

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=2, prefetch=prefetch)
        async with working(worker):
            for _ in range(20):
                await asyncio.sleep(0)
            assert (await jobs.stats()).leased == busy
            delay_calls(plane, monkeypatch, 100, ReceiveMessages)
            delay_calls(plane, monkeypatch, 1_000, AckMessages)
            for event in leave:
                event.set()
                for _ in range(60):
                    await asyncio.sleep(0)
            await jobs.put_many(range(20))
            await eventually_async(lambda: worker.stats.handled == 20 + busy)
        assert most == 2 + prefetch


@pytest.mark.parametrize("fails", ["receive", "both"])
async def test_an_async_worker_acknowledges_although_receives_fail(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Messages that are handled while it pauses after an error are acknowledged by themselves."""
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many([1, 2, 3])
        receive_many, leave, refused = AsyncQueue.receive_many, asyncio.Event(), asyncio.Event()

        async def refuse(queue: AsyncQueue, *args: Any, **options: Any) -> Any:
            if options.get("ack") or (fails == "both" and refused.is_set()):
                refused.set()
                raise Unreachable("gone")
            return await receive_many(queue, *args, **options)

        async def handle(message: AsyncMessage) -> None:
            if message.json() == 2:
                await leave.wait()

        monkeypatch.setattr(AsyncQueue, "receive_many", refuse)
        worker = AsyncWorker(
            plane, {"jobs": handle}, concurrency=2, prefetch=0, restarts=RestartPolicy(at_once=0, first_seconds=600)
        )
        async with working(worker):
            await refused.wait()
            await eventually_async(lambda: worker.stats.handled >= 1)
            leave.set()
            await eventually_async(lambda: worker.stats.handled == (3 if fails == "receive" else 2))
        assert worker.stats.failed == worker.stats.restarts == (fails == "both")
        assert (await jobs.stats()).acked_total == worker.stats.handled


def test_a_message_that_is_lost_is_reported_and_the_next_one_is_handled(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(["lost", "kept"])
    errors: list[str] = []

    def handle(message: Message) -> None:
        if message.json() == "lost":
            lease = message.lease
            jobs.held(lease.id, lease_id=lease.lease_id, fence=lease.fence).reject("taken away")

    worker = Worker(plane, {"jobs": handle}, on_error=lambda error, queue: errors.append(str(error)))
    worker.start()
    eventually(lambda: worker.stats.handled == 1)
    worker.stop()
    assert len(errors) == worker.stats.failed == worker.stats.restarts == 1
    assert "is not leased as" in errors[0]
    assert (jobs.stats().acked_total, jobs.stats().dead) == (1, 1)


def test_a_handled_message_is_acknowledged_although_the_next_receive_fails(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many([1, 2])
    receive_many = Queue.receive_many

    def refuse_acks(queue: Queue, *args: Any, **options: Any) -> Any:
        if options.get("ack"):
            raise Unreachable("gone")
        return receive_many(queue, *args, **options)

    monkeypatch.setattr(Queue, "receive_many", refuse_acks)
    worker = Worker(plane, {"jobs": lambda message: None})
    worker.start()
    eventually(lambda: worker.stats.handled == 2)
    worker.stop()
    assert (jobs.stats().acked_total, worker.stats.failed) == (2, 0)


def test_a_message_that_is_handled_while_the_worker_stops_is_acknowledged(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many([1, 2])
    started, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        started.set()
        assert leave.wait(60)

    worker = Worker(plane, {"jobs": handle}, drain_seconds=60)
    worker.start()
    assert started.wait(60)
    worker._stopping.set()
    leave.set()
    worker.stop()
    assert (jobs.stats().acked_total, jobs.stats().ready, worker.stats.handled) == (1, 1, 1)


def test_a_handler_that_raises_nacks_with_the_error(plane: Plane) -> None:
    plane.queue("jobs").put("x", max_attempts=3)
    errors: list[str] = []

    def fail(message: Message) -> None:
        raise ValueError(f"attempt {message.attempts}")

    worker = Worker(
        plane,
        {"jobs": fail},
        retry_delay_seconds=lambda failures: 0.0,
        on_error=lambda error, queue: errors.append(f"{queue}: {error}"),
    )
    worker.start()
    eventually(lambda: plane.queue("jobs").stats().dead == 1)
    worker.stop()
    assert errors == ["jobs: attempt 1", "jobs: attempt 2", "jobs: attempt 3"]
    assert plane.queue("jobs").dead_letters()[0].last_error == "ValueError: attempt 3"


def test_a_failed_handler_is_logged_and_kept_with_its_traceback(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    receipt = plane.queue("jobs").put("x", max_attempts=2)

    def fail(message: Message) -> None:
        raise ValueError(f"attempt {message.attempts}")

    worker = Worker(plane, {"jobs": fail}, owner="ada", retry_delay_seconds=lambda failures: 0.0)
    worker.start()
    eventually(lambda: plane.queue("jobs").stats().dead == 1)
    worker.stop()
    check_failures(plane.queue("jobs").dead_letters()[0], caplog, receipt.id)


async def test_a_failed_async_handler_is_logged_and_kept_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with fastness.open_async("memory:") as plane:
        receipt = await plane.queue("jobs").put("x", max_attempts=2)

        async def fail(message: AsyncMessage) -> None:
            raise ValueError(f"attempt {message.attempts}")

        worker = AsyncWorker(plane, {"jobs": fail}, owner="ada", retry_delay_seconds=lambda failures: 0.0)
        async with asyncio.timeout(60):
            running = asyncio.create_task(worker.run())
            while not (await plane.queue("jobs").stats()).dead:
                await asyncio.sleep(0.001)
            worker.stop()
            await running
        check_failures((await plane.queue("jobs").dead_letters())[0], caplog, receipt.id)


def check_failures(letter: Delivery, caplog: pytest.LogCaptureFixture, id: str) -> None:
    """Check the two failures of a dead letter, and that each has one log record with its traceback."""
    assert [(each.attempt, each.owner, each.error_type, each.message) for each in letter.failures] == [
        (1, "ada", "ValueError", "attempt 1"),
        (2, "ada", "ValueError", "attempt 2"),
    ]
    logged = [record for record in caplog.records if record.name == "fastness.worker"]
    assert [record.getMessage() for record in logged] == [
        f"jobs: message {id} failed on attempt {attempt}: ValueError" for attempt in (1, 2)
    ]
    for attempt, (record, failure) in enumerate(zip(logged, letter.failures, strict=True), 1):
        fields = vars(record)
        assert (fields["queue"], fields["message_id"], fields["attempt"]) == ("jobs", id, attempt)
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == f"attempt {attempt}"
        assert "in fail" in (failure.traceback or "")


def test_a_worker_uses_the_back_off_of_the_policy(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.set_policy(QueuePolicy(retry_delay_seconds=600, retry_delay_max_seconds=600))
    jobs.put("x")

    def fail(message: Message) -> None:
        raise ValueError("no")

    worker = Worker(plane, {"jobs": fail})
    worker.start()
    eventually(lambda: jobs.stats().failed_total == 1)
    worker.stop()
    assert jobs.stats().delayed == 1


def test_an_on_error_hook_that_raises_does_not_stop_the_worker(plane: Plane) -> None:
    plane.queue("jobs").put_many(["bad", "good"])
    done: list[str] = []

    def handle(message: Message) -> None:
        if message.json() == "bad":
            raise ValueError("bad")
        done.append(message.json())

    def on_error(error: Exception, queue: str) -> None:
        raise RuntimeError("and the hook too")

    worker = Worker(plane, {"jobs": handle}, on_error=on_error)
    worker.start()
    eventually(lambda: done)
    worker.stop()


def test_a_handler_may_settle_its_message_itself(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put("x")
    worker = Worker(plane, {"jobs": lambda message: message.reject("not for us")})
    worker.start()
    eventually(lambda: worker.stats.handled)
    worker.stop()
    assert [letter.last_error for letter in jobs.dead_letters()] == ["not for us"]


def test_stopping_does_not_count_failures(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put("long")
    begun, released = threading.Event(), threading.Event()

    def work(message: Message) -> None:
        begun.set()
        released.wait(60)

    worker = Worker(plane, {"jobs": work}, drain_seconds=0.05)
    worker.start()
    assert begun.wait(60)
    worker.stop()
    released.set()
    assert worker.stats.deferred == 1
    again = jobs.receive()
    assert again is not None
    assert (again.attempts, again.failure_attempts) == (2, 0)


@pytest.mark.parametrize("started", ["start", "run"])
def test_a_handler_may_stop_its_worker(plane: Plane, started: str) -> None:
    """Its message is acknowledged, and those of other handlers, too."""
    jobs = plane.queue("jobs")
    jobs.put_many(["stop", "slow", "later"])
    is_slow, is_stopped = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.json() == "stop":
            assert is_slow.wait(60)
            worker.stop()
            is_stopped.set()
        else:
            is_slow.set()
            assert is_stopped.wait(60)

    worker = Worker(plane, {"jobs": handle}, concurrency=2)
    if started == "run":
        worker.run()
    else:
        worker.start()
        eventually(lambda: worker.stats.handled == 2)
    assert (worker.stats.handled, worker.stats.failed) == (2, 0)
    assert (jobs.stats().acked_total, jobs.stats().ready, jobs.stats().leased) == (2, 1, 0)


def test_stop_waits_for_running_handlers(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    jobs.put("x")
    begun, released = threading.Event(), threading.Event()

    def work(message: Message) -> None:
        begun.set()
        released.wait(60)

    worker = Worker(plane, {"jobs": work})
    worker.start()
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    released.set()
    stopping.join(60)
    assert jobs.stats().acked_total == 1


def test_a_consumer_retries_after_an_error_of_the_plane(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = plane.queue("jobs")
    jobs.put("x")
    receive_many = type(jobs).receive_many
    failures = iter([Unreachable("gone")] * 5)

    def flaky(self: Queue, count: int, **options: Any) -> list[Message]:
        for error in failures:
            raise error
        return receive_many(self, count, **options)

    monkeypatch.setattr(type(jobs), "receive_many", flaky)
    quick = RestartPolicy(first_seconds=0.001)
    worker = Worker(plane, {"jobs": lambda message: None}, restarts=quick)
    worker.start()
    eventually(lambda: worker.stats.handled == 1)
    worker.stop()
    assert worker.stats.restarts == 5


@pytest.mark.parametrize("error", [NotAllowed("no"), InvalidName("no"), Closed("no"), DamagedDatabase("no")], ids=repr)
async def test_a_worker_ends_with_an_error_that_no_retry_can_pass(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, error: FastnessError
) -> None:
    """The consumers of its other queues end too, and their running handlers finish."""
    plane.queue("fine").put("x")
    begun, refused = threading.Event(), threading.Event()

    def work(message: Message) -> None:
        begun.set()
        refused.wait(60)

    receive_many = type(plane.queue("jobs")).receive_many

    def refuse(self: Queue, count: int, **options: Any) -> list[Message]:
        if self.name == "fine":
            return receive_many(self, count, **options)
        assert begun.wait(60)
        refused.set()
        raise error

    monkeypatch.setattr(type(plane.queue("jobs")), "receive_many", refuse)
    worker = Worker(plane, {"jobs": lambda message: None, "fine": work}, concurrency=2)
    with pytest.raises(type(error)) as raised:
        worker.run()
    assert raised.value is worker.error is error
    assert (worker.stats.handled, worker.stats.restarts, plane.queue("fine").stats().acked_total) == (1, 0, 1)

    async with fastness.open_async("memory:") as async_plane:

        async def refuse_async(self: AsyncQueue, count: int, **options: Any) -> list[AsyncMessage]:
            if self.name == "fine":
                await asyncio.sleep(60)
            raise error

        async def ignore(message: AsyncMessage) -> None: ...

        monkeypatch.setattr(type(async_plane.queue("jobs")), "receive_many", refuse_async)
        async_worker = AsyncWorker(async_plane, {"jobs": ignore, "fine": ignore})
        with pytest.raises(type(error)) as raised:
            await async_worker.run()
    assert raised.value is async_worker.error is error


def test_an_unexpected_error_of_a_server_is_retried() -> None:
    """It arrives as the base class, and so does an error that a newer server has and this client does not know."""
    assert not is_final(rebuild("error", "Unexpected error in the server"))
    assert not is_final(rebuild("of_a_newer_server", "?"))


def test_a_stopped_worker_does_not_raise_when_its_plane_closes(plane: Plane) -> None:
    worker = Worker(plane, {"jobs": lambda message: None})
    running = threading.Thread(target=worker.run)
    running.start()
    eventually(lambda: plane.queue("jobs").stats().waiting_consumers)
    worker._stopping.set()
    plane.close()
    running.join(60)
    assert worker.error is None


def test_restarts_back_off_after_three_immediate_retries() -> None:
    policy = RestartPolicy()
    assert [policy.pause_seconds(failures) for failures in range(1, 8)] == [0, 0, 0, 0.25, 0.5, 1, 2]
    assert policy.pause_seconds(1_000) == 300


def test_a_worker_without_handlers_is_refused(plane: Plane) -> None:
    with pytest.raises(InvalidArgument, match="handler"):
        Worker(plane, {})
    with pytest.raises(InvalidArgument, match="concurrency"):
        Worker(plane, {"jobs": print}, concurrency=0)


async def test_an_async_worker_handles_fails_and_drains() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(["good", "bad", "slow"])
        seen: list[str] = []
        slow_has_begun = asyncio.Event()

        async def handle(message: AsyncMessage) -> None:
            body = message.json()
            if body == "bad":
                raise ValueError("bad")
            if body == "slow":
                slow_has_begun.set()
                await asyncio.sleep(60)
            seen.append(body)

        worker = AsyncWorker(
            plane, {"jobs": handle}, concurrency=3, drain_seconds=0.05, retry_delay_seconds=lambda _: 600
        )
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            await slow_has_begun.wait()
            while not (seen and worker.stats.failed):
                await asyncio.sleep(0.001)
            worker.stop()
            await running
        stats = await jobs.stats()
        assert seen == ["good"]
        assert (stats.acked_total, stats.failed_total, worker.stats.deferred) == (1, 1, 1)
        assert (stats.ready, stats.delayed, stats.leased) == (1, 1, 0)  # The slow one is back, the bad one rests.


def test_a_message_that_cannot_be_settled_does_not_end_its_consumer(plane: Plane) -> None:
    """The delay of the first message is invalid, which affects that message only."""
    plane.queue("jobs").put_many(["poison", "fine"])
    handled: list[str] = []
    errors: list[Exception] = []

    def handle(message: Message) -> None:
        if message.json() == "poison":
            raise ValueError("poison")
        handled.append(message.json())

    worker = Worker(
        plane,
        {"jobs": handle},
        retry_delay_seconds=lambda failures: -1.0,
        on_error=lambda error, queue: errors.append(error),
    )
    worker.start()
    eventually(lambda: handled == ["fine"])
    worker.stop()
    assert [type(error) for error in errors] == [ValueError, InvalidArgument]


async def test_a_message_that_cannot_be_settled_does_not_end_its_async_consumer() -> None:
    async with await fastness.open_async("memory:") as plane:
        await plane.queue("jobs").put_many(["poison", "fine"])
        handled: list[str] = []

        async def handle(message: AsyncMessage) -> None:
            if message.json() == "poison":
                raise ValueError("poison")
            handled.append(message.json())
            worker.stop()

        worker = AsyncWorker(plane, {"jobs": handle}, retry_delay_seconds=lambda failures: -1.0)
        async with asyncio.timeout(60):
            await worker.run()
        assert handled == ["fine"]


def test_an_error_with_surrogates_is_encoded(plane: Plane) -> None:
    plane.queue("jobs").put("x", max_attempts=1)

    def fail(message: Message) -> None:
        raise ValueError("no such file: \udcff")

    worker = Worker(plane, {"jobs": fail})
    worker.start()
    eventually(lambda: plane.queue("jobs").stats().dead == 1)
    worker.stop()
    assert plane.queue("jobs").dead_letters()[0].last_error == "ValueError: no such file: ?"


def test_free_threads_share_one_receive(plane: Plane) -> None:
    """One thread waits and receives for all of them."""
    jobs = plane.queue("jobs")
    at_once, everybody_works = threading.Barrier(200), threading.Event()

    def handle(message: Message) -> None:
        at_once.wait(60)
        everybody_works.set()

    worker = Worker(plane, {"jobs": handle}, concurrency=200)
    worker.start()
    eventually(lambda: jobs.stats().waiting_consumers == 1)
    jobs.put_many(range(200))
    assert everybody_works.wait(60)
    worker.stop()
    assert (worker.stats.handled, worker.stats.failed, jobs.stats().acked_total) == (200, 0, 200)


async def test_free_tasks_share_one_receive() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        at_work = 0

        async def handle(message: AsyncMessage) -> None:
            nonlocal at_work
            at_work += 1
            while at_work < 300:
                await asyncio.sleep(0.001)
            worker.stop()

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=300)  # And more than one asking may take.
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            while (await jobs.stats()).waiting_consumers != 1:
                await asyncio.sleep(0.001)
            for start in (0, 150):
                await jobs.put_many(range(start, start + 150))
            await running
        assert (worker.stats.handled, worker.stats.failed, (await jobs.stats()).acked_total) == (300, 0, 300)


@pytest.mark.parametrize("after", range(0, 40, 4))
def test_a_stopped_worker_leaves_no_leases(plane: Plane, after: int) -> None:
    jobs = plane.queue("jobs")
    jobs.put_many(range(100))
    worker = Worker(plane, {"jobs": lambda message: None}, concurrency=8)
    worker.start()
    eventually(lambda: worker.stats.handled >= after)
    worker.stop()
    stats = jobs.stats()
    assert (stats.leased, stats.failed_total, stats.ready + stats.acked_total) == (0, 0, 100)
    assert stats.acked_total == worker.stats.handled


@pytest.mark.parametrize("turns", range(20))
@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stopped_async_worker_leaves_no_leases(
    monkeypatch: pytest.MonkeyPatch, turns: int, delay: int, cancelled: bool
) -> None:
    """It is stopped or cancelled at every step: receiving, starting handlers, running, settling."""
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(100))
        delay_calls(plane, monkeypatch, delay)

        async def handle(message: AsyncMessage) -> None:
            await asyncio.sleep(0)

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=8)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            for _ in range(turns):
                await asyncio.sleep(0)
            if cancelled:
                running.cancel()
            else:
                worker.stop()
            await asyncio.gather(running, return_exceptions=True)
        stats = await jobs.stats()
        assert (stats.leased, stats.failed_total, stats.ready + stats.acked_total) == (0, 0, 100)
        assert stats.acked_total == worker.stats.handled


@pytest.mark.parametrize("turns", range(0, 60, 2))
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stopped_async_worker_with_batches_leaves_no_leases(
    monkeypatch: pytest.MonkeyPatch, turns: int, cancelled: bool
) -> None:
    """At every step, also while it returns messages that were delivered before, for which it has no slot."""
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put_many(range(50))
        await jobs.nack_many(await jobs.receive_many(20), intent="defer")
        delay_calls(plane, monkeypatch, 3)

        async def handle(messages: list[AsyncMessage]) -> None:
            await asyncio.sleep(0)

        worker = AsyncWorker(plane, {"jobs": handle}, concurrency=2, batch=10, batch_wait_seconds=0.001)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            for _ in range(turns):
                await asyncio.sleep(0)
            if cancelled:
                running.cancel()
            else:
                worker.stop()
            await asyncio.gather(running, return_exceptions=True)
        stats = await jobs.stats()
        assert (stats.leased, stats.failed_total, stats.ready + stats.acked_total) == (0, 0, 50)
        assert stats.acked_total == worker.stats.handled


async def test_a_cancelled_handler_returns_its_message() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await jobs.put("x")
        times: list[int] = []

        async def handle(message: AsyncMessage) -> None:
            times.append(message.attempts)
            if message.attempts == 1:
                raise asyncio.CancelledError
            worker.stop()

        worker = AsyncWorker(plane, {"jobs": handle})
        async with asyncio.timeout(60):
            await worker.run()
        assert times == [1, 2]
        assert (worker.stats.handled, worker.stats.deferred, (await jobs.stats()).failed_total) == (1, 1, 0)
