"""The tools of Fastness, by what they are about."""

from typing import Any, Final

from fastness.mcp.tool import Tool
from fastness.mcp.tools import blobs, dead_letters, leases, mail, queues, states, tasks, worlds

TOOLS: Final[tuple[Tool[Any, Any], ...]] = tuple(
    tool for module in (mail, queues, dead_letters, leases, states, worlds, blobs, tasks) for tool in module.TOOLS
)
