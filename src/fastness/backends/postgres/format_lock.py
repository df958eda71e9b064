"""The format lock: no process writes to a plane whose format it does not know.

    every session        holds the lock of the format after its newest one, shared, then reads the plane's format;
                         so does every transaction on a connection of a caller
    raising to format N  takes the lock of N, exclusively, in the transaction that writes N

The lock of a session ends with its connection. So a format is raised only while no session of an older version exists,
also not of a process that is paused; and a session that is opened later finds the new format, and is refused.
"""

from typing import Final

import psycopg

from fastness.backends.postgres.connections import connect
from fastness.errors import DatabaseFailed, PlaneInUse, SchemaMismatch
from fastness.kv import formats

_CLASS: Final = 1_178_686_292  # The two-part keys of advisory locks are apart from the one-part keys.

HOLD: Final = f"SELECT pg_advisory_lock_shared({_CLASS}, {formats.FORMAT + 1})".encode()
HOLD_IN_TRANSACTION: Final = HOLD.replace(b"pg_advisory_lock", b"pg_advisory_xact_lock")
# Sent after HOLD has been answered: its snapshot must be taken with the lock held.
READ: Final = f"SELECT encode(value, 'hex') FROM fastness_kv WHERE key = '\\x{formats.KEY.hex()}'".encode()


def check_format(found: bytes | None) -> None:
    """Raise SchemaMismatch if the plane has a newer format than this version knows. `found` is what READ returns."""
    if found is not None and (format := formats.decode(bytes.fromhex(found.decode()))) > formats.FORMAT:
        raise SchemaMismatch(formats.other_format("The plane", format))


def raise_format(url: str, to: int) -> None:
    """Raise the format of a plane from `to - 1` to `to`. Nothing else is converted.

    Raises:
        PlaneInUse: a process that does not know the format has the plane open.
        SchemaMismatch: the plane has another format than the one before.
    """
    connection = connect(url)
    try:
        connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        if connection.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [_CLASS, to]).fetchone() != (True,):
            raise PlaneInUse(
                f"A process that does not know format {to} has the plane open; upgrade or stop it, then try again. "
                "`fastness node list` lists the processes and the formats that they know"
            )
        row = connection.execute("SELECT value FROM fastness_kv WHERE key = %s FOR UPDATE", [formats.KEY]).fetchone()
        found = formats.decode(row[0]) if row is not None and isinstance(row[0], bytes) else 0
        if found == to:
            return
        if found != to - 1:
            raise SchemaMismatch(f"The plane has format {found}, and is raised to {to} from {to - 1} only")
        connection.execute("UPDATE fastness_kv SET value = %s WHERE key = %s", [formats.encode(to), formats.KEY])
        connection.execute("COMMIT")
    except psycopg.Error as error:
        raise DatabaseFailed(f"The format could not be raised ({error}); check it with `fastness node list`") from error
    finally:
        connection.close()
