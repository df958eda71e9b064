"""Workers on an event loop."""

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Unpack

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.messages import AsyncMessage
from holdfast.handles.plane import AsyncPlane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, Window, WorkerOptions, batches
from holdfast.wire.queues import lease_mismatch

AsyncHandler = Callable[[AsyncMessage], Awaitable[object]]


class AsyncWorker(Consumers[AsyncHandler]):
    """Runs handlers as tasks of an event loop. One task of a queue receives, and acknowledges what is handled."""

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
        queues = [
            _HeldMessages(name, handler, Window(self._concurrency, self._prefetch))
            for name, handler in self._handlers.items()
        ]
        receivers = [
            asyncio.create_task(self._receive(queue), name=f"holdfast-worker-{queue.name}") for queue in queues
        ]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            gathered = asyncio.gather(*receivers, return_exceptions=True)
            await asyncio.wait((stopped, gathered), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await _cancel(receivers)
            await _wait((*self._settle_rest(queues), *self._running), timeout=self._drain_seconds)
        finally:
            self._stopping.set()
            await _cancel([*receivers, stopped])
            await _cancel(list(self._running))
            await _wait(self._settle_rest(queues))
            for number in signals:
                loop.remove_signal_handler(number)
            self._stopping = asyncio.Event()  # It may run again, on another loop.
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Make `run` receive no more messages and return; also if it has not started yet."""
        self._stopping.set()

    async def _receive(self, queue: "_HeldMessages") -> None:
        """Start a handler for each message of a queue, until the worker stops or a retry cannot succeed."""
        failures = 0
        while not self._stopping.is_set():
            try:
                await queue.wait_for_room()
                messages = await self._ack_and_receive(queue)
                if not messages and not self._stopping.is_set():
                    messages = await self._wait_and_receive(queue)
            except Exception as error:
                self._report(error, queue.name)
                if self._is_final(error):
                    if not self._stopping.is_set():
                        self.error = error
                        self._stopping.set()
                    return
                failures += 1
                self.stats.restarts += 1
                await self._pause(queue, self._restarts.pause_seconds(failures))
                continue
            failures = 0
            if messages:
                queue.window.received(message.attempts for message in messages)
                queue.buffered.extend(messages)
                queue.buffered_at = self._monotonic()
                self._start_handlers(queue)

    async def _pause(self, queue: "_HeldMessages", seconds: float) -> None:
        """Wait before the next receive. Messages that are handled meanwhile are acknowledged by themselves."""
        queue.is_waiting = True
        self._ack_done(queue)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        queue.is_waiting = False

    async def _ack_and_receive(self, queue: "_HeldMessages") -> list[AsyncMessage]:
        """Messages that are ready now. Handled ones are acknowledged in the commit that leases them."""
        done = queue.take_done()
        if not done:
            return []
        queue.is_receiving = True
        try:
            found = await self._plane.queue(queue.name).receive_many(queue.room(), ack=done, **self._receive_options)
        except asyncio.CancelledError:  # Perhaps they are acknowledged; doing it again is harmless.
            queue.done[:0] = done
            raise
        except Exception:  # Perhaps only the receive has failed; a repeated one reports that.
            queue.done[:0] = done
            self._ack_done(queue)
            return []
        finally:
            queue.is_receiving = False
        self._count_acked(done, queue.name)
        return found

    async def _wait_and_receive(self, queue: "_HeldMessages") -> list[AsyncMessage]:
        """The next messages. Those that are handled meanwhile are acknowledged by themselves."""
        self._ack_done(queue)
        queue.is_waiting = True
        try:
            count = queue.room(len(queue.done))
            if not count:
                await queue.wait_for_change()
                return []
            return await self._plane.queue(queue.name).receive_many(
                count, wait_seconds=WAIT_SECONDS, **self._receive_options
            )
        finally:
            queue.is_waiting = False

    def _start_handlers(self, queue: "_HeldMessages") -> None:
        """Start handlers for buffered messages, as slots are free."""
        if queue.is_starting:  # An eager task has finished before it was started; the caller goes on.
            return
        queue.is_starting = True
        while queue.buffered and queue.running < self._concurrency and not self._stopping.is_set():
            message = queue.buffered.popleft()
            if message.lost:  # While it was buffered.
                self._report_unsettled(lease_mismatch(message.lease), queue.name)
                continue
            queue.running += 1
            task = asyncio.create_task(self._handle(queue, message))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        queue.is_starting = False
        self._watch(queue)

    async def _handle(self, queue: "_HeldMessages", message: AsyncMessage) -> None:
        """Run the handler. Its message is acknowledged later, unless the handler has settled it."""
        started = self._monotonic()
        try:
            if self._stopping.is_set():
                queue.buffered.append(message)
                return
            try:
                await queue.handler(message)
            except asyncio.CancelledError:
                await asyncio.shield(self._defer(queue.name, [message]))
                raise
            except Exception as error:
                self._report_failure(error, queue.name, message_id=message.id, attempt=message.attempts)
                if not message.settled:
                    await self._nack(message, error)
                return
            if message.settled:
                self.stats.handled += 1
            else:
                queue.add_done(message, self._monotonic())
        except Exception as error:  # It could not be settled; its lease will expire.
            self._report(error, queue.name)
        finally:
            queue.running -= 1
            queue.window.record(self._monotonic() - started)
            self._finish(queue)

    def _finish(self, queue: "_HeldMessages") -> None:
        """Acknowledge what is handled, or let the next receive do that; and start the next handler."""
        if queue.is_waiting or self._stopping.is_set():
            self._ack_done(queue)
        queue.changed.set()
        self._start_handlers(queue)

    def _ack_done(self, queue: "_HeldMessages") -> None:
        """Acknowledge what is handled by itself; what finishes during the call goes with the next one."""
        if queue.done and queue.acknowledging is None:
            task = asyncio.create_task(self._ack_all(queue))
            queue.acknowledging = None if task.done() else task

    async def _ack_all(self, queue: "_HeldMessages") -> None:
        try:
            while done := queue.take_done():
                queue.acking = len(done)
                try:
                    await self._plane.queue(queue.name).ack_many(done)
                except Exception as error:
                    self._count_acked(done, queue.name, error)
                else:
                    self._count_acked(done, queue.name)
        finally:
            queue.acking, queue.acknowledging = 0, None
            queue.changed.set()

    def _watch(self, queue: "_HeldMessages") -> None:
        """See to it that nothing waits too long for a running handler."""
        if queue.watching is None and queue.window.is_used and (queue.buffered or queue.done):
            loop = asyncio.get_running_loop()
            queue.watching = loop.call_later(limits.WORKER_WINDOW_SECONDS, self._settle_late, queue)

    def _settle_late(self, queue: "_HeldMessages") -> None:
        """Acknowledge handled messages, and return buffered ones, that wait too long for a running handler."""
        queue.watching = None
        if self._stopping.is_set():
            return
        now = self._monotonic()
        # A receive that need not wait for messages takes them along when it is repeated.
        if not queue.is_receiving and now - queue.done_at >= limits.WORKER_WINDOW_SECONDS:
            self._ack_done(queue)
        if queue.window.is_automatic and now - queue.buffered_at >= limits.WORKER_BUFFERED_SECONDS_MAX:
            self._return_buffered(queue)
        self._watch(queue)

    def _return_buffered(self, queue: "_HeldMessages") -> None:
        if queue.buffered:
            task = asyncio.create_task(self._defer(queue.name, queue.take_buffered()))
            queue.returning.add(task)
            task.add_done_callback(queue.returning.discard)

    def _settle_rest(self, queues: "list[_HeldMessages]") -> "list[asyncio.Task[None]]":
        """Acknowledge what is handled, and return what is buffered; the tasks that do it."""
        settling: list[asyncio.Task[None]] = []
        for queue in queues:
            if queue.watching is not None:
                queue.watching.cancel()
                queue.watching = None
            self._ack_done(queue)
            self._return_buffered(queue)
            settling += queue.returning
            if queue.acknowledging is not None:
                settling.append(queue.acknowledging)
        return settling

    async def _nack(self, message: AsyncMessage, error: Exception) -> None:
        with suppress(Fenced):  # Its lease has ended.
            await message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=error)

    async def _defer(self, queue: str, messages: list[AsyncMessage]) -> None:
        """Return messages without counting a failure."""
        for some in batches(messages):
            unsettled = [message for message in some if not message.settled]
            with suppress(HoldfastError):  # Their leases expire.
                if unsettled:
                    await self._plane.queue(queue).nack_many(unsettled, intent="defer")
            self.stats.deferred += sum(message.settled for message in unsettled)


class _HeldMessages:
    """The messages of a queue that a worker holds.

    received ──► buffered ──► running ──► done ──► acknowledged, with the next receive or by themselves
    """

    def __init__(self, name: str, handler: AsyncHandler, window: Window) -> None:
        self.name = name
        self.handler = handler
        self.window = window
        self.buffered: deque[AsyncMessage] = deque()
        self.buffered_at = 0.0  # The time of the last receive.
        self.running = 0
        self.done: list[AsyncMessage] = []
        self.done_at = 0.0  # When the first of them was handled.
        self.acking = 0  # Messages that are being acknowledged by themselves,
        self.acknowledging: asyncio.Task[None] | None = None  # and the task that does it.
        self.returning: set[asyncio.Task[None]] = set()  # Tasks that return buffered messages.
        self.is_receiving = False  # A receive is in flight that acknowledges messages, and does not wait for others.
        self.is_waiting = False  # No receive will soon acknowledge messages: one waits for messages, or has failed.
        self.is_starting = False
        self.watching: asyncio.TimerHandle | None = None
        self.changed = asyncio.Event()

    def room(self, done: int = 0) -> int:
        """How many messages may be received, if this many handled ones are not acknowledged with that."""
        return self.window.room(self.running + len(self.buffered) + self.acking + done)

    async def wait_for_room(self) -> None:
        """Wait until messages may be received, and few are buffered: they are handled while others are received."""
        while not self.room() or len(self.buffered) > self.window.prefetch // 4:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until a handler has finished, or messages are acknowledged."""
        self.changed.clear()
        await self.changed.wait()

    def add_done(self, message: AsyncMessage, now: float) -> None:
        if not self.done:
            self.done_at = now
        self.done.append(message)

    def take_done(self) -> list[AsyncMessage]:
        done, self.done = self.done[: limits.MESSAGES_MAX], self.done[limits.MESSAGES_MAX :]
        return done

    def take_buffered(self) -> list[AsyncMessage]:
        messages = list(self.buffered)
        self.buffered.clear()
        return messages


async def _wait(tasks: "Collection[asyncio.Task[None]]", timeout: float | None = None) -> None:
    """Wait for tasks, without cancelling them if the caller is cancelled."""
    if tasks:
        await asyncio.wait(tasks, timeout=timeout)


async def _cancel(tasks: "Iterable[asyncio.Task[None] | asyncio.Task[bool]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
