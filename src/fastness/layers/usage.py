"""Measures what a universe holds."""

from fastness.kv import Subspace, Transaction
from fastness.layers import blobs, segments
from fastness.layers.queues.counters import total_counters
from fastness.layers.queues.keys import QueueKey, keys_of, queues
from fastness.layers.worlds import first_elements
from fastness.limits import READ_ENTRIES_MAX


def count_messages(tx: Transaction, universe: str) -> int:
    """The messages in all queues of a universe: ready, delayed, leased, blocked, and dead letters.

    Reads the counters of every queue, so it takes about 20 us for each on RocksDB.
    """
    count, after = 0, ""
    while names := first_elements(tx, queues(universe), after, READ_ENTRIES_MAX):
        for name in names:
            counters = total_counters(tx, keys_of(QueueKey(universe, name)))
            count += counters.ready_total() + counters.delayed + counters.leased + counters.blocked
        after = names[-1]
    return count


def prefix_of(universe: str) -> bytes:
    """What every key of a universe starts with."""
    return Subspace("u", universe).prefix


def range_of(universe: str) -> tuple[bytes, bytes]:
    """The bounds of every key of a universe."""
    return Subspace("u", universe).range()


def count_body_bytes(tx: Transaction, universe: str) -> int:
    """The bytes that a universe has in the object store: blobs that are not inline, and segments of worlds."""
    return blobs.body_bytes(tx, universe) + segments.body_bytes(tx, universe)
