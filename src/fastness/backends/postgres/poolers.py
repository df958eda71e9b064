"""Refuses connection poolers that give each transaction another session.

Fastness prepares statements, changes settings and listens, all of which belong to a session. A pooler in session mode
keeps a session for each connection; one in transaction or statement mode, as of PgBouncer, does not.

A pooler cannot give out the cancel keys of the servers behind it, so the process id that a connection was told is not
that of its server. Only then is it looked at more closely: two connections take turns, and in session mode each of them
always reaches its own server.
"""

from typing import Final

import psycopg

from fastness.backends.postgres.connections import connect
from fastness.errors import Unsupported

_ROUNDS: Final = 8  # A pooler with other clients may give a connection the same server a few times in a row.
_SERVER: Final = "SELECT pg_backend_pid()"


def check_no_transaction_pooler(url: str, connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Raise Unsupported if the sessions of `connection` are shared with others."""
    if _server(connection) == connection.info.backend_pid:
        return
    other = connect(url)
    try:
        servers: tuple[set[object], set[object]] = set(), set()
        for _ in range(_ROUNDS):
            for each, found in zip((connection, other), servers, strict=True):
                found.add(_server(each))
    finally:
        other.close()
    if any(len(found) > 1 for found in servers) or servers[0] == servers[1]:
        raise Unsupported(
            "A connection pooler in transaction or statement mode is between Fastness and PostgreSQL; connect to "
            "PostgreSQL directly, or set pool_mode = session for this database in the pooler"
        )


def _server(connection: psycopg.Connection[tuple[object, ...]]) -> object:
    row = connection.execute(_SERVER, prepare=False).fetchone()
    return None if row is None else row[0]
