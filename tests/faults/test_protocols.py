"""The crash matrix: a fault after every step of every protocol of worlds, then a retry as a client makes it.

The steps are counted by running the protocol once, so a new step is covered automatically. The end state, every key and
every object, equals that of a run without faults.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import Unreachable
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import (
    blobs,
    effect_leases,
    effects,
    inboxes,
    journal_records,
    journals,
    snapshots,
    states,
    timer_firing,
    timers,
    worlds,
)
from fastness.layers.effects import EffectKey
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord
from fastness.layers.worlds import World, WorldState
from fastness.limits import BLOB_ABANDONED_SECONDS, BLOB_TOUCH_SECONDS
from fastness.runtime.maintenance.garbage_collection import collect
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control, DomainEvent, Effect, Timer
from tests.support.backends import rotating_backends

ADA = World("main", "ada")
LARGE = bytes(range(256)) * 200
ENTRIES = [journal_records.entry(canonical({"n": number})) for number in range(100)]
SNAPSHOT = SnapshotRecord("", 100, snapshots.NOW, 100, NO_MANIFEST)
ASKING = DomainEvent(schema="s", effects=(Effect("mail", b"1"),), timers=(Timer(5, b"2"),))

Run = Callable[[Database, ObjectStore], None]


class Protocol(NamedTuple):
    name: str
    prepare: Run
    run: Run


def nothing(database: Database, objects: ObjectStore) -> None:
    pass


def put_blob(database: Database, objects: ObjectStore) -> None:
    BlobStore(database, objects).put("main", LARGE)


def create(database: Database, objects: ObjectStore) -> None:
    database.transact(snapshots.create_world, ADA)


def append(database: Database, objects: ObjectStore) -> None:
    """A client that lost the response reads the head before it appends again."""
    if database.read(journals.head, ADA) == 0:
        database.transact(journals.append, ADA, ENTRIES, expected_head=0)


def enqueue(database: Database, objects: ObjectStore) -> None:
    """A client that lost the response checks whether its item was stored."""
    if database.read(inboxes.next_sequence, ADA) == 0:
        database.transact(inboxes.enqueue, ADA, ASKING)


def world_with_items(database: Database, objects: ObjectStore) -> None:
    create(database, objects)
    for item in (ASKING, Control(command="go"), ASKING):
        database.transact(inboxes.enqueue, ADA, item)


def drain(database: Database, objects: ObjectStore) -> None:
    database.transact(inboxes.drain, ADA)


def world_with_entries(database: Database, objects: ObjectStore) -> None:
    create(database, objects)
    append(database, objects)


def take_snapshot(database: Database, objects: ObjectStore) -> None:
    store = WorldStore(database, objects, BlobStore(database, objects))
    store.snapshot(ADA, canonical({"state": "x" * 20_000}), SNAPSHOT, promote=True)


def world_with_a_baseline(database: Database, objects: ObjectStore) -> None:
    world_with_entries(database, objects)
    take_snapshot(database, objects)


def export(database: Database, objects: ObjectStore) -> None:
    WorldStore(database, objects, BlobStore(database, objects)).compact(ADA, entries=30, margin=5)


def world_that_waits(database: Database, objects: ObjectStore) -> None:
    world_with_items(database, objects)
    drain(database, objects)


def carry_out_effects(database: Database, objects: ObjectStore) -> None:
    """A worker that is started again finds what it has claimed by its fence."""
    due = database.read(effects.due, "main", ["mail"], until_ms=database.read(now_ms), limit=10)
    if due:
        database.transact(effect_leases.claim, "main", due, owner="ada", lease_ms=1_000)
    for each in database.read(effects.page, "main", None, after="", limit=10).effects:
        key = EffectKey(each.world, each.height, each.number)
        database.transact(effect_leases.complete, "main", key, each.fence, payload=b"done")


def fail_effects(database: Database, objects: ObjectStore) -> None:
    """The first of two effects is failed for good, and the other one stays claimed."""
    due = database.read(effects.due, "main", ["mail"], until_ms=database.read(now_ms), limit=10)
    if due:
        database.transact(effect_leases.claim, "main", due, owner="ada", lease_ms=1_000)
    first, *others = database.read(effects.page, "main", None, after="", limit=10).effects
    if others:
        key = EffectKey(first.world, first.height, first.number)
        database.transact(effect_leases.fail, "main", key, first.fence, error="no", is_final=True)


def fire_timers(database: Database, objects: ObjectStore) -> None:
    while due := database.read(timers.due, "main", until_ns=database.read(now_ms) * 1_000_000, limit=1):
        database.transact(timer_firing.fire, "main", due)


def archived_world_that_waits(database: Database, objects: ObjectStore) -> None:
    world_that_waits(database, objects)
    database.transact(worlds.change_state, ADA, WorldState.ARCHIVED)


def delete(database: Database, objects: ObjectStore) -> None:
    WorldStore(database, objects, BlobStore(database, objects)).delete(ADA)


def now_ms(tx: Transaction) -> int:
    return tx.now_ms


PROTOCOLS = (
    Protocol("A: store a blob", nothing, put_blob),
    Protocol("B: append a batch", create, append),
    Protocol("C: put an item into the inbox", create, enqueue),
    Protocol("D: drain the inbox into the journal", world_with_items, drain),
    Protocol("E: commit a snapshot and promote it", world_with_entries, take_snapshot),
    Protocol("F: export segments", world_with_a_baseline, export),
    Protocol("G: carry out effects", world_that_waits, carry_out_effects),
    Protocol("H: fail an effect for the last time", world_that_waits, fail_effects),
    Protocol("I: fire timers", world_that_waits, fire_timers),
    Protocol("J: delete a world that waits", archived_world_that_waits, delete),
)


def everything(database: Database, objects: ObjectStore) -> tuple[object, object]:
    """Every key and every object, without the random names of uploads, and without the bodies of interrupted ones."""
    pairs = dict(database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=10_000)))
    bodies = {meta.path: objects.get(meta.path) for meta in objects.list()}
    for path in [path for path in bodies if path.startswith("cas/")]:
        hash, upload = blobs.parse_path(path)
        digest, body = bytes.fromhex(hash), bodies.pop(path)
        if database.read(blobs.is_known_body, "main", digest, upload):
            key, record = Subspace("u", "main", "cas").key(digest), database.read(blobs.find, "main", digest)
            assert record is not None
            pairs[key] = msgspec.msgpack.encode(msgspec.structs.replace(record, upload=""))
            bodies[blobs.object_path("main", digest, "")] = body
    return pairs, bodies


# The crashes are those of a database in front of the backend.
@pytest.mark.parametrize("backend", rotating_backends("memory"), indirect=True)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_crash_after_any_step_converges_on_retry(
    protocol: Protocol, open_database: Callable[..., Database], tmp_path: Path
) -> None:
    def start(name: str) -> ObjectStore:
        objects = open_objects(f"dir:{tmp_path / name}")
        database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
        protocol.prepare(database, objects)
        return objects

    def run(objects: ObjectStore, faults: ChosenFault) -> None:
        protocol.run(FaultyDatabase(database, faults), faulty_objects(objects, faults))

    with open_database(clock=ManualClock()) as database:
        counting = ChosenFault()
        objects = start("without a fault")
        run(objects, counting)
        wanted = everything(database, objects)
        for fail_at in range(len(counting.points)):
            objects = start(str(fail_at))
            with pytest.raises(Crash):
                run(objects, ChosenFault(fail_at))
            run(objects, ChosenFault())
            assert everything(database, objects) == wanted, counting.points[fail_at]
    print(f"{protocol.name}: {len(counting.points)} points covered")
    assert len(counting.points) >= 3


# Collections of unreferenced blobs.

GRACE_MS = 600_000
KEPT = [b"kept", b"kept" * 10_000]  # Named by a state.
LOST = [b"lost", b"lost" * 10_000]  # Named by nothing.
DELETED = b"deleted" * 10_000  # Its record is deleted already, its body is not.
ABANDONED = b"abandoned" * 10_000  # Uploaded, but never recorded.


def count_keys(tx: Transaction, area: str) -> int:
    return len(tx.scan(*Subspace("u", "main", area).range(), limit=100))


def fill(database: Database, objects: ObjectStore, clock: ManualClock) -> None:
    """Blobs at every stage of their deletion, all of them due."""
    store = BlobStore(database, objects)
    with pytest.raises(Crash):
        abandoned = ChosenFault(5)  # After the upload.
        BlobStore(FaultyDatabase(database, abandoned), faulty_objects(objects, abandoned)).put("main", ABANDONED)
    store.put("main", DELETED, pinned=False)
    collect(database, objects, grace_ms=GRACE_MS)
    clock.advance_ms(GRACE_MS + BLOB_TOUCH_SECONDS * 1_000)
    for data in (*KEPT, *LOST):
        store.put("main", data, pinned=False)
    assert collect(database, objects, grace_ms=GRACE_MS).deleted == 1
    clock.advance_ms(BLOB_ABANDONED_SECONDS * 1_000 + 1)
    names = " ".join(hashlib.sha256(data).hexdigest() for data in KEPT)
    database.transact(states.update, "main", "report", names.encode())
    database.transact(blobs.release, "main", "ab" * 32)  # A mark without a blob.


@pytest.mark.parametrize("backend", rotating_backends("memory"), indirect=True)
@pytest.mark.parametrize("error", [Crash, lambda: Unreachable("refused on purpose")], ids=["crash", "refusal"])
def test_a_collection_that_stops_after_any_step_is_finished_by_the_next_ones(
    error: Callable[[], BaseException], open_database: Callable[..., Database]
) -> None:
    clock = ManualClock()
    with open_database(clock=clock) as database:

        def start() -> ObjectStore:
            objects = open_objects("memory:")
            database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
            fill(database, objects, clock)
            return objects

        def run(objects: ObjectStore, faults: ChosenFault) -> None:
            collect(FaultyDatabase(database, faults), faulty_objects(objects, faults), grace_ms=GRACE_MS)

        def check(objects: ObjectStore, point: str) -> None:
            """What is named can be read; after the grace periods, nothing else is left."""
            store = BlobStore(database, objects)
            for _ in range(3):
                assert [store.get("main", hashlib.sha256(data).hexdigest()).data for data in KEPT] == KEPT, point
                clock.advance_ms(GRACE_MS + BLOB_TOUCH_SECONDS * 1_000)
                assert collect(database, objects, grace_ms=GRACE_MS).unsearched == []
            assert [database.read(count_keys, area) for area in blobs.AREAS] == [2, 0, 0], point
            assert len(objects.list("cas")) == 1, point

        counting = ChosenFault()
        objects = start()
        assert len(objects.list("cas")) == 4
        run(objects, counting)
        assert len(objects.list("cas")) == 2, "the abandoned body and that of a deleted blob are gone"
        check(objects, "without a fault")
        for fail_at, point in enumerate(counting.points):
            objects = start()
            with pytest.raises((Crash, Unreachable)):
                run(objects, ChosenFault(fail_at, error))
            check(objects, f"{fail_at}: {point}")
        assert len(counting.points) >= 20
