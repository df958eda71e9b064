"""Workers of both kinds on the data of one plane, for tests that expect the same of both."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from fastness import AsyncPlane, AsyncWorker, Plane, Worker
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport

PATIENCE_SECONDS = 60.0  # Bounds every wait; far longer than any step takes.
KINDS = ("threads", "tasks")


class WorkerClock:
    """The monotonic clock of a worker. It stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Working:
    """A running worker, and the requests that it has sent."""

    def __init__(self, worker: Worker | AsyncWorker, requests: list[Any], stop: Callable[[], None]) -> None:
        self.worker = worker
        self.stats = worker.stats
        self.stop = stop
        self._requests = requests

    def sent(self, kind: type) -> list[Any]:
        """The requests of a class."""
        return [request for request in list(self._requests) if isinstance(request, kind)]


@contextmanager
def working(
    kind: str,
    plane: Plane,
    handler: Callable[[Any], Any],
    *,
    clock: WorkerClock | None = None,
    on_call: Callable[[Any], None] = lambda request: None,
    **options: Any,
) -> Iterator[Working]:
    """Run a worker for the queue `jobs` of `plane`.

    A handler that is not a coroutine function runs in a thread. `on_call` gets each request before it is sent, and may
    raise the error of the call.
    """
    requests: list[Any] = []

    def note(request: Any) -> None:
        requests.append(request)
        on_call(request)

    start = _start_threads if kind == "threads" else _start_tasks
    services = plane._transport.services  # type: ignore[attr-defined]
    worker, stop = start(services, handler, note, clock, options)
    try:
        yield Working(worker, requests, stop)
    finally:
        stop()


def _start_threads(
    services: Any, handler: Any, note: Callable[[Any], None], clock: WorkerClock | None, options: dict[str, Any]
) -> tuple[Worker, Callable[[], None]]:
    transport = EmbeddedTransport(services)
    call = transport.call

    def noted(request: Any) -> Any:
        note(request)
        return call(request)

    transport.call = noted  # type: ignore[method-assign, assignment]
    worker = Worker(Plane(transport), {"jobs": handler}, **options)
    worker._monotonic = clock or worker._monotonic
    worker.start()
    return worker, worker.stop


def _start_tasks(
    services: Any, handler: Any, note: Callable[[Any], None], clock: WorkerClock | None, options: dict[str, Any]
) -> tuple[AsyncWorker, Callable[[], None]]:
    started: SimpleQueue[tuple[AsyncWorker, asyncio.AbstractEventLoop]] = SimpleQueue()

    async def handle(messages: Any) -> Any:
        return await asyncio.to_thread(handler, messages)

    async def run() -> None:
        transport = AsyncEmbeddedTransport(services)
        call = transport.call

        async def noted(request: Any) -> Any:
            note(request)
            return await call(request)

        transport.call = noted  # type: ignore[method-assign, assignment]
        is_async = inspect.iscoroutinefunction(handler)
        worker = AsyncWorker(AsyncPlane(transport), {"jobs": handler if is_async else handle}, **options)
        worker._monotonic = clock or worker._monotonic
        started.put((worker, asyncio.get_running_loop()))
        await worker.run()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    worker, loop = started.get(timeout=PATIENCE_SECONDS)

    def stop() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(worker.stop)
        thread.join(PATIENCE_SECONDS)

    return worker, stop
