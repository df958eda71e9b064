"""The printed output: chapters, progress bars, checked claims, and a table of all claims at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import IO, Final, TypeAlias

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDTH_MAX: Final = 100  # Longer lines are hard to read on any terminal.
_WIDTH_MIN: Final = 40

ReportProgress: TypeAlias = Callable[[str, int, int], None]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A printed claim, how it was checked, and whether it holds."""

    chapter: str
    claim: str
    checked: str
    figure: str
    holds: bool


class Output:
    """Prints to a console, and records the claims."""

    def __init__(self, out: IO[str], *, quiet: bool = False) -> None:
        console = Console(file=out, quiet=quiet, highlight=False)
        self.console = Console(
            file=out, quiet=quiet, highlight=False, width=max(_WIDTH_MIN, min(console.width, _WIDTH_MAX))
        )
        self.claims: list[Claim] = []
        self._chapter = ""
        self._chapters = 0
        self._has_marks = _can_encode(self.console, "✓✗·…")
        self._started_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """The elapsed time."""
        return time.monotonic() - self._started_at

    @property
    def failed(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    def title(self, title: str, text: str) -> None:
        """Print the title and the introduction."""
        self.console.print()
        self.console.print(Text(title, style="bold cyan"))
        self.say(text)

    def chapter(self, title: str) -> None:
        self._chapters += 1
        self._chapter = title
        self.console.print()
        self.console.rule(Text(f"{self._chapters}  {title}", style="bold"), align="left", style="cyan")

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self.console.print(Text(text))

    def note(self, text: str) -> None:
        """Print a separate line, such as a command or an address."""
        self.console.print(Text(f"    {text}", style="cyan", overflow="fold"))

    def claim(self, claim: str, holds: bool, *, checked: str, figure: str = "") -> bool:
        """Print and record a checked claim. Returns whether it holds."""
        holds = bool(holds)
        self.claims.append(Claim(chapter=self._chapter, claim=claim, checked=checked, figure=figure, holds=holds))
        # Wrapped here, so continuation lines are indented and a figure is not split.
        mark, width = self._mark(holds), self.console.width - 5
        lines = list(Text(claim, style="" if holds else "bold red").wrap(self.console, width))
        figure_lines = list(Text(f"({figure})", style="dim").wrap(self.console, width)) if figure else []
        if len(figure_lines) == 1 and len(lines[-1]) + len(figure_lines[0]) + 1 <= width:
            lines[-1] = Text.assemble(lines[-1], " ", figure_lines.pop())
        for n, line in enumerate((*lines, *figure_lines)):
            line.rstrip()
            self.console.print(Text.assemble("  ", mark if n == 0 else " " * len(mark), " ", line))
        return holds

    @contextmanager
    def bar(self, title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A progress bar. Call the yielded function with the completed amount."""
        with self._progress() as progress:
            task = progress.add_task(f"  {title}", total=total)
            yield lambda done: progress.update(task, completed=done)

    @contextmanager
    def bars(self, title: str) -> Iterator[ReportProgress]:
        """A bar for a job, and one below it for its last reported step: `report(step, done, total)`."""
        with self._progress() as progress:
            progress.add_task(f"  {title}", total=None)
            row = progress.add_task("", total=None, visible=False)

            def report(step: str, done: int, total: int) -> None:
                progress.update(row, description=f"    {step}", completed=done, total=total or None, visible=True)

            yield report

    def table(self) -> None:
        """Print every claim, how it was checked, and its figure."""
        self.console.print()
        self.console.rule(Text("All claims, and how they were checked", style="bold"), align="left", style="cyan")
        for chapter, claims in groupby(self.claims, lambda each: each.chapter):
            self.console.print(Text(chapter, style="bold cyan"))
            table = Table.grid(padding=(0, 2), expand=True)
            table.add_column(no_wrap=True)
            table.add_column(ratio=5)
            table.add_column(ratio=4, style="dim")
            table.add_column(ratio=3, overflow="fold")
            for each in claims:
                style = "" if each.holds else "bold red"
                table.add_row(self._mark(each.holds), Text(each.claim, style=style), each.checked, Text(each.figure))
            self.console.print(table)

    def end(self) -> None:
        """Print whether all claims hold."""
        self.console.print()
        if not self.failed:
            text = f"All {len(self.claims)} claims hold. The demo took {self.seconds:.0f} s."
            self.console.print(Text(text, style="bold green"))
            return
        self.console.print(Text(f"{len(self.failed)} of {len(self.claims)} claims do not hold:", style="bold red"))
        for each in self.failed:
            self.console.print(Padding(Text(f"{each.chapter}: {each.claim} ({each.figure})"), (0, 0, 0, 2)))

    def _mark(self, holds: bool) -> Text:
        marks = ("✓", "✗") if self._has_marks else ("ok", "NO")
        return Text(marks[0], style="bold green") if holds else Text(marks[1], style="bold red")

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), _Count(), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)


class _Count(MofNCompleteColumn):
    """Completed and total; empty if the total is unknown."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


def _can_encode(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
