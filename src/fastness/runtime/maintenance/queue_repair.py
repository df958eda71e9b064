"""Corrects what a queue computes from its messages, where a part of its commits was lost: counters and due entries.

For a data directory that no process has open: messages must not change meanwhile.
"""

from itertools import islice

import msgspec

from fastness.kv import Database, Subspace, Transaction, unpack
from fastness.layers.queues import key_flow, message_leases
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues.counters import QueueCounters, QueueTransaction
from fastness.layers.queues.key_states import KeyState
from fastness.layers.queues.keys import QueueKey
from fastness.limits import PAGE_ITEMS
from fastness.runtime.maintenance.key_counts import count_keys, counts_of
from fastness.runtime.maintenance.scan import names, scan_range, universes
from fastness.wire import stored_messages
from fastness.wire.stored_messages import StoredMessage


def repair_queues(database: Database) -> list[QueueKey]:
    """Correct all queues; returns those whose counters or due entries were wrong."""
    return [
        queue
        for universe in universes(database)
        for queue in (QueueKey(universe, name) for name in names(database, Subspace("u", universe, "q")))
        if _repair(database, queue)
    ]


def _repair(database: Database, queue: QueueKey) -> bool:
    try:
        return _recount(database, queue)
    except msgspec.MsgspecError:
        return False  # A message that cannot be read: `doctor` reports it.


def _recount(database: Database, queue: QueueKey) -> bool:
    keys = queue_keys.keys_of(queue)
    counted = QueueCounters()
    for key, _ in scan_range(database, *keys.ready_range()):
        priority = queue_keys.priority_at(key[len(keys.ready) :])
        counted.ready[priority] = counted.ready.get(priority, 0) + 1
    counted.blocked = sum(1 for _ in scan_range(database, *keys.waiting.range()))
    delayed = (stored_messages.decode(value) for _, value in scan_range(database, *keys.delayed_range()))
    added = 0
    while page := list(islice(delayed, PAGE_ITEMS)):
        counted.delayed += len(page)
        added += database.transact(_add_due_entries, queue, page)
    for key, value in scan_range(database, *keys.due_range(0)):
        counted.leased += len(database.read(message_leases.messages_at, keys, key, value))
    is_changed = database.transact(_set_counters, queue, counted) or added > 0
    return _repair_keys(database, queue) or is_changed


def _repair_keys(database: Database, queue: QueueKey) -> bool:
    """Correct the states of keys; whether one was wrong."""
    keys, is_changed = queue_keys.keys_of(queue), False
    counted = count_keys(database, keys)
    stored = [
        str(unpack(key[len(keys.key_states.prefix) :])[0]) for key, _ in scan_range(database, *keys.key_states.range())
    ]
    for name in sorted({*counted, *stored}):
        is_changed = database.transact(_set_key, queue, name, counted.get(name, KeyState())) or is_changed
    return is_changed


def _set_key(tx: Transaction, queue: QueueKey, name: str, counted: KeyState) -> bool:
    """Replace what follows from the messages in the state of a key, and let it go on; whether that was wrong."""
    queue_tx = QueueTransaction(tx, queue)
    state = queue_tx.key_state(name)
    is_wrong = counts_of(state) != counts_of(counted)
    state.leased, state.waiting, state.front = counted.leased, counted.waiting, counted.front
    state.ready_place, state.ready_at = counted.ready_place, counted.ready_at
    key_flow.restart_clock(queue_tx, name)
    queue_tx.save()
    return is_wrong


def _add_due_entries(tx: Transaction, queue: QueueKey, messages: list[StoredMessage]) -> int:
    keys, added = queue_keys.keys_of(queue), 0
    for message in messages:
        key = keys.due_key(message.due_ms, message.id)
        if tx.get(key) is None:
            tx.put(key, b"")
            added += 1
    return added


def _set_counters(tx: Transaction, queue: QueueKey, counted: QueueCounters) -> bool:
    """Replace the counts, and let scans start at the beginning; whether a count was wrong."""
    queue_tx = QueueTransaction(tx, queue)
    counters = queue_tx.counters
    before = (_counts(counters), counters.delayed, counters.leased, counters.blocked)
    counters.ready = counted.ready
    counters.delayed, counters.leased, counters.blocked = counted.delayed, counted.leased, counted.blocked
    counters.fronts, counters.next_due_ms, counters.due_front_ms = {}, 0, 0
    counters.order_version += 1
    queue_tx.save()
    return before != (_counts(counters), counters.delayed, counters.leased, counters.blocked)


def _counts(counters: QueueCounters) -> dict[int, int]:
    return {priority: count for priority, count in counters.ready.items() if count}
