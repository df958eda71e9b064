"""`fastness backup`: a consistent, complete and checked copy of a plane. An interrupted backup resumes.

    checkpoint of the key space ──► its files, hashed ──► the objects it refers to, checked ──► session logs ──► done

The checkpoint takes milliseconds, and the directory can be opened again after it. Its files never change, and objects
are written once and referenced by the key space, so what is copied later belongs to the same point in time. DEST is
a folder or an object store (s3://…). Both store a file completely or not at all.

This module backs up a data directory that no process has open. `server_backup` backs up a running server, which makes
the checkpoint itself and sends it; the result is the same.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final

import click
import msgspec

from fastness.backends.objects import ObjectStore
from fastness.backends.rocksdb import RocksDatabase
from fastness.cli import backup_format, connect, directories, printing, server_backup
from fastness.cli.backup_format import BackupSummary, ManifestEntry, ManifestWriter
from fastness.cli.commands import LeafCommand
from fastness.cli.values import read_chunks
from fastness.errors import InvalidArgument
from fastness.folders import sync_folder, sync_tree
from fastness.kv.formats import FORMAT
from fastness.plane.formats import check_marker
from fastness.runtime.maintenance.checkpoints import referenced_objects, rotated_logs
from fastness.version import __version__
from fastness.wire.backups import BackupFile

_KEY_SPACE_COPIED: Final = "keyspace.jsonl"  # Written when all files of the key space are copied.


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness --url dir:./data backup ./backups/monday",
        "fastness --url dir:./data backup s3://bucket/monday",
        "fastness --url http://127.0.0.1:9440 backup ./backups/monday",
    ],
)
@click.argument("dest")
def backup(dest: str) -> None:
    """DEST is a new folder or an object store.

    A server keeps serving during its backup; the token must allow backup:* in every universe. A data directory must not
    be open in another process while the backup starts, which takes milliseconds. Run the command again to resume an
    interrupted backup.
    """
    source = connect.current_target()
    summary, is_encrypted = server_backup.backup(source, dest) if source.is_server else _backup_directory(source, dest)
    text = f"Copied {summary.files:,} files ({summary.bytes:,} bytes) to {dest}; all checksums match"
    printing.result(text, {"path": dest, **msgspec.structs.asdict(summary)})
    if is_encrypted:
        click.echo(
            "Restoring this backup needs the master key of its encrypted universes, which is not part of it. Keep a "
            "copy of the key apart from the backup.",
            err=True,
        )


def _backup_directory(source: connect.Target, dest: str) -> tuple[BackupSummary, bool]:
    """Copy all data of a directory to `dest`; the backup, and whether a universe is encrypted."""
    path = directories.data_directory(source, purpose="backup")
    check_marker(path)
    objects = directories.open_object_store(path, source)
    target = _open_target(dest, path)
    checkpoint = _checkpoint(path, target, source.patience_seconds)
    with tempfile.TemporaryFile() as file:
        manifest = ManifestWriter(file)
        _copy_key_space(checkpoint, target, manifest)
        with RocksDatabase(checkpoint) as database:
            is_encrypted = database.cipher.is_on
            referenced = (file for file in referenced_objects(database, objects) if file is not None)
            logs = () if objects is None else rotated_logs(objects)
            _copy_objects(chain(referenced, logs), objects, target, manifest)
        _copy_folder(path / "activity", "activity", target, manifest)
        summary = backup_format.write_finish(target, manifest, data_format=FORMAT, version=__version__)
    target.delete(_KEY_SPACE_COPIED)
    shutil.rmtree(checkpoint)
    return summary, is_encrypted


def _open_target(dest: str, source: Path) -> ObjectStore:
    if "://" not in dest:
        folder = Path(dest.removeprefix("dir:")).absolute()
        if folder == source.absolute() or source.absolute() in folder.parents:
            raise InvalidArgument(f"{dest} is inside {source}; choose a target outside the backed-up directory")
    return backup_format.open_target(dest)


def _checkpoint(source: Path, target: ObjectStore, patience_seconds: float) -> Path:
    """The checkpoint to copy: the one of an interrupted backup, or a new one."""
    before = backup_format.find_started(target, str(source.absolute()))
    if before is not None:
        if (left := source / before.checkpoint).is_dir():
            return left
        # The earlier checkpoint is gone, or was not complete. Copied objects stay valid; the files of the key space are
        # copied again.
        for part in source.glob(f"{before.checkpoint}.*"):
            shutil.rmtree(part)
        target.delete(_KEY_SPACE_COPIED)
        backup_format.remove_prefix(target, "keyspace")
    checkpoint = f".backup-{uuid.uuid4().hex[:12]}"
    with directories.open_key_space(source, patience_seconds) as database:
        # Recorded before it is made, so a failed backup never leaves an unknown checkpoint on the disk.
        backup_format.write_start(target, str(source.absolute()), checkpoint)
        draft = source / f"{checkpoint}.making"
        database.checkpoint(draft)
    # A folder with the name of the checkpoint is complete, also after a power loss.
    sync_tree(draft)
    draft.rename(source / checkpoint)
    sync_folder(source)
    return source / checkpoint


def _copy_key_space(checkpoint: Path, target: ObjectStore, manifest: ManifestWriter) -> None:
    """Copy the files of a checkpoint, unless all were copied before: opening it since then has changed them."""
    if backup_format.exists(target, _KEY_SPACE_COPIED):
        for line in target.get(_KEY_SPACE_COPIED).splitlines():
            manifest.add(msgspec.json.decode(line, type=ManifestEntry))
        return
    entries: list[ManifestEntry] = []
    files = [file for file in sorted(checkpoint.iterdir()) if file.name != "LOCK"]
    with printing.progress("Key space", sum(file.stat().st_size for file in files)) as advance:
        for file in files:
            entry = _copy_file(file, f"keyspace/{file.name}", target)
            entries.append(entry)
            advance(entry.size)
            manifest.add(entry)
    target.put(_KEY_SPACE_COPIED, b"\n".join(map(msgspec.json.encode, entries)))


def _copy_objects(
    files: Iterable[BackupFile], objects: ObjectStore | None, target: ObjectStore, manifest: ManifestWriter
) -> None:
    with printing.progress("Objects") as advance:
        for file in files:
            copied = msgspec.structs.replace(file, path=f"objects/{file.path}")
            if file.sha256 is not None and backup_format.object_size(target, copied.path) == file.size:
                # An interrupted backup has already copied and checked it.
                manifest.add(ManifestEntry(copied.path, file.size, file.sha256))
            elif objects is None:
                raise backup_format.missing_object(file.path)
            else:
                manifest.add(backup_format.copy_file(copied, lambda path=file.path: objects.open(path), target))  # type: ignore[misc]
            advance(1)


def _copy_folder(folder: Path, name: str, target: ObjectStore, manifest: ManifestWriter) -> None:
    """Copy the files of a folder. Files that disappear meanwhile were rotated into the object store."""
    for parent, _, files in os.walk(folder):
        for file in sorted(files):
            path = Path(parent) / file
            try:
                manifest.add(_copy_file(path, f"{name}/{path.relative_to(folder).as_posix()}", target))
            except FileNotFoundError:
                continue


def _copy_file(file: Path, path: str, target: ObjectStore) -> ManifestEntry:
    with file.open("rb") as stream:
        return backup_format.copy_file(BackupFile(path, file.stat().st_size), lambda: read_chunks(stream), target)
