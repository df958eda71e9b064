"""`ingest`: what is new in a plane goes into the lake, each row once.

It fills journal, segments, activity, entity_changes and quarantine, and begins where the last commit ended, whatever
became of the run that made it. `follow` does so again and again.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import HoldfastError, Retry
from holdfast.limits import (
    FINDINGS_MAX,
    INGEST_ALONE_BYTES,
    INGEST_FOLLOW_SECONDS,
    INGEST_HEAL_SECONDS,
    INGEST_TIDY_FILES,
)
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.intake import changes, histories, logs, repair
from holdfast.pipeline.intake.quarantines import Quarantined
from holdfast.pipeline.intake.runs import Run
from holdfast.pipeline.intake.task_payloads import Courier
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake import Lake, compaction, staging
from holdfast.pipeline.lake.locations import Place
from holdfast.pipeline.progress import Tell
from holdfast.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUARANTINE, SEGMENTS
from holdfast.pipeline.views import View, open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("holdfast.pipeline")


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: Tell | None = None,
    follow: bool = False,
    every_seconds: float = INGEST_FOLLOW_SECONDS,
    stop: threading.Event | None = None,
) -> JobResult:
    """Take in what is new; with `follow`, until `stop` is set or somebody interrupts.

    `ok` says that nothing is quarantined. Without Spark everything is done in this process.

    Raises:
        SchemaMismatch: a newer Holdfast has written the lake.
        TransactionConflict: other runs were always faster.
        HoldfastError: the plane or the lake cannot be reached.
    """
    begun = time.monotonic()
    told = _once(spark, config, progress, is_healing=True)
    if follow:
        with suppress(KeyboardInterrupt):
            for more in _follow(spark, config, progress, every_seconds, stop or threading.Event()):
                told = _sum(told, more)
    return msgspec.structs.replace(told, seconds=time.monotonic() - begun)


def _follow(
    spark: "SparkSession | None", config: Config, progress: Tell | None, every_seconds: float, stop: threading.Event
) -> Iterator[JobResult]:
    healed = time.monotonic()
    while not stop.wait(every_seconds):
        is_healing = time.monotonic() - healed >= INGEST_HEAL_SECONDS
        try:
            yield _once(spark, config, progress, is_healing=is_healing, alone_bytes=INGEST_ALONE_BYTES)
            if is_healing:
                tidy(spark, config)
                healed = time.monotonic()
        except HoldfastError as error:
            if error.retry is Retry.NEVER:
                raise
            # The plane is being restarted, or a store is away for a moment.
            _log.warning("This round took in nothing more, and the next one tries again: %s", error)


def take_in(
    spark: "SparkSession | None",
    config: Config,
    view: View,
    *,
    progress: Tell | None = None,
    is_healing: bool = True,
    alone_bytes: int = 0,
) -> JobResult:
    """Take in what a view has; without Spark, and where there are fewer than so many bytes, in this process."""
    begun = time.monotonic()
    with staging.staged(Lake(config.lake, config.storage).place) as staged, _courier(config, staged) as courier:
        work = [Run(spark, config, view, staged, progress, courier=courier, alone_bytes=alone_bytes) for _ in range(2)]
        if is_healing:
            repair.fill(work[0])
        _take_in_all(*work)
        work[0].quarantine.refresh()
        found = work[0].quarantine.rows()
    rows = {name: sum(each.rows[name] for each in work) for name in work[0].rows}
    rows[QUARANTINE.name] = len(found)
    return JobResult(
        job="ingest",
        ok=not found,
        rows=rows,
        seconds=time.monotonic() - begun,
        findings=[_finding(row) for row in found[:FINDINGS_MAX]],
        notes=[f"{len(found)} stretches are quarantined"] if found else [],
    )


def tidy(spark: "SparkSession | None", config: Config) -> None:
    """Compact what many small commits have left, once there is enough of it. Old files stay until `vacuum`."""
    lake = Lake(config.lake, config.storage)
    for table in (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES):
        compaction.compact(spark, lake.table(table), files_min=INGEST_TIDY_FILES)


def _take_in_all(worlds: Run, rest: Run) -> None:
    """Records of worlds, and everything else. Executors work on both at once; each has its own tables and marks."""
    if worlds.spark is None:
        histories.take_in(worlds)
        _take_in_rest(rest)
        return
    with ThreadPoolExecutor(1, "holdfast-ingest") as run_in_thread:
        beside = run_in_thread.submit(_take_in_rest, rest)
        histories.take_in(worlds)
        beside.result()


@contextmanager
def _courier(config: Config, staged: Place) -> Iterator[Courier | None]:
    """Nobody is needed where executors read the very folder that a view stages in."""
    if staged.is_local:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-ingest-") as folder:
        yield Courier(Stores(config.storage), Path(folder))


def _take_in_rest(run: Run) -> None:
    run.quarantine.refresh()
    logs.take_in(run)
    changes.take_in(run)


def _once(
    spark: "SparkSession | None",
    config: Config,
    progress: Tell | None,
    *,
    is_healing: bool,
    alone_bytes: int = 0,
) -> JobResult:
    with open_view(config) as view:
        return take_in(spark, config, view, progress=progress, is_healing=is_healing, alone_bytes=alone_bytes)


def _sum(before: JobResult, told: JobResult) -> JobResult:
    rows = {name: before.rows[name] + count for name, count in told.rows.items()}
    return msgspec.structs.replace(told, rows={**rows, QUARANTINE.name: told.rows[QUARANTINE.name]})


def _finding(row: Quarantined) -> dict[str, object]:
    return {
        "universe": row.universe,
        "table": row.table,
        "world": row.source,
        "height": row.start,
        "end": row.end,
        "reason": row.reason,
        "detail": row.detail,
    }
