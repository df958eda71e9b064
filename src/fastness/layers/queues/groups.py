"""Message groups: their messages are delivered in order, one at a time, or those of one receive together.

    "h", group  ->  head | leased … | front     the head is ready, delayed, or leased; all others that wait are blocked

Only the head of a group can be ready, so consumers of other groups do not see the rest. With `group_batches` of the
policy, a receive that takes the head leases the next messages of the group with it. Then the group has no head, and its
record names the leased messages. No message is delivered while one before it is leased, so what is after the first
leased message waits until that is settled, has expired or was returned. A message that was returned becomes the head
again if no leased one is before it: it is delivered at once, although later ones are still leased. Ids are in the order
of puts.

The record names the messages, not their number: a message that leaves the queue need not know whether it was leased.
Only receives read the policy. A policy that changes applies to the next receive, and what is leased stays in order.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from fastness.layers.queues import key_flow, locations
from fastness.layers.queues.counters import QueueTransaction
from fastness.wire.stored_messages import ID_BYTES, StoredHead, StoredMessage, decode, encode

_NO_HEAD: Final = bytes(ID_BYTES)


class _Group(NamedTuple):
    """The record of a group."""

    head: bytes  # The message that is next, or was delivered alone; `_NO_HEAD`: there is none.
    leased: Sequence[bytes]  # Messages that were delivered together with others.
    front: bytes  # No blocked message is before it: an id, or an id and another byte.


def enter(queue_tx: QueueTransaction, message: StoredMessage, group: str, *, newest: bool) -> None:
    """Store a message of a group: as its head, or as blocked."""
    tx, keys = queue_tx.tx, queue_tx.keys
    found = _find(queue_tx, group)
    if found is None or found.head == message.id:
        if found is None:
            _save(queue_tx, group, _only(message.id))
        place(queue_tx, message, newest=newest)
        return
    # As a duration, too: the clock may be set back before it becomes the head. Without a delay, no time to wait for.
    message.delayed_for_ms = max(message.due_ms - tx.now_ms, 0)
    if not message.delayed_for_ms:
        message.due_ms = 0
    tx.put(keys.waiting_key(message), encode(message))
    locations.set_group(queue_tx, message.id, group)
    queue_tx.counters.blocked += 1
    if message.id in found.leased or message.id < found.front:  # It was returned, or redriven: later ones have left.
        leased = [id for id in found.leased if id != message.id]
        _go_on(queue_tx, group, _Group(found.head, leased, min(found.front, message.id)))


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
    found = _find(queue_tx, message.group)
    if found is None:
        return
    if found.head == message.id:
        _go_on(queue_tx, message.group, found._replace(head=_NO_HEAD))
    elif message.id in found.leased:
        leased = [id for id in found.leased if id != message.id]
        _go_on(queue_tx, message.group, found._replace(leased=leased))


def take_followers(queue_tx: QueueTransaction, head: StoredHead, limit: int) -> list[bytes]:
    """Take out the blocked messages that may be leased with the head of their group, in order, at most `limit`.

    The caller leases them and calls `lease_together`, or removes them. Messages with keys are delivered alone, as the
    limits of the keys say.
    """
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if head.group is None or head.key is not None or limit < 1 or (not tx.writer and counters.blocked < 1):
        return []
    group = _find(queue_tx, head.group)
    if group is None or group.head != head.id:
        return []
    begin, end = keys.group_range(head.group, group.front)
    if group.leased:  # What is after them waits for them.
        end = keys.group_range(head.group, min(group.leased))[0]
    found: list[bytes] = []
    for key, value in tx.scan(begin, end, limit=limit) if begin < end else ():
        follower = decode(value)
        # One that is older than the head was redriven or moved meanwhile. It is delivered after the head, not with it.
        if follower.key is not None or follower.due_ms > tx.now_ms or follower.id < head.id:
            break
        tx.delete(key)
        locations.clear(queue_tx, follower.id)
        counters.blocked -= 1
        found.append(value)
    return found


def lease_together(queue_tx: QueueTransaction, group: str, leased: Sequence[bytes]) -> None:
    """Note that the head of a group was leased together with the messages after it."""
    found = _find(queue_tx, group)
    others = () if found is None else found.leased
    _save(queue_tx, group, _Group(_NO_HEAD, [*others, *leased], leased[-1]))


def is_behind_head(queue_tx: QueueTransaction, message: StoredMessage) -> bool:
    """Whether a message that was redriven or moved waits for a younger one of its group."""
    found = None if message.group is None else _find(queue_tx, message.group)
    return found is not None and found.head != _NO_HEAD and message.id < found.head


def lease_again(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Note that a message that waited, and was taken out, is leased again."""
    found = None if message.group is None or message.origin is not None else _find(queue_tx, message.group)
    if found is not None and message.group is not None and found.head != message.id:
        _save(queue_tx, message.group, found._replace(leased=[*found.leased, message.id]))


def _go_on(queue_tx: QueueTransaction, group: str, found: _Group) -> None:
    """Save what is left of a group. Its first blocked message becomes the head, unless one before it is leased."""
    tx, keys = queue_tx.tx, queue_tx.keys
    first_leased = min(found.leased, default=None)
    if found.head != _NO_HEAD or (first_leased is not None and first_leased <= found.front):
        _save(queue_tx, group, found)
        return
    begin, end = keys.group_range(group, found.front)
    blocked = tx.scan(begin, end, limit=1)
    successor = decode(blocked[0][1]) if blocked else None
    if successor is not None and (first_leased is None or successor.id < first_leased):
        tx.delete(blocked[0][0])
        queue_tx.counters.blocked -= 1
        locations.clear(queue_tx, successor.id)
        successor.due_ms = min(successor.due_ms, tx.now_ms + successor.delayed_for_ms)
        _save(queue_tx, group, _only(successor.id)._replace(leased=found.leased))
        place(queue_tx, successor, newest=False)
    elif first_leased is not None:
        _save(queue_tx, group, found._replace(front=first_leased))  # None of the blocked messages is before it.
    else:
        tx.delete(keys.head.key(group))


def _only(head: bytes) -> _Group:
    """A group in which nothing else is leased, and no blocked message is before the head."""
    return _Group(head, (), head + b"\x00")


def _find(queue_tx: QueueTransaction, group: str) -> _Group | None:
    stored = queue_tx.tx.get(queue_tx.keys.head.key(group))
    if stored is None:
        return None
    end = (len(stored) // ID_BYTES - 1) * ID_BYTES
    leased = [stored[begin : begin + ID_BYTES] for begin in range(ID_BYTES, end, ID_BYTES)]
    return _Group(stored[:ID_BYTES], leased, stored[end:])


def _save(queue_tx: QueueTransaction, group: str, found: _Group) -> None:
    queue_tx.tx.put(queue_tx.keys.head.key(group), found.head + b"".join(found.leased) + found.front)
