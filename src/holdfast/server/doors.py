"""What every door of a server stands on: the plane, who may come in, and how much."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from holdfast.server.authorization import Guards, Open
from holdfast.server.relay import Relay, RelayOptions
from holdfast.server.relay_auth import Introductions
from holdfast.server.rpc import Rpc
from holdfast.server.streams import Streams


class Doors:
    """The parts that the doors of one server share."""

    def __init__(
        self,
        transport: Any,
        guards: Guards | None = None,
        *,
        agent: str | None = None,
        relay: RelayOptions | None = None,
        rejected: Callable[[str], None] | None = None,
    ) -> None:
        """`agent` receives what is pushed to nobody in particular; `rejected` is told why somebody was refused."""
        self.transport = transport
        self.guards = guards or Open()
        self.streams = Streams(transport)
        self.rpc = Rpc(transport, agent=agent)
        self._relay = relay or RelayOptions()
        self._rejected = rejected

    @cached_property
    def relay(self) -> Relay:
        """The door of agents."""
        tokens = None if isinstance(self.guards, Open) else self.guards
        how = Introductions(self.transport, tokens, registration=self._relay.registration, rejected=self._rejected)
        return Relay(self.transport, how, self.streams.call_batch, self.rpc.answer, self._relay)

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop, and begins nothing new."""
        return self.streams.draining
