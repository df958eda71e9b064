"""What is measured, a scene each; every scene returns the figures that have goals.

Messages have 200 bytes. Clients are one process with one event loop unless a line says otherwise. A batch is 256
messages on all sides: `receive_many(256)` of Holdfast and `fetch(256)` of NATS, and Redis' `COUNT 256`.
"""

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import median
from typing import Any, Final

from benches.contest import say, steadiness
from benches.peers.clients import BATCH, Ack, Client, Receive, shared
from benches.peers.putters import Putters, putters
from benches.peers.servers import holdfast_server
from benches.peers.stage import BODY, NAMES, Figure, Stage, at_least, below_ms, quantile, ratio, table_of

CONSUMERS: Final = 8
HANDS: Final = 64  # Handlers of a worker that run at a time.
CONTENDERS: Final = 16
CONTEND_SECONDS: Final = 5.0
SENDS_PER_SECOND: Final = 500
SEND_SECONDS: Final = 3.0
_STAMP: Final = struct.Struct("<d")
_END: Final = _STAMP.pack(0.0)  # The consumer that receives it has done its work.


def puts(stage: Stage) -> list[Figure]:
    """256 callers, each of which waits for its own synced acknowledgement: group commit's headline."""
    counts = {"nats": 5_120, "redis": 5_120, "holdfast": 15_360}
    with stage.clients("puts") as clients, ExitStack() as stack:
        contestants: dict[str, Callable[[], int]] = {
            NAMES[name]: partial(_put_round, stage, client, stage.settings.part(counts[name]))
            for name, client in clients.items()
        }
        for name in ("nats", "holdfast"):
            if name in clients:
                two = stack.enter_context(_two_putters(stage, name))
                contestants[f"{NAMES[name]}, 2 client processes"] = partial(two.put, stage.settings.part(counts[name]))
        rates = stage.race("256 callers put, each put synced and acknowledged", contestants)
    return [at_least("256 callers put, against NATS", ratio(rates, "Holdfast", NAMES["nats"]), 5)]


def single(stage: Stage) -> list[Figure]:
    """One caller that puts one after the other: a round trip and a sync each."""
    count = stage.settings.part(500)
    with stage.clients("single", ("nats", "redis", "holdfast", "bare")) as clients:
        rates = stage.race(
            "One caller puts, one after the other",
            {NAMES[name]: partial(_put_round, stage, client, count, callers=1) for name, client in clients.items()},
        )
    return [at_least("One caller puts, against NATS", ratio(rates, "Holdfast", NAMES["nats"]), 1)]


def consume(stage: Stage) -> list[Figure]:
    """8 consumers that receive and acknowledge, in batches and one by one, and one that has 64 hands."""
    with stage.clients("consume") as clients:
        consumers = {name: stage.run(client.consumers(CONSUMERS)) for name, client in clients.items()}

        def fill(name: str, count: int) -> None:
            stage.run(clients[name].fill(count * (stage.settings.rounds + 1), BODY))

        def contestant(name: str, batch: int, ack: Ack, count: int, those: int = CONSUMERS) -> Callable[[], int]:
            count = stage.settings.part(count)
            fill(name, count)
            return _drainer(stage, consumers[name][:those], count, batch, ack)

        batched: dict[str, Callable[[], int]] = {}
        if "nats" in clients:
            batched["NATS, fetch(256), each ack confirmed"] = contestant("nats", BATCH, clients["nats"].ack_each, 4_096)
            batched["NATS, fetch(256), acks not confirmed"] = contestant(
                "nats", BATCH, clients["nats"].ack_together, 4_096
            )
        if "redis" in clients:
            batched["Redis, COUNT 256, one XACK"] = contestant("redis", BATCH, clients["redis"].ack_together, 8_192)
        ours = clients["holdfast"]
        batched["Holdfast, receive_many(256), one queues.ack"] = contestant("holdfast", BATCH, ours.ack_together, 8_192)
        batched["Holdfast, receive_many(256), 256 acks at once"] = contestant("holdfast", BATCH, ours.ack_each, 8_192)
        rates = stage.race("8 consumers receive and acknowledge batches of 256", batched)
        in_batches = ratio(rates, "Holdfast, receive_many(256), one queues.ack", "NATS, fetch(256), each ack confirmed")

        rates = stage.race(
            "8 consumers receive and acknowledge one by one",
            {NAMES[name]: contestant(name, 1, client.ack_each, 1_000) for name, client in clients.items()},
        )
        handed = {
            f"{NAMES[name]}, {HANDS} at a time, each acknowledged by itself": contestant(
                name, HANDS, client.ack_each, 4_096, 1
            )
            for name, client in clients.items()
        }
        count = stage.settings.part(4_096)
        fill("holdfast", count + HANDS)
        worker, peer = f"Holdfast, AsyncWorker of {HANDS} hands", next(iter(handed))
        handed[worker] = lambda: stage.run(ours.work(count, HANDS))
        hands = stage.race(f"One consumer with {HANDS} hands", handed)
    return [
        at_least("8 consumers, batches of 256, against NATS", in_batches, 2),
        at_least("8 consumers, one by one, against NATS", ratio(rates, "Holdfast", NAMES["nats"]), None),
        at_least(f"A worker with {HANDS} hands, against NATS", ratio(hands, worker, peer), None),
    ]


def latency(stage: Stage) -> list[Figure]:
    """From the call of put to the message in a consumer's hands, at 500 a second; 8 consumers wait, and acknowledge."""
    count = stage.settings.part(int(SENDS_PER_SECOND * SEND_SECONDS))
    p50s: dict[str, list[float]] = {}
    p99s: dict[str, list[float]] = {}
    syncs: list[float] = []
    with stage.clients("latency") as senders, stage.clients("latency") as takers:
        consumers = {name: stage.run(taker.consumers(CONSUMERS)) for name, taker in takers.items()}
        for round_ in range(stage.settings.rounds + 1):
            syncs.append(stage.disk.rate(stage.settings.part(500)))
            for name in senders:
                took = stage.run(send_and_take(senders[name], takers[name], consumers[name], count))
                if round_:  # The first round warms up.
                    p50s.setdefault(name, []).append(quantile(took, 0.5))
                    p99s.setdefault(name, []).append(quantile(took, 0.99))
    title = f"Put to receipt at {SENDS_PER_SECOND} a second, {CONSUMERS} consumers wait (medians of the rounds)"
    found = {name: (median(p50s[name]), median(p99s[name])) for name in p50s}
    rows = [(NAMES[name], f"{p50 * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms") for name, (p50, p99) in found.items()]
    say(table_of(title, ("contestant", "p50", "p99"), rows))
    say(f"A bare write and fdatasync meanwhile: {median(syncs):,.0f}/s, {min(syncs):,.0f}/s at worst.")
    same = steadiness(stage.settings.part(5))
    half, most = quantile(same, 0.5), quantile(same, 0.99)
    say(
        f"The same piece of Python again and again, with nothing beside it: {half * 1e3:.2f} ms of processor time in "
        f"the median, {most / half:.1f} times as much at p99, {same[-1] / half:.0f} times at worst."
    )
    for at, quantile_name in enumerate(("p50", "p99")):
        stage.rates[f"Put to receipt, {quantile_name}, seconds"] = {
            NAMES[name]: each[at] for name, each in found.items()
        }
    p50, p99 = found["holdfast"]
    return [below_ms("Put to receipt at 500/s, p50", p50, 1), below_ms("Put to receipt at 500/s, p99", p99, 3)]


def backlog(stage: Stage) -> list[Figure]:
    """The same puts and deliveries on a server with a backlog, against those on one without."""
    depth, part = stage.settings.backlog, stage.settings.part
    folders = [stage.folder / name for name in ("shallow", "deep")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        servers = [stack.enter_context(holdfast_server(folder)) for folder in folders]
        shallow, deep = (stack.enter_context(stage.client("holdfast", "work", url=each.url)) for each in servers)
        began = time.perf_counter()
        stage.run(deep.fill(depth, BODY))
        say(f"A backlog of {depth:,} was put in {time.perf_counter() - began:.0f} s, batches of {BATCH}, IMPORTANT.")
        pair = {"no backlog": shallow, f"a backlog of {depth:,}": deep}
        takes = {name: stage.run(client.consumers(CONSUMERS)) for name, client in pair.items()}
        figures = []
        rates = stage.race(
            "Holdfast, 256 callers put, by backlog",
            {name: partial(_put_round, stage, client, part(15_360)) for name, client in pair.items()},
        )
        figures.append(_slowed("256 callers put, behind the backlog", rates))
        for batch, whole, title in ((BATCH, 8_192, "batches of 256"), (1, 1_000, "one by one")):
            count = part(whole)
            stage.run(shallow.fill(count * (stage.settings.rounds + 1), BODY))
            rates = stage.race(
                f"Holdfast, 8 consumers receive and acknowledge {title}, by backlog",
                {
                    name: _drainer(stage, takes[name], count, batch, client.ack_together)
                    for name, client in pair.items()
                },
            )
            figures.append(_slowed(f"8 consumers, {title}, behind the backlog", rates))
    return figures


def locks(stage: Stage) -> list[Figure]:
    """One caller that locks and unlocks, and 16 that all want the same lock."""
    count = stage.settings.part(300)
    with stage.clients("locks", ("redis", "holdfast", "bare")) as clients:
        rates = stage.race(
            "One caller locks and unlocks, two syncs",
            {NAMES[name]: partial(_lock_round, stage, client, count) for name, client in clients.items()},
        )
        found = {name: _contention(stage, name) for name in clients if name != "bare"}
    title = f"{CONTENDERS} contenders for one lock, {CONTEND_SECONDS:.0f} s, a connection each (medians of the rounds)"
    rows = [(NAMES[name], f"{rate:,.0f}", f"{share:.2f}") for name, (rate, share) in found.items()]
    say(table_of(title, ("contestant", "locks/s", "least served, of an equal share"), rows))
    stage.rates["16 contenders, locks/s"] = {NAMES[name]: rate for name, (rate, _) in found.items()}
    stage.rates["16 contenders, share of the least served"] = {NAMES[name]: share for name, (_, share) in found.items()}
    share = found["holdfast"][1]
    return [
        at_least("One caller locks and unlocks, against Redis", ratio(rates, "Holdfast", NAMES["redis"]), 2),
        Figure("16 contenders: the least served, of an equal share", f"{share:.2f}", ">= 0.9", share >= 0.9),
    ]


SCENES: Final = {each.__name__: each for each in (puts, single, consume, latency, backlog, locks)}


# Rounds.


def _put_round(stage: Stage, client: Client, count: int, callers: int = 256) -> int:
    return stage.run(shared(lambda: client.put(BODY), count, callers))


def _two_putters(stage: Stage, name: str) -> AbstractContextManager[Putters]:
    url, uvloop = stage.servers[name].url, stage.settings.uvloop
    return putters(2, name, url, "puts", size_bytes=len(BODY), uvloop=uvloop)


def _lock_round(stage: Stage, client: Any, count: int) -> int:
    return stage.run(shared(lambda: client.lock_and_unlock("ada"), count, 1))


def _drainer(stage: Stage, consumers: list[Receive], count: int, batch: int, ack: Ack) -> Callable[[], int]:
    return lambda: stage.run(drain(consumers, count, batch, ack))


def _slowed(name: str, rates: dict[str, float]) -> Figure:
    without, behind, _ = rates.values()
    return Figure(name, f"{behind / without:.2f} of the rate without", "", None)


async def drain(consumers: list[Receive], count: int, batch: int, ack: Ack) -> int:
    """Have the consumers share `count` messages, all of which are there already."""
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


async def send_and_take(sender: Client, taker: Client, consumers: list[Receive], count: int) -> list[float]:
    """How long each message was under way, in seconds. Sends do not wait for each other, so no wait hides another."""
    took: list[float] = []

    async def take(receive: Receive) -> None:
        while True:
            for message in await receive(1):
                now, body = time.perf_counter(), taker.body(message)
                await taker.ack_each([message])
                if body.startswith(_END):
                    return
                took.append(now - _STAMP.unpack_from(body)[0])

    taking = [asyncio.create_task(take(receive)) for receive in consumers]
    await asyncio.sleep(0.1)  # So that they all wait.
    sending = []
    began = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(began + number / SENDS_PER_SECOND - time.perf_counter(), 0))
        body = _STAMP.pack(time.perf_counter()).ljust(len(BODY), b"x")
        sending.append(asyncio.create_task(sender.put(body)))
    await asyncio.gather(*sending)
    for _ in consumers:
        await sender.put(_END)
    await asyncio.gather(*taking)
    return took


def _contention(stage: Stage, name: str) -> tuple[float, float]:
    """Locks a second, and what the least served contender had of an equal share."""
    seconds = CONTEND_SECONDS / 10 if stage.settings.quick else CONTEND_SECONDS
    rates, shares = [], []
    with ExitStack() as stack:
        clients = [stack.enter_context(stage.client(name, "locks")) for _ in range(CONTENDERS)]
        stage.run(_contend(clients, seconds / 5))
        for _ in range(min(stage.settings.rounds, 3)):
            counts = stage.run(_contend(clients, seconds))
            rates.append(sum(counts) / seconds)
            shares.append(min(counts) * len(counts) / max(sum(counts), 1))
    return median(rates), median(shares)


async def _contend(clients: list[Any], seconds: float) -> list[int]:
    deadline = time.perf_counter() + seconds

    async def contend(number: int) -> int:
        count = 0
        while True:
            await clients[number].lock_and_unlock(f"contender-{number}")
            if time.perf_counter() > deadline:
                return count
            count += 1

    return list(await asyncio.gather(*(contend(number) for number in range(len(clients)))))
