"""One round of a relay: what is gathered for a commit, and who is told what became of it."""

import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final

from holdfast.errors import Backend, Busy, HoldfastError
from holdfast.layers.mailboxes import Address, address_of
from holdfast.limits import RELAY_FLUSH_BYTES, RELAY_RECEIPTS
from holdfast.runtime.relay.session import Session
from holdfast.wire.frames import Call
from holdfast.wire.mail import ConfirmMail, ReadMail, ReadReceipts, SendMail
from holdfast.wire.requests import Request

_log = logging.getLogger("holdfast.relay")
_LONG_NAME: Final = 512  # Nobody is called so, and nothing so long is remembered.

Then = partial[None]  # Is given the outcome of a call; its first argument is the session that it is for.


class Round:
    """What is to be committed together, and who is to be told of it."""

    __slots__ = ("has_asks", "requests", "sessions", "size", "thens")

    def __init__(self) -> None:
        self.requests: list[Request[Any]] = []
        self.thens: list[Then] = []
        self.sessions: dict[Session, None] = {}  # An ordered set.
        self.size = 0  # In mails.
        self.has_asks = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be committed, and nobody has part in it."""
        return not self.requests and not self.sessions

    def add(self, request: Request[Any], then: Then) -> None:
        self.requests.append(request)
        self.thens.append(then)

    def join(self, session: Session) -> bool:
        """Whether the session has part in this round, because it has part in no other."""
        if session in self.sessions:
            return True
        if session.is_busy:
            return False
        session.is_busy = True
        self.sessions[session] = None
        return True

    def expect(self, session: Session, request: Request[Any], sessions: Mapping[Address, Session]) -> int:
        """Have those read who get something by this request; how many mails it is about."""
        if isinstance(request, SendMail):
            universe = session.address.universe
            for mail in request.mails:
                to = sessions.get(_recipient(mail.to, universe)) if len(mail.to) < _LONG_NAME else None
                if to is not None and self.join(to):
                    to.expects_mail = True
            return len(request.mails)
        if isinstance(request, ConfirmMail):
            for id in request.ids:
                sender = sessions.get(address_of(session.in_flight.get(id, "")))
                if sender is not None and self.join(sender):
                    sender.expects_receipts = True
            return len(request.ids)
        return 1

    def calls(self) -> list[Call]:
        return [Call(number, request) for number, request in enumerate(self.requests)]  # type: ignore[arg-type]


@lru_cache(maxsize=4_096)
def _recipient(name: str, universe: str) -> Address:
    """Whose mailbox a mail to that name is for, if it is a name at all; its send finds that out."""
    return Address(universe, name.partition("@")[0].lower())


def read_mail(session: Session, limit: int) -> ReadMail:
    universe, agent = session.address
    return ReadMail(agent, session.after, limit, 0.0, session.id, False, universe, RELAY_FLUSH_BYTES)


def read_receipts(session: Session) -> ReadReceipts:
    universe, agent = session.address
    return ReadReceipts(agent, session.receipts_after, RELAY_RECEIPTS, 0.0, universe)


def may_pass(error: HoldfastError) -> bool:
    """Whether the same may succeed later."""
    return isinstance(error, Backend | Busy)


def ignore(session: Session, outcome: Any) -> None:
    """Nobody waits for it."""
    del session, outcome


def give_up(session: Session) -> None:
    """End a session with which something went wrong that nobody thought of."""
    _log.exception("the session of %s failed in a way that nobody thought of", session.name)
    session.give_up()


def unexpected() -> HoldfastError:
    """What whoever waits is told of it."""
    return HoldfastError("The server failed in a way that nobody thought of; its log says how")
