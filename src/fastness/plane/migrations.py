"""Opens the source and the target of a migration by their URLs, and upgrades the tables of a PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from obstore.store import LocalStore

from fastness.backends.objects import ObjectStore, open_objects
from fastness.backends.objects.encrypted import encrypted
from fastness.backends.rocksdb import RocksReader
from fastness.encryption_keys import KeyProvider, provider_of_environment
from fastness.errors import InvalidUrl, NotFound, TargetNotEmpty, Unsupported
from fastness.extras import how_to_install
from fastness.kv import Database
from fastness.kv.value_cipher import ValueCipher
from fastness.names import folder_at
from fastness.plane.formats import MARKER
from fastness.plane.open import open_database
from fastness.runtime.maintenance.migrations import PlaneStores

_OURS: Final = frozenset({MARKER, "kv", "objects", "activity"})
_SECRETS: Final = frozenset({"password", "sslpassword"})


def without_password(url: str) -> str:
    """A URL that can be logged and stored: with the full path of a folder, and without passwords.

    Raises:
        InvalidUrl: it is not a URL.
    """
    if url.startswith("dir:"):
        return f"dir:{folder_of(url).resolve()}"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidUrl(
            f"The URL is not understood ({error}); write dir:PATH or postgresql://user@host/database"
        ) from None
    user, at, host = parts.netloc.rpartition("@")
    query = urlencode([(name, value) for name, value in parse_qsl(parts.query) if name not in _SECRETS], safe="/:")
    scheme = "postgresql" if parts.scheme == "postgres" else parts.scheme  # Both schemes are valid.
    return urlunsplit(parts._replace(scheme=scheme, netloc=f"{user.partition(':')[0]}{at}{host}", query=query))


@contextmanager
def opened_source(
    url: str, *, objects: str | None = None, logs: Path | None = None, encryption: KeyProvider | None = None
) -> Iterator[PlaneStores]:
    """Open a plane for reading, while no other process has it open.

    `encryption` has the master keys of encrypted universes; by default, those that the environment names.

    Raises:
        EncryptionKeyMissing: the plane has encrypted universes, and the master key is missing.
        NotFound, PathUnusable: there is no plane, or one of the given folders does not exist.
        DirectoryInUse, PlaneInUse: another process has it open.
    """
    if logs is not None:
        _check_there(logs)
    if objects is not None and objects.startswith("dir:"):
        _check_there(folder_of(objects))
    if url.startswith("dir:"):
        folder = folder_of(url)
        with RocksReader(folder / "kv", cipher=_cipher(encryption)) as database:
            store = _decrypted(_read_only(objects or f"dir:{folder / 'objects'}"), database)
            yield PlaneStores(database, store, logs or folder / "activity", database.estimated_pairs())
        return
    _check_postgres(url)
    from fastness.backends.postgres import PostgresReader

    with PostgresReader(url, cipher=_cipher(encryption)) as shared:
        yield PlaneStores(shared, _decrypted(_read_only(objects), shared), logs, shared.estimated_pairs())


@contextmanager
def opened_target(
    url: str, *, objects: str | None = None, encryption: KeyProvider | None = None
) -> Iterator[PlaneStores]:
    """Open the target of a migration for writing. The migration checks whether it is empty.

    `encryption` has the master keys of the source.

    Raises:
        TargetNotEmpty: the folder contains files that do not belong to a plane.
        DirectoryInUse: another process has it open.
        InvalidUrl: the object store is unknown, or is in memory.
    """
    if objects == "memory:":
        raise InvalidUrl("An object store at memory: is lost with this process; give a persistent one")
    if url.startswith("dir:"):
        folder = folder_of(url)
        if folder.is_dir() and not (folder / MARKER).exists():
            others = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
            if others:
                raise TargetNotEmpty(
                    f"{folder} contains {others[0]}, which does not belong to a plane; choose a new folder"
                )
        store = None if objects is None else open_objects(objects)  # First, so that an invalid URL creates nothing.
        with open_database(url, encryption=_without_requirements(encryption)) as database:
            yield PlaneStores(database, encrypted(store or open_objects(f"dir:{folder / 'objects'}"), database))
        return
    _check_postgres(url)
    from fastness.backends.postgres import PostgresDatabase, exclusive_url

    kept = None if objects is None else open_objects(objects)
    with PostgresDatabase(exclusive_url(url), cipher=_cipher(_without_requirements(encryption))) as shared:
        yield PlaneStores(shared, _decrypted(kept, shared))


class _MasterKeys:
    """A key provider that requires nothing: the target of a migration has no encrypted universe at first."""

    def __init__(self, keys: KeyProvider) -> None:
        self.wrap = keys.wrap
        self.unwrap = keys.unwrap


def _without_requirements(encryption: KeyProvider | None) -> KeyProvider | None:
    keys = encryption or provider_of_environment()
    return None if keys is None else _MasterKeys(keys)


def _cipher(encryption: KeyProvider | None) -> ValueCipher | None:
    return None if encryption is None else ValueCipher(encryption)


def _decrypted(store: ObjectStore | None, database: Database) -> ObjectStore | None:
    return None if store is None else encrypted(store, database)


def check_unused(url: str) -> None:
    """Raise PlaneInUse if a process has the PostgreSQL plane at `url` open; a folder has a lock for that."""
    if not url.startswith("dir:"):
        from fastness.backends.postgres import check_unused

        check_unused(url)


def upgrade_tables(url: str) -> tuple[int, int]:
    """Create the tables of the PostgreSQL plane at `url`, or upgrade older ones. Returns the versions before and after.

    Raises:
        InvalidUrl, Unsupported: it is not PostgreSQL, or its driver is missing.
        PlaneInUse: a process uses the tables, and the upgrade needs exclusive use.
        SchemaMismatch: a newer version of Fastness created them.
    """
    _check_postgres(url)
    from fastness.backends.postgres import exclusive_url, upgrade_schema

    return upgrade_schema(exclusive_url(url))


def upgrade_sql(url: str) -> str:
    """The SQL that `upgrade_tables` would run; empty if there is nothing to do."""
    _check_postgres(url)
    from fastness.backends.postgres import exclusive_url, upgrade_script

    return upgrade_script(exclusive_url(url))


def folder_of(url: str) -> Path:
    """The folder of a dir: URL.

    Raises:
        InvalidUrl, PathUnusable: it does not name a folder.
    """
    path = url.removeprefix("dir:")
    if not path:
        raise InvalidUrl("dir: has no path; write dir:PATH")
    return folder_at(path)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder; check the path")


def _read_only(url: str | None) -> ObjectStore | None:
    """Open a store for reading. Opening a folder for writing would create files in it."""
    if url is None or not url.startswith("dir:"):
        return None if url is None else open_objects(url)
    folder = folder_of(url)
    return ObjectStore(LocalStore(folder)) if folder.is_dir() else None


def _check_postgres(url: str) -> None:
    scheme = url.partition(":")[0]
    if scheme in ("http", "https"):
        raise Unsupported(
            "A running server cannot be migrated; stop it and give its data (dir:PATH or postgresql://…), or migrate "
            "the directory that `fastness backup DEST` and `fastness restore DEST TARGET` make of it"
        )
    if scheme not in ("postgresql", "postgres"):
        raise InvalidUrl(f"{scheme!r} planes cannot be migrated; write dir:PATH or postgresql://…")
    try:
        import psycopg
    except ImportError as error:
        raise Unsupported(f"PostgreSQL needs its driver; {how_to_install('postgres')}") from error
    del psycopg
