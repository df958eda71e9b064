"""One stream to a server: calls made at the same time travel in one frame.

    call ──► outbox ──► at the end of this turn of the loop: one frame ──► the server
                                                            replies ──► whoever waits for each

A connection that breaks is made again, with pauses that double up to a few seconds. Calls that were not answered are
sent again: one that writes has a key, so that it happens once even if only its answer was lost.
"""

import asyncio
import random
import ssl
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec
import websockets
from websockets.asyncio.client import ClientConnection, connect

from holdfast.errors import Closed, HoldfastError, NotAllowed, Unreachable
from holdfast.limits import CALLS_MAX, CONNECT_PAUSE_MS_MAX, FRAME_BYTES_MAX
from holdfast.wire.frames import PROTOCOL, AnyRequest, Call, Hello, decode_hello, decode_replies, encode
from holdfast.wire.problems import error_of
from holdfast.wire.requests import answer_type

_REFUSED: Final = (401, 403)
_FRAME_BYTES: Final = FRAME_BYTES_MAX // 2  # Where a frame is full, and the next one begins.
_decoders: dict[Any, Callable[[Any], Any]] = {}


class Pending:
    """A call that waits for its answer."""

    __slots__ = ("call", "decode", "future", "sent")

    def __init__(self, call: Call, decode: Callable[[Any], Any], future: "asyncio.Future[Any]") -> None:
        self.call = call
        self.decode = decode
        self.future = future
        self.sent = False


class Connection:
    """A stream that is made again when it breaks. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/v1/stream"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls
        self._patience_seconds = patience_seconds
        self._session = uuid.uuid4().hex
        self._numbers = count()
        self._pending: dict[int, Pending] = {}
        self._outbox: list[Pending] = []
        self._socket: ClientConnection | None = None
        self._runner: asyncio.Task[None] | None = None
        self._flushing = False
        self._connected = asyncio.Event()
        self._error: HoldfastError | None = None
        self._jitter = random.Random()
        self._room = asyncio.Semaphore(CALLS_MAX // 2)

    async def call(self, request: AnyRequest, *, key: str | None) -> Any:
        """The answer to `request`.

        Raises:
            Unreachable: the server did not answer for as long as the client is patient.
        """
        if self._error is not None:
            raise self._error
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run())
        kind = answer_type(type(request))
        decode = _decoders.get(kind)
        if decode is None:
            decode = _decoders[kind] = msgspec.msgpack.Decoder(kind).decode
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        pending = Pending(Call(number, request, key), decode, future)
        async with self._room:
            self._pending[number] = pending
            self._outbox.append(pending)
            if not self._flushing and self._socket is not None:
                self._flushing = True
                asyncio.get_running_loop().call_soon(self._flush)
            try:
                return await future
            finally:
                self._pending.pop(number, None)

    async def close(self) -> None:
        self._error = Closed("The plane was closed; connect again")
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
        self._fail(self._error)

    def _flush(self) -> None:
        self._flushing = False
        socket = self._socket
        if socket is None or not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        asyncio.get_running_loop().create_task(self._send(socket, outbox))

    async def _send(self, socket: ClientConnection, outbox: list[Pending]) -> None:
        batch: list[Call] = []
        size = 0
        with suppress(websockets.ConnectionClosed):  # Whoever reads notices, and it is sent again.
            for pending in outbox:
                pending.sent = True
                batch.append(pending.call)
                size += _size(pending.call)
                if size > _FRAME_BYTES:
                    await socket.send(encode(batch))
                    batch, size = [], 0
            if batch:
                await socket.send(encode(batch))

    async def _run(self) -> None:
        """Keep a connection up for as long as the client is patient with a server that does not answer."""
        loop = asyncio.get_running_loop()
        failures, since = 0, loop.time()
        reason: Exception | None = None
        while True:
            try:
                async with connect(
                    self._url,
                    additional_headers=self._headers,
                    ssl=self._tls,
                    compression=None,
                    max_size=None,
                    max_queue=64,
                    open_timeout=10,
                    ping_interval=20,
                    proxy=None,
                ) as socket:
                    await socket.send(encode(Hello(PROTOCOL, self._session)))
                    decode_hello(_bytes(await socket.recv()))
                    failures, since = 0, loop.time()
                    self._resume(socket)
                    while True:
                        self._deliver(_bytes(await socket.recv()))
            except websockets.InvalidStatus as error:
                if error.response.status_code in _REFUSED:
                    self._fail(NotAllowed("The server refused the token; create one with: holdfast token create"))
                    return
                reason = error
            except (OSError, websockets.WebSocketException, msgspec.MsgspecError, TimeoutError) as error:
                reason = error
            self._socket = None
            failures += 1
            if loop.time() - since > self._patience_seconds:
                self._fail(
                    Unreachable(f"{self._url} does not answer ({reason}); check that `holdfast serve` runs there")
                )
                since = loop.time()
            await asyncio.sleep(self._jitter.random() * min(50 * 2 ** min(failures, 8), CONNECT_PAUSE_MS_MAX) / 1_000)

    def _resume(self, socket: ClientConnection) -> None:
        """Send what waits: new calls, and again those whose answers were lost with the last connection."""
        self._socket = socket
        waiting = sorted(self._pending.items())
        self._outbox = []
        for number, pending in waiting:
            if pending.sent:
                pending.call = Call(number, pending.call.request, pending.call.key, True)
            self._outbox.append(pending)
        self._flush()

    def _deliver(self, data: bytes) -> None:
        for reply in decode_replies(data):
            pending = self._pending.get(reply.number)
            if pending is None or pending.future.done():
                continue  # Whoever asked has gone.
            if reply.problem is not None:
                pending.future.set_exception(error_of(reply.problem))
            else:
                pending.future.set_result(pending.decode(reply.answer))

    def _fail(self, error: HoldfastError) -> None:
        if isinstance(error, NotAllowed | Closed):
            self._error = error
        for pending in list(self._pending.values()):
            if not pending.future.done():
                pending.future.set_exception(error)
        self._outbox.clear()


def _size(call: Call) -> int:
    """About how many bytes a call takes: only large bodies matter."""
    request: Any = call.request
    messages = getattr(request, "messages", None)
    if messages is not None:
        return 256 + sum(len(message.payload) for message in messages)
    data = getattr(request, "data", None)
    return 256 + (len(data) if isinstance(data, bytes) else 0)


def _bytes(data: "str | bytes") -> bytes:
    return data if isinstance(data, bytes) else data.encode()
