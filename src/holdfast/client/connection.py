"""One stream to a server: calls made at the same time travel in one frame.

    call ──► outbox ──► at the end of this turn of the loop, or at once if nobody else calls: one frame ──► the server
                                                            replies ──► whoever waits for each

A connection that breaks is made again, with pauses that double up to a few seconds. Calls that were not answered are
sent again: one that writes has a key, so that it happens once even if only its answer was lost. A call fails when there
was no server for as long as the client is patient, or for longer than a server remembers keys.

Whoever is cancelled while a call is under way will not hear its answer. What such a call has leased is given back.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Any, Final

import msgspec
import websockets
from websockets.asyncio.client import connect

from holdfast.adaptive_batching import AdaptiveBatching
from holdfast.client.batching import MERGED, CallMerger, Merged, Small
from holdfast.client.connection_errors import BEFORE_KEYS, told, unknown
from holdfast.client.pending_calls import Pending, frames_of, sift
from holdfast.client.undo import undo_of
from holdfast.client.websocket import Socket
from holdfast.errors import Closed, HoldfastError, NotAllowed, ShutdownDraining, Unreachable, Unsupported
from holdfast.limits import CALLS_MAX, CONNECT_PAUSE_MS_MAX, ONCE_PERIOD_SECONDS
from holdfast.wire.frames import (
    PROTOCOL,
    AnyRequest,
    Hello,
    ReplyOnTheWay,
    decode_hello,
    decode_replies,
    encode,
)
from holdfast.wire.problems import error_of
from holdfast.wire.repeats import takes_key

_log = logging.getLogger("holdfast.client")
_REFUSED: Final = (401, 403)
_NOT_ALLOWED: Final = 4_003  # How a server closes the streams of a token that was revoked.
_NOT_UNDERSTOOD: Final = (1002, 1007, 1009)  # The close codes of a server that could make nothing of a frame.
_OPEN_SECONDS_MAX: Final = 5.0
_PING_SECONDS_MAX: Final = 20.0
_FLEETING_SECONDS: Final = 2.0  # A connection that ended sooner and brought no answer is as good as none.
_LOOK_SECONDS_MAX: Final = 0.25  # How often calls that wait for a server are looked at.
_KEYS_SECONDS: Final = ONCE_PERIOD_SECONDS - 60.0  # How long keys are remembered, less what it takes to notice a loss.
_GIVE_BACK_SECONDS: Final = 5.0  # How long whoever was cancelled, or closes, waits for leases to be given back.


class Connection:
    """A stream that is made again when it breaks. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._url = url.replace("http", "ws", 1) + "/v1/stream"
        ping_seconds = min(_PING_SECONDS_MAX, max(patience_seconds / 2, 1.0))
        self._options: dict[str, Any] = {
            "additional_headers": {"Authorization": f"Bearer {token}"} if token else {},
            "compression": None,
            "create_connection": Socket,
            "max_size": None,
            "max_queue": 64,
            "open_timeout": _OPEN_SECONDS_MAX,
            "close_timeout": 1.0,
            "ping_interval": ping_seconds,
            "ping_timeout": ping_seconds,
            "proxy": None,
        }
        if tls is not None:
            self._options["ssl"] = tls
        self._patience_seconds = patience_seconds
        self._session = token_hex(16)
        self._numbers = count()
        self._pending: dict[int, Pending] = {}
        self._outbox: list[Pending] = []
        self._merging = CallMerger(self._send_merged)
        self._socket: Socket | None = None
        self._turns: AdaptiveBatching | None = None
        self._waiting_frames: list[bytes] = []  # That the socket has no room for.
        self._runner: asyncio.Task[None] | None = None
        self._flushing = False
        self._error: HoldfastError | None = None
        self._jitter = random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_back: set[asyncio.Task[None]] = set()
        # Together they are fewer than the server takes, and calls that wait there never hold up the others.
        self._room = asyncio.Semaphore(CALLS_MAX // 2 - 1)
        self._waiting_room = asyncio.Semaphore(CALLS_MAX // 2)
        self._gone_since = 0.0
        self._reason: BaseException | None = None
        self._up_since: float | None = None
        self._heard = False

    async def call(self, request: AnyRequest) -> Any:
        """The answer to `request`.

        Raises:
            Unreachable: there was no server for as long as the client is patient.
            CommitUnknown: it was sent, and there was no answer for as long as the client is patient.
            TooLong: it does not fit a frame; nothing was sent.
        """
        async with self._waiting_room if getattr(request, "wait_seconds", 0) else self._room:
            if self._error is not None:
                raise self._error
            if isinstance(request, MERGED):
                return await self._merged(request)
            pending = self._submit(request, now=self._may_go())
            try:
                return await pending.future
            except asyncio.CancelledError:
                await self._abandon(pending)
                raise
            finally:
                if not pending.abandoned:
                    self._pending.pop(pending.number, None)

    async def close(self) -> None:
        """End the connection. Calls that are under way fail; what is being given back is given back first."""
        self._error = self._error or Closed("The plane was closed; connect again")
        if self._giving_back:
            await asyncio.wait(self._giving_back, timeout=_GIVE_BACK_SECONDS)
        for task in (self._runner, *self._tasks, *self._giving_back):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._runner, *self._tasks, *self._giving_back)), return_exceptions=True)
        self._fail(self._error)

    # Sending.

    async def _merged(self, request: Merged) -> Any:
        if self._socket is None or self._may_go():  # There is no frame to share, and may be no server.
            pending = self._submit(request, now=True)
            try:
                return await pending.future
            finally:
                self._pending.pop(pending.number, None)
        small = Small(request, asyncio.get_running_loop().create_future())
        self._merging.add(small)
        self._flush_soon()
        return await small.future

    def _send_merged(self, request: Merged) -> "asyncio.Future[Any]":
        if self._error is not None:
            raise self._error
        pending = self._submit(request)
        pending.future.add_done_callback(lambda _: self._pending.pop(pending.number, None))
        return pending.future

    def _may_go(self) -> bool:
        """Whether a call need not wait for others to share its frame."""
        return self._turns is not None and not self._outbox and not self._flushing and self._turns.take()

    def _submit(self, request: AnyRequest, *, now: bool = False) -> Pending:
        """Have a call sent with the next frame, or `now`."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        key = f"{self._session}/{number}" if takes_key(type(request)) else None
        pending = Pending(number, request, key, loop)
        if self._runner is None:
            self._gone_since = loop.time()
            self._runner = loop.create_task(self._run())
        self._pending[pending.number] = pending
        self._outbox.append(pending)
        if now:
            self._write()
        else:
            self._flush_soon()
        return pending

    def _flush_soon(self) -> None:
        if not self._flushing and self._socket is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        try:
            callers = self._merging.send() + len(self._outbox)
        finally:
            self._flushing = False
        if self._turns is not None:
            self._turns.shared(callers)
        self._write()

    def _write(self) -> None:
        """Write what is in the outbox: at once, or as soon as the server takes it."""
        socket = self._socket
        if socket is None or not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        for frame in frames_of(outbox):
            self._write_frame(socket, frame)

    def _write_frame(self, socket: Socket, frame: bytes) -> None:
        waiting = self._waiting_frames
        if waiting:
            waiting.append(frame)
        elif not socket.write_now(frame):
            waiting.append(frame)
            self._spawn(self._send(socket, waiting), self._tasks)

    async def _send(self, socket: Socket, waiting: list[bytes]) -> None:
        try:
            while waiting:
                await socket.send(waiting[0])
                del waiting[0]
        except websockets.ConnectionClosed:
            waiting.clear()  # Whoever reads notices, and it is sent again.
        except Exception:
            _log.exception("the connection is given up: a frame could not be sent")
            waiting.clear()
            socket.transport.abort()

    # The connection.

    async def _run(self) -> None:
        """Keep a connection up, for ever."""
        loop = asyncio.get_running_loop()
        failures = 0
        looking = loop.create_task(self._look())
        try:
            while True:
                self._heard, self._up_since = False, None
                try:
                    if not await self._connect_once():
                        return
                except Exception as error:  # Whatever it is, whoever waits must not wait for ever.
                    self._reason = error
                self._socket = None
                self._note_lost(loop.time())
                if self._heard or (self._up_since is not None and loop.time() - self._up_since > _FLEETING_SECONDS):
                    failures, self._gone_since = 0, loop.time()
                failures += 1
                pause_ms = min(50 * 2 ** min(failures, 8), CONNECT_PAUSE_MS_MAX)
                await asyncio.sleep(self._jitter.random() * pause_ms / 1_000)
        finally:
            looking.cancel()

    async def _connect_once(self) -> bool:
        """One connection, and what its end says of calls; whether another one may be made."""
        try:
            await self._stream()
        except websockets.InvalidStatus as error:
            if error.response.status_code in _REFUSED:
                self._fail(NotAllowed("The server refused the token; create one with: holdfast token create"))
                return False
            self._reason = error
        except websockets.ConnectionClosed as error:
            self._reason = error
            if error.rcvd is not None and error.rcvd.code == _NOT_ALLOWED:
                self._fail(NotAllowed("The server does not know the token any more; ask for another one"))
                return False
            if error.rcvd is not None and error.rcvd.code in _NOT_UNDERSTOOD:
                sift(list(self._pending.values()), error.rcvd.reason)
        return True

    async def _stream(self) -> None:
        """One connection, from its hello to its end."""
        async with connect(self._url, **self._options) as socket:
            async with asyncio.timeout(_OPEN_SECONDS_MAX):
                await socket.send(encode(Hello(PROTOCOL, self._session)))
                hello = decode_hello(_bytes(await socket.recv()))
            if hello.protocol != PROTOCOL:
                raise Unsupported(f"The server speaks protocol {hello.protocol} and this client {PROTOCOL}; upgrade")
            assert isinstance(socket, Socket)
            wrong: list[Exception] = []
            socket.taker = partial(self._hear, socket, wrong)
            self._resume(socket)
            try:
                while True:  # With a taker, only messages that came in pieces, and the end.
                    socket.taker(_bytes(await socket.recv()))
            except websockets.ConnectionClosed:
                if wrong:
                    raise wrong[0] from None
                raise

    def _hear(self, socket: Socket, wrong: list[Exception], data: bytes) -> None:
        try:
            replies = decode_replies(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            wrong.append(error)
            socket.transport.abort()
            return
        self._heard = True
        for reply in replies:
            self._deliver(reply)

    def _resume(self, socket: Socket) -> None:
        """Send what waits: new calls, and again those whose answers were lost with the last connection."""
        self._socket, self._waiting_frames = socket, []
        self._turns = self._turns or AdaptiveBatching(asyncio.get_running_loop())
        self._up_since = asyncio.get_running_loop().time()
        self._outbox = []
        for _, pending in sorted(self._pending.items()):
            if pending.abandoned:
                pending.fail(Unreachable("The connection broke, and what waited there was cancelled with it"))
            elif pending.lost_at is not None and self._up_since - pending.lost_at > _KEYS_SECONDS and pending.key:
                pending.fail(unknown(pending.request, "the server remembers it no longer"))
            else:
                if pending.sent:
                    pending.mark_again()
                self._outbox.append(pending)
        self._flush()

    def _deliver(self, reply: ReplyOnTheWay) -> None:
        pending = self._pending.get(reply.number)
        if pending is not None and pending.future.cancelled():
            # Its caller does not know yet that it was cancelled, and will give back what it finds here.
            pending.future = asyncio.get_running_loop().create_future()
            pending.future.add_done_callback(asyncio.Future.exception)
        if pending is None or pending.future.done():
            return  # Whoever asked has gone.
        if reply.problem is None:
            try:
                pending.future.set_result(pending.decode(reply.answer))
            except Exception as wrong:
                pending.lose(Unsupported(f"This client does not understand the answer ({wrong}); upgrade it"))
            return
        error = error_of(reply.problem)
        if isinstance(error, ShutdownDraining) and not pending.abandoned:
            # It was not begun. The server closes the connection soon, and the next one carries it.
            pending.sent = False
            asyncio.get_running_loop().call_later(self._patience_seconds, pending.fail, error)
        elif pending.lost_at is not None and isinstance(error, BEFORE_KEYS):
            pending.lose(error)
        else:
            pending.fail(error)

    # What goes wrong.

    async def _look(self) -> None:
        """Fail the calls for which there was no server for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS_MAX, max(self._patience_seconds / 4, 0.01)))
            try:
                self._fail_late(loop.time() - self._patience_seconds)
            except Exception:
                _log.exception("calls that have waited for too long could not be told so, and will be soon")

    def _fail_late(self, latest: float) -> None:
        if self._socket is None:
            for pending in list(self._pending.values()):
                if max(pending.since, self._gone_since) <= latest:
                    error = told(self._url, self._reason)
                    pending.fail(unknown(pending.request, error) if pending.sent and pending.key else error)

    def _note_lost(self, now: float) -> None:
        """The connection has ended: whatever was sent and not answered may have happened."""
        for pending in self._pending.values():
            if pending.sent and pending.lost_at is None:
                pending.lost_at = now

    def _fail(self, error: HoldfastError) -> None:
        """Fail every call, and every one to come."""
        self._error = error
        for pending in list(self._pending.values()):
            pending.lose(error)
        self._outbox.clear()

    # Calls whose callers have gone.

    async def _abandon(self, pending: Pending) -> None:
        """Cancel a call whose caller was, and give back what it has leased already."""
        undo = undo_of(pending.request)
        if undo is None or not pending.sent or self._error is not None:
            return
        if pending.future.cancelled():
            pending.abandoned = True
            pending.future = asyncio.get_running_loop().create_future()
        giving_back = self._spawn(self._give_back(pending, undo), self._tasks)
        if pending.abandoned and self._socket is not None:
            self._write_frame(self._socket, encode([pending.number]))
        await asyncio.wait({giving_back}, timeout=_GIVE_BACK_SECONDS)

    async def _give_back(self, pending: Pending, undo: Callable[[Any], AnyRequest | None]) -> None:
        try:
            request = undo(await pending.future)
            if request is not None:
                returning = self._spawn(self._quietly(request), self._giving_back)
                await asyncio.wait({returning})
        except HoldfastError:
            pass  # It leased nothing, or the server has taken it back by itself.
        finally:
            self._pending.pop(pending.number, None)

    async def _quietly(self, request: AnyRequest) -> None:
        with suppress(HoldfastError):  # Then its lease ends by itself.
            await self.call(request)

    def _spawn(self, work: Coroutine[Any, Any, None], among: "set[asyncio.Task[None]]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)  # An event loop keeps only weak references to its tasks.
        task.add_done_callback(among.discard)
        return task


def _bytes(data: "str | bytes") -> bytes:
    return data if isinstance(data, bytes) else data.encode()
