"""The sweeper processes due entries of queues without active consumers.

Consumers process due entries when they receive, so correctness does not depend on the sweeper. But a queue without
consumers should not hide a dead letter, keep expired messages, or miss its schedule. The sweeper knows the next due
time of each queue and sleeps until then: it scans all queues once, when it starts, and every commit with an earlier due
time notifies it. Where other processes write too, it also scans all queues every few seconds, and once a minute it does
the upkeep that puts do on an embedded store (`layers/queues/upkeep.py`).

Only the node on duty scans. The others process what their own commits made due before its next scan: it would find that
too late.
"""

import heapq
import logging
import threading
import time
from collections.abc import Iterator
from random import Random

from fastness.clock import SystemClock
from fastness.errors import Backend, Busy, Closed, FastnessError
from fastness.kv import Database
from fastness.layers import queues, worlds
from fastness.layers.queues import NEVER_MS, QueueKey
from fastness.limits import DUTY_CHECK_SECONDS
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.duty import Duty
from fastness.runtime.maintenance.scan import walk
from fastness.runtime.maintenance.skipping import skip_undecryptable
from fastness.tiers import Tier

_log = logging.getLogger("fastness.sweeper")
_TRANSACTIONS_MAX = 1_000  # Per queue, before the other queues are processed.
_RETRY_SECONDS = 1.0
_SKIPPED_SECONDS = 60.0  # Until a queue is swept again of which a value cannot be decrypted.
_UPKEEP_SECONDS = 60.0
_UPKEEP_TRANSACTIONS_MAX = 100  # Per queue and minute.


class Sweeper:
    """A thread with a heap of due times."""

    def __init__(
        self,
        database: Database,
        options: ConsumerOptions,
        *,
        shared: bool,
        duty: Duty | None = None,
    ) -> None:
        self._database = database
        self._options = options
        self._shared = shared
        self._duty = duty or Duty()
        self._scan_seconds_max = options.poll_seconds + options.poll_jitter_seconds
        self._now_ms = SystemClock().now_ms
        self._jitter = Random()
        self._lock = threading.Condition()
        self._due: list[tuple[int, QueueKey]] = []
        self._earliest: dict[QueueKey, int] = {}  # The valid heap entry of each queue; later ones are outdated.
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fastness-sweeper", daemon=True)
        self._thread.start()

    def schedule(self, queue: QueueKey, at_ms: int) -> None:
        """Schedule a queue whose next entry is due at `at_ms`."""
        if not self._duty.is_ours() and at_ms - self._now_ms() > self._scan_seconds_max * 1_000:
            return  # The node on duty finds it in time.
        with self._lock:
            if at_ms < self._earliest.get(queue, NEVER_MS):
                self._earliest[queue] = at_ms
                heapq.heappush(self._due, (at_ms, queue))
                if self._due[0] == (at_ms, queue):
                    self._lock.notify()

    def stop(self) -> None:
        """Finish the current transaction, then end."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        next_full_scan = 0.0
        next_upkeep = time.monotonic() + self._jitter.random() * _UPKEEP_SECONDS  # Nodes that start together differ.
        while not self._stopping:
            try:
                if time.monotonic() >= next_full_scan:
                    is_ours = self._duty.is_ours()
                    pause_seconds = self._full_scan_interval() if is_ours else DUTY_CHECK_SECONDS
                    next_full_scan = time.monotonic() + pause_seconds
                    is_upkeep_due = is_ours and self._shared and time.monotonic() >= next_upkeep
                    if is_upkeep_due:
                        next_upkeep = time.monotonic() + _UPKEEP_SECONDS
                    for queue in self._queues() if is_ours else ():
                        self._sweep_guarded(queue, with_upkeep=is_upkeep_due)
                queue_due = self._next(next_full_scan)
                if queue_due is not None:
                    self._sweep_guarded(queue_due)
            except Closed:
                return
            except FastnessError as error:
                _log.warning("queues could not be swept; retrying soon: %s", error)
                next_full_scan = time.monotonic() + _RETRY_SECONDS
            except Exception:
                _log.exception("unexpected error while sweeping queues; retrying soon")
                next_full_scan = time.monotonic() + _RETRY_SECONDS

    def _full_scan_interval(self) -> float:
        if not self._shared:
            return threading.TIMEOUT_MAX / 2
        return self._options.poll_seconds + self._jitter.random() * self._options.poll_jitter_seconds

    def _next(self, next_full_scan: float) -> QueueKey | None:
        """The next queue with a due entry, once it is due; None when a full scan is due or the sweeper stops."""
        with self._lock:
            while not self._stopping:
                left = next_full_scan - time.monotonic()
                if left <= 0:
                    return None
                if self._due:
                    at_ms, queue = self._due[0]
                    if self._earliest.get(queue) != at_ms:
                        heapq.heappop(self._due)
                        continue
                    until_due = (at_ms - self._now_ms()) / 1_000
                    if until_due <= 0:
                        heapq.heappop(self._due)
                        del self._earliest[queue]
                        return queue
                    left = min(left, until_due)
                self._lock.wait(min(left, threading.TIMEOUT_MAX))
            return None

    def _sweep_guarded(self, queue: QueueKey, *, with_upkeep: bool = False) -> None:
        """Sweep a queue. After an unexpected error it is retried soon, and the other queues continue."""
        try:
            is_done = False
            with skip_undecryptable(self._database, queue.universe, "the sweep of a queue"):
                self._sweep(queue)
                if with_upkeep:
                    self._run_upkeep(queue)
                is_done = True
            if not is_done:
                self.schedule(queue, self._now_ms() + round(_SKIPPED_SECONDS * 1_000))
        except (Backend, Busy, Closed):  # Not specific to this queue.
            raise
        except Exception:
            _log.exception("unexpected error while sweeping queue %s; continuing with the others", "/".join(queue))
            self.schedule(queue, self._now_ms() + round(_RETRY_SECONDS * 1_000))

    def _sweep(self, queue: QueueKey) -> None:
        """Process everything that is due in a queue, a bounded number per transaction."""
        for _ in range(_TRANSACTIONS_MAX):
            if self._stopping:
                return
            in_ms = self._database.read(
                queues.due_in, queue
            )  # By the database's clock, which may differ from this one.
            if in_ms > 0:
                self.schedule(queue, self._now_ms() + in_ms)
                return
            self._database.transact(queues.sweep, queue)
        self.schedule(queue, self._now_ms())

    def _run_upkeep(self, queue: QueueKey) -> None:
        """Fold the counters of a queue and delete what has expired, a bounded number per transaction."""
        for _ in range(_UPKEEP_TRANSACTIONS_MAX):
            if self._stopping or not self._database.read(queues.needs_upkeep, queue):
                return
            self._database.transact(queues.run_upkeep, queue, tier=Tier.IMPORTANT)

    def _queues(self) -> Iterator[QueueKey]:
        for universe in walk(self._database, worlds.universes):
            for name in walk(self._database, queues.names, universe):
                yield QueueKey(universe, name)
