"""Checkpoints of LangGraph, against its own savers: embedded against SQLite, and on the same PostgreSQL.

    python -m benches savers                                all lines; about three minutes
    python -m benches.bench_savers --quick                  a smoke test
    python -m benches.bench_savers embedded --json FILE     one kind of storage, and the figures as JSON

Every put is synced before it returns, on both sides: SQLite has a write-ahead log and synchronous=FULL, as
AsyncSqliteSaver sets it; PostgreSQL has its default settings (fsync and synchronous_commit on); RocksDB syncs its log.
A state has 2 KB in three channels, of which two change with every checkpoint. All contestants share a process and its
event loop, and take turns. Each round has threads of its own; the first round does not count, and the medians are
compared.
"""

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointMetadata, empty_checkpoint
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool
from rich.table import Table

import fastness
from benches import bench_nodes
from benches.comparison import echo
from benches.storage_options import parse_options
from fastness.langgraph import FastnessSaver

Saver = BaseCheckpointSaver[Any]
Work = Callable[[], Awaitable[int]]  # Does something, and returns how often.
GRAPHS: Final = 16
CONNECTIONS: Final = 16  # Of the pool of AsyncPostgresSaver: one for each graph.
_threads = count()


class Sizes(NamedTuple):
    """How much is measured in a round."""

    rounds: int = 11
    puts: int = 200  # Of one graph.
    concurrent_puts: int = 40  # Of each of 16 graphs.
    history: int = 1_000


QUICK: Final = Sizes(rounds=1, puts=20, concurrent_puts=3, history=50)


def main(argv: Sequence[str] = ()) -> None:
    options = parse_options(argv, STORAGES, name="bench_savers", doc=__doc__, quick="few checkpoints")
    sizes = QUICK if options.quick else Sizes()
    results = {name: asyncio.run(measure(name, sizes)) for name in options.storages}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


@asynccontextmanager
async def embedded() -> AsyncIterator[dict[str, Saver]]:
    """AsyncSqliteSaver and FastnessSaver on a directory."""
    with tempfile.TemporaryDirectory(prefix="fastness-savers-") as folder:
        async with (
            AsyncSqliteSaver.from_conn_string(f"{folder}/checkpoints.sqlite") as sqlite,
            fastness.open_async(f"dir:{folder}/plane") as plane,
        ):
            await sqlite.setup()
            await check_pragma(sqlite, "journal_mode", "wal")
            await check_pragma(sqlite, "synchronous", 2)
            yield {"AsyncSqliteSaver": sqlite, "FastnessSaver": FastnessSaver(plane)}


async def check_pragma(sqlite: AsyncSqliteSaver, name: str, expected: object) -> None:
    async with sqlite.conn.execute(f"pragma {name}") as cursor:
        row = await cursor.fetchone()
    if row is None or row[0] != expected:
        raise SystemExit(f"SQLite has {name}={row and row[0]}, and {expected} is needed to compare synced puts")


@asynccontextmanager
async def shared_postgresql() -> AsyncIterator[dict[str, Saver]]:
    """AsyncPostgresSaver with a pool of connections, and FastnessSaver, on one server."""
    with bench_nodes.postgresql() as url, tempfile.TemporaryDirectory(prefix="fastness-savers-") as folder:
        pool: AsyncConnectionPool[AsyncConnection[dict[str, Any]]] = AsyncConnectionPool(
            url,
            min_size=CONNECTIONS,
            max_size=CONNECTIONS,
            open=False,
            kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        )
        async with pool, fastness.open_async(url, objects=f"dir:{folder}") as plane:
            postgres = AsyncPostgresSaver(pool)
            await postgres.setup()
            yield {"AsyncPostgresSaver": postgres, "FastnessSaver": FastnessSaver(plane)}


STORAGES: Final = {"embedded": embedded, "postgres": shared_postgresql}
TITLES: Final = {"embedded": "SQLite, and Fastness on RocksDB", "postgres": "the same PostgreSQL"}


async def measure(storage: str, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Measure everything on one kind of storage; the rates of each contestant, with those of the rounds."""
    async with AsyncExitStack() as running:
        savers = await running.enter_async_context(STORAGES[storage]())
        histories = {name: new_thread(saver, sizes.history) for name, saver in savers.items()}
        for name, saver in savers.items():
            await put(saver, histories[name])

        async def list_history(saver: Saver) -> int:
            [name] = [name for name, each in savers.items() if each is saver]
            found = [each async for each in saver.alist(histories[name].config)]
            assert len(found) == sizes.history
            return len(found)

        rates = {
            f"one graph, {sizes.puts} checkpoints in a row": await rounds(
                savers, sizes.rounds, lambda saver: put_threads(saver, 1, sizes.puts)
            ),
            f"{GRAPHS} graphs at once, {sizes.concurrent_puts} checkpoints each": await rounds(
                savers, sizes.rounds, lambda saver: put_threads(saver, GRAPHS, sizes.concurrent_puts)
            ),
            f"list a history of {sizes.history:,} checkpoints": await rounds(
                savers, sizes.rounds, lambda saver: partial(list_history, saver)
            ),
        }
    show(storage, rates)
    return rates


async def rounds(savers: dict[str, Saver], number: int, prepare: Callable[[Saver], Work]) -> dict[str, Any]:
    """Let the contestants take turns: their median rates, the rates of all rounds, and the ratio of the medians.

    Only the work is measured that `prepare` returns.
    """
    found: dict[str, list[float]] = {name: [] for name in savers}
    for round_ in range(number + 1):
        for name, saver in savers.items() if round_ % 2 else reversed(savers.items()):
            work = prepare(saver)
            gc.collect()
            started = time.perf_counter()
            operations = await work()
            if round_:  # The first round is a warm-up.
                found[name].append(operations / (time.perf_counter() - started))
    medians = {name: median(rates) for name, rates in found.items()}
    peer, ours = medians.values()
    ratios = sorted(own / other for other, own in zip(*found.values(), strict=True))
    return {"rates": medians, "rounds": found, "ratio": ours / peer, "ratio of the rounds": (ratios[0], ratios[-1])}


class Thread(NamedTuple):
    """A thread of a graph: its configuration, and its checkpoints with metadata and the new versions of channels."""

    config: RunnableConfig
    checkpoints: list[tuple[Checkpoint, CheckpointMetadata, dict[str, Any]]]


def new_thread(saver: Saver, checkpoints: int) -> Thread:
    """A thread whose states have 2 KB: 19 messages of 100 characters, a plan that stays, and a number."""
    thread = Thread({"configurable": {"thread_id": f"thread-{next(_threads)}", "checkpoint_ns": ""}}, [])
    first = version = saver.get_next_version(None, None)
    for number in range(checkpoints):
        changed = {"messages": version, "step": version}
        messages = [f"{number} ".ljust(100, "x")] * 19
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": messages, "plan": "p" * 100, "step": number}
        checkpoint["channel_versions"] = {**changed, "plan": first}
        checkpoint["updated_channels"] = ["messages", "step"]
        metadata: CheckpointMetadata = {"source": "loop", "step": number, "parents": {}}
        thread.checkpoints.append((checkpoint, metadata, changed if number else {**changed, "plan": first}))
        version = saver.get_next_version(version, None)
    return thread


def put_threads(saver: Saver, graphs: int, checkpoints: int) -> Work:
    """Puts the checkpoints of new threads, each one after the other, and the threads at once."""
    threads = [new_thread(saver, checkpoints) for _ in range(graphs)]

    async def work() -> int:
        await asyncio.gather(*(put(saver, thread) for thread in threads))
        return graphs * checkpoints

    return work


async def put(saver: Saver, thread: Thread) -> None:
    config = thread.config
    for checkpoint, metadata, versions in thread.checkpoints:
        config = await saver.aput(config, checkpoint, metadata, versions)


def show(storage: str, lines: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"Checkpoints: {TITLES[storage]}", title_justify="left", min_width=100)
    names = list(next(iter(lines.values()))["rates"])
    for column in ("", *names, "ratio", "of the rounds"):
        table.add_column(column, justify="left" if not column else "right")
    for line, found in lines.items():
        low, high = found["ratio of the rounds"]
        rates = [f"{found['rates'][name]:,.0f}/s" for name in names]
        table.add_row(line, *rates, f"{found['ratio']:.2f}", f"{low:.1f} to {high:.1f}")
    echo(table)


if __name__ == "__main__":
    main(sys.argv[1:])
