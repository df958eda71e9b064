"""WebSockets that are alive as long as anything comes, and carry messages without a detour."""

import asyncio
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from holdfast.wire.shorts import ShortMessages, masked


class Socket(ShortMessages, ClientConnection):
    """A connection that is given up when nothing at all was heard after a ping.

    To wait for the pong would give up connections that are only slow: it stands behind answers that are being read, and
    a server that has many of those to send does not read the ping.
    """

    _heard = 0.0

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
