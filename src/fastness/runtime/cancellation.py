"""Work that may commit after its caller was cancelled: it is finished, then undone."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastness.errors import FastnessError
from fastness.runtime.eager_tasks import EagerCoroutine

_log = logging.getLogger("fastness.cancelled")
Result = TypeVar("Result")

_undo_tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.


async def finish_or_undo_async(work: Coroutine[Any, Any, Result], undo: Callable[[Result], object]) -> Result:
    """The result of `work`. If the caller is cancelled meanwhile, `undo(result)` runs in a thread."""
    started = EagerCoroutine(work)
    if started.is_done:
        return started.result
    task = asyncio.get_running_loop().create_task(started.remainder)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        undoing = asyncio.get_running_loop().create_task(_undo_when_done(task, undo))
        _undo_tasks.add(undoing)
        undoing.add_done_callback(_undo_tasks.discard)
        with suppress(asyncio.CancelledError):  # A second cancellation does not wait for the undo.
            await asyncio.shield(undoing)
        raise


def finish_or_undo(result: Result, undo: Callable[[Result], object]) -> Result:
    """The synchronous version: a thread cannot be cancelled, so there is nothing to undo."""
    del undo
    return result


async def undo_async(undo: Callable[[], object]) -> None:
    """Run `undo` in a thread to its end, even if the caller is cancelled once more."""
    undoing = asyncio.get_running_loop().create_task(_undo_now(undo))
    _undo_tasks.add(undoing)
    undoing.add_done_callback(_undo_tasks.discard)
    with suppress(asyncio.CancelledError):
        await asyncio.shield(undoing)


def undo(undo: Callable[[], object]) -> None:
    """The synchronous version."""
    with suppress(FastnessError):
        undo()


async def _undo_now(undo: Callable[[], object]) -> None:
    try:
        await asyncio.to_thread(undo)
    except FastnessError:
        pass  # There is no way to undo it; the lease expires.
    except Exception:
        _log.exception("unexpected error while undoing the work of a cancelled caller")


async def _undo_when_done(task: "asyncio.Task[Result]", undo: Callable[[Result], object]) -> None:
    try:
        await asyncio.to_thread(undo, await task)
    except FastnessError:
        pass  # There is nothing to undo, or no way to do it; the lease expires.
    except Exception:  # The caller only sees its own cancellation.
        _log.exception("unexpected error while undoing the work of a cancelled caller")
