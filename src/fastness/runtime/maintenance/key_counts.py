"""What the states of a queue's keys must be, computed from its messages."""

from collections.abc import Iterable

from fastness.kv import Database
from fastness.layers.queues import message_leases
from fastness.layers.queues.key_states import KeyState
from fastness.layers.queues.keys import QueueKeys, place_of
from fastness.runtime.maintenance.scan import scan_range
from fastness.wire import stored_messages

KeyCounts = tuple[int, int, bytes, bytes]  # Leased, waiting, and the place and the position of the ready message.


def counts_of(state: KeyState) -> KeyCounts:
    """The part of a key's state that follows from the messages."""
    return state.leased, state.waiting, state.ready_place, state.ready_at


def count_keys(database: Database, keys: QueueKeys) -> dict[str, KeyState]:
    """The state of each key that has messages, without its rate, its pause and its due time."""
    states: dict[str, KeyState] = {}
    for key, value in scan_range(database, *keys.ready_range()):
        message = stored_messages.decode(value)
        if message.key is not None:
            state = states.setdefault(message.key, KeyState())
            state.ready_place, state.ready_at = place_of(message.priority, message.id), key[len(keys.ready) :]
    for key, value in scan_range(database, *keys.lanes.range()):
        message = stored_messages.decode(value)
        if message.key is not None:
            state = states.setdefault(message.key, KeyState())
            state.front = key[-17:] if not state.waiting else min(state.front, key[-17:])
            state.waiting += 1
    for name in _leased_keys(database, keys):
        states.setdefault(name, KeyState()).leased += 1
    return states


def _leased_keys(database: Database, keys: QueueKeys) -> Iterable[str]:
    for key, value in scan_range(database, *keys.due_range(0)):
        for message in database.read(message_leases.messages_at, keys, key, value):
            if message.key is not None:
                yield message.key
