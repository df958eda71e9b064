"""Concurrent commits share a sync."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import limits
from fastness.backends.rocksdb import RocksDatabase
from fastness.handles.queues import AsyncQueue
from fastness.kv import Transaction
from fastness.layers import journal_records, journals, queues, snapshots
from fastness.layers.queues import QueueKey
from fastness.layers.worlds import World
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier
from fastness.wire.canonical import canonical
from fastness.wire.queues import MessageLease, NewMessage, QueuePolicy
from tests.support.waiting import eventually

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
    async with fastness.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        database = plane._transport.services.database  # type: ignore[attr-defined]
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
    async with fastness.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        waiting = [asyncio.create_task(jobs.receive(wait_seconds=60)) for _ in range(8)]
        await wait_for_consumers(jobs, 8)
        database = plane._transport.services.database  # type: ignore[attr-defined]
        syncs = count_syncs(database)
        await jobs.put_many(list(range(8)))
        messages = await asyncio.gather(*waiting)
        assert sorted(message.json() for message in messages) == list(range(8))
        assert len(syncs) < 8


# A delivery waits for the puts that it reads, not for its own sync.


def test_a_message_costs_two_syncs_not_three(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        syncs = count_syncs(plane._transport.services.database)  # type: ignore[attr-defined]
        jobs.put("work")
        assert len(syncs) == 1
        message = jobs.receive(extend_for_seconds=0)
        assert message is not None
        assert len(syncs) == 1
        message.ack()
        assert len(syncs) == 2
        assert jobs.receive() is None
        assert len(syncs) == 2


async def test_a_message_costs_two_syncs_on_an_event_loop(tmp_path: Path) -> None:
    async with fastness.open_async(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        syncs = count_syncs(plane._transport.services.database)  # type: ignore[attr-defined]
        await jobs.put_many(["a", "b", "c"])
        messages = await jobs.receive_many(3, extend_for_seconds=0, wait_seconds=5)
        assert (len(messages), len(syncs)) == (3, 1)
        await jobs.ack_many(messages)
        assert len(syncs) == 2


@pytest.mark.parametrize("options", [{"tier": Tier.CRITICAL}, {"with_state": True}], ids=["critical", "state"])
def test_a_delivery_waits_for_its_own_sync_if_it_must_be_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        jobs.put("work")
        syncs = count_syncs(plane._transport.services.database)  # type: ignore[attr-defined]
        assert jobs.receive(extend_for_seconds=0, **options) is not None
        assert len(syncs) == 1


def test_a_delivery_that_ends_a_lease_waits_for_its_own_sync(tmp_path: Path, clock: ManualClock) -> None:
    """Otherwise a power failure could give the message back to its previous owner."""
    with RocksDatabase(tmp_path / "kv", clock=clock) as database:
        jobs = QueueKey("main", "jobs")
        database.transact(queues.put, jobs, [NewMessage(payload=b"x")])
        syncs = count_syncs(database)
        database.transact(queues.lease, jobs, owner="ada", visibility_ms=1_000, may_lose=True)
        clock.advance_ms(1_000)
        assert not syncs
        database.transact(queues.lease, jobs, owner="bob", may_lose=True)
        assert len(syncs) == 1


def test_a_delivery_does_not_wait_for_a_put_that_promised_less(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        syncs = count_syncs(plane._transport.services.database)  # type: ignore[attr-defined]
        jobs.put("work", tier=Tier.IMPORTANT)
        assert jobs.receive(extend_for_seconds=0) is not None
        assert not syncs


def test_a_delivery_is_synced_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMPORTANT_SYNC_SECONDS_MAX", 0.02)
    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(Transaction.put, b"a", b"1", may_lose=True)
        eventually(lambda: not database.has_unsynced)


class SlowSync:
    """Makes each sync of a database wait until `go_on`."""

    def __init__(self, database: RocksDatabase) -> None:
        self.count = 0
        self.started, self.go_on = threading.Event(), threading.Event()
        self._sync = database._log._sync
        database._log._sync = self

    def __call__(self) -> None:
        self.count += 1
        self.started.set()
        assert self.go_on.wait(DEADLINE_SECONDS)
        self._sync()


def test_a_delivery_waits_for_the_sync_of_the_put_and_no_other(tmp_path: Path) -> None:
    """The put is being synced while its message is delivered."""
    with RocksDatabase(tmp_path / "kv") as database, ThreadPoolExecutor(2) as threads:
        slow, jobs = SlowSync(database), QueueKey("main", "jobs")
        put = threads.submit(database.transact, queues.put, jobs, [NewMessage(payload=b"x")])
        assert slow.started.wait(DEADLINE_SECONDS)
        delivery = threads.submit(database.transact, queues.lease, jobs, owner="ada", may_lose=True)
        while not database._log._followers:
            time.sleep(0.001)
        assert not delivery.done()
        slow.go_on.set()
        put.result(DEADLINE_SECONDS)
        assert [message.payload for message in delivery.result(DEADLINE_SECONDS)] == [b"x"]
        assert slow.count == 1
        assert database.has_unsynced  # The delivery itself.


def test_a_delivery_of_a_group_waits_for_the_sync_of_a_put_behind_its_head(tmp_path: Path) -> None:
    """With `group_batches` it delivers that message, too."""
    with RocksDatabase(tmp_path / "kv") as database, ThreadPoolExecutor(2) as threads:
        jobs = QueueKey("main", "jobs")
        database.transact(queues.set_policy, jobs, QueuePolicy(group_batches=True))
        database.transact(queues.put, jobs, [NewMessage(payload=b"x", group="a")])
        slow = SlowSync(database)
        put = threads.submit(database.transact, queues.put, jobs, [NewMessage(payload=b"y", group="a")])
        assert slow.started.wait(DEADLINE_SECONDS)
        delivery = threads.submit(database.transact, queues.lease, jobs, owner="ada", limit=2, may_lose=True)
        while not database._log._followers and not delivery.done():
            time.sleep(0.001)
        assert not delivery.done()
        slow.go_on.set()
        put.result(DEADLINE_SECONDS)
        assert [message.payload for message in delivery.result(DEADLINE_SECONDS)] == [b"x", b"y"]


def test_a_delivery_does_not_wait_for_the_acks_of_other_messages(tmp_path: Path) -> None:
    """But an answer that no message is ready does: a power failure would bring one back."""
    with RocksDatabase(tmp_path / "kv") as database, ThreadPoolExecutor(2) as threads:
        jobs = QueueKey("main", "jobs")
        database.transact(queues.put, jobs, [NewMessage(payload=payload) for payload in (b"x", b"y")])
        [first] = database.transact(queues.lease, jobs, owner="ada")
        slow, proof = SlowSync(database), MessageLease(queues.format_id(first.id), first.lease_id, first.fence)
        ack = threads.submit(database.transact, queues.ack, jobs, proof)
        assert slow.started.wait(DEADLINE_SECONDS)
        assert [each.payload for each in database.transact(queues.lease, jobs, owner="bob", may_lose=True)] == [b"y"]
        empty = threads.submit(database.transact, queues.lease, jobs, owner="eve", may_lose=True)
        while not database._log._followers:
            time.sleep(0.001)
        assert (ack.done(), empty.done()) == (False, False)
        slow.go_on.set()
        assert (ack.result(DEADLINE_SECONDS), empty.result(DEADLINE_SECONDS)) == (queues.format_id(first.id), [])


async def test_a_delivery_does_not_release_a_reader_that_waits_for_more(tmp_path: Path) -> None:
    """Both wait in one tick: the reader for an unsynced delivery, the next delivery for an older commit."""
    with RocksDatabase(tmp_path / "kv") as database:
        await database.transact_async(Transaction.put, b"a", b"1")
        loop_sync = database._loop_sync()
        loop_sync._thread_batches = 0
        last = database._last_commit()
        await database.transact_async(Transaction.put, b"b", b"2", may_lose=True)
        reader = loop_sync.wait(database._last_commit(), single=False)
        other = loop_sync.wait(last, single=False)
        assert reader is not None
        assert other is not None
        await asyncio.gather(reader, other)
        assert not database.has_unsynced
