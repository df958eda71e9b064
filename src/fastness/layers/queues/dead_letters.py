"""How messages leave a queue: removed with everything that belongs to them, or moved to the dead letter queue and back.

The dead letter queue is `<queue>.dlq` unless the policy names another. A dead letter keeps its id, payload, state,
correlation id and failures, and records its original queue, the time, and the last error. It is ready in the dead
letter queue like any message, and is never dead-lettered again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastness.kv import Transaction
from fastness.layers.queues import failures, locations, outcomes, sidecars, unique_keys
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.enqueue import clear_ttl, insert, keep_from_now, remove_parts, set_ttl
from fastness.layers.queues.groups import advance_group
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.queues.policies import SUFFIX, check_not_deleted, dead_letter_queue, policy_of
from fastness.layers.queues.work import Work
from fastness.limits import MESSAGES_MAX, PRIORITY_MAX
from fastness.wire.queues import QueuePolicy
from fastness.wire.stored_messages import JobOptions, StoredMessage, decode, parse_id


def remove(queue_tx: QueueTransaction, message: StoredMessage, *, keep_failures: bool = False) -> None:
    """Delete what belongs to a message that was taken out, and advance its group.

    With `keep_failures` its failed attempts stay, until they expire together with its outcome.
    """
    remove_parts(queue_tx, message)
    if message.has_failures and not keep_failures:
        failures.remove(queue_tx, message)
    sidecars.remove(queue_tx.tx, queue_tx.queue, message)
    advance_group(queue_tx, message)


def expire_message(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """`remove` a message whose TTL has expired, and emit the event."""
    queue_tx.emit("outlived", message)
    remove(queue_tx, message)


def purge_message(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """`remove` a message in a purge, and emit the event."""
    queue_tx.emit("purged", message)
    remove(queue_tx, message)


def cancel_message(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """`remove` a message that was cancelled, keep that, and emit the event."""
    queue_tx.emit("cancelled", message)
    outcomes.record(queue_tx, message, "cancelled")
    remove(queue_tx, message, keep_failures=True)


def requeue(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int) -> None:
    """Insert a message that was taken out again, or remove it if its TTL has expired."""
    if message.ttl_at_ms and message.ttl_at_ms <= queue_tx.tx.now_ms:
        expire_message(queue_tx, message)
        return
    sidecars.release(queue_tx.tx, queue_tx.queue, message)
    insert(queue_tx, message, delay_ms=delay_ms, newest=False)


def dead_letter(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Move a message that was taken out, with everything that belongs to it, to the dead letter queue.

    The caller has asked `takes_dead_letters`. The age of the message counts on, and anew in FIFO queues, as in SQS.
    """
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    dead = QueueTransaction(queue_tx.tx, dead_letter_queue(queue_tx.queue, policy))
    move_parts(queue_tx, dead, message)
    if message.job is not None:
        _end_job(queue_tx, message, message.job)
    advance_group(queue_tx, message)
    queue_tx.counters.dead_lettered += 1
    message.origin, message.died_ms = queue_tx.queue.name, queue_tx.tx.now_ms
    message.origin_job, message.job = message.job, None
    message.owner, message.txn_id, message.lease_ref = None, None, b""
    set_ttl(dead, message, policy.dead_letter_retention_seconds)
    if policy.group_batches:
        message.kept_from_ms = queue_tx.tx.now_ms
    dead.make_ready(message, newest=False)
    dead.record("arrived", message)
    dead.save()
    queue_tx.emit("dead-lettered", message, message.last_error)


def _end_job(queue_tx: QueueTransaction, message: StoredMessage, job: JobOptions) -> None:
    """Free the keys of a message that is dead, and keep why, if that was asked for."""
    if job.keep_result:
        dead = dead_letter_queue(queue_tx.queue, policy_of(queue_tx.tx, queue_tx.queue))
        known = failures.failures_of(queue_tx.tx, dead, [message]).get(message.id)  # They are there already.
        outcomes.record(queue_tx, message, "dead", failure=known[-1] if known else None)
    locations.clear(queue_tx, message.id)
    unique_keys.release(queue_tx, message)


def redrive(tx: Transaction, queue: QueueKey, *, ids: Sequence[str] | None = None, limit: int = MESSAGES_MAX) -> int:
    """Move dead letters back to their original queue with no failures counted; returns how many.

    A dead letter whose unique key another message has stays where it is.

    Raises:
        QueueNotFound: the queue is being deleted.
    """
    check_not_deleted(tx, queue)
    policy = policy_of(tx, queue)
    dead, queue_tx = QueueTransaction(tx, dead_letter_queue(queue, policy)), QueueTransaction(tx, queue)
    letters = _letters(dead, queue_tx, limit) if ids is None else _letters_by_id(dead, queue.name, ids)
    if not letters:
        return 0
    count = 0
    for message in sorted(letters, key=lambda letter: letter.id):  # Keeps the order within a group.
        if _is_key_taken(queue_tx, message.origin_job):  # By another letter of this batch.
            continue
        count += 1
        dead.remove_ready(message)
        bring_back(dead, queue_tx, policy, message)
        if message.job is not None:
            outcomes.forget(queue_tx, message.id)
            unique_keys.claim(queue_tx, message, message.job)
        keep_from_now(queue_tx, policy, message)
        insert(queue_tx, message, delay_ms=0, newest=False)
        queue_tx.emit("redriven", message)
    if policy.group_batches:
        tx.expose()  # A receive may deliver them, although they are blocked.
    dead.save()
    queue_tx.save()
    return count


def bring_back(dead: QueueTransaction, queue_tx: QueueTransaction, policy: QueuePolicy, message: StoredMessage) -> None:
    """Let a dead letter that was taken out be a message of a queue again, with nothing counted that makes it one."""
    dead.record("returned", message)
    move_parts(dead, queue_tx, message)
    message.job, message.origin_job = message.origin_job, None
    message.origin, message.died_ms, message.failures = None, 0, 0
    if policy.dead_letter_rule != "failures":
        message.attempts = 0


def redrive_step(tx: Transaction, queue: QueueKey, work: Work, *, ids: Sequence[str] | None, limit: int) -> None:
    """Redrive one batch."""
    requested = limit if ids is None else len(ids)
    size, count = min(MESSAGES_MAX, requested - work.tried), 0
    if size > 0:
        batch = None if ids is None else ids[work.tried : work.tried + size]
        count = redrive(tx, queue, ids=batch, limit=size)
        work.count += count
        work.tried += size
    work.is_done = work.tried >= requested or (ids is None and count < size)


class LetterSize(NamedTuple):
    """A ready dead letter: its key in the dead letter queue, when it failed for the last time, and its bytes."""

    key: bytes
    died_ms: int
    bytes: int


def sizes(tx: Transaction, dead: QueueKey, *, after: bytes = b"", limit: int) -> tuple[list[LetterSize], bytes | None]:
    """The dead letters among the next `limit` messages after the key `after`, and the key to continue after."""
    begin, end = keys_of(dead).ready_range()
    pairs = tx.scan(after + b"\x00" if after else begin, end, limit=limit)
    found = []
    for key, value in pairs:
        letter = decode(value)
        if letter.origin is not None:
            apart = letter.size if letter.has_body or letter.blob is not None else 0
            found.append(LetterSize(key, letter.died_ms, len(value) + apart))
    return found, pairs[-1][0] if len(pairs) == limit else None


def drop(tx: Transaction, dead: QueueKey, letters: Iterable[LetterSize]) -> int:
    """Remove dead letters, unless they were received or redriven since; how many."""
    dead_tx, count = QueueTransaction(tx, dead), 0
    for letter in letters:
        stored = tx.get(letter.key)
        if stored is not None and decode(stored).died_ms == letter.died_ms:
            message = decode(stored)
            dead_tx.remove_ready(message)
            expire_message(dead_tx, message)
            count += 1
    if count:
        dead_tx.save()
    return count


def queues_of(tx: Transaction, universe: str, names: Iterable[str]) -> set[str]:
    """Of the queues with these names, all that receive dead letters."""
    found = {name for name in names if name.endswith(SUFFIX)}
    for name in names:
        if tx.get(keys_of(QueueKey(universe, name)).policy) is not None:
            queue = QueueKey(universe, name)
            found.add(dead_letter_queue(queue, policy_of(tx, queue)).name)
    return found


def move_parts(source: QueueTransaction, target: QueueTransaction, message: StoredMessage) -> None:
    """Move the body, the failures and the state of a message to another queue, and clear its TTL."""
    tx = source.tx
    clear_ttl(tx, source.keys, message)
    if message.has_body:
        body = tx.get(source.keys.body_key(message.id))
        tx.delete(source.keys.body_key(message.id))
        tx.put(target.keys.body_key(message.id), body or b"")
    failures.move(source, target, message)
    sidecars.move(tx, source.queue, target.queue, message)


def _letters(dead: QueueTransaction, queue_tx: QueueTransaction, limit: int) -> list[StoredMessage]:
    """At most `limit` dead letters that can return to a queue. Several queues may share one dead letter queue."""
    begin, end = dead.keys.ready_range()
    found: list[StoredMessage] = []
    while len(found) < limit and (pairs := dead.tx.scan(begin, end, limit=MESSAGES_MAX)):
        letters = [decode(value) for _, value in pairs]
        found += [
            letter
            for letter in letters
            if letter.origin == queue_tx.queue.name and not _is_key_taken(queue_tx, letter.origin_job)
        ]
        begin = pairs[-1][0] + b"\x00"
    return found[:limit]


def _is_key_taken(queue_tx: QueueTransaction, job: JobOptions | None) -> bool:
    """Whether another message has the unique key that a dead letter had."""
    unique_key = None if job is None else job.unique_key
    return unique_key is not None and unique_keys.holder_of(queue_tx.tx, queue_tx.keys, unique_key) is not None


def _letters_by_id(dead: QueueTransaction, origin: str, ids: Sequence[str]) -> list[StoredMessage]:
    found = []
    for id in dict.fromkeys(map(parse_id, ids)):
        for priority in range(PRIORITY_MAX + 1):
            stored = dead.tx.get(dead.keys.ready_key_at(priority, id))
            if stored is not None and decode(stored).origin == origin:
                found.append(decode(stored))
    return found
