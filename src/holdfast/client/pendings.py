"""Calls that wait for their answers."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from holdfast.errors import HoldfastError, InvalidArgument
from holdfast.limits import FRAME_BYTES_MAX
from holdfast.wire.answers import decoder_of
from holdfast.wire.frames import AnyRequest, Call, encode

_CALL_BYTES_MAX: Final = FRAME_BYTES_MAX - 64  # A frame of one call has a few bytes more than the call.


class TooLong(Exception):
    """The call does not fit a frame."""


class Pending:
    """A call that waits for its answer."""

    __slots__ = ("abandoned", "data", "decode", "future", "key", "lost_at", "number", "request", "sent", "since")

    def __init__(self, number: int, request: AnyRequest, key: str | None, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.request = request
        self.key = key
        self.data = _encoded(Call(number, request, key))
        self.decode: Callable[[Any], Any] = decoder_of(request)
        self.future: asyncio.Future[Any] = loop.create_future()
        self.since = loop.time()
        self.sent = False
        self.lost_at: float | None = None  # When the connection ended on which it was sent first.
        self.abandoned = False

    def fail(self, error: HoldfastError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def mark_again(self) -> None:
        """It may have been carried out: let the server look before it does so again."""
        self.data = encode(Call(self.number, self.request, self.key, True))


def _encoded(call: Call) -> bytes:
    try:
        data = encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{type(call.request).__name__} cannot be sent: {error}") from error
    if len(data) > _CALL_BYTES_MAX:
        raise TooLong
    return data
