"""Runs the functions of steps: coroutines on the event loop, other functions on threads, or tasks of a queue."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache, partial
from inspect import isawaitable, iscoroutinefunction
from traceback import TracebackException
from typing import Any, Final

from fastness.errors import Backend, Busy, ResultNotReady
from fastness.handles.queues import stored_messages
from fastness.handles.receipts import read_result
from fastness.handles.task_flow import start
from fastness.hosts.workflows.operations import StepCall
from fastness.tasks.app import Task
from fastness.tasks.arguments import TaskArguments
from fastness.tasks.functions import name_of
from fastness.wire import AsyncTransport
from fastness.wire.queues import CancelMessage, NewMessage, PutMessages
from fastness.wire.tasks import TaskCall

_THREADS_MAX: Final = 64  # Blocking steps that run at a time in one process.
_RESULT_WAIT_SECONDS: Final = 20.0  # As long as one call may wait.
_UNIQUE_SECONDS: Final = 86_400.0  # For which a task is not put again: hosts restart faster.
_PAUSE_SECONDS: Final = 1.0  # Before a result is asked for again from a plane that did not answer.


async def run_here(call: StepCall[Any]) -> Any:
    """The result of a step's function, run in this process.

    Raises:
        TimeoutError: it has taken too long. A function on a thread cannot be stopped; its result is ignored.
    """
    if call.timeout is None:
        return await _called(call)
    async with asyncio.timeout(call.timeout):
        return await _called(call)


async def run_on_queue(
    call: StepCall[Any], transport: AsyncTransport, universe: str, key: str, put: Callable[[str], None]
) -> Any:
    """The result of a step that is a task of a queue.

    Args:
        call: the step. It has the id of its message, if that was recorded.
        transport: carries requests to the plane.
        universe: the universe of the queue.
        key: unique for the call, so that its message is put once.
        put: called with the id of the message when it was put.

    Raises:
        MessageFailed: it is a dead letter.
        TimeoutError: it has taken too long, and was cancelled.
    """
    assert call.queue is not None
    if call.message_id is None:
        messages = await stored_messages(transport, universe, [task_message(call, key)])
        receipts = (await transport.call(PutMessages(call.queue, messages, universe))).receipts
        call.message_id = receipts[0].id
        put(call.message_id)
    try:
        async with asyncio.timeout(call.timeout):
            return await _result(call.queue, call.message_id, transport, universe)
    except TimeoutError:
        await transport.call(CancelMessage(call.queue, call.message_id, universe))
        raise


async def _result(queue: str, id: str, transport: AsyncTransport, universe: str) -> Any:
    while True:
        try:
            return await read_result(transport, universe, queue, id, wait_seconds=_RESULT_WAIT_SECONDS)
        except ResultNotReady:
            await asyncio.sleep(0)  # An embedded plane may answer without waiting.
        except (Backend, Busy):
            await asyncio.sleep(_PAUSE_SECONDS)


def task_message(call: StepCall[Any], key: str) -> NewMessage:
    """The message of a step that is a task.

    Raises:
        InvalidArgument: its arguments do not fit the function.
    """
    options: Any = {"keep_result": True, "unique_key": key, "unique_until": _UNIQUE_SECONDS}
    if call.key is not None:
        options["key"] = call.key
    if call.retry is not None:
        options["max_attempts"] = call.retry.attempts
        options["retry_delay_seconds"] = call.retry.delay_seconds
    function: Any = call.function
    if isinstance(function, Task):
        return function.with_options(**options).message(*call.args, **call.kwargs)
    name = name_of(function)
    args, kwargs = TaskArguments(name, function).sent(call.args, call.kwargs)
    task = TaskCall(name, call.queue or "", args, kwargs, options)
    return start([task], new_id=str, find_task=_none).messages[0].message


def _none(name: str) -> Any:
    raise LookupError(name)  # Only steps that follow others are looked up.


async def _called(call: StepCall[Any]) -> Any:
    function: Callable[..., Any] = call.function.function if isinstance(call.function, Task) else call.function
    if _is_coroutine_function(function):
        return await function(*call.args, **call.kwargs)
    work = partial(copy_context().run, function, *call.args, **call.kwargs)
    found = await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), work)
    return await _awaited(found) if isawaitable(found) else found


_is_coroutine_function = lru_cache(maxsize=1_024)(iscoroutinefunction)


async def _awaited(found: Awaitable[Any]) -> Any:
    """The result of a function that returns an awaitable, as `lambda: fetch(url)` does."""
    return await found


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    del process  # A forked process needs threads of its own.
    return ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="fastness-step")


def error_of(error: BaseException) -> list[str]:
    """An error as it is recorded: its type and message, cut."""
    message = str(TracebackException.from_exception(error))[:_MESSAGE_CHARACTERS]
    return [type(error).__name__, message.encode(errors="replace").decode()]  # The name of a file may not be encodable.


_MESSAGE_CHARACTERS: Final = 2_000  # An error is a record among many.
