"""One call in a transaction of the caller's own connection: its savepoint, its view of the key space, its writes.

The view is that of Fastness's own transactions, with two differences. It waits for a lock, although the caller may hold
others: PostgreSQL detects a deadlock. And a part that is shared is not locked at all, because the caller may keep the
transaction open for long, and consumers would wait for its end. That is possible because a transaction that shares a
part writes only new keys and the counters of its writer, and here every transaction is a writer of its own. An ordered
lock is shared to exclude its holders until the end of the transaction, so it is locked.
"""

from typing import Final

from psycopg import pq

from fastness import limits
from fastness.backends.postgres import statements
from fastness.backends.postgres.format_lock import HOLD_IN_TRANSACTION, READ, check_format
from fastness.backends.postgres.locked_view import LockedView, Needs
from fastness.backends.postgres.notifications import notification
from fastness.backends.postgres.parts import CALLERS, EVERYTHING, is_lock, lock_number
from fastness.backends.postgres.statements import Statement
from fastness.errors import (
    Busy,
    DatabaseFailed,
    DiskFull,
    IsolationUnsupported,
    ReadOnlyTransaction,
    TransactionConflict,
    Unreachable,
)
from fastness.kv import Transaction, fence_floor
from fastness.kv.value_cipher import GENERATION, ValueCipher

# The transaction's id is never used again, so no two transactions have one writer. The lock_timeout of the caller is
# kept if there is one.
# The lock of CALLERS excludes changes of the encryption keys and of the fence floor until the transaction ends.
_BEGIN: Final = f"""SAVEPOINT fastness; {HOLD_IN_TRANSACTION.decode()},
    pg_advisory_xact_lock_shared({lock_number(CALLERS)}); SELECT
    current_setting('transaction_read_only') = 'off',
    current_setting('transaction_isolation') = 'read committed',
    current_setting('lock_timeout') = '0',
    CASE current_setting('transaction_read_only') WHEN 'off' THEN pg_current_xact_id()::text ELSE '' END,
    CASE current_setting('lock_timeout') WHEN '0' THEN
        set_config('lock_timeout', '{round(limits.LOCK_WAIT_SECONDS_MAX * 1_000)}', true) END,
    ({READ.decode()}),
    (SELECT encode(value, 'hex') FROM fastness_kv WHERE key = '\\x{GENERATION.hex()}'),
    (SELECT encode(value, 'hex') FROM fastness_kv WHERE key = '\\x{fence_floor.KEY.hex()}')""".encode()
_UNDO: Final = b"ROLLBACK TO SAVEPOINT fastness; RELEASE SAVEPOINT fastness"
_TRUE: Final = b"t"


class UserSession:
    """The statements of one call, on the caller's connection."""

    def __init__(self, connection: pq.abc.PGconn, table: str, cipher: ValueCipher) -> None:
        self.cipher = cipher
        self.generation: bytes | None = None  # The record of the keys of encrypted universes.
        self.fence_floor = 0
        self._pq = connection
        self._table = table
        self._sets_lock_timeout = False
        self.is_read_committed = True
        self.writer = ""
        self.failure: Exception | None = None  # Why a statement has failed. The call must not go on.

    def begin(self) -> None:
        """Set the savepoint.

        Raises:
            ReadOnlyTransaction: the caller's transaction cannot write.
            SchemaMismatch: the plane has a newer format.
        """
        answer = self._check(self._pq.exec_(_BEGIN.replace(b"fastness_kv", self._table.encode())))
        is_writable, self.is_read_committed, self._sets_lock_timeout = (
            answer.get_value(0, column) == _TRUE for column in range(3)
        )
        if not is_writable:
            raise ReadOnlyTransaction("The transaction is READ ONLY; begin one that can write")
        check_format(answer.get_value(0, 5))
        self.generation, floor = (
            None if found is None else bytes.fromhex(found.decode())
            for found in (answer.get_value(0, column) for column in (6, 7))
        )
        self.fence_floor = fence_floor.decode(floor)
        self.writer = f"tx-{(answer.get_value(0, 3) or b'').decode()}"

    def run(self, *wanted: Statement) -> "list[pq.abc.PGresult]":
        """The answers to these statements."""
        if self.failure is not None:
            raise self.failure
        return [self._execute(name, parameters) for name, parameters in wanted]

    def write(self, tx: Transaction) -> None:
        """Write the changes of `tx`. PostgreSQL sends their notification when the caller commits."""
        if self.failure is not None:
            raise self.failure
        if tx.has_writes:
            self.run(*statements.writes_of(tx, self.cipher), (b"notify", [notification(tx, self.writer)]))

    def release(self) -> None:
        """Keep what the call has written."""
        reset = b"SET LOCAL lock_timeout = 0; " if self._sets_lock_timeout else b""
        self._check(self._pq.exec_(reset + b"RELEASE SAVEPOINT fastness"))

    def undo(self) -> None:
        """Roll back what the call did. The caller's transaction goes on, unless the connection is lost."""
        if self._pq.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            self._pq.exec_(_UNDO)

    def _execute(self, name: bytes, parameters: list[bytes]) -> "pq.abc.PGresult":
        # Not prepared: the caller's connection may go through a pooler, which would lose a prepared statement.
        statement = statements.WRITING[name]
        if name != b"notify":  # The name of the channel is that of the table.
            statement = statement.replace("fastness_kv", self._table)
        formats = [1] * len(parameters)
        return self._check(self._pq.exec_params(statement.encode(), parameters, None, formats, 1))

    def _check(self, answer: "pq.abc.PGresult") -> "pq.abc.PGresult":
        if answer.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            return answer
        self.failure = self._error(answer)
        raise self.failure

    def _error(self, answer: "pq.abc.PGresult") -> Exception:
        state = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = answer.get_error_message().strip()
        if state.startswith("57P") or self._pq.status != pq.ConnStatus.OK:
            return Unreachable(f"The connection broke ({text}); nothing was written. Run the transaction again")
        if state in ("40001", "40P01"):
            return TransactionConflict(
                f"Another transaction is in the way ({text}); roll back and run the transaction again"
            )
        if state in ("55P03", "57014"):
            return Busy(
                f"Another transaction holds what this call needs ({text}); roll back and run the transaction again"
            )
        if state == "53100":
            return DiskFull(f"PostgreSQL's disk is full ({text}); roll back, and free some space")
        if state == "42501":
            return DatabaseFailed(
                f"PostgreSQL refused a statement ({text}); this user needs USAGE on the schema of {self._table}, and "
                "SELECT, INSERT, UPDATE and DELETE on the table"
            )
        return DatabaseFailed(f"PostgreSQL refused a statement ({state}: {text}); roll back the transaction")


class UserView(LockedView):
    """The view and the clock of one call."""

    def __init__(self, session: UserSession, needs: Needs) -> None:
        """Wait for the locks of `needs` before anything else."""
        super().__init__(session)  # type: ignore[arg-type]  # It uses `run` only.
        self._is_read_committed = session.is_read_committed
        self._oldest_keys = None if session.is_read_committed else 0
        self.use_keys(session.generation)
        if needs:
            self.wait_for(needs)

    @property
    def locked(self) -> Needs:
        """What the work has locked."""
        return {part: exclusive for part, exclusive in self.needs.items() if exclusive or not self._is_unlocked(part)}

    def _try(self, part: bytes, exclusive: bool, *wanted: Statement) -> "list[pq.abc.PGresult]":
        """Lock a part, after a wait if need be, and answer the statements."""
        if self.taken is not None:  # The work has caught the exception.
            raise self.taken
        if not exclusive and self._is_unlocked(part):
            return self._run(*wanted)
        if not self._is_read_committed:
            raise IsolationUnsupported(
                "This call needs what others have committed since your transaction began, which its isolation level "
                "hides; begin it with READ COMMITTED, or make this call on the plane itself"
            )
        first = [] if self._held else [_wait(EVERYTHING, exclusive=False)]
        answers = self._run(*first, _wait(part, exclusive=exclusive), *wanted)[len(first) :]
        self._held.setdefault(EVERYTHING, False)
        if part in self._held:  # Others may have changed it before this transaction owned it.
            self._forget()
        self._held[part] = exclusive
        if not self._note_time(answers[0]):
            self._stop(part)  # The wait was long: the work runs again with a time from after it.
        return answers[1:]

    def _is_unlocked(self, part: bytes) -> bool:
        return part in self._shared and not is_lock(part)


def _wait(part: bytes, *, exclusive: bool) -> Statement:
    return b"wait" if exclusive else b"wait_shared", [statements.number(lock_number(part))]
