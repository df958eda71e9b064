"""Serves `/mcp`: authenticates every request, then leaves it to the session manager of the MCP SDK.

    request ──► token ──► universe ──► body within its bounds ──► session manager ──► handlers, with the caller

Clients of revision 2025-11-25 open a session, which lives in the memory of this server and belongs to the token that
opened it. Clients of 2026-07-28 send independent requests. Neither keeps anything in a session that must not be lost.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, Self

import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import INVALID_PARAMS
from starlette.datastructures import MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fastness import AsyncPlane
from fastness.errors import NotAllowed, QuotaExceeded, RetryAdvice
from fastness.limits import (
    MCP_BODY_BYTES_MAX,
    MCP_SESSION_IDLE_SECONDS,
    MCP_SESSIONS_MAX,
    MCP_SESSIONS_PER_TOKEN_MAX,
    MCP_WATCH_SECONDS,
)
from fastness.mcp.caller import Caller
from fastness.mcp.changes import Changes
from fastness.mcp.errors import INVALID_ID, data_of, has_invalid_id
from fastness.mcp.server import RequestContext as McpContext
from fastness.mcp.server import make_server
from fastness.mcp.subscriptions import Subscriptions
from fastness.mcp.tools import TOOLS
from fastness.names import UNIVERSE, checked_name
from fastness.plane.tokens import Token
from fastness.runtime.quotas import Quotas
from fastness.server import health
from fastness.server.authorization import AllowAll, Authorizer
from fastness.server.context import ServerContext
from fastness.server.http.context import HttpContext
from fastness.server.http.limits import HttpLimits
from fastness.server.http.middleware import MCP_PATH, authenticate_request
from fastness.server.http.request_context import RequestContext
from fastness.server.logs import RateLimitFilter
from fastness.server.mcp.metadata import ResourceMetadata
from fastness.server.mcp.options import McpOptions
from fastness.server.mcp.transport import AuthorizedTransport
from fastness.server.mcp.watches import WatchHint
from fastness.server.problems import JSON, HttpError, Unauthenticated
from fastness.wire.permissions import EVERYTHING, covers, covers_queue, covers_universes

_refusals = logging.getLogger("fastness.refusals")  # Its filter bounds the lines of token guessing.
# Clients can send any number of requests with unknown or foreign sessions.
logging.getLogger("mcp.server.streamable_http_manager").addFilter(RateLimitFilter(per_second=20))

_SESSION_HEADER: Final = "mcp-session-id"
_UNIVERSES_CACHED: Final = 256  # Planes for what the MCP server itself keeps in a universe.
_INITIALIZE: Final = "initialize"  # Opens a session.
_METHODS: Final = (_INITIALIZE, "server/discover", "notifications/initialized", "notifications/cancelled")
_LISTEN: Final = "subscriptions/listen"
_END_SECONDS: Final = 10.0  # How often sessions are looked for that have expired.


class _Call(msgspec.Struct):
    """What is read of a JSON-RPC request before the SDK decodes it."""

    method: str = ""
    id: Any = msgspec.UNSET
    params: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The call; an empty one if the body is invalid, for which the SDK has the answer."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return cls()


class _Connection:
    """Counts against the quota of a universe: while a request without a session is answered, or for a session."""

    def __init__(self, quotas: Quotas, universe: str | None) -> None:
        """Raises QuotaExceeded if the universe has as many connections as its quota allows."""
        self._quotas = quotas
        self._universe: str | None = None
        self.is_of_session = False
        if universe is not None:
            quotas.connect(universe)
            self._universe = universe

    def close(self) -> None:
        if self._universe is not None:
            self._quotas.disconnect(self._universe)
            self._universe = None


class _Session:
    """A session of revision 2025-11-25."""

    def __init__(self, authorizer: Authorizer, user: AuthenticatedUser | None, connection: _Connection) -> None:
        self.owner = authorizer.name
        self.user = user
        self.connection = connection
        connection.is_of_session = True
        self.requests = 0  # In flight, with the stream of notifications.
        self.has_stream = False
        self.idle_since = time.monotonic()

    @contextmanager
    def serving(self, *, stream: bool) -> Iterator[None]:
        """Answer one request of the session inside the block."""
        self.requests += 1
        before, self.has_stream = self.has_stream, self.has_stream or stream
        try:
            yield
        finally:
            self.requests -= 1
            self.has_stream = before if stream else self.has_stream
            self.idle_since = time.monotonic()

    @property
    def has_expired(self) -> bool:
        """Whether the manager has ended it, or is about to."""
        return not self.requests and time.monotonic() - self.idle_since > MCP_SESSION_IDLE_SECONDS


class McpEndpoint:
    """`/mcp` of one server."""

    def __init__(self, context: ServerContext, limits: HttpLimits, options: McpOptions) -> None:
        bytes_max = min(limits.body_bytes_max, MCP_BODY_BYTES_MAX)
        self._context = context
        self._http = HttpContext(context, msgspec.structs.replace(limits, body_bytes_max=bytes_max))
        self._agent = options.agent
        self._verbs = {tool.name: tool.verbs for tool in TOOLS}
        self.metadata = ResourceMetadata(options.url, options.authorization_servers, chain(*self._verbs.values()))
        self._sessions: dict[str, _Session] = {}
        self.requests: Counter[str] = Counter()  # By method.
        self._quotas = context.transport.services.quotas
        database = context.transport.services.database
        self._changes = Changes(partial(WatchHint, database), seconds=MCP_WATCH_SECONDS)
        self._subscriptions = Subscriptions(self._changes, is_open=self._is_open)
        self.server = make_server(_identify, features=[self._subscriptions.install], correlation_id=_correlation_id_of)
        self._own_plane = lru_cache(_UNIVERSES_CACHED)(partial(self._plane, AllowAll()))
        self._manager = StreamableHTTPSessionManager(
            self.server,
            session_idle_timeout=MCP_SESSION_IDLE_SECONDS,
            max_sessions=MCP_SESSIONS_MAX,
            max_request_body_size=bytes_max,
        )

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return sum(not session.has_expired for session in self._sessions.values())

    @property
    def streams(self) -> int:
        """The number of open streams of notifications: of sessions, and of clients without one."""
        return self._subscriptions.streams + sum(session.has_stream for session in self._sessions.values())

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve inside the block. An endpoint runs once."""
        try:
            async with self._manager.run():
                ending = asyncio.get_running_loop().create_task(self._end_regularly())
                try:
                    yield
                finally:
                    ending.cancel()
        finally:
            self._changes.close()

    def drain(self) -> None:
        """End the streams of clients without a session, with their last message. New requests are refused already."""
        self._subscriptions.close()

    async def close(self) -> None:
        """End all sessions, and with them the streams of their notifications."""
        self.drain()
        for id in list(self._sessions):
            await self._end(id)

    async def close_sessions_of(self, token_id: str) -> None:
        """End the sessions and streams of a token that became unusable."""
        self._subscriptions.check_callers()
        for id, session in list(self._sessions.items()):
            if session.owner == token_id:
                await self._end(id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        request = HttpRequest(scope, receive)
        authorizer = self._authenticate(request)
        try:
            caller = self._caller(request, authorizer)
        except NotAllowed as error:
            self._refuse(request, authorizer, str(error), asked="universe")
            challenge = self.metadata.challenge(request, error="insufficient_scope")
            raise HttpError(403, error.code, str(error), headers={"WWW-Authenticate": challenge}) from None
        scope["state"]["mcp_caller"] = caller
        user = _user_of(authorizer)
        if user is not None:
            scope["user"] = user  # The manager binds a session to it: with another token it is not found.
        is_stream, opens = request.method == "GET", False
        if request.method == "POST":
            body = await RequestContext(self._http, request, authorizer, JSON).body()
            call = _Call.read(body)
            self.requests[call.method if self._is_known(call.method) else "other"] += 1
            refusal = _id_refusal(call) or self._scope_refusal(request, authorizer, caller, call)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            if call.method == _INITIALIZE:
                await self._check_sessions(authorizer)
            receive = _replayed(body, receive)
            is_stream = call.method == _LISTEN
            opens = call.method in (_INITIALIZE, _LISTEN) and _SESSION_HEADER not in request.headers
        connection = await self._connect(authorizer if opens else None)
        try:
            with ExitStack() as stack:
                if is_stream:
                    stack.enter_context(health.waiting())  # For as long as the client reads: a shutdown does not wait.
                await self._answer(request, authorizer, receive, send, connection)
        finally:
            if not connection.is_of_session:
                connection.close()

    async def _connect(self, authorizer: Authorizer | None) -> _Connection:
        """Count a connection against the quota of the universe that the caller's token is limited to.

        Raises:
            QuotaExceeded: the universe has as many connections as its quota allows.
        """
        universe = None if authorizer is None else authorizer.only_universe
        try:
            return _Connection(self._quotas, universe)
        except QuotaExceeded:
            await self._end_expired()
            return _Connection(self._quotas, universe)

    async def _answer(
        self, request: HttpRequest, authorizer: Authorizer, receive: Receive, send: Send, connection: _Connection
    ) -> None:
        id = request.headers.get(_SESSION_HEADER)
        session = self._sessions.get(id or "")
        if session is not None and session.has_expired:
            await self._end(id or "")  # The manager has a timer of its own, which may fire later.
            session = None

        async def send_and_register(message: Message) -> None:
            if message["type"] == "http.response.start" and id is None and message["status"] < 400:
                opened = MutableHeaders(scope=message).get(_SESSION_HEADER)
                if opened is not None:
                    self._sessions[opened] = _Session(authorizer, request.scope.get("user"), connection)
            await send(message)

        if session is None or session.owner != authorizer.name:
            await self._manager.handle_request(request.scope, receive, send_and_register)
            return
        with session.serving(stream=request.method == "GET"):
            await self._manager.handle_request(request.scope, receive, send)
        if request.method == "DELETE":
            self._forget(id or "")

    def _is_known(self, method: str) -> bool:
        return method in _METHODS or self.server.get_request_handler(method) is not None

    def _authenticate(self, request: HttpRequest) -> Authorizer:
        try:
            return authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        except Unauthenticated as error:
            error.challenge = self.metadata.challenge(request)
            raise

    def _caller(self, request: HttpRequest, authorizer: Authorizer) -> Caller:
        """The caller, by its token.

        Raises:
            NotAllowed: the token is not for the universe.
        """
        token = authorizer.token
        universe = _universe_of(request, token)
        if token is not None and not covers_universes(token.universes, [universe]):
            raise NotAllowed(
                f"The token {token.name} is not for the universe {universe[:128]}; name one of its own: "
                f"{MCP_PATH}?universe={token.universes[0]}"
            )
        return Caller(
            plane=self._plane(authorizer, universe),
            agent=authorizer.holder or self._agent,
            is_allowed=partial(_allows, authorizer),
            may_use_queue=partial(covers_queue, [] if token is None else token.queues),
            records=self._own_plane(universe),
        )

    def _plane(self, authorizer: Authorizer, universe: str) -> AsyncPlane:
        transport = AuthorizedTransport(self._context.transport, authorizer, self._http.wait_for_drain)
        return AsyncPlane(transport, universe)

    async def _check_sessions(self, authorizer: Authorizer) -> None:
        """Refuse another session if the caller has as many as one token may have."""
        if len(self._sessions) < MCP_SESSIONS_PER_TOKEN_MAX:
            return
        await self._end_expired()
        if sum(session.owner == authorizer.name for session in self._sessions.values()) >= MCP_SESSIONS_PER_TOKEN_MAX:
            detail = f"{MCP_SESSIONS_PER_TOKEN_MAX} sessions are open, the most of one token; end one with DELETE /mcp"
            raise HttpError(503, "mcp_busy", detail, retry=RetryAdvice.LATER)

    async def _end_expired(self) -> None:
        for id, session in list(self._sessions.items()):
            if session.has_expired:
                await self._end(id)

    async def _end_regularly(self) -> None:
        while True:
            await asyncio.sleep(_END_SECONDS)
            await self._end_expired()  # They must not count against quotas.

    def _forget(self, id: str) -> _Session | None:
        self._subscriptions.end_session(id)
        session = self._sessions.pop(id, None)
        if session is not None:
            session.connection.close()
        return session

    def _is_open(self, id: str) -> bool:
        session = self._sessions.get(id)
        return session is not None and not session.has_expired

    async def _end(self, id: str) -> None:
        """End a session as its own client would, which closes its streams."""
        session = self._forget(id)
        if session is None:
            return
        headers = [(_SESSION_HEADER.encode(), id.encode())]
        scope: Scope = {"type": "http", "method": "DELETE", "path": MCP_PATH, "query_string": b"", "headers": headers}
        if session.user is not None:
            scope["user"] = session.user
        await self._manager.handle_request(scope, _no_body, _ignore)

    def _refuse(self, request: HttpRequest, authorizer: Authorizer, message: str, *, asked: str) -> None:
        """Count and log a refused request."""
        self._context.count_reject(NotAllowed.code)
        client = request.client.host if request.client else ""
        about = {"code": NotAllowed.code, "reason": NotAllowed.code, "token": authorizer.name}
        _refusals.warning("refused: %s", message, extra={**about, "client": client, "asked": asked})

    def _scope_refusal(
        self, request: HttpRequest, authorizer: Authorizer, caller: Caller, call: _Call
    ) -> Response | None:
        """The refusal of a tool call that the token does not allow; None if the call may go on.

        The tools of a token do not include it, and the plane would refuse it too. The status tells a client which
        scopes to ask for.
        """
        name = (call.params or {}).get("name")
        if call.method != "tools/call" or not isinstance(name, str):
            return None
        missing = [verb for verb in self._verbs.get(name, ()) if not caller.is_allowed(verb)]
        if not missing:
            return None
        scope = " ".join(missing)
        message = f"{name} needs a token that allows {scope}; create one with --allow {','.join(missing)}"
        self._refuse(request, authorizer, message, asked=scope)
        data = {**data_of(NotAllowed(message)), "scope": scope}
        error = {"code": INVALID_PARAMS, "message": message, "data": data}
        challenge = self.metadata.challenge(request, error="insufficient_scope", scope=scope)
        id = None if call.id is msgspec.UNSET else call.id
        content = msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})
        return Response(content, 403, {"WWW-Authenticate": challenge, "Cache-Control": "no-store"}, JSON)


def _id_refusal(call: _Call) -> Response | None:
    """The refusal of a message whose id is of another type than ids are; None if it may go on."""
    if not has_invalid_id(call.id):
        return None
    return Response(INVALID_ID, 400, {"Cache-Control": "no-store"}, JSON)


def _identify(context: McpContext) -> Caller:
    """The caller of an MCP request: that of the HTTP request which carried it."""
    request: Any = context.request
    caller: Caller = request.state.mcp_caller
    return caller


def _correlation_id_of(context: McpContext) -> str:
    request: Any = context.request
    found: str = request.state.correlation_id
    return found


def _allows(authorizer: Authorizer, verb: str) -> bool:
    """Whether the caller's token allows a verb. Raises NotAllowed if it was revoked or has expired."""
    token = authorizer.token
    return token is None or covers(token.verbs, verb)


def _universe_of(request: HttpRequest, token: Token | None) -> str:
    """The universe that the URL or a header names, or that of a token which has only one."""
    for given in (request.query_params.get("universe"), request.headers.get("x-fastness-universe")):
        if given is not None:
            return checked_name("universe", given)  # An empty name is an error, too.
    if token is not None and len(token.universes) == 1 and token.universes[0] != EVERYTHING:
        return token.universes[0]
    return UNIVERSE


def _user_of(authorizer: Authorizer) -> AuthenticatedUser | None:
    """The owner of sessions, for the manager; None without tokens. The token itself is not passed on."""
    token = authorizer.token
    if token is None:
        return None
    return AuthenticatedUser(
        AccessToken(token="-", client_id=authorizer.name, subject=token.name, scopes=list(token.verbs))
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body which was read already, and then waits for the disconnect."""
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore(message: Message) -> None:
    del message
