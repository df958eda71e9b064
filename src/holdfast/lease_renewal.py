"""The keeper: extends the leases of messages that are being worked on, off the worker's own thread or event loop.

A consumer that forgets to extend its lease is the commonest fault there is, and one that is busy cannot. So every
message that was received is kept from a third of its visibility timeout on, until it is settled, its handle is gone, or
the cap is reached. A message that was lost all the same (the process was stopped for too long) is told of it.
"""

import heapq
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

from holdfast.errors import Closed, Fenced
from holdfast.wire.queues import MessageLease

_log = logging.getLogger("holdfast.keeper")

_NEW_MAX = 4_096  # Messages that may gather before the thread is woken to forget those that are settled.

Extend = Callable[[str, str, MessageLease, float], int]  # Of a universe's queue, by seconds; when it ends then.


class Renewable(Protocol):
    """A message in somebody's hands, as the keeper knows it."""

    lost: bool
    expires_ms: int


class Renewal:
    """One message that is kept. `stop` it when the message is settled."""

    __slots__ = ("cap", "lease", "message", "queue", "seconds", "stopped", "universe")

    def __init__(
        self, message: Renewable, universe: str, queue: str, lease: MessageLease, *, seconds: float, cap: float
    ) -> None:
        self.message = weakref.ref(message)
        self.universe = universe
        self.queue = queue
        self.lease = lease
        self.seconds = seconds
        self.cap = cap
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


class LeaseRenewer:
    """A thread that begins with the first message and ends with the plane."""

    def __init__(self, extend: Extend) -> None:
        self._extend = extend
        self._lock = threading.Condition()
        self._due: list[tuple[float, int, Renewal]] = []
        self._new: deque[tuple[float, int, Renewal]] = deque()
        self._wake_at = math.inf  # When the thread will look by itself.
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._is_idle = False  # Whether it was said that there can be no thread.
        self._closing = False

    def keep(
        self, message: Renewable, universe: str, queue: str, lease: MessageLease, *, seconds: float, cap_seconds: float
    ) -> Renewal:
        """Extend the lease by `seconds` again and again, for `cap_seconds` at most."""
        now = time.monotonic()
        keeping = Renewal(message, universe, queue, lease, seconds=seconds, cap=now + cap_seconds)
        self._new.append((now + seconds / 3, next(self._numbers), keeping))
        # Mostly the thread looks here in time by itself, and finds that the message is settled.
        if self._wake_at > now + seconds / 3 or len(self._new) > _NEW_MAX:
            self._wake()
        return keeping

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing:
                self._begin()
            else:
                self._lock.notify()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # The process may have no more. Whoever received a message has it all the same.
            if not self._is_idle:
                self._is_idle = True
                _log.warning("leases are not extended, and will be when a thread can be had: %s", error)
            while len(self._new) > _NEW_MAX:
                self._new.popleft()
        else:
            self._thread = thread

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._due.clear()
            self._new.clear()
            self._lock.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._take_new()
                while not self._closing and (not self._due or self._due[0][0] > time.monotonic()):
                    self._wake_at = self._due[0][0] if self._due else math.inf
                    if self._new:  # Whoever came just now may have relied on the moment that was planned before.
                        self._take_new()
                        continue
                    self._lock.wait(self._due[0][0] - time.monotonic() if self._due else None)
                    self._take_new()
                self._wake_at = 0.0  # It is awake, and will look before it sleeps again.
                if self._closing:
                    return
                keeping = heapq.heappop(self._due)[2]
            if self._extended(keeping):
                with self._lock:
                    due = time.monotonic() + keeping.seconds / 3
                    heapq.heappush(self._due, (due, next(self._numbers), keeping))

    def _take_new(self) -> None:
        """Take up what came since the last look, but for what was settled meanwhile."""
        while self._new:
            due = self._new.popleft()
            if not due[2].stopped and due[2].message() is not None:
                heapq.heappush(self._due, due)
        while self._due and (self._due[0][2].stopped or self._due[0][2].message() is None):
            heapq.heappop(self._due)

    def _extended(self, keeping: Renewal) -> bool:
        """Extend one lease; whether it is to be extended again."""
        message = keeping.message()
        if keeping.stopped or message is None or time.monotonic() >= keeping.cap:
            return False
        try:
            message.expires_ms = self._extend(keeping.universe, keeping.queue, keeping.lease, keeping.seconds)
        except Closed:
            return False
        except Fenced as error:
            if not keeping.stopped:
                message.lost = True
                _log.warning("the lease on message %s of %s was lost: %s", keeping.lease.id, keeping.queue, error)
            return False
        except Exception as error:  # Nobody knows whether it was extended, and doing it again does no harm.
            _log.info(
                "the lease on message %s of %s is extended again soon: %s", keeping.lease.id, keeping.queue, error
            )
        return True
