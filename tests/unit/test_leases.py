"""Leases and states, as functions over a transaction, on every backend."""

from typing import Any

import pytest

from fastness.errors import (
    CasMismatch,
    FencingMismatch,
    LeaseConflict,
    LeaseExpired,
    LeaseHeld,
    LeaseRequired,
    TxnMismatch,
    ValueTooLarge,
)
from fastness.kv import Database, Transaction
from fastness.layers import leases, states
from fastness.layers.leases import Grant, LeaseKey
from fastness.limits import LOCK_LATE_MS_MAX, STATE_BYTES_MAX
from fastness.testing.clock import ManualClock
from fastness.wire.leases import LeaseProof

DEPLOY = LeaseKey("main", "deploy")


def acquire(database: Database, owner: str, ttl_ms: int = 1_000, **options: Any) -> Grant:
    return database.transact(leases.acquire, DEPLOY, owner=owner, ttl_ms=ttl_ms, **options)


def proof(grant: Grant, **changes: Any) -> LeaseProof:
    shown: dict[str, Any] = {
        "key": "deploy",
        "lease_id": grant.lease_id,
        "fence": grant.fence,
        "txn_id": grant.txn_id,
    } | changes
    return LeaseProof(**shown)


def test_a_lease_from_a_clock_that_was_ahead_ends_its_ttl_after_the_correction(
    database: Database, clock: ManualClock
) -> None:
    now_ms = clock.now_ms()
    clock.advance_ms(7_200_000)
    first = acquire(database, "ada", 30_000)
    clock.jump_to_ms(now_ms)
    with pytest.raises(LeaseHeld, match=r"another 30\.000 s"):
        acquire(database, "bob")
    [(_, listed)] = database.read(leases.page, "main", after="", limit=10)
    assert (listed.expires_ms, database.read(leases.inspect, DEPLOY)) == (now_ms + 30_000, (listed, True))
    assert database.read(leases.check, proof(first)).expires_ms == now_ms + 30_000  # Its holder keeps it until then.
    assert database.transact(leases.shorten, DEPLOY) is True
    assert database.transact(leases.shorten, DEPLOY) is False
    clock.advance_ms(29_999)
    with pytest.raises(LeaseHeld, match=r"another 0\.001 s"):
        acquire(database, "bob")
    clock.advance_ms(1)
    assert acquire(database, "bob").fence == first.fence + 1


def test_a_transaction_with_a_slightly_older_time_does_not_shorten_a_lease(
    database: Database, clock: ManualClock
) -> None:
    """On PostgreSQL it may get its lock after a later one has committed. The holder relies on what it was told."""
    first = acquire(database, "ada", 1_000)
    clock.jump_to_ms(clock.now_ms() - LOCK_LATE_MS_MAX)
    assert database.transact(leases.shorten, DEPLOY) is False
    with pytest.raises(LeaseHeld):
        acquire(database, "bob")
    assert database.read(leases.check, proof(first)).expires_ms == first.expires_ms
    clock.jump_to_ms(clock.now_ms() - 1)
    assert database.transact(leases.shorten, DEPLOY) is True


def test_a_renewal_after_the_clock_was_set_back_does_not_keep_the_old_end(
    database: Database, clock: ManualClock
) -> None:
    now_ms = clock.now_ms()
    clock.advance_ms(7_200_000)
    grant = acquire(database, "ada", 30_000)
    clock.jump_to_ms(now_ms)
    assert database.transact(leases.keepalive, proof(grant), ttl_ms=10_000).expires_ms == now_ms + 30_000
    assert acquire(database, "ada", 60_000).expires_ms == now_ms + 60_000


def test_a_free_lease_is_granted_until_it_expires(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada")
    assert (grant.owner, grant.fence, grant.expires_ms) == ("ada", 1, clock.now_ms() + 1_000)
    assert database.read(leases.inspect, DEPLOY) == (grant, True)


def test_an_expired_lease_is_granted_again_with_a_higher_fence(database: Database, clock: ManualClock) -> None:
    first = acquire(database, "ada")
    with pytest.raises(LeaseHeld, match="ada"):
        acquire(database, "bob")
    clock.advance_ms(1_000)
    second = acquire(database, "bob")
    assert second.fence > first.fence
    assert second.lease_id != first.lease_id


def test_a_held_lease_is_never_granted_to_another_owner(database: Database, clock: ManualClock) -> None:
    """Only its expiry or a release ends a lease."""
    acquire(database, "ada", ttl_ms=10_000)
    for _ in range(9):
        clock.advance_ms(1_111)
        with pytest.raises(LeaseHeld) as held:
            acquire(database, "bob")
        assert held.value.expires_ms > held.value.now_ms


def test_a_renewal_fences_off_older_copies_of_the_lease(database: Database) -> None:
    first = acquire(database, "ada")
    second = acquire(database, "ada")
    assert (second.lease_id, second.fence) == (first.lease_id, first.fence + 1)
    database.transact(leases.check, proof(second))
    with pytest.raises(FencingMismatch, match="2"):
        database.transact(leases.check, proof(first))


def test_a_renewal_never_shortens(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada", ttl_ms=60_000)
    assert database.transact(leases.keepalive, proof(grant), ttl_ms=10).expires_ms == grant.expires_ms
    assert acquire(database, "ada", ttl_ms=10).expires_ms == grant.expires_ms
    clock.advance_ms(59_000)
    renewed = database.transact(leases.keepalive, proof(grant, fence=2), ttl_ms=5_000)
    assert renewed.expires_ms == clock.now_ms() + 5_000


def test_a_proof_is_checked_in_order_id_then_expiry_then_fence_then_transaction(
    database: Database, clock: ManualClock
) -> None:
    grant = acquire(database, "ada", txn_id="t-1")
    wrong = {"lease_id": "0" * 32, "fence": 99, "txn_id": "t-2"}
    for error in (LeaseConflict, FencingMismatch, TxnMismatch):
        with pytest.raises(error):
            database.transact(leases.check, proof(grant, **wrong))
        wrong.pop(next(iter(wrong)))
    database.transact(leases.check, proof(grant))
    clock.advance_ms(1_000)
    with pytest.raises(LeaseExpired):
        database.transact(leases.check, proof(grant, fence=99))


def test_a_released_lease_is_free_at_once_and_its_fence_keeps_growing(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada")
    assert database.transact(leases.release, proof(grant))
    assert not database.transact(leases.release, proof(grant))
    with pytest.raises(LeaseExpired):
        database.transact(leases.check, proof(grant))
    assert acquire(database, "bob").fence == grant.fence + 1


def test_setting_the_clock_back_does_not_revive_a_released_lease(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada", ttl_ms=60_000)
    clock.advance_ms(10_000)
    database.transact(leases.release, proof(grant))
    clock.jump_to_ms(clock.now_ms() - 9_000)
    assert acquire(database, "bob").owner == "bob"


def test_a_former_holder_cannot_release_the_next_holders_lease(database: Database, clock: ManualClock) -> None:
    first = acquire(database, "ada")
    clock.advance_ms(1_000)
    second = acquire(database, "bob")
    assert not database.transact(leases.release, proof(first))
    database.transact(leases.check, proof(second))


def test_a_broken_lease_passes_on_and_its_holder_is_fenced_off(database: Database, clock: ManualClock) -> None:
    first = acquire(database, "ada", 60_000)
    with pytest.raises(LeaseConflict, match="has the fence 1 and the owner ada"):
        database.transact(leases.break_lease, DEPLOY, fence=2)
    database.transact(leases.check, proof(first))
    assert database.transact(leases.break_lease, DEPLOY, fence=1)
    with pytest.raises(LeaseExpired):
        database.transact(leases.keepalive, proof(first), ttl_ms=1_000)
    assert not database.transact(leases.break_lease, DEPLOY, fence=1)
    second = acquire(database, "bob")
    assert second.fence == 2
    with pytest.raises(LeaseConflict):
        database.transact(leases.break_lease, DEPLOY, fence=1)  # What an operator has seen is not bob's lease.
    database.transact(leases.check, proof(second))
    clock.advance_ms(1_000)
    assert not database.transact(leases.break_lease, DEPLOY, fence=2)
    with pytest.raises(LeaseConflict, match="was never granted"):
        database.transact(leases.break_lease, LeaseKey("main", "other"), fence=1)


def test_an_expired_lease_cannot_be_kept_alive(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada")
    clock.advance_ms(1_000)
    with pytest.raises(LeaseExpired, match="acquire it again"):
        database.transact(leases.keepalive, proof(grant), ttl_ms=1_000)


def test_a_fence_guards_all_writes_of_its_transaction(database: Database, clock: ManualClock) -> None:
    """Without a fence that is checked on writes, two holders could write."""
    stale = acquire(database, "ada")
    clock.advance_ms(1_000)
    fresh = acquire(database, "bob")

    def work(tx: Transaction, grant: Grant) -> None:
        tx.put(b"released by", grant.owner.encode())
        leases.check(tx, proof(grant))

    database.transact(work, fresh)
    with pytest.raises(LeaseConflict):
        database.transact(work, stale)
    assert database.read(lambda tx: tx.get(b"released by")) == b"bob"


def test_leases_are_listed_a_page_at_a_time(database: Database) -> None:
    for key in ("a/1", "a/2", "b"):
        database.transact(leases.acquire, LeaseKey("main", key), owner="ada", ttl_ms=1_000)
    database.transact(leases.acquire, LeaseKey("other", "c"), owner="ada", ttl_ms=1_000)
    first = database.read(leases.page, "main", after="", limit=2)
    assert [key for key, _ in first] == ["a/1", "a/2"]
    assert [key for key, _ in database.read(leases.page, "main", after="a/2", limit=2)] == ["b"]


def update(database: Database, value: bytes, **options: Any) -> states.State:
    return database.transact(states.update, "main", "deploy", value, **options)


def test_a_state_is_replaced_with_its_current_etag(database: Database) -> None:
    first = update(database, b"1", if_absent=True)
    second = update(database, b"2", if_match=first.etag)
    assert (first.version, second.version) == (1, 2)
    with pytest.raises(CasMismatch) as mismatch:
        update(database, b"3", if_match=first.etag)
    assert mismatch.value.current_etag == second.etag
    with pytest.raises(CasMismatch):
        update(database, b"3", if_absent=True)
    assert database.read(states.get, "main", "deploy").value == b"2"


def test_an_etag_is_never_reused(database: Database) -> None:
    first = update(database, b"same")
    assert database.transact(states.remove, "main", "deploy", if_match=first.etag)
    assert not database.transact(states.remove, "main", "deploy")
    second = update(database, b"same")
    assert second.etag != first.etag
    with pytest.raises(CasMismatch):
        update(database, b"x", if_match=first.etag)


def test_a_star_matches_any_existing_version(database: Database) -> None:
    with pytest.raises(CasMismatch) as mismatch:
        update(database, b"1", if_match="*")
    assert mismatch.value.current_etag is None
    update(database, b"1")
    update(database, b"2", if_match="*")


def test_only_the_lease_holder_changes_a_state(database: Database, clock: ManualClock) -> None:
    grant = acquire(database, "ada")
    with pytest.raises(LeaseRequired, match="ada"):
        update(database, b"1")
    other = database.transact(leases.acquire, LeaseKey("main", "other"), owner="bob", ttl_ms=5_000)
    with pytest.raises(LeaseRequired):
        update(database, b"1", lease=proof(other, key="other"))
    update(database, b"1", lease=proof(grant))
    with pytest.raises(LeaseRequired):
        database.transact(states.remove, "main", "deploy")
    clock.advance_ms(1_000)
    with pytest.raises(LeaseExpired):
        update(database, b"2", lease=proof(grant))
    update(database, b"3")
    update(database, b"4", lease=proof(other, key="other"))


def test_a_state_keeps_its_correlation_id(database: Database) -> None:
    update(database, b"1", correlation_id="trace-7")
    assert update(database, b"2").correlation_id == "trace-7"
    assert update(database, b"3", correlation_id="trace-8").correlation_id == "trace-8"


def test_a_state_that_is_too_large_is_refused(database: Database) -> None:
    update(database, b"x" * STATE_BYTES_MAX)
    with pytest.raises(ValueTooLarge, match="blob"):
        update(database, b"x" * (STATE_BYTES_MAX + 1))
