"""Answers that go on: events for browsers (server-sent events), lines of JSON for programs (NDJSON)."""

from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from holdfast.server.http import dialect

NDJSON: Final = "application/x-ndjson"
SSE: Final = "text/event-stream"


class Events:
    """Writes events in the form that the caller chose."""

    def __init__(self, media: str) -> None:
        self.media = media

    def event(self, name: str, value: Any, id: str | None = None) -> bytes:
        """One event."""
        data = dialect.encoded(value)
        if self.media == SSE:
            mark = f"id: {id}\n" if id is not None else ""
            return f"{mark}event: {name}\ndata: ".encode() + data + b"\n\n"
        return b'{"event":"' + name.encode() + b'","data":' + data + b"}\n"

    def heartbeat(self) -> bytes:
        """Nothing happened, and the connection is still there."""
        return b": still here\n\n" if self.media == SSE else b'{"event":"heartbeat","data":null}\n'


class EventStream(StreamingResponse):
    """An answer that goes on until its end, or until the caller hangs up."""

    def __init__(self, content: AsyncIterator[bytes], media: str) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type=media)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()  # type: ignore[attr-defined]
