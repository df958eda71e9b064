"""The ASGI app: every door of a server."""

from collections.abc import Awaitable, Generator
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import WebSocketRoute

from holdfast.errors import NotAllowed
from holdfast.server.doors import Doors


def make_app(doors: Doors) -> Starlette:
    """Every door of the plane behind `doors`."""

    class StreamDoor:
        """`/v1/stream`, as Starlette wants it: something to await, made from the connection."""

        def __init__(self, scope: Any, receive: Any, send: Any) -> None:
            self._serving: Awaitable[None] = _serve_stream(doors, scope, receive, send)

        def __await__(self) -> Generator[Any, None, None]:
            return self._serving.__await__()

    return Starlette(routes=[WebSocketRoute("/v1/stream", StreamDoor)])


async def _serve_stream(doors: Doors, scope: Any, receive: Any, send: Any) -> None:
    client = (scope.get("client") or ("", 0))[0]
    try:
        guard = doors.guards.admit(Headers(scope=scope), client)
    except NotAllowed:
        await receive()
        await send({"type": "websocket.close", "code": 4003, "reason": "not_allowed"})  # Before accepting: a 403.
        return
    await doors.streams.serve(guard, receive, send)
