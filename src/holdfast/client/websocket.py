"""WebSockets that are alive as long as anything comes, and carry messages without a detour."""

import asyncio
from typing import Any, Final

from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from holdfast.wire.websocket_frames import ShortMessages, masked

_READ_BYTES: Final = 262_144  # At a time.


class Socket(ShortMessages, ClientConnection, asyncio.BufferedProtocol):
    """A connection that is given up when nothing at all was heard after a ping.

    To wait for the pong would give up connections that are only slow: it stands behind answers that are being read, and
    a server that has many of those to send does not read the ping.

    It brings its own buffer. Without one, asyncio has 256 KiB allocated for every read, which the allocator takes from
    the system and gives back each time: some 25 µs, a tenth of a call.
    """

    _heard = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        rest = self.take_short(self.protocol, data)
        if rest:
            super().data_received(rest)

    def process_event(self, event: Any) -> None:
        if self.taker is not None and isinstance(event, Frame) and event.opcode is Opcode.BINARY and event.fin:
            self.taker(bytes(event.data))
        else:
            super().process_event(event)

    def write_now(self, message: bytes) -> bool:
        """Whether the message was written: not if others have still to be taken, or the connection ends."""
        if self.paused or self.protocol.state is not State.OPEN or self.transport.is_closing():
            return False
        self.transport.write(masked(message))
        return True

    async def keepalive(self) -> None:
        assert self.ping_interval is not None
        assert self.ping_timeout is not None
        while True:
            await asyncio.sleep(self.ping_interval)
            asked = self.loop.time()
            await self.ping()
            await asyncio.sleep(self.ping_timeout)
            if self._heard < asked:
                async with self.send_context():
                    self.protocol.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
