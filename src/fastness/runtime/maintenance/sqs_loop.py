"""The loop that does the unfinished work on SQS queues: it moves messages, and empties purged and deleted queues.

    look for work in every universe ──► a step of each that is due, one transaction each ─┐
          ▲                        ▲                                                      │
          │                        └────────── sleep until the next step is due ◄─────────┤
          └────────── a commit of this process adds work, or it is time to look ◄─────────┘

Where several nodes share a key space, the node on duty looks for work every few seconds, also for what a stopped node
has left. A node does the work that its own commits add without waiting for that. Two nodes that do the same work are
harmless: each step is a transaction that reads how far the work has come, and its rate is kept there, too.

The loop of an embedded key space ends when there is no work, and starts with the next commit that adds some.
"""

import logging
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Final

from fastness.clock import Clock, on_clock_change
from fastness.errors import Backend, Busy, Closed, FastnessError
from fastness.kv import Database, Transaction
from fastness.layers import move_tasks, queues, sqs, worlds
from fastness.layers.queues import QueueKey, Work, WorkKey
from fastness.layers.queues.work import Kind, pending
from fastness.limits import DUTY_CHECK_SECONDS
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.duty import Duty
from fastness.runtime.maintenance.scan import walk
from fastness.runtime.maintenance.skipping import skip_undecryptable
from fastness.tiers import Tier

_log = logging.getLogger("fastness.sqs")
_STEPS_MAX: Final = 100  # Of one purge, deletion or task, before the others go on.
_RETRY_SECONDS: Final = 1.0
_SKIPPED_SECONDS: Final = 60.0  # Until work is tried again of which a value cannot be decrypted.
_SLEEP_SECONDS_MAX: Final = 3_600.0

_STEPS: Final[dict[Kind, Callable[[Transaction, QueueKey, Work], int | None]]] = {
    "delete": sqs.delete_step,
    "move": move_tasks.step,
    "purge": sqs.purge_step,
}


class SqsLoop:
    """A thread that does steps of work until there is none left."""

    def __init__(
        self,
        database: Database,
        options: ConsumerOptions,
        *,
        worker: str,
        shared: bool,
        clock: Clock | None = None,
        duty: Duty | None = None,
    ) -> None:
        self._database = database
        self._options = options
        self._worker = worker
        self._shared = shared
        self._clock = clock
        self._duty = duty or Duty()
        self._jitter = Random()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_added = True  # Work may have been added since the loop looked for it.
        self._is_clock_moved = False
        self._stopping = False
        self._due: dict[WorkKey, float] = {}  # When the next step of known work is due, by the monotonic clock.
        self._next_look = 0.0
        self._thread: threading.Thread | None = None
        with self._lock:
            self._start()

    def note_added(self) -> None:
        """A commit of this process has added work, or made it due."""
        with self._lock:
            self._is_added = True
            if self._thread is None and not self._stopping:
                self._start()
        self._wake.set()

    def stop(self) -> None:
        """Finish the current step, then end."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()

    @property
    def is_running(self) -> bool:
        """Whether there is a thread, because there is work or may be some."""
        return self._thread is not None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="fastness-sqs", daemon=True)
        thread.start()  # It needs the lock, which the caller has, before it can end.
        self._thread = thread

    def _run(self) -> None:
        stop_listening = on_clock_change(self._clock, self._clock_changed)
        try:
            while not self._stopping:
                try:
                    self._look()
                    self._do_due_steps()
                    if not self._due and not self._shared and self._end():
                        return
                    self._wake.wait(self._pause_seconds())
                    self._wake.clear()
                except Closed:
                    return
                except FastnessError as error:
                    _log.warning("work on SQS queues could not be done; retrying soon: %s", error)
                    self._pause_after_failure()
                except Exception:
                    _log.exception("unexpected error in the work on SQS queues; retrying soon")
                    self._pause_after_failure()
        finally:
            stop_listening()

    def _pause_after_failure(self) -> None:
        self._is_added = True  # It looks again, because a commit may have been missed.
        self._wake.wait(_RETRY_SECONDS)
        self._wake.clear()

    def _clock_changed(self) -> None:
        """A test has moved the clock: every step may be due."""
        self._is_clock_moved = True
        self._wake.set()

    def _end(self) -> bool:
        """End the thread, unless work was added since it looked."""
        with self._lock:
            if self._is_added and not self._stopping:
                return False
            self._thread = None
            return True

    def _look(self) -> None:
        """Look for work if a commit has added some, and from time to time where others may add it."""
        with self._lock:
            is_added, self._is_added = self._is_added, False
        now = time.monotonic()
        if not is_added and not (self._shared and now >= self._next_look and self._duty.is_ours()):
            return
        if self._shared:
            jitter = self._jitter.random() * self._options.poll_jitter_seconds
            self._next_look = now + self._options.poll_seconds + jitter
        for universe in walk(self._database, worlds.universes):
            with skip_undecryptable(self._database, universe, "the search for work on SQS queues"):
                for key in self._database.read(pending, universe, tier=Tier.IMPORTANT):
                    self._due[key] = 0.0

    def _do_due_steps(self) -> None:
        now, is_moved = time.monotonic(), self._is_clock_moved
        self._is_clock_moved = False
        for key in [key for key, at in self._due.items() if at <= now or is_moved]:
            if self._stopping:
                return
            seconds = self._do_guarded(key)
            if seconds is None:
                del self._due[key]
            else:
                self._due[key] = time.monotonic() + seconds

    def _do_guarded(self, key: WorkKey) -> float | None:
        """Do what is due; in how many seconds the next step is, or None. An error does not stop other work."""
        try:
            with skip_undecryptable(self._database, key.universe, "work on an SQS queue"):
                return self._do(key)
            return _SKIPPED_SECONDS
        except (Backend, Busy, Closed):  # Not specific to this work.
            raise
        except Exception:
            _log.exception("the %s of queue %s/%s failed; retrying soon", key.kind, key.universe, key.queue)
            return _RETRY_SECONDS

    def _do(self, key: WorkKey) -> float | None:
        """Do a bounded number of steps."""
        for _ in range(_STEPS_MAX):
            in_ms = self._database.transact(queues.listed_step, key, _STEPS[key.kind], self._worker)
            if in_ms is None:
                return None
            if in_ms or self._stopping:
                return in_ms / 1_000
        return 0.0

    def _pause_seconds(self) -> float:
        now = time.monotonic()
        pause = min([at - now for at in self._due.values()], default=_SLEEP_SECONDS_MAX)
        if self._is_added:
            return 0.0
        if self._shared:
            look = self._next_look - now if self._duty.is_ours() else DUTY_CHECK_SECONDS
            pause = min(pause, look)
        return max(pause, 0.0)
