"""What to do with an answer that nobody hears."""

from collections.abc import Callable
from typing import Any

from holdfast.wire.frames import AnyRequest
from holdfast.wire.leases import AcquireLease, Granted, LeaseProof, ReleaseLease
from holdfast.wire.queues import Deliveries, MessageLease, NackMessages, ReceiveMessages


def undo_of(request: AnyRequest) -> Callable[[Any], AnyRequest | None] | None:
    """Makes of an answer that nobody hears the request that takes it back; None if there is nothing to take back."""
    if isinstance(request, ReceiveMessages):
        return lambda answer: _deferred(request, answer)
    if isinstance(request, AcquireLease):
        return lambda answer: _released(request, answer)
    return None


def _deferred(request: ReceiveMessages, answer: Deliveries) -> NackMessages | None:
    """Nobody has seen these messages: that is no failure of theirs."""
    leases = [MessageLease(each.id, each.lease_id, each.fence) for each in answer.messages]
    return NackMessages(request.queue, leases, intent="defer", universe=request.universe) if leases else None


def _released(request: AcquireLease, answer: Granted) -> ReleaseLease:
    return ReleaseLease(LeaseProof(answer.key, answer.lease_id, answer.fence, answer.txn_id, request.universe))
