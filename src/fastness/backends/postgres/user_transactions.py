"""Runs functions in a transaction of the caller's own connection, beside the caller's own statements.

    caller's BEGIN ──► the caller's statements, and for each call of Fastness         ──► caller's COMMIT or ROLLBACK
                       SAVEPOINT ──► locks, reads ──► writes, NOTIFY ──► RELEASE

What a call writes is in PostgreSQL when the call returns. Later calls of the same transaction see it, and others see it
after the commit. PostgreSQL sends the notification with the commit, and drops it with a rollback. A call that fails is
rolled back to its savepoint: the caller's transaction goes on without it. Nothing is remembered from one call to the
next, because the caller may roll back to a savepoint of its own.

A call that reads what others write holds the locks that Fastness's own transactions take, until the caller's
transaction ends. It must see everything that was committed before it got a lock. The snapshot of a REPEATABLE READ or
SERIALIZABLE transaction is older, so such calls are refused there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from fastness import limits
from fastness.backends.postgres.connections import connect
from fastness.backends.postgres.groups import GroupOptions
from fastness.backends.postgres.locked_view import LockTaken, Needs, union
from fastness.backends.postgres.user_connections import (
    AsyncConnection,
    Connection,
    async_connection_of,
    check_open,
    connection_of,
)
from fastness.backends.postgres.user_view import UserSession, UserView
from fastness.errors import Busy, DatabaseFailed, TransactionRequired, Unreachable, WrongDatabase
from fastness.kv import Result, Transaction, Work
from fastness.kv.execution import run
from fastness.threads import run_in_thread

_WHERE: Final = """
    SELECT (SELECT system_identifier FROM pg_control_system())::text,
        (SELECT oid FROM pg_database WHERE datname = current_database())::text
"""
_TABLE: Final = """
    SELECT quote_ident(nspname) || '.fastness_kv' FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE pg_class.oid = 'fastness_kv'::regclass
"""

_BEGIN_ATTEMPTS_MAX: Final = 4  # Other tasks or threads may end the transaction of a connection that they share.


class Place(msgspec.Struct, frozen=True):
    """Where a plane is: the server, the database, and its table with its schema."""

    system: str
    database: str
    table: str


class PlaceFinder:
    """Finds out where a plane is when that is first asked for."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.place: Place | None = None  # None until it is known.

    def find(self) -> Place:
        """Where the plane is.

        Raises:
            Unreachable: the server does not answer.
        """
        if self.place is None:  # Two threads may both ask, and get the same answer.
            with _translated_errors(), connect(self._url) as connection:
                system, database = _row(connection.execute(_WHERE).fetchone())
                (table,) = _row(connection.execute(_TABLE).fetchone())
            self.place = Place(system, database, table)
        return self.place


class UserTransaction:
    """The transaction of a caller's connection or session, whichever is open there at each call."""

    def __init__(
        self,
        given: object,
        finder: PlaceFinder,
        check_usable: Callable[[], None],
        *,
        options: GroupOptions,
        load_keys: Callable[[], None],
    ) -> None:
        self._given = given
        self._finder = finder
        self._check_usable = check_usable  # Raises Closed if the plane was closed.
        self._options = options
        self._load_keys = load_keys  # In a transaction of its own.
        self._asked: object = None  # The connection that is known to be one to the plane's database.

    def run(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """The result of `work(tx, *args, **kwargs)`, whose writes are part of the caller's transaction.

        Raises:
            InvalidArgument: what the caller gave is no connection of psycopg.
            TransactionRequired: it has no open transaction, or a failed one.
            WrongDatabase: it is connected to another database than the plane.
            IsolationUnsupported: `work` needs READ COMMITTED.
            TransactionConflict, Busy: another transaction is in the way; roll back and run the transaction again.
        """
        self._check_usable()
        connection = connection_of(self._given)
        place = self._finder.find()
        for _ in range(_BEGIN_ATTEMPTS_MAX):
            with connection.lock:
                if not self._must_ask(connection):
                    return self._run(connection, place, work, args, kwargs)
            with _translated_errors(), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                _check_place(place, _row(cursor.execute(_WHERE).fetchone()))
            self._asked = connection
        raise _ended_meanwhile_error()

    async def run_async(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """`run` for an event loop. The statements run in a thread, which has the connection to itself meanwhile."""
        self._check_usable()
        connection = await async_connection_of(self._given)
        place = self._finder.place
        if place is None:
            place = await run_in_thread(self._finder.find)
        for _ in range(_BEGIN_ATTEMPTS_MAX):
            async with connection.lock:
                if not self._must_ask(connection):
                    return await _finish(run_in_thread(self._run, connection, place, work, args, kwargs))
            await _finish(_check_place_async(place, connection))
            self._asked = connection
        raise _ended_meanwhile_error()

    def _must_ask(self, connection: "Connection | AsyncConnection") -> bool:
        """Whether to ask first where the connection is. With the question, psycopg opens a transaction if none is open.

        Call it with the connection's lock held: only then no other task is in the middle of a statement.
        """
        check_open(connection)
        return self._asked is not connection or connection.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def _run(
        self,
        connection: "Connection | AsyncConnection",
        place: Place,
        work: Work[Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Result:
        needs: Needs = {}
        for _ in range(limits.LOCK_ATTEMPTS_MAX):
            session = UserSession(connection.pgconn, place.table, self._options.cipher)
            view: UserView | None = None
            try:
                session.begin()
                if not session.is_read_committed:  # Its snapshot may be older than the newest keys.
                    self._load_keys()
                view = UserView(session, needs)
                result = self._attempt(session, view, work, args, kwargs)
            except LockTaken:
                assert view is not None
                needs = union([needs, view.locked])
                session.undo()
            except BaseException:
                session.undo()
                raise
            else:
                session.release()
                return result
        raise Busy("Locks were granted late again and again; roll back and run the transaction again")

    def _attempt(
        self, session: UserSession, view: UserView, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result:
        options = self._options
        database = options.database
        tx = Transaction(view, clock=options.clock or view, ids=options.ids, writer=session.writer)
        tx.fence_floor, tx.data_format = session.fence_floor, database.data_format
        usage = database.usage
        tx.defaults, tx.usage = database.defaults, None if usage is None else usage.of_caller()
        result = run(tx, work, args, kwargs)
        if view.taken is not None:
            raise view.taken  # The function has caught it.
        view.lock_writes(tx)
        if tx.usage is not None:
            tx.usage.add_writes(tx.writes)
        session.write(tx)
        return result


async def _check_place_async(place: Place, connection: "AsyncConnection") -> None:
    with _translated_errors():
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(_WHERE)
            _check_place(place, _row(await cursor.fetchone()))


async def _finish(statements: Coroutine[Any, Any, Result]) -> Result:
    """The result of statements on the connection. A caller that is cancelled waits for their end, which is bounded.

    Otherwise it would use the connection while a thread still does, or its transaction would fail with the statement.
    """
    running = asyncio.ensure_future(statements)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(running)
        raise


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        raise Unreachable(f"The connection broke ({error}); nothing was written. Run the transaction again") from error
    except psycopg.Error as error:
        raise DatabaseFailed(f"PostgreSQL does not say which server it is ({error}); roll back") from error


def _ended_meanwhile_error() -> TransactionRequired:
    return TransactionRequired(
        "Another task or thread keeps ending the transaction of this connection; use one connection for each of them"
    )


def _check_place(place: Place, found: tuple[str, ...]) -> None:
    if found != (place.system, place.database):
        raise WrongDatabase(
            "The connection is to another database than the plane; connect to the database of the plane's URL"
        )


def _row(found: "tuple[Any, ...] | None") -> tuple[str, ...]:
    assert found is not None, "the query returns one row"
    return tuple(str(value) for value in found)
