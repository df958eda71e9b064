"""Handlers of queue requests. A batch is answered item by item; a failed item does not affect the others."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from fastness.errors import BatchTooLarge, EmptyBatch, FastnessError, Fenced, InvalidArgument
from fastness.kv import Transaction
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import QueueKey
from fastness.layers.queues.failures import Reported
from fastness.limits import (
    MESSAGES_MAX,
    RECEIVE_WAIT_SECONDS_MAX,
)
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.queues import (
    AckMessages,
    CancelMessage,
    CancelMessages,
    ChangeVisibility,
    CheckMessages,
    DeleteMessages,
    DeleteQueue,
    Deliveries,
    ExtendMessages,
    FoundMessages,
    GetKey,
    GetMessage,
    GetQueuePolicy,
    GetQueueStats,
    GetResult,
    KeyInfo,
    LeasedMessages,
    ListLeasedMessages,
    ListQueues,
    ListSchedules,
    MessageEvents,
    MessageInfo,
    MessageLease,
    MessageResult,
    Moved,
    MoveMessages,
    NackMessages,
    Outcome,
    Outcomes,
    PauseKey,
    PauseQueue,
    PeekMessages,
    PurgeQueue,
    PutMessages,
    QueueNames,
    QueuePolicy,
    QueueStats,
    QueueSurvey,
    ReadQueueHistory,
    Receipts,
    ReceiveMessages,
    RedriveMessages,
    RejectMessages,
    RemoveSchedule,
    Schedule,
    Schedules,
    SearchMessages,
    SetQueuePolicy,
    SetSchedule,
    SurveyQueues,
    UpdateMessage,
    WaitForCancel,
    outcome_of,
)
from fastness.wire.stored_messages import StoredMessage


@transaction
def put(tx: Transaction, request: PutMessages) -> Receipts:
    receipts = queues.put(tx, queue_key(request), request.messages, tier=request.tier, must_exist=request.must_exist)
    return Receipts(receipts)


@service
def receive(stores: AnyStores, request: ReceiveMessages, call: KeyedCall | None = None) -> Served[Deliveries]:
    if request.acks:
        _check_count(sum([each.mask.bit_count() for each in request.acks]))
    seconds = request.visibility_seconds
    return stores.queues.receive(
        queue_key(request),
        wait_ms=round(request.wait_seconds * 1_000),
        tier=request.tier,
        owner=request.owner,
        limit=request.max_messages,
        visibility_ms=None if seconds is None else round(seconds * 1_000),
        with_state=request.with_state,
        txn_id=request.txn_id,
        call=call,
        packed=request.packed,
        acks=request.acks,
        must_exist=request.must_exist,
    )


@transaction
def ack(tx: Transaction, request: AckMessages) -> Outcomes:
    _check_count(len(request.leases) + sum([each.mask.bit_count() for each in request.packed]))
    refused = queues.ack_packed(tx, queue_key(request), request.packed) if request.packed else []
    if len(request.results) > len(request.leases):
        raise InvalidArgument(f"{len(request.results)} results for {len(request.leases)} leases; give one for each")
    outcomes: list[str | FastnessError] = []
    if request.leases:
        outcomes = queues.ack_many(tx, queue_key(request), request.leases, request.results, late=request.late)
    return Outcomes(
        [outcome_of(each) if isinstance(each, FastnessError) else Outcome(None, None, 0, each) for each in outcomes],
        refused,
    )


@transaction
def nack(tx: Transaction, request: NackMessages) -> Outcomes:
    settle = partial(
        queues.nack,
        tx,
        queue_key(request),
        delay_seconds=request.delay_seconds,
        counts=request.intent == "failure",
        **_reported(request),
    )
    return _each(request.leases, settle)


@transaction
def reject(tx: Transaction, request: RejectMessages) -> Outcomes:
    return _each(request.leases, partial(queues.reject, tx, queue_key(request), **_reported(request)))


def _reported(request: NackMessages | RejectMessages) -> Reported:
    return Reported(error=request.error, error_type=request.error_type, traceback=request.traceback)


@transaction
def extend(tx: Transaction, request: ExtendMessages) -> Outcomes:
    return _leased(queues.extend_many(tx, queue_key(request), request.leases, by_ms=round(request.seconds * 1_000)))


@transaction
def change_visibility(tx: Transaction, request: ChangeVisibility) -> Outcomes:
    answers = queues.change_visibility(tx, queue_key(request), request.changes, late_owner=request.late_owner)
    return _leased(answers)


@transaction
def check(tx: Transaction, request: CheckMessages) -> Outcomes:
    return _each(request.leases, partial(queues.check, tx, queue_key(request)))


@service
def get(stores: AnyStores, request: GetMessage) -> Served[MessageInfo]:
    return stores.stale_queues.get(queue_key(request), request.id, request.tier)


@service
def cancel(stores: AnyStores, request: CancelMessage) -> Served[MessageInfo]:
    return stores.queues.cancel(queue_key(request), request.id, request.tier)


@transaction
def search(tx: Transaction, request: SearchMessages) -> FoundMessages:
    return queues.search_messages(tx, queue_key(request), request)


@service
def cancel_many(stores: AnyStores, request: CancelMessages) -> Served[Outcomes]:
    return stores.queues.cancel_many(queue_key(request), request.ids, request.tier)


@transaction
def delete_messages(tx: Transaction, request: DeleteMessages) -> Outcomes:
    return Outcomes(list(map(outcome_of, queues.delete_messages(tx, queue_key(request), request.ids))))


@transaction
def move_messages(tx: Transaction, request: MoveMessages) -> Outcomes:
    target = QueueKey(request.universe, request.to)
    return Outcomes(list(map(outcome_of, queues.move_messages(tx, queue_key(request), request.ids, to=target))))


@transaction
def update(tx: Transaction, request: UpdateMessage) -> MessageInfo:
    return queues.update(
        tx, queue_key(request), request.id, priority=request.priority, delay_seconds=request.delay_seconds
    )


@service
def result(stores: AnyStores, request: GetResult) -> Served[MessageResult]:
    seconds = request.wait_seconds
    if seconds > RECEIVE_WAIT_SECONDS_MAX:  # Not declared: a server waits for its own `wait_seconds_max` at most.
        raise InvalidArgument(f"wait_seconds is {seconds}; give 0 to {RECEIVE_WAIT_SECONDS_MAX:.0f}")
    return stores.queues.result(queue_key(request), request.id, wait_ms=round(seconds * 1_000), tier=request.tier)


@service
def wait_for_cancel(stores: AnyStores, request: WaitForCancel) -> Served[Outcomes]:
    return stores.queues.wait_for_cancel(
        queue_key(request), request.leases, wait_ms=round(request.wait_seconds * 1_000), tier=request.tier
    )


@transaction
def get_key(tx: Transaction, request: GetKey) -> KeyInfo:
    return queues.key_info(tx, queue_key(request), request.key)


@transaction
def pause_key(tx: Transaction, request: PauseKey) -> KeyInfo:
    if request.until_ms is not None and request.seconds is not None:
        raise InvalidArgument("The pause has both until_ms and seconds; leave one of them out")
    until_ms = request.until_ms or 0
    if request.seconds is not None:
        until_ms = tx.now_ms + round(request.seconds * 1_000)
    return queues.pause_key(tx, queue_key(request), request.key, until_ms=until_ms)


@transaction
def peek(tx: Transaction, request: PeekMessages) -> Deliveries:
    queue = queue_key(request)
    messages = queues.peek(tx, queue, limit=request.limit)
    failures = queues.failures_of(tx, queue, messages)
    return Deliveries([queues.delivery_of(message, failures=failures.get(message.id)) for message in messages])


@transaction
def read_history(tx: Transaction, request: ReadQueueHistory) -> MessageEvents:
    return queues.read_history(tx, queue_key(request), after=request.after, limit=request.limit)


@transaction
def leased(tx: Transaction, request: ListLeasedMessages) -> LeasedMessages:
    return queues.leased(tx, queue_key(request), after=request.after, limit=request.limit)


@service
def stats(stores: AnyStores, request: GetQueueStats) -> Served[QueueStats]:
    return stores.stale_queues.stats(queue_key(request), request.tier, must_exist=request.must_exist)


@transaction
def names(tx: Transaction, request: ListQueues) -> QueueNames:
    return QueueNames(queues.names(tx, request.universe, after=request.after, limit=request.limit, only=request.only))


@service
def survey(stores: AnyStores, request: SurveyQueues) -> Served[QueueSurvey]:
    return stores.stale_queues.survey(
        request.universe,
        after=request.after,
        limit=request.limit,
        text=request.text,
        tier=request.tier,
        only=request.only,
    )


@service
def purge(stores: AnyStores, request: PurgeQueue, call: KeyedCall | None = None) -> Served[Moved]:
    return stores.queues.run_work(queue_key(request), partial(queues.purge_step, leased=request.leased), call)


@service
def delete(stores: AnyStores, request: DeleteQueue, call: KeyedCall | None = None) -> Served[Moved]:
    return stores.queues.run_work(queue_key(request), partial(queues.delete_step, force=request.force), call)


@service
def redrive(stores: AnyStores, request: RedriveMessages, call: KeyedCall | None = None) -> Served[Moved]:
    step = partial(queues.redrive_step, ids=request.ids, limit=request.limit)
    return stores.queues.run_work(queue_key(request), step, call)


@transaction
def get_policy(tx: Transaction, request: GetQueuePolicy) -> QueuePolicy:
    return queues.policy_of(tx, queue_key(request))


@transaction
def set_policy(tx: Transaction, request: SetQueuePolicy) -> QueuePolicy:
    return queues.set_policy(tx, queue_key(request), request.policy)


@transaction
def pause(tx: Transaction, request: PauseQueue) -> QueuePolicy:
    queue = queue_key(request)
    policy = msgspec.structs.replace(queues.policy_of(tx, queue), paused=request.paused)
    return queues.set_policy(tx, queue, policy)


@transaction
def set_schedule(tx: Transaction, request: SetSchedule) -> Schedule:
    return queues.set_schedule(
        tx,
        queue_key(request),
        request.name,
        cron=request.cron,
        timezone=request.timezone,
        message=request.message,
    )


@transaction
def remove_schedule(tx: Transaction, request: RemoveSchedule) -> Moved:
    return Moved(int(queues.remove_schedule(tx, queue_key(request), request.name)))


@transaction
def list_schedules(tx: Transaction, request: ListSchedules) -> Schedules:
    return Schedules(queues.schedules_of(tx, queue_key(request)))


def _each(leases: list[MessageLease], settle: Callable[[MessageLease], str | None]) -> Outcomes:
    """Settle every message of a batch. The layer checks before it writes, so a failed item has written nothing."""
    return Outcomes([_outcome(settle, lease) for lease in leases])


def _check_count(messages: int) -> None:
    """Check how many messages are acknowledged. No field has all of them."""
    if not messages:
        raise EmptyBatch("The batch has no messages; name at least one")
    if messages > MESSAGES_MAX:
        raise BatchTooLarge(f"One batch has at most {MESSAGES_MAX} messages, not {messages}; split it")


def _outcome(settle: Callable[[MessageLease], str | None], lease: MessageLease) -> Outcome:
    try:
        return Outcome(correlation_id=settle(lease))
    except (Fenced, InvalidArgument) as error:
        return outcome_of(error)


def _leased(messages: list[StoredMessage | FastnessError]) -> Outcomes:
    """When the leases of messages end, or why they were refused. One that is not leased any more has no end."""
    return Outcomes(
        [
            outcome_of(each)
            if isinstance(each, FastnessError)
            else Outcome(expires_ms=each.due_ms if each.lease_ref else 0, correlation_id=each.correlation_id)
            for each in messages
        ]
    )


class _OfQueue(Protocol):
    @property
    def queue(self) -> str: ...

    @property
    def universe(self) -> str: ...


def queue_key(request: _OfQueue) -> QueueKey:
    """The queue of a request."""
    return QueueKey(request.universe, request.queue)
