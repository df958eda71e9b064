"""`vacuum`: remove rows by their age, compact small files of the lake, and delete files that are no longer used."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from fastness.limits import LAKE_FILES_MIN, LAKE_KEEP_HOURS
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs.folds import FOLDED_FROM, folded_watermark
from fastness.pipeline.lake import Lake, LakeTable, compaction, retention, retries, staging
from fastness.pipeline.lake.changes import ChangeLog
from fastness.pipeline.lake.retention import Removed
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    keep_hours: int = LAKE_KEEP_HOURS,
    files_min: int = LAKE_FILES_MIN,
    retain: Mapping[str, float] | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Compact and clean every table. It may run concurrently with everything else.

    With `retain`, first remove the rows of tables that are older than so many seconds, by whole days in UTC. Events
    that no roll-up has read stay until one has.

    Raises:
        InvalidArgument: rows of a table cannot be removed by age.
        TransactionConflict: other runs committed first, too often.
    """
    started = time.monotonic()
    retention.check(retain or {})
    lake = Lake(config.lake, config.storage)
    removed: dict[str, int] = {}
    notes: list[str] = []
    removed_rows: dict[str, int] = {}
    for name, seconds in (retain or {}).items():
        before = retention.cutoff(now or datetime.now(UTC), seconds)
        remove = partial(_remove_older, lake, TABLES[name], before, config.universes)
        found = retries.retry_until_committed(f"the table {name}", remove)
        removed_rows[f"{name} rows removed"] = found.rows
        notes += _retention_notes(name, found, before)
    for n, table in enumerate(TABLES.values()):
        if progress is not None:
            progress(f"vacuum {table.name}", n, len(TABLES))
        target = lake.table(table)
        old, new = compaction.compact(spark, target, files_min=files_min)
        if old:
            notes.append(f"{table.name}: {old} small files became {new}")
        removed[table.name] = len(compaction.vacuum(target, keep_hours=keep_hours))
    stale = staging.delete_stale(lake.location, keep_hours=keep_hours)
    if stale:
        notes.append(f"{stale} stale staging folders were removed")
    if progress is not None:
        progress("vacuum", len(TABLES), len(TABLES))
    return JobResult(
        job="vacuum", ok=True, rows=removed | removed_rows, seconds=time.monotonic() - started, notes=notes
    )


def _remove_older(lake: Lake, table: Table, before: datetime, universes: Sequence[str]) -> Removed:
    folded = [lake.table(each) for each in FOLDED_FROM.get(table.name, ())]  # Before the source: it may only be newer.
    source = lake.table(table)
    held = set(_unread_paths(source, folded)) if folded else set()
    return retention.remove_older(source, before, universes=universes, held=held)


def _unread_paths(source: LakeTable, folded: Sequence[LakeTable]) -> Iterator[str]:
    """The files with events that a roll-up has not read."""
    changes = ChangeLog(source)
    for universe in {file.universe for file in source.entries()}:
        watermark = folded_watermark(source.table.name, universe)
        version = min(target.watermark(watermark) for target in folded) - 1
        yield from changes.paths_with_new_rows(version, universe)


def _retention_notes(name: str, found: Removed, before: datetime) -> Iterator[str]:
    if found.rows:
        yield f"{name}: {found.rows:,} rows from before {before:%Y-%m-%d} were removed"
    if found.held_files:
        yield (
            f"{name}: {found.held_files} files with older rows have events that no roll-up has read; they stay until "
            "the next `fastness pipeline rollup`"
        )
