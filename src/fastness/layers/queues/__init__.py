"""Queues with leased, fenced, at-least-once delivery.

`keys` draws the key layout, and `leasing` the states of a message.
"""

from fastness.layers.queues.admin import (
    DeleteProgress,
    PurgeProgress,
    delete_step,
    find,
    leased,
    matching_names,
    names,
    peek,
    purge,
    purge_step,
    set_policy,
    stats,
    survey,
)
from fastness.layers.queues.by_id import (
    FoundLease,
    SearchOn,
    cancel,
    cancel_many,
    get,
    result,
    search,
    search_leases,
    update,
)
from fastness.layers.queues.counters import DUE, NEVER_MS
from fastness.layers.queues.dead_letter_sources import sources as dead_letter_sources
from fastness.layers.queues.dead_letters import RedriveProgress, redrive, redrive_step
from fastness.layers.queues.enqueue import only_adds, put, remove_schedule, schedules_of, set_schedule
from fastness.layers.queues.expiry import due_in, next_due, sweep, sweep_and_collect_events
from fastness.layers.queues.failures import failures_of
from fastness.layers.queues.history import read_history
from fastness.layers.queues.key_flow import info as key_info
from fastness.layers.queues.key_flow import pause as pause_key
from fastness.layers.queues.keyed_receives import (
    abandon_receive,
    ack_keyed,
    lease_keyed,
    release_undelivered,
    stored_lease,
)
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.queues.leasing import (
    Leased,
    Prefetched,
    deliveries_of,
    lease,
    lease_or_wait,
    packed_of,
)
from fastness.layers.queues.message_search import search_messages
from fastness.layers.queues.moves import delete_messages, move_as_new, move_messages
from fastness.layers.queues.outcomes import failed
from fastness.layers.queues.policies import dead_letter_queue, exists, is_deleted, policy_of
from fastness.layers.queues.settling import (
    ack,
    ack_many,
    ack_packed,
    change_visibility,
    check,
    defer_all,
    ended,
    extend,
    extend_many,
    nack,
    reject,
)
from fastness.layers.queues.upkeep import fold, needs_upkeep, run_upkeep
from fastness.wire.deliveries import delivery_of
from fastness.wire.stored_messages import StoredMessage, format_id

__all__ = [
    "FoundLease",
    "SearchOn",
    "cancel",
    "cancel_many",
    "find",
    "get",
    "key_info",
    "pause_key",
    "result",
    "search",
    "search_leases",
    "search_messages",
    "delete_messages",
    "move_as_new",
    "move_messages",
    "update",
    "ended",
    "failed",
    "DeleteProgress",
    "PurgeProgress",
    "delete_step",
    "leased",
    "matching_names",
    "names",
    "peek",
    "purge",
    "purge_step",
    "stats",
    "survey",
    "DUE",
    "NEVER_MS",
    "RedriveProgress",
    "redrive",
    "redrive_step",
    "fold",
    "needs_upkeep",
    "run_upkeep",
    "only_adds",
    "put",
    "remove_schedule",
    "schedules_of",
    "set_schedule",
    "due_in",
    "next_due",
    "sweep",
    "sweep_and_collect_events",
    "QueueKey",
    "StoredMessage",
    "delivery_of",
    "failures_of",
    "format_id",
    "keys_of",
    "Leased",
    "Prefetched",
    "abandon_receive",
    "ack",
    "ack_keyed",
    "ack_many",
    "ack_packed",
    "change_visibility",
    "check",
    "defer_all",
    "deliveries_of",
    "extend",
    "extend_many",
    "lease",
    "lease_keyed",
    "lease_or_wait",
    "nack",
    "packed_of",
    "reject",
    "release_undelivered",
    "stored_lease",
    "dead_letter_queue",
    "dead_letter_sources",
    "exists",
    "is_deleted",
    "policy_of",
    "read_history",
    "set_policy",
]
