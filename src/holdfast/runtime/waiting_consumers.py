"""The consumers of a plane that wait for messages: how many, how many may, and how many were refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import QueueBusy


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
