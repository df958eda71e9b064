"""The consumers of a plane that wait for messages: how many, how many may, and what those of one queue know of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastness.errors import QueueBusy
from fastness.kv import Database, Watch
from fastness.layers.queues import Leased, QueueKey, keys_of


class WaitingConsumers:
    """Counts the waiting consumers of all queues together, and refuses those beyond the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.refused = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count one more waiting consumer until the end of the `with` block.

        Raises:
            QueueBusy: `limit` consumers are waiting.
        """
        with self._lock:
            if self.count >= self.limit:
                self.refused += 1
                raise QueueBusy(
                    f"{self.limit} consumers of all queues already wait; raise queue_max_consumers, or try again later"
                )
            self.count += 1
        try:
            yield
        finally:
            with self._lock:
                self.count -= 1


class SharedLine:
    """What the consumers of this process know of a queue that other processes use too, while some of them wait.

    They have one watch, and the one at the front of the line reads the queue. If it found the queue empty, those behind
    it do not read until a message may have become ready. So a put leads to one delivery in its own process, and to at
    most one attempt in every other process, however many consumers wait.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.consumers = 0
        self.version = 0  # Grows when a message may have become ready.
        self._is_empty = False  # Nothing was ready when the queue was last read, and nothing became ready since.
        self._retry_at_ms = 0

    def wait_ms(self, now_ms: int) -> int:
        """How long to wait for a change before the queue is read; 0: read it now."""
        return max(self._retry_at_ms - now_ms, 0) if self._is_empty else 0

    def note_read(self, leased: Leased, now_ms: int, version: int) -> None:
        """Note what a delivery or an attempt has found that began at a version."""
        if version == self.version and not leased.repeated:  # A repeated one has not read the queue.
            self._is_empty = not (leased.leases and leased.more)
            self._retry_at_ms = now_ms + max(leased.retry_in_ms, 1)

    def note_change(self) -> None:
        """Note that a message may have become ready, or that it is time to check."""
        self.version += 1
        self._is_empty = False


class SharedLines:
    """The lines of the queues that consumers of this process wait for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lines: dict[QueueKey, SharedLine] = {}
        self._lock = threading.Lock()

    @contextmanager
    def join(self, queue: QueueKey) -> Iterator[SharedLine]:
        """The line of a queue. It exists while a consumer has joined it."""
        with self._lock:
            line = self._lines.get(queue)
            if line is None:
                keys = keys_of(queue)
                # Leases and acks delete ready messages and change the rest of the queue, and make nothing available.
                # A lease or delay that ends is noticed by the sweeper, or by the next poll.
                line = SharedLine(self._database.watch(keys.ready, keys.policy, additions=True))
                self._lines[queue] = line
            line.consumers += 1
        try:
            yield line
        finally:
            with self._lock:
                line.consumers -= 1
                if not line.consumers:
                    del self._lines[queue]
                    line.watch.close()
