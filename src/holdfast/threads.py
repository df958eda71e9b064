"""Work on a thread beside an event loop: it is done, or whoever wanted it hears that it is not, never both."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from holdfast.errors import Busy

Result = TypeVar("Result")


async def run_in_thread(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """The result of a function that blocks, from a thread of the event loop's executor.

    An executor that cannot start another thread says so when the work is in line already, where a thread that it has
    finds it later. Here it is taken out of the line.

    Raises:
        Busy: no thread can be had; nothing was done.
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
            raise Busy(f"No thread can be had ({error}); nothing was done. Try again later") from error
    return await asyncio.wrap_future(outcome)
