"""`fastness restore`: creates a data directory from a backup, and checks every byte.

Files are restored to TARGET.restoring, which is renamed to TARGET when it is complete. An interrupted restore resumes:
files that exist already are hashed again instead of copied.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec
from obstore.store import LocalStore

from fastness.backends.objects import ObjectStore, open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.cli import connect, printing
from fastness.cli.backup_format import BACKUP_FORMAT, FINISHED, MANIFEST, BackupSummary, ManifestEntry
from fastness.cli.commands import LeafCommand
from fastness.errors import Conflict, HashMismatch, MissingObject, NotFound, ObjectNotFound, SchemaMismatch
from fastness.folders import sync_folder, sync_tree
from fastness.json_checksums import has_valid_checksum
from fastness.kv.formats import FORMAT
from fastness.layers import lineages
from fastness.layers.lineages import Identity
from fastness.names import folder_at
from fastness.plane.formats import MARKER

_FOLDERS: Final = {"keyspace": "kv", "objects": "objects", "activity": "activity"}  # By part of a backup.


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness restore ./backups/monday ./data",
        "fastness restore s3://bucket/monday ./data --objects s3://bucket/objects",
    ],
)
@click.argument("source")
@click.argument("target")
def restore(source: str, target: str) -> None:
    """SOURCE is a backup, and TARGET a data directory that does not exist yet. Every file is checked.

    With --objects, blobs and segments are restored to that object store.
    """
    folder = folder_at(target).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Conflict(f"{folder} already exists, and is not overwritten; choose another target, or move it away")
    store = _open_backup(source)
    summary = _read_summary(store, source)
    draft = folder.with_name(f"{folder.name}.restoring")
    files = open_objects(f"dir:{draft}")
    objects_url = connect.current_target().objects
    objects = None if objects_url is None else open_objects(objects_url)
    restored: set[str] = set()
    with printing.progress("Bytes", summary.bytes) as advance:
        for entry in _read_manifest(store, summary):
            part, _, rest = entry.path.partition("/")
            if part not in _FOLDERS:
                raise HashMismatch(
                    f"{MANIFEST} of the backup lists {entry.path}, which is not part of a backup; use another backup"
                )
            if part == "objects" and objects is not None:
                _restore_file(store, entry, objects, rest)
            else:
                _restore_file(store, entry, files, f"{_FOLDERS[part]}/{rest}")
                restored.add(f"{_FOLDERS[part]}/{rest}")
            advance(entry.size)
    files.put(MARKER, msgspec.json.encode({"format": summary.data_format}))
    shutil.rmtree(draft / ".staging", ignore_errors=True)
    identity = _begin_lineage(draft / "kv", restored, summary.checkpoint_ms)
    _publish(draft, folder)
    text = (
        f"Restored {summary.files:,} files of {summary.at} to {folder}; all checksums match. "
        f"Its lineage is {identity.lineage}"
    )
    fields = {"path": str(folder), "plane": identity.plane, "lineage": identity.lineage}
    printing.result(text, {**fields, **msgspec.structs.asdict(summary)})


def _begin_lineage(key_space: Path, restored: set[str], checkpoint_ms: int) -> Identity:
    """Open the restored key space, which raises if that is impossible, and begin another lineage in it."""
    for file in key_space.iterdir():
        if f"kv/{file.name}" not in restored:
            file.unlink()  # An interrupted restore opened the key space before: its log must not be applied again.
    with RocksDatabase(key_space) as database:
        return database.transact(lineages.begin, "restored", until_ms=checkpoint_ms)


def _open_backup(source: str) -> ObjectStore:
    """The object store of a backup, for reading. Its folder may be on a read-only medium."""
    if source.startswith(("s3://", "az://", "gs://")):
        return open_objects(source)
    folder = folder_at(source).absolute()
    if not folder.is_dir():
        raise NotFound(f"No backup at {folder}; check the path")
    return ObjectStore(LocalStore(folder))


def _read_summary(store: ObjectStore, source: str) -> BackupSummary:
    try:
        data = store.get(FINISHED)
        summary = msgspec.json.decode(data, type=BackupSummary)
        if not has_valid_checksum(data):
            raise ValueError("its checksum does not match")
    except ObjectNotFound:
        raise NotFound(
            f"{source} is not a complete backup ({FINISHED} is missing); complete it with: "
            f"fastness --url URL backup {source}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise HashMismatch(f"{FINISHED} in {source} is damaged ({error}); use another backup") from None
    if summary.format != BACKUP_FORMAT or summary.data_format != FORMAT:
        raise SchemaMismatch(
            f"The backup has format {summary.format} with data format {summary.data_format}; this version supports "
            f"{BACKUP_FORMAT} and {FORMAT}; upgrade Fastness"
        )
    return summary


def _read_manifest(store: ObjectStore, summary: BackupSummary) -> Iterator[ManifestEntry]:
    """The entries of the backup's manifest, whose hash is checked first."""
    sha = hashlib.sha256()
    try:
        for part in store.open(MANIFEST):
            sha.update(part)
        if sha.hexdigest() != summary.manifest_sha256:
            raise HashMismatch(f"{MANIFEST} of the backup is damaged; use another backup")
        rest = b""
        for part in store.open(MANIFEST):
            *lines, rest = (rest + part).split(b"\n")
            for encoded in lines:
                yield msgspec.json.decode(encoded, type=ManifestEntry)
    except ObjectNotFound:
        raise MissingObject(f"{MANIFEST} is missing from the backup; use another backup") from None


def _restore_file(source: ObjectStore, entry: ManifestEntry, target: ObjectStore, path: str) -> None:
    """Copy one file unless it exists, and check it either way."""
    if _file_hash(target, path) == entry.sha256:
        return
    sha = hashlib.sha256()

    def checked() -> Iterator[bytes]:
        for part in source.open(entry.path):
            sha.update(part)
            yield part
        if sha.hexdigest() != entry.sha256:
            raise HashMismatch(f"{entry.path} of the backup is damaged; use another backup")

    try:
        target.write(path, checked())
    except ObjectNotFound:
        raise MissingObject(f"{entry.path} is missing from the backup; use another backup") from None


def _file_hash(store: ObjectStore, path: str) -> str | None:
    sha = hashlib.sha256()
    try:
        for part in store.open(path):
            sha.update(part)
    except ObjectNotFound:
        return None
    return sha.hexdigest()


def _publish(draft: Path, folder: Path) -> None:
    sync_tree(draft)  # An interrupted restore may have left files whose names are not durable yet.
    if folder.exists():
        folder.rmdir()
    draft.rename(folder)
    sync_folder(folder.parent)
