"""Upkeep of a queue: expired records are deleted, and counters of many processes become one record.

Embedded, puts delete expired idempotency keys, ack records and history once a minute. Where several processes write,
plain puts share the queue and must not delete what others may read. There the sweeper does it, and the other puts.

Each of these processes has counters of its own, and every process that ever wrote leaves a record. So the sweeper folds
them: their sums become the record of the writer "", and theirs are deleted. A process whose record is gone begins with
a new one, which takes over from the folded one what is not a sum: see `counters.load_counters`.
"""

from typing import Final

from fastness.kv import Transaction
from fastness.layers.queues.counters import QueueTransaction, decode_counters, merged_counters
from fastness.layers.queues.history import events_before
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.policies import history_ms, policy_of
from fastness.limits import (
    COUNTERS_FOLDED_MAX,
    COUNTERS_UNFOLDED_MAX,
    EXPIRED_KEYS_BATCH_MAX,
    IDEMPOTENCY_SECONDS,
)
from fastness.wire.stored_messages import encode

_MINUTE_MS: Final = 60_000
_Ranges = list[tuple[bytes, bytes]]


def needs_upkeep(tx: Transaction, queue: QueueKey) -> bool:
    """Whether `run_upkeep` has something to do. Always false on an embedded store, where puts do it."""
    if not tx.writer:
        return False
    keys = keys_of(queue)
    writers = tx.scan(*keys.all_counters.range(), limit=COUNTERS_UNFOLDED_MAX + 1)
    return len(writers) > COUNTERS_UNFOLDED_MAX or any(
        tx.scan(begin, end, limit=1) for begin, end in _expired_ranges(tx, queue)
    )


def run_upkeep(tx: Transaction, queue: QueueKey) -> None:
    """Delete a bounded number of expired records of a queue that several processes write to, and fold its counters.

    Does nothing on an embedded store.
    """
    if not tx.writer:
        return
    for begin, end in _expired_ranges(tx, queue):
        pairs = tx.scan(begin, end, limit=EXPIRED_KEYS_BATCH_MAX)
        if pairs:
            tx.delete_range(begin, pairs[-1][0] + b"\x00")
    if len(tx.scan(*keys_of(queue).all_counters.range(), limit=COUNTERS_UNFOLDED_MAX + 1)) > COUNTERS_UNFOLDED_MAX:
        fold(tx, queue)


def fold(tx: Transaction, queue: QueueKey) -> int:
    """Add the counters of a bounded number of writers to the record of the writer ""; returns how many it deleted."""
    keys = keys_of(queue)
    pairs = tx.scan(*keys.all_counters.range(), limit=COUNTERS_FOLDED_MAX)  # That of the writer "" is the first.
    others = [key for key, _ in pairs if key != keys.own_counters]
    if not others:
        return 0
    merged = merged_counters(tx, keys, [decode_counters(value) for _, value in pairs])
    merged.history_ms = history_ms(policy_of(tx, queue))
    tx.put(keys.own_counters, encode(merged))
    for key in others:
        tx.delete(key)
    return len(others)


def delete_expired_once_a_minute(queue_tx: QueueTransaction) -> None:
    """Delete what has expired, unless that was done in this minute."""
    tx, minute = queue_tx.tx, queue_tx.tx.now_ms // _MINUTE_MS
    if minute <= queue_tx.counters.swept_minute:
        return
    queue_tx.counters.swept_minute = minute
    for begin, end in _expired_ranges(tx, queue_tx.queue):
        tx.delete_range(begin, end)


def has_expired_keys(tx: Transaction, queue: QueueKey) -> bool:
    """Whether a queue has expired idempotency keys or ack records. Puts delete them, but it may have none."""
    return any(tx.scan(begin, end, limit=1) for begin, end in _expired_keys(keys_of(queue), tx.now_ms))


def delete_expired_keys(tx: Transaction, queue: QueueKey) -> None:
    """Delete the expired idempotency keys and ack records of a queue."""
    for begin, end in _expired_keys(keys_of(queue), tx.now_ms):
        tx.delete_range(begin, end)


def idempotency_period(now_ms: int) -> int:
    """The period of the idempotency keys that are used now. Those of the period before may still count."""
    return now_ms // (IDEMPOTENCY_SECONDS * 1_000)


def _expired_ranges(tx: Transaction, queue: QueueKey) -> _Ranges:
    keys, kept_ms = keys_of(queue), history_ms(policy_of(tx, queue))
    ranges = _expired_keys(keys, tx.now_ms)
    if kept_ms and tx.now_ms > kept_ms:
        ranges.append(events_before(keys, tx.now_ms - kept_ms))
    return ranges


def _expired_keys(keys: QueueKeys, now_ms: int) -> _Ranges:
    return [
        (keys.ids.range()[0], keys.ids.key(idempotency_period(now_ms) - 1)),
        (keys.acks.range()[0], keys.acks.key(now_ms // _MINUTE_MS - IDEMPOTENCY_SECONDS // 60 - 1)),
    ]
