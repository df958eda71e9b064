"""Queues: at-least-once delivery with leases and fences."""

import struct
from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import FastnessError, MessageCancelled, QueueMessageLeaseMismatch
from fastness.names import UNIVERSE
from fastness.tiers import Tier
from fastness.wire.fields import (
    CorrelationId,
    Count,
    DebounceSeconds,
    DelaySeconds,
    Hash,
    IdempotencyKey,
    Limit,
    MaxAttempts,
    MessageBatch,
    MessageKey,
    Name,
    NameAfter,
    Owner,
    Priority,
    QueueName,
    ReceiveWaitSeconds,
    RetentionSeconds,
    SearchedText,
    SummaryLimit,
    Tag,
    VisibilitySeconds,
    WaitSeconds,
    one_of,
    short_text,
    worded,
)
from fastness.wire.leases import LeaseProof
from fastness.wire.requests import Operation, Request, RequestWithoutTier, Route
from fastness.wire.stored_messages import ID_BYTES, format_id, format_lease_id

_END: Final = struct.Struct(">I")
LEASE_BYTES: Final = 16


class NewMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message to put. Its payload is inline, or in the blob with the hash `blob`.

    The fields between the payload and the blob are the options of a put, wherever it comes from: `Queue.put`, the HTTP
    API, the command line and MCP have them from here.
    """

    payload: bytes = b""
    content_type: Annotated[
        str, Meta(description="The content type of the body. By default it follows from the body.")
    ] = "application/octet-stream"
    attributes: Annotated[dict[str, str], Meta(description="Texts by name, which consumers get with the message.")] = {}
    correlation_id: Annotated[
        CorrelationId | None,
        Meta(description="An id that links related messages and requests. By default that of the message."),
    ] = None
    priority: Annotated[Priority, Meta(description="0 to 9; 9 is delivered first.")] = 5
    group: Annotated[Name | None, Meta(description="Messages of one group are delivered one at a time, in order.")] = (
        None
    )
    idempotency_key: Annotated[
        IdempotencyKey | None,
        Meta(description="A put with the same key within five minutes adds nothing; its receipt has `duplicate`."),
    ] = None
    delay_seconds: Annotated[
        DelaySeconds | None,
        Meta(description="Hold the message back for this time. By default the policy decides: not at all."),
    ] = None
    ttl_seconds: Annotated[
        RetentionSeconds | None, Meta(description="Remove the message after this time, delivered or not.")
    ] = None
    max_attempts: Annotated[
        MaxAttempts | None, Meta(description="After this many failed attempts the message becomes a dead letter.")
    ] = None
    visibility_seconds: Annotated[
        VisibilitySeconds | None, Meta(description="How long a delivery is leased to its consumer.")
    ] = None
    retry_delay_seconds: Annotated[
        DelaySeconds | None,
        Meta(description="The delay after the first failure, from which the back-off of the policy grows."),
    ] = None
    key: Annotated[
        MessageKey | None,
        Meta(
            description="Messages with the same key share the limits `concurrency_per_key` and `rate_per_key` of the "
            "policy, and take turns with other keys if it is `fair`."
        ),
    ] = None
    keep_result: Annotated[
        bool,
        Meta(description="Keep what becomes of the message, with its result, so that it can be read when it is done."),
    ] = False
    unique_key: Annotated[
        IdempotencyKey | None,
        Meta(
            description="While a message has this key, a put with the same key adds nothing; its receipt has "
            "`duplicate`."
        ),
    ] = None
    unique_until: Annotated[
        Literal["done", "leased"] | RetentionSeconds,
        Meta(
            description="When the message gives up its `unique_key`: `done` (also dead or cancelled), `leased`, or "
            "after a time."
        ),
    ] = "done"
    debounce_key: Annotated[
        IdempotencyKey | None,
        Meta(
            description="Hold the message back for `debounce_seconds`. A put with the same key within that time "
            "replaces it and starts the time again."
        ),
    ] = None
    debounce_seconds: Annotated[
        DelaySeconds, Meta(description="How long a message with a `debounce_key` is held back after the last put.")
    ] = 0.0
    debounce_max_seconds: Annotated[
        DebounceSeconds | None,
        Meta(description="How long after the first put a message with a `debounce_key` is held back at most."),
    ] = None
    tags: Annotated[
        Annotated[list[Tag], Meta(max_length=limits.TAGS_MAX)],
        Meta(description="Texts to search for. A message that is done has none any more."),
    ] = []
    blob: Hash | None = None
    blob_size: Count = 0


class Receipt(msgspec.Struct, frozen=True):
    """The acknowledgement of a put: the message's id, its durability, and whether it is a duplicate.

    Of a duplicate, and of a put that replaced a debounced message, the id is that of the first message.
    """

    id: str
    durability: Tier
    duplicate: bool
    correlation_id: str


class Receipts(msgspec.Struct, frozen=True):
    """Receipts in the order of the messages."""

    receipts: list[Receipt]


class SidecarState(msgspec.Struct, frozen=True):
    """The workflow state of a delivered message, as canonical CBOR, and the lease on it."""

    value: bytes
    etag: str
    lease: LeaseProof
    expires_ms: int


class Failure(msgspec.Struct, frozen=True):
    """A failed attempt of a message: who had it leased, from when to when, and what went wrong."""

    attempt: int  # The number of the delivery.
    owner: str
    outcome: str  # failed: it was nacked; expired: its lease ended before it was settled; rejected.
    leased_ms: int
    failed_ms: int
    error_type: str | None = None
    message: str | None = None
    traceback: str | None = None  # Its end, if it was too long. A `receive` leaves it out.


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that is leased to a consumer, or read by `peek`."""

    id: str
    payload: bytes | None  # None: too large to be sent with the delivery; open its blob.
    blob: str | None
    size: int
    content_type: str
    attributes: dict[str, str]
    correlation_id: str
    priority: int
    group: str | None
    created_ms: int
    attempts: int
    failure_attempts: int
    max_attempts: int
    last_error: str | None
    origin: str | None  # The queue that a dead letter comes from.
    died_ms: int
    lease_id: str
    fence: int
    expires_ms: int
    visibility_ms: int
    state: SidecarState | None = None
    failures: list[Failure] = []  # The oldest first.
    tags: list[str] = []


MessageState = Literal["ready", "delayed", "blocked", "leased", "dead", "done", "cancelled"]


class FoundMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that a search has found, without its payload."""

    id: str
    state: MessageState
    priority: int
    created_ms: int
    attempts: int  # Deliveries.
    failure_attempts: int
    max_attempts: int
    correlation_id: str
    owner: str | None = None  # Who has it leased, or had it when it was done.
    expires_ms: int = 0  # When its lease ends.
    due_ms: int = 0  # When its delay ends.
    died_ms: int = 0
    finished_ms: int = 0
    key: str | None = None
    group: str | None = None
    last_error: str | None = None
    size: int = 0
    content_type: str = ""
    tags: list[str] = []


class MessageInfo(FoundMessage, frozen=True, omit_defaults=True):
    """What is known about one message.

    It is ready; or delayed until `due_ms`; or blocked, by another message of its group or by its key; or leased
    by `owner` until `expires_ms`; or dead, which a redrive can undo; or done or cancelled, at `finished_ms`.
    """

    payload: bytes | None = None  # None: it is in the blob, or gone.
    blob: str | None = None
    attributes: dict[str, str] = {}
    unique_key: str | None = None
    failures: list[Failure] = []  # The oldest first, with tracebacks.
    ttl_at_ms: int = 0  # When it is removed; 0: never.
    lease_id: str | None = None
    fence: int = 0
    leased_ms: int = 0  # When it was last delivered; 0: never.
    keep_result: bool = False  # What becomes of it is kept.
    has_result: bool = False
    stateful: bool = False  # It has a workflow state, which its consumers share:
    state_value: bytes | None = None  # as canonical CBOR; None: it has none yet,
    state_etag: str | None = None  # and the version of it.


class FoundMessages(msgspec.Struct, frozen=True):
    """What a search has found in the part of the queue that it has read.

    `next` is where the search continues; it is None at the end of the queue. A page without messages may have a `next`.
    """

    messages: list[FoundMessage]
    next: str | None
    scanned: int  # Records that were read.


class NewResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of a message: inline, or in the blob with the hash `blob`."""

    value: bytes = b""
    content_type: str = "application/octet-stream"
    blob: Hash | None = None
    blob_size: Count = 0


class MessageResult(msgspec.Struct, frozen=True):
    """The result that a message was acknowledged with. Without one, its value is empty and has no content type."""

    id: str
    value: bytes | None  # None: it is in the blob.
    content_type: str
    blob: str | None
    size: int
    attempts: int
    finished_ms: int


class KeyInfo(msgspec.Struct, frozen=True):
    """How many messages of a key are in which state, and until when it is paused."""

    key: str
    ready: int
    blocked: int
    leased: int
    paused_until_ms: int | None


class LeasedMessage(msgspec.Struct, frozen=True):
    """A message that a consumer holds, as an operator sees it: without its payload."""

    id: str
    owner: str
    attempts: int  # Deliveries, including this one.
    failure_attempts: int
    max_attempts: int
    expires_ms: int
    created_ms: int
    lease_id: str
    fence: int
    priority: int
    group: str | None
    correlation_id: str
    txn_id: str | None


class LeasedMessages(msgspec.Struct, frozen=True):
    """Leased messages, the oldest first; `next` is where the next page starts, if there may be one."""

    messages: list[LeasedMessage]
    next: str | None


class MessageLease(msgspec.Struct, frozen=True):
    """What a consumer sends to settle a message."""

    id: str
    lease_id: str
    fence: int


class PackedLease(msgspec.Struct, frozen=True, array_like=True):
    """Messages that are leased together, as they are stored. Its consumer decodes what it needs of them.

    A message is identified by its position. What is not stored with a message is in a dictionary by position.
    """

    id: bytes
    fence: int  # Of the first message.
    fences: list[int]  # Of each message, if they differ.
    attempt: int  # The number of this delivery, for the first message.
    attempts: list[int]  # Of each message, if they differ.
    leased_ms: int
    expires_ms: int
    ids: bytes
    ends: bytes  # Where each message ends in `content`: four bytes each.
    content: bytes
    delivered: list[int] = []  # The positions that are delivered; empty: all.
    bodies: dict[int, bytes] = {}
    states: dict[int, SidecarState] = {}
    failures: dict[int, list[Failure]] = {}

    @property
    def positions(self) -> Sequence[int]:
        """The positions of the messages that are delivered."""
        return self.delivered or range(len(self.ids) // ID_BYTES)

    def id_at(self, position: int) -> bytes:
        return self.ids[position * ID_BYTES : (position + 1) * ID_BYTES]

    def fence_at(self, position: int) -> int:
        return self.fences[position] if self.fences else self.fence

    def attempt_at(self, position: int) -> int:
        return self.attempts[position] if self.attempts else self.attempt

    def ref_at(self, position: int) -> bytes:
        """The lease and the position of a message, or the lease that the message has for itself."""
        return self.id + bytes((position,)) if len(self.id) == LEASE_BYTES else self.id

    def lease_at(self, position: int) -> MessageLease:
        """What settles a message by itself."""
        id, fence = self.id_at(position), self.fence_at(position)
        return MessageLease(format_id(id), format_lease_id(id, fence, self.ref_at(position)), fence)

    def stored_at(self, position: int) -> bytes:
        """A message as it is stored."""
        if len(self.ends) == _END.size:
            return self.content
        begin = _END.unpack_from(self.ends, (position - 1) * 4)[0] if position else 0
        return self.content[begin : _END.unpack_from(self.ends, position * 4)[0]]

    def first(self, count: int) -> Self:
        """The lease with only its first `count` messages."""
        delivered = list(self.positions[:count])
        end = delivered[-1] + 1
        return msgspec.structs.replace(
            self,
            ids=self.ids[: end * ID_BYTES],
            ends=self.ends[: end * 4],
            content=self.content[: _END.unpack_from(self.ends, (end - 1) * 4)[0]],
            delivered=delivered,
            bodies={position: body for position, body in self.bodies.items() if position < end},
            states={position: state for position, state in self.states.items() if position < end},
            failures={position: failures for position, failures in self.failures.items() if position < end},
        )


class PackedAck(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledges messages of a lease."""

    lease: bytes
    fence: int  # As in the lease.
    fences: list[int]
    bits: bytes  # A bit for each position: of the last byte, the lowest one is position 0.

    @property
    def mask(self) -> int:
        return int.from_bytes(self.bits, "big")

    def merged_with(self, other: "PackedAck") -> "PackedAck":
        """Acknowledges what this one and another one of the same lease acknowledge."""
        return PackedAck(self.lease, self.fence, self.fences, bits_of(self.mask | other.mask))

    def fence_at(self, position: int) -> int | None:
        """The fence of a message; None if there is no such position."""
        if not self.fences:
            return self.fence
        return self.fences[position] if position < len(self.fences) else None


class RefusedAck(msgspec.Struct, frozen=True, array_like=True):
    """A message of a `PackedAck` that was not acknowledged, and the code of the error."""

    lease: bytes
    position: int
    code: str


class Deliveries(msgspec.Struct, frozen=True, omit_defaults=True):
    """Leased or peeked messages, in order: one by one, or packed by lease if the caller asked for that."""

    messages: list[Delivery]
    packed: list[PackedLease] = []
    refused: list[RefusedAck] = []  # Of the acks that came with the call.

    @property
    def count(self) -> int:
        return len(self.messages) + sum([len(lease.positions) for lease in self.packed])

    def leases(self) -> list[MessageLease]:
        """What settles each message by itself."""
        leases = [MessageLease(each.id, each.lease_id, each.fence) for each in self.messages]
        return leases + [lease.lease_at(position) for lease in self.packed for position in lease.positions]

    def first(self, count: int) -> "Deliveries":
        """The first `count` messages."""
        packed, left = list[PackedLease](), count - len(self.messages)
        for lease in self.packed:
            if left > 0:
                packed.append(lease if len(lease.positions) <= left else lease.first(left))
            left -= len(lease.positions)
        return Deliveries(self.messages[:count], packed, self.refused)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome for one item of a batch: success, or the `code` and `detail` of the error."""

    code: str | None = None
    detail: str | None = None
    expires_ms: int = 0
    correlation_id: str | None = None


def outcome_of(error: FastnessError | None) -> Outcome:
    """The outcome for an item that was refused with this error, or succeeded."""
    return Outcome() if error is None else Outcome(error.code, str(error))


class Outcomes(msgspec.Struct, frozen=True, omit_defaults=True):
    """An outcome for each item, in order; of packed acks, only those that were refused."""

    outcomes: list[Outcome]
    refused: list[RefusedAck] = []


class QueuePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The defaults for the messages of a queue."""

    visibility_seconds: Annotated[
        VisibilitySeconds, Meta(description="How long a delivery is leased to its consumer.")
    ] = 30.0
    max_attempts: Annotated[
        MaxAttempts, Meta(description="After this many failed attempts a message becomes a dead letter.")
    ] = 5
    dead_letter_queue: Annotated[
        QueueName | None, Meta(description="The queue that gets the dead letters; none: `<queue>.dlq`.")
    ] = None
    retention_seconds: Annotated[
        RetentionSeconds | None, Meta(description="How long a message without a TTL is kept; none: it is not removed.")
    ] = None
    dead_letter_retention_seconds: Annotated[RetentionSeconds, Meta(description="How long dead letters are kept.")] = (
        1_209_600.0
    )
    rate_per_second: Annotated[
        Annotated[float, Meta(ge=0.001, le=limits.RATE_MAX)] | None,
        Meta(description="The maximum number of deliveries per second; none: no limit."),
    ] = None
    paused: Annotated[bool, Meta(description="Deliver nothing; puts are accepted.")] = False
    failures_kept: Annotated[
        int,
        Meta(
            ge=0,
            le=limits.FAILURES_KEPT_MAX,
            description="How many failed attempts are kept with each message, the newest.",
        ),
    ] = 10
    retry_delay_seconds: Annotated[DelaySeconds, Meta(description="The back-off after the first failed attempt.")] = 1.0
    retry_factor: Annotated[
        float,
        Meta(
            ge=1,
            le=limits.RETRY_FACTOR_MAX,
            description="The factor by which the back-off grows with each failed attempt.",
        ),
    ] = 2.0
    retry_delay_max_seconds: Annotated[DelaySeconds, Meta(description="The longest back-off.")] = 300.0
    retry_jitter: Annotated[
        float,
        Meta(ge=0, le=1, description="The fraction by which a back-off is longer or shorter, at random: 0 to 1."),
    ] = 0.1
    history: Annotated[
        Literal["none", "durable"],
        Meta(description="durable: every change of a message is recorded, in the commit that changes it."),
    ] = "none"
    history_seconds: Annotated[RetentionSeconds, Meta(description="How long recorded changes are kept.")] = 604_800.0
    result_ttl_seconds: Annotated[
        RetentionSeconds, Meta(description="How long results are kept, and that a message was cancelled.")
    ] = 3_600.0
    concurrency_per_key: Annotated[
        Annotated[int, Meta(ge=1, le=limits.RATE_MAX)] | None,
        Meta(description="How many messages of one key may be leased at a time; none: no limit."),
    ] = None
    rate_per_key: Annotated[
        Annotated[float, Meta(ge=0.001, le=limits.RATE_MAX)] | None,
        Meta(description="The maximum number of deliveries per second of one key; none: no limit."),
    ] = None
    burst_per_key: Annotated[
        Annotated[int, Meta(ge=1, le=limits.RATE_MAX)] | None,
        Meta(description="How many deliveries an idle key accumulates; none: as many as in one second, at least one."),
    ] = None
    fair: Annotated[
        bool, Meta(description="Messages of different keys take turns; priorities count within a key then.")
    ] = False
    delay_seconds: Annotated[
        DelaySeconds, Meta(description="How long a message is held back that is put without a delay.")
    ] = 0.0
    dead_letter_rule: Annotated[
        Literal["failures", "deliveries", "never"],
        Meta(
            description="What makes dead letters. failures: the `max_attempts` of the message. deliveries: that many "
            "deliveries by this policy, at the next one, if `dead_letter_queue` exists. never: only a reject."
        ),
    ] = "failures"
    retention_by_age: Annotated[
        bool,
        Meta(description="`retention_seconds` count from the put, also for messages that are stored already."),
    ] = False
    group_batches: Annotated[
        bool, Meta(description="One receive may lease several messages of a group, in their order.")
    ] = False


class MessageEvent(msgspec.Struct, frozen=True):
    """A change of a message, recorded in the same commit.

    `event` is put, leased, acked, nacked, deferred (returned uncounted), expired (its lease), dead-lettered, redriven,
    outlived (its TTL), cancelled, updated, replaced (by a debounced put), moved (to another queue), or purged. The
    history of a dead letter queue also has arrived and returned.
    """

    id: str
    event: str
    at_ms: int
    attempt: int  # The number of deliveries so far.
    correlation_id: str | None = None  # Of a put.
    error: str | None = None  # Of a dead letter.


class MessageEvents(msgspec.Struct, frozen=True):
    """Events in the order of their times; `next` is where the next page starts, if there is one."""

    events: list[MessageEvent]
    next: str | None


class QueueStats(msgspec.Struct, frozen=True):
    """The number of messages in each state, and of waiting consumers."""

    queue: str
    ready: int
    delayed: int
    leased: int
    blocked: int  # Behind another message of their group or key.
    dead: int  # In its dead-letter queue.
    paused: bool
    waiting_consumers: int
    head_message_id: str | None
    head_age_seconds: float
    put_total: int
    delivered_total: int
    acked_total: int
    failed_total: int
    expired_total: int
    dead_total: int


class QueueNames(msgspec.Struct, frozen=True):
    """Names of queues, in order."""

    names: list[str]


class QueueSurvey(msgspec.Struct, frozen=True):
    """The statistics of queues in the order of their names; `next` is where the next page starts, if there is one."""

    queues: list[QueueStats]
    next: str | None


class Moved(msgspec.Struct, frozen=True):
    """How many messages were moved, or removed."""

    count: int


class Schedule(msgspec.Struct, frozen=True):
    """A message that is put at the times of a cron expression."""

    name: str
    cron: str
    timezone: str
    message: NewMessage
    next_ms: int


class Schedules(msgspec.Struct, frozen=True):
    """The schedules of a queue, in the order of their names."""

    schedules: list[Schedule]


class PutMessages(Request[Receipts], frozen=True, tag="queues.put"):
    operation = Operation(stores=True, atomic=True)

    queue: QueueName
    messages: Annotated[list[NewMessage], MessageBatch]
    universe: Name = UNIVERSE
    must_exist: bool = False  # Refuse it if the queue does not exist, instead of making the queue.


class ReceiveMessages(RequestWithoutTier[Deliveries], frozen=True, tag="queues.receive"):
    """Lease at most `max_messages`, waiting up to `wait_seconds` for the first.

    Without a `tier`, the messages are as durable as their puts, and the leases are not waited for. A power failure may
    undo them: the messages are delivered again then, with higher fences. Messages that are done are acknowledged in the
    same commit, or at once if the call has to wait; the acks are always waited for.
    """

    queue: QueueName
    owner: Owner
    max_messages: Annotated[int, Meta(ge=1, le=limits.MESSAGES_MAX)] = 1
    wait_seconds: ReceiveWaitSeconds = 0.0
    visibility_seconds: VisibilitySeconds | None = None
    with_state: bool = False
    txn_id: Owner | None = None
    universe: Name = UNIVERSE
    packed: bool = False  # Whether the answer may have the messages as they are stored.
    acks: list[PackedAck] = msgspec.field(default_factory=list)
    must_exist: bool = False  # Refuse it if the queue does not exist, or is deleted while the call waits.


class AckMessages(Request[Outcomes], frozen=True, tag="queues.ack"):
    """Acknowledge messages one by one, or several of a lease together.

    `results` has one for each of the first `leases`, or None; they are kept for `result_ttl_seconds` of the policy.
    `late` acks of `leases` also succeed after the lease has expired, until the message is delivered again.
    """

    operation = Operation(atomic=True)

    queue: QueueName
    leases: list[MessageLease]
    universe: Name = UNIVERSE
    packed: list[PackedAck] = msgspec.field(default_factory=list)
    results: list[NewResult | None] = msgspec.field(default_factory=list)
    late: bool = False


class NackMessages(Request[Outcomes], frozen=True, tag="queues.nack"):
    """Return messages to the queue. The intent failure counts against max_attempts, defer does not.

    Without `delay_seconds`, a failure is delivered again after the back-off of the queue's policy, and a deferred
    message at once.
    """

    operation = Operation(atomic=True)

    queue: QueueName
    leases: Annotated[list[MessageLease], MessageBatch]
    delay_seconds: DelaySeconds | None = None
    intent: Annotated[str, one_of("failure", "defer")] = "failure"
    error: str | None = None
    universe: Name = UNIVERSE
    error_type: str | None = None
    traceback: str | None = None


class RejectMessages(Request[Outcomes], frozen=True, tag="queues.reject"):
    """Send messages to the dead letters at once."""

    operation = Operation(atomic=True)

    queue: QueueName
    leases: Annotated[list[MessageLease], MessageBatch]
    error: str | None = None
    universe: Name = UNIVERSE
    error_type: str | None = None
    traceback: str | None = None


class ExtendMessages(Request[Outcomes], frozen=True, tag="queues.extend"):
    """Extend leases to at least `seconds` from now; never shortens them."""

    operation = Operation(atomic=True)

    queue: QueueName
    leases: Annotated[list[MessageLease], MessageBatch]
    seconds: Annotated[
        float,
        worded(
            f"0.001 to {limits.VISIBILITY_SECONDS_MAX:,.0f} seconds; to return the message, nack it",
            ge=0.001,
            le=limits.VISIBILITY_SECONDS_MAX,
        ),
    ]
    universe: Name = UNIVERSE


class VisibilityChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the lease of a message ends: `seconds` from now. With 0 the message returns to the queue at once."""

    lease: MessageLease
    seconds: float  # Out of its range, it is refused by its own outcome.


class ChangeVisibility(Request[Outcomes], frozen=True, tag="queues.change_visibility"):
    """Let leases end sooner or later than they would, or now; an outcome for each.

    A message that returns to the queue does not count as failed, and keeps its place in its group. With a `late_owner`,
    a lease that has ended is granted again to that owner, as long as its message waits and was not delivered again.
    """

    operation = Operation(atomic=True)

    queue: QueueName
    changes: Annotated[list[VisibilityChange], MessageBatch]
    universe: Name = UNIVERSE
    late_owner: Annotated[str, short_text(limits.OWNER_BYTES_MAX, least=0)] = ""

    @property
    def leases(self) -> list[MessageLease]:
        """The leases that change."""
        return [change.lease for change in self.changes]


class CheckMessages(Request[Outcomes], frozen=True, tag="queues.check"):
    """Check which of these leases still hold."""

    operation = Operation(reads=True, atomic=True)

    queue: QueueName
    leases: Annotated[list[MessageLease], MessageBatch]
    universe: Name = UNIVERSE


class GetMessage(Request[MessageInfo], frozen=True, tag="queues.get"):
    """Read what is known about a message, by its id."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(
            Route("GET", "/v1/queues/{queue}/messages/{id}", "Read the state of a message, and its failed attempts."),
        ),
    )

    queue: QueueName
    id: str
    universe: Name = UNIVERSE


class SearchMessages(Request[FoundMessages], frozen=True, tag="queues.search"):
    """Search a bounded part of a queue for messages that match all filters; `after` is the `next` of the page before.

    The dead letters of the queue are among them, and what is kept of messages that are done or cancelled. `error` is a
    part of the last error, in upper or lower case. `owner` is the consumer that has the message leased.
    """

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/queues/{queue}/messages", "Search the messages of a queue."),),
    )

    queue: QueueName
    states: list[MessageState] = msgspec.field(default_factory=list)  # Empty: all.
    key: SearchedText | None = None
    group: SearchedText | None = None
    owner: SearchedText | None = None
    error: SearchedText | None = None
    tag: Tag | None = None
    older_than_seconds: Annotated[float, Meta(ge=0, le=limits.TTL_SECONDS_MAX)] | None = None
    newer_than_seconds: Annotated[float, Meta(ge=0, le=limits.TTL_SECONDS_MAX)] | None = None
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=limits.SEARCH_LIST_MAX)] = 100
    universe: Name = UNIVERSE


class CancelMessage(Request[MessageInfo], frozen=True, tag="queues.cancel"):
    """Cancel a message, so that it is not delivered any more. If it is leased, its consumer cannot settle it.

    A message that is done, dead or cancelled stays as it is; the answer says what it is.
    """

    operation = Operation(
        audited=True,
        repeatable="a message that is cancelled already stays so",
        http=(Route("POST", "/v1/queues/{queue}/messages/{id}/cancel", "Cancel a message."),),
    )

    queue: QueueName
    id: str
    universe: Name = UNIVERSE


class CancelMessages(Request[Outcomes], frozen=True, tag="queues.cancel_many"):
    """Cancel several messages, as `CancelMessage` does; an outcome for each.

    A message that is done or dead stays as it is, and its outcome is the code `message_finished`.
    """

    operation = Operation(
        repeatable="a message that is cancelled already stays so",
        permission="queue:cancel",
        audited=True,
        http=(Route("POST", "/v1/queues/{queue}/messages/cancel", "Cancel several messages."),),
    )

    queue: QueueName
    ids: Annotated[list[str], MessageBatch]
    universe: Name = UNIVERSE


class DeleteMessages(Request[Outcomes], frozen=True, tag="queues.delete_messages"):
    """Delete messages that are not leased, or dead letters of the queue; an outcome for each. Nothing of them stays."""

    operation = Operation(
        audited=True,
        http=(Route("POST", "/v1/queues/{queue}/messages/delete", "Delete messages that are not leased."),),
    )

    queue: QueueName
    ids: Annotated[list[str], MessageBatch]
    universe: Name = UNIVERSE


class MoveMessages(Request[Outcomes], frozen=True, tag="queues.move"):
    """Move messages that are not leased, or dead letters of the queue, to the queue `to`, in one commit.

    They keep their ids, payloads, attributes, failures, workflow states and delays. Dead letters are delivered again,
    with no failures counted.
    """

    operation = Operation(
        audited=True,
        http=(Route("POST", "/v1/queues/{queue}/messages/move", "Move messages to another queue."),),
    )

    queue: QueueName
    ids: Annotated[list[str], MessageBatch]
    to: QueueName
    universe: Name = UNIVERSE

    def queue_names(self) -> tuple[str, ...]:
        return (self.queue, self.to)


class UpdateMessage(Request[MessageInfo], frozen=True, tag="queues.update"):
    """Change the priority of a message that is not leased, or hold it back for `delay_seconds` from now; 0: not."""

    operation = Operation(
        atomic=True,
        http=(
            Route(
                "PATCH", "/v1/queues/{queue}/messages/{id}", "Change the priority or the delay of a waiting message."
            ),
        ),
    )

    queue: QueueName
    id: str
    priority: Annotated[Priority | None, Meta(description="The new priority, 0 to 9; 9 is delivered first.")] = None
    delay_seconds: Annotated[
        DelaySeconds | None, Meta(description="Deliver the message after this time from now; 0 is at once.")
    ] = None
    universe: Name = UNIVERSE


class GetResult(Request[MessageResult], frozen=True, tag="queues.result"):
    """Read the result of a message, waiting up to `wait_seconds` until it is done."""

    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/queues/{queue}/messages/{id}/result", "Wait for the result of a message."),),
    )

    queue: QueueName
    id: str
    wait_seconds: WaitSeconds = 0.0
    universe: Name = UNIVERSE


class WaitForCancel(Request[Outcomes], frozen=True, tag="queues.wait_for_cancel"):
    """Wait up to `wait_seconds` until one of these leased messages is cancelled; an outcome for each lease."""

    operation = Operation(reads=True, permission="queue:extend")  # Tokens of workers have it already.

    queue: QueueName
    leases: Annotated[list[MessageLease], MessageBatch]
    wait_seconds: ReceiveWaitSeconds
    universe: Name = UNIVERSE


class GetKey(Request[KeyInfo], frozen=True, tag="queues.keys.get"):
    """Read how many messages of a key are in which state."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/queues/{queue}/keys/{key:path}", "Read the state of a key of messages."),),
    )

    queue: QueueName
    key: MessageKey
    universe: Name = UNIVERSE


class PauseKey(Request[KeyInfo], frozen=True, tag="queues.keys.pause"):
    """Deliver no message of a key before `until_ms`, or for `seconds` from now. With neither, it goes on."""

    operation = Operation(
        audited=True,
        atomic=True,
        http=(
            Route("POST", "/v1/queues/{queue}/keys/{key:path}/pause", "Pause deliveries of a key for a time."),
            Route(
                "POST",
                "/v1/queues/{queue}/keys/{key:path}/resume",
                "Resume deliveries of a key.",
                fixed={"seconds": 0.0},
            ),
        ),
    )

    queue: QueueName
    key: MessageKey
    until_ms: Count | None = None
    seconds: DelaySeconds | None = None
    universe: Name = UNIVERSE


class PeekMessages(Request[Deliveries], frozen=True, tag="queues.peek"):
    """Read the ready messages, in delivery order, without consuming them."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/queues/{queue}/peek", "Read ready messages without leasing them."),),
    )

    queue: QueueName
    limit: Limit = 10
    universe: Name = UNIVERSE


class ReadQueueHistory(Request[MessageEvents], frozen=True, tag="queues.history"):
    """Read the recorded changes of messages, after the position `after`; only of queues whose history is durable."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/queues/{queue}/history", "Read the recorded changes of a queue's messages."),),
    )

    queue: QueueName
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=limits.HISTORY_PAGE_MAX)] = 1_000
    universe: Name = UNIVERSE


class ListLeasedMessages(Request[LeasedMessages], frozen=True, tag="queues.leased"):
    """List the messages that consumers hold, after the id `after`. A page may be short although there are more."""

    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("GET", "/v1/queues/{queue}/leased", "List the leased messages, with their owners and expiries."),),
    )

    queue: QueueName
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=limits.LEASED_LIST_MAX)] = 100
    universe: Name = UNIVERSE


class GetQueueStats(Request[QueueStats], frozen=True, tag="queues.stats"):
    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/queues/{queue}", "Read the number of messages in each state."),)
    )

    queue: QueueName
    universe: Name = UNIVERSE
    must_exist: bool = False  # Refuse it if the queue does not exist, instead of answering zeros.


class ListQueues(Request[QueueNames], frozen=True, tag="queues.list"):
    operation = Operation(
        reads=True,
        stale=True,
        lists_queues=True,
        http=(Route("GET", "/v1/queues", "List the names of queues, in order.", fixed={"only": []}),),
    )

    after: NameAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE
    only: list[str] = msgspec.field(default_factory=list)  # Empty: all. A server sets the caller's.


class SurveyQueues(Request[QueueSurvey], frozen=True, tag="queues.survey"):
    """The statistics of each queue after `after`, or of those whose names contain `text`, in any case.

    A search looks at `SURVEY_NAMES_MAX` names, so it may find fewer than `limit` queues, even none, and have a `next`.
    """

    operation = Operation(
        reads=True,
        stale=True,
        lists_queues=True,
        http=(Route("GET", "/v1/surveys/queues", "Summarize each queue.", fixed={"only": []}),),
    )

    after: NameAfter = ""
    limit: SummaryLimit = 100
    universe: Name = UNIVERSE
    text: Annotated[str, Meta(max_length=limits.NAME_BYTES_MAX)] = ""
    only: list[str] = msgspec.field(default_factory=list)  # Empty: all. A server sets the caller's.


class PurgeQueue(Request[Moved], frozen=True, tag="queues.purge"):
    """Remove every message that is not leased. With `leased`, remove those too: their consumers cannot settle them."""

    operation = Operation(
        audited=True, http=(Route("POST", "/v1/queues/{queue}/purge", "Remove all messages that are not leased."),)
    )

    queue: QueueName
    universe: Name = UNIVERSE
    leased: Annotated[bool, Meta(description="Remove leased messages too. Their consumers lose them.")] = False


class DeleteQueue(Request[Moved], frozen=True, tag="queues.delete"):
    """Remove a queue: its messages, policy, schedules and counters. Its dead letters are a queue of their own.

    While messages are leased it is refused, unless `force` is set. A deletion that was interrupted can be repeated.
    """

    operation = Operation(
        audited=True, http=(Route("DELETE", "/v1/queues/{queue}", "Remove a queue and its messages."),)
    )

    queue: QueueName
    force: Annotated[bool, Meta(description="Delete it although messages are leased; their consumers lose them.")] = (
        False
    )
    universe: Name = UNIVERSE


class RedriveMessages(Request[Moved], frozen=True, tag="queues.redrive"):
    """Put dead letters of `queue` back into it, the given ones or all."""

    operation = Operation(
        audited=True,
        http=(
            Route("POST", "/v1/queues/{queue}/redrive", "Move dead letters back to the queue, all or the given ones."),
        ),
    )

    queue: QueueName
    ids: list[str] | None = None
    limit: Annotated[int, Meta(ge=1, description="The maximum number of dead letters, if no id is given.")] = 1_000
    universe: Name = UNIVERSE


class GetQueuePolicy(Request[QueuePolicy], frozen=True, tag="queues.policy.get"):
    operation = Operation(reads=True, http=(Route("GET", "/v1/queues/{queue}/policy", "Read the policy of a queue."),))

    queue: QueueName
    universe: Name = UNIVERSE


class SetQueuePolicy(Request[QueuePolicy], frozen=True, tag="queues.policy.set"):
    operation = Operation(
        audited=True,
        http=(Route("PUT", "/v1/queues/{queue}/policy", "Set the policy of a queue.", body_field="policy"),),
    )

    queue: QueueName
    policy: QueuePolicy
    universe: Name = UNIVERSE

    def queue_names(self) -> tuple[str, ...]:
        # Messages could otherwise be sent to any queue, as dead letters.
        dead = self.policy.dead_letter_queue
        return (self.queue,) if dead is None else (self.queue, dead)


class PauseQueue(Request[QueuePolicy], frozen=True, tag="queues.pause"):
    """Deliver nothing until the queue is resumed; puts are still accepted."""

    operation = Operation(
        audited=True,
        http=(
            Route("POST", "/v1/queues/{queue}/pause", "Pause deliveries of a queue.", fixed={"paused": True}),
            Route("POST", "/v1/queues/{queue}/resume", "Resume deliveries of a queue.", fixed={"paused": False}),
        ),
    )

    queue: QueueName
    paused: bool = True
    universe: Name = UNIVERSE


class SetSchedule(Request[Schedule], frozen=True, tag="queues.schedules.set"):
    operation = Operation(
        audited=True,
        stores=True,
        http=(
            Route(
                "PUT",
                "/v1/queues/{queue}/schedules/{name}",
                "Create or replace a schedule, which enqueues a message by a cron expression.",
                read_only=("next_ms",),
            ),
        ),
    )

    queue: QueueName
    name: Name
    cron: str
    message: NewMessage
    timezone: str = "UTC"
    universe: Name = UNIVERSE


class RemoveSchedule(Request[Moved], frozen=True, tag="queues.schedules.remove"):
    operation = Operation(
        audited=True, http=(Route("DELETE", "/v1/queues/{queue}/schedules/{name}", "Remove a schedule."),)
    )

    queue: QueueName
    name: Name
    universe: Name = UNIVERSE


class ListSchedules(Request[Schedules], frozen=True, tag="queues.schedules.list"):
    operation = Operation(
        reads=True, stale=True, http=(Route("GET", "/v1/queues/{queue}/schedules", "List the schedules of a queue."),)
    )

    queue: QueueName
    universe: Name = UNIVERSE


def lease_mismatch(lease: MessageLease) -> QueueMessageLeaseMismatch:
    """The error of settling a message whose lease has ended."""
    return QueueMessageLeaseMismatch(
        f"Message {lease.id} is not leased as {lease.lease_id} any more; stop working on it. It was settled, or its "
        "lease expired and it is delivered again"
    )


def message_cancelled(id: str) -> MessageCancelled:
    """The error of settling a message that was cancelled."""
    return MessageCancelled(f"Message {id} was cancelled and is not delivered again; stop working on it")


def bits_of(mask: int) -> bytes:
    """The bits of a `PackedAck`."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "big")


def positions_in(mask: int) -> list[int]:
    """The positions whose bits are set."""
    return [0] if mask == 1 else [position for position, bit in enumerate(bin(mask)[:1:-1]) if bit == "1"]
