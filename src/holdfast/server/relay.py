"""The relay: `/v1/relay`, a WebSocket by which agents of any language send and get mail.

    accepted ──► challenge ──► authenticate, in time ──► welcome ──► frames, both ways ──► closed; a code says why

`runtime/relay/session.py` and `runtime/relay/hub.py` hold the state; `relay_auth.py` authenticates the agent; this
module handles the socket.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
from starlette.datastructures import Headers

from holdfast.errors import BatchTooLarge, HoldfastError, InvalidArgument, NotAllowed, PayloadTooLarge, Retry
from holdfast.limits import FRAME_BYTES_MAX, RELAY_AUTHENTICATE_SECONDS, RELAY_FRAMES_MAX
from holdfast.runtime.relay.hub import Commit, RelayHub
from holdfast.runtime.relay.session import NOT_ALLOWED, PROTOCOL_ERROR, STOPPING, TOO_BIG, TOO_SLOW, Allow, Session
from holdfast.server.logs import correlation_id
from holdfast.server.relay_auth import Introduced, Introductions
from holdfast.server.sockets import BoundedSocket
from holdfast.server.websocket_reader import Hearing
from holdfast.wire.relay import (
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
from holdfast.wire.websocket_frames import BINARY, TEXT

_log = logging.getLogger("holdfast.relay")
_LAST_WORDS_SECONDS: Final = 5.0  # How long whoever is closed may take to hear why.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Answer = Callable[[str, bytes, Allow | None], Awaitable[bytes | None]]  # To a call of an agent, by its address.


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be said about a relay."""

    host: str | None = None  # What agents call this server; by the address that they reach it at if nothing is said.
    registration: Literal["open", "closed"] = "closed"  # Whether an agent that nobody knows registers itself.
    rate_per_second: float = 0.0  # Mails of one sender; 0: as many as it likes.
    burst: int = 1
    authenticate_seconds: float = RELAY_AUTHENTICATE_SECONDS


class Relay:
    """Every agent that is connected to a server."""

    def __init__(self, port: Any, introductions: Introductions, commit: Commit, answer: Answer, options: RelayOptions):
        """`commit` carries out calls together, `answer` those of JSON-RPC."""
        rate, burst = options.rate_per_second, options.burst
        self.hub = RelayHub(port.services.database, commit, rate_per_second=rate, burst=burst)
        self.introductions = introductions
        self.answer = answer
        self.options = options
        self._callers: dict[Session, str] = {}  # By which token they came in.

    def __len__(self) -> int:
        return len(self.hub.sessions)

    async def serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection to its end."""
        await receive()  # The request to connect.
        id = (correlation_id.get() or "").encode()
        await send({"type": "websocket.accept", "headers": [(b"x-correlation-id", id)] if id else []})
        with suppress(OSError):  # It is gone, in one of a server's many ways.
            await Connection(self, scope, receive, send).run()

    async def join(self, introduced: Introduced, receipts_after: int | None) -> Session:
        """The session of an agent that has proved who it is."""
        universe, agent, allow, caller = introduced
        session = await self.hub.join(universe, agent, allow, receipts_after=receipts_after)
        self._callers[session] = caller
        return session

    def leave(self, session: Session) -> None:
        """The connection of a session is gone."""
        self._callers.pop(session, None)
        self.hub.leave(session)

    def cut(self, caller: str) -> None:
        """Close the connections of a token that may not be used any more."""
        for session in [each for each, name in self._callers.items() if name == caller]:
            session.end(NOT_ALLOWED, "not_allowed")

    def drain(self) -> None:
        """Take no more mail."""
        self.hub.drain()

    async def close(self) -> None:
        """Commit what agents have asked for, and leave their mailboxes."""
        await self.hub.close()


class Connection:
    """One WebSocket of an agent."""

    def __init__(self, relay: Relay, scope: Message, receive: Receive, send: Send) -> None:
        self._relay = relay
        self._receive = receive
        self._send = send
        self._socket = BoundedSocket.of(scope)
        self._client: str = (scope.get("client") or ("", 0))[0]
        self._host = relay.options.host or _host(scope)
        self._encoding: Encoding = "msgpack" if b"format=msgpack" in scope.get("query_string", b"") else "json"

    async def run(self) -> None:
        """Find out who it is, then carry frames until either end closes."""
        session = await self._admit()
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
            await _stop(writing, seconds=_LAST_WORDS_SECONDS)

    async def _admit(self) -> Session | None:
        nonce, seconds = os.urandom(NONCE_BYTES), self._relay.options.authenticate_seconds
        await self._say([Challenge(Body(nonce), self._host, PROTOCOL)])
        try:
            async with asyncio.timeout(seconds):
                frame = await self._first_frame()
                if frame is None:
                    return None
                proof = signed_bytes(self._host, nonce)
                introduced = await self._relay.introductions.introduce(frame, proof, self._client)
                return await self._relay.join(introduced, frame.receipts_after)
        except TimeoutError:
            late = NotAllowed(f"The challenge was not answered within {seconds:g} s; connect again")
            await self._refuse(late, TOO_SLOW)
        except Unreadable as error:
            await self._refuse(error.error, error.code)
        except NotAllowed as error:
            await self._refuse(error, NOT_ALLOWED)
        except HoldfastError as error:
            await self._refuse(error, PROTOCOL_ERROR if error.retry is Retry.NEVER else STOPPING)
        return None

    async def _first_frame(self) -> Authenticate | None:
        message = await self._message()
        if message is None:
            return None
        frames = self._decoded(message)
        if len(frames) != 1 or not isinstance(frames[0], Authenticate):
            detail = f": {frames[0].detail}" if frames and isinstance(frames[0], Error) else ""
            raise InvalidArgument(f"The first frame is an authenticate, and comes alone{detail}")
        return frames[0]

    async def _read(self, session: Session) -> None:
        """Take what the agent sends, as long as there is room for it."""
        socket, taking = self._socket, Taking(self, session)
        hearing = None if socket is None else Hearing(socket, taking, taking.take)
        if socket is not None:
            kind = TEXT if self._encoding == "json" else BINARY
            session.write = lambda frames: socket.write_now(encode(frames, self._encoding), kind)
        try:
            while session.ended is None:
                if hearing is not None:
                    hearing.begin()  # From now on, only the end comes this way.
                message = await self._message()
                if message is None:
                    return
                taking.take(message)
                await taking.wait_for_room()
        finally:
            if hearing is not None:
                hearing.end()

    def take(self, session: Session, message: str | bytes | None) -> list[Rpc]:
        """Give a message to the session; those of its frames that are for somebody else."""
        if session.ended is not None:
            return []
        try:
            frames = self._decoded(message)
        except Unreadable as unreadable:
            error = unreadable.error
            session.end(unreadable.code, error.code, Error(error.code, str(error), error.retry))
            return []
        calls = [frame for frame in frames if isinstance(frame, Rpc)]
        session.take([frame for frame in frames if not isinstance(frame, Rpc)] if calls else frames)
        return calls

    async def answer(self, session: Session, call: Rpc) -> None:
        """Have a call answered, and the answer sent."""
        try:
            answer = await self._relay.answer(session.name, msgspec.json.encode(call.body), session.allow)
        except HoldfastError as error:
            session.refuse(error)
        except (TypeError, ValueError, RecursionError) as error:  # MessagePack says things that JSON cannot.
            session.refuse(InvalidArgument(f"The call is no JSON-RPC ({error}); send what JSON can say"))
        else:
            if answer is not None:
                session.push(Rpc(msgspec.json.decode(answer)))

    async def _message(self) -> str | bytes | None:
        """The next message; None when there are no more."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        text: str | None = message.get("text")
        return text if text is not None else bytes(message["bytes"])

    def _decoded(self, message: str | bytes | None) -> list[OfAgent | Error]:
        """The frames of a message.

        Raises:
            Unreadable: it is none.
        """
        if not isinstance(message, str if self._encoding == "json" else bytes):
            raise Unreadable(PROTOCOL_ERROR, InvalidArgument(f"This connection speaks only {self._encoding}"))
        if len(message) > FRAME_BYTES_MAX:
            raise Unreadable(TOO_BIG, PayloadTooLarge(f"A message has at most {FRAME_BYTES_MAX} bytes; send several"))
        try:
            frames = decode(message)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            wrong = InvalidArgument(f"The message is not {self._encoding} ({error})")
            raise Unreadable(PROTOCOL_ERROR, wrong) from None
        if len(frames) > RELAY_FRAMES_MAX:
            raise Unreadable(TOO_BIG, BatchTooLarge(f"A message has at most {RELAY_FRAMES_MAX} frames; send several"))
        return frames

    async def _write(self, session: Session) -> None:
        """Send what the session has for the agent, and in the end why it is closed."""
        try:
            while (batch := await session.outgoing()) is not None:
                frames, size = batch
                await self._say(frames)
                session.written(size)
            assert session.ended is not None
            await self._close(*session.ended)
        except OSError as error:  # It is gone, in one of a server's many ways.
            _log.debug("frames could not be sent: %s", error)

    async def _say(self, frames: list[Frame]) -> None:
        data = encode(frames, self._encoding)
        said = {"text": data.decode()} if self._encoding == "json" else {"bytes": data}
        await self._send({"type": "websocket.send", **said})

    async def _refuse(self, error: HoldfastError, code: int) -> None:
        await self._say([Error(error.code, str(error), error.retry)])
        await self._close(code, error.code)

    async def _close(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


class Taking:
    """What an agent sends, taken while its session has room and its calls are answered, one after the other."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._session = session
        self._calls: list[Rpc] = []  # Not answered yet.

    @property
    def is_full(self) -> bool:
        return bool(self._calls) or self._session.is_full

    @property
    def is_gone(self) -> bool:
        return self._session.ended is not None

    def take(self, message: str | bytes) -> None:
        self._calls += self._connection.take(self._session, message)

    async def wait_for_room(self) -> None:
        while self._calls:
            await self._connection.answer(self._session, self._calls[0])
            del self._calls[0]
        await self._session.room()


class Unreadable(Exception):
    """A message that cannot be answered frame by frame: the connection is closed with `code`."""

    def __init__(self, code: int, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


async def _stop(task: "asyncio.Task[None]", *, seconds: float) -> None:
    """End a task, which may take a while to do so by itself."""
    if seconds:
        await asyncio.wait({task}, timeout=seconds)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    except Exception:
        _log.exception("a connection failed in a way that nobody thought of")


def _host(scope: Message) -> str:
    """What an agent calls this server, if it is one of the names of the very socket that it has reached.

    Anything else that stands in a header is for whoever sends it to choose: one that stands between an agent and its
    server could have the agent's signature for itself passed on.
    """
    asked = Headers(scope=scope).get("host", "").lower()
    address, port = scope.get("server") or ("", None)
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return asked if asked in (place, f"localhost:{port}") else place
