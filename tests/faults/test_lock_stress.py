"""A hundred threads and some tasks at once on overlapping rows and tables, with plain integers that only locks protect.

A lost update makes the sums wrong, a reader without a lock sees a row whose two halves differ, and a deadlock leaves
a thread that does not end.
"""

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from fastness.errors import LockOrderViolation, LockTimeout
from fastness.runtime.locks.table import LockTable

THREADS = 100
TASKS = 20
KINDS = ("edge", "note", "task")
ROWS = 4  # Of each kind: few, for high contention.
TIMEOUT_SECONDS = 120.0  # A longer wait counts as a deadlock.


class Ledger:
    """Every row is two integers that are always changed together, in two steps."""

    def __init__(self) -> None:
        self.table = LockTable()
        self.left = {(kind, id): 0 for kind in KINDS for id in range(ROWS)}
        self.right = dict(self.left)

    def add(self, row: tuple[str, int], amount: int) -> None:
        left = self.left[row]
        time.sleep(0)  # Yields to other threads between the two steps.
        self.left[row] = left + amount
        right = self.right[row]
        time.sleep(0)
        self.right[row] = right + amount

    def check(self, kinds: tuple[str, ...]) -> None:
        rows = [row for row in self.left if row[0] in kinds]
        before = sum(self.left[row] for row in rows)
        time.sleep(0)
        assert all(self.left[row] == self.right[row] for row in rows)
        assert sum(self.right[row] for row in rows) == before


class Worker:
    """Runs random operations until it is stopped, and counts them."""

    def __init__(self, ledger: Ledger, seed: int, stop: threading.Event) -> None:
        self.ledger = ledger
        self.table = ledger.table
        self.random = random.Random(seed)
        self.stop = stop
        self.did: Counter[str] = Counter()
        self.added = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        deeds = [self.change_rows] * 16
        deeds += [self.change_rows_one_by_one, self.try_a_row, self.ask_against_the_order, self.read_a_row] * 4
        deeds += [self.scan_a_table, self.change_a_table] * 2 + [self.scan_everything, self.change_everything]
        try:
            while not self.stop.is_set():
                deed = self.random.choice(deeds)
                deed()
                self.did[deed.__name__] += 1
        except BaseException as error:
            self.error = error
            self.stop.set()

    async def run_async(self) -> None:
        try:
            while not self.stop.is_set():
                rows = self.rows(self.random.randint(1, 3))
                async with await self.table.acquire_all_async(list(map(path, rows)), timeout_seconds=TIMEOUT_SECONDS):
                    await asyncio.sleep(0)
                    self.add_to(rows)
                self.did["change_rows_async"] += 1
                kind = self.random.choice(KINDS)
                async with await self.table.acquire_async(["entity_type", kind], "S", timeout_seconds=TIMEOUT_SECONDS):
                    await asyncio.sleep(0)
                    self.ledger.check((kind,))
                self.did["scan_a_table_async"] += 1
                await self.cancel_a_wait()
        except BaseException as error:
            self.error = error
            self.stop.set()

    async def cancel_a_wait(self) -> None:
        """A wait for a contended lock that is cancelled at a random time, possibly during the grant."""
        wish = asyncio.create_task(self.table.acquire_async(path(self.rows(1)[0]), timeout_seconds=TIMEOUT_SECONDS))
        for _ in range(self.random.randint(0, 4)):
            await asyncio.sleep(0)
        wish.cancel()
        try:
            (await wish).release()
        except asyncio.CancelledError:
            self.did["cancelled"] += 1

    def change_rows(self) -> None:
        rows = self.rows(self.random.randint(1, 4))
        with self.table.acquire_all(list(map(path, rows)), timeout_seconds=TIMEOUT_SECONDS):
            self.add_to(rows)

    def change_rows_one_by_one(self) -> None:
        kind = self.random.choice(KINDS)
        first, second = sorted(self.random.sample(range(ROWS), 2))
        with self.table.acquire(path((kind, first)), timeout_seconds=TIMEOUT_SECONDS):
            self.add_to([(kind, first)])
            with self.table.acquire(path((kind, second)), timeout_seconds=TIMEOUT_SECONDS):
                self.add_to([(kind, first), (kind, second)])

    def try_a_row(self) -> None:
        rows = self.rows(1)
        try:
            with self.table.acquire(path(rows[0]), timeout_seconds=self.random.choice((0, 0.001))):
                self.add_to(rows)
        except LockTimeout:
            self.did["gave up"] += 1

    def ask_against_the_order(self) -> None:
        """In two ways, while it holds a lock; other owners may hold the requested one."""
        kind = self.random.choice(KINDS[1:])
        with self.table.acquire(path((kind, ROWS - 1)), timeout_seconds=TIMEOUT_SECONDS):
            for wrong in (path((kind, 0)), ["entity_type", KINDS[0]]):
                self.did["violations expected"] += 1
                try:
                    self.table.acquire(wrong, timeout_seconds=TIMEOUT_SECONDS).release()
                except LockOrderViolation:
                    self.did["violations"] += 1

    def read_a_row(self) -> None:
        (row,) = self.rows(1)
        with self.table.acquire(path(row), "S", timeout_seconds=TIMEOUT_SECONDS):
            left = self.ledger.left[row]
            time.sleep(0)
            assert self.ledger.right[row] == left

    def scan_a_table(self) -> None:
        kind = self.random.choice(KINDS)
        with self.table.acquire(["entity_type", kind], "S", timeout_seconds=TIMEOUT_SECONDS):
            self.ledger.check((kind,))

    def scan_everything(self) -> None:
        with self.table.acquire(["database"], "S", timeout_seconds=TIMEOUT_SECONDS):
            self.ledger.check(KINDS)

    def change_a_table(self) -> None:
        kind = self.random.choice(KINDS)
        with self.table.acquire(["entity_type", kind], timeout_seconds=TIMEOUT_SECONDS):
            self.add_to([(kind, id) for id in range(ROWS)])

    def change_everything(self) -> None:
        with self.table.acquire(["database"], timeout_seconds=TIMEOUT_SECONDS):
            self.add_to(list(self.ledger.left))

    def add_to(self, rows: list[tuple[str, int]]) -> None:
        for row in rows:
            self.ledger.add(row, 1)
        self.added += len(rows)

    def rows(self, number: int) -> list[tuple[str, int]]:
        return self.random.sample(list(self.ledger.left), number)


def path(row: tuple[str, int]) -> list[str]:
    return ["record_id", f"{row[0]}/{row[1]}"]


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Switch threads far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often_interrupted")
@pytest.mark.parametrize(
    "seconds", [1, pytest.param(5, marks=pytest.mark.thorough), pytest.param(60, marks=pytest.mark.nightly)]
)
def test_a_hundred_threads_do_not_deadlock_or_lose_updates(seconds: float) -> None:
    """The holder of a lock has exclusive access to what it protects."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    seeds = random.Random(seed)
    ledger, stop = Ledger(), threading.Event()
    workers = [Worker(ledger, seeds.getrandbits(64), stop) for _ in range(THREADS)]
    tasks = [Worker(ledger, seeds.getrandbits(64), stop) for _ in range(TASKS)]

    async def run_tasks() -> None:
        await asyncio.gather(*(task.run_async() for task in tasks))

    lives: list[Callable[[], None]] = [worker.run for worker in workers]
    threads = [threading.Thread(target=life, daemon=True) for life in [*lives, lambda: asyncio.run(run_tasks())]]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    stuck = [thread for thread in threads if thread.is_alive()]
    assert not stuck, f"{len(stuck)} threads never ended:\n{ledger.table.holders()}"

    participants = list(chain(workers, tasks))
    assert [worker.error for worker in participants if worker.error is not None] == []
    did = sum((worker.did for worker in participants), Counter[str]())
    print(dict(did), {name: f"{level.contention:.2f}" for name, level in ledger.table.stats().items()})
    assert ledger.left == ledger.right
    assert sum(ledger.left.values()) == sum(worker.added for worker in participants)
    assert did["violations"] == did["violations expected"]
    stats = ledger.table.stats()
    assert sum(level.violations for level in stats.values()) == did["violations"]
    assert sum(level.waits for level in stats.values())
    assert ledger.table.holders() == []
    registry = ledger.table._registry
    assert not any(
        (registry.held, registry.lines, registry.owners, registry.completed, registry.unnoticed, registry.waiting)
    )
