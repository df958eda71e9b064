"""How messages leave a queue: removed with all that belongs to them, or moved to the dead letters and back.

The dead letters of a queue are a queue of their own, `<queue>.dlq` unless its policy names another. A dead letter keeps
its id, its payload, its state and its correlation id, and knows the queue that it died in, when, and of what. It is
ready there for whoever looks after dead letters, and never dies a second time.
"""

from collections.abc import Sequence

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers.queues import sidecars
from holdfast.layers.queues.counters import QueueTransaction
from holdfast.layers.queues.enqueue import TTL_IS_OVER, note_ttl, pass_the_lead, settle_into
from holdfast.layers.queues.keys import QueueKey, QueueKeys, StoredMessage, decode, id_of
from holdfast.layers.queues.policies import dead_letter_queue, policy_of
from holdfast.limits import MESSAGES_MAX, PRIORITY_MAX


def is_due(message: StoredMessage) -> bool:
    """Whether a message has failed as often as it may."""
    return message.origin is None and message.failures >= message.max_attempts


def remove(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """A message that was taken from its place is gone: forget what belongs to it, and let its group go on."""
    if message.has_body:
        queue_tx.tx.delete(queue_tx.keys.body_key(message.id))
    _forget_ttl(queue_tx.tx, queue_tx.keys, message)
    sidecars.remove(queue_tx.tx, queue_tx.queue, message)
    pass_the_lead(queue_tx, message)


def outlived(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """`remove` for a message whose time to live is over."""
    queue_tx.emit("outlived", message)
    remove(queue_tx, message)


def purged(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """`remove` for a message that nobody wants."""
    queue_tx.emit("purged", message)
    remove(queue_tx, message)


def give_back(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int) -> None:
    """A message that was parked is to be delivered again, unless its time to live is over."""
    if message.ttl_at_ms and message.ttl_at_ms <= queue_tx.tx.now_ms:
        outlived(queue_tx, message)
        return
    sidecars.release(queue_tx.tx, queue_tx.queue, message)
    settle_into(queue_tx, message, delay_ms=delay_ms, fresh=False)


def dead_letter(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Move a message that was taken from its place to the dead letters, with all that belongs to it."""
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    dead = QueueTransaction(queue_tx.tx, dead_letter_queue(queue_tx.queue, policy))
    _move(queue_tx, dead, message)
    pass_the_lead(queue_tx, message)
    queue_tx.counters.died += 1
    message.origin, message.died_ms, message.owner = queue_tx.queue.name, queue_tx.tx.now_ms, None
    note_ttl(dead, message, policy.dead_letter_retention_seconds)
    dead.make_ready(message, fresh=False)
    dead.save()
    queue_tx.emit("dead-lettered", message, message.last_error)


def redrive(tx: Transaction, queue: QueueKey, *, ids: Sequence[str] | None = None, limit: int = MESSAGES_MAX) -> int:
    """Put dead letters back into the queue that they died in, as if they had never failed; how many there were.

    Raises:
        InvalidArgument: more than one batch may have.
    """
    if not 0 < limit <= MESSAGES_MAX or (ids is not None and len(ids) > MESSAGES_MAX):
        raise InvalidArgument(f"One transaction puts 1 to {MESSAGES_MAX} dead letters back; split it")
    policy = policy_of(tx, queue)
    dead, queue_tx = QueueTransaction(tx, dead_letter_queue(queue, policy)), QueueTransaction(tx, queue)
    letters = _letters(dead, queue.name, limit) if ids is None else _named(dead, queue.name, ids)
    if not letters:
        return 0
    for message in sorted(letters, key=lambda letter: letter.id):  # Groups go on in the order of their puts.
        dead.take_ready(message)
        _move(dead, queue_tx, message)
        message.origin, message.died_ms, message.failures = None, 0, 0
        if policy.retention_seconds is not None:
            note_ttl(queue_tx, message, policy.retention_seconds)
        settle_into(queue_tx, message, delay_ms=0, fresh=False)
        queue_tx.emit("redriven", message)
    dead.save()
    queue_tx.save()
    return len(letters)


def _move(source: QueueTransaction, target: QueueTransaction, message: StoredMessage) -> None:
    """Take what belongs to a message along to another queue."""
    tx = source.tx
    _forget_ttl(tx, source.keys, message)
    if message.has_body:
        body = tx.get(source.keys.body_key(message.id))
        tx.delete(source.keys.body_key(message.id))
        tx.put(target.keys.body_key(message.id), body or b"")
    sidecars.move(tx, source.queue, target.queue, message)


def _forget_ttl(tx: Transaction, keys: QueueKeys, message: StoredMessage) -> None:
    if message.ttl_at_ms:
        tx.delete(keys.due_key(message.ttl_at_ms, message.id + TTL_IS_OVER))
        message.ttl_at_ms = 0


def _letters(dead: QueueTransaction, origin: str, limit: int) -> list[StoredMessage]:
    """At most `limit` dead letters of a queue. Several queues may share one for their dead letters."""
    begin, end = dead.keys.ready_range()
    found: list[StoredMessage] = []
    while len(found) < limit and (pairs := dead.tx.scan(begin, end, limit=MESSAGES_MAX)):
        letters = [decode(value) for _, value in pairs]
        found += [letter for letter in letters if letter.origin == origin]
        begin = pairs[-1][0] + b"\x00"
    return found[:limit]


def _named(dead: QueueTransaction, origin: str, ids: Sequence[str]) -> list[StoredMessage]:
    found = []
    for id in dict.fromkeys(map(id_of, ids)):
        for priority in range(PRIORITY_MAX + 1):
            stored = dead.tx.get(dead.keys.ready_place(priority, id))
            if stored is not None and decode(stored).origin == origin:
                found.append(decode(stored))
    return found
