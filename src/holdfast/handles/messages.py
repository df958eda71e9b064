"""Messages in a consumer's hands."""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import cbor2
import msgspec

from holdfast.errors import rebuild
from holdfast.limits import EXTEND_FOR_SECONDS
from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.blobs import GetBlob, OpenBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.queues import (
    AckMessages,
    Delivery,
    ExtendMessages,
    MessageLease,
    NackMessages,
    Outcome,
    Outcomes,
    RejectMessages,
)
from holdfast.wire.requests import Request
from holdfast.wire.states import UpdateState

Result = TypeVar("Result")


class AsyncMessage:
    """A message that was received. It is the caller's until its lease ends or it is settled.

    `fence` is higher than that of every delivery before, so what is written with it can be told from what a consumer
    that lost the message writes late.
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
        self.lost = False  # Its lease ended while it was worked on; somebody else may have it.
        self._transport = transport
        self._universe = universe
        self._state = delivery.state
        self._visibility_seconds = visibility_seconds or delivery.visibility_ms / 1_000
        cap = EXTEND_FOR_SECONDS if extend_for_seconds is None else extend_for_seconds
        self._keeping: Any = None
        if cap > 0:
            self._keeping = transport.lease_renewer.keep(
                self, universe, queue, self.lease, seconds=self._visibility_seconds, cap_seconds=cap
            )

    @property
    def payload(self) -> bytes | None:
        """What was put; None if it is so large that `read` or `open` must fetch it, or was received elsewhere."""
        return self.delivery.payload

    def json(self) -> Any:
        """The payload, from JSON."""
        self._check_here()
        if self.delivery.payload is None:
            raise rebuild("invalid_argument", "The payload is too large to have come along; read() it, or open() it")
        return msgspec.json.decode(self.delivery.payload)

    @property
    def attempts(self) -> int:
        """How often it was delivered, this time included."""
        return self.delivery.attempts

    @property
    def failure_attempts(self) -> int:
        """How often it failed before."""
        return self.delivery.failure_attempts

    @property
    def fence(self) -> int:
        """The number of this delivery; it only grows."""
        return self.delivery.fence

    @property
    def correlation_id(self) -> str:
        """What ties it to whatever led to it."""
        return self.delivery.correlation_id

    @property
    def attributes(self) -> dict[str, str]:
        """What was put beside the payload."""
        return self.delivery.attributes

    @property
    def state(self) -> Any:
        """The workflow state that it was received with; None before anybody has written one."""
        return None if self._state is None else cbor2.loads(self._state.value)

    async def read(self) -> bytes:
        """The payload, whole, however large."""
        self._check_here()
        if self.delivery.payload is not None or self.delivery.blob is None:
            return self.delivery.payload or b""
        return (await self._transport.call(GetBlob(self.delivery.blob, self._universe))).data

    async def open(self) -> AsyncIterator[bytes]:
        """The payload as a stream, for what is too large for memory."""
        self._check_here()
        if self.delivery.blob is None:
            return _single(self.delivery.payload or b"")
        return await self._transport.receive(OpenBlob(self.delivery.blob, self._universe))

    async def save_state(self, value: Any) -> None:
        """Write the workflow state, which the next consumer finds if this one does not finish.

        Raises:
            Fenced: the message is somebody else's by now.
        """
        if self._state is None:
            raise rebuild("invalid_argument", "The message was received without its state; receive it with_state=True")
        encoded = canonical(value)
        proof = self._state.lease
        request = UpdateState(proof.key, encoded, proof, universe=self._universe)
        updated = await self._transport.call(request)
        self._state = msgspec.structs.replace(self._state, value=encoded, etag=updated.etag)

    async def ack(self, *, tier: Tier = Tier.CRITICAL) -> None:
        """It is done. Doing this twice is fine.

        Raises:
            QueueMessageLeaseMismatch: somebody else has it by now.
        """
        await self._settle(AckMessages(self.queue, [self.lease], self._universe, tier=tier))

    async def nack(
        self,
        *,
        delay_seconds: float = 0.0,
        intent: str = "failure",
        error: str | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> None:
        """Give it back, to be delivered again after the delay. `intent="defer"` does not count as a failure.

        Raises:
            QueueMessageLeaseMismatch: somebody else has it by now.
        """
        request = NackMessages(self.queue, [self.lease], delay_seconds, intent, error, self._universe, tier=tier)
        await self._settle(request)

    async def reject(self, error: str | None = None, *, tier: Tier = Tier.CRITICAL) -> None:
        """Send it to the dead letters at once.

        Raises:
            QueueMessageLeaseMismatch: somebody else has it by now.
        """
        await self._settle(RejectMessages(self.queue, [self.lease], error, self._universe, tier=tier))

    async def extend(self, seconds: float | None = None) -> int:
        """Let the lease last at least `seconds` from now; when it ends, in milliseconds since 1970.

        Raises:
            QueueMessageLeaseMismatch: somebody else has it by now.
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
            QueueMessageLeaseMismatch: somebody else has it by now, and nothing was written.
        """
        transport, request = self._transport, AckMessages(self.queue, [self.lease], self._universe)

        def both(tx: Any) -> Result:
            result = work(tx, *args)
            _checked(transport.execute(tx, request).outcomes[0])
            return result

        result = await transport.transact(both, tier=tier)
        self.settle_elsewhere()
        return result

    def settle_elsewhere(self) -> None:
        """It was settled by another way than its own methods: leave its lease alone."""
        self.settled = True
        if self._keeping is not None:
            self._keeping.stop()

    def _check_here(self) -> None:
        if not self.delivery.attempts:
            raise rebuild("invalid_argument", "The message was received elsewhere, and its payload is there")

    async def _settle(self, request: Request[Outcomes]) -> None:
        _checked((await self._transport.call(request)).outcomes[0])
        self.settle_elsewhere()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.settled:
            return
        if kind is None:
            await self.ack()
        elif issubclass(kind, Exception):
            await self.nack(error=f"{kind.__name__}: {error}")
        else:  # The consumer is stopped, which is nothing the message did.
            await self.nack(intent="defer")

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempts}, fence {self.fence}>"


def elsewhere(id: str, lease_id: str, fence: int) -> Delivery:
    """A delivery to somebody else, of which no more is known than what settles it."""
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
