"""Messages with keys: how many of a key are leased at a time, how fast they are delivered, and whose turn it is.

    put ──► waiting for its key ──► ready ──► leased
               ▲     a slot of the key is free,  │
               │     its rate allows it, and     │
               │     it is not paused            │
               └──── nack, or the lease ends ────┘

At most one message of a key is ready: the first of those that wait, by priority and age. Its delivery lets the next one
become ready, unless `concurrency_per_key` are leased then, the rate is used up, or the key is paused. So a delivery
costs the same however many keys and messages there are, and a key that may not go on delays no other.

With `fair`, a message that becomes ready gets a new place behind all others, so the keys take turns. Without it, the
order is that of priorities and ages, among the keys that may go on.
"""

import math

from fastness.errors import InvalidArgument
from fastness.kv import Transaction, unpack
from fastness.layers.queues import locations
from fastness.layers.queues.counters import NEVER_MS, QueueTransaction
from fastness.layers.queues.key_states import KeyState
from fastness.layers.queues.keys import QueueKey, place_of, priority_at
from fastness.layers.queues.policies import policy_of
from fastness.limits import DELAY_SECONDS_MAX, KEYS_BATCH_MAX
from fastness.wire.queues import KeyInfo, QueuePolicy
from fastness.wire.stored_messages import StoredHead, StoredMessage, decode, encode

KEY_DUE = b"K"  # The kind of a due entry: a key may go on.
LIMITS_DUE = b"L"  # The limits of keys have changed, so each key may go on at another time.
_TURN_PRIORITY = 5  # Of all messages whose keys take turns: their own priorities count within their keys.


def enter(queue_tx: QueueTransaction, message: StoredMessage, key: str, *, newest: bool) -> None:
    """Let a message wait for the turn of its key, which may be now."""
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    state, place = queue_tx.key_state(key), place_of(message.priority, message.id)
    locations.set_key(queue_tx, message.id, key)
    if state.ready_place and place < state.ready_place:  # It goes before the one that is ready.
        _swap(queue_tx, policy, key, state, message)
        return
    if not state.waiting and not state.ready_place and _wait_ms(policy, state, queue_tx.tx.now_ms) == 0:
        _make_ready(queue_tx, policy, state, message, newest=newest)
        return
    _wait(queue_tx, key, state, place, encode(message))
    go_on(queue_tx, policy, key, state)


def deliver(queue_tx: QueueTransaction, policy: QueuePolicy, key: str, *, is_over: bool = False) -> bytes:
    """Note that the ready message of a key was leased, or that its time is over; lets the next one become ready.

    Returns the place of that one among the ready messages; empty: none became ready.
    """
    state = queue_tx.key_state(key)
    state.ready_place = state.ready_at = b""
    if not is_over:
        state.leased += 1
        if policy.rate_per_key is not None:
            state.budget = _budget(policy, state, queue_tx.tx.now_ms) - 1
            state.budget_ms = queue_tx.tx.now_ms
    go_on(queue_tx, policy, key, state)
    return state.ready_at


def release(queue_tx: QueueTransaction, message: StoredHead) -> None:
    """Note that a message was taken out of its lease: it has no location, and the slot of its key is free."""
    if message.job is None:
        return
    locations.clear(queue_tx, message.id)
    if message.key is not None:
        state = queue_tx.key_state(message.key)
        state.leased -= 1
        go_on(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), message.key, state)


def remove_ready(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Remove a message from the ready ones, out of order, and let the next one of its key become ready."""
    if message.key is None:
        queue_tx.remove_ready(message)
        return
    state = queue_tx.key_state(message.key)
    _take_back(queue_tx, state)
    go_on(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), message.key, state)


def remove_waiting(queue_tx: QueueTransaction, message: StoredMessage, key: str) -> bool:
    """Remove a message that waits for its key; whether it did."""
    tx, place = queue_tx.tx, place_of(message.priority, message.id)
    lane_key = queue_tx.keys.lane_key(key, place)
    if tx.get(lane_key) is None:
        return False
    tx.delete(lane_key)
    queue_tx.key_state(key).waiting -= 1
    queue_tx.counters.blocked -= 1
    return True


def wake(queue_tx: QueueTransaction, key: str, at_ms: int) -> None:
    """Let a key go on whose time has come."""
    state = queue_tx.key_state(key)
    if state.due_ms == at_ms:
        state.due_ms = 0
        go_on(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), key, state)


def limits_changed(queue_tx: QueueTransaction) -> None:
    """Let all keys go on by new limits, soon: `apply_limits` does it for a bounded number at a time."""
    if queue_tx.tx.scan(*queue_tx.keys.key_states.range(), limit=1):
        _continue_limits(queue_tx, b"")


def apply_limits(queue_tx: QueueTransaction, after: bytes) -> None:
    """Let keys go on by the limits of the policy; those whose states are after the key `after`."""
    tx, keys = queue_tx.tx, queue_tx.keys
    begin, end = keys.key_states.range()
    prefix = len(keys.key_states.prefix)
    found = tx.scan(keys.key_states.prefix + after + b"\x00" if after else begin, end, limit=KEYS_BATCH_MAX)
    for key, _ in found:
        restart_clock(queue_tx, str(unpack(key[prefix:])[0]))
    if len(found) == KEYS_BATCH_MAX:
        _continue_limits(queue_tx, found[-1][0][prefix:])


def _continue_limits(queue_tx: QueueTransaction, after: bytes) -> None:
    now_ms = queue_tx.tx.now_ms
    queue_tx.tx.put(queue_tx.keys.due_key(now_ms, LIMITS_DUE + after), LIMITS_DUE)
    queue_tx.counters.add_due(now_ms)


def restart_clock(queue_tx: QueueTransaction, key: str) -> None:
    """Compute from now on when a key may go on, because the clock was set back. A pause has an absolute end."""
    state, now_ms = queue_tx.key_state(key), queue_tx.tx.now_ms
    state.budget_ms = min(state.budget_ms, now_ms)
    _set_due(queue_tx, key, state, 0)
    go_on(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), key, state)


def pause(tx: Transaction, queue: QueueKey, key: str, *, until_ms: int) -> KeyInfo:
    """Deliver no message of a key before `until_ms`; a time that has passed lets it go on.

    Raises:
        InvalidArgument: the time is too far away.
    """
    if not 0 <= until_ms <= tx.now_ms + DELAY_SECONDS_MAX * 1_000:
        raise InvalidArgument(
            f"A key cannot be paused until {until_ms}; give milliseconds since 1970, at most a year from now"
        )
    queue_tx, policy = QueueTransaction(tx, queue), policy_of(tx, queue)
    state = queue_tx.key_state(key)
    state.paused_until_ms = until_ms if until_ms > tx.now_ms else 0
    if state.paused_until_ms and state.ready_place:
        stored = tx.get(queue_tx.keys.ready + state.ready_at)
        place = state.ready_place
        _take_back(queue_tx, state)
        if stored is not None:
            _wait(queue_tx, key, state, place, stored)
    go_on(queue_tx, policy, key, state)
    queue_tx.save()
    return _info(key, state, tx.now_ms)


def info(tx: Transaction, queue: QueueKey, key: str) -> KeyInfo:
    """The state of a key."""
    return _info(key, QueueTransaction(tx, queue).key_state(key), tx.now_ms)


def _info(key: str, state: KeyState, now_ms: int) -> KeyInfo:
    paused = state.paused_until_ms if state.paused_until_ms > now_ms else None
    return KeyInfo(key, int(bool(state.ready_place)), state.waiting, state.leased, paused)


def go_on(queue_tx: QueueTransaction, policy: QueuePolicy, key: str, state: KeyState) -> None:
    """Make the first waiting message of a key ready if it may be; otherwise see to it that this is tried in time."""
    tx, keys, now_ms = queue_tx.tx, queue_tx.keys, queue_tx.tx.now_ms
    wait_ms = 0 if state.ready_place else _wait_ms(policy, state, now_ms)
    if wait_ms == 0 and not state.ready_place and state.waiting:
        found = tx.scan(*keys.lane_range(key, state.front), limit=1)
        if found:
            lane_key, value = found[0]
            tx.delete(lane_key)
            state.waiting -= 1
            state.front = lane_key[-17:] + b"\x00"
            queue_tx.counters.blocked -= 1
            _make_ready(queue_tx, policy, state, decode(value), newest=False)
    if state.waiting and not state.ready_place and 0 < wait_ms < NEVER_MS:
        due_ms = now_ms + wait_ms
    elif state.paused_until_ms > now_ms:
        due_ms = state.paused_until_ms
    elif policy.rate_per_key is not None and not state.is_busy:  # Its budget is remembered until it is full.
        missing = _burst(policy) - _budget(policy, state, now_ms)
        due_ms = now_ms + math.ceil(missing / policy.rate_per_key * 1_000) if missing > 0 else 0
    else:
        due_ms = 0
    _set_due(queue_tx, key, state, due_ms)


def _wait_ms(policy: QueuePolicy, state: KeyState, now_ms: int) -> int:
    """How long the key has to wait before another message of it may be delivered; NEVER_MS: until one is settled."""
    if policy.concurrency_per_key is not None and state.leased >= policy.concurrency_per_key:
        return NEVER_MS
    wait_ms = max(state.paused_until_ms - now_ms, 0)
    if policy.rate_per_key is not None:
        budget = _budget(policy, state, now_ms)
        if budget < 1:
            wait_ms = max(wait_ms, math.ceil((1 - budget) / policy.rate_per_key * 1_000), 1)
    return wait_ms


def _budget(policy: QueuePolicy, state: KeyState, now_ms: int) -> float:
    """How many messages the rate of a key allows now. A new key has all of its burst."""
    burst = _burst(policy)
    if policy.rate_per_key is None or not state.budget_ms:
        return burst
    passed_ms = max(now_ms - state.budget_ms, 0)
    return min(state.budget + passed_ms * policy.rate_per_key / 1_000, burst)


def _burst(policy: QueuePolicy) -> float:
    if policy.burst_per_key is not None:
        return float(policy.burst_per_key)
    return max(policy.rate_per_key or 0.0, 1.0)


def _make_ready(
    queue_tx: QueueTransaction, policy: QueuePolicy, state: KeyState, message: StoredMessage, *, newest: bool
) -> None:
    state.ready_place = place_of(message.priority, message.id)
    if policy.fair:
        position = message.id if newest else queue_tx.new_id()
        state.ready_at = place_of(_TURN_PRIORITY, position)
        newest = True
    else:
        state.ready_at = state.ready_place
    queue_tx.add_ready(priority_at(state.ready_at), state.ready_at[1:], encode(message), newest=newest)


def _swap(queue_tx: QueueTransaction, policy: QueuePolicy, key: str, state: KeyState, message: StoredMessage) -> None:
    """Let a message take the place of the ready one of its key, which waits again."""
    before = queue_tx.tx.get(queue_tx.keys.ready + state.ready_at) or b""
    _wait(queue_tx, key, state, state.ready_place, before)
    place, turn = place_of(message.priority, message.id), state.ready_at
    _take_back(queue_tx, state)
    state.ready_place, state.ready_at = place, turn if policy.fair else place
    queue_tx.add_ready(priority_at(state.ready_at), state.ready_at[1:], encode(message), newest=False)


def _wait(queue_tx: QueueTransaction, key: str, state: KeyState, place: bytes, stored: bytes) -> None:
    """Let a message wait for its key."""
    queue_tx.tx.put(queue_tx.keys.lane_key(key, place), stored)
    state.front = min(state.front, place) if state.waiting else place
    state.waiting += 1
    queue_tx.counters.blocked += 1


def _take_back(queue_tx: QueueTransaction, state: KeyState) -> None:
    """Remove the ready message of a key from the ready ones, out of order."""
    queue_tx.remove_ready_at(priority_at(state.ready_at), state.ready_at[1:])
    state.ready_place = state.ready_at = b""


def _set_due(queue_tx: QueueTransaction, key: str, state: KeyState, due_ms: int) -> None:
    if due_ms == state.due_ms:
        return
    tx, keys, entry = queue_tx.tx, queue_tx.keys, KEY_DUE + key.encode()
    if state.due_ms:
        tx.delete(keys.due_key(state.due_ms, entry))
    state.due_ms = due_ms
    if due_ms:
        tx.put(keys.due_key(due_ms, entry), KEY_DUE)
        queue_tx.counters.add_due(due_ms)
