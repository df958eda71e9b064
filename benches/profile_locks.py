"""Lock waits of many agents: `python -m benches.profile_locks --duration 60 --agents 100 --out locks.png`.

Agents lock rows of four tables with a Zipfian distribution and hold each lock as long as a synced commit. Of 1,000
locks, 949 are of one row, 40 of several rows at once, 10 of a whole table, which excludes the writers of all its rows,
and 1 is a shared lock of the whole database, as for a backup. Each lock also acquires its intention locks.

    --agents 100                       threads of this process, on one lock table
    --processes 100 --on server        processes, connected to a server on RocksDB
    --processes 100 --on postgres      half of the processes connected to each of two servers on one PostgreSQL
    --processes 12 --on nodes          each process opens the PostgreSQL itself, with connections of its own

Servers are real `fastness serve` processes, and every commit is synced.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

import fastness
from benches.bench_nodes import postgresql
from benches.lock_process import MIX, Agent, Task
from benches.ycsb import STUCK_SECONDS, LevelLoad, at_least, loads, progress_bar, quantile, wide_console
from fastness import Plane
from fastness.runtime.locks.table import LevelStats, LockTable

ROOT: Final = Path(__file__).parent.parent
PERCENTILES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}
LEVEL: Final = {"row": "record_id", "rows": "record_id", "table": "entity_type", "database": "database"}
WHERE: Final = {"server": "a server", "postgres": "two servers on PostgreSQL", "nodes": "PostgreSQL"}
NODES_MAX: Final = 12  # Processes that are nodes: each has some connections, and PostgreSQL accepts 100.


class Found(NamedTuple):
    """The acquisitions of one agent by kind: the second of each, and its duration."""

    samples: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    failures: Counter[str]
    stats: Sequence[dict[str, LevelStats]] = ()  # Before and after, if the agent has a plane of its own.

    @property
    def acquired(self) -> int:
        return sum(len(durations) for _, durations in self.samples.values())


class Profile(NamedTuple):
    """The result of a run."""

    seconds: float
    durations: dict[str, list[float]]  # By kind, sorted.
    each_second: list[dict[str, float]]  # Percentiles of the acquisitions in it, in milliseconds.
    levels: dict[str, LevelLoad]
    levels_each_second: list[dict[str, LevelLoad]]
    failures: Counter[str]
    served: list[int]  # Acquisitions of each agent, sorted.
    deadlocks: int


def profile_threads(agents_count: int, duration_seconds: float, hold_seconds: float) -> Profile:
    """Run the agents for `duration_seconds`, as threads of this process."""
    table = LockTable()
    agents = [Agent(table, number, hold_seconds) for number in range(agents_count)]
    snapshots = [table.stats()]
    started = time.perf_counter()
    deadline = started + duration_seconds
    threads = [threading.Thread(target=agent.work, args=(started, deadline), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    with progress_bar() as progress:
        bar = progress.add_task(f"{agents_count} agents", total=duration_seconds)
        while (left := deadline - time.perf_counter()) > 0:
            time.sleep(min(left, 1.0))
            snapshots.append(table.stats())
            progress.update(bar, completed=duration_seconds - left)
    for thread in threads:
        thread.join(max(0.0, deadline + STUCK_SECONDS - time.perf_counter()))
    seconds, stuck = time.perf_counter() - started, sum(each.is_alive() for each in threads)
    return build_profile([Found(agent.samples, agent.failures) for agent in agents], snapshots, seconds, stuck)


def profile_processes(task: Task, statistics: Sequence[Plane]) -> Profile:
    """Run the agents as processes; `statistics` are the servers' planes, whose lock statistics are added up."""
    program = subprocess.Popen(
        [sys.executable, "-m", "benches.lock_process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # All processes are one group, which can be killed.
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        program.stdin.write(json.dumps(task._asdict()) + "\n")
        program.stdin.flush()
        if program.stdout.readline() != "started\n":
            raise SystemExit(f"The processes ended with {program.wait()}")
        started = time.perf_counter()
        snapshots = [total(each.locks.stats() for each in statistics)]
        with progress_bar() as progress:
            bar = progress.add_task(f"{task.processes} processes", total=task.seconds)
            while (left := started + task.seconds - time.perf_counter()) > 0:
                time.sleep(min(left, 1.0))
                snapshots.append(total(each.locks.stats() for each in statistics))
                progress.update(bar, completed=task.seconds - left)
        with suppress(subprocess.TimeoutExpired):
            program.wait(STUCK_SECONDS)
        seconds = time.perf_counter() - started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    files = [Path(task.folder) / f"{number}.json" for number in range(task.processes)]
    found = [read(file) for file in files if file.exists()]
    if not statistics:
        snapshots = [total(each.stats[position] for each in found) for position in range(2)]
    return build_profile(found, snapshots, seconds, task.processes - len(found))


def read(file: Path) -> Found:
    found = json.loads(file.read_text())
    stats = msgspec.convert(found["stats"], list[dict[str, LevelStats]])
    return Found(found["samples"], Counter(found["failures"]), stats)


def total(stats: Iterable[Mapping[str, LevelStats]]) -> dict[str, LevelStats]:
    """The statistics of several nodes as those of one."""
    found: dict[str, LevelStats] = {}
    for each in stats:
        for level, counts in each.items():
            before = found.get(level)
            fields = {
                name: getattr(counts, name)
                if before is None
                else (max if name.endswith("_max") else sum)((getattr(before, name), getattr(counts, name)))
                for name in LevelStats.__struct_fields__
            }
            found[level] = LevelStats(**fields)
    return found


def build_profile(agents: list[Found], snapshots: list[dict[str, LevelStats]], seconds: float, stuck: int) -> Profile:
    durations = {kind: sorted(each for agent in agents for each in agent.samples[kind][1]) for kind in MIX}
    by_second: dict[int, list[float]] = {}
    for agent in agents:
        for sample in agent.samples.values():
            for second, each in zip(*sample, strict=True):
                by_second.setdefault(second, []).append(each)
    each_second = []
    for _, values in sorted(by_second.items()):
        values.sort()
        each_second.append({name: quantile(values, share) * 1e3 for name, share in PERCENTILES.items()})
    return Profile(
        seconds,
        durations,
        each_second,
        loads(snapshots[0], snapshots[-1]),
        [loads(before, after) for before, after in pairwise(snapshots)],
        sum((agent.failures for agent in agents), Counter()),
        sorted(agent.acquired for agent in agents),
        stuck,
    )


@contextmanager
def serving(data: str, state: Path) -> Iterator[str]:
    """The URL of a server on `data`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastness.cli", "serve", "--data", data, "--port", "0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"XDG_STATE_HOME": str(state)},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        if not url.startswith("http"):
            raise SystemExit(f"The server ended with {process.wait()}")
        yield url
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def shared_planes(on: str, folder: Path) -> Iterator[tuple[list[str], list[Plane]]]:
    """What the processes connect to, and the planes of its servers."""
    with ExitStack() as stack:
        if on == "server":
            urls = [stack.enter_context(serving(f"dir:{folder / 'data'}", folder))]
        else:
            shared = stack.enter_context(postgresql())
            fastness.open(shared, activity=str(folder / "activity")).close()  # Creates the tables.
            if on == "nodes":
                yield [shared], []
                return
            urls = [stack.enter_context(serving(shared, folder / f"node-{number}")) for number in range(2)]
        yield urls, [stack.enter_context(fastness.connect(url)) for url in urls]


def show(console: Console, result: Profile) -> None:
    table = Table(title="Acquisitions by kind", title_justify="left", min_width=100)
    for column in ("lock", "level"):
        table.add_column(column)
    for column in ("acquired", "acquired/s", "p50 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="right", ratio=1)
    for kind, durations in result.durations.items():
        if durations:
            figures = (f"{quantile(durations, share) * 1e3:,.3f}" for share in PERCENTILES.values())
            table.add_row(kind, LEVEL[kind], f"{len(durations):,}", f"{len(durations) / result.seconds:,.0f}", *figures)
    console.print(table)
    levels = Table(title="Acquisitions by level", title_justify="left", min_width=100)
    levels.add_column("level")
    for column in ("acquired", "intents", "waits", "contention", "mean wait ms", "longest wait ms"):
        levels.add_column(column, justify="right", ratio=1)
    for level, each in result.levels.items():
        counts = (f"{number:,}" for number in (each.acquisitions, each.intents, each.waits))
        levels.add_row(level, *counts, f"{each.contention:.2%}", f"{each.wait_ms_mean:.3f}", f"{each.wait_ms_max:.3f}")
    console.print(levels)
    served, mean = result.served, fmean(result.served)
    console.print(f"{sum(served) / result.seconds:,.0f} acquisitions/s by {len(served)} agents.", end=" ")
    console.print(f"The least served got {served[0]:,}, {served[0] / mean:.2f} of an equal share;", end=" ")
    console.print(f"the most served {served[-1]:,}, {served[-1] / mean:.2f} of it.")
    console.print(f"Deadlocks: {result.deadlocks}. Failures: {dict(result.failures) or 'none'}.")


def draw(result: Profile, title: str, path: Path) -> None:
    """Draw two panels: percentiles and contention by second."""
    from benches import plots

    figure, (above, below) = plots.page(f"{title}, {result.seconds:.0f} s", 2)
    complete = len(result.levels_each_second)
    seconds = [second + 0.5 for second in range(len(result.each_second[:complete]))]
    latencies = {name: [each[name] for each in result.each_second[:complete]] for name in PERCENTILES}
    plots.latencies_over_time(above, seconds, latencies)
    contention = {
        f"{level} ({load.contention:.1%} overall)": [each[level].contention * 100 for each in result.levels_each_second]
        for level, load in result.levels.items()
    }
    plots.contention_over_time(below, [second + 0.5 for second in range(complete)], contention)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.profile_locks")
    parser.add_argument("--duration", type=at_least(1), default=60, help="seconds")
    parser.add_argument("--agents", type=at_least(1), default=100, help="threads, without --processes")
    parser.add_argument("--processes", type=at_least(1), help="processes, instead of threads")
    parser.add_argument("--on", choices=("server", "postgres", "nodes"), help="what the processes share [server]")
    parser.add_argument("--hold-us", type=at_least(0), default=200, help="how long a lock is held, in microseconds")
    parser.add_argument("--out", type=Path, help="write a plot to this file")
    given = parser.parse_args()
    if given.on and not given.processes:
        parser.error("--on needs --processes")
    if given.on == "nodes" and given.processes > NODES_MAX:
        parser.error(f"PostgreSQL accepts too few connections for more than {NODES_MAX} nodes; use --on postgres")
    console, hold_seconds = wide_console(), given.hold_us / 1e6
    if given.processes is None:
        title = f"Lock table, {given.agents} agents"
        result = profile_threads(given.agents, given.duration, hold_seconds)
    else:
        on = given.on or "server"
        title = f"Shared locks, {given.processes} processes on {WHERE[on]}"
        with tempfile.TemporaryDirectory() as folder, shared_planes(on, Path(folder)) as (urls, planes):
            found = Path(folder) / "found"
            found.mkdir()
            result = profile_processes(Task(urls, given.processes, given.duration, hold_seconds, str(found)), planes)
    console.print(f"{title}, {given.duration} s")
    show(console, result)
    if given.out is not None:
        draw(result, title, given.out)
        console.print(f"Drawn: {given.out}")


if __name__ == "__main__":
    main()
