"""Cold segments: a journal reads the same before and after compaction, and damage in a segment is reported."""

from pathlib import Path
from typing import Any

import cbor2
import pytest

import fastness
from fastness import Plane
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import ChecksumMismatch, InvalidArgument, MalformedSegment, MissingObject, SegmentExists
from fastness.kv import Database
from fastness.layers import journal_records, journals, segments, snapshots
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord
from fastness.layers.worlds import World
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from fastness.wire.canonical import canonical
from fastness.wire.worlds import Segment

GOLDEN = Path(__file__).parents[1] / "golden" / "segment-0-3.log"
ADA = World("main", "ada")


def fill(database: Database, count: int, *, baseline: int) -> None:
    """Create a world with `count` entries and a baseline at that height."""
    database.transact(snapshots.create_world, ADA)
    for start in range(0, count, 256):
        batch = [journal_records.entry(canonical({"n": number})) for number in range(start, min(start + 256, count))]
        database.transact(journals.append, ADA, batch, expected_head=start)
    genesis = database.read(snapshots.baseline, ADA).snapshot_ref
    record = SnapshotRecord(genesis, baseline, 1, baseline, NO_MANIFEST)
    database.transact(snapshots.commit, ADA, record, promote=True)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return open_objects(f"dir:{tmp_path / 'objects'}")


def store_of(database: Database, objects: ObjectStore) -> WorldStore:
    return WorldStore(database, objects, BlobStore(database, objects))


def everything(database: Database, objects: ObjectStore) -> list[Any]:
    return store_of(database, objects).read(ADA, 0, 10_000).records


@pytest.mark.parametrize(("baseline", "behind"), [(650, 600), (640, 600), (639, 500), (140, 100), (139, 0), (1, 0)])
def test_the_lag_is_the_number_of_records_a_compaction_removes(
    database: Database, objects: ObjectStore, baseline: int, behind: int
) -> None:
    fill(database, 700, baseline=baseline)
    assert database.read(segments.lag, ADA, entries=100, margin=40) == behind
    assert store_of(database, objects).compact(ADA, entries=100, margin=40).records == behind
    assert database.read(segments.lag, ADA, entries=100, margin=40) == 0


def test_hot_records_in_segments_count_as_lag(database: Database, objects: ObjectStore) -> None:
    fill(database, 700, baseline=650)
    store_of(database, objects)._export(ADA, 1, 0, 99, 40)
    assert database.read(segments.lag, ADA, entries=100, margin=40) == 600
    database.transact(segments.trim, ADA, 30)
    assert database.read(segments.lag, ADA, entries=100, margin=40) == 570


def test_a_journal_reads_the_same_before_and_after_compaction(database: Database, objects: ObjectStore) -> None:
    fill(database, 700, baseline=650)
    before = everything(database, objects)
    compacted = store_of(database, objects).compact(ADA, entries=100, margin=40)
    assert (compacted.segments, compacted.records) == (6, 600)
    assert everything(database, objects) == before
    assert database.read(journals.first_hot, ADA) == 600
    store = store_of(database, objects)
    for start, limit in ((0, 1), (99, 2), (100, 1), (599, 2), (600, 5), (350, 300), (701, 10), (702, 1), (9_999, 1)):
        assert store.read(ADA, start, limit).records == before[start : start + limit]


def test_only_records_below_the_baseline_margin_are_exported(database: Database, objects: ObjectStore) -> None:
    fill(database, 500, baseline=200)
    store = store_of(database, objects)
    assert store.compact(ADA, entries=100, margin=101).segments == 0
    assert store.compact(ADA, entries=100, margin=100).segments == 1
    assert store.compact(ADA, entries=100, margin=1).segments == 0
    assert store.compact(ADA, entries=99, margin=1).segments == 1
    with pytest.raises(InvalidArgument, match="too close to the baseline"):
        database.transact(segments.index, ADA, Segment(199, 300, "x", "y", 1), margin=0)


def test_segments_leave_no_gap_and_never_change(database: Database, objects: ObjectStore) -> None:
    fill(database, 500, baseline=400)
    store_of(database, objects).compact(ADA, entries=100, margin=0)
    first = database.read(segments.find, ADA, 42)
    assert (first.start, first.end) == (0, 99)
    database.transact(segments.index, ADA, first)
    with pytest.raises(SegmentExists, match="export from"):
        database.transact(segments.index, ADA, Segment(50, 150, "x", "y", 1))
    with pytest.raises(SegmentExists, match="leave no gap"):
        database.transact(segments.index, ADA, Segment(420, 430, "x", "y", 1))
    assert [record.start for record in database.read(segments.page, ADA, limit=10)] == [0, 100, 200, 300]
    assert [record.start for record in database.read(segments.page, ADA, after=99, limit=1)] == [100]


def test_a_damaged_segment_is_reported(database: Database, objects: ObjectStore) -> None:
    fill(database, 300, baseline=250)
    store_of(database, objects).compact(ADA, entries=100, margin=0)
    path = segments.object_path(ADA, 0, 99)
    body = bytearray(objects.get(path))
    body[1_000] ^= 1
    objects.put(path, bytes(body))
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match="restore it"):
            everything(database, objects)
    objects.delete(path)
    with pytest.raises(MissingObject):
        everything(database, objects)
    assert len(store_of(database, objects).read(ADA, 100, 1_000).records) == 202


def test_a_segment_with_the_right_checksum_and_the_wrong_records_is_reported() -> None:
    body = b"".join(segments.body([b"a", b"b"]))
    record = Segment(0, 2, "x", segments.checksum(body), len(body))
    with pytest.raises(MalformedSegment):
        segments.parse(body, record)
    cut = body[:-1]
    with pytest.raises(MalformedSegment):
        segments.parse(cut, Segment(0, 1, "x", segments.checksum(cut), len(cut)))


def test_the_bytes_of_a_segment_never_change() -> None:
    """The format is stable: the golden file is read, and written with the same bytes."""
    values = [{"b": 1, "a": [True, None, "ü"]}, b"\x00\xff", -7, {"nested": {"z": 1.5, "y": {}}}]
    entries = [journal_records.entry(canonical(value)) for value in values]
    golden = GOLDEN.read_bytes()
    assert b"".join(segments.body(entries)) == golden
    assert segments.checksum(golden) == "sha256:b510321ac6db64fb049fcb5623db8f50263533dd50f1cd46d9484dc997e2b889"
    parsed = segments.parse(golden, Segment(0, 3, "x", segments.checksum(golden), len(golden)))
    assert [cbor2.loads(journal_records.split(record)[1]) for record in parsed] == values


def test_a_crashed_compaction_is_completed_by_the_next(
    database: Database, objects: ObjectStore, tmp_path: Path
) -> None:
    """A fault after every step: the end state equals the fault-free run."""

    def compact(objects: ObjectStore, faults: ChosenFault) -> None:
        store = store_of(FaultyDatabase(database, faults), faulty_objects(objects, faults))
        store.compact(ADA, entries=100, margin=0)

    def start_again() -> list[Any]:
        database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
        fill(database, 260, baseline=250)
        return everything(database, objects)

    before = start_again()
    counting = ChosenFault()
    compact(open_objects("memory:"), counting)
    points = len(counting.points)
    assert points > 20
    for fail_at in range(points):
        assert start_again() == before
        fresh = open_objects(f"dir:{tmp_path / str(fail_at)}")
        with pytest.raises(Crash):
            compact(fresh, ChosenFault(fail_at))
        assert everything(database, fresh) == before
        compact(fresh, ChosenFault())
        assert everything(database, fresh) == before
        assert database.read(journals.first_hot, ADA) == 200
        assert len(fresh.list()) == 2
    print(f"{points} points covered")


def test_a_crash_at_any_point_of_a_snapshot_converges_on_retry(database: Database, objects: ObjectStore) -> None:
    """A fault after every step of a snapshot that becomes the baseline."""
    data = canonical({"state": "x" * 20_000})
    draft = SnapshotRecord("", 5, snapshots.NOW, 5, NO_MANIFEST)

    def start_again() -> None:
        database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
        database.transact(snapshots.create_world, ADA)
        database.transact(
            journals.append, ADA, [journal_records.entry(canonical(n)) for n in range(5)], expected_head=0
        )

    def commit(faults: ChosenFault) -> None:
        faulty, store = FaultyDatabase(database, faults), faulty_objects(objects, faults)
        WorldStore(faulty, store, BlobStore(faulty, store)).snapshot(ADA, data, draft, promote=True)

    start_again()
    counting = ChosenFault()
    commit(counting)
    wanted = everything(database, objects)
    for fail_at in range(len(counting.points)):
        start_again()
        with pytest.raises(Crash):
            commit(ChosenFault(fail_at))
        commit(ChosenFault())
        assert everything(database, objects) == wanted
        assert database.read(snapshots.baseline, ADA).height == 5
    print(f"{len(counting.points)} points covered")


def test_the_handle_compacts_and_lists(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        compact_through_a_handle(plane)


def compact_through_a_handle(plane: Plane) -> None:
    world = plane.world("w")
    world.create()
    world.append(list(range(200)), expected_head=0)
    world.snapshots.commit(1, height=200)
    before = world.read()
    assert world.compact(entries=50, margin=10).segments == 3
    assert [segment.end for segment in world.segments()] == [49, 99, 149]
    assert world.read() == before
    assert world.compact(entries=50, margin=10).segments == 0
