"""One connection to PostgreSQL, with the operations that a transaction needs.

    round trips     what is sent
    0 or 1          BEGIN and the database's clock, when `work` first reads data or the time
    1 per read      a prepared SELECT
    1               all writes of the transaction as one statement, with its notification
    1               COMMIT

A write-only transaction needs no BEGIN: its one statement is the whole transaction, in one round trip. Statements use
libpq's blocking calls (`psycopg.pq`), which release the GIL and take half of a cursor's time.
"""

import select
import struct
import time
from collections.abc import Iterable
from typing import Final

import psycopg
from psycopg import pq

from holdfast import limits
from holdfast.backends.postgres.connections import connect
from holdfast.backends.postgres.failover import IS_DURABLE, is_demoted, is_unreplicated, unreplicated_error
from holdfast.backends.postgres.notifications import CHANNEL, notification
from holdfast.backends.postgres.retries import Conflicted, Disconnected, Idled, Overloaded
from holdfast.errors import CommitUnknown, DatabaseFailed, DiskFull
from holdfast.kv import Pair, Transaction

# Sequential scans would take a predicate lock on the whole table, and conflict with every writer.
_SETTINGS: Final = """
    SET default_transaction_isolation = 'serializable';
    SET synchronous_commit = on;
    SET enable_seqscan = off;
    SET enable_bitmapscan = off;
    SET statement_timeout = {statement};
    SET lock_timeout = {lock};
    SET idle_in_transaction_session_timeout = {idle};
    SET client_min_messages = 'warning';
"""

# The log position is read after the snapshot is taken, so it covers every commit in the snapshot.
_BEGIN: Final = b"BEGIN; SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, pg_current_wal_insert_lsn()"
_BEGIN_READING: Final = _BEGIN.replace(b"BEGIN", b"BEGIN READ ONLY", 1)

_PUT: Final = """INSERT INTO holdfast_kv SELECT * FROM unnest($1::bytea[], $2::bytea[])
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
_READING: Final = {
    b"get": "SELECT value FROM holdfast_kv WHERE key = $1",
    b"scan": "SELECT key, value FROM holdfast_kv WHERE key >= $1 AND key < $2 ORDER BY key LIMIT $3::bigint",
    b"back": "SELECT key, value FROM holdfast_kv WHERE key >= $1 AND key < $2 ORDER BY key DESC LIMIT $3::bigint",
}
_STATEMENTS: Final = {
    **_READING,
    b"put": f"WITH put AS ({_PUT}) SELECT pg_notify('{CHANNEL}', $3)",
    b"write": f"""WITH put AS ({_PUT}), gone AS (DELETE FROM holdfast_kv USING unnest($4::bytea[]) AS old(key)
        WHERE holdfast_kv.key = old.key) SELECT pg_notify('{CHANNEL}', $3)""",
    b"clear": """DELETE FROM holdfast_kv USING unnest($1::bytea[], $2::bytea[]) AS cleared(first, past)
        WHERE key >= first AND key < past""",
}

_CONFLICTS: Final = frozenset({"40001", "40P01"})  # A serialization failure, a deadlock.

# Out of memory, of predicate locks or of another resource; a lock or a statement took too long. PostgreSQL has aborted
# the transaction. An open transaction of a paused process causes most of these, and ends in seconds.
_OVERLOADS: Final = frozenset({"53000", "53200", "53300", "53400", "55P03", "57014"})


class Session:
    """A connection with at most one open transaction; also that transaction's view. Used by one thread at a time."""

    def __init__(self, url: str, *, reading: bool = False) -> None:
        """`reading` is for a session that never writes: preparing a writing statement waits for the table's lock."""
        self._connection = connect(url, await_failover=True)
        self._connection.add_notice_handler(self._on_notice)
        self._unreplicated = False  # Whether a commit stopped waiting for its synchronous standby.
        self._pq = self._connection.pgconn
        self._open = False
        self._reading = False
        self._durable = True
        self._now_ms = 0
        self._log_position = b""
        self._answered = time.monotonic()  # When the last statement succeeded.
        self.failure: Exception | None = None  # Why the open transaction has failed.
        try:
            self._exec(_settings())
            for name, statement in (_READING if reading else _STATEMENTS).items():
                self._check(self._pq.prepare(name, statement.encode()), uncertain=False)
        except BaseException:
            self.close()
            raise

    def start(self, *, durable: bool, reading: bool = False) -> None:
        """Prepare for a transaction; BEGIN is sent with its first read or write.

        The commit of a `durable` transaction returns once everything it wrote and read survives power loss.
        """
        self._open, self._reading, self.failure = False, reading, None
        self._values_read: dict[bytes, bytes | None] = {}
        if durable != self._durable:
            self._exec(b"SET synchronous_commit = on" if durable else b"SET synchronous_commit = off")
            self._durable = durable

    def now_ms(self) -> int:
        """The database's clock at the start of the transaction."""
        self._begin()
        return self._now_ms

    def get(self, key: bytes) -> bytes | None:
        # A transaction sees one snapshot, and the jobs of a group often read the same keys.
        if key in self._values_read:
            return self._values_read[key]
        self._begin()
        found = self._run(b"get", [key])
        value = self._values_read[key] = found.get_value(0, 0) if found.ntuples else None
        return value

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        self._begin()
        found = self._run(b"back" if reverse else b"scan", [begin, end, struct.pack("!q", limit)])
        return [(found.get_value(row, 0) or b"", found.get_value(row, 1) or b"") for row in range(found.ntuples)]

    def share(self, prefix: bytes) -> None:
        """Every transaction is SERIALIZABLE, so there is no lock to share."""

    def commit(self, tx: Transaction) -> None:
        """Write the changes of `tx` and commit.

        Raises:
            Conflicted, Disconnected: nothing was written; run it again.
            CommitUnknown: the connection broke during the commit.
        """
        if self.failure is not None:
            raise self.failure
        if not tx.has_writes:
            self._finish_reading()
            return
        if tx.cleared:
            self._begin()
            self._run(b"clear", [_array(begin for begin, _ in tx.cleared), _array(end for _, end in tx.cleared)])
        self._write(tx)
        if self._open:
            if not self.is_usable:  # PostgreSQL ended the session before COMMIT was sent, so nothing is uncertain.
                self.failure = self._disconnected("the session was ended before the commit")
                raise self.failure
            self._exec(b"COMMIT", uncertain=True)
            self._open = False

    def rollback(self) -> None:
        """Abort the transaction."""
        if self._open and self._pq.status == pq.ConnStatus.OK:
            self._pq.exec_(b"ROLLBACK")
        self._open = False

    @property
    def is_usable(self) -> bool:
        """Whether the connection seems usable, without a round trip."""
        if self._pq.status != pq.ConnStatus.OK:
            return False
        # If the server closed this idle connection, its message is waiting to be read.
        poller = select.poll()  # `select.select` supports no descriptors over 1,023, which a busy server has.
        poller.register(self._pq.socket, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        self._connection.close()

    def _begin(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._open:
            return
        self._open = True  # Set first: if the second statement fails, BEGIN must be rolled back.
        row = self._exec(_BEGIN_READING if self._reading else _BEGIN)
        self._now_ms = int(row.get_value(0, 0) or b"0")
        self._log_position = row.get_value(0, 1) or b""

    def _write(self, tx: Transaction) -> None:
        puts = {key: value for key, value in tx.writes.items() if value is not None}
        deleted = [key for key, value in tx.writes.items() if value is None]
        parameters = [_array(puts), _array(puts.values()), notification(tx)]
        uncertain = not self._open  # Without BEGIN, the statement commits by itself.
        if deleted:
            self._run(b"write", [*parameters, _array(deleted)], uncertain=uncertain)
        else:
            self._run(b"put", parameters, uncertain=uncertain)

    def _finish_reading(self) -> None:
        if not self._open:
            return
        if not self._durable:
            self._exec(b"COMMIT")
            self._open = False
            return
        flushed = self._exec(b"COMMIT; " + IS_DURABLE.encode().replace(b"$1", b"'%b'" % self._log_position))
        self._open = False
        if flushed.get_value(0, 0) != b"t":
            # An unsynced IMPORTANT commit may have been read. A synced commit syncs everything before it.
            self._exec(b"SELECT pg_logical_emit_message(true, 'holdfast', '')")

    def _exec(self, command: bytes, *, uncertain: bool = False) -> pq.abc.PGresult:
        return self._check(self._pq.exec_(command), uncertain)

    def _run(self, name: bytes, parameters: list[bytes], *, uncertain: bool = False) -> pq.abc.PGresult:
        return self._check(self._pq.exec_prepared(name, parameters, [1] * len(parameters), 1), uncertain)

    def _check(self, result: pq.abc.PGresult, uncertain: bool) -> pq.abc.PGresult:
        if self._unreplicated:
            self._unreplicated, self.failure = False, unreplicated_error(wrote=uncertain)
            raise self.failure
        if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            self._answered = time.monotonic()
            return result
        self.failure = self._failure(result, uncertain)
        raise self.failure

    def _failure(self, result: pq.abc.PGresult, uncertain: bool) -> Exception:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = result.get_error_message().strip()
        if state in _CONFLICTS:
            return Conflicted(text)
        if state in _OVERLOADS:
            return Overloaded(f"{state}: {text}")
        if is_demoted(state, text):
            self.close()
            return self._disconnected(text)
        ending = state.startswith("57P")  # The server is shutting down, or an administrator ended this session.
        if ending or self._pq.status != pq.ConnStatus.OK:
            if uncertain:
                return CommitUnknown(
                    f"PostgreSQL's answer to a commit was lost ({text}); check whether the write was stored"
                )
            return self._disconnected(text)
        if state == "53100":
            return DiskFull(f"PostgreSQL's disk is full ({text}); nothing was written. Free some space and try again")
        return DatabaseFailed(f"PostgreSQL refused a statement ({state}: {text}); nothing was written")

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if is_unreplicated(notice.severity_nonlocalized, notice.source_function):
            self._unreplicated = True

    def _disconnected(self, text: str) -> Disconnected:
        # libpq reports only that the connection is closed, not the message in which the server said why.
        idle_seconds = time.monotonic() - self._answered
        return Idled(text) if self._open and idle_seconds >= limits.IDLE_TRANSACTION_SECONDS_MAX else Disconnected(text)


def _settings() -> bytes:
    return _SETTINGS.format(
        statement=round(limits.STATEMENT_SECONDS_MAX * 1_000),
        lock=round(limits.LOCK_WAIT_SECONDS_MAX * 1_000),
        idle=round(limits.IDLE_TRANSACTION_SECONDS_MAX * 1_000),
    ).encode()


def _array(items: Iterable[bytes]) -> bytes:
    """A bytea[] in PostgreSQL's binary format."""
    parts = [struct.pack("!i", len(item)) + item for item in items]
    if not parts:
        return struct.pack("!iii", 0, 0, _BYTEA)
    return struct.pack("!iiiii", 1, 0, _BYTEA, len(parts), 1) + b"".join(parts)


_BYTEA: Final = 17  # The type's OID.
