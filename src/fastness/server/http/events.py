"""Streaming responses: server-sent events for browsers, lines of JSON (NDJSON) for programs."""

from collections.abc import AsyncGenerator
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fastness.server.http import json_codec
from fastness.wire.problems import Problem

NDJSON: Final = "application/x-ndjson"
SSE: Final = "text/event-stream"


class End(msgspec.Struct, frozen=True):
    """Why the stream ends: `idle`, `reconnect` after an hour, or `shutdown_draining`."""

    reason: str


class EndLine(msgspec.Struct, frozen=True):
    """The last line of a stream."""

    event: Literal["end"]
    data: End


class HeartbeatLine(msgspec.Struct, frozen=True):
    """Shows that the connection is alive. As a server-sent event it is a comment."""

    event: Literal["heartbeat"]
    data: None


class ProblemLine(msgspec.Struct, frozen=True):
    """An error that ends the stream."""

    event: Literal["problem"]
    data: Problem


LINES: Final = (HeartbeatLine, ProblemLine, EndLine)


class Events:
    """Encodes events in the media type that the caller chose."""

    def __init__(self, media: str) -> None:
        self.media = media

    def event(self, name: str, value: Any, id: str | None = None) -> bytes:
        """One event."""
        data = json_codec.encode(value)
        if self.media == SSE:
            mark = f"id: {id}\n" if id is not None else ""
            return f"{mark}event: {name}\ndata: ".encode() + data + b"\n\n"
        return b'{"event":"' + name.encode() + b'","data":' + data + b"}\n"

    def heartbeat(self) -> bytes:
        """An event that shows that the connection is alive."""
        return b": still here\n\n" if self.media == SSE else b'{"event":"heartbeat","data":null}\n'


class EventStream(StreamingResponse):
    """A response that streams events until the end event, or until the caller disconnects."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], media: str) -> None:
        """`first` is produced before the response starts, so that an invalid request gets an error status."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_joined(first, rest), headers=headers, media_type=media)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":
                await Response(headers=self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for each in rest:
        yield each
