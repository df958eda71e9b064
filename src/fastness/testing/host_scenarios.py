"""Hosts in the simulator: they claim worlds and commit turns, and are paused, crash and lose their claims.

A turn with items is followed by one without, as a step of a workflow is: its host has work that no item brings.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import cbor2

from fastness.kv import Transaction
from fastness.layers import hosting, inboxes, journal_records, journals, snapshots, turns, worlds
from fastness.layers.hosting import Hosting
from fastness.layers.worlds import World, WorldState
from fastness.testing.histories import Outcome, Violation
from fastness.testing.simulation import Client, Simulation
from fastness.wire.canonical import canonical
from fastness.wire.hosting import CommitTurn, FailTurn, GivenBack
from fastness.wire.inboxes import DomainEvent

_NAMES: Final = ("a", "b", "c")
_LEASE_MS: Final = 1_000
_FOLLOWED: Final = canonical("followed")  # The entry of the turn that follows one with items.
_CLAIMS_MAX: Final = 300  # Far more than the last host needs to handle everything.


class _Claim(NamedTuple):
    """What a claim returns to a simulated host."""

    world: str
    fence: int
    head: int
    sequences: tuple[int, ...]  # Of the items that come next.


class _Folded(NamedTuple):
    """What a journal says."""

    items: int  # That were handled, or set aside.
    has_work: bool  # A turn with items has not been followed yet.


def hosts(simulation: Simulation) -> Callable[[], None]:
    """One host writes a world at a time; items are taken once and in order; the work of a world is always continued."""

    async def host(client: Client) -> None:
        owner = f"{client.name}.{client.crashes}"
        for _ in range(10):
            limit = client.random.randrange(1, 3)
            for claim in await client.operate("claim", "worlds", owner, _claim, owner, limit) or []:
                await _run(client, owner, claim)
            await client.pause(client.random.randrange(400))

    async def operate(client: Client) -> None:
        for _ in range(8):
            name = client.random.choice(_NAMES)
            if client.random.random() < 0.7:
                await client.operate("pause", name, None, _change, name, WorldState.PAUSED)
                await client.pause(client.random.randrange(500))
                await client.operate("resume", name, None, _change, name, WorldState.ACTIVE)
            else:
                await client.operate("program", name, None, _set_program, name, client.random.choice(("p", None)))
            await client.pause(client.random.randrange(500))

    _add_senders(simulation, _NAMES, items=12, pause_ms=300)
    for number in range(3):
        simulation.add(f"host-{number}", host)
    simulation.add("operator", operate)
    return lambda: _check(simulation)


def releases(simulation: Simulation) -> Callable[[], None]:
    """What gives a world back arrives late, twice or never; its host may have taken the world again by then."""
    sent: list[tuple[str, GivenBack]] = []  # With the owners.

    async def host(client: Client) -> None:
        owner = f"{client.name}.{client.crashes}"
        for _ in range(40):
            claims = await client.operate("claim", "worlds", owner, _claim, owner, 1, 5 * _LEASE_MS)
            for claim in claims or []:
                if (head := await _run_all(client, owner, claim)) is not None:
                    sent.append((owner, GivenBack(claim.world, claim.fence, head)))
            await client.pause(client.random.randrange(100))

    async def deliver(client: Client) -> None:
        for _ in range(60):
            await client.pause(client.random.randrange(200))
            if not sent:
                continue
            owner, given = sent.pop()
            for _ in range(client.random.choice((0, 1, 1, 2))):
                await client.pause(client.random.randrange(1_500))
                await client.operate("late release", given.world, (owner, given.fence), _release, owner, given)

    def check() -> None:
        for owner, given in sent:
            simulation.database.transact(_release, owner, given)
        _check(simulation)

    _add_senders(simulation, _NAMES[:1], items=20, pause_ms=2_000)
    for number in range(2):
        simulation.add(f"host-{number}", host)
        simulation.add(f"network-{number}", deliver)
    return check


def _add_senders(simulation: Simulation, names: tuple[str, ...], *, items: int, pause_ms: int) -> None:
    """Create the worlds, and add clients that put items into some of their inboxes."""
    for name in _NAMES:
        simulation.database.transact(_create, name)

    async def send(client: Client) -> None:
        for step in range(items):
            name = client.random.choice(names)
            item = f"{client.name}.{client.crashes}.{step}"
            await client.operate("put", name, item, _put, name, item)
            await client.pause(client.random.randrange(pause_ms))

    for number in range(2):
        simulation.add(f"sender-{number}", send)


async def _run(client: Client, owner: str, claim: _Claim) -> None:
    """The turns of a claimed world, until its work is done, a turn is refused, or the host gives it back."""
    name, fence, head, sequences = claim
    restored = await client.operate("restore", name, None, _folded, name)
    if restored is None:
        return
    folded, has_work = restored
    while True:
        await client.pause(client.random.choice((5, 50, 300, 1_300)))  # Some are longer than a claim lasts.
        choice = client.random.random()
        if choice < 0.1:
            await client.operate("fail", name, (owner, fence), _fail, name, owner, fence)
            return
        if choice < 0.2:
            await client.operate("renew", name, (owner, fence), _renew, name, owner, fence)
        if not (sequences or has_work) or choice > 0.9:
            given = GivenBack(name, fence, head, has_work)
            await client.operate("release", name, (owner, fence), _release, owner, given)
            return
        number = client.random.randrange(1, len(sequences) + 1) if sequences else 0
        taken, sequences = sequences[:number], sequences[number:]
        aside = [(taken[0], "on purpose")] if taken and client.random.random() < 0.1 else []
        turn = _turn(owner, _Claim(name, fence, head, taken), folded, aside)
        folded, has_work = folded + len(taken), bool(taken)
        committed = await client.operate("turn", name, (owner, fence), _commit, turn)
        if committed is None:
            return  # It is lost, or the outcome is unknown: restore it after the next claim.
        head = committed


async def _run_all(client: Client, owner: str, claim: _Claim) -> int | None:
    """The turns of a claimed world until its work is done; its head then, or None if that is not known."""
    restored = await client.operate("restore", claim.world, None, _folded, claim.world)
    while restored is not None and (claim.sequences or restored.has_work):
        turn = _turn(owner, claim, restored.items)
        await client.pause(client.random.randrange(300))
        head = await client.operate("turn", claim.world, (owner, claim.fence), _commit, turn)
        if head is None:
            return None
        restored = _Folded(restored.items + len(claim.sequences), has_work=bool(claim.sequences))
        claim = claim._replace(head=head, sequences=())
    return None if restored is None else claim.head


def _turn(owner: str, claim: _Claim, folded: int, aside: list[tuple[int, str]] | None = None) -> CommitTurn:
    """A turn that takes the items of a claim; without items, the one that follows it."""
    name, fence, head, sequences = claim
    if not sequences:
        return CommitTurn(name, owner, fence, head, entries=[_FOLLOWED])
    entries = [canonical([owner, fence, folded + len(sequences)])]
    return CommitTurn(name, owner, fence, head, sequences[-1], entries=entries, aside=aside or [])


def _check(simulation: Simulation) -> None:
    _run_everything(simulation)
    for name in _NAMES:
        simulation.database.transact(_change, name, WorldState.ACTIVE)
        simulation.database.transact(_set_program, name, "p")
    _run_everything(simulation)
    _check_wakes(simulation)
    _run_everything(simulation)
    for name in _NAMES:
        handled, written = simulation.database.read(_journal, name)
        if [sequence for sequence, _ in handled] != list(range(len(handled))):
            raise Violation(f"Items of {name} are lost, duplicated or out of order: {handled}", [])
        fences = [fence for _, fence, _ in written]
        if fences != sorted(fences):
            raise Violation(f"A host without a claim wrote to {name}: fences {fences}", [])
        for owner, _, folded in written:
            if folded is not None:
                raise Violation(f"{owner} wrote to {name} with an old state: {folded}", [])
        times = Counter(item for _, item in handled)
        for put in simulation.history.operations:
            if put.kind != "put" or put.key != name:
                continue
            least = 1 if put.outcome is Outcome.OK else 0
            most = 0 if put.outcome is Outcome.FAILED else 1
            if not least <= times[put.argument] <= most:
                raise Violation(f"Item {put.argument} was handled {times[put.argument]} times", [put])


def _check_wakes(simulation: Simulation) -> None:
    """Check that a host learns of the items that arrive for a world while it holds it."""
    database = simulation.database
    for name in _NAMES:
        database.transact(_put, name, f"before {name}")
    held = {claim.world for claim in database.transact(_claim, "last", 10)}
    for name in _NAMES:
        database.transact(_put, name, f"after {name}")
    woken = {claim.world for claim in database.transact(_claim, "last", 10)}
    if held != set(_NAMES) or woken != set(_NAMES):
        raise Violation(f"The last host could claim {held}, and was woken for {woken}", [])


def _run_everything(simulation: Simulation) -> None:
    """Let a host without faults handle everything that hosts can claim, after the claims of others have ended."""
    database = simulation.database
    for _ in range(_CLAIMS_MAX):
        claims = database.transact(_claim, "last", 10)
        for claim in claims:
            folded, head = database.read(_folded, claim.world), claim.head
            if claim.sequences:
                head = database.transact(_commit, _turn("last", claim, folded.items))
            if claim.sequences or folded.has_work:
                followed = claim._replace(head=head, sequences=())
                head = database.transact(_commit, _turn("last", followed, folded.items))
            database.transact(_release, "last", GivenBack(claim.world, claim.fence, head))
        if claims:
            continue
        next_ms = database.read(hosting.candidates, "main", programs=["p"], owner=None, limit=1).next_ms
        if next_ms is None:
            stuck = [name for name in _NAMES if database.read(_is_stuck, name)]
            if stuck:
                raise Violation(f"{stuck} have work, and no host can claim them", [])
            return
        simulation.clock.jump_to_ms(max(next_ms, simulation.clock.now_ms() + 1))
    raise Violation(f"There is work after {_CLAIMS_MAX} claims", [])


# Transaction functions.


def _world(name: str) -> World:
    return World("main", name)


def _create(tx: Transaction, name: str) -> None:
    snapshots.create_world(tx, _world(name))
    turns.set_program(tx, _world(name), "p")


def _put(tx: Transaction, name: str, item: str) -> int:
    return inboxes.enqueue(tx, _world(name), DomainEvent(schema=item))


def _change(tx: Transaction, name: str, state: WorldState) -> None:
    worlds.change_state(tx, _world(name), state)
    turns.note_state(tx, _world(name))


def _set_program(tx: Transaction, name: str, program: str | None) -> None:
    turns.set_program(tx, _world(name), program)
    _check_idle(tx, name)


def _claim(tx: Transaction, owner: str, limit: int, lease_ms: int = _LEASE_MS) -> list[_Claim]:
    found = hosting.candidates(tx, "main", programs=["p"], owner=owner, limit=limit)
    claimed = [turns.claim_woken(tx, _world(name), owner=owner) for name in found.woken]
    for ready in found.ready:
        before = hosting.find(tx, _world(ready.world))
        if before is not None and before.is_held_at(tx.now_ms):
            raise Violation(f"{owner} can claim {ready.world}, which {before.owner} holds", [])
        claimed.append(turns.claim(tx, _world(ready.world), ready, owner=owner, lease_ms=lease_ms))
    return [
        _Claim(each.world, each.fence, each.head, tuple(sequence for sequence, _ in each.items))
        for each in claimed
        if each is not None
    ]


def _commit(tx: Transaction, turn: CommitTurn) -> int:
    record = hosting.find(tx, _world(turn.world)) or Hosting(None)
    committed = turns.commit_turn(tx, _world(turn.world), turn, lease_ms=_LEASE_MS)
    if (record.owner, record.fence) != (turn.owner, turn.fence) or tx.now_ms >= record.expires_ms:
        raise Violation(f"{turn.owner} wrote with fence {turn.fence}, and {record} is the claim", [])
    return committed.head


def _is_stuck(tx: Transaction, name: str) -> bool:
    """Whether a world has work that hosts should do, although nothing is ready."""
    info = turns.describe(tx, _world(name))
    is_active = worlds.describe(tx, _world(name)).state is WorldState.ACTIVE
    items, has_work = _folded(tx, name)
    has_work = has_work or inboxes.next_sequence(tx, _world(name)) > items
    return is_active and info.program is not None and has_work


def _fail(tx: Transaction, name: str, owner: str, fence: int) -> None:
    turns.fail_turn(tx, _world(name), FailTurn(name, owner, fence, "on purpose", delay_seconds=0.2))


def _renew(tx: Transaction, name: str, owner: str, fence: int) -> bool:
    return turns.renew(tx, _world(name), owner=owner, fence=fence, lease_ms=_LEASE_MS) is not None


def _release(tx: Transaction, owner: str, given: GivenBack) -> bool:
    had_it = turns.release(tx, _world(given.world), given, owner=owner)
    _check_idle(tx, given.world)
    return had_it


def _check_idle(tx: Transaction, name: str) -> None:
    """Check that a world with work is held or ready."""
    record = hosting.find(tx, _world(name))
    if record is not None and (record.owner, record.ready_ms) == (None, None) and _is_stuck(tx, name):
        raise Violation(f"{name} has work, and is neither held nor ready", [])


def _folded(tx: Transaction, name: str) -> _Folded:
    last = journals.read_hot(tx, _world(name), max(journals.head(tx, _world(name)) - 1, 0), 1)
    has_work = bool(last) and journal_records.split(last[0][1])[1] != _FOLLOWED
    return _Folded(len(_journal(tx, name)[0]), has_work)


def _journal(tx: Transaction, name: str) -> tuple[list[tuple[int, str]], list[tuple[str, int, int | None]]]:
    """The items in the order of the journal, and the turns; of a turn, what its host had folded, if that is wrong."""
    aside: dict[int, Any] = {
        each.sequence: each.item for each in turns.aside(tx, _world(name), after=None, limit=1_000)
    }
    handled: list[tuple[int, str]] = []
    written: list[tuple[str, int, int | None]] = []
    for _, record in journals.read_hot(tx, _world(name), 0, 10_000):
        kind, encoded = journal_records.split(record)
        value = cbor2.loads(encoded)
        if kind == "ingress":
            handled.append((value["seq"], value["schema"]))
        elif isinstance(value, dict):
            handled.append((value["aside"], aside[value["aside"]].schema))
        elif encoded != _FOLLOWED:
            owner, fence, folded = value
            written.append((owner, fence, None if folded == len(handled) else folded))
    return handled, written
