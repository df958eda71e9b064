"""What queues do beyond one transaction: waiting, fetching payloads, and working through many messages."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.kv import Database
from holdfast.layers import queues
from holdfast.layers.once import Once
from holdfast.layers.queues import QueueKey
from holdfast.limits import MESSAGES_MAX, PAYLOAD_FETCH_BYTES_MAX
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.dispatcher import AsyncDispatcher
from holdfast.tiers import Tier
from holdfast.wire.queues import Deliveries, Moved, QueueStats

Tell = Callable[[Sequence[tuple[Any, ...]]], None]  # Of what happened, once it is committed.


class AsyncQueueStore:
    """Receives, counts, empties and redrives."""

    def __init__(self, database: Database, dispatcher: AsyncDispatcher, blobs: AsyncBlobStore, tell: Tell) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._tell = tell

    async def receive(
        self, queue: QueueKey, *, wait_ms: int, tier: Tier, call: Once | None = None, **options: Any
    ) -> Deliveries:
        """At least one message, unless `wait_ms` pass without any; with its payload, unless it is a large blob.

        A `call` that has leased before is told again what it still leases.
        """
        leased = await self._dispatcher.receive(queue, wait_ms=wait_ms, tier=tier, call=call, **options)
        deliveries = queues.deliveries_of(leased)
        try:
            for index, delivery in enumerate(deliveries):
                if delivery.blob is not None and delivery.size <= PAYLOAD_FETCH_BYTES_MAX:
                    with suppress(HoldfastError):  # Whoever reads it will learn what is wrong, and settle it.
                        payload = await self._blobs.get(queue.universe, delivery.blob)
                        deliveries[index] = msgspec.structs.replace(delivery, payload=payload.data)
        except BaseException:  # Nobody waits for them any more: they were not delivered, and nothing has failed.
            await self._dispatcher.give_back(queue, leased, call)
            raise
        return Deliveries(deliveries)

    async def stats(self, queue: QueueKey, tier: Tier) -> QueueStats:
        """How many messages are in which state, and how many consumers wait here."""
        found = await self._database.read_async(queues.stats, queue, tier=tier)
        return msgspec.structs.replace(found, waiting_consumers=self._dispatcher.waiting(queue))

    async def purge(self, queue: QueueKey) -> Moved:
        """Remove every message that nobody holds, a bounded number a transaction."""
        removed, after = 0, b""
        while True:
            count, following = await self._database.transact_async(queues.purge, queue, after=after, limit=MESSAGES_MAX)
            removed += count
            if following is None:
                return Moved(removed)
            after = following

    async def redrive(self, queue: QueueKey, ids: Sequence[str] | None, limit: int) -> Moved:
        """Put dead letters back, a bounded number a transaction."""
        moved = tried = 0
        asked = limit if ids is None else len(ids)
        while tried < asked:
            size = min(MESSAGES_MAX, asked - tried)
            batch = None if ids is None else ids[tried : tried + size]
            count, notes = await self._database.transact_async(queues.redrive_and_tell, queue, ids=batch, limit=size)
            self._tell(notes)
            moved += count
            tried += size
            if ids is None and count < size:
                break
        return Moved(moved)
