"""Policies: what holds for the messages of a queue that do not say otherwise."""

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers.queues.keys import QueueKey, keys_of
from holdfast.limits import MAX_ATTEMPTS_MAX, QUEUE_NAME_CHARACTERS_MAX, TTL_SECONDS_MAX, VISIBILITY_SECONDS_MAX
from holdfast.names import checked_name
from holdfast.wire.queues import QueuePolicy

DEFAULT = QueuePolicy()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QueuePolicy).decode


def policy_of(tx: Transaction, queue: QueueKey) -> QueuePolicy:
    """The policy of a queue."""
    stored = tx.get(keys_of(queue).policy)
    return DEFAULT if stored is None else _decode(stored)


def set_policy(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> QueuePolicy:
    """Give a queue another policy; it holds for what is put and delivered from now on.

    Raises:
        InvalidArgument: a value is out of its range.
    """
    try:
        policy = msgspec.convert(msgspec.to_builtins(policy), QueuePolicy)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"The policy could not be read again ({error}); correct it") from None
    visibility_ms(policy.visibility_seconds)
    max_attempts(policy.max_attempts)
    for name, seconds in (
        ("retention_seconds", policy.retention_seconds),
        ("dead_letter_retention_seconds", policy.dead_letter_retention_seconds),
    ):
        if seconds is not None and not 0.001 <= seconds <= TTL_SECONDS_MAX:
            raise InvalidArgument(f"{name} is {seconds}; choose 0.001 to {TTL_SECONDS_MAX:.0f}, or none")
    if policy.rate_per_second is not None and not 0.001 <= policy.rate_per_second <= 1_000_000:
        raise InvalidArgument(f"rate_per_second is {policy.rate_per_second}; choose 0.001 to 1,000,000, or none")
    if policy.dead_letter_queue is not None:
        target = queue_name(policy.dead_letter_queue)
        if target == queue.name:
            raise InvalidArgument(f"{target} cannot be the queue of its own dead letters; choose another name")
        policy = msgspec.structs.replace(policy, dead_letter_queue=target)
    tx.put(keys_of(queue).policy, _encode(policy))
    return policy


def dead_letter_queue(queue: QueueKey, policy: QueuePolicy) -> QueueKey:
    """Where the dead letters of a queue go."""
    return QueueKey(queue.universe, policy.dead_letter_queue or f"{queue.name}.dlq")


def queue_name(name: object) -> str:
    """The name of a queue in lower case.

    Raises:
        InvalidName: it is no name.
        InvalidArgument: it is too long for its dead letters to have one.
    """
    checked = checked_name("queue", name)
    if len(checked) > QUEUE_NAME_CHARACTERS_MAX and not checked.endswith(".dlq"):
        raise InvalidArgument(f"A queue's name has at most {QUEUE_NAME_CHARACTERS_MAX} characters, not {len(checked)}")
    return checked


def visibility_ms(seconds: float) -> int:
    """How long a delivery is leased.

    Raises:
        InvalidArgument: no time at all, or too long.
    """
    if not 0.001 <= seconds <= VISIBILITY_SECONDS_MAX:
        raise InvalidArgument(f"A visibility timeout is 0.001 to {VISIBILITY_SECONDS_MAX:.0f} s, not {seconds}")
    return round(seconds * 1_000)


def max_attempts(count: int) -> int:
    """How many failures make a dead letter.

    Raises:
        InvalidArgument: none, or too many.
    """
    if not 1 <= count <= MAX_ATTEMPTS_MAX:
        raise InvalidArgument(f"max_attempts is {count}; choose 1 to {MAX_ATTEMPTS_MAX}")
    return count
