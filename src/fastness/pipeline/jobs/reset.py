"""`reset`: drop the rows of sources, so that the next ingest reads them again from the start.

    quarantine ◄ journal, segments, world_state, entity_changes, queue_events, activity     their watermarks become 0

Rows that the plane no longer has would not come back: the job refuses to remove them unless that is allowed. Each table
is one commit, with its watermarks. A run that was killed leaves every table consistent; the next one continues.
`messages`, `mail` and the aggregates follow with the next `rollup`.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from fastness.errors import WouldLoseData
from fastness.limits import FINDINGS_MAX
from fastness.pipeline import ownership
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import known_sources, losses
from fastness.pipeline.intake.losses import Loss
from fastness.pipeline.intake.quarantine import REWOUND, Quarantine, Scope
from fastness.pipeline.intake.sources import FED_TABLES, Sources
from fastness.pipeline.lake import Lake, removal, retries, staging
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import ACTIVITY, Table
from fastness.pipeline.views import View, open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOSSES_SHOWN: Final = 3


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
    allow_loss: bool = False,
) -> JobResult:
    """Remove the rows of sources from the tables that are fed from them, and set their watermarks to zero.

    With `everything`, all sources of the selected universes. With `allow_loss`, also rows that the plane no longer has;
    they are findings of the result. Quarantined ranges that were accepted as lost stay accepted.

    Raises:
        InvalidArgument: no source is named.
        NotFound: neither the plane nor the lake has a source of that name.
        WouldLoseData: the plane no longer has some of the rows; nothing was removed.
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        TransactionConflict: other runs committed first, too often.
    """
    del spark, progress
    started = time.monotonic()
    sources = Sources(tuple(worlds), tuple(kinds), tuple(queues), tuple(sessions), everything)
    sources.check("fastness pipeline reset")
    lake = Lake(config.lake, config.storage)
    with open_view(config) as view, staging.temporary_folder(lake.location) as staged:
        ownership.check(lake, view)
        universes = ownership.universes_of(lake, view, config.universes)
        known_sources.check(lake, view, config, universes, sources.named)
        lost = [loss for each in universes for loss in losses.find(lake, view, each, sources, staged.store_url)]
        if lost and not allow_loss:
            raise WouldLoseData(_refusal(lost))
        counts = dict.fromkeys((table.name for table in FED_TABLES), 0)
        for universe in universes:
            files = _log_files(lake, view, universe, sources)
            for table in FED_TABLES:
                remove = partial(_remove, lake, table, universe, sources, files)
                counts[table.name] += retries.retry_until_committed(f"the table {table.name}", remove)
            _drop_quarantine(lake, universe, sources, files)
    return JobResult(
        job="reset",
        ok=True,
        rows={f"{name} removed": count for name, count in counts.items()},
        seconds=time.monotonic() - started,
        findings=[_finding(loss) for loss in lost[:FINDINGS_MAX]],
        notes=[*_notes(counts, lost)],
    )


def _remove(lake: Lake, table: Table, universe: str, sources: Sources, files: set[str]) -> int:
    target = lake.table(table)
    moves = sources.moves(target, universe, files)
    return removal.remove_where(target, partial(sources.matches, table), moves, universe=universe)


def _log_files(lake: Lake, view: View, universe: str, sources: Sources) -> set[str]:
    """The log files of the sessions, in the lake or in the plane."""
    found = {file.id for file in view.logs(universe) if sources.wants(ACTIVITY.name, file.session)}
    for rows in lake.table(ACTIVITY).scan(["session", "file"], universe=universe):
        found.update(pc.unique(rows.filter(sources.matches(ACTIVITY, rows)).column("file")).to_pylist())
    return found


def _drop_quarantine(lake: Lake, universe: str, sources: Sources, files: set[str]) -> None:
    """Drop the quarantined ranges of the sources. The next ingest finds them again, and accepted ones are as before."""
    quarantine = Quarantine(lake)
    chosen = [row for row in quarantine.rows() if row.universe == universe and sources.covers(row, files)]
    quarantine.resolve(
        [
            Scope(universe, row.table, row.source, row.start, row.start, clears_rewound=row.reason == REWOUND)
            for row in chosen
            if row.accepted_at is None
        ]
    )


def _refusal(lost: Sequence[Loss]) -> str:
    shown = "; ".join(map(str, lost[:_LOSSES_SHOWN]))
    more = f"; and {len(lost) - _LOSSES_SHOWN} more sources" if len(lost) > _LOSSES_SHOWN else ""
    return (
        f"The plane no longer has, or has with another content, {shown}{more}. An ingest would not bring them back. "
        "Restore the missing data of the plane or its session logs first, or remove these rows with --allow-loss"
    )


def _notes(counts: dict[str, int], lost: Sequence[Loss]) -> Iterator[str]:
    if not any(counts.values()):
        yield "The lake has no rows of these sources"
    if lost:
        yield f"{sum(loss.rows for loss in lost)} rows are lost, which was allowed: the plane no longer has them"


def _finding(loss: Loss) -> dict[str, object]:
    return loss.finding("lost", f"{loss.rows} rows were removed that the plane no longer has")
