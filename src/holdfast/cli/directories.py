"""A data directory as `doctor` and `backup` see it without a server: opened as it is, never made, nothing running."""

from pathlib import Path

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.cli.connect import Target, patiently
from holdfast.errors import InvalidUrl, Unsupported
from holdfast.layers.migrations import check_complete
from holdfast.names import folder_at


def path_of(place: Target, *, what_for: str) -> Path:
    """The folder of a `dir:` URL.

    Raises:
        Unsupported: it is a PostgreSQL.
    """
    if not place.url.startswith("dir:"):
        if place.url.startswith("postgres"):
            raise Unsupported(f"PostgreSQL has its own tools for a {what_for} (pg_dump, amcheck); use those")
        raise InvalidUrl(f"A {what_for} is for a data directory or a server; give --url dir:PATH, or http://HOST:PORT")
    return folder_at(place.url)


def open_key_space(path: Path, patience_seconds: float) -> RocksDatabase:
    """The key space, and nothing that runs on it.

    Raises:
        DirectoryInUse: another process has it open.
        DamagedDatabase: what it holds is damaged.
        MigrationUnfinished: only a part of a plane was migrated to it.
    """
    database = patiently(lambda: RocksDatabase(path / "kv"), patience_seconds)
    try:
        database.read(check_complete)
    except BaseException:
        database.close()
        raise
    return database


def objects_of(path: Path, place: Target) -> ObjectStore | None:
    """Where the big bytes are; None if nothing was ever stored there."""
    if place.objects is not None:
        return open_objects(place.objects)
    folder = path / "objects"
    return open_objects(f"dir:{folder}") if folder.is_dir() else None
