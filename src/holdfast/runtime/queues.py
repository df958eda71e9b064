"""Queue operations beyond one transaction: waiting, fetching payloads, and processing many messages."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Unpack

import msgspec

from holdfast.errors import HoldfastError
from holdfast.kv import Database
from holdfast.layers import queues
from holdfast.layers.idempotency import KeyedCall
from holdfast.layers.queues import DeleteProgress, PurgeProgress, QueueKey, RedriveProgress
from holdfast.limits import PAYLOAD_FETCH_BYTES_MAX
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.dispatcher import AsyncDispatcher, LeaseOptions
from holdfast.runtime.publishing import Publish
from holdfast.tiers import Tier
from holdfast.wire.queues import Deliveries, Moved, PackedAck, QueueStats, QueueSurvey


class AsyncQueueStore:
    """Receives from queues, and counts, purges, deletes and redrives them."""

    def __init__(
        self, database: Database, dispatcher: AsyncDispatcher, blobs: AsyncBlobStore, publish: Publish
    ) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._publish = publish

    async def receive(
        self,
        queue: QueueKey,
        *,
        wait_ms: int,
        tier: Tier | None,
        call: KeyedCall | None = None,
        packed: bool = False,
        acks: Sequence[PackedAck] = (),
        **options: Unpack[LeaseOptions],
    ) -> Deliveries:
        """At least one message, unless `wait_ms` pass without any; with its payload, unless that is a large blob.

        `tier` is that of the dispatcher. A repeated `call` gets the messages that it still leases. `packed` messages
        are passed on as they are stored. `acks` are committed with the lease, or at once if nothing can be leased.
        """
        leased = await self._dispatcher.receive(queue, wait_ms=wait_ms, tier=tier, call=call, acks=acks, **options)
        try:
            for message in leased.blobs:
                if message.blob is not None and message.size <= PAYLOAD_FETCH_BYTES_MAX:
                    with suppress(HoldfastError):  # The consumer gets the error when it reads the payload.
                        leased.bodies[message.id] = (await self._blobs.get(queue.universe, message.blob)).data
        except BaseException:  # The consumer is gone: the messages were not delivered, and no attempt failed.
            await self._dispatcher.release_undelivered(queue, leased, call)
            raise
        if packed:
            return Deliveries([], queues.packed_of(leased), leased.refused)
        return Deliveries(queues.deliveries_of(leased), refused=leased.refused)

    async def stats(self, queue: QueueKey, tier: Tier) -> QueueStats:
        """The number of messages in each state, and of consumers that wait in this process."""
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
        """Remove every message that is not leased, a bounded number per transaction; once per `call`."""
        so_far = PurgeProgress()
        while so_far.after is not None:
            so_far, events = await self._database.transact_async(queues.purge_step, queue, so_far, call)
            self._publish(events)
        return Moved(so_far.count)

    async def delete(self, queue: QueueKey, *, force: bool, call: KeyedCall | None = None) -> Moved:
        """Remove a queue and its messages, a bounded number per transaction; once per `call`."""
        so_far = DeleteProgress()
        while not so_far.is_done:
            so_far, events = await self._database.transact_async(queues.delete_step, queue, so_far, call, force=force)
            self._publish(events)
        return Moved(so_far.count)

    async def redrive(
        self, queue: QueueKey, ids: Sequence[str] | None, limit: int, call: KeyedCall | None = None
    ) -> Moved:
        """Return dead letters to the queue, a bounded number per transaction; once per `call`."""
        so_far = RedriveProgress()
        while not so_far.is_done:
            so_far, events = await self._database.transact_async(
                queues.redrive_step, queue, so_far, call, ids=ids, limit=limit
            )
            self._publish(events)
        return Moved(so_far.count)
