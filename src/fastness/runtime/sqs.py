"""Purges and deletions of SQS queues, which take more than one transaction."""

from collections.abc import Callable

from fastness.kv import Database, Transaction
from fastness.layers import sqs
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import QueueKey
from fastness.layers.sqs_work import SqsWorkAdded, Step
from fastness.limits import SQS_STEPS_MAX
from fastness.tiers import Tier
from fastness.wire.sqs import Purged


class AsyncSqsStore:
    """Purges and deletes queues: a part before it answers, and the rest in the background (`sqs_loop.py`)."""

    def __init__(self, database: Database, *, worker: str) -> None:
        self._database = database
        self._worker = worker

    async def purge(self, queue: QueueKey, tier: Tier, call: KeyedCall | None = None) -> Purged:
        """Remove all messages of a queue."""
        await self._database.transact_async(sqs.begin_purge, queue, call, tier=tier)
        return await self._begin(queue, sqs.purge_step)

    async def delete(self, queue: QueueKey, tier: Tier, call: KeyedCall | None = None) -> Purged:
        """Delete a queue, which does not exist for others from the first commit on."""
        await self._database.transact_async(sqs.begin_delete, queue, call, tier=tier)
        return await self._begin(queue, sqs.delete_step)

    async def _begin(self, queue: QueueKey, step: Callable[[Transaction, QueueKey, str], Step]) -> Purged:
        """Do a bounded number of steps, and leave the rest to the background."""
        done = Step(0, 0)
        for _ in range(SQS_STEPS_MAX):
            done = await self._database.transact_async(step, queue, self._worker)
            if done.in_ms != 0:
                break
        if done.in_ms is not None:
            self._database.publish([SqsWorkAdded()])
        return Purged(is_done=done.in_ms != 0)
