"""Waits for what another process or thread does, with a bound that a slow machine stretches."""

import subprocess
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
POLLS_MAX: Final = 3_000  # A minute and more.
PAUSE_SECONDS: Final = 0.02


def eventually(condition: Callable[[], T], what: object = None) -> T:
    """Poll until the condition returns something true, and return that. `what` is reported if it never does.

    Polls are counted, not seconds: on a busy machine the condition and the pause take longer, too.
    """
    for _ in range(POLLS_MAX):
        if found := condition():
            return found
        time.sleep(PAUSE_SECONDS)
    raise AssertionError(f"it never came true: {what() if callable(what) else what or condition}")


def exit_code(process: "subprocess.Popen[Any]") -> int:
    """Wait until a process has ended."""
    eventually(lambda: process.poll() is not None, f"the end of {process.args!r:.200}")
    return int(process.returncode)
