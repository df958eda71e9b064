"""WebSockets whose other end has to take what it is sent, and that a door can have to itself.

uvicorn takes a peer for dead whose pong it does not hear, although while a stream is full nothing is read from it,
pongs neither.

A door that has thousands of quiet connections finds its socket in the scope, and need not have a task wait for each of
its messages and another one for each of its own: they cost more than most of what is said. What such a door is sent is
mostly short messages in one frame each; those are read here, and everything else by websockets, a whole frame at a time
where that is possible, so that it is known when one begins.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State
from websockets.streams import StreamReader

from holdfast.server.unread import Taken

try:
    from websockets.speedups import apply_mask
except ImportError:  # There is no compiled one for this machine.
    from websockets.utils import apply_mask

_log = logging.getLogger("holdfast.stream")
_EXTENSION: Final = "holdfast.socket"
_TEXT, _BINARY = 0x81, 0x82  # The first byte of a message in one frame.
_MASKED, _TWO_BYTES, _EIGHT_BYTES = 0x80, 126, 127  # The second byte: a flag, and a length or where one follows.
_MASK_BYTES: Final = 4
_BETWEEN_FRAMES: Final = StreamReader.at_eof.__code__  # Where websockets waits for the next frame.


class BoundedSocket(Taken, WebSocketsSansIOProtocol):
    """A connection that is cut if its peer takes nothing of what waits for it."""

    log = _log
    taker: Callable[[str | bytes], None] | None = None  # Is given messages as they come; nobody else is then.
    is_between_frames = False  # As far as websockets was told.
    begun = b""  # Of a frame that is not whole yet.

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
        if self.begun:
            data, self.begun = self.begun + data, b""
        read = self._read_short(data) if self.taker is not None and self._can_read() else 0
        if read < len(data) and not self.transport.is_closing():
            self.is_between_frames = False
            super().data_received(data[read:] if read else data)

    def _can_read(self) -> bool:
        """Whether the next byte begins a frame, and the frame a message."""
        if not self.is_between_frames:
            conn, parser = self.conn, self.conn.parser
            while (inner := getattr(parser, "gi_yieldfrom", None)) is not None:
                parser = inner
            self.is_between_frames = (
                getattr(parser, "gi_code", None) is _BETWEEN_FRAMES
                and conn.current_size is None
                and conn.state is State.OPEN
            )
        return self.is_between_frames

    def _read_short(self, data: bytes) -> int:
        """Give the taker the messages in front of what came; how many bytes those were, with what is kept for later."""
        begin, size = 0, len(data)
        while begin < size:
            taker = self.taker
            if taker is None or self.close_sent:
                return begin
            if size - begin < 2:
                break
            kind, length = data[begin], data[begin + 1] - _MASKED
            if kind not in (_TEXT, _BINARY) or length < 0 or length == _EIGHT_BYTES:
                return begin
            at = begin + 2
            if length == _TWO_BYTES:
                at += 2
                length = int.from_bytes(data[begin + 2 : at], "big")
            mask_end = at + _MASK_BYTES
            end = mask_end + length
            if end > size or mask_end > size:
                break
            message: str | bytes = apply_mask(data[mask_end:end], data[at:mask_end])
            if kind == _TEXT:
                try:
                    message = message.decode()  # type: ignore[union-attr]
                except UnicodeDecodeError:
                    return begin
            begin = end
            taker(message)
        self.begun = data[begin:]
        return size

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
