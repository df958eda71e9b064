"""Receives that are sent again: a consumer that did not hear which messages are its own is told so once more.

    key  ->  the ids and fences of what was leased under it, and whether anybody has asked for them again

It gets what it still leases, by the same tokens. What it has lost in the meantime, or has settled, is left out, and
nothing is leased in its place: one call leases once.
"""

from typing import Any

import msgspec

from holdfast.kv import Transaction
from holdfast.layers.once import Once, forget_one, recall, recall_any, remember
from holdfast.layers.queues import sidecars
from holdfast.layers.queues.deliveries import Leased, defer_all, lease_or_wait
from holdfast.layers.queues.rooms import QueueKey, Stored, decode, room_of
from holdfast.layers.queues.tallies import NEVER_MS


class _Taken(msgspec.Struct, frozen=True, array_like=True):
    """What was leased under a key."""

    messages: list[tuple[bytes, int]]
    asked_again: bool = False


_decode = msgspec.msgpack.Decoder(_Taken).decode


def lease_once(tx: Transaction, queue: QueueKey, *, call: Once, with_state: bool = False, **options: Any) -> Leased:
    """`lease_or_wait`, or what is left of that if it was done before. To have found nothing is to have done nothing."""
    before = leased_before(tx, queue, call=call, with_state=with_state)
    if before is not None:
        return before
    leased = lease_or_wait(tx, queue, with_state=with_state, **options)
    if leased.messages:
        remember(tx, call, _Taken([(message.id, message.fence) for message in leased.messages]))
    return leased


def leased_before(tx: Transaction, queue: QueueKey, *, call: Once, with_state: bool) -> Leased | None:
    """What is left of what a call has leased before; None if it has not."""
    before = recall(tx, call)
    if before is None:
        return None
    taken = _decode(before)
    if not taken.asked_again:
        remember(tx, call, msgspec.structs.replace(taken, asked_again=True))
    messages = [found for id, fence in taken.messages if (found := _still_leased(tx, queue, id, fence)) is not None]
    states = [sidecars.look(tx, queue, message) if with_state else None for message in messages]
    return Leased(messages, NEVER_MS, states, tx.notes, repeated=True)


def give_back_once(tx: Transaction, queue: QueueKey, leased: Leased, call: Once) -> list[tuple[Any, ...]]:
    """`defer_all` what was leased for a consumer that is gone, as if its call had never been; unless it has asked
    again, on another connection, and has these messages now. What is to be told of it once it is committed."""
    before = recall_any(tx, call)
    if leased.repeated or before is None or _decode(before).asked_again:
        return []
    forget_one(tx, call)
    return defer_all(tx, queue, leased.messages)


def _still_leased(tx: Transaction, queue: QueueKey, id: bytes, fence: int) -> Stored | None:
    room = room_of(queue)
    stored = tx.get(room.parked_key(id))
    if stored is None:
        return None
    message = decode(stored)
    if message.owner is None or message.fence != fence or message.due_ms <= tx.now_ms:
        return None
    if message.has_body:
        message.payload = tx.get(room.body_key(id))
    return message
