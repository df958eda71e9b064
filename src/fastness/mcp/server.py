"""The MCP server with everything that each transport offers."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fastness.mcp.client_log import add_client_log
from fastness.mcp.completion import add_completion
from fastness.mcp.dispatch import FastnessServer, Feature, Handler, Identify, RequestContext, ToolSource
from fastness.mcp.errors import new_correlation_id
from fastness.mcp.prompts import add_prompts
from fastness.mcp.resources import add_resources
from fastness.mcp.task_protocols import add_tasks
from fastness.mcp.tool import Tool
from fastness.mcp.tools import TOOLS

__all__ = ["Feature", "Handler", "FastnessServer", "Identify", "RequestContext", "ToolSource", "make_server"]


_FEATURES: Final[tuple[Feature, ...]] = (
    add_resources,
    add_prompts,
    add_completion,
    add_client_log,
    add_tasks,
)


def make_server(
    identify: Identify,
    *,
    tools: Iterable[Tool[Any, Any]] = TOOLS,
    features: Iterable[Feature] = (),
    correlation_id: Callable[[RequestContext], str] = new_correlation_id,
) -> FastnessServer:
    """A server for one transport, with tools, tasks, resources, prompts, completion and log messages.

    Args:
        identify: says who sent a request; called for each one. Raises NotAllowed if the caller is not known any more.
        tools: the tools of Fastness that are offered.
        features: add handlers and tools, each by `feature(server)`.
        correlation_id: the id under which an unexpected error of a request is logged; a new one by default.
    """
    server = FastnessServer(identify, tools=tools, correlation_id=correlation_id)
    for feature in (*_FEATURES, *features):
        feature(server)
    return server
