"""State documents: one value per key, replaced as a whole, guarded by a lease or by an ETag.

    (u, universe, "states", key)  ->  etag, version, value

An ETag identifies one version of one document for ever: a document that is removed and written again gets a new one.
While the lease of the same key is held, only its holder may write.
"""

from functools import lru_cache

import msgspec

from fastness.errors import CasMismatch, LeaseRequired, ValueTooLarge
from fastness.kv import Subspace, Transaction
from fastness.layers import leases
from fastness.layers.leases import LeaseKey
from fastness.limits import STATE_BYTES_MAX
from fastness.wire.leases import LeaseProof


class State(msgspec.Struct, frozen=True, array_like=True):
    """One version of a document."""

    etag: str
    version: int
    value: bytes
    updated_ms: int
    correlation_id: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode


def get(tx: Transaction, universe: str, key: str) -> State | None:
    """The document, or None."""
    stored = tx.get(_record(universe, key))
    return None if stored is None else _decode(stored)


def update(
    tx: Transaction,
    universe: str,
    key: str,
    value: bytes,
    *,
    lease: LeaseProof | None = None,
    if_match: str | None = None,
    if_absent: bool = False,
    correlation_id: str | None = None,
) -> State:
    """Write the document. It keeps its correlation id unless another is given.

    Raises:
        Fenced: `lease` is not valid, or the key's lease is held and `lease` is missing.
        CasMismatch: the document's version is not `if_match`, or it exists despite `if_absent`.
        ValueTooLarge: the value is too large for a document.
    """
    if len(value) > STATE_BYTES_MAX:
        raise ValueTooLarge(f"A state has at most {STATE_BYTES_MAX} bytes, not {len(value)}; store the rest as a blob")
    current = _check(tx, universe, key, lease, if_match)
    if if_absent and current is not None:
        raise CasMismatch(key, current_etag=current.etag)
    version = 1 if current is None else current.version + 1
    if correlation_id is None and current is not None:
        correlation_id = current.correlation_id
    state = State(tx.new_id().hex, version, value, tx.now_ms, correlation_id)
    tx.put(_record(universe, key), _encode(state))
    return state


def remove(
    tx: Transaction, universe: str, key: str, *, lease: LeaseProof | None = None, if_match: str | None = None
) -> bool:
    """Remove the document; whether it existed.

    Raises:
        Fenced, CasMismatch: as `update`.
    """
    if _check(tx, universe, key, lease, if_match) is None:
        return False
    tx.delete(_record(universe, key))
    return True


def move(tx: Transaction, universe: str, source: str, target: str) -> None:
    """Move a document to another key, unchanged."""
    stored = tx.get(_record(universe, source))
    if stored is not None:
        tx.delete(_record(universe, source))
        tx.put(_record(universe, target), stored)


def _check(tx: Transaction, universe: str, key: str, lease: LeaseProof | None, if_match: str | None) -> State | None:
    """The current document, if the caller may change it."""
    if lease is not None:
        leases.check(tx, lease)
    if lease is None or (lease.universe, lease.key) != (universe, key):
        holder = leases.last_grant(tx, LeaseKey(universe, key))
        if holder is not None and holder.holds_at(tx.now_ms):
            raise LeaseRequired(f"{holder.owner} holds the lease on {key}; acquire it, and pass it with the write")
    current = get(tx, universe, key)
    if if_match is not None and (current is None or if_match not in ("*", current.etag)):
        raise CasMismatch(key, current_etag=None if current is None else current.etag)
    return current


@lru_cache(maxsize=4_096)
def _record(universe: str, key: str) -> bytes:
    return Subspace("u", universe, "states").key(key)
