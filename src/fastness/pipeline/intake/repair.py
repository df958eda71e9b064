"""Retries quarantined ranges: ingests exactly the heights and lines that are readable now, and drops their quarantine
rows.

    watermark holes/<universe>/<source>   how often some of the source's gaps were repaired

A gap is below the watermark of its world or file; what is above is ingested as usual. Before a gap is repaired, the
table itself is checked for its rows: an earlier run may have been killed after it repaired the gap and before it
updated the quarantine, or have found damage where another run found none. For the same reason gaps may overlap, so they
are repaired one source at a time, by one run at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import MissingObject
from fastness.limits import INGEST_WORLDS_MAX
from fastness.pipeline import logs as log_reader
from fastness.pipeline.intake import journal_ingest, journal_tasks, log_ingest, plans
from fastness.pipeline.intake.ingest_run import Run, check_staged
from fastness.pipeline.intake.journal_tasks import Item, SegmentCheck
from fastness.pipeline.intake.quarantine import REWOUND, Quarantined, Scope
from fastness.pipeline.lake import LakeTable, Move, files
from fastness.pipeline.logs import LogChunk
from fastness.pipeline.schemas import ACTIVITY, JOURNAL, SEGMENTS, decoded

_Range: TypeAlias = tuple[int, int]  # Inclusive.


class Gap(msgspec.Struct, frozen=True):
    """A quarantine row, and those of its heights or lines that neither the table nor an earlier gap has."""

    row: Quarantined
    missing: list[_Range]

    @property
    def watermark(self) -> str:
        return f"holes/{self.row.universe}/{self.row.source}"


def repair_all(run: Run) -> None:
    """Read all quarantined ranges again."""
    run.retry_until_done("gaps in the journal", lambda: _repair_journal(run))
    run.retry_until_done("gaps in the session logs", lambda: _repair_activity(run))
    run.retry_until_done("segment checks", lambda: _recheck_segments(run))


def _repair_journal(run: Run) -> None:
    table = run.table(JOURNAL)
    rows = [
        row
        for row in sorted(run.quarantine.rows(), key=lambda row: row.key)  # The sort order of files.
        if row.table == JOURNAL.name
        and row.reason != REWOUND
        and row.end < table.watermark(plans.journal_watermark(row.universe, row.source))
    ]
    for begin in range(0, len(rows), INGEST_WORLDS_MAX):
        repair_heights(run, table, _gaps(table, rows[begin : begin + INGEST_WORLDS_MAX], "world", "height"))


def repair_heights(run: Run, table: LakeTable, gaps: Sequence[Gap]) -> None:
    """Ingest the readable heights of gaps, and update the quarantine."""
    staging = f"{run.staging}/holes"
    try:
        work = {gap.row.key: list(_gap_items(run, gap, staging)) for gap in gaps if gap.missing}
        items = [item for each in work.values() for item in each]
        results = list(journal_ingest.execute_items(run, items)) if items else []
    finally:
        run.clear(staging)
    check_staged(result.staging_error for result in results)
    added = [file for result in results for file in result.files]
    damaged = [journal_ingest.quarantine_row(each) for result in results for each in result.damaged]
    checked = [gap for gap in gaps if not gap.missing or work[gap.row.key]]
    remaining = [row for gap in checked for row in _still_damaged(gap, damaged)]
    if added:
        table.append(added, {gap.watermark: next_repair(table, gap.watermark) for gap in checked if gap.missing})
        run.record_commit(JOURNAL, sum(file.rows for file in added))
    run.quarantine.resolve([_scope(gap) for gap in checked], remaining)


def _gap_items(run: Run, gap: Gap, staging: str) -> Iterator[Item]:
    row = gap.row
    world = run.view.world(row.universe, row.source)
    if world is None or world.head <= row.end:
        return
    chunks = run.view.chunks(msgspec.structs.replace(world, head=row.end + 1), row.start, staging)
    wanted = [chunk for chunk in chunks if chunk.start <= row.end]
    # Their segments were checked before; `_recheck_segments` checks them again.
    yield Item(row.universe, row.source, wanted, checked_below=world.head, wanted=gap.missing)


def _still_damaged(gap: Gap, damaged: Sequence[Quarantined]) -> Iterator[Quarantined]:
    """The damage that remains of a gap; if that is all of it, the existing row."""
    row = gap.row
    for each in damaged:
        if each.key[:3] == row.key[:3] and each.start <= row.end and row.start <= each.end:
            start, end = max(each.start, row.start), min(each.end, row.end)
            yield row if (start, end) == (row.start, row.end) else msgspec.structs.replace(each, start=start, end=end)


def _repair_activity(run: Run) -> None:
    table = run.table(ACTIVITY)
    rows: dict[tuple[str, str], list[Quarantined]] = {}
    for row in run.quarantine.rows():
        ingested = table.watermark(log_ingest.line_watermark(row.universe, row.source))
        if row.table == ACTIVITY.name and row.reason != REWOUND and row.end < ingested:
            rows.setdefault((row.universe, row.source), []).append(row)
    staging = f"{run.staging}/log-holes"
    try:
        for universe in sorted({universe for universe, _ in rows}):
            for file in run.view.logs(universe):
                if bad := rows.get((universe, file.id)):
                    try:
                        chunk = run.view.log_chunk(file, staging)
                        repair_lines(run, table, _gaps(table, bad, "file", "n"), chunk)
                    except MissingObject:
                        continue
    finally:
        run.clear(staging)


def repair_lines(run: Run, table: LakeTable, gaps: Sequence[Gap], chunk: LogChunk) -> None:
    """Ingest the readable lines of one file's gaps."""
    batches = (each for each in log_reader.activity_rows([chunk], run.stores) if isinstance(each, pa.RecordBatch))
    wanted = {n for gap in gaps for n in _expand(gap.missing)}
    readable = pa.Table.from_batches([_filter_lines(batch, wanted) for batch in batches], decoded(ACTIVITY))
    visible = (run.view.hidden.visible(batch) for batch in readable.to_batches())
    rows = pa.Table.from_batches([run.redaction.activity(batch) for batch in visible], ACTIVITY.schema)
    if rows.num_rows:
        added = files.write(ACTIVITY, table.location, files.sorted_batches(ACTIVITY, rows))
        table.append(added, {gap.watermark: next_repair(table, gap.watermark) for gap in gaps if gap.missing})
        run.record_commit(ACTIVITY, rows.num_rows)
    found = set(readable.column("n").to_pylist())
    remaining: list[Quarantined] = []
    for gap in gaps:
        left = [n for n in _expand(gap.missing) if n not in found]
        remaining += [msgspec.structs.replace(gap.row, start=low, end=high) for low, high in ranges(left)]
    run.quarantine.resolve([_scope(gap) for gap in gaps], remaining)


def _filter_lines(batch: pa.RecordBatch, numbers: set[int]) -> pa.RecordBatch:
    return batch.filter(pc.is_in(batch.column("n"), pa.array(sorted(numbers), pa.int64())))


def _recheck_segments(run: Run) -> None:
    """Check damaged segments again, and update the rows of those that are intact now."""
    table = run.table(SEGMENTS)
    bad = [row for rows in table.scan(where=pc.field("verdict") != journal_tasks.OK) for row in rows.to_pylist()]
    for begin in range(0, len(bad), INGEST_WORLDS_MAX):
        staging = f"{run.staging}/verdicts"
        try:
            items = [
                item for row in bad[begin : begin + INGEST_WORLDS_MAX] for item in _recheck_items(run, row, staging)
            ]
            results = list(journal_ingest.execute_items(run, items)) if items else []
        finally:
            run.clear(staging)
        check_staged(result.staging_error for result in results)
        intact = [each for result in results for each in result.segment_checks if each.verdict == journal_tasks.OK]
        if intact:
            _replace_segment_rows(table, intact)
            run.record_commit(SEGMENTS, 0)


def _recheck_items(run: Run, row: dict[str, object], staging: str) -> Iterator[Item]:
    universe, name, start, end = str(row["universe"]), str(row["world"]), row["start"], row["last"]
    world = run.view.world(universe, name)
    for segment in world.segments if world is not None else ():
        if world is not None and (segment.start, segment.end) == (start, end):
            chunks = run.view.chunks(msgspec.structs.replace(world, head=segment.end + 1), segment.start, staging)
            yield Item(universe, name, [], segment_checks=[chunk for chunk in chunks if chunk.start == segment.start])


def _replace_segment_rows(table: LakeTable, intact: Sequence[SegmentCheck]) -> None:
    keys = {(each.universe, each.world, each.segment.start) for each in intact}
    old, kept = [], []
    for file in table.entries():
        if any(file.universe == key[0] and file.may_hold(world=key[1], start=key[2]) for key in keys):
            rows = table.rows_of(file)
            row_keys = zip(*(rows.column(name).to_pylist() for name in ("universe", "world", "start")), strict=True)
            old.append(file)
            kept.append(rows.filter(pa.array([row_key not in keys for row_key in row_keys], pa.bool_())))
    rows = pa.concat_tables([*kept, journal_ingest.segment_rows(intact)])
    table.replace(old, files.write(SEGMENTS, table.location, files.sorted_batches(SEGMENTS, rows)))


def _gaps(table: LakeTable, rows: Sequence[Quarantined], source: str, number: str) -> list[Gap]:
    """The gaps without the rows that the table has; reads each of its files once."""
    by_universe: dict[str, dict[str, list[_Range]]] = {}
    for row in rows:
        by_universe.setdefault(row.universe, {}).setdefault(row.source, []).append((row.start, row.end))
    present = {
        (universe, name): numbers
        for universe, spans in by_universe.items()
        for name, numbers in _rows_present(table, universe, spans, source, number).items()
    }
    gaps = []
    for row in rows:
        ingested = present.setdefault((row.universe, row.source), set())
        missing = [n for n in range(row.start, row.end + 1) if n not in ingested]
        ingested.update(missing)
        gaps.append(Gap(row, list(ranges(missing))))
    return gaps


def _rows_present(
    table: LakeTable, universe: str, spans: dict[str, list[_Range]], source: str, number: str
) -> dict[str, set[int]]:
    """The heights or lines in these spans that the table has, by source."""
    found: dict[str, set[int]] = {}
    for file in table.entries():
        candidates = [name for name in spans if file.universe == universe and file.may_hold(**{source: name})]
        if not candidates:
            continue
        rows = table.rows_of(file, [source, number], pc.field(source).isin(candidates))
        numbers = rows.column(number).to_numpy()
        names = np.asarray(rows.column(source).to_pylist(), dtype=object)
        for name in candidates:
            matching = numbers[names == name]
            for low, high in spans[name]:
                found.setdefault(name, set()).update(matching[(matching >= low) & (matching <= high)].tolist())
    return found


def _expand(spans: Iterable[_Range]) -> Iterator[int]:
    for low, high in spans:
        yield from range(low, high + 1)


def ranges(numbers: Sequence[int]) -> Iterator[_Range]:
    """Sorted numbers as ranges without a gap."""
    begin = 0
    for n, number in enumerate(numbers):
        if n + 1 == len(numbers) or numbers[n + 1] != number + 1:
            yield numbers[begin], number
            begin = n + 1


def next_repair(table: LakeTable, watermark: str) -> Move:
    """The move that counts another repair: of two runs that repair the same source, one starts over."""
    return Move(table.watermark(watermark), table.watermark(watermark) + 1)


def _scope(gap: Gap) -> Scope:
    return Scope(gap.row.universe, gap.row.table, gap.row.source, gap.row.start, gap.row.end, clears_rewound=False)
