"""The keys of a queue.

    (u, universe, "q", queue, …)
      "tally", writer            counters by state, and scan positions; one record per writing process
      "policy"                   defaults for the messages of the queue
      "sqs"                      what the SQS protocol has beside that: attributes, tags, times
      "v"                        the pass that removes messages that are too old, if they are kept by age
      "r" | 9 - priority | id    ready messages, in delivery order
      "p" | id                   delayed messages
      "t" | at_ms | entry        the due index: leases, with their messages, and when a delay or a TTL ends, or a
                                 schedule fires
      "m" | lease                the messages of a lease, if they are too many for its entry in the due index
      "d" | lease                which messages of a lease are settled
      "x" | lease                when a lease ends that was extended
      "b" | id                   payloads that are too large to be rewritten with every delivery
      "f" | id                   the failed attempts of a message, also of one that is done while "o" has its outcome
      "w", group | id            blocked messages, waiting behind another message of their group
      "w", 0, key | 9 - priority | id    messages with a key, waiting for their turn
      "k", key                   the state of a key: its leases, its message that is ready, its rate and its pause
      "l" | id                   where a message is that has job options, or waits behind its group
      "h", group                 a group's head (ready, delayed or leased), and where the scan for the next one starts,
                                 or its messages that are leased together: see `groups`
      "i", period, key           idempotency keys
      "u", key                   the message that has a unique key
      "n", key                   the delayed message that has a debounce key
      "o" | id                   what became of a message: its result, or why it has none
      "c" | lease | position     a leased message that was cancelled
      "e" | minute | key         keys of "o", "f", "c" and "u" that are deleted after that minute
      "a", minute | lease        the messages of a lease that were acknowledged, by the minute of the last one
      "s", name                  schedules
      "y" | at_ms | id | n       the history: changes of messages, if the queue's policy asks for it

The parts after `|` are plain bytes. They sort like the values they encode and cost less than packed tuples. A message
is in exactly one of "r", "p", "w" and a lease. Ids are UUIDv7, so within one priority the order of ids is the order of
puts. A message with a key is ready under its turn instead of its id if the keys take turns.
"""

from functools import lru_cache
from typing import NamedTuple

from fastness.kv import Subspace
from fastness.limits import PRIORITY_MAX
from fastness.wire.stored_messages import ID_BYTES, StoredMessage


class QueueKey(NamedTuple):
    """Identifies a queue."""

    universe: str
    name: str


class QueueKeys:
    """The keys of one queue."""

    def __init__(self, queue: QueueKey) -> None:
        keys = Subspace("u", queue.universe, "q", queue.name)
        self.prefix = keys.prefix
        self.all_counters = keys.at("tally")
        self.own_counters = self.all_counters.key("")
        self.policy = keys.key("policy")
        self.sqs = keys.key("sqs")
        self.retention = keys.key("v")
        self.ready = keys.key("r")
        self.delayed = keys.key("p")
        self.due = keys.key("t")
        self.contents = keys.key("m")
        self.settled = keys.key("d")
        self.moved = keys.key("x")
        self.body = keys.key("b")
        self.failures = keys.key("f")
        self.waiting = keys.at("w")
        self.lanes = self.waiting.at(0)
        self.key_states = keys.at("k")
        self.locations = keys.key("l")
        self.head = keys.at("h")
        self.ids = keys.at("i")
        self.acks = keys.at("a")
        self._acks_of_minute = (-1, b"")
        self.schedules = keys.at("s")
        self.history = keys.key("y")
        self.unique = keys.at("u")
        self.debounced = keys.at("n")
        self.outcomes = keys.key("o")
        self.cancelled = keys.key("c")
        self.expiries = keys.key("e")

    def counters_key(self, writer: str) -> bytes:
        return self.own_counters if not writer else self.all_counters.key(writer)

    def ready_key(self, message: StoredMessage) -> bytes:
        return self.ready + _URGENCY[message.priority] + message.id

    def ready_key_at(self, priority: int, id: bytes) -> bytes:
        return self.ready + _URGENCY[priority] + id

    def lane_key(self, key: str, place: bytes) -> bytes:
        """Where a message waits for the turn of its key. `place` is that of `place_of`."""
        return self.lanes.key(key) + place

    def lane_range(self, key: str, front: bytes) -> tuple[bytes, bytes]:
        """The key range of the messages that wait for the turn of a key, from the place `front` on."""
        prefix = self.lanes.key(key)
        return prefix + front, prefix + b"\xff" * (ID_BYTES + 2)

    def priority_range(self, priority: int, front: bytes) -> tuple[bytes, bytes]:
        """The key range of a priority's ready messages, from `front` on."""
        prefix = self.ready + _URGENCY[priority]
        return prefix + front, prefix + b"\xff" * (ID_BYTES + 1)

    def ready_range(self) -> tuple[bytes, bytes]:
        """The key range of all ready messages, most urgent first."""
        return self.ready, self.ready + b"\xff"

    def delayed_key(self, id: bytes) -> bytes:
        return self.delayed + id

    def delayed_range(self, after: bytes = b"") -> tuple[bytes, bytes]:
        """The key range of the delayed messages, after an id."""
        return self.delayed + (after + b"\x00" if after else b""), self.delayed + b"\xff" * (ID_BYTES + 1)

    def body_key(self, id: bytes) -> bytes:
        return self.body + id

    def failures_key(self, id: bytes) -> bytes:
        return self.failures + id

    def due_key(self, at_ms: int, entry: bytes) -> bytes:
        return self.due + at_ms.to_bytes(8, "big") + entry

    def due_range(self, front_ms: int) -> tuple[bytes, bytes]:
        """The key range of the due index, from `front_ms` on."""
        return self.due + front_ms.to_bytes(8, "big"), self.due + b"\xff" * 9

    def due_at(self, key: bytes) -> int:
        """The time of an entry of the due index."""
        return int.from_bytes(key[len(self.due) :][:8], "big")

    def ack_key(self, minute: int, lease: bytes) -> bytes:
        of_minute = self._acks_of_minute
        if of_minute[0] != minute:
            of_minute = self._acks_of_minute = (minute, self.acks.key(minute))
        return of_minute[1] + lease

    def waiting_key(self, message: StoredMessage) -> bytes:
        return self.waiting.key(message.group) + message.id

    def group_range(self, group: str, front: bytes) -> tuple[bytes, bytes]:
        """The key range of a group's blocked messages, from `front` on."""
        prefix = self.waiting.key(group)
        return prefix + front, prefix + b"\xff" * (ID_BYTES + 1)


_URGENCY = [bytes((PRIORITY_MAX - priority,)) for priority in range(PRIORITY_MAX + 1)]  # The most urgent sorts first.


def place_of(priority: int, id: bytes) -> bytes:
    """The order of messages: the most urgent first, then the oldest."""
    return _URGENCY[priority] + id


def priority_at(place: bytes) -> int:
    """The priority of a place."""
    return PRIORITY_MAX - place[0]


@lru_cache(maxsize=4_096)
def keys_of(queue: QueueKey) -> QueueKeys:
    """The keys of a queue, cached."""
    return QueueKeys(queue)


def queues(universe: str) -> Subspace:
    """The subspace of a universe's queues."""
    return Subspace("u", universe, "q")
