"""Copies what can be read of a damaged data directory to a new one, for `fastness doctor --salvage`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.directory_lock import directory_lock
from fastness.backends.rocksdb.salvage import salvage
from fastness.errors import Conflict, DirectoryInUse, NotFound
from fastness.folders import make_folder
from fastness.kv.formats import FORMAT
from fastness.layers import lineages
from fastness.plane.formats import MARKER
from fastness.private_files import FILE_MODE, open_private
from fastness.runtime.maintenance.queue_repair import repair_queues

_FOLDERS = ("objects", "activity")


class SalvagedDirectory(NamedTuple):
    """What was copied, and a description of each part that was not."""

    pairs: int
    files: int
    lost: list[str]


def salvage_directory(source: Path, target: Path) -> SalvagedDirectory:
    """Copy the readable parts of the data directory `source` to the new one `target`.

    Counters and due entries of queues are corrected, where commits that are lost left them wrong.

    Raises:
        NotFound: there is nothing at `source`.
        Conflict: `target` exists.
        DirectoryInUse: another process has `source` open.
    """
    if not (source / "kv").is_dir() and not (source / MARKER).exists():
        raise NotFound(f"There is no plane in {source}; check the path")
    if target.exists():
        raise Conflict(f"{target} already exists, and is not overwritten; choose another target, or move it away")
    lost: list[str] = []
    make_folder(target)
    if (source / "kv").is_dir():
        with directory_lock(source / "kv") as is_free:
            if not is_free:
                target.rmdir()
                raise DirectoryInUse(f"{source} is open in another process; stop it, then run this again")
            pairs, _, lost = salvage(source / "kv", target / "kv")
    else:
        pairs, _, lost = salvage(source / "kv", target / "kv")
        lost.append(f"the key space {source / 'kv'}: it is missing")
    files = sum(_copy_files(source, target, lost))
    with RocksDatabase(target / "kv") as database:
        repair_queues(database)
        database.transact(lineages.begin, "salvaged")
    with open(target / MARKER, "wb", opener=open_private) as marker:
        marker.write(msgspec.json.encode({"format": FORMAT}))
    return SalvagedDirectory(pairs, files, lost)


def _copy_files(source: Path, target: Path, lost: list[str]) -> Iterator[int]:
    """Copy the object store and the session logs; yields 1 for each file."""
    for folder in _FOLDERS:
        for file in sorted((source / folder).rglob("*")):
            if not file.is_file():
                continue
            copy = target / file.relative_to(source)
            make_folder(copy.parent)
            try:
                shutil.copy2(file, copy)
                copy.chmod(FILE_MODE)
            except OSError as error:
                lost.append(f"{file}: {error.strerror}")
            else:
                yield 1
