"""Concurrent commits share a sync."""

import asyncio
from pathlib import Path

import holdfast
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.handles.queues import AsyncQueue
from holdfast.layers import journal_records, journals, snapshots
from holdfast.layers.worlds import World
from holdfast.wire.canonical import canonical

DEADLINE_SECONDS = 30.0


def count_syncs(database: RocksDatabase) -> list[None]:
    """A list that gets one item with every sync of the log."""
    syncs: list[None] = []
    sync = database._log._sync

    def count_and_sync() -> None:
        syncs.append(None)
        sync()

    database._log._sync = count_and_sync
    return syncs


async def wait_for_consumers(jobs: AsyncQueue, consumers: int) -> None:
    """Return when this many consumers wait."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await jobs.stats()).waiting_consumers < consumers:
            await asyncio.sleep(0.001)


def test_single_events_of_many_callers_share_their_syncs(tmp_path: Path) -> None:
    """256 callers that each wait for their own synced append need a few syncs, not 256."""
    with RocksDatabase(tmp_path / "kv") as database:
        worlds = [World("main", f"world-{number}") for number in range(256)]
        for world in worlds:
            database.transact(snapshots.create_world, world)
        syncs = count_syncs(database)

        async def append(world: World) -> None:
            for height in range(4):
                batch = [journal_records.entry(canonical(height))]
                await database.transact_async(journals.append, world, batch, expected_head=height)

        async def append_all() -> None:
            await asyncio.gather(*(append(world) for world in worlds))

        asyncio.run(append_all())
        assert not database.has_unsynced
        assert 4 <= len(syncs) < 64  # For 1,024 commits.


async def test_a_put_and_the_delivery_it_triggers_share_a_sync(tmp_path: Path) -> None:
    """Even after many ticks with a single caller: the woken consumer commits before both sync."""
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        database = plane._transport.services.database
        syncs = count_syncs(database)
        for _ in range(20):
            database._loop_sync()._thread_batches = 0  # Sync inline even if the machine is busy.
            await jobs.put("single")
        assert len(syncs) == 20
        await jobs.purge()
        waiting = asyncio.create_task(jobs.receive(wait_seconds=60))
        await wait_for_consumers(jobs, 1)
        syncs.clear()
        database._loop_sync()._thread_batches = 0
        await jobs.put("awaited")
        message = await waiting
        assert message is not None
        assert message.json() == "awaited"
        assert len(syncs) == 1


async def test_deliveries_to_waiting_consumers_share_syncs(tmp_path: Path) -> None:
    async with holdfast.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        waiting = [asyncio.create_task(jobs.receive(wait_seconds=60)) for _ in range(8)]
        await wait_for_consumers(jobs, 8)
        database = plane._transport.services.database
        syncs = count_syncs(database)
        await jobs.put_many(list(range(8)))
        messages = await asyncio.gather(*waiting)
        assert sorted(message.json() for message in messages) == list(range(8))
        assert len(syncs) < 8
