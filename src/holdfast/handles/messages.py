"""Messages that a consumer has received."""

import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import cbor2
import msgspec

from holdfast.errors import QueueMessageLeaseMismatch, rebuild
from holdfast.handles.failed_attempts import nack_request, reject_request
from holdfast.limits import EXTEND_FOR_SECONDS
from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.blobs import GetBlob, OpenBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.json_values import decode_json
from holdfast.wire.queues import (
    AckMessages,
    Delivery,
    ExtendMessages,
    Failure,
    MessageLease,
    Outcome,
    Outcomes,
)
from holdfast.wire.requests import Request
from holdfast.wire.states import UpdateState
from holdfast.wire.transport import Renewal

_log = logging.getLogger("holdfast.messages")

Result = TypeVar("Result")


class AsyncMessage:
    """A received message, leased to the caller until it is settled or its lease ends.

    `fence` is higher than that of every earlier delivery, so a write with it can be distinguished from a late write of
    a consumer that lost the message.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        universe: str,
        queue: str,
        delivery: Delivery,
        *,
        visibility_seconds: float | None,
        extend_for_seconds: float | None,
    ) -> None:
        self.delivery = delivery
        self.id = delivery.id
        self.queue = queue
        self.lease = MessageLease(delivery.id, delivery.lease_id, delivery.fence)
        self.expires_ms = delivery.expires_ms
        self.settled = False
        self.lost = False  # Its lease ended before it was settled; another consumer may have it.
        self._transport = transport
        self._universe = universe
        self._state = delivery.state
        self._visibility_seconds = visibility_seconds or delivery.visibility_ms / 1_000
        cap = EXTEND_FOR_SECONDS if extend_for_seconds is None else extend_for_seconds
        self._renewal: Renewal | None = None
        if cap > 0:
            self._renewal = transport.lease_renewer.start(
                self, universe, queue, self.lease, seconds=self._visibility_seconds, cap_seconds=cap
            )

    @property
    def universe(self) -> str:
        """The universe of its queue."""
        return self._universe

    @property
    def payload(self) -> bytes | None:
        """The payload; None if it is so large that `read` or `open` must fetch it, or another process received it."""
        return self.delivery.payload

    def json(self) -> Any:
        """The payload, from JSON.

        Raises:
            InvalidValue: it is not JSON, or nested too deep.
        """
        self._check_received_here()
        if self.delivery.payload is None:
            raise rebuild(
                "invalid_argument", "The payload is too large to come with the delivery; call read() or open()"
            )
        return decode_json(self.delivery.payload)

    @property
    def attempts(self) -> int:
        """The number of deliveries, including this one."""
        return self.delivery.attempts

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
        """The fencing token of this delivery; it only grows."""
        return self.delivery.fence

    @property
    def correlation_id(self) -> str:
        """The id that links it to the request that caused it."""
        return self.delivery.correlation_id

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes that were put with the payload."""
        return self.delivery.attributes

    @property
    def state(self) -> Any:
        """The workflow state that it was received with; None if none was saved."""
        return None if self._state is None else cbor2.loads(self._state.value)

    async def read(self) -> bytes:
        """The whole payload, of any size."""
        self._check_received_here()
        if self.delivery.payload is not None or self.delivery.blob is None:
            return self.delivery.payload or b""
        return (await self._transport.call(GetBlob(self.delivery.blob, self._universe))).data

    async def open(self) -> AsyncIterator[bytes]:
        """The payload as a stream, if it is too large for memory."""
        self._check_received_here()
        if self.delivery.blob is None:
            return _single(self.delivery.payload or b"")
        return await self._transport.receive(OpenBlob(self.delivery.blob, self._universe))

    async def save_state(self, value: Any) -> None:
        """Save the workflow state, which the next consumer receives if this one does not finish.

        Raises:
            Fenced: the message's lease has ended.
        """
        if self._state is None:
            raise rebuild("invalid_argument", "The message was received without its state; receive it with_state=True")
        encoded = canonical(value)
        proof = self._state.lease
        request = UpdateState(proof.key, encoded, proof, universe=self._universe)
        updated = await self._transport.call(request)
        self._state = msgspec.structs.replace(self._state, value=encoded, etag=updated.etag)

    async def ack(self, *, tier: Tier = Tier.CRITICAL) -> None:
        """Acknowledge the message: it is done. Acknowledging twice is fine.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        await self._settle(AckMessages(self.queue, [self.lease], self._universe, tier=tier))

    async def nack(
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
            self.queue, [self.lease], self._universe, error, delay_seconds=delay_seconds, intent=intent, tier=tier
        )
        await self._settle(request)

    async def reject(self, error: str | BaseException | None = None, *, tier: Tier = Tier.CRITICAL) -> None:
        """Send it to the dead letters at once. Of an exception, the type, message and traceback are kept.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        await self._settle(reject_request(self.queue, [self.lease], self._universe, error, tier=tier))

    async def extend(self, seconds: float | None = None) -> int:
        """Extend the lease to at least `seconds` from now; its expiry in milliseconds since 1970.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it.
        """
        request = ExtendMessages(
            self.queue, [self.lease], self._visibility_seconds if seconds is None else seconds, self._universe
        )
        self.expires_ms = _checked((await self._transport.call(request)).outcomes[0]).expires_ms
        return self.expires_ms

    async def complete(self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL) -> Result:
        """Run `work(tx, *args)` and acknowledge the message in the same commit: both happen, or neither.

        Raises:
            NotEmbedded: the plane is in another process; use `plane.atomic()` there.
            QueueMessageLeaseMismatch: its lease has ended, and nothing was written.
        """
        transport, request = self._transport, AckMessages(self.queue, [self.lease], self._universe)

        def work_and_ack(tx: Any) -> Result:
            result = work(tx, *args)
            _checked(transport.execute(tx, request).outcomes[0])
            return result

        result = await transport.transact(work_and_ack, tier=tier)
        self.mark_settled()
        return result

    def mark_settled(self) -> None:
        """Stop extending its lease: it was settled, possibly by another call than its own methods."""
        self.settled = True
        if self._renewal is not None:
            self._renewal.stop()

    def mark_lost(self) -> None:
        """Stop extending its lease, which has ended. Another consumer may have the message, unless it was settled."""
        self.lost = not self.settled
        if self._renewal is not None:
            self._renewal.stop()

    def _check_received_here(self) -> None:
        if not self.delivery.attempts:
            raise rebuild("invalid_argument", "The message was received by another process, which has its payload")

    async def _settle(self, request: Request[Outcomes]) -> None:
        outcome = (await self._transport.call(request)).outcomes[0]
        if outcome.code == QueueMessageLeaseMismatch.code:
            self.mark_lost()
        _checked(outcome)
        self.mark_settled()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.settled:
            return
        if kind is None:
            await self.ack()
            return
        try:
            if issubclass(kind, Exception):
                await self.nack(error=error)
            else:  # The consumer is being stopped; the message has not failed.
                await self.nack(intent="defer")
        except Exception as failure:  # The block's own error matters more, and the message's lease expires by itself.
            _log.warning("message %s of %s was not returned to its queue: %s", self.id, self.queue, failure)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempts}, fence {self.fence}>"


def received_elsewhere(id: str, lease_id: str, fence: int) -> Delivery:
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
        visibility_ms=0,
    )


def _checked(outcome: Outcome) -> Outcome:
    if outcome.code is not None:
        raise rebuild(outcome.code, outcome.detail or outcome.code)
    return outcome


async def _single(payload: bytes) -> AsyncIterator[bytes]:
    yield payload
