"""Corrects what a queue computes from its messages, where a part of its commits was lost: counters and due entries.

For a data directory that no process has open: messages must not change meanwhile.
"""

from itertools import islice

import msgspec

from holdfast.kv import Database, Subspace, Transaction
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues import message_leases
from holdfast.layers.queues.counters import QueueCounters, QueueTransaction
from holdfast.layers.queues.keys import QueueKey
from holdfast.limits import PAGE_ITEMS
from holdfast.runtime.maintenance.scan import names, scan_range, universes
from holdfast.wire import stored_messages
from holdfast.wire.stored_messages import StoredMessage


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
    for _, value in scan_range(database, *keys.ready_range()):
        message = stored_messages.decode(value)
        counted.ready[message.priority] = counted.ready.get(message.priority, 0) + 1
    counted.blocked = sum(1 for _ in scan_range(database, *keys.waiting.range()))
    delayed = (stored_messages.decode(value) for _, value in scan_range(database, *keys.delayed_range()))
    added = 0
    while page := list(islice(delayed, PAGE_ITEMS)):
        counted.delayed += len(page)
        added += database.transact(_add_due_entries, queue, page)
    for key, value in scan_range(database, *keys.due_range(0)):
        counted.leased += len(database.read(message_leases.messages_at, keys, key, value))
    return database.transact(_set_counters, queue, counted) or added > 0


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
