"""Outcomes of messages: the result of one that is done, the error of one that is dead, or that it was cancelled.

    "o" | id                ->  the outcome
    "c" | lease | position  ->  the id of a message that was cancelled while it was leased
    "e" | minute | key      ->  nothing: the key, after the prefix of the queue, is deleted after that minute

An outcome is kept for `result_ttl_seconds` of the policy, in the commit that made it: of an ack with a result, of every
message that was put with `keep_result`, and of cancelled ones. Other messages leave nothing behind. One due entry per
minute deletes what has expired. Readers check the time, so a result ends exactly when its time has passed.

The failed attempts of a message that is done or cancelled are kept as long as its outcome. Their record stays as it is
(`failures`) and only gets an entry under "e", so an ack does not read or copy it. Those of a dead letter are in the
dead letter queue, and are removed with it: then the outcome still has the last one.
"""

from typing import Final, Literal

import msgspec

from fastness.errors import InvalidArgument, MessageFailed, PayloadTooLarge
from fastness.kv import Transaction
from fastness.layers import blobs
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.keys import QueueKeys
from fastness.layers.queues.policies import policy_of
from fastness.limits import EXPIRY_BATCH_MAX, RESULT_BYTES_MAX
from fastness.plurals import counted
from fastness.wire.queues import Failure, MessageResult, NewResult, message_cancelled
from fastness.wire.stored_messages import StoredMessage, format_id

EXPIRY_DUE: Final = b"E"  # The kind of a due entry: records of a minute have expired.
_MINUTE_MS: Final = 60_000
_MINUTE_BYTES: Final = 8


class OutcomeRecord(msgspec.Struct, frozen=True, array_like=True):
    """What became of a message."""

    state: Literal["done", "dead", "cancelled"]
    finished_ms: int
    expires_ms: int
    created_ms: int
    attempts: int
    failures: int
    max_attempts: int
    priority: int
    correlation_id: str
    key: str | None
    group: str | None
    owner: str | None  # Who had it leased.
    result: NewResult | None = None
    failure: Failure | None = None  # The last one, if it is dead.


_encode = msgspec.msgpack.Encoder().encode
decode_outcome = msgspec.msgpack.Decoder(OutcomeRecord).decode


def check_result(result: NewResult) -> None:
    """Check a result that was built in this process, or came from the network.

    Raises:
        PayloadTooLarge: it is too large to be stored inline.
        InvalidArgument: it has both a value and a blob, or the size of a blob without one.
    """
    if len(result.value) > RESULT_BYTES_MAX:
        raise PayloadTooLarge(
            f"The result has {len(result.value)} bytes, and {RESULT_BYTES_MAX} are stored inline; "
            "store it as a blob and pass its hash"
        )
    if result.blob is not None and result.value:
        raise InvalidArgument("The result has both a value and a blob; leave one of them out")
    if result.blob is None and result.blob_size:
        raise InvalidArgument("blob_size is given without a blob; give both, or leave it out")


def record(
    queue_tx: QueueTransaction,
    message: StoredMessage,
    state: Literal["done", "dead", "cancelled"],
    *,
    result: NewResult | None = None,
    failure: Failure | None = None,
) -> None:
    """Keep what became of a message. Unless it is dead, the caller leaves its failures where they are."""
    tx, keys = queue_tx.tx, queue_tx.keys
    if result is not None and result.blob is not None:
        blobs.use(tx, queue_tx.queue.universe, result.blob)
    forget(queue_tx, message.id)
    expires_ms = tx.now_ms + round(policy_of(tx, queue_tx.queue).result_ttl_seconds * 1_000)
    job = message.job or message.origin_job
    kept = OutcomeRecord(
        state=state,
        finished_ms=tx.now_ms,
        expires_ms=expires_ms,
        created_ms=message.created_ms,
        attempts=message.attempts,
        failures=message.failures,
        max_attempts=message.max_attempts,
        priority=message.priority,
        correlation_id=message.correlation_id,
        key=None if job is None else job.key,
        group=message.group,
        owner=message.owner,
        result=result,
        failure=failure,
    )
    tx.put(keys.outcomes + message.id, _encode(kept))
    expire_at(queue_tx, keys.outcomes + message.id, expires_ms)
    if message.has_failures and state != "dead":
        expire_at(queue_tx, keys.failures_key(message.id), expires_ms)


def forget(queue_tx: QueueTransaction, id: bytes) -> None:
    """Delete the outcome of a message, if there is one."""
    tx, key = queue_tx.tx, queue_tx.keys.outcomes + id
    stored = tx.get(key)
    if stored is not None:
        _release_blob(queue_tx, stored)
        tx.delete(key)


def find(tx: Transaction, keys: QueueKeys, id: bytes) -> OutcomeRecord | None:
    """The outcome of a message; None if none is kept."""
    stored = tx.get(keys.outcomes + id)
    outcome = None if stored is None else decode_outcome(stored)
    return None if outcome is None or outcome.expires_ms <= tx.now_ms else outcome


def result_of(id: bytes, outcome: OutcomeRecord) -> MessageResult:
    """The result of a message that is done.

    Raises:
        MessageFailed: it is a dead letter.
        MessageCancelled: it was cancelled.
    """
    if outcome.state == "cancelled":
        raise message_cancelled(format_id(id))
    if outcome.state == "dead":
        raise failed(id, outcome.failure, outcome.failures)
    result = outcome.result
    is_inline = result is None or result.blob is None
    return MessageResult(
        id=format_id(id),
        value=(b"" if result is None else result.value) if is_inline else None,
        content_type="" if result is None else result.content_type,
        blob=None if result is None else result.blob,
        size=0 if result is None else len(result.value) if is_inline else result.blob_size,
        attempts=outcome.attempts,
        finished_ms=outcome.finished_ms,
    )


def failed(id: bytes, failure: Failure | None, failures: int) -> MessageFailed:
    """The error of asking for the result of a dead letter."""
    kind = None if failure is None else failure.error_type
    text = None if failure is None else failure.message
    reason = ": ".join([each for each in (kind, text) if each]) or "no error was given"
    return MessageFailed(
        f"Message {format_id(id)} is dead after {counted(failures, 'failed attempt')}: {reason}. "
        "Correct the cause, then redrive it"
    )


def cancel_lease(queue_tx: QueueTransaction, ref: bytes, id: bytes) -> None:
    """Remember that a leased message was cancelled, so that settling it is refused as that."""
    tx, keys = queue_tx.tx, queue_tx.keys
    tx.put(keys.cancelled + ref, id)
    ttl_ms = round(policy_of(tx, queue_tx.queue).result_ttl_seconds * 1_000)
    expire_at(queue_tx, keys.cancelled + ref, tx.now_ms + ttl_ms)


def is_cancelled(tx: Transaction, keys: QueueKeys, ref: bytes) -> bool:
    """Whether the message of a lease and position was cancelled."""
    return tx.get(keys.cancelled + ref) is not None


def expire_at(queue_tx: QueueTransaction, key: bytes, at_ms: int) -> None:
    """Let a key of the queue be deleted some time after `at_ms`."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    minute = at_ms // _MINUTE_MS + 1
    tx.put(keys.expiries + minute.to_bytes(_MINUTE_BYTES, "big") + key[len(keys.prefix) :], b"")
    if counters.expiry_minute != minute:
        counters.expiry_minute = minute
        add_expiry_due(queue_tx, minute, minute * _MINUTE_MS)


def add_expiry_due(queue_tx: QueueTransaction, minute: int, at_ms: int) -> None:
    entry = EXPIRY_DUE + minute.to_bytes(_MINUTE_BYTES, "big")
    queue_tx.tx.put(queue_tx.keys.due_key(at_ms, entry), EXPIRY_DUE)
    queue_tx.counters.add_due(at_ms)


def delete_expired(queue_tx: QueueTransaction, entry: bytes) -> None:
    """Delete the records of a minute, a bounded number now and the rest later. `entry` is that of the due index."""
    tx, keys = queue_tx.tx, queue_tx.keys
    prefix = keys.expiries + entry[1 : 1 + _MINUTE_BYTES]
    expired = tx.scan(prefix, prefix + b"\xff" * 8, limit=EXPIRY_BATCH_MAX)
    for index_key, _ in expired:
        tx.delete(index_key)
        _delete_if_expired(queue_tx, keys.prefix + index_key[len(prefix) :])
    if len(expired) == EXPIRY_BATCH_MAX:
        add_expiry_due(queue_tx, int.from_bytes(entry[1 : 1 + _MINUTE_BYTES], "big"), tx.now_ms)


def _delete_if_expired(queue_tx: QueueTransaction, key: bytes) -> None:
    """Delete a record, unless it was written again with a later end."""
    tx, keys = queue_tx.tx, queue_tx.keys
    stored = tx.get(key)
    if stored is None:
        return
    if key.startswith(keys.outcomes):
        if decode_outcome(stored).expires_ms > tx.now_ms:
            return
        _release_blob(queue_tx, stored)
    elif key.startswith(keys.unique.prefix) and not 0 < int.from_bytes(stored[16:24], "big") <= tx.now_ms:
        return
    tx.delete(key)


def _release_blob(queue_tx: QueueTransaction, stored: bytes) -> None:
    result = decode_outcome(stored).result
    if result is not None and result.blob is not None:
        blobs.release(queue_tx.tx, queue_tx.queue.universe, result.blob)
