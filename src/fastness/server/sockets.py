"""WebSocket protocol class for uvicorn: slow peers are disconnected, and endpoints may bypass uvicorn's queues.

uvicorn drops a peer whose pong does not arrive. While a stream is full, nothing is read from it, not even pongs, so the
deadline is extended then.

An endpoint finds its socket in the ASGI scope. It can receive messages by callback and write them without a task, which
would cost more time than handling most messages.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from fastness.server.slow_peer import SlowPeerGuard
from fastness.wire.websocket_frames import BINARY, TEXT, ShortFrameReader, server_frame

_log = logging.getLogger("fastness.stream")
_EXTENSION: Final = "fastness.socket"


class BoundedSocket(SlowPeerGuard, ShortFrameReader, WebSocketsSansIOProtocol):
    """A WebSocket connection that is aborted if its peer stops reading."""

    log = _log
    opcodes = (TEXT, BINARY)
    is_masked = True

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> "BoundedSocket | None":
        """The socket of an ASGI connection; None if the server uses another protocol class."""
        found: BoundedSocket | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("socket")
        return found

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # The handshake was not refused.
            self.scope["extensions"][_EXTENSION] = {"socket": self}

    def data_received(self, data: bytes) -> None:
        rest = self.read_short(self.conn, data)
        if rest and not self.transport.is_closing():
            super().data_received(rest)

    def send_receive_event_to_app(self) -> None:
        if self.on_message is None or self.close_sent:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        try:
            message = data.decode() if self.curr_msg_data_type == "text" else bytes(data)
        except UnicodeDecodeError:
            if self.conn.state is State.OPEN:  # Otherwise an earlier message is closing it.
                super().send_receive_event_to_app()
            return
        self.frames = []
        self.on_message(message)

    def pause_receiving(self) -> None:
        """Read nothing more until `resume_receiving`."""
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def resume_receiving(self) -> None:
        """Read again."""
        if self.read_paused and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def write_now(self, message: bytes, opcode: int = BINARY) -> bool:
        """Write a message without waiting; return False if the write buffer is full or the connection is closing."""
        if not self.writable.is_set() or self.close_sent or self.disconnected or self.transport.is_closing():
            return False
        self.transport.write(server_frame(message, opcode))
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_write_timer()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self.start_write_timer()  # The connection closes once its write buffer is empty.

    def keepalive_timeout(self) -> None:
        if self.read_paused or not self.writable.is_set():
            # The pong is still unread, or the ping is queued behind unsent data.
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():  # Otherwise the close frame was sent.
            self.abort()
