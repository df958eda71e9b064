"""The simulator finds nothing wrong with leases, states and entities, and finds what was broken in them on purpose."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.errors import LeaseConflict, LeaseExpired
from holdfast.kv import Subspace, Transaction
from holdfast.layers import entities as entity_layer
from holdfast.layers import leases as lease_layer
from holdfast.layers import states
from holdfast.layers.leases import Grant, LeaseKey
from holdfast.testing import lease_scenarios
from holdfast.testing.faults import FaultyDatabase
from holdfast.testing.histories import Outcome, Violation
from holdfast.testing.scenarios import Scenario, play
from holdfast.testing.simulation import Rates
from holdfast.tiers import Tier
from holdfast.wire.leases import LeaseProof

SCENARIOS = {"leases": lease_scenarios.leases, "entities": lease_scenarios.entities}

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())


@every_scenario
def test_power_that_fails_often_finds_no_violation(scenario: Scenario) -> None:
    for seed in range(50, 70):
        play(scenario, seed, rates=Rates(power=0.05, crash=0.01))


def test_the_scenarios_come_to_everything_that_they_are_about() -> None:
    """A scenario in which nobody is ever refused, or ever succeeds, proves nothing."""
    seen = {
        (operation.kind, operation.outcome)
        for scenario in SCENARIOS.values()
        for seed in range(20)
        for operation in play(scenario, seed).history.operations
    }
    for kind in ("acquire", "update", "keepalive", "pass by", "swap", "put", "delete"):
        assert {(kind, outcome) for outcome in Outcome} <= seen, kind
    assert {("release", Outcome.OK), ("look", Outcome.OK)} <= seen


# Layers with a fault. A simulator that does not find these proves nothing.

real_acquire = lease_layer.acquire
real_check = lease_layer.check


def robs(tx: Transaction, lease: LeaseKey, *, owner: str, ttl_ms: int, txn_id: str | None = None) -> Grant:
    """Ignores that the lease of another has not expired."""
    last = lease_layer.last_grant(tx, lease)
    if last is not None and last.owner != owner:
        tx.put(lease_layer.record_prefix(lease), msgspec.msgpack.encode(msgspec.structs.replace(last, released=True)))
    return real_acquire(tx, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)


def grows_no_fence_on_renewal(tx: Transaction, lease: LeaseKey, **options: Any) -> Grant:
    before, is_held = lease_layer.look(tx, lease)
    grant = real_acquire(tx, lease, **options)
    return msgspec.structs.replace(grant, fence=before.fence) if before is not None and is_held else grant


def starts_fences_anew(tx: Transaction, lease: LeaseKey, **options: Any) -> Grant:
    """Forgets a lease that has ended, as one that deletes the record of it would."""
    last, is_held = lease_layer.look(tx, lease)
    if last is not None and not is_held:
        tx.delete(lease_layer.record_prefix(lease))
    return real_acquire(tx, lease, **options)


def shortens(tx: Transaction, proof: LeaseProof, *, ttl_ms: int) -> Grant:
    held = lease_layer.check(tx, proof)
    kept = msgspec.structs.replace(held, expires_ms=tx.now_ms + ttl_ms)
    tx.put(lease_layer.record_prefix(LeaseKey(proof.universe, proof.key)), msgspec.msgpack.encode(kept))
    return kept


def skips_the_fence(tx: Transaction, proof: LeaseProof) -> Grant:
    last = lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))
    if last is None or last.lease_id != proof.lease_id:
        raise LeaseConflict("It is somebody else's")
    if not last.holds_at(tx.now_ms):
        raise LeaseExpired("It has ended")
    return last


def skips_the_expiry(tx: Transaction, proof: LeaseProof) -> Grant:
    last = lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))
    if last is None or (last.lease_id, last.fence) != (proof.lease_id, proof.fence):
        raise LeaseConflict("It is somebody else's")
    return last


def skips_everything(tx: Transaction, proof: LeaseProof) -> Grant | None:
    return lease_layer.last_grant(tx, LeaseKey(proof.universe, proof.key))


def releases_anybodys(tx: Transaction, proof: LeaseProof) -> bool:
    last, is_held = lease_layer.look(tx, LeaseKey(proof.universe, proof.key))
    if last is None or not is_held:
        return False
    gone = msgspec.structs.replace(last, released=True)
    tx.put(lease_layer.record_prefix(LeaseKey(proof.universe, proof.key)), msgspec.msgpack.encode(gone))
    return True


@pytest.mark.parametrize(
    ("function", "broken", "says"),
    [
        ("acquire", robs, "while holder"),
        ("acquire", grows_no_fence_on_renewal, "Fence|did not grow"),
        ("acquire", starts_fences_anew, "Fence|did not grow"),
        ("keepalive", shortens, "shorter"),
        ("check", skips_the_fence, "had fence"),
        ("check", skips_the_expiry, "had fence"),
        ("check", skips_everything, "had fence"),
        ("release", releases_anybodys, "had fence|while holder"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_broken_lease_is_found(
    function: str, broken: Callable[..., Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 30: a fence that nobody checks lets two holders write."""
    monkeypatch.setattr(lease_layer, function, broken)
    with pytest.raises(Violation, match=says) as caught:
        for seed in range(50):
            play(lease_scenarios.leases, seed)
    assert "seed" in caught.value.__notes__[0]


def test_a_state_that_anybody_may_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "leases", SimpleNamespace(check=real_check, last_grant=lambda tx, lease: None))
    with pytest.raises(Violation, match=r"wrote '[xy]' while holder"):
        for seed in range(50):
            play(lease_scenarios.leases, seed)


def test_a_fence_that_was_handed_out_before_it_was_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN section 1: a fence is durable before its holder hears of it."""
    transact = lease_scenarios.Client.transact

    def hasty(self: Any, work: Any, *args: Any, tier: Tier = Tier.CRITICAL) -> Any:
        return transact(self, work, *args, tier=Tier.IMPORTANT if work is lease_scenarios._acquire else tier)

    monkeypatch.setattr(lease_scenarios.Client, "transact", hasty)
    with pytest.raises(Violation):
        for seed in range(50):
            play(lease_scenarios.leases, seed, rates=Rates(power=0.05))


def forgets_to_compare(
    tx: Transaction, key: entity_layer.EntityKey, expected: int, stamp: bytes = b""
) -> entity_layer.Entity:
    return entity_layer.get(tx, key)


def test_a_version_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 17: "check the version, then put" is not compare-and-swap."""
    monkeypatch.setattr(entity_layer, "require_version", forgets_to_compare)
    with pytest.raises(Violation, match="counts"):
        for seed in range(50):
            play(lease_scenarios.entities, seed)


def test_a_version_that_starts_anew_after_a_deletion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(tx: Transaction, key: entity_layer.EntityKey, *, expected_version: int) -> int:
        entity_layer.require_version(tx, key, expected_version)
        tx.delete(Subspace("u", key.universe, "entities", key.kind).key(key.id))
        return expected_version + 1

    monkeypatch.setattr(entity_layer, "delete", forgets)
    with pytest.raises(Violation):
        for seed in range(50):
            play(lease_scenarios.entities, seed)


def test_an_entity_that_is_shown_before_it_is_safe_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN section 1: an answer never reveals what a power loss could take back."""

    def committed(self: FaultyDatabase, result: Any, undo: Any, tier: Tier) -> Any:
        if undo:
            self._unsynced.append(undo)
        if undo and tier is Tier.CRITICAL:
            self._unsynced.clear()  # Commits are synced, and readers do not wait for it.
        return result

    monkeypatch.setattr(FaultyDatabase, "_committed", committed)
    with pytest.raises(Violation, match="no more what it was"):
        for seed in range(50):
            play(lease_scenarios.entities, seed, rates=Rates(power=0.05))
