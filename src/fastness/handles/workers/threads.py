"""Workers on threads."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Unpack, overload

from fastness import limits
from fastness.errors import FastnessError, Fenced, InvalidArgument
from fastness.handles.sync.messages import Message
from fastness.handles.sync.plane import Plane
from fastness.handles.workers.consumers import (
    WAIT_SECONDS,
    CancelQuestions,
    Consumers,
    Handling,
    HeldMessages,
    Window,
    WorkerOptions,
    WorkerOutcome,
    batches,
    is_final,
)
from fastness.stop_signals import stop_on_signals

ThreadHandler = Callable[[Message], object]
ThreadBatchHandler = Callable[[list[Message]], object]


class Worker(Consumers[Message]):
    """Runs handlers on threads. One free thread receives for all of them, and acknowledges what they have handled."""

    @overload
    def __init__(
        self, plane: Plane, handlers: Mapping[str, ThreadHandler], **options: Unpack[WorkerOptions[Message]]
    ) -> None: ...

    @overload
    def __init__(
        self,
        plane: Plane,
        handlers: Mapping[str, ThreadBatchHandler],
        *,
        batch: int,
        batch_wait_seconds: float = 0.0,
        **options: Unpack[WorkerOptions[Message]],
    ) -> None: ...

    def __init__(
        self,
        plane: Plane,
        handlers: Mapping[str, ThreadHandler] | Mapping[str, ThreadBatchHandler],
        *,
        batch: int | None = None,
        batch_wait_seconds: float = 0.0,
        **options: Unpack[WorkerOptions[Message]],
    ) -> None:
        super().__init__(handlers, batch=batch, batch_wait_seconds=batch_wait_seconds, **options)
        for name in ("on_start", "on_message", "on_settled", "on_error", "on_stop"):
            if iscoroutinefunction(options.get(name)):
                raise InvalidArgument(f"{name} is a coroutine function; give a function, or use an AsyncWorker")
        self._plane = plane
        self._returned: set[Message] = set()  # By `stop`, while their handlers were running.
        self._stopping = threading.Event()
        self._queues: list[_HeldMessages] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._has_stopped = False

    def start(self) -> None:
        """Start handling messages, on threads of its own."""
        self._has_stopped = False
        if self._on_start is not None:
            self._call_hook("on_start", self._on_start)
        for name, handler in self._handlers.items():
            window = Window(self._concurrency, self._prefetch, self._batch)
            queue = _HeldMessages(
                name,
                handler,
                window,
                batch_wait_seconds=self._batch_wait_seconds,
                stopping=self._stopping,
                monotonic=self._monotonic,
            )
            self._queues.append(queue)
            for number in range(self._concurrency):
                self._start_thread(self._consume, queue, f"fastness-worker-{name}-{number}")
            if window.is_used:
                self._start_thread(self._settle_late, queue, f"fastness-worker-{name}-settling")
            # It ends by itself, at most a second after the last handler.
            threading.Thread(
                target=self._watch_cancels, args=(queue,), name=f"fastness-worker-{name}-cancels", daemon=True
            ).start()

    def run(self) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT (in the main thread); then drain.

        Raises:
            FastnessError: messages cannot be received, and a retry cannot succeed (its `retry` is `never`).
        """
        with stop_on_signals(lambda _: self._stopping.set()):
            self.start()
            while not self._stopping.wait(WAIT_SECONDS) and any(thread.is_alive() for thread in self._threads):
                pass
            self.stop()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Receive no more messages, wait `drain_seconds` for handlers, and return the rest uncounted.

        A handler that calls it does not wait, and its own message is acknowledged as usual.
        """
        self._stopping.set()
        deadline = time.monotonic() + self._drain_seconds
        for queue in self._queues:
            queue.wake_all()
        if threading.current_thread() in self._threads:
            return  # Every thread settles what it has when it ends.
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        for queue in self._queues:
            self._settle_rest(queue)
            running = [message for message in queue.take_running() if not message.settled]
            self._returned.update(running)
            self._defer(queue.name, running, self._delay_on_close_seconds)
        with self._lock:
            had_stopped, self._has_stopped = self._has_stopped, True
        if self._on_stop is not None and not had_stopped:
            self._call_hook("on_stop", self._on_stop)

    def _start_thread(self, work: "Callable[[_HeldMessages], None]", queue: "_HeldMessages", name: str) -> None:
        thread = threading.Thread(target=work, args=(queue,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _consume(self, queue: "_HeldMessages") -> None:
        """Handle messages until the worker stops, or a retry cannot succeed."""
        failures = 0
        while not self._stopping.is_set():
            handling = None
            try:
                handling = queue.take()
                if handling is not None:
                    self._handle(queue, handling)
                elif not self._stopping.is_set():
                    self._receive(queue)
                failures = 0
            except Exception as error:
                self._report(error, queue.name)
                if handling is None and is_final(error):  # An error of one message does not end the worker.
                    self._end(error)
                    break
                failures += 1
                self.stats.restarts += 1
                self._stopping.wait(self._restarts.pause_seconds(failures))
        self._settle_rest(queue)

    def _end(self, error: Exception) -> None:
        """Stop all consumers because of `error`, unless they are stopping already."""
        with self._lock:
            if not self._stopping.is_set():
                self.error = error
                self._stopping.set()

    def _receive(self, queue: "_HeldMessages") -> None:
        """Receive messages for all free threads."""
        messages: list[Message] = []
        try:
            messages = self._ack_and_receive(queue)
            if not messages and not self._stopping.is_set():
                messages = self._wait_and_receive(queue)
            unwanted = queue.select_unwanted(messages)
            if unwanted:  # Before the handler of another one starts, which may end the process.
                self._defer(queue.name, unwanted)
                messages = [message for message in messages if message not in set(unwanted)]
        finally:
            queue.received(messages)

    def _ack_and_receive(self, queue: "_HeldMessages") -> list[Message]:
        """Messages that are ready now. Handled ones are acknowledged in the commit that leases them."""
        count, done = queue.begin_receive()
        if not done:
            return []
        try:
            found = self._plane.queue(queue.name).receive_many(count, ack=done, **self._receive_options)
        except Exception:  # Perhaps only the receive has failed; a repeated one reports that.
            self._ack(queue.name, done)
            return []
        self._count_acked(done, queue.name)
        return found

    def _wait_and_receive(self, queue: "_HeldMessages") -> list[Message]:
        """The next messages. Those that are handled meanwhile are acknowledged by their threads."""
        queue.begin_wait()
        self._ack_done(queue)
        count, wait_seconds = queue.next_wait()
        if not count:
            return []
        return self._plane.queue(queue.name).receive_many(count, wait_seconds=wait_seconds, **self._receive_options)

    def _handle(self, queue: "_HeldMessages", handling: Handling[Message]) -> None:
        """Run the handler. Its messages are acknowledged later, unless the handler has settled them."""
        messages = self._without_lost(handling.messages, queue.name)
        if not messages:
            queue.drop(handling)
            return
        done: list[Message] = []
        if self._on_message is not None:
            for message in messages:
                self._call_hook("on_message", self._on_message, message)
        try:
            queue.handler(messages)
        except Exception as error:
            failed = self._count_failed(error, queue.name, messages)
            if failed and queue.is_running(handling):
                self._nack(queue.name, failed, error)
        else:
            done = self._count_handled(messages)
        finally:
            must_ack = queue.finish(handling, done)
        if must_ack:
            self._ack_done(queue)

    def _watch_cancels(self, queue: "_HeldMessages") -> None:
        """Mark messages that are cancelled while they are held for long."""
        questions = CancelQuestions()
        while self._asks_for_cancels and (held := queue.wait_for_long()):
            messages, wait_seconds = questions.next(held)
            try:
                self._plane.queue(queue.name).wait_for_cancel(messages, wait_seconds=wait_seconds)
            except Exception as error:
                self._note_unanswered(error, queue.name)
                queue.pause_questions(wait_seconds)

    def _ack_done(self, queue: "_HeldMessages") -> None:
        """Acknowledge what is handled by itself, unless another thread does; what finishes meanwhile goes next."""
        while done := queue.begin_ack():
            try:
                self._ack(queue.name, done)
            finally:
                queue.end_ack()

    def _ack(self, queue: str, messages: list[Message]) -> None:
        try:
            self._plane.queue(queue).ack_many(messages)
        except Exception as error:
            self._count_acked(messages, queue, error)
        else:
            self._count_acked(messages, queue)

    def _settle_late(self, queue: "_HeldMessages") -> None:
        """Acknowledge handled messages, and return buffered ones, that wait too long for a running handler."""
        while not self._stopping.is_set():
            is_late, buffered = queue.wait_for_late()
            if is_late:
                self._ack_done(queue)
            self._defer(queue.name, buffered)
        self._settle_rest(queue)

    def _settle_rest(self, queue: "_HeldMessages") -> None:
        """Wake the threads of a queue, acknowledge what is handled, and return what is buffered."""
        queue.wake_all()
        self._ack_done(queue)
        self._defer(queue.name, queue.take_buffered(), self._delay_on_close_seconds)

    def _nack(self, queue: str, messages: list[Message], error: Exception) -> None:
        delay_seconds = self._delay(messages[0].failure_attempts + 1)  # Messages that have failed before are alone.
        with suppress(Fenced):  # Leases have ended.
            self._plane.queue(queue).nack_many(messages, delay_seconds=delay_seconds, error=error)
        self._note_returned(messages, "failed")

    def _note_handled(self, message: Message, outcome: WorkerOutcome) -> None:
        if message not in self._returned:  # They were reported as deferred.
            super()._note_handled(message, outcome)

    def _defer(self, queue: str, messages: list[Message], delay_seconds: float | None = None) -> None:
        """Return messages without counting a failure."""
        for some in batches(messages):
            unsettled = [message for message in some if not message.settled and not message.lost]
            with suppress(FastnessError):  # Their leases expire.
                if unsettled:
                    self._plane.queue(queue).nack_many(unsettled, intent="defer", delay_seconds=delay_seconds)
            self.stats.deferred += sum(message.settled for message in unsettled)
            self._note_returned(unsettled, "deferred")


class _HeldMessages(HeldMessages[Message, Handling[Message]]):
    """The messages of a queue that a worker holds, shared by its threads."""

    def __init__(
        self,
        name: str,
        handler: ThreadBatchHandler,
        window: Window,
        *,
        batch_wait_seconds: float,
        stopping: threading.Event,
        monotonic: Callable[[], float],
    ) -> None:
        super().__init__(name, handler, window, batch_wait_seconds=batch_wait_seconds)
        self._stopping = stopping
        self._monotonic = monotonic
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # Wakes free threads.
        self._pending = threading.Condition(lock)  # Wakes the thread that settles what is late.
        self._is_watched = False  # Whether that thread knows that there may be any.
        self._held = threading.Condition(lock)  # Wakes the thread that asks for cancels.
        self._is_held = False  # Whether that thread knows that messages are buffered or running.
        self._is_receiving = False
        self._is_waiting = False  # Whether that may take long, because nothing was ready.

    def take(self) -> Handling[Message] | None:
        """Buffered messages to handle; None if the calling thread is to receive, or the worker is stopping."""
        with self._changed:
            while not self._stopping.is_set():
                now = self._monotonic()
                messages = self.buffered.take(now)
                if messages:
                    handling = Handling(messages, now)
                    self.running[handling] = None
                    return handling
                if not self._is_receiving and self.room():
                    self._is_receiving = True
                    return None
                self._changed.wait(self.buffered.ready_in(now))
            return None

    def next_wait(self) -> tuple[int, float]:
        """How many messages may be received by a call that acknowledges none, and how long it may wait for them."""
        with self._changed:
            return self.room(len(self.done)), self.wait_seconds(self._monotonic())

    def begin_receive(self) -> tuple[int, list[Message]]:
        """How many messages to receive, and those to acknowledge with that."""
        with self._changed:
            done = self.take_done()
            return self.room(), done

    def begin_wait(self) -> None:
        """Let threads acknowledge what they handle from now on: the receive may wait for messages."""
        with self._changed:
            self._is_waiting = True

    def select_unwanted(self, messages: list[Message]) -> list[Message]:
        """Those of received messages that are to be returned."""
        with self._changed:
            if not messages:
                return []
            self.window.received(message.attempts for message in messages)
            return self.unwanted(messages)

    def received(self, messages: list[Message]) -> None:
        """Buffer what was received, and let another thread receive."""
        with self._changed:
            self._is_receiving = self._is_waiting = False
            if messages:
                self.add_buffered(messages, self._monotonic())
                self._watch()
                if not self._is_held:
                    self._is_held = True
                    self._held.notify()
            self._changed.notify(max(len(messages), 1))  # One thread for each message, and one to receive next.

    def drop(self, handling: Handling[Message]) -> None:
        """Forget messages that are not to be handled."""
        with self._changed:
            self.running.pop(handling, None)

    def is_running(self, handling: Handling[Message]) -> bool:
        """Whether its thread may settle it. A worker that stops returns what its handlers have not finished."""
        with self._changed:
            return handling in self.running

    def finish(self, handling: Handling[Message], done: list[Message]) -> bool:
        """Note that a handler has ended, and which of its messages are to be acknowledged.

        Returns whether the calling thread has to do that, because no receive will soon.
        """
        with self._changed:
            now = self._monotonic()
            self.window.record(now - handling.started)
            was_running = handling in self.running
            self.running.pop(handling, None)
            if self._stopping.is_set():
                self._held.notify()
            if not done or not was_running:
                return False
            self.add_done(done, now)
            self._watch()
            return self._is_waiting or self._stopping.is_set()

    def begin_ack(self) -> list[Message]:
        """What is to be acknowledged by itself. Nothing if another thread does that."""
        with self._changed:
            done = [] if self.acking else self.take_done()
            self.acking = self.acking or len(done)
            return done

    def end_ack(self) -> None:
        with self._changed:
            self.acking = 0
            self._changed.notify()

    def wait_for_late(self) -> tuple[bool, list[Message]]:
        """Whether handled messages have waited too long to be acknowledged, and buffered ones that did for a handler.

        Returns after `WORKER_WINDOW_SECONDS`; while nothing is held, it waits for messages.
        """
        with self._pending:
            while not (self.may_be_late or self._stopping.is_set()):
                self._is_watched = False
                self._pending.wait()
            if not self._stopping.is_set():
                self._pending.wait(limits.WORKER_WINDOW_SECONDS)
            now = self._monotonic()
            # A receive that need not wait for messages takes them along when it is repeated.
            is_late = (self._is_waiting or not self._is_receiving) and bool(
                self.done and now - self.done_at >= limits.WORKER_WINDOW_SECONDS
            )
            is_stuck = self.window.is_automatic and now - self.buffered_at >= limits.WORKER_BUFFERED_SECONDS_MAX
            return is_late, self.buffered.clear() if is_stuck else []

    def wait_for_long(self) -> list[Message]:
        """The messages that are held for long, as soon as there are any; none when the worker has stopped."""
        with self._held:
            while not (held := self.held_for_long(self._monotonic())):
                pause = self.held_for_long_in(self._monotonic())
                if pause is None:
                    if self._stopping.is_set():
                        return []
                    self._is_held = False
                self._held.wait(pause)
            return held

    def pause_questions(self, seconds: float) -> None:
        """Wait before the next question, unless the worker is stopped."""
        with self._held:
            self._held.wait(seconds)

    def wake_all(self) -> None:
        with self._changed:
            self._changed.notify_all()
            self._pending.notify_all()
            self._held.notify_all()

    def take_buffered(self) -> list[Message]:
        with self._changed:
            return self.buffered.clear()

    def take_running(self) -> list[Message]:
        """The messages whose handlers are running; from now on their threads leave them alone."""
        with self._changed:
            running = [message for handling in self.running for message in handling.messages]
            self.running.clear()
            self._held.notify_all()
            return running

    def _watch(self) -> None:
        if not self._is_watched and self.may_be_late:
            self._is_watched = True
            self._pending.notify()
