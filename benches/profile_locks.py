"""Lock waits of many agents: `python -m benches.profile_locks --duration 60 --agents 100 --out locks.png`.

Agents lock rows of four tables with a Zipfian distribution and hold each lock as long as a synced commit. Of 1,000
locks, 949 are of one row, 40 of several rows at once, 10 of a whole table, which excludes the writers of all its rows,
and 1 is a shared lock of the whole database, as for a backup. Each lock also acquires its intention locks.
"""

import argparse
import random
import threading
import time
from array import array
from collections import Counter
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from benches import zipfian
from benches.ycsb import STUCK_SECONDS, LevelLoad, at_least, loads, progress_bar, quantile, wide_console
from holdfast.errors import HoldfastError
from holdfast.runtime.locks.table import LevelStats, LockTable

TABLES: Final = ("task", "decision", "edge", "metrics")
ROWS: Final = 1_000  # Of each table.
PERCENTILES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}
MIX: Final = {"row": 949, "rows": 40, "table": 10, "database": 1}
LEVEL: Final = {"row": "record_id", "rows": "record_id", "table": "entity_type", "database": "database"}


class Sample(NamedTuple):
    """Acquisitions of one agent: the second of each, and its duration."""

    second: "array[int]"
    durations: "array[float]"


class Agent:
    """One thread that locks and unlocks."""

    def __init__(self, table: LockTable, number: int, hold_seconds: float) -> None:
        self._table = table
        self._random = random.Random(number)
        self._choose = zipfian.zipfian(ROWS, self._random)
        self._hold_seconds = hold_seconds
        self.samples = {kind: Sample(array("l"), array("d")) for kind in MIX}
        self.failures: Counter[str] = Counter()

    def work(self, started: float, deadline: float) -> None:
        """Lock until the deadline."""
        clock, operations = time.perf_counter, [kind for kind, share in MIX.items() for _ in range(share)]
        while clock() < deadline:
            self._random.shuffle(operations)
            for kind in operations:
                started_at = clock()
                if started_at >= deadline:
                    break
                try:
                    with self._acquire(kind):
                        acquired = clock()
                        time.sleep(self._hold_seconds)
                except HoldfastError as error:
                    self.failures[error.code] += 1
                else:
                    self.samples[kind].second.append(int(acquired - started))
                    self.samples[kind].durations.append(acquired - started_at)

    def _acquire(self, kind: str) -> AbstractContextManager[Any]:
        if kind == "database":
            return self._table.acquire(["database"], "S")
        name = self._random.choice(TABLES)
        if kind == "table":
            return self._table.acquire(["entity_type", name], self._random.choice("SX"))
        if kind == "rows":
            rows = {f"{name}/{self._choose()}" for _ in range(self._random.randint(2, 5))}
            return self._table.acquire_all([["record_id", row] for row in rows])
        return self._table.acquire(["record_id", f"{name}/{self._choose()}"], self._random.choice("SX"))


class Profile(NamedTuple):
    """The result of a run."""

    seconds: float
    durations: dict[str, list[float]]  # By kind, sorted.
    each_second: list[dict[str, float]]  # Percentiles of the acquisitions in it, in milliseconds.
    levels: dict[str, LevelLoad]
    levels_each_second: list[dict[str, LevelLoad]]
    failures: Counter[str]
    deadlocks: int


def profile(agents_count: int, duration_seconds: float, hold_seconds: float) -> Profile:
    """Run the agents for `duration_seconds`."""
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
    return build_profile(agents, snapshots, time.perf_counter() - started, sum(each.is_alive() for each in threads))


def build_profile(agents: list[Agent], snapshots: list[dict[str, LevelStats]], seconds: float, stuck: int) -> Profile:
    durations = {kind: sorted(each for agent in agents for each in agent.samples[kind].durations) for kind in MIX}
    by_second: dict[int, list[float]] = {}
    for agent in agents:
        for sample in agent.samples.values():
            for second, each in zip(sample.second, sample.durations, strict=True):
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
        stuck,
    )


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
    console.print(f"Deadlocks: {result.deadlocks}. Failures: {dict(result.failures) or 'none'}.")


def draw(result: Profile, agents: int, path: Path) -> None:
    """Draw two panels: percentiles and contention by second."""
    from benches import plots

    figure, (above, below) = plots.page(f"Lock table, {agents} agents, {result.seconds:.0f} s", 2)
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
    parser.add_argument("--agents", type=at_least(1), default=100, help="threads")
    parser.add_argument("--hold-us", type=at_least(0), default=200, help="how long a lock is held, in microseconds")
    parser.add_argument("--out", type=Path, help="write a plot to this file")
    given = parser.parse_args()
    result = profile(given.agents, given.duration, given.hold_us / 1e6)
    console = wide_console()
    show(console, result)
    if given.out is not None:
        draw(result, given.agents, given.out)
        console.print(f"Drawn: {given.out}")


if __name__ == "__main__":
    main()
