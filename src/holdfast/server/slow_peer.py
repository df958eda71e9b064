"""Connections whose other end has to take what it is sent.

uvicorn waits for a peer that has stopped reading without an end: a connection that it closes is not closed before the
last byte was taken. Both kinds of connections are watched alike, while writing is paused and while they close: as long
as what is unread changes, somebody reads.

What the kernel has taken over is the kernel's to watch. It takes megabytes, and a feed with a few hundred bytes a
second would not be found out within hours.
"""

import asyncio
import logging
import socket
import struct
from typing import Any, Final

from holdfast.limits import UNREAD_SECONDS_MAX

_AT_ONCE: Final = struct.pack("ii", 1, 0)


class Taken:
    """The part of a protocol that cuts a peer which takes nothing of what waits for it for `unread_seconds`."""

    unread_seconds = UNREAD_SECONDS_MAX
    log: logging.Logger

    loop: asyncio.AbstractEventLoop
    transport: Any

    _looking: asyncio.TimerHandle | None = None

    def bound_kernel(self) -> None:
        """Have the kernel end the connection, too, if the peer has no room for what waits for so long, or is gone."""
        connection = self.transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):  # Linux.
            milliseconds = max(round(self.unread_seconds * 1_000), 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def look(self) -> None:
        """Begin to watch whether what was sent is taken."""
        if self._looking is None:
            self._look_again(None)

    def stop_looking(self) -> None:
        """Nothing waits any more, or the connection is gone."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def abort(self) -> None:
        """End the connection without waiting for anybody."""
        # Without this the kernel goes on for a while with what it has taken over, and the peer does not hear of it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _look_again(self, unread: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._looking = None
        elif left != unread:
            self._looking = self.loop.call_later(self.unread_seconds, self._look_again, left)
        else:
            self.log.warning("cut: %s bytes were not read for %g s", left, self.unread_seconds)
            self.abort()
