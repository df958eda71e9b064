"""Leases: who may write, until when, and how everybody else can tell.

    (u, universe, "leases", key)  ->  the last grant

    free ── acquire ──► held ── keepalive ──► held
      ▲                  │
      └ release, expiry ─┘

Every acquire grows the fence of its key, so the record stays when the lease is gone: the next fence goes on from there.
Whatever is written under a lease is written in a transaction that calls `check`. A holder that slept past its expiry,
or whose lease somebody acquired since, is refused there, whatever it believes.
"""

from typing import Final, NamedTuple

import msgspec

from holdfast.errors import FencingMismatch, InvalidArgument, LeaseConflict, LeaseExpired, LeaseHeld, TxnMismatch
from holdfast.kv import Subspace, Transaction
from holdfast.layers.idempotency import KeyedCall, forget_one, recall, recall_any, remember
from holdfast.limits import NAMES_KNOWN_MAX, OWNER_BYTES_MAX, READ_ENTRIES_MAX
from holdfast.wire.leases import Granted, LeaseProof

LEASE_EVENTS: Final = "lease."  # What the names of events of leases begin with, among those of queues and mail.


class LeaseKey(NamedTuple):
    """What a lease is on."""

    universe: str
    key: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The last time that a key was given to somebody."""

    lease_id: str
    owner: str
    fence: int
    acquired_ms: int
    expires_ms: int
    txn_id: str | None = None
    released: bool = False  # Said outright: a clock that is set back must not bring a lease back to life.

    def holds_at(self, now_ms: int) -> bool:
        return not self.released and now_ms < self.expires_ms


class _Taken(msgspec.Struct, frozen=True, array_like=True):
    """What was granted under a key."""

    lease_id: str
    fence: int
    asked_again: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grant).decode
_decode_taken = msgspec.msgpack.Decoder(_Taken).decode
_known_owners: set[object] = set()  # Those that were found to be short texts.


def acquire(tx: Transaction, lease: LeaseKey, *, owner: str, ttl_ms: int, txn_id: str | None = None) -> Grant:
    """Grant the lease to `owner` for at least `ttl_ms`, with a fence higher than every one before.

    Acquiring a lease that one already holds renews it; older copies of it are fenced off.

    Raises:
        LeaseHeld: somebody else's lease has not expired.
    """
    check_owner(owner, txn_id)
    last, now_ms = last_grant(tx, lease), tx.now_ms
    if last is None or not last.holds_at(now_ms):
        fence = 1 if last is None else last.fence + 1
        return _write(tx, lease, Grant(tx.new_id().hex, owner, fence, now_ms, now_ms + ttl_ms, txn_id))
    if last.owner != owner:
        raise LeaseHeld(lease.key, owner=last.owner, expires_ms=last.expires_ms, now_ms=now_ms)
    # A renewal never shortens: whoever looked at the lease before may have promised somebody to wait that long.
    expires_ms = max(now_ms + ttl_ms, last.expires_ms)
    return _write(tx, lease, Grant(last.lease_id, owner, last.fence + 1, last.acquired_ms, expires_ms, txn_id))


def acquire_once(
    tx: Transaction, lease: LeaseKey, call: KeyedCall, *, owner: str, ttl_ms: int, txn_id: str | None = None
) -> tuple[Grant, bool]:
    """`acquire`, or the grant that the same call had before; and whether it is a new one.

    Raises:
        LeaseHeld: somebody else's lease has not expired.
        LeaseExpired: the call had a grant, and that has ended since.
    """
    before = granted_before(tx, lease, call)
    if before is not None:
        return before, False
    grant = acquire(tx, lease, owner=owner, ttl_ms=ttl_ms, txn_id=txn_id)
    remember(tx, call, _Taken(grant.lease_id, grant.fence))
    return grant, True


def granted_before(tx: Transaction, lease: LeaseKey, call: KeyedCall) -> Grant | None:
    """What a call was granted before, as it is now; None if it was not.

    Raises:
        LeaseExpired: it was, and that has ended since.
    """
    before = recall(tx, call)
    if before is None:
        return None
    taken, last = _decode_taken(before), last_grant(tx, lease)
    if last is None or (last.lease_id, last.fence) != (taken.lease_id, taken.fence) or not last.holds_at(tx.now_ms):
        raise LeaseExpired(f"The lease on {lease.key} was granted to this very call, and has ended since; acquire anew")
    if not taken.asked_again:
        remember(tx, call, msgspec.structs.replace(taken, asked_again=True))
    return last


def release_once(tx: Transaction, proof: LeaseProof, call: KeyedCall) -> bool:
    """`release` what was granted to a caller that is gone, as if its call had never been; unless it has asked again,
    on another connection, and has the lease now."""
    before = recall_any(tx, call)
    if before is None or _decode_taken(before).asked_again:
        return False
    forget_one(tx, call)
    return release(tx, proof)


def check(tx: Transaction, proof: LeaseProof) -> Grant:
    """The grant behind a proof that entitles to write now.

    Raises:
        LeaseConflict: another lease has taken its place.
        LeaseExpired: it ran out, or was released.
        FencingMismatch: it was acquired again since.
        TxnMismatch: it belongs to another transaction.
    """
    last = last_grant(tx, _key_of(proof))
    if last is None or last.lease_id != proof.lease_id:
        raise LeaseConflict(f"{proof.key} was acquired by somebody else since; stop, acquire it again, then look")
    if not last.holds_at(tx.now_ms):
        raise LeaseExpired(f"The lease on {proof.key} has ended; stop, acquire it again, then look")
    if last.fence != proof.fence:
        raise FencingMismatch(
            f"The fence of {proof.key} is {last.fence}, not {proof.fence}; its owner acquired it again elsewhere"
        )
    if last.txn_id is not None and last.txn_id != proof.txn_id:
        raise TxnMismatch(f"The lease on {proof.key} belongs to transaction {last.txn_id}; name that one")
    return last


def keepalive(tx: Transaction, proof: LeaseProof, *, ttl_ms: int) -> Grant:
    """Let the lease last at least `ttl_ms` from now.

    Raises:
        Fenced: as `check`.
    """
    held = check(tx, proof)
    expires_ms = max(tx.now_ms + ttl_ms, held.expires_ms)
    return _write(tx, _key_of(proof), msgspec.structs.replace(held, expires_ms=expires_ms))


def release(tx: Transaction, proof: LeaseProof) -> bool:
    """Give the lease back; whether it was held until now. Giving back what one has lost changes nothing."""
    last = last_grant(tx, _key_of(proof))
    if last is None or (last.lease_id, last.fence) != (proof.lease_id, proof.fence) or not last.holds_at(tx.now_ms):
        return False
    _write(tx, _key_of(proof), msgspec.structs.replace(last, released=True))
    return True


def end(tx: Transaction, lease: LeaseKey) -> None:
    """End whoever's lease it is: what it guards has changed hands by another way."""
    last = last_grant(tx, lease)
    if last is not None and not last.released:
        _write(tx, lease, msgspec.structs.replace(last, released=True))


def forget(tx: Transaction, lease: LeaseKey) -> None:
    """Remove every trace of a lease whose key never comes back: a fence that started again would be an old one."""
    tx.delete(_record(lease))


def prolong(tx: Transaction, lease: LeaseKey, *, until_ms: int) -> None:
    """Let whoever holds the lease hold it until then at least."""
    last = last_grant(tx, lease)
    if last is not None and last.holds_at(tx.now_ms):
        _write(tx, lease, msgspec.structs.replace(last, expires_ms=max(until_ms, last.expires_ms)))


def last_grant(tx: Transaction, lease: LeaseKey) -> Grant | None:
    """The last grant of a key, whether it still holds or not; None if nobody ever had it."""
    stored = tx.get(_record(lease))
    return None if stored is None else _decode(stored)


def look(tx: Transaction, lease: LeaseKey) -> tuple[Grant | None, bool]:
    """The last grant of a key, and whether it still holds."""
    last = last_grant(tx, lease)
    return last, last is not None and last.holds_at(tx.now_ms)


def page(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, Grant]]:
    """The last grants of at most `limit` keys behind `after`, in order."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A page has 1 to {READ_ENTRIES_MAX} leases, not {limit}")
    subspace = Subspace("u", universe, "leases")
    begin, end = subspace.range()
    pairs = tx.scan(subspace.key(after) + b"\x00" if after else begin, end, limit=limit)
    return [(subspace.unpack(key)[0], _decode(value)) for key, value in pairs]


def granted(key: str, grant: Grant) -> Granted:
    """A grant in the words of the wire."""
    return Granted(key, grant.lease_id, grant.owner, grant.fence, grant.acquired_ms, grant.expires_ms, grant.txn_id)


def _write(tx: Transaction, lease: LeaseKey, grant: Grant) -> Grant:
    tx.put(_record(lease), _encode(grant))
    return grant


def _record(lease: LeaseKey) -> bytes:
    return Subspace("u", lease.universe, "leases").key(lease.key)


def record_prefix(lease: LeaseKey) -> bytes:
    """What to watch for changes of a lease."""
    return _record(lease)


def _key_of(proof: LeaseProof) -> LeaseKey:
    return LeaseKey(proof.universe, proof.key)


def check_owner(owner: object, txn_id: object = None) -> None:
    """Refuse owners and transactions that are no short text.

    Raises:
        InvalidArgument: one of them is not.
    """
    if txn_id is None and owner in _known_owners:
        return
    for what, text in (("owner", owner), ("txn_id", "none" if txn_id is None else txn_id)):
        if not isinstance(text, str) or not 0 < _bytes_of(text) <= OWNER_BYTES_MAX:
            raise InvalidArgument(f"{what} is {text!r}; give text of 1 to {OWNER_BYTES_MAX} bytes")
    if len(_known_owners) >= NAMES_KNOWN_MAX:
        _known_owners.clear()
    _known_owners.add(str(owner))


def _bytes_of(text: str) -> int:
    """How many it takes; none if half of a character is in it, which cannot be stored and cannot be told of."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
