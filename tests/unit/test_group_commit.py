"""Many who commit at once share a sync."""

import asyncio
from pathlib import Path

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.layers import journals, records, snapshots
from holdfast.layers.worlds import World
from holdfast.wire.canonical import canonical


def test_single_events_of_many_callers_share_their_syncs(tmp_path: Path) -> None:
    """LESSONS 27: one durable transaction per event took throughput from 5,000/s to 7/s.

    Here every event may be a transaction of its own: 256 callers, each of whom waits for its own synced append, cost a
    few syncs and not 256.
    """
    with RocksDatabase(tmp_path / "kv") as database:
        worlds = [World("main", f"world-{number}") for number in range(256)]
        for world in worlds:
            database.transact(snapshots.found, world)
        syncs = 0
        sync = database._log._sync

        def counted() -> None:
            nonlocal syncs
            syncs += 1
            sync()

        database._log._sync = counted

        async def append(world: World) -> None:
            for height in range(4):
                batch = [records.entry(canonical(height))]
                await database.transact_async(journals.append, world, batch, expected_head=height)

        async def everybody() -> None:
            await asyncio.gather(*(append(world) for world in worlds))

        asyncio.run(everybody())
        assert not database.unsynced
        assert 4 <= syncs <= 16
