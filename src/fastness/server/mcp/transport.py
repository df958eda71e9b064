"""The transport of a caller inside the server: authorizes every request, then executes it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from fastness.errors import NotAllowed, NotEmbedded, ShutdownDraining
from fastness.lock_sessions import LockSessions
from fastness.server.audit import call_audited
from fastness.server.authorization import Authorizer
from fastness.server.metrics import MeasuredTransport
from fastness.server.transport import ServerTransport
from fastness.tiers import Tier
from fastness.wire.requests import Answer, Request, permission_of
from fastness.wire.transport import LeaseRenewer

Result = TypeVar("Result")
AnyRequest = TypeVar("AnyRequest", bound=Request[Any])


class AuthorizedTransport:
    """Executes the requests of one caller, as `/v1` would.

    Handles over this transport can do no more than the caller's token allows, whatever code uses them.
    """

    locks = None  # Clients share the locks of the plane.
    on_data_push = None  # A listener would get the pushes of all universes.

    def __init__(
        self, transport: ServerTransport, authorizer: Authorizer, wait_for_drain: Callable[[], Awaitable[None]]
    ) -> None:
        """`wait_for_drain` returns when the server starts to shut down; calls that wait end then."""
        self._transport = transport
        authorizer.entry = "mcp"
        self._authorizer = authorizer
        self._wait_for_drain = wait_for_drain
        self.lease_renewer: LeaseRenewer = (
            transport.lease_renewer if isinstance(transport, MeasuredTransport) else transport.services.lease_renewer
        )
        self.lock_sessions = LockSessions(self.lease_renewer)

    async def call(self, request: Request[Answer]) -> Answer:
        """Raises NotAllowed if the caller may not send this request, ShutdownDraining if a wait is ended."""
        checked = self._checked(request)
        if getattr(checked, "wait_seconds", 0.0) <= 0:
            return await call_audited(self._transport, self._authorizer, checked, lambda: self._transport.call(checked))
        calling = asyncio.ensure_future(self._transport.call(checked))
        draining = asyncio.ensure_future(self._wait_for_drain())
        try:
            await asyncio.wait([calling, draining], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                calling.cancel()
                await asyncio.wait([calling])  # It may be done by now: a message that was leased must arrive.
            if not calling.cancelled():
                return calling.result()
            raise ShutdownDraining("The server is shutting down; call again in a few seconds")
        finally:
            for task in (calling, draining):
                task.cancel()

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        return await self._transport.send(self._checked(request), self._bounded(chunks))

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        return await self._transport.receive(self._checked(request))

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        del work, args, tier, kwargs
        raise _not_embedded()

    def within(self, connection: object) -> NoReturn:
        del connection
        raise _not_embedded()

    async def reopen(self) -> None:
        raise _not_embedded()

    def execute(self, tx: Any, request: Request[Any]) -> Any:
        del tx, request
        raise _not_embedded()

    async def close(self) -> None:
        """The plane stays open: it is the server's."""

    def _checked(self, request: AnyRequest) -> AnyRequest:
        if not request.operation.network:
            raise NotAllowed(f"{permission_of(type(request))} is for programs that open the plane themselves")
        self._authorizer.authorize(request)
        request.check()
        return self._authorizer.attributed(request)

    async def _bounded(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            self._authorizer.authorize_body(size)
            yield chunk


def _not_embedded() -> NotEmbedded:
    return NotEmbedded("Clients of a server cannot run code in its transactions; use the handles")
