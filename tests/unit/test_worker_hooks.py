"""Hooks of workers, and what happens to messages when their consumer ends."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, Plane, QueuePolicy, TaskApp, Worker
from fastness.errors import InvalidArgument
from fastness.handles.workers import consumers
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NackMessages
from tests.support.waiting import eventually
from tests.unit.worker_fixtures import KINDS, PATIENCE_SECONDS, working


@pytest.fixture(autouse=True)
def short_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for messages finds soon that its worker is stopped."""
    monkeypatch.setattr(consumers, "WAIT_SECONDS", 0.1)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


class Recorder:
    """Hooks that record their calls and then raise; as functions or as coroutine functions."""

    def __init__(self, *, are_async: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {
            f"on_{name}": (self._async_hook if are_async else self._hook)(name)
            for name in ("start", "message", "settled", "error", "stop")
        }

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            self.calls.append((name, *(each.json() if hasattr(each, "json") else each for each in args)))
            raise RuntimeError(f"error of on_{name}")

        return hook

    def _async_hook(self, name: str) -> Callable[..., Any]:
        hook = self._hook(name)

        async def hook_async(*args: Any) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            hook(*args)

        return hook_async

    def args_of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for kind, *args in self.calls if kind == name]  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "are_async"), [("threads", False), ("tasks", False), ("tasks", True)])
@pytest.mark.parametrize("batch", [None, 4])
def test_hooks_see_what_becomes_of_every_message_and_their_errors_change_nothing(
    plane: Plane, kind: str, are_async: bool, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Four messages of each kind, which make one batch if there are batches. The last handler never ends by itself."""
    expected = {
        "return": "acked",
        "raise": "failed",
        "reject": "settled",
        "cancel": "cancelled",
        "lose": "lost",
        "hang": "deferred",
    }
    jobs = plane.queue("jobs")
    jobs.set_policy(QueuePolicy(max_attempts=1))
    jobs.put_many([[word, n] for word in expected for n in range(4)])
    hooks, hanging, released = Recorder(are_async=are_async), threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        word, taken = message.json()[0], message.lease
        assert ("message", message.json()) in hooks.calls
        if word == "cancel":
            jobs.cancel(message.id)
        elif word in ("reject", "lose"):
            jobs.held(taken.id, lease_id=taken.lease_id, fence=taken.fence).reject("by the handler")
            message.settled = word == "reject"

    def handle_some(messages: list[Any]) -> bool:
        for message in messages:
            handle(message)
        if messages[0].json()[0] == "raise":
            raise ValueError("it failed")
        if messages[0].json()[0] == "hang":
            hanging.set()
            return kind == "tasks" or released.wait(PATIENCE_SECONDS)
        return False

    async def handle_some_async(messages: list[Any]) -> None:
        if await asyncio.to_thread(handle_some, messages):
            await asyncio.sleep(PATIENCE_SECONDS)

    async def handle_one_async(message: Any) -> None:
        await handle_some_async([message])

    if kind == "threads":
        handler: Any = handle_some if batch else lambda message: handle_some([message])
    else:
        handler = handle_some_async if batch else handle_one_async
    options: dict[str, Any] = {"batch": batch} if batch else {}
    with working(kind, plane, handler, drain_seconds=0.0, prefetch=0, **options, **hooks.options) as worker:
        assert hanging.wait(PATIENCE_SECONDS)
        worker.stop()
        released.set()
    settled = sorted((*body, outcome) for body, outcome in hooks.args_of("settled"))
    hung = 4 if batch else 1
    assert settled == sorted(
        (word, n, expected[word]) for word in expected for n in range(4 if word != "hang" else hung)
    )
    assert len(hooks.args_of("message")) == 20 + hung
    assert {queue for _, queue in hooks.args_of("error")} == {"jobs"}
    assert len(hooks.args_of("error")) == (1 if batch else 4) + 4  # Of handlers that raised, and of lost messages.
    assert (hooks.calls[0], hooks.calls[-1]) == (("start",), ("stop",))
    assert len(hooks.args_of("start")) == len(hooks.args_of("stop")) == 1
    assert {f"error of on_{name}" for name in ("start", "message", "settled", "error", "stop")} <= {
        str(record.exc_info[1]) for record in caplog.records if record.exc_info
    }
    stats = jobs.stats()
    assert (stats.ready, stats.leased, stats.acked_total) == (4, 0, 4)


async def _coroutine(*args: object) -> None:
    del args


@pytest.mark.parametrize("name", ["on_start", "on_message", "on_settled", "on_error", "on_stop"])
def test_hooks_on_threads_must_be_functions(plane: Plane, name: str) -> None:
    options: Any = {name: _coroutine}
    with pytest.raises(InvalidArgument, match=f"{name} is a coroutine function; give a function, or use an AsyncW"):
        Worker(plane, {"jobs": print}, **options)
    with pytest.raises(InvalidArgument, match=f"{name} is a coroutine function; a hook of an app must be a function"):
        getattr(TaskApp(plane), name)(_coroutine)


def test_an_app_has_hooks_for_its_functions_and_coroutines(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    app, calls = TaskApp(plane), list[tuple[Any, ...]]()

    @app.task(queue="functions", max_attempts=1)
    def halve(n: int) -> int:
        if n % 2:
            raise ValueError("odd")
        return n // 2

    @app.task(queue="coroutines")
    async def double(n: int) -> int:
        return 2 * n

    @app.on_message
    def first(message: Any) -> None:
        calls.append(("first", message.queue))
        raise RuntimeError("error of the first hook")

    app.on_start(lambda: calls.append(("start",)))
    app.on_message(lambda message: calls.append(("second", message.queue)))
    app.on_settled(lambda message, outcome: calls.append(("settled", message.queue, outcome)))
    app.on_error(lambda error, queue: calls.append(("error", str(error), queue)))
    app.on_stop(lambda: calls.append(("stop",)))
    errors: list[str] = []
    worker = app.worker(on_error=lambda error, queue: errors.append(queue))
    worker.start()
    results = [halve.send(8), double.send(4)]
    assert [result.result(wait_seconds=PATIENCE_SECONDS) for result in results] == [4, 8]
    halve.send(3)
    eventually(lambda: errors)
    worker.stop()
    worker.stop()
    assert Counter(calls) == {
        ("start",): 1,
        ("first", "functions"): 2,
        ("second", "functions"): 2,
        ("first", "coroutines"): 1,
        ("second", "coroutines"): 1,
        ("settled", "functions", "settled"): 1,
        ("settled", "coroutines", "settled"): 1,
        ("settled", "functions", "failed"): 1,
        ("error", "odd", "functions"): 1,
        ("stop",): 1,
    }
    assert (calls[0], calls[-1], errors) == (("start",), ("stop",), ["functions"])
    assert caplog.text.count("RuntimeError: error of the first hook") == 3


# Messages that are not settled when their consumer ends.


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_stops_returns_its_messages_with_the_delay(plane: Plane, kind: str) -> None:
    """One whose handler runs, and three that wait for it."""
    plane.queue("jobs").put_many(range(4))
    at_work, released = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        del message
        at_work.set()
        released.wait(PATIENCE_SECONDS)

    async def handle_async(message: Any) -> None:
        del message
        at_work.set()
        await asyncio.sleep(PATIENCE_SECONDS)

    options: dict[str, Any] = {"prefetch": 3, "drain_seconds": 0.0, "delay_on_close_seconds": 500.0}
    with working(kind, plane, handle if kind == "threads" else handle_async, **options) as worker:
        assert at_work.wait(PATIENCE_SECONDS)
        worker.stop()
        released.set()
    nacks = worker.sent(NackMessages)
    assert {(nack.intent, nack.delay_seconds) for nack in nacks} == {("defer", 500.0)}
    stats = plane.queue("jobs").stats()
    assert (stats.delayed, stats.ready, stats.leased, stats.failed_total) == (4, 0, 0, 0)
    assert worker.stats.deferred == 4


def returned_after(plane: Plane, clock: ManualClock, seconds: float) -> list[tuple[Any, int]]:
    """The messages that are delivered again after this time, not before, with their failures."""
    jobs = plane.queue("jobs")
    clock.advance_ms(round(seconds * 1_000) - 1)
    assert jobs.receive() is None
    clock.advance_ms(1)
    return [(message.json(), message.failure_attempts) for message in jobs.receive_many(10)]


def test_a_stopped_block_returns_its_message_with_the_delay(clock: ManualClock) -> None:
    with fastness.open("memory:", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put_many([1, 2])
        with pytest.raises(KeyboardInterrupt), jobs.receive(delay_on_close_seconds=20):
            raise KeyboardInterrupt
        (second,) = jobs.receive_many(1, delay_on_close_seconds=20)
        with pytest.raises(SystemExit), second:
            raise SystemExit
        assert returned_after(plane, clock, 20) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_subscription_that_ends_returns_what_is_not_settled_with_the_delay(
    clock: ManualClock, is_async: bool
) -> None:
    """Messages that the caller has seen and not settled, too; without the option, those stay leased."""
    with fastness.open("memory:", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put_many(range(5))

        def consume() -> None:
            subscription: Any = jobs.subscribe(delay_on_close_seconds=20)
            next(subscription).ack()
            assert [next(subscription).json(), next(subscription).json()] == [1, 2]
            subscription.close()

        async def consume_async() -> None:
            queue = AsyncPlane(AsyncEmbeddedTransport(plane._transport.services)).queue("jobs")  # type: ignore[attr-defined]
            subscription: Any = queue.subscribe(delay_on_close_seconds=20)
            await (await anext(subscription)).ack()
            assert [(await anext(subscription)).json(), (await anext(subscription)).json()] == [1, 2]
            await subscription.aclose()

        asyncio.run(consume_async()) if is_async else consume()
        assert returned_after(plane, clock, 20) == [(n, 0) for n in range(1, 5)]


def test_delays_on_close_are_bounded(plane: Plane) -> None:
    jobs = plane.queue("jobs")
    for invalid in (-1, 31_536_001, float("nan"), "5"):
        delay: Any = invalid
        for call in (jobs.receive, jobs.receive_many, lambda **given: next(jobs.subscribe(**given))):
            with pytest.raises(InvalidArgument, match=r"delay_on_close_seconds is .*; give a number from 0 to 31,536,"):
                call(delay_on_close_seconds=delay)
        with pytest.raises(InvalidArgument, match="delay_on_close_seconds"):
            Worker(plane, {"jobs": print}, delay_on_close_seconds=delay)
