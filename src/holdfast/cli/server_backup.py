"""The backup of a server that runs: it makes the checkpoint, and sends the files one by one.

    begin ──► list of all files ──► each of them, checked ──► manifest ──► end

The server goes on; what it writes meanwhile is not in the backup. A backup that was interrupted goes on with the same
checkpoint, as long as the server has it: files that are whole at the target are not sent again. What the checkpoint
names may go while it is copied, if somebody deletes a world; then another one is begun, and copied objects stay.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.cli import backup_format, connect, printing
from holdfast.cli.backup_format import Finished, Line, Written
from holdfast.cli.printing import Advance
from holdfast.errors import MissingObject, NotFound
from holdfast.handles import Plane
from holdfast.wire.backups import BackupBegun, BackupFile

_ATTEMPTS: Final = 3
_ITS_OWN: Final = ("keyspace", "activity")  # What belongs to one checkpoint alone.


def backup(place: connect.Target, dest: str) -> Finished:
    """Copy everything that the server at `place` keeps to `dest`.

    Raises:
        Conflict: something else is there already.
        Corrupt: something on the server is damaged, so there is no whole backup.
    """
    target = backup_format.store_at(dest)
    before = backup_format.started(target, place.url)
    begun = None if before is None else msgspec.json.decode(before.checkpoint, type=BackupBegun)
    with connect.opened(place) as plane, tempfile.TemporaryFile() as listed:
        for attempt in range(_ATTEMPTS):
            begun = _listing(plane, begun, place.url, target, listed)
            try:
                finished = _copied(plane, begun, target, listed)
            except MissingObject:
                plane.backups.end(begun.id)
                begun = None
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                plane.backups.end(begun.id)
                return finished
    raise AssertionError("the last attempt returns or raises")


def _listing(
    plane: Plane, begun: BackupBegun | None, source: str, target: ObjectStore, listed: IO[bytes]
) -> BackupBegun:
    """The checkpoint to copy, with its files in `listed`: the one that was begun before, or a new one."""
    if begun is not None:
        try:
            _list(plane, begun, listed)
        except NotFound:
            pass
        else:
            return begun
    for part in _ITS_OWN:  # What is there is of another moment.
        backup_format.remove(target, part)
    begun = plane.backups.begin()
    backup_format.start(target, source, msgspec.json.encode(begun).decode())
    _list(plane, begun, listed)
    return begun


def _list(plane: Plane, begun: BackupBegun, listed: IO[bytes]) -> None:
    """Write down all files, so that the server need not keep its list while they are copied."""
    listed.seek(0)
    listed.truncate()
    with printing.progress("Files") as advance:
        for file in plane.backups.files(begun.id):
            listed.write(msgspec.json.encode(file) + b"\n")
            advance(1)


def _copied(plane: Plane, begun: BackupBegun, target: ObjectStore, listed: IO[bytes]) -> Finished:
    listed.seek(0)
    total = sum(msgspec.json.decode(line, type=BackupFile).size for line in listed)
    listed.seek(0)
    with tempfile.TemporaryFile() as manifest, printing.progress("Bytes", total) as advance:
        written = Written(manifest)
        for line in listed:
            file = msgspec.json.decode(line, type=BackupFile)
            known = _known(file, target)
            if known is not None:
                advance(file.size)
            written.add(known or _sent(plane, begun, file, target, advance))
        return backup_format.finish(target, manifest, written, data_format=begun.data_format, version=begun.version)


def _known(file: BackupFile, target: ObjectStore) -> Line | None:
    """The file, if an earlier attempt has brought it: a target has a file whole or not at all."""
    if backup_format.size_of(target, file.path) != file.size:
        return None
    if file.sha256 is not None:
        return Line(file.path, file.size, file.sha256)
    sha = hashlib.sha256()
    for part in target.open(file.path):
        sha.update(part)
    return Line(file.path, file.size, sha.hexdigest())


def _sent(plane: Plane, begun: BackupBegun, file: BackupFile, target: ObjectStore, advance: Advance) -> Line:
    def pieces() -> Iterator[bytes]:
        for piece in plane.backups.open(begun.id, file.path, length=file.size):  # Session logs may have grown since.
            yield piece
            advance(len(piece))

    try:
        line = backup_format.copy(file, pieces, target)
    except NotFound as error:
        raise backup_format.missing(file.path) from error
    if line.size != file.size:
        raise MissingObject(f"{file.path} came with {line.size} bytes instead of {file.size}; run the backup again")
    return line
