"""Journals: the ordered history of a world.

    journal/head         ->  the next height; it only grows
    journal/hot          ->  the first height that the key space still holds; lower ones are in segments; it only grows
    journal/e/<height>   ->  the record, canonical CBOR

Heights count from zero. `append` writes head … head+n-1 and returns the first of them. Concurrent writers are detected
by the expected head that each passes: the second one gets HeadAdvanced, and nothing of its batch is written.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from fastness.errors import BatchTooLarge, EmptyBatch, HeadAdvanced, MissingEntry
from fastness.kv import Subspace, Transaction, pack
from fastness.layers import worlds
from fastness.layers.worlds import World, describe, require_active, subspace
from fastness.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX

_HEIGHT_BYTES: Final = 8


def head(tx: Transaction, world: World) -> int:
    """The next height, which is the number of records."""
    stored = tx.get(head_key(world))
    return 0 if stored is None else int.from_bytes(stored, "big")


class WorldHead(NamedTuple):
    """The head of a world, and its incarnation; None if its record is missing or of a newer version."""

    name: str
    head: int
    incarnation: int | None


def heads(tx: Transaction, universe: str, after: str, limit: int) -> list[WorldHead]:
    """A page of the heads of all worlds by name, including those that are being deleted."""
    parent = Subspace("u", universe, "w")
    found: list[WorldHead] = []
    for name in worlds.first_elements(tx, parent, after, limit):
        prefix = parent.key(name)  # Packing each key as a whole would take as long as reading it.
        stored = tx.get(prefix + _HEAD)
        incarnation = worlds.incarnation_at(tx, prefix)
        found.append(WorldHead(name, 0 if stored is None else int.from_bytes(stored, "big"), incarnation))
    return found


def first_hot(tx: Transaction, world: World) -> int:
    """The first height that the key space holds; lower ones are in segments."""
    return int.from_bytes(tx.get(subspace(world).key("journal", "hot")) or b"", "big")


def trim(tx: Transaction, world: World, to: int, limit: int) -> bool:
    """Remove at most `limit` hot records below the height `to`; whether none are left."""
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
        EmptyBatch, BatchTooLarge: there are no records, or more than one batch allows.
        WorldNotActive: the world is not active.
    """
    require_active(tx, world)
    return append_to_active(tx, world, records, expected_head=expected_head)


def append_to_active(tx: Transaction, world: World, records: Sequence[bytes], *, expected_head: int) -> int:
    """The same for a world that the caller has checked to be active."""
    check_batch(records)
    actual = head(tx, world)
    if actual != expected_head:
        raise HeadAdvanced(expected_head, actual)
    return write(tx, world, records, actual)


def write(tx: Transaction, world: World, records: Sequence[bytes], height: int) -> int:
    """Write records at `height`, which must be the head, and advance the head."""
    prefix = _entries(world)
    for offset, record in enumerate(records, height):
        tx.put(prefix + offset.to_bytes(_HEIGHT_BYTES, "big"), record)
    tx.put(head_key(world), (height + len(records)).to_bytes(_HEIGHT_BYTES, "big"))
    return height


def write_at(tx: Transaction, world: World, records: Sequence[bytes], height: int) -> None:
    """Copy records into a world that is not active yet. Repeating it changes nothing.

    Raises:
        HeadAdvanced: the head is below `height`, so a gap would be left.
    """
    check_batch(records)
    actual = head(tx, world)
    if actual < height:
        raise HeadAdvanced(height, actual)
    if actual == height:
        write(tx, world, records, height)


def read_hot(tx: Transaction, world: World, start: int, limit: int) -> list[tuple[int, bytes]]:
    """At most `limit` records from the height `start` on, without gaps.

    Raises:
        MissingEntry: a record below the head is missing.
    """
    end = min(start + limit, head(tx, world))
    if start >= end:
        describe(tx, world)  # Raises if the world does not exist.
        return []
    prefix = _entries(world)
    pairs = tx.scan(prefix + start.to_bytes(8, "big"), prefix + end.to_bytes(8, "big"), limit=end - start)
    if len(pairs) != end - start:
        present = {int.from_bytes(key[-_HEIGHT_BYTES:], "big") for key, _ in pairs}
        gap = next(height for height in range(start, end) if height not in present)
        raise MissingEntry(
            f"World {world.name} has no record {gap}, which is below its head {head(tx, world)}; restore a backup"
        )
    # There are as many keys as heights in the range, so none is missing.
    return [(height, record) for height, (_, record) in enumerate(pairs, start)]


def next_run(tx: Transaction, world: World, start: int, end: int, limit: int) -> tuple[int, list[bytes]]:
    """The first contiguous records with start <= height < end that the key space holds, at most `limit`.

    Returns the height of the first record, or `end` if there are none. For readers that handle gaps themselves.
    """
    prefix = _entries(world)
    begin, stop = prefix + start.to_bytes(_HEIGHT_BYTES, "big"), prefix + end.to_bytes(_HEIGHT_BYTES, "big")
    pairs = tx.scan(begin, stop, limit=limit)
    if not pairs:
        return end, []
    first, last = (int.from_bytes(pairs[n][0][-_HEIGHT_BYTES:], "big") for n in (0, -1))
    if last - first + 1 == len(pairs):  # There are as many keys as heights, so none is missing.
        return first, [record for _, record in pairs]
    count = next(n for n, (key, _) in enumerate(pairs) if int.from_bytes(key[-_HEIGHT_BYTES:], "big") != first + n)
    return first, [record for _, record in pairs[:count]]


def check_batch(records: Sequence[bytes]) -> None:
    """Check that records fit one batch.

    Raises:
        EmptyBatch, BatchTooLarge: there are none, or too many.
    """
    if not records:
        raise EmptyBatch("The batch is empty; append at least one record")
    size = sum(map(len, records))
    if len(records) > BATCH_ENTRIES_MAX or size > BATCH_BYTES_MAX:
        raise BatchTooLarge(
            f"The batch has {len(records)} records and {size} bytes; one append takes {BATCH_ENTRIES_MAX} records "
            f"and {BATCH_BYTES_MAX} bytes. Split it, or store large values as blobs"
        )


@lru_cache(maxsize=4_096)
def _entries(world: World) -> bytes:
    """The key prefix of records. The height follows as eight bytes, which sort like numbers."""
    return subspace(world).key("journal", "e")


_HEAD: Final = pack(("journal", "head"))


@lru_cache(maxsize=4_096)
def head_key(world: World) -> bytes:
    """Where the head is stored."""
    return subspace(world).key("journal", "head")
