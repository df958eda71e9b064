"""Delivery of received messages to the consumers of one connection; undelivered ones are released at once.

    reply ──► only call in flight? ──► sent
                    └ no ──► end of this event loop iteration ──► one frame with all replies that are ready by then

Consumers that get messages in one frame also acknowledge them, and ask for their next message, in one frame.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from fastness.errors import Busy, FastnessError
from fastness.layers.idempotency import KeyedCall
from fastness.limits import ANSWER_BYTES_MAX, PAYLOAD_FETCH_BYTES_MAX, REPLY_BATCH_MAX
from fastness.plane.idempotency import release_undelivered
from fastness.server.logs import correlation_id
from fastness.server.replies import Replies, encode_replies, fits
from fastness.server.transport import ServerTransport
from fastness.wire.frames import Reply
from fastness.wire.problems import problem_of
from fastness.wire.queues import Deliveries, ReceiveMessages

_ALWAYS_FITS: Final = ANSWER_BYTES_MAX // (2 * PAYLOAD_FETCH_BYTES_MAX)  # So many messages fit a reply at any size.

Spawn = Callable[[Coroutine[Any, Any, None]], Any]
OnUndelivered = Callable[[], None]  # Called if a reply was not sent.


class Connection(Protocol):
    """The connection that the consumers share."""

    is_closed: bool
    in_flight: int  # Calls without a reply.
    replies: Replies

    async def reply(self, replies: list[Reply]) -> bool:
        """Send replies; return whether all of them were sent unchanged."""

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` until it first waits, and the rest in a task."""

    def finish_calls(self, count: int) -> None:
        """Count `count` calls as answered."""


class Consumers:
    """Sends received messages over one connection."""

    def __init__(self, connection: Connection, transport: ServerTransport, spawn: Spawn) -> None:
        """`spawn` runs work that outlives the connection."""
        self._connection = connection
        self._transport = transport
        self._spawn = spawn
        self._ready: list[tuple[Reply, OnUndelivered]] = []  # Sent at the end of this event loop iteration.

    async def deliver(self, request: ReceiveMessages, reply: Reply, keyed_call: KeyedCall | None) -> None:
        """Send a consumer its messages. Messages that cannot be sent are released at once."""
        answer: Deliveries = reply.answer
        if self._connection.replies.is_backlogged:
            self._release(request, answer, 0, keyed_call)
            problem = problem_of(unread_replies_error(), correlation_id.get())
            await self._connection.reply([Reply(reply.number, None, problem)])
            return
        on_undelivered = partial(self._release, request, answer, 0, keyed_call)
        count = answer.count
        is_short = count == 1 and not _has_extras(answer) and not request.with_state
        if is_short and self._connection.in_flight > 1:
            self._send_in_batch(reply, on_undelivered)
            return
        while count > _ALWAYS_FITS and not fits(Reply(reply.number, answer.first(count))):
            count //= 2
        if await self._send(Reply(reply.number, answer.first(count)), on_undelivered):
            self._release(request, answer, count, None)

    def _send_in_batch(self, reply: Reply, on_undelivered: OnUndelivered) -> None:
        self._ready.append((reply, on_undelivered))
        if len(self._ready) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        elif len(self._ready) == REPLY_BATCH_MAX:
            self._flush()

    def _flush(self) -> None:
        ready, self._ready = self._ready, []
        if len(ready) > 1 and not self._connection.is_closed:
            frame = encode_replies([reply for reply, _ in ready])
            if frame is not None and self._connection.replies.write(frame):
                self._connection.finish_calls(len(ready))
                return
        for reply, on_undelivered in ready:  # Separately, because each may wait or be cancelled by itself.
            self._connection.start(self._send(reply, on_undelivered))

    async def _send(self, reply: Reply, on_undelivered: OnUndelivered) -> bool:
        is_sent = False
        try:
            is_sent = await self._connection.reply([reply])
        finally:
            if not is_sent:
                on_undelivered()
        return is_sent

    def _release(self, request: ReceiveMessages, answer: Deliveries, begin: int, keyed_call: KeyedCall | None) -> None:
        """Release the messages from the number `begin` on."""
        if answer.count > begin:
            leases = answer.leases()[begin:]
            self._spawn(_ignore_errors(release_undelivered(self._transport, request, leases, keyed_call)))


def _has_extras(answer: Deliveries) -> bool:
    """Whether a message may come with a large payload."""
    return any(each.blob is not None for each in answer.messages) or any(each.bodies for each in answer.packed)


def unread_replies_error() -> FastnessError:
    return Busy("The client has not read its earlier replies; read them, then call again")


async def _ignore_errors(work: Awaitable[object]) -> None:
    with suppress(FastnessError):  # The leases then expire by themselves.
        await work
