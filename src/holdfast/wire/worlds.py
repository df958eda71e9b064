"""Worlds: their journals and inboxes."""

import msgspec

from holdfast.limits import SEGMENT_ENTRIES, SEGMENT_MARGIN
from holdfast.names import UNIVERSE
from holdfast.wire.canonical import check_canonical
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.requests import Operation, Request


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
    world: str
    universe: str = UNIVERSE
    manifest_hash: str | None = None


class DescribeWorld(Request[Described], frozen=True, tag="worlds.describe"):
    operation = Operation(reads=True)

    world: str
    universe: str = UNIVERSE


class ListWorlds(Request[Names], frozen=True, tag="worlds.list"):
    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class SurveyWorlds(Request[WorldSurvey], frozen=True, tag="worlds.survey"):
    """The state of each world after `after`."""

    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class AppendEntries(Request[Height], frozen=True, tag="worlds.append"):
    """Append values, each canonical CBOR; answered with the height of the first."""

    operation = Operation(atomic=True)

    world: str
    entries: list[bytes]
    expected_head: int
    universe: str = UNIVERSE

    def check(self) -> None:
        for entry in self.entries:
            check_canonical(entry)


class ReadJournal(Request[Records], frozen=True, tag="worlds.read"):
    operation = Operation(reads=True)

    world: str
    start: int
    limit: int = 1_000
    universe: str = UNIVERSE


class DrainInbox(Request[Drained], frozen=True, tag="worlds.drain"):
    world: str
    limit: int = 256
    universe: str = UNIVERSE


class PutItem(Request[Sequence], frozen=True, tag="worlds.inbox.put"):
    operation = Operation(atomic=True)

    world: str
    item: InboxItem
    universe: str = UNIVERSE


class ReadInbox(Request[Items], frozen=True, tag="worlds.inbox.read"):
    operation = Operation(reads=True)

    world: str
    after: int | None = None
    limit: int = 1_000
    universe: str = UNIVERSE


class GetCursor(Request[Sequence], frozen=True, tag="worlds.inbox.cursor"):
    operation = Operation(reads=True)

    world: str
    universe: str = UNIVERSE


class SetManifest(Request[Height], frozen=True, tag="worlds.manifest"):
    """Record that another manifest defines the world from here on; the answer is the height of the record."""

    world: str
    manifest_hash: str
    expected_head: int
    universe: str = UNIVERSE


class CommitSnapshot(Request[Snapshot], frozen=True, tag="worlds.snapshots.commit"):
    """Store a snapshot that has applied every record below `height`; `promote` makes it the baseline."""

    world: str
    data: bytes
    height: int
    promote: bool = False
    receipt_horizon_height: int | None = None
    manifest_hash: str | None = None
    logical_time_ns: int | None = None
    universe: str = UNIVERSE


class GetBaseline(Request[Snapshot], frozen=True, tag="worlds.baseline"):
    operation = Operation(reads=True)

    world: str
    universe: str = UNIVERSE


class ListSnapshots(Request[Snapshots], frozen=True, tag="worlds.snapshots.list"):
    operation = Operation(reads=True)

    world: str
    start: int = 0
    limit: int = 100
    universe: str = UNIVERSE


class CompactWorld(Request[Compacted], frozen=True, tag="worlds.compact"):
    """Move records more than `margin` below the baseline into segments of `entries` records."""

    operation = Operation(repeatable="entries that were moved are not moved again; only the answer differs")

    world: str
    entries: int = SEGMENT_ENTRIES
    margin: int = SEGMENT_MARGIN
    universe: str = UNIVERSE


class ListSegments(Request[Segments], frozen=True, tag="worlds.segments"):
    operation = Operation(reads=True)

    world: str
    after: int = -1
    limit: int = 100
    universe: str = UNIVERSE


class CheckWorld(Request[Checked], frozen=True, tag="worlds.check"):
    """Check records from `start` on, a segment or at most `limit` hot ones, and the snapshots among them.

    Whether a snapshot agrees with the records cannot be checked without the reducer.
    """

    operation = Operation(reads=True)

    world: str
    start: int = 0
    limit: int = 1_000
    universe: str = UNIVERSE


class ChangeWorld(Request[Described], frozen=True, tag="worlds.change"):
    """Pause, resume or archive a world: `state` is paused, active or archived."""

    world: str
    state: str
    universe: str = UNIVERSE


class DeleteWorld(Request[Described], frozen=True, tag="worlds.delete"):
    """Delete an archived world. Its name stays reserved."""

    operation = Operation(repeatable="a deleted world stays deleted, and its name stays reserved")

    world: str
    universe: str = UNIVERSE


class ForkWorld(Request[Described], frozen=True, tag="worlds.fork"):
    """Create a world with the records of this one below `height`."""

    world: str
    target: str
    height: int
    universe: str = UNIVERSE
