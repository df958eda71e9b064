"""The ports of a plane in this process: a request goes straight to the key space and the parts that run beside it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from holdfast.backends.objects import ObjectStore
from holdfast.errors import InvalidArgument
from holdfast.kv import Database, Result
from holdfast.layers.blobs import Verify
from holdfast.plane.execute import Operation, operation_of
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.sync.blobs import BlobStore
from holdfast.runtime.sync.worlds import WorldStore
from holdfast.runtime.upkeep import Upkeep
from holdfast.runtime.worlds import AsyncWorldStore
from holdfast.tiers import Tier
from holdfast.wire.requests import Answer, Request


class EmbeddedPort:
    """Executes requests while the caller's thread waits."""

    def __init__(
        self, database: Database, objects: ObjectStore | None = None, *, verify: Verify = Verify.ALWAYS
    ) -> None:
        self.database = database
        self.objects = objects  # None on PostgreSQL until somebody names a store that all nodes reach.
        self.blobs = BlobStore(database, objects, verify=verify)
        self.worlds = WorldStore(database, objects, self.blobs)
        self.upkeep: Upkeep | None = None

    def call(self, request: Request[Answer]) -> Answer:
        operation = operation_of(request)
        answer: Answer
        if operation.run is None:
            answer = _server(operation)(self, request)
        else:
            run = self.database.read if operation.reads_only else self.database.transact
            answer = run(operation.run, request, tier=request.tier)
        return answer

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        answer: Answer = _server(operation_of(request))(self, request, chunks)
        return answer

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        stream: Iterator[bytes] = _server(operation_of(request))(self, request)
        return stream

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return self.database.transact(work, *args, tier=tier, **kwargs)

    def close(self) -> None:
        _close(self.upkeep, self.database)


class AsyncEmbeddedPort:
    """Executes requests while the caller's event loop goes on."""

    def __init__(
        self, database: Database, objects: ObjectStore | None = None, *, verify: Verify = Verify.ALWAYS
    ) -> None:
        self.database = database
        self.objects = objects
        self.blobs = AsyncBlobStore(database, objects, verify=verify)
        self.worlds = AsyncWorldStore(database, objects, self.blobs)
        self.upkeep: Upkeep | None = None

    async def call(self, request: Request[Answer]) -> Answer:
        operation = operation_of(request)
        answer: Answer
        if operation.run is None:
            answer = await _server(operation)(self, request)
        else:
            run = self.database.read_async if operation.reads_only else self.database.transact_async
            answer = await run(operation.run, request, tier=request.tier)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        answer: Answer = await _server(operation_of(request))(self, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        stream: AsyncIterator[bytes] = await _server(operation_of(request))(self, request)
        return stream

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return await self.database.transact_async(work, *args, tier=tier, **kwargs)

    async def close(self) -> None:
        # Closing syncs and waits for threads, which an event loop must not.
        await asyncio.to_thread(_close, self.upkeep, self.database)


def _close(upkeep: Upkeep | None, database: Database) -> None:
    if upkeep is not None:
        upkeep.stop()
    database.close()


def _server(operation: Operation) -> Callable[..., Any]:
    if operation.serve is None:
        raise InvalidArgument("This operation has no stream; call it instead")
    return operation.serve
