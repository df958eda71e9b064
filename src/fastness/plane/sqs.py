"""Handlers of requests for SQS queues and move tasks."""

from fastness.kv import Transaction
from fastness.layers import move_tasks, sqs, sqs_attributes
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import QueueKey, WorkKey
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.sqs import (
    CancelMoveTask,
    CreateSqsQueue,
    DeleteSqsQueue,
    GetSqsQueue,
    GetSqsSettings,
    ListMoveTasks,
    ListSqsQueues,
    ListSqsSources,
    MoveTask,
    MoveTasks,
    Purged,
    PurgeSqsQueue,
    SetSqsAttributes,
    SqsQueue,
    SqsQueueNames,
    SqsSettings,
    StartMoveTask,
    TagSqsQueue,
    UntagSqsQueue,
)


@transaction
def create(tx: Transaction, request: CreateSqsQueue) -> SqsQueue:
    queue = QueueKey(request.universe, sqs_attributes.checked_new_name(request.name))
    return sqs.create(tx, queue, request.attributes, request.tags)


@transaction
def get(tx: Transaction, request: GetSqsQueue) -> SqsQueue:
    return sqs.get(tx, QueueKey(request.universe, request.name), arn_prefix=request.arn_prefix)


@transaction
def get_settings(tx: Transaction, request: GetSqsSettings) -> SqsSettings:
    return sqs.settings(tx, QueueKey(request.universe, request.name))


@transaction
def list_queues(tx: Transaction, request: ListSqsQueues) -> SqsQueueNames:
    universe = request.universe
    return sqs.names(tx, universe, prefix=request.prefix, after=request.after, limit=request.limit, only=request.only)


@transaction
def set_attributes(tx: Transaction, request: SetSqsAttributes) -> SqsQueue:
    queue = QueueKey(request.universe, request.name)
    return sqs.set_attributes(tx, queue, request.attributes, if_policy=request.if_policy)


@transaction
def tag(tx: Transaction, request: TagSqsQueue) -> SqsQueue:
    return sqs.tag(tx, QueueKey(request.universe, request.name), request.tags)


@transaction
def untag(tx: Transaction, request: UntagSqsQueue) -> SqsQueue:
    return sqs.untag(tx, QueueKey(request.universe, request.name), request.keys)


@transaction
def list_sources(tx: Transaction, request: ListSqsSources) -> SqsQueueNames:
    queue = QueueKey(request.universe, request.name)
    return sqs.sources(tx, queue, after=request.after, limit=request.limit, only=request.only)


@service
def delete(stores: AnyStores, request: DeleteSqsQueue, call: KeyedCall | None = None) -> Served[Purged]:
    key = WorkKey(*QueueKey(request.universe, request.name), "delete")
    return stores.queues.begin_work(key, sqs.begin_delete, sqs.delete_step, request.tier, call)


@service
def purge(stores: AnyStores, request: PurgeSqsQueue, call: KeyedCall | None = None) -> Served[Purged]:
    key = WorkKey(*QueueKey(request.universe, request.name), "purge")
    return stores.queues.begin_work(key, sqs.begin_purge, sqs.purge_step, request.tier, call)


@transaction
def start_move(tx: Transaction, request: StartMoveTask) -> MoveTask:
    source = QueueKey(request.universe, request.source)
    return move_tasks.start(tx, source, destination=request.destination, per_second=request.per_second)


@transaction
def list_moves(tx: Transaction, request: ListMoveTasks) -> MoveTasks:
    return move_tasks.newest(tx, QueueKey(request.universe, request.source), limit=request.limit)


@transaction
def cancel_move(tx: Transaction, request: CancelMoveTask) -> MoveTask:
    return move_tasks.cancel(tx, request.universe, request.handle)
