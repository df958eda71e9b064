"""From a URL to a running plane.

memory:             nothing outlives the process
dir:PATH            one machine; PATH/kv is the key space, PATH/objects the objects, PATH/holdfast.json the format
postgresql://...    a PostgreSQL that several nodes share
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Final

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.clock import Clock, IdSource
from holdfast.errors import InvalidUrl, PathUnusable, SchemaMismatch, Unsupported
from holdfast.kv import Database
from holdfast.plane.ports import AsyncEmbeddedPort, EmbeddedPort

FORMAT: Final = 1
_KNOWN: Final = "memory:, dir:PATH or postgresql://user@host/database"


def open_plane(url: str, *, clock: Clock | None = None, ids: IdSource | None = None) -> EmbeddedPort:
    """The plane that `url` names, running in this process.

    Raises:
        InvalidUrl: `url` names no backend.
        PathUnusable, DirectoryInUse, DamagedDatabase, SchemaMismatch: the data directory cannot be opened.
        Unreachable: PostgreSQL does not answer.
    """
    return EmbeddedPort(open_database(url, clock=clock, ids=ids))


async def open_plane_async(url: str, *, clock: Clock | None = None, ids: IdSource | None = None) -> AsyncEmbeddedPort:
    """`open_plane` for an event loop."""
    return AsyncEmbeddedPort(await asyncio.to_thread(open_database, url, clock=clock, ids=ids))


def open_database(url: str, *, clock: Clock | None = None, ids: IdSource | None = None) -> Database:
    """The key space that `url` names."""
    if not isinstance(url, str):
        raise InvalidUrl(f"A URL is text, not {type(url).__name__}; write {_KNOWN}")
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryDatabase(clock=clock, ids=ids)
    if scheme == "dir" and rest:
        directory = Path(rest).expanduser()
        _check_format(directory)
        return RocksDatabase(directory / "kv", clock=clock, ids=ids)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return _open_postgres(url, clock, ids)
    if not colon:
        raise InvalidUrl(f"{url!r} names no backend; for a folder write dir:{url}")
    raise InvalidUrl(f"{url!r} names no backend; write {_KNOWN}")


def _open_postgres(url: str, clock: Clock | None, ids: IdSource | None) -> Database:
    try:
        from holdfast.backends.postgres import PostgresDatabase
    except ImportError as error:
        raise Unsupported("PostgreSQL needs its driver; run: pip install 'holdfast[postgres]'") from error
    return PostgresDatabase(url, clock=clock, ids=ids)


def _check_format(directory: Path) -> None:
    """Write the format of a new data directory, or refuse one that a newer Holdfast wrote."""
    marker = directory / "holdfast.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            draft = directory / f".holdfast.json.{os.getpid()}"
            with draft.open("w") as file:
                json.dump({"format": FORMAT}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(marker)
        found = json.loads(marker.read_text())["format"]
    except OSError as error:
        raise PathUnusable(f"{directory} cannot be used ({error.strerror}); choose a folder you can write") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PathUnusable(f"{marker} is not Holdfast's ({error}); choose another folder, or restore it") from error
    if found != FORMAT:
        raise SchemaMismatch(f"{directory} has format {found} and this version knows {FORMAT}; upgrade Holdfast")
