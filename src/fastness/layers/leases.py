"""Leases: exclusive, time-limited ownership of a key, with fencing.

    (u, universe, "leases", key)  ->  the last grant

    free ── acquire ──► held ── keepalive ──► held
      ▲                  │
      └ release, expiry ─┘

Every acquire grants a higher fence. The record stays after the lease ends, so that fences never repeat.
A lease never lasts longer than it was granted for. If its remaining time exceeds that, the clock has been set back
since, and it ends its TTL from now. `shorten` stores that; until then, each reader computes it from its own time.
Writes under a lease happen in a transaction that calls `check`. It refuses a holder whose lease expired or was acquired
by another owner, even if the holder has not noticed.
"""

from typing import NamedTuple

import msgspec

from fastness.errors import FencingMismatch, LeaseConflict, LeaseExpired, LeaseHeld, TxnMismatch
from fastness.kv import Event, Subspace, Transaction, fence_floor
from fastness.layers.idempotency import KeyedCall, delete_result, read_result, store_result, stored_result
from fastness.limits import LOCK_LATE_MS_MAX
from fastness.wire.leases import Granted, LeaseProof


class LeaseKey(NamedTuple):
    """Identifies a lease."""

    universe: str
    key: str


class LeaseEvent(Event, frozen=True, gc=False):
    """The outcome of a request for a lease that another owner held. Immediate grants have none."""

    event: str  # granted, refused, or gone (the caller stopped waiting)
    lease: LeaseKey
    owner: str
    waited_ms: int
    at_ms: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The latest grant of a key."""

    lease_id: str
    owner: str
    fence: int
    acquired_ms: int
    expires_ms: int
    ttl_ms: int  # How long its last acquire or renewal granted it.
    txn_id: str | None = None
    released: bool = False  # Explicit: a clock that is set back must not revive a released lease.

    def bounded(self, now_ms: int) -> "Grant":
        """The grant, ending at most its TTL from now, if the clock was set back.

        The time of a transaction on PostgreSQL may be a little older than that of a grant it reads.
        """
        if self.released or self.expires_ms - now_ms - LOCK_LATE_MS_MAX <= self.ttl_ms:
            return self
        return msgspec.structs.replace(self, expires_ms=now_ms + self.ttl_ms)

    def holds_at(self, now_ms: int) -> bool:
        return not self.released and now_ms < self.expires_ms


class _KeyedGrant(msgspec.Struct, frozen=True, array_like=True):
    """The grant that is stored under an idempotency key."""

    lease_id: str
    fence: int
    retried: bool = False  # The call was repeated, so its caller has the lease.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grant).decode
_decode_keyed = msgspec.msgpack.Decoder(_KeyedGrant).decode


def acquire(
    tx: Transaction, lease: LeaseKey, *, owner: str, ttl_ms: int, txn_id: str | None = None, last_fence: int = 0
) -> Grant:
    """Grant the lease to `owner` for at least `ttl_ms`, with a higher fence than ever before.

    Acquiring a lease that `owner` already holds renews it; older copies of it are fenced off. If the record of the key
    may have been deleted, `last_fence` is one that is as high as its last fence.

    Raises:
        LeaseHeld: another owner's lease has not expired.
    """
    last, now_ms = last_grant(tx, lease), tx.now_ms
    fence = fence_floor.next_fence(tx, last_fence, 0 if last is None else last.fence)
    if last is None or not last.holds_at(now_ms):
        grant = Grant(tx.new_id().hex, owner, fence, now_ms, now_ms + ttl_ms, ttl_ms, txn_id)
        return _write(tx, lease, grant)
    if last.owner != owner:
        raise LeaseHeld(lease.key, owner=last.owner, expires_ms=last.expires_ms, now_ms=now_ms)
    # A renewal never shortens the lease: others may rely on the expiry they have read.
    expires_ms = max(now_ms + ttl_ms, last.expires_ms)
    ttl_ms = expires_ms - now_ms
    grant = Grant(last.lease_id, owner, fence, last.acquired_ms, expires_ms, ttl_ms, txn_id)
    return _write(tx, lease, grant)


def shorten(tx: Transaction, lease: LeaseKey) -> bool:
    """Store the end of a lease that was granted before the clock was set back; whether it was one.

    Otherwise it would be held for its TTL again, however often it is looked at.
    """
    stored = tx.get(_record(lease))
    if stored is None:
        return False
    last = _decode(stored)
    bounded = last.bounded(tx.now_ms)
    if bounded is last:
        return False
    _write(tx, lease, bounded)
    return True


def acquire_keyed(
    tx: Transaction, lease: LeaseKey, call: KeyedCall, *, owner: str, ttl_ms: int, txn_id: str | None = None
) -> tuple[Grant, bool]:
    """`acquire`, or the grant of an earlier attempt of the call; and whether it is a new one.

    Raises:
        LeaseHeld: another owner's lease has not expired.
        LeaseExpired: the grant of the earlier attempt has ended.
    """
    before = stored_grant(tx, lease, call)
    if before is not None:
        return before, False
    grant = acquire(tx, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
    store_result(tx, call, _KeyedGrant(grant.lease_id, grant.fence))
    return grant, True


def stored_grant(tx: Transaction, lease: LeaseKey, call: KeyedCall) -> Grant | None:
    """The grant of an earlier attempt of the call; None if there was none.

    Raises:
        LeaseExpired: that grant has ended.
    """
    before = stored_result(tx, call)
    if before is None:
        return None
    keyed, last = _decode_keyed(before), last_grant(tx, lease)
    if last is None or (last.lease_id, last.fence) != (keyed.lease_id, keyed.fence) or not last.holds_at(tx.now_ms):
        raise LeaseExpired(f"The lease on {lease.key} was granted to this call and has ended since; acquire it again")
    if not keyed.retried:
        store_result(tx, call, msgspec.structs.replace(keyed, retried=True))
    return last


def release_undelivered(tx: Transaction, proof: LeaseProof, call: KeyedCall) -> bool:
    """`release` a lease whose caller disconnected before the response, and forget its call.

    Does nothing if the caller repeated the call on another connection, because it has the lease then.
    """
    before = read_result(tx, call)
    if before is None or _decode_keyed(before).retried:
        return False
    delete_result(tx, call)
    return release(tx, proof)


def check(tx: Transaction, proof: LeaseProof) -> Grant:
    """The grant of a proof, if it is valid now.

    Raises:
        LeaseConflict: another owner acquired the lease.
        LeaseExpired: the lease expired or was released.
        FencingMismatch: the same owner acquired it again.
        TxnMismatch: it belongs to another transaction.
    """
    last = last_grant(tx, _key_of(proof))
    if last is None or last.lease_id != proof.lease_id:
        raise LeaseConflict(f"{proof.key} was acquired by another owner; stop, acquire it again, then read its state")
    if not last.holds_at(tx.now_ms):
        raise LeaseExpired(f"The lease on {proof.key} has ended; stop, acquire it again, then read its state")
    if last.fence != proof.fence:
        raise FencingMismatch(
            f"The fence of {proof.key} is {last.fence}, not {proof.fence}; its owner acquired it again elsewhere"
        )
    if last.txn_id is not None and last.txn_id != proof.txn_id:
        raise TxnMismatch(f"The lease on {proof.key} belongs to transaction {last.txn_id}; pass that txn_id")
    return last


def keepalive(tx: Transaction, proof: LeaseProof, *, ttl_ms: int) -> Grant:
    """Extend the lease to at least `ttl_ms` from now.

    Raises:
        Fenced: as `check`.
    """
    held = check(tx, proof)
    return _write(tx, _key_of(proof), _extended(held, tx.now_ms + ttl_ms, tx.now_ms))


def release(tx: Transaction, proof: LeaseProof) -> bool:
    """Release the lease; whether it was held until now. Releasing a lost lease changes nothing."""
    last = last_grant(tx, _key_of(proof))
    if last is None or (last.lease_id, last.fence) != (proof.lease_id, proof.fence) or not last.holds_at(tx.now_ms):
        return False
    _write(tx, _key_of(proof), msgspec.structs.replace(last, released=True))
    return True


def break_lease(tx: Transaction, lease: LeaseKey, *, fence: int) -> bool:
    """Release the lease of any owner, if it still has this fence; whether it was held until now.

    Raises:
        LeaseConflict: it was granted again since, with a higher fence.
    """
    last = last_grant(tx, lease)
    if last is None or last.fence != fence:
        found = "was never granted" if last is None else f"has the fence {last.fence} and the owner {last.owner}"
        raise LeaseConflict(f"The lease on {lease.key} {found}, so the fence {fence} ends nothing; look at it again")
    if not last.holds_at(tx.now_ms):
        return False
    force_release(tx, lease)
    return True


def force_release(tx: Transaction, lease: LeaseKey) -> None:
    """Release the lease of any owner, because what it guards has a new owner."""
    last = last_grant(tx, lease)
    if last is not None and not last.released:
        _write(tx, lease, msgspec.structs.replace(last, released=True))


def delete(tx: Transaction, lease: LeaseKey) -> None:
    """Remove the record of a lease. If its key is used again, `acquire` needs a `last_fence`."""
    tx.delete(_record(lease))


def extend(tx: Transaction, lease: LeaseKey, *, until_ms: int) -> None:
    """Extend the lease, if it is held, to at least `until_ms`."""
    last = last_grant(tx, lease)
    if last is not None and last.holds_at(tx.now_ms):
        _write(tx, lease, _extended(last, until_ms, tx.now_ms))


def _extended(grant: Grant, until_ms: int, now_ms: int) -> Grant:
    expires_ms = max(until_ms, grant.expires_ms)
    return msgspec.structs.replace(grant, expires_ms=expires_ms, ttl_ms=expires_ms - now_ms)


def last_grant(tx: Transaction, lease: LeaseKey) -> Grant | None:
    """The latest grant of a key, still held or not; None if it was never acquired."""
    stored = tx.get(_record(lease))
    return None if stored is None else _decode(stored).bounded(tx.now_ms)


def inspect(tx: Transaction, lease: LeaseKey) -> tuple[Grant | None, bool]:
    """The latest grant of a key, and whether it is still held."""
    last = last_grant(tx, lease)
    return last, last is not None and last.holds_at(tx.now_ms)


def page(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, Grant]]:
    """The latest grants of at most `limit` keys after `after`, in order."""
    subspace = Subspace("u", universe, "leases")
    begin, end = subspace.range()
    pairs = tx.scan(subspace.key(after) + b"\x00" if after else begin, end, limit=limit)
    return [(subspace.unpack(key)[0], _decode(value).bounded(tx.now_ms)) for key, value in pairs]


def wire_grant(key: str, grant: Grant) -> Granted:
    """The wire form of a grant."""
    return Granted(key, grant.lease_id, grant.owner, grant.fence, grant.acquired_ms, grant.expires_ms, grant.txn_id)


def _write(tx: Transaction, lease: LeaseKey, grant: Grant) -> Grant:
    tx.put(_record(lease), _encode(grant))
    return grant


def _record(lease: LeaseKey) -> bytes:
    return Subspace("u", lease.universe, "leases").key(lease.key)


def watch_prefix(lease: LeaseKey) -> bytes:
    """The key prefix to watch for changes of a lease."""
    return _record(lease)


def _key_of(proof: LeaseProof) -> LeaseKey:
    return LeaseKey(proof.universe, proof.key)
