"""Executor tasks that ingest records of worlds: their input, their work and their result.

An item is a range of one world's journal, as chunks that are read in order. A task has many items, and writes one file
for each universe among them. The record before a range is compared with the fingerprint that the lake keeps of it (the
watermark `tip/…`): if a plane was restored from a backup and has diverged since, its new records are not mixed with
the old ones."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.backends.objects import ObjectStore
from fastness.errors import Corrupt, ObjectNotFound, Unreachable
from fastness.pipeline import codec
from fastness.pipeline.codec import Damaged
from fastness.pipeline.intake.task_payloads import INLINE_STORE, inline_store
from fastness.pipeline.journal_chunks import JournalChunk, OpenStore, Stores
from fastness.pipeline.lake import fingerprints
from fastness.pipeline.lake.files import AddedFile, Writer
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.redactions import Redaction
from fastness.pipeline.schemas import JOURNAL
from fastness.wire.worlds import Segment

OK: Final = "ok"


class Item(msgspec.Struct, frozen=True):
    """A range of one world's journal to read."""

    universe: str
    world: str
    chunks: list[JournalChunk]
    segment_checks: list[JournalChunk] = []  # Segments to check only: their records are in the lake.
    checked_below: int = 0  # Segments below this height were checked before.
    before: JournalChunk | None = None  # The chunk with the record at `height - 1`,
    height: int = 0
    fingerprint: int = 0  # which should have this fingerprint. 0: unknown.
    wanted: list[tuple[int, int]] = []  # Only these heights (inclusive ranges); empty: all.

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in (*self.chunks, *self.segment_checks))

    @property
    def all_chunks(self) -> list[JournalChunk]:
        return [*self.chunks, *self.segment_checks, *([] if self.before is None else [self.before])]

    def with_locations(self, locations: Mapping[str, JournalChunk]) -> "Item":
        """The same item, with chunks read from the stores in `locations`, by path."""

        def location(chunk: JournalChunk) -> JournalChunk:
            at = locations.get(chunk.path, chunk)
            return msgspec.structs.replace(chunk, store=at.store, staged=at.staged)

        return msgspec.structs.replace(
            self,
            chunks=[location(chunk) for chunk in self.chunks],
            segment_checks=[location(chunk) for chunk in self.segment_checks],
            before=None if self.before is None else location(self.before),
        )


class Task(msgspec.Struct, frozen=True):
    """The input of one executor task."""

    location: Location  # Of the table.
    storage: dict[str, str]
    items: list[Item]
    bodies: dict[str, bytes] = {}  # Small staged chunks, by path.
    redaction: Redaction = Redaction()


class SegmentCheck(msgspec.Struct, frozen=True):
    """The result of checking a segment."""

    universe: str
    world: str
    segment: Segment
    verdict: str
    reason: str | None = None


class LastRecord(msgspec.Struct, frozen=True):
    """The last record that was read of a world."""

    universe: str
    world: str
    height: int
    fingerprint: int


class TaskResult(msgspec.Struct):
    """The result of a task."""

    files: list[AddedFile] = []
    damaged: list[Damaged] = []
    segment_checks: list[SegmentCheck] = []
    last_records: list[LastRecord] = []
    diverged: list[tuple[str, str]] = []  # Worlds whose history differs from the lake's.
    staging_error: str = ""  # A staged object is missing: no damage; the batch is planned again.


def task(
    location: Location, storage: dict[str, str], items: list[Item], bodies: Mapping[str, bytes], redaction: Redaction
) -> Task:
    """A task with the bodies that its items need."""
    chunks = [chunk for item in items for chunk in item.all_chunks if chunk.store == INLINE_STORE]
    return Task(location, storage, items, {chunk.path: bodies[chunk.path] for chunk in chunks}, redaction)


def execute_task(task: bytes) -> bytes:
    """Read, decode and write the items of an encoded task; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=Task)
    stores, carried = cache(Stores(task_input.storage)), inline_store(task_input.bodies)

    def open_store(url: str) -> ObjectStore:
        return carried if url == INLINE_STORE else stores(url)

    try:
        result = _execute(task_input, open_store)
    except Unreachable as error:
        if not _is_staged_data_lost(task_input.items, open_store):
            raise
        result = TaskResult(staging_error=str(error))
    return msgspec.msgpack.encode(result)


def _execute(task_input: Task, open_store: OpenStore) -> TaskResult:
    result = TaskResult()
    writer = Writer(JOURNAL, task_input.location)
    last_records: dict[tuple[str, str], LastRecord] = {}
    for found in _read_items(task_input.items, open_store):
        if isinstance(found, Damaged):
            result.damaged.append(found)
        else:
            writer.write(task_input.redaction.journal(found))
            last_records |= _last_records(found)
    result.files = writer.close()
    result.last_records = list(last_records.values())
    result.segment_checks = list(_check_segments(task_input.items, result.damaged, open_store))
    result.diverged = [(item.universe, item.world) for item in task_input.items if _has_diverged(item, open_store)]
    return result


def segment_of(chunk: JournalChunk) -> Segment:
    return Segment(chunk.start, chunk.end, chunk.path, chunk.checksum, chunk.size)


def _read_items(items: list[Item], open_store: OpenStore) -> Iterator[pa.RecordBatch | Damaged]:
    # One call for the chunks of all worlds, because a batch of rows may span several worlds.
    yield from codec.journal_rows((chunk for item in items if not item.wanted for chunk in item.chunks), open_store)
    for item in items:
        if item.wanted:
            for found in codec.journal_rows(item.chunks, open_store):
                yield found if isinstance(found, Damaged) else found.filter(_mask(found, item.wanted))


def _mask(batch: pa.RecordBatch, wanted: list[tuple[int, int]]) -> pa.BooleanArray:
    heights = batch.column("height")
    mask = pa.repeat(pa.scalar(False), batch.num_rows)
    for low, high in wanted:
        mask = pc.or_(mask, pc.and_(pc.greater_equal(heights, low), pc.less_equal(heights, high)))
    return mask


def _last_records(batch: pa.RecordBatch) -> dict[tuple[str, str], LastRecord]:
    """The last record of each world in a batch."""
    ends = pc.run_end_encode(batch.column("world")).run_ends
    last = batch.select(["universe", "world", "height", "hash"]).take(pc.subtract(ends, 1))
    rows = zip(*(column.to_pylist() for column in last.columns), strict=True)
    return {
        (universe, world): LastRecord(universe, world, height, fingerprints.of_hash(hash))
        for universe, world, height, hash in rows
    }


def _check_segments(items: list[Item], damaged: list[Damaged], open_store: OpenStore) -> Iterator[SegmentCheck]:
    faults = {fault.segment: fault for fault in damaged if fault.segment is not None and fault.reason != "schema"}
    for item in items:
        for chunk in item.chunks:
            if not chunk.hot and chunk.end >= item.checked_below:
                fault = faults.get(chunk.path)
                yield _check(chunk) if fault is None else _check(chunk, fault.reason, fault.detail)
        for chunk in item.segment_checks:
            try:
                codec.read_chunk(chunk, open_store(chunk.store))
            except Corrupt as error:
                yield _check(chunk, codec.reason_of(error), str(error))
            else:
                yield _check(chunk)


def _check(chunk: JournalChunk, verdict: str = OK, reason: str | None = None) -> SegmentCheck:
    return SegmentCheck(chunk.universe, chunk.world, segment_of(chunk), verdict, reason)


def _has_diverged(item: Item, open_store: OpenStore) -> bool:
    if item.before is None:
        return False
    try:
        records = codec.read_chunk(item.before, open_store(item.before.store))
    except Corrupt:
        return False  # Unknown. The damage itself is reported elsewhere.
    return fingerprints.of_bytes(records[item.height - 1 - item.before.start]) != item.fingerprint


def _is_staged_data_lost(items: list[Item], open_store: OpenStore) -> bool:
    staged = (chunk for item in items for chunk in item.all_chunks if chunk.staged)
    for chunk in staged:
        try:
            open_store(chunk.store).head(chunk.path)
        except ObjectNotFound:
            return True
    return False
