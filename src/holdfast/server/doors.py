"""What every door of a server stands on: the plane, who may come in, and how much."""

from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.server.guards import Anybody, Guard
from holdfast.server.rpc import Rpc
from holdfast.server.streams import Streams


class Guards(Protocol):
    """Decides who stands behind a request's token."""

    def admit(self, headers: Mapping[str, str], client: str) -> Guard:
        """The guard for whoever sent these headers.

        Raises:
            NotAllowed: nobody is known by that token, or it was revoked or ran out.
        """
        ...


class Open:
    """Lets everybody in: for loopback addresses."""

    def admit(self, headers: Mapping[str, str], client: str) -> Guard:
        del headers, client
        return Anybody()


class Doors:
    """The parts that the doors of one server share."""

    def __init__(self, port: Any, guards: Guards | None = None, *, agent: str | None = None) -> None:
        """`agent` receives what is pushed to nobody in particular."""
        self.port = port
        self.guards = guards or Open()
        self.streams = Streams(port)
        self.rpc = Rpc(port, agent=agent)

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop, and begins nothing new."""
        return self.streams.draining
