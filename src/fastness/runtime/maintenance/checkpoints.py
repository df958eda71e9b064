"""Checkpoints of a running plane, for backups and health checks.

    DATA/.checkpoint-<id>/keyspace/…    a snapshot of the key space: hard links, never opened, never changed
    DATA/.checkpoint-<id>/activity/…    session logs that are not in the object store yet: also hard links
    DATA/.checkpoint-<id>/view-…/       a second copy of the key space, while it is open for reading

Opening a key space changes its files, so the opened copy is never the one that is backed up. A checkpoint keeps disk
space in use that the key space has freed; one that was idle for an hour is removed when the next one is created.
"""

import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from obstore.store import LocalStore

from fastness.backends.objects import ObjectStore
from fastness.backends.objects.encrypted import as_stored, universe_of_path
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy, Corrupt, FastnessError, NotFound, ObjectNotFound, PathUnusable, Unsupported
from fastness.folders import make_folder
from fastness.kv import Database, Subspace
from fastness.kv.value_cipher import ValueCipher, cipher_of
from fastness.layers import blobs
from fastness.layers.blobs import Blob
from fastness.limits import (
    CHECKPOINT_IDLE_SECONDS,
    CHECKPOINTS_MAX,
    OBJECT_LIST_MAX,
    STREAMED_LINES_MAX,
    STREAMED_LINES_SECONDS_MAX,
)
from fastness.runtime.maintenance import health_checks
from fastness.runtime.maintenance.scan import names, scan_range, universes
from fastness.wire.backups import BackupBegun, BackupFile, Line
from fastness.wire.health_checks import Finding, Seen
from fastness.wire.problems import problem_of
from fastness.wire.worlds import Segment

_PREFIX: Final = ".checkpoint-"
_ID: Final = re.compile("[0-9a-f]{16}")
_LOGS: Final = ("activity", "activity-manifest")  # The prefixes of session logs in the object store.
_encode: Final = msgspec.json.Encoder().encode
_FINDINGS_MAX: Final = 1_000  # Per check; where everything is damaged, the first findings are enough.


class Checkpoints:
    """The checkpoints of one plane."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore | None,
        logs: Path,
        *,
        flush: Callable[[], None],
        written_by: tuple[int, str],
    ) -> None:
        """`flush` writes session logs from memory to `logs`; `written_by` is the data format and Fastness's version."""
        self._database = database
        self._objects = objects
        self._logs = logs
        self._flush = flush
        self._written_by = written_by
        self._lock = threading.Lock()

    def begin(self) -> BackupBegun:
        """Create a checkpoint.

        Raises:
            Unsupported: the key space is not in a directory.
            Busy: there are CHECKPOINTS_MAX checkpoints.
        """
        data = self._data()
        at_ms = round(time.time() * 1_000)  # Everything before it is in the checkpoint.
        with self._lock:
            self._sweep(data)
            if len(list(data.glob(f"{_PREFIX}*"))) >= CHECKPOINTS_MAX:
                raise Busy(f"{CHECKPOINTS_MAX} backups are in progress; end one, or wait until an idle one expires")
            id = self._create(data)
        cipher = cipher_of(self._database)
        return BackupBegun(id, at_ms, *self._written_by, encrypted=cipher is not None and cipher.is_on)

    def files(self, id: str) -> "LineStream":
        """Every file that belongs to a checkpoint.

        Raises:
            NotFound: there is no checkpoint with that id.
        """
        return LineStream(_with_end_marker(self._files(self._folder(id))))

    def store(self, id: str) -> ObjectStore:
        """The files of a checkpoint that are not in the object store."""
        return ObjectStore(LocalStore(self._folder(id)))

    def end(self, id: str) -> bool:
        """Remove a checkpoint; whether it existed.

        Raises:
            NotFound: the id is invalid.
        """
        folder = self._path_of(id)
        if not folder.is_dir():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def run_checks(self, *, deep: bool) -> "LineStream":
        """The results of all health checks on a snapshot of the plane.

        Raises:
            Unsupported: the key space is not in a directory.
        """
        return LineStream(_with_end_marker(self._run_checks(self._data(), deep=deep)))

    def _data(self) -> Path:
        if not isinstance(self._database, RocksDatabase):
            raise Unsupported(
                "Only a plane in a directory supports this; use the tools of PostgreSQL (pg_dump, amcheck) instead"
            )
        return self._database.path.parent

    def _folder(self, id: str) -> Path:
        folder = self._path_of(id)
        if not folder.is_dir():
            raise NotFound(f"Backup {id} does not exist: it was ended, or expired while idle; begin another")
        os.utime(folder)
        return folder

    def _path_of(self, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise NotFound(f"{id[:32]!r} is not a backup id; begin another backup")
        return self._data() / f"{_PREFIX}{id}"

    def _sweep(self, data: Path) -> None:
        for folder in data.glob(f"{_PREFIX}*"):
            if folder.stat().st_mtime < time.time() - CHECKPOINT_IDLE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _create(self, data: Path) -> str:
        id = uuid.uuid4().hex[:16]
        folder = data / f"{_PREFIX}{id}"
        try:
            self._database.checkpoint(folder / "keyspace")
            self._flush()  # After it: the logs have the events of all commits that it has.
            link_all(self._logs, folder / "activity")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise PathUnusable(
                    f"The checkpoint {folder} cannot be created ({error.strerror}); check free space and permissions"
                ) from error
            raise
        return id

    def _files(self, folder: Path) -> Iterator[Line]:
        for part in ("keyspace", "activity"):
            for path in sorted((folder / part).rglob("*")):
                if path.is_file():
                    yield Line(BackupFile(path.relative_to(folder).as_posix(), path.stat().st_size))
        with self._opened_copy(folder) as database:
            yield from _referenced_lines(database, self._objects)
        if self._objects is not None:
            yield from _log_lines(self._objects)

    def _opened_copy(self, folder: Path) -> AbstractContextManager[RocksDatabase]:
        live = cipher_of(self._database)
        return _opened_copy(folder, ValueCipher(None if live is None else live.provider))

    def _run_checks(self, data: Path, *, deep: bool) -> Iterator[Line]:
        with self._lock:
            self._sweep(data)
            id = self._create(data)  # Not counted towards CHECKPOINTS_MAX: it is removed below.
        try:
            with self._opened_copy(data / f"{_PREFIX}{id}") as database:
                logs = data / f"{_PREFIX}{id}" / "activity"
                checks = health_checks.all_checks(database, self._objects, logs, deep=deep, live=self._database)
                for name, check in checks.items():
                    for line in check_lines(name, check()):
                        os.utime(data / f"{_PREFIX}{id}")
                        yield line
        finally:
            self.end(id)


class LineStream:
    """A list of lines that is generated while it is read, on the thread that reads it."""

    def __init__(self, lines: Generator[Line, None, None]) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._is_closed = False

    def page(self) -> bytes:
        """The next lines as JSON: at most those of STREAMED_LINES_SECONDS_MAX, so that the reader sees progress."""
        found: list[bytes] = []
        until = time.monotonic() + STREAMED_LINES_SECONDS_MAX
        with self._lock:
            for line in self._lines:
                found.append(_encode(line) + b"\n")
                if len(found) >= STREAMED_LINES_MAX or time.monotonic() > until or self._is_closed:
                    break
            if self._is_closed:
                self._lines.close()
        return b"".join(found)

    def close(self) -> None:
        """Release the resources of the list, now or when the current page is complete."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._lines.close()
            finally:
                self._lock.release()


def check_lines(name: str, results: health_checks.CheckResults) -> Iterator[Line]:
    """The results of a health check as lines: each finding, its progress at intervals, and the final count."""
    count = findings = 0
    reported = time.monotonic()
    try:
        for found in results:
            if isinstance(found, Finding):
                findings += 1
                if findings <= _FINDINGS_MAX:
                    yield Line(seen=Seen(name, count, found))
                continue
            count += found
            if time.monotonic() - reported > STREAMED_LINES_SECONDS_MAX:
                reported = time.monotonic()
                yield Line(seen=Seen(name, count))
    except Corrupt as error:
        yield Line(seen=Seen(name, count, Finding(name, f"they cannot be checked completely ({error})")))
    yield Line(seen=Seen(name, count))


def referenced_objects(database: Database, objects: ObjectStore | None) -> Iterator[BackupFile | None]:
    """Every object that a key space references; None for each inline blob, to show progress.

    Objects of encrypted universes are copied as they are stored: their hash is not known, and `objects` has their size.
    """
    cipher = cipher_of(database)
    for file in referenced_contents(database):
        universe = None if file is None else universe_of_path(file.path)
        if file is None or universe is None or cipher is None or cipher.newest_key(universe) is None:
            yield file
            continue
        size = file.size
        if objects is not None:
            with suppress(ObjectNotFound):  # The copy will fail.
                size = as_stored(objects).head(file.path).size
        yield BackupFile(file.path, size)


def referenced_contents(database: Database) -> Iterator[BackupFile | None]:
    """Like `referenced_objects`, with the size and hash of the content of each object before it was encrypted."""
    for universe in universes(database):
        keys = Subspace("u", universe, "cas")
        for key, value in scan_range(database, *keys.range()):
            blob = msgspec.msgpack.decode(value, type=Blob)
            if blob.inline is not None:
                yield None
                continue
            digest = keys.unpack(key)[0]
            yield BackupFile(blobs.object_path(universe, digest, blob.upload), blob.size, digest.hex())
        for world in names(database, Subspace("u", universe, "segments")):
            for _, value in scan_range(database, *Subspace("u", universe, "segments", world).range()):
                segment = msgspec.msgpack.decode(value, type=Segment)
                yield BackupFile(segment.object_path, segment.size, segment.checksum.removeprefix("sha256:"))


def rotated_logs(objects: ObjectStore) -> Iterator[BackupFile]:
    """Every session log in an object store; its hash is not known."""
    for prefix in _LOGS:
        after: str | None = None
        while page := objects.list(prefix, after=after):
            yield from (BackupFile(meta.path, meta.size) for meta in page)
            if len(page) < OBJECT_LIST_MAX:
                break
            after = page[-1].path


def _referenced_lines(database: Database, objects: ObjectStore | None) -> Iterator[Line]:
    skipped = 0
    for file in referenced_objects(database, objects):
        if file is not None:
            yield Line(msgspec.structs.replace(file, path=f"objects/{file.path}"))
        else:
            skipped += 1
            if skipped % 1_000 == 0:
                yield Line()


def _log_lines(objects: ObjectStore) -> Iterator[Line]:
    return (Line(msgspec.structs.replace(file, path=f"objects/{file.path}")) for file in rotated_logs(objects))


def _with_end_marker(lines: Iterator[Line]) -> Generator[Line, None, None]:
    """The lines, then one that says how they ended: a stream of bytes cannot report an error otherwise."""
    try:
        yield from lines
    except FastnessError as error:
        yield Line(problem=problem_of(error))
    else:
        yield Line(end=True)


@contextmanager
def _opened_copy(folder: Path, cipher: ValueCipher) -> Iterator[RocksDatabase]:
    """An opened copy of a checkpoint's key space. SST files are immutable, so they are hard links."""
    view = folder / f"view-{uuid.uuid4().hex[:8]}"
    make_folder(view)
    try:
        for file in (folder / "keyspace").iterdir():
            if file.suffix == ".sst":
                os.link(file, view / file.name)
            elif file.name != "LOCK":
                shutil.copyfile(file, view / file.name)
        with RocksDatabase(view, cipher=cipher) as database:
            yield database
    finally:
        shutil.rmtree(view, ignore_errors=True)


def link_all(source: Path, target: Path) -> None:
    """Hard links to all files of a folder, or copies where links are not possible."""
    for path in source.rglob("*") if source.is_dir() else ():
        linked = target / path.relative_to(source)
        if not path.is_file():
            continue
        make_folder(linked.parent)
        try:
            os.link(path, linked)
        except FileNotFoundError:
            continue  # It was rotated into the object store meanwhile.
        except OSError:
            shutil.copyfile(path, linked)
