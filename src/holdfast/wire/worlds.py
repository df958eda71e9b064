"""Worlds: their journals and inboxes."""

import msgspec

from holdfast.limits import SEGMENT_ENTRIES, SEGMENT_MARGIN
from holdfast.names import UNIVERSE
from holdfast.wire.canonical import check_canonical
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.requests import Operation, Request, Route


class Described(msgspec.Struct, frozen=True):
    """The state of a world. Records from `hot` on are in the key space; a restore starts from `baseline`."""

    name: str
    state: str
    created_ms: int
    head: int
    hot: int = 0
    baseline: int = 0


class Names(msgspec.Struct, frozen=True):
    """Names of worlds, in order."""

    names: list[str]


class WorldSurvey(msgspec.Struct, frozen=True):
    """Worlds in the order of their names; `next` is where the next page starts, if there is one."""

    worlds: list[Described]
    next: str | None


class Height(msgspec.Struct, frozen=True):
    """A height in a journal."""

    height: int


class Record(msgspec.Struct, frozen=True):
    """A journal record: its height, its kind (entry, ingress, snapshot, baseline), and its value as canonical CBOR."""

    height: int
    kind: str
    value: bytes


class Records(msgspec.Struct, frozen=True):
    """Journal records in order, without gaps."""

    records: list[Record]


class Drained(msgspec.Struct, frozen=True):
    """The heights of the drained items."""

    heights: list[int]


class Sequence(msgspec.Struct, frozen=True):
    """A sequence in an inbox; None: its beginning."""

    sequence: int | None


class Items(msgspec.Struct, frozen=True):
    """Inbox items with their sequences, in order."""

    items: list[tuple[int, InboxItem]]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of a world: the blob that holds it, and what it covers."""

    snapshot_ref: str
    height: int
    logical_time_ns: int
    receipt_horizon_height: int | None
    manifest_hash: str | None


class Snapshots(msgspec.Struct, frozen=True):
    """Snapshots in the order of their heights."""

    snapshots: list[Snapshot]


class Segment(msgspec.Struct, frozen=True):
    """A cold part of a journal, from `start` to `end`, both included."""

    start: int
    end: int
    object_path: str
    checksum: str
    size: int


class Segments(msgspec.Struct, frozen=True):
    """Segments in the order of their heights."""

    segments: list[Segment]


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


class CreateWorld(Request[Described], frozen=True, tag="worlds.create"):
    operation = Operation(
        http=(
            Route("POST", "/v1/worlds", "Create a world.", status=201),
            Route("PUT", "/v1/worlds/{world}", "Create a world with this name.", status=201),
        )
    )

    world: str
    universe: str = UNIVERSE
    manifest_hash: str | None = None


class DescribeWorld(Request[Described], frozen=True, tag="worlds.describe"):
    operation = Operation(
        reads=True, http=(Route("GET", "/v1/worlds/{world}", "Describe a world: its state, age and journal head."),)
    )

    world: str
    universe: str = UNIVERSE


class ListWorlds(Request[Names], frozen=True, tag="worlds.list"):
    operation = Operation(reads=True, http=(Route("GET", "/v1/worlds", "List the names of worlds, in order."),))

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class SurveyWorlds(Request[WorldSurvey], frozen=True, tag="worlds.survey"):
    """The state of each world after `after`."""

    operation = Operation(reads=True, http=(Route("GET", "/v1/surveys/worlds", "Summarize each world."),))

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class AppendEntries(Request[Height], frozen=True, tag="worlds.append"):
    """Append values, each canonical CBOR; answered with the height of the first."""

    operation = Operation(
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

    world: str
    entries: list[bytes]
    expected_head: int
    universe: str = UNIVERSE

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

    world: str
    start: int
    limit: int = 1_000
    universe: str = UNIVERSE


class DrainInbox(Request[Drained], frozen=True, tag="worlds.drain"):
    operation = Operation(
        http=(Route("POST", "/v1/worlds/{world}/drain", "Move the next inbox items into the journal."),)
    )

    world: str
    limit: int = 256
    universe: str = UNIVERSE


class PutItem(Request[Sequence], frozen=True, tag="worlds.inbox.put"):
    operation = Operation(
        atomic=True, http=(Route("POST", "/v1/worlds/{world}/inbox", "Put an item into the inbox.", status=201),)
    )

    world: str
    item: InboxItem
    universe: str = UNIVERSE


class ReadInbox(Request[Items], frozen=True, tag="worlds.inbox.read"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/worlds/{world}/inbox", "Read inbox items after the sequence number `after`."),),
    )

    world: str
    after: int | None = None
    limit: int = 1_000
    universe: str = UNIVERSE


class GetCursor(Request[Sequence], frozen=True, tag="worlds.inbox.cursor"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/worlds/{world}/inbox/cursor", "Read the sequence number of the last drained item."),),
    )

    world: str
    universe: str = UNIVERSE


class SetManifest(Request[Height], frozen=True, tag="worlds.manifest"):
    """Record that another manifest defines the world from here on; the answer is the height of the record."""

    operation = Operation(
        http=(Route("POST", "/v1/worlds/{world}/manifest", "Set the manifest that defines the world.", status=201),)
    )

    world: str
    manifest_hash: str
    expected_head: int
    universe: str = UNIVERSE


class CommitSnapshot(Request[Snapshot], frozen=True, tag="worlds.snapshots.commit"):
    """Store a snapshot that has applied every record below `height`; `promote` makes it the baseline."""

    operation = Operation(
        http=(
            Route("POST", "/v1/worlds/{world}/snapshots", "Store a snapshot; `data` is the state as JSON.", status=201),
        )
    )

    world: str
    data: bytes
    height: int
    promote: bool = False
    receipt_horizon_height: int | None = None
    manifest_hash: str | None = None
    logical_time_ns: int | None = None
    universe: str = UNIVERSE


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

    world: str
    universe: str = UNIVERSE


class ListSnapshots(Request[Snapshots], frozen=True, tag="worlds.snapshots.list"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/worlds/{world}/snapshots", "List the snapshots, in the order of their heights."),),
    )

    world: str
    start: int = 0
    limit: int = 100
    universe: str = UNIVERSE


class CompactWorld(Request[Compacted], frozen=True, tag="worlds.compact"):
    """Move records more than `margin` below the baseline into segments of `entries` records."""

    operation = Operation(
        repeatable="entries that were moved are not moved again; only the answer differs",
        http=(Route("POST", "/v1/worlds/{world}/compact", "Move old records below the baseline into segments."),),
    )

    world: str
    entries: int = SEGMENT_ENTRIES
    margin: int = SEGMENT_MARGIN
    universe: str = UNIVERSE


class ListSegments(Request[Segments], frozen=True, tag="worlds.segments"):
    operation = Operation(
        reads=True, http=(Route("GET", "/v1/worlds/{world}/segments", "List the cold segments of the journal."),)
    )

    world: str
    after: int = -1
    limit: int = 100
    universe: str = UNIVERSE


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

    world: str
    start: int = 0
    limit: int = 1_000
    universe: str = UNIVERSE


class ChangeWorld(Request[Described], frozen=True, tag="worlds.change"):
    """Pause, resume or archive a world: `state` is paused, active or archived."""

    operation = Operation(
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
        )
    )

    world: str
    state: str
    universe: str = UNIVERSE


class DeleteWorld(Request[Described], frozen=True, tag="worlds.delete"):
    """Delete an archived world. Its name stays reserved."""

    operation = Operation(
        repeatable="a deleted world stays deleted, and its name stays reserved",
        http=(Route("DELETE", "/v1/worlds/{world}", "Delete an archived world. Its name cannot be used again."),),
    )

    world: str
    universe: str = UNIVERSE


class ForkWorld(Request[Described], frozen=True, tag="worlds.fork"):
    """Create a world with the records of this one below `height`."""

    operation = Operation(
        http=(
            Route("POST", "/v1/worlds/{world}/fork", "Create a new world with the records below `height`.", status=201),
        )
    )

    world: str
    target: str
    height: int
    universe: str = UNIVERSE
