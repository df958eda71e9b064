"""Waiting for rows of collections: a caller is woken by the commit that changes one of its rows.

A row that expires changes without a commit. A caller that waits for it learns that with the next commit to one of its
rows, or at the end of its wait.
"""

from collections.abc import Sequence

from fastness.clock import Clock, SystemClock, on_clock_change
from fastness.kv import Database
from fastness.layers import collections
from fastness.runtime.consumer_options import ConsumerOptions, Polling
from fastness.tiers import Tier
from fastness.wire.collections import ChangedRows, KnownRow


class AsyncRowWaiter:
    """Reads rows that have changed, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._polling = Polling(database, options)

    async def wait(
        self, universe: str, collection: str, known: Sequence[KnownRow], *, wait_ms: int, tier: Tier
    ) -> ChangedRows:
        """At least one row that has another version than the known one, unless `wait_ms` pass without any."""
        until_ms = self._clock.now_ms() + wait_ms
        found = await self._database.read_async(collections.changed, universe, collection, known, tier=tier)
        if found.rows or not wait_ms:
            return found
        keys = dict.fromkeys(collections.watched_keys(universe, collection, known))  # A row may be named twice.
        with self._database.watch(*keys) as watch:
            stop_listening = on_clock_change(self._clock, watch.fire)
            try:
                while True:
                    found = await self._database.read_async(collections.changed, universe, collection, known, tier=tier)
                    left_ms = until_ms - self._clock.now_ms()
                    if found.rows or left_ms <= 0:
                        return found
                    await watch.wait_async(self._polling.pause_ms(left_ms) / 1_000)
            finally:
                stop_listening()
