"""Whether a server is alive, whether it is ready, and how it stops.

/healthz   the process answers
/readyz    the key space answers too, and the server is not about to stop

serving ── told to stop ──► draining: /readyz is 503, nothing new begins, what is under way is answered ──► closed
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.errors import HoldfastError, Retry
from holdfast.server.logs import correlation_id_of
from holdfast.tiers import Tier
from holdfast.wire.pairs import GetPair
from holdfast.wire.problems import Problem

_NOT_COUNTED: Final = frozenset(("/healthz", "/readyz", "/metrics"))  # A server that stops need not wait for these.
_LOOK_SECONDS_MAX: Final = 5.0  # A key space that takes longer to read one key is not ready.
RETRY_AFTER_SECONDS: Final = 2

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Exchange:
    """An HTTP request that is being answered."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0  # How many of its calls only wait for something to come.


_exchange: ContextVar[Exchange | None] = ContextVar("holdfast_exchange", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, a call waits for something to come. A server that stops does not wait for it."""
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
    """What a server knows of its own state."""

    def __init__(self, transport: Any) -> None:
        self.draining = False
        self._transport = transport
        self._exchanges: set[Exchange] = set()

    @property
    def under_way(self) -> int:
        """HTTP requests that are being answered, without those that only wait."""
        return sum(not exchange.waiting for exchange in self._exchanges)

    async def fault(self) -> str | None:
        """Why the server is not ready, in words; None if it is."""
        if self.draining:
            return "the server is shutting down"
        try:
            async with asyncio.timeout(_LOOK_SECONDS_MAX):
                await self._transport.call(GetPair(b"\x00ready", tier=Tier.IMPORTANT))
        except TimeoutError:
            return f"the key space did not answer within {_LOOK_SECONDS_MAX:g} s"
        except HoldfastError as error:
            return f"the key space does not answer: {error.code}"
        return None

    def routes(self) -> list[Route]:
        """`/healthz` and `/readyz`, for the app to mount."""
        return [Route("/healthz", self._alive, methods=["GET"]), Route("/readyz", self._ready, methods=["GET"])]

    def gate(self, app: App) -> App:
        """The app behind a gate that counts requests, and turns new streams away when the server drains."""

        async def pass_through(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket" and self.draining:
                await receive()
                # To close it instead would say 403, and a client would not come again.
                await _turn_away(scope, send, "websocket.http.response")
            elif scope["type"] != "http" or scope["path"] in _NOT_COUNTED:
                await app(scope, receive, send)  # A stream counts its calls by itself.
            else:
                await self._answer(app, scope, receive, send)

        return pass_through

    async def _answer(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        exchange = Exchange()
        self._exchanges.add(exchange)
        token = _exchange.set(exchange)
        try:
            await app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            if not started:  # It was not done when the time to drain was over.
                await _turn_away(scope, send, "http.response")
        finally:
            _exchange.reset(token)
            self._exchanges.discard(exchange)

    async def _alive(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        del request
        fault = await self.fault()
        if fault is None:
            return JSONResponse({"status": "ready"})
        body = {"status": "not_ready", "detail": fault}
        return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


async def _turn_away(scope: Scope, send: Send, kind: str) -> None:
    known = scope.get("state", {}).get("correlation_id")  # If the request came as far as the edge.
    correlation_id: str = known or correlation_id_of(Headers(scope=scope))
    problem = Problem(
        code="shutdown_draining",
        title="Shutdown draining",
        status=503,
        detail="The server is shutting down; try again in a moment",
        retry=Retry.LATER,
        type="urn:holdfast:error:shutdown_draining",
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
