"""JSON-RPC 2.0: `agent.ping`, `agent.capabilities.get` and `agent.data.push`, over HTTP and over the relay.

    frame ──► one call, or a batch of calls ──► each executed by itself ──► one frame, or none if all are notifications

The sender of a push is the authenticated caller: the name of a token, or the agent of a relay connection. Only on a
loopback address without tokens is the `from` of a call trusted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from fastness.errors import (
    Backend,
    Busy,
    Closed,
    Conflict,
    FastnessError,
    InvalidArgument,
    NotAllowed,
    PayloadTooLarge,
    RateLimited,
    SenderBlocked,
    SenderMismatch,
    Validation,
)
from fastness.limits import PUSH_PAYLOAD_BYTES_MAX, RPC_BATCH_MAX, RPC_BYTES_MAX
from fastness.names import UNIVERSE
from fastness.plane.ingress import push_data
from fastness.runtime.relay.session import Authorize
from fastness.server.authorization import Authorizer, push_sender
from fastness.server.logs import RateLimitFilter
from fastness.server.transport import ServerTransport
from fastness.wire.ingress import ANYBODY, NewPush, Pushed
from fastness.wire.mail import NewMail, SendMail
from fastness.wire.problems import RETRY_AFTER_SECONDS, retry_after_seconds
from fastness.wire.rpc import (
    VERSION,
    Capabilities,
    Ping,
    PushLimits,
    RpcCode,
    RpcError,
    RpcErrorData,
    RpcFailure,
    RpcResult,
)
from fastness.wire.type_checks import refusal_of

_log = logging.getLogger("fastness.rpc")
_log.addFilter(RateLimitFilter(per_second=20))  # Clients can send any number of bad calls.

PROTOCOL: Final = 1
_MISSING: Final = object()
# The first matching class decides.
_CODES: Final[tuple[tuple[type[FastnessError], RpcCode], ...]] = (
    (RateLimited, RpcCode.RATE_LIMITED),
    (PayloadTooLarge, RpcCode.PAYLOAD_TOO_LARGE),
    (SenderBlocked, RpcCode.UNAUTHORIZED),
    (SenderMismatch, RpcCode.PEER_ID_MISMATCH),
    (NotAllowed, RpcCode.METHOD_NOT_ALLOWED),
    (Validation, RpcCode.INVALID_PARAMS),
    (Busy, RpcCode.BUSY),
    (Closed, RpcCode.BUSY),
    (Conflict, RpcCode.BUSY),
    (Backend, RpcCode.BUSY),
)

Reply = RpcResult | RpcFailure
encode = msgspec.json.Encoder().encode


class Caller(NamedTuple):
    """The caller of a request. `agent` is None if the caller was not authenticated."""

    agent: str | None
    universe: str = UNIVERSE  # Of recipients without a universe.
    may_choose_universe: bool = False  # Recipients may name another universe.
    authorize: Authorize | None = None


def caller_of(authorizer: Authorizer, universe: str) -> Caller:
    """The caller by its token's name; without tokens, a caller without a name."""
    return Caller(authorizer.holder, universe, True, authorizer.authorize)


class RpcRefused(Exception):
    """A call is refused with a code that no error class has."""

    def __init__(self, code: RpcCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Rpc:
    """Executes JSON-RPC requests."""

    def __init__(self, transport: ServerTransport, *, agent: str | None = None) -> None:
        """`agent` receives pushes that name no recipient."""
        self._transport = transport
        self._agent = agent
        self._methods: Mapping[str, Callable[[Caller, Any], Awaitable[Any]]] = {
            "agent.ping": self._ping,
            "agent.capabilities.get": self._capabilities,
            "agent.data.push": self._push,
        }

    async def answer(self, address: str, data: bytes, authorize: Authorize | None = None) -> bytes | None:
        """The response to a frame of an authenticated agent, `agent@universe`; None if all calls are notifications.

        `authorize` checks whether the agent may send mail, because a push is stored as mail.
        """
        agent, _, universe = address.partition("@")
        response = await self.respond(Caller(agent, universe or UNIVERSE, False, authorize), data)
        return None if response is None else encode(response)

    async def respond(self, caller: Caller, data: bytes) -> Reply | list[Reply] | None:
        """The response to a frame, before it is encoded."""
        if len(data) > RPC_BYTES_MAX:
            return _failure(None, RpcCode.PAYLOAD_TOO_LARGE, f"A request has at most {RPC_BYTES_MAX} bytes; split it")
        try:
            body = msgspec.json.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _failure(None, RpcCode.PARSE, f"The request is not valid JSON ({error})")
        if not isinstance(body, list):
            return await self._respond(caller, body)
        if not 0 < len(body) <= RPC_BATCH_MAX:
            return _failure(None, RpcCode.INVALID_REQUEST, f"A batch has 1 to {RPC_BATCH_MAX} calls, not {len(body)}")
        replies = await asyncio.gather(*(self._respond(caller, each) for each in body))
        return [reply for reply in replies if reply is not None] or None

    async def _respond(self, caller: Caller, call: Any) -> Reply | None:
        id = call.get("id", _MISSING) if isinstance(call, dict) else None
        if id is not _MISSING and (id.__class__ is bool or not isinstance(id, str | int | float | None)):
            return _failure(None, RpcCode.INVALID_REQUEST, "The id must be a string, a number or null")
        problem = _problem_of(call)
        if problem is not None:
            return _failure(None if id is _MISSING else id, RpcCode.INVALID_REQUEST, problem)
        try:
            result = await self._call(caller, call["method"], call.get("params"))
        except RpcRefused as error:
            reply: Reply = _failure(id, error.code, str(error))
        except FastnessError as error:
            reply = _failure_of(id, error)
        except Exception as error:
            _log.error("unexpected error in %s", call["method"][:80], exc_info=error)
            reply = _failure(id, RpcCode.INTERNAL, "Unexpected error in the server; see its log")
        else:
            reply = RpcResult(id=id, result=result)
        if id is not _MISSING:
            return reply
        if isinstance(reply, RpcFailure):
            _log.warning("a notification was refused: %s: %s", reply.error.message, reply.error.data.details)
        return None

    async def _call(self, caller: Caller, name: str, params: Any) -> Any:
        method = self._methods.get(name)
        if method is None:
            known = ", ".join(self._methods)
            raise RpcRefused(RpcCode.METHOD_NOT_FOUND, f"Unknown method {name[:80]!r}; known methods: {known}")
        return await method(caller, params)

    async def _ping(self, caller: Caller, params: Any) -> Ping:
        del caller, params
        return Ping(True, datetime.now(UTC).isoformat(timespec="milliseconds")[:-6] + "Z")

    async def _capabilities(self, caller: Caller, params: Any) -> Capabilities:
        del caller, params
        per_minute = self._transport.ingress.pushes_per_minute
        bounds = PushLimits(RPC_BYTES_MAX, RPC_BATCH_MAX, PUSH_PAYLOAD_BYTES_MAX, per_minute)
        return Capabilities(PROTOCOL, PROTOCOL, ["data.push.v1"], list(self._methods), bounds)

    async def _push(self, caller: Caller, params: Any) -> Pushed:
        try:
            new = msgspec.convert(params, NewPush)
        except msgspec.ValidationError as error:
            refusal = refusal_of(NewPush, params, plain=True)
            raise refusal or InvalidArgument(f"Invalid parameters of agent.data.push: {error}") from None
        to = new.to or self._agent
        if to is None:
            raise InvalidArgument("`to` is required: name the recipient, or set ingress_agent in the server's settings")
        universe = to.partition("@")[2] if "@" in to and caller.may_choose_universe else caller.universe
        sender = push_sender(caller.agent, new.sender, universe) or ANYBODY
        if caller.authorize is not None:
            _check(caller.authorize, SendMail(sender, [NewMail(to)], universe=universe))
        return await push_data(self._transport, sender, to, new, universe=universe)


def _check(authorize: Authorize, request: SendMail) -> None:
    try:
        authorize(request)
    except Busy as error:  # The rate limit of a token.
        raise RateLimited(str(error), retry_after_seconds=error.retry_after_seconds) from error


def _problem_of(call: Any) -> str | None:
    """A description of what is wrong with a call; None if it is valid."""
    if not isinstance(call, dict):
        return "A call must be an object with jsonrpc, method, params and id"
    if call.get("jsonrpc") != VERSION:
        return f'jsonrpc must be "{VERSION}"'
    if not isinstance(call.get("method"), str):
        return "method must be a string, as in agent.ping"
    if not isinstance(call.get("params", {}), dict | list):
        return "params must be an object or a list"
    return None


def _failure_of(id: Any, error: FastnessError) -> RpcFailure:
    code = next((code for family, code in _CODES if isinstance(error, family)), RpcCode.INTERNAL)
    can_retry = code in (RpcCode.BUSY, RpcCode.RATE_LIMITED)
    seconds = (retry_after_seconds(error) or RETRY_AFTER_SECONDS) if can_retry else None
    return _failure(id, code, str(error), error.code, seconds)


def _failure(
    id: Any, code: RpcCode, details: str, reason: str | None = None, retry_after_seconds: float | None = None
) -> RpcFailure:
    data = RpcErrorData(details, reason, retry_after_seconds)
    return RpcFailure(id=id, error=RpcError(code, code.symbol, data))
