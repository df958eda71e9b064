"""Adds rows that the plane has and the lake lacks below its watermarks, where an ingest does not look.

    lake    0 1 . . 4 5 | watermark        2 and 3 are added, whether they are in the quarantine or not
    plane   0 1 2 3 4 5   6 7              6 and 7 are the next ingest's

Rows that were removed by their age are not missing.

Like repairs, each commit moves the watermark holes/<universe>/<source>: of two runs, one starts over.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import MissingObject
from fastness.layers import queues
from fastness.layers.entities import EntityKey
from fastness.layers.queues import QueueKey
from fastness.layers.queues.policies import history_ms
from fastness.pipeline.intake import divergence, entity_ingest, history_ingest, log_ingest, plans, repair
from fastness.pipeline.intake.ingest_run import Run
from fastness.pipeline.intake.quarantine import Quarantined, Scope
from fastness.pipeline.intake.repair import Gap
from fastness.pipeline.intake.sources import Sources
from fastness.pipeline.lake import LakeTable, retention
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUEUE_EVENTS
from fastness.pipeline.views.rows import EntityRow
from fastness.runtime.activity import format as log_format


def backfill(run: Run, universe: str, sources: Sources, differing: Collection[tuple[str, str]]) -> None:
    """Add the missing rows of these sources, and drop them from the quarantine.

    Sources that differ from the plane, by (table, source), are left as they are: two histories are never mixed.
    """
    held = {*differing, *((table, source) for where, table, source in run.quarantine.rewound() if where == universe)}
    run.retry_until_done("the journal", lambda: _fill_worlds(run, universe, sources, held))
    run.retry_until_done("entity changes", lambda: _fill_entities(run, universe, sources, held))
    run.retry_until_done("the histories of queues", lambda: _fill_queues(run, universe, sources))
    run.retry_until_done("the session logs", lambda: _fill_logs(run, universe, sources, held))


def _fill_worlds(run: Run, universe: str, sources: Sources, held: set[tuple[str, str]]) -> None:
    table = run.table(JOURNAL)
    for world in run.view.worlds(universe):
        if sources.wants(JOURNAL.name, world.name) and (JOURNAL.name, world.name) not in held:
            end = min(world.head, table.watermark(plans.journal_watermark(universe, world.name)))
            present = _numbers(table, universe, "world", world.name, "height")
            repair.repair_heights(
                run, table, list(_gaps(universe, JOURNAL.name, world.name, (n for n in range(end) if n not in present)))
            )


def _fill_entities(run: Run, universe: str, sources: Sources, held: set[tuple[str, str]]) -> None:
    table = run.table(ENTITY_CHANGES)
    for entity in run.view.entities(universe):
        is_held = (ENTITY_CHANGES.name, f"{entity.kind}/{entity.id}") in held
        if sources.wants(ENTITY_CHANGES.name, entity.kind) and not is_held:
            _fill_entity(run, table, entity)


def _fill_entity(run: Run, table: LakeTable, entity: EntityRow) -> None:
    universe, kind, id = entity.universe, entity.kind, entity.id
    ingested = table.watermark(entity_ingest.watermark(universe, kind, id))
    where = (pc.field("kind") == kind) & (pc.field("id") == id)
    present = {
        version
        for rows in table.scan(["version"], where, universe=universe, kind=kind)
        for version in rows.column("version").to_pylist()
    }
    retained_ms = retention.retained_ms(table, universe)
    rows = [
        row
        for row in divergence.plane_changes(run.view, EntityKey(universe, kind, id), 1)
        if row["version"] <= ingested and row["version"] not in present and row["changed_at"] >= retained_ms
    ]
    if rows:
        watermark = f"holes/{universe}/{kind}/{id}"
        moves = {watermark: repair.next_repair(table, watermark)}
        stored = [run.redaction.change(row) for row in rows]
        table.append_rows(pa.Table.from_pylist(stored, ENTITY_CHANGES.schema), moves)
        run.record_commit(ENTITY_CHANGES, len(rows))
    _shorten(run, universe, f"{kind}/{id}", present | {row["version"] for row in rows})


def _shorten(run: Run, universe: str, source: str, present: set[int]) -> None:
    """Drop the versions that the lake has from the quarantined ranges of an entity."""
    found = [row for row in run.quarantine.rows() if row.key[:3] == (universe, ENTITY_CHANGES.name, source)]
    for row in found:
        left = [version for version in range(row.start, row.end + 1) if version not in present]
        if len(left) <= row.end - row.start:
            scope = Scope(universe, row.table, source, row.start, row.end, clears_rewound=False)
            run.quarantine.resolve([scope], [_part(row, low, high) for low, high in repair.ranges(left)])


def _part(row: Quarantined, low: int, high: int) -> Quarantined:
    return Quarantined(row.universe, row.table, row.source, low, high, row.reason, row.detail, row.accepted_at)


def _fill_queues(run: Run, universe: str, sources: Sources) -> None:
    table = run.table(QUEUE_EVENTS)
    for name in run.view.queue_names(universe):
        queue = QueueKey(universe, name)
        if sources.wants(QUEUE_EVENTS.name, name) and history_ms(run.view.database.read(queues.policy_of, queue)):
            history_ingest.ingest_queue(run, table, queue, 0)


def _fill_logs(run: Run, universe: str, sources: Sources, held: set[tuple[str, str]]) -> None:
    table = run.table(ACTIVITY)
    retained_ms = retention.retained_ms(table, universe)
    staging = f"{run.staging}/backfill"
    try:
        for file in run.view.logs(universe):
            end = table.watermark(log_ingest.line_watermark(universe, file.id))
            if not end or not sources.wants(ACTIVITY.name, file.session) or (ACTIVITY.name, file.id) in held:
                continue
            present = _numbers(table, universe, "file", file.id, "n")
            try:
                lines = [line for _, line in log_format.lines(run.view.log_body(file)) if line is not None]
                kept = (line for line in lines if line.at_ms >= retained_ms)
                missing = sorted({line.n for line in kept if line.n < end and line.n not in present})
                gaps = list(_gaps(universe, ACTIVITY.name, file.id, missing))
                if gaps:
                    repair.repair_lines(run, table, gaps, run.view.log_chunk(file, staging))
            except MissingObject:
                continue
    finally:
        run.clear(staging)


def _numbers(table: LakeTable, universe: str, column: str, name: str, number: str) -> set[int]:
    found = table.scan([number], pc.field(column) == name, universe=universe, **{column: name})
    return {each for rows in found for each in rows.column(number).to_pylist()}


def _gaps(universe: str, table: str, source: str, missing: Iterable[int]) -> Iterator[Gap]:
    numbers: Sequence[int] = list(missing)
    for low, high in repair.ranges(numbers):
        yield Gap(Quarantined(universe, table, source, low, high, "missing", ""), [(low, high)])
