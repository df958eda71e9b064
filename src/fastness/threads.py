"""Runs blocking functions in threads of an event loop's executor."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from fastness.errors import Busy

Result = TypeVar("Result")


async def run_in_thread(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """The result of a blocking function, run in a thread of the event loop's executor.

    An executor that cannot start a thread raises after it has queued the function, and an existing thread may still run
    it later. This cancels the queued call first, so Busy means that the function never runs.

    Raises:
        Busy: no thread is available; nothing was done.
    """
    outcome: Future[Result] = Future()
    context = copy_context()

    def run() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(context.run(function, *args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

    try:
        asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError as error:
        if outcome.cancel():
            raise Busy(f"No thread is available ({error}); nothing was done. Try again later") from error
    return await asyncio.wrap_future(outcome)
