"""WebSocket protocol class for uvicorn: slow peers are disconnected, and endpoints may bypass uvicorn's queues.

uvicorn drops a peer whose pong does not arrive. While a stream is full, nothing is read from it, not even pongs, so the
deadline is extended then.

A frame costs as much time as a call, also an empty one. So a peer may send a bounded number of frames without a
message: fragments, pings and pongs. They are counted from the last message that the endpoint took. Between messages,
they are counted from the server's last ping: a connection that stays quiet for days has its pongs.

An endpoint finds its socket in the ASGI scope. It can receive messages by callback and write them without a task, which
would cost more time than handling most messages.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import Frame
from websockets.protocol import State
from websockets.server import ServerProtocol

from fastness.limits import WEBSOCKET_FRAMES_MAX
from fastness.server.slow_peer import SlowPeerGuard
from fastness.wire.websocket_frames import BINARY, TEXT, ShortFrameReader, server_frame

_log = logging.getLogger("fastness.stream")
_EXTENSION: Final = "fastness.socket"


class BoundedProtocol(ServerProtocol):
    """The parser of a connection, which fails it if too many frames arrive without a message."""

    frames = 0

    def recv_frame(self, frame: Frame) -> None:
        self.frames += 1
        if self.frames > WEBSOCKET_FRAMES_MAX:
            raise ProtocolError(f"over {WEBSOCKET_FRAMES_MAX} frames without a message; send fewer, larger ones")
        super().recv_frame(frame)


class BoundedSocket(SlowPeerGuard, ShortFrameReader, WebSocketsSansIOProtocol):
    """A WebSocket connection that is aborted if its peer stops reading."""

    conn: BoundedProtocol
    log = _log
    opcodes = (TEXT, BINARY)
    is_masked = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        made = self.conn
        self.conn = BoundedProtocol(
            extensions=made.available_extensions, max_size=self.config.ws_max_size, logger=made.logger
        )

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
        self.conn.frames = 0
        self.on_message(message)

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self.conn.frames = 0
        return message

    def send_keepalive_ping(self) -> None:
        if not self.frames:  # Otherwise a message has begun, whose fragments are counted to its end.
            self.conn.frames = 0
        super().send_keepalive_ping()

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
