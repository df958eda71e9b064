"""Effects and timers in the simulator: workers that pause, crash and lose their leases carry out effects."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import cbor2

from fastness.kv import Transaction
from fastness.layers import effect_leases, inboxes, journal_records, journals, snapshots, timer_firing, worlds
from fastness.layers import effects as layer
from fastness.layers import timers as timer_layer
from fastness.layers.effects import DueEffect, EffectKey
from fastness.layers.timers import DueTimer
from fastness.layers.worlds import World, WorldState
from fastness.testing.histories import Operation, Outcome, Violation
from fastness.testing.simulation import Client, Simulation
from fastness.wire.inboxes import DomainEvent, Effect, Timer

_WORLDS: Final = (World("main", "ada"), World("main", "bob"))
_KINDS: Final = ("mail", "call")
_ATTEMPTS_MAX: Final = 3
_LEASE_MS: Final = 1_000
_REUSED: Final = b"reused"  # The intent hash of timers that replace each other.
_ROUNDS_MAX: Final = 500  # Far more than what is left at the end of a run needs.
_NS_PER_MS: Final = 1_000_000


class Claimed(NamedTuple):
    """A claim: which effect, its fence, and from when until when it is leased."""

    effect: EffectKey
    fence: int
    at_ms: int
    until_ms: int


def effects(simulation: Simulation) -> Callable[[], None]:
    """Each effect has one receipt in the journal, of its last claim; each timer fires once."""
    for world in _WORLDS:
        simulation.database.transact(snapshots.create_world, world)

    async def ask(client: Client) -> None:
        for step in range(8):
            world = client.random.choice(_WORLDS)
            item = _item(client, f"{client.name}.{client.crashes}.{step}", simulation.clock.now_ms())
            await client.operate("ask", world.name, item.schema, _ask, world, item)
            await client.pause(client.random.randrange(400))

    async def work(client: Client) -> None:
        for _ in range(14):
            kinds = [client.random.choice(_KINDS)] if client.random.random() < 0.5 else list(_KINDS)
            due = await client.operate("look", "effects", None, _look, kinds, client.random.randrange(1, 4))
            claimed = await client.operate("claim", "effects", None, _claim, due, client.name) if due else None
            for claim in claimed or []:
                await client.pause(client.random.choice((5, 200, 3_000)))
                await _settle(client, claim)
            await client.pause(client.random.randrange(500))

    async def fire(client: Client) -> None:
        for _ in range(14):
            due = await client.operate("look for timers", "timers", None, _look_for_timers)
            if due:
                await client.pause(client.random.choice((0, 300)))
                await client.operate("fire", "timers", None, _fire, due)
            await client.pause(client.random.randrange(600))

    async def operate(client: Client) -> None:
        for _ in range(6):
            world = client.random.choice(_WORLDS)
            state = client.random.choice((WorldState.ACTIVE, WorldState.ACTIVE, WorldState.PAUSED))
            await client.operate("change", world.name, state, _change, world, state)
            await client.pause(client.random.randrange(800))

    for number in range(2):
        simulation.add(f"asker-{number}", ask)
        simulation.add(f"worker-{number}", work)
        simulation.add(f"clock-{number}", fire)
    simulation.add("worker-2", work)
    simulation.add("operator", operate)
    return lambda: _check(simulation)


def _item(client: Client, name: str, now_ms: int) -> DomainEvent:
    chance = client.random
    asked = tuple(
        Effect(chance.choice(_KINDS), f"{name}.{number}".encode(), max_attempts=_ATTEMPTS_MAX)
        for number in range(chance.randrange(3))
    )
    hashes = [f"{name}.timer".encode()] * (chance.random() < 0.5) + [_REUSED] * (chance.random() < 0.3)
    timers = tuple(Timer((now_ms + chance.randrange(2_000)) * _NS_PER_MS, each) for each in hashes)
    return DomainEvent(schema=name, effects=asked, timers=timers)


async def _settle(client: Client, claim: Claimed) -> None:
    choice = client.random.random()
    if choice < 0.65:
        value = f"{client.name}.{client.crashes}.{claim.fence}"
        await client.operate("complete", claim.effect, value, _complete, claim, value)
    elif choice < 0.85:
        await client.operate("fail", claim.effect, claim.fence, _fail, claim)
    elif choice < 0.95:
        await client.operate("extend", claim.effect, claim.fence, _extend, claim)


# Checks at the end.


def _check(simulation: Simulation) -> None:
    for world in _WORLDS:
        simulation.database.transact(_change, world, WorldState.ACTIVE)
    _finish(simulation)
    by_effect: dict[Any, list[Operation]] = defaultdict(list)
    claims: dict[EffectKey, list[Claimed]] = defaultdict(list)
    for operation in simulation.history.operations:
        by_effect[operation.key].append(operation)
        if operation.kind == "claim" and operation.outcome is Outcome.OK:
            for claim in operation.result:
                claims[claim.effect].append(claim)
                by_effect[claim.effect].append(operation)
    for key, found in claims.items():
        _check_claims(key, sorted(found, key=lambda claim: claim.fence), by_effect[key])
        _check_fences(key, by_effect[key])
    asks = [each for each in simulation.history.operations if each.kind == "ask"]
    for world in _WORLDS:
        items = _ingressed(simulation, world)
        _check_asks([each for each in asks if each.key == world.name], items)
        _check_receipts(world, items, by_effect)
        _check_timers(items)


def _check_asks(asks: list[Operation], items: list[dict[str, Any]]) -> None:
    """Check that what was asked for is in the journal."""
    schemas = [item.get("schema") for item in items]
    for ask in asks:
        if ask.outcome is Outcome.OK and schemas.count(ask.argument) != 1:
            raise Violation(f"{ask.argument} is in the journal {schemas.count(ask.argument)} times", [ask])


def _check_receipts(world: World, items: list[dict[str, Any]], by_effect: dict[Any, list[Operation]]) -> None:
    """Check that each effect has one receipt, which is that of the call that was acknowledged."""
    receipts: dict[bytes, list[dict[str, Any]]] = defaultdict(list)
    for item in items:
        if item["type"] == "receipt":
            receipts[item["intent_hash"]].append(item)
    for height, item in enumerate(items):
        for number, effect in enumerate(item.get("effects", ())):
            operations = by_effect[EffectKey(world.name, height, number)]
            found = receipts.pop(effect["intent_hash"], [])
            if len(found) != 1:
                raise Violation(f"An effect has {len(found)} receipts in the journal", operations)
            _check_receipt(found[0], operations)
    if receipts:
        raise Violation(f"There are receipts of effects that no record asks for: {list(receipts)}", [])


def _check_receipt(receipt: dict[str, Any], operations: list[Operation]) -> None:
    done = [each for each in operations if each.kind == "complete" and each.outcome is Outcome.OK]
    dead = [each for each in operations if each.kind == "fail" and each.outcome is Outcome.OK and each.result]
    if len(done) + len(dead) > 1:
        raise Violation("An effect was completed twice, or was dead and completed", [*done, *dead])
    value = receipt.get("payload", b"").decode()
    possible = [each.argument for each in operations if each.kind == "complete" and each.outcome is not Outcome.FAILED]
    if receipt.get("error") is None and value not in ("finished", *possible):
        raise Violation(f"A receipt has the result {value}, which no call returned", operations)
    if (done and value != done[0].argument) or (dead and receipt.get("error") is None):
        raise Violation(f"The receipt is not that of the call that was acknowledged: {receipt}", [*done, *dead])


def _check_claims(key: EffectKey, claims: list[Claimed], operations: list[Operation]) -> None:
    """Check that fences are different, and that no claim begins before the one before it has ended."""
    if len({claim.fence for claim in claims}) != len(claims) or len(claims) > _ATTEMPTS_MAX:
        raise Violation(f"{key} was claimed with the fences {[claim.fence for claim in claims]}", operations)
    for earlier, later in pairwise(claims):
        ended = [
            each
            for each in operations
            if each.kind == "fail" and each.argument == earlier.fence and each.outcome is not Outcome.FAILED
        ]
        if later.at_ms < earlier.until_ms and not ended:
            raise Violation(f"{key} was claimed again while it was leased: {earlier}, {later}", operations)


def _check_fences(key: EffectKey, operations: list[Operation]) -> None:
    """Check that a holder changes nothing once the effect was claimed again."""
    claims = [each for each in operations if each.kind == "claim"]
    for operation in operations:
        if operation.kind == "claim" or operation.outcome is not Outcome.OK:
            continue
        fence = int(str(operation.argument).rpartition(".")[2])
        for claim in claims:
            newer = [each for each in claim.result if each.effect == key and each.fence > fence]
            if newer and claim.returned < operation.invoked:
                raise Violation(f"{key} was changed with the stale fence {fence}", [claim, operation])


def _check_timers(items: list[dict[str, Any]]) -> None:
    """Check that each timer fired once, and one that was replaced not at all after that.

    Items are in the order of their commits, so at most one timer fires between two that replace each other.
    """
    pending: dict[str, bool] = {}
    for item in items:
        for timer in item.get("timers", ()):
            pending[timer["intent_hash"].decode()] = True
        if item["type"] == "timer_fired":
            if not pending.get(item["timer_id"]):
                raise Violation(f"Timer {item['timer_id']} fired twice, or was never set", [])
            pending[item["timer_id"]] = False
    left = [timer_id for timer_id, is_pending in pending.items() if is_pending]
    if left:
        raise Violation(f"Timers have not fired: {left}", [])


def _finish(simulation: Simulation) -> None:
    """Carry out every effect and fire every timer without faults, and drain the inboxes."""
    database, clock = simulation.database, simulation.clock
    for _ in range(_ROUNDS_MAX):
        due = database.transact(_look, list(_KINDS), 10)
        for claim in database.transact(_claim, due, "last") if due else []:
            database.transact(_complete, claim, "finished")
        timers = database.transact(_look_for_timers)
        if timers:
            database.transact(_fire, timers)
        drained = [height for world in _WORLDS for height in database.transact(_drain, world)]
        if not due and not timers and not drained:
            if not database.read(_unfinished):
                return
            clock.advance_ms(100)
    raise Violation("Effects or timers are left that nothing finds", [])


def _unfinished(tx: Transaction) -> bool:
    effects_left = layer.page(tx, "main", None, after="", limit=1).effects
    return bool(effects_left) or timer_layer.next_due_ns(tx, "main") is not None


def _ingressed(simulation: Simulation, world: World) -> list[dict[str, Any]]:
    """The items in the journal, whose heights are their places: nothing else is appended."""
    journal = simulation.database.read(journals.read_hot, world, 0, 10_000)
    return [cbor2.loads(journal_records.split(record)[1]) for _, record in journal]


# Transaction functions.


def _ask(tx: Transaction, world: World, item: DomainEvent) -> int:
    inboxes.enqueue(tx, world, item)
    return _drain(tx, world)[-1]


def _drain(tx: Transaction, world: World) -> list[int]:
    return inboxes.drain(tx, world)


def _look(tx: Transaction, kinds: list[str], limit: int) -> list[DueEffect]:
    return layer.due(tx, "main", kinds, until_ms=tx.now_ms, limit=limit)


def _claim(tx: Transaction, due: list[DueEffect], owner: str) -> list[Claimed]:
    found = effect_leases.claim(tx, "main", due, owner=owner, lease_ms=_LEASE_MS)
    return [
        Claimed(EffectKey(each.world, each.height, each.number), each.fence, tx.now_ms, each.due_ms) for each in found
    ]


def _complete(tx: Transaction, claim: Claimed, value: str) -> None:
    effect_leases.complete(tx, "main", claim.effect, claim.fence, payload=value.encode())


def _fail(tx: Transaction, claim: Claimed) -> bool:
    return effect_leases.fail(tx, "main", claim.effect, claim.fence, error="on purpose", delay_ms=200).is_dead


def _extend(tx: Transaction, claim: Claimed) -> None:
    effect_leases.extend(tx, "main", claim.effect, claim.fence, lease_ms=_LEASE_MS)


def _look_for_timers(tx: Transaction) -> list[DueTimer]:
    return timer_layer.due(tx, "main", until_ns=tx.now_ms * _NS_PER_MS, limit=3)


def _fire(tx: Transaction, due: list[DueTimer]) -> int:
    return timer_firing.fire(tx, "main", due)


def _change(tx: Transaction, world: World, state: WorldState) -> None:
    worlds.change_state(tx, world, state)
