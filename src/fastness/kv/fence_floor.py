"""The fence floor: every fence that is issued is above it, so no fence is issued twice.

    ("fastness", "fence_floor")  ->  8 bytes, big-endian

A commit that nobody waited for (`transact(..., may_lose=True)`) may be lost in a power failure, and with it the record
of the fences that it issued. So the floor is raised wherever commits may have been lost, before the next fence is
issued: when a key space is opened that was not closed, and when its data was restored, salvaged, copied or migrated. A
step is more than the fences that one message or lease can get in between. Fences stay below 2^53, which JSON numbers
keep exact, for two million steps.
"""

from typing import Final

from fastness.kv.keys import Subspace
from fastness.kv.transactions import Transaction

KEY: Final = Subspace("fastness").key("fence_floor")
STEP: Final = 1 << 32


def encode(floor: int) -> bytes:
    return floor.to_bytes(8, "big")


def decode(stored: bytes | None) -> int:
    """The floor that is stored; 0 if it was never raised."""
    return 0 if stored is None else int.from_bytes(stored, "big")


def load(tx: Transaction) -> int:
    """The floor of a key space."""
    return decode(tx.get(KEY))


def raise_floor(tx: Transaction) -> int:
    """Raise the floor by a step; returns it. Transactions that begin after the commit see it."""
    floor = load(tx) + STEP
    tx.put(KEY, encode(floor))
    return floor
