"""Queue counters: how many messages are in which state, and where scans start.

An LSM store keeps deleted keys until a compaction, so a scan from the start of a consumed queue would walk over every
message it ever held. The counters therefore keep a *front* for each priority, the lowest possibly ready id, and the
earliest time at which the due index may have an entry. They are part of the commit that moves them, so they are right
after a restart.

Where several processes write, each keeps its own counters to avoid conflicts. Then only the sums are meaningful: fronts
are not used, and scans start at the beginning. Now and then the counters of all processes are folded (`upkeep`).
"""

from collections.abc import Sequence

import msgspec

from fastness.kv import Event, Transaction, pages
from fastness.layers.queues.history import history_key, history_value
from fastness.layers.queues.key_states import KeyState, decode_state
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.policies import history_ms, policy_at
from fastness.limits import CLOCK_SET_BACK_MS_MIN
from fastness.wire.stored_messages import ID_BYTES, StoredHead, StoredMessage, encode

NEVER_MS = (1 << 63) - 1
_ID_TIME_SHIFT = 80  # A UUIDv7 begins with its milliseconds; this many bits follow.


class MessageEvent(Event, frozen=True, gc=False):
    """A change of a message."""

    event: str
    queue: QueueKey
    id: bytes
    correlation_id: str
    at_ms: int
    attempt: int  # The number of deliveries so far.
    error: str | None


class QueueDue(Event, frozen=True, gc=False):
    """Something in a queue will be due earlier than known so far."""

    queue: QueueKey
    in_ms: int


class QueueCounters(msgspec.Struct, array_like=True):
    """The counters of one writer. Not frozen: a transaction changes them several times and writes them once."""

    ready: dict[int, int] = msgspec.field(default_factory=dict)  # By priority.
    fronts: dict[int, bytes] = msgspec.field(default_factory=dict)  # By priority: the lowest possibly ready id.
    delayed: int = 0
    leased: int = 0
    blocked: int = 0
    next_due_ms: int = NEVER_MS  # Nothing is due before this time.
    due_front_ms: int = 0  # The due index has no entry before this time.
    put: int = 0
    delivered: int = 0
    acked: int = 0
    failed: int = 0
    expired: int = 0
    dead_lettered: int = 0
    swept_minute: int = 0
    order_version: int = 0  # Grows when a message becomes ready or is removed out of order; invalidates `Prefetched`.
    budget: float = 0.0  # Deliveries that the queue's rate allows now.
    budget_ms: int = 0  # When `budget` was computed.
    last_id: bytes = b""  # The newest message id. The next id sorts after it, even if the clock was set back.
    clock_ms: int = 0  # When a lease or delay last began. The clock is before it only if it was set back.
    shortened: bytes = b""  # While leases and delays are shortened after that: the due entry of the last one.
    history_ms: int = 0  # How long changes of messages are recorded, from the policy; 0: they are not.
    expiry_minute: int = 0  # The latest minute that has a due entry for records that expire then.

    def is_clock_set_back(self, now_ms: int) -> bool:
        """Whether the clock was set back since a lease or delay began."""
        return self.clock_ms - now_ms >= CLOCK_SET_BACK_MS_MIN

    def add_due(self, at_ms: int) -> None:
        """Record that the due index has an entry at `at_ms`."""
        self.next_due_ms = min(self.next_due_ms, at_ms)
        self.due_front_ms = min(self.due_front_ms, at_ms)

    def ready_total(self) -> int:
        return sum(self.ready.values())


decode_counters = msgspec.msgpack.Decoder(QueueCounters).decode
_COUNTS = ("delayed", "leased", "blocked", "put", "delivered", "acked", "failed", "expired", "dead_lettered")


def load_counters(tx: Transaction, keys: QueueKeys) -> QueueCounters:
    """The counters of the process that runs this transaction.

    If it has none, because they were folded or because it is new, it takes over what is no sum from the folded ones:
    which ids were issued, and whether the clock was set back.
    """
    stored = tx.get(keys.counters_key(tx.writer) if tx.writer else keys.own_counters)
    if stored is not None:
        return decode_counters(stored)
    counters = QueueCounters(history_ms=history_ms(policy_at(tx, keys)))
    folded = tx.get(keys.own_counters) if tx.writer else None
    if folded is not None:
        earlier = decode_counters(folded)
        counters.last_id, counters.clock_ms = earlier.last_id, earlier.clock_ms
    return counters


def total_counters(tx: Transaction, keys: QueueKeys) -> QueueCounters:
    """The sum of all writers' counters."""
    if not tx.writer:
        return load_counters(tx, keys)
    summed = QueueCounters()
    for page in pages(tx, *keys.all_counters.range()):
        for _, value in page:
            add_counters(summed, decode_counters(value))
    return summed


def ready_ranges(tx: Transaction, keys: QueueKeys) -> list[tuple[bytes, bytes]]:
    """Where ready messages are, the most urgent first: embedded, after those that were removed from the front."""
    if tx.writer:
        return [keys.ready_range()]
    counters = load_counters(tx, keys)
    priorities = sorted((each for each, count in counters.ready.items() if count > 0), reverse=True)
    return [keys.priority_range(priority, counters.fronts.get(priority, b"")) for priority in priorities]


def merged_counters(tx: Transaction, keys: QueueKeys, all_counters: Sequence[QueueCounters]) -> QueueCounters:
    """The counters of several writers as those of one."""
    merged = QueueCounters()
    for counters in all_counters:
        add_counters(merged, counters)
    # Without fronts, scans start at the beginning and find everything. The first due entry gives the next due time.
    first = tx.scan(*keys.due_range(0), limit=1)
    merged.next_due_ms = merged.due_front_ms = keys.due_at(first[0][0]) if first else NEVER_MS
    merged.clock_ms = max(counters.clock_ms for counters in all_counters)
    merged.last_id = max(counters.last_id for counters in all_counters)
    merged.order_version = max(counters.order_version for counters in all_counters)
    merged.history_ms = max(counters.history_ms for counters in all_counters)
    merged.swept_minute = min(counters.swept_minute for counters in all_counters)
    latest = max(all_counters, key=lambda counters: counters.budget_ms)
    merged.budget, merged.budget_ms = latest.budget, latest.budget_ms
    return merged


def add_counters(summed: QueueCounters, counters: QueueCounters) -> None:
    """Add `counters` to `summed`. Fronts and due times are not sums, and are left out."""
    for priority, count in counters.ready.items():
        summed.ready[priority] = summed.ready.get(priority, 0) + count
    for name in _COUNTS:
        setattr(summed, name, getattr(summed, name) + getattr(counters, name))


class QueueTransaction:
    """A queue inside one transaction: its keys, and its counters, which `save` writes once."""

    __slots__ = ("_due_ms", "_key_states", "admitted", "counters", "keys", "queue", "tx")

    def __init__(self, tx: Transaction, queue: QueueKey) -> None:
        self.tx = tx
        self.queue = queue
        self.keys = keys_of(queue)
        self.counters = load_counters(tx, self.keys)
        if tx.writer and self.counters.next_due_ms <= tx.now_ms:
            self.counters.next_due_ms = NEVER_MS  # Another process has processed it, or will: its sweeper knows of it.
        self._due_ms = self.counters.next_due_ms
        self._key_states: dict[str, KeyState] | None = None
        self.admitted = 0  # Messages that the quota of the universe has admitted, and `save` will count.

    def save(self) -> None:
        if self._key_states is not None:
            self._save_key_states(self._key_states)
        tx, keys = self.tx, self.keys
        tx.put(keys.counters_key(tx.writer) if tx.writer else keys.own_counters, encode(self.counters))
        if self.counters.next_due_ms < self._due_ms:
            self.tx.emit(QueueDue(self.queue, self.counters.next_due_ms - self.tx.now_ms))

    def key_state(self, key: str) -> KeyState:
        """The state of a key of messages. `save` writes it."""
        if self._key_states is None:
            self._key_states = {}
        state = self._key_states.get(key)
        if state is None:
            stored = self.tx.get(self.keys.key_states.key(key))
            state = self._key_states[key] = KeyState() if stored is None else decode_state(stored)
        return state

    def _save_key_states(self, states: dict[str, KeyState]) -> None:
        for key, state in states.items():
            if state.is_needed:
                self.tx.put(self.keys.key_states.key(key), encode(state))
            else:
                self.tx.delete(self.keys.key_states.key(key))

    def new_id(self) -> bytes:
        """An id that sorts after all earlier ones, even if the clock was set back."""
        return self.new_ids(1)[0]

    def new_ids(self, count: int) -> list[bytes]:
        """`count` ascending ids, see `new_id`."""
        numbers = self.tx.new_numbers(count)
        ids = [number.to_bytes(ID_BYTES, "big") for number in numbers]
        if ids[0] <= self.counters.last_id:
            shift = _shift_past(numbers[0], int.from_bytes(self.counters.last_id, "big"))
            ids = [(number + shift).to_bytes(ID_BYTES, "big") for number in numbers]
        self.counters.last_id = ids[-1]
        return ids

    def make_ready(self, message: StoredMessage, *, newest: bool) -> None:
        """Add a message to the ready ones. `newest` says that its id is the largest of all."""
        self.add_ready(message.priority, message.id, encode(message), newest=newest)

    def add_ready(self, priority: int, position: bytes, stored: bytes, *, newest: bool) -> None:
        """Add an encoded message to the ready ones of a priority. `newest` says that its position is the last of all.

        The position is the message's id, or its turn.
        """
        counters = self.counters
        ready = counters.ready
        self.tx.put(self.keys.ready_key_at(priority, position), stored)
        self.tx.expose()
        ready[priority] = ready.get(priority, 0) + 1
        if position < counters.fronts.get(priority, b""):
            counters.fronts[priority] = position
        if not newest:  # It may be a dead letter that returns to a queue that was deleted meanwhile.
            counters.last_id = max(counters.last_id, position)
        if not newest or (len(ready) > 1 and any(ready.get(lower) for lower in range(priority))):
            counters.order_version += 1

    def remove_ready(self, message: StoredMessage) -> None:
        """Remove a message without a key from the ready ones, out of order."""
        self.remove_ready_at(message.priority, message.id)

    def remove_ready_at(self, priority: int, position: bytes) -> None:
        """Remove a message from the ready ones, out of order."""
        self.tx.delete(self.keys.ready_key_at(priority, position))
        self.counters.order_version += 1
        self.counters.ready[priority] = self.counters.ready.get(priority, 0) - 1

    def delay(self, message: StoredMessage) -> None:
        """Store a delayed message, with a due entry at its `due_ms`."""
        now_ms = self.tx.now_ms
        message.delayed_for_ms = message.due_ms - now_ms
        self.counters.clock_ms = max(self.counters.clock_ms, now_ms)
        self.tx.put(self.keys.delayed_key(message.id), encode(message))
        self.tx.put(self.keys.due_key(message.due_ms, message.id), b"")
        self.counters.add_due(message.due_ms)
        self.counters.delayed += 1

    def remove_delayed(self, message: StoredMessage) -> None:
        """Remove a delayed message and its due entry."""
        self.tx.delete(self.keys.delayed_key(message.id))
        self.tx.delete(self.keys.due_key(message.due_ms, message.id))
        self.counters.delayed -= 1

    def emit(self, kind: str, message: StoredHead, error: str | None = None) -> None:
        """Add an event about a message, which is published after the commit."""
        self.emit_of(kind, message.id, message.correlation_id, message.attempts, error)

    def emit_of(self, kind: str, id: bytes, correlation_id: str, attempts: int, error: str | None = None) -> None:
        """`emit` an event about the message with this id, correlation id and number of deliveries."""
        tx = self.tx
        tx.events.append(MessageEvent(kind, self.queue, id, correlation_id, tx.now_ms, attempts, error))
        if self.counters.history_ms:
            self._record(kind, id, correlation_id, attempts, error)

    def record(self, kind: str, message: StoredHead) -> None:
        """Add a change of a message to the queue's history, if the queue has one."""
        if self.counters.history_ms:
            self._record(kind, message.id, message.correlation_id, message.attempts, None)

    def _record(self, kind: str, id: bytes, correlation_id: str, attempts: int, error: str | None) -> None:
        key = history_key(self.keys, self.tx.now_ms, id, attempts, kind)
        self.tx.put(key, history_value(kind, correlation_id, error))


def _shift_past(number: int, last: int) -> int:
    """What to add to an id to get one after `last`: milliseconds only.

    The random bits stay, because other processes may issue ids after the same one at the same time.
    """
    shift = (last >> _ID_TIME_SHIFT) - (number >> _ID_TIME_SHIFT)
    if number + (shift << _ID_TIME_SHIFT) <= last:
        shift += 1
    return shift << _ID_TIME_SHIFT
