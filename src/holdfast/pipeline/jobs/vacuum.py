"""`vacuum`: compact small files of the lake, and delete files that are no longer used."""

import time
from typing import TYPE_CHECKING

from holdfast.limits import LAKE_FILES_MIN, LAKE_KEEP_HOURS
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.lake import Lake, compaction, staging
from holdfast.pipeline.progress import ProgressCallback
from holdfast.pipeline.schemas import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    keep_hours: int = LAKE_KEEP_HOURS,
    files_min: int = LAKE_FILES_MIN,
) -> JobResult:
    """Compact and clean every table. It changes no row, and may run concurrently with everything else."""
    started = time.monotonic()
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
    stale = staging.delete_stale(lake.location, keep_hours=keep_hours)
    if stale:
        notes.append(f"{stale} stale staging folders were removed")
    if progress is not None:
        progress("vacuum", len(TABLES), len(TABLES))
    return JobResult(job="vacuum", ok=True, rows=removed, seconds=time.monotonic() - started, notes=notes)
