"""Backups and health checks of a running plane."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import fastness
from fastness import Plane
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy, InvalidArgument, NotFound, Unreachable, Unsupported
from fastness.handles.sync.backups import _lines
from fastness.kv import Subspace
from fastness.kv.formats import FORMAT
from fastness.limits import CHECKPOINT_IDLE_SECONDS, CHECKPOINTS_MAX
from fastness.runtime.maintenance.checkpoints import LineStream
from fastness.runtime.maintenance.scan import names, universes
from fastness.wire.backups import Line

LARGE = b"large" * 10_000


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A plane with data of every kind."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append(list(range(100)), expected_head=0)
        manifest = world.snapshots.baseline().manifest_hash
        world.snapshots.commit({"n": 1}, height=100, promote=True, receipt_horizon_height=100, manifest_hash=manifest)
        assert world.compact(entries=16, margin=10).segments == 5
        plane.blobs.put(LARGE)
        plane.blobs.put(b"small")
        plane.queue("jobs").put_many(range(10))
        plane.activity.log("s", {"a": 1})
        plane.activity.end("s")
        yield plane


def checkpoints(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data").glob(".checkpoint-*"))


def test_a_backup_contains_the_key_space_and_every_referenced_object(plane: Plane, tmp_path: Path) -> None:
    checkpoint = plane.backups.begin()
    assert (checkpoint.data_format, checkpoint.version) == (FORMAT, fastness.__version__)
    files = {file.path: file for file in plane.backups.files(checkpoint.id)}
    digest = hashlib.sha256(LARGE).hexdigest()
    assert [file.sha256 for path, file in files.items() if path.startswith("objects/cas/main/sha256/")] == [digest]
    assert len([path for path in files if path.startswith("objects/segments/main/ada/")]) == 5
    assert [path for path in files if path.startswith("objects/activity/")]
    assert {"keyspace/CURRENT"} <= files.keys()
    for path, file in files.items():
        data = b"".join(plane.backups.open(checkpoint.id, path))
        assert len(data) == file.size
        assert file.sha256 in (None, hashlib.sha256(data).hexdigest())
        assert b"".join(plane.backups.open(checkpoint.id, path, start=3, length=4)) == data[3:7]
    assert plane.backups.end(checkpoint.id) is True
    assert plane.backups.end(checkpoint.id) is False
    assert checkpoints(tmp_path) == []


def test_a_backup_is_a_snapshot_and_does_not_change(plane: Plane, tmp_path: Path) -> None:
    checkpoint = plane.backups.begin()
    before = {
        file: b"".join(plane.backups.open(checkpoint.id, file.path)) for file in plane.backups.files(checkpoint.id)
    }
    plane.queue("jobs").purge()
    plane.queue("later").put(1)
    plane.blobs.put(LARGE * 2)
    for number in range(3):
        plane.transact(lambda tx, number=number: [tx.put(b"%d %d" % (number, n), bytes(1_000)) for n in range(2_000)])
        plane._transport.services.database.flush_tables()  # type: ignore[attr-defined]
    after = {
        file: b"".join(plane.backups.open(checkpoint.id, file.path)) for file in plane.backups.files(checkpoint.id)
    }
    assert {file: data for file, data in after.items() if "activity" not in file.path} == {
        file: data for file, data in before.items() if "activity" not in file.path
    }
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, data in before.items():
        if file.path.startswith("keyspace/"):
            (copy / file.path.removeprefix("keyspace/")).write_bytes(data)
    with RocksDatabase(copy) as database:
        [universe] = universes(database)
        assert list(names(database, Subspace("u", universe, "q"))) == ["jobs"]


def test_logs_rotated_during_a_backup_are_in_the_backup(plane: Plane) -> None:
    plane.activity.log("open", {"a": 1})
    plane.activity.read()  # Writes buffered records.
    checkpoint = plane.backups.begin()
    [path] = [file.path for file in plane.backups.files(checkpoint.id) if "_open_" in file.path]
    assert path.startswith("activity/main/")
    plane.activity.end("open")
    assert b'"a":1' in b"".join(plane.backups.open(checkpoint.id, path))


def test_backups_are_limited_and_idle_ones_expire(plane: Plane, tmp_path: Path) -> None:
    ids = [plane.backups.begin().id for _ in range(CHECKPOINTS_MAX)]
    with pytest.raises(Busy, match="in progress"):
        plane.backups.begin()
    list(plane.backups.examine())  # Checks are not limited, and leave no checkpoint.
    assert len(checkpoints(tmp_path)) == CHECKPOINTS_MAX
    idle, used = checkpoints(tmp_path)[:2]
    long_ago = idle.stat().st_mtime - CHECKPOINT_IDLE_SECONDS - 1
    for folder in (idle, used):
        os.utime(folder, (long_ago, long_ago))
    list(plane.backups.files(used.name.removeprefix(".checkpoint-")))
    plane.backups.begin()
    assert not idle.exists()
    assert used.exists()
    assert len(ids) == len(checkpoints(tmp_path)) == CHECKPOINTS_MAX


def test_a_backup_continues_after_the_plane_is_reopened(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.blobs.put(LARGE)
        checkpoint = plane.backups.begin()
        first = list(plane.backups.files(checkpoint.id))
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        assert [file for file in plane.backups.files(checkpoint.id) if "activity" not in file.path] == [
            file for file in first if "activity" not in file.path
        ]


@pytest.mark.parametrize("id", ["", "x", "../kv", "..", "a/b", "0" * 400, "0" * 16])
def test_an_unknown_backup_is_not_found(plane: Plane, id: str) -> None:
    for read in (lambda: plane.backups.files(id), lambda: plane.backups.open(id, "keyspace/CURRENT")):
        with pytest.raises(NotFound, match="begin another"):
            read()
    if id == "0" * 16:
        assert plane.backups.end(id) is False
    else:
        with pytest.raises(NotFound, match="is not a backup id"):
            plane.backups.end(id)


@pytest.mark.parametrize("path", ["", "kv/CURRENT", "fastness.json", "keyspace/../../fastness.json", "objects/../x"])
def test_only_files_of_a_backup_can_be_read(plane: Plane, path: str) -> None:
    checkpoint = plane.backups.begin()
    with pytest.raises((InvalidArgument, NotFound)):
        list(plane.backups.open(checkpoint.id, path))
    with pytest.raises(NotFound, match="does not exist"):
        plane.backups.open(checkpoint.id, "keyspace/none")


def test_backups_need_a_directory(postgres_url: str) -> None:
    for url in ("memory:", postgres_url):
        with fastness.open(url) as plane:
            for ask in (plane.backups.begin, plane.backups.examine, lambda: plane.backups.files("0" * 16)):
                with pytest.raises(Unsupported, match="pg_dump"):
                    ask()


def test_the_async_plane_supports_backups(tmp_path: Path) -> None:
    async def use() -> None:
        async with fastness.open_async(f"dir:{tmp_path / 'data'}") as plane:
            await plane.blobs.put(LARGE)
            checkpoint = await plane.backups.begin()
            async for file in await plane.backups.files(checkpoint.id):
                parts = [part async for part in await plane.backups.open(checkpoint.id, file.path)]
                assert len(b"".join(parts)) == file.size
            seen = [each async for each in await plane.backups.examine(deep=True)]
            assert {each.name for each in seen} == {"keys", "blobs", "worlds", "messages", "session logs"}
            assert await plane.backups.end(checkpoint.id)

    asyncio.run(use())
    assert checkpoints(tmp_path) == []


# Health checks.


def test_health_checks_run_on_a_snapshot_of_a_running_plane(plane: Plane, tmp_path: Path) -> None:
    """Without a snapshot, counters and messages would differ by the puts between two reads."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            plane.queue("busy").put(number)
            with plane.queue("busy").receive() or plane.queue("jobs").receive():
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            assert [each.finding for each in plane.backups.examine(deep=True) if each.finding is not None] == []
    finally:
        stop.set()
        writer.join()
    assert checkpoints(tmp_path) == []


def test_health_checks_find_damage(plane: Plane, tmp_path: Path) -> None:
    body = next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*"))
    body.write_bytes(LARGE[::-1])
    for segment in (tmp_path / "data" / "objects" / "segments").rglob("*.log"):
        segment.unlink()
    found = [each.finding for each in plane.backups.examine() if each.finding is not None]
    assert [each.what for each in found if each.where.startswith("blob")] == ["its content does not match its hash"]
    assert len([each for each in found if "is not in the object store" in each.what]) == 5


def test_a_world_deleted_during_a_check_is_not_damage(plane: Plane) -> None:
    seen = plane._transport.backups._checkpoints.run_checks(deep=False)  # type: ignore[attr-defined]
    lines = seen._lines
    assert next(line for line in lines if line.seen is not None and line.seen.name == "blobs").seen is not None
    plane.world("ada").archive()
    plane.world("ada").delete()
    assert [line.seen.finding for line in lines if line.seen is not None and line.seen.finding is not None] == []


def test_an_interrupted_check_leaves_no_checkpoint(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.runtime.maintenance.checkpoints.STREAMED_LINES_MAX", 1)
    listing = plane.backups.examine()
    assert isinstance(listing, Generator)
    next(listing)
    assert len(checkpoints(tmp_path)) == 1
    listing.close()
    assert checkpoints(tmp_path) == []


def test_closing_a_list_waits_for_the_page_in_progress() -> None:
    checkpoint, go, ended = threading.Event(), threading.Event(), threading.Event()

    def making() -> Iterator[Line]:
        try:
            yield Line()
            checkpoint.set()
            assert go.wait(60)
            yield Line()
            yield Line()
        finally:
            ended.set()

    lines = LineStream(making())  # type: ignore[arg-type]
    thread = threading.Thread(target=lines.page)
    thread.start()
    assert checkpoint.wait(60)
    lines.close()
    assert not ended.is_set()
    go.set()
    thread.join()
    assert ended.is_set()


def test_a_list_without_its_end_marker_raises() -> None:
    whole = [b'{"file":{"path":"a","size":1}}\n{"fi', b'le":{"path":"b","size":2}}\n{}\n', b'{"end":true}\n']
    assert [line.file.path for line in _lines(iter(whole)) if line.file is not None] == ["a", "b"]
    with pytest.raises(Unreachable, match="before its end"):
        list(_lines(iter(whole[:-1])))
    problem = b'{"problem":{"code":"not_found","title":"t","status":404,"detail":"gone"}}\n'
    with pytest.raises(NotFound, match="gone"):
        list(_lines(iter([problem])))
