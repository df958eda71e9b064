"""`vacuum`: small files of the lake are compacted, and what no table needs any more is removed."""

import time
from typing import TYPE_CHECKING

from holdfast.limits import LAKE_FILES_MIN, LAKE_KEEP_HOURS
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.lake import Lake, compaction, staging
from holdfast.pipeline.progress import Tell
from holdfast.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: Tell | None = None,
    keep_hours: int = LAKE_KEEP_HOURS,
    files_min: int = LAKE_FILES_MIN,
) -> JobResult:
    """Compact and clean every table. It changes no row, and may run beside everything else."""
    begun = time.monotonic()
    lake = Lake(config.lake, config.storage)
    removed: dict[str, int] = {}
    notes: list[str] = []
    for n, table in enumerate(TABLES.values()):
        if progress is not None:
            progress(f"vacuum {table.name}", n, len(TABLES))
        found = lake.table(table)
        old, new = compaction.compact(spark, found, files_min=files_min)
        if old:
            notes.append(f"{table.name}: {old} small files became {new}")
        removed[table.name] = len(compaction.vacuum(found, keep_hours=keep_hours))
    stale = staging.sweep(lake.place, keep_hours=keep_hours)
    if stale:
        notes.append(f"{stale} folders that runs had left behind were removed")
    if progress is not None:
        progress("vacuum", len(TABLES), len(TABLES))
    return JobResult(job="vacuum", ok=True, rows=removed, seconds=time.monotonic() - begun, notes=notes)
