"""Worlds: their journals and inboxes.

A request with an `incarnation` is refused in any other incarnation of the world; None is the current one.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import SEGMENT_ENTRIES, SEGMENT_MARGIN
from fastness.names import UNIVERSE
from fastness.wire.canonical import check_canonical
from fastness.wire.fields import Count, Limit, Name, NameAfter, Owner, SummaryLimit, batch_of, one_of
from fastness.wire.inboxes import InboxItem
from fastness.wire.requests import Operation, Request, Route


class Described(msgspec.Struct, frozen=True):
    """The state of a world. Records from `hot` on are in the key space; a restore starts from `baseline`.

    `incarnation` counts the worlds that had this name: it grows when a deleted world is created again.
    """

    name: str
    state: str
    created_ms: int
    head: int
    hot: int = 0
    baseline: int = 0
    incarnation: int = 1


class Names(msgspec.Struct, frozen=True):
    """Names of worlds, in order."""

    names: list[str]


class WorldSurvey(msgspec.Struct, frozen=True):
    """Worlds in the order of their names; `next` is where the next page starts, if there is one."""

    worlds: list[Described]
    next: str | None


class Height(msgspec.Struct, frozen=True):
    """A height in a journal, and the incarnation of its world."""

    height: int
    incarnation: int = 1


class Record(msgspec.Struct, frozen=True):
    """A journal record: its height, its kind (entry, ingress, snapshot, baseline), and its value as canonical CBOR."""

    height: int
    kind: str
    value: bytes


class Records(msgspec.Struct, frozen=True):
    """Journal records in order, without gaps, and the incarnation of their world."""

    records: list[Record]
    incarnation: int = 1


class Drained(msgspec.Struct, frozen=True):
    """The heights of the drained items, and the incarnation of their world."""

    heights: list[int]
    incarnation: int = 1


class Sequence(msgspec.Struct, frozen=True):
    """A sequence in an inbox; None: its beginning."""

    sequence: int | None


class Items(msgspec.Struct, frozen=True):
    """Inbox items with their sequences, in order, and the incarnation of their world."""

    items: list[tuple[int, InboxItem]]
    incarnation: int = 1


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of a world: the blob that holds it, what it covers, and whether a restore starts from it now."""

    snapshot_ref: str
    height: int
    logical_time_ns: int
    receipt_horizon_height: int | None
    manifest_hash: str | None
    is_baseline: bool = False


class RestorePoint(msgspec.Struct, frozen=True):
    """Where a restore starts: the baseline, from which all records up to `head` can be read."""

    baseline: Snapshot
    head: int
    incarnation: int = 1


class Snapshots(msgspec.Struct, frozen=True):
    """Snapshots in the order of their heights, and the incarnation of their world."""

    snapshots: list[Snapshot]
    incarnation: int = 1


class Segment(msgspec.Struct, frozen=True):
    """A cold part of a journal, from `start` to `end`, both included."""

    start: int
    end: int
    object_path: str
    checksum: str
    size: int


class Segments(msgspec.Struct, frozen=True):
    """Segments in the order of their heights, and the incarnation of their world."""

    segments: list[Segment]
    incarnation: int = 1


class Compacted(msgspec.Struct, frozen=True):
    """What a compaction moved into segments."""

    segments: int
    records: int


class Checked(msgspec.Struct, frozen=True):
    """How much of a world was checked, and its fault if it has one; `next` is where to continue, None at the end."""

    next: int | None
    records: int
    segments: int
    snapshots: int
    fault: str | None
    incarnation: int = 1


class CreateWorld(Request[Described], frozen=True, tag="worlds.create"):
    operation = Operation(
        stores=True,
        http=(
            Route("POST", "/v1/worlds", "Create a world.", status=201),
            Route("PUT", "/v1/worlds/{world}", "Create a world with this name.", status=201),
        ),
    )

    world: Name
    universe: Name = UNIVERSE
    manifest_hash: Annotated[str | None, Meta(description="The hash of the world's manifest.")] = None
    program: Annotated[Name | None, Meta(description="The program that hosts run the world with.")] = None


class DescribeWorld(Request[Described], frozen=True, tag="worlds.describe"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/worlds/{world}", "Describe a world: its state, age and journal head."),),
    )

    world: Name
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ListWorlds(Request[Names], frozen=True, tag="worlds.list"):
    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/worlds", "List the names of worlds, in order."),)
    )

    after: NameAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE


class SurveyWorlds(Request[WorldSurvey], frozen=True, tag="worlds.survey"):
    """The state of each world after `after`."""

    operation = Operation(reads=True, stale=True, http=(Route("GET", "/v1/surveys/worlds", "Summarize each world."),))

    after: NameAfter = ""
    limit: SummaryLimit = 100
    universe: Name = UNIVERSE


class AppendEntries(Request[Height], frozen=True, tag="worlds.append"):
    """Append values, each canonical CBOR; answered with the height of the first."""

    operation = Operation(
        stores=True,
        atomic=True,
        http=(
            Route(
                "POST",
                "/v1/worlds/{world}/entries",
                "Append values to the journal if its head is `expected_head`.",
                status=201,
            ),
        ),
    )

    world: Name
    entries: Annotated[list[bytes], batch_of(limits.BATCH_ENTRIES_MAX, "entries")]
    expected_head: Count
    universe: Name = UNIVERSE
    incarnation: int | None = None

    def check(self) -> None:
        for entry in self.entries:
            check_canonical(entry)


class ReadJournal(Request[Records], frozen=True, tag="worlds.read"):
    operation = Operation(
        reads=True,
        http=(
            Route("GET", "/v1/worlds/{world}/entries", "Read journal records from `start` on.", defaults={"start": 0}),
        ),
    )

    world: Name
    start: Count
    limit: Limit = 1_000
    universe: Name = UNIVERSE
    incarnation: int | None = None


class DrainInbox(Request[Drained], frozen=True, tag="worlds.drain"):
    operation = Operation(
        http=(Route("POST", "/v1/worlds/{world}/drain", "Move the next inbox items into the journal."),)
    )

    world: Name
    limit: Annotated[int, Meta(ge=1, le=limits.BATCH_ENTRIES_MAX, description="The maximum number of items.")] = 256
    universe: Name = UNIVERSE
    incarnation: int | None = None


class PutItem(Request[Sequence], frozen=True, tag="worlds.inbox.put"):
    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/worlds/{world}/inbox", "Put an item into the inbox.", status=201),),
    )

    world: Name
    item: InboxItem
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ReadInbox(Request[Items], frozen=True, tag="worlds.inbox.read"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/worlds/{world}/inbox", "Read inbox items after the sequence number `after`."),),
    )

    world: Name
    after: int | None = None
    limit: Limit = 1_000
    universe: Name = UNIVERSE
    incarnation: int | None = None


class GetCursor(Request[Sequence], frozen=True, tag="worlds.inbox.cursor"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/worlds/{world}/inbox/cursor", "Read the sequence number of the last drained item."),),
    )

    world: Name
    universe: Name = UNIVERSE
    incarnation: int | None = None


class SetManifest(Request[Height], frozen=True, tag="worlds.manifest"):
    """Record that another manifest defines the world from here on; the answer is the height of the record."""

    operation = Operation(
        stores=True,
        http=(Route("POST", "/v1/worlds/{world}/manifest", "Set the manifest that defines the world.", status=201),),
    )

    world: Name
    manifest_hash: str
    expected_head: int
    universe: Name = UNIVERSE
    incarnation: int | None = None


class CommitSnapshot(Request[Snapshot], frozen=True, tag="worlds.snapshots.commit"):
    """Store a snapshot that has applied every record below `height`, and make it the baseline if it qualifies.

    With `promote` true it must qualify; with false it is only stored. A horizon or manifest that is not given is
    inferred from the journal. A host that holds the world gives its name and the fence of its claim.
    """

    operation = Operation(
        stores=True,
        http=(
            Route("POST", "/v1/worlds/{world}/snapshots", "Store a snapshot; `data` is the state as JSON.", status=201),
        ),
    )

    world: Name
    data: bytes
    height: Count
    promote: bool | None = None
    receipt_horizon_height: int | None = None
    manifest_hash: str | None = None
    logical_time_ns: int | None = None
    universe: Name = UNIVERSE
    incarnation: int | None = None
    owner: Owner | None = None
    fence: int | None = None


class PromoteSnapshot(Request[Snapshot], frozen=True, tag="worlds.snapshots.promote"):
    """Make the snapshot at `height` the baseline; what it does not state is inferred from the journal.

    A host that holds the world gives its name and the fence of its claim.
    """

    operation = Operation(
        http=(
            Route(
                "POST",
                "/v1/worlds/{world}/snapshots/{height}/promote",
                "Make a stored snapshot the baseline that restores start from.",
            ),
        )
    )

    world: Name
    height: Count
    universe: Name = UNIVERSE
    incarnation: int | None = None
    owner: Owner | None = None
    fence: int | None = None


class CheckRestore(Request[RestorePoint], frozen=True, tag="worlds.restore"):
    """Check that everything a restore needs is present, and return where it starts."""

    operation = Operation(
        reads=True,
        permission="world:baseline",
        http=(
            Route(
                "GET",
                "/v1/worlds/{world}/restore",
                "Check that a restore is possible, and return its baseline and the head.",
            ),
        ),
    )

    world: Name
    universe: Name = UNIVERSE
    incarnation: int | None = None


class GetBaseline(Request[Snapshot], frozen=True, tag="worlds.baseline"):
    operation = Operation(
        reads=True,
        http=(
            Route(
                "GET",
                "/v1/worlds/{world}/baseline",
                "Read the baseline, which is the snapshot that a restore starts from.",
            ),
        ),
    )

    world: Name
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ListSnapshots(Request[Snapshots], frozen=True, tag="worlds.snapshots.list"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/worlds/{world}/snapshots", "List the snapshots, in the order of their heights."),),
    )

    world: Name
    start: int = 0
    limit: Limit = 100
    universe: Name = UNIVERSE
    incarnation: int | None = None


class CompactWorld(Request[Compacted], frozen=True, tag="worlds.compact"):
    """Move records more than `margin` below the baseline into segments of `entries` records."""

    operation = Operation(
        repeatable="entries that were moved are not moved again; only the answer differs",
        http=(Route("POST", "/v1/worlds/{world}/compact", "Move old records below the baseline into segments."),),
    )

    world: Name
    entries: Annotated[int, Meta(ge=1, description="The number of records per segment.")] = SEGMENT_ENTRIES
    margin: Annotated[Count, Meta(description="How many records below the baseline stay in the key space.")] = (
        SEGMENT_MARGIN
    )
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ListSegments(Request[Segments], frozen=True, tag="worlds.segments"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/worlds/{world}/segments", "List the cold segments of the journal."),),
    )

    world: Name
    after: int = -1
    limit: Limit = 100
    universe: Name = UNIVERSE
    incarnation: int | None = None


class CheckWorld(Request[Checked], frozen=True, tag="worlds.check"):
    """Check records from `start` on, a segment or at most `limit` hot ones, and the snapshots among them.

    Whether a snapshot agrees with the records cannot be checked without the reducer.
    """

    operation = Operation(
        reads=True,
        http=(
            Route(
                "GET",
                "/v1/worlds/{world}/check",
                "Check for damage from `start` on, one segment or `limit` records at a time.",
            ),
        ),
    )

    world: Name
    start: Count = 0
    limit: Limit = 1_000
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ChangeWorld(Request[Described], frozen=True, tag="worlds.change"):
    """Pause, resume or archive a world: `state` is paused, active or archived."""

    operation = Operation(
        audited=True,
        http=(
            Route(
                "POST",
                "/v1/worlds/{world}/pause",
                "Pause a world: reject appends and drains.",
                fixed={"state": "paused"},
            ),
            Route("POST", "/v1/worlds/{world}/resume", "Resume a paused world.", fixed={"state": "active"}),
            Route(
                "POST", "/v1/worlds/{world}/archive", "Archive a world: reject all writes.", fixed={"state": "archived"}
            ),
        ),
    )

    world: Name
    state: Annotated[str, one_of("active", "paused", "archived")]
    universe: Name = UNIVERSE
    incarnation: int | None = None


class DeleteWorld(Request[Described], frozen=True, tag="worlds.delete"):
    """Delete an archived world. A world that is created under its name later is its next incarnation."""

    operation = Operation(
        audited=True,
        repeatable="a deleted world stays deleted, and a new world of its name is another incarnation",
        http=(Route("DELETE", "/v1/worlds/{world}", "Delete an archived world, or finish its deletion."),),
    )

    world: Name
    universe: Name = UNIVERSE
    incarnation: int | None = None


class ForkWorld(Request[Described], frozen=True, tag="worlds.fork"):
    """Create a world with the records of this one below `height`."""

    operation = Operation(
        stores=True,
        http=(
            Route("POST", "/v1/worlds/{world}/fork", "Create a new world with the records below `height`.", status=201),
        ),
    )

    world: Name
    target: Name
    height: Annotated[Count, Meta(description="The height below which the history is shared.")]
    universe: Name = UNIVERSE
    incarnation: int | None = None
