"""One WebSocket stream to a server, for an event loop. Calls made in the same iteration of the loop share a frame.

    call ──► session ──► one frame, at the end of the iteration (at once for a single caller) ──► server
                                                    replies ──► the future of each call

A broken connection is reopened, with pauses that double up to a few seconds; `Session` has the rules for the calls.

A cancelled caller does not receive its answer. What its call has leased is released.
"""

import asyncio
import logging
import ssl
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
import websockets
from websockets.asyncio.client import connect

from fastness.adaptive_batching import AdaptiveBatching
from fastness.client.batching import BatchableRequest, is_batchable
from fastness.client.pending_calls import PendingCall, is_waiting_call
from fastness.client.session import (
    CALL_SLOTS,
    OPEN_SECONDS_MAX,
    RELEASE_SECONDS_MAX,
    WAITING_CALL_SLOTS,
    Session,
)
from fastness.client.websocket import Socket
from fastness.errors import Closed
from fastness.wire.frames import AnyRequest

_log = logging.getLogger("fastness.client")


class Connection:
    """A stream that reconnects when it breaks. Belongs to one event loop."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._session: Session[asyncio.Future[Any]] = Session(
            url,
            token=token,
            patience_seconds=patience_seconds,
            new_future=lambda: asyncio.get_running_loop().create_future(),
            on_output=self._flush_soon,
            call_soon=lambda *call: asyncio.get_running_loop().call_soon(*call),
        )
        self._options: dict[str, Any] = {
            "additional_headers": self._session.headers,
            "compression": None,
            "create_connection": Socket,
            "max_size": None,
            "max_queue": 64,
            "open_timeout": OPEN_SECONDS_MAX,
            "close_timeout": 1.0,
            "ping_interval": self._session.ping_seconds,
            "ping_timeout": self._session.ping_seconds,
            "proxy": None,
        }
        if tls is not None:
            self._options["ssl"] = tls
        self._socket: Socket | None = None
        self._batching: AdaptiveBatching | None = None
        self._unsent_frames: list[bytes] = []  # Frames that wait until the socket accepts more.
        self._runner: asyncio.Task[None] | None = None
        self._flushing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._call_slots = asyncio.Semaphore(CALL_SLOTS)
        self._waiting_call_slots = asyncio.Semaphore(WAITING_CALL_SLOTS)

    async def call(self, request: AnyRequest) -> Any:
        """The answer to `request`.

        Raises:
            Unreachable: no server was reachable for `patience_seconds`.
            CommitUnknown: a write was sent, and no answer arrived within `patience_seconds`.
            TooLong: the call does not fit a frame; nothing was sent.
        """
        async with self._waiting_call_slots if is_waiting_call(request) else self._call_slots:
            if self._session.error is not None:
                raise self._session.error
            if is_batchable(request):
                return await self._call_batched(request)
            pending = self._submit(request, now=self._can_send_now())
            try:
                answer = await pending.future
            except asyncio.CancelledError:
                await self._abandon(pending)
                raise
            except BaseException:
                self._session.forget(pending)
                raise
            self._session.forget(pending)
            return answer

    async def close(self) -> None:
        """Close the connection, after pending releases. Calls in progress fail."""
        error = self._session.error = self._session.error or Closed("The plane was closed; connect again")
        if self._session.releases:
            await asyncio.wait(self._session.releases, timeout=RELEASE_SECONDS_MAX)
        for task in (self._runner, *self._tasks):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._runner, *self._tasks)), return_exceptions=True)
        self._session.fail_all(error)

    # Sending.

    async def _call_batched(self, request: BatchableRequest) -> Any:
        if self._socket is None or self._can_send_now():  # There is no frame to share.
            pending = self._submit(request, now=True)
            try:
                return await pending.future
            finally:
                self._session.forget(pending)
        future = asyncio.get_running_loop().create_future()
        self._session.add_batchable(request, future)
        self._flush_soon()
        return await future

    def _can_send_now(self) -> bool:
        """Whether a call can be sent without waiting for others to share its frame."""
        return (
            self._batching is not None
            and self._session.is_outbox_empty
            and not self._flushing
            and self._batching.may_skip()
        )

    def _submit(self, request: AnyRequest, *, now: bool = False) -> "PendingCall[asyncio.Future[Any]]":
        """Send a call with the next frame, or `now`."""
        loop = asyncio.get_running_loop()
        pending = self._session.add(request, loop.create_future())
        if self._runner is None:
            self._runner = loop.create_task(self._run())
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
            callers = self._session.make_batches()
        finally:
            self._flushing = False
        if self._batching is not None:
            self._batching.record_batch(callers)
        self._write()

    def _write(self) -> None:
        """Write the outbox: at once, or as soon as the socket accepts it."""
        socket = self._socket
        if socket is not None:
            for frame in self._session.take_frames():
                self._write_frame(socket, frame)

    def _write_frame(self, socket: Socket, frame: bytes) -> None:
        waiting = self._unsent_frames
        if waiting:
            waiting.append(frame)
        elif not socket.write_now(frame):
            waiting.append(frame)
            self._spawn(self._send(socket, waiting))

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
        checking = asyncio.get_running_loop().create_task(self._check_timeouts())
        try:
            while await self._connect_once():
                await asyncio.sleep(self._session.pause_seconds())
        finally:
            checking.cancel()

    async def _connect_once(self) -> bool:
        """Run one connection until it ends. Returns whether to reconnect."""
        try:
            await self._stream()
        except Exception as error:  # Any error leads to another attempt, so waiting calls can time out.
            self._socket = None
            try:
                return self._session.disconnect(error)
            except Exception:
                _log.exception("unexpected error at the end of a connection; reconnecting")
        return True

    async def _stream(self) -> None:
        """Run one connection, from its hello to its end."""
        async with connect(self._session.url, **self._options) as socket:
            async with asyncio.timeout(OPEN_SECONDS_MAX):
                await socket.send(self._session.hello())
                server_hello = _bytes(await socket.recv())
            assert isinstance(socket, Socket)
            errors: list[Exception] = []
            socket.on_message = partial(self._on_message, socket, errors)
            self._resume(socket, server_hello)
            try:
                while True:  # Short messages go to the callback. This receives only fragmented messages, and the end.
                    socket.on_message(_bytes(await socket.recv()))
            except websockets.ConnectionClosed:
                if errors:
                    raise errors[0] from None
                raise

    def _on_message(self, socket: Socket, errors: list[Exception], data: bytes) -> None:
        try:
            self._session.receive(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            errors.append(error)
            socket.transport.abort()

    def _resume(self, socket: Socket, server_hello: bytes) -> None:
        """Send what waits: new calls, and again the calls whose answers were lost with the last connection."""
        self._session.connect(server_hello)
        self._socket, self._unsent_frames = socket, []
        self._batching = self._batching or AdaptiveBatching(asyncio.get_running_loop())
        self._flush()

    async def _check_timeouts(self) -> None:
        """Fail the calls that waited too long for a server, until cancelled."""
        while True:
            await asyncio.sleep(self._session.check_seconds)
            try:
                self._session.fail_timed_out()
            except Exception:
                _log.exception("unexpected error while failing calls that timed out; retrying")

    # Calls of cancelled callers.

    async def _abandon(self, pending: "PendingCall[asyncio.Future[Any]]") -> None:
        """Cancel the call of a cancelled caller, and wait for the release of what it has leased."""
        released = self._session.abandon(pending)
        if released is not None:
            await asyncio.wait({released}, timeout=RELEASE_SECONDS_MAX)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # An event loop keeps only weak references to its tasks.
        task.add_done_callback(self._tasks.discard)


def _bytes(data: "str | bytes") -> bytes:
    return data if isinstance(data, bytes) else data.encode()
