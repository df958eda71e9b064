"""The sweeper processes due entries of queues without active consumers.

Consumers process due entries when they receive, so correctness does not depend on the sweeper. But a queue without
consumers should not hide a dead letter, keep expired messages, or miss its schedule. The sweeper knows the next due
time of each queue and pauses until then: it scans all queues once, when it starts, and every commit with an earlier due
time wakes it. Where other processes write too, it also scans all queues every few seconds, and once a minute it does
the upkeep that puts do on an embedded store (`layers/queues/upkeep.py`).

Only the node on duty scans. The others process what their own commits made due before its next scan: it would find that
too late.
"""

import heapq
import math
import threading
import time
from collections.abc import Generator
from random import Random

from fastness.clock import SystemClock
from fastness.kv import Database
from fastness.layers import queues
from fastness.layers.queues import NEVER_MS, QueueKey
from fastness.limits import DUTY_CHECK_SECONDS
from fastness.runtime.background import Job, Steps
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.every import every_queue
from fastness.runtime.maintenance.skipping import run_isolated
from fastness.tiers import Tier

_TRANSACTIONS_MAX = 1_000  # Per queue, before the other queues are processed.
_UPKEEP_SECONDS = 60.0
_UPKEEP_TRANSACTIONS_MAX = 100  # Per queue and minute.


class Sweeper:
    """A job with a heap of due times."""

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
        self._scan_seconds_max = options.poll_seconds + options.poll_jitter_seconds
        self._now_ms = SystemClock().now_ms
        self._jitter = Random()
        self._lock = threading.Lock()
        self._due: list[tuple[int, QueueKey]] = []
        self._earliest: dict[QueueKey, int] = {}  # The valid heap entry of each queue; later ones are outdated.
        # Nodes that start together differ.
        self._next_upkeep = time.monotonic() + self._jitter.random() * _UPKEEP_SECONDS
        self.job = Job("the sweep of queues", self._run)

    def schedule(self, queue: QueueKey, at_ms: int) -> None:
        """Schedule a queue whose next entry is due at `at_ms`."""
        if at_ms >= self._earliest.get(queue, NEVER_MS):
            return  # What comes later is found then.
        if not self.job.is_on_duty and at_ms - self._now_ms() > self._scan_seconds_max * 1_000:
            return  # The node on duty finds it in time.
        with self._lock:
            if at_ms >= self._earliest.get(queue, NEVER_MS):
                return
            self._earliest[queue] = at_ms
            heapq.heappush(self._due, (at_ms, queue))
            is_first = self._due[0] == (at_ms, queue)
        if is_first:
            self.job.wake()

    def _run(self) -> Steps:
        next_scan = 0.0  # After an error it scans, too: a due time may be lost.
        while True:
            if time.monotonic() >= next_scan:
                is_ours = self.job.is_on_duty
                next_scan = time.monotonic() + (self._full_scan_interval() if is_ours else DUTY_CHECK_SECONDS)
                if is_ours:
                    yield from self._scan()
            while (queue := self._take_due()) is not None:
                yield from self._sweep_guarded(queue)
            pause_seconds = next_scan - time.monotonic()
            with self._lock:
                if self._due:
                    pause_seconds = min(pause_seconds, (self._due[0][0] - self._now_ms()) / 1_000)
            if pause_seconds > 0:
                yield None if pause_seconds == math.inf else pause_seconds

    def _full_scan_interval(self) -> float:
        if not self._shared:
            return math.inf
        return self._options.poll_seconds + self._jitter.random() * self._options.poll_jitter_seconds

    def _scan(self) -> Steps:
        with_upkeep = self._shared and time.monotonic() >= self._next_upkeep
        if with_upkeep:
            self._next_upkeep = time.monotonic() + _UPKEEP_SECONDS
        for queue in every_queue(self._database):
            yield from self._sweep_guarded(queue, with_upkeep=with_upkeep)
            yield 0.0

    def _take_due(self) -> QueueKey | None:
        """The next queue with a due entry."""
        with self._lock:
            while self._due:
                at_ms, queue = self._due[0]
                if self._earliest.get(queue) == at_ms:
                    if at_ms > self._now_ms():
                        return None
                    del self._earliest[queue]  # Before its sweep reads: what is committed later is scheduled again.
                    heapq.heappop(self._due)
                    return queue
                heapq.heappop(self._due)
            return None

    def _sweep_guarded(self, queue: QueueKey, *, with_upkeep: bool = False) -> Generator[float, None, None]:
        """Sweep a queue. After an unexpected error it is retried soon, and the other queues continue."""
        failure = f"unexpected error while sweeping queue {'/'.join(queue)}; continuing with the others"
        steps = self._sweep(queue, with_upkeep=with_upkeep)
        seconds = yield from run_isolated(self._database, queue.universe, "the sweep of a queue", failure, steps)
        if seconds is not None:
            self.schedule(queue, self._now_ms() + round(seconds * 1_000))

    def _sweep(self, queue: QueueKey, *, with_upkeep: bool) -> Generator[float, None, None]:
        """Process everything that is due in a queue, a bounded number per transaction."""
        in_ms = 0
        for _ in range(_TRANSACTIONS_MAX):
            in_ms = self._database.read(queues.due_in, queue)
            if in_ms > 0:
                break
            self._database.transact(queues.sweep, queue)
            yield 0.0
        # By the database's clock, which may differ from this one.
        self.schedule(queue, self._now_ms() + max(in_ms, 0))
        if with_upkeep:
            yield from self._run_upkeep(queue)

    def _run_upkeep(self, queue: QueueKey) -> Generator[float, None, None]:
        """Fold the counters of a queue and delete what has expired, a bounded number per transaction."""
        for _ in range(_UPKEEP_TRANSACTIONS_MAX):
            if not self._database.read(queues.needs_upkeep, queue):
                return
            self._database.transact(queues.run_upkeep, queue, tier=Tier.IMPORTANT)
            yield 0.0
