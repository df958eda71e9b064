"""Worlds over HTTP: journals, inboxes, snapshots and their lives."""

from typing import Any, Final

from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CommitSnapshot,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    DescribeWorld,
    DrainInbox,
    ForkWorld,
    GetBaseline,
    GetCursor,
    ListSegments,
    ListSnapshots,
    ListWorlds,
    PutItem,
    ReadInbox,
    ReadJournal,
    SetManifest,
)

_WORLD: Final = "/v1/worlds/{world}"


def _row(method: str, path: str, request: Any, summary: str, **options: Any) -> Endpoint:
    return noun(method, path, request, summary, of="worlds", **options)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _row("GET", "/v1/worlds", ListWorlds, "Names of worlds, in order"),
    _row("POST", "/v1/worlds", CreateWorld, "Make a world", status=201),
    _row("GET", _WORLD, DescribeWorld, "The state, the age and the head of a world"),
    _row("PUT", _WORLD, CreateWorld, "Make a world of that name", status=201),
    _row("DELETE", _WORLD, DeleteWorld, "Delete an archived world; its name stays taken"),
    _row("GET", _WORLD + "/entries", ReadJournal, "Journal records from `start` on", defaults={"start": 0}),
    _row("POST", _WORLD + "/entries", AppendEntries, "Append values if the head is `expected_head`", status=201),
    _row("GET", _WORLD + "/inbox", ReadInbox, "Inbox items behind the sequence `after`"),
    _row("POST", _WORLD + "/inbox", PutItem, "Put an item into the inbox", status=201),
    _row("GET", _WORLD + "/inbox/cursor", GetCursor, "The sequence of the last item that was drained"),
    _row("POST", _WORLD + "/drain", DrainInbox, "Move the next inbox items into the journal"),
    _row("GET", _WORLD + "/snapshots", ListSnapshots, "Snapshots in the order of their heights"),
    _row("POST", _WORLD + "/snapshots", CommitSnapshot, "Store a snapshot; `data` is the state, as JSON", status=201),
    _row("GET", _WORLD + "/baseline", GetBaseline, "The snapshot that a restore starts from"),
    _row("POST", _WORLD + "/manifest", SetManifest, "Note that another manifest defines the world", status=201),
    _row("GET", _WORLD + "/segments", ListSegments, "Cold pieces of the journal"),
    _row("POST", _WORLD + "/compact", CompactWorld, "Move what lies well below the baseline into segments"),
    _row("POST", _WORLD + "/fork", ForkWorld, "A new world with the records below `height`", status=201),
    _row("POST", _WORLD + "/pause", ChangeWorld, "Take no more appends and drains", fixed={"state": "paused"}),
    _row("POST", _WORLD + "/resume", ChangeWorld, "Go on after a pause", fixed={"state": "active"}),
    _row("POST", _WORLD + "/archive", ChangeWorld, "Take nothing any more", fixed={"state": "archived"}),
)
