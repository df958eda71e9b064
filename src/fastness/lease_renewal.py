"""Renews leases in a background thread while their holders work: of received messages, in `with` blocks, of locks.

Forgetting to renew a lease is the most common bug of its holder, and a busy holder cannot do it. A lease is renewed
from a third of its duration on, until the holder stops the renewal, its handle is garbage-collected, or (messages only)
the cap is reached. The messages of a delivery are renewed together, in one call. A lease that is lost anyway is marked
so:

    renewed   ──► renewed again after a third of its duration
    refused   ──► lost: another owner may have it
    no answer ──► tried again; a lease in a `with` block, or of locks, is lost once its last renewal has run out
"""

import heapq
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, Protocol

from fastness.errors import Closed, FastnessError, Fenced, LeaseExpired
from fastness.wire.leases import LeaseProof
from fastness.wire.locks import LockSession
from fastness.wire.queues import MessageLease

_log = logging.getLogger("fastness.lease_renewal")

_NEW_MAX = 4_096  # New renewals that may queue before the thread is woken to drop stopped ones.
_RETRY_SECONDS: Final = 1.0  # The longest pause before an unanswered renewal of a held lease is tried again.

# (universe, queue, leases, seconds) -> the new expiry of each, or why it was refused.
Extend = Callable[[str, str, list[MessageLease], float], Sequence[int | FastnessError]]
Keep = Callable[[LeaseProof | LockSession, float], int]  # (lease, seconds) -> the new expiry.


class Renewable(Protocol):
    """The part of a received message that the renewer reads and updates."""

    settled: bool
    lost: bool
    expires_ms: int

    @property
    def lease(self) -> MessageLease: ...

    def mark_refused(self, code: str) -> None: ...


class Renewal:
    """The renewal of the messages of one delivery: of those that are not settled and have a handle."""

    __slots__ = ("_handles", "cap", "queue", "seconds", "universe")

    def __init__(self, messages: Sequence[Renewable], universe: str, queue: str, *, seconds: float, cap: float) -> None:
        self._handles = [weakref.ref(message) for message in messages]
        self.universe = universe
        self.queue = queue
        self.seconds = seconds
        self.cap = cap

    @property
    def is_done(self) -> bool:
        return not any(_is_held(handle()) for handle in self._handles)

    def renew(self, renewer: "LeaseRenewer") -> float | None:
        """Extend the leases once. Returns when to do it again, in seconds; None if never."""
        messages = [message for handle in self._handles if _is_held(message := handle()) and message is not None]
        if not messages or time.monotonic() >= self.cap:
            return None
        try:
            extended = renewer.extend(self.universe, self.queue, [each.lease for each in messages], self.seconds)
        except Closed:
            return None
        except Exception as error:  # They may have been extended; extending them again is harmless.
            _log.info("could not extend %d leases of %s, retrying: %s", len(messages), self.queue, error)
            return self.seconds / 3
        for message, outcome in zip(messages, extended, strict=True):
            self._update(message, outcome)
        return self.seconds / 3

    def _update(self, message: Renewable, outcome: int | FastnessError) -> None:
        if not isinstance(outcome, FastnessError):
            message.expires_ms = outcome
        elif isinstance(outcome, Fenced):
            if not message.settled:
                message.mark_refused(outcome.code)
                _log.warning("the lease on message %s of %s was lost: %s", message.lease.id, self.queue, outcome)
        else:
            _log.info("could not extend the lease on message %s of %s: %s", message.lease.id, self.queue, outcome)


def _is_held(message: Renewable | None) -> bool:
    return message is not None and not message.settled and not message.lost


class HeldLease(Protocol):
    """The part of a lease's handle that the renewer updates."""

    expires_ms: int


class HeldLeaseRenewal:
    """The renewal of a lease in a `with` block or of a session's locks, and until when it is certainly held.

    `held_until` is measured by this process's monotonic clock, from before a renewal is requested. So it has passed
    when another owner can acquire the lease, even if the clocks of the machines differ or the server does not answer.
    """

    def __init__(self, lease: HeldLease, proof: LeaseProof | LockSession, *, seconds: float, renewed_at: float) -> None:
        self.handle = weakref.ref(lease)
        self.proof = proof
        self.seconds = seconds
        self.held_until = renewed_at + seconds
        self.stopped = False
        self._loss: Fenced | None = None
        self._last_error: Exception | None = None

    @property
    def loss(self) -> Fenced | None:
        """Why the lease is lost; None while it is certainly held. A lost lease stays lost."""
        if self._loss is None and not self.stopped and time.monotonic() >= self.held_until:
            why = "no renewal was answered in time" if self._last_error is None else str(self._last_error)
            self._lose(_expired(self.proof, why))
        return self._loss

    @property
    def is_done(self) -> bool:
        return self.stopped or self.handle() is None

    def stop(self) -> None:
        self.stopped = True

    def extend_until(self, held_until: float) -> None:
        """Record a renewal that the holder has requested itself."""
        self.held_until = max(self.held_until, held_until)

    def renew(self, renewer: "LeaseRenewer") -> float | None:
        """Renew the lease once. Returns when to do it again, in seconds; None if never."""
        lease, requested_at = self.handle(), time.monotonic()
        if self.stopped or lease is None or self.loss is not None:
            return None
        try:
            lease.expires_ms = renewer.keep(self.proof, self.seconds)
        except Closed:
            return None
        except Fenced as error:
            if not self.stopped:
                self._lose(error)
            return None
        except Exception as error:  # It may have been renewed; renewing it again is harmless.
            _log.info("could not renew the lease %s, retrying: %s", _subject(self.proof), error)
            self._last_error = error
            left = max(self.held_until - time.monotonic(), 0.0)
            return min(self.seconds / 10, _RETRY_SECONDS, left)
        self.extend_until(requested_at + self.seconds)
        self._last_error = None
        return self.seconds / 3

    def _lose(self, error: Fenced) -> None:
        self._loss = error
        _log.warning("the lease %s was lost: %s", _subject(self.proof), error)


def _subject(proof: LeaseProof | LockSession) -> str:
    return f"on {proof.key}" if isinstance(proof, LeaseProof) else "of a session's locks"  # Its id is secret.


def _expired(proof: LeaseProof | LockSession, why: str) -> LeaseExpired:
    if isinstance(proof, LeaseProof):
        return LeaseExpired(
            f"The lease on {proof.key} could not be renewed before it expired ({why}), and another owner may hold it; "
            "stop, acquire it again, then read its state"
        )
    return LeaseExpired(
        f"The lease of the held locks could not be renewed before it expired ({why}), and other callers may hold them; "
        "stop, release them, acquire them again, then read what they protect"
    )


class LeaseRenewer:
    """Renews leases on a thread that starts with the first lease and stops with the plane."""

    def __init__(self, extend: Extend, keep: Keep) -> None:
        self.extend = extend
        self.keep = keep
        self._lock = threading.Condition()
        self._due: list[tuple[float, int, Renewal | HeldLeaseRenewal]] = []
        self._new: deque[tuple[float, int, Renewal | HeldLeaseRenewal]] = deque()
        self._wake_at = math.inf  # When the thread wakes by itself.
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._has_warned = False  # Whether a failure to start the thread was logged.
        self._closing = False

    def start(
        self, messages: Sequence[Renewable], universe: str, queue: str, *, seconds: float, cap_seconds: float
    ) -> None:
        """Extend the leases of messages by `seconds` repeatedly, for at most `cap_seconds`."""
        now = time.monotonic()
        renewal = Renewal(messages, universe, queue, seconds=seconds, cap=now + cap_seconds)
        self._new.append((now + seconds / 3, next(self._numbers), renewal))
        # Usually the thread wakes early enough by itself, and finds that the messages are settled.
        if self._wake_at > now + seconds / 3 or len(self._new) > _NEW_MAX:
            self._wake()

    def hold(
        self, lease: HeldLease, proof: LeaseProof | LockSession, *, seconds: float, renewed_at: float
    ) -> HeldLeaseRenewal:
        """Renew a lease for `seconds` repeatedly. It was last renewed at `renewed_at`, of the monotonic clock."""
        renewal = HeldLeaseRenewal(lease, proof, seconds=seconds, renewed_at=renewed_at)
        self._new.append((renewed_at + seconds / 3, next(self._numbers), renewal))
        if self._wake_at > renewed_at + seconds / 3 or len(self._new) > _NEW_MAX:
            self._wake()
        return renewal

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing:
                self._start_thread()
            else:
                self._lock.notify()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="fastness-lease-renewal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # Out of threads. The lease was granted nonetheless.
            if not self._has_warned:
                self._has_warned = True
                _log.warning("leases are not renewed: the renewal thread cannot start yet: %s", error)
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
                self._wake_at = 0.0  # Awake: it collects new renewals before it sleeps again.
                if self._closing:
                    return
                renewal = heapq.heappop(self._due)[2]
            pause = renewal.renew(self)
            if pause is not None:
                with self._lock:
                    heapq.heappush(self._due, (time.monotonic() + pause, next(self._numbers), renewal))

    def _collect_new(self) -> None:
        """Schedule the new renewals that are not stopped yet."""
        while self._new:
            due = self._new.popleft()
            if not due[2].is_done:
                heapq.heappush(self._due, due)
        while self._due and self._due[0][2].is_done:
            heapq.heappop(self._due)
