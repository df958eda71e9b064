"""State that the endpoints of one server share."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any

from holdfast.server.authorization import Authenticator, NoAuthentication
from holdfast.server.http.flow_control import FlowControl
from holdfast.server.http.limits import DRAIN_POLL_SECONDS, HttpLimits
from holdfast.server.relay import Relay, RelayOptions
from holdfast.server.relay_auth import RelayAuthenticator
from holdfast.server.rpc import Rpc
from holdfast.server.streams import Streams
from holdfast.server.transport import ServerTransport


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
        self.authenticator = authenticator or NoAuthentication()
        self.streams = Streams(transport)
        self.rpc = Rpc(transport, agent=agent)
        self._relay = relay or RelayOptions()
        self._rejected = rejected

    @cached_property
    def relay(self) -> Relay:
        """Serves `/v1/relay`."""
        tokens = None if isinstance(self.authenticator, NoAuthentication) else self.authenticator
        relay_authenticator = RelayAuthenticator(
            self.transport, tokens, registration=self._relay.registration, rejected=self._rejected
        )
        return Relay(self.transport, relay_authenticator, self.streams.call_batch, self.rpc.answer, self._relay)

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down and accepts no new calls."""
        return self.streams.draining


class HttpContext:
    """State that all HTTP endpoints of one server share: limits, flow control and background tasks."""

    def __init__(self, server: ServerContext, limits: HttpLimits) -> None:
        self.server = server
        self.transport = server.transport
        self.limits = limits
        self.flow_control = FlowControl()
        self.watches = 0
        self._waiting = 0
        self._drained = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` to its end, even if the request that started it is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_for_drain(self) -> None:
        """Return when the server starts to shut down. One task polls for all waiters."""
        self._waiting += 1
        if self._poller is None:
            self._poller = self.spawn(self._poll())
        try:
            await self._drained.wait()
        finally:
            self._waiting -= 1

    async def _poll(self) -> None:
        while self._waiting and not self.server.draining:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._poller = None
        if self.server.draining:
            self._drained.set()
