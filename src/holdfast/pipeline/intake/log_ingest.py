"""Ingests lines of session logs into `activity`.

    watermark activity/<universe>/<file>   the offset after the last ingested line
    watermark lines/<universe>/<file>      the expected number of the next line

A file without a readable header cannot be identified, so it is not ingested until it can: its lines may be in the lake
already.
"""

from collections.abc import Iterator
from functools import cache

import msgspec
import pyarrow.compute as pc

from holdfast.errors import MissingObject, ObjectNotFound, Unreachable
from holdfast.limits import INGEST_WORLDS_MAX
from holdfast.pipeline import logs, tasks
from holdfast.pipeline.intake.ingest_run import Run, check_staged
from holdfast.pipeline.intake.quarantine import REWOUND, Quarantined, Scope
from holdfast.pipeline.journal_chunks import OpenStore, Stores
from holdfast.pipeline.lake import LakeTable, Move
from holdfast.pipeline.lake.files import AddedFile, Writer
from holdfast.pipeline.lake.locations import Location
from holdfast.pipeline.logs import DamagedLines, LogChunk, ReadPosition
from holdfast.pipeline.redactions import Redaction
from holdfast.pipeline.schemas import ACTIVITY
from holdfast.pipeline.tombstones import Hidden
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import LogFile


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


def _batches(run: Run, table: LakeTable) -> Iterator[Batch]:
    count = 0
    batch = Batch(f"{run.staging}/logs-{count}")
    for universe in run.view.universes():
        for file in run.view.logs(universe):
            _add(run, batch, table, file)
            if batch.size >= run.batch_bytes or len(batch.scopes) + len(batch.found) >= INGEST_WORLDS_MAX:
                yield batch
                count += 1
                batch = Batch(f"{run.staging}/logs-{count}")
    yield batch


def _add(run: Run, batch: Batch, table: LakeTable, file: LogFile) -> None:
    if not file.writer:
        detail = f"{file.path} has no readable header and cannot be identified; restore it from a backup"
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.name, 0, 0, "malformed", detail))
        return
    batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.name, 0))
    offset = table.watermark(offset_watermark(file.universe, file.id))
    n = table.watermark(line_watermark(file.universe, file.id))
    batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.id, n))
    if file.size == offset:
        return
    try:
        if file.size < offset:
            _add_truncated(run, batch, table, file, offset)
        else:
            chunk = run.view.log_chunk(file, batch.staging, start=offset, n=n)
            batch.chunks.append(chunk)
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


def _ingest_batch(run: Run, batch: Batch, table: LakeTable) -> None:
    results = list(_execute_chunks(run, batch.chunks, table.location)) if batch.chunks else []
    check_staged(result.staging_error for result in results)
    damaged = [each for result in results for each in result.damaged]
    found = batch.found + [
        Quarantined(each.universe, ACTIVITY.name, each.file, each.start, each.end, each.reason, each.detail)
        for each in damaged
    ]
    run.quarantine.add(found)
    moves = {**batch.moves, **_moves(batch.chunks, [r for result in results for r in result.positions])}
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
