"""WebSockets whose other end has to take what it is sent, and that a door can have to itself.

uvicorn takes a peer for dead whose pong it does not hear, although while a stream is full nothing is read from it,
pongs neither.

A door that has thousands of quiet connections finds its socket in the scope, and need not have a task wait for each of
its messages and another one for each of its own: they cost more than most of what is said.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from holdfast.server.slow_peer import Taken
from holdfast.wire.websocket_frames import BINARY, TEXT, ShortMessages, framed

_log = logging.getLogger("holdfast.stream")
_EXTENSION: Final = "holdfast.socket"


class BoundedSocket(Taken, ShortMessages, WebSocketsSansIOProtocol):
    """A connection that is cut if its peer takes nothing of what waits for it."""

    log = _log
    kinds = (TEXT, BINARY)
    are_masked = True

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> "BoundedSocket | None":
        """The socket of a connection, if it is one of these."""
        found: BoundedSocket | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("socket")
        return found

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # It was not refused.
            self.scope["extensions"][_EXTENSION] = {"socket": self}

    def data_received(self, data: bytes) -> None:
        rest = self.take_short(self.conn, data)
        if rest and not self.transport.is_closing():
            super().data_received(rest)

    def send_receive_event_to_app(self) -> None:
        if self.taker is None or self.close_sent:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        try:
            message = data.decode() if self.curr_msg_data_type == "text" else bytes(data)
        except UnicodeDecodeError:
            if self.conn.state is State.OPEN:  # Otherwise it is being closed for the one before it.
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

    def write_now(self, message: bytes, kind: int = BINARY) -> bool:
        """Whether the message was written: not if the peer has still to take others, or the connection ends."""
        if not self.writable.is_set() or self.close_sent or self.disconnected or self.transport.is_closing():
            return False
        self.transport.write(framed(message, kind))
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self.look()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_looking()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self.look()  # It is closed as soon as everything was taken.

    def keepalive_timeout(self) -> None:
        if self.read_paused or not self.writable.is_set():
            # The pong lies there unread, or the ping stands behind what is being taken.
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():  # Otherwise it is closed by now.
            self.abort()
