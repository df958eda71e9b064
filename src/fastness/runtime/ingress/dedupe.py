"""Deduplication of pushes: the keys of recent pushes, in memory.

    reserve ──► entering ── in the buffer ──► queued ── committed and synced ──► stored ── 7 days ──► removed
                   │                            │
                   └── Busy ──► lost ◄── failed ┘      the key of a lost push is removed: a retry is accepted

A second push of a key that is still entering waits for the outcome of the first. When there are more keys than the
limit, the oldest is removed, in constant time. Expired keys are removed by `prune`, outside of pushes.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from fastness.clock import Clock
from fastness.errors import FastnessError
from fastness.layers.dedupe import KEY_BYTES, Entry
from fastness.limits import DEDUPE_MAX, DEDUPE_SECONDS
from fastness.runtime.timers import wake

_encode = msgspec.msgpack.Encoder().encode


class Stage(IntEnum):
    """The progress of a push."""

    ENTERING = 0
    QUEUED = 1
    STORED = 2
    LOST = 3


class Reservation:
    """The key of a push, and the progress of that push."""

    __slots__ = ("_waiting", "at_ms", "error", "is_duplicate", "key", "stage")

    def __init__(self, key: bytes, at_ms: int, stage: Stage = Stage.ENTERING) -> None:
        self.key = key
        self.at_ms = at_ms
        self.stage = stage
        self.error: FastnessError | None = None  # Why it was lost.
        self.is_duplicate = False  # The mailbox already contained the mail, although the key was not remembered.
        self._waiting: list[asyncio.Future[None]] = []

    def advance(self, stage: Stage) -> None:
        """Set the stage, and wake the callers that wait for it."""
        self.stage = stage
        for waiting in self._waiting:
            wake(waiting)
        self._waiting.clear()

    async def wait_past(self, stage: Stage) -> None:
        """Return once the push is past `stage`.

        Raises:
            FastnessError: the reason why it was lost.
        """
        while self.stage <= stage:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        if self.error is not None:
            raise self.error


class Dedupe:
    """The keys of recent pushes. For one thread at a time."""

    def __init__(self, clock: Clock, *, seconds: float = DEDUPE_SECONDS, keys_max: int = DEDUPE_MAX) -> None:
        self._clock = clock
        self.ttl_ms = round(seconds * 1_000)
        self.keys_max = keys_max
        self.has_unsaved = False  # A push was stored since the last call of `stored`.
        self._known: OrderedDict[bytes, Reservation] = OrderedDict()  # The oldest first.

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: bytes) -> Reservation | None:
        """The reservation of a key, if the key is known and has not expired."""
        found = self._known.get(key)
        return None if found is None or self._is_expired(found) else found

    def reserve(self, key: bytes) -> Reservation:
        """Add an unknown key as the newest one."""
        reservation = Reservation(key, self._clock.now_ms())
        self._known.pop(key, None)  # An entry with this key has expired.
        self._known[key] = reservation
        if len(self._known) > self.keys_max:
            self._known.popitem(last=False)
        return reservation

    def settle(self, reservation: Reservation) -> None:
        """Record that a push is stored."""
        reservation.advance(Stage.STORED)
        self.has_unsaved = True

    def mark_stored(self, reservation: Reservation) -> None:
        """As `settle`, after the event loop has ended: nothing waits any more."""
        reservation.stage = Stage.STORED
        self.has_unsaved = True

    def release(self, reservation: Reservation, error: FastnessError) -> None:
        """Record that a push is lost: remove its key, so that a retry is accepted, and raise `error` in its waiters."""
        if self._known.get(reservation.key) is reservation:  # A newer push may have replaced it.
            del self._known[reservation.key]
        reservation.error = error
        reservation.advance(Stage.LOST)

    def prune(self) -> int:
        """Remove expired keys; how many there were."""
        expired = 0
        while self._known and self._is_expired(next(iter(self._known.values()))):
            self._known.popitem(last=False)
            expired += 1
        return expired

    def stored(self) -> list[Entry]:
        """The keys of stored pushes, the oldest first, for saving."""
        self.has_unsaved = False
        return [(each.key, each.at_ms) for each in self._known.values() if each.stage is Stage.STORED]

    def restore(self, entries: Iterable[Entry]) -> None:
        """Load saved keys, the oldest first. Only at the start, when no other keys are known."""
        for key, at_ms in entries:
            self._known[key] = Reservation(key, at_ms, Stage.STORED)
        while len(self._known) > self.keys_max:
            self._known.popitem(last=False)
        self.prune()

    def _is_expired(self, reservation: Reservation) -> bool:
        return self._clock.now_ms() - reservation.at_ms >= self.ttl_ms


def key_of(to: str, sender: str, topic: str, idempotency_key: str) -> bytes:
    """The deduplication key of a push: an idempotency key applies to one sender, recipient and topic."""
    return hashlib.blake2b(_encode((to, sender, topic, idempotency_key)), digest_size=KEY_BYTES).digest()
