"""Queues with leased, fenced, at-least-once delivery.

`keys` draws the key layout, and `leasing` the states of a message.
"""

from fastness.layers.queues.admin import (
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
    SearchOn,
    by_ids,
    cancel,
    finished,
    get,
    result,
    search_leases,
    update,
)
from fastness.layers.queues.counters import NEVER_MS, MessageEvent, QueueDue
from fastness.layers.queues.dead_letter_sources import sources as dead_letter_sources
from fastness.layers.queues.dead_letters import redrive, redrive_step
from fastness.layers.queues.enqueue import only_adds, put, remove_schedule, schedules_of, set_schedule
from fastness.layers.queues.expiry import due_in, next_due, sweep
from fastness.layers.queues.failures import failures_of
from fastness.layers.queues.history import read_history
from fastness.layers.queues.key_flow import info as key_info
from fastness.layers.queues.key_flow import pause as pause_key
from fastness.layers.queues.keyed_receives import (
    ack_keyed,
    lease_keyed,
    release_undelivered,
    stored_lease,
)
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.queues.leasing import (
    Leased,
    LeaseOptions,
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
    ended,
    extend,
    extend_many,
    nack,
    reject,
)
from fastness.layers.queues.upkeep import fold, needs_upkeep, run_upkeep
from fastness.layers.queues.work import Work, WorkKey, listed_step, step
from fastness.wire.deliveries import delivery_of
from fastness.wire.stored_messages import StoredMessage, format_id
