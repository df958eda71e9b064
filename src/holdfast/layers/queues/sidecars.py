"""Sidecars: the workflow state of a message, and the lease on it that comes and goes with the message's own.

The state is an ordinary state document under `q/<queue>/state/<message id>`, so whoever has the message updates it like
any other, and one commit can do that and acknowledge the message.
"""

from holdfast.kv import Transaction
from holdfast.layers import leases, states
from holdfast.layers.leases import Grant, LeaseKey
from holdfast.layers.queues.keys import QueueKey, StoredMessage, text_of
from holdfast.layers.states import State
from holdfast.wire.leases import LeaseProof
from holdfast.wire.queues import SidecarState

_NOTHING = b"\xf6"  # CBOR's null: what a state holds before anybody has written to it.


def open(tx: Transaction, queue: QueueKey, message: StoredMessage) -> SidecarState:
    """The state of a message that was just leased, made if there is none, with a lease that ends with the message's."""
    key = _key(queue, message)
    state = states.get(tx, queue.universe, key)
    if state is None:
        state = states.update(tx, queue.universe, key, _NOTHING, correlation_id=message.correlation_id)
    leases.end(tx, LeaseKey(queue.universe, key))  # Whoever had the message before has lost it, and this with it.
    grant = leases.acquire(
        tx, LeaseKey(queue.universe, key), owner=message.owner or "", ttl_ms=message.due_ms - tx.now_ms
    )
    return _shown(queue, key, state, grant)


def look(tx: Transaction, queue: QueueKey, message: StoredMessage) -> SidecarState | None:
    """The state of a message that is leased, with the lease that came with the message; None if one of them is gone."""
    key = _key(queue, message)
    state, grant = states.get(tx, queue.universe, key), leases.last_grant(tx, LeaseKey(queue.universe, key))
    return None if state is None or grant is None else _shown(queue, key, state, grant)


def keep(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """The message was extended: so is the lease on its state."""
    if message.stateful:
        leases.prolong(tx, LeaseKey(queue.universe, _key(queue, message)), until_ms=message.due_ms)


def release(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """The message was given back: its state is nobody's."""
    if message.stateful:
        leases.end(tx, LeaseKey(queue.universe, _key(queue, message)))


def remove(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    """The message is gone: so is its state."""
    if message.stateful:
        leases.forget(tx, LeaseKey(queue.universe, _key(queue, message)))
        states.remove(tx, queue.universe, _key(queue, message))


def move(tx: Transaction, source: QueueKey, target: QueueKey, message: StoredMessage) -> None:
    """The message is in another queue: so is its state."""
    if message.stateful:
        leases.forget(tx, LeaseKey(source.universe, _key(source, message)))
        states.move(tx, source.universe, _key(source, message), _key(target, message))


def _shown(queue: QueueKey, key: str, state: State, grant: Grant) -> SidecarState:
    proof = LeaseProof(key, grant.lease_id, grant.fence, grant.txn_id, queue.universe)
    return SidecarState(state.value, state.etag, proof, grant.expires_ms)


def _key(queue: QueueKey, message: StoredMessage) -> str:
    return f"q/{queue.name}/state/{text_of(message.id)}"
