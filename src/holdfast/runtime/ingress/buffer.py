"""The backlog: accepted pushes that wait for the writer, as many as there is room for.

    enter ──► room at once, or in line for at most 20 ms ──► put ──► … ──► a batch of the writer's
                                      │
                                      └──► Busy

A batch is due when it is full, when its first push has waited for 200 ms, or as soon as somebody waits for its sync.
Nobody overtakes whoever stands in line. What enters has its room from then on, so a payload that is still on its way to
the object store is counted too.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from holdfast import limits
from holdfast.clock import Clock
from holdfast.errors import Busy, Closed
from holdfast.runtime.timers import ring_after


class Waiting(Protocol):
    """A push in the backlog."""

    @property
    def size(self) -> int: ...  # What it takes of the room for bytes.

    @property
    def since_ms(self) -> int: ...  # When it came.

    @property
    def hurries(self) -> bool: ...  # Whether somebody waits until it is stored.


Item = TypeVar("Item", bound=Waiting)


class Backlog(Generic[Item]):
    """A bounded queue of one event loop, with one reader."""

    def __init__(
        self, clock: Clock, *, most: int = limits.INGRESS_QUEUE_MAX, bytes_max: int = limits.INGRESS_QUEUE_BYTES_MAX
    ) -> None:
        self._clock = clock
        self._most = most
        self._bytes_max = bytes_max
        self._inside = 0  # How many have room: those in the queue, and those on their way into it.
        self._bytes = 0
        self._items: deque[Item] = deque()
        self._queued_bytes = 0
        self._hurried = 0  # How many of the items hurry.
        self._line: deque[tuple[asyncio.Future[bool], int]] = deque()
        self._ripe = False  # The first item has waited long enough.
        self._stop_alarm: Callable[[], None] = _nothing
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def lag_seconds(self) -> float:
        """How long the first item has waited."""
        return max(self._clock.now_ms() - self._items[0].since_ms, 0) / 1_000 if self._items else 0.0

    async def enter(self, size: int) -> None:
        """Take room for one item of so many bytes.

        Raises:
            Busy: there was none for as long as one may wait.
            Closed: nothing is taken any more.
        """
        if self._closed:
            raise _closed()
        if not self._line and self._fits(size):
            self._count(size)
            return
        place = asyncio.get_running_loop().create_future()
        self._line.append((place, size))
        stop = ring_after(self._clock, limits.INGRESS_WAIT_SECONDS, lambda: self._turn_away(place))
        try:
            granted = await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.result():
                self.leave(size)  # It was granted in the same moment.
            raise
        finally:
            stop()
        if not granted:
            if self._closed:
                raise _closed()
            raise Busy(
                f"{len(self._items):,} pushes wait to be stored, as many as may; nothing was accepted. "
                "Push it again, with the same key, in a moment"
            )

    def leave(self, size: int) -> None:
        """Give room back that was taken for an item which does not come."""
        self._inside -= 1
        self._bytes -= size
        self._admit()

    def shrink(self, size: int) -> None:
        """Give so many bytes of somebody's room back."""
        self._bytes -= size
        self._admit()

    def put(self, item: Item) -> None:
        """Queue an item that has room.

        Raises:
            Closed: nothing is taken any more.
        """
        if self._closed:
            raise _closed()
        self._items.append(item)
        self._queued_bytes += item.size
        self._hurried += item.hurries
        if len(self._items) == 1:
            self._set_alarm(limits.INGRESS_FLUSH_SECONDS)
        if self._is_due():
            self._changed.set()

    def hurry(self) -> None:
        """Let what is queued be due at once: somebody has begun to wait for it."""
        if self._items:
            self._ripen()

    async def batch(self) -> list[Item]:
        """The next items to store, once they are due; none when the backlog is closed and empty."""
        while not self._is_due():
            if self._closed:
                return []
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def close(self) -> None:
        """Take nothing more, and let the reader have what there is at once."""
        self._closed = True
        for place, _ in self._line:
            if not place.done():
                place.set_result(False)
        self._line.clear()
        self._stop_alarm()
        self._changed.set()

    def _is_due(self) -> bool:
        return bool(self._items) and (
            self._ripe
            or self._hurried > 0
            or self._closed
            or len(self._items) >= limits.INGRESS_BATCH_MAX
            or self._queued_bytes >= limits.INGRESS_BATCH_BYTES_MAX
        )

    def _take(self) -> list[Item]:
        taken: list[Item] = []
        size = 0
        while self._items and len(taken) < limits.INGRESS_BATCH_MAX:
            size += self._items[0].size
            if taken and size > limits.INGRESS_BATCH_BYTES_MAX:
                break
            item = self._items.popleft()
            taken.append(item)
            self._inside -= 1
            self._bytes -= item.size
            self._queued_bytes -= item.size
            self._hurried -= item.hurries
        if self._items:
            self._set_alarm(limits.INGRESS_FLUSH_SECONDS - self.lag_seconds)
        else:
            self._stop_alarm()
            self._ripe = False
        self._admit()
        return taken

    def _set_alarm(self, seconds: float) -> None:
        self._stop_alarm()
        self._ripe = seconds <= 0
        self._stop_alarm = _nothing if self._ripe else ring_after(self._clock, seconds, self._ripen)

    def _ripen(self) -> None:
        self._ripe = True
        self._changed.set()

    def _fits(self, size: int) -> bool:
        return self._inside < self._most and (self._bytes + size <= self._bytes_max or not self._inside)

    def _count(self, size: int) -> None:
        self._inside += 1
        self._bytes += size

    def _admit(self) -> None:
        """Let those in who stand in line, in order, as far as there is room."""
        while self._line:
            place, size = self._line[0]
            if not place.done():
                if not self._fits(size):
                    return
                self._count(size)
                place.set_result(True)
            self._line.popleft()

    def _turn_away(self, place: "asyncio.Future[bool]") -> None:
        if not place.done():
            place.set_result(False)
        self._admit()  # Whoever stood behind may need less.


def _closed() -> Closed:
    return Closed("The server is shutting down and accepts nothing more; push it again, with the same key, in a moment")


def _nothing() -> None:
    """There is no alarm to stop."""
