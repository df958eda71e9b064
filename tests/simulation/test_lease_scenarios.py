"""The simulator finds no violations in leases, states and entities, and finds deliberately broken ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fastness.errors import LeaseConflict, LeaseExpired
from fastness.kv import Subspace, Transaction
from fastness.layers import entities as entity_layer
from fastness.layers import leases as lease_layer
from fastness.layers import states
from fastness.layers.leases import Grant, LeaseKey
from fastness.testing import lease_scenarios
from fastness.testing.faults import FaultyDatabase
from fastness.testing.histories import Outcome, Violation
from fastness.testing.scenarios import Scenario, play
from fastness.testing.simulation import Client, Rates
from fastness.tiers import Tier
from fastness.wire.leases import LeaseProof
from tests.support.depth import Depth

SCENARIOS = {"leases": lease_scenarios.leases, "entities": lease_scenarios.entities}

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())


@every_scenario
def test_frequent_power_losses_find_no_violation(scenario: Scenario, depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(scenario, seed, rates=Rates(power=0.05, crash=0.01))


def test_the_scenarios_cover_every_kind_and_outcome() -> None:
    """A scenario without refusals, or without successes, proves nothing."""
    seen = {
        (operation.kind, operation.outcome)
        for scenario in SCENARIOS.values()
        for seed in range(20)
        for operation in play(scenario, seed).history.operations
    }
    for kind in ("acquire", "update", "keepalive", "unleased write", "swap", "put", "delete"):
        assert {(kind, outcome) for outcome in Outcome} <= seen, kind
    assert {("release", Outcome.OK), ("read", Outcome.OK)} <= seen


# Broken layers, which the simulator must detect.

real_acquire = lease_layer.acquire
real_check = lease_layer.check


def steals_held_leases(
    tx: Transaction, lease: LeaseKey, *, owner: str, ttl_ms: int, txn_id: str | None = None
) -> Grant:
    """Ignores that another owner's lease has not expired."""
    last = lease_layer.last_grant(tx, lease)
    if last is not None and last.owner != owner:
        tx.put(lease_layer.watch_prefix(lease), msgspec.msgpack.encode(msgspec.structs.replace(last, released=True)))
    return real_acquire(tx, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)


def keeps_the_fence_on_renewal(tx: Transaction, lease: LeaseKey, **options: Any) -> Grant:
    before, is_held = lease_layer.inspect(tx, lease)
    grant = real_acquire(tx, lease, **options)
    return msgspec.structs.replace(grant, fence=before.fence) if before is not None and is_held else grant


def restarts_fences(tx: Transaction, lease: LeaseKey, **options: Any) -> Grant:
    """Deletes the record of a lease that has ended, and with it the last fence."""
    last, is_held = lease_layer.inspect(tx, lease)
    if last is not None and not is_held:
        tx.delete(lease_layer.watch_prefix(lease))
    return real_acquire(tx, lease, **options)


def shortens_leases(tx: Transaction, proof: LeaseProof, *, ttl_ms: int) -> Grant:
    held = lease_layer.check(tx, proof)
    kept = msgspec.structs.replace(held, expires_ms=tx.now_ms + ttl_ms)
    tx.put(lease_layer.watch_prefix(LeaseKey(proof.universe, proof.key)), msgspec.msgpack.encode(kept))
    return kept


def skips_the_fence(tx: Transaction, proof: LeaseProof) -> Grant:
    last = lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))
    if last is None or last.lease_id != proof.lease_id:
        raise LeaseConflict("Another owner has it")
    if not last.holds_at(tx.now_ms):
        raise LeaseExpired("It has ended")
    return last


def skips_the_expiry(tx: Transaction, proof: LeaseProof) -> Grant:
    last = lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))
    if last is None or (last.lease_id, last.fence) != (proof.lease_id, proof.fence):
        raise LeaseConflict("Another owner has it")
    return last


def skips_everything(tx: Transaction, proof: LeaseProof) -> Grant | None:
    return lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))


def releases_leases_of_others(tx: Transaction, proof: LeaseProof) -> bool:
    last, is_held = lease_layer.inspect(tx, LeaseKey(proof.universe, proof.key))
    if last is None or not is_held:
        return False
    gone = msgspec.structs.replace(last, released=True)
    tx.put(lease_layer.watch_prefix(LeaseKey(proof.universe, proof.key)), msgspec.msgpack.encode(gone))
    return True


@pytest.mark.parametrize(
    ("function", "broken", "expected"),
    [
        ("acquire", steals_held_leases, "while holder"),
        ("acquire", keeps_the_fence_on_renewal, "Fence|did not increase"),
        ("acquire", restarts_fences, "Fence|did not increase"),
        ("keepalive", shortens_leases, "shorter"),
        ("check", skips_the_fence, "had fence"),
        ("check", skips_the_expiry, "had fence"),
        ("check", skips_everything, "had fence"),
        ("release", releases_leases_of_others, "had fence|while holder"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_broken_lease_is_found(
    function: str, broken: Callable[..., Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchecked fence lets two holders write."""
    monkeypatch.setattr(lease_layer, function, broken)
    with pytest.raises(Violation, match=expected) as caught:
        for seed in range(50):
            play(lease_scenarios.leases, seed)
    assert "seed" in caught.value.__notes__[0]


def test_a_state_that_is_writable_without_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "leases", SimpleNamespace(check=real_check, last_grant=lambda tx, lease: None))
    with pytest.raises(Violation, match=r"wrote '[xy]' while holder"):
        for seed in range(50):
            play(lease_scenarios.leases, seed)


def test_a_fence_returned_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence is durable before it is returned to its holder."""
    transact = Client.transact

    def hasty(self: Any, work: Any, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False) -> Any:
        tier = Tier.IMPORTANT if work is lease_scenarios._acquire else tier
        return transact(self, work, *args, tier=tier, may_lose=may_lose)

    monkeypatch.setattr(Client, "transact", hasty)
    with pytest.raises(Violation):
        for seed in range(50):
            play(lease_scenarios.leases, seed, rates=Rates(power=0.05))


def forgets_to_compare(
    tx: Transaction, key: entity_layer.EntityKey, expected: int, stamp: bytes = b""
) -> entity_layer.Entity:
    return entity_layer.get(tx, key)


def test_a_version_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking the version and then putting is not compare-and-swap."""
    monkeypatch.setattr(entity_layer, "require_version", forgets_to_compare)
    with pytest.raises(Violation, match="counts"):
        for seed in range(50):
            play(lease_scenarios.entities, seed)


def test_a_version_that_restarts_after_a_deletion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(tx: Transaction, key: entity_layer.EntityKey, *, expected_version: int) -> int:
        entity_layer.require_version(tx, key, expected_version)
        tx.delete(Subspace("u", key.universe, "entities", key.kind).key(key.id))
        return expected_version + 1

    monkeypatch.setattr(entity_layer, "delete", forgets)
    with pytest.raises(Violation):
        for seed in range(50):
            play(lease_scenarios.entities, seed)


def test_an_entity_returned_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer never contains data that a power loss could revert."""

    note_commit = FaultyDatabase._note_commit

    def hasty(self: FaultyDatabase, writes: Any, tier: Tier) -> int:
        commit = note_commit(self, writes, tier)
        return commit if writes.undo else 0  # Commits are synced, but readers do not wait for the sync.

    monkeypatch.setattr(FaultyDatabase, "_note_commit", hasty)
    with pytest.raises(Violation, match="has changed since it was read"):
        for seed in range(50):
            play(lease_scenarios.entities, seed, rates=Rates(power=0.05))
