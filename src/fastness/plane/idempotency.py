"""Calls that may be sent twice: how a transport executes them once, and returns messages whose answer was lost."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastness.kv import Result
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall, keyed_call
from fastness.plane.queues import queue_key
from fastness.plane.services import HasServices
from fastness.tiers import Tier
from fastness.wire.queues import MessageLease, ReceiveMessages
from fastness.wire.requests import Request


def keyed_call_of(
    stores: HasServices, request: Request[Any], key: str | None, *, again: bool, like: Request[Any] | None = None
) -> KeyedCall | None:
    """The keyed call to execute a request with; None if the request has no key or needs none.

    `like` is the request as the caller sent it, where the entry point has added fields that differ between sendings.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    if key is None or not request.operation.takes_key:
        return None
    return keyed_call(key, request if like is None else like, stores.services.repeats.received(again=again))


class AsyncTransactor(Protocol):
    """Runs a function as one transaction, without blocking the event loop."""

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result: ...


def release_undelivered(
    stores: AsyncTransactor, request: ReceiveMessages, leases: Sequence[MessageLease], call: KeyedCall | None
) -> Awaitable[None]:
    """Make leased messages available again at once, without counting a failure: they could not be delivered.

    The stored result of `call` is deleted with it, unless the consumer has repeated the call: then it has the messages.
    """
    return stores.transact(queues.release_undelivered, queue_key(request), leases, call, tier=Tier.IMPORTANT)
