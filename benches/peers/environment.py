"""What the workloads of a run share: the servers, one event loop for all clients, and the results."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from rich.table import Table

from benches import comparison
from benches.peers.clients import CLIENTS, loop_factory
from benches.peers.servers import Absent, Server, bare_server, fastness_server, nats_server, redis_server

BODY: Final = b"x" * 200
NAMES: Final = {"fastness": "Fastness", "nats": "NATS JetStream", "redis": "Redis", "bare": "minimal Python server"}
_SERVERS: Final = {"fastness": fastness_server, "nats": nats_server, "redis": redis_server, "bare": bare_server}

Result = TypeVar("Result")


class Settings(NamedTuple):
    """The size of a run."""

    rounds: int = 7
    quick: bool = False  # A tenth of the operations: a smoke test.
    backlog: int = 1_000_000
    uvloop: bool = False

    def part(self, count: int) -> int:
        return max(count // 10, 8) if self.quick else count


class Figure(NamedTuple):
    """One line of the report."""

    name: str
    measured: str


class Environment:
    """The servers, clients and results of one run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.servers: dict[str, Server] = {}
        self.absent: dict[str, str] = {}
        self.disk = Disk(folder)
        self.rates: dict[str, dict[str, float]] = {}
        self._runner = asyncio.Runner(loop_factory=loop_factory(use_uvloop=settings.uvloop))

    @contextmanager
    def start_servers(self) -> Iterator["Environment"]:
        """Start every server that is installed."""
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
        """A new client of a server."""
        client = self.run(CLIENTS[name].connect(url or self.servers[name].url, queue))
        try:
            yield client
        finally:
            self.run(client.close())

    @contextmanager
    def clients(self, queue: str, names: tuple[str, ...] = ("nats", "redis", "fastness")) -> Iterator[dict[str, Any]]:
        """A client for each of these servers that is running."""
        with ExitStack() as stack:
            running = [name for name in names if name in self.servers]
            yield {name: stack.enter_context(self.client(name, queue)) for name in running}

    def compare(self, title: str, candidates: dict[str, Callable[[], int]]) -> dict[str, float]:
        """The rates of the candidates, and of bare syncs in the same minute for reference."""
        syncs = self.settings.part(500)
        candidates = {**candidates, "bare write and fdatasync": lambda: self.disk.sync(syncs)}
        rates = comparison.compare(title, candidates, rounds=self.settings.rounds)
        self.rates[title] = rates
        return rates


class Disk:
    """Bare appends with fdatasync, one at a time: the upper bound for a single caller."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def sync(self, count: int) -> int:
        for _ in range(count):
            os.write(self._file, BODY)
            os.fdatasync(self._file)
        return count

    def rate(self, count: int) -> float:
        started = time.perf_counter()
        self.sync(count)
        return count / (time.perf_counter() - started)


def quantile(values: list[float], share: float) -> float:
    """The value that a `share` of the (unsorted) values does not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def ratio_figure(name: str, value: float | None) -> Figure:
    """A rate relative to a peer's; None if the peer is not running."""
    return Figure(name, "not measured" if value is None else f"{value:.2f} times")


def latency_figure(name: str, seconds: float) -> Figure:
    return Figure(name, f"{seconds * 1e3:.2f} ms")


def ratio(rates: dict[str, float], ours: str, theirs: str) -> float | None:
    """How many times as fast ours is; None if one of the two is not running."""
    return rates[ours] / rates[theirs] if ours in rates and theirs in rates else None


def table_of(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", min_width=100)
    table.add_column(columns[0], ratio=1)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
