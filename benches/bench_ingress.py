"""The ingress, against one synced transaction per push behind one lock.

    python -m benches ingress        two tables, and the plot docs/ingress.png

"Answered" is how long a caller waits for its answer; "stored" is the rate of pushes until the last one is in its
mailbox. 64 callers push 4,096 payloads of 200 bytes, as many as the queue holds, to 50 mailboxes.
"""

import asyncio
import gc
import tempfile
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from rich.table import Table

from benches.comparison import echo
from benches.ycsb import quantile
from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.limits import INGRESS_QUEUE_MAX, INGRESS_WAIT_SECONDS
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.ingress.dedupe import key_of
from fastness.runtime.ingress.ingress import Ingress
from fastness.runtime.ingress.validation import mail_of
from fastness.testing.faults import FaultyDatabase
from fastness.wire.ingress import NewPush
from fastness.wire.mail import MailPolicy

CALLERS: Final = 64
PUSHES: Final = 4_096
ROUNDS: Final = 5
MAILBOXES: Final = 50
PAYLOAD: Final = urlsafe_b64encode(b"x" * 200).decode().rstrip("=")
IMAGE: Final = Path(__file__).parent.parent / "docs" / "ingress.png"
KEYS: Final = Subspace("bench").key("keys")

Push = Callable[[int], Awaitable[None]]


class Result(NamedTuple):
    """The result of one candidate in one round."""

    answered: list[float]  # Seconds of each push, sorted.
    stored_per_second: float


class Figures(NamedTuple):
    """Medians over the rounds."""

    p50_ms: float
    p95_ms: float
    stored_per_second: float


def main() -> None:
    pushed = asyncio.run(compare_pushes())
    busy = asyncio.run(measure_busy_answers())
    draw(pushed, busy)
    echo(f"Drawn: {IMAGE}")


# Pushes.


def new_push(number: int, *, synced: bool = False) -> NewPush:
    return NewPush(
        topic="t",
        content_type="text/plain",
        payload_base64=PAYLOAD,
        idempotency_key=str(number),
        durability="synced" if synced else "accepted",
    )


def addresses(number: int) -> tuple[Address, Address]:
    return Address("main", f"sender-{number % CALLERS}"), Address("main", f"agent-{number % MAILBOXES}")


def push_in_transaction(tx: Transaction, number: int) -> None:
    """Check the key, write it, and append to the inbox in one transaction: a push without the ingress."""
    sender, to = addresses(number)
    new = new_push(number)
    key = key_of(str(to), str(sender), new.topic, new.idempotency_key)
    if tx.get(KEYS + key) is None:
        tx.put(KEYS + key, tx.now_ms.to_bytes(8, "big"))
        mailboxes.send(tx, sender, to, mail_of(new, key.hex(), 200))


async def with_one_lock(database: Database) -> Result:
    """The baseline: every push is one synced transaction, behind one lock."""
    lock = asyncio.Lock()

    async def push(number: int) -> None:
        async with lock:
            await database.transact_async(push_in_transaction, number)

    return await measure(push, lambda: asyncio.sleep(0))


async def with_shared_syncs(database: Database) -> Result:
    """The same transactions without the lock: concurrent callers share a sync."""

    async def push(number: int) -> None:
        await database.transact_async(push_in_transaction, number)

    return await measure(push, lambda: asyncio.sleep(0))


async def accepted(database: Database) -> Result:
    """The ingress, answered when the push is in the queue."""
    return await through_ingress(database, synced=False)


async def synced(database: Database) -> Result:
    """The ingress, answered when the batch is synced."""
    return await through_ingress(database, synced=True)


async def through_ingress(database: Database, *, synced: bool) -> Result:
    ingress = ingress_on(database)
    await ingress.start()

    async def push(number: int) -> None:
        sender, to = addresses(number)
        await ingress.push(sender, to, new_push(number, synced=synced))

    return await measure(push, ingress.close)


def ingress_on(database: Database) -> Ingress:
    return Ingress(database, AsyncBlobStore(database, None), pushes_per_minute=0)


async def measure(push: Push, finish: Callable[[], Awaitable[None]]) -> Result:
    answered: list[float] = []
    clock = time.perf_counter

    async def caller(first: int) -> None:
        for number in range(first, PUSHES, CALLERS):
            started = clock()
            await push(number)
            answered.append(clock() - started)
            await asyncio.sleep(0)  # Each push is a separate request: let the other callers run.

    gc.collect()
    started = clock()
    await asyncio.gather(*(caller(first) for first in range(CALLERS)))
    await finish()
    return Result(sorted(answered), PUSHES / (clock() - started))


CANDIDATES: Final[dict[str, Callable[[Database], Awaitable[Result]]]] = {
    "baseline: a transaction each, one lock": with_one_lock,
    "without the lock, shared syncs": with_shared_syncs,
    "ingress: accepted": accepted,
    "ingress: synced": synced,
}


async def compare_pushes() -> dict[str, Figures]:
    rounds: dict[str, list[Result]] = {name: [] for name in CANDIDATES}
    for number in range(ROUNDS + 1):
        for name, candidate in CANDIDATES.items():
            with tempfile.TemporaryDirectory() as folder, RocksDatabase(Path(folder) / "kv") as database:
                database.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1_000_000))
                each = await candidate(database)
            if number:  # The first round is a warm-up.
                rounds[name].append(each)
    figures = {
        name: Figures(
            median(quantile(each.answered, 0.5) for each in results) * 1e3,
            median(quantile(each.answered, 0.95) for each in results) * 1e3,
            median(each.stored_per_second for each in results),
        )
        for name, results in rounds.items()
    }
    table = Table(
        title=f"{CALLERS} callers push, RocksDB, medians of {ROUNDS} rounds", title_justify="left", min_width=100
    )
    table.add_column("", ratio=1)
    for column in ("answered p50 ms", "answered p95 ms", "stored/s", "against the baseline"):
        table.add_column(column, justify="right")
    first = next(iter(figures.values())).stored_per_second
    for name, each in figures.items():
        rate = f"{each.stored_per_second:,.0f}"
        table.add_row(
            name, f"{each.p50_ms:.3f}", f"{each.p95_ms:.3f}", rate, f"{each.stored_per_second / first:.1f} times"
        )
    echo(table)
    return figures


# A full queue.


class HangingStore:
    """Makes transactions hang while `is_hanging`."""

    def __init__(self) -> None:
        self.resume = threading.Event()
        self.is_hanging = False

    def at(self, point: str) -> None:
        if self.is_hanging and point == "transact: begin":
            self.resume.wait()


async def measure_busy_answers() -> Figures:
    """The latency of ERR_BUSY when the queue is full and the store hangs; 20 ms of it are the intended wait."""
    store, durations = HangingStore(), list[float]()
    ingress = ingress_on(FaultyDatabase(MemoryDatabase(), store))
    await ingress.start()
    store.is_hanging = True
    numbers = iter(range(1_000_000))

    async def push() -> bool:
        number = next(numbers)
        sender, to = addresses(number)
        started = time.perf_counter()
        try:
            await ingress.push(sender, to, new_push(number))
        except Busy:
            durations.append(time.perf_counter() - started)
            return False
        return True

    while ingress.depth < INGRESS_QUEUE_MAX:
        await push()

    async def caller() -> None:
        for _ in range(20):
            await push()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    rate = len(durations) / (time.perf_counter() - started)
    store.resume.set()
    await ingress.close()
    durations.sort()
    figures = Figures(quantile(durations, 0.5) * 1e3, quantile(durations, 0.95) * 1e3, rate)
    sleeps = await measure_sleeps()
    echo(
        f"ERR_BUSY of a full queue, {len(durations):,} answers to {CALLERS} callers while the store hangs: p50 "
        f"{figures.p50_ms:.1f} ms, p95 {figures.p95_ms:.1f} ms, max {durations[-1] * 1e3:.1f} ms. A "
        f"bare sleep of 20 ms, with as many callers, in the same minute: p50 {quantile(sleeps, 0.5) * 1e3:.1f} ms, p95 "
        f"{quantile(sleeps, 0.95) * 1e3:.1f} ms, max {sleeps[-1] * 1e3:.1f} ms"
    )
    return figures


async def measure_sleeps() -> list[float]:
    """The durations of sleeps of 20 ms on this machine, sorted."""
    durations: list[float] = []

    async def caller() -> None:
        for _ in range(20):
            started = time.perf_counter()
            await asyncio.sleep(INGRESS_WAIT_SECONDS)
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return sorted(durations)


def draw(pushed: dict[str, Figures], busy: Figures) -> None:
    from benches import plots

    figure, axes = plots.page("Ingress", 2)
    latencies = {name: {"p50": each.p50_ms, "p95": each.p95_ms} for name, each in pushed.items()}
    latencies["ERR_BUSY, the store hangs"] = {"p50": busy.p50_ms, "p95": busy.p95_ms}
    plots.bars(axes[0], latencies, "Time until a push is answered", "ms (logarithmic)", logarithmic=True)
    rates = {name: {"stored": each.stored_per_second} for name, each in pushed.items()}
    plots.bars(axes[1], rates, "Pushes stored in their mailboxes", "a second")
    plots.save(figure, IMAGE)


if __name__ == "__main__":
    main()
