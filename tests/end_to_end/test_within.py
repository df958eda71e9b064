"""Writes in the user's own transaction: visible with its commit, gone with its rollback, refused where they cannot be.

The user's tables are in a schema of their own, and the search path of the user's connections does not have the plane's.
"""

import asyncio
import json
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fastness
from fastness import AsyncPlane, DeleteRow, Plane, PutRow, Quota, TierPolicy, limits
from fastness.backends.postgres import PostgresDatabase
from fastness.errors import (
    Busy,
    CasMismatch,
    Closed,
    DatabaseFailed,
    FastnessError,
    InvalidArgument,
    IsolationUnsupported,
    NotEmbedded,
    NotTransactional,
    QueueMessageLeaseMismatch,
    QuotaExceeded,
    ReadOnlyTransaction,
    SchemaMismatch,
    TransactionConflict,
    TransactionRequired,
    Unreachable,
    Unsupported,
    WrongDatabase,
)
from fastness.kv import formats
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from tests.support.forked import run_python
from tests.support.waiting import eventually

WAIT_SECONDS = 20.0
UserConnection = psycopg.Connection[Any]
Connect = Callable[..., UserConnection]


@pytest.fixture
def shop(postgres_url: str) -> Iterator[str]:
    """The URL of a database with a user's table, in the schema `shop`."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS shop CASCADE; CREATE SCHEMA shop")
        connection.execute("CREATE TABLE shop.orders (id int PRIMARY KEY)")
    yield postgres_url
    with psycopg.connect(postgres_url, autocommit=True) as connection:  # Another test may get the database.
        connection.execute("SET lock_timeout = '5s'; DROP SCHEMA shop CASCADE")


@pytest.fixture
def plane(shop: str) -> Iterator[Plane]:
    with fastness.open(shop) as plane:
        yield plane


@pytest.fixture
async def async_plane(shop: str) -> AsyncIterator[AsyncPlane]:
    async with fastness.open_async(shop) as plane:
        yield plane


@pytest.fixture
def connect(shop: str) -> Iterator[Connect]:
    """Opens connections as a user's application has them."""
    opened: list[UserConnection] = []

    def connect(**options: Any) -> UserConnection:
        opened.append(psycopg.connect(shop, **{"options": "-c search_path=shop", **options}))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect: Connect) -> UserConnection:
    return connect()


def bodies(plane: Plane, queue: str = "emails") -> list[Any]:
    """The bodies of the ready messages of a queue."""
    return [json.loads(each.payload or b"null") for each in plane.queue(queue).peek(256)]


def orders(connect: Connect) -> list[int]:
    return [id for (id,) in connect().execute("SELECT id FROM orders ORDER BY id")]


def test_messages_and_rows_commit_together(plane: Plane, connection: UserConnection) -> None:
    with connection.transaction():
        connection.execute("INSERT INTO orders VALUES (1)")
        receipt = plane.within(connection).queue("emails").put({"order": 1})
        assert bodies(plane) == []
    assert bodies(plane) == [{"order": 1}]
    message = plane.queue("emails").receive()
    assert message is not None
    assert message.id == receipt.id
    message.ack()
    stats = plane.queue("emails").stats()
    assert (stats.ready, stats.leased) == (0, 0)


def test_a_rollback_leaves_nothing(plane: Plane, connection: UserConnection, connect: Connect) -> None:
    with pytest.raises(ZeroDivisionError), connection.transaction():
        connection.execute("INSERT INTO orders VALUES (1)")
        plane.within(connection).queue("emails").put_many([{"order": 1}, {"order": 2}])
        raise ZeroDivisionError
    assert orders(connect) == []
    assert plane.queues() == []


def test_the_first_statement_may_be_one_of_fastness(plane: Plane, connection: UserConnection) -> None:
    within = plane.within(connection)
    for number, end in enumerate((connection.rollback, connection.commit, connection.rollback, connection.commit)):
        within.queue("emails").put({"order": number})
        end()
    assert bodies(plane) == [{"order": 1}, {"order": 3}]


def test_a_rollback_to_the_users_savepoint_undoes_only_what_follows_it(
    plane: Plane, connection: UserConnection
) -> None:
    within = plane.within(connection)
    with connection.transaction():
        within.queue("emails").put({"order": 1})
        with pytest.raises(ZeroDivisionError), connection.transaction():
            within.queue("emails").put({"order": 2})
            raise ZeroDivisionError
        within.queue("emails").put({"order": 3})
        with connection.transaction():
            within.queue("emails").put({"order": 4})
    assert bodies(plane) == [{"order": 1}, {"order": 3}, {"order": 4}]
    assert plane.queue("emails").stats().ready == 3


@pytest.mark.parametrize("commits", [True, False])
def test_everything_that_can_be_written(plane: Plane, connection: UserConnection, commits: bool) -> None:
    plane.world("factory").create()
    plane.queue("jobs").put({"job": 1})
    job = plane.queue("jobs").receive()
    assert job is not None
    within = plane.within(connection)
    within.queue("emails").put({"order": 1})
    within.mailbox("ada").send("bob", {"hello": 1})
    within.world("factory").append([{"built": 1}], expected_head=within.world("factory").head())
    within.state("orders/1").update({"state": "paid"}, if_absent=True)
    within.entities.write("order", "1", {"price": 5})
    within.entities.update("order", "1", lambda order: {"price": order["price"] + 1 if order else 0})
    rows = within.collection("lines")
    rows.commit([PutRow("orders/1", (number,), b"1", ttl_seconds=60) for number in range(3)])
    rows.commit([DeleteRow("orders/1", (0,), if_version=1), PutRow("orders/2", ("a",), b"")])
    assert rows.get("orders/1", (0,)) is None
    assert [row.key for row in rows.scan("orders/1").rows] == [(1,), (2,)]
    within.ack(job, result={"built": 1})
    document = within.state("orders/1").get()
    assert document is not None
    assert document.value == {"state": "paid"}
    assert not job.settled
    if commits:
        connection.commit()
    else:
        connection.rollback()
        job.nack()
    assert bodies(plane) == [{"order": 1}] * commits
    assert len(plane.mailbox("bob").read()) == commits
    assert plane.world("factory").head() == (1 if commits else 0)
    assert (plane.state("orders/1").get() is not None) == commits
    assert plane.collection("lines").partitions().partitions == ["orders/1", "orders/2"] * commits
    order = plane.entities.get("order", "1")
    assert (None if order is None else order["price"]) == (6 if commits else None)
    assert plane.queue("jobs").stats().ready + plane.queue("jobs").stats().delayed == (not commits)
    if commits:
        assert plane.queue("jobs").result(job.id) == {"built": 1}


def test_a_message_block_around_the_transaction(plane: Plane, connection: UserConnection, connect: Connect) -> None:
    queue = plane.queue("jobs")
    queue.put({"order": 1}, retry_delay_seconds=0.001)
    for fails in (True, False):
        message = queue.receive(wait_seconds=WAIT_SECONDS)
        assert message is not None
        try:
            with message, connection.transaction():
                connection.execute("INSERT INTO orders VALUES (1)")
                plane.within(connection).ack(message)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert fails
    assert orders(connect) == [1]
    stats = queue.stats()
    assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 0)


def test_an_ack_without_its_lease_is_refused(plane: Plane, connection: UserConnection) -> None:
    plane.queue("jobs").put({"job": 1})
    message = plane.queue("jobs").receive()
    assert message is not None
    message.nack()
    with pytest.raises(QueueMessageLeaseMismatch):
        plane.within(connection).ack(message)
    connection.execute("INSERT INTO orders VALUES (1)")
    connection.commit()


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_waiting_consumer_is_woken_by_the_commit(
    plane: Plane, connection: UserConnection, shop: str, nodes: int
) -> None:
    consumer = plane if nodes == 1 else fastness.open(shop)
    received: list[Any] = []

    def consume() -> None:
        message = consumer.queue("emails").receive(wait_seconds=3 * WAIT_SECONDS)
        received.append(None if message is None else message.json())

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        eventually(lambda: consumer.queue("emails").stats().waiting_consumers == 1)
        plane.within(connection).queue("emails").put({"order": 1})
        assert received == []
        connection.commit()
        thread.join(WAIT_SECONDS)
        assert received == [{"order": 1}]
    finally:
        thread.join()
        if consumer is not plane:
            consumer.close()


def test_delayed_messages_become_ready_without_a_consumer(plane: Plane, connection: UserConnection) -> None:
    plane.within(connection).queue("emails").put({"order": 1}, delay_seconds=0.2)
    connection.commit()
    assert plane.queue("emails").stats().delayed == 1
    eventually(lambda: plane.queue("emails").stats().ready == 1)


def test_another_node_sweeps_delayed_messages(plane: Plane, connection: UserConnection, shop: str) -> None:
    with fastness.open(shop) as other:
        plane.within(connection).queue("emails").put({"order": 1}, delay_seconds=0.2)
        connection.commit()
        plane.close()
        eventually(lambda: other.queue("emails").stats().ready == 1)


def test_a_waiting_consumer_receives_a_delayed_message_when_it_is_due(plane: Plane, connection: UserConnection) -> None:
    plane.within(connection).queue("emails").put({"order": 1}, delay_seconds=0.3)
    connection.commit()
    message = plane.queue("emails").receive(wait_seconds=WAIT_SECONDS)
    assert message is not None
    assert message.json() == {"order": 1}


def test_a_large_body_is_stored_before(shop: str, connection: UserConnection, tmp_path: Path) -> None:
    body = b"x" * (limits.PAYLOAD_INLINE_BYTES_MAX + 1)
    with fastness.open(shop, objects=f"dir:{tmp_path}") as plane:
        plane.within(connection).queue("emails").put(body)
        connection.rollback()
        assert plane.queues() == []
        plane.within(connection).queue("emails").put(body)
        connection.commit()
        message = plane.queue("emails").receive()
        assert message is not None
        assert message.read() == body
        message.ack()
        plane.within(connection).queue("emails").put(b"y" + body)
        connection.rollback()
        assert plane.gc(dry_run=True).waiting == 2


def test_a_failed_call_does_not_break_the_transaction(
    plane: Plane, connection: UserConnection, connect: Connect
) -> None:
    plane.state("orders/1").update({"state": "new"})
    within = plane.within(connection)
    connection.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(CasMismatch):
        within.state("orders/1").update({"state": "paid"}, if_absent=True)
    with pytest.raises(InvalidArgument):
        within.queue("emails").put({"order": 1}, priority=10)
    within.queue("emails").put({"order": 1})
    connection.commit()
    assert orders(connect) == [1]
    assert bodies(plane) == [{"order": 1}]


def test_settings_and_row_factories_of_the_user_stay(plane: Plane, connect: Connect) -> None:
    connection = connect(row_factory=dict_row)
    shown = "SELECT current_setting('lock_timeout') AS lock_timeout, current_setting('search_path') AS search_path"
    before = connection.execute(shown).fetchone()
    within = plane.within(connection)
    within.queue("emails").put({"order": 1})
    assert connection.execute(shown).fetchone() == before
    connection.execute("SET lock_timeout = '7s'")
    within.queue("emails").put({"order": 2})
    assert connection.execute("SHOW lock_timeout").fetchone() == {"lock_timeout": "7s"}
    connection.commit()
    assert connection.execute("SHOW lock_timeout").fetchone() == {"lock_timeout": "7s"}
    assert bodies(plane) == [{"order": 1}, {"order": 2}]


def test_two_transactions_that_need_each_others_locks(plane: Plane, connect: Connect) -> None:
    """PostgreSQL ends one of the calls; its transaction can be rolled back and run again."""
    first, second = connect(), connect()
    plane.within(first).state("a").update(1)
    plane.within(second).state("b").update(1)
    errors: list[FastnessError] = []
    end = threading.Barrier(2)

    def update(connection: UserConnection, key: str) -> None:
        try:
            plane.within(connection).state(key).update(2)
        except FastnessError as error:
            errors.append(error)
            connection.rollback()
        else:
            connection.commit()
        end.wait(WAIT_SECONDS)

    threads = [threading.Thread(target=update, args=args) for args in ((first, "b"), (second, "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = errors
    assert isinstance(error, TransactionConflict)
    assert "run the transaction again" in str(error)


def test_a_call_that_waits_too_long_is_refused(plane: Plane, connect: Connect) -> None:
    first, second = connect(), connect()
    plane.within(first).state("a").update(1)
    second.execute("SET lock_timeout = '50ms'")
    second.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(Busy, match="run the transaction again"):
        plane.within(second).state("a").update(2)
    plane.within(second).state("b").update(2)
    second.commit()
    first.commit()
    assert orders(connect) == [1]
    found = [plane.state(key).get() for key in ("a", "b")]
    assert [each and each.value for each in found] == [1, 2]


def test_many_transactions_put_into_one_queue_at_once(plane: Plane, connect: Connect) -> None:
    connections = [connect() for _ in range(8)]
    for number, connection in enumerate(connections):
        connection.execute("SET lock_timeout = '1ms'")
        plane.within(connection).queue("emails").put({"order": number})
    for connection in connections:
        connection.commit()
    assert len(bodies(plane)) == 8
    assert plane.queue("emails").stats().ready == 8


def test_an_open_transaction_with_plain_puts_blocks_no_other_caller(
    plane: Plane, connection: UserConnection, shop: str
) -> None:
    queue = plane.queue("emails")
    queue.put({"order": 0})
    with fastness.open(shop) as other:
        plane.within(connection).queue("emails").put({"order": 1}, delay_seconds=0.001)
        message = queue.receive()  # This and the others would fail after a wait: the transaction is still open.
        assert message is not None
        message.ack()
        queue.put({"order": 2}, group="a", idempotency_key="b")
        queue.set_policy(queue.policy())
        other.queue("emails").put({"order": 3})
        assert other.queue("emails").purge() == 2
        other.transact(lambda tx: tx.scan(b"", b"\xff", limit=1_000))  # Locks the whole key space.
    connection.commit()
    message = queue.receive(wait_seconds=WAIT_SECONDS)
    assert message is not None
    assert message.json() == {"order": 1}


def test_a_call_that_waited_has_the_time_after_the_wait(plane: Plane, connect: Connect) -> None:
    """A send locks the policy first and then the mailbox, for which it has to wait."""
    first, second, observer = connect(), connect(), connect(autocommit=True)
    blocked = f"SELECT 1 FROM pg_stat_activity WHERE pid = {second.info.backend_pid} AND wait_event_type = 'Lock'"
    plane.within(first).mailbox("ada").send("bob", {"n": 1})
    sending = threading.Thread(target=lambda: plane.within(second).mailbox("eve").send("bob", {"n": 2}))
    sending.start()
    eventually(lambda: observer.execute(blocked).fetchone() is not None)
    observer.execute("SELECT pg_sleep(%s)", [3 * limits.LOCK_LATE_MS_MAX / 1_000])
    row = observer.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
    first.commit()
    sending.join()
    second.commit()
    _, mail = plane.mailbox("bob").read()
    assert mail.sender.startswith("eve")
    assert row is not None
    assert mail.sent_ms >= row[0]


def test_counters_are_right_while_they_are_folded(plane: Plane, connect: Connect) -> None:
    key = QueueKey("main", "emails")
    connections = [connect() for _ in range(12)]
    for number, connection in enumerate(connections):
        plane.within(connection).queue("emails").put({"order": number})
        plane.transact(queues.fold, key)
        if number % 2:
            connection.commit()
            plane.transact(queues.fold, key)
        plane.within(connection).queue("emails").put({"order": number})
        plane.transact(queues.fold, key)
    for number, connection in enumerate(connections):
        if number % 3:
            connection.commit()
        else:
            connection.rollback()
        plane.transact(queues.fold, key)
    assert plane.queue("emails").stats().ready == len(bodies(plane)) == 18


def test_a_plane_can_be_opened_beside_an_open_transaction(plane: Plane, connection: UserConnection, shop: str) -> None:
    plane.within(connection).queue("emails").put({"order": 1})
    with fastness.open(shop) as other:
        other.queue("emails").put({"order": 2})  # A wait for the transaction would end in an error.


def test_a_role_needs_the_rights_of_the_table(plane: Plane, connection: UserConnection) -> None:
    role = f"shop_{uuid.uuid4().hex}"
    connection.execute(f"CREATE ROLE {role}; GRANT ALL ON SCHEMA shop TO {role}; SET LOCAL ROLE {role}")
    with pytest.raises(DatabaseFailed, match="SELECT, INSERT, UPDATE and DELETE"):
        plane.within(connection).queue("emails").put({"order": 1})
    connection.execute("RESET ROLE")
    connection.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
    connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON public.fastness_kv TO {role}; SET LOCAL ROLE {role}")
    plane.within(connection).queue("emails").put({"order": 1})
    plane.within(connection).state("orders/1").update({"state": "paid"})
    connection.rollback()  # Also the role.


def test_a_closed_plane_is_refused(plane: Plane, connection: UserConnection) -> None:
    within = plane.within(connection)
    plane.close()
    with pytest.raises(Closed):
        within.queue("emails").put({"order": 1})
    with pytest.raises(Closed):
        plane.within(connection)


def test_autocommit_without_a_transaction_is_refused(plane: Plane, connect: Connect) -> None:
    connection = connect(autocommit=True)
    with pytest.raises(TransactionRequired, match=r"with connection\.transaction"):
        plane.within(connection).queue("emails").put({"order": 1})
    with connection.transaction():
        plane.within(connection).queue("emails").put({"order": 2})
    assert bodies(plane) == [{"order": 2}]


def test_a_failed_transaction_is_refused(plane: Plane, connection: UserConnection) -> None:
    with pytest.raises(psycopg.Error):
        connection.execute("SELECT 1 / 0")
    with pytest.raises(TransactionRequired, match="roll it back"):
        plane.within(connection).queue("emails").put({"order": 1})


def test_a_closed_connection_is_refused(plane: Plane, connection: UserConnection) -> None:
    within = plane.within(connection)
    connection.close()
    with pytest.raises(TransactionRequired, match="closed"):
        within.queue("emails").put({"order": 1})


def test_a_connection_that_breaks_is_reported(plane: Plane, connection: UserConnection, connect: Connect) -> None:
    within = plane.within(connection)
    within.queue("emails").put({"order": 1})
    connect(autocommit=True).execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    with pytest.raises(Unreachable, match="Run the transaction again"):
        within.queue("emails").put({"order": 2})
    assert bodies(plane) == []


def test_a_pipeline_is_refused(plane: Plane, connection: UserConnection) -> None:
    with connection.pipeline(), pytest.raises(TransactionRequired, match="pipeline"):
        plane.within(connection).queue("emails").put({"order": 1})


def test_a_read_only_transaction_is_refused(plane: Plane, connection: UserConnection) -> None:
    connection.read_only = True
    with pytest.raises(ReadOnlyTransaction):
        plane.within(connection).queue("emails").put({"order": 1})
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_another_database_is_refused(plane: Plane, postgres_server: str) -> None:
    with psycopg.connect(postgres_server) as connection:
        with pytest.raises(WrongDatabase):
            plane.within(connection).queue("emails").put({"order": 1})
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_higher_isolation_levels_can_put(
    plane: Plane, connection: UserConnection, level: psycopg.IsolationLevel
) -> None:
    connection.isolation_level = level
    connection.execute("SELECT 1")  # Takes the snapshot.
    plane.queue("emails").put({"order": 0})
    plane.within(connection).queue("emails").put({"order": 1})
    plane.within(connection).queue("emails").put({"order": 2})
    with pytest.raises(IsolationUnsupported, match="READ COMMITTED"):
        plane.within(connection).state("orders/1").update({"state": "paid"})
    connection.commit()
    assert len(bodies(plane)) == 3
    assert plane.queue("emails").stats().ready == 3


def test_what_cannot_be_part_of_a_transaction(plane: Plane, connection: UserConnection) -> None:
    within = plane.within(connection)
    calls: list[Callable[[], Any]] = [
        lambda: within.queue("emails").receive(),
        lambda: within.queue("emails").stats(),
        lambda: within.queue("emails").put({"order": 1}).result(),
        lambda: next(iter(within.queue("emails").subscribe())),
        lambda: within.mailbox("ada").read(),
        lambda: within.world("factory").create(),
        lambda: within.world("factory").read(),
        lambda: within.entities.delete("order", "1"),
        lambda: within.collection("lines").partitions(),
    ]
    for call in calls:
        with pytest.raises(NotTransactional, match="on the plane itself") as raised:
            call()
        assert raised.value.code == "not_transactional"
    connection.commit()


def test_best_effort_fields_are_refused(shop: str, connection: UserConnection) -> None:
    policy = TierPolicy.from_toml('[fields]\n"order.price" = "critical"\n"order.note" = "best_effort"\n')
    with fastness.open(shop, tiers=policy) as plane:
        plane.within(connection).entities.write("order", "1", {"price": 1})
        with pytest.raises(NotTransactional, match="BEST_EFFORT"):
            plane.within(connection).entities.write("order", "1", {"note": "x"})
        connection.commit()
        order = plane.entities.get("order", "1")
        assert order is not None
        assert order.fields == {"price": 1}


def test_what_is_no_connection_is_refused(plane: Plane, shop: str) -> None:
    with pytest.raises(InvalidArgument, match="psycopg"):
        plane.within("postgresql:///shop").queue("emails").put({"order": 1})
    engine = create_engine("sqlite://")
    with engine.connect() as other, pytest.raises(InvalidArgument, match="sqlite3"):
        plane.within(other).queue("emails").put({"order": 1})
    engine.dispose()
    session = AsyncSession(create_async_engine(sqlalchemy_url(shop), poolclass=NullPool))
    with pytest.raises(InvalidArgument, match="open_async"):
        plane.within(session).queue("emails").put({"order": 1})


def test_other_planes_are_refused(connection: UserConnection, shop: str) -> None:
    with PostgresDatabase(shop, isolation="serializable") as database, pytest.raises(Unsupported, match="locks"):
        database.within(connection)
    with fastness.open("memory:") as memory, pytest.raises(Unsupported, match="PostgreSQL"):
        memory.within(connection)
    with fastness.connect("http://127.0.0.1:1") as remote, pytest.raises(NotEmbedded, match="postgresql://"):
        remote.within(connection)


def sqlalchemy_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@pytest.mark.parametrize("commits", [True, False])
def test_a_session_of_sqlalchemy(plane: Plane, shop: str, connect: Connect, commits: bool) -> None:
    engine = create_engine(sqlalchemy_url(shop), connect_args={"options": "-c search_path=shop"}, poolclass=NullPool)
    with Session(engine) as session:
        plane.within(session).queue("emails").put({"order": 0})  # Begins the transaction.
        session.execute(text("INSERT INTO orders VALUES (1)"))
        with session.begin_nested() as nested:
            plane.within(session).queue("emails").put({"order": 1})
            nested.rollback()
        plane.within(session).queue("emails").put({"order": 2})
        if commits:
            session.commit()
        else:
            session.rollback()
        plane.within(session).queue("emails").put({"order": 3})
    assert orders(connect) == [1] * commits
    assert bodies(plane) == [{"order": 0}, {"order": 2}] * commits


def test_a_connection_of_sqlalchemy(plane: Plane, shop: str) -> None:
    engine = create_engine(sqlalchemy_url(shop), poolclass=NullPool)
    with engine.begin() as connection:
        plane.within(connection).queue("emails").put({"order": 1})
    with engine.connect() as connection:
        plane.within(connection).queue("emails").put({"order": 2})
        connection.rollback()
        plane.within(connection).queue("emails").put({"order": 3})
        connection.commit()
    autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with autocommit, pytest.raises(TransactionRequired):
        plane.within(autocommit).queue("emails").put({"order": 4})
    assert bodies(plane) == [{"order": 1}, {"order": 3}]


async def async_bodies(plane: AsyncPlane) -> list[Any]:
    return [json.loads(each.payload or b"null") for each in await plane.queue("emails").peek(256)]


async def test_an_asynchronous_connection(async_plane: AsyncPlane, shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        within = async_plane.within(connection)
        async with connection.transaction():
            await connection.execute("INSERT INTO shop.orders VALUES (1)")
            await within.queue("emails").put({"order": 1})
            await within.state("orders/1").update({"state": "paid"})
            assert await async_bodies(async_plane) == []
        with pytest.raises(ZeroDivisionError):
            async with connection.transaction():
                await within.queue("emails").put({"order": 2})
                raise ZeroDivisionError
    assert await async_bodies(async_plane) == [{"order": 1}]
    assert await async_plane.state("orders/1").get() is not None


@pytest.mark.usefixtures("no_polls")
async def test_a_waiting_asynchronous_consumer_is_woken_by_the_commit(async_plane: AsyncPlane, shop: str) -> None:
    waiting = asyncio.create_task(async_plane.queue("emails").receive(wait_seconds=3 * WAIT_SECONDS))
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        await async_plane.within(connection).queue("emails").put({"order": 1})
        assert not waiting.done()
    message = await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert message is not None
    await message.ack()


async def test_calls_of_one_asynchronous_connection_take_turns(async_plane: AsyncPlane, shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        queue = async_plane.within(connection).queue("emails")

        async def order(number: int) -> None:
            await connection.execute("INSERT INTO shop.orders VALUES (%s)", [number])
            await queue.put({"order": number})
            with pytest.raises(InvalidArgument):
                await queue.put({"order": number}, priority=10)
            await connection.execute("UPDATE shop.orders SET id = id + 100 WHERE id = %s", [number])
            await queue.put({"order": number})

        await asyncio.gather(*(order(number) for number in range(8)))
    assert len(await async_bodies(async_plane)) == 16


def test_threads_can_share_a_connection(plane: Plane, connection: UserConnection) -> None:
    queue = plane.within(connection).queue("emails")

    def order(number: int) -> None:
        connection.execute("INSERT INTO orders VALUES (%s)", [number])
        queue.put({"order": number})

    threads = [threading.Thread(target=order, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.commit()
    assert len(bodies(plane)) == 8


async def test_a_cancelled_call_leaves_the_connection_usable(async_plane: AsyncPlane, shop: str) -> None:
    async with (
        await psycopg.AsyncConnection.connect(shop) as first,
        await psycopg.AsyncConnection.connect(shop) as second,
    ):
        await async_plane.within(first).state("a").update(1)
        await second.execute("SET lock_timeout = '300ms'")
        blocked = asyncio.create_task(async_plane.within(second).state("a").update(2))
        await asyncio.sleep(0)
        while second.pgconn.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
            await asyncio.sleep(0.001)
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        await async_plane.within(second).state("b").update(2)
        await second.commit()
    assert await async_plane.state("b").get() is not None


async def test_sessions_of_an_event_loop(async_plane: AsyncPlane, shop: str) -> None:
    engine = create_async_engine(sqlalchemy_url(shop), poolclass=NullPool)
    async with AsyncSession(engine) as session:
        async with session.begin():
            await session.execute(text("INSERT INTO shop.orders VALUES (1)"))
            await async_plane.within(session).queue("emails").put({"order": 1})
        await async_plane.within(session).queue("emails").put({"order": 2})
        await session.rollback()
    async with engine.connect() as connection:
        await async_plane.within(connection).queue("emails").put({"order": 3})
        await connection.commit()
    assert await async_bodies(async_plane) == [{"order": 1}, {"order": 3}]


async def test_connections_of_threads_are_refused_on_an_event_loop(
    async_plane: AsyncPlane, connection: UserConnection, shop: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"open the plane with open$"):
        await async_plane.within(connection).queue("emails").put({"order": 1})
    session = Session(create_engine(sqlalchemy_url(shop), poolclass=NullPool))
    with session, pytest.raises(InvalidArgument, match=r"open the plane with open$"):
        await async_plane.within(session).queue("emails").put({"order": 1})


def test_the_example_runs_twice(shop: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "transactions" / "orders.py"
    for _ in range(2):
        done = run_python([example], env={**os.environ, "DATABASE_URL": shop}, check=True)
        assert done.stdout.splitlines() == [
            "order 1: kettle",
            "no order: unobtainable",
            "order 3: teapot",
            "emails: kettle, teapot",
            "orders without an email: (0,)",
        ]


def test_a_newer_format_is_refused_and_not_raised_beside_a_transaction(
    plane: Plane, connection: UserConnection, connect: Connect
) -> None:
    held = "SELECT mode FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND objsubid = 2 AND objid = %s"
    change = "UPDATE public.fastness_kv SET value = %s WHERE key = %s"
    newer = formats.FORMAT + 1
    plane.within(connection).queue("emails").put({"order": 1})
    assert connect().execute(held, [connection.info.backend_pid, newer]).fetchall() == [("ShareLock",)]
    connection.commit()
    with connect() as other:
        other.execute(change, [formats.encode(newer), formats.KEY])
    try:
        with pytest.raises(SchemaMismatch, match="upgrade Fastness"):
            plane.within(connection).queue("emails").put({"order": 2})
        connection.execute("INSERT INTO orders VALUES (2)")
        connection.commit()
    finally:
        with connect() as other:
            other.execute(change, [formats.encode(formats.FORMAT), formats.KEY])
    assert orders(connect) == [2]
    assert bodies(plane) == [{"order": 1}]


# Quotas.


def is_put(put: Callable[[], object]) -> bool:
    try:
        put()
    except QuotaExceeded:
        return False
    return True


def test_a_quota_limits_what_a_transaction_of_the_user_puts(
    plane: Plane, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.quotas.set("main", Quota(messages=3))
    connection = connect()
    emails = plane.within(connection).queue("emails")
    connection.execute("INSERT INTO orders VALUES (1)")
    for number in range(3):
        emails.put(number)
    with pytest.raises(QuotaExceeded, match="3 messages of 3") as caught:
        emails.put(3)
    assert (caught.value.universe, caught.value.kind) == ("main", "messages")
    with pytest.raises(QuotaExceeded):  # What is not committed counts, too: it may be at any time.
        plane.queue("others").put(b"")
    connection.execute("INSERT INTO orders VALUES (2)")  # The refused call has left the transaction as it was.
    connection.commit()
    assert (bodies(plane), orders(connect)) == ([0, 1, 2], [1, 2])

    monkeypatch.setattr("fastness.runtime.quotas.QUOTA_CALLER_SECONDS", 0.0)
    plane.queue("emails").purge()
    plane.quotas.clear("main")
    plane.quotas.set("main", Quota(messages=1))
    emails.put(4)
    connection.rollback()
    eventually(lambda: is_put(lambda: plane.queue("others").put(b"")))  # What was rolled back does not count for long.
    assert not is_put(lambda: emails.put(5))
    connection.rollback()
    assert (bodies(plane), plane.queue("others").stats().ready) == ([], 1)


def test_a_quota_limits_the_bytes_of_a_transaction_of_the_user(plane: Plane, connect: Connect) -> None:
    plane.quotas.set("main", Quota(bytes=100_000))
    eventually(lambda: plane.quotas.usage().bytes_measured_ms > 0)
    connection = connect()
    inside = plane.within(connection)
    accepted = 0
    while is_put(lambda: inside.queue("emails").put(b"x" * 10_000)):
        accepted += 1
    assert 4 <= accepted <= 9
    assert not is_put(lambda: inside.state("s").update({"text": "x" * 90_000}))
    connection.commit()
    assert plane.queue("emails").stats().ready == accepted
    assert (plane.quotas.usage().bytes or 0) >= 10_000 * accepted
