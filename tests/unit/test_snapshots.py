"""Snapshots are immutable, the baseline only moves forward, and a restore equals a full replay."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import Plane
from fastness.errors import (
    BaselineRegressed,
    Corrupt,
    HashMismatch,
    HeadAdvanced,
    InvalidArgument,
    MissingEntry,
    MissingObject,
    PromotionRefused,
    SnapshotExists,
    SnapshotNotFound,
    WorldNotActive,
    WorldNotFound,
)
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import blobs, inboxes, journal_records, journals, snapshots, worlds
from fastness.layers.blobs import Blob
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord
from fastness.layers.worlds import World
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent, Effect
from fastness.wire.restores import Entry

ADA = World("main", "ada")


def count_records(state: Any, entry: Entry) -> Any:
    """A reducer: the number of records of each kind, and the sum of the appended values."""
    state = dict(state or {"sum": 0})
    state[entry.kind] = state.get(entry.kind, 0) + 1
    if entry.kind == "entry":
        state["sum"] += entry.value
    return state


@pytest.fixture
def plane(clock: ManualClock) -> Any:
    with fastness.open("memory:", clock=clock) as plane:
        plane.world("w").create()
        yield plane


def take_snapshot(plane: Plane, **options: Any) -> Any:
    """Commit a snapshot of the current state, as a user does."""
    world = plane.world("w")
    restored = world.restore(count_records)
    return world.snapshots.commit(restored.state, height=restored.height, **options)


def test_a_new_world_has_a_baseline_at_height_zero(plane: Plane) -> None:
    world = plane.world("w")
    assert world.snapshots.baseline().height == 0
    assert world.restore(count_records).state is None
    assert world.head() == 0


def test_a_restore_equals_a_full_replay(plane: Plane) -> None:
    world = plane.world("w")
    for number in range(5):
        world.append([number, number + 1], expected_head=world.head())
        world.inbox.put(DomainEvent(schema="s"))
        world.drain()
        take_snapshot(plane)
    restored, replayed = world.restore(count_records), world.replay(count_records)
    assert (restored.state, restored.height) == (replayed.state, replayed.height)
    assert cbor2.dumps(restored.state, canonical=True) == cbor2.dumps(replayed.state, canonical=True)
    assert restored.state["sum"] == sum(number + number + 1 for number in range(5))
    verdict = world.verify(count_records)
    assert (verdict.agrees, verdict.snapshots_checked) == (True, 6)


def test_a_snapshot_and_its_promotion_are_recorded_in_the_journal(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    snapshot = take_snapshot(plane)
    kinds = [(record.height, record.kind) for record in world.read()]
    assert kinds == [(0, "entry"), (1, "snapshot"), (2, "baseline")]
    assert cbor2.loads(world.read(1)[0].value)["snapshot_ref"] == snapshot.snapshot_ref
    assert world.snapshots.baseline() == snapshot
    assert snapshot.height == 1


def test_repeating_a_snapshot_changes_nothing(plane: Plane, clock: ManualClock) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    state = world.restore(count_records).state
    first = world.snapshots.commit(state, height=1)
    assert first.is_baseline
    explicit = {"receipt_horizon_height": 1, "manifest_hash": NO_MANIFEST, "promote": True}
    clock.advance_ms(1_000)
    for options in ({}, {"promote": True}, explicit, {"promote": False}):
        assert world.snapshots.commit(state, height=1, **options) == first
    assert world.snapshots.promote(1) == first
    assert world.head() == 3


def test_another_snapshot_at_the_same_height_is_refused(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    world.snapshots.commit({"a": 1}, height=1)
    with pytest.raises(SnapshotExists):
        world.snapshots.commit({"a": 2}, height=1)
    with pytest.raises(InvalidArgument, match="beyond the journal's head"):
        world.snapshots.commit({"a": 2}, height=99)
    assert [snapshot.height for snapshot in world.snapshots.list()] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"receipt_horizon_height": 0}, "not 0; wait until all receipts"),
        ({"manifest_hash": "f" * 64}, "the journal has"),
    ],
)
def test_a_snapshot_that_does_not_qualify_is_not_promoted(plane: Plane, changes: dict[str, Any], reason: str) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    with pytest.raises(PromotionRefused, match=reason):
        take_snapshot(plane, promote=True, **changes)
    assert world.head() == 1
    assert not take_snapshot(plane, **changes).is_baseline  # Stored, as the caller did not insist.
    with pytest.raises(PromotionRefused, match=reason):
        world.snapshots.promote(1)
    assert world.snapshots.baseline().height == 0
    assert [record.kind for record in world.read()] == ["entry", "snapshot"]


def test_a_plain_snapshot_is_where_the_next_restore_starts(plane: Plane) -> None:
    world = plane.world("w")
    world.append(list(range(100)), expected_head=0)
    first = world.restore(count_records)
    assert (first.folded, first.baseline_height) == (100, 0)
    assert world.snapshots.commit(first.state, height=first.height).is_baseline
    world.append([7], expected_head=world.head())
    again = world.restore(count_records)
    assert (again.folded, again.baseline_height, again.height) == (3, 100, 103)
    assert again.state == world.replay(count_records).state
    assert [each.is_baseline for each in world.snapshots.list()] == [False, True]


def test_compaction_follows_a_plain_snapshot(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        world = plane.world("w")
        world.create()
        world.append(list(range(100)), expected_head=0)
        take_snapshot(plane)
        assert world.compact(entries=40, margin=0).records == 80
        assert world.restore(count_records).state == world.replay(count_records).state


def test_a_snapshot_that_is_only_stored_can_be_promoted_later(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1, 2], expected_head=0)
    stored = world.snapshots.commit({"sum": 1, "entry": 1}, height=1, promote=False)
    assert not stored.is_baseline
    assert world.restore(count_records).baseline_height == 0
    with pytest.raises(SnapshotNotFound, match="no snapshot at height 2"):
        world.snapshots.promote(2)
    promoted = world.snapshots.promote(1)
    assert promoted.is_baseline
    assert world.snapshots.baseline() == promoted
    assert [record.kind for record in world.read()] == ["entry", "entry", "snapshot", "baseline"]
    assert world.restore(count_records).baseline_height == 1
    take_snapshot(plane)
    with pytest.raises(BaselineRegressed, match="a snapshot at 1 is older"):
        world.snapshots.promote(1)
    world.pause()
    with pytest.raises(WorldNotActive):
        world.snapshots.promote(4)


def test_a_snapshot_waits_for_the_pending_effects_below_it(database: Database) -> None:
    """It is stored, and promoted by any later attempt once the effects are done."""
    database.transact(snapshots.create_world, ADA)
    digest = store_state(database)
    database.transact(inboxes.enqueue, ADA, DomainEvent(schema="s"))
    database.transact(inboxes.enqueue, ADA, DomainEvent(schema="s", effects=(Effect("mail", b"1"),)))
    database.transact(inboxes.drain, ADA)
    pending = Subspace("u", "main", "effects", "pending").range("ada")
    draft = SnapshotRecord(digest, 2, snapshots.NOW, None, None)
    below, is_baseline = database.transact(snapshots.commit, ADA, msgspec.structs.replace(draft, height=1))
    assert (below.receipt_horizon_height, is_baseline) == (1, True)  # The effect is not below it.
    stored, is_baseline = database.transact(snapshots.commit, ADA, draft)
    assert (stored.receipt_horizon_height, is_baseline) == (None, False)
    attempts: list[tuple[Callable[..., Any], object, dict[str, Any]]] = [
        (snapshots.commit, draft, {"promote": True}),
        (snapshots.promote, 2, {}),
    ]
    for work, argument, options in attempts:
        with pytest.raises(PromotionRefused, match="below height 2 of ada requests is pending"):
            database.transact(work, ADA, argument, **options)
    assert database.transact(snapshots.commit, ADA, draft) == (stored, False)
    head = database.read(journals.head, ADA)
    database.transact(Transaction.delete_range, *pending)
    promoted = database.transact(snapshots.promote, ADA, 2)
    assert promoted == msgspec.structs.replace(stored, receipt_horizon_height=2)
    assert database.read(snapshots.baseline, ADA) == database.read(snapshots.at, ADA, 2) == promoted
    assert database.read(journals.head, ADA) == head + 1
    assert database.transact(snapshots.commit, ADA, draft) == (promoted, True)
    assert database.read(journals.head, ADA) == head + 1


def test_a_snapshot_without_its_bytes_is_not_promoted(database: Database) -> None:
    database.transact(snapshots.create_world, ADA)
    database.transact(journals.append, ADA, [journal_records.entry(canonical(1))], expected_head=0)
    draft = SnapshotRecord("00" * 32, 1, snapshots.NOW, None, None)
    with pytest.raises(PromotionRefused, match="not stored as blob 0000"):
        database.transact(snapshots.commit, ADA, draft, promote=True)
    _, is_baseline = database.transact(snapshots.commit, ADA, draft)
    assert not is_baseline
    with pytest.raises(PromotionRefused, match="not stored as blob 0000"):
        database.transact(snapshots.promote, ADA, 1)
    assert database.read(snapshots.baseline, ADA).height == 0


def store_state(database: Database) -> str:
    """The hash of a stored state."""
    data = canonical({"a": 1})
    digest = hashlib.sha256(data).digest()
    database.transact(blobs.record, "main", digest, Blob(len(data), data))
    return digest.hex()


def blob_key(hash: str) -> bytes:
    return Subspace("u", "main", "cas").key(bytes.fromhex(hash))


def record_key(height: int) -> bytes:
    return worlds.subspace(World("main", "w")).key("journal", "e") + height.to_bytes(8, "big")


def test_a_restore_checks_everything_before_it_folds(tmp_path: Path) -> None:
    """The reducer sees no record of a world that cannot be restored completely."""
    seen: list[int] = []

    def note(state: Any, entry: Entry) -> Any:
        seen.append(entry.height)
        return state

    with fastness.open(f"dir:{tmp_path}") as plane:
        world = plane.world("w")
        world.create()
        world.append(list(range(20)), expected_head=0)
        snapshot = world.snapshots.commit({"n": 10}, height=10)
        world.append(list(range(50)), expected_head=22)
        head = world.head()
        blob, inline = blob_key(snapshot.snapshot_ref), canonical({"n": 10})

        def broken(change: Callable[[Transaction], None], error: type[Corrupt], reason: str) -> None:
            kept = plane.pairs.scan(b"", b"\xff", limit=10_000)
            plane.transact(change)
            with pytest.raises(error, match=reason):
                world.restore(note)
            plane.transact(lambda tx: [tx.put(key, value) for key, value in kept])

        broken(lambda tx: tx.delete(blob), MissingObject, "at height 10 are not stored; restore a backup, or .* replay")
        damaged = msgspec.msgpack.encode(Blob(len(inline), inline[:-1] + b"\x0b"))
        broken(lambda tx: tx.put(blob, damaged), HashMismatch, "does not match its hash; restore")
        broken(lambda tx: tx.delete(record_key(head - 1)), MissingEntry, f"no record {head - 1}")
        broken(lambda tx: tx.delete(record_key(10)), MissingEntry, "no record 10")
        index = worlds.subspace(World("main", "w")).key("snapshot", 10)
        broken(lambda tx: tx.delete(index), Corrupt, "at height 10 is not a snapshot of its journal; restore a backup")
        assert seen == []
        plane.transact(lambda tx: tx.delete(record_key(9)))  # It is below the baseline.
        assert world.restore(note).state == {"n": 10}
        assert seen == list(range(10, head))


def test_a_manifest_applies_after_its_journal_record(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    with pytest.raises(HeadAdvanced):
        world.set_manifest("a" * 64, expected_head=0)
    assert world.set_manifest("a" * 64, expected_head=1) == 1
    with pytest.raises(PromotionRefused):
        world.snapshots.commit(1, height=1, promote=True, manifest_hash="a" * 64)
    assert world.snapshots.commit({"sum": 1, "entry": 1}, height=1).manifest_hash == NO_MANIFEST
    assert take_snapshot(plane).manifest_hash == "a" * 64
    assert world.snapshots.baseline().height == 4


def test_the_baseline_does_not_go_back(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1, 2, 3], expected_head=0)
    take_snapshot(plane)
    with pytest.raises(BaselineRegressed):
        world.snapshots.commit(1, height=2, promote=True)
    assert not world.snapshots.commit(1, height=2).is_baseline
    assert world.snapshots.baseline().height == 3


def test_a_baseline_that_contradicts_the_journal_is_found(plane: Plane) -> None:
    """A world must not start from a baseline that contradicts its journal."""
    world = plane.world("w")
    world.append([1, 2, 3], expected_head=0)
    world.snapshots.commit({"sum": 7, "entry": 3}, height=3)
    verdict = world.verify(count_records)
    assert (verdict.agrees, verdict.differs_at) == (False, 3)


def test_a_missing_world_has_no_baseline() -> None:
    with fastness.open("memory:") as plane, pytest.raises(WorldNotFound):
        plane.world("missing").restore(count_records)


def test_an_async_restore_equals_the_sync_one() -> None:
    async def use() -> None:
        async with fastness.open_async("memory:") as plane:
            world = plane.world("w")
            await world.create()
            await world.append([1, 2], expected_head=0)
            await world.snapshots.commit({"sum": 3, "entry": 2}, height=2)
            assert (await world.restore(count_records)).state == {"sum": 3, "entry": 2, "snapshot": 1, "baseline": 1}
            assert (await world.verify(count_records)).agrees

    asyncio.run(use())
