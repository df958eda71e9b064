"""Compare the speed of several candidates: they take turns for several rounds, and their medians are compared.

On a shared machine absolute rates mean little; the ratio to the first candidate, measured in the same minute, is
reliable.
"""

import gc
import time
from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Candidate = Callable[[], int]  # Does its work and returns the number of operations.

_console = Console()


def compare(title: str, candidates: dict[str, Candidate], *, rounds: int = 7) -> dict[str, float]:
    """Measure the candidates, print rates and ratios to the first one, and return the rates."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task(title, total=(rounds + 1) * len(candidates))
        for round_ in range(rounds + 1):
            for name, candidate in candidates.items():
                gc.collect()
                started = time.perf_counter()
                operations = candidate()
                elapsed = time.perf_counter() - started
                if round_:  # The first round is a warm-up.
                    seconds[name].append(elapsed / operations)
                progress.advance(task)
    medians = {name: median(times) for name, times in seconds.items()}
    table = Table(title=title, title_justify="left", min_width=100)
    table.add_column("candidate", ratio=1)
    for column in ("operations/s", "µs each", "spread", "against the first"):
        table.add_column(column, justify="right")
    first = next(iter(medians.values()))
    for name, each in medians.items():
        spread = (max(seconds[name]) - min(seconds[name])) / each
        table.add_row(
            name, f"{1 / each:,.0f}", f"{each * 1e6:,.2f}", f"±{spread * 50:.0f} %", f"{first / each * 100:.0f} %"
        )
    _console.print(table)
    _console.print()
    return {name: 1 / each for name, each in medians.items()}


def repeated_cpu_seconds(seconds: float = 5.0, pause_seconds: float = 0.001) -> list[float]:
    """The processor time of each of many runs of the same Python code, sorted.

    If the slowest runs take many times the median, the machine also distorts the tails of other measurements.
    """
    durations: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.thread_time()
        len({str(number): number for number in range(1_500)})
        durations.append(time.thread_time() - started)
        time.sleep(pause_seconds)
    return sorted(durations)


def echo(line: str | Table) -> None:
    _console.print(line)
    _console.print()


def disable_output() -> None:
    """Print no more tables and lines, for `--json`."""
    _console.quiet = True
