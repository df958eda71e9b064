"""Retention by age: no message of a queue gets older than its policy allows, also those that are stored already.

    "v"                  ->  the state of the pass that removes them
    "t" | at | "R"       ->  the due entry of its next step

A message has no end of its own here, so a change of the policy applies to all. No message that is too old is delivered,
found by its id or hidden again, and passes over the queue remove such messages wherever they are. A pass has steps of a
bounded number of records. It notes how old the oldest message is that stays, and the next pass is when that one ends.

The age counts from the put, which is the time in the message's id, or from the last redrive or move; of a dead letter
of a FIFO queue, from its death. Ready messages of one priority and delayed ones are ordered by their ids, so a pass
reads only the oldest of them. It reads all that are blocked or leased.
"""

from typing import Final, NamedTuple

import msgspec

from fastness.kv import Transaction
from fastness.layers.queues import by_id, dead_letters, key_flow, message_leases
from fastness.layers.queues.by_id import WaitingMessage
from fastness.layers.queues.counters import NEVER_MS, QueueTransaction
from fastness.layers.queues.keys import QueueKeys
from fastness.layers.queues.policies import kept_ms, policy_of, since_ms
from fastness.limits import PRIORITY_MAX, RETENTION_BATCH_MAX, RETENTION_PASS_MS_MIN, RETENTION_PASSES_MIN
from fastness.wire.queues import MessageState, QueuePolicy
from fastness.wire.stored_messages import StoredMessage, decode, encode, put_at_ms

RETENTION_DUE: Final = b"R"  # The kind of a due entry: a step of the pass.


class _Pass(msgspec.Struct, array_like=True):
    """A pass over the queue: where its next step continues, and what it knows so far."""

    due_ms: int  # The time of its due entry. Other entries are of passes that were replaced.
    range: int = 0
    after: bytes = b""  # The last key that was read of this range; empty: none.
    oldest_ms: int = NEVER_MS  # From when the age of the oldest message counts that stays.
    records: int = 0  # That were read.


class _Range(NamedTuple):
    """A part of the queue that a pass reads."""

    state: MessageState
    begin: bytes
    end: bytes
    is_ordered: bool  # By age: after a message that stays, all do.


_decode = msgspec.msgpack.Decoder(_Pass).decode


def restart(queue_tx: QueueTransaction, policy: QueuePolicy) -> None:
    """Begin a new pass, because the policy has changed."""
    tx, keys = queue_tx.tx, queue_tx.keys
    before = _stored(tx, keys)
    if before is not None:
        tx.delete(keys.due_key(before.due_ms, RETENTION_DUE))
    if kept_ms(policy) is None:
        tx.delete(keys.retention)
    else:
        _continue(queue_tx, _Pass(tx.now_ms))


def run_step(queue_tx: QueueTransaction, at_ms: int) -> int:
    """Run the step of a pass that is due at this time; returns how many messages were removed, at least 1."""
    tx, keys = queue_tx.tx, queue_tx.keys
    state, policy = _stored(tx, keys), policy_of(tx, queue_tx.queue)
    allowed_ms = kept_ms(policy)
    if state is None or state.due_ms != at_ms or allowed_ms is None:
        return 1
    ranges, removed, left = _ranges(queue_tx, policy, at_ms), 0, RETENTION_BATCH_MAX
    while state.range < len(ranges) and left > 0:
        part = ranges[state.range]
        pairs = tx.scan(state.after + b"\x00" if state.after else part.begin, part.end, limit=left)
        is_read = len(pairs) < left
        left -= len(pairs)
        for key, value in pairs:
            if part.state == "leased":
                removed += _remove_leased(queue_tx, key, value, allowed_ms, state)
            elif _remove_waiting(queue_tx, WaitingMessage(decode(value), part.state, key), allowed_ms, state):
                removed += 1
            elif part.is_ordered and put_at_ms(key[-16:]) > tx.now_ms - allowed_ms:
                is_read = True
                break
        state.range, state.after = (state.range + 1, b"") if is_read else (state.range, pairs[-1][0])
    state.records += RETENTION_BATCH_MAX - left
    if state.range < len(ranges):
        state.due_ms = tx.now_ms
        _continue(queue_tx, state)
    else:
        _continue(queue_tx, _Pass(_next_ms(state, tx.now_ms, allowed_ms)))
    return max(removed, 1)


def _next_ms(done: _Pass, now_ms: int, allowed_ms: int) -> int:
    """When the next pass begins: when the oldest message ends, but not too soon after a pass that was long.

    Messages that are moved into the queue may be older, or change their places during a pass of several steps. So there
    is a pass several times while a message is kept.
    """
    next_ms = min(done.oldest_ms + allowed_ms, now_ms + allowed_ms // RETENTION_PASSES_MIN)
    return max(next_ms, now_ms + max(RETENTION_PASS_MS_MIN, done.records))


def _ranges(queue_tx: QueueTransaction, policy: QueuePolicy, at_ms: int) -> list[_Range]:
    """What a pass reads. Blocked messages are first, so that none of them becomes ready that is too old.

    Leases that end before the step at `at_ms` are processed before it.
    """
    keys, fronts = queue_tx.keys, {} if queue_tx.tx.writer else queue_tx.counters.fronts
    ranges = [
        _Range("blocked", *keys.waiting.range(), False),
        _Range("delayed", *keys.delayed_range(), True),
        _Range("leased", *keys.due_range(at_ms), False),
    ]
    for priority in range(PRIORITY_MAX, -1, -1):  # Messages whose keys take turns are ordered by their turns.
        begin, end = keys.priority_range(priority, fronts.get(priority, b""))
        ranges.append(_Range("ready", begin, end, not policy.fair))
    return ranges


def _remove_waiting(queue_tx: QueueTransaction, found: WaitingMessage, allowed_ms: int, done: _Pass) -> bool:
    """Remove a message that is not leased if it is too old."""
    from_ms = since_ms(found.message)
    if from_ms > queue_tx.tx.now_ms - allowed_ms:
        done.oldest_ms = min(done.oldest_ms, from_ms)
        return False
    dead_letters.expire_message(queue_tx, by_id.take(queue_tx, found))
    return True


def _remove_leased(queue_tx: QueueTransaction, key: bytes, value: bytes, allowed_ms: int, done: _Pass) -> int:
    """Remove the messages of a lease that are too old, which their consumers cannot settle; returns how many.

    A lease that is due has an entry that this transaction may be about to process, so it is left for the next pass.
    """
    held = message_leases.held_at(queue_tx.tx, queue_tx.keys, key, value)
    if held is None:
        return 0
    now_ms, old = queue_tx.tx.now_ms, dict[int, StoredMessage]()
    over_ms = now_ms - allowed_ms if held.record.due_ms > now_ms else -1
    for position in held.remaining():
        put_ms = put_at_ms(held.record.id_at(position))
        if put_ms <= over_ms:
            message = held.message(position)
            put_ms = since_ms(message)
            if put_ms <= over_ms:
                old[position] = message
                continue
        done.oldest_ms = min(done.oldest_ms, put_ms)
    if old:
        held.leave(queue_tx, old)
    for message in old.values():
        key_flow.release(queue_tx, message)
        dead_letters.expire_message(queue_tx, message)
    return len(old)


def _continue(queue_tx: QueueTransaction, state: _Pass) -> None:
    tx, keys = queue_tx.tx, queue_tx.keys
    tx.put(keys.retention, encode(state))
    tx.put(keys.due_key(state.due_ms, RETENTION_DUE), RETENTION_DUE)
    queue_tx.counters.add_due(state.due_ms)


def _stored(tx: Transaction, keys: QueueKeys) -> _Pass | None:
    stored = tx.get(keys.retention)
    return None if stored is None else _decode(stored)
