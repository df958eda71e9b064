"""A TCP proxy that injects network faults: delays, cuts in the middle of a frame, lost data, silence, and refusals.

Faults are drawn from a random seed. Delayed connections overtake each other.
"""

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

_CHUNK_BYTES = 65_536
_HOLD_SECONDS = 0.01  # How often a pump that holds data looks whether it may pass it on.


class Proxy:
    """Proxies a loopback port or a Unix socket, in its own thread. Its attributes can be changed at any time."""

    def __init__(self, target: int | str, seed: int = 0) -> None:
        self.target = target
        self.delay_seconds = 0.0  # The longest delay of each chunk.
        self.bytes_max = 0  # A connection is cut after up to this many bytes. 0: never.
        self.swallows = False  # New connections are accepted, and their data is dropped.
        self.mutes = False  # Requests are passed on, and responses are dropped.
        self.holds = False  # Data is kept, in both directions, and passed on afterwards.
        self.refuses = False  # New connections are closed at once.
        self.dropped_bytes = 0  # Of responses, while `mutes` was set.
        self.accepted = 0
        self.cuts = 0
        self.port = 0
        self._rng = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._forwards: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut_all(self) -> None:
        """Cut all open connections; later ones are not muted."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        # Not asyncio.start_server: the sockets of connections that it has just accepted stay open when it is closed.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._loop.add_reader(listener, self._accept, listener)
            self._ready.set()
            await self._stopping.wait()
            self._loop.remove_reader(listener)
        for task in self._forwards:
            task.cancel()
        await asyncio.gather(*self._forwards, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self.accepted += 1
        if self.refuses:
            connection.close()
            return
        forward = asyncio.create_task(self._forward(connection))
        self._forwards.add(forward)
        forward.add_done_callback(self._forwards.discard)
        forward.add_done_callback(lambda _: connection.close())

    def _cut_all(self) -> None:
        self.cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self.mutes = False  # Only now, so that no response in flight gets through.

    async def _forward(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with suppress(OSError, asyncio.CancelledError), self._registered(writer):
            if self.swallows:
                while await reader.read(_CHUNK_BYTES):
                    pass
                return
            target_reader, target_writer = await self._connect()
            with self._registered(target_writer):
                left = [self._rng.randrange(1, self.bytes_max) if self.bytes_max else 0]
                pumps = (
                    self._pump(reader, target_writer, left),
                    self._pump(target_reader, writer, left, is_response=True),
                )
                await asyncio.gather(*pumps)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.target, str):
            return await asyncio.open_unix_connection(self.target)
        return await asyncio.open_connection("127.0.0.1", self.target)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int], *, is_response: bool = False
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self.mutes and is_response:
                self.dropped_bytes += len(data)
                continue
            while self.holds:
                await asyncio.sleep(_HOLD_SECONDS)
            if self.delay_seconds:
                await asyncio.sleep(self._rng.random() * self.delay_seconds)
            if left[0]:
                data, left[0] = data[: left[0]], max(left[0] - len(data), 0)
                if not left[0]:
                    writer.write(data)
                    with suppress(OSError):
                        await writer.drain()
                    self.cuts += 1
                    raise ConnectionAbortedError
            writer.write(data)
            await writer.drain()
        writer.close()

    @contextmanager
    def _registered(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
