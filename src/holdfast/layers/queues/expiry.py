"""What is due: leases and delays that end, messages whose time to live is over, schedules that strike.

Everything that will be due has a note under its moment. Whoever touches a queue attends to the notes whose moment has
come, a bounded number at a time, so nothing depends on a clock hand that turns somewhere; one that does turn (the
sweeper) only makes it happen sooner.
"""

from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.queues import counters, dead_letters, enqueue
from holdfast.layers.queues.counters import NEVER_MS, Book
from holdfast.layers.queues.enqueue import SCHEDULE_STRIKES, TTL_IS_OVER
from holdfast.layers.queues.keys import ID_BYTES, QueueKey, decode, room_of
from holdfast.limits import DUE_BATCH


def attend_to(tx: Transaction, queue: QueueKey) -> int:
    """Attend to what is due now, as far as one transaction goes; when something will be due next."""
    book = Book(tx, queue)
    if attend(book):
        book.save()
    return book.tally.next_due_ms


def next_due(tx: Transaction, queue: QueueKey) -> int:
    """The moment before which there is nothing to attend to."""
    room = room_of(queue)
    if not tx.writer:
        return counters.load(tx, room).next_due_ms
    first = tx.scan(*room.due_range(0), limit=1)
    return int.from_bytes(first[0][0][len(room.due) :][:8], "big") if first else NEVER_MS


def due_in(tx: Transaction, queue: QueueKey) -> int:
    """In how many milliseconds there is something to attend to, by the clock that transactions go by."""
    return next_due(tx, queue) - tx.now_ms


def attend_and_tell(tx: Transaction, queue: QueueKey) -> list[tuple[Any, ...]]:
    """`attend_to`; what is to be told of it once it is committed."""
    attend_to(tx, queue)
    return tx.notes


def attend(book: Book) -> bool:
    """`attend_to` in a book that the caller saves; whether it changed."""
    tx, room, tally = book.tx, book.room, book.tally
    now_ms, prefix = tx.now_ms, len(room.due)
    if not tx.writer and now_ms < tally.next_due_ms:
        return False
    begin, end = room.due_range(0 if tx.writer else tally.due_front_ms)
    notes = [
        (int.from_bytes(key[prefix : prefix + 8], "big"), key, value)
        for key, value in tx.scan(begin, end, limit=DUE_BATCH + 1)
    ]
    due = [note for note in notes[:DUE_BATCH] if note[0] <= now_ms]
    tally.next_due_ms = tally.due_front_ms = NEVER_MS
    if len(due) < len(notes):
        tally.note_due(notes[len(due)][0])
    for at_ms, key, value in due:
        what = key[prefix + 8 :]
        if value[:1] == SCHEDULE_STRIKES:
            tx.delete(key)
            enqueue.strike(book, what[1:].decode())
        elif value[:1] == TTL_IS_OVER:
            tx.delete(key)
            _end_a_life(book, what[:ID_BYTES], value)
        else:
            tx.delete(key)
            _end_a_wait(book, what, at_ms)
    return bool(due) or not tx.writer


def _end_a_wait(book: Book, id: bytes, at_ms: int) -> None:
    """The delay of a message is over, or its lease."""
    stored = book.tx.get(book.room.parked_key(id))
    if stored is None:
        return
    message = decode(stored)
    if message.due_ms != at_ms:
        return
    book.unpark(message)
    if message.owner is not None:
        message.failures += 1
        message.last_error = f"The lease of {message.owner} ended before it was settled"
        book.tally.expired += 1
        book.tell("expired", message)
        if dead_letters.is_due(message):
            dead_letters.bury(book, message)
            return
    dead_letters.give_back(book, message, delay_ms=0)


def _end_a_life(book: Book, id: bytes, note: bytes) -> None:
    """The time to live of a message is over. One that somebody leases is removed when they give it back."""
    tx, room = book.tx, book.room
    parked = tx.get(room.parked_key(id))
    if parked is not None:
        message = decode(parked)
        if message.owner is not None:
            return
        book.unpark(message)
        dead_letters.outlived(book, message)
        return
    ready = tx.get(room.ready_place(note[1], id))
    if ready is not None:
        message = decode(ready)
        book.take_ready(message)
        dead_letters.outlived(book, message)
        return
    waiting_key = room.waiting.key(note[2:].decode()) + id
    waiting = tx.get(waiting_key)
    if waiting is not None:
        tx.delete(waiting_key)
        book.tally.blocked -= 1
        dead_letters.outlived(book, decode(waiting))
