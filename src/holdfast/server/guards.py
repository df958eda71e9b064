"""Guards: what whoever comes through a door may ask for."""

from typing import Any, Protocol

from holdfast.wire.requests import Request


class Guard(Protocol):
    """Stands at a door. `name` tells its callers apart from those of others."""

    @property
    def name(self) -> str: ...

    def allow(self, request: Request[Any]) -> None:
        """Return if the caller may ask for this; raise NotAllowed otherwise."""
        ...


class Anybody:
    """Whoever can reach the server may do everything: for loopback addresses."""

    name = "anybody"

    def allow(self, request: Request[Any]) -> None:
        """Whatever it is."""
        del request
