"""The key space in memory: the readable reference for the other backends, and the default in tests.

Nothing survives the process, so there is no durability to wait for. A sorted list of keys is kept beside a plain
dictionary. A read snapshot shares both; the next commit copies them first.
"""

import threading
from bisect import bisect_left, insort

from fastness.clock import Clock, IdSource, SystemClock
from fastness.kv import Pair, Transaction
from fastness.kv.serial_database import SerialDatabase
from fastness.tiers import Tier


class Pairs:
    """A sorted map from bytes to bytes."""

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        self._values = {} if values is None else dict(values)
        self._keys = sorted(self._values)

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        first, last = bisect_left(self._keys, begin), bisect_left(self._keys, end)
        keys = (
            self._keys[max(first, last - limit) : last][::-1]
            if reverse
            else self._keys[first : min(last, first + limit)]
        )
        return [(key, self._values[key]) for key in keys]

    def apply(self, tx: Transaction) -> None:
        for begin, end in tx.cleared:
            first, last = bisect_left(self._keys, begin), bisect_left(self._keys, end)
            for key in self._keys[first:last]:
                del self._values[key]
            del self._keys[first:last]
        for key, value in tx.writes.items():
            if value is not None:
                if key not in self._values:
                    insort(self._keys, key)
                self._values[key] = value
            elif key in self._values:
                del self._values[key]
                del self._keys[bisect_left(self._keys, key)]

    def copy(self) -> "Pairs":
        return Pairs(self._values)


class MemoryDatabase(SerialDatabase):
    """A key space that lives as long as this object."""

    def __init__(self, *, clock: Clock | None = None, ids: IdSource | None = None) -> None:
        super().__init__(clock or SystemClock(), ids or IdSource())
        self._current: Pairs = Pairs()
        self._shared = False  # Whether a snapshot may still read `_current`.
        self._share_lock = threading.Lock()  # Held briefly; the write lock is held for as long as a `work` runs.
        self._commits = 0

    def _snapshot(self) -> Pairs:
        with self._share_lock:
            self._shared = True
            return self._current

    def _commit(self, tx: Transaction) -> None:
        with self._share_lock:
            if self._shared:
                self._current, self._shared = self._current.copy(), False
            self._current.apply(tx)
            self._commits += 1

    def _last_commit(self) -> int:
        return self._commits

    def _wait_durable(self, commit: int, tier: Tier) -> None:
        """Nothing survives the process, so there is nothing to wait for."""

    def _wait_durable_async(self, commit: int, tier: Tier) -> None:
        """Nothing survives the process, so there is nothing to wait for."""

    def _release(self) -> None:
        self._current = Pairs()
