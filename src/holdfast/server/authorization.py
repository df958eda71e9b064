"""Guards: what whoever comes through a door may ask for."""

from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.wire.requests import Request


class Guard(Protocol):
    """Stands at a door. `name` tells its callers apart from those of others."""

    @property
    def name(self) -> str: ...

    def allow(self, request: Request[Any]) -> None:
        """Return if the caller may ask for this; raise NotAllowed otherwise."""
        ...


class Guards(Protocol):
    """Decides who stands behind a request's token."""

    def admit(self, headers: Mapping[str, str], client: str) -> Guard:
        """The guard for whoever sent these headers.

        Raises:
            NotAllowed: nobody is known by that token, or it was revoked or ran out.
        """
        ...


class Anybody:
    """Whoever can reach the server may do everything: for loopback addresses."""

    name = "anybody"

    def allow(self, request: Request[Any]) -> None:
        """Whatever it is."""
        del request


class Open:
    """Lets everybody in: for loopback addresses."""

    def admit(self, headers: Mapping[str, str], client: str) -> Guard:
        del headers, client
        return Anybody()
