"""The client's WebSocket: any received data counts as a sign of life, and short messages bypass the library."""

import asyncio
from typing import Any, Final

from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from fastness.wire.websocket_frames import ShortFrameReader, client_frame

_READ_BYTES: Final = 262_144


class Socket(ShortFrameReader, ClientConnection, asyncio.BufferedProtocol):
    """A connection that is closed when nothing at all arrives after a ping.

    Waiting for the pong itself would close connections that are merely slow: the pong queues behind answers, and a
    server with many answers to send does not read the ping.

    It reads into its own buffer. Without one, asyncio allocates 256 KiB for every read, which the allocator requests
    from the system and returns each time: about 25 µs, a tenth of a call.
    """

    _received_at = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        rest = self.read_short(self.protocol, data)
        if rest:
            super().data_received(rest)

    def process_event(self, event: Any) -> None:
        if self.on_message is not None and isinstance(event, Frame) and event.opcode is Opcode.BINARY and event.fin:
            self.on_message(bytes(event.data))
        else:
            super().process_event(event)

    def write_now(self, message: bytes) -> bool:
        """Write the message. Returns False if the socket is paused or closing."""
        if self.paused or self.protocol.state is not State.OPEN or self.transport.is_closing():
            return False
        self.transport.write(client_frame(message))
        return True

    async def keepalive(self) -> None:
        assert self.ping_interval is not None
        assert self.ping_timeout is not None
        while True:
            await asyncio.sleep(self.ping_interval)
            pinged_at = self.loop.time()
            await self.ping()
            await asyncio.sleep(self.ping_timeout)
            if self._received_at < pinged_at:
                async with self.send_context():
                    self.protocol.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
