"""`holdfast backup`: a consistent copy of a data directory, whole, checked, and resumable.

    checkpoint of the key space ──► its files, hashed ──► the objects that it names, checked ──► session logs ──► done

    DEST/started.json      who began it, and from which checkpoint
    DEST/keyspace/…        the files of the checkpoint
    DEST/objects/…         blobs, segments, session logs that were rotated
    DEST/activity/…        session logs that were not
    DEST/manifest.jsonl    path, size and SHA-256 of each of them, one a line
    DEST/backup.json       written last: the backup is whole

The checkpoint takes milliseconds, and the directory is free again after it: its files never change, and objects are
written once and named by the key space, so what is copied later belongs to the same moment. DEST is a folder or an
object store (s3://…), in which a file is there whole or not at all; a backup that was interrupted goes on where it was.
"""

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final

import click
import msgspec

from holdfast import __version__
from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.cli import directories, planes, printing
from holdfast.cli.commands import Verb
from holdfast.cli.directories import names, universes, walk
from holdfast.cli.values import chunks
from holdfast.errors import Conflict, HashMismatch, InvalidArgument, MissingObject, ObjectNotFound
from holdfast.kv import Database, Subspace
from holdfast.layers import blobs
from holdfast.layers.blobs import Blob
from holdfast.layers.segments import SegmentRecord
from holdfast.limits import OBJECT_LIST_MAX
from holdfast.plane.open import FORMAT

BACKUP_FORMAT: Final = 1
STARTED: Final = "started.json"
MANIFEST: Final = "manifest.jsonl"
FINISHED: Final = "backup.json"
_COPIED: Final = "keyspace.jsonl"  # Written when all files of the key space are copied, for whoever resumes.
_LOGS: Final = ("activity", "activity-manifest")  # Where the object store has session logs.


class Started(msgspec.Struct, frozen=True):
    """A backup that was begun."""

    source: str
    checkpoint: str
    at: str


class Line(msgspec.Struct, frozen=True):
    """One file of a backup."""

    path: str
    size: int
    sha256: str


class Finished(msgspec.Struct, frozen=True):
    """A backup that is whole."""

    format: int
    data_format: int
    version: str
    at: str
    files: int
    bytes: int
    manifest_sha256: str


class Needed(msgspec.Struct, frozen=True):
    """An object that the key space names, and what it must be; nothing is known of the bytes of a log."""

    path: str
    size: int
    sha256: str | None


@click.command(
    cls=Verb,
    examples=[
        "holdfast --url dir:./data backup ./backups/monday",
        "holdfast --url dir:./data backup s3://bucket/monday",
    ],
)
@click.argument("dest")
def backup(dest: str) -> None:
    """Copy a data directory to DEST, a new folder or an object store, as it is at one moment.

    The directory must not be open elsewhere while the copy begins, which takes a moment. A backup that was interrupted
    goes on where it was when it is run again.
    """
    place = planes.target()
    path = directories.path_of(place, what_for="backup")
    directories.check_marker(path)
    objects = directories.objects_of(path, place)
    target = _target(dest, path)
    checkpoint = _checkpoint(path, target, place.patience_seconds)
    with tempfile.TemporaryFile() as manifest:
        written = Written(manifest)
        _copy_key_space(checkpoint, target, written)
        with RocksDatabase(checkpoint) as database:
            _copy_objects(_needed(database, objects), objects, target, written)
        _copy_folder(path / "activity", "activity", target, written)
        finished = _finish(target, manifest, written)
    shutil.rmtree(checkpoint)
    said = f"{finished.files:,} files, {finished.bytes:,} bytes are in {dest}, and every object had its hash"
    printing.done(said, {"path": dest, **msgspec.structs.asdict(finished)})


class Written:
    """The manifest as it grows."""

    def __init__(self, manifest: IO[bytes]) -> None:
        self.files = 0
        self.bytes = 0
        self._manifest = manifest

    def add(self, path: str, size: int, sha256: str) -> None:
        self.files += 1
        self.bytes += size
        self._manifest.write(msgspec.json.encode(Line(path, size, sha256)) + b"\n")


def store_at(url: str) -> ObjectStore:
    """The store that a URL or a plain path names, to write to."""
    return open_objects(url if url.startswith(("dir:", "s3://", "az://", "gs://")) else f"dir:{url}")


def _target(dest: str, source: Path) -> ObjectStore:
    if "://" not in dest:
        folder = Path(dest.removeprefix("dir:")).absolute()
        if folder == source.absolute() or source.absolute() in folder.parents:
            raise InvalidArgument(f"{dest} lies inside {source}; choose a place outside of what is backed up")
    return store_at(dest)


def _checkpoint(source: Path, target: ObjectStore, patience_seconds: float) -> Path:
    """The checkpoint to copy: the one that an interrupted backup left, or a new one."""
    if _exists(target, FINISHED):
        raise Conflict("The target holds a finished backup, which is not written over; choose another one")
    if _exists(target, STARTED):
        started = msgspec.json.decode(target.get(STARTED), type=Started)
        if started.source != str(source.absolute()):
            raise Conflict(f"The target holds the beginning of a backup of {started.source}; choose another one")
        if (left := source / started.checkpoint).is_dir():
            return left
        # The moment that it was of is gone. Objects stay as they are; the files of the key space are others.
        target.delete(_COPIED)
        for meta in _listed(target, "keyspace"):
            target.delete(meta.path)
    elif target.list(limit=1):
        raise Conflict("The target holds something that is no backup; choose an empty one")
    checkpoint = f".backup-{uuid.uuid4().hex[:12]}"
    with directories.open_key_space(source, patience_seconds) as database:
        # Said before it is made: a checkpoint that nobody knows of would fill the disk for ever.
        target.put(STARTED, msgspec.json.encode(Started(str(source.absolute()), checkpoint, _now())))
        database.checkpoint(source / checkpoint)
    return source / checkpoint


def _copy_key_space(checkpoint: Path, target: ObjectStore, written: Written) -> None:
    """Copy the files of a checkpoint, unless all of them were: then it has been opened since, and has others."""
    if _exists(target, _COPIED):
        for encoded in target.get(_COPIED).splitlines():
            before = msgspec.json.decode(encoded, type=Line)
            written.add(before.path, before.size, before.sha256)
        return
    lines: list[Line] = []
    files = [file for file in sorted(checkpoint.iterdir()) if file.name != "LOCK"]
    with printing.progress("Key space", sum(file.stat().st_size for file in files)) as advance:
        for file in files:
            line = _copy_file(file, f"keyspace/{file.name}", target)
            lines.append(line)
            advance(line.size)
            written.add(line.path, line.size, line.sha256)
    target.put(_COPIED, b"\n".join(map(msgspec.json.encode, lines)))


def _needed(database: Database, objects: ObjectStore | None) -> Iterator[Needed]:
    """Every object that the key space names, and all session logs."""
    for universe in universes(database):
        room = Subspace("u", universe, "cas")
        for key, value in walk(database, *room.range()):
            blob = msgspec.msgpack.decode(value, type=Blob)
            if blob.inline is None:
                digest = room.unpack(key)[0]
                yield Needed(blobs.object_path(universe, digest), blob.size, digest.hex())
        for world in names(database, Subspace("u", universe, "segments")):
            for _, value in walk(database, *Subspace("u", universe, "segments", world).range()):
                segment = msgspec.msgpack.decode(value, type=SegmentRecord)
                yield Needed(segment.object_path, segment.size, segment.checksum.removeprefix("sha256:"))
    if objects is not None:
        for prefix in _LOGS:
            for meta in _listed(objects, prefix):
                yield Needed(meta.path, meta.size, None)


def _copy_objects(needed: Iterable[Needed], objects: ObjectStore | None, target: ObjectStore, written: Written) -> None:
    with printing.progress("Objects") as advance:
        for each in needed:
            path = f"objects/{each.path}"
            if each.sha256 is not None and _size(target, path) == each.size:
                written.add(path, each.size, each.sha256)  # An interrupted backup has copied and checked it.
            else:
                if objects is None:
                    raise _missing(each.path)
                _copy_object(each, objects, target, written)
            advance(1)


def _copy_object(each: Needed, objects: ObjectStore, target: ObjectStore, written: Written) -> None:
    """Copy an object, and refuse one that is not what the key space says: a backup of damage is no backup."""
    sha, size = hashlib.sha256(), 0

    def checked() -> Iterator[bytes]:
        nonlocal size
        for part in objects.open(each.path):
            sha.update(part)
            size += len(part)
            yield part
        if each.sha256 is not None and (size, sha.hexdigest()) != (each.size, each.sha256):
            raise HashMismatch(
                f"{each.path} is damaged, so there is no whole backup; holdfast doctor says what else is"
            )

    try:
        target.write(f"objects/{each.path}", checked())
    except ObjectNotFound as error:
        raise _missing(each.path) from error
    written.add(f"objects/{each.path}", size, sha.hexdigest())


def _copy_folder(folder: Path, name: str, target: ObjectStore, written: Written) -> None:
    """Copy what is in a folder now; files that vanish meanwhile were moved into the object store."""
    for parent, _, files in os.walk(folder):
        for file in sorted(files):
            path = Path(parent) / file
            try:
                line = _copy_file(path, f"{name}/{path.relative_to(folder).as_posix()}", target)
            except FileNotFoundError:
                continue
            written.add(line.path, line.size, line.sha256)


def _copy_file(file: Path, path: str, target: ObjectStore) -> Line:
    sha, size = hashlib.sha256(), 0

    def hashed(stream: IO[bytes]) -> Iterator[bytes]:
        nonlocal size
        for piece in chunks(stream):
            sha.update(piece)
            size += len(piece)
            yield piece

    with file.open("rb") as stream:
        target.write(path, hashed(stream))
    return Line(path, size, sha.hexdigest())


def _finish(target: ObjectStore, manifest: IO[bytes], written: Written) -> Finished:
    manifest.seek(0)
    sha = hashlib.sha256()
    for piece in chunks(manifest):
        sha.update(piece)
    manifest.seek(0)
    target.write(MANIFEST, chunks(manifest))
    finished = Finished(BACKUP_FORMAT, FORMAT, __version__, _now(), written.files, written.bytes, sha.hexdigest())
    target.put(FINISHED, msgspec.json.encode(finished))
    target.delete(STARTED)
    target.delete(_COPIED)
    return finished


def _listed(store: ObjectStore, prefix: str) -> Iterator[Needed]:
    after: str | None = None
    while page := store.list(prefix, after=after):
        for meta in page:
            yield Needed(meta.path, meta.size, None)
        if len(page) < OBJECT_LIST_MAX:
            return
        after = page[-1].path


def _exists(store: ObjectStore, path: str) -> bool:
    return _size(store, path) is not None


def _size(store: ObjectStore, path: str) -> int | None:
    try:
        return store.head(path).size
    except ObjectNotFound:
        return None


def _missing(path: str) -> MissingObject:
    return MissingObject(f"{path} is not in the object store, so there is no whole backup; holdfast doctor says more")


def _now() -> str:
    return printing.moment(round(time.time() * 1_000)) or ""
