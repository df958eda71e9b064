"""Workers on an event loop."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.messages import AsyncMessage
from holdfast.handles.plane import AsyncPlane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, reason_of


class AsyncWorker(Consumers):
    """Runs handlers as tasks of an event loop. Each queue is asked for as many messages at once as hands are free."""

    def __init__(
        self, plane: AsyncPlane, handlers: Mapping[str, Callable[[AsyncMessage], Awaitable[Any]]], **options: Any
    ) -> None:
        super().__init__(plane, handlers, **options)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Begin, and go on until `stop`, SIGTERM or SIGINT; then drain."""
        loop = asyncio.get_running_loop()
        signals = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Only the main thread gets signals.
                loop.add_signal_handler(number, self._stopping.set)
                signals.append(number)
        feeders = [
            asyncio.create_task(self._feed(queue, handler), name=f"holdfast-worker-{queue}")
            for queue, handler in self._handlers.items()
        ]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            gathered = asyncio.gather(*feeders, return_exceptions=True)
            await asyncio.wait((stopped, gathered), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await _end(feeders)
            if self._at_work:
                await asyncio.wait(self._at_work, timeout=self._drain_seconds)
        finally:
            await _end([*feeders, stopped])
            await _end(list(self._at_work))
            for number in signals:
                loop.remove_signal_handler(number)
            self._stopping = asyncio.Event()  # It may run again, on another loop.

    def stop(self) -> None:
        """Have `run` take no new messages and end; before it began, too."""
        self._stopping.set()

    async def _feed(self, name: str, handler: Callable[[AsyncMessage], Awaitable[Any]]) -> None:
        """Hand out the messages of a queue until the worker stops, or until asking again would only fail again."""
        hands, failures = _Hands(self._concurrency), 0
        while not self._stopping.is_set():
            try:
                free = min(await hands.free(), limits.MESSAGES_MAX)
                messages = await self._plane.queue(name).receive_many(free, wait_seconds=WAIT_SECONDS, **self._options)
            except Exception as error:
                self._told(error, name)
                if self._is_final(error):
                    return
                failures += 1
                self.stats.restarts += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._restarts.pause_seconds(failures))
                continue
            failures = 0
            for message in messages:
                task = asyncio.create_task(self._handle(name, handler, message))
                self._at_work.add(task)
                task.add_done_callback(self._at_work.discard)
                hands.take(task)

    async def _handle(
        self, queue: str, handler: Callable[[AsyncMessage], Awaitable[Any]], message: AsyncMessage
    ) -> None:
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
                self._told(error, queue)
                if not message.settled:
                    await self._give_back(message, error)
                return
            if not message.settled:
                await message.ack()
            self.stats.handled += 1
        except Exception as error:  # It could not be settled; its lease ends by itself.
            self._told(error, queue)

    async def _give_back(self, message: AsyncMessage, error: Exception) -> None:
        with suppress(Fenced):  # Somebody else has it by now.
            await message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=reason_of(error))

    async def _defer(self, message: AsyncMessage) -> None:
        with suppress(HoldfastError):
            if not message.settled:
                await message.nack(intent="defer")
                self.stats.deferred += 1


class _Hands:
    """How many messages of a queue may be at work at once, and how many are."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._freed = asyncio.Event()

    async def free(self) -> int:
        """How many are free, as soon as one is."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        return self._free

    def take(self, task: "asyncio.Task[None]") -> None:
        """Give one to `task` until it ends."""
        self._free -= 1
        task.add_done_callback(self._give_back)

    def _give_back(self, _: "asyncio.Task[None]") -> None:
        self._free += 1
        self._freed.set()


async def _end(tasks: list["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
