"""Waits for what another process or thread does, with a bound that a slow machine stretches."""

import asyncio
import inspect
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar, overload

T = TypeVar("T")
POLLS_MAX: Final = 3_000  # A minute, times the processes that share a core.
POLLS_MAX_SPARK: Final = 30_000  # Spark starts in seconds, and in minutes on a busy machine.
PAUSE_SECONDS: Final = 0.02


def eventually(condition: Callable[[], T | None], what: object = None, *, polls_max: int = POLLS_MAX) -> T:
    """Poll until the condition returns something true, and return that. `what` is reported if it never does."""
    for pause in _pauses(polls_max):
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError(_never(condition, what))


@overload
async def eventually_async(condition: Callable[[], Awaitable[T | None]], what: object = None) -> T: ...
@overload
async def eventually_async(condition: Callable[[], T | None], what: object = None) -> T: ...
async def eventually_async(condition: Callable[[], Any], what: object = None) -> Any:
    """As `eventually`, on an event loop; the condition may be asynchronous."""
    for pause in _pauses(POLLS_MAX):
        result = condition()
        if found := await result if inspect.isawaitable(result) else result:
            return found
        await asyncio.sleep(pause)
    raise AssertionError(_never(condition, what))


def exit_code(process: "subprocess.Popen[Any]", *, polls_max: int = POLLS_MAX) -> int:
    """Wait until a process has ended."""
    eventually(lambda: process.poll() is not None, f"the end of {process.args!r:.200}", polls_max=polls_max)
    return int(process.returncode)


def _pauses(count: int) -> Iterator[float]:
    """Short ones first: most waits end soon. There are more when several processes share a core."""
    number = 0
    while number < count * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)):
        number += 1
        yield min(PAUSE_SECONDS, 0.001 * number)


def _never(condition: object, what: object) -> str:
    return f"it never came true: {what() if callable(what) else what or condition}"
