"""Queues: leased, fenced, at least once. `rooms` draws the keys, `deliveries` the states of a message."""

from holdfast.layers.queues.deliveries import (
    Ahead,
    Leased,
    ack,
    check,
    defer_all,
    deliveries_of,
    extend,
    lease,
    lease_or_wait,
    nack,
    reject,
)
from holdfast.layers.queues.dues import attend_and_tell, attend_to, due_in, next_due
from holdfast.layers.queues.graves import redrive
from holdfast.layers.queues.looks import names, peek, purge, stats, survey
from holdfast.layers.queues.policies import dead_letter_queue, policy_of, queue_name, set_policy, visibility_ms
from holdfast.layers.queues.puts import put
from holdfast.layers.queues.repeats import (
    Purged,
    Redriven,
    give_back_once,
    give_up,
    lease_once,
    leased_before,
    purge_on,
    redrive_on,
)
from holdfast.layers.queues.rooms import QueueKey, Stored, delivery_of, room_of, text_of
from holdfast.layers.queues.schedules import remove_schedule, schedules_of, set_schedule
from holdfast.layers.queues.tallies import DUE, NEVER_MS

__all__ = [
    "DUE",
    "NEVER_MS",
    "Ahead",
    "Leased",
    "Purged",
    "QueueKey",
    "Redriven",
    "Stored",
    "ack",
    "attend_and_tell",
    "attend_to",
    "check",
    "dead_letter_queue",
    "defer_all",
    "deliveries_of",
    "delivery_of",
    "due_in",
    "extend",
    "give_back_once",
    "give_up",
    "lease",
    "lease_once",
    "lease_or_wait",
    "leased_before",
    "nack",
    "names",
    "next_due",
    "peek",
    "policy_of",
    "purge",
    "purge_on",
    "put",
    "queue_name",
    "redrive",
    "redrive_on",
    "reject",
    "remove_schedule",
    "room_of",
    "schedules_of",
    "set_policy",
    "set_schedule",
    "stats",
    "survey",
    "text_of",
    "visibility_ms",
]
