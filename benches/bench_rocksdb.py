"""RocksDB through `transact`, against bare `rocksdict`: three keys per commit, every commit synced."""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

from rocksdict import Options, Rdict, WriteBatch

from benches.comparison import compare
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Transaction
from fastness.tiers import Tier

_numbers = count()
_VALUES = (b"x" * 100, b"y" * 20, b"z" * 20)


def next_keys() -> tuple[bytes, bytes, bytes]:
    number = next(_numbers)
    return b"a%010d" % number, b"b%010d" % number, b"c%010d" % number


def put_three(tx: Transaction) -> None:
    for key, value in zip(next_keys(), _VALUES, strict=True):
        tx.put(key, value)


class Bare:
    """Hand-written group commit on rocksdict, for threads and for an event loop."""

    def __init__(self, path: Path) -> None:
        self.rocks = Rdict(str(path), Options(raw_mode=True))
        self.waiting: list[asyncio.Future[None]] = []
        self.syncing = False
        self.changed = threading.Condition()
        self.has_leader = False
        self.durable = 0
        self.work = threading.Semaphore(0)
        threading.Thread(target=self._sync_for_loops, daemon=True).start()

    def put_three(self) -> None:
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(next_keys(), _VALUES, strict=True):
            batch.put(key, value)
        self.rocks.write(batch)

    def put_and_sync(self) -> None:
        self.put_three()
        self.rocks.flush_wal(True)

    def put_in_thread(self) -> None:
        """Commit; one thread syncs for all, the others wait on one condition."""
        self.put_three()
        mine = self.rocks.latest_sequence_number()
        while True:
            with self.changed:
                while self.has_leader and self.durable < mine:
                    self.changed.wait()
                if self.durable >= mine:
                    return
                self.has_leader = True
            target = self.rocks.latest_sequence_number()
            self.rocks.flush_wal(True)
            with self.changed:
                self.durable, self.has_leader = target, False
                self.changed.notify_all()

    async def put_on_loop(self) -> None:
        """Commit; callers of one event-loop iteration share a sync in another thread."""
        self.put_three()
        self.loop = asyncio.get_running_loop()
        future = self.loop.create_future()
        self.waiting.append(future)
        if not self.syncing:
            self.syncing = True
            self.loop.call_soon(self._start)
        await future

    def _start(self) -> None:
        self.group, self.waiting = self.waiting, []
        self.work.release()

    def _sync_for_loops(self) -> None:
        while True:
            self.work.acquire()
            self.rocks.flush_wal(True)
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        for future in self.group:
            future.set_result(None)
        self.syncing = bool(self.waiting)
        if self.syncing:
            self.loop.call_soon(self._start)


def on_loop(call: Callable[[], Coroutine[Any, Any, None]], callers: int, each: int) -> int:
    async def caller() -> None:
        for _ in range(each):
            await call()

    async def all_callers() -> None:
        await asyncio.gather(*(caller() for _ in range(callers)))

    asyncio.run(all_callers())
    return callers * each


def on_threads(call: Callable[[], None], callers: int, each: int) -> int:
    threads = [threading.Thread(target=lambda: [call() for _ in range(each)]) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return callers * each


def repeat(call: Callable[[], Any], times: int) -> int:
    for _ in range(times):
        call()
    return times


def put_in_groups(bare: Bare, size: int, times: int) -> int:
    """Put without callers to wake: the engine's upper bound for this workload."""
    for _ in range(times):
        for _ in range(size):
            bare.put_three()
        bare.rocks.flush_wal(True)
    return size * times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bare, database = Bare(Path(folder, "bare")), RocksDatabase(Path(folder, "fastness"))

        def transact() -> None:
            database.transact(put_three)

        async def transact_async() -> None:
            await database.transact_async(put_three)

        compare(
            "RocksDB, one caller, each commit of 3 keys synced",
            {
                "bare write + WAL sync": lambda: repeat(bare.put_and_sync, 500),
                "transact": lambda: repeat(transact, 500),
                "bare, on an event loop with a sync thread": lambda: on_loop(bare.put_on_loop, 1, 500),
                "transact_async": lambda: on_loop(transact_async, 1, 500),
            },
        )
        compare(
            "RocksDB, 256 callers on one event loop, each waits for its own synced commit of 3 keys",
            {
                "bare group commit with 256 callers": lambda: on_loop(bare.put_on_loop, 256, 40),
                "transact_async": lambda: on_loop(transact_async, 256, 40),
                "bare loop without callers, a sync after 256": lambda: put_in_groups(bare, 256, 40),
            },
        )
        compare(
            "RocksDB, 8 threads, each waits for its own synced commit of 3 keys",
            {
                "bare leader and followers": lambda: on_threads(bare.put_in_thread, 8, 300),
                "transact": lambda: on_threads(transact, 8, 300),
            },
        )
        compare(
            "RocksDB, one caller, IMPORTANT: in the log, not synced",
            {
                "bare write": lambda: repeat(bare.put_three, 10_000),
                "transact": lambda: repeat(lambda: database.transact(put_three, tier=Tier.IMPORTANT), 10_000),
            },
        )
        database.sync()
        for store in (bare.rocks, database._rocks):
            store[b"known"] = b"v" * 100
        compare(
            "RocksDB, one caller reads one key",
            {
                "bare get": lambda: repeat(lambda: bare.rocks.get(b"known"), 20_000),
                "transact": lambda: repeat(lambda: database.transact(get, b"known"), 20_000),
                "read": lambda: repeat(lambda: database.read(get, b"known"), 20_000),
            },
        )
        compare(
            "RocksDB, one caller scans 1,000 pairs (a pair is one operation)",
            {
                "bare iterator": lambda: repeat(lambda: scan_bare(bare.rocks), 20) * 1_000,
                "read": lambda: repeat(lambda: database.read(scan), 20) * 1_000,
            },
        )
        database.close()


def get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def scan(tx: Transaction) -> int:
    return len(tx.scan(b"a", b"b", limit=1_000))


def scan_bare(rocks: Rdict) -> int:
    iterator = rocks.iter()
    iterator.seek(b"a")
    found = []
    while len(found) < 1_000 and iterator.valid():
        found.append((iterator.key(), iterator.value()))
        iterator.next()
    return len(found)


if __name__ == "__main__":
    main()
