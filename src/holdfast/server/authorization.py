"""Authentication (who calls) and authorization (what the caller may do) of requests to a server."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.plane.tokens import Token
from holdfast.wire.requests import Request
from holdfast.wire.tokens import CreateToken

AnyRequest = TypeVar("AnyRequest", bound=Request[Any])


class Authorizer(ABC):
    """Decides what one caller may do. `name` separates the caller's keys and sessions from those of others."""

    name: str

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
    def token_id(self) -> str:
        """The id of the caller's token; empty if the caller has none."""
        return ""

    def check_allowed(self, request: Request[Any]) -> None:
        """`authorize` for a request that is not executed yet: it does not count against the caller's rate."""
        self.authorize(request)

    def attributed(self, request: AnyRequest) -> AnyRequest:
        """The request with the id of the caller's token, if it needs it: a new token is limited by its maker."""
        if request.__class__ is not CreateToken:
            return request
        return msgspec.structs.replace(request, maker=self.token_id)

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

    name = "anybody"  # Stored as the sender of pushes.

    @property
    def holder(self) -> None:
        return None

    def authorize(self, request: Request[Any]) -> None:
        del request


class NoAuthentication:
    """Admits every caller without a token, for loopback addresses."""

    def authenticate(self, headers: Mapping[str, str], client: str) -> Authorizer:
        del headers, client
        return AllowAll()
