"""Workers on threads."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Unpack

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.plane import Plane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, Window, WorkerOptions, batches
from holdfast.wire.queues import lease_mismatch

ThreadHandler = Callable[[Message], object]


class Worker(Consumers[ThreadHandler]):
    """Runs handlers on threads. One free thread receives for all of them, and acknowledges what they have handled."""

    def __init__(self, plane: Plane, handlers: Mapping[str, ThreadHandler], **options: Unpack[WorkerOptions]) -> None:
        super().__init__(handlers, **options)
        self._plane = plane
        self._stopping = threading.Event()
        self._queues: list[_HeldMessages] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start handling messages, on threads of its own."""
        for name, handler in self._handlers.items():
            window = Window(self._concurrency, self._prefetch)
            queue = _HeldMessages(name, handler, window, self._stopping, self._monotonic)
            self._queues.append(queue)
            for number in range(self._concurrency):
                self._start_thread(self._consume, queue, f"holdfast-worker-{name}-{number}")
            if window.is_used:
                self._start_thread(self._settle_late, queue, f"holdfast-worker-{name}-settling")

    def run(self) -> None:
        """Handle messages until `stop`, SIGTERM or SIGINT (in the main thread); then drain.

        Raises:
            HoldfastError: messages cannot be received, and a retry cannot succeed (its `retry` is `never`).
        """
        before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, lambda *_: self._stopping.set())
        try:
            self.start()
            while not self._stopping.wait(WAIT_SECONDS) and any(thread.is_alive() for thread in self._threads):
                pass
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Receive no more messages, wait `drain_seconds` for handlers, and return the rest uncounted."""
        self._stopping.set()
        deadline = time.monotonic() + self._drain_seconds
        for queue in self._queues:
            queue.wake_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        for queue in self._queues:
            self._settle_rest(queue)
            self._defer(queue.name, queue.take_running())

    def _start_thread(self, work: "Callable[[_HeldMessages], None]", queue: "_HeldMessages", name: str) -> None:
        thread = threading.Thread(target=work, args=(queue,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _consume(self, queue: "_HeldMessages") -> None:
        """Handle messages until the worker stops, or a retry cannot succeed."""
        failures = 0
        while not self._stopping.is_set():
            message = None
            try:
                message = queue.take()
                if message is not None:
                    self._handle(queue, message)
                elif not self._stopping.is_set():
                    self._receive(queue)
                failures = 0
            except Exception as error:
                self._report(error, queue.name)
                if message is None and self._is_final(error):  # An error of one message does not end the worker.
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
        count = queue.room_beside_done()
        if not count:
            return []
        return self._plane.queue(queue.name).receive_many(count, wait_seconds=WAIT_SECONDS, **self._receive_options)

    def _handle(self, queue: "_HeldMessages", message: Message) -> None:
        """Run the handler. Its message is acknowledged later, unless the handler has settled it."""
        if message.lost:  # While it was buffered.
            queue.drop(message)
            self._report_unsettled(lease_mismatch(message.lease), queue.name)
            return
        is_done, started = False, self._monotonic()
        try:
            queue.handler(message)
        except Exception as error:
            self._report_failure(error, queue.name, message_id=message.id, attempt=message.attempts)
            if queue.is_running(message) and not message.settled:
                self._nack(message, error)
        else:
            is_done = not message.settled
            self.stats.handled += not is_done
        finally:
            must_ack = queue.finish(message, self._monotonic() - started, is_done=is_done)
        if must_ack:
            self._ack_done(queue)

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
        self._defer(queue.name, queue.take_buffered())

    def _nack(self, message: Message, error: Exception) -> None:
        with suppress(Fenced):  # Its lease has ended.
            message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=error)

    def _defer(self, queue: str, messages: list[Message]) -> None:
        """Return messages without counting a failure."""
        for some in batches(messages):
            unsettled = [message for message in some if not message.settled]
            with suppress(HoldfastError):  # Their leases expire.
                if unsettled:
                    self._plane.queue(queue).nack_many(unsettled, intent="defer")
            self.stats.deferred += sum(message.settled for message in unsettled)


class _HeldMessages:
    """The messages of a queue that a worker holds, shared by its threads.

    received ──► buffered ──► running ──► done ──► acknowledged, with the next receive or by themselves
    """

    def __init__(
        self,
        name: str,
        handler: ThreadHandler,
        window: Window,
        stopping: threading.Event,
        monotonic: Callable[[], float],
    ) -> None:
        self.name = name
        self.handler = handler
        self._window = window
        self._stopping = stopping
        self._monotonic = monotonic
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # Wakes free threads.
        self._pending = threading.Condition(lock)  # Wakes the thread that settles what is late.
        self._is_watched = False  # Whether that thread knows that messages are buffered or done.
        self._buffered: deque[Message] = deque()
        self._buffered_at = 0.0  # The time of the last receive.
        self._running: set[Message] = set()
        self._done: list[Message] = []
        self._done_at = 0.0  # When the first of them was handled.
        self._acking = 0  # Messages that are being acknowledged by themselves.
        self._is_receiving = False
        self._is_waiting = False  # Whether that may take long, because nothing was ready.

    def take(self) -> Message | None:
        """A buffered message; None if the calling thread is to receive, or the worker is stopping."""
        with self._changed:
            while not self._stopping.is_set():
                if self._buffered:
                    message = self._buffered.popleft()
                    self._running.add(message)
                    return message
                if not self._is_receiving and self._room():
                    self._is_receiving = True
                    return None
                self._changed.wait()
            return None

    def room_beside_done(self) -> int:
        """How many messages may be received by a call that acknowledges none."""
        with self._changed:
            return self._room(len(self._done))

    def begin_receive(self) -> tuple[int, list[Message]]:
        """How many messages to receive, and those to acknowledge with that."""
        with self._changed:
            done = self._take_done()
            return self._room(), done

    def begin_wait(self) -> None:
        """Let threads acknowledge what they handle from now on: the receive may wait for messages."""
        with self._changed:
            self._is_waiting = True

    def received(self, messages: list[Message]) -> None:
        """Buffer what was received, and let another thread receive."""
        with self._changed:
            self._is_receiving = self._is_waiting = False
            if messages:
                self._window.received(message.attempts for message in messages)
                self._buffered.extend(messages)
                self._buffered_at = self._monotonic()
                self._watch()
            self._changed.notify(max(len(messages), 1))  # One thread for each message, and one to receive next.

    def drop(self, message: Message) -> None:
        """Forget a message that is not to be handled."""
        with self._changed:
            self._running.discard(message)

    def is_running(self, message: Message) -> bool:
        """Whether its thread may settle it. A worker that stops returns what its handlers have not finished."""
        with self._changed:
            return message in self._running

    def finish(self, message: Message, seconds: float, *, is_done: bool) -> bool:
        """Note that a handler took this long, and whether its message is to be acknowledged.

        Returns whether the calling thread has to do that, because no receive will soon.
        """
        with self._changed:
            self._window.record(seconds)
            if not is_done or message not in self._running:
                self._running.discard(message)
                return False
            self._running.discard(message)
            if not self._done:
                self._done_at = self._monotonic()
            self._done.append(message)
            self._watch()
            return self._is_waiting or self._stopping.is_set()

    def begin_ack(self) -> list[Message]:
        """What is to be acknowledged by itself. Nothing if another thread does that."""
        with self._changed:
            done = [] if self._acking else self._take_done()
            self._acking = self._acking or len(done)
            return done

    def end_ack(self) -> None:
        with self._changed:
            self._acking = 0
            self._changed.notify()

    def wait_for_late(self) -> tuple[bool, list[Message]]:
        """Whether handled messages have waited too long to be acknowledged, and buffered ones that did for a handler.

        Returns after `WORKER_WINDOW_SECONDS`; while nothing is held, it waits for messages.
        """
        with self._pending:
            while not (self._buffered or self._done or self._stopping.is_set()):
                self._is_watched = False
                self._pending.wait()
            if not self._stopping.is_set():
                self._pending.wait(limits.WORKER_WINDOW_SECONDS)
            now = self._monotonic()
            # A receive that need not wait for messages takes them along when it is repeated.
            is_late = (self._is_waiting or not self._is_receiving) and bool(
                self._done and now - self._done_at >= limits.WORKER_WINDOW_SECONDS
            )
            is_stuck = self._window.is_automatic and now - self._buffered_at >= limits.WORKER_BUFFERED_SECONDS_MAX
            return is_late, self._take_buffered() if is_stuck else []

    def wake_all(self) -> None:
        with self._changed:
            self._changed.notify_all()
            self._pending.notify_all()

    def take_buffered(self) -> list[Message]:
        with self._changed:
            return self._take_buffered()

    def take_running(self) -> list[Message]:
        """The messages whose handlers are running; from now on their threads leave them alone."""
        with self._changed:
            running = list(self._running)
            self._running.clear()
            return running

    def _room(self, done: int = 0) -> int:
        return self._window.room(len(self._running) + len(self._buffered) + self._acking + done)

    def _take_buffered(self) -> list[Message]:
        messages = list(self._buffered)
        self._buffered.clear()
        return messages

    def _take_done(self) -> list[Message]:
        done, self._done = self._done[: limits.MESSAGES_MAX], self._done[limits.MESSAGES_MAX :]
        return done

    def _watch(self) -> None:
        if not self._is_watched and (self._buffered or self._done):
            self._is_watched = True
            self._pending.notify()
