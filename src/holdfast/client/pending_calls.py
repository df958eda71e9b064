"""Calls that wait for their answers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from holdfast.client.connection_errors import unknown
from holdfast.client.undo import undo_of
from holdfast.errors import HoldfastError, InvalidArgument, Unsupported
from holdfast.limits import FRAME_BYTES_MAX
from holdfast.wire.answers import decoder_of
from holdfast.wire.frames import AnyRequest, Call, decode_calls, encode

_FRAME_BYTES: Final = FRAME_BYTES_MAX // 2  # Where a frame is full, and the next one begins.
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

    def lose(self, error: HoldfastError) -> None:
        """Fail a call whose answer will not come, for the reason that is given: what was sent may have been done."""
        # What was leased and is told to nobody ends by itself, and is no harm to whoever asks again.
        harmless = self.key is None or undo_of(self.request) is not None
        self.fail(error if harmless or not self.sent else unknown(self.request, error))

    def mark_again(self) -> None:
        """It may have been carried out: let the server look before it does so again."""
        self.data = encode(Call(self.number, self.request, self.key, True))


def frames_of(outbox: Sequence[Pending]) -> Iterator[bytes]:
    """The frames in which calls travel."""
    frame: list[msgspec.Raw] = []
    size = 0
    for pending in outbox:
        if pending.future.done():
            continue  # Whoever asked has gone before it was sent.
        if frame and size + len(pending.data) > _FRAME_BYTES:
            yield encode(frame)
            frame, size = [], 0
        pending.sent = True
        frame.append(msgspec.Raw(pending.data))
        size += len(pending.data)
    if frame:
        yield encode(frame)


def sift(pendings: Sequence[Pending], reason: str) -> None:
    """The server could make nothing of a frame: find the call that was wrong, or it would be sent for ever."""
    sent = [pending for pending in pendings if pending.sent]
    wrong = [(pending, error) for pending in sent if (error := _wrong_with(pending.data)) is not None]
    for pending, error in wrong:
        pending.fail(InvalidArgument(f"{type(pending.request).__name__} cannot be sent: {error}"))
    if not wrong:
        error = Unsupported(f"The server did not understand a call ({reason}); use the same version there")
        for pending in sent:
            if len(sent) == 1:
                pending.fail(error)
            else:  # It is one of them, and the others may have been done.
                pending.lose(error)


def _wrong_with(data: bytes) -> Exception | None:
    """What a server cannot understand about a call."""
    try:
        decode_calls(encode([msgspec.Raw(data)]))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return error
    return None


def _encoded(call: Call) -> bytes:
    try:
        data = encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{type(call.request).__name__} cannot be sent: {error}") from error
    if len(data) > _CALL_BYTES_MAX:
        raise TooLong
    return data
