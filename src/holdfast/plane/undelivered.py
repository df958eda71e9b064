"""Messages that were leased for somebody who did not hear of them."""

from collections.abc import Awaitable, Sequence
from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.once import Once
from holdfast.layers.queues import give_up
from holdfast.plane.queues import nack
from holdfast.tiers import Tier
from holdfast.wire.queues import Delivery, MessageLease, NackMessages, ReceiveMessages


def give_back(port: Any, request: ReceiveMessages, messages: Sequence[Delivery], call: Once | None) -> Awaitable[None]:
    """Let others have these messages at once; it was not their fault.

    A `call` that gives all of its messages back is forgotten, unless its consumer has asked for them again meanwhile:
    then they are that consumer's.
    """
    leases = [MessageLease(each.id, each.lease_id, each.fence) for each in messages]
    giving = NackMessages(request.queue, leases, intent="defer", universe=request.universe)
    done: Awaitable[None] = port.transact(_give_back, giving, call, tier=Tier.IMPORTANT)
    return done


def _give_back(tx: Transaction, giving: NackMessages, call: Once | None) -> None:
    if call is None or give_up(tx, call):
        nack(tx, giving)
