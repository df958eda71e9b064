"""From two URLs to the two sides of a migration: one that is only read, and one that must be empty or half full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from obstore.store import LocalStore

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.backends.rocksdb import RocksReader
from holdfast.errors import InvalidUrl, NotFound, TargetNotEmpty, Unsupported
from holdfast.names import folder_at
from holdfast.plane.formats import MARKER
from holdfast.plane.open import open_database
from holdfast.runtime.maintenance.migrations import PlaneStores

_OURS: Final = frozenset({MARKER, "kv", "objects", "activity"})
_SECRETS: Final = frozenset({"password", "sslpassword"})


def said(url: str) -> str:
    """A URL as it may be written down: a folder by its whole path, and nobody's password.

    Raises:
        InvalidUrl: it is none.
    """
    if url.startswith("dir:"):
        return f"dir:{folder_of(url).resolve()}"
    try:
        services = urlsplit(url)
    except ValueError as error:
        raise InvalidUrl(
            f"The URL is not understood ({error}); write dir:PATH or postgresql://user@host/database"
        ) from None
    user, at, host = services.netloc.rpartition("@")
    query = urlencode([(name, value) for name, value in parse_qsl(services.query) if name not in _SECRETS], safe="/:")
    scheme = "postgresql" if services.scheme == "postgres" else services.scheme  # Two words for the same.
    return urlunsplit(services._replace(scheme=scheme, netloc=f"{user.partition(':')[0]}{at}{host}", query=query))


@contextmanager
def opened_source(url: str, *, objects: str | None = None, logs: Path | None = None) -> Iterator[PlaneStores]:
    """A plane that nobody else has open, to read from.

    Raises:
        NotFound, PathUnusable: there is no plane, or not the folder that was named beside it.
        DirectoryInUse, PlaneInUse: somebody else uses it.
    """
    if logs is not None:
        _check_there(logs)
    if objects is not None and objects.startswith("dir:"):
        _check_there(folder_of(objects))
    if url.startswith("dir:"):
        folder = folder_of(url)
        with RocksReader(folder / "kv") as database:
            store = _read_only(objects or f"dir:{folder / 'objects'}")
            yield PlaneStores(database, store, logs or folder / "activity", database.estimated_pairs())
        return
    _check_postgres(url)
    from holdfast.backends.postgres import PostgresReader

    with PostgresReader(url) as shared:
        yield PlaneStores(shared, _read_only(objects), logs, shared.estimated_pairs())


@contextmanager
def opened_target(url: str, *, objects: str | None = None) -> Iterator[PlaneStores]:
    """A place for a plane, to write to; whether it may be written to is for a migration to see.

    Raises:
        TargetNotEmpty: a folder has something in it that is no plane.
        DirectoryInUse: somebody else has it open.
        InvalidUrl: there is no such store, or it would forget its objects.
    """
    if objects == "memory:":
        raise InvalidUrl("A store at memory: ends with this process, and the objects with it; name one that stays")
    if url.startswith("dir:"):
        folder = folder_of(url)
        if folder.is_dir() and not (folder / MARKER).exists():
            others = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
            if others:
                raise TargetNotEmpty(f"{folder} holds {others[0]}, which is no plane's; choose a new folder")
        store = None if objects is None else open_objects(objects)  # First: a URL that is none leaves nothing behind.
        with open_database(url) as database:
            yield PlaneStores(database, store or open_objects(f"dir:{folder / 'objects'}"))
        return
    _check_postgres(url)
    from holdfast.backends.postgres import PostgresDatabase, exclusive_url

    kept = None if objects is None else open_objects(objects)
    with PostgresDatabase(exclusive_url(url)) as shared:
        yield PlaneStores(shared, kept)


def check_unused(url: str) -> None:
    """Raise PlaneInUse if somebody has the PostgreSQL plane at `url` open; a folder has a lock for that."""
    if not url.startswith("dir:"):
        from holdfast.backends.postgres import check_unused

        check_unused(url)


def folder_of(url: str) -> Path:
    """The folder that a dir: URL names.

    Raises:
        InvalidUrl, PathUnusable: it names none.
    """
    path = url.removeprefix("dir:")
    if not path:
        raise InvalidUrl("dir: names no folder; write dir:PATH")
    return folder_at(path)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder, so nothing would be migrated from it; check the path")


def _read_only(url: str | None) -> ObjectStore | None:
    """A store to read from. Opening a folder as one that is written to would leave a trace in it."""
    if url is None or not url.startswith("dir:"):
        return None if url is None else open_objects(url)
    folder = folder_of(url)
    return ObjectStore(LocalStore(folder)) if folder.is_dir() else None


def _check_postgres(url: str) -> None:
    scheme = url.partition(":")[0]
    if scheme in ("http", "https"):
        raise Unsupported(
            "A server is not migrated while it runs; stop it and name its data, dir:PATH or postgresql://…, or back it "
            "up and migrate what holdfast restore makes of that"
        )
    if scheme not in ("postgresql", "postgres"):
        raise InvalidUrl(f"{scheme!r} names no plane that can be migrated; write dir:PATH or postgresql://…")
    try:
        import psycopg
    except ImportError as error:
        raise Unsupported("PostgreSQL needs its driver; run: pip install 'holdfast[postgres]'") from error
    del psycopg
