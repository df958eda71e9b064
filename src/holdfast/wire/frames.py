"""Frames of the stream: many calls in one, many answers in one.

    client ──►  [hello]                 which client this is, and what it may do
    client ──►  [call, call, …]         each with a number of its own; a bare number cancels the call that has it
    server ──►  [reply, reply, …]       in any order; what was committed in one group is answered in one frame

A frame is one binary WebSocket message, MessagePack. A call has a key if its outcome must not be doubled: a client that
did not hear the answer sends the same call again with the same key, marked as `again`.
"""

from typing import TYPE_CHECKING, Any, Final, Union

import msgspec

from holdfast.wire.catalog import NETWORK_REQUESTS
from holdfast.wire.problems import Problem
from holdfast.wire.requests import Request

if TYPE_CHECKING:
    AnyRequest = Request[Any]
else:
    AnyRequest = Union[NETWORK_REQUESTS]  # noqa: UP007

PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of each side."""

    protocol: int
    session: str  # Names the client across its connections, so that a new one takes over from an old one.
    calls_max: int = 0  # The server's: how many calls may be under way.


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request with a number. A `key` makes its outcome happen once, however often it is sent."""

    number: int
    request: AnyRequest
    key: str | None = None
    again: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of that number, or the problem with it."""

    number: int
    answer: Any = None
    problem: Problem | None = None


class ReplyOnTheWay(msgspec.Struct, frozen=True, array_like=True):
    """A reply whose answer is decoded by whoever knows its type."""

    number: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    problem: Problem | None = None


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_calls = msgspec.msgpack.Decoder(list[Call | int]).decode  # A bare number cancels the call that has it.
decode_replies = msgspec.msgpack.Decoder(list[ReplyOnTheWay]).decode
