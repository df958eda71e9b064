"""Statistics of the locks that processes share: what the callers of this process have acquired and waited for."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from fastness.errors import LockOrderViolation, LockTimeout
from fastness.lock_rules import DATA_LEVELS, Step
from fastness.runtime.locks.registry import Counters
from fastness.wire.locks import LevelStats

OnWait = Callable[[str, float], None]  # Receives the level and the duration of each acquire that may wait.


class LockCounters:
    """Counts by universe and level. Many threads and tasks may use it."""

    def __init__(self) -> None:
        self.on_wait: OnWait | None = None
        self._universes: dict[str, list[Counters]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def acquiring(self, universe: str, steps: Sequence[Step], *, may_wait: bool) -> Iterator["Acquisition"]:
        """Count an acquire of `steps` with its outcome. The caller reports the locks that it waits for."""
        acquisition = Acquisition(self._of(universe), self._lock)
        began = monotonic()
        try:
            yield acquisition
        except LockTimeout:
            acquisition.end(granted=False)
            acquisition.count_timeout()
            raise
        except LockOrderViolation:
            with self._lock:
                self._of(universe)[steps[-1][0][0]].violations += 1
            raise
        except BaseException:
            acquisition.end(granted=False)
            raise
        else:
            acquisition.end(granted=True)
            acquisition.count_granted(steps)
        finally:
            if may_wait and self.on_wait is not None:
                self.on_wait(DATA_LEVELS[steps[-1][0][0]], monotonic() - began)

    def stats(self, universe: str, holders: Sequence[int]) -> dict[str, LevelStats]:
        """The statistics of each level, by its name. `holders` are counted by the caller."""
        with self._lock:
            counters = self._of(universe)
            return {name: counters[level].snapshot(holders[level]) for level, name in enumerate(DATA_LEVELS)}

    def _of(self, universe: str) -> list[Counters]:
        return self._universes.setdefault(universe, [Counters() for _ in DATA_LEVELS])


class Acquisition:
    """One acquire, and the level of the lock that it waits for."""

    def __init__(self, counters: list[Counters], lock: threading.Lock) -> None:
        self._counters = counters
        self._lock = lock
        self._refused = 0  # The level of the lock that was in the way last.
        self._level: int | None = None
        self._since = 0.0

    def refuse(self, level: int) -> None:
        """A lock of this level is in the way."""
        self._refused = level

    def wait(self, level: int) -> None:
        """It waits for a lock of this level from now on, if it has not before."""
        self._refused = level
        if level == self._level:
            return
        self.end(granted=True)
        with self._lock:
            self._level, self._since = level, monotonic()
            self._counters[level].waits += 1
            self._counters[level].waiting += 1

    def end(self, *, granted: bool) -> None:
        """It no longer waits."""
        if self._level is None:
            return
        seconds = monotonic() - self._since
        with self._lock:
            counters = self._counters[self._level]
            counters.waiting -= 1
            counters.unserved += not granted
            counters.wait_seconds_total += seconds
            counters.wait_seconds_max = max(counters.wait_seconds_max, seconds)
        self._level = None

    def count_timeout(self) -> None:
        with self._lock:
            self._counters[self._refused].timeouts += 1

    def count_granted(self, steps: Sequence[Step]) -> None:
        with self._lock:
            for (level, _), _, requested in steps:
                if requested:
                    self._counters[level].acquisitions += 1
                else:
                    self._counters[level].intents += 1
