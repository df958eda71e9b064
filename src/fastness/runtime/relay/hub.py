"""The relay hub commits the work of all sessions in batches.

    sessions with work ──► joins, leaves ──► sends, confirms ──► reads of mailboxes ──► reads of receipts ──► one commit
             ▲                                                                                                    │
             └── new work meanwhile ◄────────────────────────── answers, mail, delivery confirms ◄────────────────┘

A mail for an agent that is connected to this server is stored and delivered by the same commit: the recipient's mailbox
is read after the send. So a hop costs one sync, and a commit carries everything that arrived while the previous one was
synced.

Mail that is stored by HTTP, a stream or another server reaches the hub through the commit listener
(`commit_listener.py`): every commit reports the keys that it wrote, and the key of a mail ends with a sequence number.
Only a session that has not read that far reads its mailbox. Sessions do not poll, and all of them share one listener.

After an unexpected error in a session, that session is ended and its agent reconnects; the other sessions of its batch
and all later batches continue.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fastness.clock import Clock, MonotonicClock
from fastness.errors import Closed, FastnessError, InvalidArgument, MailboxTaken, ShutdownDraining
from fastness.kv import Database
from fastness.layers.mailboxes import Address
from fastness.limits import (
    RELAY_BATCH_MAILS,
    RELAY_BATCHES_IN_FLIGHT_MAX,
    RELAY_PING_SECONDS,
    RELAY_POLL_SECONDS,
    RELAY_PONG_SECONDS,
    RELAY_RECEIPTS,
    RELAY_RECEIPTS_SECONDS,
    RELAY_RETRY_SECONDS,
    RELAY_SENDERS_MAX,
)
from fastness.runtime.rate_limits import RateLimiter
from fastness.runtime.relay.batch import (
    CommitBatch,
    OutcomeCallback,
    abort,
    ignore_outcome,
    is_transient,
    read_mail,
    read_receipts,
    unexpected_error,
)
from fastness.runtime.relay.commit_listener import CommitListener
from fastness.runtime.relay.session import REPLACED, STOPPING, TOO_SLOW, Authorize, Session
from fastness.wire.frames import Call
from fastness.wire.mail import (
    Confirmed,
    ConfirmMail,
    Joined,
    JoinMailbox,
    LeaveMailbox,
    MailReceipts,
    Mails,
    SendMail,
    SentMails,
)
from fastness.wire.relay import Draining, Ping, QueueStatus, Replaced, Welcome
from fastness.wire.requests import Request

_log = logging.getLogger("fastness.relay")
_TICK_SECONDS: Final = 1.0

Commit = Callable[
    [list[Call]], Awaitable[list[Any]]
]  # Commits a prefix of the calls in one transaction; their outcomes.


class RelayHub:
    """All relay sessions of a server. It starts with the first one, on that session's event loop."""

    def __init__(
        self,
        database: Database,
        commit: Commit,
        *,
        rate_per_second: float = 0.0,
        burst: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """`clock` measures durations; it need not be a wall clock."""
        self.clock = clock or MonotonicClock()
        self.rate_limiter = RateLimiter(rate_per_second, burst, callers_max=RELAY_SENDERS_MAX, clock=self.clock)
        self.draining = False
        self.sessions: dict[Address, Session] = {}
        self._database = database
        self._commit = commit
        self._membership_requests: list[tuple[Request[Any], OutcomeCallback]] = []  # Joins and leaves.
        self._membership_in_flight = False  # Requests for one mailbox must stay in order.
        self._ready: dict[Session, None] = {}  # Sessions with work, in FIFO order.
        self._receipt_checks: dict[Session, None] = {}  # Sessions that may have new receipts.
        self._in_flight: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._closed = False
        self._commit_listener: CommitListener | None = None
        self._subscription: asyncio.Future[Callable[[], None]] | None = None
        self._batch_loop: asyncio.Task[None] | None = None
        self._tick_loop: asyncio.Task[None] | None = None

    async def join(
        self, universe: str, agent: str, authorize: Authorize | None, *, receipts_after: int | None = None
    ) -> Session:
        """Make this connection the only reader of the mailbox, replacing an earlier one on any server.

        Raises:
            ShutdownDraining: the server is shutting down.
        """
        if self.draining:
            raise ShutdownDraining("The server is shutting down; reconnect in a few seconds")
        await self._start()
        address = Address(universe, agent)
        session = Session(self, address, uuid.uuid4().hex, authorize)
        joined: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        request = JoinMailbox(agent, session.id, universe)
        self._request_membership(request, partial(self._on_joined, session, receipts_after, joined))
        return await joined

    def leave(self, session: Session) -> None:
        """End the session of a closed connection. Work that it has queued is still committed."""
        session.end(STOPPING, "gone")
        if self.sessions.get(session.address) is session:
            self._forget(session)
            request = LeaveMailbox(session.address.agent, session.id, session.address.universe)
            self._request_membership(request, partial(ignore_outcome, session))

    def wake(self, session: Session) -> None:
        """A session has something to do."""
        self._ready[session] = None
        self._awake.set()

    def tick(self) -> None:
        """Ping silent agents, and retry what failed. Called every second."""
        now_ms = self.clock.now_ms()
        for session in list(self.sessions.values()):
            try:
                self._check_session(session, now_ms)
            except Exception:
                abort(session)

    def drain(self) -> None:
        """Reject new mail; confirmations are accepted until the connections are closed."""
        self.draining = True
        for session in self.sessions.values():
            session.push(Draining())

    async def close(self) -> None:
        """End every session once its queued work is committed."""
        self.draining = self._closed = True
        for session in list(self.sessions.values()):
            self.leave(session)
        self._awake.set()
        if self._tick_loop is not None:
            self._tick_loop.cancel()
        if self._batch_loop is not None:
            await self._batch_loop
        if self._subscription is not None:
            with suppress(Exception):  # The callers of `join` have received this error.
                (await self._subscription)()

    async def _start(self) -> None:
        """Subscribe to commits and start the loops, if that has not happened."""
        if self._subscription is None:
            self._commit_listener = CommitListener(
                self._on_mail_stored, self._on_receipt_stored, self._on_reader_changed
            )
            # On PostgreSQL this opens a connection, which must not block the event loop.
            subscribing = asyncio.to_thread(self._database.subscribe, self._commit_listener.on_commit)
            self._subscription = asyncio.ensure_future(subscribing)
        if self._batch_loop is None:
            self._batch_loop = asyncio.ensure_future(self._run())
            self._tick_loop = asyncio.ensure_future(self._tick())
        current = self._subscription
        try:
            await asyncio.shield(current)
        except Exception:
            if self._subscription is current:
                self._subscription = None  # The next join tries again.
            raise

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.tick()
            except Exception:
                _log.exception("unexpected error while checking relay sessions; retrying in a second")

    def _check_session(self, session: Session, now_ms: int) -> None:
        if session.is_backlogged:
            session.received_ms = now_ms
        if session.pinged_ms is not None and now_ms - session.pinged_ms >= RELAY_PONG_SECONDS * 1_000:
            session.end(TOO_SLOW, "no pong")
        elif session.pinged_ms is None and now_ms - session.received_ms >= RELAY_PING_SECONDS * 1_000:
            session.pinged_ms = now_ms
            session.push(Ping())
        if now_ms - session.checked_ms >= RELAY_POLL_SECONDS * 1_000:
            session.checked_ms, session.must_recheck, session.may_have_receipts = now_ms, True, True
        if session.has_work:
            self.wake(session)

    async def _run(self) -> None:
        """Start batches while there is work: the next one is filled while earlier ones are being synced."""
        while not self._closed or self._membership_requests or self._ready or self._in_flight:
            await self._awake.wait()
            self._awake.clear()
            while len(self._in_flight) < RELAY_BATCHES_IN_FLIGHT_MAX and not (batch := self._next_batch()).is_empty:
                task = asyncio.get_running_loop().create_task(self._process_batch(batch))
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)
                task.add_done_callback(self._wake_loop)

    def _wake_loop(self, *_: object) -> None:
        self._awake.set()

    def _next_batch(self) -> CommitBatch:
        batch = CommitBatch()
        try:
            self._fill_batch(batch)
        except Exception:
            _log.exception("unexpected error while filling a relay batch; committing what it contains")
            asyncio.get_running_loop().call_later(RELAY_RETRY_SECONDS, self._wake_loop)
        return batch

    def _fill_batch(self, batch: CommitBatch) -> None:
        """Add the work of the first sessions in line. A session is in one batch at a time, which keeps it in order."""
        if not self._membership_in_flight:
            self._membership_in_flight = batch.has_membership_requests = bool(self._membership_requests)
            requests, self._membership_requests = self._membership_requests, []
            for request, callback in requests:
                batch.add(request, callback)
        while self._ready and batch.size < RELAY_BATCH_MAILS:
            session = next(iter(self._ready))
            del self._ready[session]
            try:
                if session.is_busy or not session.has_work:  # A busy session is queued again when its batch ends.
                    continue
                batch.include(session)
                for request in session.next_writes():
                    batch.add(request, partial(self._on_write_done, session, request))
                    batch.size += batch.include_recipients(session, request, self.sessions)
                batch.size += session.read_limit if session.may_have_mail else 1
            except Exception:
                abort(session)
        for session in batch.sessions:
            try:
                if session.wants_mail or session.must_recheck or (session.expects_mail and session.accepts_mail):
                    limit = session.read_limit
                    batch.add(
                        read_mail(session, limit), partial(self._on_mail_read, session, limit, session.known_sequence)
                    )
                    session.must_recheck = False
            except Exception:
                abort(session)
        for session in batch.sessions:
            try:
                if session.wants_receipts or session.expects_receipts:
                    batch.add(read_receipts(session), partial(self._on_receipts_read, session, session.known_receipt))
            except Exception:
                abort(session)
            session.expects_mail = session.expects_receipts = False

    async def _process_batch(self, batch: CommitBatch) -> None:
        """Commit a batch, and pass the outcomes to its sessions."""
        try:
            await self._commit_all(batch)
        finally:
            if batch.has_membership_requests:
                self._membership_in_flight = False
            for session in batch.sessions:
                session.is_busy = False
                try:
                    session.flush()
                except Exception:
                    abort(session)
                if session.has_work:
                    self._ready[session] = None

    async def _commit_all(self, batch: CommitBatch) -> None:
        calls, callbacks = batch.calls(), batch.callbacks
        while calls:
            try:
                outcomes = await self._commit(calls)
                assert outcomes, "a commit handles at least one call"
            except Exception:
                _log.exception("unexpected error while committing a relay batch")
                outcomes = [unexpected_error()] * len(calls)
            for callback, outcome in zip(callbacks, outcomes, strict=False):
                try:
                    callback(outcome)
                except Exception:
                    abort(callback.args[0])
            calls, callbacks = calls[len(outcomes) :], callbacks[len(outcomes) :]

    # Callbacks for outcomes.

    def _on_joined(
        self,
        session: Session,
        receipts_after: int | None,
        joined: "asyncio.Future[Session]",
        outcome: Joined | FastnessError,
    ) -> None:
        try:
            if not isinstance(outcome, FastnessError):
                self._welcome(session, receipts_after, joined, outcome)
            elif not joined.done():
                joined.set_exception(outcome)
        except Exception:
            abort(session)
            with suppress(Exception):  # It may have failed at any step.
                self.leave(session)
            if not joined.done():
                joined.set_exception(unexpected_error())

    def _welcome(
        self, session: Session, receipts_after: int | None, joined: "asyncio.Future[Session]", outcome: Joined
    ) -> None:
        before = self.sessions.get(session.address)
        if before is not None:
            self._replace(before)
        assert self._commit_listener is not None
        self.sessions[session.address] = session
        self._commit_listener.add_session(session)
        if joined.done():  # The caller was cancelled.
            self.leave(session)
            return
        session.receipts_seen = outcome.receipts_seen
        session.receipts_after = outcome.receipts_seen if receipts_after is None else receipts_after
        session.push(Welcome(session.id, session.name, outcome.receipts_seen), QueueStatus(outcome.pending))
        joined.set_result(session)
        self.wake(session)

    def _on_write_done(
        self, session: Session, request: Request[Any], outcome: SentMails | Confirmed | FastnessError
    ) -> None:
        if isinstance(request, SendMail):
            if isinstance(outcome, FastnessError):
                session.on_send_failed(request, outcome)
            elif isinstance(outcome, SentMails):
                session.on_sent(outcome.mails)
        elif not isinstance(outcome, FastnessError):
            if isinstance(request, ConfirmMail):
                session.on_confirmed(request.ids)
        elif is_transient(outcome) and isinstance(request, ConfirmMail):
            session.confirms.extendleft(reversed(request.ids))
            self._retry_later(session)
        else:
            session.refuse(outcome)

    def _on_mail_read(self, session: Session, limit: int, known_sequence: int, outcome: Mails | FastnessError) -> None:
        if isinstance(outcome, MailboxTaken):
            self._replace(session)
        elif isinstance(outcome, FastnessError):
            self._on_read_failed(session, outcome)
        else:
            session.deliver(outcome, limit=limit, known_sequence=known_sequence)

    def _on_receipts_read(self, session: Session, known_receipt: int, outcome: MailReceipts | FastnessError) -> None:
        if isinstance(outcome, InvalidArgument):
            session.receipts_after = session.receipts_seen
            session.refuse(outcome)
        elif isinstance(outcome, FastnessError):
            self._on_read_failed(session, outcome)
        else:
            session.deliver_receipts(outcome.receipts, limit=RELAY_RECEIPTS, known_receipt=known_receipt)

    def _on_read_failed(self, session: Session, error: FastnessError) -> None:
        if isinstance(error, Closed):
            session.end(STOPPING, "closed")
        else:
            _log.warning("the mailbox of %s cannot be read and will be retried: %s", session.name, error)
            session.must_recheck = session.may_have_receipts = True
            self._retry_later(session)

    def _retry_later(self, session: Session) -> None:
        session.retry_at_ms = self.clock.now_ms() + round(RELAY_RETRY_SECONDS * 1_000)

    def _replace(self, session: Session) -> None:
        session.end(REPLACED, "replaced", Replaced())
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.address) is session:
            assert self._commit_listener is not None
            del self.sessions[session.address]
            self._commit_listener.remove_session(session)

    def _request_membership(self, request: Request[Any], callback: OutcomeCallback) -> None:
        self._membership_requests.append((request, callback))
        self._awake.set()

    # Callbacks of the commit listener.

    def _on_mail_stored(self, session: Session, sequence: int) -> None:
        if sequence > session.known_sequence:
            session.known_sequence = sequence
            if not session.is_busy and session.wants_mail:  # A busy session is checked when its batch ends.
                self.wake(session)

    def _on_receipt_stored(self, session: Session, sequence: int) -> None:
        """Check for receipts a little later: most are read in the batch that writes them."""
        if sequence > session.known_receipt:
            session.known_receipt = sequence
            if not self._receipt_checks:
                asyncio.get_running_loop().call_later(RELAY_RECEIPTS_SECONDS, self._check_receipts)
            self._receipt_checks[session] = None

    def _check_receipts(self) -> None:
        sessions, self._receipt_checks = self._receipt_checks, {}
        for session in sessions:
            if session.known_receipt > session.receipts_after:
                session.may_have_receipts = True
                self.wake(session)

    def _on_reader_changed(self, session: Session) -> None:
        """Read the mailbox: it may have a new reader, or an unknown change."""
        session.must_recheck = session.may_have_receipts = True
        self.wake(session)
