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
_COUNTER_BITS: Final = 74
_LOW_62: Final = (1 << 62) - 1


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

    The 74 bits after the timestamp start at random in each millisecond and grow by a random step, so ids
    of one process sort in the order they were made and ids of two processes do not collide.
    """

    def __init__(self, seed: int | None = None) -> None:
        # Ids must differ, not be secret: one look at the system's randomness is enough, and each further one dear.
        self._random = random.Random(os.urandom(32) if seed is None else seed)
        self._lock = threading.Lock()
        self._last_ms = 0  # A clock that stands before 1970 counts as if it stood there.
        self._counter = 0

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
            stamp, counter = self._last_ms, self._counter
            for _ in range(count):
                if now_ms > stamp:
                    stamp = now_ms
                    # The top bit starts clear, which leaves room to grow within the millisecond.
                    counter = getrandbits(_COUNTER_BITS - 1)
                else:
                    counter += 1 + getrandbits(32)
                    if counter >> _COUNTER_BITS:
                        stamp += 1
                        counter = getrandbits(_COUNTER_BITS - 1)
                numbers.append(stamp << 80 | _VERSION_7 | counter >> 62 << 64 | _VARIANT | counter & _LOW_62)
            self._last_ms, self._counter = stamp, counter
        return numbers
