"""The files of a backup, and how they are written. The same for a data directory and for a server.

DEST/started.json      the source and its checkpoint, while the backup is incomplete
DEST/keyspace/…        the files of the checkpoint
DEST/objects/…         blobs, segments, rotated session logs
DEST/activity/…        session logs that are not rotated yet
DEST/manifest.jsonl    path, size and SHA-256 of each file, one per line
DEST/backup.json       written last: the backup is complete
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import IO, Final

import msgspec

from fastness.backends.objects import ObjectStore, open_objects
from fastness.cli import printing
from fastness.cli.values import read_chunks
from fastness.errors import Conflict, HashMismatch, MissingObject, ObjectNotFound
from fastness.json_checksums import add_checksum
from fastness.limits import OBJECT_LIST_MAX
from fastness.wire.backups import BackupFile

BACKUP_FORMAT: Final = 1
STARTED: Final = "started.json"
MANIFEST: Final = "manifest.jsonl"
FINISHED: Final = "backup.json"


class BackupStart(msgspec.Struct, frozen=True):
    """The contents of started.json: a backup that is not complete yet."""

    source: str
    checkpoint: str
    at: str
    at_ms: int  # Everything before this time is in the checkpoint.


class ManifestEntry(msgspec.Struct, frozen=True):
    """One file of a backup: a line of the manifest."""

    path: str
    size: int
    sha256: str


class BackupSummary(msgspec.Struct, frozen=True):
    """The contents of backup.json: a complete backup. Its checksum is the last field of the file."""

    format: int
    data_format: int
    version: str
    at: str
    files: int
    bytes: int
    manifest_sha256: str
    checkpoint_ms: int  # Everything before this time is in the backup.


class ManifestWriter:
    """Writes the manifest, and counts its files and bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.files = 0
        self.bytes = 0

    def add(self, entry: ManifestEntry) -> None:
        self.files += 1
        self.bytes += entry.size
        self.file.write(msgspec.json.encode(entry) + b"\n")


def open_target(url: str) -> ObjectStore:
    """The object store at a URL or a plain path, for writing."""
    return open_objects(url if url.startswith(("dir:", "s3://", "az://", "gs://")) else f"dir:{url}")


def find_started(target: ObjectStore, source: str) -> BackupStart | None:
    """The incomplete backup of `source` at the target; None if the target is empty.

    Raises:
        Conflict: the target holds something else.
    """
    if exists(target, FINISHED):
        raise Conflict("The target holds a complete backup, which is never overwritten; choose another target")
    if exists(target, STARTED):
        try:
            found = msgspec.json.decode(target.get(STARTED), type=BackupStart)
        except (ValueError, RecursionError) as error:
            raise HashMismatch(f"{STARTED} in the target is damaged ({error}); choose another target") from None
        if found.source != source:
            raise Conflict(f"The target holds an incomplete backup of {found.source}; choose another target")
        return found
    if target.list(limit=1):
        raise Conflict("The target is not empty and not a backup; choose an empty target")
    return None


def write_start(target: ObjectStore, source: str, checkpoint: str, at_ms: int | None = None) -> None:
    """Record the source, checkpoint and time of a backup, so an interrupted backup can resume."""
    now_ms = round(time.time() * 1_000) if at_ms is None else at_ms
    target.put(STARTED, msgspec.json.encode(BackupStart(source, checkpoint, _now(), now_ms)))


def write_finish(target: ObjectStore, manifest: ManifestWriter, *, data_format: int, version: str) -> BackupSummary:
    """Write the manifest and backup.json: the backup is complete."""
    manifest.file.seek(0)
    sha = hashlib.sha256()
    for chunk in read_chunks(manifest.file):
        sha.update(chunk)
    manifest.file.seek(0)
    target.write(MANIFEST, read_chunks(manifest.file))
    started = msgspec.json.decode(target.get(STARTED), type=BackupStart)
    summary = BackupSummary(
        BACKUP_FORMAT,
        data_format,
        version,
        _now(),
        manifest.files,
        manifest.bytes,
        sha.hexdigest(),
        started.at_ms,
    )
    target.put(FINISHED, add_checksum(msgspec.json.encode(summary)))
    target.delete(STARTED)
    return summary


def copy_file(file: BackupFile, open_file: Callable[[], Iterator[bytes]], target: ObjectStore) -> ManifestEntry:
    """Copy a file to the target, and compare it with its recorded size and hash.

    Raises:
        HashMismatch: the file is damaged.
        MissingObject: the file does not exist.
    """
    sha, size = hashlib.sha256(), 0

    def checked() -> Iterator[bytes]:
        nonlocal size
        for chunk in open_file():
            sha.update(chunk)
            size += len(chunk)
            yield chunk
        if file.sha256 is not None and (size, sha.hexdigest()) != (file.size, file.sha256):
            raise HashMismatch(
                f"{file.path} is damaged, so the backup is incomplete; run `fastness doctor` to find all damage"
            )

    try:
        target.write(file.path, checked())
    except ObjectNotFound as error:
        raise missing_object(file.path) from error
    return ManifestEntry(file.path, size, sha.hexdigest())


def remove_prefix(target: ObjectStore, prefix: str) -> None:
    """Remove every file below `prefix`."""
    while page := target.list(prefix, limit=OBJECT_LIST_MAX):
        for meta in page:
            target.delete(meta.path)


def exists(store: ObjectStore, path: str) -> bool:
    """Whether the store has an object at `path`."""
    return object_size(store, path) is not None


def object_size(store: ObjectStore, path: str) -> int | None:
    """The size of an object; None if it does not exist."""
    try:
        return store.head(path).size
    except ObjectNotFound:
        return None


def missing_object(path: str) -> MissingObject:
    return MissingObject(
        f"{path} is missing from the object store, so the backup is incomplete; "
        "run `fastness doctor` to find all damage"
    )


def _now() -> str:
    return printing.timestamp(round(time.time() * 1_000)) or ""
