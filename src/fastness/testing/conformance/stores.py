"""Conformance checks for a key space together with an object store: blobs, baselines, segments and restores.

for check in STORE_CHECKS:
    check(database, objects)
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import cbor2

from fastness.backends.objects import ObjectStore
from fastness.errors import BaselineRegressed, BlobNotFound, PromotionRefused, SnapshotExists, WorldNotFound
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.worlds import World as WorldHandle
from fastness.kv import Database
from fastness.layers import journals
from fastness.layers.worlds import World
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.conformance.workloads import in_threads, raises
from fastness.wire.restores import Entry

StoreCheck = Callable[[Database, ObjectStore], None]


def check_blobs_are_idempotent_and_named_by_their_hash(database: Database, objects: ObjectStore) -> None:
    blobs = Plane(EmbeddedTransport(Services(database, objects)), "blobs").blobs
    for data in (b"", b"small", bytes(range(256)) * 100):
        names = {blobs.put(data), blobs.put(data), blobs.write(iter([data[:7], data[7:]]))}
        assert names == {hashlib.sha256(data).hexdigest()}
        (name,) = names
        assert blobs.has(name)
        assert blobs.get(name) == b"".join(blobs.open(name)) == data
    raises(BlobNotFound, lambda: blobs.get("00" * 32))


def check_concurrent_puts_of_the_same_blob_succeed(database: Database, objects: ObjectStore) -> None:
    blobs = Plane(EmbeddedTransport(Services(database, objects)), "blobs-at-once").blobs
    data = b"shared" * 10_000
    in_threads(8, lambda _: blobs.put(data))
    assert blobs.get(hashlib.sha256(data).hexdigest()) == data


def check_snapshots_are_immutable_and_the_baseline_never_regresses(database: Database, objects: ObjectStore) -> None:
    world = Plane(EmbeddedTransport(Services(database, objects)), "baselines").world("w")
    world.create()
    world.append([1, 2, 3], expected_head=0)
    assert world.snapshots.commit("two", height=2).is_baseline
    raises(SnapshotExists, lambda: world.snapshots.commit("other", height=2))
    raises(BaselineRegressed, lambda: world.snapshots.commit("one", height=1, promote=True))
    raises(
        PromotionRefused,
        lambda: world.snapshots.commit("three", height=3, promote=True, receipt_horizon_height=2),
    )
    raises(
        PromotionRefused,
        lambda: world.snapshots.commit("three", height=3, promote=True, manifest_hash="f" * 64),
    )
    assert world.snapshots.baseline().height == 2
    assert [snapshot.height for snapshot in world.snapshots.list()] == [0, 2]


def check_a_restore_from_segments_and_tail_equals_a_full_replay(database: Database, objects: ObjectStore) -> None:
    world = Plane(EmbeddedTransport(Services(database, objects)), "segments").world("w")
    world.create()
    for number in range(6):
        world.append([{"n": number, "pad": "x" * 50}] * 50, expected_head=world.head())
        state, height = world.restore(_count), world.head()
        world.snapshots.commit(state.state, height=height)
    before = world.read(limit=1_000)
    whole = world.replay(_count)
    assert world.compact(entries=64, margin=10).segments == 4
    assert database.read(journals.first_hot, World("segments", "w")) == 256
    assert world.read(limit=1_000) == before
    for found in (world.replay(_count), world.restore(_count)):
        assert cbor2.dumps(found.state, canonical=True) == cbor2.dumps(whole.state, canonical=True)
    assert world.verify(_count).agrees


def check_a_world_that_is_created_again_has_nothing_of_the_deleted_one(
    database: Database, objects: ObjectStore
) -> None:
    plane = Plane(EmbeddedTransport(Services(database, objects)), "incarnations")

    def create_and_fill(incarnation: int) -> WorldHandle:
        world = plane.world("w")
        assert world.create().incarnation == incarnation
        world.append([[incarnation, number] for number in range(20)], expected_head=0)
        world.snapshots.commit(incarnation, height=20)
        assert world.compact(entries=10, margin=0).segments == 2
        values = [cbor2.loads(record.value) for record in world.read(limit=20)]
        assert values == [[incarnation, number] for number in range(20)]
        return world

    old = create_and_fill(1)
    old.archive()
    old.delete()
    raises(WorldNotFound, old.read)
    new = create_and_fill(2)
    raises(WorldNotFound, old.read)
    raises(WorldNotFound, lambda: old.append(["late"], expected_head=22))
    assert (new.head(), new.check().fault) == (22, None)


STORE_CHECKS: Final[tuple[StoreCheck, ...]] = tuple(
    value for name, value in list(globals().items()) if name.startswith("check_")
)


def _count(state: Any, entry: Entry) -> Any:
    counts = dict(state or {})
    counts[entry.kind] = counts.get(entry.kind, 0) + 1
    return counts
