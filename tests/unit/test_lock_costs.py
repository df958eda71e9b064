"""What ordered locks in the key space read and write, counted in keys."""

from collections import Counter

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.kv import Pair, Transaction
from fastness.kv.contract import View
from fastness.layers import locks
from fastness.testing.clock import ManualClock
from fastness.wire.locks import GrantedLocks, LockSession

ROW = ("record_id", "task/1")
BOB = LockSession("session-of-bob-0123456789")


class CountingView:
    """The committed pairs, with a count of the reads of a transaction."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.counts: Counter[str] = Counter()

    def get(self, key: bytes) -> bytes | None:
        self.counts["gets"] += 1
        return self._view.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        found = self._view.scan(begin, end, limit, reverse)
        self.counts["scans"] += 1
        self.counts["scanned"] += len(found)
        return found


@pytest.fixture
def database(clock: ManualClock) -> MemoryDatabase:
    return MemoryDatabase(clock=clock)


def acquire(tx: Transaction, session: LockSession, path: tuple[str, str], mode: str = "X") -> dict[str, int]:
    """Acquire a free lock; what it read and wrote."""
    tx.view = view = CountingView(tx.view)
    steps = locks.steps_of([path], mode)
    granted = locks.acquire(tx, locks.AcquireCall(session, "claim", steps, "bob", 1_000), may_wait=True)
    assert isinstance(granted, GrantedLocks)
    return dict(view.counts) | {"writes": len(tx.writes)}


def release(tx: Transaction, session: LockSession) -> dict[str, int]:
    tx.view = view = CountingView(tx.view)
    assert locks.release(tx, session, "claim")
    return dict(view.counts) | {"writes": len(tx.writes)}


def test_a_row_lock_costs_the_same_beside_any_number_of_others(database: MemoryDatabase) -> None:
    def cost() -> tuple[dict[str, int], dict[str, int]]:
        return database.transact(acquire, BOB, ROW), database.transact(release, BOB)

    database.transact(acquire, LockSession("session-of-the-first-one"), ("record_id", "task/0"))
    cost()
    alone = cost()
    # Its session and the mark of the universe; the locks of the row, with its fence, of the type and of the database.
    assert alone[0] == {"gets": 2, "scans": 3, "scanned": 1, "writes": 5}
    assert alone[1] == {"gets": 1, "scans": 3, "scanned": 0, "writes": 4}
    for number in range(200):
        database.transact(acquire, LockSession(f"session-of-row-{number:04}"), ("record_id", f"task/{number + 2}"))
    assert cost() == alone


def test_a_shared_table_lock_does_not_read_the_intents_of_its_readers(database: MemoryDatabase) -> None:
    for number in range(200):
        database.transact(acquire, LockSession(f"session-of-row-{number:04}"), ("record_id", f"task/{number}"), "S")
    counts = database.transact(acquire, BOB, ("entity_type", "task"), "S")
    assert counts["scanned"] == 1
    assert counts["scans"] <= 6


def test_a_write_of_an_entity_looks_for_locks_in_four_scans_while_there_is_a_session(database: MemoryDatabase) -> None:
    def look(tx: Transaction, session: str | None = None) -> dict[str, int]:
        tx.view = view = CountingView(tx.view)
        assert locks.obstacles(tx, "main", [("task", "1")], session=session) == []
        return dict(view.counts) | {"writes": len(tx.writes)}

    assert database.transact(look) == {"gets": 1, "writes": 0}
    for number in range(20):
        database.transact(acquire, LockSession(f"session-of-row-{number:04}"), ("record_id", f"task/{number + 2}"))
    # The sessions; the locks of the row, of its type and of the database.
    assert database.transact(look) == {"gets": 1, "scans": 4, "scanned": 1, "writes": 0}
    database.transact(acquire, BOB, ROW)
    # A holder also reads its session, and who excludes others from the row: holders, and intents.
    assert database.transact(look, BOB.id) == {"gets": 2, "scans": 6, "scanned": 3, "writes": 0}
