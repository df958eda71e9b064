"""YCSB over `plane.entities`, by agents on threads: `python -m benches.ycsb --workload a --agents 10`.

    a   50 read, 50 update                  d   95 read of the latest, 5 insert
    b   95 read, 5 update                   e   95 scan, 5 insert
    c   read only                           f   50 read, 50 read-modify-write, checked by version

    mixed   what the tiers are for, in the proportions that they were asked for (a hundred task updates to ten thousand
            metrics a second): of 100 operations 1 sets a CRITICAL status, 4 an IMPORTANT priority, and 95 are
            BEST_EFFORT records of a session log
    heavy   10 CRITICAL, 20 IMPORTANT and 70 BEST_EFFORT, half of these as fields of `metrics` entities

`--compare` runs the mix (or the heavy one) three times side by side, in turns, and compares medians:

    one global lock   one threading.Lock around every operation, and every operation is a synced commit
    row locks         the lock table's row lock around every operation, and every operation is a synced commit
    tiers             Holdfast as it is

An update sets `priority`, and one in ten `status` instead. Keys are zipfian, or with `--hot 0.1` a tenth of them gets
nine tenths of the operations. The clock stops when all commits are synced and all records are in their files.
"""

import argparse
import gc
import random
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rocksdict import Options, Rdict

import holdfast
from benches import zipfian
from benches.zipfian import Chooser
from holdfast.errors import HoldfastError, VersionConflict
from holdfast.kv import Transaction, pack
from holdfast.layers import entities
from holdfast.layers.entities import EntityKey
from holdfast.runtime.locks.table import LevelStats
from holdfast.tiers import Tier
from holdfast.wire.canonical import canonical

Mix = dict[str, int]  # How many of a hundred operations are of each kind.

WORKLOADS: Final[dict[str, Mix]] = {
    "a": {"read": 50, "priority": 45, "status": 5},
    "b": {"read": 90, "priority": 9, "status": 1},
    "c": {"read": 100},
    "d": {"read": 95, "insert": 5},
    "e": {"scan": 95, "insert": 5},
    "f": {"read": 50, "modify": 50},
    "mixed": {"status": 1, "priority": 4, "record": 95},
    "heavy": {"status": 10, "priority": 20, "record": 35, "metric": 35},
}
PROMISES: Final = {
    "read": "IMPORTANT",
    "scan": "CRITICAL",
    "insert": "CRITICAL",
    "status": "CRITICAL",
    "priority": "IMPORTANT",
    "modify": "IMPORTANT",
    "record": "BEST_EFFORT",
    "metric": "BEST_EFFORT",
}
WRITES: Final = ("priority", "status", "modify", "insert")
SCAN_LENGTH_MAX: Final = 100
ATTEMPTS_MAX: Final = 10
SYNCS: Final = 50  # In each round of a comparison, to know the disk.
STUCK_SECONDS: Final = 30.0  # Longer than any wait that a plane allows: who has not ended by then never will.

_errors = Console(stderr=True)


class Latency(msgspec.Struct):
    """How long operations of one kind took."""

    operations: int
    per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class LevelLoad(msgspec.Struct):
    """What a run asked of one level of the lock table."""

    acquisitions: int
    intents: int
    waits: int
    contention: float  # The share of those who came that had to wait.
    wait_ms_mean: float
    wait_ms_max: float


class Outcome(msgspec.Struct):
    """What a run showed."""

    workload: str
    agents: int
    seconds: float
    operations: int
    per_second: float
    kinds: dict[str, Latency]
    aborts: int  # Attempts that ended in VersionConflict.
    abort_rate: float  # Of all attempts to commit something.
    failures: dict[str, int]  # Other errors, by their code.
    deadlocks: int  # Agents that never ended.
    locks: dict[str, LevelLoad]


class Tasks:
    """The task entities: how many there are, and their names."""

    def __init__(self, size: int) -> None:
        self.acknowledged = size
        self._next = count(size)

    def new(self) -> str:
        return self.name(next(self._next))

    @staticmethod
    def name(number: int) -> str:
        return f"task-{number:08d}"


class Tiers:
    """Holdfast as it is: each field and record by its tier."""

    title = "tiers"

    def __init__(self, plane: holdfast.Plane) -> None:
        self.plane = plane
        self._entities = plane.entities

    def read(self, id: str) -> None:
        # At CRITICAL a read would wait until the IMPORTANT updates that it sees are synced.
        self._entities.get("task", id, tier=Tier.IMPORTANT)

    def scan(self, id: str, length: int) -> None:
        self._entities.scan("task", after=id, limit=length)

    def insert(self, id: str) -> None:
        self._entities.write("task", id, new_task())

    def status(self, id: str, value: int) -> None:
        self._entities.write("task", id, {"status": f"state-{value}"})

    def priority(self, id: str, value: int) -> None:
        self._entities.write("task", id, {"priority": value})

    def modify(self, id: str, value: int) -> None:
        with self._entities.transaction() as tx:
            task = tx.get("task", id)
            tx.write("task", id, "priority", value if task is None else (task["priority"] + 1) % 1_000)

    def record(self, session: str, number: int) -> None:
        self.plane.activity.log(session, measured(number), kind="metrics")

    def metric(self, session: str, number: int) -> None:
        self._entities.write("metrics", session, measured(number), session=session)

    def settle(self) -> None:
        """Bring everything to where its promise lets it go at leisure."""
        parts = self.plane._transport.services
        parts.log().flush()
        parts.database.sync()


class Locked(Tiers):
    """Every operation is one synced commit below a lock, whatever its data is worth."""

    def __init__(self, plane: holdfast.Plane) -> None:
        super().__init__(plane)
        self._numbers = count()

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def status(self, id: str, value: int) -> None:
        self._write(id, {"status": canonical(f"state-{value}")})

    def priority(self, id: str, value: int) -> None:
        self._write(id, {"priority": canonical(value)})

    def record(self, session: str, number: int) -> None:
        # The cheapest way to make it durable: one key, without a version or a history.
        line = msgspec.json.encode(measured(number))
        with self.lock("metrics", session):
            self.plane.transact(put, pack(("metrics", session, next(self._numbers))), line)

    metric = record

    def _write(self, id: str, fields: dict[str, bytes]) -> None:
        with self.lock("task", id):
            self.plane.transact(write_task, EntityKey("main", "task", id), fields)


class GlobalLock(Locked):
    """One lock for everything: what the seed calls before."""

    title = "one global lock"

    def __init__(self, plane: holdfast.Plane) -> None:
        super().__init__(plane)
        self._lock = threading.Lock()

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._lock


class RowLocks(Locked):
    """A lock for each entity, and a synced commit for everything."""

    title = "row locks"

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = self.plane.locks.acquire(["record_id", f"{kind}/{id}"])
        return held


class Agent:
    """One thread's worth of operations."""

    def __init__(self, number: int, store: Tiers, tasks: Tasks, choose: Chooser, *, mix: Mix, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = store
        self._tasks = tasks
        self._choose = choose
        self._deck = [kind for kind, share in mix.items() for _ in range(share)]
        self._session = f"agent-{number}"
        self.took: dict[str, array[float]] = {kind: array("d") for kind in mix}
        self.aborts = 0
        self.failures: Counter[str] = Counter()

    def work(self, deadline: float) -> None:
        """Carry out operations until the deadline, each kind as often as the mix says in every hundred."""
        clock = time.perf_counter
        calls = {kind: getattr(self, kind) for kind in self.took}
        deck = self._deck
        while clock() < deadline:
            self._random.shuffle(deck)
            for kind in deck:
                began = clock()
                if began >= deadline:
                    break
                try:
                    calls[kind]()
                except HoldfastError as error:
                    self.failures[error.code] += 1
                else:
                    self.took[kind].append(clock() - began)

    def read(self) -> None:
        self._store.read(self._task())

    def scan(self) -> None:
        self._store.scan(self._task(), self._random.randint(1, SCAN_LENGTH_MAX))

    def insert(self) -> None:
        self._store.insert(self._tasks.new())
        self._tasks.acknowledged += 1

    def status(self) -> None:
        self._store.status(self._task(), self._random.randrange(5))

    def priority(self) -> None:
        self._store.priority(self._task(), self._random.randrange(1_000))

    def modify(self) -> None:
        id, value = self._task(), self._random.randrange(1_000)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                self._store.modify(id, value)
            except VersionConflict:
                self.aborts += 1
                if attempt == ATTEMPTS_MAX:
                    raise
            else:
                return

    def record(self) -> None:
        self._store.record(self._session, len(self.took["record"]))

    def metric(self) -> None:
        self._store.metric(self._session, len(self.took["metric"]))

    def _task(self) -> str:
        return self._tasks.name(self._choose())


class Settings(NamedTuple):
    """What a run looks like."""

    workload: str = "a"
    agents: int = 10
    seconds: float = 10.0
    entities: int = 1_000
    hot: float | None = None
    seed: int = 1


def run(store: Tiers, tasks: Tasks, settings: Settings, *, tick: Callable[[float], None] = lambda _: None) -> Outcome:
    """Let the agents loose on loaded tasks for the time that `settings` say; `tick` hears how many seconds passed."""
    mix = WORKLOADS[settings.workload]
    agents = [
        Agent(number, store, tasks, chooser(settings, tasks, number), mix=mix, seed=settings.seed * 1_000 + number)
        for number in range(settings.agents)
    ]
    before = store.plane.locks.stats()
    gate = threading.Barrier(len(agents) + 1)
    started = deadline = 0.0

    def life(agent: Agent) -> None:
        gate.wait()
        agent.work(deadline)

    threads = [threading.Thread(target=life, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    gc.collect()
    started = time.perf_counter()
    deadline = started + settings.seconds
    gate.wait()
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(min(left, 0.2))
        tick(settings.seconds - left)
    for thread in threads:
        thread.join(max(0.0, deadline + STUCK_SECONDS - time.perf_counter()))
    store.settle()
    seconds = time.perf_counter() - started
    stuck = sum(thread.is_alive() for thread in threads)
    return outcome(settings, agents, seconds, stuck, loads(before, store.plane.locks.stats()))


def chooser(settings: Settings, tasks: Tasks, number: int) -> Chooser:
    """How one agent chooses tasks."""
    generator = random.Random(f"{settings.seed}/{number}")
    if settings.workload == "d":
        return zipfian.latest(lambda: tasks.acknowledged, generator)
    if settings.hot is not None:
        return zipfian.hotspot(settings.entities, generator, hot=settings.hot)
    return zipfian.zipfian(settings.entities, generator)


def outcome(
    settings: Settings, agents: Sequence[Agent], seconds: float, stuck: int, locks: dict[str, LevelLoad]
) -> Outcome:
    kinds = {}
    for kind in WORKLOADS[settings.workload]:
        took = sorted(each for agent in agents for each in agent.took[kind])
        if took:
            p50, p99 = (quantile(took, share) * 1e3 for share in (0.5, 0.99))
            kinds[kind] = Latency(len(took), len(took) / seconds, p50, p99, took[-1] * 1e3)
    operations = sum(each.operations for each in kinds.values())
    aborts = sum(agent.aborts for agent in agents)
    commits = sum(kinds[kind].operations for kind in WRITES if kind in kinds)
    return Outcome(
        workload=settings.workload,
        agents=settings.agents,
        seconds=seconds,
        operations=operations,
        per_second=operations / seconds,
        kinds=kinds,
        aborts=aborts,
        abort_rate=aborts / (aborts + commits) if aborts else 0.0,
        failures=dict(sum((agent.failures for agent in agents), Counter())),
        deadlocks=stuck,
        locks=locks,
    )


def loads(before: dict[str, LevelStats], after: dict[str, LevelStats]) -> dict[str, LevelLoad]:
    """What happened on each level between two moments."""
    found = {}
    for level, now in after.items():
        then = before[level]
        acquisitions, intents, waits = (
            getattr(now, name) - getattr(then, name) for name in ("acquisitions", "intents", "waits")
        )
        came = acquisitions + intents + now.unserved - then.unserved + now.waiting - then.waiting
        waited = now.wait_seconds_total - then.wait_seconds_total
        found[level] = LevelLoad(
            acquisitions=acquisitions,
            intents=intents,
            waits=waits,
            contention=waits / came if came else 0.0,
            wait_ms_mean=waited / waits * 1e3 if waits else 0.0,
            wait_ms_max=now.wait_seconds_max * 1e3,
        )
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of an ordered sequence lies."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def load(plane: holdfast.Plane, size: int) -> Tasks:
    """Fill an empty plane with tasks."""
    for first in range(0, size, 100):
        with plane.entities.transaction() as tx:
            for number in range(first, min(first + 100, size)):
                for field, value in new_task().items():
                    tx.write("task", Tasks.name(number), field, value)
    return Tasks(size)


def new_task() -> dict[str, Any]:
    return {"status": "open", "priority": 0, "title": "Look at what the other agents did", "note": "x" * 64}


def measured(number: int) -> dict[str, Any]:
    return {"model": "file_prediction", "accuracy": 0.95, "step": number}


def write_task(tx: Transaction, key: EntityKey, fields: dict[str, bytes]) -> None:
    entities.write(tx, key, fields, (), tier=Tier.CRITICAL)


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


class Comparison(msgspec.Struct):
    """The same mix below each kind of locking."""

    sync_ms: float  # What a synced write of the bare engine takes: the slower the disk, the more it is to avoid it.
    rounds: dict[str, list[Outcome]]


def compare(settings: Settings, *, rounds: int, progress: Progress) -> Comparison:
    """The mix below each kind of locking, in turns; the first round of each warms up and does not count."""
    each = settings._replace(seconds=settings.seconds / rounds)
    with ExitStack() as stack:
        stores = []
        for kind in (GlobalLock, RowLocks, Tiers):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            plane = stack.enter_context(holdfast.open(f"dir:{folder}"))
            stores.append((kind(plane), load(plane, settings.entities)))
        bar = progress.add_task("compare", total=(rounds + 1) * len(stores))
        outcomes: dict[str, list[Outcome]] = {store.title: [] for store, _ in stores}
        bare = Rdict(stack.enter_context(tempfile.TemporaryDirectory()), Options(raw_mode=True))
        stack.callback(bare.close)
        syncs: list[float] = []
        for round_ in range(rounds + 1):
            syncs += synced_writes(bare, SYNCS)
            for store, tasks in stores:
                progress.update(bar, description=store.title)
                found = run(store, tasks, each._replace(seed=settings.seed + round_))
                if round_:
                    outcomes[store.title].append(found)
                progress.advance(bar)
    return Comparison(median(syncs) * 1e3, outcomes)


def synced_writes(rocks: Rdict, times: int) -> Iterator[float]:
    """How long each of some synced writes takes."""
    for _ in range(times):
        began = time.perf_counter()
        rocks.put(b"key", b"x" * 100)
        rocks.flush_wal(True)
        yield time.perf_counter() - began


def show(console: Console, found: Outcome) -> None:
    table = Table(
        title=f"YCSB {found.workload.upper()}, {found.agents} agents, {found.seconds:.1f} s: "
        f"{found.per_second:,.0f} operations/s",
        title_justify="left",
        min_width=90,
    )
    table.add_column("operation", ratio=1)
    for column in ("promise", "count", "operations/s", "p50 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="right")
    for kind, each in found.kinds.items():
        figures = (each.p50_ms, each.p99_ms, each.max_ms)
        row = [PROMISES[kind], f"{each.operations:,}", f"{each.per_second:,.0f}", *(f"{ms:,.3f}" for ms in figures)]
        table.add_row(kind, *row)
    console.print(table)
    console.print(level_table(found.locks))
    console.print(f"Aborts: {found.aborts:,}, {found.abort_rate:.2%} of commits (goal: < 2 %).", end=" ")
    console.print(f"Deadlocks: {found.deadlocks} (goal: 0). Failures: {found.failures or 'none'}.")


def level_table(locks: dict[str, LevelLoad]) -> Table:
    table = Table(title="Locks", title_justify="left", min_width=90)
    table.add_column("level", ratio=1)
    for column in ("acquired", "intents", "waits", "contention", "mean wait ms", "longest ms"):
        table.add_column(column, justify="right")
    for level, each in locks.items():
        counts = (f"{number:,}" for number in (each.acquisitions, each.intents, each.waits))
        waits = (f"{each.wait_ms_mean:,.3f}", f"{each.wait_ms_max:,.3f}")
        table.add_row(level, *counts, f"{each.contention:.2%}", *waits)
    return table


def show_comparison(console: Console, comparison: Comparison) -> None:
    outcomes = comparison.rounds
    table = Table(title="The mix of CRITICAL, IMPORTANT and BEST_EFFORT, below each kind of locking", min_width=100)
    table.title_justify = "left"
    table.add_column("contestant", ratio=1)
    columns = ("operations/s", "spread", "to the first", "status p50 ms", "p99 ms", "priority p99 ms", "metric p99 ms")
    for column in (*columns, "row contention"):
        table.add_column(column, justify="right")
    rates = {title: [each.per_second for each in found] for title, found in outcomes.items()}
    first = median(next(iter(rates.values())))
    for title, found in outcomes.items():
        rate = median(rates[title])
        spread = (max(rates[title]) - min(rates[title])) / rate
        latencies = [("status", "p50_ms"), ("status", "p99_ms"), ("priority", "p99_ms"), ("record", "p99_ms")]
        table.add_row(
            title,
            f"{rate:,.0f}",
            f"±{spread * 50:.0f} %",
            f"{rate / first:.1f} x",
            *(f"{median(getattr(each.kinds[kind], name) for each in found):,.3f}" for kind, name in latencies),
            f"{median(each.locks['record_id'].contention for each in found):.1%}",
        )
    console.print(table)
    stuck = sum(each.deadlocks for found in outcomes.values() for each in found)
    ratio = median(rates["tiers"]) / first
    console.print(f"Tiers: {ratio:.1f} x one global lock (goal: >= 10 x). Deadlocks: {stuck} (goal: 0).", end=" ")
    console.print(f"A bare synced write takes {comparison.sync_ms:.3f} ms on this disk, and the ratio follows it.")


def wide_console() -> Console:
    """Standard output, with room for the tables where nobody says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 130))


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_errors, transient=True)


def opened(url: str | None, stack: ExitStack) -> holdfast.Plane:
    if url is None:
        url = f"dir:{stack.enter_context(tempfile.TemporaryDirectory())}"
    elif url.startswith("dir:") and (Path(url.removeprefix("dir:")) / "kv").exists():
        raise SystemExit(f"{url} is in use; a run fills a new folder with its own tasks")
    return stack.enter_context(holdfast.open(url))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.ycsb", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), help="a, or mixed with --compare, if nothing is said")
    parser.add_argument("--compare", action="store_true", help="the mix below three kinds of locking, side by side")
    parser.add_argument("--agents", type=at_least(1), default=10, help="threads")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run; with --compare of each contestant")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="of --compare")
    parser.add_argument("--entities", type=at_least(2), default=1_000)
    parser.add_argument("--hot", type=float, help="this share of the entities gets 90 %% of the operations")
    parser.add_argument("--url", help="a plane to use, instead of a temporary folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.hot is not None and not 0 < given.hot < 1:
        parser.error("--hot is a share between 0 and 1")
    if given.seconds <= 0:
        parser.error("--seconds is a positive number")
    if given.compare and given.workload not in (None, "mixed", "heavy"):
        parser.error("--compare is for the workloads mixed and heavy")
    if given.compare and given.url:
        parser.error("--compare opens folders of its own; leave out --url")
    return given


def at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is less than {lowest}")
        return int(text)

    return number


def main() -> None:
    given = arguments()
    workload = given.workload or ("mixed" if given.compare else "a")
    settings = Settings(workload, given.agents, given.seconds, given.entities, given.hot, given.seed)
    console = wide_console()
    if given.compare:
        with progress_bar() as progress:
            comparison = compare(settings, rounds=given.rounds, progress=progress)
        if given.json:
            print(msgspec.json.encode(comparison).decode())
        else:
            show_comparison(console, comparison)
        return
    with ExitStack() as stack:
        plane = opened(given.url, stack)
        tasks = load(plane, settings.entities)
        with progress_bar() as progress:
            bar = progress.add_task(f"workload {workload}", total=settings.seconds)
            found = run(Tiers(plane), tasks, settings, tick=lambda done: progress.update(bar, completed=done))
    if given.json:
        print(msgspec.json.encode(found).decode())
    else:
        show(console, found)


if __name__ == "__main__":
    main()
