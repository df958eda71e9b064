"""Worlds over HTTP: journals, inboxes, snapshots and lifecycle; and the list of universes."""

from functools import partial
from typing import Final

from holdfast.server.http.endpoints import Endpoint, operation
from holdfast.wire.universes import ListUniverses
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CheckWorld,
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
    SurveyWorlds,
)

_WORLD: Final = "/v1/worlds/{world}"


_operation: Final = partial(operation, tag="worlds")


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    operation("GET", "/v1/universes", ListUniverses, "List the universes that hold any data.", tag="universes"),
    _operation("GET", "/v1/surveys/worlds", SurveyWorlds, "Summarize each world."),
    _operation("GET", "/v1/worlds", ListWorlds, "List the names of worlds, in order."),
    _operation("POST", "/v1/worlds", CreateWorld, "Create a world.", status=201),
    _operation("GET", _WORLD, DescribeWorld, "Describe a world: its state, age and journal head."),
    _operation("PUT", _WORLD, CreateWorld, "Create a world with this name.", status=201),
    _operation("DELETE", _WORLD, DeleteWorld, "Delete an archived world. Its name cannot be used again."),
    _operation("GET", _WORLD + "/entries", ReadJournal, "Read journal records from `start` on.", defaults={"start": 0}),
    _operation(
        "POST",
        _WORLD + "/entries",
        AppendEntries,
        "Append values to the journal if its head is `expected_head`.",
        status=201,
    ),
    _operation("GET", _WORLD + "/inbox", ReadInbox, "Read inbox items after the sequence number `after`."),
    _operation("POST", _WORLD + "/inbox", PutItem, "Put an item into the inbox.", status=201),
    _operation("GET", _WORLD + "/inbox/cursor", GetCursor, "Read the sequence number of the last drained item."),
    _operation("POST", _WORLD + "/drain", DrainInbox, "Move the next inbox items into the journal."),
    _operation("GET", _WORLD + "/snapshots", ListSnapshots, "List the snapshots, in the order of their heights."),
    _operation(
        "POST", _WORLD + "/snapshots", CommitSnapshot, "Store a snapshot; `data` is the state as JSON.", status=201
    ),
    _operation(
        "GET", _WORLD + "/baseline", GetBaseline, "Read the baseline, which is the snapshot that a restore starts from."
    ),
    _operation("POST", _WORLD + "/manifest", SetManifest, "Set the manifest that defines the world.", status=201),
    _operation("GET", _WORLD + "/segments", ListSegments, "List the cold segments of the journal."),
    _operation("POST", _WORLD + "/compact", CompactWorld, "Move old records below the baseline into segments."),
    _operation(
        "GET",
        _WORLD + "/check",
        CheckWorld,
        "Check for damage from `start` on, one segment or `limit` records at a time.",
    ),
    _operation("POST", _WORLD + "/fork", ForkWorld, "Create a new world with the records below `height`.", status=201),
    _operation(
        "POST", _WORLD + "/pause", ChangeWorld, "Pause a world: reject appends and drains.", fixed={"state": "paused"}
    ),
    _operation("POST", _WORLD + "/resume", ChangeWorld, "Resume a paused world.", fixed={"state": "active"}),
    _operation(
        "POST", _WORLD + "/archive", ChangeWorld, "Archive a world: reject all writes.", fixed={"state": "archived"}
    ),
)
