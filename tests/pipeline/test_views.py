"""Views of a data directory, of a server and of PostgreSQL."""

import fcntl
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import limits
from fastness.backends.objects import ObjectStore, open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.encryption_keys import FileKeys, new_master_key
from fastness.errors import (
    BlobNotFound,
    Busy,
    DirectoryInUse,
    EncryptionKeyMissing,
    HashMismatch,
    InvalidArgument,
    InvalidUrl,
    MigrationUnfinished,
    MissingObject,
    NotAllowed,
    NotFound,
    SchemaMismatch,
    Unreachable,
)
from fastness.handles.sync.backups import Backups
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import journals, migrations, worlds
from fastness.layers.worlds import World, WorldState, subspace
from fastness.pipeline import codec, hash_checks
from fastness.pipeline.codec import Damaged
from fastness.pipeline.config import Config
from fastness.pipeline.intake.plans import Plan
from fastness.pipeline.intake.task_payloads import INLINE_STORE, PayloadPacker
from fastness.pipeline.jobs import audit
from fastness.pipeline.journal_chunks import JournalChunk, Stores
from fastness.pipeline.logs import DamagedLines, ReadPosition, activity_rows
from fastness.pipeline.source import plans
from fastness.pipeline.source.options import parse_options
from fastness.pipeline.views import View, WorldView, manifests, open_view
from fastness.pipeline.views import server as server_views
from fastness.runtime.activity import rotation
from fastness.wire.backups import BackupBegun, BackupFile
from fastness.wire.worlds import Segment
from tests.pipeline import planes
from tests.support.forked import run_python
from tests.support.http_server import serving
from tests.support.waiting import eventually

BLOB = os.urandom(200_000)


class Together:
    """Holds each caller back until `count` of them have arrived, which needs concurrent requests."""

    def __init__(self, count: int) -> None:
        self._count, self._arrived, self._lock = count, 0, threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self._arrived += 1
            group_end = -(-self._arrived // self._count) * self._count
        eventually(lambda: self._arrived >= group_end, "concurrent requests")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def staging(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'staging'}"


def config(data: Path, **options: Any) -> Config:
    return Config(data=f"dir:{data}", lake="unused", **options)


def world_of(view: View, name: str) -> WorldView:
    found = view.world("main", name)
    assert found is not None
    return found


def rows_of(view: View, chunks: list[JournalChunk]) -> tuple[dict[int, bytes], list[Damaged]]:
    rows: dict[int, bytes] = {}
    damaged = []
    for found in codec.journal_rows(chunks, view.stores):
        if isinstance(found, Damaged):
            damaged.append(found)
        else:
            rows.update(zip(found["height"].to_pylist(), found["raw"].to_pylist(), strict=True))
    return rows, damaged


def everything(view: View, staging: str, universe: str = "main") -> dict[str, list[bytes]]:
    found = {}
    for world in view.worlds(universe):
        rows, damaged = rows_of(view, view.chunks(world, 0, staging))
        assert damaged == []
        assert sorted(rows) == list(range(world.head))
        found[world.name] = [rows[height] for height in range(world.head)]
    return found


def test_directory_view_has_every_record(data: Path, staging: str) -> None:
    built = planes.copy(data, worlds=3, entries=300)
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["main"]
        found = everything(view, staging)
        worlds = {world.name: world for world in view.worlds("main")}
    assert found == planes.truth(data)
    assert sum(map(len, found.values())) == built.entries
    assert list(worlds) == ["empty", *built.worlds]
    assert worlds["empty"].head == 0
    assert worlds["world-0000"].segments == []
    cold = worlds["world-0001"]
    assert [segment.start for segment in cold.segments] == [0, 64, 128]
    assert cold.first_hot == cold.segments[-1].end + 1 == 192
    assert cold.baseline == cold.snapshots[-1]
    assert [snapshot.height for snapshot in cold.snapshots] == [0, 111, 223]


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plane that tests only read."""
    path: Path = tmp_path_factory.mktemp("read-only") / "data"
    planes.build(path, worlds=2, entries=300)
    return path


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100, 191, 192, 250, 301])
def test_chunks_cover_the_heights_from_start_to_head(read_only: Path, staging: str, start: int) -> None:
    with open_view(config(read_only)) as view:
        world = world_of(view, "world-0001")
        chunks = view.chunks(world, start, staging)
        rows, damaged = rows_of(view, chunks)
    assert damaged == []
    assert sorted(rows) == list(range(start, world.head))
    assert sum(chunk.rows for chunk in chunks) == len(rows)


def test_hot_records_are_staged_in_bounded_chunks(data: Path, staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planes.copy(data, worlds=1, entries=300)
    for module in ("view", "chunk_stager"):
        monkeypatch.setattr(f"fastness.pipeline.views.{module}.CHUNK_ENTRIES", 100)
    with open_view(config(data)) as view:
        world = world_of(view, "world-0000")
        chunks = view.chunks(world, 0, staging)
        assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 99), (100, 199), (200, 299), (300, 300)]
        assert all(chunk.hot for chunk in chunks)
        monkeypatch.setattr("fastness.pipeline.views.chunk_stager.CHUNK_BYTES", 1_000)
        monkeypatch.setattr("fastness.pipeline.views.view.CHUNK_PAGE", 20)
        small = view.chunks(world, 0, staging)
        assert len(small) > 4
        assert rows_of(view, small) == rows_of(view, chunks)


def test_open_view_does_not_lock_the_directory_and_does_not_change(data: Path, staging: str) -> None:
    planes.copy(data, worlds=2, entries=300)
    before = planes.truth(data)
    with open_view(config(data)) as view:
        planes.extend(data, ["world-0000", "world-0001"], 500)
        with planes.opened(f"dir:{data}") as plane:
            plane.world("late").create()
            plane.world("world-0001").archive()
            plane.world("world-0000").compact(entries=64, margin=8)
        found = everything(view, staging)
    assert found == before
    with open_view(config(data)) as view:
        found = everything(view, staging)
    assert len(found["world-0000"]) == len(before["world-0000"]) + 500
    assert "late" in found


def test_view_deletes_its_folder_and_those_of_dead_processes(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    child = (
        "import os, sys; from fastness.pipeline.views import open_view; from fastness.pipeline.config import Config\n"
        "view = open_view(Config(data=sys.argv[1], lake='')); os.kill(os.getpid(), 9)"
    )
    assert run_python(["-c", child, f"dir:{data}"]).returncode == -signal.SIGKILL
    assert len(list(data.glob(".view-*"))) == 1
    with open_view(config(data)) as first:
        (folder,) = data.glob(".view-*")  # The stale one is deleted; this one is ours.
        with open_view(config(data)) as second:
            assert len(list(data.glob(".view-*"))) == 2
            assert [world.name for world in second.worlds("main")] == [world.name for world in first.worlds("main")]
        assert list(data.glob(".view-*")) == [folder]
        first.close()
        first.close()
    assert list(data.glob(".view-*")) == []


def test_views_of_one_directory_can_be_opened_concurrently(data: Path) -> None:
    planes.copy(data, worlds=2, entries=100)

    def heads(_: int) -> dict[str, int]:
        with open_view(config(data)) as view:
            return {world.name: world.head for world in view.worlds("main")}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(heads, range(16)))
    assert found == [{"empty": 0, "world-0000": 101, "world-0001": 101}] * 16
    assert list(data.glob(".view-*")) == []


def test_old_folder_without_a_lock_is_deleted(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    (data / ".view-young").mkdir()
    (data / ".view-old").mkdir()
    old = time.time() - limits.VIEW_LOCK_WAIT_SECONDS_MAX - 10
    os.utime(data / ".view-old", (old, old))
    with open_view(config(data)):
        assert (data / ".view-young").exists()
        assert not (data / ".view-old").exists()


def test_folder_that_cannot_be_deleted_is_ignored(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    (data / ".view-strange" / "lock").mkdir(parents=True)  # Like another user's: it cannot be locked.
    with open_view(config(data)) as view:
        assert [world.name for world in view.worlds("main")] == ["empty", "world-0000"]


def test_directory_in_use_is_rejected_with_advice(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    with planes.opened(f"dir:{data}"), pytest.raises(DirectoryInUse, match="--data http://HOST:PORT"):
        open_view(config(data))
    assert list(data.glob(".view-*")) == []


def test_invalid_plane_is_rejected_without_side_effects(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="There is no plane in"):
        open_view(config(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    planes.copy(data, worlds=1, entries=10)
    (data / "fastness.json").write_text('{"format": 999}')
    with pytest.raises(SchemaMismatch, match="upgrade"):
        open_view(config(data))
    for url in ("nonsense", "dir:", "ftp://host", "memory:"):
        with pytest.raises(InvalidUrl, match="not the URL of a plane"):
            open_view(Config(data=url, lake=""))


def test_view_has_only_the_selected_universes(data: Path) -> None:
    for universe in ("main", "other", "third"):
        planes.build(data, worlds=1, entries=10, universe=universe)
    with open_view(config(data, universes=("other", "unknown"))) as view:
        assert list(view.universes()) == ["other"]
    planes.leave_log(data, 3, universe="logs-only")
    with planes.opened(f"dir:{data}", universe="rotated") as plane:
        plane.activity.log("session", {"alone": True})
    (data / "activity" / "Not A Universe").mkdir()
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["logs-only", "main", "other", "rotated", "third"]
        assert len(list(view.logs("rotated"))) == 1


def test_view_lists_rotated_logs_of_universes_once(data: Path) -> None:
    """A folder with many logs takes long to list; and all steps of a job see the same universes."""
    with planes.opened(f"dir:{data}", universe="first") as plane:
        plane.activity.log("session", {"n": 1})
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["first"]
        entry = view.objects.list(manifests.FOLDER)[0].path
        view.objects.put(entry.replace("/first/", "/second/"), b"{}")
        assert list(view.universes()) == ["first"]
    with open_view(config(data)) as view:
        assert list(view.universes()) == ["first", "second"]


def test_universes_with_a_common_prefix_are_listed_once(data: Path) -> None:
    names = ["main", "main-2", "main.eu"]  # Paths sort `main-2/` before `main/`.
    for name in names:
        planes.build(data, worlds=1, entries=5, activity=3, universe=name)
    with open_view(config(data)) as view:
        assert list(view.universes()) == names


def test_deleted_world_has_no_journal_and_an_archived_one_has(data: Path) -> None:
    planes.copy(data, worlds=2, entries=100)
    with planes.opened(f"dir:{data}") as plane:
        for name in ("world-0000", "world-0001"):
            plane.world(name).archive()
        plane.world("world-0001").delete()
    with open_view(config(data)) as view:
        assert [(world.name, world.state) for world in view.worlds("main")] == [
            ("empty", "active"),
            ("world-0000", "archived"),
        ]
        assert view.world("main", "world-0001") is None
        assert view.world("main", "unknown") is None


def test_gaps_and_lost_segments_are_missing_chunks(data: Path, staging: str) -> None:
    planes.copy(data, worlds=2, entries=300)
    for height in (200, 201, 250):
        planes.remove_record(data, "world-0001", height)
    lost = planes.remove_segment(data, "world-0001", 1)
    with open_view(config(data)) as view:
        world = world_of(view, "world-0001")
        rows, damaged = rows_of(view, view.chunks(world, 0, staging))
    assert [(each.start, each.end, each.reason) for each in damaged] == [
        (*lost, "missing"),
        (200, 201, "missing"),
        (250, 250, "missing"),
    ]
    gone = {*range(lost[0], lost[1] + 1), 200, 201, 250}
    assert sorted(rows) == [height for height in range(world.head) if height not in gone]


def test_lost_index_entry_is_a_gap_up_to_the_next_segment(data: Path, staging: str) -> None:
    planes.copy(data, worlds=2, entries=300)
    with planes.opened(f"dir:{data}") as plane:
        where = World("main", "world-0001")
        plane.pairs.delete(Subspace("u", "main", "segments", where.name).key(127))
    with open_view(config(data)) as view:
        world = world_of(view, "world-0001")
        rows, damaged = rows_of(view, view.chunks(world, 0, staging))
    assert [(each.start, each.end, each.reason) for each in damaged] == [(64, 127, "missing")]
    assert len(rows) == world.head - 64


def test_unknown_records_do_not_affect_others(data: Path, staging: str) -> None:
    planes.copy(data, worlds=2, entries=300)
    where = World("main", "world-0001")
    newer = msgspec.msgpack.encode({"made by": "a newer version"})

    def write(tx: Transaction) -> None:
        tx.put(Subspace("u", "main", "segments", "world-0001").key(127), newer)
        tx.put(subspace(where).key("snapshot", 111), newer)
        tx.put(subspace(where).key("meta"), msgspec.msgpack.encode(["frozen", 0]))

    with planes.opened(f"dir:{data}") as plane:
        plane.transact(write)
    with open_view(config(data)) as view:
        world = world_of(view, "world-0001")
        rows, damaged = rows_of(view, view.chunks(world, 0, staging))
    assert world.state == "unknown"
    assert [snapshot.height for snapshot in world.snapshots] == [0, 223]
    assert [segment.start for segment in world.segments] == [0, 128]
    assert [(each.start, each.end, each.reason) for each in damaged] == [(64, 127, "missing")]
    assert len(rows) == world.head - 64


def test_world_without_a_baseline_is_listed(data: Path) -> None:
    planes.copy(data, worlds=1, entries=100)
    with planes.opened(f"dir:{data}") as plane:
        plane.transact(lambda tx: tx.delete(subspace(World("main", "world-0000")).key("baseline")))
    with open_view(config(data)) as view:
        world = view.world("main", "world-0000")
        assert world.baseline is None
        assert world.head == 101


def test_blobs_are_verified_in_both_stores(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    with planes.opened(f"dir:{data}") as plane:
        small = plane.blobs.put(b"small")
        large = plane.blobs.put(b"x" * (limits.BLOB_INLINE_BYTES_MAX + 1))
        lost = plane.blobs.put(b"y" * (limits.BLOB_INLINE_BYTES_MAX + 1))
    with open_view(config(data)) as view:
        assert view.blob("main", small) == b"small"
        assert len(view.blob("main", large)) == limits.BLOB_INLINE_BYTES_MAX + 1
        with pytest.raises(BlobNotFound):
            view.blob("main", "0" * 64)
        next((data / "objects" / "cas" / "main" / "sha256").glob(lost + "*")).unlink()
        with pytest.raises(MissingObject):
            view.blob("main", lost)
        next((data / "objects" / "cas" / "main" / "sha256").glob(large + "*")).write_bytes(b"other")
        with pytest.raises(HashMismatch):
            view.blob("main", large)


def test_session_logs_are_read_in_place_or_staged(data: Path, staging: str) -> None:
    planes.copy(data, worlds=1, entries=10, activity=30)
    left = planes.leave_log(data, 5, garbled=2, torn=True)
    with open_view(config(data)) as view:
        files = list(view.logs("main"))
        left.unlink()  # The view has its own hard links.
        chunks = [view.log_chunk(file, staging) for file in files]
        found = list(activity_rows(chunks, view.stores))
    assert sum(file.is_rotated for file in files) == 3
    assert sum(batch.num_rows for batch in found if hasattr(batch, "num_rows")) == 30 + 3
    damaged = [(each.start, each.end, each.reason) for each in found if isinstance(each, DamagedLines)]
    assert damaged == [(2, 2, "malformed"), (4, 4, "torn")]
    assert len([each for each in found if isinstance(each, ReadPosition)]) == 4


def test_log_offset_stays_valid_after_rotation(data: Path, staging: str) -> None:
    planes.copy(data, worlds=1, entries=10)
    planes.leave_log(data, 5)
    with open_view(config(data)) as view:
        (file,) = view.logs("main")
        (position,) = [
            each
            for each in activity_rows([view.log_chunk(file, staging)], view.stores)
            if isinstance(each, ReadPosition)
        ]
        assert view.log_body(file)[: position.offset].count(b"\n") == 6
    with planes.opened(f"dir:{data}") as plane:
        plane.activity.log("other", {"wakes": "the log"}, kind="metrics")
    with open_view(config(data)) as view:
        rotated = next(each for each in view.logs("main") if each.id == file.id)
        assert rotated.is_rotated
        chunk = view.log_chunk(rotated, staging, start=position.offset, n=position.n)
        assert list(activity_rows([chunk], view.stores)) == [position]


def test_log_whose_body_was_stored_in_part_is_read_from_its_local_file(data: Path, staging: str) -> None:
    planes.copy(data, worlds=1, entries=10)
    kept = rotation.copy(planes.leave_log(data, 5), open_objects(f"dir:{data / 'objects'}"))
    assert kept is not None
    body = data / "objects" / kept.path
    body.write_bytes(body.read_bytes()[: kept.bytes // 2])
    next(data.glob("objects/activity-manifest/main/*")).unlink()
    with open_view(config(data)) as view:
        (file,) = view.logs("main")
        chunk = view.log_chunk(file, staging)
        assert sum(batch.num_rows for batch in activity_rows([chunk], view.stores) if hasattr(batch, "num_rows")) == 5
        assert view.rotated_logs("main") == {}


def test_log_rotated_after_listing_is_found(data: Path, staging: str) -> None:
    planes.copy(data, worlds=1, entries=10)
    planes.leave_log(data, 5)
    with open_view(config(data)) as view:
        (file,) = view.logs("main")
        assert not file.is_rotated
        assert view.objects is not None
        assert rotation.rotate(Path(file.path), view.objects)  # PostgreSQL nodes do so at any time.
        chunk = view.log_chunk(file, staging)
        assert sum(batch.num_rows for batch in activity_rows([chunk], view.stores) if hasattr(batch, "num_rows")) == 5
        (rotated,) = view.logs("main")
        (data / "objects" / rotated.path).unlink()
        assert view.log_chunk(file, staging) == chunk  # Reading it reports it as missing.
        next(data.glob("objects/activity-manifest/main/*")).unlink()
        with pytest.raises(MissingObject, match="list the files again"):
            view.log_chunk(file, staging)


def test_manifests_are_fetched_concurrently_and_cached(data: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    with planes.opened(f"dir:{data}") as plane:
        for n in range(40):
            plane.activity.log(f"session-{n}", {"n": n})
    asked: list[str] = []
    both = Together(2)

    class Counting(ObjectStore):
        def get(self, path: str) -> bytes:
            asked.append(path)
            both.wait()
            return super().get(path)

    with open_view(config(data)) as view:
        view.objects = Counting(view.objects._store)
        first = list(view.logs("main"))
        assert len(first) == len(asked) == 40
        assert list(view.logs("main")) == first
        assert len(asked) == 40
    with open_view(config(data)) as view:
        view.objects = Counting(view.objects._store)
        assert list(view.logs("main")) == first
        assert len(asked) == 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_server_view_has_every_record_of_a_running_server(data: Path, staging: str, cache: Path) -> None:
    planes.copy(data, worlds=3, entries=300, messages=50, mails=20, entities=5, activity=20)
    planes.leave_log(data, 5)
    before = planes.truth(data)
    with serving(f"dir:{data}") as server:
        with open_view(Config(data=server.url, lake="unused")) as view:
            with fastness.connect(server.url) as plane:
                plane.world("world-0000").append([{"late": True}], expected_head=len(before["world-0000"]))
                plane.world("late").create()
                plane.activity.log("late", {"late": True})
            assert everything(view, staging) == before
            assert view.objects_url is None
            rows = activity_rows([view.log_chunk(file, staging) for file in view.logs("main")], view.stores)
            records = [
                batch["session"].to_pylist() for batch in rows if not isinstance(batch, DamagedLines | ReadPosition)
            ]
            counts = Counter(session for sessions in records for session in sessions)
            assert counts["session-0"] + counts["session-1"] + counts["session-2"] == 20
            assert counts["crashed"] == 5
            assert counts["late"] == 0
            baseline = view.world("main", "world-0001").baseline
            assert len(cbor2.loads(view.blob("main", baseline.snapshot_ref))) == 32
            assert len(list(view.messages("main"))) > 0
            (folder,) = cache.rglob(".view-*")
            assert len(list(data.glob(".checkpoint-*"))) == 1
        assert list(data.glob(".checkpoint-*")) == []
        assert not folder.exists()
        with open_view(Config(data=server.url, lake="unused")) as view:
            assert len(everything(view, staging)["world-0000"]) == len(before["world-0000"]) + 1


def test_segments_are_fetched_concurrently(data: Path, staging: str, cache: Path) -> None:
    planes.copy(data, worlds=2, entries=300)
    both = Together(2)
    with serving(f"dir:{data}") as server, open_view(Config(data=server.url, lake="unused")) as view:
        world = world_of(view, "world-0001")
        first = view.chunks(msgspec.structs.replace(world, head=world.segments[1].end + 1), 0, staging)
        get = view.objects.get

        def together(path: str) -> bytes:
            both.wait()
            return get(path)

        view.objects.get = together  # type: ignore[method-assign]
        assert view.chunks(msgspec.structs.replace(world, head=world.segments[1].end + 1), 0, staging) == first
    assert [(chunk.start, chunk.staged) for chunk in first] == [(0, True), (64, True)]


def test_segments_of_several_worlds_are_fetched_concurrently(data: Path, staging: str, cache: Path) -> None:
    planes.copy(data, worlds=5, entries=100)  # One segment each, except the first.
    source = parse_options({"url": "http://unused", "staging": staging})
    with serving(f"dir:{data}") as server, open_view(Config(data=server.url, lake="unused")) as view:
        one_by_one = [chunk for world in view.worlds("main") for chunk in view.chunks(world, 0, staging)]
        assert [chunk.world for chunk in one_by_one if not chunk.hot] == [f"world-000{n}" for n in range(1, 5)]
        all_four, get = Together(4), view.objects.get

        def together(path: str) -> bytes:
            all_four.wait()
            return get(path)

        view.objects.get = together  # type: ignore[method-assign]
        located = (chunk for world in view.worlds("main") for chunk in view.locate_chunks(world, 0, staging))
        assert list(view.make_readable(located, staging)) == one_by_one
        wanted = [(chunk.world, chunk.start, chunk.path) for chunk in one_by_one]
        partitions = (
            plans.plan_partitions(view, source),
            plans.partitions_between(view, source, {}, plans.heads(view)),
        )
        for found in partitions:
            chunks = [chunk for partition in found for chunk in partition.chunks]
            assert [(chunk.world, chunk.start, chunk.path) for chunk in chunks] == wanted
            assert all(chunk.staged and chunk.store == source.staging for chunk in chunks)
        for packer in (None, PayloadPacker(view.stores, data.parent / "packed")):
            batches = list(_plan(view, f"{staging}/batches", packer).batches())
            chunks = [chunk for batch in batches for item in batch.items for chunk in item.chunks]
            assert [(chunk.world, chunk.start, chunk.path) for chunk in chunks] == wanted
            stores = {INLINE_STORE} if packer else {batch.staging for batch in batches}
            assert {chunk.store for chunk in chunks} == stores
        assert not [path for path in (data.parent / "packed").rglob("*") if path.is_file()]
        lake: Any = _EmptyLakeJournal()
        audit_batches = list(audit._batches(view, f"{staging}/audit", lake, 1 << 30, None))
        chunks = [chunk for batch in audit_batches for each in batch.audit_inputs for chunk in each.chunks]
        assert [(chunk.world, chunk.start, chunk.path) for chunk in chunks] == wanted
        assert {chunk.store for chunk in chunks} == {f"{staging}/audit/batch-0"}


def test_summaries_of_worlds_say_the_same_as_the_worlds(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.pipeline.views.view.PAGE_ITEMS", 3)
    names = [f"w{n}" for n in range(8)]

    def fill(tx: Transaction) -> None:
        for n, name in enumerate(names):
            world = World("main", name)
            worlds.create(tx, world)
            if n % 3:
                journals.append(tx, world, [b"record"] * n, expected_head=0)
        for name, starts in (("w2", (0, 1)), ("w5", (0, 2)), ("w7", (0,))):
            for start in starts:
                record = Segment(start, start, f"{name}/{start}", "00", 1)
                tx.put(Subspace("u", "main", "segments", name).key(start), msgspec.msgpack.encode(record))
        tx.put(Subspace("u", "main", "segments", "w6").key(4), msgspec.msgpack.encode("of a newer version"))
        tx.put(subspace(World("main", "w4")).key("meta"), msgspec.msgpack.encode("of a newer version"))
        tx.put(Subspace("u", "other", "segments", "w9").key(0), b"")

    database.transact(fill)
    for state in (WorldState.ARCHIVED, WorldState.DELETING):
        database.transact(worlds.change_state, World("main", "w1"), state)
    view = View(database, objects=None, objects_url=None, logs=(), stores=Stores(), store_id="none")
    summaries = {summary.name: summary for summary in view.world_summaries("main")}
    assert list(summaries) == names == list(view.world_names("main"))
    assert [name for name, summary in summaries.items() if summary.incarnation is None] == ["w4", "w6"]
    assert view.world("main", "w1") is None
    for name in names:
        world = view.world("main", name)
        if world is not None:
            cold_below = max((segment.end + 1 for segment in world.segments), default=0)
            assert (summaries[name].head, summaries[name].cold_below) == (world.head, cold_below)
            assert summaries[name].incarnation in (None, world.incarnation)


def _plan(view: View, staging: str, packer: PayloadPacker | None) -> Plan:
    return Plan(
        view,
        staging,
        heights=lambda watermark: 0,
        segment_checks=lambda watermark: 0,
        rewound_sources=set(),
        diverged_worlds=set(),
        batch_bytes=1 << 30,
        packer=packer,
    )


class _EmptyLakeJournal:
    """An empty lake."""

    def expected(self, universe: str, world: str) -> tuple[int, list[tuple[int, int]]]:
        return 0, []


def test_sst_files_are_fetched_once(data: Path, staging: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planes.copy(data, worlds=2, entries=300)
    with RocksDatabase(data / "kv") as database:
        database.flush_tables()
    sent: list[tuple[str, Any]] = []
    monkeypatch.setattr(Backups, "open", _recording(Backups.open, sent))
    with serving(f"dir:{data}") as server:
        for _ in range(2):
            sent.clear()
            with open_view(Config(data=server.url, objects=f"dir:{data / 'objects'}", lake="unused")) as view:
                assert view.objects_url is not None
                assert len(everything(view, staging)["world-0001"]) == 301
        tables = [length for path, length in sent if path.endswith(".sst")]
    assert tables
    assert max(tables) <= 4_096


def test_cached_sst_file_of_another_plane_is_not_used(data: Path, staging: str, cache: Path, tmp_path: Path) -> None:
    planes.copy(data, worlds=2, entries=300)
    with RocksDatabase(data / "kv") as database:
        database.flush_tables()
    with serving(f"dir:{data}") as server:
        with open_view(Config(data=server.url, lake="unused")) as view:
            everything(view, staging)
        (tables,) = cache.rglob("tables")
        for table in tables.iterdir():
            table.write_bytes(table.read_bytes()[:-3_000] + bytes(3_000))
        with open_view(Config(data=server.url, lake="unused")) as view:
            assert len(everything(view, staging)["world-0001"]) == 301
    ends = set()
    for name in ("one", "two"):
        with RocksDatabase(tmp_path / name) as database:
            database.transact(lambda tx: tx.put(b"key", b"value"))
            database.flush_tables()
        (table,) = (tmp_path / name).glob("*.sst")
        ends.add(table.read_bytes()[-4_096:])
    assert len(ends) == 2  # The same pairs in two key spaces.


@pytest.mark.parametrize(
    "damage", ["flip", "delete", *(pytest.param(each, marks=pytest.mark.rotating) for each in ("truncate", "empty"))]
)
def test_damaged_cache_is_fetched_again(
    data: Path, staging: str, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    planes.copy(data, worlds=2, entries=300)
    with RocksDatabase(data / "kv") as database:
        database.flush_tables()
    sent: list[tuple[str, Any]] = []
    monkeypatch.setattr(Backups, "open", _recording(Backups.open, sent))
    config = Config(data="", lake="unused")
    with serving(f"dir:{data}") as server:
        config = msgspec.structs.replace(config, data=server.url, objects=f"dir:{data / 'objects'}")
        with open_view(config) as view:
            before = everything(view, staging)
        (tables,) = cache.rglob("tables")
        for table in tables.iterdir():
            content = bytearray(table.read_bytes())
            for n in range(0, len(content) - 4_096, 100):  # In every block; the end of a file is compared anyway.
                content[n] ^= 1
            if damage == "delete":
                table.unlink()
            else:
                table.write_bytes({"flip": bytes(content), "truncate": bytes(content[:-1]), "empty": b""}[damage])
        for fetched in (True, False):  # The second view uses the repaired cache.
            sent.clear()
            with open_view(config) as view:
                assert everything(view, staging) == before
            assert any(length > 4_096 for path, length in sent if path.endswith(".sst")) == fetched


def test_concurrent_views_of_one_server_share_the_cache(
    data: Path, staging: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes.copy(data, worlds=2, entries=300)
    with RocksDatabase(data / "kv") as database:
        database.flush_tables()
    link, cleared = server_views._link, []

    def clearing(source: Path, target: Path) -> None:
        link(source, target)
        if target.parent.name == "tables":  # Another view deletes files it does not know.
            target.unlink()
            cleared.append(target)

    with serving(f"dir:{data}") as server:
        monkeypatch.setattr(server_views, "_link", clearing)
        with open_view(Config(data=server.url, lake="unused")) as view:
            assert len(everything(view, staging)["world-0001"]) == 301
    assert cleared


@pytest.mark.parametrize(
    "path",
    [
        "activity/../../../owned",
        "keyspace/../../owned",
        pytest.param("keyspace//owned.sst", marks=pytest.mark.rotating),
    ],
)
def test_server_cannot_write_outside_the_view(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    planes.copy(data, worlds=1, entries=10)
    files = Backups.files
    monkeypatch.setattr(Backups, "files", lambda self, name: [BackupFile(path, 0), *files(self, name)])
    with serving(f"dir:{data}") as server, pytest.raises(InvalidArgument, match="owned"):
        open_view(Config(data=server.url, lake="unused"))
    assert list(cache.rglob("owned*")) == list(cache.rglob(".view-*")) == []


def test_checkpoint_removed_during_fetch_fails_the_view(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes.copy(data, worlds=1, entries=10)
    log = planes.leave_log(data, 5)
    opened = Backups.open

    def ending(self: Backups, id: str, path: str, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        if path.startswith("activity/"):
            self.end(id)
        return opened(self, id, path, start=start, length=length)

    monkeypatch.setattr(Backups, "open", ending)
    with log.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # It is being written, so the server does not rotate it.
        with serving(f"dir:{data}") as server, pytest.raises(NotFound):
            open_view(Config(data=server.url, lake="unused"))


def _recording(
    opened: Callable[..., Iterator[bytes]], sent: list[tuple[str, int | None]]
) -> Callable[..., Iterator[bytes]]:
    def recording(self: Backups, id: str, path: str, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        sent.append((path, length))
        return opened(self, id, path, start=start, length=length)

    return recording


def test_server_view_needs_a_token_that_allows_backups(data: Path, cache: Path) -> None:
    planes.copy(data, worlds=1, entries=10)
    with serving(f"dir:{data}", tokens=True) as server:
        with pytest.raises(NotAllowed):
            open_view(Config(data=server.url, lake="unused", token="unknown"))
        with open_view(Config(data=server.url, lake="unused", token="all")) as view:
            assert list(view.universes()) == ["main"]


def test_damage_is_reported_through_a_server(data: Path, staging: str, cache: Path) -> None:
    planes.copy(data, worlds=2, entries=300)
    lost = planes.remove_segment(data, "world-0001", 0)
    flipped = planes.flip_byte(data, "world-0001", 1)
    with serving(f"dir:{data}") as server, open_view(Config(data=server.url, lake="unused")) as view:
        world = world_of(view, "world-0001")
        rows, damaged = rows_of(view, view.chunks(world, 0, staging))
    assert [(each.start, each.end, each.reason) for each in damaged] == [(*lost, "missing"), (*flipped, "checksum")]
    assert len(rows) == world.head - 128


def test_removed_checkpoint_is_not_damage(data: Path, staging: str, cache: Path) -> None:
    planes.copy(data, worlds=2, entries=300, activity=10)
    with serving(f"dir:{data}") as server, open_view(Config(data=server.url, lake="unused")) as view:
        rotated = next(file for file in view.logs("main") if file.is_rotated)
        (checkpoint,) = data.glob(".checkpoint-*")
        shutil.rmtree(checkpoint)  # The server does so after an hour without use.
        with pytest.raises(Unreachable, match="removed"):
            view.chunks(world_of(view, "world-0001"), 0, staging)
        with pytest.raises(Unreachable, match="removed"):
            view.log_chunk(rotated, staging)


def test_view_waits_for_a_free_checkpoint_of_the_server(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes.copy(data, worlds=1, entries=10)
    begin, refused = Backups.begin, []

    with serving(f"dir:{data}") as server, fastness.connect(server.url) as plane:
        others = [plane.backups.begin().id for _ in range(limits.CHECKPOINTS_MAX)]

        def ending(self: Backups) -> BackupBegun:
            try:
                return begin(self)
            except Busy as error:
                refused.append(error)
                plane.backups.end(others.pop())  # Another backup ends.
                raise

        monkeypatch.setattr(Backups, "begin", ending)
        with open_view(Config(data=server.url, lake="unused")) as view:
            assert list(view.universes()) == ["main"]
        assert len(refused) == 1
        monkeypatch.setattr(Backups, "begin", begin)
        others.append(plane.backups.begin().id)
        monkeypatch.setattr(server_views, "VIEW_LOCK_WAIT_SECONDS_MAX", 0.0)
        with pytest.raises(Busy, match="in progress"):
            open_view(Config(data=server.url, lake="unused"))


def test_postgres_view_has_every_record(postgres_url: str, tmp_path: Path, staging: str) -> None:
    objects = f"dir:{tmp_path / 'objects'}"
    built = planes.build(tmp_path / "unused", worlds=2, entries=300, url=postgres_url, objects=objects, messages=20)
    with open_view(Config(data=postgres_url, lake="unused", objects=objects)) as view:
        found = everything(view, staging)
        assert sum(map(len, found.values())) == built.entries
        with fastness.open(postgres_url, objects=objects) as plane:
            world = plane.world("world-0001")
            assert [record.height for record in world.read(limit=1_000)] == list(range(301))
            seen = world_of(view, "world-0001")
            # Records that were hot when the world was read may be cold by now.
            world.snapshots.commit(
                {}, height=290, promote=True, receipt_horizon_height=290, manifest_hash=seen.baseline.manifest_hash
            )
            assert world.compact(entries=64, margin=8).segments == 1
        rows, damaged = rows_of(view, view.chunks(seen, 0, staging))
        assert damaged == []
        assert sorted(rows) == list(range(301))
        assert len(list(view.messages("main"))) > 0


def test_view_does_not_create_a_plane_in_postgres(postgres_url: str) -> None:
    with pytest.raises(NotFound):
        open_view(Config(data=postgres_url, lake="unused"))
    with pytest.raises(NotFound):
        open_view(Config(data=postgres_url, lake="unused"))


def test_missing_object_store_option_is_reported(postgres_url: str, tmp_path: Path, staging: str) -> None:
    objects = f"dir:{tmp_path / 'objects'}"
    planes.build(tmp_path / "unused", worlds=2, entries=300, url=postgres_url, objects=objects)
    with open_view(Config(data=postgres_url, lake="unused")) as view:
        view.chunks(world_of(view, "world-0000"), 0, staging)
        with pytest.raises(InvalidArgument, match="--objects"):
            view.chunks(world_of(view, "world-0001"), 0, staging)


def test_directory_view_can_use_another_object_store(data: Path, tmp_path: Path, staging: str) -> None:
    elsewhere = f"dir:{tmp_path / 'elsewhere'}"
    planes.build(data, worlds=2, entries=300, objects=elsewhere)
    with open_view(config(data, objects=elsewhere)) as view:
        found = everything(view, staging)
    assert len(found["world-0001"]) == 301
    assert not (data / "objects").exists()


def test_unfinished_migration_is_rejected(data: Path) -> None:
    fastness.open(f"dir:{data}").close()
    with RocksDatabase(data / "kv") as database:
        database.transact(migrations.begin, "dir:elsewhere")
    with pytest.raises(MigrationUnfinished, match="dir:elsewhere"):
        open_view(config(data))
    with RocksDatabase(data / "kv"):  # It is closed.
        pass


def encrypt(data: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypt everything in the directory. After that the environment names no key file."""
    keys.write_text(f"{new_master_key('first')}\n")
    keys.chmod(0o600)
    with fastness.open(f"dir:{data}", encryption=FileKeys(keys)) as plane:
        plane.encryption.enable("main")
        plane.encryption.rewrite("main")
    monkeypatch.delenv("FASTNESS_ENCRYPTION_KEY_FILE", raising=False)


def check_view(view: View, staging: str, truth: dict[str, list[bytes]], blob: str) -> None:
    """Everything can be read, and what executors read without the key."""
    assert everything(view, staging) == truth
    assert view.blob("main", blob) == BLOB
    assert view.blob("main", view.world("main", "world-0001").baseline.snapshot_ref)
    assert view.objects is not None
    assert view.objects_url is None
    path = next(each.path for each in hash_checks.blob_checks(view, "main", ()) if each.blob == blob)
    check = hash_checks.Check(universe="main", subject="", affects="", path=path, size=len(BLOB), sha256=blob)
    assert hash_checks.verify(check, view.objects) is None
    assert b"".join(view.objects.open(path, 70_000, 100_000)) == BLOB[70_000:170_000]


def test_views_read_encrypted_universes_with_the_master_key(
    data: Path, staging: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes.copy(data, worlds=3, entries=300, messages=50)
    with fastness.open(f"dir:{data}") as plane:
        blob = plane.blobs.put(BLOB)
        plane.world("world-0001").compact(entries=100, margin=5)
    truth = planes.truth(data)
    with open_view(config(data)) as view:
        messages = list(view.messages("main"))
    keys = tmp_path / "keys"
    encrypt(data, keys, monkeypatch)
    assert not [path for path in (data / "objects").rglob("*") if path.is_file() and BLOB[:64] in path.read_bytes()]
    with pytest.raises(EncryptionKeyMissing, match="--encryption-key-file FILE"):
        open_view(config(data))
    with open_view(config(data, encryption_key_file=str(keys))) as view:
        check_view(view, staging, truth, blob)
        assert list(view.messages("main")) == messages
        assert view.objects is not None
        (check,) = (each for each in hash_checks.blob_checks(view, "main", ()) if each.blob == blob)
        assert isinstance(check, hash_checks.Check)
        stored = data / "objects" / check.path
        whole = stored.read_bytes()
        stored.write_bytes(whole[:-1] + bytes((whole[-1] ^ 1,)))
        assert "cannot be decrypted" in hash_checks.verify(check, view.objects).detail
        stored.write_bytes(whole)
    with open_view(config(data, encryption_key_file=str(keys), universes=("other",))) as view:
        assert view.objects_url is not None, "executors read plain universes themselves"
    resources = ExitStack()
    with monkeypatch.context() as environment:
        environment.setenv("FASTNESS_ENCRYPTION_KEY_FILE", str(keys))
        server = resources.enter_context(serving(f"dir:{data}"))
    with resources:
        with pytest.raises(EncryptionKeyMissing):
            open_view(Config(data=server.url, lake="unused"))
        for objects in (None, f"dir:{data / 'objects'}"):
            given = Config(data=server.url, lake="unused", objects=objects, encryption_key_file=str(keys))
            with open_view(given) as view:
                check_view(view, staging, truth, blob)
