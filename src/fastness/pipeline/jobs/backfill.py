"""`backfill`: ingest sources again from the start, add the rows that the lake lacks, and report what differs.

An ingest continues at its watermarks, and retries quarantined ranges. This job compares every row: it adds rows that
are missing for another reason, and versions of entities that are readable now. Then it ingests what is new, such as
session logs that were found later and are given with `activity`. No row of the lake is changed or removed.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastness.limits import FINDINGS_MAX
from fastness.pipeline import ownership, redactions
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import backfills, known_sources, losses
from fastness.pipeline.intake.ingest_run import Run
from fastness.pipeline.intake.losses import Loss
from fastness.pipeline.intake.quarantine import REWOUND, Quarantine, Quarantined
from fastness.pipeline.intake.sources import Sources
from fastness.pipeline.jobs import ingest
from fastness.pipeline.lake import Lake, staging
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.views import shared_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    worlds: Sequence[str] = (),
    kinds: Sequence[str] = (),
    queues: Sequence[str] = (),
    sessions: Sequence[str] = (),
    everything: bool = False,
    lost: bool = False,
) -> JobResult:
    """Add the rows of sources that the plane has and the lake lacks; with `lost`, confirm that the others are lost.

    `ok` means that no row differs from the plane's, and that no range of these sources is in the quarantine, except
    accepted ones. Without Spark, everything runs in this process.

    Raises:
        InvalidArgument: no source is named.
        NotFound: neither the plane nor the lake has a source of that name.
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        TransactionConflict: other runs committed first, too often.
    """
    started = time.monotonic()
    sources = Sources(tuple(worlds), tuple(kinds), tuple(queues), tuple(sessions), everything)
    sources.check("fastness pipeline backfill")
    lake = Lake(config.lake, config.storage)
    with shared_view(config) as view:
        ownership.claim(lake, view)
        redactions.claim(lake, config)
        universes = list(view.universes())
        known_sources.check(lake, view, config, universes, sources.named)
        with staging.temporary_folder(lake.location) as staged:
            work = Run(spark, config, view, staged, progress, packer=None)
            found = [loss for each in universes for loss in losses.find(lake, view, each, sources, staged.store_url)]
            differing = [loss for loss in found if loss.differing]
            for universe in universes:
                held = [(loss.table, loss.source) for loss in differing if loss.universe == universe]
                backfills.backfill(work, universe, sources, held)
        files = {file.id for each in universes for file in view.logs(each) if sources.wants("activity", file.session)}
        ingested = ingest.ingest_view(spark, config, view, progress=progress)
    quarantine = Quarantine(lake)

    def is_chosen(row: Quarantined) -> bool:
        return row.universe in universes and sources.covers(row, files)

    confirmed = quarantine.accept(lambda row: row.reason != REWOUND and is_chosen(row)) if lost else 0
    left = [row for row in quarantine.rows() if row.accepted_at is None and is_chosen(row)]
    return JobResult(
        job="backfill",
        ok=not (left or differing),
        rows={name: work.rows.get(name, 0) + count for name, count in ingested.rows.items()} | {"confirmed": confirmed},
        seconds=time.monotonic() - started,
        findings=[*map(_difference, differing), *map(ingest.finding, left)][:FINDINGS_MAX],
        notes=[*_notes(sum(work.rows.values()), found, len(left))],
    )


def _difference(loss: Loss) -> dict[str, object]:
    return loss.finding(
        "differs", f"{loss.differing} rows differ from the plane's; replace them with `fastness pipeline reset`"
    )


def _notes(added: int, found: Sequence[Loss], left: int) -> Iterator[str]:
    yield f"{added} rows were missing below the watermarks, and were added"
    if only_here := sum(loss.rows - loss.differing for loss in found):
        yield f"{only_here} rows are only in the lake: the plane no longer has them"
    if left:
        yield f"{left} ranges are still quarantined; confirm that they are lost with --lost"
