"""Rounds: what all sessions of a relay want done is committed together, one commit after the other.

    sessions with work ──► joins, leaves ──► sends, confirms ──► reads of mailboxes ──► reads of receipts ──► one commit
             ▲                                                                                                    │
             └── what came meanwhile ◄───────────────────────── answers, mail, delivery confirms ◄────────────────┘

A mail for an agent that is connected here is stored and delivered by the same commit: the recipient's mailbox is read
behind the send. So a hop costs one sync, and a commit carries as much as came while the one before it was synced.

What others store, by HTTP, a stream or another server, the hub hears from the key space (`ears.py`): every commit says
which keys it wrote, and a key of mail ends with a sequence. A session that has not come so far reads; any other is left
in peace. Nobody polls, and a thousand sessions cost one pair of ears.

A session with which something goes wrong that nobody thought of is ended, and its agent connects again; the others of
its round, and all rounds to come, go on.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from holdfast.clock import Clock, MonotonicClock
from holdfast.errors import Closed, HoldfastError, InvalidArgument, MailboxTaken, ShutdownDraining
from holdfast.kv import Database
from holdfast.layers.mailboxes import Address
from holdfast.limits import (
    RELAY_LOOK_SECONDS,
    RELAY_PING_SECONDS,
    RELAY_PONG_SECONDS,
    RELAY_RECEIPTS,
    RELAY_RECEIPTS_SECONDS,
    RELAY_RETRY_SECONDS,
    RELAY_ROUND_MAILS,
    RELAY_ROUNDS_MAX,
    RELAY_SENDERS_MAX,
)
from holdfast.runtime.rate_limits import Rates
from holdfast.runtime.relay.batch import Round, Then, give_up, ignore, may_pass, read_mail, read_receipts, unexpected
from holdfast.runtime.relay.commit_listener import CommitListener
from holdfast.runtime.relay.session import REPLACED, STOPPING, TOO_SLOW, Allow, Session
from holdfast.wire.frames import Call
from holdfast.wire.mail import ConfirmMail, Joined, JoinMailbox, LeaveMailbox, SendMail
from holdfast.wire.relay import Draining, Ping, QueueStatus, Replaced, Welcome
from holdfast.wire.requests import Request

_log = logging.getLogger("holdfast.relay")
_TICK_SECONDS: Final = 1.0

Commit = Callable[[list[Call]], Awaitable[list[Any]]]  # The outcomes of the first of the calls, in one commit.


class RelayHub:
    """Every session of a server. It starts with the first one, on the event loop that serves it."""

    def __init__(
        self,
        database: Database,
        commit: Commit,
        *,
        rate_per_second: float = 0.0,
        burst: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """`clock` need not know what time it is, only how much of it passes."""
        self.clock = clock or MonotonicClock()
        self.rates = Rates(rate_per_second, burst, callers_max=RELAY_SENDERS_MAX, clock=self.clock)
        self.draining = False
        self.sessions: dict[Address, Session] = {}
        self._database = database
        self._commit = commit
        self._asks: list[tuple[Request[Any], Then]] = []  # Joins and leaves.
        self._are_asking = False  # Those of one mailbox must not overtake each other.
        self._ready: dict[Session, None] = {}  # Those with work, in line.
        self._later: dict[Session, None] = {}  # Those who may have receipts.
        self._under_way: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._closed = False
        self._ears: CommitListener | None = None
        self._hearing: asyncio.Future[Callable[[], None]] | None = None
        self._running: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def join(
        self, universe: str, agent: str, allow: Allow | None, *, receipts_after: int | None = None
    ) -> Session:
        """Make this connection the mailbox's only reader, wherever its last one was.

        Raises:
            ShutdownDraining: the server is about to stop.
        """
        if self.draining:
            raise ShutdownDraining("The server is shutting down; connect again in a moment")
        await self._start()
        address = Address(universe, agent)
        session = Session(self, address, uuid.uuid4().hex, allow)
        joined: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        request = JoinMailbox(agent, session.id, universe)
        self._ask(request, partial(self._joined, session, receipts_after, joined))
        return await joined

    def leave(self, session: Session) -> None:
        """The connection is gone. What it has asked for is done all the same."""
        session.end(STOPPING, "gone")
        if self.sessions.get(session.address) is session:
            self._forget(session)
            request = LeaveMailbox(session.address.agent, session.id, session.address.universe)
            self._ask(request, partial(ignore, session))

    def wake(self, session: Session) -> None:
        """A session has something to do."""
        self._ready[session] = None
        self._awake.set()

    def tick(self) -> None:
        """Attend to whoever was silent, and to what a failure has put off. Called every second."""
        now_ms = self.clock.now_ms()
        for session in list(self.sessions.values()):
            try:
                self._attend(session, now_ms)
            except Exception:
                give_up(session)

    def drain(self) -> None:
        """Take no more mail; confirmations are taken until the connections are closed."""
        self.draining = True
        for session in self.sessions.values():
            session.push(Draining())

    async def close(self) -> None:
        """End every session, once what they have asked for is committed."""
        self.draining = self._closed = True
        for session in list(self.sessions.values()):
            self.leave(session)
        self._awake.set()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._running is not None:
            await self._running
        if self._hearing is not None:
            with suppress(Exception):  # Whoever wanted to join was told why it could not be heard.
                (await self._hearing)()

    async def _start(self) -> None:
        """Begin to hear and to commit, if that has not begun."""
        if self._hearing is None:
            self._ears = CommitListener(self._told_of_mail, self._told_of_receipts, self._told_of_reader)
            # PostgreSQL is connected to for this, which an event loop must not wait for.
            hearing = asyncio.to_thread(self._database.subscribe, self._ears.hear)
            self._hearing = asyncio.ensure_future(hearing)
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())
            self._ticking = asyncio.ensure_future(self._tick())
        begun = self._hearing
        try:
            await asyncio.shield(begun)
        except Exception:
            if self._hearing is begun:
                self._hearing = None  # The next one tries again.
            raise

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.tick()
            except Exception:
                _log.exception("sessions could not be attended to, and will be in a second")

    def _attend(self, session: Session, now_ms: int) -> None:
        if session.is_held:
            session.heard_ms = now_ms
        if session.pinged_ms is not None and now_ms - session.pinged_ms >= RELAY_PONG_SECONDS * 1_000:
            session.end(TOO_SLOW, "no pong")
        elif session.pinged_ms is None and now_ms - session.heard_ms >= RELAY_PING_SECONDS * 1_000:
            session.pinged_ms = now_ms
            session.push(Ping())
        if now_ms - session.looked_ms >= RELAY_LOOK_SECONDS * 1_000:
            session.looked_ms, session.must_look, session.receipts_behind = now_ms, True, True
        if session.has_work:
            self.wake(session)

    async def _run(self) -> None:
        """Begin rounds as long as there is work: the next one is made while those before it are being synced."""
        while not self._closed or self._asks or self._ready or self._under_way:
            await self._awake.wait()
            self._awake.clear()
            while len(self._under_way) < RELAY_ROUNDS_MAX and not (round := self._gathered()).is_empty:
                task = asyncio.get_running_loop().create_task(self._carry_out(round))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
                task.add_done_callback(self._rouse)

    def _rouse(self, *_: object) -> None:
        self._awake.set()

    def _gathered(self) -> Round:
        round = Round()
        try:
            self._gather(round)
        except Exception:
            _log.exception("a round is carried out as far as it was gathered")
            asyncio.get_running_loop().call_later(RELAY_RETRY_SECONDS, self._rouse)
        return round

    def _gather(self, round: Round) -> None:
        """What the first in line want. A session has part in one round at a time, so what it does stays in order."""
        if not self._are_asking:
            self._are_asking = round.has_asks = bool(self._asks)
            self._asks, asks = [], self._asks
            for request, then in asks:
                round.add(request, then)
        while self._ready and round.size < RELAY_ROUND_MAILS:
            session = next(iter(self._ready))
            del self._ready[session]
            try:
                if session.is_busy or not session.has_work:  # Whoever is busy stands in line again when that is over.
                    continue
                round.join(session)
                for request in session.writes():
                    round.add(request, partial(self._wrote, session, request))
                    round.size += round.expect(session, request, self.sessions)
                round.size += session.read_limit if session.is_behind else 1
            except Exception:
                give_up(session)
        for session in round.sessions:
            try:
                if session.is_hungry or session.must_look or (session.expects_mail and session.is_open):
                    limit = session.read_limit
                    round.add(read_mail(session, limit), partial(self._read, session, limit, session.told))
                    session.must_look = False
            except Exception:
                give_up(session)
        for session in round.sessions:
            try:
                if session.wants_receipts or session.expects_receipts:
                    round.add(read_receipts(session), partial(self._read_receipts, session, session.receipts_told))
            except Exception:
                give_up(session)
            session.expects_mail = session.expects_receipts = False

    async def _carry_out(self, round: Round) -> None:
        """Commit a round, and tell everybody in it what became of what they wanted."""
        try:
            await self._commit_all(round)
        finally:
            if round.has_asks:
                self._are_asking = False
            for session in round.sessions:
                session.is_busy = False
                try:
                    session.flush()
                except Exception:
                    give_up(session)
                if session.has_work:
                    self._ready[session] = None

    async def _commit_all(self, round: Round) -> None:
        calls, thens = round.calls(), round.thens
        while calls:
            try:
                outcomes = await self._commit(calls)
                assert outcomes, "a group has at least one call"
            except Exception:
                _log.exception("a round failed in a way that nobody thought of")
                outcomes = [unexpected()] * len(calls)
            for then, outcome in zip(thens, outcomes, strict=False):
                try:
                    then(outcome)
                except Exception:
                    give_up(then.args[0])
            calls, thens = calls[len(outcomes) :], thens[len(outcomes) :]

    # What became of it.

    def _joined(
        self, session: Session, receipts_after: int | None, joined: "asyncio.Future[Session]", outcome: Any
    ) -> None:
        try:
            if not isinstance(outcome, HoldfastError):
                self._welcome(session, receipts_after, joined, outcome)
            elif not joined.done():
                joined.set_exception(outcome)
        except Exception:
            give_up(session)
            with suppress(Exception):  # Nobody knows how far it has come.
                self.leave(session)
            if not joined.done():
                joined.set_exception(unexpected())

    def _welcome(
        self, session: Session, receipts_after: int | None, joined: "asyncio.Future[Session]", outcome: Any
    ) -> None:
        assert isinstance(outcome, Joined)
        before = self.sessions.get(session.address)
        if before is not None:
            self._replace(before)
        assert self._ears is not None
        self.sessions[session.address] = session
        self._ears.listen_for(session)
        if joined.done():  # Whoever wanted it was gone before.
            self.leave(session)
            return
        session.receipts_seen = outcome.receipts_seen
        session.receipts_after = outcome.receipts_seen if receipts_after is None else receipts_after
        session.push(Welcome(session.id, session.name, outcome.receipts_seen), QueueStatus(outcome.pending))
        joined.set_result(session)
        self.wake(session)

    def _wrote(self, session: Session, request: Request[Any], outcome: Any) -> None:
        if isinstance(request, SendMail):
            if isinstance(outcome, HoldfastError):
                session.not_sent(request, outcome)
            else:
                session.sent(outcome.mails)
        elif not isinstance(outcome, HoldfastError):
            if isinstance(request, ConfirmMail):
                session.confirmed(request.ids)
        elif may_pass(outcome) and isinstance(request, ConfirmMail):
            session.confirms.extendleft(reversed(request.ids))
            self._rest(session)
        else:
            session.refuse(outcome)

    def _read(self, session: Session, limit: int, told: int, outcome: Any) -> None:
        if isinstance(outcome, MailboxTaken):
            self._replace(session)
        elif isinstance(outcome, HoldfastError):
            self._failed(session, outcome)
        else:
            session.deliver(outcome, limit=limit, told=told)

    def _read_receipts(self, session: Session, told: int, outcome: Any) -> None:
        if isinstance(outcome, InvalidArgument):
            session.receipts_after = session.receipts_seen
            session.refuse(outcome)
        elif isinstance(outcome, HoldfastError):
            self._failed(session, outcome)
        else:
            session.receipt(outcome.receipts, limit=RELAY_RECEIPTS, told=told)

    def _failed(self, session: Session, error: HoldfastError) -> None:
        if isinstance(error, Closed):
            session.end(STOPPING, "closed")
        else:
            _log.warning("the mailbox of %s cannot be read: %s", session.name, error)
            session.must_look = session.receipts_behind = True
            self._rest(session)

    def _rest(self, session: Session) -> None:
        session.rests_until_ms = self.clock.now_ms() + round(RELAY_RETRY_SECONDS * 1_000)

    def _replace(self, session: Session) -> None:
        session.end(REPLACED, "replaced", Replaced())
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self.sessions.get(session.address) is session:
            assert self._ears is not None
            del self.sessions[session.address]
            self._ears.ignore(session)

    def _ask(self, request: Request[Any], then: Then) -> None:
        self._asks.append((request, then))
        self._awake.set()

    # What the key space tells.

    def _told_of_mail(self, session: Session, sequence: int) -> None:
        if sequence > session.told:
            session.told = sequence
            if not session.is_busy and session.is_hungry:  # Whoever is busy is asked when that is over.
                self.wake(session)

    def _told_of_receipts(self, session: Session, sequence: int) -> None:
        """Of three receipts only the last one is of interest, and most are read in the round that writes them."""
        if sequence > session.receipts_told:
            session.receipts_told = sequence
            if not self._later:
                asyncio.get_running_loop().call_later(RELAY_RECEIPTS_SECONDS, self._look_at_receipts)
            self._later[session] = None

    def _look_at_receipts(self) -> None:
        sessions, self._later = self._later, {}
        for session in sessions:
            if session.receipts_told > session.receipts_after:
                session.receipts_behind = True
                self.wake(session)

    def _told_of_reader(self, session: Session) -> None:
        """Somebody joined the mailbox, or nobody knows what happened: look."""
        session.must_look = session.receipts_behind = True
        self.wake(session)
