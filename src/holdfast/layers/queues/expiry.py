"""The due index of a queue: leases and delays that end, TTLs that expire, schedules that fire.

Each has a due entry at its time. Every lease call on a queue processes the entries that are due, a bounded number at a
time, so correctness does not depend on a background process. The sweeper only makes it happen sooner.
"""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.queues import dead_letters, enqueue, failures
from holdfast.layers.queues.counters import NEVER_MS, QueueTransaction, load_counters
from holdfast.layers.queues.enqueue import SCHEDULE_DUE, TTL_EXPIRED
from holdfast.layers.queues.keys import ID_BYTES, QueueKey, decode, keys_of
from holdfast.layers.queues.policies import policy_of
from holdfast.limits import DUE_BATCH_MAX


def sweep(tx: Transaction, queue: QueueKey) -> int:
    """Process a bounded number of due entries; returns when the next one is due."""
    queue_tx = QueueTransaction(tx, queue)
    if process_due(queue_tx):
        queue_tx.save()
    return queue_tx.counters.next_due_ms


def next_due(tx: Transaction, queue: QueueKey) -> int:
    """The time before which nothing is due."""
    keys = keys_of(queue)
    if not tx.writer:
        counters = load_counters(tx, keys)
        return tx.now_ms if counters.is_clock_set_back(tx.now_ms) else counters.next_due_ms
    first = tx.scan(*keys.due_range(0), limit=1)
    return int.from_bytes(first[0][0][len(keys.due) :][:8], "big") if first else NEVER_MS


def due_in(tx: Transaction, queue: QueueKey) -> int:
    """In how many milliseconds something is due, by the transaction's clock."""
    return next_due(tx, queue) - tx.now_ms


def sweep_and_collect_events(tx: Transaction, queue: QueueKey) -> list[tuple[Any, ...]]:
    """`sweep`; returns the events to publish after the commit."""
    sweep(tx, queue)
    return tx.events


def process_due(queue_tx: QueueTransaction) -> bool:
    """Process a bounded number of due entries; whether anything changed, in which case the caller saves `queue_tx`."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    now_ms, prefix = tx.now_ms, len(keys.due)
    is_shortened = counters.is_clock_set_back(now_ms)
    if is_shortened:
        _shorten_parked(queue_tx)
    elif counters.shortened:
        counters.shortened = b""
    if not tx.writer and now_ms < counters.next_due_ms:
        return is_shortened
    begin, end = keys.due_range(0 if tx.writer else counters.due_front_ms)
    entries = [
        (int.from_bytes(key[prefix : prefix + 8], "big"), key, value)
        for key, value in tx.scan(begin, end, limit=DUE_BATCH_MAX + 1)
    ]
    due = [entry for entry in entries[:DUE_BATCH_MAX] if entry[0] <= now_ms]
    counters.next_due_ms = counters.due_front_ms = NEVER_MS
    if len(due) < len(entries):
        counters.add_due(entries[len(due)][0])
    for at_ms, key, value in due:
        tx.delete(key)
        subject = key[prefix + 8 :]
        if value[:1] == SCHEDULE_DUE:
            enqueue.fire_schedule(queue_tx, subject[1:].decode())
        elif value[:1] == TTL_EXPIRED:
            _expire(queue_tx, subject[:ID_BYTES], value)
        else:
            _end_lease_or_delay(queue_tx, subject, at_ms)
    return is_shortened or bool(due) or not tx.writer


def _shorten_parked(queue_tx: QueueTransaction) -> None:
    """End leases and delays that began before the clock was set back no later than they were to last, from now on.

    Takes a bounded number of parked messages at a time, in the order of their ids.
    """
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    begin, end = keys.parked_key(counters.shortened), keys.parked + b"\xff" * (ID_BYTES + 1)
    pairs = tx.scan(begin + b"\x00" if counters.shortened else begin, end, limit=DUE_BATCH_MAX)
    for _, value in pairs:
        message = decode(value)
        if 0 < message.parked_for_ms < message.due_ms - tx.now_ms:
            queue_tx.unpark(message)
            message.due_ms = tx.now_ms + message.parked_for_ms
            queue_tx.park(message)
    if len(pairs) == DUE_BATCH_MAX:
        counters.shortened = pairs[-1][0][-ID_BYTES:]
    else:
        counters.shortened, counters.clock_ms = b"", tx.now_ms


def _end_lease_or_delay(queue_tx: QueueTransaction, id: bytes, at_ms: int) -> None:
    """End the lease or the delay of a message, unless it was extended or settled since."""
    stored = queue_tx.tx.get(queue_tx.keys.parked_key(id))
    if stored is None:
        return
    message = decode(stored)
    if message.due_ms != at_ms:
        return
    queue_tx.unpark(message)
    if message.owner is not None:
        failures.record(
            queue_tx,
            policy_of(queue_tx.tx, queue_tx.queue),
            message,
            failures.EXPIRED,
            failed_ms=at_ms,
            error=f"The lease of {message.owner} ended before it was settled",
        )
        queue_tx.counters.expired += 1
        queue_tx.emit("expired", message)
        if failures.makes_dead_letter(message, failures.EXPIRED):
            dead_letters.dead_letter(queue_tx, message)
            return
    dead_letters.requeue(queue_tx, message, delay_ms=0)


def _expire(queue_tx: QueueTransaction, id: bytes, location: bytes) -> None:
    """Remove a message whose TTL has expired. A leased one is removed when its lease ends."""
    tx, keys = queue_tx.tx, queue_tx.keys
    parked = tx.get(keys.parked_key(id))
    if parked is not None:
        message = decode(parked)
        if message.owner is not None:
            return
        queue_tx.unpark(message)
        dead_letters.expire_message(queue_tx, message)
        return
    ready = tx.get(keys.ready_key_at(location[1], id))
    if ready is not None:
        message = decode(ready)
        queue_tx.remove_ready(message)
        dead_letters.expire_message(queue_tx, message)
        return
    waiting_key = keys.waiting.key(location[2:].decode()) + id
    waiting = tx.get(waiting_key)
    if waiting is not None:
        tx.delete(waiting_key)
        queue_tx.counters.blocked -= 1
        dead_letters.expire_message(queue_tx, decode(waiting))
