"""The tools of Fastness, by what they are about."""

from typing import Any, Final

from fastness.mcp.tool import Tool
from fastness.mcp.tools import blobs, dead_letters, leases, mail, queues, states, tasks, worlds

TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    *mail.TOOLS,
    *queues.TOOLS,
    *dead_letters.TOOLS,
    *leases.TOOLS,
    *states.TOOLS,
    *worlds.TOOLS,
    *blobs.TOOLS,
    *tasks.TOOLS,
)
