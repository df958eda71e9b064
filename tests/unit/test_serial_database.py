"""One transaction at a time: whoever waits for the turn waits for a bounded time, and never on the event loop."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import limits
from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import Busy, NestedTransaction
from holdfast.kv import Transaction
from holdfast.kv.serial_database import SerialDatabase

HELD_SECONDS_MAX = 60.0  # How long a turn is held at most, so that a test that fails does not hang.


@pytest.fixture(params=["memory", "rocksdb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SerialDatabase]:
    """The two backends that take turns."""
    with MemoryDatabase() if request.param == "memory" else RocksDatabase(tmp_path / "kv") as database:
        yield database


@contextmanager
def turn_held(database: SerialDatabase) -> Iterator[threading.Event]:
    """Another thread has the turn until the event is set, or the block ends."""
    taken, passed_on = threading.Event(), threading.Event()

    def hold(tx: Transaction) -> None:
        tx.put(b"holder", b"1")
        taken.set()
        passed_on.wait(HELD_SECONDS_MAX)

    holder = threading.Thread(target=database.transact, args=(hold,))
    holder.start()
    taken.wait()
    try:
        yield passed_on
    finally:
        passed_on.set()
        holder.join()


def get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN_WAIT_SECONDS_MAX", 0.001)


@pytest.mark.usefixtures("impatient")
def test_a_turn_that_is_never_passed_on_makes_the_next_busy(database: SerialDatabase) -> None:
    with turn_held(database), pytest.raises(Busy, match=r"0\.001 s"):
        database.transact(Transaction.put, b"a", b"1")
    assert database.read(get, b"a") is None
    database.transact(Transaction.put, b"a", b"2")
    assert database.read(get, b"a") == b"2"


@pytest.mark.usefixtures("impatient")
async def test_a_coroutine_that_gets_no_turn_is_busy_too(database: SerialDatabase) -> None:
    with turn_held(database), pytest.raises(Busy):
        await database.transact_async(Transaction.put, b"a", b"1")
    assert await database.read_async(get, b"a") is None


def test_who_waits_for_a_turn_sees_what_its_holder_wrote(database: SerialDatabase) -> None:
    with turn_held(database) as passed_on:
        threading.Timer(0.001, passed_on.set).start()
        assert database.transact(get, b"holder") == b"1"


async def test_a_loop_goes_on_while_a_coroutine_waits_for_its_turn(database: SerialDatabase) -> None:
    with turn_held(database) as passed_on:
        waiting = asyncio.ensure_future(database.transact_async(get, b"holder"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        passed_on.set()  # Only a loop that goes on gets here.
        assert await waiting == b"1"


async def test_a_loop_goes_on_while_another_thread_has_the_turn_and_it_reads(database: SerialDatabase) -> None:
    with turn_held(database) as passed_on:
        assert await database.read_async(get, b"holder") is None
        assert not passed_on.is_set()


def test_everybody_who_came_during_one_turn_gets_theirs(
    database: SerialDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TURN_WAIT_SECONDS_MAX", HELD_SECONDS_MAX)
    with ThreadPoolExecutor(5) as threads:
        with turn_held(database) as passed_on:
            calls = [threads.submit(database.transact, Transaction.put, b"%d" % number, b"") for number in range(5)]
            passed_on.set()
        for call in calls:
            call.result()
    assert len(database.read(Transaction.scan, b"0", b"9", limit=10)) == 5


def test_the_failure_of_one_who_waited_is_its_own(database: SerialDatabase) -> None:
    def fail(tx: Transaction) -> None:
        tx.put(b"a", b"1")
        raise LookupError("on purpose")

    with ThreadPoolExecutor(1) as threads, turn_held(database) as passed_on:
        call = threads.submit(database.transact, fail)
        passed_on.set()
        with pytest.raises(LookupError):
            call.result()
    assert database.read(get, b"a") is None
    assert database.read(get, b"holder") == b"1"


def test_a_failed_work_passes_the_turn_on(database: SerialDatabase) -> None:
    def fail(tx: Transaction) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        database.transact(fail)
    assert database.transact(get, b"a") is None


async def test_a_coroutine_started_inside_a_transaction_is_nested(database: SerialDatabase) -> None:
    def start(tx: Transaction) -> None:
        database.transact_async(get, b"a").send(None)

    with pytest.raises(NestedTransaction, match="pass `tx` on"):
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


def test_another_thread_inside_a_transaction_waits_and_does_not_nest(
    database: SerialDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TURN_WAIT_SECONDS_MAX", 0.001)
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


def test_two_databases_nest_in_each_other(database: SerialDatabase) -> None:
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
