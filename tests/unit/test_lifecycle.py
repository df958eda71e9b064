"""The lifecycle of a world: pause, resume, archive, fork, delete, and background compaction."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest

import fastness
from fastness import Plane
from fastness.backends.objects import open_objects
from fastness.errors import InvalidArgument, WorldExists, WorldNotActive, WorldNotFound
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import (
    effects,
    inboxes,
    journal_records,
    journals,
    segments,
    snapshots,
    timers,
    world_forks,
    worlds,
)
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord
from fastness.layers.worlds import World, WorldState
from fastness.plane.open import Options, open_plane
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control, DomainEvent, Effect, Timer
from fastness.wire.restores import Entry
from fastness.wire.worlds import Segment

ADA, EVE = World("main", "ada"), World("main", "eve")
NEVER_NS = 1 << 62


@pytest.fixture
def plane(tmp_path: Path, clock: ManualClock) -> Any:
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
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


def delete(world: Any) -> None:
    world.archive()
    world.delete()


def operations(plane: Plane, world: Any) -> dict[str, Callable[[], object]]:
    """Everything that can be done with a world, apart from creating and deleting it."""
    return {
        "describe": world.describe,
        "head": world.head,
        "pause": world.pause,
        "resume": world.resume,
        "archive": world.archive,
        "fork": lambda: world.fork("fork", height=0),
        "append": lambda: world.append(["late"], expected_head=0),
        "atomic append": lambda: plane.atomic().append(world, ["late"], expected_head=0).commit(),
        "atomic deliver": lambda: plane.atomic().deliver(world, Control(command="late")).commit(),
        "read": world.read,
        "check": world.check,
        "drain": world.drain,
        "set_manifest": lambda: world.set_manifest("a" * 64, expected_head=0),
        "compact": world.compact,
        "segments": world.segments,
        "restore": lambda: world.restore(lambda state, entry: state),
        "replay": lambda: world.replay(lambda state, entry: state),
        "verify": lambda: world.verify(lambda state, entry: state),
        "inbox.put": lambda: world.inbox.put(Control(command="late")),
        "inbox.read": world.inbox.read,
        "inbox.cursor": world.inbox.cursor,
        "snapshots.commit": lambda: world.snapshots.commit(1, height=0),
        "snapshots.promote": lambda: world.snapshots.promote(0),
        "snapshots.baseline": world.snapshots.baseline,
        "snapshots.list": world.snapshots.list,
    }


def test_no_operation_finds_a_deleted_world(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append([1, 2], expected_head=0)
    world.inbox.put(Control(command="go"))
    delete(world)
    for handle in (world, plane.world("w")):
        for name, work in operations(plane, handle).items():
            with pytest.raises(WorldNotFound, match="w was deleted"):
                pytest.fail(f"{name} returned {work()!r}")
    assert plane.worlds() == []
    assert plane.survey_worlds().worlds == []
    assert plane.world("w").delete().state == "deleted"  # Repeating a deletion is harmless.


def test_a_handle_of_a_deleted_world_does_not_continue_in_its_next_incarnation(plane: Plane) -> None:
    old = plane.world("w")
    assert old.create().incarnation == 1
    reader, writer = plane.world("w"), plane.world("w")
    old.append([1, 2], expected_head=0)
    assert len(reader.read(limit=1)) == 1  # The reader learns the incarnation from a page, the writer from its append.
    writer.append([3], expected_head=2)
    delete(plane.world("w"))
    new = plane.world("w")
    made = new.create()
    assert (made.incarnation, made.head, new.describe().incarnation, new.incarnation) == (2, 0, 2, 2)
    new.inbox.put(Control(command="go"))
    for handle in (old, reader, writer, plane.world("w", incarnation=1)):
        for name, work in {**operations(plane, handle), "delete": handle.delete}.items():
            with pytest.raises(WorldNotFound, match="Incarnation 1 of world w does not exist: the current one is 2"):
                pytest.fail(f"{name} returned {work()!r}")
    assert (new.head(), len(new.inbox.read()), new.describe().state) == (0, 1, "active")
    assert new.append(["mine"], expected_head=0) == 0
    delete(new)
    assert old.create().incarnation == 3  # The handle that creates a world works on it.
    assert old.append(["again"], expected_head=0) == 0


def test_a_fold_does_not_continue_in_the_next_incarnation(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.handles.worlds.READ_ENTRIES_MAX", 2)
    monkeypatch.setattr("fastness.handles.sync.worlds.READ_ENTRIES_MAX", 2)
    plane.world("w").create()

    def replace_world(state: Any, entry: Entry) -> Any:
        if entry.height == 1:
            delete(plane.world("w"))
            plane.world("w").create()
            plane.world("w").append(["other"] * 5, expected_head=0)
        return entry.value

    for fold in ("restore", "replay", "verify"):
        world = plane.world("w")
        world.append(["mine"] * 5, expected_head=world.head())
        with pytest.raises(WorldNotFound, match="was deleted and created again"):
            getattr(world, fold)(replace_world)


def test_the_next_incarnation_inherits_nothing(plane: Plane) -> None:
    """Neither keys, nor pending effects, nor timers, nor cached segments."""

    def keys_of(name: str) -> list[bytes]:
        return [key for key, _ in plane.pairs.scan(*worlds.subspace(World("main", name)).range(), limit=100)]

    world = plane.world("w")
    world.create()
    new_keys = keys_of("w")
    other = plane.world("other")
    other.create()
    item = DomainEvent(schema="s", effects=(Effect("mail", b"1"),), timers=(Timer(NEVER_NS, b"2"),))
    for each in (world, other):
        each.inbox.put(item)
        each.drain()
    world.append([f"old {n}" for n in range(100)], expected_head=1)
    world.snapshots.commit("old", height=101, receipt_horizon_height=101)
    assert world.compact(entries=50, margin=0).segments == 2
    assert len(world.read(limit=100)) == 100  # The segments are cached.
    delete(world)
    world.create()
    assert keys_of("w") == new_keys
    for index, where in ((("effects", "pending"), 0), (("effects", "due", "mail"), 1), (("timers", "due"), -1)):
        requests = Subspace("u", "main", *index)
        assert [requests.unpack(key)[where] for key, _ in plane.pairs.scan(*requests.range(), limit=10)] == ["other"]
    world.append([f"new {n}" for n in range(100)], expected_head=0)
    assert world.snapshots.commit("new", height=100).is_baseline
    assert world.compact(entries=50, margin=0).segments == 2
    assert [cbor2.loads(record.value) for record in world.read(limit=100)] == [f"new {n}" for n in range(100)]
    assert all("/w/2/" in segment.object_path for segment in world.segments())
    assert world.check().fault is None


def test_an_interrupted_deletion_is_finished_before_the_name_is_used_again(database: Database, tmp_path: Path) -> None:
    objects = open_objects(f"dir:{tmp_path / 'objects'}")

    def store(faults: ChosenFault) -> WorldStore:
        faulty = FaultyDatabase(database, faults)
        return WorldStore(faulty, objects, BlobStore(faulty, objects))

    def prepare(world: World) -> None:
        database.transact(snapshots.create_world, world)
        batch = [journal_records.entry(canonical(number)) for number in range(20)]
        database.transact(journals.append, world, batch, expected_head=0)
        draft = SnapshotRecord("", 20, snapshots.NOW, None, None)
        store(ChosenFault()).snapshot(world, canonical("state"), draft)
        store(ChosenFault()).compact(world, entries=10, margin=0)
        database.transact(worlds.change_state, world, WorldState.ARCHIVED)

    prepare(ADA)
    counting = ChosenFault()
    store(counting).delete(ADA)
    for fail_at in range(len(counting.points)):
        world = World("main", f"w-{fail_at}")
        prepare(world)
        with pytest.raises(Crash):
            store(ChosenFault(fail_at)).delete(world)
        if database.read(worlds.last_meta, world).state is WorldState.DELETING:
            with pytest.raises(WorldExists, match="is being deleted; finish that"):
                database.transact(snapshots.create_world, world)
            for read in (
                lambda world=world: store(ChosenFault()).read(world, 0, 10),
                lambda world=world: store(ChosenFault()).check_restore(world),
            ):
                with pytest.raises(WorldNotActive, match="is being deleted, and cannot be read"):
                    read()
        assert store(ChosenFault()).delete(world).state == "deleted"
        database.transact(snapshots.create_world, world)
        assert database.read(segments.describe, world).incarnation == 2
        assert store(ChosenFault()).read(world, 0, 10).records == []
        assert database.read(segments.page, world, limit=10) == []


def test_late_steps_of_work_on_a_deleted_world_change_nothing(database: Database, tmp_path: Path) -> None:
    """A second deletion, a compaction and a fork that were under way stop at the next incarnation."""
    objects = open_objects(f"dir:{tmp_path / 'objects'}")
    store = WorldStore(database, objects, BlobStore(database, objects))
    first_segments = []
    for _ in range(2):
        database.transact(snapshots.create_world, ADA)
        batch = [journal_records.entry(canonical(number)) for number in range(20)]
        database.transact(journals.append, ADA, batch, expected_head=0)
        store.snapshot(ADA, canonical("state"), SnapshotRecord("", 20, snapshots.NOW, None, None))
        store.compact(ADA, entries=5, margin=0)
        first_segments.append(database.read(segments.find, ADA, 0))
        if database.read(worlds.describe, ADA).incarnation == 1:
            old = database.transact(world_forks.begin, ADA, EVE, 20)
            database.transact(worlds.change_state, ADA, WorldState.ARCHIVED)
            store.delete(ADA)
    before = database.read(Transaction.scan, b"", b"\xff", limit=10_000)
    assert database.transact(worlds.clear, ADA, 1, 100)
    database.transact(segments.forget, ADA, first_segments[0], 1)
    database.transact(worlds.end_delete, ADA, 1)
    assert database.transact(timers.clear, ADA, 1, 100)
    assert database.transact(effects.clear, ADA, 1, 100)
    late = Segment(20, 24, "x", "y", 1)
    for work in (
        lambda: database.transact(segments.index, ADA, late, margin=0, incarnation=1),
        lambda: database.transact(segments.trim, ADA, 100, 1),
        lambda: store.compact(ADA, entries=5, margin=0, incarnation=1),
        lambda: store.read(ADA, 0, 5, old.source),
        lambda: store.delete(ADA, 1),
        lambda: store.snapshot(ADA, canonical("state"), SnapshotRecord("", 22, 0, None, None), incarnation=1),
    ):
        with pytest.raises(WorldNotFound, match="Incarnation 1 of world ada does not exist"):
            work()
    with pytest.raises(WorldExists):  # The unfinished fork is of the first incarnation.
        store.fork(ADA, EVE, 20)
    assert database.read(Transaction.scan, b"", b"\xff", limit=10_000) == before
    assert len(store.read(ADA, 0, 100).records) == 22


def test_a_fork_keeps_its_history_when_its_source_is_deleted(plane: Plane) -> None:
    source = plane.world("source")
    source.create()
    source.append(list(range(100)), expected_head=0)
    source.snapshots.commit("x" * 20_000, height=100)  # Its bytes are in the object store.
    source.compact(entries=25, margin=0)
    fork = source.fork("fork", height=101)
    before = (fork.describe(), fork.read(limit=200), fork.snapshots.list())
    delete(source)
    source.create()
    assert (fork.describe(), fork.read(limit=200), fork.snapshots.list()) == before
    restored = fork.restore(lambda state, entry: state)
    assert (restored.state, restored.baseline_height) == ("x" * 20_000, 100)
    assert fork.check().fault is None
    fork.append([1], expected_head=101)


def test_only_an_archived_world_is_deleted(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append(list(range(200)), expected_head=0)
    world.snapshots.commit(1, height=200)
    world.compact(entries=50, margin=0)
    world.inbox.put(DomainEvent(schema="s", effects=(Effect("mail", b"1"),)))
    world.drain()
    with pytest.raises(WorldNotActive, match="can become"):
        world.delete()
    world.archive()
    assert world.delete().state == "deleted"
    assert world.delete().state == "deleted"
    left = plane.pairs.scan(
        worlds.subspace(World("main", "w")).prefix, worlds.subspace(World("main", "w")).prefix + b"\xff"
    )
    assert left == []  # Lists do not read what is left of a deleted world.
    assert world.create().incarnation == 2


def test_a_fork_shares_the_history_up_to_its_height(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append(list(range(300 - 50)), expected_head=0)
    world.snapshots.commit("at 250", height=250)
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
    delete(gone)
    with pytest.raises(WorldNotFound, match="gone was deleted"):
        gone.fork("copy", height=0)
    assert "copy" not in plane.worlds()


def test_a_fork_copies_all_snapshots_and_the_newest_baseline(database: Database) -> None:
    database.transact(snapshots.create_world, ADA)
    genesis = database.read(snapshots.baseline, ADA).snapshot_ref

    def snapshot_everywhere(tx: Transaction) -> None:
        journals.write(tx, ADA, [journal_records.entry(canonical(0))] * 1_500, 0)
        for height in range(1, 1_501):
            horizon = height if height <= 1_430 else height - 1
            manifest = NO_MANIFEST if height <= 1_400 else "f" * 64
            snapshots.commit(tx, ADA, SnapshotRecord(genesis, height, 1, horizon, manifest), promote=False)

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
    monkeypatch.setattr("fastness.limits.SEGMENT_ENTRIES", 50)
    monkeypatch.setattr("fastness.limits.SEGMENT_MARGIN", 0)
    transport = open_plane(f"dir:{tmp_path}", Options(compact_every_seconds=0.005))
    try:
        plane = Plane(transport)
        for name in ("a", "b"):
            world = plane.world(name)
            world.create()
            world.append(list(range(100)), expected_head=0)
            world.snapshots.commit(1, height=100)
        while any(len(plane.world(name).segments()) < 1 for name in ("a", "b")):
            pass  # Ends when the background compaction is done.
        assert len(plane.world("a").read()) == 102
    finally:
        transport.close()
    assert not any(thread.name == "fastness-space" for thread in threading.enumerate())


def test_an_invalid_interval_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="positive"):
        fastness.open(f"dir:{tmp_path}", compact_every_seconds=0)
    fastness.open(f"dir:{tmp_path}").close()
