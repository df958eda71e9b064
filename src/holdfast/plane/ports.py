"""The ports of a plane in this process: a request goes straight to the key space."""

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.backends.objects import ObjectStore
from holdfast.kv import Database, Result
from holdfast.plane.execute import operation_of
from holdfast.tiers import Tier
from holdfast.wire.requests import Answer, Request


class EmbeddedPort:
    """Executes requests while the caller's thread waits."""

    def __init__(self, database: Database, objects: ObjectStore | None = None) -> None:
        self.database = database
        self.objects = objects  # None on PostgreSQL until somebody names a store that all nodes reach.

    def call(self, request: Request[Answer]) -> Answer:
        operation = operation_of(request)
        run = self.database.read if operation.reads_only else self.database.transact
        answer: Answer = run(operation.run, request, tier=request.tier)
        return answer

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return self.database.transact(work, *args, tier=tier, **kwargs)

    def close(self) -> None:
        self.database.close()


class AsyncEmbeddedPort:
    """Executes requests while the caller's event loop goes on."""

    def __init__(self, database: Database, objects: ObjectStore | None = None) -> None:
        self.database = database
        self.objects = objects  # None on PostgreSQL until somebody names a store that all nodes reach.

    async def call(self, request: Request[Answer]) -> Answer:
        operation = operation_of(request)
        run = self.database.read_async if operation.reads_only else self.database.transact_async
        answer: Answer = await run(operation.run, request, tier=request.tier)
        return answer

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return await self.database.transact_async(work, *args, tier=tier, **kwargs)

    async def close(self) -> None:
        # Closing syncs and waits for threads, which an event loop must not.
        await asyncio.to_thread(self.database.close)
