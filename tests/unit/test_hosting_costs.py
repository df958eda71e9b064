"""What claims and turns read and write, counted in keys, and how fairly worlds are served."""

from collections import Counter, deque
from statistics import median

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.kv import Database, Pair, Transaction
from fastness.kv.contract import View
from fastness.layers import hosting, inboxes, turns, worlds
from fastness.layers.hosting import Candidates
from fastness.layers.worlds import World
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.hosting import HostingStore
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimWorlds, CommitTurn, GivenBack, TurnCommitted
from fastness.wire.inboxes import Control

LEASE_MS = 10_000


class CountingView:
    """The committed pairs, with a count of those that a transaction reads."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.read = 0

    def get(self, key: bytes) -> bytes | None:
        self.read += 1
        return self._view.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        found = self._view.scan(begin, end, limit, reverse)
        self.read += max(len(found), 1)
        return found


@pytest.fixture
def database(clock: ManualClock) -> Database:
    return MemoryDatabase(clock=clock)


def test_idle_worlds_cost_a_claim_nothing(database: Database) -> None:
    def claim_one(tx: Transaction) -> int:
        tx.view = counting = CountingView(tx.view)
        found = hosting.candidates(tx, "main", programs=["p"], owner="h1", limit=16)
        assert [ready.world for ready in found.ready] == ["active"]
        claimed = turns.claim(tx, World("main", "active"), found.ready[0], owner="h1", lease_ms=LEASE_MS)
        assert claimed is not None
        turns.release(tx, World("main", "active"), GivenBack("active", claimed.fence, 0, has_work=True), owner="h1")
        return counting.read

    database.transact(create, ["active"])
    database.transact(inboxes.enqueue, World("main", "active"), Control(command="go"))
    alone = database.transact(claim_one)
    for start in range(0, 10_000, 1_000):
        database.transact(create, [f"idle-{number}" for number in range(start, start + 1_000)])
    assert database.transact(claim_one) == alone


def test_a_turn_without_items_reads_two_keys_and_writes_its_records_and_the_head(database: Database) -> None:
    world = World("main", "ada")
    database.transact(create, ["ada"])
    database.transact(inboxes.enqueue, world, Control(command="go"))
    (claimed,) = store(database).claim(ClaimWorlds(["p"], "h1", 1, LEASE_MS / 1_000)).worlds

    def commit(tx: Transaction, turn: CommitTurn) -> tuple[TurnCommitted, int, int]:
        tx.view = counting = CountingView(tx.view)
        return turns.commit_turn(tx, world, turn, lease_ms=LEASE_MS), counting.read, len(tx.writes)

    entries = [canonical(number) for number in range(3)]
    turn = CommitTurn("ada", "h1", claimed.fence, 0, entries=entries)
    assert database.transact(commit, turn) == (TurnCommitted(3, claimed.expires_ms, False), 2, 4)
    taking = CommitTurn("ada", "h1", claimed.fence, 3, 0)
    assert database.transact(commit, taking)[1:] == (5, 3)  # The cursor, the item and the next sequence too.


def test_a_thousand_active_worlds_are_served_fairly(database: Database, clock: ManualClock) -> None:
    """Worlds that always have work: none waits more than three times as many claims as the median."""
    names = [f"w-{number}" for number in range(1_000)]
    for start in range(0, 1_000, 250):
        database.transact(create, names[start : start + 250])
    for name in names:
        for _ in range(2):
            database.transact(inboxes.enqueue, World("main", name), Control(command="go"))
    last, gaps, served = dict.fromkeys(names, 0), [], Counter[str]()
    held: deque[GivenBack] = deque()
    for number in range(1, 200):
        clock.advance_ms(1)
        found = store(database).claim(ClaimWorlds(["p"], "h1", lease_seconds=LEASE_MS / 1_000)).worlds
        for each in found:
            gaps.append(number - last[each.world])
            last[each.world] = number
            served[each.world] += 1
            held.append(GivenBack(each.world, each.fence, each.head))
        while len(held) > 32:  # A host that runs so many at a time, and gives the oldest back.
            store(database).release("main", [held.popleft()], owner="h1")
    assert len(served) == 1_000
    assert max(gaps) <= 3 * median(gaps)
    assert max(served.values()) - min(served.values()) <= 1


def test_a_search_stops_at_its_limit(database: Database) -> None:
    database.transact(create, ["a", "b", "c"])
    for name in ("a", "b", "c"):
        database.transact(inboxes.enqueue, World("main", name), Control(command="go"))
    found: Candidates = database.read(hosting.candidates, "main", programs=["p", "q"], owner="h1", limit=2)
    assert [ready.world for ready in found.ready] == ["a", "b"]


def create(tx: Transaction, names: list[str]) -> None:
    for name in names:
        worlds.create(tx, World("main", name))
        turns.set_program(tx, World("main", name), "p")


def store(database: Database) -> HostingStore:
    return HostingStore(database, None, ConsumerOptions(), Counter())
