"""Log messages for the client: what the server did with its tool calls.

A client of 2025-11-25 gets those of the level that it has set, and more severe ones; without a level it gets none. A
client of 2026-07-28 asks for a level in each request. Exceptions are not among them: those are in the server's log.
"""

import weakref
from typing import Final, get_args

import mcp_types
from mcp_types import LOG_LEVEL_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from fastness.mcp.caller import Caller
from fastness.mcp.dispatch import FastnessServer, RequestContext

_LEVELS: Final[tuple[str, ...]] = get_args(mcp_types.LoggingLevel)


def add_client_log(server: FastnessServer) -> None:
    """Serve `logging/setLevel`, and send the messages of `server`."""
    log = ClientLog()
    server.handle("logging/setLevel", mcp_types.SetLevelRequestParams, log.set_level)
    server.log_to_client = log.send


class ClientLog:
    """The levels that connected clients have set."""

    def __init__(self) -> None:
        self._levels: dict[int, str] = {}  # By the identity of what a client said when it connected.

    async def send(self, context: RequestContext, level: mcp_types.LoggingLevel, text: str) -> None:
        """Send a message to the client of a request, if it asked for this level."""
        if not self._is_wanted(context, level):
            return
        params = mcp_types.LoggingMessageNotificationParams(level=level, logger="fastness", data=text)
        notification = mcp_types.LoggingMessageNotification(params=params)
        await context.session.send_notification(notification, related_request_id=context.request_id)

    async def set_level(
        self, context: RequestContext, caller: Caller, params: mcp_types.SetLevelRequestParams
    ) -> mcp_types.EmptyResult:
        del caller
        client = context.session.client_params
        if client is not None:
            if id(client) not in self._levels:
                weakref.finalize(client, self._levels.pop, id(client), None)
            self._levels[id(client)] = params.level
        return mcp_types.EmptyResult()

    def _is_wanted(self, context: RequestContext, level: str) -> bool:
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            asked = (context.meta or {}).get(LOG_LEVEL_META_KEY)
        else:
            asked = self._levels.get(id(context.session.client_params))
        return asked in _LEVELS and _LEVELS.index(level) >= _LEVELS.index(asked)
