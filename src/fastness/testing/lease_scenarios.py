"""Leases, states and entities in the simulator: holders pause, crash and continue with stale lease proofs.

Each transaction also logs what it did. So there is a log of events in commit order that does not depend on the layers
under test.
"""

from collections.abc import Callable
from typing import Any, Final

import cbor2
import msgspec

from fastness.errors import FastnessError
from fastness.kv import Subspace, Transaction
from fastness.layers import entities as entity_layer
from fastness.layers import field_tiers, states
from fastness.layers import leases as lease_layer
from fastness.layers.entities import EntityKey
from fastness.layers.leases import LeaseKey
from fastness.testing.histories import Operation, Outcome, Violation, check_all_fences
from fastness.testing.simulation import Client, Simulation
from fastness.tiers import Tier, TierPolicy
from fastness.wire.canonical import canonical
from fastness.wire.entities import Fields, SeenEntity
from fastness.wire.leases import LeaseProof

_SUBSPACE: Final = Subspace("scenario", "leases")
_KEYS: Final = ("x", "y")
_IDS: Final = ("1", "2", "3")
_POLICY: Final = TierPolicy()
_TIERS: Final = (Tier.CRITICAL, Tier.CRITICAL, Tier.IMPORTANT)


class _Event(msgspec.Struct, frozen=True, array_like=True):
    """A committed operation: its owner and fence, its time, and the lease's new expiry."""

    kind: str
    name: str
    owner: str
    fence: int
    now_ms: int
    expires_ms: int = 0
    version: int = 0  # The version of the state that it wrote.


def leases(simulation: Simulation) -> Callable[[], None]:
    """There is one holder at a time, fences increase, and only the highest fence can write."""
    proofs_of: dict[str, list[LeaseProof]] = {}  # Each client's lease proofs, which survive its crashes.

    async def acquire(client: Client, key: str, name: str) -> None:
        ttl_ms = client.random.choice((300, 1_000, 5_000))
        operation = simulation.history.invoke(f"{client.name}.{client.crashes}", "acquire", key, name)
        try:
            proof = await client.transact(_acquire, key, name, client.name, ttl_ms)
        except FastnessError as error:
            simulation.history.raised(operation, error)
            return
        simulation.history.ok(operation, proof.fence)
        proofs_of.setdefault(client.name, []).append(proof)

    async def run_client(client: Client) -> None:
        for step in range(12):
            name, key = f"{client.name}.{client.crashes}.{step}", client.random.choice(_KEYS)
            await acquire(client, key, f"{name}.acquire")
            proofs = proofs_of.get(client.name, [])
            for attempt in range(client.random.randrange(3) if proofs else 0):
                await client.pause(client.random.choice((10, 200, 900, 4_000)))
                # Usually the latest; sometimes one that is stale because of a crash or a long sleep.
                proof = proofs[-1] if client.random.random() < 0.6 else client.random.choice(proofs)
                tier = client.random.choice(_TIERS)
                kind, work = client.random.choice((("update", _update), ("update", _update), ("keepalive", _keepalive)))
                unique = f"{name}.{attempt}"
                await client.operate(kind, proof.key, [unique, tier], work, proof, unique, client.name, tier=tier)
            if proofs and client.random.random() < 0.3:
                proof, unique = proofs[-1], f"{name}.release"
                await client.operate(
                    "release", proof.key, [unique, Tier.CRITICAL], _release, proof, unique, client.name
                )

    async def unleased_writer(client: Client) -> None:
        """Writes without a lease, which is allowed while there is no holder, over the version that it read."""
        for step in range(15):
            key, name = client.random.choice(_KEYS), f"{client.name}.{client.crashes}.{step}"
            etag = await client.operate("read", key, None, _read_etag, key)
            await client.pause(client.random.choice((10, 700, 3_000)))
            await client.operate("unleased write", key, [name, Tier.CRITICAL], _write_unleased, key, name, etag)

    for number in range(4):
        simulation.add(f"holder-{number}", run_client)
    simulation.add("unleased-writer", unleased_writer)
    return lambda: _check_leases(simulation)


def entities(simulation: Simulation) -> Callable[[], None]:
    """Versions are compared and swapped, and an entity's history keeps what a CRITICAL operation returned."""

    async def writer(client: Client) -> None:
        for step in range(15):
            id, name = client.random.choice(_IDS), f"{client.name}.{client.crashes}.{step}"
            # At CRITICAL: a version that a power loss reverted is assigned again, to another state of the entity.
            seen = await client.operate("read", id, None, _read_entity, id)
            if seen is None:
                continue
            tier, chance = client.random.choice(_TIERS), client.random.random()
            if chance < 0.7:
                await client.operate("swap", id, [name, tier], _swap, id, name, seen, tier, tier=tier)
            elif chance < 0.85:
                await client.operate("put", id, [name, Tier.CRITICAL], _put, id, name, seen)
            else:
                await client.operate("delete", id, None, _delete, id, seen[0])

    async def reader(client: Client) -> None:
        for _ in range(25):
            id = client.random.choice(_IDS)
            await client.operate("read", id, None, _read_entity, id)
            await client.pause(client.random.randrange(300))

    for number in range(4):
        simulation.add(f"writer-{number}", writer)
    for number in range(2):
        simulation.add(f"reader-{number}", reader)
    return lambda: _check_entities(simulation)


# Checks.


def _check_leases(simulation: Simulation) -> None:
    check_all_fences(simulation.history)
    committed: set[str] = set()
    for key in _KEYS:
        events = simulation.database.read(_events, key)
        committed |= {event.name for event in events}
        _check_holders(key, events)
        state = simulation.database.read(states.get, "main", key)
        written = [event for event in events if event.version]
        if [event.version for event in written] != list(range(1, len(written) + 1)):
            raise Violation(f"Versions of {key!r} are {[event.version for event in written]}", [])
        last = cbor2.loads(state.value) if state is not None else None
        if last != ([written[-1].fence, written[-1].name] if written else None):
            raise Violation(f"State {key!r} holds {last}, which is not the last write", [])
    for operation in simulation.history.operations:
        if operation.kind != "read" and not (operation.kind == "release" and operation.result is False):
            _check_committed(operation, committed)


def _check_holders(key: str, events: list[_Event]) -> None:
    """Check that each committed operation was allowed: it came from the holder, or there was none."""
    highest, holder, until_ms = 0, "", 0
    for event in events:
        is_held = event.now_ms < until_ms
        if event.kind == "acquire":
            if event.fence <= highest:
                raise Violation(f"{event} did not increase the fence of {key!r}, which was {highest}", [])
            if is_held and event.owner != holder:
                raise Violation(f"{event} while {holder} held {key!r} until {until_ms}", [])
            highest, holder = event.fence, event.owner
        elif event.kind == "unleased write":
            if is_held:
                raise Violation(f"{event} wrote {key!r} while {holder} held it until {until_ms}", [])
            continue
        elif event.fence != highest or event.owner != holder or not is_held:
            raise Violation(f"{event} of {key!r}, where {holder} had fence {highest} until {until_ms}", [])
        if event.kind == "release":
            until_ms = 0
        elif event.kind != "update":
            if is_held and event.expires_ms < until_ms:
                raise Violation(f"{event} made the lease on {key!r} shorter; it lasted until {until_ms}", [])
            until_ms = event.expires_ms


def _check_entities(simulation: Simulation) -> None:
    names_of: dict[str, list[str | None]] = {}
    for id in _IDS:
        key = EntityKey("main", "task", id)
        entity = simulation.database.read(entity_layer.get, key)
        changes = simulation.database.read(entity_layer.history, key, after=0, limit=1_000)
        if [change.version for change in changes] != list(range(1, entity.version + 1)):
            raise Violation(f"Versions of {id} are {[change.version for change in changes]}, to {entity.version}", [])
        names_of[id], number = [None], 0
        fields: Fields = {}
        for change in changes:
            proofs_of = {field: value for field, value in fields.items() if field not in change.removed}
            fields = proofs_of | change.fields
            names_of[id].append(cbor2.loads(fields["name"]) if fields else None)
            expected, number = (number + 1, cbor2.loads(fields["n"])) if fields else (0, 0)
            if number != expected:
                raise Violation(f"Version {change.version} of {id} counts {number}, expected {expected}", [])
        if fields != entity.fields:
            raise Violation(f"The history of {id} leads to {fields}, but it has {entity.fields}", [])
    committed = {name for names in names_of.values() for name in names if name is not None}
    for operation in simulation.history.operations:
        if operation.kind in ("swap", "put"):
            _check_committed(operation, committed)
        is_durable_write = operation.kind == "put" or (
            operation.kind == "swap" and operation.argument[1] is Tier.CRITICAL
        )
        if operation.outcome is Outcome.OK and (is_durable_write or operation.kind == "read"):
            version = operation.result if is_durable_write else operation.result[0]
            name = operation.argument[0] if is_durable_write else operation.result[1]
            if names_of[str(operation.key)][version : version + 1] != [name]:
                raise Violation(f"Version {version} has changed since it was read", [operation])


def _check_committed(operation: Operation, committed: set[str]) -> None:
    name, tier = operation.argument if isinstance(operation.argument, list) else (operation.argument, Tier.CRITICAL)
    if operation.outcome is Outcome.OK and tier is Tier.CRITICAL and name not in committed:
        raise Violation(f"{name} was acknowledged and is lost", [operation])
    if operation.outcome is Outcome.FAILED and name in committed:
        raise Violation(f"{name} was refused and committed", [operation])


# Transaction functions.


def _log_event(tx: Transaction, key: str, event: _Event) -> None:
    tx.put(_SUBSPACE.key(key, tx.new_id()), msgspec.msgpack.encode(event))


def _events(tx: Transaction, key: str) -> list[_Event]:
    found = tx.scan(*_SUBSPACE.range(key), limit=10_000)
    return [msgspec.msgpack.decode(value, type=_Event) for _, value in found]


def _acquire(tx: Transaction, key: str, name: str, owner: str, ttl_ms: int) -> LeaseProof:
    grant = lease_layer.acquire(tx, LeaseKey("main", key), owner=owner, ttl_ms=ttl_ms)
    _log_event(tx, key, _Event("acquire", name, owner, grant.fence, tx.now_ms, grant.expires_ms))
    return LeaseProof(key, grant.lease_id, grant.fence)


def _keepalive(tx: Transaction, proof: LeaseProof, name: str, owner: str) -> int:
    expires_ms = lease_layer.keepalive(tx, proof, ttl_ms=500).expires_ms
    _log_event(tx, proof.key, _Event("keepalive", name, owner, proof.fence, tx.now_ms, expires_ms))
    return expires_ms


def _release(tx: Transaction, proof: LeaseProof, name: str, owner: str) -> bool:
    released = lease_layer.release(tx, proof)
    if released:
        _log_event(tx, proof.key, _Event("release", name, owner, proof.fence, tx.now_ms))
    return released


def _update(tx: Transaction, proof: LeaseProof, name: str, owner: str) -> int:
    value = canonical([proof.fence, name])
    version = states.update(tx, "main", proof.key, value, lease=proof).version
    _log_event(tx, proof.key, _Event("update", name, owner, proof.fence, tx.now_ms, version=version))
    return version


def _write_unleased(tx: Transaction, key: str, name: str, etag: str | None) -> int:
    value = canonical([0, name])
    version = states.update(tx, "main", key, value, if_match=etag, if_absent=etag is None).version
    _log_event(tx, key, _Event("unleased write", name, "", 0, tx.now_ms, version=version))
    return version


def _read_etag(tx: Transaction, key: str) -> str | None:
    state = states.get(tx, "main", key)
    return None if state is None else state.etag


def _read_entity(tx: Transaction, id: str) -> tuple[int, str | None, int]:
    """The version of an entity, the name of its last write, and its counter. A deletion resets the last two."""
    entity = entity_layer.get(tx, EntityKey("main", "task", id))
    if entity.deleted:
        return entity.version, None, 0
    return entity.version, cbor2.loads(entity.fields["name"]), cbor2.loads(entity.fields["n"])


def _swap(tx: Transaction, id: str, name: str, seen: Any, tier: Tier) -> int | None:
    """Increment the counter that was read, if the version is unchanged."""
    fields = {"name": canonical(name), "n": canonical(seen[2] + 1)}
    if tier is Tier.CRITICAL:
        fields["status"] = canonical(name)
    part = field_tiers.tiered_write(_POLICY, EntityKey("main", "task", id), fields)
    return field_tiers.write(tx, [part], [SeenEntity("task", id, seen[0])], "main", tier=part.tier)[0]


def _put(tx: Transaction, id: str, name: str, seen: Any) -> int:
    fields = {"name": canonical(name), "n": canonical(seen[2] + 1), "id": canonical(id)}
    part = field_tiers.tiered_write(_POLICY, EntityKey("main", "task", id), fields)
    return field_tiers.put(tx, part, _POLICY, expected_version=seen[0], tier=part.tier)


def _delete(tx: Transaction, id: str, version: int) -> int | None:
    return entity_layer.delete(tx, EntityKey("main", "task", id), expected_version=version)
