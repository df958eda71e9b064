"""What the tiers must hold: each figure beside its goal, and beside something bare that does the same work.

The goals are tighter than the seed's success criteria, which are named in brackets where they differ.
"""

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

import holdfast
from benches import ycsb
from benches.bench_rocksdb import Bare, repeat
from benches.contest import race
from benches.ycsb import Outcome, Settings, measured, quantile, wide_console
from holdfast.runtime.locks.table import LockTable

AGENTS: Final = 10
TASKS: Final = 1_000
CONCURRENT_ROUNDS: Final = 300
YCSB_SECONDS: Final = 8.0
FILE_BUFFER_BYTES: Final = 1 << 20  # As much as a session log keeps before a caller has to write it.
ENTITY_BYTES: Final = 160  # What a task of these benches takes as it is stored, and a note of its history.
NOTE_BYTES: Final = 40


class Figure(NamedTuple):
    """One line of the report."""

    name: str
    measured: str
    goal: str
    holds: bool


def below(name: str, value: float, goal: float, *, unit: str, note: str = "") -> Figure:
    return Figure(name, f"{value:,.2f} {unit}", f"< {goal:,g} {unit}{note}", value < goal)


def above(name: str, value: float, goal: float, *, unit: str, note: str = "") -> Figure:
    return Figure(name, f"{value:,.0f} {unit}", f"> {goal:,g} {unit}{note}", value > goal)


def main() -> None:
    figures: list[Figure] = []
    for scene in (critical, concurrent, important, best_effort, locks, leases, agents):
        with tempfile.TemporaryDirectory() as folder:
            figures += scene(Path(folder))
    table = Table(title="What must hold", title_justify="left", min_width=110)
    table.add_column("figure", ratio=1)
    for column in ("measured", "goal"):
        table.add_column(column, justify="right")
    table.add_column("holds")
    for each in figures:
        table.add_row(each.name, each.measured, f"goal: {each.goal}", "yes" if each.holds else "[bold red]no")
    wide_console().print(table)


def critical(folder: Path) -> list[Figure]:
    """A lone caller sets the status of a task and waits until it would survive a power loss."""
    with bare_rocks(folder / "bare") as bare, opened(folder) as plane:
        took: list[float] = []

        def update() -> None:
            began = time.perf_counter()
            plane.entities.write("task", "task-00000001", {"status": "done"})
            took.append(time.perf_counter() - began)

        race(
            "CRITICAL: one caller sets a task's status",
            {
                "bare rocksdict, two keys, write + sync": lambda: repeat(bare.put_and_sync, 300),
                "entities.write": lambda: repeat(update, 300),
            },
        )
    took.sort()
    p50, p99 = (quantile(took, share) * 1e3 for share in (0.5, 0.99))
    return [
        below("CRITICAL update, lone caller, p50", p50, 5, unit="ms"),
        below("CRITICAL update, lone caller, p99", p99, 10, unit="ms", note=" (seed: 100)"),
    ]


def concurrent(folder: Path) -> list[Figure]:
    """Ten threads each update a task of their own; the clock stops when the last one is acknowledged."""
    with bare_rocks(folder / "bare") as bare, opened(folder) as plane:
        shared = Bare(folder / "shared")

        def update(number: int) -> None:
            plane.entities.write("task", ycsb.Tasks.name(number), {"status": "done"})

        works: dict[str, Callable[[int], Any]] = {
            "bare, under one lock": locked(bare.put_and_sync),
            "bare leader and followers": lambda _: shared.put_in_thread(),
            "entities.write": update,
            "nothing: what the threads cost": lambda _: None,
        }
        crews = {name: Crew(AGENTS, work) for name, work in works.items()}
        race(
            f"CRITICAL: {AGENTS} threads update {AGENTS} tasks at once (a round of {AGENTS} is one operation)",
            {name: (lambda crew=crew: repeat(crew.round, CONCURRENT_ROUNDS)) for name, crew in crews.items()},
        )
        took = sorted(crews["entities.write"].took)
        for crew in crews.values():
            crew.end()
        shared.rocks.close()
    p50, p99 = (quantile(took, share) * 1e3 for share in (0.5, 0.99))
    return [
        below(f"{AGENTS} concurrent CRITICAL updates, until all are acknowledged, p50", p50, 20, unit="ms"),
        below(f"{AGENTS} concurrent CRITICAL updates, p99", p99, 50, unit="ms", note=" (seed: 1,000)"),
    ]


def important(folder: Path) -> list[Figure]:
    """A lone caller sets the priority of a task: in the log, not synced yet."""
    with bare_rocks(folder / "bare") as bare, opened(folder) as plane:
        # So many that none of them comes to the end of its history, where every update also deletes.
        tasks = cycle([ycsb.Tasks.name(number) for number in range(TASKS)])

        def update() -> None:
            plane.entities.write("task", next(tasks), {"priority": 7})

        title = "entities.write"
        rates = race(
            "IMPORTANT: one caller sets a task's priority",
            {
                "bare rocksdict, get, two keys, write": lambda: repeat(bare.get_and_put, 5_000),
                title: lambda: repeat(update, 5_000),
            },
        )
    return [
        above("IMPORTANT updates", rates[title], 25_000, unit="/s", note=" (seed: 100)"),
        below("IMPORTANT update", 1e6 / rates[title], 40, unit="µs"),
    ]


def best_effort(folder: Path) -> list[Figure]:
    """Records of about 60 bytes; the clock stops when all are in a file."""
    with opened(folder) as plane, (folder / "bare.jsonl").open("wb", FILE_BUFFER_BYTES) as file:
        encode, flush = msgspec.json.Encoder().encode, plane._transport.services.log().flush

        def bare(times: int) -> int:
            for number in range(times):
                file.write(encode(measured(number)) + b"\n")
            file.flush()
            return times

        def logged(times: int) -> int:
            for number in range(times):
                plane.activity.log("agent-1", measured(number), kind="metrics")
            flush()
            return times

        def logged_many(times: int) -> int:
            for _ in range(times // 100):
                plane.activity.log_many("agent-2", [measured(number) for number in range(100)], kind="metrics")
            flush()
            return times

        def written(times: int) -> int:
            for number in range(times):
                plane.entities.write("metrics", "agent-3", measured(number), session="agent-3")
            flush()
            return times

        rates = race(
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
        above("BEST_EFFORT records, activity.log", log, 200_000, unit="/s", note=" (seed: 10,000)"),
        below("BEST_EFFORT record, activity.log", 1e6 / log, 5, unit="µs"),
        above("BEST_EFFORT metrics, entities.write", entity, 50_000, unit="/s", note=" (seed: 10,000)"),
        below("BEST_EFFORT metric, entities.write", 1e6 / entity, 20, unit="µs"),
    ]


def locks(folder: Path) -> list[Figure]:  # noqa: ARG001
    """Nobody is in the way: what it costs to lock a row and let go."""
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
    rates = race(
        "Lock and unlock, nobody waits",
        {
            "threading.Lock": lambda: repeat(bare_lock, 50_000),
            "RLock of a key, in a dict": lambda: repeat(keyed_lock, 50_000),
            title: lambda: repeat(row_lock, 20_000),
        },
    )
    return [below("LockTable, acquire and release of a row", 1e6 / rates[title], 10, unit="µs")]


def leases(folder: Path) -> list[Figure]:
    """Acquire and release, two synced commits."""
    with bare_rocks(folder / "bare") as bare, opened(folder) as plane:
        desk = plane.lease("deploy")

        def lease() -> None:
            desk.acquire(ttl_seconds=30, owner="ada").release()

        def two_writes() -> None:
            bare.put_and_sync()
            bare.put_and_sync()

        first, title = "bare rocksdict, two synced writes", "lease acquire + release"
        rates = race(
            "A lease, acquired and released",
            {first: lambda: repeat(two_writes, 150), title: lambda: repeat(lease, 150)},
        )
    return [below("Lease acquire + release, to two bare synced writes", rates[first] / rates[title], 2, unit="x")]


def agents(folder: Path) -> list[Figure]:
    """YCSB A and F with ten agents. An update of A checks no version, so it cannot abort; that of F can."""
    a, f = (workload(folder / name, name) for name in "af")
    rows = a.locks["record_id"]
    given_up = f.failures.get("version_conflict", 0)
    stuck = a.deadlocks + f.deadlocks
    return [
        below("YCSB A, 10 agents: rows that had to be waited for", rows.contention * 100, 5, unit="%"),
        below("YCSB A, 10 agents: transactions that aborted", a.abort_rate * 100, 1, unit="%"),
        below("YCSB F, 10 agents: attempts that met another version", f.abort_rate * 100, 2, unit="%"),
        Figure("YCSB F, 10 agents: updates that gave up", f"{given_up}", "0", not given_up),
        Figure("Agents that never ended", f"{stuck}", "0", not stuck),
    ]


def workload(folder: Path, name: str) -> Outcome:
    with holdfast.open(f"dir:{folder}") as plane:
        found = ycsb.run(ycsb.Tiers(plane), ycsb.load(plane, TASKS), Settings(name, AGENTS, YCSB_SECONDS))
    ycsb.show(wide_console(), found)
    return found


class BareEntity:
    """What one would write by hand for an entity: the record, and a note of what changed."""

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


class Crew:
    """Threads that do their work once a round, all at the same moment."""

    def __init__(self, size: int, work: Callable[[int], Any]) -> None:
        self.took: list[float] = []
        self._work = work
        self._ended = False
        self._start, self._finish = threading.Barrier(size + 1), threading.Barrier(size + 1)
        self._threads = [threading.Thread(target=self._live, args=(number,), daemon=True) for number in range(size)]
        for thread in self._threads:
            thread.start()

    def round(self) -> None:
        began = time.perf_counter()
        self._start.wait()
        self._finish.wait()
        self.took.append(time.perf_counter() - began)

    def end(self) -> None:
        self._ended = True
        self._start.wait()
        for thread in self._threads:
            thread.join()

    def _live(self, number: int) -> None:
        while True:
            self._start.wait()
            if self._ended:
                return
            self._work(number)
            self._finish.wait()


def locked(work: Callable[[], Any]) -> Callable[[int], Any]:
    lock = threading.Lock()

    def one_at_a_time(_: int) -> None:
        with lock:
            work()

    return one_at_a_time


@contextmanager
def bare_rocks(path: Path) -> Iterator[BareEntity]:
    rocks = Rdict(str(path), Options(raw_mode=True))
    yield BareEntity(rocks)
    rocks.close()


@contextmanager
def opened(folder: Path) -> Iterator[holdfast.Plane]:
    """A plane with tasks."""
    with holdfast.open(f"dir:{folder / 'plane'}") as plane:
        ycsb.load(plane, TASKS)
        yield plane


if __name__ == "__main__":
    main()
