"""Tallies: how many messages a queue has in which state, kept up with every change, and where to look first.

An LSM store does not forget deleted keys at once: a scan from the head of a queue that was consumed would walk over
every message that was ever there. So a tally remembers for each priority a *front*, below which nothing is ready, and
for what is due the first moment that may have anything. Both are part of the commit that moves them, so they are right
after a restart too.

Where several processes write, each keeps a tally of its own, so that they do not conflict over it. Only the sums mean
anything then, fronts are of no use, and scans begin at the beginning.
"""

import msgspec

from holdfast.kv import Transaction
from holdfast.layers.queues.keys import ID_BYTES, QueueKey, QueueKeys, StoredMessage, encode, keys_of

NEVER_MS = (1 << 63) - 1
DUE = "due"  # The note for whoever waits until something is due: in how many milliseconds.


class QueueCounters(msgspec.Struct, array_like=True):
    """What one writer has counted. Not frozen: one transaction changes it several times and writes it once."""

    ready: dict[int, int] = msgspec.field(default_factory=dict)  # By priority.
    fronts: dict[int, bytes] = msgspec.field(default_factory=dict)  # By priority: no ready id sorts below.
    delayed: int = 0
    leased: int = 0
    blocked: int = 0
    next_due_ms: int = NEVER_MS  # Nothing is due before.
    due_front_ms: int = 0  # Nothing is noted below.
    put: int = 0
    delivered: int = 0
    acked: int = 0
    failed: int = 0
    expired: int = 0
    died: int = 0
    swept_minute: int = 0
    disorder: int = 0  # Grows when a message becomes ready, or is taken, out of order: what was read ahead is wrong.
    budget: float = 0.0  # Deliveries that the queue's rate allows now.
    budget_ms: int = 0  # When that was counted.
    last_id: bytes = b""  # Of the messages that were put. The next one sorts behind it, whatever the clock says.

    def note_due(self, at_ms: int) -> None:
        """Something will be due at that moment."""
        self.next_due_ms = min(self.next_due_ms, at_ms)
        self.due_front_ms = min(self.due_front_ms, at_ms)

    def ready_total(self) -> int:
        return sum(self.ready.values())


_decode = msgspec.msgpack.Decoder(QueueCounters).decode
_COUNTS = ("delayed", "leased", "blocked", "put", "delivered", "acked", "failed", "expired", "died")


def load_counters(tx: Transaction, keys: QueueKeys) -> QueueCounters:
    """The tally of whoever runs this transaction."""
    stored = tx.get(keys.counters_key(tx.writer))
    return QueueCounters() if stored is None else _decode(stored)


def total_counters(tx: Transaction, keys: QueueKeys) -> QueueCounters:
    """The sum of all tallies."""
    if not tx.writer:
        return load_counters(tx, keys)
    summed = QueueCounters()
    for _, value in tx.scan(*keys.all_counters.range(), limit=10_000):
        add_counters(summed, _decode(value))
    return summed


def add_counters(summed: QueueCounters, counters: QueueCounters) -> None:
    """Add the counts of a tally to others. Fronts, and what is due, are not sums."""
    for priority, count in counters.ready.items():
        summed.ready[priority] = summed.ready.get(priority, 0) + count
    for name in _COUNTS:
        setattr(summed, name, getattr(summed, name) + getattr(counters, name))


class QueueTransaction:
    """A queue inside one transaction: its keys and its tally, which is saved once whatever was done."""

    __slots__ = ("_due_ms", "counters", "keys", "queue", "tx")

    def __init__(self, tx: Transaction, queue: QueueKey) -> None:
        self.tx = tx
        self.queue = queue
        self.keys = keys_of(queue)
        self.counters = load_counters(tx, self.keys)
        self._due_ms = self.counters.next_due_ms

    def save(self) -> None:
        self.tx.put(self.keys.counters_key(self.tx.writer), encode(self.counters))
        if self.counters.next_due_ms < self._due_ms:
            self.tx.emit(DUE, self.queue, self.counters.next_due_ms - self.tx.now_ms)

    def new_id(self) -> bytes:
        """An id that sorts behind all that were put before, even if the clock was set back since."""
        return self.new_ids(1)[0]

    def new_ids(self, count: int) -> list[bytes]:
        """`new_id` for a batch, in the order of the batch."""
        numbers = self.tx.new_numbers(count)
        ids = [number.to_bytes(ID_BYTES, "big") for number in numbers]
        if ids[0] <= self.counters.last_id:
            behind = int.from_bytes(self.counters.last_id, "big") + 1 - numbers[0]
            ids = [(number + behind).to_bytes(ID_BYTES, "big") for number in numbers]
        self.counters.last_id = ids[-1]
        return ids

    def make_ready(self, message: StoredMessage, *, fresh: bool) -> None:
        """Put a message where it will be delivered from. A fresh one has the largest id of all and comes last."""
        counters, priority = self.counters, message.priority
        ready = counters.ready
        self.tx.put(self.keys.ready_key(message), encode(message))
        ready[priority] = ready.get(priority, 0) + 1
        if message.id < counters.fronts.get(priority, b""):
            counters.fronts[priority] = message.id
        if not fresh or (len(ready) > 1 and any(ready.get(lower) for lower in range(priority))):
            counters.disorder += 1

    def take_ready(self, message: StoredMessage, *, in_order: bool = False) -> None:
        """Take a message from where it would be delivered from, `in_order` if it is the next to be delivered."""
        self.tx.delete(self.keys.ready_key(message))
        if not in_order:
            self.counters.disorder += 1
        self.counters.ready[message.priority] = self.counters.ready.get(message.priority, 0) - 1

    def park(self, message: StoredMessage) -> None:
        """Put a message aside until its `due_ms`."""
        self.tx.put(self.keys.parked_key(message.id), encode(message))
        self.tx.put(self.keys.due_key(message.due_ms, message.id), b"")
        self.counters.note_due(message.due_ms)
        if message.owner is None:
            self.counters.delayed += 1
        else:
            self.counters.leased += 1

    def unpark(self, message: StoredMessage) -> None:
        """Take a parked message up again."""
        self.tx.delete(self.keys.parked_key(message.id))
        self.tx.delete(self.keys.due_key(message.due_ms, message.id))
        if message.owner is None:
            self.counters.delayed -= 1
        else:
            self.counters.leased -= 1

    def emit(self, what: str, message: StoredMessage, error: str | None = None) -> None:
        """Have it told that something happened to a message, and of which error if there is one to tell of."""
        tx = self.tx
        tx.events.append((what, self.queue, message.id, message.correlation_id, tx.now_ms, message.attempts, error))
