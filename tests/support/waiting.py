"""Waits for what another process or thread does, with a bound that a slow machine stretches."""

import asyncio
import inspect
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")
POLLS_MAX: Final = 3_000  # A minute and more.
POLLS_MAX_SPARK: Final = 30_000  # Spark starts in seconds, and in minutes on a busy machine.
PAUSE_SECONDS: Final = 0.02


def eventually(condition: Callable[[], T], what: object = None, *, polls_max: int = POLLS_MAX) -> T:
    """Poll until the condition returns something true, and return that. `what` is reported if it never does.

    Polls are counted, not seconds: on a busy machine the condition and the pause take longer, too.
    """
    for pause in _pauses(polls_max):
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError(_never(condition, what))


async def eventually_async(condition: Callable[[], T | Awaitable[T]], what: object = None) -> T:
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
    """Short ones first: most waits end soon."""
    for number in range(count):
        yield min(PAUSE_SECONDS, 0.001 * (number + 1))


def _never(condition: object, what: object) -> str:
    return f"it never came true: {what() if callable(what) else what or condition}"
