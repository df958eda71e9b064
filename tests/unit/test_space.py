"""Deletion of unreferenced blobs, retention of session logs, and what is kept and why."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, Tier, limits
from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import ObjectStore, open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.compaction import Compactions
from fastness.backends.rocksdb.disk_needs import DiskSpace, disk_space
from fastness.errors import (
    BlobNotFound,
    Busy,
    Closed,
    DiskFull,
    InvalidArgument,
    Unreachable,
    WorldNotActive,
    WorldNotFound,
)
from fastness.kv import Event, Subspace, Transaction
from fastness.layers import blobs, inboxes, journals, queues, snapshots, states, worlds
from fastness.layers.blobs import Blob
from fastness.layers.idempotency import keyed_call, store_result
from fastness.layers.queues import MessageEvent, QueueKey
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.worlds import World
from fastness.limits import (
    BLOB_TOUCH_SECONDS,
    BLOB_UPLOAD_SECONDS_MAX,
    COMPACT_DELETIONS_MIN,
    COMPACT_REWRITES_MAX,
    COMPACT_TIGHT_SECONDS,
    GC_GRACE_SECONDS,
    PAYLOAD_INLINE_BYTES_MAX,
)
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.runtime.background import BackgroundRunner, Job
from fastness.runtime.maintenance import retention
from fastness.runtime.maintenance.space_counters import SpaceCounters
from fastness.runtime.maintenance.space_loop import SpaceLoop, trim_logs
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.runtime.maintenance.table_compaction import table_compaction
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from fastness.wire.inboxes import DomainEvent
from fastness.wire.queues import NewMessage, PutMessages, QueuePolicy
from tests.support.background import DrivenRunner
from tests.support.waiting import eventually

LARGE = bytes(range(256)) * 200
HASH = hashlib.sha256(LARGE).hexdigest()
GRACE_MS = round(GC_GRACE_SECONDS * 1_000)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def plane(tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(f"dir:{tmp_path / 'data'}", clock=clock) as plane:
        yield plane


@pytest.fixture
def objects(tmp_path: Path, plane: Plane) -> ObjectStore:
    return open_objects(f"dir:{tmp_path / 'data' / 'objects'}")


def pass_grace(clock: ManualClock) -> None:
    clock.advance_ms(GRACE_MS + BLOB_TOUCH_SECONDS * 1_000)


def consume(plane: Plane) -> None:
    message = plane.queue("jobs").receive()
    assert message is not None
    message.ack()


def test_the_blob_of_a_payload_goes_after_its_last_message(
    plane: Plane, objects: ObjectStore, clock: ManualClock
) -> None:
    for _ in range(2):
        plane.queue("jobs").put(LARGE)
    consume(plane)
    pass_grace(clock)
    assert (plane.gc().kept, plane.blobs.has(HASH)) == (1, True), "a message names it"
    consume(plane)
    assert plane.gc().waiting == 1
    pass_grace(clock)
    planned = plane.gc(dry_run=True)
    assert (planned.deleted, planned.deleted_bytes) == (1, len(LARGE))
    assert plane.blobs.has(HASH), "a dry run deletes nothing"
    done = plane.gc()
    assert (done.deleted, done.deleted_bytes, done.freed) == (1, len(LARGE), 0)
    assert not plane.blobs.has(HASH)
    assert len(objects.list("cas")) == 1, "a reader or a backup may still need the body"
    pass_grace(clock)
    assert plane.gc().freed == 1
    assert objects.list("cas") == []
    assert [key for area in blobs.AREAS for key, _ in plane.pairs.scan(*Subspace("u", "main", area).range())] == []


def test_a_message_without_a_blob_costs_nothing(plane: Plane) -> None:
    plane.queue("jobs").put({"n": 1})
    consume(plane)

    assert [key for area in blobs.AREAS for key, _ in plane.pairs.scan(*Subspace("u", "main", area).range())] == []


def test_everything_that_names_a_blob_keeps_it(plane: Plane, clock: ManualClock) -> None:
    contents = [f"{n}".encode() * (PAYLOAD_INLINE_BYTES_MAX + 1) for n in range(8)]
    pinned = plane.blobs.put(contents[0])
    in_state, in_blob = (plane.blobs.put(content, pinned=False) for content in contents[1:3])
    plane.state("report").update({"blob": in_state})
    holder = plane.blobs.put(f"see {in_blob}".encode().ljust(20_000))
    world = plane.world("ada")
    world.create()
    world.append(["hello"], expected_head=0)
    snapshot = world.snapshots.commit("state" * 10_000, height=1)
    plane.queue("failing").put(contents[5])
    message = plane.queue("failing").receive()
    assert message is not None
    message.reject("no")
    in_segment, in_pair = (plane.blobs.put(content, pinned=False) for content in contents[6:])
    cold = plane.world("cold")
    cold.create()
    cold.append([in_segment, *range(19)], expected_head=0)
    cold.snapshots.commit(None, height=20)
    assert cold.compact(entries=10, margin=0).segments == 2
    plane.pairs.put(b"mine", in_pair.upper().encode())
    lost = plane.blobs.put(contents[4], pinned=False)
    for _ in range(3):
        plane.gc()
        pass_grace(clock)
    in_dead_letter = hashlib.sha256(contents[5]).hexdigest()
    kept = [pinned, in_state, in_blob, holder, snapshot.snapshot_ref, in_dead_letter, in_segment, in_pair]
    assert [plane.blobs.has(hash) for hash in kept] == [True] * len(kept)
    assert not plane.blobs.has(lost)
    plane.blobs.unpin(pinned)
    plane.state("report").remove()
    for _ in range(2):
        plane.gc()
        pass_grace(clock)
    assert not plane.blobs.has(pinned)
    assert not plane.blobs.has(in_state)


def test_the_grace_period_starts_with_the_last_name(plane: Plane, clock: ManualClock) -> None:
    """A message went long ago, a state only now: another process may be about to name the blob again."""
    plane.queue("jobs").put(LARGE)
    plane.state("report").update({"blob": HASH})
    consume(plane)
    pass_grace(clock)
    plane.state("report").remove()
    assert (plane.gc().waiting, plane.blobs.has(HASH)) == (1, True)
    plane.state("other").update({"blob": HASH})
    pass_grace(clock)
    assert plane.gc().kept == 1
    plane.state("other").remove()
    assert plane.gc().waiting == 1
    pass_grace(clock)
    assert plane.gc().deleted == 1


def test_another_put_starts_the_grace_period_again(plane: Plane, clock: ManualClock) -> None:
    plane.queue("jobs").put(LARGE)
    consume(plane)
    pass_grace(clock)
    plane.blobs.put(LARGE, pinned=False)
    plane.gc()
    clock.advance_ms(GRACE_MS)
    assert plane.gc().waiting == 1
    assert plane.blobs.get(HASH) == LARGE
    pass_grace(clock)
    assert plane.gc().deleted == 1


def test_a_message_cannot_name_a_deleted_blob(plane: Plane) -> None:
    new = NewMessage(b"", blob=HASH, blob_size=len(LARGE))
    with pytest.raises(BlobNotFound, match="put it first"):
        plane.transact(queues.put, QueueKey("main", "jobs"), [new])


def test_nothing_is_deleted_while_something_cannot_be_searched(
    plane: Plane, objects: ObjectStore, clock: ManualClock
) -> None:
    # More possible hashes than a record keeps, so its content is read.
    long_run = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(256)) * 2
    plane.blobs.put(long_run.encode())
    (body,) = objects.list("cas")
    plane.queue("jobs").put(LARGE)
    consume(plane)
    assert plane.gc().waiting == 1
    pass_grace(clock)
    objects.delete(body.path)
    done = plane.gc()
    assert (done.deleted, len(done.unsearched)) == (0, 1)
    objects.put(body.path, long_run.encode())
    assert plane.gc().deleted == 1


def test_a_body_that_was_never_recorded_is_deleted_after_a_week(
    plane: Plane, objects: ObjectStore, clock: ManualClock
) -> None:
    plane.blobs.put(LARGE)
    (recorded,) = objects.list("cas")
    upload = plane.transact(lambda tx: tx.new_id().hex)
    objects.put(blobs.object_path("main", bytes.fromhex(HASH), upload), LARGE)
    assert plane.gc().freed == 0
    clock.advance_ms(8 * 86_400_000)
    assert plane.gc().freed == 1
    assert [meta.path for meta in objects.list("cas")] == [recorded.path]


def test_an_upload_that_took_too_long_is_not_recorded() -> None:
    clock = ManualClock()
    database = MemoryDatabase(clock=clock)
    upload = database.read(lambda tx: tx.new_id().hex)
    clock.advance_ms(BLOB_UPLOAD_SECONDS_MAX * 1_000 + 1)
    with pytest.raises(Busy, match="store it again"):
        database.transact(blobs.record, "main", bytes(32), Blob(9, upload=upload))


@pytest.mark.parametrize(
    "change",
    [
        lambda tx: blobs.use(tx, "main", HASH),
        lambda tx: blobs.release(tx, "main", HASH),
        lambda tx: blobs.set_pinned(tx, "main", HASH, pinned=True),
        lambda tx: blobs.record(tx, "main", bytes.fromhex(HASH), Blob(len(LARGE), upload="1" * 32, pinned=False)),
        lambda tx: None,
    ],
    ids=["named", "released", "pinned", "put", "unchanged"],
)
def test_a_blob_that_changed_after_the_search_stays(
    change: Callable[[Transaction], object], request: pytest.FixtureRequest
) -> None:
    clock = ManualClock()
    database = MemoryDatabase(clock=clock)
    digest = bytes.fromhex(HASH)
    upload = database.read(lambda tx: tx.new_id().hex)
    seen = database.transact(blobs.record, "main", digest, Blob(len(LARGE), upload=upload, pinned=False))
    database.transact(blobs.mark_or_delete, "main", digest, seen=seen, mark=None, grace_ms=GRACE_MS)
    mark = database.read(blobs.mark_of, "main", digest)
    pass_grace(clock)
    database.transact(change)
    is_deleted = database.transact(blobs.mark_or_delete, "main", digest, seen=seen, mark=mark, grace_ms=GRACE_MS)
    assert is_deleted == ("unchanged" in request.node.name)
    assert (database.read(blobs.find, "main", digest) is None) == is_deleted


ADA = World("main", "ada")
BLOB_MESSAGE = NewMessage(b"", blob=HASH, blob_size=len(LARGE))


@pytest.mark.parametrize(
    ("name", "needs_record"),
    [
        (lambda tx: queues.put(tx, QueueKey("main", "jobs"), [BLOB_MESSAGE]), True),
        (
            lambda tx: queues.set_schedule(
                tx, QueueKey("main", "jobs"), "daily", cron="0 3 * * *", timezone="UTC", message=BLOB_MESSAGE
            ),
            True,
        ),
        (lambda tx: inboxes.enqueue(tx, ADA, DomainEvent(schema="s", payload_blob=HASH)), True),
        (
            lambda tx: snapshots.commit(tx, ADA, SnapshotRecord(HASH, 1, snapshots.NOW, None, None), promote=False),
            False,  # It can be indexed before its bytes are stored, but not become the baseline.
        ),
    ],
    ids=["message", "schedule", "inbox item", "snapshot"],
)
def test_naming_a_blob_removes_its_mark_and_needs_its_record(
    name: Callable[[Transaction], object], needs_record: bool
) -> None:
    database = MemoryDatabase(clock=ManualClock())
    database.transact(snapshots.create_world, ADA)
    database.transact(journals.append, ADA, [b"\x82\x00\x00"], expected_head=0)
    if needs_record:
        with pytest.raises(BlobNotFound, match="put it first"):
            database.transact(name)
    digest = bytes.fromhex(HASH)
    seen = database.transact(blobs.record, "main", digest, Blob(len(LARGE), upload="", pinned=False))
    database.transact(blobs.mark_or_delete, "main", digest, seen=seen, mark=None, grace_ms=GRACE_MS)
    assert database.read(blobs.mark_of, "main", digest) is not None
    database.transact(name)
    assert database.read(blobs.mark_of, "main", digest) is None


def test_a_negative_grace_period_is_refused(plane: Plane) -> None:
    with pytest.raises(InvalidArgument, match="grace_seconds is -1; give a number from 0 to 31,536,000"):
        plane.gc(grace_seconds=-1)


# Session logs.


def run_passes(job: Job, count: int) -> None:
    runner = DrivenRunner()
    runner.start(job)
    while job.passes < count:
        runner.advance(job.due_at - runner.now, job)


def log_a_file(plane: Plane, session: str) -> None:
    plane.activity.log(session, {"text": "x" * 1_000})
    plane.activity.end(session)


@pytest.fixture
def logged(plane: Plane, objects: ObjectStore, clock: ManualClock) -> Callable[[SpaceOptions], list[str]]:
    """Writes three session logs, an hour apart; then trims them and returns the sessions that are left."""
    for n in range(3):
        log_a_file(plane, f"s{n}")
        clock.advance_ms(3_600_000)
    plane.close()
    database = MemoryDatabase(clock=clock)

    def trim(options: SpaceOptions) -> list[str]:
        trim_logs(database, objects, options)
        return sorted(meta.path.rpartition("/")[2].split("_")[0] for meta in objects.list("activity"))

    return trim


def test_session_logs_are_kept_without_a_retention(logged: Callable[[SpaceOptions], list[str]]) -> None:
    assert logged(SpaceOptions()) == ["s0", "s1", "s2"]


def test_session_logs_are_deleted_by_age(logged: Callable[[SpaceOptions], list[str]], objects: ObjectStore) -> None:
    assert logged(SpaceOptions(log_keep_seconds=1.5 * 3_600)) == ["s2"]
    assert len(objects.list("activity-manifest")) == 1


def test_the_oldest_session_logs_are_deleted_by_bytes(
    logged: Callable[[SpaceOptions], list[str]], objects: ObjectStore
) -> None:
    sizes = [meta.size for meta in objects.list("activity")]
    assert logged(SpaceOptions(log_bytes_max=sum(sizes) - 1)) == ["s1", "s2"]
    assert logged(SpaceOptions(log_bytes_max=0)) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_counts_what_it_deletes_and_its_failures(
    plane: Plane, objects: ObjectStore, clock: ManualClock, fails: bool
) -> None:
    log_a_file(plane, "s0")
    (file,) = objects.list("activity")
    clock.advance_ms(3_600_000)
    plane.close()
    database, counters = MemoryDatabase(clock=clock), SpaceCounters(clock)
    store = faulty_objects(objects, ChosenFault(0, lambda: Unreachable("away"))) if fails else objects
    worlds = WorldStore(database, store, BlobStore(database, store))
    loop = SpaceLoop(database, store, SpaceOptions(log_keep_seconds=60), 60.0, worlds=worlds, counters=counters)
    run_passes(loop.job, 2)
    assert (counters.deleted["session logs"], counters.deleted_bytes["session logs"]) == (1, file.size)
    assert counters.last.failures == fails
    assert (counters.last.succeeded_ms, counters.last.error) == (clock.now_ms(), None)


# What is kept, and why.


def test_space_shows_what_is_kept_and_why(plane: Plane) -> None:
    plane.queue("jobs").put(LARGE)
    plane.blobs.put(b"pinned")
    uses = {(use.kind, use.reason): (use.count, use.bytes) for use in plane.space().uses}
    assert uses["blobs", "named by messages"] == (1, len(LARGE))
    assert uses["blobs", "pinned"] == (1, 6)
    consume(plane)
    uses = {(use.kind, use.reason): (use.count, use.bytes) for use in plane.space().uses}
    assert uses["blobs", "unreferenced"] == (1, len(LARGE))


def test_space_shows_until_when_data_is_kept(plane: Plane, clock: ManualClock) -> None:
    def shown(kind: str, reason: str) -> tuple[int, int, str, int | None]:
        uses = {(use.kind, use.reason): use for use in plane.space().uses}
        return tuple(getattr(uses[kind, reason], name) for name in ("count", "bytes", "until", "next_ms"))

    in_grace = "for the grace period of 1 d (gc_grace_seconds)"
    plane.queue("jobs").put(LARGE)
    consume(plane)
    put_ms = clock.now_ms()
    due_ms = put_ms + GRACE_MS + BLOB_TOUCH_SECONDS * 1_000
    not_searched = f"{in_grace}, which starts with the next collection"
    assert shown("blobs", "unreferenced") == (1, len(LARGE), not_searched, None)
    plane.gc()
    assert shown("blobs", "unreferenced") == (1, len(LARGE), in_grace, due_ms)
    clock.advance_ms(due_ms - put_ms - 1)
    assert plane.gc().deleted == 0
    clock.advance_ms(1)
    assert plane.gc().deleted == 1
    bodies = "bodies of deleted blobs, for readers and backups"
    assert shown("deleted blobs", bodies) == (1, len(LARGE), f"{in_grace} after their deletion", None)
    pass_grace(clock)
    plane.gc()
    assert [use.kind for use in plane.space().uses if "blobs" in use.kind] == []


def test_space_shows_the_last_collection_and_the_disk(plane: Plane, clock: ManualClock) -> None:
    assert plane.storage_status().collection == fastness.LastCollection()
    clock.advance_ms(1_000)
    plane.gc()
    status = plane.space().status
    assert (status.failure, status.disk_low) == (None, False)
    assert status.disk_reserve_bytes is not None
    assert (status.disk_free_bytes or 0) > status.disk_reserve_bytes > 0
    assert status.collection.succeeded_ms == clock.now_ms()
    assert status.collection.result == plane.gc()


def test_a_plane_deletes_in_the_background(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with fastness.open(url, gc_every_seconds=0.01, gc_grace_seconds=0) as plane:
        plane.queue("jobs").put(b"plain")
    clock = ManualClock()
    database, objects = MemoryDatabase(clock=clock), open_objects("memory:")
    digest = hashlib.sha256(b"small").digest()
    database.transact(blobs.record, "main", digest, Blob(5, b"small", pinned=False))
    database.transact(blobs.release, "main", digest.hex())
    clock.advance_ms(BLOB_TOUCH_SECONDS * 1_000)
    counters, store = SpaceCounters(), WorldStore(database, objects, BlobStore(database, objects))
    loop = SpaceLoop(database, objects, SpaceOptions(grace_seconds=0), 60.0, worlds=store, counters=counters)
    run_passes(loop.job, 2)
    assert database.read(blobs.find, "main", digest) is None
    assert counters.deleted["blobs"] == 1
    with pytest.raises(InvalidArgument, match="gc_every_seconds"):
        fastness.open(url, gc_every_seconds=0)


def test_closing_a_plane_does_not_wait_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.runtime.maintenance.space_loop.SEARCH_PAUSE_SECONDS", 3_600.0)
    database, objects = MemoryDatabase(), open_objects("memory:")
    digest = hashlib.sha256(b"small").digest()
    database.transact(blobs.record, "main", digest, Blob(5, b"small", pinned=False))
    database.transact(states.update, "main", "something", b"to read")
    searching = threading.Event()
    read = database.read

    def read_and_tell(*args: Any, **options: Any) -> Any:
        searching.set()
        return read(*args, **options)

    monkeypatch.setattr(database, "read", read_and_tell)
    store = WorldStore(database, objects, BlobStore(database, objects))
    runner, loop = BackgroundRunner(), SpaceLoop(database, objects, SpaceOptions(), 0.001, worlds=store)
    runner.add(loop.job)
    assert searching.wait(60)
    runner.stop()  # It would wait an hour.
    assert loop.job.passes == 0


# Archived worlds, dead letters and results.


def make_world(plane: Plane, name: str, *, blob: str | None = None) -> None:
    """An archived world with a journal in the key space and in segments."""
    world = plane.world(name)
    world.create()
    world.append([{"n": n, "see": blob, "pad": "x" * 100} for n in range(20)], expected_head=0)
    world.snapshots.commit(name * 10_000, height=20)
    assert world.compact(entries=10, margin=0).segments == 2
    world.append(["hot"], expected_head=world.head())
    world.archive()


def services_of(plane: Plane) -> Services:
    assert isinstance(plane._transport, EmbeddedTransport)
    return plane._transport.services


def world_store(plane: Plane) -> WorldStore:
    services = services_of(plane)
    return WorldStore(services.database, services.objects, BlobStore(services.database, services.objects))


def trim_worlds(plane: Plane, **options: float) -> int:
    return retention.trim_worlds(
        services_of(plane).database, world_store(plane), msgspec.convert(options, SpaceOptions)
    )


def test_archived_worlds_are_kept_without_a_retention(plane: Plane, clock: ManualClock) -> None:
    make_world(plane, "ada")
    clock.advance_ms(10 * 365 * 86_400_000)
    assert trim_worlds(plane) == 0
    assert len(plane.world("ada").read(limit=100)) == 23


def test_archived_worlds_are_deleted_by_age_and_forks_of_them_stay(
    plane: Plane, objects: ObjectStore, clock: ManualClock
) -> None:
    shared = plane.blobs.put(LARGE, pinned=False)
    pinned = plane.blobs.put(b"pinned" * 10_000)
    make_world(plane, "old", blob=shared)
    plane.world("old").fork("copy", height=20)
    before = plane.world("copy").read(limit=100)
    clock.advance_ms(5_000)
    make_world(plane, "resumed")
    make_world(plane, "young")
    plane.world("active").create()
    clock.advance_ms(6_000)
    plane.world("resumed").resume()
    plane.world("resumed").archive()
    assert trim_worlds(plane, archived_keep_seconds=12) == 0
    assert trim_worlds(plane, archived_keep_seconds=11) == 1
    assert list(plane.worlds()) == ["active", "copy", "resumed", "young"]
    with pytest.raises(WorldNotFound, match="deleted"):
        plane.world("old").read()
    assert {meta.path.split("/")[2] for meta in objects.list("segments")} == {"resumed", "young"}
    for _ in range(3):
        plane.gc()
        pass_grace(clock)
    assert plane.world("copy").read(limit=100) == before
    assert (plane.blobs.get(shared), plane.blobs.has(pinned)) == (LARGE, True)
    assert trim_worlds(plane, archived_keep_seconds=11) == 2
    assert list(plane.worlds()) == ["active", "copy"]


def test_the_worlds_that_were_archived_first_are_deleted_by_bytes(plane: Plane, clock: ManualClock) -> None:
    for name in ("c", "a", "b"):
        make_world(plane, name)
        clock.advance_ms(1)
    sizes = [retention.size_of(services_of(plane).database, World("main", name)) for name in ("a", "b", "c")]
    assert min(sizes) > 20 * 100, "segments count"
    assert trim_worlds(plane, archived_bytes_max=sum(sizes)) == 0
    assert trim_worlds(plane, archived_bytes_max=sum(sizes) - 1) == 1
    assert list(plane.worlds()) == ["a", "b"]
    assert trim_worlds(plane, archived_bytes_max=0) == 2


def test_a_world_that_is_resumed_or_half_deleted_meanwhile(plane: Plane, clock: ManualClock) -> None:
    """A world that was resumed stays. A deletion that stopped after any step is finished."""
    make_world(plane, "ada")
    clock.advance_ms(1_000)
    database, objects = services_of(plane).database, services_of(plane).objects
    assert objects is not None
    seen = database.read(worlds.last_meta, World("main", "ada"))
    plane.world("ada").resume()
    plane.world("ada").archive()
    with pytest.raises(WorldNotActive, match="archived again"):
        world_store(plane).delete(World("main", "ada"), seen.incarnation, archived_ms=seen.archived_ms)
    for fail_at in range(0, 100, 3):
        faults = ChosenFault(fail_at)
        store = WorldStore(FaultyDatabase(database, faults), faulty_objects(objects, faults), BlobStore(database, None))
        with suppress(Crash):
            retention.trim_worlds(FaultyDatabase(database, faults), store, SpaceOptions(archived_keep_seconds=0))
    assert list(plane.worlds()) == []
    assert objects.list("segments") == []


def make_dead_letters(plane: Plane, queue: str, clock: ManualClock) -> None:
    for payload in (b"small", b"x" * 5_000, LARGE):
        plane.queue(queue).put(payload)
        message = plane.queue(queue).receive()
        assert message is not None
        message.reject("no")
        clock.advance_ms(1)


def test_the_oldest_dead_letters_are_deleted_by_bytes(plane: Plane, clock: ManualClock) -> None:
    plane.queue("named").set_policy(QueuePolicy(dead_letter_queue="failed"))
    make_dead_letters(plane, "jobs", clock)
    make_dead_letters(plane, "named", clock)
    plane.queue("failed").put("not a dead letter")
    events: list[Event] = []
    services_of(plane).database.publish = events.extend

    def trim(bytes_max: int | None) -> tuple[list[int], list[int]]:
        options = SpaceOptions(dead_letter_bytes_max=bytes_max)
        retention.trim_dead_letters(services_of(plane).database, options)
        return tuple([each.size for each in plane.queue(name).dead_letters()] for name in ("jobs", "named"))  # type: ignore[return-value]

    everything = [5, 5_000, len(LARGE)]
    assert trim(None) == (everything, everything)
    assert trim(2 * sum(everything) + 10_000) == (everything, everything)
    assert trim(2 * sum(everything)) == (everything[2:], everything)
    assert trim(len(LARGE) + 1_000) == ([], everything[2:])
    assert trim(0) == ([], [])
    assert len([each for each in events if isinstance(each, MessageEvent) and each.event == "outlived"]) == 6
    assert plane.queue("failed").stats().ready == 1
    assert plane.queue("jobs").stats().dead == 0
    for _ in range(2):
        plane.gc()
        pass_grace(clock)
    assert plane.gc().kept == 0


def test_results_are_deleted_although_nothing_else_happens(plane: Plane, clock: ManualClock) -> None:
    database = services_of(plane).database
    plane.queue("jobs").put("x", idempotency_key="k")
    consume(plane)
    request = PutMessages("jobs", [NewMessage(b"x")])
    call = keyed_call("key", request, lambda: False)
    database.transact(store_result, call, 1)
    retention.delete_results(database)
    assert sum(use.count for use in plane.space().uses if use.kind == "results") == 3, "a call, a put and an ack"
    clock.advance_ms(20 * 60_000)
    retention.delete_results(database)
    assert "results" not in {use.kind for use in plane.space().uses}


def test_space_shows_retentions(tmp_path: Path, clock: ManualClock) -> None:
    with fastness.open(
        f"dir:{tmp_path / 'data'}",
        archived_keep_seconds=60,
        archived_bytes_max=1_000,
        dead_letter_bytes_max=500,
        activity_keep_seconds=5,
        clock=clock,
    ) as plane:
        make_world(plane, "ada")
        make_dead_letters(plane, "jobs", clock)
        log_a_file(plane, "s")
        until = {use.kind: use.until for use in plane.space().uses}
    assert "for 1 min (archived_keep_seconds) and up to 1,000 bytes" in until["archived worlds"]
    assert "up to 500 bytes" in until["dead letters"]
    assert until["session logs"] == "for 5 s (activity_keep_seconds)"
    with pytest.raises(InvalidArgument, match="archived_bytes_max"):
        fastness.open(f"dir:{tmp_path / 'data'}", archived_bytes_max=-1)


# Space of deleted pairs in the tables of a key space.


def size_of_key_space(plane: Plane) -> int:
    return sum(path.stat().st_size for path in key_space(plane).path.iterdir())


def key_space(plane: Plane) -> RocksDatabase:
    database = services_of(plane).database
    assert isinstance(database, RocksDatabase)
    return database


def test_a_drained_queue_gives_its_disk_space_back(plane: Plane, clock: ManualClock) -> None:
    jobs, count = plane.queue("jobs"), COMPACT_DELETIONS_MIN
    empty_bytes = size_of_key_space(plane)
    for _ in range(0, count, 256):
        jobs.put_many([os.urandom(800) for _ in range(256)], tier=Tier.IMPORTANT)
    key_space(plane).flush_tables()
    while messages := jobs.receive_many(256, tier=Tier.IMPORTANT, extend_for_seconds=0):
        jobs.ack_many(messages, tier=Tier.IMPORTANT)
    clock.advance_ms(3_600_000)  # After this the next put removes the records of the acks.
    jobs.put(b"last")
    assert size_of_key_space(plane) > empty_bytes + 800 * count

    compactions = 0
    for _ in range(3):
        while key_space(plane).compact_deleted():
            compactions += 1
    assert compactions == 1
    assert size_of_key_space(plane) < empty_bytes + 262_144
    message = jobs.receive()
    assert message is not None
    assert message.payload == b"last"


def test_deletions_in_memory_are_not_written_while_more_follow(plane: Plane) -> None:
    database = key_space(plane)
    put_pairs(database, 2 * COMPACT_DELETIONS_MIN)
    database.flush_tables()
    for begin in (0, COMPACT_DELETIONS_MIN):
        delete_pairs(database, begin, begin + COMPACT_DELETIONS_MIN)
        assert not database.compact_deleted(), "it is the first check since these deletions"
    assert database.compact_deleted(), "nothing was deleted since the last check"


def test_a_deep_backlog_is_not_rewritten_for_few_deletions(plane: Plane) -> None:
    database, count = key_space(plane), COMPACT_DELETIONS_MIN
    put_pairs(database, count * (COMPACT_REWRITES_MAX + 2))
    database.flush_tables()
    delete_pairs(database, 0, count)
    assert not any(database.compact_deleted() for _ in range(3))
    delete_pairs(database, count, 2 * count)
    assert [database.compact_deleted() for _ in range(3)] == [False, True, False]


def put_pairs(database: RocksDatabase, count: int) -> None:
    for begin in range(0, count, 1_024):
        database.transact(change_pairs, range(begin, begin + 1_024), b"v" * 20, tier=Tier.IMPORTANT)


def delete_pairs(database: RocksDatabase, begin: int, end: int) -> None:
    for first in range(begin, end, 1_024):
        database.transact(change_pairs, range(first, first + 1_024), None, tier=Tier.IMPORTANT)


def change_pairs(tx: Transaction, numbers: range, value: bytes | None) -> None:
    for number in numbers:
        if value is None:
            tx.delete(b"pair-%08d" % number)
        else:
            tx.put(b"pair-%08d" % number, value)


def test_a_failed_or_closed_database_frees_no_space(plane: Plane) -> None:
    database = key_space(plane)
    database._failure = Unreachable("The disk failed")
    assert not database.compact_deleted()
    database._failure = None
    plane.close()
    with pytest.raises(Closed):
        database.compact_deleted()


class Compacting:
    """A key space whose attempts to free space have chosen outcomes."""

    def __init__(self, *outcomes: bool | Exception) -> None:
        self.outcomes = list(outcomes)
        self.is_tight = False

    def compact_deleted(self) -> bool:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_space_is_freed_until_nothing_is_left_and_again_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    database = Compacting(True, True, False, Unreachable("no disk"), ZeroDivisionError("unexpected"), False)
    runner, job = DrivenRunner(), table_compaction(database, 3 * COMPACT_TIGHT_SECONDS)
    runner.start(job)

    def wait(times: int) -> int:
        """Let the job look so often; how many outcomes are left."""
        for _ in range(times):
            runner.advance(job.due_at - runner.now, job)
        return len(database.outcomes)

    assert wait(2) == 6, "it is not time yet"
    assert wait(1) == 3
    assert (wait(2), wait(1), wait(1), wait(1)) == (3, 2, 1, 0)
    assert "no disk" in caplog.text


def test_space_is_freed_often_while_the_disk_is_tight() -> None:
    database = Compacting(False, False)
    runner, job = DrivenRunner(), table_compaction(database, 60.0)
    database.is_tight = True
    runner.start(job)
    for left in (1, 0):
        assert runner.advance(COMPACT_TIGHT_SECONDS, job) == COMPACT_TIGHT_SECONDS
        assert len(database.outcomes) == left


def test_an_open_directory_frees_space_until_it_is_closed(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        assert "fastness-tables" in {thread.name for thread in threading.enumerate()}
    del plane
    assert "fastness-tables" not in {thread.name for thread in threading.enumerate()}


def test_a_database_is_not_closed_or_reopened_during_a_compaction(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = key_space(plane)
    arrived, go_on = threading.Event(), threading.Event()

    def compact(*_: Any, **__: Any) -> bool:
        arrived.set()
        return go_on.wait(30)

    monkeypatch.setattr(Compactions, "compact", compact)
    compacting = threading.Thread(target=database.compact_deleted)
    compacting.start()
    assert arrived.wait(30)
    rocks = database._rocks
    database._failure = Unreachable("The disk failed")
    reopening = threading.Thread(target=database.reopen)
    reopening.start()
    reopening.join(0.05)
    assert rocks.get(b"missing") is None, "RocksDB is still open"
    go_on.set()
    reopening.join(30)
    compacting.join(30)
    assert database._rocks is not rocks
    plane.queue("jobs").put(b"stored")


# A disk with too little space.

RESERVE_BYTES = 1 << 30


def level_0_tables(database: RocksDatabase) -> int:
    return database._rocks.property_int_value("rocksdb.num-files-at-level0") or 0


def write_tables(database: RocksDatabase, count: int) -> None:
    """Write tables that all have the same keys, so that RocksDB merges every four of them."""
    for _ in range(count):
        database.transact(lambda tx: [tx.put(b"pair-%d" % n, os.urandom(1_000)) for n in range(50)])
        database.flush_tables()


def test_rocksdb_merges_nothing_that_would_take_the_reserve_until_it_fits(plane: Plane) -> None:
    database = key_space(plane)
    write_tables(database, 1)
    database.limit_disk_use(free_bytes=disk_space(database.path).flush_bytes, reserve_bytes=RESERVE_BYTES)
    before = level_0_tables(database)
    write_tables(database, 8)
    assert level_0_tables(database) == before + 8

    database.limit_disk_use(free_bytes=RESERVE_BYTES * 8, reserve_bytes=RESERVE_BYTES)
    assert database.is_tight, "they are paused until the next sweep"
    while database.compact_deleted():
        pass
    assert not database.is_tight
    assert level_0_tables(database) < 4


def test_rocksdb_merges_again_in_a_directory_that_was_closed_while_it_merged_nothing(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path) as database:
        write_tables(database, 1)
        database.limit_disk_use(free_bytes=disk_space(tmp_path).flush_bytes, reserve_bytes=RESERVE_BYTES)
        write_tables(database, 8)
        assert level_0_tables(database) == 9
    with RocksDatabase(tmp_path) as database:
        assert not database.is_tight
        eventually(lambda: level_0_tables(database) < 4)


def test_rocksdb_merges_nothing_in_a_directory_that_is_opened_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RocksDatabase(tmp_path) as database:
        write_tables(database, 1)
    full_disk = DiskSpace(total_bytes=disk_space(tmp_path).total_bytes, free_bytes=1)
    monkeypatch.setattr("fastness.backends.rocksdb.database.disk_space", lambda _: full_disk)
    with RocksDatabase(tmp_path) as database:
        assert database.is_tight
        write_tables(database, 8)
        assert level_0_tables(database) == 9


def test_all_writes_are_refused_before_a_flush_would_fail_and_reads_work(plane: Plane) -> None:
    database, jobs = key_space(plane), plane.queue("jobs")
    jobs.put(b"before")
    message = jobs.receive()
    assert message is not None
    database.limit_disk_use(free_bytes=1_000, reserve_bytes=RESERVE_BYTES)
    with pytest.raises(DiskFull, match="Reads still work"):
        message.ack()
    status = plane.storage_status()
    assert (status.failure, status.disk_low, status.refuses_writes) == (None, True, True)
    assert jobs.stats().leased == 1

    free_bytes = 2 * disk_space(database.path).flush_bytes
    database.limit_disk_use(free_bytes=free_bytes, reserve_bytes=RESERVE_BYTES)
    assert (plane.storage_status().disk_low, plane.storage_status().refuses_writes) == (True, False)
    message.ack()
    with pytest.raises(DiskFull, match="nearly full"):
        jobs.put(b"refused")


def test_a_blob_that_would_take_the_reserve_is_refused(plane: Plane) -> None:
    key_space(plane).object_bytes_max = 99_999
    plane.blobs.put(os.urandom(99_999))
    kept = plane.blobs.put(b"x" * 20_000)
    key_space(plane).object_bytes_max = 0
    with pytest.raises(DiskFull, match="100000 bytes, and the disk has 0 above its reserve"):
        plane.blobs.put(os.urandom(100_000))
    with pytest.raises(DiskFull, match="disk_reserve_bytes"):
        plane.blobs.write([os.urandom(100_000)])
    assert plane.blobs.put(b"x" * 20_000) == kept, "it is stored already"


def test_session_logs_are_not_written_into_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISK_RESERVE_SHARE_MAX", 2.0)
    with fastness.open(f"dir:{tmp_path}") as plane:
        plane.queue("jobs").put_many([b"1", b"2"])
    with fastness.open(f"dir:{tmp_path}", disk_reserve_bytes=1 << 60) as plane:
        services = services_of(plane)
        before = services.log().stats().written
        assert plane.queue("jobs").purge() == 2
        services.flush_logs()
        stats = services.log().stats()
        assert stats.accepted > stats.written == before
        assert "Only the reserve of the disk is left" in (stats.last_error or "")
        assert services.disk_space is not None
        services.disk_space.job.pause()
        services.database.low_space = False
        services.flush_logs()
        assert services.log().stats().written == services.log().stats().accepted
