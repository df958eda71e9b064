"""What is kept, why, and until when: the size of each kind of data in a plane."""

from collections.abc import Iterator
from typing import Final

from fastness.backends.objects import ObjectStore
from fastness.kv import Database
from fastness.layers import blobs
from fastness.runtime.activity import retention
from fastness.runtime.maintenance.garbage_collection import ARCHIVED, DEAD_LETTERS, PINNED, RESULTS, FoundBlob, Search
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.wire.space import SpaceReport, SpaceUse


def report(database: Database, objects: ObjectStore | None, options: SpaceOptions) -> SpaceReport:
    """What all universes keep. Reads the whole key space, in one snapshot."""
    search = Search(database, objects, measures=True)
    return SpaceReport(uses_of(search, objects, options), search.unsearched, measured_ms=search.now_ms)


def uses_of(search: Search, objects: ObjectStore | None, options: SpaceOptions) -> list[SpaceUse]:
    """What each universe keeps, as a search saw it, the largest first."""
    kinds = {**_KINDS, **_retained(options)}
    uses = [
        SpaceUse(universe, kind, reason, count, size, until)
        for (universe, area), (count, size) in search.sizes.items()
        for kind, reason, until in [kinds.get(area, (area, "stored", "until it is deleted"))]
        if count
    ]
    uses += _blob_uses(search, options)
    for universe, segments in search.segments.items():
        cold = sum(segment.size for segment in segments)
        reason = "cold journal records of worlds"
        uses.append(SpaceUse(universe, "segments", reason, len(segments), cold, "until their world is deleted"))
    if objects is not None:
        for universe in search.universes:
            uses += _body_uses(search, objects, universe, f"for the {_grace(options)} after their deletion")
        until = _limits("activity", options.log_keep_seconds, options.log_bytes_max)
        for universe in retention.universes(objects):
            count, size = retention.size(objects, universe)
            uses.append(SpaceUse(universe, "session logs", "rotated session logs", count, size, until))
    return sorted(uses, key=lambda use: (not use.universe, use.universe, -use.bytes, use.kind, use.reason))


def _retained(options: SpaceOptions) -> dict[str, tuple[str, str, str]]:
    """Kinds of data that have a retention, why they are kept, and until when."""
    archived = _limits("archived", options.archived_keep_seconds, options.archived_bytes_max)
    dead = "for the dead_letter_retention_seconds of their queues"
    if options.dead_letter_bytes_max is not None:
        dead += f" and up to {options.dead_letter_bytes_max:,} bytes per universe (dead_letter_bytes_max)"
    return {
        ARCHIVED: (ARCHIVED, "hot journal records, inboxes and snapshots of archived worlds", archived),
        DEAD_LETTERS: (DEAD_LETTERS, "messages that failed too often", dead),
    }


def _limits(name: str, seconds: float | None, bytes_max: int | None) -> str:
    """A retention by age and bytes, with the settings of that name that it comes from."""
    limits = []
    if seconds is not None:
        limits.append(f"for {_duration(seconds)} ({name}_keep_seconds)")
    if bytes_max is not None:
        limits.append(f"up to {bytes_max:,} bytes per universe ({name}_bytes_max)")
    return " and ".join(limits) or f"for ever: {name}_keep_seconds and {name}_bytes_max are not set"


def _blob_uses(search: Search, options: SpaceOptions) -> Iterator[SpaceUse]:
    """The blobs, by the first reason that was found for each."""
    found_by: dict[tuple[str, str | None], list[FoundBlob]] = {}
    for found in search.blobs:
        found_by.setdefault((found.universe, search.reason_of(found)), []).append(found)
    for (universe, reason), group in found_by.items():
        size = sum(found.blob.size for found in group)
        if reason is None:
            due = [blobs.due_ms(found.blob, found.mark, grace_ms=options.grace_ms) for found in group]
            next_ms = min((each for each in due if each is not None), default=None)
            starts = "" if next_ms is not None else ", which starts with the next collection"
            until = f"for the {_grace(options)}{starts}"
            yield SpaceUse(universe, "blobs", "unreferenced", len(group), size, until, next_ms)
        else:
            is_pinned = reason == PINNED
            why = reason if is_pinned else f"named by {reason}"
            until = "until they are unpinned" if is_pinned else "until nothing names them"
            yield SpaceUse(universe, "blobs", why, len(group), size, until)


def _body_uses(search: Search, objects: ObjectStore, universe: str, until: str) -> Iterator[SpaceUse]:
    """The bodies in the object store that no recorded blob has."""
    recorded = {found.path for found in search.blobs if found.universe == universe}
    count = size = 0
    for meta, _ in objects.times(blobs.folder(universe)):
        if meta.path not in recorded:
            count, size = count + 1, size + meta.size
    if count:
        reason = "bodies of deleted blobs, for readers and backups"
        yield SpaceUse(universe, "deleted blobs", reason, count, size, until)


def _grace(options: SpaceOptions) -> str:
    return f"grace period of {_duration(options.grace_seconds)} (gc_grace_seconds)"


def _duration(seconds: float) -> str:
    for unit_seconds, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds and seconds % unit_seconds == 0:
            return f"{seconds // unit_seconds:g} {unit}"
    return f"{seconds:g} s"


_KINDS: Final = {
    "q": ("queues", "messages, their failures and schedules", "until they are acked, deleted or purged"),
    RESULTS: ("results", "of finished calls and messages, for callers that repeat them", "for up to 20 minutes"),
    "w": (
        "worlds",
        "hot journal records, inboxes and snapshots",
        "until they are compacted, or their world is deleted",
    ),
    "w-deleted": ("deleted worlds", "the incarnations of deleted worlds", "for ever"),
    "segments": ("segment index", "where cold journal records are", "until their world is deleted"),
    **dict.fromkeys(
        (blobs.UNREFERENCED, blobs.DELETED),
        ("blob index", "blobs and bodies that wait for their deletion", "until they are deleted or named again"),
    ),
    "effects": ("effects", "pending effects of worlds", "until they are done, or their world is deleted"),
    "timers": ("timers", "timers of worlds", "until they are due, or their world is deleted"),
    "hosting": ("hosting index", "worlds that have work for a host", "until it is done, or their world is deleted"),
    "runs": ("run index", "runs of workflows by their state", "until they are deleted"),
    "mail": ("mail", "mail, receipts and policies", "until it is confirmed or expires"),
    "mail-due": ("mail index", "when mail expires", "until the mail is confirmed or expires"),
    "agents": ("agents", "registered agents and their keys", "for ever"),
    "leases": ("leases", "the last grant of each lease, with its fence", "for ever, so that fences grow"),
    "locks": ("locks", "holders and lines of ordered locks, with their last fences", "fences: for ever"),
    "lock-sessions": ("lock sessions", "what holds ordered locks, or waits for them", "until their lease ends"),
    "states": ("states", "values of states", "until they are removed"),
    "collections": ("collections", "rows of collections", "until they are deleted or expire"),
    "collections-due": ("collection index", "when rows of collections expire", "until then"),
    "entities": ("entities", "entities and their fields", "until they are deleted; a small record stays"),
    "entity-history": ("entity history", "changes of entities", "for ever"),
    "dead-letter-sources": ("dead letter index", "queues by their dead-letter queues", "as their policies say"),
    "sqs-tasks": ("move tasks", "the newest tasks that move messages of SQS queues", "until their queue is deleted"),
    "sqs-work": ("unfinished work", "purges, deletions and move tasks of SQS queues", "until they are finished"),
    "audit": ("audit log", "who did what", "as long as audit_keep_seconds says"),
    "pairs": (
        "other pairs",
        "tokens, the plane's audit log, samples of servers, and pairs that callers wrote",
        "until they are deleted",
    ),
}
