"""Workers on an event loop."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Unpack

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.messages import AsyncMessage
from holdfast.handles.plane import AsyncPlane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, WorkerOptions

AsyncHandler = Callable[[AsyncMessage], Awaitable[object]]


class AsyncWorker(Consumers[AsyncHandler]):
    """Runs handlers as tasks of an event loop. Receives as many messages at once as handlers are free."""

    def __init__(
        self, plane: AsyncPlane, handlers: Mapping[str, AsyncHandler], **options: Unpack[WorkerOptions]
    ) -> None:
        super().__init__(handlers, **options)
        self._plane = plane
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT; then drain.

        Raises:
            HoldfastError: messages cannot be received, and a retry cannot succeed (its `retry` is `never`).
        """
        loop = asyncio.get_running_loop()
        self.error = None
        signals = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Only the main thread can handle signals.
                loop.add_signal_handler(number, self._stopping.set)
                signals.append(number)
        receivers = [
            asyncio.create_task(self._receive(queue, handler), name=f"holdfast-worker-{queue}")
            for queue, handler in self._handlers.items()
        ]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            gathered = asyncio.gather(*receivers, return_exceptions=True)
            await asyncio.wait((stopped, gathered), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await _cancel(receivers)
            if self._running:
                await asyncio.wait(self._running, timeout=self._drain_seconds)
        finally:
            await _cancel([*receivers, stopped])
            await _cancel(list(self._running))
            for number in signals:
                loop.remove_signal_handler(number)
            self._stopping = asyncio.Event()  # It may run again, on another loop.
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Make `run` receive no more messages and return; also if it has not started yet."""
        self._stopping.set()

    async def _receive(self, name: str, handler: AsyncHandler) -> None:
        """Start a handler for each message of a queue, until the worker stops or a retry cannot succeed."""
        slots, failures = _Slots(self._concurrency), 0
        while not self._stopping.is_set():
            try:
                free = min(await slots.wait_for_free(), limits.MESSAGES_MAX)
                messages = await self._plane.queue(name).receive_many(
                    free, wait_seconds=WAIT_SECONDS, **self._receive_options
                )
            except Exception as error:
                self._report(error, name)
                if self._is_final(error):
                    if not self._stopping.is_set():
                        self.error = error
                        self._stopping.set()
                    return
                failures += 1
                self.stats.restarts += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._restarts.pause_seconds(failures))
                continue
            failures = 0
            for message in messages:
                task = asyncio.create_task(self._handle(name, handler, message))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                slots.occupy(task)

    async def _handle(self, queue: str, handler: AsyncHandler, message: AsyncMessage) -> None:
        try:
            if self._stopping.is_set():
                await self._defer(message)
                return
            try:
                await handler(message)
            except asyncio.CancelledError:
                await asyncio.shield(self._defer(message))
                raise
            except Exception as error:
                self._report_failure(error, queue, message_id=message.id, attempt=message.attempts)
                if not message.settled:
                    await self._nack(message, error)
                return
            if not message.settled:
                await message.ack()
            self.stats.handled += 1
        except Exception as error:  # It could not be settled; its lease will expire.
            self._report(error, queue)

    async def _nack(self, message: AsyncMessage, error: Exception) -> None:
        with suppress(Fenced):  # Its lease has ended.
            await message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=error)

    async def _defer(self, message: AsyncMessage) -> None:
        with suppress(HoldfastError):
            if not message.settled:
                await message.nack(intent="defer")
                self.stats.deferred += 1


class _Slots:
    """Counts the free handler slots of a queue."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._freed = asyncio.Event()

    async def wait_for_free(self) -> int:
        """The number of free slots, as soon as there is one."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        return self._free

    def occupy(self, task: "asyncio.Task[None]") -> None:
        """Occupy a slot until `task` ends."""
        self._free -= 1
        task.add_done_callback(self._release)

    def _release(self, _: "asyncio.Task[None]") -> None:
        self._free += 1
        self._freed.set()


async def _cancel(tasks: "Iterable[asyncio.Task[None] | asyncio.Task[bool]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
