"""Runs functions in a transaction of the caller's own connection, beside the caller's own statements.

    caller's BEGIN ──► caller's statements, and for each call of Holdfast:            ──► caller's COMMIT or ROLLBACK
                       SAVEPOINT ──► locks, reads ──► writes, NOTIFY ──► RELEASE

What a call writes is in PostgreSQL when the call returns, so later calls of the same transaction see it, and others see
it after the commit. PostgreSQL sends the notification with the commit, or drops it with the rollback. A call that fails
is rolled back to its savepoint: the caller's transaction goes on without it. Nothing is remembered between calls,
because the caller may roll back to a savepoint of its own.

The locks are those of Holdfast's own transactions, held until the caller's transaction ends. A caller can hold several
and wait for another one, so two callers can deadlock. PostgreSQL detects that, and ends one of the calls.

Only PostgreSQL's locks order the transactions, so a call must see what was committed before it got its lock. The
snapshot of a REPEATABLE READ or SERIALIZABLE transaction is older. There, only calls that share a part are possible,
which read nothing that others write.
"""

import asyncio
import struct
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final

import msgspec
import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from holdfast import limits
from holdfast.backends.postgres.connections import connect
from holdfast.backends.postgres.notifications import CHANNEL, notification
from holdfast.backends.postgres.sessions import _array
from holdfast.backends.postgres.user_connections import (
    AsyncConnection,
    Connection,
    async_connection_of,
    check_open,
    connection_of,
)
from holdfast.clock import Clock, IdSource
from holdfast.errors import (
    Busy,
    DatabaseFailed,
    DiskFull,
    IsolationUnsupported,
    ReadOnlyTransaction,
    TransactionConflict,
    Unreachable,
    WrongDatabase,
)
from holdfast.kv import Pair, Result, Transaction, Work
from holdfast.kv.execution import run
from holdfast.threads import run_in_thread

_WHERE: Final = """
    SELECT (SELECT system_identifier FROM pg_control_system())::text,
        (SELECT oid FROM pg_database WHERE datname = current_database())::text
"""
_TABLE: Final = """
    SELECT quote_ident(nspname) || '.holdfast_kv' FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE pg_class.oid = 'holdfast_kv'::regclass
"""

# The caller's own lock_timeout is kept if there is one. The transaction's id names the writer where the isolation level
# hides what the same connection has committed since the snapshot.
_BEGIN: Final = """SAVEPOINT holdfast; SELECT
    (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    current_setting('transaction_isolation') = 'read committed',
    current_setting('transaction_read_only') = 'off',
    current_setting('lock_timeout'),
    pg_backend_pid(),
    CASE WHEN current_setting('transaction_isolation') <> 'read committed' THEN pg_current_xact_id()::text END,
    CASE WHEN current_setting('lock_timeout') = '0' THEN set_config('lock_timeout', '{lock_timeout_ms}', true) END"""


class Place(msgspec.Struct, frozen=True):
    """Where a plane is: the server, the database, and its table with its schema."""

    system: str
    database: str
    table: str


class PlaceFinder:
    """Finds out where a plane is when that is first asked for."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._place: Place | None = None

    def find(self) -> Place:
        if self._place is None:  # Two threads may both ask, and get the same answer.
            with connect(self._url) as connection:
                system, database = _row(connection.execute(_WHERE).fetchone())
                (table,) = _row(connection.execute(_TABLE).fetchone())
            self._place = Place(system, database, table)
        return self._place


class UserTransaction:
    """The transaction of a caller's connection or session, whichever is open there at each call."""

    def __init__(self, given: object, finder: PlaceFinder, *, clock: Clock | None, ids: IdSource, floor: int) -> None:
        self._given = given
        self._finder = finder
        self._clock = clock
        self._ids = ids
        self._fence_floor = floor
        self._checked: object = None  # The connection that is known to be one to the plane's database.

    def run(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """The result of `work(tx, *args, **kwargs)`, whose writes are part of the caller's transaction.

        Raises:
            InvalidArgument: what the caller gave is no connection of psycopg.
            TransactionRequired: it has no open transaction, or a failed one.
            WrongDatabase: it is connected to another database than the plane.
            IsolationUnsupported: `work` needs READ COMMITTED.
            TransactionConflict, Busy: another transaction is in the way; roll back and run the transaction again.
        """
        connection = connection_of(self._given)
        check_open(connection)
        place = self._finder.find()
        if self._must_check(connection):
            with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                _check_place(place, _row(cursor.execute(_WHERE).fetchone()))
            self._checked = connection
        with connection.lock:
            return self._run(connection, place, work, args, kwargs)

    async def run_async(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """`run` for an event loop. The statements run in a thread, which has the connection to itself meanwhile."""
        connection = await async_connection_of(self._given)
        check_open(connection)
        place = await run_in_thread(self._finder.find)
        if self._must_check(connection):
            async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
                await cursor.execute(_WHERE)
                _check_place(place, _row(await cursor.fetchone()))
            self._checked = connection
        async with connection.lock:
            running = asyncio.ensure_future(run_in_thread(self._run, connection, place, work, args, kwargs))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                # The thread still uses the connection. Each of its statements ends in a bounded time.
                while not running.done():
                    with suppress(asyncio.CancelledError, Exception):
                        await asyncio.shield(running)
                raise

    def _must_check(self, connection: "Connection | AsyncConnection") -> bool:
        """Whether to ask where the connection is: psycopg opens the transaction with the question, if there is none."""
        is_idle = connection.pgconn.transaction_status == pq.TransactionStatus.IDLE
        return is_idle or self._checked is not connection

    def _run(
        self,
        connection: "Connection | AsyncConnection",
        place: Place,
        work: Work[Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Result:
        view = _View(connection.pgconn, place.table)
        view.begin()
        try:
            tx = Transaction(view, clock=self._clock or view, ids=self._ids, writer=view.writer)
            tx.fence_floor = self._fence_floor
            result = run(tx, work, args, kwargs)
            if view.failure is not None:
                raise view.failure  # The function may have caught it, but it must not go on.
            view.write(tx)
        except BaseException:
            view.undo()
            raise
        view.release()
        return result


class _View:
    """The key space as the caller's transaction sees it, and the statements of one call."""

    def __init__(self, connection: pq.abc.PGconn, table: str) -> None:
        self._pq = connection
        self._table = table
        self._values_read: dict[bytes, bytes | None] = {}
        self._locked: set[bytes] = set()
        self._shared: set[bytes] = set()
        self._now_ms = 0
        self._is_read_committed = True
        self._resets_lock_timeout = False
        self.writer = ""
        self.failure: Exception | None = None

    def begin(self) -> None:
        """Set a savepoint, and read what the call depends on."""
        row = self._exec(_BEGIN.format(lock_timeout_ms=round(limits.LOCK_WAIT_SECONDS_MAX * 1_000)).encode())
        now_ms, self._is_read_committed, is_writable, lock_timeout, pid, number = (
            int(row.get_value(0, 0) or b"0"),
            row.get_value(0, 1) == b"t",
            row.get_value(0, 2) == b"t",
            row.get_value(0, 3),
            row.get_value(0, 4) or b"",
            row.get_value(0, 5),
        )
        self._now_ms = now_ms
        self._resets_lock_timeout = lock_timeout == b"0"
        # No two transactions that run at the same time may have one writer.
        self.writer = f"pid-{pid.decode()}" if number is None else f"transaction-{number.decode()}"
        if not is_writable:
            self.undo()
            raise ReadOnlyTransaction("The transaction is READ ONLY; begin one that can write")

    def now_ms(self) -> int:
        """The database's clock at the start of the call."""
        return self._now_ms

    def get(self, key: bytes) -> bytes | None:
        if key in self._values_read:
            return self._values_read[key]
        self._lock([part_of(key)])
        found = self._run(f"SELECT value FROM {self._table} WHERE key = $1", [key])
        value = self._values_read[key] = found.get_value(0, 0) if found.ntuples else None
        return value

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        self._lock([part_of_range(begin, end)])
        order = "DESC" if reverse else "ASC"
        found = self._run(
            f"SELECT key, value FROM {self._table} WHERE key >= $1 AND key < $2 ORDER BY key {order} LIMIT $3::bigint",
            [begin, end, struct.pack("!q", limit)],
        )
        return [(found.get_value(row, 0) or b"", found.get_value(row, 1) or b"") for row in range(found.ntuples)]

    def share(self, prefix: bytes) -> None:
        """See `Transaction.share`."""
        self._shared.add(part_of(prefix))

    def write(self, tx: Transaction) -> None:
        """Write the changes of `tx`, with their notification."""
        if not tx.has_writes:
            return
        self._lock([*(part_of(key) for key in tx.writes), *(part_of_range(*bounds) for bounds in tx.cleared)])
        table = self._table
        if tx.cleared:
            self._run(
                f"DELETE FROM {table} USING unnest($1::bytea[], $2::bytea[]) AS cleared(first, past) "
                "WHERE key >= first AND key < past",
                [_array(begin for begin, _ in tx.cleared), _array(end for _, end in tx.cleared)],
            )
        puts = {key: value for key, value in tx.writes.items() if value is not None}
        deleted = [key for key, value in tx.writes.items() if value is None]
        self._run(
            f"WITH put AS (INSERT INTO {table} SELECT * FROM unnest($1::bytea[], $2::bytea[]) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value), "
            f"gone AS (DELETE FROM {table} AS old USING unnest($4::bytea[]) AS gone(key) WHERE old.key = gone.key) "
            f"SELECT pg_notify('{CHANNEL}', $3)",
            [_array(puts), _array(puts.values()), notification(tx), _array(deleted)],
        )

    def release(self) -> None:
        """Keep what the call wrote."""
        reset = b"SET LOCAL lock_timeout = 0; " if self._resets_lock_timeout else b""
        self._exec(reset + b"RELEASE SAVEPOINT holdfast")

    def undo(self) -> None:
        """Roll back what the call did. The caller's transaction goes on, unless the connection is lost."""
        if self._pq.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            self._pq.exec_(b"ROLLBACK TO SAVEPOINT holdfast; RELEASE SAVEPOINT holdfast")

    def _lock(self, parts: Iterable[bytes]) -> None:
        """Lock parts of the key space until the caller's transaction ends, and wait for those that others hold."""
        if self.failure is not None:
            raise self.failure
        for part in dict.fromkeys(parts):
            if part in self._locked:
                continue
            shared = part in self._shared
            if not shared and not self._is_read_committed:
                raise IsolationUnsupported(
                    "This call reads what other transactions may have changed since this one began; begin it with "
                    "ISOLATION LEVEL READ COMMITTED, or make this call on the plane itself"
                )
            kind = "_shared" if shared else ""
            self._run(f"SELECT pg_advisory_xact_lock{kind}($1::bigint)", [lock_number(part)])
            self._locked.add(part)

    def _exec(self, command: bytes) -> pq.abc.PGresult:
        return self._check(self._pq.exec_(command))

    def _run(self, statement: str, parameters: list[bytes]) -> pq.abc.PGresult:
        # Without a name: the caller may be behind a connection pooler, which would lose a prepared statement.
        result = self._pq.exec_params(statement.encode(), parameters, None, [1] * len(parameters), 1)
        return self._check(result)

    def _check(self, result: pq.abc.PGresult) -> pq.abc.PGresult:
        if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            return result
        self.failure = self._failure(result)
        raise self.failure

    def _failure(self, result: pq.abc.PGresult) -> Exception:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = result.get_error_message().strip()
        if state in ("40001", "40P01"):
            return TransactionConflict(
                f"Another transaction is in the way ({text}); roll back and run the transaction again"
            )
        if state in ("55P03", "57014"):
            return Busy(
                f"Another transaction holds what this call needs ({text}); roll back and run the transaction again"
            )
        if state.startswith("57P") or self._pq.status != pq.ConnStatus.OK:
            return Unreachable(f"The connection broke ({text}); nothing was written. Run the transaction again")
        if state == "53100":
            return DiskFull(f"PostgreSQL's disk is full ({text}); roll back, free some space and run it again")
        if state == "42501":
            return DatabaseFailed(
                f"PostgreSQL refused a statement ({text}); GRANT SELECT, INSERT, UPDATE, DELETE ON {self._table} to "
                "this user, and USAGE on its schema"
            )
        return DatabaseFailed(f"PostgreSQL refused a statement ({state}: {text}); roll back the transaction")


def _check_place(place: Place, found: tuple[str, ...]) -> None:
    if found != (place.system, place.database):
        raise WrongDatabase(
            "The connection is to another database than the plane; connect to the database of the plane's URL"
        )


def _row(found: "tuple[Any, ...] | None") -> tuple[str, ...]:
    assert found is not None, "the query returns one row"
    return tuple(str(value) for value in found)


def part_of(key: bytes) -> bytes:
    return b"\x00".join(key.split(b"\x00")[:4])


def part_of_range(begin: bytes, end: bytes) -> bytes:
    del end
    return part_of(begin)


def lock_number(part: bytes) -> bytes:
    return blake2b(part, digest_size=8).digest()
