"""`holdfast restore`: a data directory from a backup, every byte of it checked.

Everything goes into TARGET.restoring, and TARGET appears when it is whole. A restore that was interrupted goes on where
it was: what is there already is hashed again instead of copied.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec
from obstore.store import LocalStore

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.cli import connect, printing
from holdfast.cli.backup_format import BACKUP_FORMAT, FINISHED, MANIFEST, Finished, Line
from holdfast.cli.commands import Verb
from holdfast.errors import Conflict, HashMismatch, MissingObject, NotFound, ObjectNotFound, SchemaMismatch
from holdfast.names import folder_at
from holdfast.plane.formats import FORMAT, MARKER

_PLACES: Final = {"keyspace": "kv", "objects": "objects", "activity": "activity"}  # Where each part of a backup goes.


@click.command(
    cls=Verb,
    examples=[
        "holdfast restore ./backups/monday ./data",
        "holdfast restore s3://bucket/monday ./data --objects s3://bucket/objects",
    ],
)
@click.argument("source")
@click.argument("target")
def restore(source: str, target: str) -> None:
    """Make the data directory TARGET from the backup SOURCE, and check every file of it.

    TARGET must not be there yet. With --objects, big bytes go to that store.
    """
    folder = folder_at(target).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Conflict(f"{folder} is there already, and is not written over; choose another place, or move it away")
    store = _store_of(source)
    finished = _finished(store, source)
    draft = folder.with_name(f"{folder.name}.restoring")
    files = open_objects(f"dir:{draft}")
    elsewhere = connect.target().objects
    objects = None if elsewhere is None else open_objects(elsewhere)
    with printing.progress("Bytes", finished.bytes) as advance:
        for line in _manifest(store, finished):
            part, _, rest = line.path.partition("/")
            if part not in _PLACES:
                raise HashMismatch(f"{MANIFEST} of the backup names {line.path}, which is no part of one; use another")
            if part == "objects" and objects is not None:
                _bring(store, line, objects, rest)
            else:
                _bring(store, line, files, f"{_PLACES[part]}/{rest}")
            advance(line.size)
    files.put(MARKER, msgspec.json.encode({"format": finished.data_format}))
    shutil.rmtree(draft / ".staging", ignore_errors=True)
    RocksDatabase(draft / "kv").close()  # What cannot be opened is not restored.
    _publish(draft, folder)
    said = f"{finished.files:,} files of {finished.at} are in {folder}, and every one has the hash that it had"
    printing.done(said, {"path": str(folder), **msgspec.structs.asdict(finished)})


def _store_of(source: str) -> ObjectStore:
    """The store of a backup, to read from: its folder may be on a medium that cannot be written."""
    if source.startswith(("s3://", "az://", "gs://")):
        return open_objects(source)
    folder = folder_at(source).absolute()
    if not folder.is_dir():
        raise NotFound(f"There is no backup at {folder}; check the path")
    return ObjectStore(LocalStore(folder))


def _finished(store: ObjectStore, source: str) -> Finished:
    try:
        finished = msgspec.json.decode(store.get(FINISHED), type=Finished)
    except ObjectNotFound:
        raise NotFound(f"{source} holds no finished backup (there is no {FINISHED}); finish it first") from None
    except msgspec.MsgspecError as error:
        raise HashMismatch(f"{FINISHED} in {source} is damaged ({error}); use another backup") from None
    if finished.format != BACKUP_FORMAT or finished.data_format != FORMAT:
        raise SchemaMismatch(
            f"The backup has format {finished.format} of data format {finished.data_format}, and this version knows "
            f"{BACKUP_FORMAT} and {FORMAT}; upgrade Holdfast"
        )
    return finished


def _manifest(store: ObjectStore, finished: Finished) -> Iterator[Line]:
    """Every file of the backup; the manifest is hashed before a line of it is believed."""
    sha = hashlib.sha256()
    try:
        for part in store.open(MANIFEST):
            sha.update(part)
        if sha.hexdigest() != finished.manifest_sha256:
            raise HashMismatch(f"{MANIFEST} of the backup is damaged; use another backup")
        rest = b""
        for part in store.open(MANIFEST):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield msgspec.json.decode(line, type=Line)
    except ObjectNotFound:
        raise MissingObject(f"{MANIFEST} is not in the backup; use another backup") from None


def _bring(source: ObjectStore, line: Line, target: ObjectStore, path: str) -> None:
    """Copy one file, unless it is there, and check it either way."""
    if _hash_of(target, path) == line.sha256:
        return
    sha = hashlib.sha256()

    def checked() -> Iterator[bytes]:
        for part in source.open(line.path):
            sha.update(part)
            yield part
        if sha.hexdigest() != line.sha256:
            raise HashMismatch(f"{line.path} of the backup is damaged; use another backup")

    try:
        target.write(path, checked())
    except ObjectNotFound:
        raise MissingObject(f"{line.path} is not in the backup; use another backup") from None


def _hash_of(store: ObjectStore, path: str) -> str | None:
    sha = hashlib.sha256()
    try:
        for part in store.open(path):
            sha.update(part)
    except ObjectNotFound:
        return None
    return sha.hexdigest()


def _publish(draft: Path, folder: Path) -> None:
    if folder.exists():
        folder.rmdir()
    draft.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
