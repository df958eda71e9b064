"""Queues against `persist-queue`, `litequeue` and `diskcache`, bare group commit, and themselves at depth.

Messages have 200 bytes. "Synced" means that a caller's own message survives power loss when its call returns.
"""

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diskcache
import persistqueue
from litequeue import LiteQueue

import holdfast
from benches.bench_rocksdb import Bare, on_threads, repeat
from benches.contest import race, say
from holdfast import Tier
from holdfast.handles.sync.queues import Queue

BODY = b"x" * 200


def main() -> None:
    # Memory first, while the process has none of the others'.
    for scene in (memory, threads_synced, one_thread_unsynced, callers_on_a_loop, depth, latencies):
        with tempfile.TemporaryDirectory() as folder:
            scene(Path(folder))


def receive_and_ack(queue: Queue, tier: Tier = Tier.CRITICAL) -> None:
    message = queue.receive(tier=tier)
    assert message is not None
    message.ack(tier=tier)


def twice(call: Callable[[], None]) -> None:
    """A delivery is two commits, of the lease and of its end; bare, neither reads, checks or returns anything."""
    call()
    call()


def threads_synced(folder: Path) -> None:
    """8 threads, every operation synced: what a small fleet in one process does."""
    peer = persistqueue.SQLiteAckQueue(str(folder / "persist"), multithreading=True)
    bare = Bare(folder / "bare")
    with holdfast.open(f"dir:{folder / 'plane'}") as plane:
        jobs = plane.queue("jobs")

        def peer_get_and_ack() -> None:
            peer.ack(peer.get(block=False))

        race(
            "8 threads put messages of 200 bytes, each put synced (goal: 2.5 times persist-queue)",
            {
                "persist-queue, SQLiteAckQueue": lambda: on_threads(lambda: peer.put(BODY), 8, 60),
                "plane.queue.put": lambda: on_threads(lambda: jobs.put(BODY), 8, 250),
                "bare group commit of 3 keys": lambda: on_threads(bare.put_in_thread, 8, 250),
            },
        )
        race(
            "8 threads receive and acknowledge, both synced (goal: 3 times persist-queue)",
            {
                "persist-queue, SQLiteAckQueue": lambda: on_threads(peer_get_and_ack, 8, 30),
                "plane.queue.receive + ack": lambda: on_threads(lambda: receive_and_ack(jobs), 8, 125),
                "two bare group commits of 3 keys": lambda: on_threads(lambda: twice(bare.put_in_thread), 8, 125),
            },
        )


def one_thread_unsynced(folder: Path) -> None:
    """One thread that does not wait for the disk."""
    bare = Bare(folder / "bare")
    lite = LiteQueue(str(folder / "lite.sqlite"))
    deque = diskcache.Deque(directory=str(folder / "deque"))
    important = Tier.IMPORTANT
    with holdfast.open(f"dir:{folder / 'plane'}") as plane:
        jobs, batches = plane.queue("jobs"), plane.queue("batches")

        def lite_get_and_done() -> None:
            message = lite.pop() if hasattr(lite, "pop") else lite.get()
            lite.done(message.message_id)

        race(
            "One thread puts, nothing waits for a sync (goal: 1.5 times the faster peer)",
            {
                "litequeue": lambda: repeat(lambda: lite.put("x" * 200), 2_000),
                "diskcache.Deque": lambda: repeat(lambda: deque.append(BODY), 1_000),
                "plane.queue.put, IMPORTANT": lambda: repeat(lambda: jobs.put(BODY, tier=important), 4_000),
                "bare commit of 3 keys": lambda: repeat(bare.put_three, 4_000),
            },
        )
        race(
            "One thread receives and acknowledges, nothing waits for a sync (goal: 1.5 times the faster peer)",
            {
                "litequeue": lambda: repeat(lite_get_and_done, 1_000),
                "diskcache.Deque, popleft": lambda: repeat(deque.popleft, 500),
                "plane.queue.receive + ack, IMPORTANT": lambda: repeat(lambda: receive_and_ack(jobs, important), 2_000),
                "two bare commits of 3 keys": lambda: repeat(lambda: twice(bare.put_three), 2_000),
            },
        )
        bodies = [BODY] * 64
        rates = race(
            "Batches of 64 (goal: 100,000 messages/s)",
            {
                "plane.queue.put_many, IMPORTANT": lambda: (
                    64 * repeat(lambda: batches.put_many(bodies, tier=important), 200)
                )
            },
        )

        def drain() -> int:
            taken = 0
            for _ in range(100):
                messages = batches.receive_many(64, tier=important)
                taken += len(messages)
                plane.transact(settle, messages, tier=important)
            return taken

        def settle(tx: Any, messages: list[Any]) -> None:
            from holdfast.layers import queues

            for message in messages:
                queues.ack(tx, queues.QueueKey("main", "batches"), message.lease)

        race("Batches of 64", {"receive_many and one commit of acks, IMPORTANT": drain})
        say(f"put_many: {next(iter(rates.values())):,.0f} messages/s (goal: 100,000).")


def callers_on_a_loop(folder: Path) -> None:
    """256 callers on one event loop, each waits for its own synced acknowledgement."""

    async def contest() -> None:
        bare = Bare(folder / "bare")
        async with holdfast.open_async(f"dir:{folder / 'plane'}") as plane:
            jobs = plane.queue("jobs")

            async def put() -> None:
                await jobs.put(BODY)

            rates: dict[str, list[float]] = {"bare": [], "put": []}
            for _ in range(7):
                for name, call in (("bare", bare.put_on_loop), ("put", put)):
                    gc.collect()
                    started = time.perf_counter()
                    await asyncio.gather(*(times(call, 40) for _ in range(256)))
                    rates[name].append(256 * 40 / (time.perf_counter() - started))
            medians = {name: sorted(found)[3] for name, found in rates.items()}
            say(
                f"256 asyncio callers, each put synced: {medians['put']:,.0f}/s; a bare prototype of group commit with "
                f"the same callers {medians['bare']:,.0f}/s ({medians['put'] / medians['bare'] * 100:.0f} %; goal: "
                "25,000 where it does 40,000, which is 62 %)."
            )

    asyncio.run(contest())


async def times(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        await call()


def fill(queue: Queue, count: int) -> None:
    bodies = [BODY] * 256
    for start in range(0, count, 256):
        queue.put_many(bodies[: min(256, count - start)], tier=Tier.IMPORTANT)


def depth(folder: Path) -> None:
    """What a delivery costs with a thousand messages in the queue, with a million, and behind a million consumed."""
    with holdfast.open(f"dir:{folder}") as plane:
        shallow, deep, worn = plane.queue("shallow"), plane.queue("deep"), plane.queue("worn")
        fill(shallow, 60_000)
        fill(deep, 1_000_000)
        fill(worn, 1_060_000)
        while worn.stats().acked_total < 1_000_000:
            messages = worn.receive_many(256, tier=Tier.IMPORTANT, extend_for_seconds=0)
            plane.transact(ack_all, "worn", messages, tier=Tier.IMPORTANT)
        while shallow.stats().ready > 1_000:
            messages = shallow.receive_many(256, tier=Tier.IMPORTANT, extend_for_seconds=0)
            plane.transact(ack_all, "shallow", messages, tier=Tier.IMPORTANT)
        fill(shallow, 59_000)

        def consume(queue: Queue) -> int:
            return repeat(lambda: receive_and_ack(queue, Tier.IMPORTANT), 2_000)

        rates = race(
            "Receive and acknowledge, by depth (goal: within 1.3 times)",
            {
                "some thousand messages": lambda: consume(shallow),
                "a backlog of 1,000,000": lambda: consume(deep),
                "after 1,000,000 were consumed": lambda: consume(worn),
            },
        )
        first, *others = rates.values()
        say("Cost against the first: " + ", ".join(f"{first / other:.2f} times" for other in others) + " (goal: 1.3).")


def ack_all(tx: Any, queue: str, messages: list[Any]) -> None:
    from holdfast.layers import queues

    for message in messages:
        queues.ack(tx, queues.QueueKey("main", queue), message.lease)


def latencies(folder: Path) -> None:
    """How soon a waiting consumer has what was put, and what was delayed."""
    with holdfast.open(f"dir:{folder}") as plane:
        jobs = plane.queue("jobs")
        arrivals: list[float] = []
        arrived = threading.Event()

        def consume(rounds: int) -> None:
            for _ in range(rounds):
                message = jobs.receive(wait_seconds=30)
                arrivals.append(time.perf_counter())
                arrived.set()
                assert message is not None
                message.ack()

        waits = []
        consumer = threading.Thread(target=consume, args=(1_000,))
        consumer.start()
        for _ in range(1_000):
            while not jobs.stats().waiting_consumers:
                time.sleep(0.0005)
            arrived.clear()
            jobs.put(BODY)
            put_at = time.perf_counter()
            arrived.wait()
            waits.append(max(arrivals[-1] - put_at, 0.0))
        consumer.join()
        waits.sort()
        say(
            f"A waiting consumer has a put {waits[500] * 1e3:.2f} ms after its acknowledgement in the median, "
            f"{waits[990] * 1e3:.2f} ms at p99 (goal: 2 ms)."
        )
        late = []
        consumer = threading.Thread(target=consume, args=(100,))
        consumer.start()
        for _ in range(100):
            arrived.clear()
            started = time.perf_counter()
            jobs.put(BODY, delay_seconds=0.05)
            arrived.wait()
            late.append(arrivals[-1] - started - 0.05)
        consumer.join()
        late.sort()
        say(
            f"Delayed messages come {late[50] * 1e3:.1f} ms after they are due in the median, {late[-1] * 1e3:.1f} ms "
            "at most (goal: 20 ms)."
        )


def memory(folder: Path) -> None:
    """What a million messages cost the process that holds them."""
    with holdfast.open(f"dir:{folder}") as plane:
        jobs = plane.queue("jobs")
        fill(jobs, 256)
        before = resident_mib()
        fill(jobs, 1_000_000)
        say(f"1,000,000 queued messages of 200 bytes: {resident_mib() - before:.0f} MiB above the start (goal: 300).")


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
