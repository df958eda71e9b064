"""Conformance checks for hosting: one host writes a world at a time, and every item is taken once and in order.

    for check in HOSTING_CHECKS:
        check(database)

Each check clears the universe that has its name, so checks can share a database and run again.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Final

import cbor2

from fastness.errors import CommitUnknown, Fenced
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import inboxes, journal_records, journals, sends, snapshots, turns
from fastness.layers.worlds import World
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.hosting import HostingStore
from fastness.testing.conformance.workloads import in_threads
from fastness.testing.conformance.worlds import FAULTS
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimedWorld, ClaimWorlds, CommitTurn, GivenBack
from fastness.wire.inboxes import Control, DomainEvent

Check = Callable[[Database], None]

_ROUNDS_MAX: Final = 1_000
_WAIT_MS: Final = 10_000
_SENDS: Final = 20


def check_concurrent_hosts_take_each_item_once_and_in_order(database: Database) -> None:
    worlds = _worlds(database, check_concurrent_hosts_take_each_item_once_and_in_order, 4)
    universe = worlds[0].universe

    def run_one(number: int) -> None:
        if number == 0:
            for step in range(40):
                database.transact(inboxes.enqueue, worlds[step % 4], Control(command=str(step)))
            return
        for _ in range(_ROUNDS_MAX):
            if all(database.read(inboxes.cursor, world) == 9 for world in worlds):
                return
            for claimed in _claim(database, universe, f"host-{number}", lease_ms=60_000, wait_ms=20):
                _work(database, universe, f"host-{number}", claimed)
        raise AssertionError(f"Items are left after {_ROUNDS_MAX} claims")

    in_threads(4, run_one)
    for world in worlds:
        sequences, fences = _written(database, world)
        assert sequences == list(range(10))
        assert fences == sorted(fences)


def check_a_fault_in_a_claim_or_a_turn_loses_and_repeats_nothing(database: Database) -> None:
    (world,) = _worlds(database, check_a_fault_in_a_claim_or_a_turn_loses_and_repeats_nothing, 1)

    def run(database: Database) -> None:
        for claimed in _claim(database, world.universe, "host", lease_ms=100, wait_ms=_WAIT_MS):
            with suppress(Fenced):  # The machine may have been slow.
                _work(database, world.universe, "host", claimed)

    counting = ChosenFault()
    database.transact(inboxes.enqueue, world, Control(command="first"))
    run(FaultyDatabase(database, counting))
    points = list(product(FAULTS, range(len(counting.points))))
    for error, fail_at in points:
        sequence = database.transact(inboxes.enqueue, world, Control(command="go"))
        with suppress(Crash, CommitUnknown):
            run(FaultyDatabase(database, ChosenFault(fail_at, error)))
        for _ in range(_ROUNDS_MAX):  # Another claim waits until the one before has ended.
            if database.read(inboxes.cursor, world) == sequence:
                break
            run(database)
        sequences, fences = _written(database, world)
        assert sequences == list(range(sequence + 1)), f"{error} at {counting.points[fail_at]}"
        assert fences == sorted(fences)
    assert len(points) >= 2 * 3 * 3, "a claim, a turn and a release have three points each"


def check_a_waiting_host_is_woken_by_an_item(database: Database) -> None:
    (world,) = _worlds(database, check_a_waiting_host_is_woken_by_an_item, 1)
    for number in range(3):  # The first item makes the world ready, and others are for a world that is held.
        found: list[ClaimedWorld] = []

        def wait(found: list[ClaimedWorld] = found) -> None:
            found.extend(_claim(database, world.universe, "host", lease_ms=600_000, wait_ms=_WAIT_MS))

        waiting = threading.Thread(target=wait)
        waiting.start()
        database.transact(inboxes.enqueue, world, Control(command=str(number)))
        waiting.join()
        assert [(each.is_new, len(each.items)) for each in found] == [(number == 0, number + 1)]


def check_worlds_of_two_universes_send_to_each_other_once_and_in_order(database: Database) -> None:
    """Each transaction locks worlds of both universes, in the order of its own direction."""
    check = check_worlds_of_two_universes_send_to_each_other_once_and_in_order
    pair = [_worlds(database, check, 1, suffix=suffix)[0] for suffix in ("-a", "-b")]
    claims: list[ClaimedWorld] = []
    for world, other in (pair, reversed(pair)):
        database.transact(inboxes.enqueue, world, Control(command="start"))
        claims += _claim(database, world.universe, "host", lease_ms=600_000, wait_ms=_WAIT_MS)
        allowed = [other.universe]
        database.transact(sends.set_policy, world.universe, sends_to=allowed, accepts_from=allowed)

    def send_one(tx: Transaction, number: int, step: int) -> None:
        claimed, event = claims[number], DomainEvent(schema=str(step))
        turn = CommitTurn(claimed.world, "host", claimed.fence, step, entries=[canonical(step)])
        turns.commit_turn(tx, pair[number], turn, lease_ms=600_000)
        sends.send(tx, pair[number], pair[1 - number], event, owner="host", fence=claimed.fence)

    def run_one(number: int) -> None:
        for step in range(_SENDS):
            database.transact(send_one, number, step)

    in_threads(2, run_one)
    for number, world in enumerate(pair):
        sender = pair[1 - number]
        wanted = [DomainEvent(schema=str(step), sender=f"{sender.name}@{sender.universe}") for step in range(_SENDS)]
        assert [item for _, item in database.read(inboxes.read, world, after=0, limit=100)] == wanted


def _worlds(database: Database, check: Check, number: int, *, suffix: str = "") -> list[World]:
    """New worlds with a program, in an empty universe that has the name of the check."""
    universe = check.__name__.removeprefix("check_")[:60] + suffix
    database.transact(Transaction.delete_range, *Subspace("u", universe).range())
    worlds = [World(universe, f"w-{each}") for each in range(number)]
    for world in worlds:
        database.transact(snapshots.create_world, world)
        database.transact(turns.set_program, world, "p")
    return worlds


def _claim(database: Database, universe: str, owner: str, *, lease_ms: int, wait_ms: int) -> list[ClaimedWorld]:
    store = HostingStore(database, None, ConsumerOptions(), Counter())
    return store.claim(ClaimWorlds(["p"], owner, 2, lease_ms / 1_000, wait_ms / 1_000, universe)).worlds


def _work(database: Database, universe: str, owner: str, claimed: ClaimedWorld) -> None:
    """Take all items of a claimed world, and give it back."""
    world, head = World(universe, claimed.world), claimed.head
    if claimed.items:
        turn = CommitTurn(
            claimed.world,
            owner,
            claimed.fence,
            claimed.head,
            claimed.items[-1][0],
            entries=[canonical(claimed.fence)],
        )
        head = database.transact(turns.commit_turn, world, turn, lease_ms=60_000).head
    database.transact(turns.release, world, GivenBack(world.name, claimed.fence, head), owner=owner)


def _written(database: Database, world: World) -> tuple[list[int], list[int]]:
    """The sequences of the items in a journal, and the fences of its turns."""
    sequences, fences = [], []
    for _, record in database.read(journals.read_hot, world, 0, 10_000):
        kind, value = journal_records.split(record)
        if kind == "ingress":
            sequences.append(cbor2.loads(value)["seq"])
        else:
            fences.append(cbor2.loads(value))
    return sequences, fences


HOSTING_CHECKS: Final[tuple[Check, ...]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
