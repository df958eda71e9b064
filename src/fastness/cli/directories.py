"""Opens an existing data directory for `doctor` and `backup`, without starting anything that runs on it."""

from pathlib import Path

from fastness.backends.objects import ObjectStore, open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.cli.connect import Target, retry_while_in_use
from fastness.errors import InvalidUrl, Unsupported
from fastness.layers.migrations import check_complete
from fastness.names import folder_at


def data_directory(target: Target, *, purpose: str) -> Path:
    """The path of a `dir:` target.

    Raises:
        Unsupported: the target is PostgreSQL.
        InvalidUrl: the target is not a data directory.
    """
    if not target.url.startswith("dir:"):
        if target.url.startswith("postgres"):
            raise Unsupported(f"A {purpose} of PostgreSQL is not supported; use its own tools (pg_dump, amcheck)")
        raise InvalidUrl(f"A {purpose} needs a data directory or a server; give --url dir:PATH or http://HOST:PORT")
    return folder_at(target.url)


def open_key_space(path: Path, patience_seconds: float) -> RocksDatabase:
    """Open the key space alone, without background tasks.

    Raises:
        DirectoryInUse: another process has it open.
        DamagedDatabase: the database is damaged.
        MigrationUnfinished: a migration to this directory is incomplete.
    """
    database = retry_while_in_use(lambda: RocksDatabase(path / "kv"), patience_seconds)
    try:
        database.read(check_complete)
    except BaseException:
        database.close()
        raise
    return database


def open_object_store(path: Path, target: Target) -> ObjectStore | None:
    """The object store of a data directory; None if it has none yet."""
    if target.objects is not None:
        return open_objects(target.objects)
    folder = path / "objects"
    return open_objects(f"dir:{folder}") if folder.is_dir() else None
