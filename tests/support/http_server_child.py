"""A server process for tests: `http_server_child.py URL OPTIONS`. Prints its port; SIGUSR1 makes it drain."""

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import uvicorn

from fastness.errors import NotAllowed
from fastness.limits import SLOW_PEER_SECONDS_MAX
from fastness.plane import Options, open_plane_async
from fastness.server.app import make_app
from fastness.server.authorization import Authorizer
from fastness.server.context import ServerContext
from fastness.server.http.limits import HttpLimits
from fastness.server.sockets import BoundedSocket
from fastness.wire.pairs import GetPair
from fastness.wire.requests import Request


class TwoTokens:
    """Two tokens: `all` may do everything, `reader` may only read."""

    def authenticate(self, headers: Mapping[str, str], client: str) -> Authorizer:
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("all", "reader"):
            raise NotAllowed("The token is unknown")
        return Holder(token)


class Holder(Authorizer):
    name = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def authorize(self, request: Request[Any]) -> None:
        if self.name == "reader" and not type(request).__name__.startswith(("Get", "List", "Read", "Describe", "Find")):
            raise NotAllowed("This token may only read")


class FailingTransport:
    """A transport that raises an unexpected error for the key `boom`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Any], call: Any = None) -> Any:
        if isinstance(request, GetPair) and request.key == b"boom":
            raise RuntimeError("secret: /etc/passwd")
        return await self._transport.call(request, call)


async def main(url: str, options: dict[str, Any]) -> None:
    transport = await open_plane_async(url, Options())
    socket_class = type(
        "Socket", (BoundedSocket,), {"unread_seconds": options.pop("unread_seconds", SLOW_PEER_SECONDS_MAX)}
    )
    context = ServerContext(FailingTransport(transport), TwoTokens() if options.pop("tokens", False) else None)
    app = make_app(context, msgspec.convert(options, HttpLimits))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws=socket_class, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, context.streams.drain)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    print(listening.getsockname()[1], flush=True)
    await server.serve(sockets=[listening])
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2])))
