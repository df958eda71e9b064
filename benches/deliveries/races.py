"""Lets contestants take turns, and compares their medians and the processor time of a message."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table

ROOT: Final = Path(__file__).parents[2]
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    """What a message took in one turn, in seconds; and other results of the turn."""

    wall: float
    client_cpu: float
    server_cpu: float | None
    more: dict[str, float]


class Standing(msgspec.Struct):
    """The result of one contestant. Ratios are against the first contestant of the race."""

    name: str
    per_second: float  # The median of the turns.
    ratio: float  # Of the rates, the median of the ratios of each round.
    client_cpu_us: float  # Processor time of a message, the median of the turns.
    server_cpu_us: float | None
    cpu_ratio: float  # Of the processor time of client and server.
    more: dict[str, float]  # Medians.
    turns: list[Turn]


class Race(msgspec.Struct):
    """The results of contestants that took turns with the same work."""

    title: str
    standings: list[Standing]


class Contestant:
    """A process that does what it is told, and the processes that serve it."""

    def __init__(self, process: "subprocess.Popen[str]", server_cpu: Callable[[], float] | None) -> None:
        self._process = process
        self._server_cpu = server_cpu
        self.source = Path(self._read()["source"])

    def do(self, task: str, **options: Any) -> dict[str, float]:
        """Let it execute a task of `contestant.py`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, **options}) + "\n")
        self._process.stdin.flush()
        result: dict[str, float] = self._read()
        return result

    def turn(self, task: str, *, fill: int = 0, **options: Any) -> Turn:
        """Put `fill` messages, then execute the task and take its time."""
        if fill:
            self.do("fill", queue=options["queue"], count=fill)
        before = self._server_cpu() if self._server_cpu else 0.0
        result = self.do(task, **options)
        server = self._server_cpu() - before if self._server_cpu else None
        count = result.pop("operations")
        wall, client = result.pop("seconds"), result.pop("cpu_seconds")
        return Turn(wall / count, client / count, None if server is None else server / count, result)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("A contestant ended early; its error is above")
        return json.loads(line)


@contextmanager
def contestant(
    source: Path, kind: str, url: str, *, folder: Path, server_cpu: Callable[[], float] | None = None
) -> Iterator[Contestant]:
    """A process with the code in `source`, as the module `contestant` describes; its session logs are in `folder`."""
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, "-m", "benches.deliveries.contestant", kind, url]
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        started = Contestant(process, server_cpu)
        if not started.source.is_relative_to(source):
            raise RuntimeError(f"The contestant runs {started.source}, not the code in {source}")
        yield started
    finally:
        process.communicate()  # Closes its standard input, upon which it exits.


def race(title: str, turns: Mapping[str, Callable[[], Turn]], rounds: int) -> Race:
    """Let the contestants take turns. The first round is a warm-up."""
    taken: dict[str, list[Turn]] = {name: [] for name in turns}
    for round_ in range(rounds + 1):
        for name, take in turns.items():
            turn = take()
            if round_:
                taken[name].append(turn)
    first = next(iter(taken.values()))
    return Race(title, [_standing(name, each, first) for name, each in taken.items()])


def table_of(result: Race) -> Table:
    """The standings of a race, for people. Ratios are against the first contestant; processor time is a message's."""
    table = Table(title=result.title, title_justify="left", min_width=100)
    table.add_column("contestant", ratio=1)
    more = {name: None for each in result.standings for name in each.more}
    for column in ("messages/s", "ratio", "client CPU", "server CPU", "CPU ratio", *more):
        table.add_column(column, justify="right")
    for each in result.standings:
        table.add_row(
            each.name,
            f"{each.per_second:,.0f}",
            f"{each.ratio:.2f}",
            f"{each.client_cpu_us:,.1f} µs",
            "" if each.server_cpu_us is None else f"{each.server_cpu_us:,.1f} µs",
            f"{each.cpu_ratio:.2f}",
            *(f"{each.more[name] * 1e3:.2f} ms" for name in more),
        )
    return table


def cpu_seconds_of(process: int) -> float:
    """The processor time of a process and of its children, also of those that have ended."""
    return _ended_children_seconds(process) + sum(_cpu_seconds(each) for each in (process, *_children(process)))


def _standing(name: str, turns: list[Turn], first: list[Turn]) -> Standing:
    servers = [turn.server_cpu for turn in turns if turn.server_cpu is not None]
    more = {key: median(turn.more[key] for turn in turns) for key in turns[0].more}
    return Standing(
        name=name,
        per_second=1 / median(turn.wall for turn in turns),
        ratio=median(theirs.wall / turn.wall for theirs, turn in zip(first, turns, strict=True)),
        client_cpu_us=median(turn.client_cpu for turn in turns) * 1e6,
        server_cpu_us=median(servers) * 1e6 if servers else None,
        cpu_ratio=_cpu(turns) / _cpu(first),
        more=more,
        turns=turns,
    )


def _cpu(turns: Sequence[Turn]) -> float:
    return median(turn.client_cpu + (turn.server_cpu or 0) for turn in turns)


def _children(process: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _cpu_seconds(process: int) -> float:
    """The processor time of its running threads, in nanoseconds where the times of a process are in 10 ms."""
    nanoseconds = 0
    for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
        try:
            nanoseconds += int(thread.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            continue
    return nanoseconds / 1e9


def _ended_children_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / _TICKS_PER_SECOND
