"""Calls whose effect is in no transaction: what a session log accepts in memory is remembered in memory."""

import threading

from holdfast.layers.once import Once, reused
from holdfast.limits import ONCE_RECENT_MAX


class Recent:
    """The keys of the latest calls. It is as lasting as what it guards: both are lost with the process."""

    def __init__(self, most: int = ONCE_RECENT_MAX) -> None:
        self._most = most
        self._digests: dict[bytes, bytes] = {}  # By key, the oldest first.
        self._lock = threading.Lock()

    def knows(self, call: Once) -> bool:
        """Whether a call was carried out before.

        Raises:
            IdempotencyKeyReused: what was carried out under its key is another call.
        """
        before = self._digests.get(call.name)
        if before is not None and before != call.digest:
            raise reused()
        return before is not None

    def add(self, call: Once) -> None:
        """A call was carried out. Not before: one that failed may be sent again."""
        with self._lock:
            self._digests[call.name] = call.digest
            if len(self._digests) > self._most:
                del self._digests[next(iter(self._digests))]
