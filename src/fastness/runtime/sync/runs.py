"""Generated from runtime/runs.py by tools/make_twins.py; change that file instead."""

from fastness.clock import Clock
from fastness.kv import Database
from fastness.layers import runs
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.runtime.sync.worlds import WorldStore
from fastness.tiers import Tier
from fastness.wire.requests import Committed
from fastness.wire.runs import RunInfo


class RunStore:
    """Waits for runs, and deletes them."""

    def __init__(self, database: Database, worlds: WorldStore, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._worlds = worlds
        self._waits = CommitWaits(database, clock, options)

    def get(self, universe: str, id: str, *, wait_ms: int, tier: Tier) -> RunInfo:
        """A run, as soon as it has ended or `wait_ms` are over.

        Raises:
            RunNotFound: there is no run with this id, or it was deleted meanwhile.
        """
        if not wait_ms:
            found: RunInfo = self._database.read(runs.get, universe, id, tier=tier)
            return found
        until_ms = self._waits.now_ms() + wait_ms
        read_tier = Tier.IMPORTANT  # Only the answer has to be durable, not what is read before the wait.
        with self._waits.open(runs.watch_key(universe, id), until_ms=until_ms) as wait:
            while True:
                found = self._database.read(runs.get, universe, id, tier=read_tier)
                is_over = found.ended_ms is not None or wait.is_over
                if is_over and read_tier is tier:
                    return found
                if not is_over:
                    wait.pause()
                read_tier = tier

    def delete(self, universe: str, id: str, *, tier: Tier) -> Committed:
        """Delete a run that has ended, and its world; doing so again finishes what was interrupted.

        Raises:
            RunNotFound, RunNotEnded: there was never such a run, or it is running.
        """
        incarnation = self._database.transact(runs.begin_delete, universe, id, tier=tier)
        self._worlds.delete(runs.world_of(universe, id), incarnation)
        return Committed(tier)
