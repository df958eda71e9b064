"""The crash matrix: a fault after every step of every protocol of worlds, then a retry as a client makes it.

The steps are counted by running the protocol once, so a new step is covered automatically. The end state, every key and
every object, equals that of a run without faults.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.kv import Database
from holdfast.layers import inboxes, journal_records, journals, snapshots
from holdfast.layers.snapshots import NO_MANIFEST, SnapshotRecord
from holdfast.layers.worlds import World
from holdfast.runtime.sync.blobs import BlobStore
from holdfast.runtime.sync.worlds import WorldStore
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import Control, DomainEvent, Effect, Timer

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


PROTOCOLS = (
    Protocol("A: store a blob", nothing, put_blob),
    Protocol("B: append a batch", create, append),
    Protocol("C: put an item into the inbox", create, enqueue),
    Protocol("D: drain the inbox into the journal", world_with_items, drain),
    Protocol("E: commit a snapshot and promote it", world_with_entries, take_snapshot),
    Protocol("F: export segments", world_with_a_baseline, export),
)


def everything(database: Database, objects: ObjectStore) -> tuple[object, object]:
    bodies = [(meta.path, objects.get(meta.path)) for meta in objects.list()]
    return database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=10_000)), bodies


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
