"""Generated from handles/queues.py by tools/make_twins.py; change that file instead."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from fastness.errors import FastnessError, InvalidArgument, MessageCancelled, QueueMessageLeaseMismatch, rebuild
from fastness.handles.arguments import check_receive_options, checked_items, checked_map
from fastness.handles.failed_attempts import nack_request, reject_request
from fastness.handles.sync.messages import (
    LOST_CODES,
    Message,
    mark_acked,
    packed_acks,
    received_elsewhere,
    received_messages,
)
from fastness.handles.sync.receipts import MessageSource, PutReceipt, bound_receipt, read_result
from fastness.limits import LEASED_LIST_MAX, PAYLOAD_INLINE_BYTES_MAX, RECEIVE_WAIT_SECONDS_MAX
from fastness.names import checked_name
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.blobs import PutBlob
from fastness.wire.json_values import encode_json
from fastness.wire.queues import (
    AckMessages,
    CancelMessage,
    CancelMessages,
    CheckMessages,
    DeleteMessages,
    DeleteQueue,
    Deliveries,
    Delivery,
    ExtendMessages,
    FoundMessages,
    GetKey,
    GetMessage,
    GetQueuePolicy,
    GetQueueStats,
    KeyInfo,
    LeasedMessage,
    ListLeasedMessages,
    ListSchedules,
    MessageEvents,
    MessageInfo,
    MessageLease,
    MessageState,
    MoveMessages,
    NewMessage,
    Outcome,
    Outcomes,
    PauseKey,
    PauseQueue,
    PeekMessages,
    PurgeQueue,
    PutMessages,
    QueuePolicy,
    QueueStats,
    ReadQueueHistory,
    ReceiveMessages,
    RedriveMessages,
    RemoveSchedule,
    Schedule,
    SearchMessages,
    SetQueuePolicy,
    SetSchedule,
    UpdateMessage,
    WaitForCancel,
    lease_mismatch,
    message_cancelled,
)
from fastness.wire.requests import Request
from fastness.wire.type_checks import check_argument

_JSON = "application/json"
_BYTES = "application/octet-stream"
_CREDIT_POLL_SECONDS = 0.005  # How often a subscription without credit checks whether a message was settled.
_POLLS_PER_LEASE_CHECK = 20  # After so many polls it asks the plane which leases have ended.


class MessageOptions(TypedDict, total=False):
    """The options of `put`, for calls that put a message in another way."""

    # Generated: options.
    content_type: str
    attributes: dict[str, str]
    correlation_id: str | None
    priority: int
    group: str | None
    idempotency_key: str | None
    delay_seconds: float | None
    ttl_seconds: float | None
    max_attempts: int | None
    visibility_seconds: float | None
    retry_delay_seconds: float | None
    key: str | None
    keep_result: bool
    unique_key: str | None
    unique_until: Literal["done", "leased"] | float
    debounce_key: str | None
    debounce_seconds: float
    debounce_max_seconds: float | None
    tags: list[str]
    # End of the generated options.


def new_message(body: Any, **options: Unpack[MessageOptions]) -> NewMessage:
    """A message with these options: bytes as they are, anything else as JSON."""
    payload, kind = payload_of(body)
    options.setdefault("content_type", kind)
    return NewMessage(payload=payload, **options)


class Queue:
    """One queue. It is created by the first message that is put into it.

    A message is delivered at least once: to one consumer at a time, again if the consumer does not settle it in time,
    and to the dead letters after `max_attempts` failures. The fence of each delivery is higher than the last one's.
    """

    def __init__(self, transport: Transport, universe: str, name: str) -> None:
        self.name = checked_name("queue", name)
        self._transport = transport
        self._universe = universe
        self._owner = uuid.uuid4().hex[:12]
        self._source = MessageSource(transport, universe, self.name)

    def put(
        self,
        body: Any,
        *,
        # Generated: signature.
        content_type: str | None = None,
        attributes: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        priority: int = 5,
        group: str | None = None,
        idempotency_key: str | None = None,
        delay_seconds: float | None = None,
        ttl_seconds: float | None = None,
        max_attempts: int | None = None,
        visibility_seconds: float | None = None,
        retry_delay_seconds: float | None = None,
        key: str | None = None,
        keep_result: bool = False,
        unique_key: str | None = None,
        unique_until: Literal["done", "leased"] | float = "done",
        debounce_key: str | None = None,
        debounce_seconds: float = 0.0,
        debounce_max_seconds: float | None = None,
        tags: Sequence[str] = (),
        # End of the generated signature.
        tier: Tier = Tier.CRITICAL,
    ) -> PutReceipt:
        """Put a message: bytes as they are, anything else as JSON. The receipt has the message's id and durability.

        Args:
            content_type: The content type of the body. By default it follows from the body.
            attributes: Texts by name, which consumers get with the message.
            correlation_id: An id that links related messages and requests. By default that of the message.
            priority: 0 to 9; 9 is delivered first.
            group: Messages of one group are delivered one at a time, in order.
            idempotency_key: A put with the same key within five minutes adds nothing; its receipt has `duplicate`.
            delay_seconds: Hold the message back for this time. By default the policy decides: not at all.
            ttl_seconds: Remove the message after this time, delivered or not.
            max_attempts: After this many failed attempts the message becomes a dead letter.
            visibility_seconds: How long a delivery is leased to its consumer.
            retry_delay_seconds: The delay after the first failure, from which the back-off of the policy grows.
            key: Messages with the same key share the limits `concurrency_per_key` and `rate_per_key` of the policy, and
                take turns with other keys if it is `fair`.
            keep_result: Keep what becomes of the message, with its result, so that it can be read when it is done.
            unique_key: While a message has this key, a put with the same key adds nothing; its receipt has `duplicate`.
            unique_until: When the message gives up its `unique_key`: `done` (also dead or cancelled), `leased`, or
                after a time.
            debounce_key: Hold the message back for `debounce_seconds`. A put with the same key within that time
                replaces it and starts the time again.
            debounce_seconds: How long a message with a `debounce_key` is held back after the last put.
            debounce_max_seconds: How long after the first put a message with a `debounce_key` is held back at most.
            tags: Texts to search for. A message that is done has none any more.
        """
        payload, kind = payload_of(body)
        message = NewMessage(  # By position: a struct of this size takes several times as long by keyword.
            payload,
            # Generated: fields.
            content_type or kind,
            checked_map("attributes", attributes) if attributes else {},
            correlation_id,
            priority,
            group,
            idempotency_key,
            delay_seconds,
            ttl_seconds,
            max_attempts,
            visibility_seconds,
            retry_delay_seconds,
            key,
            keep_result,
            unique_key,
            unique_until,
            debounce_key,
            debounce_seconds,
            debounce_max_seconds,
            [*checked_items(tags, "write tags=[tag]")] if tags else [],
            # End of the generated fields.
        )
        if len(payload) > PAYLOAD_INLINE_BYTES_MAX:
            return (self._put([message], tier))[0]
        answer = self._transport.call(PutMessages(self.name, [message], self._universe, tier=tier))
        return bound_receipt(self._source, answer.receipts[0])

    def put_many(self, bodies: Iterable[Any], *, tier: Tier = Tier.CRITICAL) -> list[PutReceipt]:
        """Put up to 256 messages in one commit; each is a body, or a `NewMessage` with its own options."""
        messages = []
        for body in checked_items(bodies, "write put_many([body, …]), or put(body)"):
            if isinstance(body, NewMessage):
                messages.append(body)
            else:
                payload, kind = payload_of(body)
                messages.append(NewMessage(payload=payload, content_type=kind))
        return self._put(messages, tier)

    def receive(
        self,
        *,
        wait_seconds: float = 0.0,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        extend_for_seconds: float | None = None,
        delay_on_close_seconds: float | None = None,
        tier: Tier | None = None,
    ) -> Message | None:
        """The next message, leased to the caller; None if none arrives within `wait_seconds`.

        Settle it with `ack`, `nack` or `reject`, or in a `with` block, which acknowledges it at its end and nacks it on
        an exception; then it is delivered again after the back-off of the queue's policy. Until it is settled its lease
        is extended automatically, for at most `extend_for_seconds` (default: an hour; 0: not at all). If the block is
        stopped, by Ctrl-C or because its task is cancelled, the message is returned without counting a failure, and is
        delivered again after `delay_on_close_seconds` (default: at once).

        By default the message is as durable as its put, and on a data directory the call does not wait for a sync of
        its lease: a power failure may undo a delivery, and then the message is delivered again with a higher fence.
        Give a `tier` to wait for the lease too. With `with_state` it always waits.

        Raises:
            QueueBusy: the maximum number of consumers is waiting.
        """
        check_receive_options(extend_for_seconds, delay_on_close_seconds)
        request = ReceiveMessages(
            queue=self.name,
            owner=owner or self._owner,
            wait_seconds=wait_seconds,
            visibility_seconds=visibility_seconds,
            with_state=with_state,
            universe=self._universe,
            tier=tier,
            packed=True,
        )
        messages = received_messages(
            self._transport,
            self._universe,
            self.name,
            self._transport.call(request),
            visibility_seconds=visibility_seconds,
            extend_for_seconds=extend_for_seconds,
            delay_on_close_seconds=delay_on_close_seconds,
        )
        return messages[0] if messages else None

    def receive_many(
        self,
        max_messages: int = 10,
        *,
        wait_seconds: float = 0.0,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        extend_for_seconds: float | None = None,
        delay_on_close_seconds: float | None = None,
        tier: Tier | None = None,
        ack: Iterable[Message] = (),
    ) -> list[Message]:
        """Up to `max_messages` (at most 256) as soon as one is ready; empty if none arrives within `wait_seconds`.

        The options are those of `receive`.

        for message in queue.receive_many(10, wait_seconds=20):
            with message:
                ...

        The messages in `ack`, at most 256, are acknowledged in the same commit, or first if there is nothing to receive
        yet. Those whose lease has ended are marked `lost` instead of `settled`. If the call fails, acknowledge them
        again.
        """
        check_receive_options(extend_for_seconds, delay_on_close_seconds)
        done = self._checked_messages(ack)
        acks, alone = packed_acks(done)
        if alone:
            self.ack_many(alone, tier=tier or Tier.CRITICAL)
        request = ReceiveMessages(
            queue=self.name,
            owner=owner or self._owner,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            visibility_seconds=visibility_seconds,
            with_state=with_state,
            universe=self._universe,
            tier=tier,
            packed=True,
            acks=acks,
        )
        answer = self._transport.call(request)
        mark_acked(done, answer.refused)
        return received_messages(
            self._transport,
            self._universe,
            self.name,
            answer,
            visibility_seconds=visibility_seconds,
            extend_for_seconds=extend_for_seconds,
            delay_on_close_seconds=delay_on_close_seconds,
        )

    def ack_many(self, messages: Iterable[Message], *, tier: Tier = Tier.CRITICAL) -> None:
        """Acknowledge up to 256 messages of this queue in one commit.

        All that are still leased are settled, also if the leases of others have ended; those are marked `lost`.

        Raises:
            QueueMessageLeaseMismatch: leases had ended; the error names the messages.
            BatchTooLarge, EmptyBatch: there are too many messages, or none; nothing was written.
        """
        some = self._checked_messages(messages)
        packed, alone = packed_acks(some)
        request = AckMessages(self.name, _leases(alone), self._universe, packed, tier=tier)
        self._settle_many(some, alone, request)

    def nack_many(
        self,
        messages: Iterable[Message],
        *,
        delay_seconds: float | None = None,
        intent: str = "failure",
        error: str | BaseException | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> None:
        """Return up to 256 messages in one commit, like `Message.nack`. Raises what `ack_many` raises."""
        some = self._checked_messages(messages)
        request = nack_request(
            self.name, _leases(some), self._universe, error, delay_seconds=delay_seconds, intent=intent, tier=tier
        )
        self._settle_many(some, some, request)

    def reject_many(
        self, messages: Iterable[Message], error: str | BaseException | None = None, *, tier: Tier = Tier.CRITICAL
    ) -> None:
        """Send up to 256 messages to the dead letters in one commit. Raises what `ack_many` raises."""
        some = self._checked_messages(messages)
        request = reject_request(self.name, _leases(some), self._universe, error, tier=tier)
        self._settle_many(some, some, request)

    def extend_many(self, messages: Iterable[Message], seconds: float) -> None:
        """Extend the leases of up to 256 messages to at least `seconds` from now, in one commit.

        Sets `expires_ms` of each. Raises what `ack_many` raises.
        """
        some = self._checked_messages(messages)
        self._settle_many(some, some, ExtendMessages(self.name, _leases(some), seconds, self._universe))

    def held(
        self,
        id: str,
        *,
        lease_id: str,
        fence: int,
        visibility_seconds: float | None = None,
        extend_for_seconds: float = 0.0,
    ) -> Message:
        """A message that another process received, by its id and lease: to settle it, or to extend its lease.

        This makes no call, and the message has no payload. Its lease is extended automatically only if
        `extend_for_seconds` is given.
        """
        check_argument("visibility_seconds", visibility_seconds, float | None)
        check_argument("extend_for_seconds", extend_for_seconds, float)
        seconds = QueuePolicy().visibility_seconds if visibility_seconds is None else visibility_seconds
        return received_messages(
            self._transport,
            self._universe,
            self.name,
            Deliveries([received_elsewhere(id, lease_id, fence, seconds)]),
            visibility_seconds=seconds,
            extend_for_seconds=extend_for_seconds,
        )[0]

    def subscribe(
        self,
        *,
        credit: int = 16,
        visibility_seconds: float | None = None,
        owner: str | None = None,
        with_state: bool = False,
        wait_seconds: float = RECEIVE_WAIT_SECONDS_MAX,
        extend_for_seconds: float | None = None,
        delay_on_close_seconds: float | None = None,
    ) -> Iterator[Message]:
        """Messages as they arrive, at most `credit` of them unsettled; ends when none arrives for `wait_seconds`.

        When it ends, messages that the caller has not seen are returned at once, without counting a failure. Those
        that it has seen stay leased until they are settled, or their leases expire. With `delay_on_close_seconds`, all
        that are not settled by then are returned, and are delivered again after this time.
        """
        check_receive_options(extend_for_seconds, delay_on_close_seconds)
        check_argument("credit", credit, int)
        unsettled: list[Message] = []
        unseen: list[Message] = []
        polls = 0
        try:
            while True:
                unsettled = _unsettled(unsettled)
                if len(unsettled) >= credit:
                    time.sleep(_CREDIT_POLL_SECONDS)
                    polls += 1
                    if polls % _POLLS_PER_LEASE_CHECK == 0:
                        self._mark_lost(unsettled)
                    continue
                batch = self.receive_many(
                    credit - len(unsettled),
                    wait_seconds=wait_seconds,
                    visibility_seconds=visibility_seconds,
                    owner=owner,
                    with_state=with_state,
                    extend_for_seconds=extend_for_seconds,
                    delay_on_close_seconds=delay_on_close_seconds,
                )
                if not batch:
                    return
                unsettled += batch
                unseen = batch[::-1]
                while unseen:
                    yield unseen.pop()
        finally:
            rest = unseen[::-1] if delay_on_close_seconds is None else _unsettled(unsettled)
            if rest:
                with suppress(QueueMessageLeaseMismatch, MessageCancelled):  # Their leases have ended.
                    self.nack_many(rest, intent="defer", delay_seconds=delay_on_close_seconds)

    def _mark_lost(self, messages: list[Message]) -> None:
        """Mark the messages whose lease has ended."""
        request = CheckMessages(self.name, [message.lease for message in messages], self._universe)
        outcomes = (self._transport.call(request)).outcomes
        for message, outcome in zip(messages, outcomes, strict=True):
            if outcome.code is not None:
                message.mark_refused(outcome.code)

    def stats(self, *, must_exist: bool = False) -> QueueStats:
        """The number of messages in each state, and of consumers that wait in the plane's process.

        Raises:
            QueueNotFound: the queue was never used and has no policy, and `must_exist` is set. Otherwise it has zeros.
        """
        return self._transport.call(GetQueueStats(self.name, self._universe, must_exist))

    def peek(self, n: int = 10) -> list[Delivery]:
        """At most `n` ready messages, in delivery order, with their failed attempts. Nothing is consumed."""
        return (self._transport.call(PeekMessages(self.name, n, self._universe))).messages

    def history(self, n: int = 1_000, *, after: str = "") -> MessageEvents:
        """At most `n` recorded changes of messages, in the order of their times.

        The queue's policy must have `history="durable"`, which records every change in the same commit, from then on.

        Args:
            n: up to 1,000.
            after: the `next` of the page before.

        Raises:
            InvalidArgument: the queue has no history.
        """
        return self._transport.call(ReadQueueHistory(self.name, after, n, self._universe))

    def leased(self, n: int = 100, *, after: str = "") -> list[LeasedMessage]:
        """At most `n` leased messages with their owners, attempts and expiries, in the order of the expiries.

        A lease that has expired is listed until a consumer or the sweeper has processed its expiry.

        Args:
            n: how many.
            after: the `lease_id` of the last message of the page before.
        """
        check_argument("n", n, int)
        found: list[LeasedMessage] = []
        at: str | None = after
        while at is not None and len(found) < n:
            limit = min(n - len(found), LEASED_LIST_MAX)
            page = self._transport.call(ListLeasedMessages(self.name, at, limit, self._universe))
            found += page.messages
            at = page.next
        return found

    def get(self, id: str) -> MessageInfo:
        """What is known about a message: its state, its failed attempts, who has it.

        Of a message that is done, something is known only if it was put with `keep_result` or acknowledged with a
        result, for `result_ttl_seconds` of the policy.

        Raises:
            MessageNotFound: there is no such message, and nothing is kept about it.
        """
        return self._transport.call(GetMessage(self.name, id, self._universe))

    def cancel(self, id: str) -> MessageInfo:
        """Cancel a message: it is not delivered any more. What is known about it then.

        If it is leased, its consumer is told, and its ack is refused with MessageCancelled. A message that is done,
        dead or cancelled stays as it is.

        Raises:
            MessageNotFound: there is no such message, and nothing is kept about it.
        """
        return self._transport.call(CancelMessage(self.name, id, self._universe))

    def search(
        self,
        *,
        states: Iterable[MessageState] = (),
        key: str | None = None,
        group: str | None = None,
        owner: str | None = None,
        error: str | None = None,
        tag: str | None = None,
        older_than_seconds: float | None = None,
        newer_than_seconds: float | None = None,
        after: str = "",
        limit: int = 100,
    ) -> FoundMessages:
        """Messages that match all filters, among the next 1,000 records of the queue.

        Dead letters of the queue are among them, and what is kept of messages that are done or cancelled. There is no
        index: a page may have no messages and still have a `next`. A message that changes its state between two pages
        may be found twice, or not at all.

        Args:
            states: ready, delayed, blocked, leased, dead, done or cancelled; without any, all.
            owner: the consumer that has the message leased.
            error: a part of the last error, in upper or lower case.
            after: the `next` of the page before.
            limit: up to 1,000.
        """
        wanted = list(checked_items(states, 'wrap it in a list: states=["dead"]'))
        request = SearchMessages(
            queue=self.name,
            states=wanted,
            key=key,
            group=group,
            owner=owner,
            error=error,
            tag=tag,
            older_than_seconds=older_than_seconds,
            newer_than_seconds=newer_than_seconds,
            after=after,
            limit=limit,
            universe=self._universe,
        )
        return self._transport.call(request)

    def cancel_many(self, ids: Iterable[str]) -> list[Outcome]:
        """Cancel up to 256 messages, as `cancel` does; an outcome for each, whose `code` is None if it is cancelled.

        The code `message_finished` is that of a message that is done or dead.
        """
        some = list(checked_items(ids, "wrap it in a list: cancel_many([id])"))
        return (self._transport.call(CancelMessages(self.name, some, self._universe))).outcomes

    def delete_messages(self, ids: Iterable[str]) -> list[Outcome]:
        """Delete up to 256 messages that are not leased, or dead letters; an outcome for each. Nothing of them stays.

        The code of an outcome is None, `message_leased`, `message_finished` or `message_not_found`.
        """
        some = list(checked_items(ids, "wrap it in a list: delete_messages([id])"))
        return (self._transport.call(DeleteMessages(self.name, some, self._universe))).outcomes

    def move(self, ids: Iterable[str], *, to: str) -> list[Outcome]:
        """Move up to 256 messages that are not leased, or dead letters, to another queue; an outcome for each.

        They keep their ids, payloads, attributes, failures, workflow states and delays. Dead letters are delivered
        again, with no failures counted. The code of an outcome is None, `message_leased`, `message_finished`,
        `message_key_taken` or `message_not_found`.

        Raises:
            InvalidArgument: `to` is this queue, or that of its dead letters.
        """
        some = list(checked_items(ids, "wrap it in a list: move([id], to=…)"))
        return (self._transport.call(MoveMessages(self.name, some, to, self._universe))).outcomes

    def wait_for_cancel(self, messages: Iterable[Message], *, wait_seconds: float) -> list[Message]:
        """Wait until one of up to 256 received messages is cancelled, and mark those that are `cancelled`.

        Returns them; none if `wait_seconds` pass without a cancel. Workers do this by themselves.
        """
        some = self._checked_messages(messages)
        request = WaitForCancel(self.name, [message.lease for message in some], wait_seconds, self._universe)
        outcomes = (self._transport.call(request)).outcomes
        cancelled: list[Message] = []
        for message, outcome in zip(some, outcomes, strict=True):
            if outcome.code == MessageCancelled.code:  # A lease that ended otherwise may just have been settled.
                message.mark_refused(outcome.code)
                cancelled.append(message)
        return cancelled

    def update(self, id: str, *, priority: int | None = None, delay_seconds: float | None = None) -> MessageInfo:
        """Change the priority of a message that is not leased, or hold it back from now on; `delay_seconds=0`: no more.

        Raises:
            MessageLeased: a consumer has it.
            MessageFinished: it is done, dead or cancelled.
            MessageNotFound: there is no such message.
        """
        return self._transport.call(UpdateMessage(self.name, id, priority, delay_seconds, self._universe))

    def result(self, id: str, *, wait_seconds: float = 0.0) -> Any:
        """The result that a message was acknowledged with, as soon as it is done: from JSON, or bytes; None if none.

        Raises:
            ResultNotReady: it is not done within `wait_seconds`.
            MessageFailed: it is a dead letter; the error has its last failure.
            MessageCancelled: it was cancelled.
            ResultNotKept: it is not in the queue any more, and no result was kept.
        """
        return read_result(self._transport, self._universe, self.name, id, wait_seconds=wait_seconds)

    def pause_key(self, key: str, until: float | datetime) -> KeyInfo:
        """Deliver no message of a key for this many seconds, or until a moment. A handler that meets a limit of its
        peer calls this, for example with the seconds of a Retry-After.
        """
        if isinstance(until, datetime):
            return self._transport.call(
                PauseKey(self.name, key, round(until.timestamp() * 1_000), None, self._universe)
            )
        return self._transport.call(PauseKey(self.name, key, None, until, self._universe))

    def resume_key(self, key: str) -> KeyInfo:
        """Deliver messages of a paused key again."""
        return self._transport.call(PauseKey(self.name, key, None, 0.0, self._universe))

    def key(self, key: str) -> KeyInfo:
        """How many messages of a key are ready, blocked and leased, and until when it is paused."""
        return self._transport.call(GetKey(self.name, key, self._universe))

    def delete(self, *, force: bool = False) -> int:
        """Remove the queue: its messages, policy, schedules and counters. Returns how many messages it had.

        Waiting consumers keep waiting: the next put creates the queue again. Its dead letters are a queue of their own
        and stay. A deletion that was interrupted can be repeated. With `force`, leased messages are removed too, and
        their consumers cannot settle them.

        Raises:
            QueueInUse: messages are leased, and `force` is not set.
        """
        return (self._transport.call(DeleteQueue(self.name, force, self._universe))).count

    def purge(self, *, leased: bool = False) -> int:
        """Remove every message that is not leased; how many there were.

        With `leased`, those are removed too, and their consumers cannot settle them.
        """
        return (self._transport.call(PurgeQueue(self.name, self._universe, leased))).count

    def pause(self) -> None:
        """Deliver nothing until `resume`; puts are still accepted."""
        self._transport.call(PauseQueue(self.name, True, self._universe))

    def resume(self) -> None:
        """Deliver again."""
        self._transport.call(PauseQueue(self.name, False, self._universe))

    def policy(self) -> QueuePolicy:
        """The defaults for messages that do not override them."""
        return self._transport.call(GetQueuePolicy(self.name, self._universe))

    def set_policy(self, policy: QueuePolicy) -> QueuePolicy:
        """Set the policy for messages that are put and delivered from now on."""
        return self._transport.call(SetQueuePolicy(self.name, policy, self._universe))

    def dead_letters(self, n: int = 100) -> list[Delivery]:
        """At most `n` dead letters of this queue, with the last error and the failed attempts of each."""
        policy = self.policy()
        peek = PeekMessages(policy.dead_letter_queue or f"{self.name}.dlq", n, self._universe)
        return [letter for letter in (self._transport.call(peek)).messages if letter.origin == self.name]

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int = 1_000) -> int:
        """Put dead letters back into this queue, the given ones or up to `limit`; how many there were."""
        some = None if ids is None else list(checked_items(ids, "wrap it in a list: redrive([id])"))
        return (self._transport.call(RedriveMessages(self.name, some, limit, self._universe))).count

    def schedule(
        self, name: str, cron: str, body: Any, *, timezone: str = "UTC", **options: Unpack[MessageOptions]
    ) -> Schedule:
        """Put `body` at the times of a cron expression; replaces a schedule of the same name."""
        message = new_message(body, **options)
        return self._transport.call(SetSchedule(self.name, name, cron, message, timezone, self._universe))

    def unschedule(self, name: str) -> bool:
        """Remove a schedule; whether it existed."""
        return bool((self._transport.call(RemoveSchedule(self.name, name, self._universe))).count)

    def schedules(self) -> list[Schedule]:
        """The schedules of this queue, with the next time of each."""
        return (self._transport.call(ListSchedules(self.name, self._universe))).schedules

    def _checked_messages(self, messages: Iterable[Message]) -> list[Message]:
        """The messages, if all of them were received from this queue."""
        if isinstance(messages, Message):
            raise InvalidArgument("This is one message, not a list; pass a list, or call its own method")
        some = list(checked_items(messages, "pass what receive_many returned"))
        name, universe = self.name, self._universe
        for message in some:
            if not isinstance(message, Message):
                raise InvalidArgument(f"{message!r} is not a received message; pass what receive_many returned")
            if message.queue != name or message.universe != universe:
                raise InvalidArgument(
                    f"Message {message.id} is from queue {message.queue} of {message.universe}, not from "
                    f"{self.name} of {self._universe}; settle it with its own queue"
                )
        return some

    def _settle_many(self, messages: list[Message], alone: list[Message], request: Request[Outcomes]) -> None:
        """Mark each message by its outcome, then raise if there was an error. Those that are not `alone` are packed."""
        answer = self._transport.call(request)
        lost, errors = list[Message](), list[FastnessError]()
        if len(alone) < len(messages):
            lost += mark_acked(messages, answer.refused)
        by_lease = dict(zip(_leases(alone), answer.outcomes, strict=True))
        for message in alone:
            outcome = by_lease[message.lease]
            if outcome.expires_ms:
                message.expires_ms = outcome.expires_ms
            elif outcome.code is None:
                message.mark_settled()
            elif outcome.code in LOST_CODES:
                message.mark_refused(outcome.code)
                lost.append(message)
            else:
                errors.append(rebuild(outcome.code, outcome.detail or outcome.code))
        if lost and len(messages) == 1:
            errors.append(message_cancelled(lost[0].id) if lost[0].cancelled else lease_mismatch(lost[0].lease))
        if errors:
            raise errors[0]
        if lost:
            raise QueueMessageLeaseMismatch(
                f"{len(lost)} of {len(messages)} messages are not leased any more; stop working on them, because they "
                f"were settled, or are delivered again: {', '.join([message.id for message in lost])}"
            )

    def _put(self, messages: list[NewMessage], tier: Tier) -> list[PutReceipt]:
        stored = stored_messages(self._transport, self._universe, messages)
        answer = self._transport.call(PutMessages(self.name, stored, self._universe, tier=tier))
        return [bound_receipt(self._source, receipt) for receipt in answer.receipts]


def stored_messages(transport: Transport, universe: str, messages: Iterable[NewMessage]) -> list[NewMessage]:
    """The messages, with large payloads stored as blobs."""
    stored = []
    for message in messages:
        if len(message.payload) > PAYLOAD_INLINE_BYTES_MAX:
            blob = transport.call(PutBlob(message.payload, universe, pinned=False))
            size = len(message.payload)
            stored.append(msgspec.structs.replace(message, payload=b"", blob=blob.hash, blob_size=size))
        else:
            stored.append(message)
    return stored


def _unsettled(messages: list[Message]) -> list[Message]:
    """Those that the caller has to settle."""
    return [message for message in messages if not message.settled and not message.lost]


def _leases(messages: list[Message]) -> list[MessageLease]:
    """The leases of messages, each once."""
    return list(dict.fromkeys(message.lease for message in messages))


def payload_of(body: Any) -> tuple[bytes, str]:
    """A body as bytes, and their content type.

    Raises:
        InvalidValue: it is neither bytes nor a value that JSON has.
    """
    if body.__class__ is bytes:
        return body, _BYTES
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), _BYTES
    return encode_json(body), _JSON
