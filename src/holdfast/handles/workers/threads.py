"""Workers on threads."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Unpack

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.plane import Plane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, WorkerOptions
from holdfast.wire.queues import lease_mismatch

ThreadHandler = Callable[[Message], object]


class Worker(Consumers[ThreadHandler]):
    """Runs handlers on threads. One free thread receives messages for all free threads."""

    def __init__(self, plane: Plane, handlers: Mapping[str, ThreadHandler], **options: Unpack[WorkerOptions]) -> None:
        super().__init__(handlers, **options)
        self._plane = plane
        self._running: set[Message] = set()  # Messages whose handlers are running.
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start handling messages, on threads of its own."""
        for queue, handler in self._handlers.items():
            slots = _SharedReceiver(partial(self._receive, queue), self._stopping)
            for number in range(self._concurrency):
                name = f"holdfast-worker-{queue}-{number}"
                thread = threading.Thread(target=self._consume, args=(queue, handler, slots), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

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
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            unfinished = list(self._running)
        for message in unfinished:
            self._defer(message)

    def _receive(self, queue: str, count: int, done: Message | None) -> list[Message]:
        """The next messages. The message that is `done` is acknowledged in the commit that leases them."""
        found = [] if done is None else self._ack_and_receive(queue, count, done)
        if found or self._stopping.is_set():
            return found
        return self._plane.queue(queue).receive_many(count, wait_seconds=WAIT_SECONDS, **self._receive_options)

    def _ack_and_receive(self, queue: str, count: int, done: Message) -> list[Message]:
        """Acknowledge a message, and receive messages that are ready now."""
        try:
            found = self._plane.queue(queue).receive_many(count, ack=[done], **self._receive_options)
        except Exception:  # Perhaps only the receive has failed; a repeated one reports that.
            self._ack(queue, done)
            return []
        if done.lost:
            self._report_unsettled(lease_mismatch(done.lease), queue)
        else:
            self.stats.handled += 1
        return found

    def _ack(self, queue: str, message: Message) -> None:
        """Acknowledge a handled message by itself."""
        try:
            message.ack()
        except Exception as error:  # Its lease will expire. That does not end the worker.
            self._report_unsettled(error, queue)
        else:
            self.stats.handled += 1

    def _report_unsettled(self, error: Exception, queue: str) -> None:
        self._report(error, queue)
        self.stats.restarts += 1

    def _consume(self, name: str, handler: ThreadHandler, receiver: "_SharedReceiver") -> None:
        failures, done = 0, None
        while not self._stopping.is_set():
            message = None
            try:
                if done is not None and not receiver.begin():  # It must not wait for other threads' messages.
                    self._ack(name, done)
                    done = None
                message = receiver.next() if done is None else receiver.receive(done)
                failures, done = 0, None
                if message is not None:
                    done = self._handle(name, handler, message)
            except Exception as error:
                self._report(error, name)
                if message is None and self._is_final(error):  # An error of one message does not end the worker.
                    self._end(error)
                    return
                failures, done = failures + 1, None
                self.stats.restarts += 1
                self._stopping.wait(self._restarts.pause_seconds(failures))
        if done is not None:
            self._ack(name, done)

    def _end(self, error: Exception) -> None:
        """Stop all consumers because of `error`, unless they are stopping already."""
        with self._lock:
            if not self._stopping.is_set():
                self.error = error
                self._stopping.set()

    def _handle(self, queue: str, handler: ThreadHandler, message: Message) -> Message | None:
        """Run the handler; returns the message if it has to be acknowledged."""
        if self._stopping.is_set():
            self._defer(message)
            return None
        with self._lock:
            self._running.add(message)
        try:
            handler(message)
        except Exception as error:
            self._report_failure(error, queue, message_id=message.id, attempt=message.attempts)
            with self._lock:
                is_ours = message in self._running
            if is_ours and not message.settled:
                self._nack(message, error)
        else:
            if not message.settled:
                return message
            self.stats.handled += 1
        finally:
            with self._lock:
                self._running.discard(message)
        return None

    def _nack(self, message: Message, error: Exception) -> None:
        with suppress(Fenced):  # Its lease has ended.
            message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=error)

    def _defer(self, message: Message) -> None:
        with self._lock:
            self._running.discard(message)
        with suppress(HoldfastError):
            if not message.settled:
                message.nack(intent="defer")
                self.stats.deferred += 1


class _SharedReceiver:
    """Lets one free thread of a queue receive messages for all of its free threads."""

    def __init__(self, receive: Callable[[int, Message | None], list[Message]], stopping: threading.Event) -> None:
        self._receive = receive
        self._stopping = stopping
        self._changed = threading.Condition()
        self._free = 0  # Free threads, including the one that receives.
        self._is_receiving = False
        self._messages: deque[Message] = deque()  # Never more than free threads.

    def next(self) -> Message | None:
        """A message; None if none arrived for a while, or if the worker is stopping."""
        with self._changed:
            self._free += 1
            while self._is_receiving and not self._messages:
                self._changed.wait()
            if self._messages:
                self._free -= 1
                return self._messages.popleft()
            if self._stopping.is_set():
                self._free -= 1
                self._changed.notify_all()
                return None
            self._is_receiving = True
        return self.receive(None)

    def begin(self) -> bool:
        """Let the calling thread receive, if it would not have to wait for another one; then it calls `receive`."""
        with self._changed:
            if self._is_receiving or self._messages or self._stopping.is_set():
                return False
            self._free += 1
            self._is_receiving = True
            return True

    def receive(self, done: Message | None) -> Message | None:
        """Receive messages for all free threads, and acknowledge the one that is `done`; the first message."""
        with self._changed:
            count = min(self._free, limits.MESSAGES_MAX)
        messages: list[Message] = []
        try:
            messages = self._receive(count, done)
        finally:
            with self._changed:
                self._free -= 1
                self._is_receiving = False
                self._messages.extend(messages[1:])
                self._changed.notify(max(len(messages), 1))  # One thread for each message, and one to receive next.
        return messages[0] if messages else None
