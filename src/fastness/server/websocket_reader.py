"""Reads one connection's messages by callback, with back-pressure; no task waits for each message.

    message ──► handled ──► capacity left? ──► next message
                               └ no ──► reading is paused, messages are queued ──► capacity ──► handled in order

The queue holds at most the messages of one read of the socket. Capacity is checked after each message, so a receiver
that filled up meanwhile by what it sends handles one more message.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fastness.server.sockets import BoundedSocket

_log = logging.getLogger("fastness.stream")


class Receiver(Protocol):
    """Handles the messages, and says when it can handle no more."""

    @property
    def is_full(self) -> bool:
        """Whether no more messages can be handled now."""

    @property
    def is_closed(self) -> bool:
        """Whether no more messages are to be handled at all."""

    async def wait_for_capacity(self) -> None:
        """Return when there is capacity, or the connection has closed."""


class WebsocketReader:
    """Reads one connection's messages, with back-pressure."""

    def __init__(self, socket: BoundedSocket, receiver: Receiver, handle: Callable[[str | bytes], None]) -> None:
        self._socket = socket
        self._receiver = receiver
        self._handle = handle
        self._queued: deque[str | bytes] = deque()
        self._draining: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Receive messages from the socket, unless uvicorn's queue still holds earlier ones."""
        if self._socket.queue.empty():
            self._socket.on_message = self._on_message

    def stop(self) -> None:
        """Receive nothing more."""
        self._socket.on_message = None
        self._queued.clear()
        if self._draining is not None:
            self._draining.cancel()

    def _on_message(self, message: str | bytes) -> None:
        receiver = self._receiver
        if self._draining is not None:
            self._queued.append(message)
        elif not receiver.is_closed:
            self._handle(message)
            if receiver.is_full and not receiver.is_closed:
                self._socket.pause_receiving()
                self._draining = asyncio.get_running_loop().create_task(self._drain())

    def _handle_queued(self) -> None:
        while self._queued and not self._receiver.is_full:
            message = self._queued.popleft()
            if not self._receiver.is_closed:
                self._handle(message)

    async def _drain(self) -> None:
        try:
            while self._receiver.is_full or self._queued:
                await self._receiver.wait_for_capacity()
                if self._receiver.is_closed:
                    return
                self._handle_queued()
        except Exception:
            # Paused for ever, the connection would seem alive to the client.
            _log.exception("aborted: unexpected error in a connection")
            self._socket.abort()
            return
        self._draining = None
        self._socket.resume_receiving()
