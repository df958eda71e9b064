"""Handlers of world requests."""

from typing import Protocol

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import hosting, inboxes, journal_records, journals, segments, snapshots, turns, worlds
from fastness.layers.idempotency import KeyedCall
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.worlds import World, WorldState
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.universes import ListUniverses, UniverseNames
from fastness.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    Checked,
    CheckRestore,
    CheckWorld,
    CommitSnapshot,
    Compacted,
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
    PromoteSnapshot,
    PutItem,
    ReadInbox,
    ReadJournal,
    Records,
    RestorePoint,
    Segments,
    Sequence,
    SetManifest,
    Snapshot,
    Snapshots,
    SurveyWorlds,
    WorldSurvey,
)


class OfWorld(Protocol):
    """A request that names a world."""

    @property
    def world(self) -> str: ...

    @property
    def universe(self) -> str: ...


class _OfIncarnation(OfWorld, Protocol):
    @property
    def incarnation(self) -> int | None: ...


@transaction
def create(tx: Transaction, request: CreateWorld) -> Described:
    world = world_of(request)
    snapshots.create_world(tx, world, request.manifest_hash or snapshots.NO_MANIFEST)
    if request.program is not None:
        turns.set_program(tx, world, request.program)
    return segments.describe(tx, world)


@transaction
def describe(tx: Transaction, request: DescribeWorld) -> Described:
    return segments.describe(tx, world_of(request), request.incarnation)


@transaction
def names(tx: Transaction, request: ListWorlds) -> Names:
    return Names(worlds.names(tx, request.universe, after=request.after, limit=request.limit))


@transaction
def survey(tx: Transaction, request: SurveyWorlds) -> WorldSurvey:
    found = [
        segments.describe(tx, World(request.universe, name))
        for name in worlds.names(tx, request.universe, after=request.after, limit=request.limit)
    ]
    return WorldSurvey(found, found[-1].name if len(found) == request.limit else None)


@transaction
def list_universes(tx: Transaction, request: ListUniverses) -> UniverseNames:
    return UniverseNames(worlds.universes(tx, after=request.after, limit=request.limit))


@service
def check(stores: AnyStores, request: CheckWorld) -> Served[Checked]:
    return stores.worlds.check(world_of(request), request.start, request.limit, request.incarnation)


def lag(tx: Transaction, universe: str, *, after: str, limit: int) -> tuple[list[str], int]:
    """A page of names of worlds, and the number of their records that a compaction would move."""
    names = worlds.names(tx, universe, after=after, limit=limit)
    behind = 0
    for name in names:
        world = World(universe, name)
        if worlds.describe(tx, world).state is not WorldState.DELETING:
            behind += segments.lag(tx, world)
    return names, behind


@transaction
def append(tx: Transaction, request: AppendEntries) -> Height:
    world = world_of(request)
    incarnation = worlds.require_active(tx, world, request.incarnation)
    hosting.require_unheld(tx, world)
    batch = [journal_records.entry(value) for value in request.entries]
    return Height(journals.append_to_active(tx, world, batch, expected_head=request.expected_head), incarnation)


@service
def read(stores: AnyStores, request: ReadJournal) -> Served[Records]:
    return stores.worlds.read(world_of(request), request.start, request.limit, request.incarnation)


@transaction
def drain(tx: Transaction, request: DrainInbox) -> Drained:
    world, incarnation = _current(tx, request)
    hosting.require_unheld(tx, world)
    return Drained(inboxes.drain(tx, world, limit=request.limit), incarnation)


@transaction
def put_item(tx: Transaction, request: PutItem) -> Sequence:
    world = world_of(request)
    if request.incarnation is not None:
        worlds.describe(tx, world, request.incarnation)
    return Sequence(inboxes.enqueue(tx, world, request.item))


@transaction
def read_inbox(tx: Transaction, request: ReadInbox) -> Items:
    world, incarnation = _readable(tx, request)
    return Items(inboxes.read(tx, world, after=request.after, limit=request.limit), incarnation)


@transaction
def cursor(tx: Transaction, request: GetCursor) -> Sequence:
    world, _ = _readable(tx, request)
    return Sequence(inboxes.cursor(tx, world))


@transaction
def set_manifest(tx: Transaction, request: SetManifest) -> Height:
    world, incarnation = _current(tx, request)
    hosting.require_unheld(tx, world)
    height = snapshots.set_manifest(tx, world, request.manifest_hash, expected_head=request.expected_head)
    return Height(height, incarnation)


@service
def commit_snapshot(stores: AnyStores, request: CommitSnapshot, call: KeyedCall | None = None) -> Served[Snapshot]:
    time_ns = snapshots.NOW if request.logical_time_ns is None else request.logical_time_ns
    draft = SnapshotRecord("", request.height, time_ns, request.receipt_horizon_height, request.manifest_hash)
    return stores.worlds.snapshot(
        world_of(request),
        request.data,
        draft,
        promote=request.promote,
        incarnation=request.incarnation,
        claim=_claim_of(request),
        call=call,
    )


@transaction
def promote_snapshot(tx: Transaction, request: PromoteSnapshot) -> Snapshot:
    world, _ = _current(tx, request)
    claim = _claim_of(request)
    if claim is None:
        hosting.require_unheld(tx, world)
    else:
        hosting.require_claim(tx, world, owner=claim[0], fence=claim[1])
    return snapshots.describe(snapshots.promote(tx, world, request.height), is_baseline=True)


def _claim_of(request: CommitSnapshot | PromoteSnapshot) -> tuple[str, int] | None:
    """The owner and the fence of the claim that a request names; None if it names none."""
    owner, fence = request.owner, request.fence
    if owner is not None and fence is not None:
        return owner, fence
    if owner is not None or fence is not None:
        given, other = ("owner", "fence") if fence is None else ("fence", "owner")
        raise InvalidArgument(f"{given} is given without {other}; give both, as the claim has them, or leave it out")
    return None


@transaction
def baseline(tx: Transaction, request: GetBaseline) -> Snapshot:
    world, _ = _readable(tx, request)
    return snapshots.describe(snapshots.baseline(tx, world), is_baseline=True)


@service
def check_restore(stores: AnyStores, request: CheckRestore) -> Served[RestorePoint]:
    return stores.worlds.check_restore(world_of(request), request.incarnation)


@transaction
def list_snapshots(tx: Transaction, request: ListSnapshots) -> Snapshots:
    world, incarnation = _readable(tx, request)
    current = snapshots.find_baseline(tx, world)
    page = snapshots.page(tx, world, start=request.start, limit=request.limit)
    found = [snapshots.describe(record, is_baseline=record == current) for record in page]
    return Snapshots(found, incarnation)


@service
def compact(stores: AnyStores, request: CompactWorld) -> Served[Compacted]:
    return stores.worlds.compact(
        world_of(request), entries=request.entries, margin=request.margin, incarnation=request.incarnation
    )


@transaction
def list_segments(tx: Transaction, request: ListSegments) -> Segments:
    world, incarnation = _readable(tx, request)
    page = segments.page(tx, world, after=request.after, limit=request.limit)
    return Segments(page, incarnation)


@transaction
def change(tx: Transaction, request: ChangeWorld) -> Described:
    world, _ = _current(tx, request)
    worlds.change_state(tx, world, WorldState(request.state))
    turns.note_state(tx, world)
    return segments.describe(tx, world)


@service
def delete(stores: AnyStores, request: DeleteWorld) -> Served[Described]:
    return stores.worlds.delete(world_of(request), request.incarnation)


@service
def fork(stores: AnyStores, request: ForkWorld, call: KeyedCall | None = None) -> Served[Described]:
    source = world_of(request)
    target = World(source.universe, request.target)
    return stores.worlds.fork(source, target, request.height, incarnation=request.incarnation, call=call)


def _current(tx: Transaction, request: _OfIncarnation) -> tuple[World, int]:
    """The world of a request and its incarnation, after checking that it is the one that the caller knows."""
    world = world_of(request)
    return world, worlds.describe(tx, world, request.incarnation).incarnation


def _readable(tx: Transaction, request: _OfIncarnation) -> tuple[World, int]:
    """The same for a request that reads the world's history."""
    world = world_of(request)
    return world, worlds.require_readable(tx, world, request.incarnation)


def world_of(request: OfWorld) -> World:
    """The world that a request names."""
    return World(request.universe, request.world)
