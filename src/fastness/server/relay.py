"""The relay, `/v1/relay`: a WebSocket over which agents written in any language send and receive mail.

    accepted ──► challenge ──► authenticate, before the timeout ──► welcome ──► frames, both ways ──► closed with a code

`runtime/relay/session.py` and `runtime/relay/hub.py` hold the state; `relay_auth.py` authenticates the agent; this
module handles the socket.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from fastness.errors import (
    BatchTooLarge,
    FastnessError,
    InvalidArgument,
    InvalidValue,
    NotAllowed,
    PayloadTooLarge,
    RetryAdvice,
)
from fastness.layers.mailboxes import Address
from fastness.limits import FRAME_BYTES_MAX, RELAY_AUTHENTICATE_SECONDS, RELAY_FRAMES_MAX
from fastness.runtime.relay.hub import Commit, RelayHub
from fastness.runtime.relay.session import NOT_ALLOWED, PROTOCOL_ERROR, STOPPING, TOO_BIG, TOO_SLOW, Authorize, Session
from fastness.server.logs import correlation_id
from fastness.server.relay_auth import AuthenticatedAgent, RelayAuthenticator
from fastness.server.sockets import BoundedSocket
from fastness.server.transport import ServerTransport
from fastness.server.websocket_reader import WebsocketReader
from fastness.wire.json_values import encode_json
from fastness.wire.relay import (
    NONCE_BYTES,
    PROTOCOL,
    Authenticate,
    Body,
    Challenge,
    Encoding,
    Error,
    Frame,
    OfAgent,
    Rpc,
    decode,
    encode,
    signed_bytes,
)
from fastness.wire.websocket_frames import BINARY, TEXT

_log = logging.getLogger("fastness.relay")
_CLOSE_SECONDS: Final = 5.0  # To send the last frames and the close frame.

HandleRpc = Callable[[str, bytes, Authorize | None], Awaitable[bytes | None]]  # Address, JSON-RPC request -> response.


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a relay."""

    host: str | None = None  # Host that agents sign; default: the address that they connected to.
    registration: Literal["open", "closed"] = "closed"  # Whether an unknown agent may register itself.
    rate_per_second: float = 0.0  # Mails of one sender; 0: unlimited.
    burst: int = 1
    authenticate_seconds: float = RELAY_AUTHENTICATE_SECONDS


class Relay:
    """All agents that are connected to a server."""

    def __init__(
        self,
        transport: ServerTransport,
        authenticator: RelayAuthenticator,
        commit: Commit,
        handle_rpc: HandleRpc,
        options: RelayOptions,
    ) -> None:
        """`commit` executes a batch of calls, `handle_rpc` a JSON-RPC request."""
        rate, burst = options.rate_per_second, options.burst
        self.hub = RelayHub(transport.services.database, commit, rate_per_second=rate, burst=burst)
        self.authenticator = authenticator
        self.handle_rpc = handle_rpc
        self.options = options
        self._quotas = transport.services.quotas
        self._universes: dict[Session, str] = {}  # Of those that count against a quota.
        self._callers: dict[Session, str] = {}  # The name of the token that each session authenticated with.

    def __len__(self) -> int:
        return len(self.hub.sessions)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it closes."""
        await receive()  # websocket.connect
        id = (correlation_id.get() or "").encode()
        await send({"type": "websocket.accept", "headers": [(b"x-correlation-id", id)] if id else []})
        with suppress(OSError):  # The connection is lost.
            await Connection(self, scope, receive, send).run()

    async def join(self, authenticated: AuthenticatedAgent, receipts_after: int | None) -> Session:
        """The session of an authenticated agent.

        Raises:
            QuotaExceeded: the universe has as many connections as its quota allows.
        """
        universe, agent, authorize, caller = authenticated
        # The server may not know yet that the agent's earlier connection is lost.
        self._quotas.connect(universe, replaces=Address(universe, agent) in self.hub.sessions)
        try:
            session = await self.hub.join(universe, agent, authorize, receipts_after=receipts_after)
        except BaseException:
            self._quotas.disconnect(universe)
            raise
        self._callers[session] = caller
        self._universes[session] = universe
        return session

    def leave(self, session: Session) -> None:
        """End a session whose connection has closed."""
        self._callers.pop(session, None)
        universe = self._universes.pop(session, None)
        if universe is not None:
            self._quotas.disconnect(universe)
        self.hub.leave(session)

    def close_sessions_of(self, caller: str) -> None:
        """Close the connections of a token that became unusable."""
        for session in [each for each, name in self._callers.items() if name == caller]:
            session.end(NOT_ALLOWED, "not_allowed")

    def drain(self) -> None:
        """Accept no more mail."""
        self.hub.drain()

    async def close(self) -> None:
        """Commit the pending requests of agents, and leave their mailboxes."""
        await self.hub.close()


class Connection:
    """One WebSocket of an agent."""

    def __init__(self, relay: Relay, scope: Scope, receive: Receive, send: Send) -> None:
        self._relay = relay
        self._receive = receive
        self._send = send
        self._socket = BoundedSocket.of(scope)
        self._client: str = (scope.get("client") or ("", 0))[0]
        self._host = relay.options.host or _host(scope)
        self._encoding: Encoding = "msgpack" if b"format=msgpack" in scope.get("query_string", b"") else "json"

    async def run(self) -> None:
        """Authenticate the agent, then exchange frames until either side closes."""
        session = await self._authenticate()
        if session is None:
            return
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(session))
        writing = loop.create_task(self._write(session))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.end(STOPPING, "gone")
            self._relay.leave(session)
            await _stop(reading, seconds=0)
            await _stop(writing, seconds=_CLOSE_SECONDS)

    async def _authenticate(self) -> Session | None:
        nonce, seconds = os.urandom(NONCE_BYTES), self._relay.options.authenticate_seconds
        await self._send_frames([Challenge(Body(nonce), self._host, PROTOCOL)])
        try:
            async with asyncio.timeout(seconds):
                frame = await self._first_frame()
                if frame is None:
                    return None
                proof = signed_bytes(self._host, nonce)
                authenticated = await self._relay.authenticator.authenticate(frame, proof, self._client)
                return await self._relay.join(authenticated, frame.receipts_after)
        except TimeoutError:
            late = NotAllowed(f"The challenge was not answered within {seconds:g} s; connect again")
            await self._refuse(late, TOO_SLOW)
        except InvalidMessage as error:
            await self._refuse(error.error, error.code)
        except NotAllowed as error:
            await self._refuse(error, NOT_ALLOWED)
        except FastnessError as error:
            await self._refuse(error, PROTOCOL_ERROR if error.retry is RetryAdvice.NEVER else STOPPING)
        return None

    async def _first_frame(self) -> Authenticate | None:
        message = await self._next_message()
        if message is None:
            return None
        frames = self._decode(message)
        if len(frames) != 1 or not isinstance(frames[0], Authenticate):
            detail = f": {frames[0].detail}" if frames and isinstance(frames[0], Error) else ""
            raise InvalidArgument(f"The first message must be a single authenticate frame{detail}")
        return frames[0]

    async def _read(self, session: Session) -> None:
        """Handle the agent's messages, while the session has capacity for them."""
        socket, handler = self._socket, MessageHandler(self, session)
        reader = None if socket is None else WebsocketReader(socket, handler, handler.handle)
        if socket is not None:
            opcode = TEXT if self._encoding == "json" else BINARY
            session.write = lambda frames: socket.write_now(encode(frames, self._encoding), opcode)
        try:
            while session.ended is None:
                if reader is not None:
                    reader.start()  # From now on, `_receive` returns only the disconnect.
                message = await self._next_message()
                if message is None:
                    return
                handler.handle(message)
                await handler.wait_for_capacity()
        finally:
            if reader is not None:
                reader.stop()

    def handle(self, session: Session, message: str | bytes | None) -> list[Rpc]:
        """Pass a message's frames to the session; return its JSON-RPC frames, which the session does not handle."""
        if session.ended is not None:
            return []
        try:
            frames = self._decode(message)
        except InvalidMessage as invalid:
            error = invalid.error
            session.end(invalid.code, error.code, Error(error.code, str(error), error.retry))
            return []
        calls = [frame for frame in frames if isinstance(frame, Rpc)]
        session.receive([frame for frame in frames if not isinstance(frame, Rpc)] if calls else frames)
        return calls

    async def answer(self, session: Session, call: Rpc) -> None:
        """Execute a JSON-RPC request and send its response."""
        try:
            body = encode_json(call.body)
        except InvalidValue as error:  # MessagePack has values that JSON lacks.
            session.refuse(InvalidArgument(f"The call is not JSON-RPC. {error}"))
            return
        try:
            answer = await self._relay.handle_rpc(session.name, body, session.authorize)
        except FastnessError as error:
            session.refuse(error)
        else:
            if answer is not None:
                session.push(Rpc(msgspec.json.decode(answer)))

    async def _next_message(self) -> str | bytes | None:
        """The next message; None when the connection has closed."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        text: str | None = message.get("text")
        return text if text is not None else bytes(message["bytes"])

    def _decode(self, message: str | bytes | None) -> list[OfAgent | Error]:
        """The frames of a message.

        Raises:
            InvalidMessage: it cannot be decoded, or is too large.
        """
        if not isinstance(message, str if self._encoding == "json" else bytes):
            raise InvalidMessage(PROTOCOL_ERROR, InvalidArgument(f"This connection accepts only {self._encoding}"))
        if len(message) > FRAME_BYTES_MAX:
            raise InvalidMessage(
                TOO_BIG, PayloadTooLarge(f"A message has at most {FRAME_BYTES_MAX} bytes; send several")
            )
        try:
            frames = decode(message)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            invalid = InvalidArgument(f"The message is not {self._encoding} ({error})")
            raise InvalidMessage(PROTOCOL_ERROR, invalid) from None
        if len(frames) > RELAY_FRAMES_MAX:
            raise InvalidMessage(
                TOO_BIG, BatchTooLarge(f"A message has at most {RELAY_FRAMES_MAX} frames; send several")
            )
        return frames

    async def _write(self, session: Session) -> None:
        """Send the session's outgoing frames, and finally the close frame."""
        try:
            while (batch := await session.outgoing()) is not None:
                frames, size = batch
                await self._send_frames(frames)
                session.on_written(size)
            assert session.ended is not None
            await self._close(*session.ended)
        except OSError as error:  # The connection is lost.
            _log.debug("frames could not be sent: %s", error)

    async def _send_frames(self, frames: list[Frame]) -> None:
        data = encode(frames, self._encoding)
        message = {"text": data.decode()} if self._encoding == "json" else {"bytes": data}
        await self._send({"type": "websocket.send", **message})

    async def _refuse(self, error: FastnessError, code: int) -> None:
        await self._send_frames([Error(error.code, str(error), error.retry)])
        await self._close(code, error.code)

    async def _close(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


class MessageHandler:
    """Handles an agent's messages while its session has capacity; its JSON-RPC requests run one after the other."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._session = session
        self._calls: list[Rpc] = []  # Not answered yet.

    @property
    def is_full(self) -> bool:
        return bool(self._calls) or self._session.is_full

    @property
    def is_closed(self) -> bool:
        return self._session.ended is not None

    def handle(self, message: str | bytes) -> None:
        self._calls += self._connection.handle(self._session, message)

    async def wait_for_capacity(self) -> None:
        while self._calls:
            await self._connection.answer(self._session, self._calls[0])
            del self._calls[0]
        await self._session.wait_for_capacity()


class InvalidMessage(Exception):
    """A message without valid frames: the connection is closed with `code`."""

    def __init__(self, code: int, error: FastnessError) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


async def _stop(task: "asyncio.Task[None]", *, seconds: float) -> None:
    """Cancel a task that does not end within `seconds`."""
    if seconds:
        await asyncio.wait({task}, timeout=seconds)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    except Exception:
        _log.exception("unexpected error in a connection")


def _host(scope: Scope) -> str:
    """The Host header, if it names the socket that the agent connected to; that socket's address otherwise.

    Other Host values are not trusted: a machine in the middle could choose one and pass on the signature that the agent
    made for it.
    """
    host = Headers(scope=scope).get("host", "").lower()
    address, port = scope.get("server") or ("", None)
    location = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return host if host in (location, f"localhost:{port}") else location
