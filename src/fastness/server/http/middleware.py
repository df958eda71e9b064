"""The middleware around all HTTP endpoints.

Every response has an `X-Correlation-Id`, and so has every log line of its request. Every error becomes a problem
response; no response contains a stack trace.
"""

import asyncio
import logging
import re
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastness.errors import Corrupt, FastnessError, NotAllowed
from fastness.server import tracing
from fastness.server.authorization import Authorizer
from fastness.server.context import ServerContext
from fastness.server.http.limits import LINGER_SECONDS
from fastness.server.logs import RateLimitFilter, correlation_id_of, correlation_scope
from fastness.server.problems import (
    TOO_LARGE,
    HttpError,
    Unauthenticated,
    draining_error,
    problem_for,
    problem_response,
)
from fastness.server.refusals import is_counted, request_scope

_log = logging.getLogger("fastness.http")
_rejections = logging.getLogger("fastness.http.refusals")
_rejections.addFilter(RateLimitFilter(per_second=20))  # Malformed requests must not fill the disk with log lines.
_WARNING_STATUSES: Final = frozenset((400, 408, 411, 413, 414, 415, 431))  # A correct client never gets these.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_OTHER_ORIGINS: Final = ("cross-site", "same-site")  # Another port of this host is "same-site", but another program.
_CONDITIONS: Final = ("if-match", "if-none-match")
MCP_PATH: Final = "/mcp"


class HttpMiddleware:
    """Wraps the router: correlation ids, rejection while draining, cross-origin checks, and problem responses."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_headers = Headers(scope=scope)
        correlation_id = correlation_id_of(request_headers)
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        with correlation_scope(correlation_id), tracing.caused_by(request_headers), request_scope():
            await self._answer(scope, receive, send, request_headers, correlation_id)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers, correlation_id: str
    ) -> None:
        started, unread = False, True

        async def track_body() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _add_headers(message, request_headers, correlation_id)
            await send(message)

        try:
            self._check(scope, request_headers)
            await self.app(scope, track_body, send_with_headers)
        except ClientDisconnect:
            return
        except Exception as error:
            _log_error(error, scope)
            if started:
                return  # The server closes the connection, so that a partial response is not taken for a complete one.
            conditional = any(name in request_headers for name in _CONDITIONS)
            problem, headers = problem_for(error, correlation_id, conditional=conditional)
            if not is_counted():
                self._context.count_reject(problem.code)
            if unread and problem.status == TOO_LARGE:
                headers["Connection"] = "close"
                await problem_response(problem, headers, request_headers)(
                    scope, receive, linger(receive, send_with_headers)
                )
            else:
                await problem_response(problem, headers, request_headers)(scope, receive, send_with_headers)

    def _check(self, scope: Scope, request_headers: Headers) -> None:
        if self._context.draining and _is_for_programs(scope):
            raise draining_error()
        if is_cross_origin(request_headers) and not _is_followed_link(scope, request_headers):
            raise HttpError(
                403, "foreign_origin", "Web pages of other origins may not call this server; call it from a program"
            )


def linger(receive: Receive, send: Send) -> Send:
    """A `send` that reads and discards the rest of the request body before it completes the response.

    Closing a connection while the client still sends resets it, and the client would not get the response.
    """

    async def send_and_linger(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)
        if message["type"] != "http.response.body" or message.get("more_body"):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})

    return send_and_linger


def is_cross_origin(request_headers: Headers) -> bool:
    """Whether a web page of another origin sent the request.

    A server on a loopback address needs no token, so such pages must be rejected. Browsers send no `Origin` for
    embedded resources such as images, but they send `Sec-Fetch-Site`.
    """
    origin = request_headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] != request_headers.get("host")
    return request_headers.get("sec-fetch-site") in _OTHER_ORIGINS


def _is_followed_link(scope: Scope, request_headers: Headers) -> bool:
    """Whether a user followed a link from another site to a page. `/v1` and `/mcp` are excluded, because some of their
    GET requests have effects."""
    return (
        "origin" not in request_headers
        and request_headers.get("sec-fetch-dest") == "document"
        and not _is_for_programs(scope)
    )


def _is_for_programs(scope: Scope) -> bool:
    """Whether a request is a call; others get pages, files, metadata or health."""
    path: str = scope["path"]
    return path.startswith("/v1/") or path == MCP_PATH


def authenticate_request(context: ServerContext, request_headers: Headers, client: str) -> Authorizer:
    """The authorizer of the caller that sent these headers."""
    try:
        return context.authenticator.authenticate(request_headers, client)
    except NotAllowed as error:
        raise Unauthenticated(error) from None


def _add_headers(message: Message, request_headers: Headers, correlation_id: str) -> None:
    headers = MutableHeaders(scope=message)
    headers.setdefault("X-Correlation-Id", correlation_id)
    headers.setdefault("X-Content-Type-Options", "nosniff")
    trace = request_headers.get("traceparent", "")
    if _TRACEPARENT.match(trace):
        headers["traceparent"] = trace


def _log_error(error: Exception, scope: Scope) -> None:
    where = f"{scope['method']} {scope['path'][:200]!r}"
    if isinstance(error, Corrupt):
        _log.error("%s: %s: %s", where, error.code, error)
    elif isinstance(error, FastnessError | HttpError | Unauthenticated | HTTPException):
        status = problem_for(error, "")[0].status
        _rejections.log(
            logging.WARNING if status in _WARNING_STATUSES else logging.DEBUG,
            "refused: %s: %s %s",
            where,
            status,
            error,
        )
    else:
        _log.error("%s failed", where, exc_info=error)
