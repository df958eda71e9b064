"""`/mcp` of a server, without the cost of the MCP SDK until a client uses it: a second of CPU time and 25 MB.

first request ──► SDK imported in a thread ──► endpoint ──► its sessions run in a task of their own until the end
"""

import asyncio
import importlib
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from fastness.errors import InvalidArgument
from fastness.extras import how_to_install
from fastness.server.context import ServerContext
from fastness.server.http.limits import HttpLimits
from fastness.server.http.middleware import MCP_PATH
from fastness.server.mcp.options import METADATA_PATH, McpOptions
from fastness.server.problems import HttpError, draining_error

if TYPE_CHECKING:
    from fastness.server.mcp.endpoint import McpEndpoint

_log = logging.getLogger("fastness.mcp")
_ENDPOINT: Final = "fastness.server.mcp.endpoint"


class Mcp:
    """`/mcp` and its metadata. Clients that never come cost nothing."""

    def __init__(self, context: ServerContext, limits: HttpLimits, options: McpOptions) -> None:
        self._parts = context, limits, options
        self._loading = asyncio.Lock()
        self._endpoint: McpEndpoint | None = None
        self._running: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def routes(self) -> list[BaseRoute]:
        """`/mcp`, and the document that says which tokens it accepts at both paths where clients look for it."""
        paths = (METADATA_PATH, METADATA_PATH + MCP_PATH)
        return [Route(MCP_PATH, self), *(Route(path, self._describe, methods=["GET"]) for path in paths)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        await (await self._loaded())(scope, receive, send)

    @property
    def requests(self) -> Mapping[str, int]:
        """The number of requests, by method."""
        return {} if self._endpoint is None else self._endpoint.requests

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return 0 if self._endpoint is None else self._endpoint.sessions

    @property
    def streams(self) -> int:
        """The number of open streams of notifications."""
        return 0 if self._endpoint is None else self._endpoint.streams

    def drain(self) -> None:
        """End the streams of clients without a session. New requests are refused already."""
        if self._endpoint is not None:
            self._endpoint.drain()

    async def close(self) -> None:
        """End all sessions and streams."""
        if self._endpoint is not None:
            await self._endpoint.close()

    async def close_sessions_of(self, token_id: str) -> None:
        """End the sessions and streams of a token that became unusable."""
        if self._endpoint is not None:
            await self._endpoint.close_sessions_of(token_id)

    async def stop(self) -> None:
        """Stop what runs beside the requests. No request is in flight any more."""
        self._stopping.set()
        if self._running is not None:
            try:
                await self._running
            except Exception:  # The rest of the server stops as it should.
                _log.exception("unexpected error at the end of MCP sessions")

    async def _describe(self, request: HttpRequest) -> Response:
        return (await self._loaded()).metadata.answer(request)

    async def _loaded(self) -> "McpEndpoint":
        if self._endpoint is None:
            async with self._loading:
                if self._endpoint is None:
                    await self._load()
        assert self._endpoint is not None
        return self._endpoint

    async def _load(self) -> None:
        if self._stopping.is_set():
            raise draining_error()
        try:
            await asyncio.to_thread(importlib.import_module, _ENDPOINT)  # Other calls go on meanwhile.
        except ImportError as error:  # Of an older version of the SDK.
            detail = f"The server cannot import the MCP SDK ({error}); {how_to_install('mcp')}"
            raise HttpError(501, "unsupported", detail) from error
        from fastness.server.mcp.endpoint import McpEndpoint

        endpoint = McpEndpoint(*self._parts)
        is_ready = asyncio.Event()
        self._running = asyncio.get_running_loop().create_task(self._run(endpoint, is_ready))
        await is_ready.wait()
        if self._running.done():
            self._running.result()  # Raises the error that ended it.
        self._endpoint = endpoint

    async def _run(self, endpoint: "McpEndpoint", is_ready: asyncio.Event) -> None:
        """Run the sessions: one task must begin and end them."""
        try:
            async with endpoint.run():
                is_ready.set()
                await self._stopping.wait()
        finally:
            is_ready.set()


def open_mcp(context: ServerContext, limits: HttpLimits, options: McpOptions) -> Mcp | None:
    """`/mcp`; None if it is off or the package `mcp` is not installed.

    Raises:
        InvalidArgument: it is on, and the package `mcp` is not installed.
    """
    if options.enabled is False:
        return None
    if find_spec("mcp") is None:
        if options.enabled:
            raise InvalidArgument(f"/mcp needs the package mcp; {how_to_install('mcp')}, or give --no-mcp")
        return None
    return Mcp(context, limits, options)


def mcp_routes(mcp: Mcp | None) -> list[BaseRoute]:
    """`/mcp` and its metadata; without them, a refusal that says why."""
    if mcp is not None:
        return mcp.routes()

    async def refuse(request: HttpRequest) -> Response:
        del request
        raise HttpError(404, "not_found", _refusal())

    return [Route(MCP_PATH, refuse, methods=["GET", "POST", "DELETE"])]


def _refusal() -> str:
    if find_spec("mcp") is None:
        return f"This server does not speak MCP; {how_to_install('mcp')}, then start it again"
    return "This server does not offer MCP; serve with --mcp"
