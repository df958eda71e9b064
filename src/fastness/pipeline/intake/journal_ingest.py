"""Ingests records of worlds into `journal`, and a check of each segment into `segments`: the driver's side.

    damage ──► quarantine     files ──► journal     verdicts ──► segments     repaired ◄── quarantine

Each table has its own watermarks, so a run may be killed between any two of these commits. Segments are never ahead of
the journal, whose last record shows whether the plane still has the same history.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from fastness.pipeline import tasks
from fastness.pipeline.codec import Damaged
from fastness.pipeline.intake import journal_tasks, plans
from fastness.pipeline.intake.ingest_run import ReplanRequired, Run, check_staged
from fastness.pipeline.intake.journal_tasks import Item, LastRecord, SegmentCheck, TaskResult
from fastness.pipeline.intake.plans import Batch, Plan, WorldRange
from fastness.pipeline.intake.quarantine import REWOUND, Quarantined, Scope
from fastness.pipeline.lake import LakeTable, Move
from fastness.pipeline.schemas import JOURNAL, SEGMENTS


def ingest_journals(run: Run) -> None:
    """Ingest all records that the view has and the lake does not."""
    diverged_worlds: set[tuple[str, str]] = set()
    run.retry_until_done("the journal", lambda: _ingest_new(run, diverged_worlds))


def execute_items(run: Run, items: Sequence[Item], bodies: Mapping[str, bytes] | None = None) -> Iterator[TaskResult]:
    """Run the items on executors, in balanced tasks. Each task writes its own files, and gets the payload it needs."""
    location, storage = run.table(JOURNAL).location, run.config.storage
    groups = tasks.balanced([item.size for item in items], tasks.parallelism(run.spark))
    work = [
        msgspec.msgpack.encode(
            journal_tasks.task(location, storage, [items[n] for n in group], bodies or {}, run.redaction)
        )
        for group in groups
    ]
    for result in run.execute(journal_tasks.execute_task, work, sum(item.size for item in items)):
        yield msgspec.msgpack.decode(result, type=TaskResult)


def quarantine_row(damaged: Damaged) -> Quarantined:
    return Quarantined(
        damaged.universe, JOURNAL.name, damaged.world, damaged.start, damaged.end, damaged.reason, damaged.detail
    )


def segment_rows(segment_checks: Sequence[SegmentCheck]) -> pa.Table:
    """Segment checks as rows of `segments`."""
    now_ms = time.time_ns() // 1_000_000
    rows = [
        {
            "universe": each.universe,
            "world": each.world,
            "start": each.segment.start,
            "last": each.segment.end,
            "object_path": each.segment.object_path,
            "checksum": each.segment.checksum,
            "size": each.segment.size,
            "verdict": each.verdict,
            "reason": each.reason,
            "seen_at": now_ms,
        }
        for each in segment_checks
    ]
    return pa.Table.from_pylist(rows, SEGMENTS.schema)


def _ingest_new(run: Run, diverged_worlds: set[tuple[str, str]]) -> None:
    journal, segments = run.table(JOURNAL), run.table(SEGMENTS)
    plan = Plan(
        run.view,
        run.staging,
        heights=run.table(JOURNAL).watermark,  # Its own snapshot of the table: planning runs while others commit.
        segment_checks=run.table(SEGMENTS).watermark,
        rewound_sources=run.quarantine.rewound(),
        diverged_worlds=diverged_worlds,
        batch_bytes=run.batch_bytes,
        packer=run.packer,
    )
    with run.prefetch(plan.batches()) as batches:
        for batch in batches:
            try:
                _ingest_batch(run, batch, journal, segments, diverged_worlds)
            finally:
                run.clear(batch.staging)


def _ingest_batch(
    run: Run, batch: Batch, journal: LakeTable, segments: LakeTable, diverged_worlds: set[tuple[str, str]]
) -> None:
    results = list(execute_items(run, batch.items, batch.payload.bodies)) if batch.items else []
    diverged = {world for result in results for world in result.diverged}
    if diverged:
        diverged_worlds |= diverged
        found = [_divergence(world_range) for world_range in batch.ranges if _world(world_range) in diverged]
        run.quarantine.resolve(_rewound_scopes(found), found)
        raise ReplanRequired
    check_staged(result.staging_error for result in results)
    found = [quarantine_row(each) for result in results for each in result.damaged] + batch.found
    run.quarantine.add(found)
    files = [file for result in results for file in result.files]
    last_records = {
        (record.universe, record.world): record
        for result in results
        for record in _range_ends(result.last_records, batch.ranges)
    }
    moves = _moves(journal, batch.ranges, last_records)
    if moves:
        journal.append(files, moves)
        run.record_commit(JOURNAL, sum(file.rows for file in files))
    _commit_checks(run, batch, segments, [each for result in results for each in result.segment_checks])
    run.quarantine.resolve([*_scopes(batch.ranges), *_rewound_scopes(batch.found)], found)


def _commit_checks(run: Run, batch: Batch, segments: LakeTable, segment_checks: list[SegmentCheck]) -> None:
    moves = {
        plans.segment_watermark(world_range.universe, world_range.world): world_range.segment_checks
        for world_range in batch.ranges
        if world_range.segment_checks.target > world_range.segment_checks.origin
    }
    if moves:
        segments.append_rows(segment_rows(segment_checks), moves)
        run.record_commit(SEGMENTS, len(segment_checks))


def _range_ends(last_records: Sequence[LastRecord], ranges: Sequence[WorldRange]) -> Iterator[LastRecord]:
    """The last records of the planned ranges; a range may be several items, and each has a last record."""
    last = {_world(world_range): world_range.heights.target - 1 for world_range in ranges}
    return (record for record in last_records if last.get((record.universe, record.world)) == record.height)


def _moves(
    journal: LakeTable, ranges: Sequence[WorldRange], last_records: dict[tuple[str, str], LastRecord]
) -> dict[str, Move]:
    moves: dict[str, Move] = {}
    for world_range in ranges:
        if world_range.heights.target > world_range.heights.origin:
            moves[plans.journal_watermark(*_world(world_range))] = world_range.heights
            watermark, record = plans.tip_watermark(*_world(world_range)), last_records.get(_world(world_range))
            before = journal.watermark(watermark) if world_range.fingerprint is None else world_range.fingerprint
            # If the last record could not be read, there is nothing to compare with.
            moves[watermark] = Move(before, 0 if record is None else record.fingerprint)
    return moves


def _scopes(ranges: Sequence[WorldRange]) -> Iterator[Scope]:
    for world_range in ranges:
        low, high = world_range.heights.origin, world_range.heights.target - 1
        yield Scope(world_range.universe, JOURNAL.name, world_range.world, low, high)


def _rewound_scopes(found: Sequence[Quarantined]) -> list[Scope]:
    """Scopes that replace the `rewound` rows of these sources."""
    return [Scope(row.universe, row.table, row.source, 0, -1) for row in found]


def _divergence(world_range: WorldRange) -> Quarantined:
    height = world_range.heights.origin
    return Quarantined(
        world_range.universe,
        JOURNAL.name,
        world_range.world,
        height,
        max(height, world_range.heights.target - 1),
        REWOUND,
        f"record {height - 1} differs from the one in the lake: the plane was restored from an older backup, or the "
        "world was deleted and created again",
    )


def _world(world_range: WorldRange) -> tuple[str, str]:
    return world_range.universe, world_range.world
