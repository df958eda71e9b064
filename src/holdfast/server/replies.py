"""Replies on their way out: how they become frames, and how many of them a connection has not taken yet.

A frame of replies is no longer than one of calls, unless a single reply is. One that is longer than any may be is a
problem instead, and so is one that cannot be encoded: whoever waits for it hears why.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from holdfast.errors import AnswerTooLarge, HoldfastError
from holdfast.limits import ANSWER_BYTES_MAX, FRAME_BYTES_MAX
from holdfast.server.logs import correlation_id
from holdfast.wire.frames import Reply, encode
from holdfast.wire.problems import problem_of

_log = logging.getLogger("holdfast.stream")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Write = Callable[[bytes], bool]


class Replies:
    """The replies of one connection."""

    def __init__(self, send: Send, write: Write | None = None) -> None:
        """`write` writes a frame at once, if it can."""
        self._send = send
        self._write = write
        self.unsent = 0  # Bytes that the other end has not taken yet.

    @property
    def are_unread(self) -> bool:
        """Whether the other end has left so much that no further long answer is kept for it."""
        return self.unsent > ANSWER_BYTES_MAX

    def write(self, frame: bytes) -> bool:
        """Whether a frame of replies was written, because it is not too long and nothing is in its way."""
        return self._write is not None and len(frame) <= FRAME_BYTES_MAX and self._write(frame)

    async def send(self, replies: Sequence[Reply], frame: bytes | None) -> bool:
        """Hand replies over, waiting until the other end takes them; whether it was told all of them as they are.

        `frame` is what `encoded` made of them.

        Raises:
            Exception: the connection is gone, in one of a server's many ways.
        """
        if len(replies) > 1 and (frame is None or len(frame) > FRAME_BYTES_MAX):
            half = len(replies) // 2
            del frame
            first = await self.send(replies[:half], encoded(replies[:half]))
            return await self.send(replies[half:], encoded(replies[half:])) and first
        whole = frame is not None and len(frame) <= ANSWER_BYTES_MAX
        if not whole:
            error = unexpected() if frame is None else _too_large(len(frame))
            frame = encode([Reply(replies[0].number, None, problem_of(error, correlation_id.get()))])
        assert frame is not None
        if self._write is not None and self._write(frame):
            return whole
        self.unsent += len(frame)
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        finally:
            self.unsent -= len(frame)
        return whole


def fits(reply: Reply) -> bool:
    """Whether the other end can be told a reply as it is."""
    frame = encoded([reply])
    return frame is not None and len(frame) <= ANSWER_BYTES_MAX


def unexpected() -> HoldfastError:
    """No stack trace leaves the server: what happened is in its log."""
    return HoldfastError("The server failed in a way that nobody thought of; its log says how")


def encoded(replies: Sequence[Reply]) -> bytes | None:
    """The frame of replies; None if there is none, because one of them cannot be encoded."""
    try:
        return encode(replies)
    except (TypeError, ValueError, OverflowError, RecursionError):
        if len(replies) == 1:
            _log.exception("an answer cannot be encoded")
        return None


def _too_large(size: int) -> AnswerTooLarge:
    return AnswerTooLarge(
        f"The answer has {size} bytes, and over a stream it may have {ANSWER_BYTES_MAX}; "
        "ask for less at a time, or for a blob over HTTP"
    )
