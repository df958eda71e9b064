"""Where a queue keeps what: its keys, and the record of a message.

    (u, universe, "q", queue, …)
      "tally", writer            counts by state, and where to look first; one record for each process that writes
      "policy"                   what holds for messages that do not say otherwise
      "r" | 9 - priority | id    ready, in the order of delivery: the message
      "p" | id                   parked, because somebody leases it or its delay is not over: the message
      "t" | at_ms | what         when something is due: a lease or a delay ends, a TTL is over, a schedule strikes
      "b" | id                   the payload, where it is too long to be written again with every delivery
      "w", group | id            waits behind another message of its group: the message
      "h", group                 the message of a group that is ready, parked or leased, and where to look for the next
      "i", period, key           idempotency keys
      "a", minute | id           the fences of messages that were acknowledged in that minute
      "s", name                  schedules

Behind `|` stand plain bytes, which sort like what they say and are cheaper to make than tuples. A message is in exactly
one of "r", "p" and "w". Ids are UUIDv7, so within a priority the order of ids is the order of puts.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Subspace
from holdfast.limits import PAYLOAD_CARRIED_BYTES_MAX, PRIORITY_MAX
from holdfast.wire.queues import Delivery, SidecarState

ID_BYTES = 16
_FRONT_BYTES = 10  # Of an id: its millisecond, and the first bits of what tells those of one millisecond apart.


class QueueKey(NamedTuple):
    """Which queue."""

    universe: str
    name: str


class StoredMessage(msgspec.Struct, array_like=True):
    """A message as it is stored. Not frozen: one is decoded, changed and written again in each step of its life."""

    id: bytes
    payload: bytes | None
    blob: str | None
    size: int
    content_type: str
    attributes: dict[str, str]
    correlation_id: str
    priority: int
    group: str | None
    created_ms: int
    max_attempts: int
    visibility_ms: int
    ttl_at_ms: int = 0  # 0: it has no end.
    attempts: int = 0  # Deliveries.
    failures: int = 0
    fence: int = 0  # Grows with every delivery, and goes on growing when a dead letter is put back.
    last_error: str | None = None
    origin: str | None = None  # The queue in which a dead letter died.
    died_ms: int = 0
    due_ms: int = 0  # When its lease or its delay ends, while it is parked.
    owner: str | None = None  # Who leases it; None while it is delayed.
    txn_id: str | None = None
    stateful: bool = False  # It was delivered with its workflow state.

    @property
    def has_body(self) -> bool:
        """Whether its payload is stored apart from it."""
        return self.blob is None and self.size > PAYLOAD_CARRIED_BYTES_MAX

    @property
    def lease_id(self) -> str:
        """Names one delivery: no other one of this message has its fence."""
        return f"{self.id.hex()}-{self.fence}"


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(StoredMessage).decode


class QueueKeys:
    """The keys of one queue."""

    __slots__ = (
        "_acks_of_minute",
        "acks",
        "all_counters",
        "body",
        "due",
        "head",
        "ids",
        "own_counters",
        "parked",
        "policy",
        "prefix",
        "ready",
        "schedules",
        "waiting",
    )

    def __init__(self, queue: QueueKey) -> None:
        keys = Subspace("u", queue.universe, "q", queue.name)
        self.prefix = keys.prefix
        self.all_counters = keys.at("tally")
        self.own_counters = self.all_counters.key("")
        self.policy = keys.key("policy")
        self.ready = keys.key("r")
        self.parked = keys.key("p")
        self.due = keys.key("t")
        self.body = keys.key("b")
        self.waiting = keys.at("w")
        self.head = keys.at("h")
        self.ids = keys.at("i")
        self.acks = keys.at("a")
        self._acks_of_minute = (-1, b"")
        self.schedules = keys.at("s")

    def counters_key(self, writer: str) -> bytes:
        return self.own_counters if not writer else self.all_counters.key(writer)

    def ready_key(self, message: StoredMessage) -> bytes:
        return self.ready + _URGENCY[message.priority] + message.id

    def ready_place(self, priority: int, id: bytes) -> bytes:
        return self.ready + _URGENCY[priority] + id

    def priority_range(self, priority: int, front: bytes) -> tuple[bytes, bytes]:
        """Where the ready messages of a priority are, from `front` on."""
        prefix = self.ready + _URGENCY[priority]
        return prefix + front, prefix + b"\xff" * (ID_BYTES + 1)

    def ready_range(self) -> tuple[bytes, bytes]:
        """Where ready messages are, the most urgent first."""
        return self.ready, self.ready + b"\xff"

    def parked_key(self, id: bytes) -> bytes:
        return self.parked + id

    def body_key(self, id: bytes) -> bytes:
        return self.body + id

    def due_key(self, at_ms: int, what: bytes) -> bytes:
        return self.due + at_ms.to_bytes(8, "big") + what

    def due_range(self, front_ms: int) -> tuple[bytes, bytes]:
        """Where what is due is, from `front_ms` on."""
        return self.due + front_ms.to_bytes(8, "big"), self.due + b"\xff" * 9

    def ack_key(self, minute: int, id: bytes) -> bytes:
        of_minute = self._acks_of_minute
        if of_minute[0] != minute:
            of_minute = self._acks_of_minute = (minute, self.acks.key(minute))
        return of_minute[1] + id

    def waiting_key(self, message: StoredMessage) -> bytes:
        return self.waiting.key(message.group) + message.id

    def group_range(self, group: str, front: bytes) -> tuple[bytes, bytes]:
        """Where the messages of a group wait, from `front` on."""
        prefix = self.waiting.key(group)
        return prefix + front, prefix + b"\xff" * (ID_BYTES + 1)


_URGENCY = [bytes((PRIORITY_MAX - priority,)) for priority in range(PRIORITY_MAX + 1)]  # The most urgent sorts first.


@lru_cache(maxsize=4_096)
def keys_of(queue: QueueKey) -> QueueKeys:
    """The keys of a queue."""
    return QueueKeys(queue)


def queues(universe: str) -> Subspace:
    """Where the queues of a universe are."""
    return Subspace("u", universe, "q")


def delivery_of(message: StoredMessage, state: SidecarState | None = None) -> Delivery:
    """A message in the words of the wire."""
    # By position, which is twice as fast; the fields are in the order in which Delivery declares them.
    held = message.owner is not None
    return Delivery(
        text_of(message.id),
        message.payload,
        message.blob,
        message.size,
        message.content_type,
        message.attributes,
        message.correlation_id,
        message.priority,
        message.group,
        message.created_ms,
        message.attempts,
        message.failures,
        message.max_attempts,
        message.last_error,
        message.origin,
        message.died_ms,
        message.lease_id if held else "",
        message.fence,
        message.due_ms if held else 0,
        message.visibility_ms,
        state,
    )


def id_of(text: str) -> bytes:
    """The bytes of a message's id.

    Raises:
        InvalidArgument: it is no id.
    """
    try:
        id = bytes.fromhex(text.replace("-", ""))
    except (ValueError, AttributeError, TypeError):
        id = b""
    if len(id) != ID_BYTES:
        raise InvalidArgument(f"{text!r} is no id of a message; give the one of its receipt")
    return id


def text_of(id: bytes) -> str:
    """The id of a message as people see it."""
    return _front_of(id[:_FRONT_BYTES]) + id[_FRONT_BYTES:].hex()


@lru_cache(maxsize=256)
def _front_of(front: bytes) -> str:
    """What the ids of one millisecond have in common."""
    text = front.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:]}-"
