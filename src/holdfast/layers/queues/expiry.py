"""What is due: leases and delays that end, messages whose time to live is over, schedules that strike.

Everything that will be due has a note under its moment. Whoever touches a queue attends to the notes whose moment has
come, a bounded number at a time, so nothing depends on a clock hand that turns somewhere; one that does turn (the
sweeper) only makes it happen sooner.
"""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.queues import dead_letters, enqueue
from holdfast.layers.queues.counters import NEVER_MS, QueueTransaction, load_counters
from holdfast.layers.queues.enqueue import SCHEDULE_IS_DUE, TTL_IS_OVER
from holdfast.layers.queues.keys import ID_BYTES, QueueKey, decode, keys_of
from holdfast.limits import DUE_BATCH


def process_due_of(tx: Transaction, queue: QueueKey) -> int:
    """Attend to what is due now, as far as one transaction goes; when something will be due next."""
    queue_tx = QueueTransaction(tx, queue)
    if process_due(queue_tx):
        queue_tx.save()
    return queue_tx.counters.next_due_ms


def next_due(tx: Transaction, queue: QueueKey) -> int:
    """The moment before which there is nothing to attend to."""
    keys = keys_of(queue)
    if not tx.writer:
        return load_counters(tx, keys).next_due_ms
    first = tx.scan(*keys.due_range(0), limit=1)
    return int.from_bytes(first[0][0][len(keys.due) :][:8], "big") if first else NEVER_MS


def due_in(tx: Transaction, queue: QueueKey) -> int:
    """In how many milliseconds there is something to attend to, by the clock that transactions go by."""
    return next_due(tx, queue) - tx.now_ms


def process_due_and_collect(tx: Transaction, queue: QueueKey) -> list[tuple[Any, ...]]:
    """`process_due_of`; what is to be told of it once it is committed."""
    process_due_of(tx, queue)
    return tx.events


def process_due(queue_tx: QueueTransaction) -> bool:
    """`process_due_of` in a book that the caller saves; whether it changed."""
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    now_ms, prefix = tx.now_ms, len(keys.due)
    if not tx.writer and now_ms < counters.next_due_ms:
        return False
    begin, end = keys.due_range(0 if tx.writer else counters.due_front_ms)
    events = [
        (int.from_bytes(key[prefix : prefix + 8], "big"), key, value)
        for key, value in tx.scan(begin, end, limit=DUE_BATCH + 1)
    ]
    due = [note for note in events[:DUE_BATCH] if note[0] <= now_ms]
    counters.next_due_ms = counters.due_front_ms = NEVER_MS
    if len(due) < len(events):
        counters.note_due(events[len(due)][0])
    for at_ms, key, value in due:
        what = key[prefix + 8 :]
        if value[:1] == SCHEDULE_IS_DUE:
            tx.delete(key)
            enqueue.strike(queue_tx, what[1:].decode())
        elif value[:1] == TTL_IS_OVER:
            tx.delete(key)
            _end_a_life(queue_tx, what[:ID_BYTES], value)
        else:
            tx.delete(key)
            _end_a_wait(queue_tx, what, at_ms)
    return bool(due) or not tx.writer


def _end_a_wait(queue_tx: QueueTransaction, id: bytes, at_ms: int) -> None:
    """The delay of a message is over, or its lease."""
    stored = queue_tx.tx.get(queue_tx.keys.parked_key(id))
    if stored is None:
        return
    message = decode(stored)
    if message.due_ms != at_ms:
        return
    queue_tx.unpark(message)
    if message.owner is not None:
        message.failures += 1
        message.last_error = f"The lease of {message.owner} ended before it was settled"
        queue_tx.counters.expired += 1
        queue_tx.emit("expired", message)
        if dead_letters.is_due(message):
            dead_letters.dead_letter(queue_tx, message)
            return
    dead_letters.give_back(queue_tx, message, delay_ms=0)


def _end_a_life(queue_tx: QueueTransaction, id: bytes, note: bytes) -> None:
    """The time to live of a message is over. One that somebody leases is removed when they give it back."""
    tx, keys = queue_tx.tx, queue_tx.keys
    parked = tx.get(keys.parked_key(id))
    if parked is not None:
        message = decode(parked)
        if message.owner is not None:
            return
        queue_tx.unpark(message)
        dead_letters.outlived(queue_tx, message)
        return
    ready = tx.get(keys.ready_place(note[1], id))
    if ready is not None:
        message = decode(ready)
        queue_tx.take_ready(message)
        dead_letters.outlived(queue_tx, message)
        return
    waiting_key = keys.waiting.key(note[2:].decode()) + id
    waiting = tx.get(waiting_key)
    if waiting is not None:
        tx.delete(waiting_key)
        queue_tx.counters.blocked -= 1
        dead_letters.outlived(queue_tx, decode(waiting))
