"""Workers on threads."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast import limits
from holdfast.errors import Fenced, HoldfastError
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.plane import Plane
from holdfast.handles.workers.consumers import WAIT_SECONDS, Consumers, reason_of


class Worker(Consumers):
    """Runs handlers on threads. One of those that are free asks the queue for messages for all of them."""

    def __init__(self, plane: Plane, handlers: Mapping[str, Callable[[Message], Any]], **options: Any) -> None:
        super().__init__(plane, handlers, **options)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, on threads of its own."""
        for queue, handler in self._handlers.items():
            hands = _Hands(partial(self._receive, queue), self._stopping)
            for number in range(self._concurrency):
                name = f"holdfast-worker-{queue}-{number}"
                thread = threading.Thread(target=self._consume, args=(queue, handler, hands), name=name, daemon=True)
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
            while not self._stopping.wait(WAIT_SECONDS) and any(thread.is_alive() for thread in self._threads):
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

    def _receive(self, queue: str, count: int) -> list[Message]:
        messages: list[Message] = self._plane.queue(queue).receive_many(
            count, wait_seconds=WAIT_SECONDS, **self._options
        )
        return messages

    def _consume(self, name: str, handler: Callable[[Message], Any], hands: "_Hands") -> None:
        failures = 0
        while not self._stopping.is_set():
            message = None
            try:
                message = hands.next()
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
            message.nack(delay_seconds=self._delay(message.failure_attempts + 1), error=reason_of(error))

    def _defer(self, message: Message) -> None:
        with self._lock:
            self._at_work.discard(message)
        with suppress(HoldfastError):
            if not message.settled:
                message.nack(intent="defer")
                self.stats.deferred += 1


class _Hands:
    """The threads of one queue that are free: whoever of them asks for messages does so for all."""

    def __init__(self, ask: Callable[[int], list[Message]], stopping: threading.Event) -> None:
        self._ask = ask
        self._stopping = stopping
        self._changed = threading.Condition()
        self._free = 0  # How many are here, with the one that asks.
        self._is_asking = False
        self._messages: deque[Message] = deque()  # Never more than hands that wait for them.

    def next(self) -> Message | None:
        """A message, by whoever asked for it; None if none came for a while, or if the worker is to stop."""
        with self._changed:
            self._free += 1
            while self._is_asking and not self._messages:
                self._changed.wait()
            if self._messages:
                self._free -= 1
                return self._messages.popleft()
            if self._stopping.is_set():
                self._free -= 1
                self._changed.notify_all()
                return None
            self._is_asking = True
            count = min(self._free, limits.MESSAGES_MAX)
        messages: list[Message] = []
        try:
            messages = self._ask(count)
        finally:
            with self._changed:
                self._free -= 1
                self._is_asking = False
                self._messages.extend(messages[1:])
                self._changed.notify(max(len(messages), 1))  # One for each message, and one that asks next.
        return messages[0] if messages else None
