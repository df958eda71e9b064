"""The sweeper: attends to what is due in queues that nobody looks at.

Consumers attend to what is due when they look, so nothing depends on this. But a queue without consumers should not
hide a dead letter, keep what has outlived its time, or miss its schedule. The sweeper knows when each queue has
something due next and sleeps until then: it looks at all queues once, when it starts, and is told by every commit that
makes it earlier. Where other processes write too, it also looks at all of them every few seconds.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from holdfast.clock import SystemClock
from holdfast.errors import Backend, Busy, Closed, HoldfastError
from holdfast.kv import Database
from holdfast.layers import queues, worlds
from holdfast.layers.queues import NEVER_MS, QueueKey
from holdfast.runtime.consumer_options import ConsumerOptions

_log = logging.getLogger("holdfast.sweeper")
_PAGE = 100
_ROUNDS_MAX = 1_000  # A queue with more than that due waits for its next turn behind the others.
_RETRY_SECONDS = 1.0

Publish = Callable[[list[tuple[Any, ...]]], None]


class Sweeper:
    """A thread with a heap of moments."""

    def __init__(self, database: Database, waits: ConsumerOptions, publish: Publish, *, shared: bool) -> None:
        self._database = database
        self._waits = waits
        self._publish = publish
        self._shared = shared
        self._now_ms = SystemClock().now_ms
        self._jitter = Random()
        self._lock = threading.Condition()
        self._due: list[tuple[int, QueueKey]] = []
        self._earliest: dict[QueueKey, int] = {}  # What of a queue is in the heap; later entries are leftovers.
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="holdfast-sweeper", daemon=True)
        self._thread.start()

    def expect(self, queue: QueueKey, at_ms: int) -> None:
        """Something is due in a queue at that moment."""
        with self._lock:
            if at_ms < self._earliest.get(queue, NEVER_MS):
                self._earliest[queue] = at_ms
                heapq.heappush(self._due, (at_ms, queue))
                if self._due[0] == (at_ms, queue):
                    self._lock.notify()

    def stop(self) -> None:
        """Finish the queue at hand, then end."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        look_at_all = 0.0
        while not self._stopping:
            try:
                if time.monotonic() >= look_at_all:
                    look_at_all = time.monotonic() + self._until_next_look()
                    for queue in self._queues():
                        self._attend(queue)
                queue_due = self._next(look_at_all)
                if queue_due is not None:
                    self._attend(queue_due)
            except Closed:
                return
            except HoldfastError as error:
                _log.warning("queues could not be swept, and will be soon: %s", error)
                look_at_all = time.monotonic() + _RETRY_SECONDS
            except Exception:
                _log.exception("queues could not be swept, and will be soon")
                look_at_all = time.monotonic() + _RETRY_SECONDS

    def _until_next_look(self) -> float:
        if not self._shared:
            return threading.TIMEOUT_MAX / 2
        return self._waits.poll_seconds + self._jitter.random() * self._waits.poll_jitter_seconds

    def _next(self, look_at_all: float) -> QueueKey | None:
        """The next queue that has something due, once it is; None if it is time for something else."""
        with self._lock:
            while not self._stopping:
                left = look_at_all - time.monotonic()
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

    def _attend(self, queue: QueueKey) -> None:
        """Sweep a queue. One with which something is wrong is swept again soon, and keeps no other from being swept."""
        try:
            self._sweep(queue)
        except (Backend, Busy, Closed):  # It is not the queue's fault.
            raise
        except Exception:
            _log.exception("the queue %s could not be swept; the others go on", "/".join(queue))
            self.expect(queue, self._now_ms() + round(_RETRY_SECONDS * 1_000))

    def _sweep(self, queue: QueueKey) -> None:
        """Attend to everything that is due in a queue, a bounded number a transaction."""
        for _ in range(_ROUNDS_MAX):
            if self._stopping:
                return
            in_ms = self._database.read(queues.due_in, queue)  # By the database's clock, which may not be this one.
            if in_ms > 0:
                self.expect(queue, self._now_ms() + in_ms)
                return
            self._publish(self._database.transact(queues.process_due_and_collect, queue))
        self.expect(queue, self._now_ms())

    def _queues(self) -> Iterator[QueueKey]:
        universe = ""
        while found := self._database.read(worlds.universes, after=universe, limit=1):
            universe, name = found[0], ""
            while names := self._database.read(queues.names, universe, after=name, limit=_PAGE):
                name = names[-1]
                yield from (QueueKey(universe, each) for each in names)
