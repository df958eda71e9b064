"""A conversation: one connection of a stream, and what its calls are answered.

    frame ──► calls ──► those that are one transaction: together, one commit, one frame of replies
                   └──► the others (waiting, object stores): by themselves, each with a reply of its own
          numbers ──► whichever of those their callers do not wait for any more: cancelled

Whatever need not wait is done when its frame comes, and answered at once: a task, or a message from uvicorn to one that
waits for it, takes as long as most calls do.

It has a bounded number of calls under way, of long answers in memory, and of bytes that were not read. At a bound, the
server begins nothing more or stops reading from it, so neither a fast sender nor a slow reader makes it grow; one that
takes nothing at all is cut after a while (`sockets.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import Closed, HoldfastError, ShutdownDraining
from holdfast.limits import (
    CALLS_MAX,
    FRAME_BYTES_MAX,
    HELLO_SECONDS,
    READS_MAX,
    UNSENT_BYTES_MAX,
)
from holdfast.plane.batching import is_batchable
from holdfast.plane.idempotency import keyed_call_of
from holdfast.runtime.eager_tasks import EagerCoroutine
from holdfast.server.authorization import Guard
from holdfast.server.consumers import Consumers, unread
from holdfast.server.logs import correlation_id
from holdfast.server.replies import Replies, Send, encoded, unexpected
from holdfast.server.sockets import BoundedSocket
from holdfast.server.websocket_reader import Hearing
from holdfast.wire.frames import PROTOCOL, Call, Hello, Reply, decode_calls, decode_hello, encode
from holdfast.wire.problems import problem_of
from holdfast.wire.queues import ReceiveMessages
from holdfast.wire.repeats import READS

if TYPE_CHECKING:
    from holdfast.server.streams import Streams

_log = logging.getLogger("holdfast.stream")
_PROTOCOL_ERROR, _TOO_BIG, _FAILED = 1002, 1009, 1011

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Conversation:
    """One connection."""

    def __init__(
        self, streams: "Streams", guard: Guard, receive: Receive, send: Send, socket: BoundedSocket | None
    ) -> None:
        self.session = ""
        self._streams = streams
        self._guard = guard
        self._receive = receive
        self._send = send
        self._hearing = None if socket is None else Hearing(socket, self, self._hear)
        self._context = copy_context()
        self.is_gone = False  # Nothing is begun any more at all.
        self._goodbye: asyncio.Task[None] | None = None
        self.under_way = 0  # Calls that are not answered yet.
        self.replies = Replies(send, None if socket is None else socket.write_now)
        self._reads = asyncio.Semaphore(READS_MAX)
        self._room = asyncio.Event()
        self._room.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ones: dict[int, asyncio.Task[None]] = {}  # Calls that run by themselves, by their numbers.
        self._replying: set[asyncio.Task[bool]] = set()
        self._consumers = Consumers(self, streams.transport, streams.spawn)

    @property
    def caller(self) -> str:
        """Who is at the other end, as the guard knows them."""
        return self._guard.name

    def cut(self, code: int, reason: str) -> None:
        """End the connection: begin nothing more, and say why. Nobody waits until the other end has heard it."""
        self.drop()
        self._goodbye = self._streams.spawn(self._say_goodbye(code, reason))

    def drop(self) -> None:
        """The connection is gone, or has a successor: begin nothing more. Commits that were begun are finished."""
        self.is_gone = True
        for task in (*self._ones.values(), *self._replying):
            task.cancel()
        self._room.set()

    async def run(self) -> None:
        await self._receive()  # The request to connect.
        id = (correlation_id.get() or "").encode()
        await self._send({"type": "websocket.accept", "headers": [(b"x-correlation-id", id)] if id else []})
        try:
            if not await self._greet():
                return
            while True:
                if self._hearing is not None:
                    self._hearing.begin()  # From now on, only the end comes this way.
                data = await self._frame()
                if data is None:
                    return
                self._take(data)
                await asyncio.sleep(0)  # So that what can be answered at once is, and counts if it is not read.
                await self.wait_for_room()
        finally:
            self.drop()
            if self._hearing is not None:
                self._hearing.end()
            if self._goodbye is not None:  # Whoever runs this closes the connection next, and it would not be heard.
                await asyncio.wait({self._goodbye})

    @property
    def is_full(self) -> bool:
        """Whether so much is under way, or not read, that nothing more is begun."""
        return self.under_way >= CALLS_MAX or self.replies.unsent >= UNSENT_BYTES_MAX

    async def wait_for_room(self) -> None:
        while self.is_full and not self.is_gone:
            self._room.clear()
            await self._room.wait()

    def _hear(self, message: str | bytes) -> None:
        data = self._checked(message)
        if data is not None:
            self._take(data)

    async def _greet(self) -> bool:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                data = await self._frame()
        except TimeoutError:
            await self._close(_PROTOCOL_ERROR, f"The hello did not come within {HELLO_SECONDS:g} s; connect again")
            return False
        if data is None:  # It was told why, or has ended.
            return False
        try:
            hello = decode_hello(data)
        except (msgspec.MsgspecError, ValueError):
            await self._close(_PROTOCOL_ERROR, "The first frame is a hello")
            return False
        if hello.protocol != PROTOCOL or not 0 < len(hello.session) <= 64:
            await self._close(_PROTOCOL_ERROR, f"This server speaks protocol {PROTOCOL}")
            return False
        self.session = f"{self._guard.name}/{hello.session}"
        self._streams.take_over(self)
        await self._send({"type": "websocket.send", "bytes": encode(Hello(PROTOCOL, hello.session, CALLS_MAX))})
        return True

    async def _frame(self) -> bytes | None:
        """The next frame; None when the connection has ended."""
        message = await self._receive()
        if message["type"] != "websocket.receive" or self.is_gone:
            return None
        data = message.get("bytes")
        return self._checked(message["text"] if data is None else data)

    def _checked(self, message: str | bytes) -> bytes | None:
        """The frame that a message is; None if it is none, and the connection ends."""
        if isinstance(message, str):
            self.cut(_PROTOCOL_ERROR, "Frames are binary")
        elif len(message) > FRAME_BYTES_MAX:
            self.cut(_TOO_BIG, f"A frame has at most {FRAME_BYTES_MAX} bytes")
        else:
            return bytes(message)
        return None

    def _take(self, data: bytes) -> None:
        try:
            calls = decode_calls(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            _log.warning("a frame of %s bytes was not understood: %s", len(data), error)
            self.cut(_PROTOCOL_ERROR, "The frame is no list of calls")
            return
        if len(calls) > CALLS_MAX:
            self.cut(_PROTOCOL_ERROR, f"A frame has at most {CALLS_MAX} calls")
            return
        if (len(calls) > 1 or self._ones) and self._is_number_taken(calls):
            _log.warning("a frame of %s bytes has a number that another call has", len(data))
            self.cut(_PROTOCOL_ERROR, "Two calls have the same number")
            return
        together: list[Call] = []
        are_reads = False  # Or some of them.
        refused: list[Reply] = []
        for call in calls:
            if isinstance(call, int):
                self._cancel(call)
                continue
            self.under_way += 1
            try:
                self._check(call)
            except HoldfastError as error:
                refused.append(Reply(call.number, None, problem_of(error, correlation_id.get())))
                continue
            if is_batchable(call.request):
                together.append(self._keyed(call))
                are_reads = are_reads or type(call.request) in READS
            else:
                task = self.begin(self._one(self._keyed(call)))
                if task is not None:
                    self._ones[call.number] = task
        if together:
            self.begin(self._read_among(together) if are_reads else self._carry_out(together))
        if refused:
            self.begin(self._answer_all(refused))

    def _is_number_taken(self, calls: list[Call | int]) -> bool:
        """Whether two calls have one number: only one of them could be cancelled, and the other wait for nobody."""
        numbers = [call.number for call in calls if call.__class__ is Call]
        return len(set(numbers)) < len(numbers) or not self._ones.keys().isdisjoint(numbers)

    def _cancel(self, number: int) -> None:
        """Nobody waits for this call any more. One that is done is answered, and its caller takes it back."""
        task = self._ones.pop(number, None)
        if task is not None:
            task.cancel()
            self._start(self._tell_cancelled(number, task), self._context)

    async def _tell_cancelled(self, number: int, task: "asyncio.Task[None]") -> None:
        await asyncio.wait({task})  # What it has leased is given back by then.
        if task.cancelled():
            problem = problem_of(Closed("The call was cancelled by its caller"), correlation_id.get())
            await self.reply([Reply(number, None, problem)])

    def _check(self, call: Call) -> None:
        if self._streams.draining:
            raise _draining()
        self._guard.allow(call.request)
        call.request.check()

    def _keyed(self, call: Call) -> Call:
        """The call, its key apart from those of other clients."""
        if call.key is None:
            return call
        return Call(call.number, call.request, f"{self._guard.name}/{call.key}", call.again)

    def begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[None] | None":
        """Do something now, as far as that is possible; the task that does the rest."""
        context = self._context.copy()
        if not self._streams.at_once:
            return self._start(work, context)
        begun = EagerCoroutine(work, context)
        return None if begun.is_done else self._start(begun.rest, context)

    def _start(self, work: Any, context: Context) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits for its answer would wait for ever; on the next connection it is asked again.
            _log.error("a connection is cut: a call failed in a way that nobody thought of", exc_info=error)
            self.cut(_FAILED, "The server failed in a way that nobody thought of; connect again")

    def _is_wanted(self) -> bool:
        return not self.is_gone

    async def _read_among(self, calls: list[Call]) -> None:
        """`_carry_out` for calls some of which read much."""
        async with self._reads:
            await self._carry_out(calls)

    async def _carry_out(self, calls: list[Call]) -> None:
        """Carry calls out in order, a group at a time: its answers are on their way before the next one begins."""
        id = _name(calls)
        while calls and not self.is_gone:
            try:
                outcomes = await self._streams.call_batch(calls, self._is_wanted)
            except Exception:
                _log.exception("a group of calls failed in a way that nobody thought of")
                outcomes = [unexpected() for _ in calls]
            await self.reply(
                [
                    Reply(call.number, None, problem_of(outcome, id))
                    if isinstance(outcome, HoldfastError)
                    else Reply(call.number, outcome)
                    for call, outcome in zip(calls, outcomes, strict=False)
                ]
            )
            calls = calls[len(outcomes) :]

    async def _one(self, call: Call) -> None:
        reads = type(call.request) in READS and not getattr(call.request, "wait_seconds", 0)
        async with self._reads if reads else nullcontext():  # Who receives much and reads little gives it back.
            await self._answer(call)

    async def _answer(self, call: Call) -> None:
        id = _name([call])
        transport = self._streams.transport
        once = None
        try:
            once = keyed_call_of(transport, call.request, call.key, again=call.again)
            reply = Reply(call.number, await transport.call(call.request, once))
        except HoldfastError as error:
            reply = Reply(call.number, None, problem_of(error, id))
        except Exception:
            _log.exception("a call failed in a way that nobody thought of")
            reply = Reply(call.number, None, problem_of(unexpected(), id))
        finally:
            self._ones.pop(call.number, None)  # What is done is answered, and not cancelled any more.
        if isinstance(call.request, ReceiveMessages) and reply.problem is None:
            await self._consumers.deliver(call.request, reply, once)
        elif type(call.request) in READS and self.replies.are_unread:
            await self.reply([Reply(call.number, None, problem_of(unread(), id))])
        else:
            await self.reply([reply])

    async def reply(self, replies: list[Reply]) -> bool:
        """Whether the other end is told these replies as they are."""
        if self.is_gone:
            return False
        task: asyncio.Task[bool] | None = None
        try:
            frame = encoded(replies)
            if frame is not None and self.replies.write(frame):
                return True
            sending = EagerCoroutine(self.replies.send(replies, frame))
            if sending.is_done:
                return sending.result
            task = asyncio.get_running_loop().create_task(sending.rest)
            self._replying.add(task)
            return await task
        except Exception as error:  # The connection is gone, in one of a server's many ways.
            _log.debug("replies could not be sent: %s", error)
            if task is not None:
                self._replying.discard(task)
            self.drop()
            return False
        finally:
            if task is not None:
                self._replying.discard(task)
            self.end_calls(len(replies))

    def end_calls(self, count: int) -> None:
        """So many calls are answered."""
        self.under_way -= count
        if not self.is_full:
            self._room.set()

    async def _answer_all(self, replies: list[Reply]) -> None:
        await self.reply(replies)

    async def _say_goodbye(self, code: int, reason: str) -> None:
        with suppress(Exception):  # It may be gone already, in one of a server's many ways.
            await self._close(code, reason)

    async def _close(self, code: int, reason: str) -> None:
        self.is_gone = True
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


def _name(calls: list[Call]) -> str:
    """Give the lines that this task logs from now on the name of its calls; that name."""
    first, last = calls[0].number, calls[-1].number
    id = f"{correlation_id.get() or '-'}/{first}" + (f"-{last}" if len(calls) > 1 else "")
    correlation_id.set(id)
    return id


def _draining() -> HoldfastError:
    return ShutdownDraining("The server is shutting down; connect again in a moment")
