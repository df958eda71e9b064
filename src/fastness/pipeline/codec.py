"""Decode journal records into rows of JOURNAL. No Spark here.

Unreadable records are reported as `Damaged`, with a short reason code. Readable records beside them are not affected:

    missing     neither the key space nor a segment has the records, or the segment's object is missing
    checksum    the object does not match the checksum in the index
    malformed   the object matches its checksum but is not a valid segment, or a record is not valid CBOR
    schema      this version does not know the record's kind
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final

import cbor2
import msgspec
import orjson
import pyarrow as pa

from fastness.backends.objects import ObjectStore
from fastness.errors import ChecksumMismatch, Corrupt, MalformedSegment, MissingObject, ObjectNotFound
from fastness.layers import segments
from fastness.layers.journal_records import Kind
from fastness.limits import ROWS_BATCH, ROWS_BATCH_BYTES
from fastness.pipeline.journal_chunks import JournalChunk, OpenStore, staged_object_missing
from fastness.pipeline.schemas import JOURNAL, decoded
from fastness.wire.worlds import Segment


class Damaged(msgspec.Struct, frozen=True):
    """Records that could not be read, and why."""

    universe: str
    world: str
    start: int
    end: int  # Included.
    reason: str
    detail: str
    segment: str | None = None  # The object they belong to; None: hot records.


def read_chunk(chunk: JournalChunk, objects: ObjectStore) -> list[bytes]:
    """All records of a chunk, including those outside its wanted range.

    Raises:
        MissingObject: neither the key space nor a segment has them.
        ChecksumMismatch: the bytes do not match the checksum in the index.
        MalformedSegment: the bytes match but are not a valid segment.
        Unreachable: a staged object is missing.
    """
    if not chunk.path:
        raise MissingObject(
            f"Records {chunk.start} to {chunk.end} of world {chunk.world} are neither hot nor in a segment; "
            "restore a backup"
        )
    try:
        data = objects.get(chunk.path)
    except ObjectNotFound as error:
        if chunk.staged:
            raise staged_object_missing(chunk.path, chunk.store) from error
        raise MissingObject(f"{chunk.path} is not in the object store; restore it from a backup") from error
    return segments.parse(data, Segment(chunk.start, chunk.end, chunk.path, chunk.checksum, chunk.size))


def reason_of(error: Corrupt) -> str:
    """The reason code for an error of `read_chunk`."""
    return _REASONS.get(type(error), "missing")


def journal_rows(chunks: Iterable[JournalChunk], open_store: OpenStore) -> Iterator[pa.RecordBatch | Damaged]:
    """The wanted records of the chunks as rows of JOURNAL, in order, and the damage that was found.

    Errors of unreachable stores are raised: they are not damage, and a retry may succeed.
    """
    rows = Rows()
    for chunk in chunks:
        first, last = chunk.span
        try:
            records = read_chunk(chunk, open_store(chunk.store))
        except Corrupt as error:
            yield Damaged(
                chunk.universe,
                chunk.world,
                first,
                last,
                reason_of(error),
                str(error),
                None if chunk.hot else chunk.path or None,
            )
            continue
        yield from rows.add(chunk, records[first - chunk.start : last + 1 - chunk.start], first)
    yield from rows.flush()


class Rows:
    """Collects records into batches of bounded size."""

    def __init__(self) -> None:
        self._clear()

    def add(self, chunk: JournalChunk, records: list[bytes], height: int) -> Iterator[pa.RecordBatch | Damaged]:
        """Add records, the first at `height`; yields the batches that are full and the damage that was found."""
        for begin in range(0, len(records), _SLICE):
            yield from self._decode(chunk, records[begin : begin + _SLICE], height + begin)
            if len(self._raw) >= ROWS_BATCH or self._bytes >= ROWS_BATCH_BYTES:
                yield self._batch()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """The last, partial batch, if there is one."""
        if self._raw:
            yield self._batch()

    def _decode(self, chunk: JournalChunk, records: list[bytes], height: int) -> Iterator[Damaged]:
        loads, dumps, sha256, kinds = cbor2.loads, orjson.dumps, hashlib.sha256, KINDS  # Local names: the loop is hot.
        bad: list[tuple[int, str, str]] = []
        taken = 0
        for offset, record in enumerate(records, height):
            try:
                name, (_, value) = kinds[record[1]], loads(record)
            except Exception as error:  # A decoder may raise anything on bytes it does not understand.
                bad.append((offset, *record_fault(record, error)))
                continue
            try:
                payload = dumps(value, _default, orjson.OPT_NON_STR_KEYS)
            except (TypeError, ValueError, RecursionError):
                payload = None
            self._heights.append(offset)
            self._kinds.append(name)
            self._payloads.append(payload)
            self._raw.append(record)
            self._hashes.append(sha256(record).hexdigest())
            taken += 1
        self._universes += [chunk.universe] * taken
        self._worlds += [chunk.world] * taken
        self._segments += [None if chunk.hot else chunk.path] * taken
        self._bytes += sum(map(len, records))
        return _merge_damage(chunk, bad)

    def _clear(self) -> None:
        self._universes: list[str] = []
        self._worlds: list[str] = []
        self._heights: list[int] = []
        self._kinds: list[str] = []
        self._payloads: list[bytes | None] = []
        self._raw: list[bytes] = []
        self._hashes: list[str] = []
        self._segments: list[str | None] = []
        self._bytes = 0

    def _batch(self) -> pa.RecordBatch:
        columns = [
            pa.array(self._universes, pa.string()),
            pa.array(self._worlds, pa.string()),
            pa.array(self._heights, pa.int64()),
            pa.array(self._kinds, pa.string()),
            pa.array(self._payloads, pa.string()),
            pa.array(self._raw, pa.binary()),
            pa.array(self._hashes, pa.string()),
            pa.array(self._segments, pa.string()),
        ]
        self._clear()
        return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def payload_of(value: Any) -> str | None:
    """A value as JSON, with bytes as {"$bytes": base64}; None where it has no JSON form."""
    try:
        return orjson.dumps(value, _default, orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError, RecursionError):
        return None


def _default(value: Any) -> Any:
    if value.__class__ is bytes:
        return {"$bytes": b64encode(value).decode()}
    raise TypeError(type(value).__name__)


def record_fault(record: bytes, error: Exception) -> tuple[str, str]:
    """The reason code and the detail for a record that cannot be decoded."""
    if len(record) > 1 and record[0] == _PAIR and record[1] not in KINDS:
        return "schema", f"its kind {record[1]} is unknown to this version; upgrade Fastness"
    return "malformed", f"it is not a valid record ({type(error).__name__}: {error}); restore it from a backup"


def _merge_damage(chunk: JournalChunk, bad: list[tuple[int, str, str]]) -> Iterator[Damaged]:
    """The bad records, with adjacent ones of the same fault merged."""
    start = 0
    for n, (height, reason, detail) in enumerate(bad):
        follows = n + 1 < len(bad) and bad[n + 1][0] == height + 1 and bad[n + 1][1:] == (reason, detail)
        if not follows:
            segment = None if chunk.hot else chunk.path
            yield Damaged(chunk.universe, chunk.world, bad[start][0], height, reason, detail, segment)
            start = n + 1


_SCHEMA: Final = decoded(JOURNAL)
_PAIR: Final = 0x82  # CBOR: an array of two.
_SLICE: Final = 256  # Records between two checks of a batch's size.
KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_REASONS: Final[dict[type, str]] = {ChecksumMismatch: "checksum", MalformedSegment: "malformed"}
