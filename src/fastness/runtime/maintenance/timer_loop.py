"""The firing of timers moves those that are due into the inboxes of their worlds.

    look for the first timer of each universe ──► due: fire it, a bounded number per transaction
          ▲                                  └──► not due: pause until it is, or until a timer is set ─┐
          └────────────────────────────────────────────────────────────────────────────────────────────┘

A commit that sets a timer wakes the job. Where several nodes share a key space, the one on duty fires the timers of
all: notifications wake it, and it looks again every few seconds in case one is lost. The other nodes only fire what is
late by more than a few seconds, because the node on duty may be stopped. Each timer fires once, by the transaction that
removes it, so two nodes at once are harmless.
"""

import logging
import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from random import Random
from typing import Final

from fastness.errors import Backend, Busy, Closed
from fastness.kv import Database, Transaction
from fastness.layers import timer_firing, timers
from fastness.layers.timers import DueTimer
from fastness.limits import DUTY_CHECK_SECONDS, TIMER_BATCH, TIMER_LATE_SECONDS
from fastness.runtime.background import Job, Steps
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.every import every_universe
from fastness.runtime.maintenance.skipping import RETRY_SECONDS, SKIPPED_SECONDS, skip_undecryptable
from fastness.tiers import Tier

_log = logging.getLogger("fastness.timers")
_BATCHES_MAX: Final = 100  # Of a universe, before the others are looked at.
_NS_PER_MS: Final = 1_000_000


class TimerFiring:
    """A job that pauses until the next timer of any universe is due."""

    def __init__(
        self,
        database: Database,
        options: ConsumerOptions,
        *,
        shared: bool,
    ) -> None:
        self._database = database
        self._options = options
        self._shared = shared
        self._jitter = Random()
        self._universes: frozenset[str] = frozenset()
        self._has_new_universe = False  # A timer was set in a universe that the job may not know.
        self._next_late_look = 0.0
        self.job = Job("the firing of timers", self._run, thread="timers", follows_clock=True)

    def note_set(self, universe: str) -> None:
        """A commit of this process has set a timer."""
        if universe not in self._universes:
            self._has_new_universe = True
        self.job.wake()

    def _run(self) -> Steps:
        while True:
            self._universes, self._has_new_universe = frozenset(), False
            universes = list(every_universe(self._database))
            self._universes = frozenset(universes)
            with ExitStack() as stack:
                watch = None
                if self._shared:  # Other processes set timers, too.
                    prefixes = [timers.watch_prefix(each) for each in universes] or [timers.watch_prefix("")]
                    watch = stack.enter_context(self._database.watch(*prefixes, additions=True))
                    watch.on_fire = self.job.wake
                look_again = time.monotonic() + self._scan_seconds()
                while not self._has_new_universe and (left_seconds := look_again - time.monotonic()) > 0:
                    if watch is not None:
                        watch.wait(0)
                    pause_seconds = yield from self._fire_due(universes)
                    if pause_seconds is not None:
                        left_seconds = min(left_seconds, pause_seconds)
                    yield None if left_seconds == math.inf else left_seconds

    def _fire_due(self, universes: Sequence[str]) -> Generator[float, None, float | None]:
        """Fire what is due; the seconds until the next timer is, or None if there is none."""
        if not self.job.is_on_duty:
            if time.monotonic() >= self._next_late_look:
                self._next_late_look = time.monotonic() + TIMER_LATE_SECONDS
                for each in universes:
                    yield from self._fire_guarded(each, late_ms=TIMER_LATE_SECONDS * 1_000)
            return DUTY_CHECK_SECONDS
        next_ms = None
        for each in universes:
            in_ms = yield from self._fire_guarded(each)
            if in_ms is not None:
                next_ms = in_ms if next_ms is None else min(next_ms, in_ms)
        return None if next_ms is None else next_ms / 1_000

    def _fire_guarded(self, universe: str, late_ms: int = 0) -> Generator[float, None, int | None]:
        """Fire what is due in a universe, like `_fire_universe`. If a value cannot be decrypted, look again later."""
        with skip_undecryptable(self._database, universe, "the firing of timers"):
            return (yield from self._fire_universe(universe, late_ms))
        return round(SKIPPED_SECONDS * 1_000)

    def _fire_universe(self, universe: str, late_ms: int = 0) -> Generator[float, None, int | None]:
        """Fire what is due in a universe; in how many milliseconds the next timer is, if there is one."""
        after: DueTimer | None = None
        for _ in range(_BATCHES_MAX):
            due, in_ms = self._database.read(_look, universe, late_ms, after, tier=Tier.IMPORTANT)
            if not due:
                return in_ms if after is None else round(RETRY_SECONDS * 1_000)
            if not self._fire(universe, due):
                after = due[-1]
            yield 0.0
        return 0

    def _fire(self, universe: str, due: Sequence[DueTimer]) -> bool:
        """Fire timers; whether all of them are gone now. One that cannot be fired does not stop the others."""
        try:
            self._database.transact(timer_firing.fire, universe, due)
        except (Backend, Busy, Closed):  # Not specific to a timer.
            raise
        except Exception:
            if len(due) == 1:
                _log.exception("a timer of %s cannot be fired; retrying soon", "/".join((universe, due[0].world)))
                return False
            are_gone = [self._fire(universe, [each]) for each in due]
            return all(are_gone)
        return True

    def _scan_seconds(self) -> float:
        """How long it follows the same universes. Embedded, every commit that sets a timer is noted."""
        if not self._shared:
            return math.inf
        return self._options.poll_seconds + self._jitter.random() * self._options.poll_jitter_seconds


def _look(tx: Transaction, universe: str, late_ms: int, after: DueTimer | None) -> tuple[list[DueTimer], int | None]:
    """The next timers that are due since `late_ms`, or in how many milliseconds the next one is."""
    now_ns = tx.now_ms * _NS_PER_MS
    due = timers.due(tx, universe, until_ns=now_ns - late_ms * _NS_PER_MS, limit=TIMER_BATCH, after=after)
    if due:
        return due, None
    next_ns = timers.next_due_ns(tx, universe)
    return [], None if next_ns is None else max(-((now_ns - next_ns) // _NS_PER_MS), 0)
