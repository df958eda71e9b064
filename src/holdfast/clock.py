"""Time and identity, injected so that every layer runs under a simulated clock and replays from a seed."""

import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Final, Protocol

_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
_GROWING_BITS: Final = 62  # Those behind the variant.


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
    """How much time passes. What it says means nothing outside of the process, and is never set back or forward."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def when_moved(clock: Clock | None, wake: Callable[[], object]) -> Callable[[], object]:
    """Have `wake` called whenever somebody moves the clock by hand, until the function that this returns is called.

    A wall clock only passes, which timeouts see for themselves; one that a test moves tells whoever waits for it.
    """
    subscribe: Callable[[Callable[[], object]], Callable[[], object]] | None = getattr(clock, "subscribe", None)
    return subscribe(wake) if subscribe is not None else _nothing


def _nothing() -> None:
    """There was nothing to end."""


class IdSource:
    """Makes UUIDv7s that strictly grow within a process, even when the clock stands still or goes back.

    Of the 74 bits after the timestamp 73 are random for the first id of a millisecond, and each further one is larger
    by a random step: so ids of one process sort in the order they were made, and ids of two processes do not collide.
    """

    def __init__(self, seed: int | None = None) -> None:
        # Ids must differ, not be secret: one look at the system's randomness is enough, and each further one dear.
        self._random = random.Random(os.urandom(32) if seed is None else seed)
        self._lock = threading.Lock()
        self._last_ms = 0  # A clock that stands before 1970 counts as if it stood there.
        self._last = 0
        self._left = 0  # By how much ids can still grow within the millisecond.

    def new_id(self, now_ms: int) -> uuid.UUID:
        return uuid.UUID(int=self.new_number(now_ms))

    def new_number(self, now_ms: int) -> int:
        """The same as a number, for whoever has no use for the object."""
        return self.new_numbers(now_ms, 1)[0]

    def new_numbers(self, now_ms: int, count: int) -> list[int]:
        """As many of them, each larger than the one before it."""
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
                    # The top bit of what grows starts clear, which leaves room to grow within the millisecond.
                    low = getrandbits(_GROWING_BITS - 1)
                    number = stamp << 80 | _VERSION_7 | getrandbits(12) << 64 | _VARIANT | low
                    left = (1 << _GROWING_BITS) - 1 - low
                numbers.append(number)
            self._last_ms, self._last, self._left = stamp, number, left
        return numbers
