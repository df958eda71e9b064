"""What could not be read and now can: exactly those heights and lines go in, and their rows of the quarantine go.

    mark holes/<universe>/<source>   how often somebody has filled some of them

A hole lies below the mark of its world or file; what lies above is read by the ordinary way. Before anything is taken,
the table itself is asked which of the rows it has: a run may have been killed after it filled the hole and before it
said so, or have found damage where another one found none. For the same reason holes may overlap, so they are filled
one source at a time, by one run at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import MissingObject
from holdfast.limits import INGEST_WORLDS_MAX
from holdfast.pipeline import logs as loglines
from holdfast.pipeline.intake import histories, journals, logs, plans
from holdfast.pipeline.intake.journals import Item, Verdict
from holdfast.pipeline.intake.quarantines import REWOUND, Quarantined, Scope
from holdfast.pipeline.intake.runs import Run, require_staged
from holdfast.pipeline.lake import LakeTable, Move, files
from holdfast.pipeline.logs import LogPiece
from holdfast.pipeline.schemas import ACTIVITY, JOURNAL, SEGMENTS

_Span: TypeAlias = tuple[int, int]  # Both included.


class Hole(msgspec.Struct, frozen=True):
    """A row of the quarantine, and which of its heights or lines the table still lacks, and no other hole has."""

    row: Quarantined
    missing: list[_Span]

    @property
    def mark(self) -> str:
        return f"holes/{self.row.universe}/{self.row.source}"


def fill(run: Run) -> None:
    """Look at everything that was damaged once more."""
    run.until_done("holes in the journal", lambda: _fill_journal(run))
    run.until_done("holes in the session logs", lambda: _fill_activity(run))
    run.until_done("verdicts on segments", lambda: _revise_segments(run))


def _fill_journal(run: Run) -> None:
    table = run.table(JOURNAL)
    rows = [
        row
        for row in sorted(run.quarantine.rows(), key=lambda row: row.key)  # As rows are sorted in files.
        if row.table == JOURNAL.name
        and row.reason != REWOUND
        and row.end < table.mark(plans.journal_mark(row.universe, row.source))
    ]
    for begin in range(0, len(rows), INGEST_WORLDS_MAX):
        _fill_heights(run, table, _holes(table, rows[begin : begin + INGEST_WORLDS_MAX], "world", "height"))


def _fill_heights(run: Run, table: LakeTable, holes: Sequence[Hole]) -> None:
    staging = f"{run.staging}/holes"
    try:
        work = {hole.row.key: list(_items(run, hole, staging)) for hole in holes if hole.missing}
        items = [item for each in work.values() for item in each]
        answers = list(histories.executed(run, items)) if items else []
    finally:
        run.clear(staging)
    require_staged(answer.lost for answer in answers)
    added = [file for answer in answers for file in answer.files]
    damaged = [histories.quarantined(each) for answer in answers for each in answer.damaged]
    looked = [hole for hole in holes if not hole.missing or work[hole.row.key]]
    still = [row for hole in looked for row in _still(hole, damaged)]
    if added:
        table.append(added, {hole.mark: _next(table, hole) for hole in looked if hole.missing})
        run.committed(JOURNAL, sum(file.rows for file in added))
    run.quarantine.settle([_scope(hole) for hole in looked], still)


def _items(run: Run, hole: Hole, staging: str) -> Iterator[Item]:
    row = hole.row
    world = run.view.world(row.universe, row.source)
    if world is None or world.head <= row.end:
        return
    pieces = run.view.pieces(msgspec.structs.replace(world, head=row.end + 1), row.start, staging)
    wanted = [piece for piece in pieces if piece.start <= row.end]
    # Their segments have a verdict already; whether it is to be revised is looked at by itself.
    yield Item(row.universe, row.source, wanted, verdicted=world.head, wanted=hole.missing)


def _still(hole: Hole, damaged: Sequence[Quarantined]) -> Iterator[Quarantined]:
    """What of a hole cannot be read yet. If it is all of it, that is the row that is there."""
    row = hole.row
    for each in damaged:
        if each.key[:3] == row.key[:3] and each.start <= row.end and row.start <= each.end:
            start, end = max(each.start, row.start), min(each.end, row.end)
            yield row if (start, end) == (row.start, row.end) else msgspec.structs.replace(each, start=start, end=end)


def _fill_activity(run: Run) -> None:
    table = run.table(ACTIVITY)
    rows: dict[tuple[str, str], list[Quarantined]] = {}
    for row in run.quarantine.rows():
        taken = table.mark(logs.lines_mark(row.universe, row.source))
        if row.table == ACTIVITY.name and row.reason != REWOUND and row.end < taken:
            rows.setdefault((row.universe, row.source), []).append(row)
    staging = f"{run.staging}/log-holes"
    try:
        for universe in sorted({universe for universe, _ in rows}):
            for file in run.view.logs(universe):
                if bad := rows.get((universe, file.id)):
                    try:
                        piece = run.view.log_piece(file, staging)
                        _fill_lines(run, table, _holes(table, bad, "file", "n"), piece)
                    except MissingObject:
                        continue
    finally:
        run.clear(staging)


def _fill_lines(run: Run, table: LakeTable, holes: Sequence[Hole], piece: LogPiece) -> None:
    """Take the lines of one file that are in its holes."""
    batches = (each for each in loglines.activity_rows([piece], run.stores) if isinstance(each, pa.RecordBatch))
    wanted = {n for hole in holes for n in _numbers(hole.missing)}
    rows = pa.Table.from_batches([_only(batch, wanted) for batch in batches], ACTIVITY.schema)
    if rows.num_rows:
        added = files.write(ACTIVITY, table.place, files.in_order(ACTIVITY, rows))
        table.append(added, {hole.mark: _next(table, hole) for hole in holes if hole.missing})
        run.committed(ACTIVITY, rows.num_rows)
    found = set(rows.column("n").to_pylist())
    still: list[Quarantined] = []
    for hole in holes:
        left = [n for n in _numbers(hole.missing) if n not in found]
        still += [msgspec.structs.replace(hole.row, start=low, end=high) for low, high in _spans(left)]
    run.quarantine.settle([_scope(hole) for hole in holes], still)


def _only(batch: pa.RecordBatch, numbers: set[int]) -> pa.RecordBatch:
    return batch.filter(pc.is_in(batch.column("n"), pa.array(sorted(numbers), pa.int64())))


def _revise_segments(run: Run) -> None:
    """Segments that were damaged and are well now: their rows say so."""
    table = run.table(SEGMENTS)
    bad = [row for rows in table.scan(where=pc.field("verdict") != journals.OK) for row in rows.to_pylist()]
    for begin in range(0, len(bad), INGEST_WORLDS_MAX):
        staging = f"{run.staging}/verdicts"
        try:
            items = [
                item for row in bad[begin : begin + INGEST_WORLDS_MAX] for item in _segment_items(run, row, staging)
            ]
            answers = list(histories.executed(run, items)) if items else []
        finally:
            run.clear(staging)
        require_staged(answer.lost for answer in answers)
        well = [each for answer in answers for each in answer.verdicts if each.verdict == journals.OK]
        if well:
            _replace_verdicts(table, well)
            run.committed(SEGMENTS, 0)


def _segment_items(run: Run, row: dict[str, object], staging: str) -> Iterator[Item]:
    universe, name, start, end = str(row["universe"]), str(row["world"]), row["start"], row["end"]
    world = run.view.world(universe, name)
    for segment in world.segments if world is not None else ():
        if world is not None and (segment.start, segment.end) == (start, end):
            pieces = run.view.pieces(msgspec.structs.replace(world, head=segment.end + 1), segment.start, staging)
            yield Item(universe, name, [], verdicts=[piece for piece in pieces if piece.start == segment.start])


def _replace_verdicts(table: LakeTable, well: Sequence[Verdict]) -> None:
    keys = {(each.universe, each.world, each.segment.start) for each in well}
    old, kept = [], []
    for file in table.entries():
        if any(file.universe == key[0] and file.may_hold(world=key[1], start=key[2]) for key in keys):
            rows = table.rows_of(file)
            places = zip(*(rows.column(name).to_pylist() for name in ("universe", "world", "start")), strict=True)
            old.append(file)
            kept.append(rows.filter(pa.array([place not in keys for place in places], pa.bool_())))
    rows = pa.concat_tables([*kept, histories.verdict_rows(well)])
    table.replace(old, files.write(SEGMENTS, table.place, files.in_order(SEGMENTS, rows)))


def _holes(table: LakeTable, rows: Sequence[Quarantined], source: str, number: str) -> list[Hole]:
    """Holes, without what the table has of them: one look at its files for all."""
    by_universe: dict[str, dict[str, list[_Span]]] = {}
    for row in rows:
        by_universe.setdefault(row.universe, {}).setdefault(row.source, []).append((row.start, row.end))
    present = {
        (universe, name): numbers
        for universe, spans in by_universe.items()
        for name, numbers in _present(table, universe, spans, source, number).items()
    }
    holes = []
    for row in rows:
        taken = present.setdefault((row.universe, row.source), set())
        missing = [n for n in range(row.start, row.end + 1) if n not in taken]
        taken.update(missing)
        holes.append(Hole(row, list(_spans(missing))))
    return holes


def _present(
    table: LakeTable, universe: str, spans: dict[str, list[_Span]], source: str, number: str
) -> dict[str, set[int]]:
    """What the table has of these spans, by source."""
    found: dict[str, set[int]] = {}
    for file in table.entries():
        near = [name for name in spans if file.universe == universe and file.may_hold(**{source: name})]
        if not near:
            continue
        rows = table.rows_of(file, [source, number], pc.field(source).isin(near))
        numbers = rows.column(number).to_numpy()
        names = np.asarray(rows.column(source).to_pylist(), dtype=object)
        for name in near:
            mine = numbers[names == name]
            for low, high in spans[name]:
                found.setdefault(name, set()).update(mine[(mine >= low) & (mine <= high)].tolist())
    return found


def _numbers(spans: Iterable[_Span]) -> Iterator[int]:
    for low, high in spans:
        yield from range(low, high + 1)


def _spans(numbers: Sequence[int]) -> Iterator[_Span]:
    """Numbers in order, as stretches without a gap."""
    begin = 0
    for n, number in enumerate(numbers):
        if n + 1 == len(numbers) or numbers[n + 1] != number + 1:
            yield numbers[begin], number
            begin = n + 1


def _next(table: LakeTable, hole: Hole) -> Move:
    return Move(table.mark(hole.mark), table.mark(hole.mark) + 1)


def _scope(hole: Hole) -> Scope:
    return Scope(hole.row.universe, hole.row.table, hole.row.source, hole.row.start, hole.row.end, forgives=False)
