"""Disconnects peers that stopped reading.

uvicorn waits without limit for such a peer: a connection that it closes stays open until the last byte is written. HTTP
and WebSocket connections are checked alike, while writing is paused and while they close: as long as the size of the
write buffer changes, the peer reads.

The kernel's send buffer has TCP_USER_TIMEOUT instead: it holds megabytes, and a feed of a few hundred bytes per second
would take hours to fill it.
"""

import asyncio
import logging
import socket
import struct
from typing import Any, Final

from fastness.limits import SLOW_PEER_SECONDS_MAX

_LINGER_OFF: Final = struct.pack("ii", 1, 0)  # Reset the connection and drop unsent bytes.


class SlowPeerGuard:
    """Protocol mixin that aborts the connection if the peer reads nothing for `unread_seconds`."""

    unread_seconds = SLOW_PEER_SECONDS_MAX
    log: logging.Logger

    loop: asyncio.AbstractEventLoop
    transport: Any

    _write_timer: asyncio.TimerHandle | None = None

    def set_kernel_timeout(self) -> None:
        """Let the kernel reset the connection, too, if sent bytes stay unacknowledged for `unread_seconds`."""
        connection = self.transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):  # Linux.
            milliseconds = max(round(self.unread_seconds * 1_000), 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def start_write_timer(self) -> None:
        """Start to check whether the write buffer shrinks."""
        if self._write_timer is None:
            self._check_progress(None)

    def stop_write_timer(self) -> None:
        """Stop checking: the write buffer is empty, or the connection is lost."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """Reset the connection at once."""
        # Without SO_LINGER the kernel keeps sending its buffer, and the peer does not notice the abort.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_OFF)
        self.transport.abort()

    def _check_progress(self, before: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._write_timer = None
        elif left != before:
            self._write_timer = self.loop.call_later(self.unread_seconds, self._check_progress, left)
        else:
            self.log.warning("disconnected: the client left %s bytes unread for %g s", left, self.unread_seconds)
            self.abort()
