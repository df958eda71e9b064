"""Replies on their way out: how they become frames, and how many of them a connection has not taken yet.

A frame of replies is no longer than one of calls, unless a single reply is. One that cannot be encoded is a problem
instead: whoever waits for it hears of it.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.limits import FRAME_BYTES_MAX
from holdfast.server.logs import correlation_id
from holdfast.wire.frames import Reply, encode
from holdfast.wire.problems import problem_of

_log = logging.getLogger("holdfast.stream")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Replies:
    """The replies of one connection."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.unsent = 0  # Bytes that the other end has not taken yet.

    async def send(self, replies: Sequence[Reply]) -> None:
        """Hand replies over, waiting until the other end takes them.

        Raises:
            Exception: the connection is gone, in one of a server's many ways.
        """
        frame = _encoded(replies)
        if len(replies) > 1 and (frame is None or len(frame) > FRAME_BYTES_MAX):
            del frame
            half = len(replies) // 2
            await self.send(replies[:half])
            await self.send(replies[half:])
            return
        if frame is None:
            frame = encode([Reply(replies[0].number, None, problem_of(unexpected(), correlation_id.get()))])
        self.unsent += len(frame)
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        finally:
            self.unsent -= len(frame)


def unexpected() -> HoldfastError:
    """No stack trace leaves the server: what happened is in its log."""
    return HoldfastError("The server failed in a way that nobody thought of; its log says how")


def _encoded(replies: Sequence[Reply]) -> bytes | None:
    try:
        return encode(replies)
    except (TypeError, ValueError, OverflowError, RecursionError):
        if len(replies) == 1:
            _log.exception("an answer cannot be encoded")
        return None
