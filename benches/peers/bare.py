"""A minimal Python server: the cost of a round trip with a sync, as a lower bound for a Python implementation.

    python -m benches.peers.bare FOLDER         prints its port

A message is a length of four bytes, then MessagePack. The server writes the three keys of a put through rocksdict,
syncs the log and answers. It has no checks, no idempotency keys and no way to receive messages.
"""

import asyncio
import struct
import sys
from typing import Any, Final

import msgspec
import uvloop
from rocksdict import Options, Rdict, WriteBatch

_LENGTH: Final = struct.Struct(">I")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class Frames(asyncio.BufferedProtocol):
    """Splits incoming data into messages. Its own buffer saves asyncio an allocation per read."""

    transport: Any = None

    def __init__(self) -> None:
        self._data = b""
        self._buffer = memoryview(bytearray(65_536))

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._data += self._buffer[:nbytes]
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message, self._data = _decode(self._data[_LENGTH.size : end]), self._data[end:]
            self.on_message(message)

    def send(self, message: Any) -> None:
        data = _encode(message)
        self.transport.write(_LENGTH.pack(len(data)) + data)

    def on_message(self, message: Any) -> None:
        raise NotImplementedError


class BareServer(Frames):
    """Writes each message, syncs and answers."""

    def __init__(self, database: Rdict) -> None:
        super().__init__()
        self._database = database
        self._count = 0

    def on_message(self, message: Any) -> None:
        self._count += 1
        batch = WriteBatch(raw_mode=True)
        batch.put(b"message" + self._count.to_bytes(8, "big"), message)
        batch.put(b"count", self._count.to_bytes(8, "big"))
        batch.put(b"key" + self._count.to_bytes(8, "big"), b"answer")
        self._database.write(batch)
        self._database.flush_wal(True)
        self.send(self._count)


class BareClient(Frames):
    """A client that makes one call at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._answer: asyncio.Future[Any] | None = None

    @classmethod
    async def connect(cls, url: str, queue: str) -> "BareClient":
        del queue
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", int(url))
        return client

    def on_message(self, message: Any) -> None:
        assert self._answer is not None
        self._answer.set_result(message)

    async def put(self, body: bytes) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self.send(body)
        await self._answer

    async def lock_and_unlock(self, owner: str) -> None:
        await self.put(owner.encode())
        await self.put(owner.encode())

    async def close(self) -> None:
        self.transport.close()


async def serve(folder: str) -> None:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    database = Rdict(folder, options)
    server = await asyncio.get_running_loop().create_server(lambda: BareServer(database), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
