"""WebSockets whose other end has to take what it is sent.

uvicorn waits for a peer that has stopped reading without an end: a connection that it closes is not closed before the
last byte was taken. And it takes a peer for dead whose pong it does not hear, although while a stream is full nothing
is read from it, pongs neither.
"""

import asyncio
import logging
import socket
import struct
from typing import Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.limits import UNREAD_SECONDS_MAX

_log = logging.getLogger("holdfast.stream")
_AT_ONCE: Final = struct.pack("ii", 1, 0)


class BoundedSocket(WebSocketsSansIOProtocol):
    """A connection that is cut if its peer takes nothing of what waits for it for `seconds`."""

    seconds = UNREAD_SECONDS_MAX

    _looking: asyncio.TimerHandle | None = None

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
