"""The keys of a queue, and the stored record of a message.

    (u, universe, "q", queue, …)
      "tally", writer            counters by state, and scan positions; one record per writing process
      "policy"                   defaults for the messages of the queue
      "r" | 9 - priority | id    ready messages, in delivery order
      "p" | id                   delayed messages
      "t" | at_ms | entry        the due index: leases, with their messages, and when a delay or a TTL ends, or a
                                 schedule fires
      "m" | lease                the messages of a lease, if they are too many for its entry in the due index
      "d" | lease                which messages of a lease are settled
      "x" | lease                when a lease ends that was extended
      "b" | id                   payloads that are too large to be rewritten with every delivery
      "f" | id                   the failed attempts of a message
      "w", group | id            blocked messages, waiting behind another message of their group
      "h", group                 the group's head (ready, delayed or leased), and where the scan for the next one starts
      "i", period, key           idempotency keys
      "a", minute | lease        the messages of a lease that were acknowledged, by the minute of the last one
      "s", name                  schedules
      "y" | at_ms | id | n       the history: changes of messages, if the queue's policy asks for it

The parts after `|` are plain bytes. They sort like the values they encode and cost less than packed tuples. A message
is in exactly one of "r", "p", "w" and a lease. Ids are UUIDv7, so within one priority the order of ids is the order of
puts.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Subspace
from holdfast.limits import PAYLOAD_CARRIED_BYTES_MAX, PRIORITY_MAX

ID_BYTES = 16
_SHARED_ID_BYTES = 10  # The part of an id that ids of one millisecond mostly share: timestamp and counter.


class QueueKey(NamedTuple):
    """Identifies a queue."""

    universe: str
    name: str


class StoredHead(msgspec.Struct, array_like=True):
    """The first fields of a stored message: what a delivery needs to know of it. The rest is passed on undecoded."""

    id: bytes
    fence: int  # Of its last delivery. It grows with every delivery; a redrive does not reset it.
    attempts: int  # Deliveries.
    ttl_at_ms: int  # 0: no TTL.
    visibility_ms: int
    group: str | None
    blob: str | None
    size: int
    has_failures: bool  # It has a record of its failed attempts.
    stateful: bool  # It was delivered with its workflow state.
    # Whether more than its record has to be removed with it, or its correlation id is not its id.
    is_special: bool
    correlation_id: str

    @property
    def has_body(self) -> bool:
        """Whether the payload has a record of its own."""
        return self.blob is None and self.size > PAYLOAD_CARRIED_BYTES_MAX


class StoredMessage(StoredHead, array_like=True):
    """A message as it is stored. Not frozen: each state change decodes, changes and rewrites it."""

    payload: bytes | None
    content_type: str
    attributes: dict[str, str]
    priority: int
    created_ms: int
    max_attempts: int
    failures: int = 0
    last_error: str | None = None
    origin: str | None = None  # For a dead letter: the queue it comes from.
    died_ms: int = 0
    due_ms: int = 0  # When its lease or delay ends.
    delayed_for_ms: int = 0  # How long its delay was to last when it began.
    leased_ms: int = 0  # When it was last delivered; 0: never.
    retry_delay_ms: int | None = None  # The back-off after its first failure; None: that of the queue's policy.
    # Only while it is leased. A lease has these, and they are not stored with the message.
    owner: str | None = None
    txn_id: str | None = None
    lease_ref: bytes = b""

    @property
    def lease_id(self) -> str:
        """Identifies one delivery."""
        return format_lease_id(self.id, self.fence, self.lease_ref)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(StoredMessage).decode
decode_head = msgspec.msgpack.Decoder(StoredHead).decode


class QueueKeys:
    """The keys of one queue."""

    __slots__ = (
        "_acks_of_minute",
        "acks",
        "all_counters",
        "body",
        "contents",
        "delayed",
        "due",
        "failures",
        "head",
        "history",
        "ids",
        "moved",
        "own_counters",
        "policy",
        "prefix",
        "ready",
        "schedules",
        "settled",
        "waiting",
    )

    def __init__(self, queue: QueueKey) -> None:
        keys = Subspace("u", queue.universe, "q", queue.name)
        self.prefix = keys.prefix
        self.all_counters = keys.at("tally")
        self.own_counters = self.all_counters.key("")
        self.policy = keys.key("policy")
        self.ready = keys.key("r")
        self.delayed = keys.key("p")
        self.due = keys.key("t")
        self.contents = keys.key("m")
        self.settled = keys.key("d")
        self.moved = keys.key("x")
        self.body = keys.key("b")
        self.failures = keys.key("f")
        self.waiting = keys.at("w")
        self.head = keys.at("h")
        self.ids = keys.at("i")
        self.acks = keys.at("a")
        self._acks_of_minute = (-1, b"")
        self.schedules = keys.at("s")
        self.history = keys.key("y")

    def counters_key(self, writer: str) -> bytes:
        return self.own_counters if not writer else self.all_counters.key(writer)

    def ready_key(self, message: StoredMessage) -> bytes:
        return self.ready + _URGENCY[message.priority] + message.id

    def ready_key_at(self, priority: int, id: bytes) -> bytes:
        return self.ready + _URGENCY[priority] + id

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


@lru_cache(maxsize=4_096)
def keys_of(queue: QueueKey) -> QueueKeys:
    """The keys of a queue, cached."""
    return QueueKeys(queue)


def queues(universe: str) -> Subspace:
    """The subspace of a universe's queues."""
    return Subspace("u", universe, "q")


def parse_id(text: str) -> bytes:
    """The 16 bytes of a message id.

    Raises:
        InvalidArgument: `text` is not a message id.
    """
    try:
        id = bytes.fromhex(text.replace("-", ""))
    except (ValueError, AttributeError, TypeError):
        id = b""
    if len(id) != ID_BYTES:
        raise InvalidArgument(f"{text!r} is not a message id; use the id from the message's receipt")
    return id


def format_lease_id(id: bytes, fence: int, ref: bytes) -> str:
    """The text that identifies the delivery of a message. `ref` is the lease, and the number of the message in it."""
    return f"{id.hex()}-{fence}-{ref.hex()}"


def format_id(id: bytes) -> str:
    """A message id as text, in UUID form."""
    return _format_shared(id[:_SHARED_ID_BYTES]) + id[_SHARED_ID_BYTES:].hex()


@lru_cache(maxsize=256)
def _format_shared(shared: bytes) -> str:
    """The first part of an id as text. Cached, because consecutive ids share it."""
    text = shared.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:]}-"
