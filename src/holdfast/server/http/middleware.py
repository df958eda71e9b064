"""The edge: what holds for every HTTP request, whatever endpoint it is for.

Every answer carries an `X-Correlation-Id`, and so does every line that is logged for it; whatever is raised becomes a
problem; no answer shows a stack trace.
"""

import asyncio
import logging
import re
from contextlib import suppress
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import Corrupt, HoldfastError, NotAllowed
from holdfast.server import tracing
from holdfast.server.doors import Doors
from holdfast.server.http.limits import LINGER_SECONDS
from holdfast.server.http.problems import TOO_LARGE, Refusal, Unauthenticated, draining, problem_for, problem_response
from holdfast.server.logs import Sparing, correlated, correlation_id_of

_log = logging.getLogger("holdfast.http")
_refusals = logging.getLogger("holdfast.http.refusals")
_refusals.addFilter(Sparing(per_second=20))  # Whoever sends nonsense must not fill the disk with what we say about it.
_WRONG: Final = frozenset((400, 408, 411, 413, 414, 415, 431))  # No program that works sends what is answered so.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_ELSEWHERE: Final = ("cross-site", "same-site")  # Another port is another program, on the same site.
_CONDITIONS: Final = ("if-match", "if-none-match")


class Edge:
    """Wraps the router: correlation ids, draining, foreign origins, and problems."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self.app = app
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        correlation_id = correlation_id_of(asked)
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        with correlated(correlation_id), tracing.caused_by(asked):
            await self._answer(scope, receive, send, asked, correlation_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, asked: Headers, correlation_id: str) -> None:
        started, unread = False, True

        async def receive_noted() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _mark(message, asked, correlation_id)
            await send(message)

        try:
            self._refuse(scope, asked)
            await self.app(scope, receive_noted, send_marked)
        except ClientDisconnect:
            return
        except Exception as error:
            _note(error, scope)
            if started:
                return  # The server cuts the connection, so that nobody takes a part for the whole.
            conditional = any(name in asked for name in _CONDITIONS)
            problem, headers = problem_for(error, correlation_id, conditional=conditional)
            if unread and problem.status == TOO_LARGE:
                headers["Connection"] = "close"
                await problem_response(problem, headers, asked)(scope, receive, _lingering(receive, send_marked))
            else:
                await problem_response(problem, headers, asked)(scope, receive, send_marked)

    def _refuse(self, scope: Scope, asked: Headers) -> None:
        if self._doors.draining and scope["path"].startswith("/v1/"):
            raise draining()
        if is_foreign(asked) and not _is_followed_link(scope, asked):
            raise Refusal(403, "foreign_origin", "A page of another site may not call this server; use a program")


def _lingering(receive: Receive, send: Send) -> Send:
    """Sends an answer and, before it ends, reads on for a moment and throws away what comes.

    A connection that is closed while its other end still sends is reset, and nobody there hears why.
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


def is_foreign(asked: Headers) -> bool:
    """Whether a page of another site is calling: a server on a loopback address asks for no token, so no page may.

    For what a page only shows, an image for instance, a browser names no origin. It says whether it is another one's.
    """
    origin = asked.get("origin")
    if origin is not None:
        return origin.partition("://")[2] != asked.get("host")
    return asked.get("sec-fetch-site") in _ELSEWHERE


def _is_followed_link(scope: Scope, asked: Headers) -> bool:
    """Whether somebody comes from another site to a page for people. Reading mail says that it was read, and does more
    than a link may."""
    return "origin" not in asked and asked.get("sec-fetch-dest") == "document" and not scope["path"].startswith("/v1/")


def admitted(doors: Doors, asked: Headers, client: str) -> Any:
    """The guard for whoever sent these headers."""
    try:
        return doors.guards.admit(asked, client)
    except NotAllowed as error:
        raise Unauthenticated(error) from None


def _mark(message: Message, asked: Headers, correlation_id: str) -> None:
    headers = MutableHeaders(scope=message)
    headers.setdefault("X-Correlation-Id", correlation_id)
    headers.setdefault("X-Content-Type-Options", "nosniff")
    trace = asked.get("traceparent", "")
    if _TRACEPARENT.match(trace):
        headers["traceparent"] = trace


def _note(error: Exception, scope: Scope) -> None:
    where = f"{scope['method']} {scope['path'][:200]!r}"
    if isinstance(error, Corrupt):
        _log.error("%s: %s: %s", where, error.code, error)
    elif isinstance(error, HoldfastError | Refusal | Unauthenticated | HTTPException):
        status = problem_for(error, "")[0].status
        _refusals.log(
            logging.WARNING if status in _WRONG else logging.DEBUG, "refused: %s: %s %s", where, status, error
        )
    else:
        _log.error("%s failed", where, exc_info=error)
