"""Many who commit at once share a sync."""

import asyncio
from pathlib import Path

import holdfast
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


async def test_a_put_and_the_delivery_that_it_wakes_share_a_sync(tmp_path: Path) -> None:
    """However often the putter was alone before: the consumer that it wakes commits before they both sync."""
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        database = plane._port.parts.database
        syncs = 0
        sync = database._log._sync

        def counted() -> None:
            nonlocal syncs
            syncs += 1
            sync()

        database._log._sync = counted
        for _ in range(20):
            database._loop_sync()._aside = 0  # However busy the machine is, the loop syncs itself.
            await jobs.put("alone")
        assert syncs == 20
        await jobs.purge()
        waiting = asyncio.create_task(jobs.receive(wait_seconds=60))
        while (await jobs.stats()).waiting_consumers == 0:
            await asyncio.sleep(0.001)
        syncs = 0
        database._loop_sync()._aside = 0
        await jobs.put("awaited")
        message = await waiting
        assert message is not None
        assert message.json() == "awaited"
        assert syncs == 1


async def test_deliveries_to_consumers_who_wait_do_not_wait_for_each_others_syncs(tmp_path: Path) -> None:
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        waiting = [asyncio.create_task(jobs.receive(wait_seconds=60)) for _ in range(8)]
        while (await jobs.stats()).waiting_consumers < 8:
            await asyncio.sleep(0.001)
        database = plane._port.parts.database
        syncs = 0
        sync = database._log._sync

        def counted() -> None:
            nonlocal syncs
            syncs += 1
            sync()

        database._log._sync = counted
        await jobs.put_many(list(range(8)))
        messages = await asyncio.gather(*waiting)
        assert sorted(message.json() for message in messages) == list(range(8))
        assert syncs < 8
