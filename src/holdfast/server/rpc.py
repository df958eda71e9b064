"""JSON-RPC 2.0: `agent.ping`, `agent.capabilities.get` and `agent.data.push`, whatever door a frame came through.

    frame ──► one call, or a batch of them ──► each answered by itself ──► one frame, or none if all were notifications

Who pushes is whoever was authenticated: the name of a token, or the agent of a relay's connection. Only where nobody
is, on a loopback address without tokens, a call is believed when it says who it is `from`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.errors import (
    Backend,
    Busy,
    Closed,
    Conflict,
    HoldfastError,
    InvalidArgument,
    NotAllowed,
    PayloadTooLarge,
    RateLimited,
    SenderBlocked,
    Validation,
)
from holdfast.limits import PUSH_PAYLOAD_BYTES_MAX, RPC_BATCH_MAX, RPC_BYTES_MAX
from holdfast.names import UNIVERSE, checked_agent
from holdfast.plane import pushes
from holdfast.server.authorization import Anybody, Guard
from holdfast.server.logs import Sparing
from holdfast.wire.ingress import NewPush, Pushed
from holdfast.wire.mail import NewMail, SendMail
from holdfast.wire.problems import RETRY_AFTER_SECONDS
from holdfast.wire.requests import Request
from holdfast.wire.rpc import (
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

_log = logging.getLogger("holdfast.rpc")
_log.addFilter(Sparing(per_second=20))  # Bad calls are others' to make.

PROTOCOL: Final = 1
_MISSING: Final = object()
# The first family that an error belongs to decides.
_CODES: Final[tuple[tuple[type[HoldfastError], RpcCode], ...]] = (
    (RateLimited, RpcCode.RATE_LIMITED),
    (PayloadTooLarge, RpcCode.PAYLOAD_TOO_LARGE),
    (SenderBlocked, RpcCode.UNAUTHORIZED),
    (NotAllowed, RpcCode.METHOD_NOT_ALLOWED),
    (Validation, RpcCode.INVALID_PARAMS),
    (Busy, RpcCode.BUSY),
    (Closed, RpcCode.BUSY),
    (Conflict, RpcCode.BUSY),
    (Backend, RpcCode.BUSY),
)

Reply = RpcResult | RpcFailure
Allow = Callable[[Request[Any]], None]  # Raises if the caller may not ask for this.
encode = msgspec.json.Encoder().encode


class Caller(NamedTuple):
    """Who calls. `agent` is None where nobody was authenticated."""

    agent: str | None
    universe: str = UNIVERSE  # Of what they push to, if nothing else is said.
    roams: bool = False  # They may name another one.
    allow: Allow | None = None


def caller_of(guard: Guard, universe: str) -> Caller:
    """Whoever came in past a guard: by its token's name, or as nobody in particular."""
    agent = None if isinstance(guard, Anybody) else getattr(guard, "holder", guard.name)
    return Caller(agent, universe, True, guard.allow)


class Refused(Exception):
    """A call is refused, by a code that no error of the plane stands for."""

    def __init__(self, code: RpcCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Rpc:
    """Answers the calls of agents."""

    def __init__(self, transport: Any, *, agent: str | None = None) -> None:
        """`agent` receives what is pushed to nobody in particular."""
        self._transport = transport
        self._agent = agent
        self._methods: Mapping[str, Callable[[Caller, Any], Awaitable[Any]]] = {
            "agent.ping": self._ping,
            "agent.capabilities.get": self._capabilities,
            "agent.data.push": self._push,
        }

    async def answer(self, address: str, data: bytes, allow: Allow | None = None) -> bytes | None:
        """The answer to a frame of an authenticated agent, `agent@universe`; None if there is none to give.

        `allow` is asked whether the agent may send mail, which is what a push becomes.
        """
        agent, _, universe = address.partition("@")
        replied = await self.respond(Caller(agent, universe or UNIVERSE, False, allow), data)
        return None if replied is None else encode(replied)

    async def respond(self, caller: Caller, data: bytes) -> Reply | list[Reply] | None:
        """The answer to a frame, before it is encoded."""
        if len(data) > RPC_BYTES_MAX:
            return _failure(None, RpcCode.PAYLOAD_TOO_LARGE, f"A request has at most {RPC_BYTES_MAX} bytes; split it")
        try:
            given = msgspec.json.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _failure(None, RpcCode.PARSE, f"This is not JSON ({error}); encode it again")
        if not isinstance(given, list):
            return await self._respond(caller, given)
        if not 0 < len(given) <= RPC_BATCH_MAX:
            return _failure(None, RpcCode.INVALID_REQUEST, f"A batch has 1 to {RPC_BATCH_MAX} calls, not {len(given)}")
        replies = await asyncio.gather(*(self._respond(caller, each) for each in given))
        return [reply for reply in replies if reply is not None] or None

    async def _respond(self, caller: Caller, given: Any) -> Reply | None:
        id = given.get("id", _MISSING) if isinstance(given, dict) else None
        if id is not _MISSING and (id.__class__ is bool or not isinstance(id, str | int | float | None)):
            return _failure(None, RpcCode.INVALID_REQUEST, "An id is text, a number or null; give it one")
        fault = _fault(given)
        if fault is not None:
            return _failure(None if id is _MISSING else id, RpcCode.INVALID_REQUEST, fault)
        try:
            result = await self._call(caller, given["method"], given.get("params"))
        except Refused as error:
            reply: Reply = _failure(id, error.code, str(error))
        except HoldfastError as error:
            reply = _failure_of(id, error)
        except Exception as error:
            _log.error("%s failed in a way that nobody expected", given["method"][:80], exc_info=error)
            reply = _failure(id, RpcCode.INTERNAL, "The server failed; its log says how")
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
            raise Refused(RpcCode.METHOD_NOT_FOUND, f"There is no method {name[:80]!r}; it knows {known}")
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
            raise InvalidArgument(f"These are no parameters of agent.data.push: {error}") from None
        to = new.to or self._agent
        if to is None:
            raise InvalidArgument("to is required: name the agent, or one in the server's settings (ingress_agent)")
        universe = to.partition("@")[2] if "@" in to and caller.roams else caller.universe
        sender = _sender(caller, new, universe)
        if caller.allow is not None:
            _check(caller.allow, SendMail(sender, [NewMail(to)], universe=universe))
        return await pushes.push(self._transport, sender, to, new, universe=universe)


def _sender(caller: Caller, new: NewPush, universe: str) -> str:
    if caller.agent is None:
        return new.sender or Anybody.name
    if new.sender is not None and checked_agent(new.sender, universe) != caller.agent.lower():
        raise Refused(RpcCode.PEER_ID_MISMATCH, f"You are {caller.agent}, not {new.sender[:128]!r}; leave `from` out")
    return caller.agent


def _check(allow: Allow, request: SendMail) -> None:
    try:
        allow(request)
    except Busy as error:  # A token has a rate of its own.
        raise RateLimited(str(error)) from error


def _fault(given: Any) -> str | None:
    """What is wrong with a call, in words; None if it is one."""
    if not isinstance(given, dict):
        return "A call is an object with jsonrpc, method, params and id"
    if given.get("jsonrpc") != VERSION:
        return f'jsonrpc is "{VERSION}"; say so'
    if not isinstance(given.get("method"), str):
        return "method is the name of one, as in agent.ping"
    if not isinstance(given.get("params", {}), dict | list):
        return "params are an object or a list"
    return None


def _failure_of(id: Any, error: HoldfastError) -> RpcFailure:
    code = next((code for family, code in _CODES if isinstance(error, family)), RpcCode.INTERNAL)
    again = code in (RpcCode.BUSY, RpcCode.RATE_LIMITED)
    return _failure(id, code, str(error), error.code, RETRY_AFTER_SECONDS if again else None)


def _failure(
    id: Any, code: RpcCode, details: str, reason: str | None = None, retry_after_seconds: float | None = None
) -> RpcFailure:
    data = RpcErrorData(details, reason, retry_after_seconds)
    return RpcFailure(id=id, error=RpcError(code, code.symbol, data))
