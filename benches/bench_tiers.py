"""Durability tiers, locks and leases: latencies and rates, compared with bare code that does the same work."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table
from rocksdict import Options, Rdict, WriteBatch

import fastness
from benches import ycsb
from benches.bench_rocksdb import Bare, repeat
from benches.comparison import compare
from benches.ycsb import Outcome, Settings, metric_record, quantile, wide_console
from fastness.runtime.locks.table import LockTable

AGENTS: Final = 10
TASKS: Final = 1_000
CONCURRENT_ROUNDS: Final = 300
YCSB_SECONDS: Final = 8.0
FILE_BUFFER_BYTES: Final = 1 << 20  # The buffer size of a session log.
ENTITY_BYTES: Final = 160  # The stored size of a task.
NOTE_BYTES: Final = 40  # The stored size of an entry in its history.


class Figure(NamedTuple):
    """One line of the report."""

    name: str
    measured: str


def figure(name: str, value: float, unit: str) -> Figure:
    return Figure(name, f"{value:,.2f} {unit}")


def rate(name: str, per_second: float) -> Figure:
    return Figure(name, f"{per_second:,.0f} /s")


def main() -> None:
    figures: list[Figure] = []
    for benchmark in (critical, concurrent, important, best_effort, locks, leases, agents):
        with tempfile.TemporaryDirectory() as folder:
            figures += benchmark(Path(folder))
    table = Table(title="Summary", title_justify="left", min_width=110)
    table.add_column("figure", ratio=1)
    table.add_column("measured", justify="right")
    for each in figures:
        table.add_row(*each)
    wide_console().print(table)


def critical(folder: Path) -> list[Figure]:
    """One caller sets the status of a task; every write is synced."""
    with bare_rocks(folder / "bare") as bare, open_loaded_plane(folder) as plane:
        durations: list[float] = []

        def update() -> None:
            started = time.perf_counter()
            plane.entities.write("task", "task-00000001", {"status": "done"})
            durations.append(time.perf_counter() - started)

        compare(
            "CRITICAL: one caller sets a task's status",
            {
                "bare rocksdict, two keys, write + sync": lambda: repeat(bare.put_and_sync, 300),
                "entities.write": lambda: repeat(update, 300),
            },
        )
    durations.sort()
    p50, p99 = (quantile(durations, share) * 1e3 for share in (0.5, 0.99))
    return [
        figure("CRITICAL update, one caller, p50", p50, "ms"),
        figure("CRITICAL update, one caller, p99", p99, "ms"),
    ]


def concurrent(folder: Path) -> list[Figure]:
    """Ten threads update different tasks; a round ends when the last update is acknowledged."""
    with bare_rocks(folder / "bare") as bare, open_loaded_plane(folder) as plane:
        shared = Bare(folder / "shared")

        def update(number: int) -> None:
            plane.entities.write("task", ycsb.Tasks.name(number), {"status": "done"})

        functions: dict[str, Callable[[int], Any]] = {
            "bare, under one lock": serialized(bare.put_and_sync),
            "bare leader and followers": lambda _: shared.put_in_thread(),
            "entities.write": update,
            "no work: the overhead of the threads": lambda _: None,
        }
        groups = {name: ThreadGroup(AGENTS, work) for name, work in functions.items()}
        compare(
            f"CRITICAL: {AGENTS} threads update {AGENTS} tasks at once (a round of {AGENTS} is one operation)",
            {name: (lambda group=group: repeat(group.run_round, CONCURRENT_ROUNDS)) for name, group in groups.items()},
        )
        durations = sorted(groups["entities.write"].durations)
        for group in groups.values():
            group.end()
        shared.rocks.close()
    p50, p99 = (quantile(durations, share) * 1e3 for share in (0.5, 0.99))
    return [
        figure(f"{AGENTS} concurrent CRITICAL updates, until all are acknowledged, p50", p50, "ms"),
        figure(f"{AGENTS} concurrent CRITICAL updates, p99", p99, "ms"),
    ]


def important(folder: Path) -> list[Figure]:
    """One caller sets the priority of a task: in the log, not synced."""
    with bare_rocks(folder / "bare") as bare, open_loaded_plane(folder) as plane:
        # Enough tasks that no history reaches its limit, after which every update also deletes.
        tasks = cycle([ycsb.Tasks.name(number) for number in range(TASKS)])

        def update() -> None:
            plane.entities.write("task", next(tasks), {"priority": 7})

        title = "entities.write"
        rates = compare(
            "IMPORTANT: one caller sets a task's priority",
            {
                "bare rocksdict, get, two keys, write": lambda: repeat(bare.get_and_put, 5_000),
                title: lambda: repeat(update, 5_000),
            },
        )
    return [
        rate("IMPORTANT updates", rates[title]),
        figure("IMPORTANT update", 1e6 / rates[title], "µs"),
    ]


def best_effort(folder: Path) -> list[Figure]:
    """Records of about 60 bytes, until all are in a file."""
    with open_loaded_plane(folder) as plane, (folder / "bare.jsonl").open("wb", FILE_BUFFER_BYTES) as file:
        encode, flush = msgspec.json.Encoder().encode, plane._transport.services.log().flush

        def bare(times: int) -> int:
            for number in range(times):
                file.write(encode(metric_record(number)) + b"\n")
            file.flush()
            return times

        def logged(times: int) -> int:
            for number in range(times):
                plane.activity.log("agent-1", metric_record(number), kind="metrics")
            flush()
            return times

        def logged_many(times: int) -> int:
            for _ in range(times // 100):
                plane.activity.log_many("agent-2", [metric_record(number) for number in range(100)], kind="metrics")
            flush()
            return times

        def written(times: int) -> int:
            for number in range(times):
                plane.entities.write("metrics", "agent-3", metric_record(number), session="agent-3")
            flush()
            return times

        rates = compare(
            "BEST_EFFORT: one caller, a record of 60 bytes",
            {
                "bare file, buffered": lambda: bare(50_000),
                "activity.log": lambda: logged(50_000),
                "activity.log_many, 100 each": lambda: logged_many(50_000),
                "entities.write of a metric": lambda: written(20_000),
            },
        )
    log, entity = rates["activity.log"], rates["entities.write of a metric"]
    return [
        rate("BEST_EFFORT records, activity.log", log),
        figure("BEST_EFFORT record, activity.log", 1e6 / log, "µs"),
        rate("BEST_EFFORT metrics, entities.write", entity),
        figure("BEST_EFFORT metric, entities.write", 1e6 / entity, "µs"),
    ]


def locks(folder: Path) -> list[Figure]:  # noqa: ARG001
    """The cost of an uncontended row lock."""
    table, lock = LockTable(), threading.Lock()
    keyed: dict[str, threading.RLock] = {}

    def bare_lock() -> None:
        with lock:
            pass

    def keyed_lock() -> None:
        with keyed.setdefault("task/123", threading.RLock()):
            pass

    def row_lock() -> None:
        with table.acquire(["record_id", "task/123"]):
            pass

    title = "LockTable: a row, with its intents"
    rates = compare(
        "Lock and unlock, without contention",
        {
            "threading.Lock": lambda: repeat(bare_lock, 50_000),
            "RLock of a key, in a dict": lambda: repeat(keyed_lock, 50_000),
            title: lambda: repeat(row_lock, 20_000),
        },
    )
    return [figure("LockTable, acquire and release of a row", 1e6 / rates[title], "µs")]


def leases(folder: Path) -> list[Figure]:
    """Acquire and release, two synced commits."""
    with bare_rocks(folder / "bare") as bare, open_loaded_plane(folder) as plane:
        lease_key = plane.lease("deploy")

        def lease() -> None:
            lease_key.acquire(ttl_seconds=30, owner="ada").release()

        def two_writes() -> None:
            bare.put_and_sync()
            bare.put_and_sync()

        first, title = "bare rocksdict, two synced writes", "lease acquire + release"
        rates = compare(
            "A lease, acquired and released",
            {first: lambda: repeat(two_writes, 150), title: lambda: repeat(lease, 150)},
        )
    return [figure("Lease acquire + release, against two bare synced writes", rates[first] / rates[title], "times")]


def agents(folder: Path) -> list[Figure]:
    """YCSB A and F with ten agents. An update in A checks no version, so it cannot abort; one in F can."""
    a, f = (workload(folder / name, name) for name in "af")
    rows = a.locks["record_id"]
    abandoned = f.failures.get("version_conflict", 0)
    stuck = a.deadlocks + f.deadlocks
    return [
        figure("YCSB A, 10 agents: row locks that had to wait", rows.contention * 100, "%"),
        figure("YCSB A, 10 agents: aborted transactions", a.abort_rate * 100, "%"),
        figure("YCSB F, 10 agents: version conflicts", f.abort_rate * 100, "%"),
        Figure("YCSB F, 10 agents: abandoned updates", f"{abandoned}"),
        Figure("Deadlocked agents", f"{stuck}"),
    ]


def workload(folder: Path, name: str) -> Outcome:
    with fastness.open(f"dir:{folder}") as plane:
        found = ycsb.run(ycsb.Tiers(plane), ycsb.load(plane, TASKS), Settings(name, AGENTS, YCSB_SECONDS))
    ycsb.show(wide_console(), found)
    return found


class BareEntity:
    """Hand-written code for an entity: the record, and an entry in its history."""

    def __init__(self, rocks: Rdict) -> None:
        self._rocks = rocks
        self._numbers = count()

    def put(self) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(b"task-00000001", b"x" * ENTITY_BYTES)
        batch.put(b"note-00000001-%d" % next(self._numbers), b"y" * NOTE_BYTES)
        self._rocks.write(batch)

    def get_and_put(self) -> None:
        self._rocks.get(b"task-00000001")
        self.put()

    def put_and_sync(self) -> None:
        self.put()
        self._rocks.flush_wal(True)


class ThreadGroup:
    """Threads that all call a function once per round, at the same time."""

    def __init__(self, size: int, work: Callable[[int], Any]) -> None:
        self.durations: list[float] = []
        self._work = work
        self._ended = False
        self._start, self._finish = threading.Barrier(size + 1), threading.Barrier(size + 1)
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(size)]
        for thread in self._threads:
            thread.start()

    def run_round(self) -> None:
        started = time.perf_counter()
        self._start.wait()
        self._finish.wait()
        self.durations.append(time.perf_counter() - started)

    def end(self) -> None:
        self._ended = True
        self._start.wait()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while True:
            self._start.wait()
            if self._ended:
                return
            self._work(number)
            self._finish.wait()


def serialized(work: Callable[[], Any]) -> Callable[[int], Any]:
    lock = threading.Lock()

    def run_locked(_: int) -> None:
        with lock:
            work()

    return run_locked


@contextmanager
def bare_rocks(path: Path) -> Iterator[BareEntity]:
    rocks = Rdict(str(path), Options(raw_mode=True))
    yield BareEntity(rocks)
    rocks.close()


@contextmanager
def open_loaded_plane(folder: Path) -> Iterator[fastness.Plane]:
    """A plane with tasks."""
    with fastness.open(f"dir:{folder / 'plane'}") as plane:
        ycsb.load(plane, TASKS)
        yield plane


if __name__ == "__main__":
    main()
