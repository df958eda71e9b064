"""Calls that wait for their answers, and the frames that carry them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from fastness.client.connection_errors import unknown
from fastness.client.undo import undo_of
from fastness.errors import FastnessError, InvalidArgument, Unsupported
from fastness.limits import FRAME_BYTES_MAX
from fastness.wire.answers import decoder_of
from fastness.wire.frames import AnyRequest, Call, decode_calls, encode
from fastness.wire.type_checks import check_types, refusal_of

_FRAME_BYTES: Final = FRAME_BYTES_MAX // 2  # A longer list of calls is split into several frames.
_CALL_BYTES_MAX: Final = FRAME_BYTES_MAX - 64  # A frame of one call is a few bytes longer than the call.


def is_waiting_call(request: AnyRequest) -> bool:
    """Whether a call may wait at the server, for a message or a lease."""
    return bool(getattr(request, "wait_seconds", 0))


class TooLong(Exception):
    """The call does not fit a frame."""


class AnswerFuture(Protocol):
    """The future answer to a call: asyncio's future, or that of a thread."""

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def cancel(self) -> bool: ...

    def result(self) -> Any: ...

    def exception(self) -> BaseException | None: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


AnyFuture = TypeVar("AnyFuture", bound=AnswerFuture)


class PendingCall(Generic[AnyFuture]):
    """A call that waits for its answer."""

    __slots__ = ("abandoned", "data", "decode", "future", "key", "lost_at", "number", "request", "sent", "since")

    def __init__(self, number: int, request: AnyRequest, key: str | None, future: AnyFuture, *, now: float) -> None:
        self.number = number
        self.request = request
        self.key = key
        check_types(request)
        self.data = _encode(Call(number, request, key))
        self.decode = _decoder_of(request)
        self.future = future
        self.since = now
        self.sent = False
        self.lost_at: float | None = None  # When the connection of the first attempt ended.
        self.abandoned = False

    def fail(self, error: FastnessError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def lose(self, error: FastnessError) -> None:
        """Fail a call whose answer will not arrive: as CommitUnknown if it is a write that may have happened."""
        # A lease that no caller received expires, so repeating such a call is safe.
        is_repeatable = self.key is None or undo_of(self.request) is not None
        self.fail(error if is_repeatable or not self.sent else unknown(self.request, error))

    def mark_repeated(self) -> None:
        """Mark the call as repeated: the server checks its idempotency key before it carries the call out."""
        self.data = encode(Call(self.number, self.request, self.key, True))


def encode_frames(outbox: Sequence[PendingCall[AnyFuture]]) -> Iterator[bytes]:
    """Encode the calls as frames, and mark them as sent."""
    frame: list[msgspec.Raw] = []
    size = 0
    for pending in outbox:
        if pending.future.done():
            continue  # The caller was cancelled before the call was sent.
        if frame and size + len(pending.data) > _FRAME_BYTES:
            yield encode(frame)
            frame, size = [], 0
        pending.sent = True
        frame.append(msgspec.Raw(pending.data))
        size += len(pending.data)
    if frame:
        yield encode(frame)


def fail_bad_calls(pendings: Sequence[PendingCall[AnyFuture]], reason: str) -> None:
    """Fail the calls of a frame that the server could not decode, or they would be sent again without end."""
    sent = [pending for pending in pendings if pending.sent]
    bad = [(pending, error) for pending in sent if (error := _decode_error(pending.data)) is not None]
    for pending, error in bad:
        pending.fail(_refusal(pending.request, error))
    if not bad:
        error = Unsupported(f"The server could not decode a call ({reason}); use the same version on both sides")
        for pending in sent:
            if len(sent) == 1:
                pending.fail(error)
            else:  # One of them is bad, and the others may have been carried out.
                pending.lose(error)


def _decode_error(data: bytes) -> Exception | None:
    """The error that a server finds when it decodes a call."""
    try:
        decode_calls(encode([msgspec.Raw(data)]))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return error
    return None


def _refusal(request: AnyRequest, error: Exception) -> FastnessError:
    """The error of a request that cannot be sent."""
    found = refusal_of(type(request), request)
    return found or InvalidArgument(f"{type(request).__name__} cannot be sent: {error}")


def _decoder_of(request: AnyRequest) -> Callable[[Any], Any]:
    try:
        return decoder_of(request)
    except TypeError as error:  # A list of operations that is none.
        raise _refusal(request, error) from error


def _encode(call: Call) -> bytes:
    try:
        data = encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(call.request, error) from error
    if len(data) > _CALL_BYTES_MAX:
        raise TooLong
    return data
