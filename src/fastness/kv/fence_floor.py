"""Fences, and the floor that all of them are above: no fence is issued twice.

    ("fastness", "fence_floor")  ->  8 bytes, big-endian

`next_fence` issues every fence: of a delivery, a lease, a lock, an effect, a world. It is above the last one that the
data knows, and above the floor, which is raised wherever the data may not know the last one:

    lost commits   a key space is opened that was not closed: the last commits may be lost with the power, also one that
                   no caller waited for (`transact(..., may_lose=True)`). The floor rises by a step, which is more than
                   one message or lease can get between two syncs.
    older data     it was restored, salvaged, copied or migrated, and the original may have gone on for long: it may
                   have issued fences and raised its own floor since, and the same backup may be restored again. So the
                   floor is a time: it rises by 2^20 a second, faster than fences are issued and databases are opened
                   again. One that is set wrong by an hour does no harm.

Fences stay below 2^53, which JSON numbers keep exact, until the year 2304.
"""

from typing import Final

from fastness.kv.keys import Subspace, prefix_range
from fastness.kv.transactions import Transaction

KEY: Final = Subspace("fastness").key("fence_floor")
STEP: Final = 1 << 16
COPY_STEP: Final = 1 << 32  # An hour and ten minutes of time.
BEGIN_MS: Final = 1_767_225_600_000  # The first moment of 2026: the floor of that time is 0.
_PER_MS: Final = 1 << 10


def next_fence(tx: Transaction, *last: int) -> int:
    """A new fence: above the last ones, and above the floor. Nothing else issues fences."""
    return max(tx.fence_floor, *last) + 1


def encode(floor: int) -> bytes:
    return floor.to_bytes(8, "big")


def decode(stored: bytes | None) -> int:
    """The floor that is stored; 0 if it was never raised."""
    return 0 if stored is None else int.from_bytes(stored, "big")


def load(tx: Transaction) -> int:
    """The floor of a key space."""
    return decode(tx.get(KEY))


def floor_of_copy(floor: int, now_ms: int) -> int:
    """The floor of data that is older than what was issued from it; `floor` is its own."""
    return max(floor + STEP, max(now_ms - BEGIN_MS, 0) * _PER_MS + COPY_STEP)


def raise_floor(tx: Transaction) -> int:
    """Raise the floor because commits may be lost; returns it. Transactions that begin after the commit see it."""
    return _store(tx, load(tx) + STEP)


def raise_for_copy(tx: Transaction) -> int:
    """Raise the floor because the data is older than what was issued from it; returns it, as `raise_floor`."""
    tx.scan(*prefix_range(b""), limit=1)  # Locks the whole key space, where several processes issue fences.
    return _store(tx, floor_of_copy(load(tx), tx.now_ms))


def _store(tx: Transaction, floor: int) -> int:
    tx.put(KEY, encode(floor))
    return floor
