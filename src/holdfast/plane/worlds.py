"""Worlds: what a request asks of the journal and the inbox."""

from typing import Any, Protocol

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers import inboxes, journal_records, journals, segments, snapshots, worlds
from holdfast.layers.idempotency import KeyedCall
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.layers.worlds import World, WorldState
from holdfast.limits import SURVEY_MAX
from holdfast.names import checked_name
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CheckWorld,
    CommitSnapshot,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    Described,
    DescribeWorld,
    Drained,
    DrainInbox,
    ForkWorld,
    GetBaseline,
    GetCursor,
    Height,
    Items,
    ListSegments,
    ListSnapshots,
    ListWorlds,
    Names,
    PutItem,
    ReadInbox,
    ReadJournal,
    Segment,
    Segments,
    Sequence,
    SetManifest,
    Snapshot,
    Snapshots,
    SurveyWorlds,
    WorldSurvey,
)


class _OfWorld(Protocol):
    @property
    def world(self) -> str: ...

    @property
    def universe(self) -> str: ...


def create(tx: Transaction, request: CreateWorld) -> Described:
    world = _world(request)
    snapshots.found(tx, world, request.manifest_hash or snapshots.NO_MANIFEST)
    return segments.describe(tx, world)


def describe(tx: Transaction, request: DescribeWorld) -> Described:
    return segments.describe(tx, _world(request))


def names(tx: Transaction, request: ListWorlds) -> Names:
    universe = checked_name("universe", request.universe)
    after = checked_name("world", request.after) if request.after else ""
    return Names(worlds.names(tx, universe, after=after, limit=request.limit))


def survey(tx: Transaction, request: SurveyWorlds) -> WorldSurvey:
    if not 0 < request.limit <= SURVEY_MAX:
        raise InvalidArgument(f"A survey has 1 to {SURVEY_MAX} worlds, not {request.limit}")
    universe = checked_name("universe", request.universe)
    after = checked_name("world", request.after) if request.after else ""
    found = [
        segments.describe(tx, World(universe, name))
        for name in worlds.names(tx, universe, after=after, limit=request.limit)
    ]
    return WorldSurvey(found, found[-1].name if len(found) == request.limit else None)


def check(services: Any, request: CheckWorld) -> Any:
    return services.worlds.check(_world(request), request.start, request.limit)


def lag(tx: Transaction, universe: str, *, after: str, limit: int) -> tuple[list[str], int]:
    """A page of names of worlds, and how many of their records a compaction would move; for a server's metrics."""
    names = worlds.names(tx, universe, after=after, limit=limit)
    behind = 0
    for name in names:
        world = World(universe, name)
        if worlds.describe(tx, world).state not in (WorldState.DELETING, WorldState.DELETED):
            behind += segments.lag(tx, world)
    return names, behind


def append(tx: Transaction, request: AppendEntries) -> Height:
    batch = [journal_records.entry(value) for value in request.entries]
    return Height(journals.append(tx, _world(request), batch, expected_head=request.expected_head))


def read(services: Any, request: ReadJournal) -> Any:
    return services.worlds.read(_world(request), request.start, request.limit)


def drain(tx: Transaction, request: DrainInbox) -> Drained:
    return Drained(inboxes.drain(tx, _world(request), limit=request.limit))


def put_item(tx: Transaction, request: PutItem) -> Sequence:
    return Sequence(inboxes.enqueue(tx, _world(request), request.item))


def read_inbox(tx: Transaction, request: ReadInbox) -> Items:
    return Items(inboxes.read(tx, _world(request), after=request.after, limit=request.limit))


def cursor(tx: Transaction, request: GetCursor) -> Sequence:
    return Sequence(inboxes.cursor(tx, _world(request)))


def set_manifest(tx: Transaction, request: SetManifest) -> Height:
    height = snapshots.set_manifest(tx, _world(request), request.manifest_hash, expected_head=request.expected_head)
    return Height(height)


def commit_snapshot(services: Any, request: CommitSnapshot, call: KeyedCall | None = None) -> Any:
    time_ns = snapshots.NOW if request.logical_time_ns is None else request.logical_time_ns
    draft = SnapshotRecord("", request.height, time_ns, request.receipt_horizon_height, request.manifest_hash)
    return services.worlds.snapshot(_world(request), request.data, draft, promote=request.promote, call=call)


def baseline(tx: Transaction, request: GetBaseline) -> Snapshot:
    return Snapshot(*msgspec.structs.astuple(snapshots.baseline(tx, _world(request))))


def list_snapshots(tx: Transaction, request: ListSnapshots) -> Snapshots:
    page = snapshots.page(tx, _world(request), start=request.start, limit=request.limit)
    return Snapshots([Snapshot(*msgspec.structs.astuple(record)) for record in page])


def compact(services: Any, request: CompactWorld) -> Any:
    if request.entries < 1 or request.margin < 0:
        raise InvalidArgument("A segment holds at least 1 record, and the margin is not negative")
    return services.worlds.compact(_world(request), entries=request.entries, margin=request.margin)


def list_segments(tx: Transaction, request: ListSegments) -> Segments:
    page = segments.page(tx, _world(request), after=request.after, limit=request.limit)
    return Segments([Segment(*msgspec.structs.astuple(record)) for record in page])


def change(tx: Transaction, request: ChangeWorld) -> Described:
    world = _world(request)
    if request.state not in ("active", "paused", "archived"):
        raise InvalidArgument(f"A world is made active, paused or archived, not {request.state!r}")
    worlds.change_state(tx, world, WorldState(request.state))
    return segments.describe(tx, world)


def delete(services: Any, request: DeleteWorld) -> Any:
    return services.worlds.delete(_world(request))


def fork(services: Any, request: ForkWorld, call: KeyedCall | None = None) -> Any:
    source = _world(request)
    target = World(source.universe, checked_name("world", request.target))
    return services.worlds.fork(source, target, request.height, call)


def _world(request: _OfWorld) -> World:
    return World(checked_name("universe", request.universe), checked_name("world", request.world))
