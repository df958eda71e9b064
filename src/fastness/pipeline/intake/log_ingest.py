"""Ingests lines of session logs into `activity`.

    watermark activity/<universe>/<file>   the offset after the last ingested line
    watermark lines/<universe>/<file>      the expected number of the next line
    watermark whole/<universe>/<hash>      a fingerprint of the file's identity: all of a rotated file was ingested

A rotated file never changes, and its manifest entry has the start of its hash in its name. So the listing alone shows
which files are new, and the entries of the others are not read. A quarantined file is read again each time.

A file without a readable header cannot be identified, so it is not ingested until it can: its lines may be in the lake
already.
"""

from collections.abc import Callable, Iterator
from functools import cache

import msgspec
import pyarrow.compute as pc

from fastness.errors import MissingObject, ObjectNotFound, Unreachable
from fastness.limits import INGEST_WHOLE_LOGS_MIN, INGEST_WORLDS_MAX
from fastness.pipeline import logs, tasks
from fastness.pipeline.intake.ingest_run import Run, check_staged
from fastness.pipeline.intake.quarantine import REWOUND, Quarantined, Scope
from fastness.pipeline.journal_chunks import OpenStore, Stores
from fastness.pipeline.lake import LakeTable, Move, fingerprints
from fastness.pipeline.lake.files import AddedFile, Writer
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.logs import DamagedLines, LogChunk, ReadPosition
from fastness.pipeline.redactions import Redaction
from fastness.pipeline.schemas import ACTIVITY
from fastness.pipeline.tombstones import Hidden
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.activity.format import LogFile


class Task(msgspec.Struct, frozen=True):
    """The input of one executor task."""

    location: Location
    storage: dict[str, str]
    chunks: list[LogChunk]
    hidden: Hidden = Hidden()
    redaction: Redaction = Redaction()


class TaskResult(msgspec.Struct):
    """The result of a task."""

    files: list[AddedFile] = []
    damaged: list[DamagedLines] = []
    positions: list[ReadPosition] = []
    staging_error: str = ""


class Batch(msgspec.Struct):
    """The content of one commit."""

    staging: str
    chunks: list[LogChunk] = []
    moves: dict[str, Move] = {}
    found: list[Quarantined] = []
    scopes: list[Scope] = []
    size: int = 0
    rotated: dict[tuple[str, str], LogFile] = {}  # The files of the chunks, by universe and id.
    whole: dict[str, Move] = {}  # For files that were ingested before they were rotated.

    @property
    def count(self) -> int:
        """The number of files that the commit is about, or somewhat more."""
        return len(self.scopes) + len(self.moves) + len(self.whole) + len(self.found)


def ingest_logs(run: Run) -> None:
    """Ingest all lines that the view has and the lake does not."""
    run.retry_until_done("the session logs", lambda: _ingest_new(run))


def execute_task(task: bytes) -> bytes:
    """Read, decode and write the log files of an encoded task; runs on an executor."""
    task_input = msgspec.msgpack.decode(task, type=Task)
    open_store = cache(Stores(task_input.storage))
    try:
        result = _execute(task_input, open_store)
    except Unreachable as error:
        if not _is_staged_data_lost(task_input.chunks, open_store):
            raise
        result = TaskResult(staging_error=str(error))
    return msgspec.msgpack.encode(result)


def _execute(task_input: Task, open_store: OpenStore) -> TaskResult:
    result = TaskResult()
    writer = Writer(ACTIVITY, task_input.location)
    chunks = sorted(task_input.chunks, key=lambda chunk: (chunk.universe, chunk.kind, chunk.file))
    for found in logs.activity_rows(chunks, open_store):
        if isinstance(found, DamagedLines):
            result.damaged.append(found)
        elif isinstance(found, ReadPosition):
            result.positions.append(found)
        else:
            writer.write(task_input.redaction.activity(task_input.hidden.visible(found)))
    result.files = writer.close()
    return result


def _is_staged_data_lost(chunks: list[LogChunk], open_store: OpenStore) -> bool:
    for chunk in chunks:
        if chunk.staged:
            try:
                open_store(chunk.store).head(chunk.path)
            except ObjectNotFound:
                return True
    return False


def offset_watermark(universe: str, file: str) -> str:
    return f"activity/{universe}/{file}"


def line_watermark(universe: str, file: str) -> str:
    return f"lines/{universe}/{file}"


def _ingest_new(run: Run) -> None:
    table = run.table(ACTIVITY)
    with run.prefetch(_batches(run, run.table(ACTIVITY))) as batches:
        for batch in batches:
            try:
                _ingest_batch(run, batch, table)
            finally:
                run.clear(batch.staging)


def whole_watermark(universe: str, short_hash: str) -> str:
    return f"whole/{universe}/{short_hash}"


def read_all_again(table: LakeTable, universe: str) -> dict[str, Move]:
    """The moves after which the manifest entries of all rotated files are read once more."""
    prefix = whole_watermark(universe, "")
    return {name: Move(value, 0) for name, value in table.watermarks().items() if value and name.startswith(prefix)}


def _batches(run: Run, table: LakeTable) -> Iterator[Batch]:
    count = 0
    batch = Batch(f"{run.staging}/logs-{count}")
    for universe in run.view.universes():
        quarantined = {
            row.source for row in run.quarantine.rows() if (row.universe, row.table) == (universe, ACTIVITY.name)
        }
        for file in run.view.logs(universe, is_known=_known_entries(table, universe, quarantined)):
            _add(run, batch, table, file, quarantined)
            if batch.size >= run.batch_bytes or batch.count >= INGEST_WORLDS_MAX:
                yield batch
                count += 1
                batch = Batch(f"{run.staging}/logs-{count}")
    yield batch


def _known_entries(table: LakeTable, universe: str, quarantined: set[str]) -> Callable[[str], bool]:
    """Whether the file of a manifest entry was ingested whole, and is not quarantined."""
    watermarks, prefix = table.watermarks(), whole_watermark(universe, "")
    damaged = {fingerprints.of_bytes(source.encode()) for source in quarantined}

    def is_known(entry: str) -> bool:
        file = watermarks.get(prefix + rotation.short_hash(entry), 0)
        return file != 0 and file not in damaged and (not quarantined or rotation.name_of(entry) not in quarantined)

    return is_known


def _add(run: Run, batch: Batch, table: LakeTable, file: LogFile, quarantined: set[str]) -> None:
    if not file.writer:
        detail = f"{file.path} has no readable header and cannot be identified; restore it from a backup"
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.name, 0, 0, "malformed", detail))
        return
    offset = table.watermark(offset_watermark(file.universe, file.id))
    n = table.watermark(line_watermark(file.universe, file.id))
    if file.size != offset or not quarantined.isdisjoint((file.name, file.id)):
        batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.name, 0))
        batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.id, n))
    if file.size == offset:
        batch.whole |= _whole(table, file)
        return
    try:
        if file.size < offset:
            _add_truncated(run, batch, table, file, offset)
        else:
            chunk = run.view.log_chunk(file, batch.staging, start=offset, n=n)
            batch.chunks.append(chunk)
            batch.rotated[file.universe, file.id] = file
            batch.size += chunk.size - chunk.start
    except MissingObject as error:
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.id, n, n, "missing", str(error)))


def _add_truncated(run: Run, batch: Batch, table: LakeTable, file: LogFile, offset: int) -> None:
    """Handle a file that became shorter. Rotation cuts bad lines off its end; other lines only go with a restore."""
    kept = max((line.n for _, line in log_format.lines(run.view.log_body(file)) if line is not None), default=-1)
    of_file = table.scan(["n"], pc.field("file") == file.id, universe=file.universe, file=file.id)
    ingested = max((pc.max(rows.column("n")).as_py() for rows in of_file if rows.num_rows), default=-1)
    if ingested > kept:
        detail = f"the plane has {kept + 1} lines, the lake {ingested + 1}: the plane was restored from an older backup"
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.id, kept + 1, ingested, REWOUND, detail))
    else:
        batch.moves[offset_watermark(file.universe, file.id)] = Move(offset, file.size)


def _whole(table: LakeTable, file: LogFile) -> dict[str, Move]:
    """The move that a file which was ingested up to its end needs, if it is rotated."""
    if not file.is_rotated:
        return {}
    watermark = whole_watermark(file.universe, rotation.hash_in_name(file.path)[: rotation.SHORT_HASH])
    before, target = table.watermark(watermark), fingerprints.of_bytes(file.id.encode())
    return {} if before == target else {watermark: Move(before, target)}


def _ingest_batch(run: Run, batch: Batch, table: LakeTable) -> None:
    results = list(_execute_chunks(run, batch.chunks, table.location)) if batch.chunks else []
    check_staged(result.staging_error for result in results)
    damaged = [each for result in results for each in result.damaged]
    found = batch.found + [
        Quarantined(each.universe, ACTIVITY.name, each.file, each.start, each.end, each.reason, each.detail)
        for each in damaged
    ]
    run.quarantine.add(found)
    positions = [position for result in results for position in result.positions]
    moves = {**batch.moves, **_moves(batch.chunks, positions)}
    for position in positions:
        file = batch.rotated[position.universe, position.file]
        if position.offset == file.size:
            batch.whole |= _whole(table, file)
    if moves or len(batch.whole) >= INGEST_WHOLE_LOGS_MIN:
        moves |= batch.whole
    files = [file for result in results for file in result.files]
    if moves:
        table.append(files, moves)
        run.record_commit(ACTIVITY, sum(file.rows for file in files))
    run.quarantine.resolve(batch.scopes, found)


def _execute_chunks(run: Run, chunks: list[LogChunk], location: Location) -> Iterator[TaskResult]:
    groups = tasks.balanced([chunk.size - chunk.start for chunk in chunks], tasks.parallelism(run.spark))
    hidden, redaction = run.view.hidden, run.redaction
    work = [
        msgspec.msgpack.encode(Task(location, run.config.storage, [chunks[n] for n in group], hidden, redaction))
        for group in groups
    ]
    for result in run.execute(execute_task, work, sum(chunk.size - chunk.start for chunk in chunks)):
        yield msgspec.msgpack.decode(result, type=TaskResult)


def _moves(chunks: list[LogChunk], positions: list[ReadPosition]) -> dict[str, Move]:
    planned = {(chunk.universe, chunk.file): chunk for chunk in chunks}
    moves: dict[str, Move] = {}
    for each in positions:
        chunk = planned[each.universe, each.file]
        if each.offset > chunk.start:
            moves[offset_watermark(each.universe, each.file)] = Move(chunk.start, each.offset)
            moves[line_watermark(each.universe, each.file)] = Move(chunk.n, each.n)
    return moves
