"""Journals: the one ordered history of a world.

    journal/head         ->  the next height; it only grows
    journal/hot          ->  the first height that is not only in a segment; it only grows
    journal/e/<height>   ->  the record, canonical CBOR

Heights count from zero. `append` writes head … head+n-1 and returns the first of them. One writer at a time is not
enforced by a lock but by the head that it must name: whoever comes second learns it, and nothing of theirs is written.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from holdfast.errors import BatchTooLarge, EmptyBatch, HeadAdvanced, InvalidArgument, MissingEntry
from holdfast.kv import Transaction
from holdfast.layers.worlds import World, describe, require_active, subspace
from holdfast.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, READ_ENTRIES_MAX

_HEIGHT_BYTES: Final = 8


def head(tx: Transaction, world: World) -> int:
    """The next height; how many records there are."""
    stored = tx.get(_head_key(world))
    return 0 if stored is None else int.from_bytes(stored, "big")


def first_hot(tx: Transaction, world: World) -> int:
    """The first height that the key space holds; those below it are in segments."""
    return int.from_bytes(tx.get(subspace(world).key("journal", "hot")) or b"", "big")


def trim(tx: Transaction, world: World, to: int, limit: int) -> bool:
    """Remove at most `limit` hot records below the height `to`; whether there are none left."""
    begin = first_hot(tx, world)
    end = min(begin + limit, to)
    if begin < end:
        prefix = _entries(world)
        tx.delete_range(prefix + begin.to_bytes(_HEIGHT_BYTES, "big"), prefix + end.to_bytes(_HEIGHT_BYTES, "big"))
        tx.put(subspace(world).key("journal", "hot"), end.to_bytes(_HEIGHT_BYTES, "big"))
    return end >= to


def append(tx: Transaction, world: World, records: Sequence[bytes], *, expected_head: int) -> int:
    """Append the records and return the height of the first.

    Raises:
        HeadAdvanced: the head is not `expected_head`.
        EmptyBatch, BatchTooLarge: there is nothing to append, or more than one batch may have.
        WorldNotActive: the world is paused or gone.
    """
    _check_batch(records)
    require_active(tx, world)
    actual = head(tx, world)
    if actual != expected_head:
        raise HeadAdvanced(expected_head, actual)
    return write(tx, world, records, actual)


def write(tx: Transaction, world: World, records: Sequence[bytes], height: int) -> int:
    """Put records at `height`, which the caller has found to be the head, and move the head behind them."""
    prefix = _entries(world)
    for offset, record in enumerate(records, height):
        tx.put(prefix + offset.to_bytes(_HEIGHT_BYTES, "big"), record)
    tx.put(_head_key(world), (height + len(records)).to_bytes(_HEIGHT_BYTES, "big"))
    return height


def write_at(tx: Transaction, world: World, records: Sequence[bytes], height: int) -> None:
    """Copy records into a world that is not active yet; doing it again changes nothing.

    Raises:
        HeadAdvanced: the journal is not that far, so a hole would be left.
    """
    _check_batch(records)
    actual = head(tx, world)
    if actual < height:
        raise HeadAdvanced(height, actual)
    if actual == height:
        write(tx, world, records, height)


def read_hot(tx: Transaction, world: World, start: int, limit: int) -> list[tuple[int, bytes]]:
    """At most `limit` records from the height `start` on, without a hole.

    Raises:
        MissingEntry: a record below the head is not there.
    """
    if start < 0 or not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A read starts at 0 or later and takes 1 to {READ_ENTRIES_MAX} records")
    end = min(start + limit, head(tx, world))
    if start >= end:
        describe(tx, world)  # A world that nobody made is not an empty one.
        return []
    prefix = _entries(world)
    pairs = tx.scan(prefix + start.to_bytes(8, "big"), prefix + end.to_bytes(8, "big"), limit=end - start)
    if len(pairs) != end - start:
        present = {int.from_bytes(key[-_HEIGHT_BYTES:], "big") for key, _ in pairs}
        hole = next(height for height in range(start, end) if height not in present)
        raise MissingEntry(
            f"World {world.name} has no record {hole}, below its head {head(tx, world)}; restore a backup"
        )
    # As many different keys as there are heights: they are these heights.
    return [(height, record) for height, (_, record) in enumerate(pairs, start)]


def next_run(tx: Transaction, world: World, start: int, end: int, limit: int) -> tuple[int, list[bytes]]:
    """The first records with start <= height < end that the key space holds, up to `limit` or the next hole.

    The height of the first of them comes with them; it is `end` if there are none. This is for whoever reads around
    holes, and knows which heights it wants.
    """
    prefix = _entries(world)
    begin, behind = prefix + start.to_bytes(_HEIGHT_BYTES, "big"), prefix + end.to_bytes(_HEIGHT_BYTES, "big")
    pairs = tx.scan(begin, behind, limit=limit)
    if not pairs:
        return end, []
    first, last = (int.from_bytes(pairs[n][0][-_HEIGHT_BYTES:], "big") for n in (0, -1))
    if last - first + 1 == len(pairs):  # As many different keys as there are heights: they are these heights.
        return first, [record for _, record in pairs]
    whole = next(n for n, (key, _) in enumerate(pairs) if int.from_bytes(key[-_HEIGHT_BYTES:], "big") != first + n)
    return first, [record for _, record in pairs[:whole]]


def _check_batch(records: Sequence[bytes]) -> None:
    if not records:
        raise EmptyBatch("There is nothing to append; an empty batch is a mistake of its caller")
    size = sum(map(len, records))
    if len(records) > BATCH_ENTRIES_MAX or size > BATCH_BYTES_MAX:
        raise BatchTooLarge(
            f"A batch of {len(records)} records and {size} bytes; one append takes {BATCH_ENTRIES_MAX} records "
            f"and {BATCH_BYTES_MAX} bytes, so split it, or store large values as blobs"
        )


@lru_cache(maxsize=4_096)
def _entries(world: World) -> bytes:
    """What the keys of records start with; the height follows as eight bytes, which sort like numbers."""
    return subspace(world).key("journal", "e")


@lru_cache(maxsize=4_096)
def _head_key(world: World) -> bytes:
    return subspace(world).key("journal", "head")
