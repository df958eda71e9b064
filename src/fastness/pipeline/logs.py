"""Decodes lines of session logs into rows of ACTIVITY. No Spark here.

A file is read from a byte offset up to its last line break: the rest is still being written, or was torn by a crash.
Offsets stay valid when a file is rotated into the object store, which changes nothing before its last intact line.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import pyarrow as pa

from fastness.backends.objects import ObjectStore
from fastness.errors import MissingObject, ObjectNotFound
from fastness.limits import ROWS_BATCH, ROWS_BATCH_BYTES
from fastness.pipeline.journal_chunks import OpenStore, staged_object_missing
from fastness.pipeline.lifecycles import AT_MS_MAX
from fastness.pipeline.schemas import ACTIVITY, decoded
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Line


class LogChunk(msgspec.Struct, frozen=True):
    """The lines of one file from a byte offset on, in an object that executors can read."""

    universe: str
    session: str
    kind: str
    file: str  # Identifies the file, rotated or not.
    store: str
    path: str
    start: int  # The offset of the first wanted line.
    size: int  # The size of the file when it was listed.
    base: int = 0  # The offset in the file where the object begins.
    n: int = 0  # The expected number of the first wanted line, if known.
    staged: bool = False  # Written for this read only.


class ReadPosition(msgspec.Struct, frozen=True):
    """The position after the last complete line of a file. `n` is the expected number of the next line."""

    universe: str
    file: str
    offset: int
    n: int


class DamagedLines(msgspec.Struct, frozen=True):
    """Unreadable lines. The reason is `malformed` in the middle, `torn` at the end, or `missing` for the whole file.

    A torn line is after the read position: its writer may be about to finish it.
    """

    universe: str
    file: str
    start: int
    end: int  # Inclusive.
    reason: str
    detail: str


def read_log(chunk: LogChunk, objects: ObjectStore) -> bytes:
    """The wanted bytes of a file.

    Raises:
        MissingObject: the object does not exist.
        Unreachable: a staged object is missing.
    """
    try:
        return objects.get_range(chunk.path, chunk.start - chunk.base, chunk.size - chunk.start)
    except ObjectNotFound as error:
        if chunk.staged:
            raise staged_object_missing(chunk.path, chunk.store) from error
        raise MissingObject(f"{chunk.path} is not in the object store; restore it from a backup") from error


def activity_rows(
    chunks: Iterable[LogChunk], open_store: OpenStore
) -> Iterator[pa.RecordBatch | DamagedLines | ReadPosition]:
    """The lines of files as rows of ACTIVITY, the damage that was found, and the position reached in each file.

    A batch has rows of one file only, and comes before that file's position.
    """
    for chunk in chunks:
        try:
            data = read_log(chunk, open_store(chunk.store))
        except MissingObject as error:
            yield DamagedLines(chunk.universe, chunk.file, chunk.n, chunk.n, "missing", str(error))
            continue
        yield from _rows(chunk, data)


def _rows(chunk: LogChunk, data: bytes) -> Iterator[pa.RecordBatch | DamagedLines | ReadPosition]:
    complete = data.rfind(b"\n") + 1
    good: list[Line] = []
    n, bad, size = chunk.n, 0, 0
    for _, line in log_format.lines(data[:complete]):
        if line is None or not (0 <= line.at_ms < AT_MS_MAX and 0 <= line.n < _N_MAX):
            bad += 1
            continue
        if bad:
            first = line.n - bad if n == 0 else n
            yield _damaged(chunk, first, max(first, line.n - 1))
            bad = 0
        good.append(line)
        n = line.n + 1
        size += len(line.record)
        if len(good) >= ROWS_BATCH or size >= ROWS_BATCH_BYTES:
            yield _batch(chunk, good)
            good, size = [], 0
    if good:
        yield _batch(chunk, good)
    if bad:
        yield _damaged(chunk, n, n + bad - 1)
        n += bad
    if complete < len(data):
        yield DamagedLines(
            chunk.universe, chunk.file, n, n, "torn", f"{len(data) - complete} bytes without a line break"
        )
    yield ReadPosition(chunk.universe, chunk.file, chunk.start + complete, n)


def _batch(chunk: LogChunk, lines: list[Line]) -> pa.RecordBatch:
    count = len(lines)
    times = [line.at_ms for line in lines]
    columns = [
        pa.array([chunk.universe] * count, pa.string()),
        pa.array([chunk.session] * count, pa.string()),
        pa.array([chunk.kind] * count, pa.string()),
        pa.array([chunk.file] * count, pa.string()),
        pa.array([line.n for line in lines], pa.int64()),
        pa.array(times, pa.timestamp("ms", tz="UTC")),
        pa.array([at_ms // _DAY_MS for at_ms in times], pa.int32()).cast(pa.date32()),
        pa.array([bytes(line.record) for line in lines], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _damaged(chunk: LogChunk, start: int, end: int) -> DamagedLines:
    return DamagedLines(chunk.universe, chunk.file, start, end, "malformed", "not valid session log lines")


_SCHEMA: Final = decoded(ACTIVITY)
_DAY_MS: Final = 86_400_000
_N_MAX: Final = 1 << 63  # The range of an int64 column.
