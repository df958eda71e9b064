"""Workers: consumers that run by themselves.

    receive ──► handler(message) ──► returned: ack     raised: nack, later and later     stopped: given back, uncounted
       ▲
       └── the plane failed: again at once three times, then after 250 ms, doubling up to five minutes

Errors of handlers, of hooks and of the plane take one path: they are counted, logged and given to `on_error`. A handler
that settles its message itself is left alone. A shutdown takes no new messages, waits for those at work, and gives back
what it could not finish without counting it as a failure.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.errors import Closed, Fenced, HoldfastError, InvalidArgument, Validation
from holdfast.handles.messages import AsyncMessage
from holdfast.handles.plane import AsyncPlane
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.plane import Plane

_log = logging.getLogger("holdfast.worker")
_WAIT_SECONDS = 1.0  # A thread that waits for messages looks this often whether it is to stop.


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How soon a consumer goes on after the plane failed it."""

    at_once: int = 3
    first_seconds: float = 0.25
    longest_seconds: float = 300.0

    def pause_seconds(self, failures: int) -> float:
        """How long to rest after so many failures in a row."""
        if failures <= self.at_once:
            return 0.0
        return min(self.first_seconds * 2.0 ** min(failures - self.at_once - 1, 60), self.longest_seconds)


def back_off(failures: int) -> float:
    """How many seconds a message rests after so many failures: 1, 2, 4, up to five minutes."""
    return min(2.0 ** min(failures - 1, 60), 300.0)


class WorkerStats(msgspec.Struct):
    """What a worker has done so far."""

    handled: int = 0
    failed: int = 0
    deferred: int = 0
    restarts: int = 0


class _Worker:
    """What both kinds of workers have in common."""

    def __init__(
        self,
        plane: Any,
        handlers: Mapping[str, Callable[[Any], Any]],
        *,
        concurrency: int = 1,
        owner: str | None = None,
        with_state: bool = False,
        visibility_seconds: float | None = None,
        extend_for_seconds: float | None = None,
        retry_delay_seconds: Callable[[int], float] = back_off,
        restarts: RestartPolicy | None = None,
        on_error: Callable[[Exception, str], None] | None = None,
        drain_seconds: float = 10.0,
    ) -> None:
        """Handle the messages of each queue by its handler, `concurrency` at a time for each.

        Args:
            handlers: by the name of the queue; a handler takes a message, and what it returns is not looked at.
            retry_delay_seconds: how long a message rests after so many failures.
            restarts: how soon to go on after the plane failed.
            on_error: is given every error, and the name of its queue.
            drain_seconds: how long `stop` waits for handlers that are at work.
        """
        if not handlers:
            raise InvalidArgument("A worker needs at least one handler; give a queue's name and a function")
        if concurrency < 1 or drain_seconds < 0:
            raise InvalidArgument("concurrency is at least 1, and drain_seconds is not negative")
        self.stats = WorkerStats()
        self._plane = plane
        self._handlers = dict(handlers)
        self._concurrency = concurrency
        self._options = {
            "owner": owner,
            "with_state": with_state,
            "visibility_seconds": visibility_seconds,
            "extend_for_seconds": extend_for_seconds,
        }
        self._delay = retry_delay_seconds
        self._restarts = restarts or RestartPolicy()
        self._on_error = on_error
        self._drain_seconds = drain_seconds
        self._at_work: set[Any] = set()

    def _told(self, error: Exception, queue: str) -> None:
        """The one path of every error."""
        self.stats.failed += 1
        _log.warning("%s: %s: %s", queue, type(error).__name__, error)
        if self._on_error is not None:
            try:
                self._on_error(error, queue)
            except Exception:
                _log.exception("on_error failed itself")

    @staticmethod
    def _is_final(error: Exception) -> bool:
        """Whether trying again would only fail again."""
        return isinstance(error, Validation | Closed)


def _reason(error: Exception) -> str:
    """What a message is said to have failed of; names of files may hold what nobody can encode."""
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


class Worker(_Worker):
    """Runs handlers on threads."""

    def __init__(self, plane: Plane, handlers: Mapping[str, Callable[[Message], Any]], **options: Any) -> None:
        super().__init__(plane, handlers, **options)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, on threads of its own."""
        for queue, handler in self._handlers.items():
            for number in range(self._concurrency):
                name = f"holdfast-worker-{queue}-{number}"
                thread = threading.Thread(target=self._consume, args=(queue, handler), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def run(self) -> None:
        """Begin, and go on until `stop`, SIGTERM or SIGINT (in the main thread); then drain."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, lambda *_: self._stopping.set())
        try:
            self.start()
            while not self._stopping.wait(_WAIT_SECONDS) and any(thread.is_alive() for thread in self._threads):
                pass
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Take no new messages, let handlers finish for `drain_seconds`, and give the rest back uncounted."""
        self._stopping.set()
        deadline = time.monotonic() + self._drain_seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            unfinished = list(self._at_work)
        for message in unfinished:
            self._defer(message)

    def _consume(self, name: str, handler: Callable[[Message], Any]) -> None:
        failures = 0
        while not self._stopping.is_set():
            message = None
            try:
                message = self._plane.queue(name).receive(wait_seconds=_WAIT_SECONDS, **self._options)
                failures = 0
                if message is not None:
                    self._handle(name, handler, message)
            except Exception as error:
                self._told(error, name)
                if message is None and self._is_final(error):  # One message that cannot be settled ends nothing.
                    return
                failures += 1
                self.stats.restarts += 1
                self._stopping.wait(self._restarts.pause_seconds(failures))

    def _handle(self, queue: str, handler: Callable[[Message], Any], message: Message) -> None:
        if self._stopping.is_set():
            self._defer(message)
            return
        with self._lock:
            self._at_work.add(message)
        try:
            handler(message)
        except Exception as error:
            self._told(error, queue)
            with self._lock:
                mine = message in self._at_work
            if mine and not message.settled:
                self._give_back(message, error)
        else:
            if not message.settled:
                message.ack()
            self.stats.handled += 1
        finally:
            with self._lock:
                self._at_work.discard(message)

    def _give_back(self, message: Message, error: Exception) -> None:
        with suppress(Fenced):  # Somebody else has it by now.
            message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=_reason(error))

    def _defer(self, message: Message) -> None:
        with self._lock:
            self._at_work.discard(message)
        with suppress(HoldfastError):
            if not message.settled:
                message.nack(intent="defer")
                self.stats.deferred += 1


class AsyncWorker(_Worker):
    """Runs handlers as tasks of an event loop."""

    def __init__(
        self, plane: AsyncPlane, handlers: Mapping[str, Callable[[AsyncMessage], Awaitable[Any]]], **options: Any
    ) -> None:
        super().__init__(plane, handlers, **options)
        self._stopping: asyncio.Event | None = None

    async def run(self) -> None:
        """Begin, and go on until `stop`, SIGTERM or SIGINT; then drain."""
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        signals = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Only the main thread gets signals.
                loop.add_signal_handler(number, self._stopping.set)
                signals.append(number)
        consumers = [
            asyncio.create_task(self._consume(queue, handler), name=f"holdfast-worker-{queue}-{number}")
            for queue, handler in self._handlers.items()
            for number in range(self._concurrency)
        ]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            gathered = asyncio.gather(*consumers, return_exceptions=True)
            await asyncio.wait((stopped, gathered), return_when=asyncio.FIRST_COMPLETED)
            await self._drain(consumers)
        finally:
            stopped.cancel()
            for task in consumers:
                task.cancel()
            await asyncio.gather(*consumers, stopped, return_exceptions=True)
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Have `run` take no new messages and end."""
        if self._stopping is not None:
            self._stopping.set()

    async def _drain(self, consumers: list["asyncio.Task[None]"]) -> None:
        for task in consumers:
            if task not in {message.task for message in self._at_work}:
                task.cancel()  # It waits for a message, and would take one more.
        await asyncio.wait(consumers, timeout=self._drain_seconds)

    async def _consume(self, name: str, handler: Callable[[AsyncMessage], Awaitable[Any]]) -> None:
        failures = 0
        assert self._stopping is not None
        while not self._stopping.is_set():
            message = None
            try:
                message = await self._plane.queue(name).receive(wait_seconds=_WAIT_SECONDS, **self._options)
                failures = 0
                if message is not None:
                    await self._handle(name, handler, message)
            except Exception as error:
                self._told(error, name)
                if message is None and self._is_final(error):  # One message that cannot be settled ends nothing.
                    return
                failures += 1
                self.stats.restarts += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._restarts.pause_seconds(failures))

    async def _handle(
        self, queue: str, handler: Callable[[AsyncMessage], Awaitable[Any]], message: AsyncMessage
    ) -> None:
        assert self._stopping is not None
        work = _AtWork(message, asyncio.current_task())
        self._at_work.add(work)
        try:
            if self._stopping.is_set():
                await self._defer(message)
                return
            await handler(message)
        except asyncio.CancelledError:
            await asyncio.shield(self._defer(message))
            raise
        except Exception as error:
            self._told(error, queue)
            if not message.settled:
                with suppress(Fenced):  # Somebody else has it by now.
                    await message.nack(
                        delay_seconds=self._delay(message.failure_attempts + 1),
                        error=_reason(error),
                    )
        else:
            if not message.settled:
                await message.ack()
            self.stats.handled += 1
        finally:
            self._at_work.discard(work)

    async def _defer(self, message: AsyncMessage) -> None:
        with suppress(HoldfastError):
            if not message.settled:
                await message.nack(intent="defer")
                self.stats.deferred += 1


class _AtWork:
    """A message, and the task that works on it."""

    def __init__(self, message: AsyncMessage, task: "asyncio.Task[Any] | None") -> None:
        self.message = message
        self.task = task
