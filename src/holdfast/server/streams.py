"""The stream: WebSockets that carry many calls at once.

Every connection is a conversation (`conversations.py`). A new one of the same client takes over: what the old one had
sent and was not begun is dropped, because the client will send it again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property, partial
from typing import Any, Final

from holdfast.kv.serial_database import SerialDatabase
from holdfast.plane.batching import call_batch
from holdfast.server.authorization import Guard
from holdfast.server.replies import Send
from holdfast.server.sockets import BoundedSocket
from holdfast.server.stream_connection import Conversation, Receive

_TAKEN_OVER: Final = 4001
_NOT_ALLOWED: Final = 4003

CallGroup = Callable[..., Awaitable[list[Any]]]  # `plane.groups.call_batch` with its port.


class Streams:
    """Every open stream of a server."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.open: dict[str, Conversation] = {}
        self.draining = False
        self._tasks: set[asyncio.Task[None]] = set()  # What outlives its connection.

    @cached_property
    def at_once(self) -> bool:
        """Whether calls are begun without a task. Other stores wait for the network, in ways that need one."""
        return isinstance(self.transport.services.database, SerialDatabase)

    async def serve(self, guard: Guard, receive: Receive, send: Send, socket: BoundedSocket | None = None) -> None:
        """Serve one connection to its end; with its socket, without a detour."""
        stream = Conversation(self, guard, receive, send, socket)
        try:
            await stream.run()
        finally:
            if self.open.get(stream.session) is stream:
                del self.open[stream.session]

    def take_over(self, stream: Conversation) -> None:
        """Of one client only the newest connection counts."""
        old = self.open.get(stream.session)
        self.open[stream.session] = stream
        if old is not None:
            old.cut(_TAKEN_OVER, "Another connection of this client has taken over")

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Do something that outlives its connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @cached_property
    def call_batch(self) -> CallGroup:
        """What has the outcomes of the first of some calls: a port that measures groups, if it does."""
        measured: CallGroup | None = getattr(self.transport, "call_batch", None)
        return partial(call_batch, self.transport) if measured is None else measured

    async def cut(self, name: str) -> None:
        """Close the streams of a caller who may not come in any more."""
        for stream in [each for each in self.open.values() if each.caller == name]:
            stream.cut(_NOT_ALLOWED, "not_allowed")

    def drain(self) -> None:
        """Begin no new call; those under way are answered."""
        self.draining = True
