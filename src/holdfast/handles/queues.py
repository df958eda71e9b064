"""Queues: put, receive, settle."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.errors import InvalidValue
from holdfast.handles.messages import AsyncMessage, elsewhere
from holdfast.limits import PAYLOAD_INLINE_BYTES_MAX, RECEIVE_WAIT_SECONDS_MAX
from holdfast.names import checked_name
from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.blobs import PutBlob
from holdfast.wire.queues import (
    CheckMessages,
    Delivery,
    GetQueuePolicy,
    GetQueueStats,
    ListSchedules,
    NewMessage,
    PauseQueue,
    PeekMessages,
    PurgeQueue,
    PutMessages,
    QueuePolicy,
    QueueStats,
    Receipt,
    ReceiveMessages,
    RedriveMessages,
    RemoveSchedule,
    Schedule,
    SetQueuePolicy,
    SetSchedule,
)

_encode = msgspec.json.Encoder().encode
_JSON = "application/json"
_BYTES = "application/octet-stream"
_LOOKS_A_CHECK = 20  # Every so many of these looks it asks the plane which messages it has lost.
_CREDIT_LOOK_SECONDS = 0.005  # How often a subscription whose credit is used up looks whether a message was settled.


class AsyncQueue:
    """One queue. It begins with the first message that is put into it.

    A message is delivered at least once: to one consumer at a time, again if that one does not settle it in time, and
    after `max_attempts` failures to the dead letters. Every delivery has a fence that is higher than the last one's.
    """

    def __init__(self, transport: AsyncTransport, universe: str, name: str) -> None:
        self.name = checked_name("queue", name)
        self._transport = transport
        self._universe = universe
        self._owner = uuid.uuid4().hex[:12]

    async def put(
        self,
        body: Any,
        *,
        delay_seconds: float = 0.0,
        ttl_seconds: float | None = None,
        priority: int = 5,
        group: str | None = None,
        idempotency_key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        max_attempts: int | None = None,
        visibility_seconds: float | None = None,
        content_type: str | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> Receipt:
        """Put a message: bytes as they are, anything else as JSON. The receipt says which promise it carries.

        Args:
            delay_seconds: how long it is not delivered.
            ttl_seconds: when it is removed, delivered or not.
            priority: 0 to 9; 9 is delivered first.
            group: messages of one group are delivered one at a time, in the order in which they were put.
            idempotency_key: a second put with the same key within five minutes puts nothing; `duplicate` says so.
            max_attempts, visibility_seconds: in place of those of the queue's policy.
        """
        payload, kind = payload_of(body)
        # By position, which is twice as fast; the fields are in the order in which NewMessage declares them.
        message = NewMessage(
            payload,
            None,
            0,
            content_type or kind,
            dict(attributes) if attributes else {},
            correlation_id,
            priority,
            group,
            idempotency_key,
            delay_seconds,
            ttl_seconds,
            max_attempts,
            visibility_seconds,
        )
        return (await self._put([message], tier))[0]

    async def put_many(self, bodies: Iterable[Any], *, tier: Tier = Tier.CRITICAL) -> list[Receipt]:
        """Put up to 256 messages as one commit; each a body, or a `NewMessage` with options of its own."""
        messages = []
        for body in bodies:
            if isinstance(body, NewMessage):
                messages.append(body)
            else:
                payload, kind = payload_of(body)
                messages.append(NewMessage(payload, None, 0, kind))  # By position, which is twice as fast.
        return await self._put(messages, tier)

    async def receive(
        self,
        *,
        wait_seconds: float = 0.0,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        extend_for_seconds: float | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> AsyncMessage | None:
        """The next message, leased to the caller; None if there is none within `wait_seconds`.

        Settle it: in a `with` block, which acknowledges it at its end and gives it back on an exception, or with `ack`,
        `nack` or `reject`. Its lease is extended by itself meanwhile, for `extend_for_seconds` at most (an hour; 0
        leaves it to the caller).

        Raises:
            QueueBusy: as many consumers wait as may.
        """
        request = ReceiveMessages(
            self.name, owner or self._owner, 1, wait_seconds, visibility_seconds, with_state, None, self._universe,
            tier=tier,
        )  # fmt: skip
        for delivery in (await self._transport.call(request)).messages:
            return AsyncMessage(
                self._transport,
                self._universe,
                self.name,
                delivery,
                visibility_seconds=visibility_seconds,
                extend_for_seconds=extend_for_seconds,
            )
        return None

    async def receive_many(
        self,
        max_messages: int = 10,
        *,
        wait_seconds: float = 0.0,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        extend_for_seconds: float | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> list[AsyncMessage]:
        """Up to `max_messages` (256), as soon as there is one; none if there is none within `wait_seconds`."""
        request = ReceiveMessages(
            self.name,
            owner or self._owner,
            max_messages,
            wait_seconds,
            visibility_seconds,
            with_state,
            None,
            self._universe,
            tier=tier,
        )
        deliveries = (await self._transport.call(request)).messages
        return [
            AsyncMessage(
                self._transport,
                self._universe,
                self.name,
                delivery,
                visibility_seconds=visibility_seconds,
                extend_for_seconds=extend_for_seconds,
            )
            for delivery in deliveries
        ]

    def held(
        self,
        id: str,
        *,
        lease_id: str,
        fence: int,
        visibility_seconds: float | None = None,
        extend_for_seconds: float = 0.0,
    ) -> AsyncMessage:
        """A message that was received elsewhere, by its id and its lease: to settle it, or to extend it, from here.

        Nothing is asked of the plane before that, and its payload is where it was received. Its lease is extended by
        itself only if `extend_for_seconds` says so.
        """
        return AsyncMessage(
            self._transport,
            self._universe,
            self.name,
            elsewhere(id, lease_id, fence),
            visibility_seconds=QueuePolicy().visibility_seconds if visibility_seconds is None else visibility_seconds,
            extend_for_seconds=extend_for_seconds,
        )

    async def subscribe(
        self,
        *,
        credit: int = 16,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        wait_seconds: float = RECEIVE_WAIT_SECONDS_MAX,
        extend_for_seconds: float | None = None,
    ) -> AsyncIterator[AsyncMessage]:
        """Messages as they come, `credit` of them unsettled at most; ends when none came for `wait_seconds`."""
        unsettled: list[AsyncMessage] = []
        looks = 0
        while True:
            unsettled = [message for message in unsettled if not message.settled and not message.lost]
            if len(unsettled) >= credit:
                await asyncio.sleep(_CREDIT_LOOK_SECONDS)
                looks += 1
                if looks % _LOOKS_A_CHECK == 0:
                    await self._note_lost(unsettled)
                continue
            batch = await self.receive_many(
                credit - len(unsettled),
                wait_seconds=wait_seconds,
                visibility_seconds=visibility_seconds,
                owner=owner,
                with_state=with_state,
                extend_for_seconds=extend_for_seconds,
            )
            if not batch:
                return
            unsettled += batch
            handed_out = 0
            try:
                for message in batch:
                    handed_out += 1
                    yield message
            finally:
                for message in batch[handed_out:]:  # Nobody has seen these: that is no failure of theirs.
                    await message.nack(intent="defer")

    async def _note_lost(self, messages: list[AsyncMessage]) -> None:
        """Find out which messages are somebody else's by now."""
        request = CheckMessages(self.name, [message.lease for message in messages], self._universe)
        outcomes = (await self._transport.call(request)).outcomes
        for message, outcome in zip(messages, outcomes, strict=True):
            message.lost = message.lost or outcome.code is not None

    async def stats(self) -> QueueStats:
        """How many messages are in which state, and how many consumers wait in the plane's process."""
        return await self._transport.call(GetQueueStats(self.name, self._universe))

    async def peek(self, n: int = 10) -> list[Delivery]:
        """At most `n` messages that are ready, in the order in which they would be delivered. Nothing is consumed."""
        return (await self._transport.call(PeekMessages(self.name, n, self._universe))).messages

    async def purge(self) -> int:
        """Remove every message that nobody holds; how many there were."""
        return (await self._transport.call(PurgeQueue(self.name, self._universe))).count

    async def pause(self) -> None:
        """Deliver nothing until `resume`; puts are still taken."""
        await self._transport.call(PauseQueue(self.name, True, self._universe))

    async def resume(self) -> None:
        """Deliver again."""
        await self._transport.call(PauseQueue(self.name, False, self._universe))

    async def policy(self) -> QueuePolicy:
        """What holds for messages that do not say otherwise."""
        return await self._transport.call(GetQueuePolicy(self.name, self._universe))

    async def set_policy(self, policy: QueuePolicy) -> QueuePolicy:
        """Give the queue another policy; it holds for what is put and delivered from now on."""
        return await self._transport.call(SetQueuePolicy(self.name, policy, self._universe))

    async def dead_letters(self, n: int = 100) -> list[Delivery]:
        """At most `n` dead letters of this queue, with the last error of each."""
        policy = await self.policy()
        peek = PeekMessages(policy.dead_letter_queue or f"{self.name}.dlq", n, self._universe)
        return [letter for letter in (await self._transport.call(peek)).messages if letter.origin == self.name]

    async def redrive(self, ids: list[str] | None = None, *, limit: int = 1_000) -> int:
        """Put dead letters back into this queue, those named or up to `limit`; how many there were."""
        return (await self._transport.call(RedriveMessages(self.name, ids, limit, self._universe))).count

    async def schedule(self, name: str, cron: str, body: Any, *, timezone: str = "UTC", **options: Any) -> Schedule:
        """Put `body` whenever the clock of `timezone` says what `cron` names, in place of a schedule of the same name.

        `options` are those of a `NewMessage`.
        """
        payload, kind = payload_of(body)
        message = NewMessage(payload=payload, **{"content_type": kind, **options})
        return await self._transport.call(SetSchedule(self.name, name, cron, message, timezone, self._universe))

    async def unschedule(self, name: str) -> bool:
        """Remove a schedule; whether there was one."""
        return bool((await self._transport.call(RemoveSchedule(self.name, name, self._universe))).count)

    async def schedules(self) -> list[Schedule]:
        """The schedules of this queue, with the moment at which each strikes next."""
        return (await self._transport.call(ListSchedules(self.name, self._universe))).schedules

    async def _put(self, messages: list[NewMessage], tier: Tier) -> list[Receipt]:
        for index, message in enumerate(messages):
            if len(message.payload) > PAYLOAD_INLINE_BYTES_MAX:
                stored = await self._transport.call(PutBlob(message.payload, self._universe))
                messages[index] = msgspec.structs.replace(
                    message, payload=b"", blob=stored.hash, blob_size=len(message.payload)
                )
        return (await self._transport.call(PutMessages(self.name, messages, self._universe, tier=tier))).receipts


def payload_of(body: Any) -> tuple[bytes, str]:
    """A body as bytes, and what they are."""
    if body.__class__ is bytes:
        return body, _BYTES
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), _BYTES
    try:
        return _encode(body), _JSON
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidValue(f"This body has no JSON form ({error}); give bytes, text, numbers, lists or maps") from error
