"""A contestant: a process that fills and consumes queues as it is told, one command a line, and reports what it took.

    python -m benches.deliveries.contestant KIND URL
    {"task": "consume", "queue": "jobs", "count": 8192, "batch": 256}

KIND is `open` (a plane in this process), `connect` (the client for threads), or `fastness`, `nats` or `redis` (a client
on an event loop). PYTHONPATH says which code it runs. Only calls are made that both codes have, with their defaults.
"""

import asyncio
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import fastness
from benches.peers.clients import BATCH, CLIENTS, Client
from benches.peers.workloads import drain, measure_latencies
from fastness import Message, Plane, Tier

BODY_BYTES: Final = 200
_WAIT_SECONDS: Final = 20.0  # Reached only if messages are missing.
_LEASE_SECONDS: Final = 600.0  # Longer than a turn, so that no message is redelivered.

Result = TypeVar("Result")


class Measured:
    """Measures the wall and processor time of the process from its creation on."""

    def __init__(self) -> None:
        self._cpu, self._began = _cpu_seconds(), time.perf_counter()

    def report(self, operations: int, **more: float) -> dict[str, float]:
        seconds, cpu_seconds = time.perf_counter() - self._began, _cpu_seconds() - self._cpu
        return {"operations": operations, "seconds": seconds, "cpu_seconds": cpu_seconds, **more}


class Threads:
    """A plane for threads, in this process or over the network."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def fill(self, queue: str, count: int) -> dict[str, float]:
        measured = Measured()
        for start in range(0, count, BATCH):
            self._plane.queue(queue).put_many(bodies(min(BATCH, count - start)), tier=Tier.IMPORTANT)
        return measured.report(count)

    def put(self, queue: str, count: int, batch: int = 1) -> dict[str, float]:
        handle, some = self._plane.queue(queue), bodies(batch)
        measured = Measured()
        for _ in range(count // batch):
            if batch == 1:
                handle.put(some[0])
            else:
                handle.put_many(some)
        return measured.report(count)

    def consume(
        self, queue: str, count: int, *, batch: int = 1, threads: int = 1, tier: str | None = None, ack: bool = True
    ) -> dict[str, float]:
        """Receive `count` messages that are queued, and acknowledge them."""
        handle = self._plane.queue(queue)
        options: dict[str, Any] = {} if tier is None else {"tier": Tier[tier]}

        def consume_one(left: int) -> None:
            for _ in range(left):
                message = handle.receive(visibility_seconds=_LEASE_SECONDS, extend_for_seconds=0, **options)
                assert message is not None
                if ack:
                    message.ack(**options)

        def consume_batches(left: int) -> None:
            while left:
                messages = handle.receive_many(
                    min(batch, left), visibility_seconds=_LEASE_SECONDS, extend_for_seconds=0, **options
                )
                assert messages
                if ack:
                    handle.ack_many(messages, **options)
                left -= len(messages)

        return on_threads(consume_one if batch == 1 else consume_batches, count, threads)

    def work(self, queue: str, count: int, threads: int) -> dict[str, float]:
        """Run a worker until it has handled `count` messages."""
        handled, lock = 0, threading.Lock()

        def handle(_: Message) -> None:
            nonlocal handled
            with lock:
                handled += 1
                if handled == count:
                    worker.stop()

        worker = fastness.Worker(self._plane, {queue: handle}, concurrency=threads, extend_for_seconds=0)
        measured = Measured()
        worker.run()
        return measured.report(worker.stats.handled)

    def close(self) -> None:
        self._plane.close()


class EventLoop:
    """A client on an event loop."""

    def __init__(self, kind: str, url: str) -> None:
        self._kind, self._url = kind, url
        self._runner = asyncio.Runner()
        self._clients: dict[str, tuple[Client, list[Any]]] = {}

    def fill(self, queue: str, count: int) -> dict[str, float]:
        measured = Measured()
        self._run(self._client(queue)[0].fill(count, bodies(1)[0]))
        return measured.report(count)

    def consume(self, queue: str, count: int, *, batch: int, consumers: int, ack: str) -> dict[str, float]:
        """Consume in batches, acknowledged by one call for a batch, one for a message, or with the next receive."""
        client, receivers = self._client(queue, consumers)
        work: Coroutine[Any, Any, Any]
        if ack == "next":
            work = drain_with_next(client, count, batch, consumers)
        else:
            work = drain(receivers, count, batch, client.ack_batch if ack == "batch" else client.ack_each)
        measured = Measured()
        self._run(work)
        return measured.report(count)

    def latency(self, queue: str, count: int, consumers: int) -> dict[str, float]:
        """The time from the call of put to the receipt, at a fixed rate."""
        receiver, receivers = self._client(queue, consumers)
        sender, _ = self._client(queue, consumers, of="senders")
        measured = Measured()
        latencies = sorted(self._run(measure_latencies(sender, receiver, receivers, count)))
        return measured.report(
            count, p50=latencies[len(latencies) // 2], p99=latencies[min(len(latencies) * 99 // 100, count - 1)]
        )

    def work(self, queue: str, count: int, slots: int) -> dict[str, float]:
        """Run an AsyncWorker until it has handled `count` messages."""
        client: Any = self._client(queue)[0]
        measured = Measured()
        return measured.report(self._run(client.work(count, slots)))

    def close(self) -> None:
        for client, _ in self._clients.values():
            self._run(client.close())
        self._runner.close()

    def _client(self, queue: str, consumers: int = 0, *, of: str = "consumers") -> tuple[Client, list[Any]]:
        """A client of a queue with its consumers, which is connected with the first call."""
        name = f"{of}-{consumers}-{queue}"
        if name not in self._clients:
            client: Client = self._run(CLIENTS[self._kind].connect(self._url, queue))
            receivers = self._run(client.consumers(consumers)) if consumers and of == "consumers" else []
            self._clients[name] = client, receivers
        return self._clients[name]

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)


async def drain_with_next(client: Any, count: int, batch: int, consumers: int) -> None:
    """Let consumers receive `count` queued messages, and acknowledge each batch with the next receive."""
    queue, left = client.queue, count

    async def consume() -> None:
        nonlocal left
        done: list[Any] = []
        while left > 0:
            wanted = min(batch, left)
            left -= wanted
            done = await queue.receive_many(
                wanted, wait_seconds=_WAIT_SECONDS, visibility_seconds=_LEASE_SECONDS, extend_for_seconds=0, ack=done
            )
            assert done
            left += wanted - len(done)
        if done:
            await queue.ack_many(done)

    await asyncio.gather(*(consume() for _ in range(consumers)))


def on_threads(work: Callable[[int], None], count: int, threads: int) -> dict[str, float]:
    """Divide `count` operations among threads, which are started before the time is taken."""
    if threads == 1:
        measured = Measured()
        work(count)
        return measured.report(count)
    started = threading.Barrier(threads + 1)

    def run() -> None:
        started.wait()
        work(count // threads)

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(run) for _ in range(threads)]
        measured = Measured()
        started.wait()
        for each in running:
            each.result()
        return measured.report(count // threads * threads)


def bodies(count: int) -> list[bytes]:
    """Messages that do not compress to nothing: half of their bytes are random."""
    return [os.urandom(BODY_BYTES // 2).hex().encode() for _ in range(count)]


def connect(kind: str, url: str) -> Threads | EventLoop:
    if kind == "open":
        return Threads(fastness.open(url))
    if kind == "connect":
        return Threads(fastness.connect(url))
    return EventLoop(kind, url)


def main() -> None:
    contestant = connect(*sys.argv[1:])
    print(json.dumps({"source": fastness.__file__}), flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        print(json.dumps(getattr(contestant, options.pop("task"))(**options)), flush=True)
    contestant.close()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
