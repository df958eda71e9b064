"""WebSockets that are alive as long as anything comes."""

import asyncio

from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode


class Socket(ClientConnection):
    """A connection that is given up when nothing at all was heard after a ping.

    To wait for the pong would give up connections that are only slow: it stands behind answers that are being read, and
    a server that has many of those to send does not read the ping.
    """

    _heard = 0.0

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        super().data_received(data)

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
