"""Records of journals as rows: read, checked, decoded. No Spark in it; executors call it, and so may anybody.

What cannot be read is told as `Damaged`, with a reason that is a short word, and hides nothing else:

    missing     nothing holds the records: no segment, or no object where the index says
    checksum    the object is not the one that was indexed
    malformed   it is, and does not hold what it should; or a record is no CBOR
    schema      a record is of a kind that this version does not know
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final

import cbor2
import msgspec
import orjson
import pyarrow as pa

from holdfast.backends.objects import ObjectStore
from holdfast.errors import ChecksumMismatch, Corrupt, MalformedSegment, MissingObject, ObjectNotFound
from holdfast.layers import segments
from holdfast.layers.journal_records import Kind
from holdfast.layers.segments import SegmentRecord
from holdfast.limits import ROWS_BATCH, ROWS_BATCH_BYTES
from holdfast.pipeline.journal_chunks import OpenStore, Piece, not_staged
from holdfast.pipeline.schemas import JOURNAL


class Damaged(msgspec.Struct, frozen=True):
    """Records that could not be read, and why."""

    universe: str
    world: str
    start: int
    end: int  # Included.
    reason: str
    detail: str
    segment: str | None = None  # The object they should be in; None: they should be hot.


def read_piece(piece: Piece, objects: ObjectStore) -> list[bytes]:
    """All records of a piece, those that are not wanted too.

    Raises:
        MissingObject: nothing holds them.
        ChecksumMismatch: these are not the bytes that were indexed.
        MalformedSegment: they are, and do not hold what they should.
        Unreachable: they were staged, and this is not the place.
    """
    if not piece.path:
        raise MissingObject(
            f"World {piece.world} has records {piece.start} to {piece.end} neither hot nor in a segment; "
            "restore a backup"
        )
    try:
        data = objects.get(piece.path)
    except ObjectNotFound as error:
        if piece.staged:
            raise not_staged(piece.path, piece.store) from error
        raise MissingObject(f"{piece.path} is not in the object store; restore it from a backup") from error
    return segments.parse(data, SegmentRecord(piece.start, piece.end, piece.path, piece.checksum, piece.size))


def reason_of(error: Corrupt) -> str:
    """The short word for damage of a piece."""
    return _REASONS.get(type(error), "missing")


def journal_rows(pieces: Iterable[Piece], open_store: OpenStore) -> Iterator[pa.RecordBatch | Damaged]:
    """The wanted records of the pieces as rows of JOURNAL, in order, and what could not be read.

    Stores that do not answer raise their errors: they are no damage, and another attempt may find them well.
    """
    rows = Rows()
    for piece in pieces:
        first, last = piece.span
        try:
            records = read_piece(piece, open_store(piece.store))
        except Corrupt as error:
            yield Damaged(
                piece.universe,
                piece.world,
                first,
                last,
                reason_of(error),
                str(error),
                None if piece.hot else piece.path or None,
            )
            continue
        yield from rows.add(piece, records[first - piece.start : last + 1 - piece.start], first)
    yield from rows.rest()


class Rows:
    """Gathers records into batches of bounded size."""

    def __init__(self) -> None:
        self._clear()

    def add(self, piece: Piece, records: list[bytes], height: int) -> Iterator[pa.RecordBatch | Damaged]:
        """Take records from `height` on; whatever is complete by that."""
        for begin in range(0, len(records), _SLICE):
            yield from self._take(piece, records[begin : begin + _SLICE], height + begin)
            if len(self._raw) >= ROWS_BATCH or self._bytes >= ROWS_BATCH_BYTES:
                yield self._batch()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is gathered, if anything is."""
        if self._raw:
            yield self._batch()

    def _take(self, piece: Piece, records: list[bytes], height: int) -> Iterator[Damaged]:
        loads, dumps, sha256, kinds = cbor2.loads, orjson.dumps, hashlib.sha256, _KINDS  # Found once, not once a row.
        bad: list[tuple[int, str, str]] = []
        taken = 0
        for offset, record in enumerate(records, height):
            try:
                name, (_, value) = kinds[record[1]], loads(record)
            except Exception as error:  # Whatever a decoder raises over bytes that it does not understand.
                bad.append((offset, *_fault(record, error)))
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
        self._universes += [piece.universe] * taken
        self._worlds += [piece.world] * taken
        self._segments += [None if piece.hot else piece.path] * taken
        self._bytes += sum(map(len, records))
        return _joined(piece, bad)

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
        return pa.RecordBatch.from_arrays(columns, schema=JOURNAL.schema)


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


def _fault(record: bytes, error: Exception) -> tuple[str, str]:
    """The reason and the detail of a record that has no row."""
    if len(record) > 1 and record[0] == _PAIR and record[1] not in _KINDS:
        return "schema", f"its kind is {record[1]}, which this version does not know; upgrade Holdfast"
    return "malformed", f"it is no record ({type(error).__name__}: {error}); restore it from a backup"


def _joined(piece: Piece, bad: list[tuple[int, str, str]]) -> Iterator[Damaged]:
    """The bad records, with those that follow each other and have the same fault as one."""
    start = 0
    for n, (height, reason, detail) in enumerate(bad):
        follows = n + 1 < len(bad) and bad[n + 1][0] == height + 1 and bad[n + 1][1:] == (reason, detail)
        if not follows:
            segment = None if piece.hot else piece.path
            yield Damaged(piece.universe, piece.world, bad[start][0], height, reason, detail, segment)
            start = n + 1


_PAIR: Final = 0x82  # CBOR: an array of two.
_SLICE: Final = 256  # Records between two looks at how large a batch has become.
_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_REASONS: Final[dict[type, str]] = {ChecksumMismatch: "checksum", MalformedSegment: "malformed"}
