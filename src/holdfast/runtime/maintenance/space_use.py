"""What is kept, and why: the size of each kind of data in a plane."""

from typing import Final

from holdfast.backends.objects import ObjectStore
from holdfast.kv import Database
from holdfast.layers import blobs
from holdfast.runtime.activity import retention
from holdfast.runtime.maintenance.garbage_collection import ARCHIVED, DEAD_LETTERS, RESULTS, Search
from holdfast.runtime.maintenance.space_options import SpaceOptions
from holdfast.wire.space import SpaceReport, SpaceUse


def report(database: Database, objects: ObjectStore | None, options: SpaceOptions) -> SpaceReport:
    """What all universes keep. Reads the whole key space, in one snapshot."""
    search = Search(database, objects, measures=True)
    kinds = {**_KINDS, **_retained(options)}
    uses = [
        SpaceUse(universe, *kinds.get(area, (area, "stored")), count, size)
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
            why = _limits(options.log_keep_seconds, options.log_bytes_max)
            uses.append(SpaceUse(universe, "session logs", why, *size))
    return SpaceReport(
        sorted(uses, key=lambda use: (use.universe, -use.bytes, use.kind, use.reason)), search.unsearched
    )


def _retained(options: SpaceOptions) -> dict[str, tuple[str, str]]:
    """Kinds of data that have a retention, and why they are kept."""
    archived = _limits(options.archived_keep_seconds, options.archived_bytes_max)
    bytes_max = options.dead_letter_bytes_max
    dead = "kept for the dead_letter_retention_seconds of their queues"
    return {
        ARCHIVED: (ARCHIVED, f"hot journal records, inboxes and snapshots; {archived}"),
        DEAD_LETTERS: (DEAD_LETTERS, dead if bytes_max is None else f"{dead}, up to {bytes_max} bytes"),
    }


def _limits(seconds: float | None, bytes_max: int | None) -> str:
    if seconds is None and bytes_max is None:
        return "kept for ever"
    limits = [] if seconds is None else [f"for {seconds:.0f} s"]
    return "kept " + ", ".join(limits + ([] if bytes_max is None else [f"up to {bytes_max} bytes"]))


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
    "q": ("queues", "messages, their failures and schedules"),
    RESULTS: ("results", "of finished calls and messages, for callers that repeat them; kept for up to 20 minutes"),
    "w": ("worlds", "hot journal records, inboxes and snapshots"),
    "segments": ("segment index", "where cold journal records are"),
    blobs.UNREFERENCED: ("blob marks", "blobs that may be unreferenced"),
    blobs.DELETED: ("deleted blobs", "their bodies are deleted after the grace period"),
    "pairs": ("other pairs", "tokens, and pairs that callers wrote"),
}
