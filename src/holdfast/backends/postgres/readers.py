"""A PostgreSQL plane that is read while it stands still.

Its connections may not write, which the server itself enforces. One of them holds a lock on the table that lets others
read and nobody write, and ends with its process whatever happens to that.
"""

from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.backends.postgres.database import PostgresDatabase
from holdfast.backends.postgres.sessions import APPLICATION, connect, not_understood
from holdfast.errors import DatabaseFailed, PlaneInUse

_ALONE: Final = "holdfast-migrate"  # How whoever must be alone is told from everybody else.
_LOCK_WAIT: Final = "5s"  # A transaction that is under way ends within this, or is no transaction of Holdfast.
_OTHERS: Final = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()
"""


class PostgresReader(PostgresDatabase):
    """The key space of a PostgreSQL that nobody else uses or writes to, for as long as this is open."""

    def __init__(self, url: str) -> None:
        """Lock the table, and connect.

        Raises:
            Unreachable: the server does not answer.
            NotFound: there is no plane in this database.
            PlaneInUse: another process has the plane open, or writes to its table.
        """
        url = alone(url)
        options = conninfo_to_dict(url).get("options", "")
        url = make_conninfo(url, options=f"{options} -c default_transaction_read_only=on")
        super().__init__(url, create=False)
        try:
            self._holder = _still(url)
        except BaseException:
            super().close()
            raise

    def estimated_pairs(self) -> int:
        """About how many pairs there are, as far as the server knows."""
        row = self._holder.execute("SELECT reltuples::bigint FROM pg_class WHERE oid = 'holdfast_kv'::regclass")
        (found,) = row.fetchone() or (0,)
        return max(int(str(found)), 0)

    def close(self) -> None:
        super().close()
        self._holder.close()


def alone(url: str) -> str:
    """The URL for whoever must be alone, and looks whether it is.

    Raises:
        InvalidUrl: it is none.
    """
    try:
        return make_conninfo(url, application_name=_ALONE)
    except psycopg.ProgrammingError as error:
        raise not_understood(error) from None


def check_unused(url: str) -> None:
    """Raise PlaneInUse if another process has the plane open."""
    connection = connect(alone(url))
    try:
        _check_unused(connection)
    finally:
        connection.close()


def _still(url: str) -> psycopg.Connection[tuple[object, ...]]:
    connection = connect(url)
    try:
        _check_unused(connection)
        connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE holdfast_kv IN SHARE MODE")
    except psycopg.errors.LockNotAvailable as error:
        connection.close()
        raise PlaneInUse("Somebody writes to the table holdfast_kv; stop them, then run this again") from error
    except psycopg.Error as error:
        connection.close()
        raise DatabaseFailed(f"The table holdfast_kv cannot be locked ({error}); use its owner's name") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_unused(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    (others,) = connection.execute(_OTHERS, (APPLICATION,)).fetchone() or (0,)
    if others:
        raise PlaneInUse(
            f"{others} connections of Holdfast are open on this database; stop the servers and workers, "
            "then run this again"
        )
