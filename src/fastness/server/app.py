"""The ASGI app with all endpoints of a server."""

from collections.abc import Awaitable, Generator
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send

from fastness.errors import NotAllowed
from fastness.server import error_pages, openapi
from fastness.server.api_docs import pages as api_docs
from fastness.server.authorization import NoAuthentication
from fastness.server.context import ServerContext
from fastness.server.http.context import HttpContext
from fastness.server.http.endpoints import routes
from fastness.server.http.limits import HttpLimits
from fastness.server.http.middleware import HttpMiddleware, is_cross_origin
from fastness.server.http.routes import ENDPOINTS
from fastness.server.logs import correlation_id_of, correlation_scope
from fastness.server.mcp.mounting import Mcp, mcp_routes
from fastness.server.sockets import BoundedSocket
from fastness.server.sqs import mounting as sqs


def make_app(context: ServerContext, limits: HttpLimits | None = None, *, mcp: Mcp | None = None) -> Starlette:
    """The app that serves HTTP, `/v1/stream`, `/v1/relay` and, if it is given, `/mcp`."""

    class StreamEndpoint:
        """`/v1/stream` as an ASGI class, whose instances Starlette awaits."""

        def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self._serving: Awaitable[None] = _serve_stream(context, scope, receive, send)

        def __await__(self) -> Generator[Any, None, None]:
            return self._serving.__await__()

    class RelayEndpoint(StreamEndpoint):
        """`/v1/relay`."""

        def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self._serving = _serve_relay(context, scope, receive, send)

    http_context = HttpContext(context, limits or HttpLimits())
    all_routes: list[BaseRoute] = [
        WebSocketRoute("/v1/stream", StreamEndpoint),
        WebSocketRoute("/v1/relay", RelayEndpoint),
        *error_pages.routes(),
        *openapi.routes(ENDPOINTS),
        *api_docs.routes(),
        *mcp_routes(mcp),
        *sqs.refusal_routes(),  # Never reached if `sqs.mounted` is around the app.
        *routes(http_context, ENDPOINTS),
    ]
    app = Starlette(
        routes=all_routes,
        middleware=[Middleware(HttpMiddleware, context=context)],
        exception_handlers={HTTPException: _reraise},
    )
    app.router.redirect_slashes = False  # Unknown paths are problems; a redirect would drop the body.
    return app


async def _reraise(request: Request, error: Exception) -> Response:
    """Leave the error to the middleware; Starlette would send a plain-text response."""
    del request
    raise error


async def _serve_stream(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    client = (scope.get("client") or ("", 0))[0]
    headers = Headers(scope=scope)
    with correlation_scope(correlation_id_of(headers)):
        try:
            if is_cross_origin(headers):
                context.count_reject("foreign_origin")
                raise NotAllowed("A web page of another site may not open a stream")
            authorizer = context.authenticator.authenticate(headers, client)
        except NotAllowed:
            await receive()
            await send(
                {"type": "websocket.close", "code": 4003, "reason": "not_allowed"}
            )  # Before accept, this is a 403.
            return
        await context.streams.serve(authorizer, receive, send, BoundedSocket.of(scope))


async def _serve_relay(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a relay connection. Agents authenticate by a frame, so the HTTP request needs no token."""
    client = (scope.get("client") or ("", 0))[0]
    headers = Headers(scope=scope)
    with correlation_scope(correlation_id_of(headers)):
        try:
            if is_cross_origin(headers):
                context.count_reject("foreign_origin")
                raise NotAllowed("A web page of another site may not connect to the relay")
            if isinstance(context.authenticator, NoAuthentication):
                context.authenticator.authenticate(headers, client)
        except NotAllowed:
            await receive()
            await send(
                {"type": "websocket.close", "code": 4003, "reason": "not_allowed"}
            )  # Before accept, this is a 403.
            return
        await context.relay.serve(scope, receive, send)
