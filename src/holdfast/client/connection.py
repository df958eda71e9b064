"""One WebSocket stream to a server. Calls made in the same event-loop iteration share a frame.

    call ──► outbox ──► one frame, at the end of the iteration (at once for a single caller) ──► server
                                                    replies ──► the future of each call

A broken connection is reopened, with pauses that double up to a few seconds. Unanswered calls are sent again. A call
that writes carries an idempotency key, so it is carried out once even if only its answer was lost. A call fails when no
server was reachable for `patience_seconds`, or for longer than servers remember idempotency keys.

A cancelled caller does not receive its answer. What its call has leased is released.
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
from holdfast.client.batching import BATCHABLE, BatchableCall, BatchableRequest, RequestBatcher
from holdfast.client.connection_errors import CHECKED_BEFORE_KEYS, connection_error, refused, unknown
from holdfast.client.pending_calls import PendingCall, encode_frames, fail_bad_calls
from holdfast.client.undo import undo_of
from holdfast.client.websocket import Socket
from holdfast.errors import Closed, HoldfastError, NotAllowed, ShutdownDraining, Unreachable, Unsupported
from holdfast.limits import CALL_KEY_PERIOD_SECONDS, CALLS_MAX, CONNECT_PAUSE_MS_MAX
from holdfast.wire.frames import (
    PROTOCOL,
    AnyRequest,
    Hello,
    RawReply,
    decode_hello,
    decode_replies,
    encode,
)
from holdfast.wire.problems import error_of

_log = logging.getLogger("holdfast.client")
_REFUSED: Final = (401, 403)
_TOKEN_REVOKED_CODE: Final = 4_003  # The close code for streams of a revoked token.
_BAD_FRAME_CODES: Final = (1002, 1007, 1009)  # The close codes of a server that could not decode a frame.
_OPEN_SECONDS_MAX: Final = 5.0
_PING_SECONDS_MAX: Final = 20.0
_SHORT_LIVED_SECONDS: Final = 2.0  # A connection that ended sooner, without an answer, counts as a failed attempt.
_TIMEOUT_CHECK_SECONDS_MAX: Final = 0.25  # How often calls that wait for a server are checked for a timeout.
# How long servers remember keys, less the time that a client needs to notice a lost connection.
_KEYS_SECONDS: Final = CALL_KEY_PERIOD_SECONDS - 60.0
_RELEASE_SECONDS_MAX: Final = 5.0  # How long a cancelled caller, and close(), wait for leases to be released.


class Connection:
    """A stream that reconnects when it breaks. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._url = url.replace("http", "ws", 1) + "/v1/stream"
        self._token = token
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
        self._pending: dict[int, PendingCall] = {}
        self._outbox: list[PendingCall] = []
        self._batcher = RequestBatcher(self._send_batched)
        self._socket: Socket | None = None
        self._revision = 0  # What the server knows; see `Hello`.
        self._batching: AdaptiveBatching | None = None
        self._unsent_frames: list[bytes] = []  # Frames that wait until the socket accepts more.
        self._runner: asyncio.Task[None] | None = None
        self._flushing = False
        self._error: HoldfastError | None = None
        self._jitter = random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        # The sum is below the server's limit. Calls that wait there have their own slots, so they never block the rest.
        self._call_slots = asyncio.Semaphore(CALLS_MAX // 2 - 1)
        self._waiting_call_slots = asyncio.Semaphore(CALLS_MAX // 2)
        self._disconnected_since = 0.0
        self._reason: BaseException | None = None
        self._connected_since: float | None = None
        self._has_received = False

    async def call(self, request: AnyRequest) -> Any:
        """The answer to `request`.

        Raises:
            Unreachable: no server was reachable for `patience_seconds`.
            CommitUnknown: a write was sent, and no answer arrived within `patience_seconds`.
            TooLong: the call does not fit a frame; nothing was sent.
        """
        async with self._waiting_call_slots if getattr(request, "wait_seconds", 0) else self._call_slots:
            if self._error is not None:
                raise self._error
            if isinstance(request, BATCHABLE):
                return await self._call_batched(request)
            pending = self._submit(request, now=self._can_send_now())
            try:
                return await pending.future
            except asyncio.CancelledError:
                await self._abandon(pending)
                raise
            finally:
                if not pending.abandoned:
                    self._pending.pop(pending.number, None)

    async def close(self) -> None:
        """Close the connection, after pending releases. Calls in progress fail."""
        self._error = self._error or Closed("The plane was closed; connect again")
        if self._releases:
            await asyncio.wait(self._releases, timeout=_RELEASE_SECONDS_MAX)
        for task in (self._runner, *self._tasks, *self._releases):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._runner, *self._tasks, *self._releases)), return_exceptions=True)
        self._fail(self._error)

    # Sending.

    async def _call_batched(self, request: BatchableRequest) -> Any:
        if self._socket is None or self._can_send_now():  # There is no frame to share.
            pending = self._submit(request, now=True)
            try:
                return await pending.future
            finally:
                self._pending.pop(pending.number, None)
        call = BatchableCall(request, asyncio.get_running_loop().create_future())
        self._batcher.add(call)
        self._flush_soon()
        return await call.future

    def _send_batched(self, request: BatchableRequest) -> "asyncio.Future[Any]":
        if self._error is not None:
            raise self._error
        pending = self._submit(request)
        pending.future.add_done_callback(lambda _: self._pending.pop(pending.number, None))
        return pending.future

    def _can_send_now(self) -> bool:
        """Whether a call can be sent without waiting for others to share its frame."""
        return self._batching is not None and not self._outbox and not self._flushing and self._batching.may_skip()

    def _submit(self, request: AnyRequest, *, now: bool = False) -> PendingCall:
        """Send a call with the next frame, or `now`."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        key = f"{self._session}/{number}" if request.operation.takes_key else None
        pending = PendingCall(number, request, key, loop)
        if self._runner is None:
            self._disconnected_since = loop.time()
            self._runner = loop.create_task(self._run())
        if self._socket is not None:  # Otherwise when it is connected.
            pending.adapt(self._revision)
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
            callers = self._batcher.send() + len(self._outbox)
        finally:
            self._flushing = False
        if self._batching is not None:
            self._batching.record_batch(callers)
        self._write()

    def _write(self) -> None:
        """Write the outbox: at once, or as soon as the socket accepts it."""
        socket = self._socket
        if socket is None or not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        for frame in encode_frames(outbox):
            self._write_frame(socket, frame)

    def _write_frame(self, socket: Socket, frame: bytes) -> None:
        waiting = self._unsent_frames
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
            waiting.clear()  # The reading side notices the end, and the next connection sends the calls again.
        except Exception:
            _log.exception("unexpected error while sending a frame; closing the connection")
            waiting.clear()
            socket.transport.abort()

    # The connection.

    async def _run(self) -> None:
        """Keep a connection open until cancelled."""
        loop = asyncio.get_running_loop()
        failures = 0
        checking = loop.create_task(self._check_timeouts())
        try:
            while True:
                self._has_received, self._connected_since = False, None
                try:
                    if not await self._connect_once():
                        return
                except Exception as error:  # Any error leads to another attempt, so waiting calls can time out.
                    self._reason = error
                self._socket = None
                self._mark_lost(loop.time())
                if self._has_received or (
                    self._connected_since is not None and loop.time() - self._connected_since > _SHORT_LIVED_SECONDS
                ):
                    failures, self._disconnected_since = 0, loop.time()
                failures += 1
                pause_ms = min(50 * 2 ** min(failures, 8), CONNECT_PAUSE_MS_MAX)
                await asyncio.sleep(self._jitter.random() * pause_ms / 1_000)
        finally:
            checking.cancel()

    async def _connect_once(self) -> bool:
        """Run one connection until it ends, and fail calls as its end requires. Returns whether to reconnect."""
        try:
            await self._stream()
        except websockets.InvalidStatus as error:
            if error.response.status_code in _REFUSED:
                self._fail(refused(self._url, self._token))
                return False
            self._reason = error
        except websockets.ConnectionClosed as error:
            self._reason = error
            if error.rcvd is not None and error.rcvd.code == _TOKEN_REVOKED_CODE:
                self._fail(
                    NotAllowed("The token was revoked; create another with `holdfast token create NAME --allow VERBS`")
                )
                return False
            if error.rcvd is not None and error.rcvd.code in _BAD_FRAME_CODES:
                fail_bad_calls(list(self._pending.values()), error.rcvd.reason)
        return True

    async def _stream(self) -> None:
        """Run one connection, from its hello to its end."""
        async with connect(self._url, **self._options) as socket:
            async with asyncio.timeout(_OPEN_SECONDS_MAX):
                await socket.send(encode(Hello(PROTOCOL, self._session)))
                hello = decode_hello(_bytes(await socket.recv()))
            if hello.protocol != PROTOCOL:
                raise Unsupported(f"The server speaks protocol {hello.protocol} and this client {PROTOCOL}; upgrade")
            assert isinstance(socket, Socket)
            errors: list[Exception] = []
            socket.on_message = partial(self._on_message, socket, errors)
            self._revision = hello.revision
            self._resume(socket)
            try:
                while True:  # Short messages go to the callback. This receives only fragmented messages, and the end.
                    socket.on_message(_bytes(await socket.recv()))
            except websockets.ConnectionClosed:
                if errors:
                    raise errors[0] from None
                raise

    def _on_message(self, socket: Socket, errors: list[Exception], data: bytes) -> None:
        try:
            replies = decode_replies(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            errors.append(error)
            socket.transport.abort()
            return
        self._has_received = True
        for reply in replies:
            self._deliver(reply)

    def _resume(self, socket: Socket) -> None:
        """Send what waits: new calls, and again the calls whose answers were lost with the last connection."""
        self._socket, self._unsent_frames = socket, []
        self._batching = self._batching or AdaptiveBatching(asyncio.get_running_loop())
        self._connected_since = asyncio.get_running_loop().time()
        self._outbox = []
        for _, pending in sorted(self._pending.items()):
            if pending.abandoned:
                pending.fail(Unreachable("The connection broke; the server cancels what waited on it"))
            elif (
                pending.lost_at is not None and self._connected_since - pending.lost_at > _KEYS_SECONDS and pending.key
            ):
                pending.fail(unknown(pending.request, "the server no longer remembers its idempotency key"))
            else:
                pending.adapt(self._revision)
                if pending.sent:
                    pending.mark_repeated()
                self._outbox.append(pending)
        self._flush()

    def _deliver(self, reply: RawReply) -> None:
        pending = self._pending.get(reply.number)
        if pending is not None and pending.future.cancelled():
            # The caller was cancelled but has not run since. _abandon() then finds the answer here and releases it.
            pending.future = asyncio.get_running_loop().create_future()
            pending.future.add_done_callback(asyncio.Future.exception)
        if pending is None or pending.future.done():
            return  # The caller was cancelled.
        if reply.problem is None:
            try:
                pending.future.set_result(pending.decode(reply.answer))
            except Exception as error:
                pending.lose(Unsupported(f"The client cannot decode the answer ({error}); upgrade the client"))
            return
        refusal = error_of(reply.problem)
        if isinstance(refusal, ShutdownDraining) and not pending.abandoned:
            # The call was not started. The server closes the connection soon, and the next connection carries the call.
            pending.sent = False
            asyncio.get_running_loop().call_later(self._patience_seconds, pending.fail, refusal)
        elif pending.lost_at is not None and isinstance(refusal, CHECKED_BEFORE_KEYS):
            pending.lose(refusal)
        else:
            pending.fail(refusal)

    # Failures.

    async def _check_timeouts(self) -> None:
        """Fail the calls that waited too long for a server, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_TIMEOUT_CHECK_SECONDS_MAX, max(self._patience_seconds / 4, 0.01)))
            try:
                self._fail_timed_out(loop.time() - self._patience_seconds)
            except Exception:
                _log.exception("unexpected error while failing calls that timed out; retrying")

    def _fail_timed_out(self, deadline: float) -> None:
        if self._socket is None:
            for pending in list(self._pending.values()):
                if max(pending.since, self._disconnected_since) <= deadline:
                    error = connection_error(self._url, self._reason)
                    pending.fail(unknown(pending.request, error) if pending.sent and pending.key else error)

    def _mark_lost(self, now: float) -> None:
        """Mark the calls that were sent and not answered: they may have been carried out."""
        for pending in self._pending.values():
            if pending.sent and pending.lost_at is None:
                pending.lost_at = now

    def _fail(self, error: HoldfastError) -> None:
        """Fail every pending call, and every later one."""
        self._error = error
        for pending in list(self._pending.values()):
            pending.lose(error)
        self._outbox.clear()

    # Calls of cancelled callers.

    async def _abandon(self, pending: PendingCall) -> None:
        """Cancel the call of a cancelled caller, and release what it has leased."""
        undo = undo_of(pending.request)
        if undo is None or not pending.sent or self._error is not None:
            return
        if pending.future.cancelled():
            pending.abandoned = True
            pending.future = asyncio.get_running_loop().create_future()
        releasing = self._spawn(self._release(pending, undo), self._tasks)
        if pending.abandoned and self._socket is not None:
            self._write_frame(self._socket, encode([pending.number]))
        await asyncio.wait({releasing}, timeout=_RELEASE_SECONDS_MAX)

    async def _release(self, pending: PendingCall, undo: Callable[[Any], AnyRequest | None]) -> None:
        try:
            request = undo(await pending.future)
            if request is not None:
                task = self._spawn(self._call_ignoring_errors(request), self._releases)
                await asyncio.wait({task})
        except HoldfastError:
            pass  # It leased nothing, or the server has already released it.
        finally:
            self._pending.pop(pending.number, None)

    async def _call_ignoring_errors(self, request: AnyRequest) -> None:
        with suppress(HoldfastError):  # The lease then expires.
            await self.call(request)

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)  # An event loop keeps only weak references to its tasks.
        task.add_done_callback(tasks.discard)
        return task


def _bytes(data: "str | bytes") -> bytes:
    return data if isinstance(data, bytes) else data.encode()
