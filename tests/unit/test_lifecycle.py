"""The lifecycle of a world: pause, resume, archive, fork, delete, and background compaction."""

import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Plane
from holdfast.backends.objects import open_objects
from holdfast.errors import InvalidArgument, WorldExists, WorldNotActive, WorldNotFound
from holdfast.kv import Database, Transaction
from holdfast.layers import inboxes, journal_records, journals, snapshots, world_forks, worlds
from holdfast.layers.snapshots import NO_MANIFEST, SnapshotRecord
from holdfast.layers.worlds import World
from holdfast.plane.open import Options, open_plane
from holdfast.runtime.sync.blobs import BlobStore
from holdfast.runtime.sync.worlds import WorldStore
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import ChosenFault, Crash, FaultyDatabase
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import Control, DomainEvent, Effect, Timer

ADA, EVE = World("main", "ada"), World("main", "eve")


@pytest.fixture
def plane(tmp_path: Path, clock: ManualClock) -> Any:
    with holdfast.open(f"dir:{tmp_path}", clock=clock) as plane:
        yield plane


def test_a_paused_world_accepts_inbox_items_only(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    assert world.pause().state == "paused"
    assert world.pause().state == "paused"
    world.inbox.put(Control(command="go"))
    for refused in (lambda: world.append([1], expected_head=0), world.drain):
        with pytest.raises(WorldNotActive, match="is paused; resume it"):
            refused()
    world.resume()
    assert world.drain() == [0]


def test_an_archived_world_is_read_only(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append([1], expected_head=0)
    world.archive()
    with pytest.raises(WorldNotActive):
        world.inbox.put(Control(command="go"))
    assert len(world.read()) == 1
    world.resume()
    world.append([2], expected_head=1)


def test_only_an_archived_world_is_deleted_and_its_name_stays_taken(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append(list(range(200)), expected_head=0)
    world.snapshots.commit(1, height=200, promote=True, receipt_horizon_height=200, manifest_hash=NO_MANIFEST)
    world.compact(entries=50, margin=0)
    world.inbox.put(DomainEvent(schema="s", effects=(Effect("mail", b"1"),)))
    world.drain()
    with pytest.raises(WorldNotActive, match="can become"):
        world.delete()
    world.archive()
    assert world.delete().state == "deleted"
    assert world.delete().state == "deleted"
    assert world.segments() == []
    left = plane.pairs.scan(
        worlds.subspace(World("main", "w")).prefix, worlds.subspace(World("main", "w")).prefix + b"\xff"
    )
    assert len(left) == 1
    with pytest.raises(WorldExists):
        world.create()
    with pytest.raises(WorldNotActive):
        world.append([1], expected_head=0)


def test_a_fork_shares_the_history_up_to_its_height(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append(list(range(300 - 50)), expected_head=0)
    world.snapshots.commit("at 250", height=250, promote=True, receipt_horizon_height=250, manifest_hash=NO_MANIFEST)
    world.append(list(range(100)), expected_head=252)
    world.compact(entries=100, margin=0)
    fork = world.fork("fork", height=300)
    assert fork.head() == 300
    assert fork.read(limit=300) == world.read(limit=300)
    assert fork.snapshots.baseline() == world.snapshots.baseline()
    fork.append(["mine"], expected_head=300)
    assert world.head() == 352
    assert [record.height for record in world.fork("early", height=10).read()] == list(range(10))
    assert plane.world("early").snapshots.baseline().height == 0
    with pytest.raises(InvalidArgument, match="beyond the head"):
        world.fork("late", height=999)
    with pytest.raises(WorldExists):
        world.fork("fork", height=5)


def test_an_invalid_fork_is_refused_and_creates_nothing(plane: Plane) -> None:
    with pytest.raises(WorldNotFound):
        plane.world("missing").fork("copy", height=0)
    gone = plane.world("gone")
    gone.create()
    gone.archive()
    gone.delete()
    with pytest.raises(WorldNotActive, match="history cannot be read"):
        gone.fork("copy", height=0)
    assert "copy" not in plane.worlds()


def test_a_fork_copies_all_snapshots_and_the_newest_baseline(database: Database) -> None:
    database.transact(snapshots.create_world, ADA)

    def snapshot_everywhere(tx: Transaction) -> None:
        journals.write(tx, ADA, [journal_records.entry(canonical(0))] * 1_500, 0)
        for height in range(1, 1_501):
            horizon = height if height <= 1_400 else None
            snapshots.index(tx, ADA, SnapshotRecord("00" * 32, height, 1, horizon, NO_MANIFEST))

    database.transact(snapshot_everywhere)
    database.transact(world_forks.begin, ADA, EVE, 1_450)
    assert database.read(snapshots.baseline, EVE).height == 1_400
    assert len(database.read(snapshots.page, EVE, limit=5_000)) == 1_451


def test_a_fork_has_nothing_pending_and_new_items_get_new_numbers(database: Database, tmp_path: Path) -> None:
    database.transact(snapshots.create_world, ADA)
    asked = DomainEvent(schema="s", effects=(Effect("mail", b"1"),), timers=(Timer(5, b"2"),))
    database.transact(inboxes.enqueue, ADA, asked)
    database.transact(inboxes.drain, ADA)
    objects = open_objects(f"dir:{tmp_path / 'objects'}")
    before = database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=1_000))
    WorldStore(database, objects, BlobStore(database, objects)).fork(ADA, EVE, 1)
    after = database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=1_000))
    added = [key for key, _ in after if key not in dict(before)]
    assert all(key.startswith(worlds.subspace(EVE).prefix) for key in added)
    assert database.transact(inboxes.enqueue, EVE, Control(command="go")) == 1
    assert database.transact(inboxes.drain, EVE) == [1]


def test_a_crashed_fork_is_completed_by_the_next(database: Database, tmp_path: Path) -> None:
    database.transact(snapshots.create_world, ADA)
    for start in (0, 200, 400):
        batch = [journal_records.entry(canonical(number)) for number in range(200)]
        database.transact(journals.append, ADA, batch, expected_head=start)
    objects = open_objects(f"dir:{tmp_path / 'objects'}")

    def fork(target: World, faults: ChosenFault) -> None:
        faulty = FaultyDatabase(database, faults)
        WorldStore(faulty, objects, BlobStore(faulty, objects)).fork(ADA, target, 600)

    counting = ChosenFault()
    fork(EVE, counting)
    for fail_at in range(len(counting.points)):
        target = World("main", f"fork-{fail_at}")
        with pytest.raises(Crash):
            fork(target, ChosenFault(fail_at))
        fork(target, ChosenFault())
        assert database.read(journals.read_hot, target, 0, 600) == database.read(journals.read_hot, ADA, 0, 600)
        assert database.read(worlds.describe, target).state == "active"


def test_drained_items_are_removed_after_a_grace_period(plane: Plane, clock: ManualClock) -> None:
    world = plane.world("w")
    world.create()
    for number in range(5):
        world.inbox.put(Control(command=str(number)))
    world.drain(limit=4)
    world.compact()
    assert len(world.inbox.read()) == 5
    clock.advance_ms(3_600_000)
    world.compact()
    assert [sequence for sequence, _ in world.inbox.read()] == [3, 4]  # The item at the cursor stays.
    assert world.drain() == [4]


def test_worlds_are_compacted_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.limits.SEGMENT_ENTRIES", 50)
    monkeypatch.setattr("holdfast.limits.SEGMENT_MARGIN", 0)
    transport = open_plane(f"dir:{tmp_path}", Options(compact_every_seconds=0.005))
    try:
        plane = Plane(transport)
        for name in ("a", "b"):
            world = plane.world(name)
            world.create()
            world.append(list(range(100)), expected_head=0)
            world.snapshots.commit(1, height=100, promote=True, receipt_horizon_height=100, manifest_hash=NO_MANIFEST)
        while any(len(plane.world(name).segments()) < 1 for name in ("a", "b")):
            pass  # Ends when the background compaction is done.
        assert len(plane.world("a").read()) == 102
    finally:
        transport.close()
    assert not any(thread.name == "holdfast-upkeep" for thread in threading.enumerate())


def test_an_invalid_interval_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="positive"):
        holdfast.open(f"dir:{tmp_path}", compact_every_seconds=0)
    holdfast.open(f"dir:{tmp_path}").close()
