"""Frames of the stream: several calls or several answers each.

    client ──►  [hello]                 the client's session and limits
    client ──►  [call, call, …]         each with its own number; a bare number cancels the call of that number
    server ──►  [reply, reply, …]       in any order; calls of one batch are answered in one frame

A frame is one binary WebSocket message in MessagePack. A call that must be executed only once has a key: a client that
lost the answer sends the call again with the same key, marked as `again`.
"""

from typing import TYPE_CHECKING, Any, Final, Union

import msgspec

from fastness.wire.catalog import NETWORK_REQUESTS
from fastness.wire.problems import Problem
from fastness.wire.requests import Request

if TYPE_CHECKING:
    AnyRequest = Request[Any]
else:
    AnyRequest = Union[NETWORK_REQUESTS]  # noqa: UP007

PROTOCOL: Final = 1
REVISION: Final = 1  # Grows with everything that handles send and that servers before it refuse.


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of each side."""

    protocol: int
    session: str  # Identifies the client across connections: a new connection replaces the old one.
    calls_max: int = 0  # From the server: how many calls may be in flight.
    revision: int = 0  # From the server: what it knows. A client refuses a server with a lower one than its own.


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request with a number. With a `key` it is executed once, however often it is sent."""

    number: int
    request: AnyRequest
    key: str | None = None
    again: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of that number, or its problem."""

    number: int
    answer: Any = None
    problem: Problem | None = None


class RawReply(msgspec.Struct, frozen=True, array_like=True):
    """A reply whose answer is not decoded yet: its type depends on the request."""

    number: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    problem: Problem | None = None


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_calls = msgspec.msgpack.Decoder(list[Call | int]).decode  # A bare number cancels the call that has it.
decode_replies = msgspec.msgpack.Decoder(list[RawReply]).decode
