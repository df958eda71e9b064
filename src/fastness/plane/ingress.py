"""Handlers of pushes. `agent.data.push` of JSON-RPC ends in `push_data`, and so in the same ingress."""

from typing import Protocol

import msgspec

from fastness.errors import BatchTooLarge, FastnessError
from fastness.layers.mailboxes import Address
from fastness.limits import (
    PUSH_BATCH_BYTES_MAX,
)
from fastness.names import checked_agent, checked_name
from fastness.plane.handlers import immediate, service
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.ingress.ingress import AddressedPush, Ingress
from fastness.wire.ingress import (
    ANYBODY,
    BinaryPush,
    Durability,
    IngressStats,
    NewPush,
    Push,
    Pushed,
    PushItem,
    PushMany,
    PushOutcomes,
    SeenPushes,
    ShowIngress,
    WatchPushes,
)


class HasIngress(Protocol):
    """A transport of a plane in this process."""

    @property
    def ingress(self) -> Ingress: ...


async def push_data(stores: HasIngress, sender: str | None, to: str, new: NewPush, *, universe: str) -> Pushed:
    """Accept a push from `sender` to `to`.

    Raises:
        InvalidName: an address is invalid, or in another universe.
        FastnessError: as `Ingress.push`.
    """
    universe = checked_name("universe", universe)
    return await stores.ingress.push(_sender(sender, universe), _address(to, universe), new)


@service
def push(stores: AnyStores, request: Push) -> Served[Pushed]:
    sender, to = _sender(request.sender, request.universe), _address(request.to, request.universe)
    return stores.ingress.push(sender, to, _new_push(request, request.durability))


@service
def push_many(stores: AnyStores, request: PushMany) -> Served[PushOutcomes]:
    size = sum(len(each.payload) for each in request.pushes)
    if size > PUSH_BATCH_BYTES_MAX:
        raise BatchTooLarge(
            f"The payloads of one batch have at most {PUSH_BATCH_BYTES_MAX} bytes, not {size}; split it"
        )
    universe = request.universe
    sender = _sender(request.sender, universe)
    return stores.ingress.push_many(sender, [_item(each, request.durability, universe) for each in request.pushes])


@service
def watch(stores: AnyStores, request: WatchPushes) -> Served[SeenPushes]:
    if request.to is not None:
        request = msgspec.structs.replace(request, to=str(_address(request.to, request.universe)))
    return stores.ingress.watch(request)


@immediate
def show(stores: AnyStores, request: ShowIngress) -> IngressStats:
    del request
    return stores.ingress.stats()


def _item(item: PushItem, durability: Durability, universe: str) -> AddressedPush | FastnessError:
    try:
        return _address(item.to, universe), _new_push(item, durability)
    except FastnessError as error:
        return error


def _new_push(given: Push | PushItem, durability: Durability) -> NewPush:
    return BinaryPush(
        topic=given.topic,
        content_type=given.content_type,
        payload=given.payload,
        idempotency_key=given.idempotency_key,
        session_id=given.session_id,
        reply_to=given.reply_to,
        durability=durability,
    )


def _sender(sender: str | None, universe: str) -> Address:
    return _address(ANYBODY if sender is None else sender, universe)


def _address(agent: str, universe: str) -> Address:
    return Address(universe, checked_agent(agent, universe))
