"""`accept`: continue the lake with a plane that was restored, and confirm losses.

    superseded ◄── journal, entity_changes, activity     their watermarks move back     planes: the new lineage

The rows that the plane does not have any more are copied to `superseded`, then removed together with the move of their
watermarks. The new lineage is recorded last: if a run is killed, the next one continues, and no ingest runs before.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from fastness.errors import AnotherHistory, InvalidArgument
from fastness.pipeline import completeness, ownership
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.intake import divergence, history_ingest, known_sources, plans
from fastness.pipeline.intake.divergence import Cuts, Wanted
from fastness.pipeline.intake.quarantine import REWOUND, Quarantine, Quarantined, Scope
from fastness.pipeline.lake import Lake, Move, removal, retries, staging
from fastness.pipeline.ownership import Owner
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUEUE_EVENTS, SEGMENTS, SUPERSEDED, Table
from fastness.pipeline.views import View, open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    worlds: Sequence[str] = (),
    kinds: Sequence[str] = (),
    lost: bool = False,
) -> JobResult:
    """Replace the rows that the plane no longer has, so that the lake follows the plane again.

    Without `worlds` and kinds of entities, all of them. With `lost`, quarantined ranges that are missing are confirmed
    too, and message events that are in no log: they stay in the tables, and are no findings any more.

    Raises:
        AnotherHistory: the lake has the history of another plane.
        NotFound: neither the plane nor the lake has a source of that name.
        InvalidArgument: the plane was restored, which cannot be accepted for a part of it.
        TransactionConflict: other runs committed first, too often.
    """
    del spark, progress
    started = time.monotonic()
    lake = Lake(config.lake, config.storage)
    chosen = _Chosen(tuple(worlds), tuple(kinds))
    with open_view(config) as view, staging.temporary_folder(lake.location) as staged:
        accepted = _Acceptance(lake, view, chosen, staged.store_url)
        universes = ownership.universes_of(lake, view, config.universes)
        known_sources.check(lake, view, config, universes, chosen.named)
        followed = [universe for universe in universes if accepted.accept(universe)]
        if followed:
            ownership.follow(lake, followed, accepted.identity)
    confirmed = _confirm(lake, config, chosen) if lost else 0
    if lost and not chosen.is_partial:
        confirmed += completeness.accept(lake, config.universes)
    return JobResult(
        job="accept",
        ok=True,
        rows={f"{name} superseded": count for name, count in accepted.counts.items()} | {"confirmed": confirmed},
        seconds=time.monotonic() - started,
        notes=[f"Universe {universe} follows lineage {accepted.lineage} now" for universe in followed],
    )


class _Chosen(msgspec.Struct, frozen=True):
    """The sources to accept; empty: all."""

    worlds: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def named(self) -> list[tuple[str, str]]:
        return [*(("world", name) for name in self.worlds), *(("kind", name) for name in self.kinds)]

    @property
    def is_partial(self) -> bool:
        return bool(self.worlds or self.kinds)

    def wants(self, table: str, source: str) -> bool:
        if not self.is_partial:
            return True
        if table == ENTITY_CHANGES.name:
            return source.partition("/")[0] in self.kinds
        return table == JOURNAL.name and source in self.worlds


class _Acceptance:
    """Makes universes of the lake follow a view."""

    def __init__(self, lake: Lake, view: View, chosen: _Chosen, staged: str) -> None:
        self.counts = dict.fromkeys((JOURNAL.name, ENTITY_CHANGES.name, ACTIVITY.name, QUEUE_EVENTS.name), 0)
        self.identity = view.identity()
        self.lineage = self.identity.lineage
        self._lake = lake
        self._view = view
        self._chosen = chosen
        self._staged = staged
        self._owners = ownership.owners(lake)

    def accept(self, universe: str) -> bool:
        """Replace the rows of a universe that the plane no longer has; whether it follows another lineage now."""
        owner = self._owners.get(universe)
        is_restored = owner is not None and owner.lineage != self.lineage
        since_ms = self._shared_until_ms(owner) if owner is not None and is_restored else 0
        if is_restored and self._chosen.is_partial:
            raise InvalidArgument(
                f"The plane was restored as a whole: accept all of universe {universe}, without --world and --kind"
            )
        for table in (JOURNAL, ENTITY_CHANGES, ACTIVITY):
            self._accept_table(universe, table, owner, since_ms, is_restored=is_restored)
        if is_restored:
            retries.retry_until_committed(
                f"the table {QUEUE_EVENTS.name}", lambda: self._replace_events(universe, owner, since_ms)
            )
        return is_restored

    def _accept_table(
        self, universe: str, table: Table, owner: Owner | None, since_ms: int, *, is_restored: bool
    ) -> None:
        held = {row.source for row in self._held(universe, table)}

        def wanted(source: str) -> bool:
            return (is_restored or source in held) and self._chosen.wants(table.name, source)

        def replace() -> None:
            self._replace(universe, table, self._cuts(universe, table, wanted, since_ms), owner)

        if is_restored or held:
            if table is JOURNAL:
                retries.retry_until_committed(
                    f"the table {SEGMENTS.name}", lambda: self._replace_segments(universe, wanted)
                )
            retries.retry_until_committed(f"the table {table.name}", replace)

    def _cuts(self, universe: str, table: Table, wanted: Wanted, since_ms: int) -> Cuts:
        target = self._lake.table(table)
        if table is JOURNAL:
            return divergence.journal_cuts(
                self._view, target, universe, wanted, since_ms=since_ms, staging=self._staged
            )
        find = divergence.entity_cuts if table is ENTITY_CHANGES else divergence.log_cuts
        return find(self._view, target, universe, wanted, since_ms=since_ms)

    def _shared_until_ms(self, owner: Owner) -> int:
        if self.identity.plane != owner.plane:
            raise AnotherHistory(
                f"Universe {owner.universe} of the lake has the history of another plane, {owner.plane}; "
                "use another lake"
            )
        return ownership.shared_until_ms(self._lake, owner, self.identity)

    def _held(self, universe: str, table: Table) -> list[Quarantined]:
        rows = Quarantine(self._lake).rows()
        return [row for row in rows if (row.universe, row.table, row.reason) == (universe, table.name, REWOUND)]

    def _replace(self, universe: str, table: Table, cuts: Cuts, owner: Owner | None) -> None:
        if cuts.numbers:
            lake_table = self._lake.table(table)
            removed = [
                row
                for _, _, rows in removal.rows_from(lake_table, universe, cuts.numbers.get)
                for row in rows.to_pylist()
            ]
            self._keep_superseded(universe, table.name, removed, owner)
            self.counts[table.name] += removal.remove(lake_table, universe, cuts.numbers.get, cuts.moves)
        self._resolve(universe, table, cuts.numbers)

    def _replace_segments(self, universe: str, wanted: Wanted) -> None:
        """Remove the checks of segments that the plane lacks: it may have moved the same records in other parts.

        The next ingest checks those that exist now.
        """
        table = self._lake.table(SEGMENTS)
        cuts = divergence.segment_cuts(self._view, table, universe, wanted)
        moves = {}
        for world, cut in cuts.items():
            name = plans.segment_watermark(universe, world)
            if table.watermark(name) > cut:
                moves[name] = Move(table.watermark(name), cut)
        removal.remove(table, universe, cuts.get, moves)

    def _replace_events(self, universe: str, owner: Owner | None, since_ms: int) -> None:
        """Remove the events of queues after the backup; the next ingest adds those that the plane has."""
        table = self._lake.table(QUEUE_EVENTS)
        prefix = history_ingest.time_watermark(universe, "")
        moves = {
            name: Move(at_ms, since_ms)
            for name, at_ms in table.watermarks().items()
            if name.startswith(prefix) and at_ms > since_ms
        }
        removed = [
            row for _, _, rows in removal.rows_from(table, universe, lambda _: since_ms) for row in rows.to_pylist()
        ]
        self._keep_superseded(universe, QUEUE_EVENTS.name, removed, owner)
        if removed or moves:
            self.counts[QUEUE_EVENTS.name] += removal.remove(table, universe, lambda _: since_ms, moves)

    def _keep_superseded(self, universe: str, table: str, rows: Sequence[dict[str, Any]], owner: Owner | None) -> None:
        """Copy rows to `superseded`, except those that a killed run has copied before."""
        target = self._lake.table(SUPERSEDED)
        lineage = None if owner is None else owner.lineage
        columns = ["table_name", "source", "number", "lineage", "superseded_by"]
        known = {
            tuple(row[name] for name in columns)
            for found in target.scan(columns, universe=universe)
            for row in found.to_pylist()
        }
        now_ms = time.time_ns() // 1_000_000
        new = [
            {
                "universe": universe,
                "table_name": table,
                "source": source,
                "number": number,
                "row": msgspec.json.encode(row).decode(),
                "lineage": lineage,
                "superseded_by": self.lineage,
                "seen_at": now_ms,
            }
            for row in rows
            for source, number in [removal.source_of(table, row)]
            if (table, source, number, lineage, self.lineage) not in known
        ]
        if new:
            target.append_rows(pa.Table.from_pylist(new, SUPERSEDED.schema))

    def _resolve(self, universe: str, table: Table, cuts: Mapping[str, int]) -> None:
        """Drop the quarantined ranges above the cuts, and the `rewound` rows of the sources that were compared."""
        quarantine = Quarantine(self._lake)
        held = [row.source for row in self._held(universe, table) if self._chosen.wants(table.name, row.source)]
        scopes = [Scope(universe, table.name, source, cuts.get(source, 1 << 62)) for source in {*cuts, *held}]
        shortened = [
            msgspec.structs.replace(row, end=cuts[row.source] - 1)
            for row in quarantine.rows()
            if (row.universe, row.table) == (universe, table.name)
            and row.reason != REWOUND
            and row.start < cuts.get(row.source, -1) <= row.end
        ]
        quarantine.resolve(scopes, shortened)


def _confirm(lake: Lake, config: Config, chosen: _Chosen) -> int:
    return Quarantine(lake).accept(
        lambda row: (
            row.reason != REWOUND
            and (not config.universes or row.universe in config.universes)
            and chosen.wants(row.table, row.source)
        )
    )
