"""Liveness, readiness and draining of a server.

/healthz   the process answers
/readyz    the key space answers and has not failed, and the server is not shutting down

serving ── signal ──► draining: /readyz is 503, no new calls start, calls in flight are answered ──► closed
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastness.errors import FastnessError, RetryAdvice
from fastness.server.logs import correlation_id_of
from fastness.server.transport import ServerTransport
from fastness.threads import run_in_thread
from fastness.tiers import Tier
from fastness.wire.pairs import GetPair
from fastness.wire.problems import Problem

_NOT_COUNTED: Final = frozenset(("/healthz", "/readyz", "/metrics"))  # Draining does not wait for these.
_READ_SECONDS_MAX: Final = 5.0  # A key space that takes longer to read one key is not ready.
RETRY_AFTER_SECONDS: Final = 2


class Exchange:
    """An HTTP request that is being answered."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0  # Calls of this request that wait for messages or locks.


_exchange: ContextVar[Exchange | None] = ContextVar("fastness_exchange", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Mark the current request as waiting for messages or locks; draining does not wait for it."""
    exchange = _exchange.get()
    if exchange is None:
        yield
        return
    exchange.waiting += 1
    try:
        yield
    finally:
        exchange.waiting -= 1


class Health:
    """Readiness of a server, and its HTTP requests in flight."""

    def __init__(self, transport: ServerTransport) -> None:
        self.draining = False
        self._transport = transport
        self._exchanges: set[Exchange] = set()

    @property
    def in_flight(self) -> int:
        """HTTP requests that are being answered, without those that wait for messages or locks."""
        return sum(not exchange.waiting for exchange in self._exchanges)

    async def not_ready_reason(self) -> str | None:
        """Why the server is not ready; None if it is."""
        if self.draining:
            return "the server is shutting down"
        if (failure := self._transport.services.database.failure) is not None:
            return f"the key space has failed: {failure.code}"
        try:
            async with asyncio.timeout(_READ_SECONDS_MAX):
                if self._transport.services.shared:  # A read would wait for the end of a failover.
                    await run_in_thread(self._transport.services.database.check_reachable)
                await self._transport.call(GetPair(b"\x00ready", tier=Tier.IMPORTANT))
        except TimeoutError:
            return f"the key space did not answer within {_READ_SECONDS_MAX:g} s"
        except FastnessError as error:
            return f"the key space does not answer: {error.code}"
        return None

    def routes(self) -> list[Route]:
        """`/healthz` and `/readyz`, for the app to mount."""
        return [Route("/healthz", self._alive, methods=["GET"]), Route("/readyz", self._ready, methods=["GET"])]

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Middleware that counts requests, and refuses new streams while the server drains."""

        async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket" and self.draining:
                await receive()
                # Closing it instead would be a 403, after which a client does not reconnect.
                await _refuse_draining(scope, send, "websocket.http.response")
            elif scope["type"] != "http" or scope["path"] in _NOT_COUNTED:
                await app(scope, receive, send)  # The metrics count the calls of streams.
            else:
                await self._answer(app, scope, receive, send)

        return call_app

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_mark(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        exchange = Exchange()
        self._exchanges.add(exchange)
        token = _exchange.set(exchange)
        try:
            await app(scope, receive, send_and_mark)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            if not started:  # It did not finish within drain_seconds.
                await _refuse_draining(scope, send, "http.response")
        finally:
            _exchange.reset(token)
            self._exchanges.discard(exchange)

    async def _alive(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        del request
        reason = await self.not_ready_reason()
        if reason is None:
            return JSONResponse({"status": "ready"})
        body = {"status": "not_ready", "detail": reason}
        return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


async def _refuse_draining(scope: Scope, send: Send, kind: str) -> None:
    known = scope.get("state", {}).get("correlation_id")  # Set if the request reached the middleware.
    correlation_id: str = known or correlation_id_of(Headers(scope=scope))
    problem = Problem(
        code="shutdown_draining",
        title="Shutdown draining",
        status=503,
        detail="The server is shutting down; try again in a moment",
        retry=RetryAdvice.LATER,
        type="urn:fastness:error:shutdown_draining",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        correlation_id=correlation_id,
    )
    headers = [
        (b"x-correlation-id", correlation_id.encode()),
        (b"content-type", b"application/problem+json"),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": f"{kind}.start", "status": 503, "headers": headers})
    await send({"type": f"{kind}.body", "body": msgspec.json.encode(problem)})
