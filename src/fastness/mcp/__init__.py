"""Fastness as tools, resources and durable tasks of the Model Context Protocol.

server = make_server(lambda context: Caller(plane, agent="ada"))

The package uses public handles only, so the same server runs over an embedded plane and over a connection to a server.
A transport (stdio, HTTP) says for each request who calls; see `caller`.
"""

from fastness.extras import how_to_install

try:
    import mcp as _mcp  # noqa: F401
except ImportError as error:
    raise ImportError(f"MCP is not installed; {how_to_install('mcp')}") from error

from fastness.mcp.caller import Caller
from fastness.mcp.server import FastnessServer, ToolSource, make_server
from fastness.mcp.tool import Tool, ToolInput, ToolOutput

__all__ = ["Caller", "FastnessServer", "Tool", "ToolInput", "ToolOutput", "ToolSource", "make_server"]
