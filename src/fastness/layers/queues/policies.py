"""Queue policies: defaults for a queue's messages, how long they are kept, rate limit, pause, and dead letter queue."""

import msgspec

from fastness.errors import InvalidArgument, QueueNotFound, SqsQueueDeletedRecently
from fastness.kv import Transaction
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.wire.queues import QueuePolicy
from fastness.wire.stored_messages import StoredMessage, put_at_ms

DEFAULT = QueuePolicy()
SUFFIX = ".dlq"  # Of the name of a dead letter queue, unless the policy names it.
# In the place of the policy of a queue that does not exist any more, while its messages are removed. It delivers none.
DELETED = b"\xc0"
_OF_DELETED = QueuePolicy(paused=True)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QueuePolicy).decode


def policy_of(tx: Transaction, queue: QueueKey) -> QueuePolicy:
    """The policy of a queue; the default one if none was set."""
    return policy_at(tx, keys_of(queue))


def check_exists(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> None:
    """Raise QueueNotFound unless the queue has a policy or was used. `policy` is that of `policy_of`, read just now."""
    is_absent = policy is DEFAULT and not tx.scan(*keys_of(queue).all_counters.range(), limit=1)
    if is_absent or policy is _OF_DELETED:
        raise QueueNotFound(
            f"Queue {queue.name} does not exist; check its name, or create it by setting a policy or putting a message"
        )


def policy_at(tx: Transaction, keys: QueueKeys) -> QueuePolicy:
    """`policy_of` the queue with these keys."""
    stored = tx.get(keys.policy)
    if stored is None:
        return DEFAULT
    return _OF_DELETED if stored == DELETED else _decode(stored)


def exists(tx: Transaction, keys: QueueKeys) -> bool:
    """Whether a queue has a policy, or was used; it does not exist while it is being deleted."""
    stored = tx.get(keys.policy)
    if stored is not None:
        return stored != DELETED
    return bool(tx.scan(*keys.all_counters.range(), limit=1))


def is_deleted(tx: Transaction, keys: QueueKeys) -> bool:
    """Whether a queue is being deleted."""
    return tx.get(keys.policy) == DELETED


def history_ms(policy: QueuePolicy) -> int:
    """How long changes of messages are recorded; 0: they are not."""
    return round(policy.history_seconds * 1_000) if policy.history == "durable" else 0


def kept_ms(policy: QueuePolicy) -> int | None:
    """How old a message may get by a policy; None if it does not matter."""
    seconds = policy.retention_seconds
    return None if seconds is None or not policy.retention_by_age else round(seconds * 1_000)


def since_ms(message: StoredMessage) -> int:
    """From when the age of a message counts. It is not before the time in its id."""
    return message.kept_from_ms or put_at_ms(message.id)


def is_too_old(policy: QueuePolicy, message: StoredMessage, now_ms: int) -> bool:
    """Whether a message is kept no longer. It may be stored until the next pass of `retention.py`."""
    allowed_ms = kept_ms(policy)
    return allowed_ms is not None and since_ms(message) <= now_ms - allowed_ms


def set_policy(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> QueuePolicy:
    """Replace a queue's policy. It applies to puts and deliveries from now on.

    Raises:
        InvalidArgument: the queue is its own dead letter queue.
        SqsQueueDeletedRecently: the queue is being deleted.
    """
    if is_deleted(tx, keys_of(queue)):
        raise SqsQueueDeletedRecently(f"Queue {queue.name} is being deleted; wait a moment, then set its policy")
    if policy.dead_letter_queue == queue.name:
        raise InvalidArgument(f"{queue.name} cannot be its own dead letter queue; choose another name")
    tx.put(keys_of(queue).policy, _encode(policy))
    return policy


def dead_letter_queue(queue: QueueKey, policy: QueuePolicy) -> QueueKey:
    """The queue that receives a queue's dead letters."""
    return QueueKey(queue.universe, policy.dead_letter_queue or f"{queue.name}{SUFFIX}")


def takes_dead_letters(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> bool:
    """Whether the dead letter queue of a queue can take a message now. Otherwise the message stays in the queue.

    A queue that is being deleted takes none: they would be deleted with it. By the rule of deliveries, a queue that the
    policy names must exist. Others are made by their first dead letter.
    """
    if policy is _OF_DELETED:
        return False  # The queue itself is being deleted, and its messages with it.
    keys = keys_of(dead_letter_queue(queue, policy))
    if policy.dead_letter_rule == "deliveries" and policy.dead_letter_queue is not None:
        return exists(tx, keys)
    return not is_deleted(tx, keys)


def check_not_deleted(tx: Transaction, queue: QueueKey) -> None:
    """Raise QueueNotFound if a queue is being deleted, so that no message is moved to it."""
    if is_deleted(tx, keys_of(queue)):
        raise QueueNotFound(
            f"Queue {queue.name} does not exist: it is being deleted. Name another one, or create it again after that"
        )
