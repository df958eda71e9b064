"""Extends the leases of received messages in a background thread, while consumers process them.

Forgetting to extend a lease is the most common consumer bug, and a busy consumer cannot do it. So the lease of every
received message is extended from a third of its visibility timeout on, until the message is settled, its handle is
garbage-collected, or the cap is reached. If a lease is lost anyway (the process was suspended for too long), the
message is marked `lost`.
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

_log = logging.getLogger("holdfast.lease_renewal")

_NEW_MAX = 4_096  # New messages that may queue before the thread is woken to drop settled ones.

Extend = Callable[[str, str, MessageLease, float], int]  # (universe, queue, lease, seconds) -> the new expiry.


class Renewable(Protocol):
    """The part of a received message that the renewer updates."""

    lost: bool
    expires_ms: int


class Renewal:
    """The renewal of one message's lease. Call `stop` when the message is settled."""

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
    """Renews leases on a thread that starts with the first message and stops with the plane."""

    def __init__(self, extend: Extend) -> None:
        self._extend = extend
        self._lock = threading.Condition()
        self._due: list[tuple[float, int, Renewal]] = []
        self._new: deque[tuple[float, int, Renewal]] = deque()
        self._wake_at = math.inf  # When the thread wakes by itself.
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._has_warned = False  # Whether a failure to start the thread was logged.
        self._closing = False

    def start(
        self, message: Renewable, universe: str, queue: str, lease: MessageLease, *, seconds: float, cap_seconds: float
    ) -> Renewal:
        """Extend the lease by `seconds` repeatedly, for at most `cap_seconds`."""
        now = time.monotonic()
        renewal = Renewal(message, universe, queue, lease, seconds=seconds, cap=now + cap_seconds)
        self._new.append((now + seconds / 3, next(self._numbers), renewal))
        # Usually the thread wakes early enough by itself, and finds that the message is settled.
        if self._wake_at > now + seconds / 3 or len(self._new) > _NEW_MAX:
            self._wake()
        return renewal

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing:
                self._start_thread()
            else:
                self._lock.notify()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="holdfast-lease-renewal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # Out of threads. The message was received nonetheless.
            if not self._has_warned:
                self._has_warned = True
                _log.warning("leases are not extended: the renewal thread cannot start yet: %s", error)
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
                self._collect_new()
                while not self._closing and (not self._due or self._due[0][0] > time.monotonic()):
                    self._wake_at = self._due[0][0] if self._due else math.inf
                    if self._new:  # It may have been added in reliance on the previous wake-up time.
                        self._collect_new()
                        continue
                    self._lock.wait(self._due[0][0] - time.monotonic() if self._due else None)
                    self._collect_new()
                self._wake_at = 0.0  # Awake: it collects new messages before it sleeps again.
                if self._closing:
                    return
                renewal = heapq.heappop(self._due)[2]
            if self._extend_lease(renewal):
                with self._lock:
                    due = time.monotonic() + renewal.seconds / 3
                    heapq.heappush(self._due, (due, next(self._numbers), renewal))

    def _collect_new(self) -> None:
        """Schedule the new messages that are not settled yet."""
        while self._new:
            due = self._new.popleft()
            if not due[2].stopped and due[2].message() is not None:
                heapq.heappush(self._due, due)
        while self._due and (self._due[0][2].stopped or self._due[0][2].message() is None):
            heapq.heappop(self._due)

    def _extend_lease(self, renewal: Renewal) -> bool:
        """Extend one lease. Returns whether to extend it again later."""
        message = renewal.message()
        if renewal.stopped or message is None or time.monotonic() >= renewal.cap:
            return False
        try:
            message.expires_ms = self._extend(renewal.universe, renewal.queue, renewal.lease, renewal.seconds)
        except Closed:
            return False
        except Fenced as error:
            if not renewal.stopped:
                message.lost = True
                _log.warning("the lease on message %s of %s was lost: %s", renewal.lease.id, renewal.queue, error)
            return False
        except Exception as error:  # It may have been extended; extending it again is harmless.
            _log.info(
                "could not extend the lease on message %s of %s, retrying: %s", renewal.lease.id, renewal.queue, error
            )
        return True
