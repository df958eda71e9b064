"""Failed attempts of messages: what is kept about them, and the back-off before the next attempt.

The failures of a message are one record beside it. It is written when an attempt fails, moves with the message to the
dead letter queue and back, and is removed with the message. `StoredMessage.has_failures` says whether there is one, so
a message that never failed costs no read or write here. If the outcome of a message that is done or cancelled is kept,
its failures stay where they are for the same time: see `outcomes`.
"""

import hashlib
from collections.abc import Iterable
from typing import TypedDict

import msgspec

from fastness.kv import Transaction
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.policies import dead_letter_queue, takes_dead_letters
from fastness.limits import (
    ERROR_TYPE_BYTES_MAX,
    FAILURE_MESSAGE_BYTES_MAX,
    FAILURES_BYTES_MAX,
    FAILURES_DELIVERED_BYTES_MAX,
    FAILURES_READ_BYTES_MAX,
    LAST_ERROR_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
)
from fastness.wire.queues import Failure, QueuePolicy
from fastness.wire.stored_messages import StoredHead, StoredMessage

FAILED = "failed"  # It was nacked as a failure.
EXPIRED = "expired"  # Its lease ended before it was settled.
REJECTED = "rejected"

Failures = dict[bytes, list[Failure]]  # By message id, the oldest failure first.

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Failure]).decode
_FAILURE_COST_BYTES = 160  # Of a stored failure without its texts: field names, numbers and times.


class Reported(TypedDict, total=False):
    """What a consumer says about a failure."""

    error: str | None
    error_type: str | None
    traceback: str | None


def record(
    queue_tx: QueueTransaction,
    policy: QueuePolicy,
    message: StoredMessage,
    outcome: str,
    *,
    failed_ms: int,
    error: str | None = None,
    error_type: str | None = None,
    traceback: str | None = None,
) -> None:
    """Count a failure of a message that was leased until now, and store what is known about it.

    Without `error` and `error_type` the message keeps its last error. If the failure makes it a dead letter, its
    failures are stored in the dead letter queue at once.
    """
    message.failures += 1
    message.is_special = True
    reason = error if error_type is None else error_type if error is None else f"{error_type}: {error}"
    if reason is not None:
        message.last_error = _start(reason, LAST_ERROR_BYTES_MAX)
    failure = Failure(
        attempt=message.attempts,
        owner=message.owner or "",
        outcome=outcome,
        leased_ms=message.leased_ms,
        failed_ms=failed_ms,
        error_type=None if error_type is None else _start(error_type, ERROR_TYPE_BYTES_MAX),
        message=None if error is None else _start(error, FAILURE_MESSAGE_BYTES_MAX),
        traceback=None if traceback is None else _end(traceback, TRACEBACK_BYTES_MAX),
    )
    kept = _newest([*_stored(queue_tx.tx, queue_tx.keys, message), failure], policy.failures_kept)
    is_dead = makes_dead_letter(queue_tx, policy, message, outcome)
    if message.has_failures and (is_dead or not kept):
        remove(queue_tx, message)
    if kept:
        keys = keys_of(dead_letter_queue(queue_tx.queue, policy)) if is_dead else queue_tx.keys
        queue_tx.tx.put(keys.failures_key(message.id), _encode(kept))
    message.has_failures = bool(kept)


def makes_dead_letter(queue_tx: QueueTransaction, policy: QueuePolicy, message: StoredMessage, outcome: str) -> bool:
    """Whether the last failure of a message makes it a dead letter now. Deliveries are counted by `leasing`."""
    if message.origin is not None:
        return False
    is_last = policy.dead_letter_rule == "failures" and message.failures >= message.max_attempts
    return (is_last or outcome == REJECTED) and takes_dead_letters(queue_tx.tx, queue_tx.queue, policy)


def remove(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Remove the record of a message's failures."""
    queue_tx.tx.delete(queue_tx.keys.failures_key(message.id))


def move(source: QueueTransaction, target: QueueTransaction, message: StoredMessage) -> None:
    """Move the failures of a message to another queue, unless they are there already."""
    if message.has_failures:
        tx, key = source.tx, source.keys.failures_key(message.id)
        stored = tx.get(key)
        if stored is not None:
            tx.delete(key)
            tx.put(target.keys.failures_key(message.id), stored)


def delivered_failures(tx: Transaction, queue: QueueKey, messages: Iterable[StoredHead]) -> Failures:
    """The failures of messages for their next consumers, without tracebacks: deliveries stay short."""
    return _read(tx, queue, messages, bytes_max=FAILURES_DELIVERED_BYTES_MAX, with_tracebacks=False)


def failures_of(tx: Transaction, queue: QueueKey, messages: Iterable[StoredHead]) -> Failures:
    """The failures of messages, with tracebacks."""
    return _read(tx, queue, messages, bytes_max=FAILURES_READ_BYTES_MAX, with_tracebacks=True)


def failures_of_finished(tx: Transaction, keys: QueueKeys, id: bytes) -> list[Failure]:
    """The failures of a message that is done or cancelled and whose outcome is kept, with tracebacks."""
    stored = tx.get(keys.failures_key(id))
    return [] if stored is None else _decode(stored)


def retry_delay_ms(policy: QueuePolicy, message: StoredMessage) -> int:
    """The back-off after the last failure of a message: it grows with each failure, up to the policy's maximum."""
    first = policy.retry_delay_seconds if message.retry_delay_ms is None else message.retry_delay_ms / 1_000
    seconds = _growing(first, policy.retry_factor, message.failures - 1, policy.retry_delay_max_seconds)
    return round(seconds * (1 + policy.retry_jitter * _spread(message)) * 1_000)


def _growing(first: float, factor: float, steps: int, longest: float) -> float:
    if not first:
        return 0.0
    try:
        return min(first * factor**steps, longest)
    except OverflowError:
        return longest


def _spread(message: StoredMessage) -> float:
    """A number from -1 to 1. It differs between messages and failures, and is the same when a transaction repeats."""
    digest = hashlib.blake2b(message.id + message.failures.to_bytes(8, "big"), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 0xFFFF_FFFF * 2 - 1


def _read(
    tx: Transaction, queue: QueueKey, messages: Iterable[StoredHead], *, bytes_max: int, with_tracebacks: bool
) -> Failures:
    """The failures of messages. After `bytes_max` in total, the newest one of each, without its traceback."""
    found: Failures = {}
    keys, left = keys_of(queue), bytes_max
    for message in messages:
        if not message.has_failures:
            continue
        read: list[Failure] = []
        for failure in reversed(_stored(tx, keys, message)):
            shown = failure if with_tracebacks else _without_traceback(failure)
            left -= _size(shown)
            if left < 0:
                if not read:
                    read.append(_without_traceback(shown))
                break
            read.append(shown)
        found[message.id] = read[::-1]
    return found


def _stored(tx: Transaction, keys: QueueKeys, message: StoredHead) -> list[Failure]:
    stored = tx.get(keys.failures_key(message.id)) if message.has_failures else None
    return [] if stored is None else _decode(stored)


def _newest(failures: list[Failure], count: int) -> list[Failure]:
    """The newest `count` failures. Above FAILURES_BYTES_MAX the oldest ones lose their tracebacks, then drop out."""
    kept = failures[-count:] if count else []
    sizes = [_size(failure) for failure in kept]
    for index, failure in enumerate(kept[:-1]):
        if sum(sizes) <= FAILURES_BYTES_MAX:
            break
        kept[index] = _without_traceback(failure)
        sizes[index] = _size(kept[index])
    while sum(sizes) > FAILURES_BYTES_MAX:
        del kept[0], sizes[0]
    return kept


def _without_traceback(failure: Failure) -> Failure:
    return failure if failure.traceback is None else msgspec.structs.replace(failure, traceback=None)


def _size(failure: Failure) -> int:
    texts = (failure.owner, failure.error_type, failure.message, failure.traceback)
    return _FAILURE_COST_BYTES + sum(len(text.encode()) for text in texts if text)


def _start(text: str, bytes_max: int) -> str:
    return text.encode(errors="replace")[:bytes_max].decode(errors="ignore")


def _end(text: str, bytes_max: int) -> str:
    """The end of a text, which in a traceback names the error."""
    return text.encode(errors="replace")[-bytes_max:].decode(errors="ignore")
