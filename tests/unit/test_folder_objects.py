"""FolderStore: writes are ordered so that they survive a power loss."""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import Backend, DiskFull, FastnessError, InvalidArgument, ObjectExists, PathUnusable
from fastness.folders import DurableFolders
from fastness.limits import OBJECT_STAGED_SECONDS_MAX

MEBIBYTE = 1_048_576
STREAM_BYTES = 256 * MEBIBYTE
STREAM_MEMORY_BYTES_MAX = 64 * MEBIBYTE
WRITES: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: store.put("new/folder/a", b"x"),
    "create": lambda store: store.create("new/folder/a", b"x"),
    "write": lambda store: store.write("new/folder/a", [b"x", b"y"]),
    "put_async": lambda store: asyncio.run(store.put_async("new/folder/a", b"x")),
}


@pytest.fixture
def folder(tmp_path: Path) -> ObjectStore:
    return open_objects(f"dir:{tmp_path}")


def test_a_folder_is_created_and_can_be_reopened(tmp_path: Path) -> None:
    meta = open_objects(f"dir:{tmp_path / 'not' / 'yet' / 'there'}").put("a/b", b"kept")
    again = open_objects(f"dir:{tmp_path / 'not' / 'yet' / 'there'}")
    assert again.get("a/b") == b"kept"
    assert again.list() == [meta]


def test_a_relative_folder_is_resolved_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_objects("dir:objects")
    monkeypatch.chdir("/")
    store.put("a", b"kept")
    assert (tmp_path / "objects" / "a").read_bytes() == b"kept"


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing"])
def test_an_unusable_folder_is_refused_when_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PathUnusable, match="choose another"):
        open_objects(f"dir:{tmp_path / path}")


def test_two_stores_on_one_folder_agree(tmp_path: Path) -> None:
    one, two = open_objects(f"dir:{tmp_path}"), open_objects(f"dir:{tmp_path}")
    meta = one.create("a", b"first")
    with pytest.raises(ObjectExists):
        two.create("a", b"second")
    two.replace("a", b"second", etag=meta.etag)
    assert one.get("a") == b"second"


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_syncs_the_file_before_naming_it_and_the_folders_before_returning(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[ObjectStore], object]
) -> None:
    steps = _record_steps(monkeypatch)
    write(folder)
    root, new, target = tmp_path, tmp_path / "new", tmp_path / "new" / "folder"
    assert steps == ["sync file", f"sync {root}", f"sync {new}", "name", f"sync {target}"]


def test_a_folder_that_another_process_left_unsynced_is_made_durable_once(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can end between creating a folder and syncing its parent."""
    new, target = tmp_path / "new", tmp_path / "new" / "folder"
    target.mkdir(parents=True)
    steps = _record_steps(monkeypatch)
    folder.put("new/folder/a", b"x")
    assert steps == ["sync file", f"sync {tmp_path}", f"sync {new}", "name", f"sync {target}"]
    steps.clear()
    folder.put("new/folder/b", b"x")
    assert steps == ["sync file", "name", f"sync {target}"]
    shutil.rmtree(target)
    steps.clear()
    folder.put("new/folder/c", b"x")
    assert steps == ["sync file", f"sync {new}", "name", f"sync {target}"]


def test_a_folder_whose_parent_could_not_be_synced_is_synced_by_the_next_put(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_folders)
        with pytest.raises(Backend):
            folder.put("new/a", b"x")
    steps = _record_steps(monkeypatch)
    folder.put("new/a", b"x")
    assert steps == ["sync file", f"sync {tmp_path}", "name", f"sync {tmp_path / 'new'}"]


def test_the_durable_folders_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.folders.FOLDERS_REMEMBERED_MAX", 3)
    durable = DurableFolders(tmp_path)
    for number in range(10):
        durable.make(tmp_path / "new" / str(number))
        assert len(durable._durable) <= 3
    assert len(list((tmp_path / "new").iterdir())) == 10


def test_a_replace_and_a_delete_sync_too(folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etag = folder.put("a", b"first").etag
    steps = _record_steps(monkeypatch)
    folder.replace("a", b"second", etag=etag)
    folder.delete("a")
    assert steps == ["sync file", "name", f"sync {tmp_path}", f"sync {tmp_path}"]


def test_a_create_syncs_an_existing_object_before_it_raises(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put("a", b"first")
    steps = _record_steps(monkeypatch)
    with pytest.raises(ObjectExists):
        folder.create("a", b"second")
    assert steps == ["sync file", "name", f"sync {tmp_path}"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, Backend)])
def test_a_write_that_cannot_be_synced_leaves_the_old_object(
    folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[FastnessError]
) -> None:
    folder.put("a", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(kind):
            folder.put("a", b"new")
    assert folder.get("a") == b"old"
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_full_device_is_reported_while_streaming(folder: ObjectStore, tmp_path: Path) -> None:
    def full() -> Iterator[bytes]:
        yield b"x"
        (staged,) = (tmp_path / ".staging").iterdir()
        _point_at_a_full_device(staged)
        yield b"x" * MEBIBYTE

    with pytest.raises(DiskFull, match="free some space"):
        folder.write("a", full())
    assert folder.list() == []


def test_leftovers_of_a_crash_are_never_listed_and_removed_after_a_day(folder: ObjectStore, tmp_path: Path) -> None:
    old, young = tmp_path / ".staging" / "old#0", tmp_path / ".staging" / "young#0"
    for leftover in (old, young, tmp_path / "a#1"):
        leftover.write_bytes(b"half of an obj")
    a_day_ago = young.stat().st_mtime - OBJECT_STAGED_SECONDS_MAX - 1
    os.utime(old, (a_day_ago, a_day_ago))

    folder.put("a", b"whole")
    assert [meta.path for meta in folder.list()] == ["a"]
    again = open_objects(f"dir:{tmp_path}")
    assert [meta.path for meta in again.list()] == ["a"]
    assert not old.exists()
    assert young.exists()


def test_every_version_has_its_own_etag(folder: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An etag is inode, microsecond and size, and file systems reuse the inodes of deleted files.
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    etags, stamps_ns = set(), []
    for _ in range(20):
        etags.add(folder.put("a", b"same size").etag)
        stamps_ns.append((tmp_path / "a").stat().st_mtime_ns)
    assert len(etags) == 20
    assert stamps_ns == [stamps_ns[0] + 1_000 * version for version in range(20)]


def test_a_path_above_or_below_another_object_is_refused(folder: ObjectStore) -> None:
    folder.put("a/b", b"")
    for path in ("a", "a/b/c", "s" * 300):
        for write in (folder.put, folder.create):
            with pytest.raises(InvalidArgument, match="choose another"):
                write(path, b"")
    assert [meta.path for meta in folder.list()] == ["a/b"]


def test_a_large_stream_needs_little_memory(folder: ObjectStore) -> None:
    chunk = os.urandom(MEBIBYTE)
    before, peak = _resident_bytes(), 0

    def chunks() -> Iterator[bytes]:
        nonlocal peak
        for _ in range(STREAM_BYTES // MEBIBYTE):
            peak = max(peak, _resident_bytes())
            yield chunk

    assert folder.write("large", chunks()).size == STREAM_BYTES
    read_bytes = 0
    for part in folder.open("large"):
        read_bytes += len(part)
        peak = max(peak, _resident_bytes())
    assert read_bytes == STREAM_BYTES
    assert peak - before < STREAM_MEMORY_BYTES_MAX


def _record_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that reach the disk, in order."""
    steps: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def recorded_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}" if is_folder else "sync file")
        fsync(descriptor)

    def recorded(name: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(source: Any, target: Any) -> None:
            steps.append("name")
            name(source, target)

        return run

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded(link))
    monkeypatch.setattr(os, "replace", recorded(replace))
    return steps


def _point_at_a_full_device(staged: Path) -> None:
    """Make this process's open descriptor of `staged` one of /dev/full."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink() == staged:
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, int(entry.name))
                os.close(full)
                return


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_tilde_is_expanded_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_objects("dir:~/objects").put("a", b"x")
    assert (tmp_path / "objects" / "a").read_bytes() == b"x"
    with pytest.raises(PathUnusable, match="cannot be expanded"):
        open_objects("dir:~no-such-user/objects")
