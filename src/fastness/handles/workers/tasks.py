"""Workers on an event loop."""

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable, iscoroutine
from typing import Unpack, overload

from fastness import limits
from fastness.errors import FastnessError, Fenced
from fastness.handles.messages import AsyncMessage
from fastness.handles.plane import AsyncPlane
from fastness.handles.workers.consumers import (
    WAIT_SECONDS_MIN,
    CancelQuestions,
    Consumers,
    Handling,
    HeldMessages,
    Window,
    WorkerOptions,
    batches,
    is_final,
)

AsyncHandler = Callable[[AsyncMessage], Awaitable[object]]
AsyncBatchHandler = Callable[[list[AsyncMessage]], Awaitable[object]]

_log = logging.getLogger("fastness.worker")


class AsyncWorker(Consumers[AsyncMessage]):
    """Runs handlers as tasks of an event loop. One task of a queue receives, and acknowledges what is handled."""

    @overload
    def __init__(
        self, plane: AsyncPlane, handlers: Mapping[str, AsyncHandler], **options: Unpack[WorkerOptions[AsyncMessage]]
    ) -> None: ...

    @overload
    def __init__(
        self,
        plane: AsyncPlane,
        handlers: Mapping[str, AsyncBatchHandler],
        *,
        batch: int,
        batch_wait_seconds: float = 0.0,
        **options: Unpack[WorkerOptions[AsyncMessage]],
    ) -> None: ...

    def __init__(
        self,
        plane: AsyncPlane,
        handlers: Mapping[str, AsyncHandler] | Mapping[str, AsyncBatchHandler],
        *,
        batch: int | None = None,
        batch_wait_seconds: float = 0.0,
        **options: Unpack[WorkerOptions[AsyncMessage]],
    ) -> None:
        super().__init__(handlers, batch=batch, batch_wait_seconds=batch_wait_seconds, **options)
        self._plane = plane
        self._running: set[asyncio.Task[None]] = set()
        self._hook_results: deque[tuple[str, Awaitable[object]]] = deque()
        self._hook_task: asyncio.Task[None] | None = None  # Awaits them.
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT; then drain.

        Raises:
            FastnessError: messages cannot be received, and a retry cannot succeed (its `retry` is `never`).
        """
        loop = asyncio.get_running_loop()
        self.error = None
        signals = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # Only the main thread can handle signals.
                loop.add_signal_handler(number, self._stopping.set)
                signals.append(number)
        if self._on_start is not None:
            await self._run_hook("on_start", self._on_start)
        queues = [
            _HeldMessages(
                name,
                handler,
                Window(self._concurrency, self._prefetch, self._batch),
                batch_wait_seconds=self._batch_wait_seconds,
            )
            for name, handler in self._handlers.items()
        ]
        receivers = [
            asyncio.create_task(self._receive(queue), name=f"fastness-worker-{queue.name}") for queue in queues
        ]
        watchers = [asyncio.create_task(self._watch_cancels(queue)) for queue in queues]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            gathered = asyncio.gather(*receivers, return_exceptions=True)
            await asyncio.wait((stopped, gathered), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await _cancel(receivers)
            await _wait((*self._settle_rest(queues), *self._running), timeout=self._drain_seconds)
        finally:
            self._stopping.set()
            await _cancel([*receivers, *watchers, stopped])
            await _cancel(list(self._running))
            await _wait(self._settle_rest(queues))
            await self._stop_hooks()
            for number in signals:
                loop.remove_signal_handler(number)
            self._stopping = asyncio.Event()  # It may run again, on another loop.
        if self.error is not None:
            raise self.error

    async def _stop_hooks(self) -> None:
        """Wait for the hooks that were called, for `drain_seconds`, and call the last one."""
        await self._finish_hooks(self._drain_seconds)
        if self._hook_task is not None:
            _log.warning("hooks did not finish within %g s, and are cancelled", self._drain_seconds)
            await _cancel([self._hook_task])
        for _, result in self._hook_results:
            if iscoroutine(result):
                result.close()
        self._hook_results.clear()
        if self._on_stop is not None:
            await self._run_hook("on_stop", self._on_stop)

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
                if is_final(error):
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
                await self._add_received(queue, messages)
            if self._hook_task is not None:
                await self._finish_hooks()

    async def _add_received(self, queue: "_HeldMessages", messages: list[AsyncMessage]) -> None:
        """Buffer what was received, and start handlers; messages for which there is no slot are returned."""
        queue.window.received(message.attempts for message in messages)
        unwanted = set(queue.unwanted(messages))
        if unwanted:
            messages = [message for message in messages if message not in unwanted]
        queue.add_buffered(messages, self._monotonic())
        if unwanted:  # Before the handler of another one starts, which may end the process.
            queue.is_starting = True
            try:
                await _wait([self._return(queue, list(unwanted))])
            finally:
                queue.is_starting = False
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
            wait_seconds = queue.wait_seconds(self._monotonic())
            return await self._plane.queue(queue.name).receive_many(
                count, wait_seconds=wait_seconds, **self._receive_options
            )
        finally:
            queue.is_waiting = False

    def _start_handlers(self, queue: "_HeldMessages") -> None:
        """Start handlers for buffered messages, as slots are free."""
        if queue.is_starting:  # An eager task has finished before it was started; the caller goes on.
            return
        queue.is_starting = True
        while len(queue.running) < self._concurrency and not self._stopping.is_set():
            now = self._monotonic()
            taken = queue.buffered.take(now)
            if not taken:
                break
            messages = self._without_lost(taken, queue.name)
            if len(messages) < len(taken):
                queue.changed.set()
            if messages:
                handling = _TaskHandling(messages, now)
                queue.running[handling] = None
                handling.task = asyncio.create_task(self._handle(queue, handling))
                self._running.add(handling.task)
                handling.task.add_done_callback(self._running.discard)
        queue.is_starting = False
        if queue.buffered or queue.running:
            queue.is_held.set()
        self._watch(queue)
        self._start_when_ready(queue)

    def _start_when_ready(self, queue: "_HeldMessages") -> None:
        """Start the handler of a batch that is not full when it has waited long enough."""
        if not self._batch_wait_seconds:
            return
        if queue.starting is not None:
            queue.starting.cancel()
            queue.starting = None
        ready_in = queue.buffered.ready_in(self._monotonic())
        if ready_in is not None and len(queue.running) < self._concurrency and not self._stopping.is_set():
            loop = asyncio.get_running_loop()
            queue.starting = loop.call_later(max(ready_in, WAIT_SECONDS_MIN), self._start_handlers, queue)

    async def _handle(self, queue: "_HeldMessages", handling: "_TaskHandling") -> None:
        """Run the handler. Its messages are acknowledged later, unless the handler has settled them."""
        messages = handling.messages
        try:
            if self._stopping.is_set():
                queue.buffered.add(messages, handling.started)
                return
            try:
                if self._on_message is not None:
                    for message in messages:
                        await self._run_hook("on_message", self._on_message, message)
                await handling.run(queue.handler)
            except asyncio.CancelledError:
                if handling.is_cancelled:
                    self._count_handled(messages)
                else:
                    await asyncio.shield(self._defer(queue.name, messages, self._delay_on_close_seconds))
                raise
            except Exception as error:
                failed = self._count_failed(error, queue.name, messages)
                if failed:
                    await self._nack(queue.name, failed, error)
            else:
                done = self._count_handled(messages)
                if done:
                    queue.add_done(done, self._monotonic())
            if self._hook_task is not None:
                await self._finish_hooks()
        except Exception as error:  # They could not be settled; their leases will expire.
            self._report(error, queue.name)
        finally:
            del queue.running[handling]
            queue.window.record(self._monotonic() - handling.started)
            self._finish(queue)

    def _finish(self, queue: "_HeldMessages") -> None:
        """Acknowledge what is handled, or let the next receive do that; and start the next handler."""
        if queue.is_waiting or self._stopping.is_set():
            self._ack_done(queue)
        queue.changed.set()
        self._start_handlers(queue)

    async def _watch_cancels(self, queue: "_HeldMessages") -> None:
        """Cancel handlers whose messages are cancelled."""
        questions = CancelQuestions()
        while True:
            await queue.is_held.wait()
            now = self._monotonic()
            held, pause = queue.held_for_long(now), queue.held_for_long_in(now)
            if held:
                await self._ask_for_cancels(queue, *questions.next(held))
            elif pause is not None:
                await asyncio.sleep(pause)
            else:
                queue.is_held.clear()
            for handling in list(queue.running):
                handling.cancel_with_messages()

    async def _ask_for_cancels(
        self, queue: "_HeldMessages", messages: Sequence[AsyncMessage], wait_seconds: float
    ) -> None:
        """Mark those of the messages that are cancelled within `wait_seconds`."""
        if self._asks_for_cancels:
            try:
                await self._plane.queue(queue.name).wait_for_cancel(messages, wait_seconds=wait_seconds)
            except Exception as error:
                self._note_unanswered(error, queue.name)
            else:
                return
        await asyncio.sleep(wait_seconds)

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
                if self._hook_task is not None:
                    await self._finish_hooks()
        finally:
            queue.acking, queue.acknowledging = 0, None
            queue.changed.set()

    def _watch(self, queue: "_HeldMessages") -> None:
        """See to it that nothing waits too long for a running handler."""
        if queue.watching is None and queue.window.is_used and queue.may_be_late:
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

    def _return_buffered(self, queue: "_HeldMessages", delay_seconds: float | None = None) -> None:
        if queue.buffered:
            self._return(queue, queue.buffered.clear(), delay_seconds)

    def _return(
        self, queue: "_HeldMessages", messages: list[AsyncMessage], delay_seconds: float | None = None
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._defer(queue.name, messages, delay_seconds))
        queue.returning.add(task)
        task.add_done_callback(queue.returning.discard)
        return task

    def _settle_rest(self, queues: "list[_HeldMessages]") -> "list[asyncio.Task[None]]":
        """Acknowledge what is handled, and return what is buffered; the tasks that do it."""
        settling: list[asyncio.Task[None]] = []
        for queue in queues:
            for timer in (queue.watching, queue.starting):
                if timer is not None:
                    timer.cancel()
            queue.watching = queue.starting = None
            self._ack_done(queue)
            self._return_buffered(queue, self._delay_on_close_seconds)
            settling += queue.returning
            if queue.acknowledging is not None:
                settling.append(queue.acknowledging)
        return settling

    async def _nack(self, queue: str, messages: list[AsyncMessage], error: Exception) -> None:
        delay_seconds = self._delay(messages[0].failure_attempts + 1)  # Messages that have failed before are alone.
        with suppress(Fenced):  # Leases have ended.
            await self._plane.queue(queue).nack_many(messages, delay_seconds=delay_seconds, error=error)
        self._note_returned(messages, "failed")

    async def _run_hook(self, name: str, hook: Callable[..., object], *args: object) -> None:
        """Call a hook, and await it if it is a coroutine function. Its error is logged, and changes nothing."""
        try:
            result = hook(*args)
            if isawaitable(result):
                await result
        except Exception:
            _log.exception("%s raised an error", name)

    def _call_hook(self, name: str, hook: Callable[..., object], *args: object) -> None:
        """Call a hook. What a coroutine function returns is awaited by a task, one after the other."""
        try:
            result = hook(*args)
        except Exception:
            _log.exception("%s raised an error", name)
            return
        if isawaitable(result):
            self._hook_results.append((name, result))
            if self._hook_task is None:
                task = asyncio.create_task(self._await_hooks())
                self._hook_task = None if task.done() else task

    async def _await_hooks(self) -> None:
        try:
            while self._hook_results:
                name, result = self._hook_results.popleft()
                try:
                    await result
                except Exception:
                    _log.exception("%s raised an error", name)
        finally:
            self._hook_task = None

    async def _finish_hooks(self, timeout: float | None = None) -> None:
        """Wait for the hooks that were called, so that messages are not handled faster than they run."""
        if self._hook_task is not None:
            await _wait([self._hook_task], timeout)

    async def _defer(self, queue: str, messages: list[AsyncMessage], delay_seconds: float | None = None) -> None:
        """Return messages without counting a failure."""
        for some in batches(messages):
            unsettled = [message for message in some if not message.settled and not message.lost]
            with suppress(FastnessError):  # Their leases expire.
                if unsettled:
                    await self._plane.queue(queue).nack_many(unsettled, intent="defer", delay_seconds=delay_seconds)
            self.stats.deferred += sum(message.settled for message in unsettled)
            self._note_returned(unsettled, "deferred")
        await self._finish_hooks()


class _TaskHandling(Handling[AsyncMessage]):
    """A running call of a handler, in a task."""

    __slots__ = ("_is_in_handler", "is_cancelled", "task")

    def __init__(self, messages: list[AsyncMessage], started: float) -> None:
        super().__init__(messages, started)
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False  # Because its messages are.
        self._is_in_handler = False

    async def run(self, handler: AsyncBatchHandler) -> None:
        self._is_in_handler = True
        try:
            await handler(self.messages)
        finally:
            self._is_in_handler = False

    def cancel_with_messages(self) -> None:
        """Cancel the handler if all messages are cancelled that it has not settled: it has nothing left to do."""
        if not self._is_in_handler or self.is_cancelled or self.task is None:
            return
        unsettled = [message for message in self.messages if not message.settled]
        if unsettled and all(message.cancelled for message in unsettled):
            self.is_cancelled = True
            self.task.cancel()


class _HeldMessages(HeldMessages[AsyncMessage, _TaskHandling]):
    """The messages of a queue that a worker holds, and the tasks and timers for them."""

    def __init__(self, name: str, handler: AsyncBatchHandler, window: Window, *, batch_wait_seconds: float) -> None:
        super().__init__(name, handler, window, batch_wait_seconds=batch_wait_seconds)
        self.acknowledging: asyncio.Task[None] | None = None  # The task that acknowledges messages by themselves.
        self.returning: set[asyncio.Task[None]] = set()  # Tasks that return buffered messages.
        self.is_receiving = False  # A receive is in flight that acknowledges messages, and does not wait for others.
        self.is_waiting = False  # No receive will soon acknowledge messages: one waits for messages, or has failed.
        self.is_starting = False
        self.starting: asyncio.TimerHandle | None = None
        self.watching: asyncio.TimerHandle | None = None
        self.changed = asyncio.Event()
        self.is_held = asyncio.Event()  # Set while messages are buffered or running, and a little longer.

    async def wait_for_room(self) -> None:
        """Wait until messages may be received, and few are buffered: they are handled while others are received."""
        while not self.room() or (not self.window.has_batches and len(self.buffered) > self.window.prefetch // 4):
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until a handler has finished, or messages are acknowledged."""
        self.changed.clear()
        await self.changed.wait()


async def _wait(tasks: "Collection[asyncio.Task[None]]", timeout: float | None = None) -> None:
    """Wait for tasks, without cancelling them if the caller is cancelled."""
    if tasks:
        await asyncio.wait(tasks, timeout=timeout)


async def _cancel(tasks: "Iterable[asyncio.Task[None] | asyncio.Task[bool]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
