"""Generated from runtime/commit_waits.py by tools/make_twins.py; change that file instead."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastness.clock import Clock, SystemClock, on_clock_change
from fastness.kv import Database, Watch
from fastness.runtime.consumer_options import ConsumerOptions, Polling


class CommitWait:
    """One wait, until a time of the clock."""

    __slots__ = ("_clock", "_polling", "_watch", "until_ms")

    def __init__(self, watch: Watch, clock: Clock, polling: Polling, until_ms: int) -> None:
        self._watch = watch
        self._clock = clock
        self._polling = polling
        self.until_ms = until_ms

    @property
    def is_over(self) -> bool:
        return self._clock.now_ms() >= self.until_ms

    def pause(self, most_ms: int | None = None) -> None:
        """Return when it is time to read again: after `most_ms` at the latest, or when the wait is over."""
        left_ms = self.until_ms - self._clock.now_ms()
        pause_ms = left_ms if most_ms is None else min(left_ms, most_ms)
        self._watch.wait(self._polling.pause_ms(max(pause_ms, 1)) / 1_000)


class CommitWaits:
    """Waits for the commits of a database."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._polling = Polling(database, options)
        self.now_ms = self._clock.now_ms

    @contextmanager
    def open(self, *prefixes: bytes, until_ms: int, additions: bool = False) -> Iterator[CommitWait]:
        """Wait for commits below these prefixes; with `additions`, for those that add something."""
        with self._database.watch(*prefixes, additions=additions) as watch, self.join(watch, until_ms=until_ms) as wait:
            yield wait

    @contextmanager
    def join(self, watch: Watch, *, until_ms: int) -> Iterator[CommitWait]:
        """Wait for a watch that several callers share."""
        stop_listening = on_clock_change(self._clock, watch.fire)
        try:
            yield CommitWait(watch, self._clock, self._polling, until_ms)
        finally:
            stop_listening()
