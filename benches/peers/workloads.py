"""The workloads of the comparison with peers; each function prints its rates and returns its main figures.

Messages have 200 bytes. Clients run in one process with one event loop unless a line says otherwise. A batch is 256
messages for all: `receive_many(256)` of Fastness, `fetch(256)` of NATS, and `COUNT 256` of Redis.
"""

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import median
from typing import Any, Final

from benches.comparison import echo, repeated_cpu_seconds
from benches.peers.clients import BATCH, Ack, Client, Receive, call_concurrently
from benches.peers.environment import (
    BODY,
    NAMES,
    Environment,
    Figure,
    latency_figure,
    quantile,
    ratio,
    ratio_figure,
    table_of,
)
from benches.peers.put_clients import PutClients, put_clients
from benches.peers.servers import fastness_server

CONSUMERS: Final = 8
SLOTS: Final = 64  # Concurrent handlers of a worker.
CONTENDERS: Final = 16
CONTEND_SECONDS: Final = 5.0
SENDS_PER_SECOND: Final = 500
SEND_SECONDS: Final = 3.0
_STAMP: Final = struct.Struct("<d")
_END: Final = _STAMP.pack(0.0)  # Ends the consumer that receives it.


def puts(env: Environment) -> list[Figure]:
    """256 callers, each waiting for its own synced acknowledgement."""
    counts = {"nats": 5_120, "redis": 5_120, "fastness": 15_360}
    with env.clients("puts") as clients, ExitStack() as stack:
        candidates: dict[str, Callable[[], int]] = {
            NAMES[name]: partial(_put_round, env, client, env.settings.part(counts[name]))
            for name, client in clients.items()
        }
        for name in ("nats", "fastness"):
            if name in clients:
                two_processes = stack.enter_context(_two_put_clients(env, name))
                candidates[f"{NAMES[name]}, 2 client processes"] = partial(
                    two_processes.put, env.settings.part(counts[name])
                )
        rates = env.compare("256 callers put, each put synced and acknowledged", candidates)
    return [ratio_figure("256 callers put, against NATS", ratio(rates, "Fastness", NAMES["nats"]))]


def single(env: Environment) -> list[Figure]:
    """One caller that puts one message at a time: a round trip and a sync each."""
    count = env.settings.part(500)
    with env.clients("single", ("nats", "redis", "fastness", "bare")) as clients:
        rates = env.compare(
            "One caller puts, one message at a time",
            {NAMES[name]: partial(_put_round, env, client, count, callers=1) for name, client in clients.items()},
        )
    return [ratio_figure("One caller puts, against NATS", ratio(rates, "Fastness", NAMES["nats"]))]


def consume(env: Environment) -> list[Figure]:
    """8 consumers that receive and acknowledge, in batches and one by one, and one consumer with 64 slots."""
    with env.clients("consume") as clients:
        consumers = {name: env.run(client.consumers(CONSUMERS)) for name, client in clients.items()}

        def fill(name: str, count: int) -> None:
            env.run(clients[name].fill(count * (env.settings.rounds + 1), BODY))

        def candidate(
            name: str, batch: int, ack: Ack, count: int, consumer_count: int = CONSUMERS
        ) -> Callable[[], int]:
            count = env.settings.part(count)
            fill(name, count)
            return _drain_later(env, consumers[name][:consumer_count], count, batch, ack)

        batched: dict[str, Callable[[], int]] = {}
        if "nats" in clients:
            batched["NATS, fetch(256), each ack confirmed"] = candidate("nats", BATCH, clients["nats"].ack_each, 4_096)
            batched["NATS, fetch(256), acks not confirmed"] = candidate("nats", BATCH, clients["nats"].ack_batch, 4_096)
        if "redis" in clients:
            batched["Redis, COUNT 256, one XACK"] = candidate("redis", BATCH, clients["redis"].ack_batch, 8_192)
        ours = clients["fastness"]
        batched["Fastness, receive_many(256), one ack_many"] = candidate("fastness", BATCH, ours.ack_batch, 8_192)
        batched["Fastness, receive_many(256), 256 concurrent acks"] = candidate("fastness", BATCH, ours.ack_each, 8_192)
        rates = env.compare("8 consumers receive and acknowledge batches of 256", batched)
        in_batches = ratio(rates, "Fastness, receive_many(256), one ack_many", "NATS, fetch(256), each ack confirmed")

        rates = env.compare(
            "8 consumers receive and acknowledge one by one",
            {NAMES[name]: candidate(name, 1, client.ack_each, 1_000) for name, client in clients.items()},
        )
        by_slots = {
            f"{NAMES[name]}, {SLOTS} at a time, each acknowledged by itself": candidate(
                name, SLOTS, client.ack_each, 4_096, 1
            )
            for name, client in clients.items()
        }
        count = env.settings.part(4_096)
        fill("fastness", count + SLOTS)
        worker, peer = f"Fastness, AsyncWorker with {SLOTS} slots", next(iter(by_slots))
        by_slots[worker] = lambda: env.run(ours.work(count, SLOTS))
        worker_rates = env.compare(f"One consumer with {SLOTS} slots", by_slots)
    return [
        ratio_figure("8 consumers, batches of 256, against NATS", in_batches),
        ratio_figure("8 consumers, one by one, against NATS", ratio(rates, "Fastness", NAMES["nats"])),
        ratio_figure(f"A worker with {SLOTS} slots, against NATS", ratio(worker_rates, worker, peer)),
    ]


def latency(env: Environment) -> list[Figure]:
    """The time from the call of put to the receipt by one of 8 waiting consumers, at 500 messages a second."""
    count = env.settings.part(int(SENDS_PER_SECOND * SEND_SECONDS))
    p50s: dict[str, list[float]] = {}
    p99s: dict[str, list[float]] = {}
    syncs: list[float] = []
    with env.clients("latency") as senders, env.clients("latency") as receivers:
        consumers = {name: env.run(receiver.consumers(CONSUMERS)) for name, receiver in receivers.items()}
        for round_ in range(env.settings.rounds + 1):
            syncs.append(env.disk.rate(env.settings.part(500)))
            for name in senders:
                latencies = env.run(measure_latencies(senders[name], receivers[name], consumers[name], count))
                if round_:  # The first round is a warm-up.
                    p50s.setdefault(name, []).append(quantile(latencies, 0.5))
                    p99s.setdefault(name, []).append(quantile(latencies, 0.99))
    title = f"Put to receipt at {SENDS_PER_SECOND} a second, {CONSUMERS} consumers wait (medians of the rounds)"
    found = {name: (median(p50s[name]), median(p99s[name])) for name in p50s}
    rows = [(NAMES[name], f"{p50 * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms") for name, (p50, p99) in found.items()]
    echo(table_of(title, ("candidate", "p50", "p99"), rows))
    echo(f"A bare write and fdatasync meanwhile: {median(syncs):,.0f}/s, {min(syncs):,.0f}/s at worst.")
    cpu_seconds = repeated_cpu_seconds(env.settings.part(5))
    p50, p99 = quantile(cpu_seconds, 0.5), quantile(cpu_seconds, 0.99)
    echo(
        f"Repeated runs of the same Python code, with no other load: {p50 * 1e3:.2f} ms of processor time at p50, "
        f"{p99 / p50:.1f} times as much at p99, {cpu_seconds[-1] / p50:.0f} times at worst."
    )
    for at, quantile_name in enumerate(("p50", "p99")):
        env.rates[f"Put to receipt, {quantile_name}, seconds"] = {NAMES[name]: each[at] for name, each in found.items()}
    p50, p99 = found["fastness"]
    return [latency_figure("Put to receipt at 500/s, p50", p50), latency_figure("Put to receipt at 500/s, p99", p99)]


def backlog(env: Environment) -> list[Figure]:
    """The same puts and deliveries on a server with a backlog and on one without."""
    depth, part = env.settings.backlog, env.settings.part
    folders = [env.folder / name for name in ("shallow", "deep")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        servers = [stack.enter_context(fastness_server(folder)) for folder in folders]
        shallow, deep = (stack.enter_context(env.client("fastness", "work", url=each.url)) for each in servers)
        started = time.perf_counter()
        env.run(deep.fill(depth, BODY))
        echo(f"A backlog of {depth:,} was put in {time.perf_counter() - started:.0f} s, batches of {BATCH}, IMPORTANT.")
        pair = {"no backlog": shallow, f"a backlog of {depth:,}": deep}
        consumers = {name: env.run(client.consumers(CONSUMERS)) for name, client in pair.items()}
        figures = []
        rates = env.compare(
            "Fastness, 256 callers put, by backlog",
            {name: partial(_put_round, env, client, part(15_360)) for name, client in pair.items()},
        )
        figures.append(_backlog_figure("256 callers put, with the backlog", rates))
        for batch, full_count, title in ((BATCH, 8_192, "batches of 256"), (1, 1_000, "one by one")):
            count = part(full_count)
            env.run(shallow.fill(count * (env.settings.rounds + 1), BODY))
            rates = env.compare(
                f"Fastness, 8 consumers receive and acknowledge {title}, by backlog",
                {
                    name: _drain_later(env, consumers[name], count, batch, client.ack_batch)
                    for name, client in pair.items()
                },
            )
            figures.append(_backlog_figure(f"8 consumers, {title}, with the backlog", rates))
    return figures


def locks(env: Environment) -> list[Figure]:
    """One caller that locks and unlocks, and 16 that contend for the same lock."""
    count = env.settings.part(300)
    with env.clients("locks", ("redis", "fastness", "bare")) as clients:
        rates = env.compare(
            "One caller locks and unlocks, two syncs",
            {NAMES[name]: partial(_lock_round, env, client, count) for name, client in clients.items()},
        )
        found = {name: _contention(env, name) for name in clients if name != "bare"}
    title = f"{CONTENDERS} contenders for one lock, {CONTEND_SECONDS:.0f} s, a connection each (medians of the rounds)"
    rows = [(NAMES[name], f"{rate:,.0f}", f"{share:.2f}") for name, (rate, share) in found.items()]
    echo(table_of(title, ("candidate", "locks/s", "least served, of an equal share"), rows))
    env.rates["16 contenders, locks/s"] = {NAMES[name]: rate for name, (rate, _) in found.items()}
    env.rates["16 contenders, share of the least served"] = {NAMES[name]: share for name, (_, share) in found.items()}
    share = found["fastness"][1]
    return [
        ratio_figure("One caller locks and unlocks, against Redis", ratio(rates, "Fastness", NAMES["redis"])),
        Figure("16 contenders: the least served, of an equal share", f"{share:.2f}"),
    ]


WORKLOADS: Final = {each.__name__: each for each in (puts, single, consume, latency, backlog, locks)}


# Rounds.


def _put_round(env: Environment, client: Client, count: int, callers: int = 256) -> int:
    return env.run(call_concurrently(lambda: client.put(BODY), count, callers))


def _two_put_clients(env: Environment, name: str) -> AbstractContextManager[PutClients]:
    url, uvloop = env.servers[name].url, env.settings.uvloop
    return put_clients(2, name, url, "puts", size_bytes=len(BODY), uvloop=uvloop)


def _lock_round(env: Environment, client: Any, count: int) -> int:
    return env.run(call_concurrently(lambda: client.lock_and_unlock("ada"), count, 1))


def _drain_later(env: Environment, consumers: list[Receive], count: int, batch: int, ack: Ack) -> Callable[[], int]:
    return lambda: env.run(drain(consumers, count, batch, ack))


def _backlog_figure(name: str, rates: dict[str, float]) -> Figure:
    without, with_backlog, _ = rates.values()
    return Figure(name, f"{with_backlog / without:.2f} of the rate without")


async def drain(consumers: list[Receive], count: int, batch: int, ack: Ack) -> int:
    """Let the consumers receive and acknowledge `count` messages, which are already queued."""
    left = count

    async def consume_some(receive: Receive) -> None:
        nonlocal left
        while left > 0:
            wanted = min(batch, left)
            left -= wanted
            messages = await receive(wanted)
            if not messages:
                raise RuntimeError(f"{left + wanted} messages are missing")
            left += wanted - len(messages)
            await ack(messages)

    await asyncio.gather(*(consume_some(receive) for receive in consumers))
    return count


async def measure_latencies(sender: Client, receiver: Client, consumers: list[Receive], count: int) -> list[float]:
    """The latency of each message in seconds. Sends do not wait for each other, so a slow one does not hide others."""
    latencies: list[float] = []

    async def receive_all(receive: Receive) -> None:
        while True:
            for message in await receive(1):
                now, body = time.perf_counter(), receiver.body(message)
                await receiver.ack_each([message])
                if body.startswith(_END):
                    return
                latencies.append(now - _STAMP.unpack_from(body)[0])

    receiving = [asyncio.create_task(receive_all(receive)) for receive in consumers]
    await asyncio.sleep(0.1)  # Lets all consumers start to wait.
    sending = []
    started = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(started + number / SENDS_PER_SECOND - time.perf_counter(), 0))
        body = _STAMP.pack(time.perf_counter()).ljust(len(BODY), b"x")
        sending.append(asyncio.create_task(sender.put(body)))
    await asyncio.gather(*sending)
    for _ in consumers:
        await sender.put(_END)
    await asyncio.gather(*receiving)
    return latencies


def _contention(env: Environment, name: str) -> tuple[float, float]:
    """Locks per second, and the least served contender's part of an equal share."""
    seconds = CONTEND_SECONDS / 10 if env.settings.quick else CONTEND_SECONDS
    rates, shares = [], []
    with ExitStack() as stack:
        clients = [stack.enter_context(env.client(name, "locks")) for _ in range(CONTENDERS)]
        env.run(_lock_until(clients, seconds / 5))
        for _ in range(min(env.settings.rounds, 3)):
            counts = env.run(_lock_until(clients, seconds))
            rates.append(sum(counts) / seconds)
            shares.append(min(counts) * len(counts) / max(sum(counts), 1))
    return median(rates), median(shares)


async def _lock_until(clients: list[Any], seconds: float) -> list[int]:
    deadline = time.perf_counter() + seconds

    async def lock_repeatedly(number: int) -> int:
        count = 0
        while True:
            await clients[number].lock_and_unlock(f"contender-{number}")
            if time.perf_counter() > deadline:
                return count
            count += 1

    return list(await asyncio.gather(*(lock_repeatedly(number) for number in range(len(clients)))))
