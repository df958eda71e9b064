"""Waiting for a commit: a caller reads, and reads again when what it found may have changed.

    open a watch ──► read ──► found, or the wait is over ──► return
                      ▲  └──► pause ─┐
                      └──────────────┘

A pause ends with a commit below the watched prefixes, when a test moves the clock, and when a poll or the next due time
is reached. The watch is open before the first read, so a commit between a read and a pause is not missed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastness.clock import Clock, SystemClock, on_clock_change
from fastness.kv import Database, Watch
from fastness.runtime.consumer_options import ConsumerOptions, Polling


class AsyncCommitWait:
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

    async def pause(self, most_ms: int | None = None) -> None:
        """Return when it is time to read again: after `most_ms` at the latest, or when the wait is over."""
        left_ms = self.until_ms - self._clock.now_ms()
        pause_ms = left_ms if most_ms is None else min(left_ms, most_ms)
        await self._watch.wait_async(self._polling.pause_ms(max(pause_ms, 1)) / 1_000)


class AsyncCommitWaits:
    """Waits for the commits of a database."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._polling = Polling(database, options)
        self.now_ms = self._clock.now_ms

    @contextmanager
    def open(self, *prefixes: bytes, until_ms: int, additions: bool = False) -> Iterator[AsyncCommitWait]:
        """Wait for commits below these prefixes; with `additions`, for those that add something."""
        with self._database.watch(*prefixes, additions=additions) as watch, self.join(watch, until_ms=until_ms) as wait:
            yield wait

    @contextmanager
    def join(self, watch: Watch, *, until_ms: int) -> Iterator[AsyncCommitWait]:
        """Wait for a watch that several callers share."""
        stop_listening = on_clock_change(self._clock, watch.fire)
        try:
            yield AsyncCommitWait(watch, self._clock, self._polling, until_ms)
        finally:
            stop_listening()
