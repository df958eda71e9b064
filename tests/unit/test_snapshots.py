"""Snapshots are immutable, the baseline only moves forward, and a restore equals a full replay."""

import asyncio
from typing import Any

import cbor2
import pytest

import holdfast
from holdfast import Plane
from holdfast.errors import (
    BaselineRegressed,
    HeadAdvanced,
    InvalidArgument,
    PromotionRefused,
    SnapshotExists,
    WorldNotFound,
)
from holdfast.layers.snapshots import NO_MANIFEST
from holdfast.testing.clock import ManualClock
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.restores import Entry


def count_records(state: Any, entry: Entry) -> Any:
    """A reducer: the number of records of each kind, and the sum of the appended values."""
    state = dict(state or {"sum": 0})
    state[entry.kind] = state.get(entry.kind, 0) + 1
    if entry.kind == "entry":
        state["sum"] += entry.value
    return state


@pytest.fixture
def plane(clock: ManualClock) -> Any:
    with holdfast.open("memory:", clock=clock) as plane:
        plane.world("w").create()
        yield plane


def promote(plane: Plane, **changes: Any) -> Any:
    world = plane.world("w")
    restored = world.restore(count_records)
    options = {"receipt_horizon_height": restored.height, "manifest_hash": NO_MANIFEST, "promote": True, **changes}
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
        promote(plane)
    restored, replayed = world.restore(count_records), world.replay(count_records)
    assert restored == replayed
    assert cbor2.dumps(restored.state, canonical=True) == cbor2.dumps(replayed.state, canonical=True)
    assert restored.state["sum"] == sum(number + number + 1 for number in range(5))
    verdict = world.verify(count_records)
    assert (verdict.agrees, verdict.snapshots_checked) == (True, 6)


def test_a_snapshot_and_its_promotion_are_recorded_in_the_journal(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    snapshot = promote(plane)
    kinds = [(record.height, record.kind) for record in world.read()]
    assert kinds == [(0, "entry"), (1, "snapshot"), (2, "baseline")]
    assert cbor2.loads(world.read(1)[0].value)["snapshot_ref"] == snapshot.snapshot_ref
    assert world.snapshots.baseline() == snapshot
    assert snapshot.height == 1


def test_repeating_a_snapshot_changes_nothing(plane: Plane, clock: ManualClock) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    state, height = world.restore(count_records).state, 1
    options = {"receipt_horizon_height": 1, "manifest_hash": NO_MANIFEST, "promote": True}
    first = world.snapshots.commit(state, height=height, **options)
    clock.advance_ms(1_000)
    assert world.snapshots.commit(state, height=height, **options) == first
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
        ({"receipt_horizon_height": None}, "not None; wait until all receipts"),
        ({"manifest_hash": None}, "needs manifest_hash"),
        ({"manifest_hash": "f" * 64}, "the journal has"),
    ],
)
def test_a_snapshot_that_does_not_qualify_is_not_promoted(plane: Plane, changes: dict[str, Any], reason: str) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    with pytest.raises(PromotionRefused, match=reason):
        promote(plane, **changes)
    assert world.snapshots.baseline().height == 0
    assert world.head() == 1


def test_a_manifest_applies_after_its_journal_record(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1], expected_head=0)
    with pytest.raises(HeadAdvanced):
        world.set_manifest("a" * 64, expected_head=0)
    assert world.set_manifest("a" * 64, expected_head=1) == 1
    with pytest.raises(PromotionRefused):
        world.snapshots.commit(1, height=1, promote=True, receipt_horizon_height=1, manifest_hash="a" * 64)
    promote(plane, manifest_hash="a" * 64)
    assert world.snapshots.baseline().height == 2


def test_the_baseline_does_not_go_back(plane: Plane) -> None:
    world = plane.world("w")
    world.append([1, 2, 3], expected_head=0)
    promote(plane)
    with pytest.raises(BaselineRegressed):
        world.snapshots.commit(1, height=2, promote=True, receipt_horizon_height=2, manifest_hash=NO_MANIFEST)
    assert world.snapshots.baseline().height == 3


def test_a_baseline_that_contradicts_the_journal_is_found(plane: Plane) -> None:
    """A world must not start from a baseline that contradicts its journal."""
    world = plane.world("w")
    world.append([1, 2, 3], expected_head=0)
    options = {"receipt_horizon_height": 3, "manifest_hash": NO_MANIFEST, "promote": True}
    world.snapshots.commit({"sum": 7, "entry": 3}, height=3, **options)
    verdict = world.verify(count_records)
    assert (verdict.agrees, verdict.differs_at) == (False, 3)


def test_a_missing_world_has_no_baseline() -> None:
    with holdfast.open("memory:") as plane, pytest.raises(WorldNotFound):
        plane.world("missing").restore(count_records)


def test_an_async_restore_equals_the_sync_one() -> None:
    async def use() -> None:
        async with holdfast.open_async("memory:") as plane:
            world = plane.world("w")
            await world.create()
            await world.append([1, 2], expected_head=0)
            await world.snapshots.commit({"sum": 3, "entry": 2}, height=2)
            assert (await world.restore(count_records)).state == {"sum": 3, "entry": 2, "snapshot": 1}
            assert (await world.verify(count_records)).agrees

    asyncio.run(use())
