"""State that the endpoints of one server share."""

from collections.abc import Callable
from functools import cached_property

from fastness.server.authorization import Authenticator, NoAuthentication
from fastness.server.relay import Relay, RelayOptions
from fastness.server.relay_auth import RelayAuthenticator
from fastness.server.rpc import Rpc
from fastness.server.streams import Streams
from fastness.server.transport import ServerTransport


class ServerContext:
    """The transport, the authenticator and the endpoints' shared state."""

    def __init__(
        self,
        transport: ServerTransport,
        authenticator: Authenticator | None = None,
        *,
        agent: str | None = None,
        relay: RelayOptions | None = None,
        rejected: Callable[[str], None] | None = None,
    ) -> None:
        """`agent` receives pushes that name no recipient; `rejected` is called with the reason of every refusal."""
        self.transport = transport
        transport.services.shared_locks = True  # Clients acquire them, too.
        self.authenticator = authenticator or NoAuthentication(transport.services.quotas)
        self.streams = Streams(transport)
        self.rpc = Rpc(transport, agent=agent)
        self._relay = relay or RelayOptions()
        self.count_reject = rejected or _ignore

    @cached_property
    def relay(self) -> Relay:
        """Serves `/v1/relay`."""
        tokens = None if isinstance(self.authenticator, NoAuthentication) else self.authenticator
        relay_authenticator = RelayAuthenticator(
            self.transport, tokens, registration=self._relay.registration, rejected=self.count_reject
        )
        return Relay(self.transport, relay_authenticator, self.transport.call_all, self.rpc.answer, self._relay)

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down and accepts no new calls."""
        return self.streams.draining


def _ignore(reason: str) -> None:
    del reason
