"""Receives with an idempotency key: the leases are stored under the key.

A consumer that lost the response repeats the call and gets the messages it still leases, with the same fences.
Messages whose lease expired or that were settled are left out, and no others are leased instead.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Unpack

import msgspec

from fastness.errors import QueueMessageLeaseMismatch
from fastness.kv import Transaction
from fastness.layers.idempotency import KeyedCall, delete_result, read_result, store_result, stored_result
from fastness.layers.queues import message_leases
from fastness.layers.queues.counters import NEVER_MS, QueueTransaction
from fastness.layers.queues.keys import QueueKey
from fastness.layers.queues.leasing import Leased, LeaseOptions, Prefetched, lease_or_wait
from fastness.layers.queues.settling import ack_packed, nack
from fastness.wire.queues import MessageLease, PackedAck, RefusedAck


class _KeyedLease(msgspec.Struct, frozen=True, array_like=True):
    """The leases that were granted under a key."""

    leases: list[bytes]
    retried: bool = False  # The call was repeated, so its consumer has the messages.
    # Once the acks that came with the call are committed: those that were refused. None: it came with none.
    refused: list[RefusedAck] | None = None

    @property
    def has_only_acked(self) -> bool:
        """Whether the acks of the call are committed, and no message was leased."""
        return self.refused is not None and not self.leases


_decode = msgspec.msgpack.Decoder(_KeyedLease).decode


def lease_keyed(
    tx: Transaction,
    queue: QueueKey,
    *,
    call: KeyedCall,
    prefetched: Prefetched | None = None,
    acks: Sequence[PackedAck] = (),
    refused: list[RefusedAck] | None = None,
    **options: Unpack[LeaseOptions],
) -> Leased:
    """`lease_or_wait`, or the messages that an earlier attempt still leases. An empty result is not stored.

    `refused` is the result of `ack_keyed`, if the call has done that.
    """
    keyed = _stored_keyed(tx, call)
    if keyed is not None and not keyed.has_only_acked:
        return _still_leased(tx, queue, call, keyed, with_state=options.get("with_state", False))
    if keyed is not None:
        refused = keyed.refused
    leased = lease_or_wait(tx, queue, prefetched=prefetched, acks=acks if refused is None else (), **options)
    if refused is not None:
        leased.refused = refused
    has_acked = bool(acks) and refused is None
    if leased.leases or has_acked:
        kept = leased.refused if has_acked or refused is not None else None
        store_result(tx, call, _KeyedLease([held.id for held in leased.leases], refused=kept))
    return leased


def ack_keyed(
    tx: Transaction, queue: QueueKey, *, call: KeyedCall | None, acks: Sequence[PackedAck]
) -> list[RefusedAck]:
    """`ack_packed` for a call that has to wait for its messages, once per `call`."""
    keyed = None if call is None else _stored_keyed(tx, call)
    if keyed is not None and keyed.refused is not None:
        return keyed.refused
    refused = ack_packed(tx, queue, acks)
    if call is not None:
        store_result(tx, call, _KeyedLease([], refused=refused))
    return refused


def stored_lease(tx: Transaction, queue: QueueKey, *, call: KeyedCall, with_state: bool) -> Leased | None:
    """The messages that an earlier attempt of the call still leases; None if there was none."""
    keyed = _stored_keyed(tx, call)
    if keyed is None or keyed.has_only_acked:
        return None
    return _still_leased(tx, queue, call, keyed, with_state=with_state)


def _stored_keyed(tx: Transaction, call: KeyedCall) -> _KeyedLease | None:
    before = stored_result(tx, call)
    return None if before is None else _decode(before)


def _still_leased(tx: Transaction, queue: QueueKey, call: KeyedCall, keyed: _KeyedLease, *, with_state: bool) -> Leased:
    if not keyed.retried:
        store_result(tx, call, msgspec.structs.replace(keyed, retried=True))
    queue_tx = QueueTransaction(tx, queue)
    found = [held for id in keyed.leases for held in message_leases.load_all(tx, queue_tx.keys, id)]
    leased = Leased([held for held in found if tx.now_ms < held.record.due_ms], NEVER_MS, repeated=True)
    leased.refused = keyed.refused or []
    leased.read_rest(queue_tx, leased.messages, with_state=with_state)
    return leased


def release_undelivered(
    tx: Transaction, queue: QueueKey, proofs: Sequence[MessageLease], call: KeyedCall | None
) -> None:
    """Return messages that were leased and not delivered, and forget their call.

    No failure is counted. Does nothing if the consumer repeated the call on another connection, because it has the
    messages then.
    """
    if call is None or abandon_receive(tx, call):
        for proof in proofs:
            with suppress(QueueMessageLeaseMismatch):
                nack(tx, queue, proof, counts=False)


def abandon_receive(tx: Transaction, call: KeyedCall) -> bool:
    """Forget the leases of a receive whose consumer disconnected; False if the call was repeated since.

    Its acks stay remembered: they are not undone.
    """
    before = read_result(tx, call)
    keyed = None if before is None else _decode(before)
    if keyed is None or keyed.retried:
        return False
    if keyed.refused is None:
        delete_result(tx, call)
    else:
        store_result(tx, call, msgspec.structs.replace(keyed, leases=[]))
    return True
