"""The backup of a running server, which makes the checkpoint and sends its files one by one.

    begin ──► list of all files ──► each file, checked ──► manifest ──► end

The server keeps serving; later writes are not part of the backup. An interrupted backup resumes with the same
checkpoint while the server still has it: files that are complete at the target are not sent again. An object that the
checkpoint refers to may disappear while it is copied, if a world is deleted. Then a new checkpoint is made, and the
objects that were copied stay.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.cli import backup_format, connect, printing
from fastness.cli.backup_format import BackupSummary, ManifestEntry, ManifestWriter
from fastness.cli.printing import Advance
from fastness.errors import MissingObject, NotFound
from fastness.handles.sync.plane import Plane
from fastness.wire.backups import BackupBegun, BackupFile

_ATTEMPTS: Final = 3
_PER_CHECKPOINT: Final = ("keyspace", "activity")  # The parts that differ between checkpoints.


def backup(source: connect.Target, dest: str) -> tuple[BackupSummary, bool]:
    """Copy all data of the server `source` to `dest`; the backup, and whether a universe is encrypted.

    Raises:
        Conflict: `dest` holds something else.
        Corrupt: data on the server is damaged, so the backup cannot be completed.
    """
    target = backup_format.open_target(dest)
    started = backup_format.find_started(target, source.url)
    checkpoint = None if started is None else msgspec.json.decode(started.checkpoint, type=BackupBegun)
    with connect.open_plane(source) as plane, tempfile.TemporaryFile() as listed:
        for attempt in range(_ATTEMPTS):
            checkpoint = _prepare(plane, checkpoint, source.url, target, listed)
            try:
                summary = _copy_files(plane, checkpoint, target, listed)
            except MissingObject:
                plane.backups.end(checkpoint.id)
                checkpoint = None
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                plane.backups.end(checkpoint.id)
                return summary, checkpoint.encrypted
    raise AssertionError("the last attempt returns or raises")


def _prepare(
    plane: Plane, checkpoint: BackupBegun | None, source: str, target: ObjectStore, listed: IO[bytes]
) -> BackupBegun:
    """The checkpoint to copy: the one of an interrupted backup, or a new one. Writes its list of files to `listed`."""
    if checkpoint is not None:
        try:
            _write_list(plane, checkpoint, listed)
        except NotFound:
            pass
        else:
            return checkpoint
    for part in _PER_CHECKPOINT:  # The target holds files of another checkpoint.
        backup_format.remove_prefix(target, part)
    checkpoint = plane.backups.begin()
    backup_format.write_start(target, source, msgspec.json.encode(checkpoint).decode(), checkpoint.at_ms)
    _write_list(plane, checkpoint, listed)
    return checkpoint


def _write_list(plane: Plane, checkpoint: BackupBegun, listed: IO[bytes]) -> None:
    """Write the list of all files, so the server does not keep it open while they are copied."""
    listed.seek(0)
    listed.truncate()
    with printing.progress("Files") as advance:
        for file in plane.backups.files(checkpoint.id):
            listed.write(msgspec.json.encode(file) + b"\n")
            advance(1)


def _copy_files(plane: Plane, checkpoint: BackupBegun, target: ObjectStore, listed: IO[bytes]) -> BackupSummary:
    listed.seek(0)
    total = sum(msgspec.json.decode(line, type=BackupFile).size for line in listed)
    listed.seek(0)
    with tempfile.TemporaryFile() as manifest_file, printing.progress("Bytes", total) as advance:
        manifest = ManifestWriter(manifest_file)
        for line in listed:
            file = msgspec.json.decode(line, type=BackupFile)
            copied = _copied_entry(file, target)
            if copied is not None:
                advance(file.size)
            manifest.add(copied or _copy_file(plane, checkpoint, file, target, advance))
        return backup_format.write_finish(
            target, manifest, data_format=checkpoint.data_format, version=checkpoint.version
        )


def _copied_entry(file: BackupFile, target: ObjectStore) -> ManifestEntry | None:
    """The entry of a file that an earlier attempt has copied. A target stores a file completely or not at all."""
    if backup_format.object_size(target, file.path) != file.size:
        return None
    if file.sha256 is not None:
        return ManifestEntry(file.path, file.size, file.sha256)
    sha = hashlib.sha256()
    for part in target.open(file.path):
        sha.update(part)
    return ManifestEntry(file.path, file.size, sha.hexdigest())


def _copy_file(
    plane: Plane, checkpoint: BackupBegun, file: BackupFile, target: ObjectStore, advance: Advance
) -> ManifestEntry:
    def chunks() -> Iterator[bytes]:
        for chunk in plane.backups.open(
            checkpoint.id, file.path, length=file.size
        ):  # Session logs may have grown since.
            yield chunk
            advance(len(chunk))

    try:
        entry = backup_format.copy_file(file, chunks, target)
    except NotFound as error:
        raise backup_format.missing_object(file.path) from error
    if entry.size != file.size:
        raise MissingObject(f"Received {entry.size} bytes of {file.path} instead of {file.size}; run the backup again")
    return entry
