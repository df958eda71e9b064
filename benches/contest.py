"""A fair race: contestants take turns for several rounds, and medians are compared.

Absolute rates mean little on a shared machine; the ratio to the first contestant, measured in the same minute, does.
"""

import gc
import time
from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Contestant = Callable[[], int]  # Does its work and returns how many operations that was.

_console = Console()


def race(title: str, contestants: dict[str, Contestant], *, rounds: int = 7) -> dict[str, float]:
    """Race the contestants, print rates and ratios to the first of them, and return the rates."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task(title, total=(rounds + 1) * len(contestants))
        for round_ in range(rounds + 1):
            for name, contestant in contestants.items():
                gc.collect()
                started = time.perf_counter()
                operations = contestant()
                elapsed = time.perf_counter() - started
                if round_:  # The first round warms up.
                    seconds[name].append(elapsed / operations)
                progress.advance(task)
    medians = {name: median(times) for name, times in seconds.items()}
    table = Table(title=title, title_justify="left", min_width=100)
    table.add_column("contestant", ratio=1)
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


def steadiness(seconds: float = 5.0, pause_seconds: float = 0.001) -> list[float]:
    """How long this machine takes for one and the same piece of Python, in order: the processor time of each turn.

    Where the slowest take many times as long as the median, so does every tail that is measured beside them.
    """
    took: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.thread_time()
        len({str(number): number for number in range(1_500)})
        took.append(time.thread_time() - began)
        time.sleep(pause_seconds)
    return sorted(took)


def say(line: str | Table) -> None:
    _console.print(line)
    _console.print()


def silence() -> None:
    """Print nothing more, for whoever wants JSON and nothing else."""
    _console.quiet = True
