"""Where the contestants meet: the servers that run, one event loop for all clients, and what was found so far."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from rich.table import Table

from benches import contest
from benches.peers.clients import CLIENTS
from benches.peers.loops import loop_factory
from benches.peers.servers import Absent, Server, bare_server, holdfast_server, nats_server, redis_server

BODY: Final = b"x" * 200
NAMES: Final = {"holdfast": "Holdfast", "nats": "NATS JetStream", "redis": "Redis", "bare": "the least that Python can"}
_SERVERS: Final = {"holdfast": holdfast_server, "nats": nats_server, "redis": redis_server, "bare": bare_server}

Result = TypeVar("Result")


class Settings(NamedTuple):
    """How long and how much."""

    rounds: int = 7
    quick: bool = False  # A tenth of everything: whether it works, not how fast it is.
    backlog: int = 1_000_000
    uvloop: bool = False

    def part(self, count: int) -> int:
        return max(count // 10, 8) if self.quick else count


class Figure(NamedTuple):
    """One line of the report."""

    name: str
    measured: str
    goal: str
    holds: bool | None  # None: there is no goal, or a peer that it needs is not here.


class Stage:
    """Servers, clients and results of one run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.servers: dict[str, Server] = {}
        self.absent: dict[str, str] = {}
        self.disk = Disk(folder)
        self.rates: dict[str, dict[str, float]] = {}
        self._runner = asyncio.Runner(loop_factory=loop_factory(uvloop=settings.uvloop))

    @contextmanager
    def opened(self) -> Iterator["Stage"]:
        """Start every server that can be had."""
        with self._runner, ExitStack() as stack:
            for name, start in _SERVERS.items():
                try:
                    self.servers[name] = stack.enter_context(start(self.folder))
                except Absent as error:
                    self.absent[name] = str(error)
            yield self

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    @contextmanager
    def client(self, name: str, queue: str, *, url: str | None = None) -> Iterator[Any]:
        """A client of its own."""
        client = self.run(CLIENTS[name].connect(url or self.servers[name].url, queue))
        try:
            yield client
        finally:
            self.run(client.close())

    @contextmanager
    def clients(self, queue: str, names: tuple[str, ...] = ("nats", "redis", "holdfast")) -> Iterator[dict[str, Any]]:
        """A client of each of these servers that runs."""
        with ExitStack() as stack:
            here = [name for name in names if name in self.servers]
            yield {name: stack.enter_context(self.client(name, queue)) for name in here}

    def race(self, title: str, contestants: dict[str, Callable[[], int]]) -> dict[str, float]:
        """Rates of the contestants, and of the bare disk in the same minute, by which they can be judged."""
        syncs = self.settings.part(500)
        contestants = {**contestants, "bare write and fdatasync": lambda: self.disk.sync(syncs)}
        rates = contest.race(title, contestants, rounds=self.settings.rounds)
        self.rates[title] = rates
        return rates


class Disk:
    """A file on the disk of the run, to which a little is appended and synced: one at a time, no server beats it."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def sync(self, count: int) -> int:
        for _ in range(count):
            os.write(self._file, BODY)
            os.fdatasync(self._file)
        return count

    def rate(self, count: int) -> float:
        began = time.perf_counter()
        self.sync(count)
        return count / (time.perf_counter() - began)


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of them are not above; they need not be sorted."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def at_least(name: str, value: float | None, goal: float | None) -> Figure:
    """How many times as fast as somebody else; without that one, or without a goal, it neither holds nor does not."""
    measured = "not measured" if value is None else f"{value:.2f} times"
    holds = None if value is None or goal is None else value >= goal
    return Figure(name, measured, "" if goal is None else f"{goal:g} times", holds)


def below_ms(name: str, seconds: float, goal_ms: float) -> Figure:
    return Figure(name, f"{seconds * 1e3:.2f} ms", f"< {goal_ms:g} ms", seconds * 1e3 < goal_ms)


def ratio(rates: dict[str, float], ours: str, theirs: str) -> float | None:
    """How many times as fast; None if one of them is not here."""
    return rates[ours] / rates[theirs] if ours in rates and theirs in rates else None


def table_of(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", min_width=100)
    table.add_column(columns[0], ratio=1)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
