"""Generated from handles/task_runs.py by tools/make_twins.py; change that file instead."""

import logging
import random
import time
from typing import Any, Final
from uuid import uuid4

import msgspec

from fastness.errors import CasMismatch, FastnessError, InvalidArgument, QueueMessageLeaseMismatch, RetryAdvice
from fastness.handles.sync.atomic import Atomic
from fastness.handles.sync.messages import Message
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.receipts import MessageSource, PutReceipt, bound_receipt
from fastness.handles.task_control import Reject, RetryLater, TaskDeferred
from fastness.handles.task_flow import (
    NO_RESULT,
    FindTask,
    RunnableTask,
    Started,
    decoded_body,
    results_of,
    start,
    with_result,
)
from fastness.limits import TASK_DEFER_SECONDS, TASK_JOIN_ATTEMPTS_MAX, TASK_JOIN_PAUSE_SECONDS_MAX
from fastness.wire.tasks import GroupDocument, Join, Step, TaskMessage

_log = logging.getLogger("fastness.tasks")
_NO_BODY: Final = TaskMessage("")


def put_started(plane: Plane, started: Started) -> list[PutReceipt]:
    """Put the first messages of a chain in one commit; their receipts, in order."""
    if len(started.messages) == 1 and not started.groups:
        queue, message = started.messages[0]
        return plane.queue(queue).put_many([message])
    answers = _add_started(plane, plane.atomic(), started).commit()
    receipts: list[PutReceipt] = []
    for (queue, _), answer in zip(started.messages, answers, strict=False):  # The answers of the groups follow.
        source = MessageSource(plane._transport, plane.universe, queue)
        receipts += [bound_receipt(source, each) for each in answer.receipts]
    return receipts


def run_message(plane: Plane, message: Message, find_task: FindTask) -> None:
    """Run the task of a message. If it has no result and nothing follows, the caller acknowledges the message.

    Raises:
        Exception: the attempt has failed, with the task's own error, or its message could not be settled. Where the
            message is not marked as settled, the caller nacks it.
    """
    body = _NO_BODY
    try:
        body = decoded_body(message.read())
        task = find_task(body.task)
        args, kwargs = _checked_arguments(task, body)
        result = task.run(message, args, kwargs)
    except TaskDeferred:
        if not message.settled:
            _defer(message)
        return
    except Exception as error:
        _fail(plane, message, body, error, find_task)
        raise
    try:
        _finish(plane, message, body, result, find_task)
    except QueueMessageLeaseMismatch as error:
        message.mark_refused(error.code)
        raise
    except Exception as error:
        if isinstance(error, FastnessError) and error.retry is not RetryAdvice.NEVER:
            _defer(message)  # The task has not failed.
        else:
            _fail(plane, message, body, error, find_task)
        raise


def _checked_arguments(task: RunnableTask, body: TaskMessage) -> tuple[list[Any], dict[str, Any]]:
    try:
        return task.received(body.args, body.kwargs)
    except InvalidArgument as error:
        raise Reject(str(error)) from None


def _finish(plane: Plane, message: Message, body: TaskMessage, result: Any, find_task: FindTask) -> None:
    """Settle the message of a task that has returned, in the commit that starts what follows."""
    kept = None if body.drops_result else result
    if body.then:
        started = _start(body.then, find_task, message.correlation_id, result=_json_form(result), join=body.join)
        atomic = plane.atomic().check(message).ack(message, result=kept)
        _add_started(plane, atomic, started).commit()
    elif body.join is not None:
        _finish_member(plane, message, body, result, find_task)
    elif kept is not None:
        message.ack(result=kept)


def _finish_member(plane: Plane, message: Message, body: TaskMessage, result: Any, find_task: FindTask) -> None:
    """Acknowledge the last step of a member of a group, and add its result to the group in the same commit.

    Members that finish at the same time write the same document: all but one of them read it again.
    """
    assert body.join is not None
    kept = None if body.drops_result else result
    for attempt in range(TASK_JOIN_ATTEMPTS_MAX):
        atomic = plane.atomic().check(message).ack(message, result=kept)
        _add_result(plane, atomic, body.join, _json_form(result), find_task)
        try:
            atomic.commit()
            return
        except CasMismatch:
            if attempt == TASK_JOIN_ATTEMPTS_MAX - 1:
                raise
        time.sleep(random.uniform(0, min(0.001 * 2**attempt, TASK_JOIN_PAUSE_SECONDS_MAX)))


def _add_result(plane: Plane, atomic: Atomic, join: Join, result: Any, find_task: FindTask) -> None:
    """Add the result of a member to the document of its group. The last one removes it and starts what follows."""
    at: Join | None = join
    while at is not None:
        state = plane.state(at.key)
        found = state.get()
        if found is None:
            _log.warning("the document %s of a group was removed; what follows the group is not started", at.key)
            return
        document = with_result(msgspec.convert(found.value, GroupDocument, str_keys=True), at.member, result)
        if len(document.results) < document.members:
            atomic.update(state, msgspec.to_builtins(document, str_keys=True), if_match=found.etag)
            return
        atomic.remove(state, if_match=found.etag)
        result = results_of(document)
        if document.then:
            correlation_id = document.correlation_id
            started = _start(document.then, find_task, correlation_id, result=result, join=document.join)
            _add_started(plane, atomic, started)
            return
        at = document.join


def _fail(plane: Plane, message: Message, body: TaskMessage, error: Exception, find_task: FindTask) -> None:
    """Settle the message of a failed attempt, unless a plain nack of the caller does that."""
    is_last = isinstance(error, Reject) or message.failure_attempts + 1 >= message.delivery.max_attempts
    try:
        if is_last and body.on_failure:
            atomic = plane.atomic().check(message).reject(message, error)
            for chain in body.on_failure:
                _add_started(plane, atomic, _start(chain, find_task, message.correlation_id))
            atomic.commit()
        elif isinstance(error, Reject):
            message.reject(error)
        elif isinstance(error, RetryLater):
            message.nack(delay_seconds=error.seconds, error=error)
    except QueueMessageLeaseMismatch as refused:
        message.mark_refused(refused.code)
    except Exception:
        _log.exception("message %s of %s could not be settled; it is delivered again", message.id, message.queue)
        _defer(message)


def _defer(message: Message) -> None:
    """Return a message uncounted, so that the caller does not nack it; if that fails, its lease expires."""
    try:
        message.nack(intent="defer", delay_seconds=TASK_DEFER_SECONDS)
    except FastnessError as error:
        _log.warning("message %s of %s was not returned to its queue: %s", message.id, message.queue, error)
        message.mark_settled()


def _start(
    steps: list[Step],
    find_task: FindTask,
    correlation_id: str | None,
    *,
    result: Any = NO_RESULT,
    join: Join | None = None,
) -> Started:
    return start(
        steps,
        new_id=lambda: uuid4().hex,
        find_task=find_task,
        result=result,
        join=join,
        correlation_id=correlation_id,
    )


def _add_started(plane: Plane, atomic: Atomic, started: Started) -> Atomic:
    for queue, message in started.messages:
        atomic.put_many(plane.queue(queue), [message])
    for key, document in started.groups:
        atomic.update(plane.state(key), msgspec.to_builtins(document, str_keys=True), if_absent=True)
    return atomic


def _json_form(result: Any) -> Any:
    """A result as an argument of the next step: bytes as text, as JSON has them."""
    return msgspec.to_builtins(result)
