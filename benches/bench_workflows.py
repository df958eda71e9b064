"""Durable workflows, against dbos: on the same PostgreSQL, and embedded on RocksDB against dbos on SQLite.

    python -m benches workflows                                all lines; about three minutes
    python -m benches.bench_workflows --quick                  a smoke test
    python -m benches.bench_workflows embedded --json FILE     one kind of storage, and the figures as JSON

Every result of a step is stored and synced before the next step starts, on both sides: PostgreSQL has its default
settings, RocksDB syncs its log, and dbos leaves SQLite at a journal in a file of its own that is synced with every
commit (journal_mode=delete, synchronous=FULL). Each contestant is a process of its own, with its callers. A step is an
async function that adds one to a number. Candidates take turns, and the medians are compared.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.table import Table

from benches import bench_nodes
from benches.comparison import echo
from benches.storage_options import parse_options

SCRIPT: Final = Path(__file__).parent / "workflow_process.py"
FASTNESS: Final = "fastness"
DBOS: Final = "dbos"
MIB: Final = 1 << 20
Place = tuple[str, ...]  # The URL of a storage, and on PostgreSQL that of Fastness's object store for large blobs.
STOP_SECONDS: Final = 30


class Sizes(NamedTuple):
    """How much is measured."""

    rounds: int = 5
    steps: int = 500  # Of one run.
    concurrent_runs: int = 64
    concurrent_steps: int = 10  # Of each of them.
    starts: int = 50
    recorded_steps: int = 10_000
    recorded_steps_dbos: int = 1_000  # It records 10,000 steps in most of a minute.
    sleepers: int = 1_000
    appends: int = 1_000


QUICK: Final = Sizes(
    rounds=1,
    steps=20,
    concurrent_runs=8,
    concurrent_steps=2,
    starts=2,
    recorded_steps=50,
    recorded_steps_dbos=50,
    sleepers=10,
    appends=20,
)


def main(argv: Sequence[str] = ()) -> None:
    options = parse_options(argv, STORAGES, name="bench_workflows", doc=__doc__, quick="few steps")
    sizes = QUICK if options.quick else Sizes()
    if find_spec(DBOS) is None:
        echo("dbos is skipped: it is not installed.")
    results = {}
    for name in options.storages:
        with STORAGES[name]() as places:
            results[name] = measure(name, places, sizes)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


@contextmanager
def shared_postgresql() -> Iterator[dict[str, Place]]:
    with bench_nodes.postgresql() as url, tempfile.TemporaryDirectory(prefix="fastness-workflows-") as folder:
        yield {DBOS: (url,), FASTNESS: (url, f"dir:{folder}")}


@contextmanager
def embedded() -> Iterator[dict[str, Place]]:
    with tempfile.TemporaryDirectory(prefix="fastness-workflows-") as folder:
        yield {DBOS: (f"sqlite:///{folder}/dbos.sqlite",), FASTNESS: (f"dir:{folder}/plane",)}


STORAGES: Final = {"postgres": shared_postgresql, "embedded": embedded}
TITLES: Final = {"postgres": "the same PostgreSQL", "embedded": "RocksDB, and dbos on SQLite"}


class Process(bench_nodes.Process):
    """A contestant. It ends when it has no more tasks, and gives its runs back."""

    def __init__(self, kind: str, place: Place) -> None:
        super().__init__(kind, *place, script=SCRIPT)

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if any(raised) else STOP_SECONDS)
        super().__exit__(*raised)


def measure(storage: str, places: dict[str, Place], sizes: Sizes) -> dict[str, Any]:
    """Measure everything on one kind of storage, and print and return the figures of each contestant."""
    names = [name for name in places if name != DBOS or find_spec(DBOS)]
    figures: dict[str, dict[str, Any]] = {name: {} for name in names}
    with ExitStack() as running:
        processes = {name: running.enter_context(Process(name, places[name])) for name in names}
        rows = {"row": (1, sizes.steps), "concurrent": (sizes.concurrent_runs, sizes.concurrent_steps)}
        for line, (runs, steps) in rows.items():
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for round_ in range(sizes.rounds + 1):
                for name, process in processes.items():
                    found = do(process, "rows", runs=runs, steps=steps)
                    if round_:  # The first round is a warm-up.
                        seconds[name].append(found["seconds"] / found["steps"])
                    figures[name]["versions"] = found["versions"]
            for name, each in seconds.items():
                figures[name][f"{line}_steps_per_second"] = 1 / median(each)
                figures[name][f"{line}_spread"] = (max(each) - min(each)) / median(each) / 2
        for name, process in processes.items():
            figures[name]["first_step_p50_ms"] = median(do(process, "first", runs=sizes.starts)["seconds"]) * 1_000
        elapsed = do(processes[FASTNESS], "append", runs=sizes.appends)["seconds"]
        figures[FASTNESS]["appends_per_second"] = sizes.appends / elapsed
    for name in names:
        steps = sizes.recorded_steps_dbos if name == DBOS else sizes.recorded_steps
        figures[name]["restored_steps"] = steps
        figures[name]["restore_seconds"] = restore_seconds(name, places[name], steps)
    for name in names:
        with Process(name, places[name]) as process:
            found = do(process, "sleep", runs=sizes.sleepers)
        figures[name]["resident_mib_before"] = found["before"] / MIB
        figures[name]["resident_mib_asleep"] = found["after"] / MIB
    _print(storage, figures, sizes)
    return figures


def do(process: bench_nodes.Process, work: str, **task: int) -> dict[str, Any]:
    process.start(work=work, **task)
    return process.result()


def restore_seconds(name: str, place: Place, steps: int) -> float:
    """Record a run in one process, and let another one carry it on."""
    with Process(name, place) as process:
        do(process, "record", steps=steps)
    with Process(name, place) as process:
        return float(do(process, "restore")["seconds"])


def _print(storage: str, figures: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    names = sorted(figures)
    versions = {key: value for each in figures.values() for key, value in each["versions"].items()}
    table = Table(title=f"Workflows on {TITLES[storage]}", title_justify="left", min_width=100)
    table.add_column(", ".join(f"{key} {value}" for key, value in versions.items()), ratio=1)
    for name in (*names, "ratio"):
        table.add_column(name, justify="right")

    def add(title: str, key: str, text: str, *, faster_is: str = "") -> None:
        found = {name: figures[name][key] for name in names if key in figures[name]}
        ratio = ""
        if faster_is and len(found) == 2:
            ratio = f"{found[FASTNESS] / found[DBOS]:.1f}" if faster_is == "more" else ""
            ratio = ratio or f"{found[DBOS] / found[FASTNESS]:.1f}"
        table.add_row(title, *(text.format(found[name]) if name in found else "" for name in names), ratio)

    add(f"steps/s, {sizes.steps} steps of one run in a row", "row_steps_per_second", "{:,.0f}", faster_is="more")
    add("  spread", "row_spread", "±{:.0%}")
    title = f"steps/s, {sizes.concurrent_runs} runs of {sizes.concurrent_steps} steps at the same time"
    add(title, "concurrent_steps_per_second", "{:,.0f}", faster_is="more")
    add("  spread", "concurrent_spread", "±{:.0%}")
    add("from the start of a run to its first step, p50, ms", "first_step_p50_ms", "{:.2f}", faster_is="less")
    add("a run is restored: recorded steps", "restored_steps", "{:,}")
    add("  seconds from opening the host to the next step", "restore_seconds", "{:.2f}")
    add(f"resident memory before {sizes.sleepers:,} runs, MiB", "resident_mib_before", "{:.0f}")
    add("  when all of them are asleep, MiB", "resident_mib_asleep", "{:.0f}")
    add("for comparison: events appended one by one and synced, /s", "appends_per_second", "{:,.0f}")
    echo(table)


if __name__ == "__main__":
    main(sys.argv[1:])
