"""Run operations beyond one transaction: waiting for the end of a run, and deleting it with its world."""

from fastness.clock import Clock
from fastness.kv import Database
from fastness.layers import runs
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.worlds import AsyncWorldStore
from fastness.tiers import Tier
from fastness.wire.requests import Committed
from fastness.wire.runs import RunInfo


class AsyncRunStore:
    """Waits for runs, and deletes them."""

    def __init__(
        self, database: Database, worlds: AsyncWorldStore, clock: Clock | None, options: ConsumerOptions
    ) -> None:
        self._database = database
        self._worlds = worlds
        self._waits = AsyncCommitWaits(database, clock, options)

    async def get(self, universe: str, id: str, *, wait_ms: int, tier: Tier) -> RunInfo:
        """A run, as soon as it has ended or `wait_ms` are over.

        Raises:
            RunNotFound: there is no run with this id, or it was deleted meanwhile.
        """
        if not wait_ms:
            found: RunInfo = await self._database.read_async(runs.get, universe, id, tier=tier)
            return found
        until_ms = self._waits.now_ms() + wait_ms
        read_tier = Tier.IMPORTANT  # Only the answer has to be durable, not what is read before the wait.
        with self._waits.open(runs.watch_key(universe, id), until_ms=until_ms) as wait:
            while True:
                found = await self._database.read_async(runs.get, universe, id, tier=read_tier)
                is_over = found.ended_ms is not None or wait.is_over
                if is_over and read_tier is tier:
                    return found
                if not is_over:
                    await wait.pause()
                read_tier = tier

    async def delete(self, universe: str, id: str, *, tier: Tier) -> Committed:
        """Delete a run that has ended, and its world; doing so again finishes what was interrupted.

        Raises:
            RunNotFound, RunNotEnded: there was never such a run, or it is running.
        """
        incarnation = await self._database.transact_async(runs.begin_delete, universe, id, tier=tier)
        await self._worlds.delete(runs.world_of(universe, id), incarnation)
        return Committed(tier)
