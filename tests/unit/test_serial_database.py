"""SerialDatabase runs one transaction at a time. Waits are bounded, and never block the event loop for long."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy, NestedTransaction
from fastness.kv import Transaction
from fastness.kv.serial_database import SerialDatabase

HELD_SECONDS_MAX = 60.0  # Bounds how long the lock is held, so that a failing test does not hang.


@pytest.fixture(params=["memory", "rocksdb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SerialDatabase]:
    """The two backends that are SerialDatabases."""
    with MemoryDatabase() if request.param == "memory" else RocksDatabase(tmp_path / "kv") as database:
        yield database


@contextmanager
def write_lock_held(database: SerialDatabase) -> Iterator[threading.Event]:
    """Another thread holds the write lock until the event is set, or the block ends."""
    acquired, release = threading.Event(), threading.Event()

    def hold(tx: Transaction) -> None:
        tx.put(b"holder", b"1")
        acquired.set()
        release.wait(HELD_SECONDS_MAX)

    holder = threading.Thread(target=database.transact, args=(hold,))
    holder.start()
    acquired.wait()
    try:
        yield release
    finally:
        release.set()
        holder.join()


def get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_WAIT_SECONDS_MAX", 0.001)


@pytest.mark.usefixtures("short_wait")
def test_a_transaction_that_waits_too_long_is_busy(database: SerialDatabase) -> None:
    with write_lock_held(database), pytest.raises(Busy, match=r"0\.001 s"):
        database.transact(Transaction.put, b"a", b"1")
    assert database.read(get, b"a") is None
    database.transact(Transaction.put, b"a", b"2")
    assert database.read(get, b"a") == b"2"


@pytest.mark.usefixtures("short_wait")
async def test_a_coroutine_that_waits_too_long_is_busy(database: SerialDatabase) -> None:
    with write_lock_held(database), pytest.raises(Busy):
        await database.transact_async(Transaction.put, b"a", b"1")
    assert await database.read_async(get, b"a") is None


def test_a_waiting_transaction_reads_what_the_previous_one_wrote(database: SerialDatabase) -> None:
    with write_lock_held(database) as release:
        threading.Timer(0.001, release.set).start()
        assert database.transact(get, b"holder") == b"1"


async def test_a_loop_keeps_running_while_a_coroutine_waits(database: SerialDatabase) -> None:
    with write_lock_held(database) as release:
        waiting = asyncio.ensure_future(database.transact_async(get, b"holder"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        release.set()  # Reached only if the loop keeps running.
        assert await waiting == b"1"


async def test_a_loop_reads_while_another_thread_writes(database: SerialDatabase) -> None:
    with write_lock_held(database) as release:
        assert await database.read_async(get, b"holder") is None
        assert not release.is_set()


def test_all_transactions_that_waited_are_run(database: SerialDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_WAIT_SECONDS_MAX", HELD_SECONDS_MAX)
    with ThreadPoolExecutor(5) as threads:
        with write_lock_held(database) as release:
            calls = [threads.submit(database.transact, Transaction.put, b"%d" % number, b"") for number in range(5)]
            release.set()
        for call in calls:
            call.result()
    assert len(database.read(Transaction.scan, b"0", b"9", limit=10)) == 5


def test_a_failure_after_waiting_affects_only_its_own_transaction(database: SerialDatabase) -> None:
    def fail(tx: Transaction) -> None:
        tx.put(b"a", b"1")
        raise LookupError("on purpose")

    with ThreadPoolExecutor(1) as threads, write_lock_held(database) as release:
        call = threads.submit(database.transact, fail)
        release.set()
        with pytest.raises(LookupError):
            call.result()
    assert database.read(get, b"a") is None
    assert database.read(get, b"holder") == b"1"


def test_a_failed_function_releases_the_write_lock(database: SerialDatabase) -> None:
    def fail(tx: Transaction) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        database.transact(fail)
    assert database.transact(get, b"a") is None


async def test_a_coroutine_started_inside_a_transaction_is_nested(database: SerialDatabase) -> None:
    def start(tx: Transaction) -> None:
        database.transact_async(get, b"a").send(None)

    with pytest.raises(NestedTransaction, match="pass `tx` to"):
        await database.transact_async(start)
    with pytest.raises(NestedTransaction):
        database.transact(start)


def test_a_caught_nesting_leaves_the_outer_transaction_intact(database: SerialDatabase) -> None:
    def outer(tx: Transaction) -> None:
        tx.put(b"a", b"outer")
        for inner in (database.transact, database.read):
            with pytest.raises(NestedTransaction):
                inner(get, b"a")

    database.transact(outer)
    assert database.read(get, b"a") == b"outer"


def test_a_transaction_on_another_thread_waits_and_is_not_nested(
    database: SerialDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_WAIT_SECONDS_MAX", 0.001)
    refused: list[type[Exception]] = []

    def try_from_outside() -> None:
        try:
            database.transact(get, b"a")
        except Busy as error:
            refused.append(type(error))

    def work(tx: Transaction) -> None:
        other = threading.Thread(target=try_from_outside)
        other.start()
        other.join()

    database.transact(work)
    assert refused == [Busy]


def test_transactions_of_two_databases_may_nest(database: SerialDatabase) -> None:
    with MemoryDatabase() as other:

        def work(tx: Transaction) -> None:
            other.transact(Transaction.put, b"a", b"inner")

        database.transact(work)
        assert other.read(get, b"a") == b"inner"


def test_a_snapshot_may_write_through_another_transaction(database: SerialDatabase) -> None:
    def work(tx: Transaction) -> bytes | None:
        database.transact(Transaction.put, b"b", b"1")
        return tx.get(b"a")

    assert database.read(work) is None
    assert database.read(get, b"b") == b"1"
