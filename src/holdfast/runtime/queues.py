"""What queues do beyond one transaction: waiting, fetching payloads, and working through many messages."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.kv import Database
from holdfast.layers import queues
from holdfast.layers.idempotency import KeyedCall
from holdfast.layers.queues import Purged, QueueKey, Redriven
from holdfast.limits import PAYLOAD_FETCH_BYTES_MAX
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.dispatcher import AsyncDispatcher
from holdfast.tiers import Tier
from holdfast.wire.queues import Deliveries, Moved, QueueStats, QueueSurvey

Publish = Callable[[Sequence[tuple[Any, ...]]], None]  # Of what happened, once it is committed.


class AsyncQueueStore:
    """Receives, counts, empties and redrives."""

    def __init__(
        self, database: Database, dispatcher: AsyncDispatcher, blobs: AsyncBlobStore, publish: Publish
    ) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._publish = publish

    async def receive(
        self, queue: QueueKey, *, wait_ms: int, tier: Tier, call: KeyedCall | None = None, **options: Any
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

    async def survey(self, universe: str, *, after: str, limit: int, tier: Tier) -> QueueSurvey:
        """`stats` of a page of queues."""
        found = await self._database.read_async(queues.survey, universe, after=after, limit=limit, tier=tier)
        counted = [
            msgspec.structs.replace(each, waiting_consumers=self._dispatcher.waiting(QueueKey(universe, each.queue)))
            for each in found
        ]
        return QueueSurvey(counted, found[-1].queue if len(found) == limit else None)

    async def purge(self, queue: QueueKey, call: KeyedCall | None = None) -> Moved:
        """Remove every message that nobody holds, a bounded number a transaction; once for each `call`."""
        so_far = Purged()
        while so_far.after is not None:
            so_far, events = await self._database.transact_async(queues.purge_on, queue, so_far, call)
            self._publish(events)
        return Moved(so_far.count)

    async def redrive(
        self, queue: QueueKey, ids: Sequence[str] | None, limit: int, call: KeyedCall | None = None
    ) -> Moved:
        """Put dead letters back, a bounded number a transaction; once for each `call`."""
        so_far = Redriven()
        while not so_far.is_over:
            so_far, events = await self._database.transact_async(
                queues.redrive_on, queue, so_far, call, ids=ids, limit=limit
            )
            self._publish(events)
        return Moved(so_far.count)
