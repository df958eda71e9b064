"""An older backup is restored, for models of layers: the data goes back, and what was issued since stays out there."""

from typing import Final

from fastness.kv import Database, Pair, Subspace, Transaction, fence_floor, pages, prefix_range
from fastness.layers import lineages
from fastness.testing.clock import ManualClock

START_MS: Final = fence_floor.BEGIN_MS + 86_400_000  # The fence floor follows the time.
_RESTORE_MS: Final = 1_000


def back_up(database: Database, universe: str) -> list[Pair]:
    """Every pair of a universe, and the fence floor."""

    def work(tx: Transaction) -> list[Pair]:
        pairs = [pair for page in pages(tx, *_range_of(universe)) for pair in page]
        return [*pairs, (fence_floor.KEY, fence_floor.encode(fence_floor.load(tx)))]

    return database.read(work)


def restore(database: Database, universe: str, backup: list[Pair], clock: ManualClock) -> None:
    """Put the pairs back, and begin another lineage as every restore does. That takes a moment."""

    def work(tx: Transaction) -> None:
        tx.delete_range(*_range_of(universe))
        for key, value in backup:
            tx.put(key, value)
        lineages.begin(tx, "restored")

    clock.advance_ms(_RESTORE_MS)
    database.transact(work)


def _range_of(universe: str) -> tuple[bytes, bytes]:
    return prefix_range(Subspace("u", universe).prefix)
