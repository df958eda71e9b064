"""Work that takes effect although whoever wanted it has gone: finish it, then take it back."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.errors import HoldfastError
from holdfast.runtime.eager_tasks import EagerCoroutine

_log = logging.getLogger("holdfast.cancelled")
Result = TypeVar("Result")

_taking_back: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.


async def finish_or_undo_async(work: Coroutine[Any, Any, Result], undo: Callable[[Result], object]) -> Result:
    """The result of `work`. If the caller is cancelled meanwhile, `undo(result)` takes it back on another thread."""
    begun = EagerCoroutine(work)
    if begun.is_done:
        return begun.result
    task = asyncio.get_running_loop().create_task(begun.rest)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        taking_back = asyncio.get_running_loop().create_task(_take_back(task, undo))
        _taking_back.add(taking_back)
        taking_back.add_done_callback(_taking_back.discard)
        with suppress(asyncio.CancelledError):  # Whoever is in so much of a hurry need not wait for it.
            await asyncio.shield(taking_back)
        raise


def finish_or_undo(result: Result, undo: Callable[[Result], object]) -> Result:
    """A thread cannot be cancelled: it is finished."""
    del undo
    return result


async def _take_back(task: "asyncio.Task[Result]", undo: Callable[[Result], object]) -> None:
    try:
        await asyncio.to_thread(undo, await task)
    except HoldfastError:
        pass  # Then there is nothing to take back, or no way to; its lease ends by itself.
    except Exception:  # Whoever was cancelled hears of that alone.
        _log.exception("what was done for somebody who has gone could not be taken back")
