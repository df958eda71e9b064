"""HTTP connections that have to keep moving: what uvicorn leaves without a bound.

head           at most so many bytes, within so many seconds         431, 408
trailers       the same bytes; nobody reads them                     431
after answers  the rest of a body that nobody reads: so many seconds  closed
answers        whoever takes nothing of one for a minute is cut      closed
requests       at most so many that wait behind an unfinished one   429
connections    at most so many, streams among them                   503
"""

import asyncio
import logging
import uuid
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from holdfast.errors import Retry
from holdfast.server import logs
from holdfast.server.http.limits import PIPELINED_MAX
from holdfast.server.logs import Sparing
from holdfast.server.slow_peer import Taken
from holdfast.wire.problems import RETRY_AFTER_SECONDS, Problem

_log = logging.getLogger("holdfast.connections")
_log.addFilter(Sparing(per_second=20))  # Bad requests are others' to make.
_TITLES: Final = {
    400: ("malformed_request", "Bad Request"),
    408: ("request_timeout", "Request Timeout"),
    429: ("too_many_pipelined", "Too Many Requests"),
    431: ("request_head_too_large", "Request Header Fields Too Large"),
    503: ("too_many_connections", "Service Unavailable"),
}


class BoundedHttp(Taken, HttpToolsProtocol):
    """One connection. A server makes a class of its own of this, with its own bounds."""

    bytes_max = 32_768
    seconds = 10.0
    connections_max = 20_000
    log = _log
    pipelined_max = PIPELINED_MAX

    _quiet_bytes = 0  # That have come since the last piece of a body: of heads, trailers and the like.
    _in_head = True
    _in_message = False
    _answering: RequestResponseCycle | None = None
    _status = 400  # What is said to a request that is refused while it is parsed.
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.bound_kernel()
        self._timer = self.loop.call_later(self.seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.stop_looking()
        if isinstance(exc, TimeoutError):
            _log.warning("cut: nothing was read for %g s", self.unread_seconds)
        if self._answering is not None:  # uvicorn tells the last request only, and behind this one others may wait.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > self.bytes_max and (self._in_head or self._in_message):
            self._status = 431
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        if self._timer is None:  # The first head of a connection has its timer already.
            self._timer = self.loop.call_later(self.seconds, self._give_up)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # What comes behind a body would become part of a head that was checked already.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._quiet_bytes = 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.bytes_max:
            self._status = 431
        elif len(self.pipeline) >= self.pipelined_max:
            self._status = 429
        elif len(self.connections) > self.connections_max:
            self._status = 503
        else:
            super().on_headers_complete()
            self._in_head = False
            return
        raise httptools.HttpParserError("the head is refused")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        taken: Any = self.transport.get_protocol()
        # Of a head that websockets does not like, uvicorn hears nothing, and so would its sender, for ever.
        if not taken.handshake_initiated and not self.transport.is_closing():
            self._refuse(400, "This is no request for a stream; send a GET with few and short headers, and no body")

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._quiet_bytes = False, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.seconds, self.transport.close)
        self.look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.look()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stop_looking()

    def send_400_response(self, msg: str) -> None:
        del msg
        if self.transport.is_closing():
            return
        details = {
            400: "This is no HTTP/1.1 request; send one",
            431: f"What stands around a body has at most {self.bytes_max} bytes; shorten it",
            429: f"{self.pipelined_max} requests wait behind an unfinished one; wait for an answer",
            503: f"{self.connections_max} connections are open; come back later",
        }
        self._refuse(self._status, details[self._status])

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"The head of a request did not arrive within {self.seconds:g} s")

    def _refuse(self, status: int, detail: str) -> None:
        code, title = _TITLES[status]
        later = status in (429, 503)
        id = uuid.uuid4().hex  # What the caller calls it stands in a head that was not read.
        with logs.correlated(id):
            # Debug for those that were silent: whoever keeps a connection in reserve does that.
            silent = status == 408 and not self._in_message
            _log.log(logging.DEBUG if silent else logging.WARNING, "refused: %s. %s", code, detail)
        if self._may_answer():
            problem = Problem(
                code=code,
                title=title,
                status=status,
                detail=detail,
                retry=Retry.LATER if later else Retry.NEVER,
                type=f"urn:holdfast:error:{code}",
                retry_after_seconds=RETRY_AFTER_SECONDS if later else None,
                correlation_id=id,
            )
            body = msgspec.json.encode({"retry": problem.retry, **msgspec.to_builtins(problem)})
            head = (
                f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\nx-correlation-id: {id}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n"
            )
            wait = f"retry-after: {RETRY_AFTER_SECONDS:.0f}\r\n" if later else ""
            self.transport.write(f"{head}{wait}\r\n".encode() + body)
        cycle: Any = self.cycle  # None before the first head.
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether nothing else is being answered, or has been, that this would be taken for a part of."""
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete if self._in_head else not cycle.response_started)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
