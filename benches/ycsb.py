"""YCSB over `plane.entities`, by agents on threads: `python -m benches.ycsb --workload a --agents 10`.

    a   50 read, 50 update                  d   95 read of the latest, 5 insert
    b   95 read, 5 update                   e   95 scan, 5 insert
    c   read only                           f   50 read, 50 read-modify-write, checked by version

    mixed   of 100 operations, 1 sets a CRITICAL status, 4 an IMPORTANT priority, and 95 are BEST_EFFORT records of a
            session log
    heavy   10 CRITICAL, 20 IMPORTANT and 70 BEST_EFFORT, half of these as fields of `metrics` entities

`--compare` runs the mixed (or heavy) workload with three kinds of locking, in turns, and compares medians:

    one global lock   one threading.Lock around every operation, and every operation is a synced commit
    row locks         the lock table's row lock around every operation, and every operation is a synced commit
    tiers             Fastness with its default tiers

An update sets `priority`, and one in ten sets `status` instead. Keys have a Zipfian distribution, or with `--hot 0.1` a
tenth of them gets nine tenths of the operations. The time includes the final sync and the flush of all session logs.
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

import fastness
from benches import zipfian
from benches.zipfian import Chooser
from fastness.errors import FastnessError, VersionConflict
from fastness.kv import Transaction, pack
from fastness.layers import entities
from fastness.layers.entities import EntityKey
from fastness.runtime.locks.table import LevelStats
from fastness.tiers import Tier
from fastness.wire.canonical import canonical

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
TIER_NAMES: Final = {
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
SYNCS: Final = 50  # Bare syncs measured in each round of a comparison.
STUCK_SECONDS: Final = 30.0  # Longer than any wait that a plane allows; an agent still running is deadlocked.

_errors = Console(stderr=True)


class Latency(msgspec.Struct):
    """The latency of operations of one kind."""

    operations: int
    per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class LevelLoad(msgspec.Struct):
    """The load on one level of the lock table during a run."""

    acquisitions: int
    intents: int
    waits: int
    contention: float  # The share of requests that had to wait.
    wait_ms_mean: float
    wait_ms_max: float


class Outcome(msgspec.Struct):
    """The result of a run."""

    workload: str
    agents: int
    seconds: float
    operations: int
    per_second: float
    kinds: dict[str, Latency]
    aborts: int  # Attempts that failed with VersionConflict.
    abort_rate: float  # Of all attempts to commit.
    failures: dict[str, int]  # Other errors, by code.
    deadlocks: int  # Agents that did not end.
    locks: dict[str, LevelLoad]


class Tasks:
    """The number of task entities, and their names."""

    def __init__(self, size: int) -> None:
        self.acknowledged = size
        self._next = count(size)

    def new(self) -> str:
        return self.name(next(self._next))

    @staticmethod
    def name(number: int) -> str:
        return f"task-{number:08d}"


class Tiers:
    """Fastness with its tiers: each field and record by its own."""

    title = "tiers"

    def __init__(self, plane: fastness.Plane) -> None:
        self.plane = plane
        self._entities = plane.entities

    def read(self, id: str) -> None:
        # A CRITICAL read would wait until the IMPORTANT updates that it sees are synced.
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
        self.plane.activity.log(session, metric_record(number), kind="metrics")

    def metric(self, session: str, number: int) -> None:
        self._entities.write("metrics", session, metric_record(number), session=session)

    def flush(self) -> None:
        """Sync all commits and write all session-log records to their files."""
        services = self.plane._transport.services
        services.log().flush()
        services.database.sync()


class Locked(Tiers):
    """Every operation is one synced commit under a lock, regardless of its tier."""

    def __init__(self, plane: fastness.Plane) -> None:
        super().__init__(plane)
        self._numbers = count()

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def status(self, id: str, value: int) -> None:
        self._write(id, {"status": canonical(f"state-{value}")})

    def priority(self, id: str, value: int) -> None:
        self._write(id, {"priority": canonical(value)})

    def record(self, session: str, number: int) -> None:
        # The cheapest durable form: one key, without a version or a history.
        line = msgspec.json.encode(metric_record(number))
        with self.lock("metrics", session):
            self.plane.transact(put, pack(("metrics", session, next(self._numbers))), line)

    metric = record

    def _write(self, id: str, fields: dict[str, bytes]) -> None:
        with self.lock("task", id):
            self.plane.transact(write_task, EntityKey("main", "task", id), fields)


class GlobalLock(Locked):
    """One lock for all operations."""

    title = "one global lock"

    def __init__(self, plane: fastness.Plane) -> None:
        super().__init__(plane)
        self._lock = threading.Lock()

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._lock


class RowLocks(Locked):
    """A lock for each entity, and a synced commit for every operation."""

    title = "row locks"

    def lock(self, kind: str, id: str) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = self.plane.locks.acquire(["record_id", f"{kind}/{id}"])
        return held


class Agent:
    """The operations of one thread."""

    def __init__(self, number: int, store: Tiers, tasks: Tasks, choose: Chooser, *, mix: Mix, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = store
        self._tasks = tasks
        self._choose = choose
        self._operations = [kind for kind, share in mix.items() for _ in range(share)]
        self._session = f"agent-{number}"
        self.durations: dict[str, array[float]] = {kind: array("d") for kind in mix}
        self.aborts = 0
        self.failures: Counter[str] = Counter()

    def work(self, deadline: float) -> None:
        """Run operations until the deadline, in the proportions of the mix."""
        clock = time.perf_counter
        calls = {kind: getattr(self, kind) for kind in self.durations}
        operations = self._operations
        while clock() < deadline:
            self._random.shuffle(operations)
            for kind in operations:
                started_at = clock()
                if started_at >= deadline:
                    break
                try:
                    calls[kind]()
                except FastnessError as error:
                    self.failures[error.code] += 1
                else:
                    self.durations[kind].append(clock() - started_at)

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
        self._store.record(self._session, len(self.durations["record"]))

    def metric(self) -> None:
        self._store.metric(self._session, len(self.durations["metric"]))

    def _task(self) -> str:
        return self._tasks.name(self._choose())


class Settings(NamedTuple):
    """The parameters of a run."""

    workload: str = "a"
    agents: int = 10
    seconds: float = 10.0
    entities: int = 1_000
    hot: float | None = None
    seed: int = 1


def run(store: Tiers, tasks: Tasks, settings: Settings, *, tick: Callable[[float], None] = lambda _: None) -> Outcome:
    """Run the agents on loaded tasks; `tick` is called with the elapsed seconds."""
    mix = WORKLOADS[settings.workload]
    agents = [
        Agent(number, store, tasks, chooser(settings, tasks, number), mix=mix, seed=settings.seed * 1_000 + number)
        for number in range(settings.agents)
    ]
    before = store.plane.locks.stats()
    barrier = threading.Barrier(len(agents) + 1)
    started = deadline = 0.0

    def run_agent(agent: Agent) -> None:
        barrier.wait()
        agent.work(deadline)

    threads = [threading.Thread(target=run_agent, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    gc.collect()
    started = time.perf_counter()
    deadline = started + settings.seconds
    barrier.wait()
    while (remaining := deadline - time.perf_counter()) > 0:
        time.sleep(min(remaining, 0.2))
        tick(settings.seconds - remaining)
    for thread in threads:
        thread.join(max(0.0, deadline + STUCK_SECONDS - time.perf_counter()))
    store.flush()
    seconds = time.perf_counter() - started
    stuck = sum(thread.is_alive() for thread in threads)
    return outcome(settings, agents, seconds, stuck, loads(before, store.plane.locks.stats()))


def chooser(settings: Settings, tasks: Tasks, number: int) -> Chooser:
    """The key chooser of one agent."""
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
        durations = sorted(each for agent in agents for each in agent.durations[kind])
        if durations:
            p50, p99 = (quantile(durations, share) * 1e3 for share in (0.5, 0.99))
            kinds[kind] = Latency(len(durations), len(durations) / seconds, p50, p99, durations[-1] * 1e3)
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
    """The load on each level between two snapshots."""
    found = {}
    for level, current in after.items():
        previous = before[level]
        acquisitions, intents, waits = (
            getattr(current, name) - getattr(previous, name) for name in ("acquisitions", "intents", "waits")
        )
        arrivals = acquisitions + intents + current.unserved - previous.unserved + current.waiting - previous.waiting
        waited = current.wait_seconds_total - previous.wait_seconds_total
        found[level] = LevelLoad(
            acquisitions=acquisitions,
            intents=intents,
            waits=waits,
            contention=waits / arrivals if arrivals else 0.0,
            wait_ms_mean=waited / waits * 1e3 if waits else 0.0,
            wait_ms_max=current.wait_seconds_max * 1e3,
        )
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that a share of a sorted sequence does not exceed."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def load(plane: fastness.Plane, size: int) -> Tasks:
    """Fill an empty plane with tasks."""
    for first in range(0, size, 100):
        with plane.entities.transaction() as tx:
            for number in range(first, min(first + 100, size)):
                for field, value in new_task().items():
                    tx.write("task", Tasks.name(number), field, value)
    return Tasks(size)


def new_task() -> dict[str, Any]:
    return {"status": "open", "priority": 0, "title": "Review the work of the other agents", "note": "x" * 64}


def metric_record(number: int) -> dict[str, Any]:
    return {"model": "file_prediction", "accuracy": 0.95, "step": number}


def write_task(tx: Transaction, key: EntityKey, fields: dict[str, bytes]) -> None:
    entities.write(tx, key, fields, (), tier=Tier.CRITICAL)


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


class Comparison(msgspec.Struct):
    """The same mix with each kind of locking."""

    sync_ms: float  # The duration of a bare synced write; the ratio depends on it.
    rounds: dict[str, list[Outcome]]


def compare(settings: Settings, *, rounds: int, progress: Progress) -> Comparison:
    """Run the mix with each kind of locking, in turns; the first round of each is a warm-up and does not count."""
    each = settings._replace(seconds=settings.seconds / rounds)
    with ExitStack() as stack:
        stores = []
        for kind in (GlobalLock, RowLocks, Tiers):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            plane = stack.enter_context(fastness.open(f"dir:{folder}"))
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
    """The durations of synced writes."""
    for _ in range(times):
        started_at = time.perf_counter()
        rocks.put(b"key", b"x" * 100)
        rocks.flush_wal(True)
        yield time.perf_counter() - started_at


def show(console: Console, found: Outcome) -> None:
    table = Table(
        title=f"YCSB {found.workload.upper()}, {found.agents} agents, {found.seconds:.1f} s: "
        f"{found.per_second:,.0f} operations/s",
        title_justify="left",
        min_width=90,
    )
    table.add_column("operation", ratio=1)
    for column in ("tier", "count", "operations/s", "p50 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="right")
    for kind, each in found.kinds.items():
        figures = (each.p50_ms, each.p99_ms, each.max_ms)
        row = [TIER_NAMES[kind], f"{each.operations:,}", f"{each.per_second:,.0f}", *(f"{ms:,.3f}" for ms in figures)]
        table.add_row(kind, *row)
    console.print(table)
    console.print(level_table(found.locks))
    console.print(f"Aborts: {found.aborts:,}, {found.abort_rate:.2%} of commits.", end=" ")
    console.print(f"Deadlocks: {found.deadlocks}. Failures: {found.failures or 'none'}.")


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
    table = Table(title="The mix of CRITICAL, IMPORTANT and BEST_EFFORT, by kind of locking", min_width=100)
    table.title_justify = "left"
    table.add_column("candidate", ratio=1)
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
    console.print(f"Tiers: {ratio:.1f} times one global lock. Deadlocks: {stuck}.", end=" ")
    console.print(f"A bare synced write takes {comparison.sync_ms:.3f} ms on this disk; the ratio depends on it.")


def wide_console() -> Console:
    """A console on standard output, at least 130 columns wide if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 130))


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_errors, transient=True)


def open_plane(url: str | None, stack: ExitStack) -> fastness.Plane:
    if url is None:
        url = f"dir:{stack.enter_context(tempfile.TemporaryDirectory())}"
    elif url.startswith("dir:") and (Path(url.removeprefix("dir:")) / "kv").exists():
        raise SystemExit(f"{url} already has data; give a new folder")
    return stack.enter_context(fastness.open(url))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.ycsb", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), help="default: a, or mixed with --compare")
    parser.add_argument("--compare", action="store_true", help="compare three kinds of locking")
    parser.add_argument("--agents", type=at_least(1), default=10, help="threads")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of a run; with --compare, per candidate")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of --compare")
    parser.add_argument("--entities", type=at_least(2), default=1_000)
    parser.add_argument("--hot", type=float, help="this share of the entities gets 90 %% of the operations")
    parser.add_argument("--url", help="the plane to use; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.hot is not None and not 0 < given.hot < 1:
        parser.error("--hot must be between 0 and 1")
    if given.seconds <= 0:
        parser.error("--seconds must be positive")
    if given.compare and given.workload not in (None, "mixed", "heavy"):
        parser.error("--compare needs the workload mixed or heavy")
    if given.compare and given.url:
        parser.error("--compare uses temporary folders; remove --url")
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
        plane = open_plane(given.url, stack)
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
