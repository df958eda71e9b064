"""Dedupe: which pushes were made already, in memory, by their keys.

    reserve ──► entering ── the queue has it ──► queued ── committed and synced ──► stored ── 7 days ──► forgotten
                   │                               │
                   └── no room ──► lost ◄── failed ┘      a lost one is forgotten at once: it may be pushed again

A key that is entering says nothing yet: whoever pushes it a second time waits with the first. Of more keys than are
remembered the oldest is forgotten first, in constant time. Those whose time is over are removed by `prune`, which is no
part of a push.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.layers.dedupe import KEY_BYTES, Entry
from holdfast.limits import DEDUPE_MAX, DEDUPE_SECONDS
from holdfast.runtime.timers import wake

_encode = msgspec.msgpack.Encoder().encode


class Stage(IntEnum):
    """How far a push has come."""

    ENTERING = 0
    QUEUED = 1
    STORED = 2
    LOST = 3


class Reservation:
    """A key that somebody pushes under, and what became of it."""

    __slots__ = ("_waiting", "at_ms", "error", "key", "stage", "was_there")

    def __init__(self, key: bytes, at_ms: int, stage: Stage = Stage.ENTERING) -> None:
        self.key = key
        self.at_ms = at_ms
        self.stage = stage
        self.error: HoldfastError | None = None  # Why it was lost.
        self.was_there = False  # The mailbox had it already, which nobody remembered.
        self._waiting: list[asyncio.Future[None]] = []

    def move(self, stage: Stage) -> None:
        """It has come so far."""
        self.stage = stage
        for waiting in self._waiting:
            wake(waiting)
        self._waiting.clear()

    async def beyond(self, stage: Stage) -> None:
        """Return once the push has come further than that.

        Raises:
            HoldfastError: it was lost, and why.
        """
        while self.stage <= stage:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        if self.error is not None:
            raise self.error


class Dedupe:
    """The keys that are remembered. One thread at a time."""

    def __init__(self, clock: Clock, *, seconds: float = DEDUPE_SECONDS, most: int = DEDUPE_MAX) -> None:
        self._clock = clock
        self.ttl_ms = round(seconds * 1_000)
        self.most = most
        self.has_news = False  # Something was stored since `stored` was last asked.
        self._known: OrderedDict[bytes, Reservation] = OrderedDict()  # The oldest first.

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: bytes) -> Reservation | None:
        """What is known of a key, if it is remembered."""
        found = self._known.get(key)
        return None if found is None or self._is_over(found) else found

    def reserve(self, key: bytes) -> Reservation:
        """Remember a key that is not; it becomes the newest."""
        made = Reservation(key, self._clock.now_ms())
        self._known.pop(key, None)  # What is there is over.
        self._known[key] = made
        if len(self._known) > self.most:
            self._known.popitem(last=False)
        return made

    def settle(self, reservation: Reservation) -> None:
        """What was pushed is stored."""
        reservation.move(Stage.STORED)
        self.has_news = True

    def release(self, reservation: Reservation, error: HoldfastError) -> None:
        """What was pushed is lost: forget its key, so that it can be pushed again, and say why to whoever waits."""
        if self._known.get(reservation.key) is reservation:  # Another one may have taken its place.
            del self._known[reservation.key]
        reservation.error = error
        reservation.move(Stage.LOST)

    def prune(self) -> int:
        """Forget the keys whose time is over; how many there were."""
        over = 0
        while self._known and self._is_over(next(iter(self._known.values()))):
            self._known.popitem(last=False)
            over += 1
        return over

    def stored(self) -> list[Entry]:
        """The keys of what is stored, the oldest first: what may be written down."""
        self.has_news = False
        return [(each.key, each.at_ms) for each in self._known.values() if each.stage is Stage.STORED]

    def restore(self, entries: Iterable[Entry]) -> None:
        """Remember keys that were written down, the oldest first. Only for the beginning, when no others are known."""
        for key, at_ms in entries:
            self._known[key] = Reservation(key, at_ms, Stage.STORED)
        while len(self._known) > self.most:
            self._known.popitem(last=False)
        self.prune()

    def _is_over(self, reservation: Reservation) -> bool:
        return self._clock.now_ms() - reservation.at_ms >= self.ttl_ms


def key_of(to: str, sender: str, topic: str, idempotency_key: str) -> bytes:
    """The key of a push. A sender's key counts for one recipient and one topic."""
    return hashlib.blake2b(_encode((to, sender, topic, idempotency_key)), digest_size=KEY_BYTES).digest()
