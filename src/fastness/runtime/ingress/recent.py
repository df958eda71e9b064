"""The recent pushes of watched universes, in memory, for watches from other processes and threads.

    accepted push ──► add ──► the universe's ring ──► read: the pushes after a position, or a wait for the next one
                                   │
                                   └── full ──► the oldest is forgotten: missed by watches that have not read it

A position is `EPOCH-SEQUENCE`. A ring begins with the first watch of its universe, under a new random epoch, and ends
when no watch has asked for PUSH_RECENT_SECONDS. A watch with a position of another epoch is told that it has to begin
again: the process was restarted, or the ring was dropped.
"""

import asyncio
import re
import secrets
from collections import deque
from itertools import islice
from typing import Final

import msgspec

from fastness import limits
from fastness.clock import Clock
from fastness.errors import Busy, Closed, InvalidArgument
from fastness.runtime.timers import call_after, wake
from fastness.wire.ingress import DataPush, SeenPushes, WatchPushes

_POSITION: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,15})")
_ENTRY_BYTES: Final = 1_024  # What an entry takes beside its payload: the text fields have at most 256 characters each.


class RecentPushes:
    """The latest pushes of each watched universe. For one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rings: dict[str, _Ring] = {}
        self._waiting = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of watches that wait now."""
        return self._waiting

    def is_watched(self, universe: str) -> bool:
        """Whether the pushes of a universe are remembered."""
        return universe in self._rings

    def add(self, universe: str, push: DataPush) -> None:
        """Remember a push, if its universe is watched, and wake the watches of the universe."""
        ring = self._rings.get(universe)
        if ring is not None:
            ring.add(push)

    async def read(self, request: WatchPushes) -> SeenPushes:
        """The pushes after the position `after`, or the current position if there is none.

        Raises:
            InvalidArgument: `after` is not a position of this universe.
            Busy: too many watches wait, or too many universes are watched.
            Closed: the plane is being closed.
        """
        epoch, sequence = _split(request.after)
        ring = self._ring(request.universe)
        if epoch != ring.epoch:
            # What the new ring remembers is delivered to a watch that had begun before.
            position = ring.last if epoch is None else ring.forgotten
            return SeenPushes(ring.position(position), [], restarted=epoch is not None)
        if sequence > ring.last:
            raise InvalidArgument(
                f"after is {request.after!r}, which is beyond the last push; give the position of an answer"
            )
        return await self._wait(ring, sequence, request)

    def prune(self) -> None:
        """Drop the rings that no watch has read for PUSH_RECENT_SECONDS."""
        since_ms = self._clock.now_ms() - limits.PUSH_RECENT_SECONDS * 1_000
        for universe, ring in list(self._rings.items()):
            if not ring.waiting and ring.read_ms < since_ms:
                del self._rings[universe]

    def close(self) -> None:
        """End the waits."""
        self._closed = True
        for ring in self._rings.values():
            ring.wake_all()

    def _ring(self, universe: str) -> "_Ring":
        if self._closed:
            raise _closed()
        ring = self._rings.get(universe)
        if ring is None:
            self.prune()
            if len(self._rings) >= limits.PUSH_UNIVERSES_MAX:
                raise Busy(
                    f"The pushes of {limits.PUSH_UNIVERSES_MAX} universes are watched already; nothing is watched. Try "
                    f"again {limits.PUSH_RECENT_SECONDS:g} s after the last watch of another universe has ended"
                )
            ring = self._rings[universe] = _Ring()
        ring.read_ms = self._clock.now_ms()
        return ring

    async def _wait(self, ring: "_Ring", sequence: int, request: WatchPushes) -> SeenPushes:
        missed = 0
        is_over = request.wait_seconds <= 0
        waiting: asyncio.Future[None] | None = None

        def end_wait() -> None:
            nonlocal is_over
            is_over = True
            if waiting is not None:
                wake(waiting)

        stop = None if is_over else call_after(self._clock, request.wait_seconds, end_wait)
        try:
            while True:
                missed += max(ring.forgotten - sequence, 0)
                found, sequence = ring.matching(max(sequence, ring.forgotten), request)
                if found or missed or is_over:
                    return SeenPushes(ring.position(sequence), found, missed)
                if self._closed:
                    raise _closed()
                if self._waiting >= limits.PUSH_WATCHES_MAX:
                    raise Busy(f"{limits.PUSH_WATCHES_MAX:,} watches wait already; watch again later")
                waiting = asyncio.get_running_loop().create_future()
                await self._wait_in(ring, waiting)
        finally:
            ring.read_ms = self._clock.now_ms()
            if stop is not None:
                stop()

    async def _wait_in(self, ring: "_Ring", waiting: "asyncio.Future[None]") -> None:
        ring.waiting.add(waiting)
        self._waiting += 1
        try:
            await waiting
        finally:
            self._waiting -= 1
            ring.waiting.discard(waiting)


class _Ring:
    """The latest pushes of one universe. The last one has the sequence number `last`."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        self.last = 0
        self.read_ms = 0
        self.waiting: set[asyncio.Future[None]] = set()
        self._entries: deque[DataPush] = deque()
        self._bytes = 0

    @property
    def forgotten(self) -> int:
        """The sequence number of the last push that is not remembered."""
        return self.last - len(self._entries)

    def position(self, sequence: int) -> str:
        return f"{self.epoch}-{sequence}"

    def add(self, push: DataPush) -> None:
        self.last += 1
        self._entries.append(msgspec.structs.replace(push, position=self.position(self.last)))
        self._bytes += _size(push)
        while len(self._entries) > limits.PUSH_RECENT_MAX or self._bytes > limits.PUSH_RECENT_BYTES_MAX:
            self._bytes -= _size(self._entries.popleft())
        self.wake_all()

    def matching(self, sequence: int, request: WatchPushes) -> tuple[list[DataPush], int]:
        """Pushes after `sequence` that match, and up to where the ring was searched."""
        found: list[DataPush] = []
        size, to, topic, limit = 0, request.to, request.topic, request.limit
        for each in islice(self._entries, sequence - self.forgotten, None):
            if (to is None or each.to == to) and (topic is None or each.topic == topic):
                size += _size(each)
                if found and (len(found) >= limit or size > limits.PUSH_WATCH_BYTES_MAX):
                    break
                found.append(each)
            sequence += 1
        return found, sequence

    def wake_all(self) -> None:
        for each in self.waiting:
            wake(each)


def _split(after: str | None) -> tuple[str | None, int]:
    if after is None:
        return None, 0
    found = _POSITION.fullmatch(after)
    if found is None:
        raise InvalidArgument(
            f"after is {after[:80]!r}, which is not a position; give that of an earlier answer, or none to begin now"
        )
    return found[1], int(found[2])


def _size(push: DataPush) -> int:
    return len(push.payload) + _ENTRY_BYTES


def _closed() -> Closed:
    return Closed("The plane is being closed; watch again with the last position in a few seconds")
