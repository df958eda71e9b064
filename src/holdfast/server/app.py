"""The ASGI app: every door of a server."""

from collections.abc import Awaitable, Generator
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, WebSocketRoute

from holdfast.errors import NotAllowed
from holdfast.server import openapi
from holdfast.server.authorization import Open
from holdfast.server.doors import Doors
from holdfast.server.http.endpoints import routes
from holdfast.server.http.halls import Hall
from holdfast.server.http.limits import HttpLimits
from holdfast.server.http.middleware import Edge, is_foreign
from holdfast.server.http.routes import ENDPOINTS
from holdfast.server.logs import correlated, correlation_id_of
from holdfast.server.sockets import BoundedSocket


def make_app(doors: Doors, limits: HttpLimits | None = None) -> Starlette:
    """Every door of the plane behind `doors`."""

    class StreamDoor:
        """`/v1/stream`, as Starlette wants it: something to await, made from the connection."""

        def __init__(self, scope: Any, receive: Any, send: Any) -> None:
            self._serving: Awaitable[None] = _serve_stream(doors, scope, receive, send)

        def __await__(self) -> Generator[Any, None, None]:
            return self._serving.__await__()

    class RelayDoor(StreamDoor):
        """`/v1/relay`, likewise."""

        def __init__(self, scope: Any, receive: Any, send: Any) -> None:
            self._serving = _serve_relay(doors, scope, receive, send)

    hall = Hall(doors, limits or HttpLimits())
    doors_of_all: list[BaseRoute] = [
        WebSocketRoute("/v1/stream", StreamDoor),
        WebSocketRoute("/v1/relay", RelayDoor),
        *openapi.routes(ENDPOINTS),
        *routes(hall, ENDPOINTS),
    ]
    app = Starlette(
        routes=doors_of_all,
        middleware=[Middleware(Edge, doors=doors)],
        exception_handlers={HTTPException: _left_to_the_edge},
    )
    app.router.redirect_slashes = False  # A path is right, or a problem; not a detour that drops the body.
    return app


async def _left_to_the_edge(request: Any, error: Exception) -> Any:
    """Starlette would answer in plain text."""
    del request
    raise error


async def _serve_stream(doors: Doors, scope: Any, receive: Any, send: Any) -> None:
    client = (scope.get("client") or ("", 0))[0]
    asked = Headers(scope=scope)
    with correlated(correlation_id_of(asked)):
        try:
            if is_foreign(asked):
                raise NotAllowed("A page of another site may not open a stream")
            guard = doors.guards.admit(asked, client)
        except NotAllowed:
            await receive()
            await send({"type": "websocket.close", "code": 4003, "reason": "not_allowed"})  # Before accepting: a 403.
            return
        await doors.streams.serve(guard, receive, send, BoundedSocket.of(scope))


async def _serve_relay(doors: Doors, scope: Any, receive: Any, send: Any) -> None:
    """Whoever comes in here is asked who they are before anything else, so nobody need show a token at the door."""
    client = (scope.get("client") or ("", 0))[0]
    asked = Headers(scope=scope)
    with correlated(correlation_id_of(asked)):
        try:
            if is_foreign(asked):
                raise NotAllowed("A page of another site may not open a relay's connection")
            if isinstance(doors.guards, Open):
                doors.guards.admit(asked, client)
        except NotAllowed:
            await receive()
            await send({"type": "websocket.close", "code": 4003, "reason": "not_allowed"})  # Before accepting: a 403.
            return
        await doors.relay.serve(scope, receive, send)
