"""Generated from handles/messages.py by tools/make_twins.py; change that file instead."""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import cbor2
import msgspec

from fastness.errors import MessageCancelled, QueueMessageLeaseMismatch, rebuild
from fastness.handles.failed_attempts import nack_request, reject_request
from fastness.handles.sync.collections import Collection
from fastness.handles.sync.receipts import new_result
from fastness.limits import EXTEND_FOR_SECONDS
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.blobs import GetBlob, OpenBlob
from fastness.wire.canonical import canonical
from fastness.wire.deliveries import delivery_of, message_at
from fastness.wire.json_values import decode_json
from fastness.wire.queues import (
    AckMessages,
    ChangeVisibility,
    Deliveries,
    Delivery,
    ExtendMessages,
    Failure,
    MessageLease,
    NewResult,
    Outcome,
    Outcomes,
    PackedAck,
    PackedLease,
    RefusedAck,
    SidecarState,
    VisibilityChange,
    bits_of,
    lease_mismatch,
    message_cancelled,
)
from fastness.wire.requests import Request
from fastness.wire.states import UpdateState
from fastness.wire.stored_messages import StoredMessage, decode_head, format_id

_log = logging.getLogger("fastness.messages")

Result = TypeVar("Result")
LOST_CODES: Final = (QueueMessageLeaseMismatch.code, MessageCancelled.code)


class _Received:
    """What the messages of one lease, or one message by itself, were received with."""

    __slots__ = ("delay_on_close_seconds", "lease", "queue", "transport", "universe", "visibility_seconds")

    def __init__(
        self,
        transport: Transport,
        universe: str,
        queue: str,
        lease: PackedLease | None,
        *,
        visibility_seconds: float,
        delay_on_close_seconds: float | None,
    ) -> None:
        self.transport = transport
        self.universe = universe
        self.queue = queue
        self.lease = lease
        self.visibility_seconds = visibility_seconds
        self.delay_on_close_seconds = delay_on_close_seconds


class Message:
    """A received message, leased to the caller until it is settled or its lease ends.

    `fence` is higher than that of every earlier delivery, so a write with it can be distinguished from a late write of
    a consumer that lost the message.
    """

    __slots__ = (
        "__weakref__",
        "_delivery",
        "_position",
        "_received",
        "_state",
        "_stored",
        "cancelled",
        "expires_ms",
        "lost",
        "settled",
    )

    def __init__(self, received: _Received, position: int, expires_ms: int, delivery: Delivery | None = None) -> None:
        self._received = received
        self._position = position
        self._delivery = delivery
        self._stored: StoredMessage | None = None
        self._state: SidecarState | None = None  # As it was saved.
        self.expires_ms = expires_ms
        self.settled = False
        self.cancelled = False  # It was cancelled: stop working on it. It is lost, too.
        self.lost = False  # Its lease ended before it was settled; another consumer may have it.

    @property
    def id(self) -> str:
        """The id that its receipt has."""
        lease = self._received.lease
        return self.delivery.id if lease is None else format_id(lease.id_at(self._position))

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._received.queue

    @property
    def lease(self) -> MessageLease:
        """What identifies this delivery: the message's id, the lease's and the fence."""
        lease = self._received.lease
        if lease is None:
            return MessageLease(self.delivery.id, self.delivery.lease_id, self.delivery.fence)
        return lease.lease_at(self._position)

    @property
    def delivery(self) -> Delivery:
        """Everything that came with it."""
        if self._delivery is None:
            lease, position = self._received.lease, self._position
            assert lease is not None
            message = message_at(lease, position)
            self._delivery = delivery_of(message, lease.states.get(position), lease.failures.get(position))
        return self._delivery

    @property
    def universe(self) -> str:
        """The universe of its queue."""
        return self._received.universe

    @property
    def payload(self) -> bytes | None:
        """The payload; None if it is so large that `read` or `open` must fetch it, or another process received it."""
        return self._content().payload

    def json(self) -> Any:
        """The payload, from JSON.

        Raises:
            InvalidValue: it is not JSON, or nested too deep.
        """
        self._check_received_here()
        payload = self._content().payload
        if payload is None:
            raise rebuild(
                "invalid_argument", "The payload is too large to come with the delivery; call read() or open()"
            )
        return decode_json(payload)

    @property
    def attempts(self) -> int:
        """The number of deliveries, including this one."""
        lease = self._received.lease
        return self.delivery.attempts if lease is None else lease.attempt_at(self._position)

    @property
    def failure_attempts(self) -> int:
        """The number of failures before this delivery."""
        return self.delivery.failure_attempts

    @property
    def failures(self) -> list[Failure]:
        """The failed attempts before this delivery, the oldest first, without tracebacks; `queue.peek` has those."""
        return self.delivery.failures

    @property
    def fence(self) -> int:
        """The fence of this delivery; every delivery has a higher one."""
        lease = self._received.lease
        return self.delivery.fence if lease is None else lease.fence_at(self._position)

    @property
    def correlation_id(self) -> str:
        """The id that links it to the request that caused it."""
        return self._content().correlation_id

    @property
    def tags(self) -> list[str]:
        """The tags that were put with the payload."""
        return self._content().tags

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes that were put with the payload."""
        return self._content().attributes

    def collection(self, name: str) -> Collection:
        """A collection of its plane and universe, for what a consumer keeps about its work."""
        return Collection(self._received.transport, self._received.universe, name)

    @property
    def state(self) -> Any:
        """The workflow state that it was received with; None if none was saved."""
        state = self._sidecar()
        return None if state is None else cbor2.loads(state.value)

    def read(self) -> bytes:
        """The whole payload, of any size."""
        self._check_received_here()
        content = self._content()
        if content.payload is not None or content.blob is None:
            return content.payload or b""
        return (self._received.transport.call(GetBlob(content.blob, self.universe))).data

    def open(self) -> Iterator[bytes]:
        """The payload as a stream, if it is too large for memory."""
        self._check_received_here()
        content = self._content()
        if content.blob is None:
            return _single(content.payload or b"")
        return self._received.transport.receive(OpenBlob(content.blob, self.universe))

    def save_state(self, value: Any) -> None:
        """Save the workflow state, which the next consumer receives if this one does not finish.

        Raises:
            Fenced: the message's lease has ended.
        """
        state = self._sidecar()
        if state is None:
            raise rebuild("invalid_argument", "The message was received without its state; receive it with_state=True")
        encoded = canonical(value)
        proof = state.lease
        request = UpdateState(proof.key, encoded, proof, universe=self.universe)
        updated = self._received.transport.call(request)
        self._state = msgspec.structs.replace(state, value=encoded, etag=updated.etag)

    def ack(self, *, result: Any = None, tier: Tier = Tier.CRITICAL) -> None:
        """Acknowledge the message: it is done. Acknowledging twice is fine.

        A `result`, bytes or anything that JSON has, is kept for `result_ttl_seconds` of the queue's policy. Those who
        wait for it get it as soon as the ack is committed.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
            MessageCancelled: it was cancelled.
        """
        received, position = self._received, self._position
        lease = received.lease
        if lease is None or result is not None:
            results: list[NewResult | None] = []
            if result is not None:
                results.append(new_result(received.transport, received.universe, result))
            request = AckMessages(received.queue, [self.lease], received.universe, results=results, tier=tier)
            self._settle(request)
            return
        packed = [PackedAck(lease.id, lease.fence, lease.fences, bits_of(1 << position))]
        request = AckMessages(received.queue, [], received.universe, packed, tier=tier)
        refused = (received.transport.call(request)).refused
        if refused:
            self.mark_refused(refused[0].code)
            raise message_cancelled(self.id) if self.cancelled else lease_mismatch(self.lease)
        self.settled = True

    def nack(
        self,
        *,
        delay_seconds: float | None = None,
        intent: str = "failure",
        error: str | BaseException | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> None:
        """Return the message, to be delivered again after the delay. `intent="defer"` does not count as a failure.

        Args:
            delay_seconds: by default the back-off of the queue's policy after a failure, and 0 for `intent="defer"`.
            intent: "failure" or "defer".
            error: why it failed. Of an exception, the type, message and traceback are kept with the message.
            tier: the durability to wait for.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        request = nack_request(
            self.queue, [self.lease], self.universe, error, delay_seconds=delay_seconds, intent=intent, tier=tier
        )
        self._settle(request)

    def reject(self, error: str | BaseException | None = None, *, tier: Tier = Tier.CRITICAL) -> None:
        """Send it to the dead letters at once. Of an exception, the type, message and traceback are kept.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        self._settle(reject_request(self.queue, [self.lease], self.universe, error, tier=tier))

    def extend(self, seconds: float | None = None) -> int:
        """Extend the lease to at least `seconds` from now; its expiry in milliseconds since 1970.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        request = ExtendMessages(
            self.queue, [self.lease], self._received.visibility_seconds if seconds is None else seconds, self.universe
        )
        outcome = (self._received.transport.call(request)).outcomes[0]
        if outcome.code in LOST_CODES:
            self.mark_refused(outcome.code)
        self.expires_ms = _checked(outcome).expires_ms
        return self.expires_ms

    def change_visibility(self, seconds: float) -> int:
        """Let the lease end in `seconds`, sooner or later than it would; its expiry in milliseconds since 1970.

        With 0 the message returns to the queue at once, without counting a failure, and the answer is 0. Otherwise a
        lease that is extended automatically still is: receive with `extend_for_seconds=0` to let it end.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        request = ChangeVisibility(self.queue, [VisibilityChange(self.lease, seconds)], self.universe)
        outcome = (self._received.transport.call(request)).outcomes[0]
        if outcome.code in LOST_CODES:
            self.mark_refused(outcome.code)
        self.expires_ms = _checked(outcome).expires_ms
        if not self.expires_ms:
            self.mark_settled()
        return self.expires_ms

    def complete(self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL) -> Result:
        """Run `work(tx, *args)` and acknowledge the message in the same commit: both happen, or neither.

        Raises:
            NotEmbedded: the plane is in another process; use `plane.atomic()` there.
            QueueMessageLeaseMismatch: its lease has ended, and nothing was written.
        """
        transport, request = self._received.transport, AckMessages(self.queue, [self.lease], self.universe)

        def work_and_ack(tx: Any) -> Result:
            result = work(tx, *args)
            _checked(transport.execute(tx, request).outcomes[0])
            return result

        result = transport.transact(work_and_ack, tier=tier)
        self.mark_settled()
        return result

    def raise_if_cancelled(self) -> None:
        """Stop a handler whose message was cancelled: call it between the steps of long work.

        A worker notices a cancel within about a second. It does not count the error as a failure. This makes no call.

        Raises:
            MessageCancelled: the message was cancelled.
        """
        if self.cancelled:
            raise message_cancelled(self.id)

    def mark_settled(self) -> None:
        """Stop extending its lease: it was settled, possibly by another call than its own methods."""
        self.settled = True

    def mark_lost(self) -> None:
        """Stop extending its lease, which has ended. Another consumer may have the message, unless it was settled."""
        self.lost = not self.settled

    def mark_refused(self, code: str) -> None:
        """Mark it as lost, or cancelled, because settling it or extending its lease was refused."""
        self.mark_lost()
        self.cancelled = self.cancelled or code == MessageCancelled.code

    def _content(self) -> Delivery | StoredMessage:
        """Its payload and what was put with it."""
        lease = self._received.lease
        if lease is None:
            return self.delivery
        if self._stored is None:
            self._stored = message_at(lease, self._position)
        return self._stored

    def _sidecar(self) -> SidecarState | None:
        """The workflow state as it was last saved, or received."""
        if self._state is not None:
            return self._state
        lease = self._received.lease
        return self.delivery.state if lease is None else lease.states.get(self._position)

    def _check_received_here(self) -> None:
        if not self.attempts:
            raise rebuild("invalid_argument", "The message was received by another process, which has its payload")

    def _settle(self, request: Request[Outcomes]) -> None:
        outcome = (self._received.transport.call(request)).outcomes[0]
        if outcome.code in LOST_CODES:
            self.mark_refused(outcome.code)
        _checked(outcome)
        self.mark_settled()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.settled or (self.cancelled and kind is not None):
            return
        if kind is None:
            self.ack()
            return
        try:
            if issubclass(kind, Exception):
                self.nack(error=error)
            else:  # The consumer is being stopped; the message has not failed.
                self.nack(intent="defer", delay_seconds=self._received.delay_on_close_seconds)
        except Exception as failure:  # The block's own error matters more, and the message's lease expires by itself.
            _log.warning("message %s of %s was not returned to its queue: %s", self.id, self.queue, failure)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempts}, fence {self.fence}>"


def received_messages(
    transport: Transport,
    universe: str,
    queue: str,
    answer: Deliveries,
    *,
    visibility_seconds: float | None,
    extend_for_seconds: float | None,
    delay_on_close_seconds: float | None = None,
) -> list[Message]:
    """The messages of the answer to a receive. Their leases are extended until they are settled."""
    messages: list[Message] = []
    cap = EXTEND_FOR_SECONDS if extend_for_seconds is None else extend_for_seconds
    leases: list[PackedLease | Delivery] = [*answer.packed, *answer.messages]
    for lease in leases:
        if isinstance(lease, Delivery):
            seconds = visibility_seconds or lease.visibility_ms / 1_000
            received = _Received(
                transport,
                universe,
                queue,
                None,
                visibility_seconds=seconds,
                delay_on_close_seconds=delay_on_close_seconds,
            )
            some = [Message(received, 0, lease.expires_ms, lease)]
        else:
            positions, expires_ms = lease.positions, lease.expires_ms
            # Without `visibility_seconds`, all messages of a lease have the same.
            seconds = visibility_seconds or decode_head(lease.stored_at(positions[0])).visibility_ms / 1_000
            received = _Received(
                transport,
                universe,
                queue,
                lease,
                visibility_seconds=seconds,
                delay_on_close_seconds=delay_on_close_seconds,
            )
            some = [Message(received, position, expires_ms) for position in positions]
        if cap > 0:
            transport.lease_renewer.start(some, universe, queue, seconds=seconds, cap_seconds=cap)
        messages += some
    return messages


def packed_acks(messages: Sequence[Message]) -> tuple[list[PackedAck], list[Message]]:
    """The acks of messages by lease, and the messages that have to be acknowledged by themselves."""
    by_lease: dict[bytes, tuple[PackedLease, list[int]]] = {}
    alone: list[Message] = []
    latest: PackedLease | None = None  # Messages of one lease mostly follow each other.
    positions: list[int] = []
    for message in messages:
        lease = message._received.lease
        if lease is None:
            alone.append(message)
            continue
        if lease is not latest:
            latest = lease
            _, positions = by_lease.setdefault(lease.id, (lease, []))
        positions.append(message._position)
    acks = [PackedAck(lease.id, lease.fence, lease.fences, _bits(some)) for lease, some in by_lease.values()]
    return acks, alone


def _bits(positions: list[int]) -> bytes:
    """The bits of a `PackedAck`. Setting them in bytes is faster than in one large number."""
    bits = bytearray(max(positions) // 8 + 1)
    for position in positions:
        bits[-1 - (position >> 3)] |= 1 << (position & 7)
    return bytes(bits)


def mark_acked(messages: Sequence[Message], refused: Sequence[RefusedAck]) -> list[Message]:
    """Mark messages whose acks were packed as settled, or as lost if they were refused; returns the lost ones."""
    lost: list[Message] = []
    codes = {(each.lease, each.position): each.code for each in refused}
    for message in messages:
        lease = message._received.lease
        if lease is None:
            continue
        if codes and (code := codes.get((lease.id, message._position))) is not None:
            message.mark_refused(code)
            lost.append(message)
        else:
            message.settled = True
    return lost


def received_elsewhere(id: str, lease_id: str, fence: int, visibility_seconds: float) -> Delivery:
    """A delivery to another process: only what is needed to settle it."""
    return Delivery(
        id=id,
        payload=None,
        blob=None,
        size=0,
        content_type="",
        attributes={},
        correlation_id="",
        priority=0,
        group=None,
        created_ms=0,
        attempts=0,
        failure_attempts=0,
        max_attempts=0,
        last_error=None,
        origin=None,
        died_ms=0,
        lease_id=lease_id,
        fence=fence,
        expires_ms=0,
        visibility_ms=round(visibility_seconds * 1_000),
    )


def _checked(outcome: Outcome) -> Outcome:
    if outcome.code is not None:
        raise rebuild(outcome.code, outcome.detail or outcome.code)
    return outcome


def _single(payload: bytes) -> Iterator[bytes]:
    yield payload
