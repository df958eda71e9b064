"""Handlers of pushes. `agent.data.push` of JSON-RPC ends in `push_data`, and so in the same ingress."""

from typing import Protocol

import msgspec

from fastness.errors import BatchTooLarge, EmptyBatch, FastnessError, InvalidArgument
from fastness.layers.mailboxes import Address
from fastness.limits import (
    PUSH_BATCH_BYTES_MAX,
    PUSH_BATCH_MAX,
    PUSH_TEXT_CHARACTERS_MAX,
    PUSH_WATCH_MAX,
    PUSH_WATCH_SECONDS_MAX,
)
from fastness.names import checked_agent, checked_name
from fastness.plane.handlers import immediate, service
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.ingress.ingress import AddressedPush, Ingress
from fastness.wire.ingress import (
    ACCEPTED,
    ANYBODY,
    SYNCED,
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
    universe = checked_name("universe", request.universe)
    sender, to = _sender(request.sender, universe), _address(request.to, universe)
    return stores.ingress.push(sender, to, _new_push(request, request.durability))


@service
def push_many(stores: AnyStores, request: PushMany) -> Served[PushOutcomes]:
    if not request.pushes:
        raise EmptyBatch("The batch has no pushes; push at least one")
    if len(request.pushes) > PUSH_BATCH_MAX:
        raise BatchTooLarge(f"One batch has at most {PUSH_BATCH_MAX} pushes, not {len(request.pushes)}; split it")
    size = sum(_size(each.payload) for each in request.pushes)
    if size > PUSH_BATCH_BYTES_MAX:
        raise BatchTooLarge(
            f"The payloads of one batch have at most {PUSH_BATCH_BYTES_MAX} bytes, not {size}; split it"
        )
    universe = checked_name("universe", request.universe)
    sender = _sender(request.sender, universe)
    return stores.ingress.push_many(sender, [_item(each, request.durability, universe) for each in request.pushes])


@service
def watch(stores: AnyStores, request: WatchPushes) -> Served[SeenPushes]:
    checked_name("universe", request.universe)
    for name in ("topic", "after"):
        _check_text(name, getattr(request, name), optional=True)
    _check_number("limit", request.limit, 1, PUSH_WATCH_MAX)
    _check_number("wait_seconds", request.wait_seconds, 0, PUSH_WATCH_SECONDS_MAX)
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
    for name in ("topic", "content_type", "idempotency_key"):
        _check_text(name, getattr(given, name))
    for name in ("session_id", "reply_to"):
        _check_text(name, getattr(given, name), optional=True)
    if not isinstance(given.payload, bytes):
        raise InvalidArgument(f"payload must be bytes, not {type(given.payload).__name__}; encode it first")
    if durability not in (ACCEPTED, SYNCED):
        raise InvalidArgument(f"durability is {durability!r}; give {ACCEPTED} or {SYNCED}")
    return BinaryPush(
        topic=given.topic,
        content_type=given.content_type,
        payload=given.payload,
        idempotency_key=given.idempotency_key,
        session_id=given.session_id,
        reply_to=given.reply_to,
        durability=durability,
    )


def _check_text(name: str, text: object, *, optional: bool = False) -> None:
    """Check a text field of a request that was not decoded from a frame, which may have any type."""
    if text is None and optional:
        return
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} must be text, not {type(text).__name__}")
    if len(text) > PUSH_TEXT_CHARACTERS_MAX:
        raise InvalidArgument(f"{name} has {len(text)} characters, of at most {PUSH_TEXT_CHARACTERS_MAX}; shorten it")


def _check_number(name: str, number: object, least: float, most: float) -> None:
    if not isinstance(number, int | float) or not least <= number <= most:
        raise InvalidArgument(f"{name} is {number!r}; give {least:g} to {most:g}")


def _size(payload: object) -> int:
    return len(payload) if isinstance(payload, bytes) else 0  # Anything else is refused with its push.


def _sender(sender: str | None, universe: str) -> Address:
    return _address(ANYBODY if sender is None else sender, universe)


def _address(agent: str, universe: str) -> Address:
    return Address(universe, checked_agent(agent, universe))
