"""The ports of a plane in another process: the same requests, carried by a stream."""

import asyncio
import ssl
import threading
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from holdfast.client.bodies import receive_body, send_body
from holdfast.client.connection import Connection
from holdfast.client.keeper import RemoteKeeper
from holdfast.errors import NotEmbedded
from holdfast.tiers import Tier
from holdfast.wire.blobs import Body, GetBlob, OpenBlob, PutBlob, WriteBlob
from holdfast.wire.requests import Answer, Request

Result = TypeVar("Result")

# These change nothing that could be doubled: sending them again needs no key.
_HARMLESS = ("Get", "List", "Read", "Describe", "Scan", "Peek", "Find", "Check", "Log", "Receive", "Acquire", "Open")


_FRAME_DATA_BYTES_MAX = 262_144  # A larger blob goes by itself, and does not hold up other calls.


class AsyncRemotePort:
    """Carries requests to a server while the caller's event loop goes on."""

    def __init__(
        self, url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, patience_seconds: float = 30.0
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.tls = tls
        self.keeper = RemoteKeeper(self)
        self._patience_seconds = patience_seconds
        self._connection: Connection | None = None

    async def call(self, request: Request[Answer]) -> Answer:
        connection = self._connection
        if connection is None:
            connection = self._connection = Connection(
                self.url, token=self.token, tls=self.tls, patience_seconds=self._patience_seconds
            )
        key = None if type(request).__name__.startswith(_HARMLESS) else uuid.uuid4().hex
        answer: Any
        if isinstance(request, GetBlob):
            answer = await self._get(request)
        elif isinstance(request, PutBlob) and len(request.data) > _FRAME_DATA_BYTES_MAX:
            answer = await send_body(self, WriteBlob(request.universe), _single(request.data))
        else:
            answer = await connection.call(request, key=key)  # type: ignore[arg-type]
        found: Answer = answer
        return found

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        return await send_body(self, request, chunks)

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        return await receive_body(self, request)

    async def _get(self, request: GetBlob) -> Body:
        """A blob, whole. It is streamed all the same, so that a large one does not hold up other calls."""
        stream = await receive_body(self, OpenBlob(request.hash, request.universe))
        return Body(b"".join([part async for part in stream]))

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        del work, args, tier, kwargs
        raise _not_embedded()

    def execute(self, tx: Any, request: Request[Any]) -> Any:
        del tx, request
        raise _not_embedded()

    async def close(self) -> None:
        self.keeper.close()
        if self._connection is not None:
            await self._connection.close()


class RemotePort:
    """Carries requests to a server while the caller's thread waits; a thread of its own runs the event loop."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-client", daemon=True)
        self._thread.start()
        self._port = AsyncRemotePort(url, **options)
        self.url = self._port.url
        self.keeper = self._port.keeper
        self.execute = self._port.execute

    def call(self, request: Request[Answer]) -> Answer:
        return self._wait(self._port.call(request))

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        async def each() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return self._wait(self._port.send(request, each()))

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        stream = self._wait(self._port.receive(request))

        def each() -> Iterator[bytes]:
            while True:
                try:
                    yield self._wait(anext(stream))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return

        return each()

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return self._wait(self._port.transact(work, *args, tier=tier, **kwargs))

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait(self._port.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _single(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _not_embedded() -> NotEmbedded:
    return NotEmbedded("The plane is in another process, where a function cannot run; use plane.atomic() instead")
