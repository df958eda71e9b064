"""The consumers of one connection: told of their messages, or else those are given back at once.

    a message ──► alone? ──► told
                    └ no ──► the end of this turn ──► one frame with the others that are ready by then

Messages that are ready in one turn were synced together. Consumers that are told together also acknowledge together,
and ask together for what they want next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from holdfast.errors import Busy, HoldfastError
from holdfast.limits import ANSWER_BYTES_MAX, PAYLOAD_FETCH_BYTES_MAX, TOGETHER_REPLIES_MAX
from holdfast.plane.idempotency import give_back
from holdfast.server.logs import correlation_id
from holdfast.server.replies import Replies, encoded, fits
from holdfast.wire.frames import Reply
from holdfast.wire.problems import problem_of
from holdfast.wire.queues import Deliveries, Delivery, ReceiveMessages

_FEW: Final = ANSWER_BYTES_MAX // (2 * PAYLOAD_FETCH_BYTES_MAX)  # So many messages fit a reply, however large they are.

Spawn = Callable[[Coroutine[Any, Any, None]], Any]
Untold = Callable[[], None]  # What to do if a reply is not told.


class Teller(Protocol):
    """The connection."""

    is_gone: bool
    under_way: int  # Calls that are not answered yet.
    replies: Replies

    async def reply(self, replies: list[Reply]) -> bool:
        """Whether the other end is told these replies as they are."""

    def begin(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something now, as far as that is possible, and the rest in a task."""

    def end_calls(self, count: int) -> None:
        """So many calls are answered."""


class Consumers:
    """Tells those that wait at the other end of a connection."""

    def __init__(self, teller: Teller, transport: Any, spawn: Spawn) -> None:
        """`spawn` does what outlives the connection."""
        self._teller = teller
        self._transport = transport
        self._spawn = spawn
        self._ready: list[tuple[Reply, Untold]] = []  # To be told at the end of this turn.

    async def deliver(self, request: ReceiveMessages, reply: Reply, once: Any) -> None:
        """Tell a consumer of its messages; those that it is not told of are given back at once."""
        messages = reply.answer.messages
        if self._teller.replies.are_unread:  # It has waited among many others, and nobody reads what they were told.
            self._give_back(request, messages, once)
            await self._teller.reply([Reply(reply.number, None, problem_of(unread(), correlation_id.get()))])
            return
        untold = partial(self._give_back, request, messages, once)
        is_short = len(messages) == 1 and messages[0].blob is None and not request.with_state
        if is_short and self._teller.under_way > 1:
            self._tell_soon(reply, untold)
            return
        count = len(messages)
        while count > _FEW and not fits(Reply(reply.number, Deliveries(messages[:count]))):
            count //= 2
        if await self._tell(Reply(reply.number, Deliveries(messages[:count])), untold):
            self._give_back(request, messages[count:], None)

    def _tell_soon(self, reply: Reply, untold: Untold) -> None:
        self._ready.append((reply, untold))
        if len(self._ready) == 1:
            asyncio.get_running_loop().call_soon(self._tell_ready)
        elif len(self._ready) == TOGETHER_REPLIES_MAX:
            self._tell_ready()

    def _tell_ready(self) -> None:
        ready, self._ready = self._ready, []
        if len(ready) > 1 and not self._teller.is_gone:
            frame = encoded([reply for reply, _ in ready])
            if frame is not None and self._teller.replies.write(frame):
                self._teller.end_calls(len(ready))
                return
        for reply, untold in ready:  # Each for itself: what one waits for, or is cancelled with, is not the others'.
            self._teller.begin(self._tell(reply, untold))

    async def _tell(self, reply: Reply, untold: Untold) -> bool:
        told = False
        try:
            told = await self._teller.reply([reply])
        finally:
            if not told:
                untold()
        return told

    def _give_back(self, request: ReceiveMessages, messages: list[Delivery], once: Any) -> None:
        if messages:
            self._spawn(_quietly(give_back(self._transport, request, messages, once)))


def unread() -> HoldfastError:
    return Busy("The replies before this one were not read; read them, then ask again")


async def _quietly(work: Awaitable[None]) -> None:
    with suppress(HoldfastError):  # Then their leases end by themselves.
        await work
