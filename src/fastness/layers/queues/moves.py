"""Several messages by their ids: deleting them, and moving them to another queue.

Both take messages that are not leased, and dead letters. An item that is refused has written nothing, and does not
affect the others.
"""

from collections.abc import Callable, Sequence

import msgspec

from fastness.errors import (
    FastnessError,
    InvalidArgument,
    MessageFinished,
    MessageKeyTaken,
    MessageLeased,
    MessageNotFound,
)
from fastness.kv import Transaction
from fastness.layers.queues import by_id, dead_letters, enqueue, failures, locations, outcomes, unique_keys
from fastness.layers.queues.by_id import WaitingMessage
from fastness.layers.queues.counters import QueueTransaction, total_counters
from fastness.layers.queues.enqueue import insert, keep_from_now, move_ttl
from fastness.layers.queues.groups import advance_group
from fastness.layers.queues.keys import QueueKey
from fastness.layers.queues.policies import check_not_deleted, dead_letter_queue, policy_of
from fastness.wire.stored_messages import JobOptions, StoredMessage, format_id, parse_id

Refusals = list[FastnessError | None]


def delete_messages(tx: Transaction, queue: QueueKey, ids: Sequence[str]) -> Refusals:
    """Delete messages that are not leased, and everything that is kept about them; an error for each, or None.

    The errors are InvalidArgument, MessageLeased, MessageFinished and MessageNotFound.
    """

    def delete(id: bytes) -> None:
        source, found = _find(QueueTransaction(tx, queue), id)
        message = by_id.take(source, found)
        dead_letters.purge_message(source, message)
        _forget_death(source, message)
        source.save()

    return _each(tx, queue, ids, delete)


def move_messages(tx: Transaction, queue: QueueKey, ids: Sequence[str], *, to: QueueKey) -> Refusals:
    """Move messages that are not leased to another queue; an error for each, or None.

    They keep their ids, payloads, attributes, failures, workflow states, TTLs and delays. Dead letters become ready,
    with no failures counted. The errors are InvalidArgument, MessageLeased, MessageFinished, MessageNotFound, and
    MessageKeyTaken if a message of the target has the same unique key or debounce key.

    Raises:
        InvalidArgument: the target is the queue itself, or that of its dead letters.
        QueueNotFound: the target is being deleted.
    """
    check_not_deleted(tx, to)
    dead = dead_letter_queue(queue, policy_of(tx, queue))
    if to in (queue, dead):
        reason = "is the queue that they are in" if to == queue else f"has the dead letters of {queue.name}"
        raise InvalidArgument(f"Messages of {queue.name} cannot be moved to {to.name}, which {reason}; name another")
    policy = policy_of(tx, to)
    if policy.group_batches:
        tx.expose()  # A receive may deliver them, although they are blocked.

    def move(id: bytes) -> None:
        source, found = _find(QueueTransaction(tx, queue), id)
        target, message = QueueTransaction(tx, to), found.message
        is_dead = message.origin is not None
        job = message.origin_job if is_dead else message.job
        _check_keys(target, message, job)
        by_id.take(source, found)
        ttl_at_ms, since_ms = message.ttl_at_ms, _debounced_since_ms(source, job)
        if job is not None and not is_dead:
            unique_keys.release(source, message)
            unique_keys.end_debounce(source, message)
        if is_dead:
            _forget_death(source, message)
            dead_letters.bring_back(source, target, policy, message)
            ttl_at_ms = 0
        else:
            dead_letters.move_parts(source, target, message)
            advance_group(source, message)
            source.emit("moved", message)
        if ttl_at_ms:
            message.ttl_at_ms = ttl_at_ms
            move_ttl(target, message)
        if policy.retention_by_age or not ttl_at_ms:
            keep_from_now(target, policy, message)
        delay_ms = 0 if is_dead else max(message.due_ms - tx.now_ms, 0)
        if job is not None:
            unique_keys.claim(target, message, job)
            if job.debounce_key is not None and since_ms is not None and delay_ms:
                unique_keys.debounce(target, job.debounce_key, id, since_ms)
        insert(target, message, delay_ms=delay_ms, newest=False)
        target.counters.put += 1
        target.emit("put", message)
        source.save()
        target.save()

    return _each(tx, queue, ids, move)


def move_as_new(source: QueueTransaction, target: QueueTransaction, found: WaitingMessage) -> None:
    """Move a message without job options and workflow state as if it were put now: with a new id, and nothing counted.

    The caller saves both.
    """
    tx, message = source.tx, by_id.take(source, found)
    policy = policy_of(tx, target.queue)
    tx.expose()
    enqueue.clear_ttl(tx, source.keys, message)
    if message.has_failures:
        failures.remove(source, message)
    if message.origin is None:
        source.emit("moved", message)
    else:
        source.record("returned", message)
    advance_group(source, message)
    id = target.new_id()
    if message.has_body:
        body = tx.get(source.keys.body_key(message.id)) or b""
        tx.delete(source.keys.body_key(message.id))
        tx.put(target.keys.body_key(id), body)
    is_own = message.correlation_id == format_id(message.id)
    moved = msgspec.structs.replace(
        message,
        id=id,
        fence=0,
        attempts=0,
        visibility_ms=round(policy.visibility_seconds * 1_000),
        has_failures=False,
        correlation_id=format_id(id) if is_own else message.correlation_id,
        created_ms=tx.now_ms,
        max_attempts=policy.max_attempts,
        failures=0,
        last_error=None,
        origin=None,
        died_ms=0,
        leased_ms=0,
    )
    moved.is_special = moved.has_body or moved.blob is not None or moved.group is not None or not is_own
    keep_from_now(target, policy, moved)
    insert(target, moved, delay_ms=0, newest=True)
    target.counters.put += 1
    target.emit("put", moved)


def _each(tx: Transaction, queue: QueueKey, ids: Sequence[str], change: Callable[[bytes], None]) -> Refusals:
    refusals = [_change_one(change, id) for id in ids]
    missing = [parse_id(id) for id, each in zip(ids, refusals, strict=True) if isinstance(each, MessageNotFound)]
    if not missing:
        return refusals
    leased: dict[bytes, MessageLeased] = {}
    for each in (queue, dead_letter_queue(queue, policy_of(tx, queue))):
        leased |= _leased(QueueTransaction(tx, each), missing)
    return [
        leased.get(parse_id(id), refusal) if isinstance(refusal, MessageNotFound) else refusal
        for id, refusal in zip(ids, refusals, strict=True)
    ]


def _change_one(change: Callable[[bytes], None], id: str) -> FastnessError | None:
    try:
        change(parse_id(id))
    except (InvalidArgument, MessageNotFound, MessageLeased, MessageFinished, MessageKeyTaken) as error:
        return error
    return None


def _leased(queue_tx: QueueTransaction, ids: Sequence[bytes]) -> dict[bytes, MessageLeased]:
    """The errors of those ids that leases of the queue have, as far as one transaction searches them."""
    if total_counters(queue_tx.tx, queue_tx.keys).leased <= 0:
        return {}
    leases, position = by_id.search_many(queue_tx, ids, b"")
    reason = "is not in the queue, or it is leased: there are too many leases to be sure"
    return {
        id: _message_leased(queue_tx, id, "is leased" if id in leases else reason)
        for id in ids
        if id in leases or position is not None
    }


def _message_leased(queue_tx: QueueTransaction, id: bytes, reason: str) -> MessageLeased:
    return MessageLeased(
        f"Message {format_id(id)} of {queue_tx.queue.name} {reason}; wait until it is settled, or cancel it"
    )


def _find(queue_tx: QueueTransaction, id: bytes) -> tuple[QueueTransaction, WaitingMessage]:
    """A message of a queue that is not leased, or one of its dead letters, and the queue that it is in.

    Raises:
        MessageLeased: a consumer has it. MessageFinished: it is done or cancelled.
        MessageNotFound: it is none of these. A lease may have it, if it has no location.
    """
    queue = queue_tx.queue
    found = by_id.find_waiting(queue_tx, id)
    if found is not None:
        return queue_tx, found
    location = locations.find(queue_tx, id)
    if location is not None and location[0] == locations.LEASED:
        raise _message_leased(queue_tx, id, "is leased")
    dead = QueueTransaction(queue_tx.tx, dead_letter_queue(queue, policy_of(queue_tx.tx, queue)))
    found = by_id.find_waiting(dead, id)
    if found is not None and found.message.origin == queue.name:
        return dead, found
    known = by_id.finished_info(queue_tx, id)
    if known.state == "dead":
        raise MessageNotFound(f"Message {known.id} of {queue.name} is dead, and its dead letter is not there any more")
    raise by_id.finished(known)


def _forget_death(source: QueueTransaction, message: StoredMessage) -> None:
    """Delete what the queue of a dead letter may keep about it: that it is dead, and why."""
    if message.origin is not None:
        origin = QueueKey(source.queue.universe, message.origin)
        outcomes.forget(QueueTransaction(source.tx, origin), message.id)


def _check_keys(target: QueueTransaction, message: StoredMessage, job: JobOptions | None) -> None:
    """Refuse a message whose unique key or debounce key a message of the target has."""
    if job is None:
        return
    tx, keys = target.tx, target.keys
    if job.unique_key is not None and unique_keys.holder_of(tx, keys, job.unique_key) is not None:
        kind, key = "unique key", job.unique_key
    elif job.debounce_key is not None and unique_keys.debounced(tx, keys, job.debounce_key) is not None:
        kind, key = "debounce key", job.debounce_key
    else:
        return
    raise MessageKeyTaken(
        f"Message {format_id(message.id)} has the {kind} {key!r}, which a message of {target.queue.name} has; "
        "wait until that one is done, or cancel it"
    )


def _debounced_since_ms(source: QueueTransaction, job: JobOptions | None) -> int | None:
    """When the first message with the debounce key of a message was put."""
    if job is None or job.debounce_key is None:
        return None
    held = unique_keys.debounced(source.tx, source.keys, job.debounce_key)
    return None if held is None else held[1]
