"""Sidecars: the workflow state of a message, and a lease on it that follows the message's lease.

The state is an ordinary state document under `q/<queue>/state/<message id>`. The message's consumer updates it like any
other, and one commit can do that and acknowledge the message.
"""

from fastness.kv import Transaction
from fastness.layers import leases, states
from fastness.layers.leases import Grant, LeaseKey
from fastness.layers.queues.keys import QueueKey
from fastness.layers.states import State
from fastness.wire.leases import LeaseProof
from fastness.wire.queues import SidecarState
from fastness.wire.stored_messages import StoredMessage, format_id

_NULL = b"\xf6"  # CBOR null, the value of a new state.


def open(tx: Transaction, queue: QueueKey, message: StoredMessage) -> SidecarState:
    """The state of a message that was just leased, with a lease that ends with the message's. Created if missing."""
    key = _key(queue, message)
    state = states.get(tx, queue.universe, key)
    if state is None:
        state = states.update(tx, queue.universe, key, _NULL, correlation_id=message.correlation_id)
    leases.force_release(tx, LeaseKey(queue.universe, key))  # The previous consumer lost the message and its state.
    # The lease is deleted when the message moves, and the message may come back.
    grant = leases.acquire(
        tx,
        LeaseKey(queue.universe, key),
        owner=message.owner or "",
        ttl_ms=message.due_ms - tx.now_ms,
        last_fence=message.fence - 1,
    )
    return _sidecar_state(queue, key, state, grant)


def read(tx: Transaction, queue: QueueKey, message: StoredMessage) -> SidecarState | None:
    """The state of a leased message with the lease on it; None if either is missing."""
    key = _key(queue, message)
    state, grant = states.get(tx, queue.universe, key), leases.last_grant(tx, LeaseKey(queue.universe, key))
    return None if state is None or grant is None else _sidecar_state(queue, key, state, grant)


def document(tx: Transaction, queue: QueueKey, message: StoredMessage) -> State | None:
    """The state of a message, leased or not; None if it has none."""
    return states.get(tx, queue.universe, _key(queue, message)) if message.stateful else None


def extend(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """Extend the lease on the state until the message's lease ends."""
    if message.stateful:
        leases.extend(tx, LeaseKey(queue.universe, _key(queue, message)), until_ms=message.due_ms)


def release(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """Release the lease on the state, because the message is not leased any more."""
    if message.stateful:
        leases.force_release(tx, LeaseKey(queue.universe, _key(queue, message)))


def remove(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """Remove the state and its lease together with the message."""
    if message.stateful:
        leases.delete(tx, LeaseKey(queue.universe, _key(queue, message)))
        states.remove(tx, queue.universe, _key(queue, message))


def move(tx: Transaction, source: QueueKey, target: QueueKey, message: StoredMessage) -> None:
    """Move the state to the message's new queue."""
    if message.stateful:
        leases.delete(tx, LeaseKey(source.universe, _key(source, message)))
        states.move(tx, source.universe, _key(source, message), _key(target, message))


def _sidecar_state(queue: QueueKey, key: str, state: State, grant: Grant) -> SidecarState:
    proof = LeaseProof(key, grant.lease_id, grant.fence, grant.txn_id, queue.universe)
    return SidecarState(state.value, state.etag, proof, grant.expires_ms)


def _key(queue: QueueKey, message: StoredMessage) -> str:
    return f"q/{queue.name}/state/{format_id(message.id)}"
