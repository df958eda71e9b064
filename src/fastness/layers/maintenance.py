"""The maintenance lease: one node of a shared key space does the periodic work of all.

    ("nodes", "maintenance", "lease")     ->  the node that holds it, its fence, and when it expires
    ("nodes", "maintenance", "released")  ->  the node that released it last; a watch on this key wakes the others

    free ── take ──► held ── take by the same node ──► held
      ▲               │
      └─── release, expiry

The lease saves work and protects nothing: a node that was paused may finish a transaction after another node has
taken it, so each sweep is correct on any number of nodes at once. The fence grows when it changes hands.
"""

from typing import Final

import msgspec

from fastness.kv import Subspace, Transaction, fence_floor

SUBSPACE: Final = Subspace("nodes", "maintenance")
RELEASED: Final = SUBSPACE.key("released")
_LEASE: Final = SUBSPACE.key("lease")


class MaintenanceLease(msgspec.Struct, frozen=True, array_like=True):
    """Who holds the lease."""

    holder: str = ""  # Empty: it was released.
    fence: int = 0
    expires_ms: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MaintenanceLease).decode


def load(tx: Transaction) -> MaintenanceLease:
    """The lease as it was taken or released last; it may have expired."""
    stored = tx.get(_LEASE)
    return MaintenanceLease() if stored is None else _decode(stored)


def take(tx: Transaction, node: str, *, ttl_ms: int) -> MaintenanceLease:
    """Take or renew the lease for `node`, unless another node holds it; returns the lease that holds then."""
    last, now_ms = load(tx), tx.now_ms
    # A lease that ends later than its TTL from now was taken before the clock was set back.
    held = bool(last.holder) and now_ms < last.expires_ms <= now_ms + ttl_ms
    if held and last.holder != node:
        return last
    fence = last.fence if held else fence_floor.next_fence(tx, last.fence)
    taken = MaintenanceLease(node, fence, now_ms + ttl_ms)
    tx.put(_LEASE, _encode(taken))
    return taken


def release(tx: Transaction, node: str) -> None:
    """Release the lease if `node` holds it, so that another node takes it at once."""
    last = load(tx)
    if last.holder == node:
        tx.put(_LEASE, _encode(MaintenanceLease(fence=last.fence)))
        tx.put(RELEASED, node.encode())
