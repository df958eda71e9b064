"""`holdfast backup`: a consistent copy of everything, whole, checked, and resumable.

    checkpoint of the key space ──► its files, hashed ──► the objects that it names, checked ──► session logs ──► done

The checkpoint takes milliseconds, and the directory is free again after it: its files never change, and objects are
written once and named by the key space, so what is copied later belongs to the same moment. DEST is a folder or an
object store (s3://…), in which a file is there whole or not at all; a backup that was interrupted goes on where it was.

This is for a directory that nobody has open. `online` has the backup of a server that runs, which makes the checkpoint
itself and sends it; what comes out is the same.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import click
import msgspec

from holdfast import __version__
from holdfast.backends.objects import ObjectStore
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.cli import backup_format, connect, directories, printing, server_backup
from holdfast.cli.backup_format import Finished, Line, Written
from holdfast.cli.commands import Verb
from holdfast.cli.values import chunks
from holdfast.errors import InvalidArgument
from holdfast.plane.formats import FORMAT, check_marker
from holdfast.runtime.maintenance.checkpoints import needed, rotated_logs
from holdfast.wire.backups import BackupFile

_COPIED: Final = "keyspace.jsonl"  # Written when all files of the key space are copied, for whoever resumes.


@click.command(
    cls=Verb,
    examples=[
        "holdfast --url dir:./data backup ./backups/monday",
        "holdfast --url dir:./data backup s3://bucket/monday",
        "holdfast --url http://127.0.0.1:9440 backup ./backups/monday",
    ],
)
@click.argument("dest")
def backup(dest: str) -> None:
    """Copy everything to DEST, a new folder or an object store, as it is at one moment.

    A server goes on meanwhile, and sends what DEST gets; the token must allow backup:* in every universe. A data
    directory must not be open elsewhere while the copy begins, which takes a moment. A backup that was interrupted goes
    on where it was when it is run again.
    """
    place = connect.target()
    finished = server_backup.backup(place, dest) if place.is_server else _backup(place, dest)
    said = f"{finished.files:,} files, {finished.bytes:,} bytes are in {dest}, and every object had its hash"
    printing.done(said, {"path": dest, **msgspec.structs.asdict(finished)})


def _backup(place: connect.Target, dest: str) -> Finished:
    path = directories.path_of(place, what_for="backup")
    check_marker(path)
    objects = directories.objects_of(path, place)
    target = _target(dest, path)
    checkpoint = _checkpoint(path, target, place.patience_seconds)
    with tempfile.TemporaryFile() as manifest:
        written = Written(manifest)
        _copy_key_space(checkpoint, target, written)
        with RocksDatabase(checkpoint) as database:
            named = (file for file in needed(database) if file is not None)
            logs = () if objects is None else rotated_logs(objects)
            _copy_objects(chain(named, logs), objects, target, written)
        _copy_folder(path / "activity", "activity", target, written)
        finished = backup_format.finish(target, manifest, written, data_format=FORMAT, version=__version__)
    target.delete(_COPIED)
    shutil.rmtree(checkpoint)
    return finished


def _target(dest: str, source: Path) -> ObjectStore:
    if "://" not in dest:
        folder = Path(dest.removeprefix("dir:")).absolute()
        if folder == source.absolute() or source.absolute() in folder.parents:
            raise InvalidArgument(f"{dest} lies inside {source}; choose a place outside of what is backed up")
    return backup_format.store_at(dest)


def _checkpoint(source: Path, target: ObjectStore, patience_seconds: float) -> Path:
    """The checkpoint to copy: the one that an interrupted backup left, or a new one."""
    before = backup_format.started(target, str(source.absolute()))
    if before is not None:
        if (left := source / before.checkpoint).is_dir():
            return left
        # The moment that it was of is gone. Objects stay as they are; the files of the key space are others.
        target.delete(_COPIED)
        backup_format.remove(target, "keyspace")
    checkpoint = f".backup-{uuid.uuid4().hex[:12]}"
    with directories.open_key_space(source, patience_seconds) as database:
        # Said before it is made: a checkpoint that nobody knows of would fill the disk for ever.
        backup_format.start(target, str(source.absolute()), checkpoint)
        database.checkpoint(source / checkpoint)
    return source / checkpoint


def _copy_key_space(checkpoint: Path, target: ObjectStore, written: Written) -> None:
    """Copy the files of a checkpoint, unless all of them were: then it has been opened since, and has others."""
    if backup_format.exists(target, _COPIED):
        for encoded in target.get(_COPIED).splitlines():
            written.add(msgspec.json.decode(encoded, type=Line))
        return
    lines: list[Line] = []
    files = [file for file in sorted(checkpoint.iterdir()) if file.name != "LOCK"]
    with printing.progress("Key space", sum(file.stat().st_size for file in files)) as advance:
        for file in files:
            line = _copy_file(file, f"keyspace/{file.name}", target)
            lines.append(line)
            advance(line.size)
            written.add(line)
    target.put(_COPIED, b"\n".join(map(msgspec.json.encode, lines)))


def _copy_objects(
    files: Iterable[BackupFile], objects: ObjectStore | None, target: ObjectStore, written: Written
) -> None:
    with printing.progress("Objects") as advance:
        for file in files:
            here = msgspec.structs.replace(file, path=f"objects/{file.path}")
            if file.sha256 is not None and backup_format.size_of(target, here.path) == file.size:
                written.add(Line(here.path, file.size, file.sha256))  # An interrupted backup has copied and checked it.
            elif objects is None:
                raise backup_format.missing(file.path)
            else:
                written.add(backup_format.copy(here, lambda path=file.path: objects.open(path), target))  # type: ignore[misc]
            advance(1)


def _copy_folder(folder: Path, name: str, target: ObjectStore, written: Written) -> None:
    """Copy what is in a folder now; files that vanish meanwhile were moved into the object store."""
    for parent, _, files in os.walk(folder):
        for file in sorted(files):
            path = Path(parent) / file
            try:
                written.add(_copy_file(path, f"{name}/{path.relative_to(folder).as_posix()}", target))
            except FileNotFoundError:
                continue


def _copy_file(file: Path, path: str, target: ObjectStore) -> Line:
    with file.open("rb") as stream:

        def pieces() -> Iterator[bytes]:
            yield from chunks(stream)

        return backup_format.copy(BackupFile(path, file.stat().st_size), pieces, target)
