"""Authentication (who calls) and authorization (what the caller may do) of requests to a server."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

import msgspec

from fastness.errors import SenderMismatch
from fastness.names import checked_agent
from fastness.plane.tokens import Token
from fastness.runtime.quotas import Quotas
from fastness.wire.catalog import NETWORK_REQUESTS
from fastness.wire.ingress import ANYBODY, Push, PushMany
from fastness.wire.requests import Request
from fastness.wire.tokens import CreateToken, ShowOwnToken

AnyRequest = TypeVar("AnyRequest", bound=Request[Any])

_ATTRIBUTED: Final[frozenset[type[Request[Any]]]] = frozenset(
    (CreateToken, Push, PushMany, ShowOwnToken, *(kind for kind in NETWORK_REQUESTS if kind.operation.lists_queues))
)


class Authorizer(ABC):
    """Decides what one caller may do. `name` separates the caller's keys and sessions from those of others."""

    name: str
    client: str = ""  # The network address of the caller.
    entry: str = "http"  # How the caller came in: http, stream, mcp or sqs.

    @abstractmethod
    def authorize(self, request: Request[Any]) -> None:
        """Return if the caller may send this request; raise NotAllowed otherwise."""

    @property
    def holder(self) -> str | None:
        """The caller's name for display and for pushes; None if the caller was not authenticated.

        Raises:
            NotAllowed: the caller's token was revoked or has expired.
        """
        return self.name

    @property
    def token(self) -> Token | None:
        """The caller's token, if the caller has one. Raises NotAllowed like `holder`."""
        return None

    @property
    def only_universe(self) -> str | None:
        """The universe that the caller's token is limited to; None if it is for several, or there is none."""
        return None

    @property
    def token_id(self) -> str:
        """The id of the caller's token; empty if the caller has none."""
        return ""

    def check_allowed(self, request: Request[Any]) -> None:
        """`authorize` for a request that is not executed yet: it does not count against the caller's rate."""
        self.authorize(request)

    def attributed(self, request: AnyRequest) -> AnyRequest:
        """The request with the caller's identity, if it needs it: the maker of a token, the sender of a push,
        the token to show, the queues to list.

        Raises:
            SenderMismatch: a push names another sender.
        """
        if request.__class__ not in _ATTRIBUTED:
            return request
        if isinstance(request, CreateToken):
            return msgspec.structs.replace(request, maker=self.token_id)
        if isinstance(request, ShowOwnToken):
            return msgspec.structs.replace(request, id=self.token_id)
        if request.operation.lists_queues:
            token = self.token
            return msgspec.structs.replace(request, only=[] if token is None else token.queues)
        assert isinstance(request, Push | PushMany)
        return msgspec.structs.replace(request, sender=push_sender(self.holder, request.sender, request.universe))

    def authorize_verb(self, verb: str) -> None:
        """Return if the caller may use `verb` in every universe; raise NotAllowed otherwise."""
        del verb

    def authorize_body(self, size: int) -> None:
        """Return if the caller may send a body of `size` bytes; raise PayloadTooLarge otherwise."""
        del size

    def is_allowed(self, request: Request[Any] | str) -> bool:
        """Whether the caller may send a request, or use a verb in every universe. A refusal is not logged."""
        del request
        return True


class Authenticator(Protocol):
    """Finds the caller that sent a request."""

    def authenticate(self, headers: Mapping[str, str], client: str) -> Authorizer:
        """The authorizer of the caller that sent these headers from the address `client`.

        Raises:
            NotAllowed: the token is missing, unknown, revoked or expired.
        """
        ...


class AllowAll(Authorizer):
    """Allows every request, for loopback addresses without tokens."""

    name = ANYBODY

    def __init__(self, quotas: Quotas | None = None, client: str = "") -> None:
        self._quotas = quotas
        self.client = client

    @property
    def holder(self) -> None:
        return None

    def authorize(self, request: Request[Any]) -> None:
        """Return if the universe has calls left.

        Raises:
            QuotaExceeded: the universe has used up its rate.
        """
        if self._quotas is not None:
            self._quotas.check_rate(request)

    def check_allowed(self, request: Request[Any]) -> None:
        del request


class NoAuthentication:
    """Admits every caller without a token, for loopback addresses."""

    def __init__(self, quotas: Quotas | None = None) -> None:
        """`quotas` limits the calls of universes."""
        self._quotas = quotas

    def authenticate(self, headers: Mapping[str, str], client: str) -> Authorizer:
        del headers
        return AllowAll(self._quotas, client)


def push_sender(holder: str | None, given: str | None, universe: str) -> str | None:
    """The sender of a push: the authenticated caller, or the given one if the caller was not authenticated.

    Raises:
        SenderMismatch: it is not the authenticated caller.
    """
    if holder is None:
        return given
    if given is not None and checked_agent(given, universe) != holder:
        raise SenderMismatch(f"The caller is {holder}, not {given[:128]!r}; leave the sender (`from`) out")
    return holder
