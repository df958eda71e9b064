"""Clocks and id generation, injected so that tests can simulate time and replay a random seed."""

import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Final, Protocol

_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
_COUNTER_BITS: Final = 62  # The bits after the variant.


class Clock(Protocol):
    """Where a transaction's `now_ms` comes from."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class MonotonicClock:
    """A clock for durations. Its values mean nothing outside the process, and clock changes do not affect it."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def on_clock_change(clock: Clock | None, wake: Callable[[], object]) -> Callable[[], object]:
    """Call `wake` whenever a test moves the clock. Returns a function that ends the subscription.

    Timeouts follow a wall clock by themselves. A clock that tests move has a `subscribe` method instead.
    """
    subscribe: Callable[[Callable[[], object]], Callable[[], object]] | None = getattr(clock, "subscribe", None)
    return subscribe(wake) if subscribe is not None else _no_op


def _no_op() -> None:
    """Does nothing: there is no subscription to end."""


class IdSource:
    """Generates UUIDv7s that strictly increase within a process, even when the clock stops or goes back.

    73 of the 74 bits after the timestamp are random for the first id of a millisecond. Each further id is larger by a
    random step. So ids of one process sort in creation order, and ids of two processes do not collide.
    """

    def __init__(self, seed: int | None = None) -> None:
        # Ids must be unique, not secret: seeding once from the system is enough, and os.urandom is slow.
        self._random = random.Random(os.urandom(32) if seed is None else seed)
        self._lock = threading.Lock()
        self._last_ms = 0  # Times before 1970 count as 1970.
        self._last = 0
        self._left = 0  # How far ids can still increase within the millisecond.

    def new_id(self, now_ms: int) -> uuid.UUID:
        return uuid.UUID(int=self.new_number(now_ms))

    def new_number(self, now_ms: int) -> int:
        """`new_id` as an integer."""
        return self.new_numbers(now_ms, 1)[0]

    def new_numbers(self, now_ms: int, count: int) -> list[int]:
        """`count` ids as integers, each larger than the one before it."""
        numbers = []
        getrandbits = self._random.getrandbits
        with self._lock:
            stamp, number, left = self._last_ms, self._last, self._left
            for _ in range(count):
                step = 1 + getrandbits(32)
                if now_ms <= stamp and step <= left:
                    number += step
                    left -= step
                else:
                    stamp = max(now_ms, stamp + 1)
                    # The top bit starts clear, which leaves space for larger ids within the millisecond.
                    low = getrandbits(_COUNTER_BITS - 1)
                    number = stamp << 80 | _VERSION_7 | getrandbits(12) << 64 | _VARIANT | low
                    left = (1 << _COUNTER_BITS) - 1 - low
                numbers.append(number)
            self._last_ms, self._last, self._left = stamp, number, left
        return numbers
