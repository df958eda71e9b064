"""What is kept, and why: the size of each kind of data in a plane."""

from typing import Final

from holdfast.backends.objects import ObjectStore
from holdfast.kv import Database
from holdfast.layers import blobs
from holdfast.runtime.activity import retention
from holdfast.runtime.maintenance.garbage_collection import Search
from holdfast.wire.space import SpaceReport, SpaceUse


def report(database: Database, objects: ObjectStore | None) -> SpaceReport:
    """What all universes keep. Reads the whole key space, in one snapshot."""
    search = Search(database, objects, measures=True)
    uses = [
        SpaceUse(universe, *_KINDS.get(area, (area, "stored")), count, size)
        for (universe, area), (count, size) in search.sizes.items()
        if count
    ]
    uses += _blob_uses(search)
    for universe, segments in search.segments.items():
        cold = sum(segment.size for segment in segments)
        uses.append(SpaceUse(universe, "segments", "cold journal records of worlds", len(segments), cold))
    if objects is not None:
        for universe in retention.universes(objects):
            size = retention.size(objects, universe)
            uses.append(SpaceUse(universe, "session logs", "within their retention", *size))
    return SpaceReport(
        sorted(uses, key=lambda use: (use.universe, -use.bytes, use.kind, use.reason)), search.unsearched
    )


def _blob_uses(search: Search) -> list[SpaceUse]:
    """The blobs, by the first reason that was found for each."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for found in search.blobs:
        reason = search.reason_of(found)
        why = _UNREFERENCED if reason is None else _REASONS.get(reason, f"named by {reason}")
        count, size = totals.get((found.universe, why), (0, 0))
        totals[found.universe, why] = count + 1, size + found.blob.size
    return [SpaceUse(universe, "blobs", why, *total) for (universe, why), total in totals.items()]


_UNREFERENCED: Final = "unreferenced; deleted after the grace period"
_REASONS: Final = {"pinned": "pinned", "stored by an older version": "stored by an older version"}
_KINDS: Final = {
    "q": ("queues", "messages, their failures and idempotency keys"),
    "w": ("worlds", "hot journal records, inboxes and snapshots"),
    "segments": ("segment index", "where cold journal records are"),
    blobs.UNREFERENCED: ("blob marks", "blobs that may be unreferenced"),
    blobs.DELETED: ("deleted blobs", "their bodies are deleted after the grace period"),
    "pairs": ("other pairs", "tokens, results of keyed calls, and pairs that callers wrote"),
}
