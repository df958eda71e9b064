"""The timer loop moves timers that are due into the inboxes of their worlds.

    look for the first timer of each universe ──► due: fire it, a bounded number per transaction
          ▲                                  └──► not due: sleep until it is, or until a timer is set ─┐
          └────────────────────────────────────────────────────────────────────────────────────────────┘

A commit that sets a timer wakes the loop. Where several nodes share a key space, the one on duty fires the timers of
all: notifications wake it, and it looks again every few seconds in case one is lost. The other nodes only fire what is
late by more than a few seconds, because the node on duty may be stopped. Each timer fires once, by the transaction that
removes it, so two loops at once are harmless.

The loop of an embedded key space ends when there are no timers, and starts with the next one that is set.
"""

import logging
import threading
import time
from collections.abc import Sequence
from random import Random
from typing import Final

from fastness.clock import Clock, on_clock_change
from fastness.errors import Backend, Busy, Closed, FastnessError
from fastness.kv import Database, Transaction, Watch
from fastness.layers import timer_firing, timers, worlds
from fastness.layers.timers import DueTimer
from fastness.limits import DUTY_CHECK_SECONDS, TIMER_BATCH, TIMER_LATE_SECONDS
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.duty import Duty
from fastness.runtime.maintenance.scan import walk
from fastness.runtime.maintenance.skipping import skip_undecryptable
from fastness.tiers import Tier

_log = logging.getLogger("fastness.timers")
_BATCHES_MAX: Final = 100  # Of a universe, before the others are looked at.
_RETRY_SECONDS: Final = 1.0
_SKIPPED_SECONDS: Final = 60.0  # Until a universe is looked at again of which a value cannot be decrypted.
_SLEEP_SECONDS_MAX: Final = 3_600.0
_NS_PER_MS: Final = 1_000_000


class TimerLoop:
    """A thread that sleeps until the next timer of any universe is due."""

    def __init__(
        self,
        database: Database,
        options: ConsumerOptions,
        *,
        shared: bool,
        clock: Clock | None = None,
        duty: Duty | None = None,
    ) -> None:
        self._database = database
        self._options = options
        self._shared = shared
        self._clock = clock
        self._duty = duty or Duty()
        self._jitter = Random()
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._was_set = False  # A timer was set since the loop looked for the next one.
        self._has_new_universe = False  # One was set in a universe that the loop may not know.
        self._stopping = threading.Event()
        self._next_late_look = 0.0
        self._thread: threading.Thread | None = None
        with self._lock:
            self._start()

    def note_set(self, universe: str) -> None:
        """A commit of this process has set a timer."""
        with self._lock:
            self._was_set = True
            if self._stopping.is_set():
                return
            if self._thread is None:
                self._start()
            elif self._watch is None or timers.watch_prefix(universe) not in self._watch.prefixes:
                self._has_new_universe = True
                if self._watch is not None:
                    self._watch.fire()

    def stop(self) -> None:
        """Finish the current transaction, then end."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
            if self._watch is not None:
                self._watch.fire()
        if thread is not None:
            thread.join()

    @property
    def is_running(self) -> bool:
        """Whether there is a thread, because there are timers or may be some."""
        return self._thread is not None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="fastness-timers", daemon=True)
        thread.start()  # It needs the lock, which the caller has, before it can end.
        self._thread = thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._lock:
                    self._has_new_universe = False
                universes = list(walk(self._database, worlds.universes))
                if self._follow(universes) or not self._end():
                    continue
                return
            except Closed:
                return
            except FastnessError as error:
                _log.warning("timers could not be fired; retrying soon: %s", error)
                self._stopping.wait(_RETRY_SECONDS)
            except Exception:
                _log.exception("unexpected error while firing timers; retrying soon")
                self._stopping.wait(_RETRY_SECONDS)

    def _end(self) -> bool:
        """End the thread, unless a timer was set since it looked."""
        with self._lock:
            if self._was_set and not self._stopping.is_set():
                return False
            self._thread = None
            return True

    def _follow(self, universes: Sequence[str]) -> bool:
        """Fire the timers of these universes until there may be others; False if there are none to wait for."""
        prefixes = [timers.watch_prefix(each) for each in universes] or [timers.watch_prefix("")]
        with self._database.watch(*prefixes, additions=True) as watch:
            stop_listening = on_clock_change(self._clock, watch.fire)
            with self._lock:
                self._watch = watch
            try:
                look_again = time.monotonic() + self._scan_seconds()
                while not self._stopping.is_set() and not self._has_new_universe:
                    with self._lock:
                        self._was_set = False
                    pause_seconds = self._fire_due(universes)
                    left = look_again - time.monotonic()
                    if left <= 0 or (pause_seconds is None and not self._shared):
                        return pause_seconds is not None or self._shared
                    watch.wait(left if pause_seconds is None else min(left, pause_seconds))
                return True
            finally:
                with self._lock:
                    self._watch = None
                stop_listening()

    def _fire_due(self, universes: Sequence[str]) -> float | None:
        """Fire what is due; the seconds until the next timer is, or None if there is none."""
        if not self._duty.is_ours():
            if time.monotonic() >= self._next_late_look:
                self._next_late_look = time.monotonic() + TIMER_LATE_SECONDS
                for each in universes:
                    self._fire_guarded(each, late_ms=TIMER_LATE_SECONDS * 1_000)
            return DUTY_CHECK_SECONDS
        pauses_ms = [in_ms for each in universes if (in_ms := self._fire_guarded(each)) is not None]
        return min(pauses_ms) / 1_000 if pauses_ms else None

    def _fire_guarded(self, universe: str, late_ms: int = 0) -> int | None:
        """Fire what is due in a universe, like `_fire_universe`. If a value cannot be decrypted, look again later."""
        with skip_undecryptable(self._database, universe, "the firing of timers"):
            return self._fire_universe(universe, late_ms)
        return round(_SKIPPED_SECONDS * 1_000)

    def _fire_universe(self, universe: str, late_ms: int = 0) -> int | None:
        """Fire what is due in a universe; in how many milliseconds the next timer is, if there is one."""
        after: DueTimer | None = None
        for _ in range(_BATCHES_MAX):
            if self._stopping.is_set():
                return None
            due, in_ms = self._database.read(_look, universe, late_ms, after, tier=Tier.IMPORTANT)
            if not due:
                return in_ms if after is None else round(_RETRY_SECONDS * 1_000)
            if not self._fire(universe, due):
                after = due[-1]
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
            return _SLEEP_SECONDS_MAX
        return self._options.poll_seconds + self._jitter.random() * self._options.poll_jitter_seconds


def _look(tx: Transaction, universe: str, late_ms: int, after: DueTimer | None) -> tuple[list[DueTimer], int | None]:
    """The next timers that are due since `late_ms`, or in how many milliseconds the next one is."""
    now_ns = tx.now_ms * _NS_PER_MS
    due = timers.due(tx, universe, until_ns=now_ns - late_ms * _NS_PER_MS, limit=TIMER_BATCH, after=after)
    if due:
        return due, None
    next_ns = timers.next_due_ns(tx, universe)
    return [], None if next_ns is None else max(-((now_ns - next_ns) // _NS_PER_MS), 0)
