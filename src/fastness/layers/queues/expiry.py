"""The due index of a queue: leases and delays that end, TTLs that expire, schedules that fire.

Each has a due entry at its time. Every lease call on a queue processes the entries that are due, a bounded number at a
time, so correctness does not depend on a background process. The sweeper only makes it happen sooner.
"""

from fastness.kv import Transaction
from fastness.layers.queues import (
    by_id,
    dead_letters,
    enqueue,
    failures,
    key_flow,
    message_leases,
    outcomes,
    retention,
    unique_keys,
)
from fastness.layers.queues.counters import NEVER_MS, QueueTransaction, load_counters
from fastness.layers.queues.enqueue import SCHEDULE_DUE, TTL_EXPIRED
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.policies import policy_of
from fastness.limits import DUE_BATCH_MAX
from fastness.wire.stored_messages import ID_BYTES, decode


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
    return keys.due_at(first[0][0]) if first else NEVER_MS


def due_in(tx: Transaction, queue: QueueKey) -> int:
    """In how many milliseconds something is due, by the transaction's clock."""
    return next_due(tx, queue) - tx.now_ms


def process_due(queue_tx: QueueTransaction) -> bool:
    """Process a bounded number of due entries; whether anything changed, in which case the caller saves `queue_tx`."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    now_ms = tx.now_ms
    is_shortened = counters.is_clock_set_back(now_ms)
    if is_shortened:
        _shorten(queue_tx)
    elif counters.shortened:
        counters.shortened = b""
    if not tx.writer and now_ms < counters.next_due_ms:
        return is_shortened
    begin, end = keys.due_range(0 if tx.writer else counters.due_front_ms)
    after_now, _ = keys.due_range(now_ms + 1)
    first = tx.scan(begin, end, limit=1)
    entries = tx.scan(first[0][0], after_now, limit=DUE_BATCH_MAX + 1) if first and first[0][0] < after_now else []
    counters.next_due_ms = counters.due_front_ms = NEVER_MS
    processed = done = 0
    for key, value in entries:
        if done >= DUE_BATCH_MAX:
            break
        done += _process_entry(queue_tx, key, value)
        processed += 1
    later = entries[processed:] or (tx.scan(after_now, end, limit=1) if entries else first)
    if later:
        counters.add_due(keys.due_at(later[0][0]))
    return is_shortened or bool(entries) or not tx.writer


def _process_entry(queue_tx: QueueTransaction, key: bytes, value: bytes) -> int:
    """Process a due entry; the number of messages that it was about, at least 1."""
    tx, keys = queue_tx.tx, queue_tx.keys
    held = message_leases.held_at(tx, keys, key, value)
    if held is not None:
        return _end_lease(queue_tx, held)
    tx.delete(key)
    subject = key[len(keys.due) + 8 :]
    if value[:1] == SCHEDULE_DUE:
        enqueue.fire_schedule(queue_tx, subject[1:].decode())
    elif value[:1] == key_flow.KEY_DUE:
        key_flow.wake(queue_tx, subject[1:].decode(), keys.due_at(key))
    elif value[:1] == key_flow.LIMITS_DUE:
        key_flow.apply_limits(queue_tx, subject[1:])
    elif value[:1] == outcomes.EXPIRY_DUE:
        outcomes.delete_expired(queue_tx, subject)
    elif value[:1] == TTL_EXPIRED:
        _expire(queue_tx, subject[:ID_BYTES], value)
    elif value[:1] == retention.RETENTION_DUE:
        return retention.run_step(queue_tx, keys.due_at(key))
    else:
        _end_delay(queue_tx, subject, keys.due_at(key))
    return 1


def _shorten(queue_tx: QueueTransaction) -> None:
    """End leases and delays that began before the clock was set back no later than they were to last, from now on.

    Takes a bounded number of due entries at a time, in their order.
    """
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    begin, end = keys.due_range(tx.now_ms + 1)
    pairs = tx.scan(max(begin, counters.shortened + b"\x00"), end, limit=DUE_BATCH_MAX)
    for key, value in pairs:
        held = message_leases.held_at(tx, keys, key, value)
        if held is not None:
            if held.record.lasts_ms < held.record.due_ms - tx.now_ms:
                held.move(queue_tx, tx.now_ms + held.record.lasts_ms)
        elif not value:
            _shorten_delay(queue_tx, key[-ID_BYTES:])
        elif value[:1] == key_flow.KEY_DUE:
            key_flow.restart_clock(queue_tx, key[len(keys.due) + 9 :].decode())
    if len(pairs) == DUE_BATCH_MAX:
        counters.shortened = pairs[-1][0]
    else:
        counters.shortened, counters.clock_ms = b"", tx.now_ms


def _shorten_delay(queue_tx: QueueTransaction, id: bytes) -> None:
    stored = queue_tx.tx.get(queue_tx.keys.delayed_key(id))
    message = None if stored is None else decode(stored)
    if message is not None and message.delayed_for_ms < message.due_ms - queue_tx.tx.now_ms:
        queue_tx.remove_delayed(message)
        message.due_ms = queue_tx.tx.now_ms + message.delayed_for_ms
        queue_tx.delay(message)


def _end_lease(queue_tx: QueueTransaction, held: HeldLease) -> int:
    """Expire what is left in a lease; the number of its messages."""
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    messages = held.take(queue_tx)
    for message in messages:
        key_flow.release(queue_tx, message)
        failures.record(
            queue_tx,
            policy,
            message,
            failures.EXPIRED,
            failed_ms=held.record.due_ms,
            error=f"The lease of {message.owner} ended before it was settled",
        )
        queue_tx.counters.expired += 1
        queue_tx.emit("expired", message)
        if failures.makes_dead_letter(queue_tx, policy, message, failures.EXPIRED):
            dead_letters.dead_letter(queue_tx, message)
        else:
            dead_letters.requeue(queue_tx, message, delay_ms=0)
    return len(messages)


def _end_delay(queue_tx: QueueTransaction, id: bytes, at_ms: int) -> None:
    """End the delay of a message, unless it is not delayed any more, or until another time."""
    stored = queue_tx.tx.get(queue_tx.keys.delayed_key(id))
    message = None if stored is None else decode(stored)
    if message is not None and message.due_ms == at_ms:
        queue_tx.remove_delayed(message)
        unique_keys.end_debounce(queue_tx, message)
        dead_letters.requeue(queue_tx, message, delay_ms=0)


def _expire(queue_tx: QueueTransaction, id: bytes, entry: bytes) -> None:
    """Remove a message whose TTL has expired. A leased one is removed when its lease ends."""
    found = by_id.find_waiting(queue_tx, id, priorities=(entry[1],))
    if found is not None:
        dead_letters.expire_message(queue_tx, by_id.take(queue_tx, found))
