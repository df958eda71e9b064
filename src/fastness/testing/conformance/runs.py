"""Conformance checks for runs of workflows: an id is started once, and the end of a run is one commit.

    for check in RUN_CHECKS:
        check(database)

Each check clears the universe that has its name, so checks can share a database and run again.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Final

import cbor2

from fastness.errors import RunEnded, RunExists
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import hosting, inboxes, runs, turns
from fastness.layers.worlds import World
from fastness.limits import READ_ENTRIES_MAX
from fastness.testing.conformance.workloads import in_threads, raises
from fastness.testing.conformance.worlds import FAULTS
from fastness.testing.faults import ChosenFault, FaultyDatabase
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.runs import CHILD, COMPLETED, SIGNAL, START, CancelRun, ListRuns, SignalRun, StartRun, UpdateRun

Check = Callable[[Database], None]

_HOST: Final = "host"


def check_concurrent_starts_of_one_id_give_one_run(database: Database) -> None:
    universe = _empty_universe(database, check_concurrent_starts_of_one_id_give_one_run)
    started: list[tuple[int, str]] = []
    refused: list[str] = []

    def start_all(thread: int) -> None:
        arguments = canonical([[thread % 2], {}])
        for id in ("a", "b", "c", "d"):
            try:
                found = database.transact(runs.start, StartRun("w", id, arguments, universe=universe))
            except RunExists:
                refused.append(id)
            else:
                if not found.is_duplicate:
                    started.append((thread % 2, id))

    in_threads(8, start_all)
    assert sorted(id for _, id in started) == ["a", "b", "c", "d"]
    assert Counter(refused) == dict.fromkeys("abcd", 4)  # Those with the other arguments.
    for argument, id in started:
        [(_, item)] = _items(database, universe, id)
        assert (item.schema, cbor2.loads(item.payload)) == (START, [[argument], {}])


def check_each_signal_reaches_a_run_or_is_refused(database: Database) -> None:
    universe = _empty_universe(database, check_each_signal_reaches_a_run_or_is_refused)
    database.transact(runs.start, StartRun("w", "a", universe=universe))
    sent: list[bytes] = []

    def signal_until_it_ends(thread: int) -> None:
        for number in range(20):
            value = canonical([thread, number])
            if thread == 0 and number == 10:
                database.transact(runs.cancel, CancelRun("a", force=True, universe=universe))
            with suppress(RunEnded):
                database.transact(runs.signal, SignalRun("a", "go", value, universe))
                sent.append(value)

    in_threads(4, signal_until_it_ends)
    arrived = [item.payload for _, item in _items(database, universe, "a") if item.schema == SIGNAL]
    assert sorted(arrived) == sorted(sent)
    assert canonical([0, 9]) in sent
    assert canonical([0, 10]) not in sent


def check_a_parent_is_told_once_whatever_fails(database: Database) -> None:
    universe = _empty_universe(database, check_a_parent_is_told_once_whatever_fails)
    counting = ChosenFault()
    _run_a_family(FaultyDatabase(database, counting), universe)
    _assert_family(database, universe)
    for error, fail_at in product(FAULTS, range(len(counting.points))):
        database.transact(Transaction.delete_range, *Subspace("u", universe).range())
        faulty = FaultyDatabase(database, ChosenFault(fail_at, error))
        raises(type(error()), partial(_run_a_family, faulty, universe))
        _run_a_family(database, universe)
        _assert_family(database, universe)


def _run_a_family(database: Database, universe: str) -> None:
    """Start a parent and its child, and end the child; doing so again continues."""
    database.transact(runs.start, StartRun("parent", "p", universe=universe))
    database.transact(runs.start, StartRun("child", "p:1", parent="p", universe=universe))
    fence = database.transact(_claim, runs.world_of(universe, "p:1"))
    with suppress(RunEnded):
        database.transact(runs.update, UpdateRun("p:1", fence, COMPLETED, canonical(42), universe=universe))


def _assert_family(database: Database, universe: str) -> None:
    items = _items(database, universe, "p")
    assert [item.schema for _, item in items] == [START, CHILD]
    assert items[1][1].key == b"p:1"
    assert cbor2.loads(items[1][1].payload)["result"] == 42
    listed = database.read(runs.page, ListRuns(limit=10, universe=universe)).runs
    assert [(each.id, each.state) for each in listed] == [("p", "running"), ("p:1", "completed")]
    record = database.read(hosting.find, runs.world_of(universe, "p:1"))
    assert record is not None
    assert (record.program, record.owner, record.ready_ms) == (None, None, None)


def _claim(tx: Transaction, world: World) -> int:
    """The fence of a claim on the world of a run; 0 if the run has ended."""
    record = hosting.find(tx, world)
    if record is None or record.program is None:
        return 0
    if record.owner == _HOST:
        return record.fence
    found = hosting.candidates(tx, world.universe, programs=[record.program], owner=None, limit=10)
    claimed = turns.claim(tx, world, found.ready[0], owner=_HOST, lease_ms=3_600_000)
    assert claimed is not None
    return claimed.fence


def _items(database: Database, universe: str, id: str) -> list[tuple[int, DomainEvent]]:
    found = database.read(inboxes.read, runs.world_of(universe, id), after=None, limit=READ_ENTRIES_MAX)
    return [(sequence, item) for sequence, item in found if isinstance(item, DomainEvent)]


def _empty_universe(database: Database, check: Check) -> str:
    universe = check.__name__
    database.transact(Transaction.delete_range, *Subspace("u", universe).range())
    return universe


RUN_CHECKS: Final[tuple[Check, ...]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
