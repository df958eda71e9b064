"""One connection to PostgreSQL, with the operations that a transaction needs.

    round trips     what is sent
    1 per read      a prepared SELECT; the first one with BEGIN, and the first one of a part with its lock
    1               all writes of the transaction and COMMIT, then its notification, whose answer is not awaited

Statements are sent in libpq's pipeline mode (`psycopg.pq`), so several need one round trip, and each still gets its own
snapshot: what is read after a lock is what the lock protects.

The notification is a transaction of its own. In the transaction of the writes, PostgreSQL would let one commit pass at
a time, with its sync. It is sent together with COMMIT, so that it arrives even if this process ends at once.
"""

import select
import time
from collections.abc import Sequence

import psycopg
from psycopg import pq

from fastness import limits
from fastness.backends.postgres import statements
from fastness.backends.postgres.connections import connect, connect_standby
from fastness.backends.postgres.failover import cancel_statement, is_demoted, is_unreplicated, unreplicated_error
from fastness.backends.postgres.failures import error_of
from fastness.backends.postgres.format_lock import HOLD, READ, check_format
from fastness.backends.postgres.notifications import notification
from fastness.backends.postgres.retries import Disconnected, Idled
from fastness.backends.postgres.statements import Statement
from fastness.errors import CommitUnknown
from fastness.kv import Pair, Transaction
from fastness.kv.value_cipher import ValueCipher

_COMMIT: Statement = (b"commit", [])
_OK = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_SYNC = pq.ExecStatus.PIPELINE_SYNC
_IDLE_SHARE = 0.8  # A session that ends after this share of the time for pauses counts as ended for pausing.


class Session:
    """A connection with at most one open transaction. Used by one thread at a time."""

    def __init__(
        self, url: str, cipher: ValueCipher, *, reading: bool = False, standby: bool = False, writer: str = ""
    ) -> None:
        """`reading` is for a session that never writes: preparing a writing statement waits for the table's lock.

        `standby` connects to a standby instead of the primary. `writer` names this process in notifications.
        """
        self._connection = connect_standby(url) if standby else connect(url, await_failover=True)
        self._connection.add_notice_handler(self._on_notice)
        self.cipher = cipher
        self._unreplicated = False  # Whether a commit stopped waiting for its synchronous standby.
        self._is_replicated = True  # Whether the last commit did not.
        self._answer_seconds = limits.ANSWER_SECONDS_MAX
        self._pq = self._connection.pgconn
        self._writer = writer
        self._begin: list[Statement] = []  # Sent with the first statement of the transaction.
        self._open = False
        self._durable = True
        self._unread = 0  # Answers that nothing waits for, to be skipped before the next ones.
        self._answered = time.monotonic()  # When the last statement succeeded.
        self.failure: Exception | None = None  # Why the open transaction has failed.
        try:
            self._check(self._pq.exec_(statements.settings()))
            self._check(self._pq.exec_(HOLD))
            self._check(found := self._pq.exec_(READ))
            check_format(value_of(found))
            for name, statement in statements.prepared(reading=reading, standby=standby).items():
                self._check(self._pq.prepare(name, statement.encode()))
            self._pq.enter_pipeline_mode()
        except BaseException:
            self.close()
            raise

    def start(self, begin: bytes, *, durable: bool) -> None:
        """Prepare for a transaction, which the statement `begin` starts together with the first other one.

        The commit of a `durable` transaction returns once everything it wrote and read survives power loss.
        """
        self._open, self._durable, self.failure = False, durable, None
        self._begin = [(begin, [])]
        if durable and begin != b"read":
            self._begin.append((b"durable", []))

    def run(self, *wanted: Statement) -> "list[pq.abc.PGresult]":
        """The answers to these statements, in one round trip. Begins the transaction if needed."""
        if self.failure is not None:
            raise self.failure
        if self._open:
            return self._send(wanted)
        self._open = True  # Set first: if a later statement fails, BEGIN must be rolled back.
        return self._send([*self._begin, *wanted])[len(self._begin) :]

    def commit(self, tx: Transaction, log_position: bytes) -> None:
        """Write the changes of `tx` and commit. `log_position` covers everything that the transaction has read.

        Raises:
            Conflicted, Disconnected: nothing was written; run it again.
            CommitUnknown: the connection broke during the commit.
        """
        if self.failure is not None:
            raise self.failure
        if not tx.has_writes:
            self._finish_reading(log_position)
            return
        if not self.is_usable:  # PostgreSQL ended the session before COMMIT was sent, so nothing is uncertain.
            self.failure = self._disconnected("the session was ended before the commit")
            raise self.failure
        writes = [] if self._open else list(self._begin)
        self._open = True
        writes += statements.writes_of(tx, self.cipher)
        self._send([*writes, _COMMIT], notify=(b"notify", [notification(tx, self._writer)]), committing=True)
        self._open = False

    def rollback(self) -> None:
        """Abort the transaction."""
        if self._open and self._pq.status == pq.ConnStatus.OK:
            failure = self.failure
            try:
                self._send([(b"rollback", [])])
            except Exception:  # The connection is replaced, and its transaction ends with it.
                self.close()
            self.failure = failure
        self._open = False

    @property
    def is_usable(self) -> bool:
        """Whether the connection seems usable, without a round trip."""
        if self._pq.status != pq.ConnStatus.OK:
            return False
        # If the server closed this idle connection, its message is waiting to be read.
        try:
            while self._poll(select.POLLIN, 0):
                if not self._unread:
                    return False
                self._pq.consume_input()
                self._skip_unread()
        except psycopg.OperationalError:
            return False
        return True

    def close(self) -> None:
        self._connection.close()

    def _finish_reading(self, log_position: bytes) -> None:
        if not self._open:
            return
        if not self._durable:
            self.run(_COMMIT)
            self._open = False
            return
        _, flushed = self.run(_COMMIT, (b"flushed", [log_position]))
        self._open = False
        if flushed.get_value(0, 0) != b"\x01":
            # An unsynced IMPORTANT commit may have been read. A synced commit syncs everything before it.
            self._send([(b"begin", []), (b"durable", []), (b"sync", []), _COMMIT])

    def _send(
        self, wanted: Sequence[Statement], *, notify: Statement | None = None, committing: bool = False
    ) -> "list[pq.abc.PGresult]":
        """The answers to the statements. That to `notify` is not awaited.

        If the connection breaks while `committing`, the commit may have happened, whatever was answered before.
        """
        # After a commit that was not replicated, many callers may wait for the next ones.
        is_patient = self._is_replicated or not committing
        self._answer_seconds = limits.ANSWER_SECONDS_MAX if is_patient else limits.UNREPLICATED_SECONDS_MAX
        try:
            for name, parameters in wanted:
                self._pq.send_query_prepared(name, parameters, [1] * len(parameters), 1)
            self._pq.pipeline_sync()
            if notify is not None:
                self._pq.send_query_prepared(notify[0], notify[1], [1], 1)
                self._pq.pipeline_sync()
            self._flush()
            answers = self._receive()
            if notify is not None:
                self._unread += 1
        except psycopg.OperationalError as error:
            self.close()
            raise self._lost(str(error), committing) from None
        except BaseException:  # A signal: the next caller must not get the answers that are still to come.
            self.close()
            raise
        if self._unreplicated:
            self._unreplicated, self._is_replicated = False, False
            self.failure = unreplicated_error(wrote=committing)
            raise self.failure
        for position, answer in enumerate(answers):
            if answer.status not in _OK:
                raise self._failed(answer, committing, is_last=position == len(wanted) - 1)
        if len(answers) < len(wanted):
            raise self._lost(self._pq.get_error_message().strip(), committing)
        self._answered = time.monotonic()
        self._is_replicated |= committing and self._durable
        return answers

    def _flush(self) -> None:
        while self._pq.flush():
            found = self._poll(select.POLLIN | select.POLLOUT, limits.ANSWER_SECONDS_MAX)
            if not found:
                raise _no_answer()
            if found & select.POLLIN:  # The server may be waiting for this side to read, too.
                self._pq.consume_input()

    def _receive(self) -> "list[pq.abc.PGresult]":
        """The answers up to the next synchronization point, after those that nothing waited for."""
        answers: list[pq.abc.PGresult] = []
        deadline = time.monotonic() + self._answer_seconds
        is_cancelled = False
        while True:
            while self._pq.is_busy():  # Waiting here releases the GIL, waiting in `get_result` would not.
                if self._poll(select.POLLIN, deadline - time.monotonic()):
                    self._pq.consume_input()
                elif is_cancelled:
                    raise _no_answer()
                else:
                    cancel_statement(self._connection)
                    deadline, is_cancelled = time.monotonic() + limits.CANCEL_SECONDS_MAX, True
            answer = self._pq.get_result()
            if answer is None:
                if self._pq.status != pq.ConnStatus.OK:
                    return answers
            elif answer.status != _SYNC:
                answers.append(answer)
            elif self._unread:
                self._unread -= 1
                answers.clear()
            else:
                return answers

    def _skip_unread(self) -> None:
        """Read the answers that have arrived and that nothing waits for."""
        while self._unread and not self._pq.is_busy():
            answer = self._pq.get_result()
            if answer is None and self._pq.status != pq.ConnStatus.OK:
                return
            if answer is not None and answer.status == _SYNC:
                self._unread -= 1

    def _poll(self, events: int, timeout_seconds: float) -> int:
        """Which of the events have happened, or any error."""
        poller = select.poll()  # `select.select` supports no descriptors over 1,023, which a busy server has.
        poller.register(self._pq.socket, events)
        found = poller.poll(max(timeout_seconds, 0) * 1_000)
        return found[0][1] if found else 0

    def _check(self, answer: "pq.abc.PGresult") -> None:
        if answer.status not in _OK:
            raise self._failed(answer, committing=False, is_last=False)

    def _failed(self, answer: "pq.abc.PGresult", committing: bool, is_last: bool) -> Exception:
        state = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = answer.get_error_message().strip()
        if is_demoted(state, text):
            self.close()
            return self._lost(text, is_uncertain=False)
        # The server is shutting down, or an administrator ended this session.
        if not state or state.startswith("57P"):
            return self._lost(text, committing and (is_last or not state))
        self.failure = error_of(state, text)
        return self.failure

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if is_unreplicated(notice.severity_nonlocalized, notice.source_function):
            self._unreplicated = True

    def _lost(self, text: str, is_uncertain: bool) -> Exception:
        self.failure = (
            CommitUnknown(f"PostgreSQL's answer to a commit was lost ({text}); check whether the write was stored")
            if is_uncertain
            else self._disconnected(text)
        )
        return self.failure

    def _disconnected(self, text: str) -> Disconnected:
        # libpq reports only that the connection is closed, not the message in which the server said why. The server's
        # time begins a little earlier, before its answer arrives.
        idle_seconds = time.monotonic() - self._answered
        was_idle = self._open and idle_seconds >= limits.IDLE_TRANSACTION_SECONDS_MAX * _IDLE_SHARE
        return Idled(text) if was_idle else Disconnected(text)


def _no_answer() -> psycopg.OperationalError:
    return psycopg.OperationalError(f"no answer within {limits.ANSWER_SECONDS_MAX:.0f} s")


def pairs_of(answer: "pq.abc.PGresult") -> list[Pair]:
    """The pairs that a scan has found."""
    return [(answer.get_value(row, 0) or b"", answer.get_value(row, 1) or b"") for row in range(answer.ntuples)]


def value_of(answer: "pq.abc.PGresult") -> bytes | None:
    """The value that a get has found."""
    return answer.get_value(0, 0) if answer.ntuples else None
