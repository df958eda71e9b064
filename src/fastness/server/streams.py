"""The stream, `/v1/stream`: WebSockets that each carry many calls at once.

    frame ──► calls ──► calls that are one transaction each: batched, one commit, one frame of replies
                   └──► other calls (waiting, object stores, audited): executed singly, each with its own reply
          numbers ──► calls that the client cancels

A call that need not wait is executed as soon as its frame arrives and answered at once: a task switch, or passing a
message through uvicorn's queue, takes as long as most calls do.

A connection bounds its calls in flight, its long answers in memory and its unsent bytes. At a bound the server starts
no more calls or stops reading, so neither a fast sender nor a slow reader makes it grow. A client that reads nothing at
all is disconnected after a while (`slow_peer.py`).

A new connection of the same client session replaces the old one. Calls of the old one that have not started are
dropped, because the client sends them again.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from functools import cached_property, partial
from typing import Any, Final

import msgspec
from starlette.types import Receive, Send

from fastness.errors import Closed, FastnessError, ShutdownDraining
from fastness.kv.serial_database import SerialDatabase
from fastness.limits import (
    CALLS_MAX,
    FRAME_BYTES_MAX,
    HELLO_SECONDS,
    READS_MAX,
    UNSENT_BYTES_MAX,
)
from fastness.plane.executor import is_batchable
from fastness.plane.idempotency import keyed_call_of
from fastness.runtime.eager_tasks import EagerCoroutine
from fastness.server.audit import call_audited, is_audited
from fastness.server.authorization import Authorizer
from fastness.server.consumers import Consumers, unread_replies_error
from fastness.server.logs import correlation_id
from fastness.server.replies import Replies, encode_replies, unexpected_error
from fastness.server.sockets import BoundedSocket
from fastness.server.transport import ServerTransport
from fastness.server.websocket_reader import WebsocketReader
from fastness.wire.frames import PROTOCOL, REVISION, Call, Hello, Reply, decode_calls, decode_hello, encode
from fastness.wire.problems import problem_of
from fastness.wire.queues import ReceiveMessages

_log = logging.getLogger("fastness.stream")
_PROTOCOL_ERROR: Final = 1002
_TOO_BIG: Final = 1009
_INTERNAL_ERROR: Final = 1011
_REPLACED: Final = 4001
_NOT_ALLOWED: Final = 4003


class Streams:
    """All open streams of a server."""

    def __init__(self, transport: ServerTransport) -> None:
        self.transport = transport
        self.open: dict[str, StreamConnection] = {}
        self.draining = False
        self._tasks: set[asyncio.Task[None]] = set()  # Tasks that outlive their connection.

    @cached_property
    def is_eager(self) -> bool:
        """Whether calls start without a task. Stores that wait for the network need one."""
        return isinstance(self.transport.services.database, SerialDatabase)

    async def serve(
        self, authorizer: Authorizer, receive: Receive, send: Send, socket: BoundedSocket | None = None
    ) -> None:
        """Serve one connection until it closes. With `socket`, messages bypass uvicorn's queues."""
        authorizer.entry = "stream"
        connection = StreamConnection(self, authorizer, receive, send, socket)
        try:
            await connection.run()
        finally:
            if self.open.get(connection.session) is connection:
                del self.open[connection.session]

    def register(self, connection: "StreamConnection") -> None:
        """Make this the only connection of its session; close an older one."""
        old = self.open.get(connection.session)
        self.open[connection.session] = connection
        if old is not None:
            old.close(_REPLACED, "Another connection of this client has taken over")

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` in a task that outlives its connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close_streams_of(self, caller: str) -> None:
        """Close the streams of a caller whose token became unusable."""
        for connection in [each for each in self.open.values() if each.caller == caller]:
            connection.close(_NOT_ALLOWED, "not_allowed")

    def drain(self) -> None:
        """Start no new calls; those in flight are answered."""
        self.draining = True


class StreamConnection:
    """One WebSocket of a client."""

    def __init__(
        self, streams: Streams, authorizer: Authorizer, receive: Receive, send: Send, socket: BoundedSocket | None
    ) -> None:
        self.session = ""
        self._streams = streams
        self._authorizer = authorizer
        self._receive = receive
        self._send = send
        self._reader = None if socket is None else WebsocketReader(socket, self, self._on_message)
        self._context = copy_context()
        self.is_closed = False
        self._close_task: asyncio.Task[None] | None = None
        self.in_flight = 0  # Calls without a reply.
        self.replies = Replies(send, None if socket is None else socket.write_now)
        self._reads = asyncio.Semaphore(READS_MAX)
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._single_calls: dict[int, asyncio.Task[None]] = {}  # Calls outside of batches, by number.
        self._reply_tasks: set[asyncio.Task[bool]] = set()
        self._consumers = Consumers(self, streams.transport, streams.spawn)
        self._counted: str | None = None  # The universe whose quota this connection counts against, once it does.
        self._may_count = True

    @property
    def caller(self) -> str:
        """The caller's name, as the authorizer knows it."""
        return self._authorizer.name

    def close(self, code: int, reason: str) -> None:
        """Start no more calls, and send a close frame in a background task."""
        self.abandon()
        self._close_task = self._streams.spawn(self._send_close_quietly(code, reason))

    def abandon(self) -> None:
        """Start no more calls: the connection is lost or replaced. Commits that have started complete."""
        self.is_closed = True
        if self._counted is not None:
            self._streams.transport.services.quotas.disconnect(self._counted)
            self._counted = None
        for task in (*self._single_calls.values(), *self._reply_tasks):
            task.cancel()
        self._has_capacity.set()

    async def run(self) -> None:
        await self._receive()  # websocket.connect
        id = (correlation_id.get() or "").encode()
        await self._send({"type": "websocket.accept", "headers": [(b"x-correlation-id", id)] if id else []})
        try:
            if not await self._handshake():
                return
            while True:
                if self._reader is not None:
                    self._reader.start()  # From now on, `_receive` returns only the disconnect.
                data = await self._next_frame()
                if data is None:
                    return
                self._dispatch(data)
                await asyncio.sleep(0)  # Lets calls reply first, so that unsent replies count towards `is_full`.
                await self.wait_for_capacity()
        finally:
            self.abandon()
            if self._reader is not None:
                self._reader.stop()
            if self._close_task is not None:  # Returning closes the socket, before the close frame would be sent.
                await asyncio.wait({self._close_task})

    @property
    def is_full(self) -> bool:
        """Whether the bound of calls in flight or of unsent bytes is reached."""
        return self.in_flight >= CALLS_MAX or self.replies.unsent_bytes >= UNSENT_BYTES_MAX

    async def wait_for_capacity(self) -> None:
        while self.is_full and not self.is_closed:
            self._has_capacity.clear()
            await self._has_capacity.wait()

    def _on_message(self, message: str | bytes) -> None:
        data = self._frame_of(message)
        if data is not None:
            self._dispatch(data)

    async def _handshake(self) -> bool:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                data = await self._next_frame()
        except TimeoutError:
            await self._send_close(_PROTOCOL_ERROR, f"No hello arrived within {HELLO_SECONDS:g} s; connect again")
            return False
        if data is None:
            return False
        try:
            hello = decode_hello(data)
        except (msgspec.MsgspecError, ValueError):
            await self._send_close(_PROTOCOL_ERROR, "The first frame must be a hello")
            return False
        if hello.protocol != PROTOCOL or not 0 < len(hello.session) <= 64:
            await self._send_close(_PROTOCOL_ERROR, f"This server speaks protocol {PROTOCOL}")
            return False
        self.session = f"{self._authorizer.name}/{hello.session}"
        self._streams.register(self)
        await self._send(
            {"type": "websocket.send", "bytes": encode(Hello(PROTOCOL, hello.session, CALLS_MAX, REVISION))}
        )
        return True

    async def _next_frame(self) -> bytes | None:
        """The next frame; None when the connection has closed."""
        message = await self._receive()
        if message["type"] != "websocket.receive" or self.is_closed:
            return None
        data = message.get("bytes")
        return self._frame_of(message["text"] if data is None else data)

    def _frame_of(self, message: str | bytes) -> bytes | None:
        """The frame in a message. None if it is invalid; the connection is closed then."""
        if isinstance(message, str):
            self.close(_PROTOCOL_ERROR, "Frames must be binary")
        elif len(message) > FRAME_BYTES_MAX:
            self.close(_TOO_BIG, f"A frame has at most {FRAME_BYTES_MAX} bytes")
        else:
            return bytes(message)
        return None

    def _dispatch(self, data: bytes) -> None:
        """Start the calls of a frame, and cancel those that it cancels."""
        try:
            calls = decode_calls(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            _log.warning("closed: a frame of %s bytes could not be decoded: %s", len(data), error)
            self.close(_PROTOCOL_ERROR, "The frame is not a list of calls")
            return
        if len(calls) > CALLS_MAX:
            self.close(_PROTOCOL_ERROR, f"A frame has at most {CALLS_MAX} calls")
            return
        if (len(calls) > 1 or self._single_calls) and self._has_duplicate_number(calls):
            _log.warning("closed: a frame of %s bytes reuses the number of a call in flight", len(data))
            self.close(_PROTOCOL_ERROR, "Two calls have the same number")
            return
        batch: list[Call] = []
        has_reads = False
        refused: list[Reply] = []
        # All at once: a delivery may be complete before the next call of the frame starts, and shares a frame with it.
        self.in_flight += sum([received.__class__ is not int for received in calls])
        for received in calls:
            if isinstance(received, int):
                self._cancel(received)
                continue
            try:
                call = self._checked(received)
            except FastnessError as error:
                refused.append(Reply(received.number, None, problem_of(error, correlation_id.get())))
                continue
            if is_batchable(call.request) and not is_audited(call.request):
                batch.append(self._with_scoped_key(call))
                has_reads = has_reads or call.request.operation.reads
            else:
                task = self.start(self._execute_single(self._with_scoped_key(call)))
                if task is not None:
                    self._single_calls[call.number] = task
        if batch:
            self.start(self._execute_reads(batch) if has_reads else self._execute_batch(batch))
        if refused:
            self.start(self._send_replies(refused))

    def _has_duplicate_number(self, calls: list[Call | int]) -> bool:
        """Whether two calls share a number, so that cancelling one could not be told from cancelling the other."""
        numbers = [call.number for call in calls if call.__class__ is Call]
        return len(set(numbers)) < len(numbers) or not self._single_calls.keys().isdisjoint(numbers)

    def _cancel(self, number: int) -> None:
        """Cancel a call that its client abandoned. A call that has finished is answered, and the client undoes it."""
        task = self._single_calls.pop(number, None)
        if task is not None:
            task.cancel()
            self._start_task(self._reply_cancelled(number, task), self._context)

    async def _reply_cancelled(self, number: int, task: "asyncio.Task[None]") -> None:
        await asyncio.wait({task})  # By then, messages that it leased are released.
        if task.cancelled():
            problem = problem_of(Closed("The call was cancelled by its caller"), correlation_id.get())
            await self.reply([Reply(number, None, problem)])

    def _checked(self, call: Call) -> Call:
        """The call as it is executed, if it is valid and its caller may make it."""
        if self._streams.draining:
            raise ShutdownDraining("The server is shutting down; connect again in a moment")
        self._authorizer.authorize(call.request)
        if self._may_count:
            self._count()
        call.request.check()
        request = self._authorizer.attributed(call.request)
        return call if request is call.request else msgspec.structs.replace(call, request=request)

    def _count(self) -> None:
        """Count the connection with its first call: a refused call tells the client why, and may be repeated.

        Raises:
            QuotaExceeded: the universe of the caller's token has as many connections as its quota allows.
        """
        universe = self._authorizer.only_universe
        if universe is not None and not self.is_closed:
            self._streams.transport.services.quotas.connect(universe)
            self._counted = universe
        self._may_count = False

    def _with_scoped_key(self, call: Call) -> Call:
        """The call with its idempotency key prefixed by the caller, so that callers do not share keys."""
        if call.key is None:
            return call
        return Call(call.number, call.request, f"{self._authorizer.name}/{call.key}", call.again)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[None] | None":
        """Run `work` until it first waits; return the task that runs the rest, or None if there is no rest."""
        context = self._context.copy()
        if not self._streams.is_eager:
            return self._start_task(work, context)
        eager = EagerCoroutine(work, context)
        return None if eager.is_done else self._start_task(eager.remainder, context)

    def _start_task(self, work: Coroutine[Any, Any, Any], context: Context) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The client would wait for ever for its answer; it sends the call again on its next connection.
            _log.error("closed: unexpected error in a call", exc_info=error)
            self.close(_INTERNAL_ERROR, "Unexpected error in the server; connect again")

    def _is_open(self) -> bool:
        return not self.is_closed

    async def _execute_reads(self, calls: list[Call]) -> None:
        """`_execute_batch` for a batch with reads, whose answers may be large: a bounded number at a time."""
        async with self._reads:
            await self._execute_batch(calls)

    async def _execute_batch(self, calls: list[Call]) -> None:
        """Execute calls in order. `call_all` may answer a prefix: its replies are sent before the next batch."""
        id = _set_correlation_id(calls)
        while calls and not self.is_closed:
            try:
                outcomes = await self._streams.transport.call_all(calls, self._is_open)
            except Exception:
                _log.exception("unexpected error in a batch of calls")
                outcomes = [unexpected_error() for _ in calls]
            await self.reply(
                [
                    Reply(call.number, None, problem_of(outcome, id))
                    if isinstance(outcome, FastnessError)
                    else Reply(call.number, outcome)
                    for call, outcome in zip(calls, outcomes, strict=False)
                ]
            )
            calls = calls[len(outcomes) :]

    async def _execute_single(self, call: Call) -> None:
        reads = call.request.operation.reads and not getattr(call.request, "wait_seconds", 0)
        async with self._reads if reads else nullcontext():  # Unread messages of a receive are released instead.
            await self._call_and_reply(call)

    async def _call_and_reply(self, call: Call) -> None:
        id = _set_correlation_id([call])
        transport = self._streams.transport
        keyed_call = None
        try:
            keyed_call = keyed_call_of(transport, call.request, call.key, again=call.again)
            execute = partial(transport.call, call.request, keyed_call)
            reply = Reply(call.number, await call_audited(transport, self._authorizer, call.request, execute))
        except FastnessError as error:
            reply = Reply(call.number, None, problem_of(error, id))
        except Exception:
            _log.exception("unexpected error in a call")
            reply = Reply(call.number, None, problem_of(unexpected_error(), id))
        finally:
            self._single_calls.pop(call.number, None)  # A finished call can no longer be cancelled.
        if isinstance(call.request, ReceiveMessages) and reply.problem is None:
            await self._consumers.deliver(call.request, reply, keyed_call)
        elif call.request.operation.reads and self.replies.is_backlogged:
            await self.reply([Reply(call.number, None, problem_of(unread_replies_error(), id))])
        else:
            await self.reply([reply])

    async def reply(self, replies: list[Reply]) -> bool:
        """Send replies; return whether all of them were sent unchanged."""
        if self.is_closed:
            return False
        task: asyncio.Task[bool] | None = None
        try:
            frame = encode_replies(replies)
            if frame is not None and self.replies.write(frame):
                return True
            sending = EagerCoroutine(self.replies.send(replies, frame))
            if sending.is_done:
                return sending.result
            task = asyncio.get_running_loop().create_task(sending.remainder)
            self._reply_tasks.add(task)
            return await task
        except Exception as error:  # uvicorn raises various types when a connection is lost.
            _log.debug("replies could not be sent: %s", error)
            if task is not None:
                self._reply_tasks.discard(task)
            self.abandon()
            return False
        finally:
            if task is not None:
                self._reply_tasks.discard(task)
            self.finish_calls(len(replies))

    def finish_calls(self, count: int) -> None:
        """Count `count` calls as answered."""
        self.in_flight -= count
        if not self.is_full:
            self._has_capacity.set()

    async def _send_replies(self, replies: list[Reply]) -> None:
        await self.reply(replies)

    async def _send_close_quietly(self, code: int, reason: str) -> None:
        with suppress(Exception):  # uvicorn raises various types when a connection is lost.
            await self._send_close(code, reason)

    async def _send_close(self, code: int, reason: str) -> None:
        self.is_closed = True
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


def _set_correlation_id(calls: list[Call]) -> str:
    """Set the correlation id of this task's log lines to that of its calls, and return it."""
    first, last = calls[0].number, calls[-1].number
    id = f"{correlation_id.get() or '-'}/{first}" + (f"-{last}" if len(calls) > 1 else "")
    correlation_id.set(id)
    return id
