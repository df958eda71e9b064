"""A server of the SDK whose handlers know their caller, and whose errors tell a client no more than they should.

A feature is a function that takes the server and adds handlers, tools, capabilities or middleware to it.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import mcp_types
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from fastness.errors import FastnessError, NotAllowed
from fastness.mcp.caller import Caller
from fastness.mcp.errors import protocol_error, result_of_error, unexpected_error
from fastness.mcp.instructions import INSTRUCTIONS
from fastness.mcp.tool import Tool
from fastness.version import __version__

RequestContext = ServerRequestContext[Any, Any]
Params = TypeVar("Params", bound=BaseModel)
Handler = Callable[[RequestContext, Caller, Params], Awaitable[HandlerResult]]
Identify = Callable[[RequestContext], Caller]
Feature = Callable[["FastnessServer"], None]
LogToClient = Callable[[RequestContext, mcp_types.LoggingLevel, str], Awaitable[None]]
AddCapabilities = Callable[[mcp_types.ServerCapabilities, bool], mcp_types.ServerCapabilities]

_PARAMETERS: Final = mcp_types.PaginatedRequestParams


class ToolSource(Protocol):
    """Tools that are known at run time only, as the queues that were exposed as tools."""

    async def list_tools(self, caller: Caller) -> list[mcp_types.Tool]:
        """The tools that this caller may call."""
        ...

    async def call_tool(
        self, context: RequestContext, caller: Caller, params: mcp_types.CallToolRequestParams
    ) -> HandlerResult | None:
        """The result of a call; None if the tool is not one of these.

        Raises:
            FastnessError: the call was refused; becomes a result with `isError`.
        """
        ...


class FastnessServer(Server[Any]):
    """A low-level MCP server whose handlers know their caller."""

    def __init__(
        self,
        identify: Identify,
        *,
        tools: Iterable[Tool[Any, Any]],
        correlation_id: Callable[[RequestContext], str],
    ) -> None:
        super().__init__(
            "fastness",
            version=__version__,
            title="Fastness",
            instructions=INSTRUCTIONS,
            get_tool_input_schema=_no_headers,
        )
        self._identify = identify
        self._correlation_id = correlation_id
        self._tools = {tool.name: tool for tool in tools}
        self._sources: list[ToolSource] = []
        self._more_capabilities: list[AddCapabilities] = []
        self.log_to_client: LogToClient | None = None
        self.notifications = NotificationOptions()  # Which lists 2025-11-25 clients are told about.
        self.middleware.insert(0, self._guard)  # Outermost: it sees the exceptions of every other middleware.
        self.handle("tools/list", _PARAMETERS, self._list_tools)
        self.handle("tools/call", mcp_types.CallToolRequestParams, self._call_tool)

    def handle(self, method: str, params: type[Params], handler: Handler[Params]) -> None:
        """Serve a method with `await handler(context, caller, params)`; replaces the method's handler.

        FastnessError becomes a JSON-RPC error with its message and advice, any other exception -32603 with an id.
        """
        self.add_request_handler(method, params, partial(self._handle, handler))

    def add_tool_source(self, source: ToolSource) -> None:
        """List and call the tools of `source` after the tools of Fastness itself."""
        self._sources.append(source)

    def add_capabilities(self, add: AddCapabilities) -> None:
        """Change the advertised capabilities with `add(capabilities, is_modern)`."""
        self._more_capabilities.append(add)

    def caller_of(self, context: RequestContext) -> Caller:
        """The sender of a request; for middleware. Handlers get it as an argument."""
        return replace(self._identify(context), report=context.session.report_progress)

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> mcp_types.ServerCapabilities:
        found = super().get_capabilities(
            notification_options or self.notifications,
            experimental_capabilities,
            extensions,
            protocol_version=protocol_version,
        )
        for add in self._more_capabilities:
            found = add(found, protocol_version in MODERN_PROTOCOL_VERSIONS)
        return found

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        return super().create_initialization_options(
            notification_options or self.notifications, experimental_capabilities, extensions
        )

    async def call_tool(
        self, context: RequestContext, caller: Caller, params: mcp_types.CallToolRequestParams
    ) -> HandlerResult:
        """The result of a tool call. What Fastness refuses is a result with `isError`.

        Raises:
            MCPError: there is no such tool.
        """
        try:
            tool = self._tools.get(params.name)
            if tool is not None:
                if not tool.is_allowed(caller):
                    raise NotAllowed(f"{params.name} needs a token that allows {', '.join(tool.verbs)}")
                return await tool.answer(caller, params.arguments or {})
            for source in self._sources:
                found = await source.call_tool(context, caller, params)
                if found is not None:
                    return found
        except FastnessError as error:
            return result_of_error(error)
        raise MCPError(code=mcp_types.INVALID_PARAMS, message=f"Unknown tool {params.name[:128]!r}; list the tools")

    async def _call_tool(
        self, context: RequestContext, caller: Caller, params: mcp_types.CallToolRequestParams
    ) -> HandlerResult:
        found = await self.call_tool(context, caller, params)
        if isinstance(found, mcp_types.CallToolResult) and found.is_error:
            await self._log(
                context, "notice", f"{params.name} was refused: {(found.structured_content or {}).get('code')}"
            )
        else:
            await self._log(context, "debug", f"{params.name} was called")
        return found

    async def _list_tools(
        self, context: RequestContext, caller: Caller, params: mcp_types.PaginatedRequestParams
    ) -> mcp_types.ListToolsResult:
        del context, params
        found = [tool.listed for tool in self._tools.values() if tool.is_allowed(caller)]
        for source in self._sources:
            found += await source.list_tools(caller)
        return mcp_types.ListToolsResult(tools=found)

    async def _handle(self, handler: Handler[Params], context: RequestContext, params: Params) -> HandlerResult:
        try:
            return await handler(context, self.caller_of(context), params)
        except ValidationError as error:  # Of a result: the parameters were validated before.
            raise TypeError("A handler made an invalid result") from error

    async def _guard(self, ctx: RequestContext, call_next: CallNext) -> HandlerResult:
        """Middleware: no exception leaves with its text, except those that are meant for the client."""
        try:
            return await call_next(ctx)
        except (MCPError, ValidationError):  # The SDK answers an invalid request without pydantic's text.
            raise
        except FastnessError as error:
            raise protocol_error(error) from error
        except Exception as error:
            found = unexpected_error(error, ctx.method, self._correlation_id(ctx))
            await self._log(ctx, "error", found.error.message)
            raise found from error

    async def _log(self, context: RequestContext, level: mcp_types.LoggingLevel, text: str) -> None:
        if self.log_to_client is not None:
            with suppress(Exception):  # The request counts: the client may be gone, or read no messages.
                await self.log_to_client(context, level, text)


def _no_headers(name: str) -> None:
    """No tool repeats its arguments in headers. Without this, the SDK lists all tools before each call over HTTP."""
    del name
