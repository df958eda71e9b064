"""Lines of session logs into `activity`.

    mark activity/<universe>/<file>   the byte behind the last line that was taken
    mark lines/<universe>/<file>      the number that the next line should have

A file without a readable header does not say which file it is, so nothing of it is taken until it does: it could be in
the lake under its name already.
"""

from collections.abc import Iterator
from functools import cache

import msgspec
import pyarrow.compute as pc

from holdfast.errors import MissingObject, ObjectNotFound, Unreachable
from holdfast.limits import INGEST_WORLDS_MAX
from holdfast.pipeline import logs, tasks
from holdfast.pipeline.intake.quarantines import REWOUND, Quarantined, Scope
from holdfast.pipeline.intake.runs import Run, require_staged
from holdfast.pipeline.journal_chunks import OpenStore, Stores
from holdfast.pipeline.lake import LakeTable, Move
from holdfast.pipeline.lake.files import AddedFile, Writer
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.logs import DamagedLines, LogPiece, Reached
from holdfast.pipeline.schemas import ACTIVITY
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import LogFile


class Task(msgspec.Struct, frozen=True):
    """What one executor does at a time."""

    place: Place
    storage: dict[str, str]
    pieces: list[LogPiece]


class Answer(msgspec.Struct):
    """What became of a task."""

    files: list[AddedFile] = []
    damaged: list[DamagedLines] = []
    reached: list[Reached] = []
    lost: str = ""


class Batch(msgspec.Struct):
    """What one commit takes in."""

    staging: str
    pieces: list[LogPiece] = []
    moves: dict[str, Move] = {}
    found: list[Quarantined] = []
    scopes: list[Scope] = []
    size: int = 0


def take_in(run: Run) -> None:
    """Bring every session log in the lake to where the view has it."""
    run.until_done("the session logs", lambda: _pass(run))


def take(task: bytes) -> bytes:
    """Read, decode and write: what an executor does."""
    given = msgspec.msgpack.decode(task, type=Task)
    open_store = cache(Stores(given.storage))
    try:
        answer = _taken(given, open_store)
    except Unreachable as error:
        if not _is_lost(given.pieces, open_store):
            raise
        answer = Answer(lost=str(error))
    return msgspec.msgpack.encode(answer)


def _taken(given: Task, open_store: OpenStore) -> Answer:
    answer = Answer()
    writer = Writer(ACTIVITY, given.place)
    pieces = sorted(given.pieces, key=lambda piece: (piece.universe, piece.kind, piece.file))
    for found in logs.activity_rows(pieces, open_store):
        if isinstance(found, DamagedLines):
            answer.damaged.append(found)
        elif isinstance(found, Reached):
            answer.reached.append(found)
        else:
            writer.write(found)
    answer.files = writer.close()
    return answer


def _is_lost(pieces: list[LogPiece], open_store: OpenStore) -> bool:
    for piece in pieces:
        if piece.staged:
            try:
                open_store(piece.store).head(piece.path)
            except ObjectNotFound:
                return True
    return False


def mark(universe: str, file: str) -> str:
    return f"activity/{universe}/{file}"


def lines_mark(universe: str, file: str) -> str:
    return f"lines/{universe}/{file}"


def _pass(run: Run) -> None:
    table = run.table(ACTIVITY)
    with run.ahead(_batches(run, run.table(ACTIVITY))) as batches:
        for batch in batches:
            try:
                _take_batch(run, batch, table)
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
        detail = f"{file.path} has no header that can be read, so nobody can tell which file it is; restore it"
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.name, 0, 0, "malformed", detail))
        return
    batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.name, 0))
    offset = table.mark(mark(file.universe, file.id))
    n = table.mark(lines_mark(file.universe, file.id))
    batch.scopes.append(Scope(file.universe, ACTIVITY.name, file.id, n))
    if file.size == offset:
        return
    try:
        if file.size < offset:
            _add_shorter(run, batch, table, file, offset)
        else:
            piece = run.view.log_piece(file, batch.staging, start=offset, n=n)
            batch.pieces.append(piece)
            batch.size += piece.size - piece.start
    except MissingObject as error:
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.id, n, n, "missing", str(error)))


def _add_shorter(run: Run, batch: Batch, table: LakeTable, file: LogFile, offset: int) -> None:
    """A file lost bytes. Bad lines at its end are cut off when it is rotated; other lines only go with a restore."""
    kept = max((line.n for _, line in log_format.lines(run.view.log_body(file)) if line is not None), default=-1)
    of_file = table.scan(["n"], pc.field("file") == file.id, universe=file.universe, file=file.id)
    taken = max((pc.max(rows.column("n")).as_py() for rows in of_file if rows.num_rows), default=-1)
    if taken > kept:
        detail = f"the plane has {kept + 1} lines and the lake {taken + 1}: it was restored from an older backup"
        batch.found.append(Quarantined(file.universe, ACTIVITY.name, file.id, kept + 1, taken, REWOUND, detail))
    else:
        batch.moves[mark(file.universe, file.id)] = Move(offset, file.size)


def _take_batch(run: Run, batch: Batch, table: LakeTable) -> None:
    answers = list(_executed(run, batch.pieces, table.place)) if batch.pieces else []
    require_staged(answer.lost for answer in answers)
    damaged = [each for answer in answers for each in answer.damaged]
    found = batch.found + [
        Quarantined(each.universe, ACTIVITY.name, each.file, each.start, each.end, each.reason, each.detail)
        for each in damaged
    ]
    run.quarantine.add(found)
    moves = {**batch.moves, **_moves(batch.pieces, [r for answer in answers for r in answer.reached])}
    files = [file for answer in answers for file in answer.files]
    if moves:
        table.append(files, moves)
        run.committed(ACTIVITY, sum(file.rows for file in files))
    run.quarantine.settle(batch.scopes, found)


def _executed(run: Run, pieces: list[LogPiece], place: Place) -> Iterator[Answer]:
    groups = tasks.balanced([piece.size - piece.start for piece in pieces], tasks.parallelism(run.spark))
    work = [msgspec.msgpack.encode(Task(place, run.config.storage, [pieces[n] for n in group])) for group in groups]
    for answer in run.answers(take, work, sum(piece.size - piece.start for piece in pieces)):
        yield msgspec.msgpack.decode(answer, type=Answer)


def _moves(pieces: list[LogPiece], reached: list[Reached]) -> dict[str, Move]:
    planned = {(piece.universe, piece.file): piece for piece in pieces}
    moves: dict[str, Move] = {}
    for each in reached:
        piece = planned[each.universe, each.file]
        if each.offset > piece.start:
            moves[mark(each.universe, each.file)] = Move(piece.start, each.offset)
            moves[lines_mark(each.universe, each.file)] = Move(piece.n, each.n)
    return moves
