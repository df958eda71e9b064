"""HTTP protocol class for uvicorn, with the bounds that uvicorn lacks.

request head   bytes_max, within `seconds`                           431, 408
trailers       bytes_max; ignored                                    431
unread body    after the response, the rest within `seconds`         closed
response       a client that reads nothing for a minute              closed
pipelining     pipelined_max requests behind an unfinished one       429
connections    connections_max, streams included                     503

A refusal behind unanswered pipelined requests is sent in its turn: after their responses, if these are complete within
`seconds`. Nothing more is read from the connection.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastness.errors import RetryAdvice
from fastness.server import logs
from fastness.server.http.limits import PIPELINED_MAX
from fastness.server.logs import RateLimitFilter
from fastness.server.problems import help_link
from fastness.server.slow_peer import SlowPeerGuard
from fastness.wire.problems import RETRY_AFTER_SECONDS, Problem

_log = logging.getLogger("fastness.connections")
_log.addFilter(RateLimitFilter(per_second=20))  # Clients can send any number of bad requests.
_TITLES: Final = {
    400: ("malformed_request", "Bad Request"),
    408: ("request_timeout", "Request Timeout"),
    429: ("too_many_pipelined", "Too Many Requests"),
    431: ("request_head_too_large", "Request Header Fields Too Large"),
    503: ("too_many_connections", "Service Unavailable"),
}


class BoundedHttp(SlowPeerGuard, HttpToolsProtocol):
    """One connection. A server subclasses it with its own bounds."""

    bytes_max = 32_768
    seconds = 10.0
    connections_max = 20_000
    count_reject: Callable[[str], None] | None = None  # Called with the reason of every refusal.
    log = _log
    pipelined_max = PIPELINED_MAX

    _non_body_bytes = 0  # Received since the last piece of a body: heads, trailers and the like.
    _in_head = True
    _in_message = False
    _active_cycle: RequestResponseCycle | None = None
    _status = 400  # Of the response to a request that is refused while it is parsed.
    _timer: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str] | None = None  # Status and detail, to send after the responses before it.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.set_kernel_timeout()
        self._timer = self.loop.call_later(self.seconds, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.stop_write_timer()
        if isinstance(exc, TimeoutError):
            _log.warning("disconnected: the client read nothing for %g s", self.unread_seconds)
        if self._active_cycle is not None:  # uvicorn notifies only the last pipelined request.
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._non_body_bytes += len(data)
        super().data_received(data)
        if self._non_body_bytes > self.bytes_max and (self._in_head or self._in_message):
            self._status = 431
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        if self._timer is None:  # `connection_made` started the timer of the first head.
            self._timer = self.loop.call_later(self.seconds, self._on_head_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Trailers must not become part of a head that was already checked.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._non_body_bytes = 0
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
        raise httptools.HttpParserError("the request head is refused")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        websocket: Any = self.transport.get_protocol()
        # uvicorn sends no response to a head that websockets rejects, and the client would wait for ever.
        if not websocket.handshake_initiated and not self.transport.is_closing():
            self._refuse(400, "This is not a valid WebSocket handshake; send a GET with few, short headers and no body")

    def on_body(self, body: bytes) -> None:
        self._non_body_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._non_body_bytes = False, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None:
            if not self.transport.is_closing() and not self._is_answering():
                self._stop_timer()
                self._refuse(*self._refusal)
            return
        if self._in_message and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.seconds, self.transport.close)
        self.start_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stop_write_timer()

    def send_400_response(self, msg: str) -> None:
        del msg
        if self.transport.is_closing() or self._refusal is not None:
            return
        details = {
            400: "This is not a valid HTTP/1.1 request",
            431: f"The headers or trailers exceed {self.bytes_max} bytes; shorten them",
            429: f"{self.pipelined_max} pipelined requests wait behind an unfinished one; wait for a response",
            503: f"{self.connections_max} connections are open, the most that this server allows; try again later",
        }
        self._refuse_in_turn(self._status, details[self._status])

    def _on_head_timeout(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse_in_turn(408, f"The request head did not arrive within {self.seconds:g} s")

    def _refuse_in_turn(self, status: int, detail: str) -> None:
        """Refuse a request now, or after the responses to those before it."""
        if not self._in_head and self.pipeline:  # Its own head was accepted, and it waits behind others.
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._active_cycle  # type: ignore[assignment]
            self._in_head = True
        active = self._active_cycle
        # A response that is already being sent may be an endless stream.
        if not self._in_head or not self._is_answering() or (active is not None and active.response_started):
            self._refuse(status, detail)
            return
        self._refusal = status, detail
        self.flow.pause_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _is_answering(self) -> bool:
        """Whether a request waits for the rest of its response."""
        return bool(self.pipeline) or (self._active_cycle is not None and not self._active_cycle.response_complete)

    def _refuse(self, status: int, detail: str) -> None:
        code, title = _TITLES[status]
        later = status in (429, 503)
        id = uuid.uuid4().hex  # The caller's own id is in a head that was not read.
        with logs.correlation_scope(id):
            # At debug level for silent connections, which clients keep in reserve.
            silent = status == 408 and not self._in_message
            _log.log(logging.DEBUG if silent else logging.WARNING, "refused: %s. %s", code, detail)
        if self.count_reject is not None and not silent:
            self.count_reject(code)
        if self._may_answer():
            problem = Problem(
                code=code,
                title=title,
                status=status,
                detail=detail,
                retry=RetryAdvice.LATER if later else RetryAdvice.NEVER,
                type=f"urn:fastness:error:{code}",
                retry_after_seconds=RETRY_AFTER_SECONDS if later else None,
                correlation_id=id,
            )
            body = msgspec.json.encode({"retry": problem.retry, **msgspec.to_builtins(problem)})
            head = (
                f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\nx-correlation-id: {id}\r\n"
                f"link: {help_link(code)}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            )
            wait = f"retry-after: {RETRY_AFTER_SECONDS:.0f}\r\n" if later else ""
            self.transport.write(f"{head}{wait}\r\n".encode() + body)
        cycle: Any = self.cycle  # None before the first head.
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether a response can be written without corrupting another one."""
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete if self._in_head else not cycle.response_started)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
