"""The tables of a plane in PostgreSQL, and their version."""

from typing import Final

import psycopg

from holdfast.backends.postgres.connections import connect
from holdfast.errors import DatabaseFailed, NotFound, SchemaMismatch
from holdfast.kv import fence_floor

SCHEMA_VERSION: Final = 1

_SCHEMA: Final = f"""
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SELECT pg_advisory_xact_lock(5209160457213571);
    CREATE TABLE IF NOT EXISTS holdfast_meta (name text PRIMARY KEY, value text NOT NULL);
    CREATE TABLE IF NOT EXISTS holdfast_kv (key bytea PRIMARY KEY, value bytea NOT NULL);
    ALTER TABLE holdfast_kv ALTER COLUMN value SET STORAGE EXTERNAL;
    INSERT INTO holdfast_meta VALUES ('schema_version', '{SCHEMA_VERSION}') ON CONFLICT DO NOTHING;
    COMMIT;
"""


def prepare_schema(url: str, *, create: bool = True) -> int:
    """Create missing tables if `create`, and check their version; returns the fence floor.

    Raises:
        Unreachable: the server does not answer.
        NotFound: the tables are missing, and `create` is False.
        SchemaMismatch: a newer version of Holdfast created them.
    """
    connection = connect(url)
    try:
        connection.execute("SET client_min_messages = 'error'")
        if create:
            connection.execute(_SCHEMA)
        elif connection.execute("SELECT to_regclass('holdfast_kv')").fetchone() == (None,):
            raise NotFound(
                "The database has no Holdfast tables; check the URL and the user's search_path. "
                "The first command that writes to it creates them"
            )
        row = connection.execute("SELECT value FROM holdfast_meta WHERE name = 'schema_version'").fetchone()
        floor = connection.execute("SELECT value FROM holdfast_kv WHERE key = %s", [fence_floor.KEY]).fetchone()
    except psycopg.Error as error:
        raise DatabaseFailed(
            f"The tables could not be created ({error}); this user needs CREATE on the schema"
        ) from error
    finally:
        connection.close()
    found = "none" if row is None else str(row[0])
    if found != str(SCHEMA_VERSION):
        raise SchemaMismatch(
            f"The tables have schema version {found}, this version supports {SCHEMA_VERSION}; upgrade Holdfast"
        )
    return fence_floor.decode(floor[0] if floor is not None and isinstance(floor[0], bytes) else None)
