"""Replies of a stream: encoding them into frames, and counting the bytes that the client has not read yet.

A frame of replies is no longer than a frame of calls may be, unless it holds a single long reply. A reply that
is longer than ANSWER_BYTES_MAX, or that cannot be encoded, is replaced by a problem.
"""

import logging
from collections.abc import Callable, Sequence

from starlette.types import Send

from fastness.errors import AnswerTooLarge, FastnessError
from fastness.limits import ANSWER_BYTES_MAX, FRAME_BYTES_MAX
from fastness.server.logs import correlation_id
from fastness.wire.frames import Reply, encode
from fastness.wire.problems import problem_of

_log = logging.getLogger("fastness.stream")

Write = Callable[[bytes], bool]


class Replies:
    """The replies of one connection."""

    def __init__(self, send: Send, write: Write | None = None) -> None:
        """`write` writes a frame without waiting and returns whether it could."""
        self._send = send
        self._write = write
        self.unsent_bytes = 0

    @property
    def is_backlogged(self) -> bool:
        """Whether so much is unsent that no further long answer is kept in memory."""
        return self.unsent_bytes > ANSWER_BYTES_MAX

    def write(self, frame: bytes) -> bool:
        """Write a frame without waiting; return False if it is too long or the socket is not writable now."""
        return self._write is not None and len(frame) <= FRAME_BYTES_MAX and self._write(frame)

    async def send(self, replies: Sequence[Reply], frame: bytes | None) -> bool:
        """Send replies, waiting while the socket is not writable; return whether all of them were sent unchanged.

        `frame` is what `encode_replies` returned for them.

        Raises:
            Exception: the connection is lost; uvicorn raises various types.
        """
        if len(replies) > 1 and (frame is None or len(frame) > FRAME_BYTES_MAX):
            half = len(replies) // 2
            del frame
            first = await self.send(replies[:half], encode_replies(replies[:half]))
            return await self.send(replies[half:], encode_replies(replies[half:])) and first
        is_unchanged = frame is not None and len(frame) <= ANSWER_BYTES_MAX
        if not is_unchanged:
            error = unexpected_error() if frame is None else _too_large(len(frame))
            frame = encode([Reply(replies[0].number, None, problem_of(error, correlation_id.get()))])
        assert frame is not None
        if self._write is not None and self._write(frame):
            return is_unchanged
        self.unsent_bytes += len(frame)
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        finally:
            self.unsent_bytes -= len(frame)
        return is_unchanged


def fits(reply: Reply) -> bool:
    """Whether a reply can be sent unchanged."""
    frame = encode_replies([reply])
    return frame is not None and len(frame) <= ANSWER_BYTES_MAX


def unexpected_error() -> FastnessError:
    """An error without details: stack traces go to the server's log only."""
    return FastnessError("Unexpected error in the server; see its log")


def encode_replies(replies: Sequence[Reply]) -> bytes | None:
    """The frame of replies; None if one of them cannot be encoded."""
    try:
        return encode(replies)
    except (TypeError, ValueError, OverflowError, RecursionError):
        if len(replies) == 1:
            _log.exception("an answer cannot be encoded")
        return None


def _too_large(size: int) -> AnswerTooLarge:
    return AnswerTooLarge(
        f"The answer has {size} bytes, more than the {ANSWER_BYTES_MAX} that a stream allows; "
        "request less at a time, or read the blob over HTTP"
    )
