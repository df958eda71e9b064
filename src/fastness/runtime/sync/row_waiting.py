"""Generated from runtime/row_waiting.py by tools/make_twins.py; change that file instead."""

from collections.abc import Sequence

from fastness.clock import Clock
from fastness.kv import Database
from fastness.layers import collections
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.tiers import Tier
from fastness.wire.collections import ChangedRows, KnownRow


class RowWaiter:
    """Reads rows that have changed, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._waits = CommitWaits(database, clock, options)

    def wait(
        self, universe: str, collection: str, known: Sequence[KnownRow], *, wait_ms: int, tier: Tier
    ) -> ChangedRows:
        """At least one row that has another version than the known one, unless `wait_ms` pass without any."""
        until_ms = self._waits.now_ms() + wait_ms
        found = self._database.read(collections.changed, universe, collection, known, tier=tier)
        if found.rows or not wait_ms:
            return found
        keys = dict.fromkeys(collections.watched_keys(universe, collection, known))  # A row may be named twice.
        with self._waits.open(*keys, until_ms=until_ms) as wait:
            while True:
                found = self._database.read(collections.changed, universe, collection, known, tier=tier)
                if found.rows or wait.is_over:
                    return found
                wait.pause()
