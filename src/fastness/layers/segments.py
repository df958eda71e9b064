"""Segments: cold parts of a journal, in the object store.

    (u, universe, "segments", world, end)  ->  its Segment

Only records well below the baseline are exported, so a restore rarely needs a segment. The body is written first, then
indexed, then the hot records are removed, a bounded number per transaction. After a crash the next run completes it.
For each record the body has its length as eight bytes, and then the record itself:

    00 00 00 00 00 00 00 05 | 82 00 63 61 64 …
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from fastness.errors import ChecksumMismatch, InvalidArgument, MalformedSegment, MissingEntry, SegmentExists
from fastness.kv import Subspace, Transaction, pages
from fastness.layers import journals, snapshots, worlds
from fastness.layers.worlds import World, WorldState
from fastness.limits import SEGMENT_ENTRIES, SEGMENT_MARGIN
from fastness.wire.worlds import Described, Segment

_LENGTH: Final = struct.Struct(">Q")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Segment).decode


def next_range(
    tx: Transaction, world: World, *, entries: int = SEGMENT_ENTRIES, margin: int = SEGMENT_MARGIN
) -> tuple[int, int] | None:
    """The next heights to export, both included; None while too few are below the baseline."""
    last = latest(tx, world)
    start = 0 if last is None else last.end + 1
    end = start + entries - 1
    return (start, end) if end < snapshots.baseline(tx, world).height - margin else None


def lag(tx: Transaction, world: World, *, entries: int = SEGMENT_ENTRIES, margin: int = SEGMENT_MARGIN) -> int:
    """How many hot records a compaction would remove: those already in segments, and those that fill new segments."""
    last = latest(tx, world)
    start = 0 if last is None else last.end + 1
    below = max(snapshots.baseline(tx, world).height - margin - start, 0)
    return start - journals.first_hot(tx, world) + below // entries * entries


def index(
    tx: Transaction,
    world: World,
    record: Segment,
    *,
    margin: int = SEGMENT_MARGIN,
    incarnation: int | None = None,
) -> None:
    """Index a segment whose body is stored. Repeating it changes nothing.

    Raises:
        WorldNotFound: the world does not exist, or has another incarnation.
        SegmentExists: other segments cover these heights, or it would leave a gap after the last one.
        InvalidArgument: it ends too close to the baseline.
    """
    worlds.require_readable(tx, world, incarnation)
    last = latest(tx, world)
    start = 0 if last is None else last.end + 1
    if record.start < start:
        if find(tx, world, record.start) == record:
            return
        raise SegmentExists(f"Segments of {world.name} already cover heights up to {start - 1}; export from {start} on")
    if record.start > start:
        raise SegmentExists(f"The next segment of {world.name} starts at {start}, not {record.start}; leave no gap")
    if record.end >= snapshots.baseline(tx, world).height - margin:
        raise InvalidArgument(f"Records up to {record.end} are too close to the baseline to be exported")
    tx.put(_subspace(world).key(record.end), _encode(record))


def latest(tx: Transaction, world: World) -> Segment | None:
    """The segment with the highest heights."""
    pairs = tx.scan(*_subspace(world).range(), limit=1, reverse=True)
    return _decode(pairs[0][1]) if pairs else None


def find(tx: Transaction, world: World, height: int) -> Segment | None:
    """The segment that holds this height; None if there is none."""
    pairs = tx.scan(_subspace(world).key(height), _subspace(world).range()[1], limit=1)
    record = _decode(pairs[0][1]) if pairs else None
    return record if record is not None and record.start <= height else None


def read(tx: Transaction, world: World, start: int, limit: int) -> tuple[list[tuple[int, bytes]], Segment | None]:
    """Hot records from the height `start` on, or the segment that holds it.

    Raises:
        MissingEntry: neither the key space nor a segment holds it.
    """
    if start >= journals.first_hot(tx, world):
        return journals.read_hot(tx, world, start, limit), None
    segment = find(tx, world, start)
    if segment is None:
        raise MissingEntry(f"Record {start} of world {world.name} is neither hot nor in a segment; restore a backup")
    return [], segment


def describe(tx: Transaction, world: World, incarnation: int | None = None) -> Described:
    """The state of a world, and where its records are; with `incarnation`, only of that one."""
    meta = worlds.describe(tx, world, incarnation)
    hot = baseline = 0
    if meta.state is not WorldState.DELETING:
        hot, baseline = journals.first_hot(tx, world), snapshots.baseline(tx, world).height
    head = journals.head(tx, world)
    return Described(world.name, meta.state, meta.created_ms, head, hot, baseline, meta.incarnation)


def page(tx: Transaction, world: World, *, after: int = -1, limit: int) -> list[Segment]:
    """At most `limit` segments that end after the height `after`, in order."""
    begin = _subspace(world).key(after + 1)
    return [_decode(value) for _, value in tx.scan(begin, _subspace(world).range()[1], limit=limit)]


def body_bytes(tx: Transaction, universe: str) -> int:
    """The bytes of all segments of a universe, in the object store."""
    return sum(
        _decode(value).size for found in pages(tx, *Subspace("u", universe, "segments").range()) for _, value in found
    )


def forget(tx: Transaction, world: World, record: Segment, incarnation: int) -> None:
    """Remove a segment of a deleting world from the index."""
    if worlds.is_deleting(tx, world, incarnation):
        tx.delete(_subspace(world).key(record.end))


def trim(tx: Transaction, world: World, limit: int, incarnation: int | None = None) -> bool:
    """Remove at most `limit` hot records that are in segments; whether none are left."""
    worlds.require_readable(tx, world, incarnation)
    last = latest(tx, world)
    return last is None or journals.trim(tx, world, last.end + 1, limit)


def object_path(world: World, start: int, end: int, incarnation: int = 1) -> str:
    """Where a segment's body is stored. Incarnations share no paths: a late writer of a deleted one harms no other."""
    folder = f"segments/{world.universe}/{world.name}"
    return f"{folder}/{start}-{end}.log" if incarnation == 1 else f"{folder}/{incarnation}/{start}-{end}.log"


def body(records: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a segment, in chunks."""
    for record in records:
        yield _LENGTH.pack(len(record)) + record


def checksum(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse(data: bytes, record: Segment) -> list[bytes]:
    """The records of a segment.

    Raises:
        ChecksumMismatch: the bytes differ from those that were indexed.
        MalformedSegment: the bytes do not hold the records of the segment.
    """
    if checksum(data) != record.checksum:
        raise ChecksumMismatch(f"{record.object_path} does not match its recorded checksum; restore it from a backup")
    found: list[bytes] = []
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size + length
        found.append(data[position - length : position])
    if position != len(data) or len(found) != record.end - record.start + 1:
        raise MalformedSegment(
            f"{record.object_path} does not hold the records {record.start} to {record.end}; restore it from a backup"
        )
    return found


def _subspace(world: World) -> Subspace:
    return Subspace("u", world.universe, "segments", world.name)
