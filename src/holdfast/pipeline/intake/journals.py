"""Records of worlds: what an executor is told of them, what it does, and what it answers.

An item is a stretch of one world's history, as pieces that are read one after the other. A task has many items, and
makes one file for each universe among them. The record in front of a stretch is compared with what the lake remembers
of it (its tip): a plane that was restored from a backup, and went on differently, is not mixed with what it was.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.objects import ObjectStore
from holdfast.errors import Corrupt, ObjectNotFound, Unreachable
from holdfast.layers.segments import SegmentRecord
from holdfast.pipeline import codec
from holdfast.pipeline.codec import Damaged
from holdfast.pipeline.intake.task_payloads import CARRIED, unpacked
from holdfast.pipeline.journal_chunks import OpenStore, Piece, Stores
from holdfast.pipeline.lake.files import AddedFile, Writer
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.schemas import JOURNAL

OK: Final = "ok"
_TIP_DIGITS: Final = 15  # Of a hash in hexadecimal: a mark is a number of 63 bits.


class Item(msgspec.Struct, frozen=True):
    """A stretch of one world."""

    universe: str
    world: str
    pieces: list[Piece]
    verdicts: list[Piece] = []  # Segments that only need a verdict: their records are in the lake.
    verdicted: int = 0  # Segments below this height have one.
    before: Piece | None = None  # Holds the record at `height - 1`,
    height: int = 0
    tip: int = 0  # which should be this one. 0: nobody knows.
    wanted: list[tuple[int, int]] = []  # Only these heights, both included; none: all of the pieces.

    @property
    def size(self) -> int:
        return sum(piece.size for piece in (*self.pieces, *self.verdicts))

    @property
    def all_pieces(self) -> list[Piece]:
        return [*self.pieces, *self.verdicts, *([] if self.before is None else [self.before])]

    def moved(self, places: Mapping[str, Piece]) -> "Item":
        """The same, with pieces where those with their paths are."""

        def place(piece: Piece) -> Piece:
            at = places.get(piece.path, piece)
            return msgspec.structs.replace(piece, store=at.store, staged=at.staged)

        return msgspec.structs.replace(
            self,
            pieces=[place(piece) for piece in self.pieces],
            verdicts=[place(piece) for piece in self.verdicts],
            before=None if self.before is None else place(self.before),
        )


class Task(msgspec.Struct, frozen=True):
    """What one executor does at a time."""

    place: Place  # Of the table.
    storage: dict[str, str]
    items: list[Item]
    bodies: dict[str, bytes] = {}  # What came with it.


class Verdict(msgspec.Struct, frozen=True):
    """What is known of a segment that was read."""

    universe: str
    world: str
    segment: SegmentRecord
    verdict: str
    reason: str | None = None


class Tip(msgspec.Struct, frozen=True):
    """The last record of a stretch."""

    universe: str
    world: str
    height: int
    tip: int


class Answer(msgspec.Struct):
    """What became of a task."""

    files: list[AddedFile] = []
    damaged: list[Damaged] = []
    verdicts: list[Verdict] = []
    tips: list[Tip] = []
    diverged: list[tuple[str, str]] = []  # Worlds that have another history than the lake.
    lost: str = ""  # What was staged is not there: that is no damage, and the work has to be done again.


def task(place: Place, storage: dict[str, str], items: list[Item], bodies: Mapping[str, bytes]) -> Task:
    """A task, with those of the bodies that its items need."""
    pieces = [piece for item in items for piece in item.all_pieces if piece.store == CARRIED]
    return Task(place, storage, items, {piece.path: bodies[piece.path] for piece in pieces})


def take(task: bytes) -> bytes:
    """Read, decode and write: what an executor does."""
    given = msgspec.msgpack.decode(task, type=Task)
    stores, carried = cache(Stores(given.storage)), unpacked(given.bodies)

    def open_store(url: str) -> ObjectStore:
        return carried if url == CARRIED else stores(url)

    try:
        answer = _taken(given, open_store)
    except Unreachable as error:
        if not _is_lost(given.items, open_store):
            raise
        answer = Answer(lost=str(error))
    return msgspec.msgpack.encode(answer)


def _taken(given: Task, open_store: OpenStore) -> Answer:
    answer = Answer()
    writer = Writer(JOURNAL, given.place)
    tips: dict[tuple[str, str], Tip] = {}
    for found in _found(given.items, open_store):
        if isinstance(found, Damaged):
            answer.damaged.append(found)
        else:
            writer.write(found)
            tips |= _tips(found)
    answer.files = writer.close()
    answer.tips = list(tips.values())
    answer.verdicts = list(_verdicts(given.items, answer.damaged, open_store))
    answer.diverged = [(item.universe, item.world) for item in given.items if _has_diverged(item, open_store)]
    return answer


def tip_of(hash: str) -> int:
    """What is remembered of a record; never 0."""
    return int(hash[:_TIP_DIGITS], 16) or 1


def segment_of(piece: Piece) -> SegmentRecord:
    return SegmentRecord(piece.start, piece.end, piece.path, piece.checksum, piece.size)


def _found(items: list[Item], open_store: OpenStore) -> Iterator[pa.RecordBatch | Damaged]:
    # Pieces of all worlds go through in one run, because a batch of rows may have those of many.
    yield from codec.journal_rows((piece for item in items if not item.wanted for piece in item.pieces), open_store)
    for item in items:
        if item.wanted:
            for found in codec.journal_rows(item.pieces, open_store):
                yield found if isinstance(found, Damaged) else found.filter(_mask(found, item.wanted))


def _mask(batch: pa.RecordBatch, wanted: list[tuple[int, int]]) -> pa.BooleanArray:
    heights = batch.column("height")
    mask = pa.repeat(pa.scalar(False), batch.num_rows)
    for low, high in wanted:
        mask = pc.or_(mask, pc.and_(pc.greater_equal(heights, low), pc.less_equal(heights, high)))
    return mask


def _tips(batch: pa.RecordBatch) -> dict[tuple[str, str], Tip]:
    """The last record of each world in a batch."""
    ends = pc.run_end_encode(batch.column("world")).run_ends
    last = batch.select(["universe", "world", "height", "hash"]).take(pc.subtract(ends, 1))
    rows = zip(*(column.to_pylist() for column in last.columns), strict=True)
    return {(universe, world): Tip(universe, world, height, tip_of(hash)) for universe, world, height, hash in rows}


def _verdicts(items: list[Item], damaged: list[Damaged], open_store: OpenStore) -> Iterator[Verdict]:
    faults = {fault.segment: fault for fault in damaged if fault.segment is not None and fault.reason != "schema"}
    for item in items:
        for piece in item.pieces:
            if not piece.hot and piece.end >= item.verdicted:
                fault = faults.get(piece.path)
                yield _verdict(piece) if fault is None else _verdict(piece, fault.reason, fault.detail)
        for piece in item.verdicts:
            try:
                codec.read_piece(piece, open_store(piece.store))
            except Corrupt as error:
                yield _verdict(piece, codec.reason_of(error), str(error))
            else:
                yield _verdict(piece)


def _verdict(piece: Piece, verdict: str = OK, reason: str | None = None) -> Verdict:
    return Verdict(piece.universe, piece.world, segment_of(piece), verdict, reason)


def _has_diverged(item: Item, open_store: OpenStore) -> bool:
    if item.before is None:
        return False
    try:
        records = codec.read_piece(item.before, open_store(item.before.store))
    except Corrupt:
        return False  # Then nobody can tell; that it is damaged is found elsewhere.
    return tip_of(hashlib.sha256(records[item.height - 1 - item.before.start]).hexdigest()) != item.tip


def _is_lost(items: list[Item], open_store: OpenStore) -> bool:
    staged = (piece for item in items for piece in item.all_pieces if piece.staged)
    for piece in staged:
        try:
            open_store(piece.store).head(piece.path)
        except ObjectNotFound:
            return True
    return False
