"""The tables of a plane in PostgreSQL, and the numbered steps that create and upgrade them.

    fastness_meta    schema_version       the last step that was run
                     schema_compatible    the last step that needed exclusive use: a process that knows fewer steps than
                                          this must not use the tables, and one that knows as many can
    fastness_kv      the key space

A step that needs exclusive use changes how processes share the tables, so it is refused while one of them is connected.
The others can run beside processes of the version before, which keep using the tables.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, LiteralString, NamedTuple

import psycopg

from fastness.backends.postgres.connections import APPLICATION, connect
from fastness.backends.postgres.poolers import check_no_transaction_pooler
from fastness.errors import DatabaseFailed, FastnessError, NotFound, PlaneInUse, SchemaMismatch
from fastness.kv import fence_floor


class Step(NamedTuple):
    """A change of the tables."""

    version: int
    summary: str
    statements: tuple[LiteralString, ...]
    exclusive: bool  # Whether no process may use the tables meanwhile, and older versions cannot use them afterwards.


STEPS: Final = (
    # A queue deletes what it inserts: by default, dead rows may be a fifth of all keys before vacuum removes them. Not
    # only a fixed number, because each vacuum reads the whole index. benches/bench_table.py compares others.
    Step(
        1,
        "create the tables",
        (
            "CREATE TABLE fastness_meta (name text PRIMARY KEY, value text NOT NULL)",
            """CREATE TABLE fastness_kv (key bytea PRIMARY KEY, value bytea NOT NULL) WITH (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    toast.autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_vacuum_threshold = 5000)""",
            "ALTER TABLE fastness_kv ALTER COLUMN value SET STORAGE EXTERNAL",
        ),
        exclusive=True,
    ),
)
SCHEMA_VERSION: Final = STEPS[-1].version

_LOCK: Final = "SELECT pg_advisory_xact_lock(5209160457213571)"  # One process at a time creates or upgrades tables.
_SESSION_LOCK: Final = "SELECT pg_advisory_lock(5209160457213571)"
_LOCK_WAIT: Final = "SET lock_timeout = '5s'"
_VERSIONS: Final = """
    SELECT name, value FROM fastness_meta WHERE name IN ('schema_version', 'schema_compatible')
"""
_NEEDED: Final = """
    SELECT to_regclass('fastness_kv') IS NOT NULL, current_user,
        ARRAY(SELECT needed FROM unnest(%s::text[]) AS needed
            WHERE NOT has_table_privilege(to_regclass('fastness_kv'), needed)),
        has_table_privilege(to_regclass('fastness_meta'), 'SELECT')
"""

# A process of an older version that is opening the plane has read the version, and may not be connected for a moment.
# The locks stop it at its next statement, and the second look finds it. The view is cached in a transaction.
_CHECK_UNUSED: Final = f"""DO $$
DECLARE
    others bigint;
BEGIN
    FOR look IN 1..2 LOOP
        SELECT count(*) INTO others FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()
            AND (application_name = '{APPLICATION}' OR query LIKE 'LISTEN fastness%');
        IF others > 0 THEN
            RAISE object_in_use USING MESSAGE = others || ' Fastness connections are open on this database; '
                'stop the servers and workers, then run this again';
        END IF;
        IF look = 1 THEN
            PERFORM pg_sleep(1), pg_stat_clear_snapshot();
        END IF;
    END LOOP;
END $$"""


def prepare_schema(url: str, *, create: bool = True) -> int:
    """Create missing tables if `create`, and check their version; returns the fence floor.

    Raises:
        Unreachable: the server does not answer.
        NotFound: the tables are missing, and `create` is False.
        SchemaMismatch: another version of Fastness created them.
        DatabaseFailed: the user lacks a privilege.
        Unsupported: a connection pooler that shares sessions is in between.
    """
    with _connection(url) as connection:
        check_no_transaction_pooler(url, connection)
        if not _tables_exist(connection, needed=("SELECT", "INSERT", "UPDATE", "DELETE") if create else ("SELECT",)):
            if not create:
                raise NotFound(
                    "The database has no Fastness tables; check the URL and the user's search_path. "
                    "The first command that writes to it creates them"
                )
            _upgrade(connection)
        _check_version(*_versions(connection))
        row = connection.execute("SELECT value FROM fastness_kv WHERE key = %s", [fence_floor.KEY]).fetchone()
    return fence_floor.decode(row[0] if row is not None and isinstance(row[0], bytes) else None)


def upgrade_schema(url: str) -> tuple[int, int]:
    """Create the tables, or run the steps that they lack. Returns the versions before and after; 0: no tables.

    Raises:
        Unreachable: the server does not answer.
        PlaneInUse: a process uses the tables, and a step needs exclusive use.
        SchemaMismatch: a newer version of Fastness created them.
        DatabaseFailed: the user is not the tables' owner, or may not create any.
    """
    with _connection(url) as connection:
        check_no_transaction_pooler(url, connection)
        _tables_exist(connection, needed=())
        return _upgrade(connection)


def upgrade_script(url: str) -> str:
    """The SQL that `upgrade_schema` would run, as one transaction for `psql -f`; empty if there is nothing to do.

    Raises:
        Unreachable: the server does not answer.
        SchemaMismatch: a newer version of Fastness created the tables.
    """
    with _connection(url) as connection:
        found, compatible = _versions(connection) if _tables_exist(connection, needed=()) else (0, 0)
    if found >= SCHEMA_VERSION:
        _check_version(found, compatible)
        return ""
    statements: list[str] = ["BEGIN ISOLATION LEVEL READ COMMITTED", _LOCK_WAIT.replace("SET", "SET LOCAL"), _LOCK]
    if found:
        statements.append(_expect_version(found))
    statements += [*_missing_steps(found), "COMMIT"]
    return "".join(f"{statement};\n" for statement in statements)


def _upgrade(connection: psycopg.Connection[tuple[object, ...]]) -> tuple[int, int]:
    try:
        # Locked before the transaction: a transaction that waited for the lock may still miss tables that were created
        # meanwhile, because it looks them up in a cache. The lock ends with the connection.
        connection.execute(_LOCK_WAIT)
        connection.execute(_SESSION_LOCK)
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            found, compatible = _versions(connection) if _tables_exist(connection, needed=()) else (0, 0)
            if found >= SCHEMA_VERSION:
                _check_version(found, compatible)
                return found, found
            for statement in _missing_steps(found):
                connection.execute(statement.encode())
            return found, SCHEMA_VERSION
    except psycopg.errors.ObjectInUse as error:
        raise PlaneInUse(error.diag.message_primary or str(error)) from None
    except psycopg.errors.LockNotAvailable as error:
        raise PlaneInUse(
            "Another process uses the tables fastness_kv and fastness_meta; stop it, then run this again"
        ) from error


def _missing_steps(found: int) -> Iterator[str]:
    """The statements that upgrade tables of version `found`; 0: there are none. Run in one transaction."""
    missing = [step for step in STEPS if step.version > found]
    if found and any(step.exclusive for step in missing):
        yield "LOCK TABLE fastness_meta, fastness_kv IN ACCESS EXCLUSIVE MODE"
        yield _CHECK_UNUSED
    comments = ""
    for step in missing:
        comments += f"-- Step {step.version}: {step.summary}.\n"
        for statement in step.statements:
            yield comments + statement
            comments = ""
    compatible = max(step.version for step in STEPS if step.exclusive)
    yield (
        f"{comments}INSERT INTO fastness_meta VALUES ('schema_version', '{SCHEMA_VERSION}'), "
        f"('schema_compatible', '{compatible}')\n    ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    )


def _expect_version(found: int) -> str:
    return f"""DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM fastness_meta WHERE name = 'schema_version' AND value = '{found}') THEN
        RAISE 'The tables do not have schema version {found} any more; print these statements again';
    END IF;
END $$"""


def _tables_exist(connection: psycopg.Connection[tuple[object, ...]], *, needed: tuple[str, ...]) -> bool:
    """Whether there are tables.

    Raises:
        DatabaseFailed: the user lacks one of the privileges `needed` on them.
    """
    found, user, missing, reads_versions = connection.execute(_NEEDED, [list(needed)]).fetchone() or (False, "", [], 0)
    if not found:
        return False
    assert isinstance(missing, list)
    if missing or not reads_versions:
        grants = [f"{', '.join(missing)} ON fastness_kv"] if missing else []
        grants += [] if reads_versions else ["SELECT ON fastness_meta"]
        raise DatabaseFailed(
            f"The user {user} lacks privileges on the tables; as their owner, run: "
            + "; ".join(f'GRANT {grant} TO "{user}"' for grant in grants)
        )
    return True


def _versions(connection: psycopg.Connection[tuple[object, ...]]) -> tuple[int, int]:
    """The version of the tables, and the oldest version of a process that can use them."""
    rows = {str(row[0]): row[1] for row in connection.execute(_VERSIONS)}
    try:
        return int(str(rows["schema_version"])), int(str(rows["schema_compatible"]))
    except (KeyError, ValueError):
        raise SchemaMismatch(
            f"The table fastness_meta has no schema version ({rows}); check that it is Fastness's"
        ) from None


def _check_version(found: int, compatible: int) -> None:
    if found < SCHEMA_VERSION:
        raise SchemaMismatch(
            f"The tables have schema version {found}, this version of Fastness needs {SCHEMA_VERSION}; stop all "
            "servers and workers, then run `fastness migrate URL` as the tables' owner (`fastness migrate --sql URL` "
            "prints the SQL)"
        )
    if compatible > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"The tables have schema version {found}, this version of Fastness supports {SCHEMA_VERSION}; "
            "upgrade Fastness"
        )


@contextmanager
def _connection(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection whose errors are Fastness's."""
    connection = connect(url)
    try:
        connection.execute("SET client_min_messages = 'error'")
        yield connection
    except FastnessError:
        raise
    except psycopg.errors.InvalidSchemaName as error:
        raise DatabaseFailed(
            f"The tables are not found, and cannot be created ({error.diag.message_primary}); check the user's "
            "search_path, or as an administrator run: GRANT USAGE ON SCHEMA … TO …"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseFailed(
            f"The tables cannot be created or changed ({error.diag.message_primary}); run `fastness migrate URL` as "
            "their owner with CREATE on the schema, or give an administrator the SQL that `fastness migrate --sql URL` "
            "prints"
        ) from error
    except psycopg.Error as error:
        raise DatabaseFailed(f"The tables cannot be created or read ({error})") from error
    finally:
        connection.close()
