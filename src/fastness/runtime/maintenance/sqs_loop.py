"""The unfinished work on SQS queues: messages are moved, and purged and deleted queues are emptied.

    look for work in every universe ──► a step of each that is due, one transaction each ─┐
          ▲                        ▲                                                      │
          │                        └────────── pause until the next step is due ◄─────────┤
          └────────── a commit of this process adds work, or it is time to look ◄─────────┘

Where several nodes share a key space, the node on duty looks for work every few seconds, also for what a stopped node
has left. A node does the work that its own commits add without waiting for that. Two nodes that do the same work are
harmless: each step is a transaction that reads how far the work has come, and its rate is kept there, too.
"""

import math
import time
from collections.abc import Callable, Generator
from random import Random
from typing import Final

from fastness.clock import Clock
from fastness.kv import Database, Transaction
from fastness.layers import move_tasks, queues, sqs
from fastness.layers.queues import QueueKey, Work, WorkKey
from fastness.layers.queues.work import Kind, pending
from fastness.limits import DUTY_CHECK_SECONDS
from fastness.runtime.background import Job, Steps
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.maintenance.every import every_universe
from fastness.runtime.maintenance.skipping import run_isolated, skip_undecryptable
from fastness.tiers import Tier

_STEPS_MAX: Final = 100  # Of one purge, deletion or task, before the others go on.

_STEPS: Final[dict[Kind, Callable[[Transaction, QueueKey, Work], int | None]]] = {
    "delete": sqs.delete_step,
    "move": move_tasks.step,
    "purge": sqs.purge_step,
}


class SqsWork:
    """A job that does steps of work until there is none left."""

    def __init__(
        self,
        database: Database,
        options: ConsumerOptions,
        *,
        worker: str,
        shared: bool,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._options = options
        self._worker = worker
        self._shared = shared
        self._has_clock = clock is not None  # When a test moves it, every step may be due.
        self._jitter = Random()
        self._is_added = True  # Work may have been added since the job looked for it.
        self.job = Job("the work on SQS queues", self._run, follows_clock=True)

    def note_added(self) -> None:
        """A commit of this process has added work, or made it due."""
        self._is_added = True
        self.job.wake()

    def _run(self) -> Steps:
        due: dict[WorkKey, float] = {}  # When the next step of known work is due, by the monotonic clock.
        self._is_added, next_look = True, 0.0
        while True:
            now = time.monotonic()
            if self._is_added or (self._shared and now >= next_look and self.job.is_on_duty):
                self._is_added = False  # Before it reads: what is added later is looked for again.
                next_look = now + self._options.poll_seconds + self._jitter.random() * self._options.poll_jitter_seconds
                for universe in every_universe(self._database):
                    with skip_undecryptable(self._database, universe, "the search for work on SQS queues"):
                        found = self._database.read(pending, universe, tier=Tier.IMPORTANT)
                        due |= dict.fromkeys(found, 0.0)
            for key in [key for key, at in due.items() if at <= now or self._has_clock]:
                failure = f"the {key.kind} of queue {key.universe}/{key.queue} failed; retrying soon"
                seconds = yield from run_isolated(
                    self._database, key.universe, "work on an SQS queue", failure, self._do(key)
                )
                if seconds is None:
                    del due[key]
                else:
                    due[key] = time.monotonic() + seconds
            next_at = min(due.values(), default=math.inf)
            if self._shared:
                next_at = min(next_at, next_look if self.job.is_on_duty else time.monotonic() + DUTY_CHECK_SECONDS)
            yield None if next_at == math.inf else max(next_at - time.monotonic(), 0.0)

    def _do(self, key: WorkKey) -> Generator[float, None, float | None]:
        """Do a bounded number of steps."""
        for _ in range(_STEPS_MAX):
            in_ms = self._database.transact(queues.listed_step, key, _STEPS[key.kind], self._worker)
            if in_ms is None:
                return None
            if in_ms:
                return in_ms / 1_000
            yield 0.0
        return 0.0
