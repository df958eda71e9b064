"""Many who commit at once share a sync."""

import asyncio
from pathlib import Path

import holdfast
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.handles.queues import AsyncQueue
from holdfast.layers import journal_records, journals, snapshots
from holdfast.layers.worlds import World
from holdfast.wire.canonical import canonical

DEADLINE_SECONDS = 30.0


def counted_syncs(database: RocksDatabase) -> list[None]:
    """Grows by one with every sync of the log."""
    syncs: list[None] = []
    sync = database._log._sync

    def counted() -> None:
        syncs.append(None)
        sync()

    database._log._sync = counted
    return syncs


async def standing(jobs: AsyncQueue, consumers: int) -> None:
    """Return when so many consumers wait."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await jobs.stats()).waiting_consumers < consumers:
            await asyncio.sleep(0.001)


def test_single_events_of_many_callers_share_their_syncs(tmp_path: Path) -> None:
    """LESSONS 27: one durable transaction per event took throughput from 5,000/s to 7/s.

    Here every event may be a transaction of its own: 256 callers, each of whom waits for its own synced append, cost a
    few syncs and not 256.
    """
    with RocksDatabase(tmp_path / "kv") as database:
        worlds = [World("main", f"world-{number}") for number in range(256)]
        for world in worlds:
            database.transact(snapshots.found, world)
        syncs = counted_syncs(database)

        async def append(world: World) -> None:
            for height in range(4):
                batch = [journal_records.entry(canonical(height))]
                await database.transact_async(journals.append, world, batch, expected_head=height)

        async def everybody() -> None:
            await asyncio.gather(*(append(world) for world in worlds))

        asyncio.run(everybody())
        assert not database.unsynced
        assert 4 <= len(syncs) < 64  # Of 1,024 commits.


async def test_a_put_and_the_delivery_that_it_wakes_share_a_sync(tmp_path: Path) -> None:
    """However often the putter was alone before: the consumer that it wakes commits before they both sync."""
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        database = plane._transport.services.database
        syncs = counted_syncs(database)
        for _ in range(20):
            database._loop_sync()._aside = 0  # However busy the machine is, the loop syncs itself.
            await jobs.put("alone")
        assert len(syncs) == 20
        await jobs.purge()
        waiting = asyncio.create_task(jobs.receive(wait_seconds=60))
        await standing(jobs, 1)
        syncs.clear()
        database._loop_sync()._aside = 0
        await jobs.put("awaited")
        message = await waiting
        assert message is not None
        assert message.json() == "awaited"
        assert len(syncs) == 1


async def test_deliveries_to_consumers_who_wait_do_not_wait_for_each_others_syncs(tmp_path: Path) -> None:
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        waiting = [asyncio.create_task(jobs.receive(wait_seconds=60)) for _ in range(8)]
        await standing(jobs, 8)
        database = plane._transport.services.database
        syncs = counted_syncs(database)
        await jobs.put_many(list(range(8)))
        messages = await asyncio.gather(*waiting)
        assert sorted(message.json() for message in messages) == list(range(8))
        assert len(syncs) < 8
