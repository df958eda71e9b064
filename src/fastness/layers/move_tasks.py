"""Move tasks: they move the messages of a dead-letter queue to another queue, or back to where they come from.

    (u, universe, "sqs-tasks", source, id)       ->  the task; the newest MOVE_TASKS_LISTED_MAX of a queue are kept
    (u, universe, "sqs-work", source, "move")    ->  that one is running (`queues/work.py`): at most one per source

    start ──► RUNNING ── the last message ──► COMPLETED
                 │  └─── a message has nowhere to go ──► FAILED
                 └ cancel ──► CANCELLING ── the next step ──► CANCELLED

A task passes once over the ready messages of its source, in their order. It moves those that were there when it
started, so a message that fails again at once does not come around for ever. Each step moves a few in the commit that
stores how far the task has come: after a crash, or on another node, the next step continues exactly there.

A moved message is a new one: with a new id, counted from zero, and kept as long as its new queue says. One that has job
options or a workflow state keeps its id, because its result and its state are found by it.
"""

import uuid
from typing import Final

import msgspec

from fastness.errors import (
    InvalidArgument,
    InvalidName,
    MoveTaskNotFound,
    MoveTaskNotRunning,
    MoveTaskRunning,
    NotDeadLetterQueue,
)
from fastness.kv import Transaction
from fastness.layers import queues, sqs
from fastness.layers.queues import QueueKey, Work, WorkKey, keys_of
from fastness.layers.queues import work as work_list
from fastness.layers.queues.by_id import WaitingMessage
from fastness.layers.queues.counters import QueueTransaction, total_counters
from fastness.layers.queues.work import SqsWorkAdded, tasks_of
from fastness.layers.sqs_attributes import is_fifo
from fastness.limits import MOVE_TASK_BATCH, MOVE_TASK_SCAN, MOVE_TASKS_LISTED_MAX
from fastness.names import checked_queue_name
from fastness.wire.sqs import MoveStatus, MoveTask, MoveTasks
from fastness.wire.stored_messages import StoredMessage, decode, format_id

_NO_SOURCE: Final = "CouldNotDetermineMessageSource"  # The message was sent to the dead-letter queue itself.
_NO_QUEUE: Final = "AWS.SimpleQueueService.NonExistentQueue"
_STEPS_PER_SECOND: Final = 10  # Of a task with a rate.


class StoredTask(msgspec.Struct, array_like=True):
    """A task as it is stored. Not frozen: a step changes it and writes it once."""

    status: MoveStatus
    destination: str | None
    per_second: int | None
    to_move: int
    started_ms: int
    moved: int = 0
    reason: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredTask).decode


def start(tx: Transaction, source: QueueKey, *, destination: str | None, per_second: int | None) -> MoveTask:
    """Start a task that moves the messages of a dead-letter queue.

    Raises:
        QueueNotFound: the source or the destination does not exist.
        NotDeadLetterQueue: no queue has the source as its dead-letter queue.
        MoveTaskRunning: another task moves its messages.
        InvalidArgument: the rate is out of range, or the queues are the same, or not of the same type.
    """
    sqs.require(tx, source)
    if destination is not None:
        target = QueueKey(source.universe, destination)
        sqs.require(tx, target)
        if target == source:
            raise InvalidArgument(f"{source.name} is both source and destination; name another destination, or none")
        if is_fifo(target.name) != is_fifo(source.name):
            raise InvalidArgument(
                "The source queue and destination queue must be of the same queue type; "
                f"{source.name} and {target.name} are not"
            )
    if not _is_dead_letter_queue(tx, source):
        raise NotDeadLetterQueue("Source queue must be configured as a Dead Letter Queue.")
    key = WorkKey(*source, "move")
    if work_list.find(tx, key) is not None:
        raise MoveTaskRunning(
            "There is already a task running. Only one active task is allowed for a source queue arn at a given time."
        )
    counters = total_counters(tx, keys_of(source))
    to_move = max(counters.ready_total() + counters.blocked, 0)
    task, id = StoredTask("RUNNING", destination, per_second, to_move, tx.now_ms), tx.new_id().bytes
    earlier = tx.scan(*tasks_of(*source).range(), limit=MOVE_TASKS_LISTED_MAX + 1)
    for each, _ in earlier[: max(len(earlier) + 1 - MOVE_TASKS_LISTED_MAX, 0)]:
        tx.delete(each)
    _save(tx, source, id, task)
    work_list.save(tx, key, Work(tx.now_ms, task=id))
    tx.emit(SqsWorkAdded())
    return _task(source, id, task)


def newest(tx: Transaction, source: QueueKey, *, limit: int) -> MoveTasks:
    """The newest tasks of a queue, the newest first.

    Raises:
        QueueNotFound: it does not exist.
        InvalidArgument: `limit` is out of range.
    """
    sqs.require(tx, source)
    area = tasks_of(*source)
    pairs = tx.scan(*area.range(), limit=limit, reverse=True)
    return MoveTasks([_task(source, area.unpack(key)[0], _decode(value)) for key, value in pairs])


def cancel(tx: Transaction, universe: str, handle: str) -> MoveTask:
    """Stop a task before its next step.

    Raises:
        InvalidArgument: it is not the handle of a task.
        QueueNotFound: its queue does not exist.
        MoveTaskNotFound: there is no such task.
        MoveTaskNotRunning: it has ended, or was cancelled.
    """
    name, _, text = handle.partition("/")
    try:
        source, id = QueueKey(universe, checked_queue_name("queue", name)), uuid.UUID(hex=text).bytes
    except (ValueError, InvalidArgument, InvalidName):
        raise InvalidArgument("Value for parameter TaskHandle is invalid.") from None
    sqs.require(tx, source)
    stored = tx.get(tasks_of(*source).key(id))
    if stored is None:
        raise MoveTaskNotFound("Task does not exist.")
    task = _decode(stored)
    if task.status != "RUNNING":
        raise MoveTaskNotRunning(f"Only active tasks can be cancelled. The status of this one is {task.status}.")
    task.status = "CANCELLING"
    _save(tx, source, id, task)
    work_list.save(tx, WorkKey(*source, "move"), Work(tx.now_ms, task=id))  # The next step need not wait.
    tx.emit(SqsWorkAdded())
    return _task(source, id, task)


def step(tx: Transaction, source: QueueKey, work: Work) -> int | None:
    """Move the next messages of the running task of a queue; in how many milliseconds its rate allows the next step."""
    stored = tx.get(tasks_of(*source).key(work.task))
    if stored is None:
        return None
    task = _decode(stored)
    if task.status == "RUNNING":
        if wait_ms := _rate_wait_ms(tx, work):
            return wait_ms
        _move_batch(tx, source, task, work)
    else:
        task.status = "CANCELLED"
    _save(tx, source, work.task, task)
    return _rate_wait_ms(tx, work) if task.status == "RUNNING" else None


def _move_batch(tx: Transaction, source: QueueKey, task: StoredTask, work: Work) -> None:
    """Move a batch, and end the task if there are no more messages, or one cannot be moved."""
    if not queues.exists(tx, keys_of(source)):
        task.status, task.reason = "FAILED", _NO_QUEUE
        return
    size = MOVE_TASK_BATCH
    if task.per_second is not None:
        size = min(size, max(task.per_second // _STEPS_PER_SECOND, 1))
    begin, end = keys_of(source).ready_range()
    pairs = tx.scan(work.after + b"\x00" if work.after else begin, end, limit=MOVE_TASK_SCAN)
    if not pairs:
        task.status = "COMPLETED"
        return
    moves, before = _Moves(tx, source), task.moved
    for key, value in pairs:
        message = decode(value)
        if max(message.died_ms, message.created_ms) <= task.started_ms:
            name = message.origin if task.destination is None else task.destination
            target = None if name is None else QueueKey(source.universe, name)
            if target is None or not queues.exists(tx, keys_of(target)):
                task.status, task.reason = "FAILED", _NO_SOURCE if target is None else _NO_QUEUE
                break
            task.moved += moves.move(message, key, target)
        work.after = key
        if task.moved - before == size:
            break
    moves.save()
    if task.per_second is not None and task.moved > before:
        work.due_ms = tx.now_ms + -(-(task.moved - before) * 1_000 // task.per_second)


class _Moves:
    """The queues that one step writes to."""

    def __init__(self, tx: Transaction, source: QueueKey) -> None:
        self._tx = tx
        self._source = source
        self._open: dict[QueueKey, QueueTransaction] = {}

    def move(self, message: StoredMessage, key: bytes, target: QueueKey) -> bool:
        """Move a ready message; False if it stays, because another message of its new queue has its unique key."""
        if message.job is None and message.origin_job is None and not message.stateful:
            found = WaitingMessage(message, "ready", key)
            queues.move_as_new(self._at(self._source), self._at(target), found)
            return True
        self.save()  # What follows reads and writes the counters of both queues.
        if target == queues.dead_letter_queue(self._source, queues.policy_of(self._tx, self._source)):
            return False
        return queues.move_messages(self._tx, self._source, [format_id(message.id)], to=target) == [None]

    def save(self) -> None:
        """Write the counters."""
        for queue_tx in self._open.values():
            queue_tx.save()
        self._open = {}

    def _at(self, queue: QueueKey) -> QueueTransaction:
        found = self._open.get(queue)
        if found is None:
            found = self._open[queue] = QueueTransaction(self._tx, queue)
        return found


def _is_dead_letter_queue(tx: Transaction, queue: QueueKey) -> bool:
    after: str | None = ""
    found: list[str] = []
    while not found and after is not None:
        found, after = queues.dead_letter_sources(tx, queue, after=after, limit=MOVE_TASK_SCAN)
    return bool(found)


def _rate_wait_ms(tx: Transaction, work: Work) -> int:
    """In how many milliseconds the rate of a task allows the next step."""
    wait_ms = work.due_ms - tx.now_ms
    return max(wait_ms, 0) if wait_ms <= 1_000 else 0  # More: the clock was set back.


def _task(source: QueueKey, id: bytes, task: StoredTask) -> MoveTask:
    return MoveTask(handle=f"{source.name}/{id.hex()}", source=source.name, **msgspec.structs.asdict(task))


def _save(tx: Transaction, source: QueueKey, id: bytes, task: StoredTask) -> None:
    tx.put(tasks_of(*source).key(id), _encode(task))
