"""Checkpoints of a plane that goes on, for backups and for whoever looks whether it is sound.

    DATA/.checkpoint-<id>/keyspace/…    the key space at one moment: hard links, never opened, never changed
    DATA/.checkpoint-<id>/activity/…    session logs that are not in the object store yet: hard links too
    DATA/.checkpoint-<id>/view-…/       a second copy of the key space, while somebody looks into it

Opening a key space changes its files, so what is looked into is never what is handed out. A checkpoint holds on to disk
that the key space would have given back; one that nobody has used for an hour goes when the next one is made.
"""

import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from obstore.store import LocalStore

from holdfast.backends.objects import ObjectStore
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import Busy, Corrupt, HoldfastError, NotFound, PathUnusable, Unsupported
from holdfast.kv import Database, Subspace
from holdfast.layers import blobs
from holdfast.layers.blobs import Blob
from holdfast.layers.segments import SegmentRecord
from holdfast.limits import CHECKPOINT_IDLE_SECONDS, CHECKPOINTS_MAX, LINES_MAX, LINES_SECONDS_MAX, OBJECT_LIST_MAX
from holdfast.runtime.maintenance import health_checks
from holdfast.runtime.maintenance.scan import names, universes, walk
from holdfast.wire.backups import BackupBegun, BackupFile, Line
from holdfast.wire.health_checks import Finding, Seen
from holdfast.wire.problems import problem_of

_PREFIX: Final = ".checkpoint-"
_ID: Final = re.compile("[0-9a-f]{16}")
_LOGS: Final = ("activity", "activity-manifest")  # Where the object store has session logs.
_encode: Final = msgspec.json.Encoder().encode
_FINDINGS_MAX: Final = 1_000  # Of one kind; where everything is damaged, the first so many say enough.


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
        """`flush` brings session logs from memory into `logs`; `written_by` is the data's format, and our version."""
        self._database = database
        self._objects = objects
        self._logs = logs
        self._flush = flush
        self._written_by = written_by
        self._lock = threading.Lock()

    def begin(self) -> BackupBegun:
        """Make a checkpoint.

        Raises:
            Unsupported: the key space is not in a directory.
            Busy: there are as many as there may be.
        """
        data = self._data()
        self._flush()
        with self._lock:
            self._sweep(data)
            if len(list(data.glob(f"{_PREFIX}*"))) >= CHECKPOINTS_MAX:
                raise Busy(f"{CHECKPOINTS_MAX} backups are under way; end one, or wait until an idle one has gone")
            id = self._make(data)
        return BackupBegun(id, round(time.time() * 1_000), *self._written_by)

    def files(self, id: str) -> "Lines":
        """Every file that belongs to a checkpoint.

        Raises:
            NotFound: there is none of that id.
        """
        return Lines(_told(self._files(self._folder(id))))

    def store(self, id: str) -> ObjectStore:
        """The files of a checkpoint that are not in the object store."""
        return ObjectStore(LocalStore(self._folder(id)))

    def end(self, id: str) -> bool:
        """Remove a checkpoint; whether it was there.

        Raises:
            NotFound: there never was one of that id, because it is none.
        """
        folder = self._place(id)
        if not folder.is_dir():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def examined(self, *, deep: bool) -> "Lines":
        """Look at everything, as it is at this moment.

        Raises:
            Unsupported: the key space is not in a directory.
        """
        return Lines(_told(self._examined(self._data(), deep=deep)))

    def _data(self) -> Path:
        if not isinstance(self._database, RocksDatabase):
            raise Unsupported(
                "Only a plane in a directory can do this; PostgreSQL has its own tools (pg_dump, amcheck)"
            )
        return self._database.path.parent

    def _folder(self, id: str) -> Path:
        folder = self._place(id)
        if not folder.is_dir():
            raise NotFound(f"There is no backup {id}: it ended, or nobody used it for long; begin another")
        os.utime(folder)
        return folder

    def _place(self, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise NotFound(f"{id[:32]!r} is no backup; begin another")
        return self._data() / f"{_PREFIX}{id}"

    def _sweep(self, data: Path) -> None:
        for folder in data.glob(f"{_PREFIX}*"):
            if folder.stat().st_mtime < time.time() - CHECKPOINT_IDLE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _make(self, data: Path) -> str:
        id = uuid.uuid4().hex[:16]
        folder = data / f"{_PREFIX}{id}"
        try:
            self._database.checkpoint(folder / "keyspace")
            link_all(self._logs, folder / "activity")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise PathUnusable(
                    f"{folder} cannot be made ({error.strerror}); make room, or let it be written"
                ) from error
            raise
        return id

    def _files(self, folder: Path) -> Iterator[Line]:
        for part in ("keyspace", "activity"):
            for path in sorted((folder / part).rglob("*")):
                if path.is_file():
                    yield Line(BackupFile(path.relative_to(folder).as_posix(), path.stat().st_size))
        with _view(folder) as database:
            yield from _named(database)
        if self._objects is not None:
            yield from _listed(self._objects)

    def _examined(self, data: Path, *, deep: bool) -> Iterator[Line]:
        with self._lock:
            self._sweep(data)
            id = self._make(data)  # One more than there may be, and only for as long as this takes.
        try:
            with _view(data / f"{_PREFIX}{id}") as database:
                looks = health_checks.every(database, self._objects, deep=deep, live=self._database)
                for name, look in looks.items():
                    for line in looked_at(name, look()):
                        os.utime(data / f"{_PREFIX}{id}")
                        yield line
        finally:
            self.end(id)


class Lines:
    """A list that is made while it is read, on whichever thread reads it."""

    def __init__(self, lines: Generator[Line, None, None]) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._is_closed = False

    def page(self) -> bytes:
        """The next lines, as JSON: those that come in a moment, so that whoever waits sees that there is life."""
        found: list[bytes] = []
        until = time.monotonic() + LINES_SECONDS_MAX
        with self._lock:
            for line in self._lines:
                found.append(_encode(line) + b"\n")
                if len(found) >= LINES_MAX or time.monotonic() > until or self._is_closed:
                    break
            if self._is_closed:
                self._lines.close()
        return b"".join(found)

    def close(self) -> None:
        """Let go of what the list is made from: at once, or when the page that is being made is done."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._lines.close()
            finally:
                self._lock.release()


def looked_at(name: str, looked: health_checks.Looked) -> Iterator[Line]:
    """What a checkup sees, as lines: each finding, how far it is every now and then, and the last count."""
    count = findings = 0
    told = time.monotonic()
    try:
        for found in looked:
            if isinstance(found, Finding):
                findings += 1
                if findings <= _FINDINGS_MAX:
                    yield Line(seen=Seen(name, count, found))
                continue
            count += found
            if time.monotonic() - told > LINES_SECONDS_MAX:
                told = time.monotonic()
                yield Line(seen=Seen(name, count))
    except Corrupt as error:
        yield Line(seen=Seen(name, count, Finding(name, f"they cannot all be looked at ({error})")))
    yield Line(seen=Seen(name, count))


def needed(database: Database) -> Iterator[BackupFile | None]:
    """Every object that a key space names, by its path; None for each key that names none."""
    for universe in universes(database):
        room = Subspace("u", universe, "cas")
        for key, value in walk(database, *room.range()):
            blob = msgspec.msgpack.decode(value, type=Blob)
            if blob.inline is not None:
                yield None
                continue
            digest = room.unpack(key)[0]
            yield BackupFile(blobs.object_path(universe, digest), blob.size, digest.hex())
        for world in names(database, Subspace("u", universe, "segments")):
            for _, value in walk(database, *Subspace("u", universe, "segments", world).range()):
                segment = msgspec.msgpack.decode(value, type=SegmentRecord)
                yield BackupFile(segment.object_path, segment.size, segment.checksum.removeprefix("sha256:"))


def rotated_logs(objects: ObjectStore) -> Iterator[BackupFile]:
    """Every session log that is in an object store; nothing is known of its bytes."""
    for prefix in _LOGS:
        after: str | None = None
        while page := objects.list(prefix, after=after):
            yield from (BackupFile(meta.path, meta.size) for meta in page)
            if len(page) < OBJECT_LIST_MAX:
                break
            after = page[-1].path


def _named(database: Database) -> Iterator[Line]:
    passed = 0
    for file in needed(database):
        if file is not None:
            yield Line(msgspec.structs.replace(file, path=f"objects/{file.path}"))
        else:
            passed += 1
            if passed % 1_000 == 0:
                yield Line()


def _listed(objects: ObjectStore) -> Iterator[Line]:
    return (Line(msgspec.structs.replace(file, path=f"objects/{file.path}")) for file in rotated_logs(objects))


def _told(lines: Iterator[Line]) -> Generator[Line, None, None]:
    """The lines, and how they ended: a stream of bytes has no other way to say that."""
    try:
        yield from lines
    except HoldfastError as error:
        yield Line(problem=problem_of(error))
    else:
        yield Line(end=True)


@contextmanager
def _view(folder: Path) -> Iterator[RocksDatabase]:
    """The key space of a checkpoint, open. Its tables are shared, because nobody writes to a table twice."""
    view = folder / f"view-{uuid.uuid4().hex[:8]}"
    view.mkdir()
    try:
        for file in (folder / "keyspace").iterdir():
            if file.suffix == ".sst":
                os.link(file, view / file.name)
            elif file.name != "LOCK":
                shutil.copyfile(file, view / file.name)
        with RocksDatabase(view) as database:
            yield database
    finally:
        shutil.rmtree(view, ignore_errors=True)


def link_all(source: Path, target: Path) -> None:
    """Hard links to all files of a folder, or copies where there can be none."""
    for path in source.rglob("*") if source.is_dir() else ():
        place = target / path.relative_to(source)
        if not path.is_file():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place)
        except FileNotFoundError:
            continue  # It is in the object store by now.
        except OSError:
            shutil.copyfile(path, place)
