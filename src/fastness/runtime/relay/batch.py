"""One commit of the relay: its requests, the callbacks for their outcomes, and the sessions that take part."""

import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final

from fastness.errors import Backend, Busy, FastnessError
from fastness.layers.mailboxes import Address, address_of
from fastness.limits import RELAY_FLUSH_BYTES, RELAY_RECEIPTS
from fastness.runtime.relay.session import Session
from fastness.wire.frames import Call
from fastness.wire.mail import ConfirmMail, ReadMail, ReadReceipts, SendMail
from fastness.wire.requests import Request

_log = logging.getLogger("fastness.relay")
_LONG_NAME: Final = 512  # Longer names are invalid, and are not cached.

OutcomeCallback = partial[None]  # Called with the outcome of a request; its first argument is the session.


class CommitBatch:
    """Requests that are committed together, and the callbacks for their outcomes."""

    __slots__ = ("callbacks", "has_membership_requests", "requests", "sessions", "size")

    def __init__(self) -> None:
        self.requests: list[Request[Any]] = []
        self.callbacks: list[OutcomeCallback] = []
        self.sessions: dict[Session, None] = {}  # An ordered set.
        self.size = 0  # In mails.
        self.has_membership_requests = False  # It contains joins or leaves.

    @property
    def is_empty(self) -> bool:
        """Whether there are no requests and no sessions."""
        return not self.requests and not self.sessions

    def add(self, request: Request[Any], callback: OutcomeCallback) -> None:
        self.requests.append(request)
        self.callbacks.append(callback)

    def include(self, session: Session) -> bool:
        """Add a session, unless it takes part in another batch; whether it is in this one."""
        if session in self.sessions:
            return True
        if session.is_busy:
            return False
        session.is_busy = True
        self.sessions[session] = None
        return True

    def include_recipients(self, session: Session, request: Request[Any], sessions: Mapping[Address, Session]) -> int:
        """Add the connected sessions that receive mail or receipts by `request`; the number of mails in it."""
        if isinstance(request, SendMail):
            universe = session.address.universe
            for mail in request.mails:
                to = sessions.get(_recipient(mail.to, universe)) if len(mail.to) < _LONG_NAME else None
                if to is not None and self.include(to):
                    to.expects_mail = True
            return len(request.mails)
        if isinstance(request, ConfirmMail):
            for id in request.ids:
                sender = sessions.get(address_of(session.in_flight.get(id, "")))
                if sender is not None and self.include(sender):
                    sender.expects_receipts = True
            return len(request.ids)
        return 1

    def calls(self) -> list[Call]:
        return [Call(number, request) for number, request in enumerate(self.requests)]


@lru_cache(maxsize=4_096)
def _recipient(name: str, universe: str) -> Address:
    """The mailbox that a mail to `name` goes to. An invalid name is rejected by the send itself."""
    return Address(universe, name.partition("@")[0])


def read_mail(session: Session, limit: int) -> ReadMail:
    universe, agent = session.address
    return ReadMail(agent, session.after, limit, 0.0, session.id, False, universe, RELAY_FLUSH_BYTES)


def read_receipts(session: Session) -> ReadReceipts:
    universe, agent = session.address
    return ReadReceipts(agent, session.receipts_after, RELAY_RECEIPTS, 0.0, universe)


def is_transient(error: FastnessError) -> bool:
    """Whether a retry may succeed."""
    return isinstance(error, Backend | Busy)


def ignore_outcome(session: Session, outcome: object) -> None:
    """A callback for requests whose outcome does not matter."""
    del session, outcome


def abort(session: Session) -> None:
    """End a session after an unexpected error, which is logged."""
    _log.exception("unexpected error in the session of %s", session.name)
    session.abort()


def unexpected_error() -> FastnessError:
    """The error that the callers of a failed batch receive."""
    return FastnessError("Unexpected error in the server; see its log")
