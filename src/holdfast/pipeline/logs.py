"""Lines of session logs as rows of ACTIVITY. No Spark in it.

A file is read from a byte offset on, up to its last line break: what follows is not written yet, or a crash tore it.
Offsets stay true when a file is rotated into the object store, which changes nothing in front of its last good line.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import pyarrow as pa

from holdfast.backends.objects import ObjectStore
from holdfast.errors import MissingObject, ObjectNotFound
from holdfast.limits import ROWS_BATCH, ROWS_BATCH_BYTES
from holdfast.pipeline.journal_chunks import OpenStore, not_staged
from holdfast.pipeline.schemas import ACTIVITY
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import Line


class LogPiece(msgspec.Struct, frozen=True):
    """The lines of one file from a byte offset on, in an object that executors can read."""

    universe: str
    session: str
    kind: str
    file: str  # Names the file wherever it is.
    store: str
    path: str
    start: int  # The offset in the file from which on lines are wanted.
    size: int  # Where the file ended when it was listed.
    base: int = 0  # The offset in the file at which the object begins.
    n: int = 0  # The number that the first wanted line should have, if that is known.
    staged: bool = False  # The object was written for this read alone.


class Reached(msgspec.Struct, frozen=True):
    """How far a file was read: behind its last whole line. `n` is the number that the next line should have."""

    universe: str
    file: str
    offset: int
    n: int


class DamagedLines(msgspec.Struct, frozen=True):
    """Lines that could not be read, and why: `malformed` in the middle, `torn` at the end, `missing` all of them.

    A torn line lies behind what was reached: whoever writes to the file may be about to finish it.
    """

    universe: str
    file: str
    start: int
    end: int  # Included.
    reason: str
    detail: str


def read_log(piece: LogPiece, objects: ObjectStore) -> bytes:
    """The wanted bytes of a file.

    Raises:
        MissingObject: it is not there.
        Unreachable: it was staged, and this is not the place.
    """
    try:
        return objects.get_range(piece.path, piece.start - piece.base, piece.size - piece.start)
    except ObjectNotFound as error:
        if piece.staged:
            raise not_staged(piece.path, piece.store) from error
        raise MissingObject(f"{piece.path} is not in the object store; restore it from a backup") from error


def activity_rows(
    pieces: Iterable[LogPiece], open_store: OpenStore
) -> Iterator[pa.RecordBatch | DamagedLines | Reached]:
    """The lines of files as rows of ACTIVITY, what could not be read, and for each file how far it was read.

    A batch has rows of one file alone, and comes before that file's Reached.
    """
    for piece in pieces:
        try:
            data = read_log(piece, open_store(piece.store))
        except MissingObject as error:
            yield DamagedLines(piece.universe, piece.file, piece.n, piece.n, "missing", str(error))
            continue
        yield from _rows(piece, data)


def _rows(piece: LogPiece, data: bytes) -> Iterator[pa.RecordBatch | DamagedLines | Reached]:
    whole = data.rfind(b"\n") + 1
    good: list[Line] = []
    n, bad, size = piece.n, 0, 0
    for _, line in log_format.lines(data[:whole]):
        if line is None or not (0 <= line.at_ms < _END_OF_TIME_MS and 0 <= line.n < _N_MAX):
            bad += 1
            continue
        if bad:
            first = line.n - bad if n == 0 else n
            yield _damaged(piece, first, max(first, line.n - 1))
            bad = 0
        good.append(line)
        n = line.n + 1
        size += len(line.record)
        if len(good) >= ROWS_BATCH or size >= ROWS_BATCH_BYTES:
            yield _batch(piece, good)
            good, size = [], 0
    if good:
        yield _batch(piece, good)
    if bad:
        yield _damaged(piece, n, n + bad - 1)
        n += bad
    if whole < len(data):
        yield DamagedLines(piece.universe, piece.file, n, n, "torn", f"{len(data) - whole} bytes without a line break")
    yield Reached(piece.universe, piece.file, piece.start + whole, n)


def _batch(piece: LogPiece, lines: list[Line]) -> pa.RecordBatch:
    count = len(lines)
    moments = [line.at_ms for line in lines]
    columns = [
        pa.array([piece.universe] * count, pa.string()),
        pa.array([piece.session] * count, pa.string()),
        pa.array([piece.kind] * count, pa.string()),
        pa.array([piece.file] * count, pa.string()),
        pa.array([line.n for line in lines], pa.int64()),
        pa.array(moments, pa.timestamp("ms", tz="UTC")),
        pa.array([at_ms // _DAY_MS for at_ms in moments], pa.int32()).cast(pa.date32()),
        pa.array([bytes(line.record) for line in lines], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ACTIVITY.schema)


def _damaged(piece: LogPiece, start: int, end: int) -> DamagedLines:
    return DamagedLines(piece.universe, piece.file, start, end, "malformed", "they are no lines of a session log")


_DAY_MS: Final = 86_400_000
_N_MAX: Final = 1 << 63  # What a column holds.
_END_OF_TIME_MS: Final = 253_402_300_800_000  # The year 10,000, behind which a timestamp has no text.
