"""Finds rows of the lake that the plane no longer has: an ingest after their removal would not bring them back.

Every record is compared with the plane, not only the ends of sources: a damaged segment in the middle cannot be read
again, and the plane keeps only the latest versions of an entity.
"""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from fastness.layers import queues
from fastness.layers.entities import EntityKey
from fastness.layers.queues import QueueKey
from fastness.layers.queues.policies import history_ms
from fastness.pipeline.intake import divergence, entity_ingest, history_ingest
from fastness.pipeline.intake.sources import Sources
from fastness.pipeline.lake import Lake, LakeTable
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUEUE_EVENTS
from fastness.pipeline.views import View
from fastness.runtime.activity import format as log_format


class Loss(msgspec.Struct, frozen=True):
    """Rows of one source that the plane no longer has, or has with another content."""

    universe: str
    table: str
    source: str
    rows: int
    first: int  # The first height, version, line or time in milliseconds.
    last: int
    differing: int = 0  # How many of them the plane has with another content.

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.source} ({self.table}, {self.first} to {self.last})"

    def finding(self, reason: str, detail: str) -> dict[str, object]:
        """The loss as a finding of a job."""
        return {
            "universe": self.universe,
            "table": self.table,
            "world": self.source,
            "height": self.first,
            "end": self.last,
            "reason": reason,
            "detail": detail,
        }


def find(lake: Lake, view: View, universe: str, sources: Sources, staging: str) -> list[Loss]:
    """The rows of these sources that the plane no longer has."""
    return [
        *_lost_records(lake.table(JOURNAL), view, universe, sources, staging),
        *_lost_changes(lake.table(ENTITY_CHANGES), view, universe, sources),
        *_lost_events(lake.table(QUEUE_EVENTS), view, universe, sources),
        *_lost_lines(lake.table(ACTIVITY), view, universe, sources),
    ]


def _lost_records(table: LakeTable, view: View, universe: str, sources: Sources, staging: str) -> Iterator[Loss]:
    known: dict[str, dict[int, str]] = {}
    for row in _chosen_rows(table, universe, sources, ["world", "height", "hash"]):
        known.setdefault(row["world"], {})[row["height"]] = row["hash"]
    for name, hashes in known.items():
        world, differing = view.world(universe, name), 0
        if world is not None:
            window = msgspec.structs.replace(world, head=min(world.head, max(hashes) + 1))
            chunks = view.chunks(window, min(hashes), staging) if window.head > min(hashes) else []
            for height, hash in divergence.plane_hashes(view, chunks):
                if hashes.get(height) == hash:
                    del hashes[height]
                else:
                    differing += height in hashes
        yield from _loss(universe, JOURNAL.name, name, hashes, differing)


def _lost_changes(table: LakeTable, view: View, universe: str, sources: Sources) -> Iterator[Loss]:
    known: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in _chosen_rows(table, universe, sources, None):
        known.setdefault((row["kind"], row["id"]), {})[row["version"]] = divergence.with_milliseconds(row)
    for (kind, id), versions in known.items():
        differing = 0
        for change in divergence.plane_changes(view, EntityKey(universe, kind, id), min(versions)):
            stored = versions.get(change["version"])
            if stored is not None and entity_ingest.is_same_change(stored, change):
                del versions[change["version"]]
            else:
                differing += stored is not None
        yield from _loss(universe, ENTITY_CHANGES.name, f"{kind}/{id}", versions, differing)


def _lost_events(table: LakeTable, view: View, universe: str, sources: Sources) -> Iterator[Loss]:
    known: dict[str, dict[tuple[str, str, int, int], int]] = {}
    for row in _chosen_rows(table, universe, sources, ["queue", "id", "event", "attempt", "changed_at"]):
        at_ms = round(row["changed_at"].timestamp() * 1_000)
        known.setdefault(row["queue"], {})[row["id"], row["event"], row["attempt"], at_ms] = at_ms
    for name, times in known.items():
        queue = QueueKey(universe, name)
        if history_ms(view.database.read(queues.policy_of, queue)):
            for event in history_ingest.events(view, queue, min(times.values())):
                times.pop((event.id, event.event, event.attempt, event.at_ms), None)
        yield from _loss(universe, QUEUE_EVENTS.name, name, times.values())


def _lost_lines(table: LakeTable, view: View, universe: str, sources: Sources) -> Iterator[Loss]:
    known: dict[str, dict[int, str | None]] = {}  # None: redacted, so that only the number can be compared.
    differing: dict[str, int] = {}
    for row in _chosen_rows(table, universe, sources, ["session", "file", "n", "record", "redacted"]):
        known.setdefault(row["file"], {})[row["n"]] = None if row["redacted"] else row["record"]
    for file in view.logs(universe) if known else ():
        lines = known.get(file.id)
        if lines:
            for _, line in log_format.lines(view.log_body(file)):
                if line is not None and lines.get(line.n, "") in (None, bytes(line.record).decode()):
                    del lines[line.n]
                elif line is not None and line.n in lines:
                    differing[file.id] = differing.get(file.id, 0) + 1
    for name, lines in known.items():
        yield from _loss(universe, ACTIVITY.name, name, lines, differing.get(name, 0))


def _chosen_rows(
    table: LakeTable, universe: str, sources: Sources, columns: list[str] | None
) -> Iterator[dict[str, Any]]:
    for rows in table.scan(columns, universe=universe):
        yield from rows.filter(sources.matches(table.table, rows)).to_pylist()


def _loss(universe: str, table: str, source: str, numbers: Collection[int], differing: int = 0) -> Iterator[Loss]:
    if numbers:
        yield Loss(universe, table, source, len(numbers), min(numbers), max(numbers), differing)
