"""What a backup is made of, wherever it comes from, and how it is written down.

DEST/started.json      who began it, and from which checkpoint
DEST/keyspace/…        the files of the checkpoint
DEST/objects/…         blobs, segments, session logs that were rotated
DEST/activity/…        session logs that were not
DEST/manifest.jsonl    path, size and SHA-256 of each of them, one a line
DEST/backup.json       written last: the backup is whole
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import IO, Final

import msgspec

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.cli import printing
from holdfast.cli.values import chunks
from holdfast.errors import Conflict, HashMismatch, MissingObject, ObjectNotFound
from holdfast.limits import OBJECT_LIST_MAX
from holdfast.wire.backups import BackupFile

BACKUP_FORMAT: Final = 1
STARTED: Final = "started.json"
MANIFEST: Final = "manifest.jsonl"
FINISHED: Final = "backup.json"


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


class Written:
    """The manifest as it grows."""

    def __init__(self, manifest: IO[bytes]) -> None:
        self.files = 0
        self.bytes = 0
        self._manifest = manifest

    def add(self, line: Line) -> None:
        self.files += 1
        self.bytes += line.size
        self._manifest.write(msgspec.json.encode(line) + b"\n")


def store_at(url: str) -> ObjectStore:
    """The store that a URL or a plain path names, to write to."""
    return open_objects(url if url.startswith(("dir:", "s3://", "az://", "gs://")) else f"dir:{url}")


def started(target: ObjectStore, source: str) -> Started | None:
    """The backup of `source` that was begun at the target and not finished; None if it is empty.

    Raises:
        Conflict: something else is there.
    """
    if exists(target, FINISHED):
        raise Conflict("The target holds a finished backup, which is not written over; choose another one")
    if exists(target, STARTED):
        found = msgspec.json.decode(target.get(STARTED), type=Started)
        if found.source != source:
            raise Conflict(f"The target holds the beginning of a backup of {found.source}; choose another one")
        return found
    if target.list(limit=1):
        raise Conflict("The target holds something that is no backup; choose an empty one")
    return None


def start(target: ObjectStore, source: str, checkpoint: str) -> None:
    """Write down where a backup comes from, for whoever has to go on with it."""
    target.put(STARTED, msgspec.json.encode(Started(source, checkpoint, _now())))


def finish(target: ObjectStore, manifest: IO[bytes], written: Written, *, data_format: int, version: str) -> Finished:
    """Write down that a backup is whole."""
    manifest.seek(0)
    sha = hashlib.sha256()
    for piece in chunks(manifest):
        sha.update(piece)
    manifest.seek(0)
    target.write(MANIFEST, chunks(manifest))
    finished = Finished(BACKUP_FORMAT, data_format, version, _now(), written.files, written.bytes, sha.hexdigest())
    target.put(FINISHED, msgspec.json.encode(finished))
    target.delete(STARTED)
    return finished


def copy(file: BackupFile, pieces: Callable[[], Iterator[bytes]], target: ObjectStore) -> Line:
    """Copy a file to where it belongs; refuse one that is not what is known of it: a backup of damage is no backup.

    Raises:
        HashMismatch: it is something else.
        MissingObject: it is not there.
    """
    sha, size = hashlib.sha256(), 0

    def checked() -> Iterator[bytes]:
        nonlocal size
        for piece in pieces():
            sha.update(piece)
            size += len(piece)
            yield piece
        if file.sha256 is not None and (size, sha.hexdigest()) != (file.size, file.sha256):
            raise HashMismatch(
                f"{file.path} is damaged, so there is no whole backup; holdfast doctor says what else is"
            )

    try:
        target.write(file.path, checked())
    except ObjectNotFound as error:
        raise missing(file.path) from error
    return Line(file.path, size, sha.hexdigest())


def remove(target: ObjectStore, prefix: str) -> None:
    """Remove what an earlier attempt has left there."""
    while page := target.list(prefix, limit=OBJECT_LIST_MAX):
        for meta in page:
            target.delete(meta.path)


def exists(store: ObjectStore, path: str) -> bool:
    """Whether a store has something there."""
    return size_of(store, path) is not None


def size_of(store: ObjectStore, path: str) -> int | None:
    """How large something in a store is; None if it is not there."""
    try:
        return store.head(path).size
    except ObjectNotFound:
        return None


def missing(path: str) -> MissingObject:
    return MissingObject(f"{path} is not in the object store, so there is no whole backup; holdfast doctor says more")


def _now() -> str:
    return printing.moment(round(time.time() * 1_000)) or ""
