"""Message groups: their messages are delivered in order, one at a time, or those of one receive together.

    "h", group  ->  head | front                    the head is ready, delayed or leased; all others are blocked
                    front | leased … | _BATCH       some messages of one receive are leased; all others are blocked

Only the head of a group can be ready, so consumers of other groups do not see the rest. With `group_batches` of the
policy, a receive that takes the head leases the next messages of the group with it. They lock the group: whatever
becomes of one of them, no other message of the group is delivered before the last of them is settled, has expired or
was returned. A message that was returned waits as blocked until then. Ids are in the order of puts, so it is delivered
again before all later ones.

A lock names the messages, not their number: a message that leaves the queue need not know whether it was leased.
Only receives read the policy. A policy that changes applies to the next receive, and what is leased stays locked.
"""

from collections.abc import Sequence
from typing import Final

from fastness.layers.queues import key_flow, locations
from fastness.layers.queues.counters import QueueTransaction
from fastness.wire.stored_messages import ID_BYTES, StoredHead, StoredMessage, decode, encode

_BATCH: Final = b"\x00\x01"  # Ends the record of a locked group. Other records are two ids, or a byte longer.


def enter(queue_tx: QueueTransaction, message: StoredMessage, group: str, *, newest: bool) -> None:
    """Store a message of a group: as its head, or as blocked."""
    tx, keys = queue_tx.tx, queue_tx.keys
    head_key = keys.head.key(group)
    stored = tx.get(head_key)
    if stored is None:
        tx.put(head_key, _head_record(message.id))
        place(queue_tx, message, newest=newest)
        return
    is_locked = _is_locked(stored)
    if not is_locked and stored[:ID_BYTES] == message.id:
        place(queue_tx, message, newest=newest)
        return
    # As a duration, too: the clock may be set back before it becomes the head. Without a delay, no time to wait for.
    message.delayed_for_ms = max(message.due_ms - tx.now_ms, 0)
    if not message.delayed_for_ms:
        message.due_ms = 0
    tx.put(keys.waiting_key(message), encode(message))
    locations.set_group(queue_tx, message.id, group)
    queue_tx.counters.blocked += 1
    if not is_locked:
        if message.id < stored[ID_BYTES:]:  # A redriven dead letter sorts before messages that already left.
            tx.put(head_key, stored[:ID_BYTES] + message.id)
        return
    front, leased = _lock_of(stored)
    is_returned = message.id in leased
    if is_returned:
        leased.remove(message.id)
    if is_returned or message.id < front:
        _save_lock(queue_tx, group, min(front, message.id), leased)


def place(queue_tx: QueueTransaction, message: StoredMessage, *, newest: bool) -> None:
    """Store a message that is not blocked by its group as delayed, as waiting for its key, or as ready."""
    if message.due_ms > queue_tx.tx.now_ms:
        queue_tx.delay(message)
    elif message.key is not None:
        key_flow.enter(queue_tx, message, message.key, newest=newest)
    else:
        queue_tx.make_ready(message, newest=newest)


def advance_group(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Let the group of a message go on, because `message` leaves the queue."""
    if message.group is None or message.origin is not None:
        return
    stored = queue_tx.tx.get(queue_tx.keys.head.key(message.group))
    if stored is None:
        return
    if not _is_locked(stored):
        if stored[:ID_BYTES] == message.id:
            _make_head(queue_tx, message.group, stored[ID_BYTES:])
        return
    front, leased = _lock_of(stored)
    if message.id in leased:
        leased.remove(message.id)
        _save_lock(queue_tx, message.group, front, leased)


def take_followers(queue_tx: QueueTransaction, head: StoredHead, limit: int) -> list[bytes]:
    """Take out the blocked messages that may be leased with the head of their group, in order, at most `limit`.

    The caller leases them and calls `lock`, or removes them. Messages with keys are delivered alone, as the limits of
    the keys say.
    """
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if head.group is None or head.key is not None or limit < 1 or (not tx.writer and counters.blocked < 1):
        return []
    stored = tx.get(keys.head.key(head.group))
    if stored is None or _is_locked(stored) or stored[:ID_BYTES] != head.id:
        return []
    found: list[bytes] = []
    for key, value in tx.scan(*keys.group_range(head.group, stored[ID_BYTES:]), limit=limit):
        follower = decode(value)
        # One that is older than the head was redriven or moved meanwhile. It is delivered after the head, not with it.
        if follower.key is not None or follower.due_ms > tx.now_ms or follower.id < head.id:
            break
        tx.delete(key)
        locations.clear(queue_tx, follower.id)
        counters.blocked -= 1
        found.append(value)
    return found


def lock(queue_tx: QueueTransaction, group: str, leased: Sequence[bytes]) -> None:
    """Lock a group until all of these messages, which are leased together, have left their leases."""
    _save_lock(queue_tx, group, leased[-1], leased)


def _make_head(queue_tx: QueueTransaction, group: str, front: bytes) -> None:
    """Make the first blocked message of a group its head. None of them is before `front`."""
    tx, keys = queue_tx.tx, queue_tx.keys
    head_key = keys.head.key(group)
    blocked = tx.scan(*keys.group_range(group, front), limit=1)
    if not blocked:
        tx.delete(head_key)
        return
    key, value = blocked[0]
    tx.delete(key)
    queue_tx.counters.blocked -= 1
    successor = decode(value)
    locations.clear(queue_tx, successor.id)
    successor.due_ms = min(successor.due_ms, tx.now_ms + successor.delayed_for_ms)
    tx.put(head_key, _head_record(successor.id))
    place(queue_tx, successor, newest=False)


def _head_record(id: bytes) -> bytes:
    return id + id + b"\x00"  # The scan for its successor starts after it.


def _is_locked(stored: bytes) -> bool:
    return len(stored) % ID_BYTES == len(_BATCH)


def _lock_of(stored: bytes) -> tuple[bytes, list[bytes]]:
    """The front of a locked group, and the messages that are leased."""
    ids = [stored[begin : begin + ID_BYTES] for begin in range(0, len(stored) - len(_BATCH), ID_BYTES)]
    return ids[0], ids[1:]


def _save_lock(queue_tx: QueueTransaction, group: str, front: bytes, leased: Sequence[bytes]) -> None:
    """Write which messages of a group are leased. If none is, the group goes on."""
    if leased:
        queue_tx.tx.put(queue_tx.keys.head.key(group), front + b"".join(leased) + _BATCH)
    else:
        _make_head(queue_tx, group, front)
