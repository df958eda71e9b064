"""`ingest`: copy new data of a plane into the lake, each row exactly once.

It fills journal, segments, activity, entity_changes and quarantine, and continues from the last commit, even if that
run was killed. With `follow` it repeats.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fastness.errors import FastnessError, RetryAdvice
from fastness.limits import (
    FINDINGS_MAX,
    INGEST_COMPACT_FILES,
    INGEST_FOLLOW_SECONDS,
    INGEST_INLINE_BYTES_MAX,
    INGEST_REPAIR_SECONDS,
    LOG_SETTLE_SECONDS,
)
from fastness.pipeline import completeness, ownership, redactions
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import entity_ingest, history_ingest, journal_ingest, log_ingest, repair
from fastness.pipeline.intake.ingest_run import Run
from fastness.pipeline.intake.quarantine import Quarantined
from fastness.pipeline.intake.task_payloads import PayloadPacker
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake, compaction, staging
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUARANTINE, QUEUE_EVENTS, SEGMENTS
from fastness.pipeline.views import View, shared_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("fastness.pipeline")


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    follow: bool = False,
    every_seconds: float = INGEST_FOLLOW_SECONDS,
    stop: threading.Event | None = None,
    view: View | None = None,
    round_ended: Callable[[JobResult | FastnessError], None] = lambda _outcome: None,
) -> JobResult:
    """Ingest new data, of `view` if one is given; with `follow`, repeat until `stop` is set or there is an interrupt.

    `round_ended` is called with the result of every round so far, or with the error after which it will be retried.

    `ok` means that the quarantine has no rows, or only accepted ones. Without Spark, everything runs in this process.

    Raises:
        SchemaMismatch: a newer Fastness wrote the lake.
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        TransactionConflict: other runs committed first, too often.
        FastnessError: the plane or the lake cannot be reached.
    """
    started = time.monotonic()
    result = _ingest_once(spark, config, progress, with_repair=True, view=view)
    if follow:
        with suppress(KeyboardInterrupt):
            round_ended(result)
            for update in _follow_plane(spark, config, progress, every_seconds, stop or threading.Event()):
                if isinstance(update, JobResult):
                    result = _combine(result, update)
                    round_ended(result)
                else:
                    round_ended(update)
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


def _follow_plane(
    spark: "SparkSession | None",
    config: Config,
    progress: ProgressCallback | None,
    every_seconds: float,
    stop: threading.Event,
) -> Iterator[JobResult | FastnessError]:
    repaired_at = time.monotonic()
    while not stop.wait(every_seconds):
        with_repair = time.monotonic() - repaired_at >= INGEST_REPAIR_SECONDS
        try:
            yield _ingest_once(spark, config, progress, with_repair=with_repair, inline_bytes=INGEST_INLINE_BYTES_MAX)
            if with_repair:
                compact_tables(spark, config)
                repaired_at = time.monotonic()
        except FastnessError as error:
            if error.retry is RetryAdvice.NEVER:
                raise
            # The plane is restarting, or a store is temporarily unreachable.
            _log.warning("Ingest failed and will be retried: %s", error)
            yield error


def ingest_view(
    spark: "SparkSession | None",
    config: Config,
    view: View,
    *,
    progress: ProgressCallback | None = None,
    with_repair: bool = True,
    inline_bytes: int = 0,
) -> JobResult:
    """Ingest a view; without Spark, or for batches of fewer than `inline_bytes`, in this process."""
    started = time.monotonic()
    lake = Lake(config.lake, config.storage)
    ownership.claim(lake, view)
    redactions.claim(lake, config)
    counted, counted_at = completeness.count(view), time.monotonic()
    with (
        staging.temporary_folder(lake.location) as staged,
        _packer(config, staged) as packer,
    ):
        work = [Run(spark, config, view, staged, progress, packer=packer, inline_bytes=inline_bytes) for _ in range(2)]
        if with_repair:
            repair.repair_all(work[0])
        _ingest_concurrently(work[0], work[1], counted_at + LOG_SETTLE_SECONDS if view.is_live else 0.0)
        work[0].quarantine.refresh()
        quarantined = work[0].quarantine.rows()
    completeness.record(lake, counted, list(view.universes()))
    rows = {name: sum(each.rows[name] for each in work) for name in work[0].rows}
    rows[QUARANTINE.name] = len(quarantined)
    found = [row for row in quarantined if row.accepted_at is None]
    return JobResult(
        job="ingest",
        ok=not found,
        rows=rows,
        seconds=time.monotonic() - started,
        findings=[finding(row) for row in found[:FINDINGS_MAX]],
        notes=list(_notes(len(found), len(quarantined) - len(found))),
    )


def compact_tables(spark: "SparkSession | None", config: Config) -> None:
    """Compact tables with many small files. The old files stay until `vacuum`."""
    lake = Lake(config.lake, config.storage)
    for table in (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS):
        compaction.compact(spark, lake.table(table), files_min=INGEST_COMPACT_FILES)


def _ingest_concurrently(worlds: Run, rest: Run, logs_from: float) -> None:
    """Ingest worlds and everything else concurrently; each has its own tables and watermarks.

    Session logs are not read before the time `logs_from`.
    """
    if worlds.spark is None:
        journal_ingest.ingest_journals(worlds)
        _ingest_logs_and_entities(rest, logs_from)
        return
    with ThreadPoolExecutor(1, "fastness-ingest") as run_in_thread:
        logs_and_entities = run_in_thread.submit(_ingest_logs_and_entities, rest, logs_from)
        journal_ingest.ingest_journals(worlds)
        logs_and_entities.result()


@contextmanager
def _packer(config: Config, staged: Location) -> Iterator[PayloadPacker | None]:
    """A packer for hot records; None if executors read the local folder that the view stages in."""
    if staged.is_local:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fastness-ingest-") as folder:
        yield PayloadPacker(Stores(config.storage), Path(folder))


def _ingest_logs_and_entities(run: Run, logs_from: float) -> None:
    run.quarantine.refresh()
    entity_ingest.ingest_changes(run)
    history_ingest.ingest_history(run)
    time.sleep(max(logs_from - time.monotonic(), 0.0))
    log_ingest.ingest_logs(run)


def _ingest_once(
    spark: "SparkSession | None",
    config: Config,
    progress: ProgressCallback | None,
    *,
    with_repair: bool,
    inline_bytes: int = 0,
    view: View | None = None,
) -> JobResult:
    with shared_view(config, view) as used:
        return ingest_view(spark, config, used, progress=progress, with_repair=with_repair, inline_bytes=inline_bytes)


def _combine(before: JobResult, result: JobResult) -> JobResult:
    rows = {name: before.rows[name] + count for name, count in result.rows.items()}
    return msgspec.structs.replace(result, rows={**rows, QUARANTINE.name: result.rows[QUARANTINE.name]})


def _notes(quarantined: int, accepted: int) -> Iterator[str]:
    if quarantined:
        yield f"{quarantined} ranges are quarantined"
    if accepted:
        yield f"{accepted} ranges are lost, which was accepted"


def finding(row: Quarantined) -> dict[str, object]:
    """A quarantined range as a finding of a result."""
    return {
        "universe": row.universe,
        "table": row.table,
        "world": row.source,
        "height": row.start,
        "end": row.end,
        "reason": row.reason,
        "detail": row.detail,
    }
