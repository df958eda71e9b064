"""Clocks and id generation, injected so that tests can simulate time and replay a random seed."""

import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from fastness.limits import CLOCK_CHECK_SECONDS, CLOCK_SLEW_PPM_MAX, CLOCK_STEP_SECONDS_LOGGED

_log = logging.getLogger("fastness.clock")

_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
_COUNTER_BITS: Final = 62  # The bits after the variant.
_SECOND_NS: Final = 1_000_000_000
_CHECK_NS: Final = CLOCK_CHECK_SECONDS * _SECOND_NS


class Clock(Protocol):
    """Where a transaction's `now_ms` comes from."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The time of this process: the wall clock at its start, plus the time that has passed since then.

    It never goes back, and does not jump when the machine's clock is set. So a lease lasts its TTL, and a wait is as
    long as it should be. A difference to the wall clock is made up for by running at most 0.1 % faster or slower. The
    time while the machine is suspended counts. All instances of a process agree, unless they have clocks of their own.
    """

    def __init__(
        self, *, wall_ns: Callable[[], int] | None = None, elapsed_ns: Callable[[], int] | None = None
    ) -> None:
        """`wall_ns` and `elapsed_ns` replace the clocks of the operating system, for tests."""
        own = wall_ns is not None or elapsed_ns is not None
        self._time = _SteadyTime(wall_ns or time.time_ns, elapsed_ns or _elapsed_ns) if own else _PROCESS_TIME

    def now_ms(self) -> int:
        return self._time.now_ms()


class _Line(NamedTuple):
    """The time as a function of the elapsed time: `start_ns` at `since_ns`, then `ppm` faster than it passes.

    It is as fast as time passes after one interval, since a process may not ask for the time for hours.
    """

    since_ns: int
    start_ns: int
    ppm: int

    def at(self, elapsed_ns: int) -> int:
        passed_ns = elapsed_ns - self.since_ns
        return self.start_ns + passed_ns + min(passed_ns, _CHECK_NS) * self.ppm // 1_000_000


class _SteadyTime:
    """Follows a wall clock at a bounded rate.

    The time is a series of lines. Each starts where the one before it ends and increases, so the time cannot go back.
    """

    def __init__(self, wall_ns: Callable[[], int], elapsed_ns: Callable[[], int]) -> None:
        self._wall_ns = wall_ns
        self._elapsed_ns = elapsed_ns
        self._adjusting = threading.Lock()
        self._behind_ns = 0  # How far the wall clock was ahead at the last adjustment.
        elapsed, wall = self._read_both()
        self._line = _Line(elapsed, wall, 0)

    def now_ms(self) -> int:
        elapsed = self._elapsed_ns()
        since_ns, start_ns, ppm = self._line
        passed_ns = elapsed - since_ns
        if passed_ns < _CHECK_NS:  # `_Line.at`, which would cost a call in every transaction.
            return (start_ns + passed_ns + passed_ns * ppm // 1_000_000) // 1_000_000
        line = self._line
        if self._adjusting.acquire(blocking=False):
            try:
                line = self._adjust(elapsed)
            finally:
                self._adjusting.release()
        return line.at(elapsed) // 1_000_000

    def _adjust(self, elapsed: int) -> _Line:
        """Start a line that approaches the wall clock until the next adjustment."""
        old = self._line
        if elapsed <= old.since_ns:  # Another thread has just adjusted.
            return old
        read_at, wall = self._read_both()
        behind_ns = wall - old.at(read_at)
        self._log_step(behind_ns)
        wanted_ppm = round(behind_ns / (CLOCK_CHECK_SECONDS * 1_000))
        self._line = _Line(elapsed, old.at(elapsed), max(-CLOCK_SLEW_PPM_MAX, min(wanted_ppm, CLOCK_SLEW_PPM_MAX)))
        return self._line

    def _read_both(self) -> tuple[int, int]:
        """The elapsed time and the wall clock at about the same moment: the closest of three readings."""
        readings = []
        for _ in range(3):
            before, wall, after = self._elapsed_ns(), self._wall_ns(), self._elapsed_ns()
            readings.append((after - before, (before + after) // 2, wall))
        _, elapsed, wall = min(readings)
        return elapsed, wall

    def _log_step(self, behind_ns: int) -> None:
        limit_ns = CLOCK_STEP_SECONDS_LOGGED * _SECOND_NS
        if abs(behind_ns - self._behind_ns) >= limit_ns <= abs(behind_ns):
            _log.warning(
                "the clock of the machine was set: it differs from the time of this process by %+.1f s. The process "
                "approaches it by %g ms per second; restart the process to use it at once",
                behind_ns / _SECOND_NS,
                CLOCK_SLEW_PPM_MAX / 1_000,
            )
        self._behind_ns = behind_ns

    def release_after_fork(self) -> None:
        """Another thread of the parent may have been adjusting."""
        self._adjusting = threading.Lock()


# Both count the time while the machine is suspended: CLOCK_BOOTTIME on Linux, and CLOCK_MONOTONIC on macOS.
_elapsed_ns: Final = partial(time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
_PROCESS_TIME: Final = _SteadyTime(time.time_ns, _elapsed_ns)
os.register_at_fork(after_in_child=_PROCESS_TIME.release_after_fork)


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
