"""What comes in on a connection, taken as it comes: no task waits for it.

    message ──► taken ──► room for more? ──► the next one
                             └ no ──► nothing more is read, what came is kept ──► room ──► taken in order

What one read of the socket brings is kept whole, so that is how much a connection can have lying there. Whoever has
filled up since its last message, by what it is sent, takes one more before that is seen.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast.server.sockets import BoundedSocket

_log = logging.getLogger("holdfast.stream")


class Hearer(Protocol):
    """Who takes what is heard."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be taken now."""

    @property
    def is_gone(self) -> bool:
        """Whether nothing more is to be taken at all."""

    async def wait_for_room(self) -> None:
        """Return when there is room, or there will be none any more."""


class Hearing:
    """The ear of one connection."""

    def __init__(self, socket: BoundedSocket, hearer: Hearer, take: Callable[[str | bytes], None]) -> None:
        self._socket = socket
        self._hearer = hearer
        self._take = take
        self._unheard: deque[str | bytes] = deque()
        self._catching_up: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Be given what comes, unless something that came before lies with uvicorn yet."""
        if self._socket.queue.empty():
            self._socket.taker = self._hear

    def end(self) -> None:
        """Take nothing more."""
        self._socket.taker = None
        self._unheard.clear()
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _hear(self, message: str | bytes) -> None:
        hearer = self._hearer
        if self._catching_up is not None:
            self._unheard.append(message)
        elif not hearer.is_gone:
            self._take(message)
            if hearer.is_full and not hearer.is_gone:
                self._socket.hold()
                self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    def _take_unheard(self) -> None:
        while self._unheard and not self._hearer.is_full:
            message = self._unheard.popleft()
            if not self._hearer.is_gone:
                self._take(message)

    async def _catch_up(self) -> None:
        try:
            while self._hearer.is_full or self._unheard:
                await self._hearer.wait_for_room()
                if self._hearer.is_gone:
                    return
                self._take_unheard()
        except Exception:
            # Held for ever, it would look alive to whoever is at its other end.
            _log.exception("a connection failed in a way that nobody thought of")
            self._socket.abort()
            return
        self._catching_up = None
        self._socket.go_on()
