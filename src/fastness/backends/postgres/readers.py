"""Reads a PostgreSQL plane while no process writes to it.

Its connections are read-only, which the server enforces. One of them holds a lock on the table that allows reads and
blocks writes. The server releases the lock when the process ends, however that happens.
"""

from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fastness.backends.postgres.connections import APPLICATION, connect, invalid_url_error
from fastness.backends.postgres.database import PostgresDatabase
from fastness.errors import DatabaseFailed, PlaneInUse
from fastness.kv.value_cipher import ValueCipher

_EXCLUSIVE_APPLICATION: Final = "fastness-migrate"  # Distinguishes an exclusive user from ordinary connections.
_LOCK_WAIT: Final = "5s"  # A running transaction of Fastness ends within this time.
_OTHERS: Final = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()
"""


class PostgresReader(PostgresDatabase):
    """A read-only key space in PostgreSQL that no other process uses or writes to while this is open."""

    def __init__(self, url: str, *, cipher: ValueCipher | None = None) -> None:
        """Connect and lock the table.

        Raises:
            Unreachable: the server does not answer.
            NotFound: the database has no plane.
            PlaneInUse: another process has the plane open, or writes to its table.
            EncryptionKeyMissing: it has encrypted universes, and `cipher` cannot unwrap their keys.
        """
        self._holder: psycopg.Connection[tuple[object, ...]] | None = None
        url = exclusive_url(url)
        given = conninfo_to_dict(url)
        # Its transactions are read-only, so a server that accepts it as `read-write` does not exist.
        session = {"target_session_attrs": "primary"} if given.get("target_session_attrs") != "any" else {}
        url = make_conninfo(url, options=f"{given.get('options', '')} -c default_transaction_read_only=on", **session)
        super().__init__(url, create=False, cipher=cipher)
        try:
            self._holder = _lock_table(url)
        except BaseException:
            super().close()
            raise

    def estimated_pairs(self) -> int:
        """The approximate number of pairs, from the server's statistics."""
        assert self._holder is not None
        row = self._holder.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'fastness_kv'::regclass")
        (found,) = row.fetchone() or (0,)
        return max(int(str(found)), 0)

    def close(self) -> None:
        super().close()
        if self._holder is not None:  # Opening fails without the keys of encrypted universes.
            self._holder.close()


def exclusive_url(url: str) -> str:
    """The URL for a connection that requires exclusive use, which `check_unused` verifies.

    Raises:
        InvalidUrl: `url` is not a PostgreSQL URL.
    """
    try:
        return make_conninfo(url, application_name=_EXCLUSIVE_APPLICATION)
    except psycopg.ProgrammingError as error:
        raise invalid_url_error(error) from None


def check_unused(url: str) -> None:
    """Raise PlaneInUse if another process has the plane open."""
    connection = connect(exclusive_url(url))
    try:
        _check_unused(connection)
    finally:
        connection.close()


def _lock_table(url: str) -> psycopg.Connection[tuple[object, ...]]:
    connection = connect(url)
    try:
        _check_unused(connection)
        connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE fastness_kv IN SHARE MODE")
    except psycopg.errors.LockNotAvailable as error:
        connection.close()
        raise PlaneInUse("Another process writes to the table fastness_kv; stop it, then run this again") from error
    except psycopg.Error as error:
        connection.close()
        raise DatabaseFailed(f"The table fastness_kv cannot be locked ({error}); connect as its owner") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_unused(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    (others,) = connection.execute(_OTHERS, (APPLICATION,)).fetchone() or (0,)
    if others:
        raise PlaneInUse(
            f"{others} Fastness connections are open on this database; stop the servers and workers, "
            "then run this again"
        )
