"""The bounded buffer of accepted pushes that wait for the writer.

    reserve_space ──► granted immediately, or after at most 20 ms in line ──► put ──► … ──► a batch of the writer
                                      │
                                      └──► Busy

A batch is due when it is full, when its first push has waited for 200 ms, or as soon as a caller waits for its sync.
Waiting reservations are FIFO. Space is reserved before a payload is written to the object store, so that payload is
counted too.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from fastness import limits
from fastness.clock import Clock
from fastness.errors import Busy, Closed
from fastness.runtime.timers import call_after


class BufferItem(Protocol):
    """A push in the buffer."""

    @property
    def size(self) -> int: ...  # The bytes that count towards `bytes_max`.

    @property
    def enqueued_ms(self) -> int: ...  # When it was put.

    @property
    def is_urgent(self) -> bool: ...  # Whether a caller waits until it is stored.


Item = TypeVar("Item", bound=BufferItem)


class IngressBuffer(Generic[Item]):
    """A bounded queue for one event loop, with one reader."""

    def __init__(
        self,
        clock: Clock,
        *,
        items_max: int = limits.INGRESS_QUEUE_MAX,
        bytes_max: int = limits.INGRESS_QUEUE_BYTES_MAX,
    ) -> None:
        self._clock = clock
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._reserved = 0  # Reserved items: those in the queue, and those about to be put.
        self._bytes = 0
        self._items: deque[Item] = deque()
        self._queued_bytes = 0
        self._urgent = 0  # How many of the items are urgent.
        self._line: deque[tuple[asyncio.Future[bool], int]] = deque()
        self._is_first_due = False  # The first item has waited for INGRESS_FLUSH_SECONDS.
        self._stop_timer: Callable[[], None] = _no_timer
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def lag_seconds(self) -> float:
        """How long the oldest item has waited."""
        return max(self._clock.now_ms() - self._items[0].enqueued_ms, 0) / 1_000 if self._items else 0.0

    async def reserve_space(self, size: int) -> None:
        """Reserve space for one item of `size` bytes.

        Raises:
            Busy: there was no space within INGRESS_WAIT_SECONDS.
            Closed: the buffer is closed.
        """
        if self._closed:
            raise _closed()
        if not self._line and self._fits(size):
            self._count(size)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._line.append((waiter, size))
        stop = call_after(self._clock, limits.INGRESS_WAIT_SECONDS, lambda: self._reject(waiter))
        try:
            granted = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self.release_space(size)  # It was granted at the same time.
            raise
        finally:
            stop()
        if not granted:
            if self._closed:
                raise _closed()
            raise Busy(
                f"The ingress buffer is full: {len(self._items):,} pushes wait to be stored; nothing was accepted. "
                "Push it again with the same idempotency key in a few seconds"
            )

    def release_space(self, size: int) -> None:
        """Release the space of an item that is not put."""
        self._reserved -= 1
        self._bytes -= size
        self._admit()

    def release_bytes(self, size: int) -> None:
        """Release part of the bytes that an item has reserved."""
        self._bytes -= size
        self._admit()

    def put(self, item: Item) -> None:
        """Queue an item whose space is reserved.

        Raises:
            Closed: the buffer is closed.
        """
        if self._closed:
            raise _closed()
        self._items.append(item)
        self._queued_bytes += item.size
        self._urgent += item.is_urgent
        if len(self._items) == 1:
            self._start_timer(limits.INGRESS_FLUSH_SECONDS)
        if self._is_due():
            self._changed.set()

    def flush_soon(self) -> None:
        """Make the queued items due now, because a caller waits for them."""
        if self._items:
            self._mark_due()

    async def next_batch(self) -> list[Item]:
        """The next items to store, once they are due; none when the buffer is closed and empty."""
        while not self._is_due():
            if self._closed:
                return []
            self._changed.clear()
            await self._changed.wait()
        return self._pop_batch()

    def take_all(self) -> list[Item]:
        """Remove and return all queued items, after the event loop has ended."""
        self._closed = True
        taken: list[Item] = []
        with suppress(IndexError):
            while True:
                taken.append(self._items.popleft())
        return taken

    def close(self) -> None:
        """Accept nothing more, and make the queued items due."""
        self._closed = True
        for waiter, _ in self._line:
            if not waiter.done():
                waiter.set_result(False)
        self._line.clear()
        self._stop_timer()
        self._changed.set()

    def _is_due(self) -> bool:
        return bool(self._items) and (
            self._is_first_due
            or self._urgent > 0
            or self._closed
            or len(self._items) >= limits.INGRESS_BATCH_MAX
            or self._queued_bytes >= limits.INGRESS_BATCH_BYTES_MAX
        )

    def _pop_batch(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self._items and len(batch) < limits.INGRESS_BATCH_MAX:
            size += self._items[0].size
            if batch and size > limits.INGRESS_BATCH_BYTES_MAX:
                break
            item = self._items.popleft()
            batch.append(item)
            self._reserved -= 1
            self._bytes -= item.size
            self._queued_bytes -= item.size
            self._urgent -= item.is_urgent
        if self._items:
            self._start_timer(limits.INGRESS_FLUSH_SECONDS - self.lag_seconds)
        else:
            self._stop_timer()
            self._is_first_due = False
        self._admit()
        return batch

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._is_first_due = seconds <= 0
        self._stop_timer = _no_timer if self._is_first_due else call_after(self._clock, seconds, self._mark_due)

    def _mark_due(self) -> None:
        self._is_first_due = True
        self._changed.set()

    def _fits(self, size: int) -> bool:
        return self._reserved < self._items_max and (self._bytes + size <= self._bytes_max or not self._reserved)

    def _count(self, size: int) -> None:
        self._reserved += 1
        self._bytes += size

    def _admit(self) -> None:
        """Grant waiting reservations in order, as far as there is space."""
        while self._line:
            waiter, size = self._line[0]
            if not waiter.done():
                if not self._fits(size):
                    return
                self._count(size)
                waiter.set_result(True)
            self._line.popleft()

    def _reject(self, waiter: "asyncio.Future[bool]") -> None:
        if not waiter.done():
            waiter.set_result(False)
        self._admit()  # The next reservation may be smaller.


def _closed() -> Closed:
    return Closed("The server is shutting down; push it again with the same idempotency key in a few seconds")


def _no_timer() -> None:
    """Used when no timer is running."""
