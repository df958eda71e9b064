"""WebSockets whose other end has to take what it is sent, and that a door can have to itself.

uvicorn waits for a peer that has stopped reading without an end: a connection that it closes is not closed before the
last byte was taken. And it takes a peer for dead whose pong it does not hear, although while a stream is full nothing
is read from it, pongs neither.

A door that has thousands of quiet connections finds its socket in the scope, and need not have a task wait for each of
its messages and another one for each of its own: they cost more than most of what is said.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.limits import UNREAD_SECONDS_MAX

_log = logging.getLogger("holdfast.stream")
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_EXTENSION: Final = "holdfast.socket"
_TEXT, _BINARY = 0x81, 0x82  # The first byte of a message in one frame.


class BoundedSocket(WebSocketsSansIOProtocol):
    """A connection that is cut if its peer takes nothing of what waits for it for `seconds`."""

    seconds = UNREAD_SECONDS_MAX

    taker: Callable[[str | bytes], None] | None = None  # Is given messages as they come; nobody else is then.

    _looking: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> "BoundedSocket | None":
        """The socket of a connection, if it is one of these."""
        found: BoundedSocket | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("socket")
        return found

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # It was not refused.
            self.scope["extensions"][_EXTENSION] = {"socket": self}

    def send_receive_event_to_app(self) -> None:
        if self.taker is None or self.close_sent:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        try:
            message = data.decode() if self.curr_msg_data_type == "text" else bytes(data)
        except UnicodeDecodeError:
            super().send_receive_event_to_app()
            return
        self.frames = []
        self.taker(message)

    def hold(self) -> None:
        """Read nothing more until `go_on`."""
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        if self.read_paused and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def write_now(self, message: str | bytes) -> bool:
        """Whether the message was written: not if the peer has still to take others, or the connection ends."""
        if not self.writable.is_set() or self.close_sent or self.disconnected or self.transport.is_closing():
            return False
        kind, data = (_TEXT, message.encode()) if isinstance(message, str) else (_BINARY, message)
        size = len(data)
        if size < 126:
            head = bytes((kind, size))
        elif size < 1 << 16:
            head = bytes((kind, 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((kind, 127)) + size.to_bytes(8, "big")
        self.transport.write(head + data)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._look()  # It is closed as soon as everything was taken.

    def keepalive_timeout(self) -> None:
        if self.read_paused or not self.writable.is_set():
            # The pong lies there unread, or the ping stands behind what is being taken.
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():  # Otherwise it is closed by now.
            self._abort()

    def _look(self) -> None:
        """While writing is paused, or the connection closes, nothing is added: what is unread can only become less."""
        if self._looking is None:
            self._look_again(None)

    def _look_again(self, unread: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._looking = None
        elif unread is None or left < unread:
            self._looking = self.loop.call_later(self.seconds, self._look_again, left)
        else:
            _log.warning("cut: %s bytes were not read for %g s", left, self.seconds)
            self._abort()

    def _abort(self) -> None:
        # Without this the kernel goes on for a while with what it has taken over, and the peer does not hear of it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
