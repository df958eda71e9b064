"""Queues against `persist-queue`, `litequeue`, `diskcache` and bare group commit, and queues with a deep backlog.

Messages have 200 bytes. "Synced" means that a message survives a power loss when the call that put it returns.
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

import fastness
from benches.bench_rocksdb import Bare, on_threads, repeat
from benches.comparison import compare, echo
from fastness import Tier
from fastness.handles.sync.queues import Queue

BODY = b"x" * 200


def main() -> None:
    # Memory first, before the other benchmarks have allocated any.
    for benchmark in (memory, threads_synced, one_thread_unsynced, callers_on_a_loop, depth, latencies):
        with tempfile.TemporaryDirectory() as folder:
            benchmark(Path(folder))


def receive_and_ack(queue: Queue, tier: Tier = Tier.CRITICAL) -> None:
    message = queue.receive(tier=tier)
    assert message is not None
    message.ack(tier=tier)


def call_twice(call: Callable[[], None]) -> None:
    """Call twice: a delivery is two commits, the lease and the ack. The bare ones read, check and return nothing."""
    call()
    call()


def threads_synced(folder: Path) -> None:
    """8 threads, every operation synced."""
    peer = persistqueue.SQLiteAckQueue(str(folder / "persist"), multithreading=True)
    bare = Bare(folder / "bare")
    with fastness.open(f"dir:{folder / 'plane'}") as plane:
        jobs = plane.queue("jobs")

        def peer_get_and_ack() -> None:
            peer.ack(peer.get(block=False))

        compare(
            "8 threads put messages of 200 bytes, each put synced",
            {
                "persist-queue, SQLiteAckQueue": lambda: on_threads(lambda: peer.put(BODY), 8, 60),
                "plane.queue.put": lambda: on_threads(lambda: jobs.put(BODY), 8, 250),
                "bare group commit of 3 keys": lambda: on_threads(bare.put_in_thread, 8, 250),
            },
        )
        compare(
            "8 threads receive and acknowledge, both synced",
            {
                "persist-queue, SQLiteAckQueue": lambda: on_threads(peer_get_and_ack, 8, 30),
                "plane.queue.receive + ack": lambda: on_threads(lambda: receive_and_ack(jobs), 8, 125),
                "two bare group commits of 3 keys": lambda: on_threads(lambda: call_twice(bare.put_in_thread), 8, 125),
            },
        )


def one_thread_unsynced(folder: Path) -> None:
    """One thread, IMPORTANT: no operation waits for a sync."""
    bare = Bare(folder / "bare")
    lite = LiteQueue(str(folder / "lite.sqlite"))
    deque = diskcache.Deque(directory=str(folder / "deque"))
    important = Tier.IMPORTANT
    with fastness.open(f"dir:{folder / 'plane'}") as plane:
        jobs, batches = plane.queue("jobs"), plane.queue("batches")

        def lite_get_and_done() -> None:
            message = lite.pop() if hasattr(lite, "pop") else lite.get()
            lite.done(message.message_id)

        compare(
            "One thread puts, without waiting for a sync",
            {
                "litequeue": lambda: repeat(lambda: lite.put("x" * 200), 2_000),
                "diskcache.Deque": lambda: repeat(lambda: deque.append(BODY), 1_000),
                "plane.queue.put, IMPORTANT": lambda: repeat(lambda: jobs.put(BODY, tier=important), 4_000),
                "bare commit of 3 keys": lambda: repeat(bare.put_three, 4_000),
            },
        )
        compare(
            "One thread receives and acknowledges, without waiting for a sync",
            {
                "litequeue": lambda: repeat(lite_get_and_done, 1_000),
                "diskcache.Deque, popleft": lambda: repeat(deque.popleft, 500),
                "plane.queue.receive + ack, IMPORTANT": lambda: repeat(lambda: receive_and_ack(jobs, important), 2_000),
                "two bare commits of 3 keys": lambda: repeat(lambda: call_twice(bare.put_three), 2_000),
            },
        )
        bodies = [BODY] * 64
        rates = compare(
            "put_many in batches of 64",
            {
                "plane.queue.put_many, IMPORTANT": lambda: (
                    64 * repeat(lambda: batches.put_many(bodies, tier=important), 200)
                )
            },
        )

        def drain() -> int:
            received = 0
            for _ in range(100):
                messages = batches.receive_many(64, tier=important)
                received += len(messages)
                plane.transact(ack_all, "batches", messages, tier=important)
            return received

        compare("Batches of 64", {"receive_many and one commit of acks, IMPORTANT": drain})
        echo(f"put_many: {next(iter(rates.values())):,.0f} messages/s.")


def callers_on_a_loop(folder: Path) -> None:
    """256 callers on one event loop, each waiting for its own synced put."""

    async def measure() -> None:
        bare = Bare(folder / "bare")
        async with fastness.open_async(f"dir:{folder / 'plane'}") as plane:
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
            echo(
                f"256 asyncio callers, each put synced: {medians['put']:,.0f}/s; bare group commit with as many "
                f"callers: {medians['bare']:,.0f}/s ({medians['put'] / medians['bare'] * 100:.0f} %)."
            )

    asyncio.run(measure())


async def times(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        await call()


def fill(queue: Queue, count: int) -> None:
    bodies = [BODY] * 256
    for start in range(0, count, 256):
        queue.put_many(bodies[: min(256, count - start)], tier=Tier.IMPORTANT)


def depth(folder: Path) -> None:
    """The cost of a delivery with a thousand queued messages, with a million, and after a million were consumed."""
    with fastness.open(f"dir:{folder}") as plane:
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

        rates = compare(
            "Receive and acknowledge, by depth",
            {
                "some thousand messages": lambda: consume(shallow),
                "a backlog of 1,000,000": lambda: consume(deep),
                "after 1,000,000 were consumed": lambda: consume(worn),
            },
        )
        first, *others = rates.values()
        echo("Cost against the first: " + ", ".join(f"{first / other:.2f} times" for other in others) + ".")


def ack_all(tx: Any, queue: str, messages: list[Any]) -> None:
    from fastness.layers import queues

    for message in messages:
        queues.ack(tx, queues.QueueKey("main", queue), message.lease)


def latencies(folder: Path) -> None:
    """The latency of delivery to a waiting consumer, for messages without and with a delay."""
    with fastness.open(f"dir:{folder}") as plane:
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
        echo(
            f"A waiting consumer receives a message {waits[500] * 1e3:.2f} ms after its put returned at p50, "
            f"{waits[990] * 1e3:.2f} ms at p99."
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
        echo(
            f"Delayed messages are delivered {late[50] * 1e3:.1f} ms after their due time at p50, "
            f"{late[-1] * 1e3:.1f} ms at most."
        )


def memory(folder: Path) -> None:
    """The memory that a million queued messages take."""
    with fastness.open(f"dir:{folder}") as plane:
        jobs = plane.queue("jobs")
        fill(jobs, 256)
        before = resident_mib()
        fill(jobs, 1_000_000)
        echo(f"1,000,000 queued messages of 200 bytes: {resident_mib() - before:.0f} MiB more than before.")


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
