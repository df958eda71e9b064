"""What is remembered of calls that are sent again, where that is more than an answer.

    receive          the ids and fences of what was leased, and whether anybody has asked for them again
    purge, redrive   how far it came: these are many commits, and go on where the last one ended

A consumer that did not hear which messages are its own gets what it still leases, by the same tokens. What it has lost
in the meantime, or has settled, is left out, and nothing is leased in its place: one call leases once.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.kv import Transaction
from holdfast.layers.once import Once, forget_one, recall, recall_any, remember
from holdfast.layers.queues import sidecars
from holdfast.layers.queues.deliveries import Leased, defer_all, lease_or_wait
from holdfast.layers.queues.graves import redrive
from holdfast.layers.queues.looks import purge
from holdfast.layers.queues.rooms import QueueKey, Stored, decode, room_of
from holdfast.layers.queues.tallies import NEVER_MS
from holdfast.limits import MESSAGES_MAX


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
    return [] if leased.repeated or not give_up(tx, call) else defer_all(tx, queue, leased.messages)


def give_up(tx: Transaction, call: Once) -> bool:
    """Forget a receive whose consumer is gone, as if it had never been; whether it is, and has not asked again."""
    before = recall_any(tx, call)
    if before is None or _decode(before).asked_again:
        return False
    forget_one(tx, call)
    return True


class Purged(msgspec.Struct, frozen=True, array_like=True):
    """How far a purge came, and where it goes on; None at its end."""

    count: int = 0
    after: bytes | None = b""


class Redriven(msgspec.Struct, frozen=True, array_like=True):
    """How far a redrive came: how many letters were put back, and how many it has looked for."""

    count: int = 0
    tried: int = 0
    is_over: bool = False


_decode_purged = msgspec.msgpack.Decoder(Purged).decode
_decode_redriven = msgspec.msgpack.Decoder(Redriven).decode


def purge_on(
    tx: Transaction, queue: QueueKey, so_far: Purged, call: Once | None
) -> tuple[Purged, list[tuple[Any, ...]]]:
    """The next part of a purge that came `so_far`, or as far as is remembered of it; and what is to be told of it."""
    before = None if call is None else recall(tx, call)
    so_far = so_far if before is None else _decode_purged(before)
    if so_far.after is None:
        return so_far, []
    count, after = purge(tx, queue, after=so_far.after, limit=MESSAGES_MAX)
    so_far = Purged(so_far.count + count, after)
    if call is not None:
        remember(tx, call, so_far)
    return so_far, tx.notes


def redrive_on(
    tx: Transaction, queue: QueueKey, so_far: Redriven, call: Once | None, *, ids: Sequence[str] | None, limit: int
) -> tuple[Redriven, list[tuple[Any, ...]]]:
    """The next part of a redrive that came `so_far`, or as far as is remembered of it; and what is to be told of it."""
    before = None if call is None else recall(tx, call)
    so_far = so_far if before is None else _decode_redriven(before)
    asked = limit if ids is None else len(ids)
    size = min(MESSAGES_MAX, asked - so_far.tried)
    if so_far.is_over or size < 1:
        return msgspec.structs.replace(so_far, is_over=True), []
    batch = None if ids is None else ids[so_far.tried : so_far.tried + size]
    count = redrive(tx, queue, ids=batch, limit=size)
    tried = so_far.tried + size
    so_far = Redriven(so_far.count + count, tried, tried >= asked or (ids is None and count < size))
    if call is not None:
        remember(tx, call, so_far)
    return so_far, tx.notes


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
