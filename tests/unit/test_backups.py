"""Backups and checkups of a plane that goes on."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Plane
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import Busy, InvalidArgument, NotFound, Unreachable, Unsupported
from holdfast.handles.sync.backups import _lines
from holdfast.kv import Subspace
from holdfast.limits import CHECKPOINT_IDLE_SECONDS, CHECKPOINTS_MAX
from holdfast.runtime.maintenance.checkpoints import LineStream
from holdfast.runtime.maintenance.scan import names, universes
from holdfast.wire.backups import Line

LARGE = b"large" * 10_000


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A plane with something of everything."""
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        world.append(list(range(100)), expected_head=0)
        whole = {"receipt_horizon_height": 100, "manifest_hash": world.snapshots.baseline().manifest_hash}
        world.snapshots.commit({"n": 1}, height=100, promote=True, **whole)
        assert world.compact(entries=16, margin=10).segments == 5
        plane.blobs.put(LARGE)
        plane.blobs.put(b"small")
        plane.queue("jobs").put_many(range(10))
        plane.activity.log("s", {"a": 1})
        plane.activity.end("s")
        yield plane


def checkpoints(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data").glob(".checkpoint-*"))


def test_a_backup_has_the_key_space_and_every_object_that_it_names(plane: Plane, tmp_path: Path) -> None:
    begun = plane.backups.begin()
    assert (begun.data_format, begun.version) == (1, holdfast.__version__)
    files = {file.path: file for file in plane.backups.files(begun.id)}
    digest = hashlib.sha256(LARGE).hexdigest()
    assert files[f"objects/cas/main/sha256/{digest}"].sha256 == digest
    assert len([path for path in files if path.startswith("objects/segments/main/ada/")]) == 5
    assert [path for path in files if path.startswith("objects/activity/")]
    assert {"keyspace/CURRENT"} <= files.keys()
    for path, file in files.items():
        data = b"".join(plane.backups.open(begun.id, path))
        assert len(data) == file.size
        assert file.sha256 in (None, hashlib.sha256(data).hexdigest())
        assert b"".join(plane.backups.open(begun.id, path, start=3, length=4)) == data[3:7]
    assert plane.backups.end(begun.id) is True
    assert plane.backups.end(begun.id) is False
    assert checkpoints(tmp_path) == []


def test_a_backup_is_of_one_moment_and_nothing_that_is_done_later_changes_it(plane: Plane, tmp_path: Path) -> None:
    begun = plane.backups.begin()
    before = {file: b"".join(plane.backups.open(begun.id, file.path)) for file in plane.backups.files(begun.id)}
    plane.queue("jobs").purge()
    plane.queue("later").put(1)
    plane.blobs.put(LARGE * 2)
    for number in range(3):
        plane.transact(lambda tx, number=number: [tx.put(b"%d %d" % (number, n), bytes(1_000)) for n in range(2_000)])
        plane._transport.services.database.flush_tables()
    after = {file: b"".join(plane.backups.open(begun.id, file.path)) for file in plane.backups.files(begun.id)}
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


def test_logs_that_are_moved_away_while_they_are_copied_are_in_the_backup(plane: Plane) -> None:
    plane.activity.log("open", {"a": 1})
    plane.activity.read()  # Writes out what is in memory.
    begun = plane.backups.begin()
    [path] = [file.path for file in plane.backups.files(begun.id) if "_open_" in file.path]
    assert path.startswith("activity/main/")
    plane.activity.end("open")
    assert b'"a":1' in b"".join(plane.backups.open(begun.id, path))


def test_only_so_many_are_kept_and_the_idle_ones_go(plane: Plane, tmp_path: Path) -> None:
    ids = [plane.backups.begin().id for _ in range(CHECKPOINTS_MAX)]
    with pytest.raises(Busy, match="in progress"):
        plane.backups.begin()
    list(plane.backups.examine())  # Looking is not kept from it, and leaves nothing.
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


def test_a_backup_goes_on_after_the_plane_was_opened_again(tmp_path: Path) -> None:
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.blobs.put(LARGE)
        begun = plane.backups.begin()
        first = list(plane.backups.files(begun.id))
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        assert [file for file in plane.backups.files(begun.id) if "activity" not in file.path] == [
            file for file in first if "activity" not in file.path
        ]


@pytest.mark.parametrize("id", ["", "x", "../kv", "..", "a/b", "0" * 400, "0" * 16])
def test_what_is_no_backup_is_not_found(plane: Plane, id: str) -> None:
    for look in (lambda: plane.backups.files(id), lambda: plane.backups.open(id, "keyspace/CURRENT")):
        with pytest.raises(NotFound, match="begin another"):
            look()
    if id == "0" * 16:
        assert plane.backups.end(id) is False
    else:
        with pytest.raises(NotFound, match="is not a backup id"):
            plane.backups.end(id)


@pytest.mark.parametrize("path", ["", "kv/CURRENT", "holdfast.json", "keyspace/../../holdfast.json", "objects/../x"])
def test_nothing_but_the_files_of_a_backup_is_handed_out(plane: Plane, path: str) -> None:
    begun = plane.backups.begin()
    with pytest.raises((InvalidArgument, NotFound)):
        list(plane.backups.open(begun.id, path))
    with pytest.raises(NotFound, match="does not exist"):
        plane.backups.open(begun.id, "keyspace/none")


def test_what_is_in_no_directory_has_no_backups(postgres_url: str) -> None:
    for url in ("memory:", postgres_url):
        with holdfast.open(url) as plane:
            for ask in (plane.backups.begin, plane.backups.examine, lambda: plane.backups.files("0" * 16)):
                with pytest.raises(Unsupported, match="pg_dump"):
                    ask()


def test_an_event_loop_does_the_same(tmp_path: Path) -> None:
    async def use() -> None:
        async with holdfast.open_async(f"dir:{tmp_path / 'data'}") as plane:
            await plane.blobs.put(LARGE)
            begun = await plane.backups.begin()
            async for file in await plane.backups.files(begun.id):
                parts = [part async for part in await plane.backups.open(begun.id, file.path)]
                assert len(b"".join(parts)) == file.size
            seen = [each async for each in await plane.backups.examine(deep=True)]
            assert {each.name for each in seen} == {"keys", "blobs", "worlds", "messages"}
            assert await plane.backups.end(begun.id)

    asyncio.run(use())
    assert checkpoints(tmp_path) == []


# Looking.


def test_a_plane_that_goes_on_is_looked_at_as_it_is_at_one_moment(plane: Plane, tmp_path: Path) -> None:
    """On the key space itself, counts and tallies would differ by whatever is put between two looks."""
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


def test_damage_is_found(plane: Plane, tmp_path: Path) -> None:
    body = tmp_path / "data" / "objects" / "cas" / "main" / "sha256" / hashlib.sha256(LARGE).hexdigest()
    body.write_bytes(LARGE[::-1])
    for segment in (tmp_path / "data" / "objects" / "segments").rglob("*.log"):
        segment.unlink()
    found = [each.finding for each in plane.backups.examine() if each.finding is not None]
    assert [each.what for each in found if each.where.startswith("blob")] == ["its content does not match its hash"]
    assert len([each for each in found if "is not in the object store" in each.what]) == 5


def test_a_world_that_is_deleted_meanwhile_is_no_damage(plane: Plane) -> None:
    seen = plane._transport.backups._checkpoints.run_checks(deep=False)
    lines = seen._lines
    assert next(line for line in lines if line.seen is not None and line.seen.name == "blobs").seen is not None
    plane.world("ada").archive()
    plane.world("ada").delete()
    assert [line.seen.finding for line in lines if line.seen is not None and line.seen.finding is not None] == []


def test_whoever_stops_looking_leaves_nothing(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.maintenance.checkpoints.STREAMED_LINES_MAX", 1)
    looking = plane.backups.examine()
    next(looking)
    assert len(checkpoints(tmp_path)) == 1
    looking.close()
    assert checkpoints(tmp_path) == []


def test_a_list_that_is_being_made_is_let_go_when_it_is_done() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def making() -> Iterator[Line]:
        try:
            yield Line()
            begun.set()
            assert go.wait(60)
            yield Line()
            yield Line()
        finally:
            ended.set()

    lines = LineStream(making())  # type: ignore[arg-type]
    thread = threading.Thread(target=lines.page)
    thread.start()
    assert begun.wait(60)
    lines.close()
    assert not ended.is_set()
    go.set()
    thread.join()
    assert ended.is_set()


def test_a_list_without_its_end_is_no_list() -> None:
    whole = [b'{"file":{"path":"a","size":1}}\n{"fi', b'le":{"path":"b","size":2}}\n{}\n', b'{"end":true}\n']
    assert [line.file.path for line in _lines(iter(whole)) if line.file is not None] == ["a", "b"]
    with pytest.raises(Unreachable, match="before its end"):
        list(_lines(iter(whole[:-1])))
    problem = b'{"problem":{"code":"not_found","title":"t","status":404,"detail":"gone"}}\n'
    with pytest.raises(NotFound, match="gone"):
        list(_lines(iter([problem])))
