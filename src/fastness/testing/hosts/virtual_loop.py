"""An event loop for tests: its time moves by itself when nothing else is left to do, and it starts no threads.

So `asyncio.sleep(3600)` in a step takes no time, and a run is the same each time: functions for threads are called on
the loop, in the order in which they were asked for.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_TIE_SECONDS: Final = 1e-10  # More than the error of a time, and far less than any delay.
_STILL_SECONDS_MAX: Final = 10.0  # Of real time. Nothing that a test waits for takes longer.


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a time of its own."""

    def __init__(self, *, patience_seconds: float = 0.0) -> None:
        """A loop at the time 0.

        Args:
            patience_seconds: how long, in real time, the loop waits for other threads before its time moves.
        """
        self._selector_of_time = _Selector(patience_seconds)
        self._calls = 0
        super().__init__(self._selector_of_time)
        self._selector_of_time.ignored = len(self._selector_of_time.get_map())  # The loop's own pipe.

    def time(self) -> float:
        """The time of this loop, in seconds from 0."""
        return self._selector_of_time.now

    def call_at(
        self, when: float, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Any = None
    ) -> asyncio.TimerHandle:
        """Call a function at a time. Those of the same time are called in the order in which they were added."""
        self._calls += 1
        return super().call_at(when + self._calls * _TIE_SECONDS, callback, *args, context=context)

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> "asyncio.Future[Result]":
        """Call the function now. As on a thread, no event loop runs for it."""
        del executor
        future: asyncio.Future[Result] = self.create_future()
        asyncio._set_running_loop(None)
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        finally:
            asyncio._set_running_loop(self)
        return future


class _Selector(selectors.DefaultSelector):
    """Returns at once, and counts the time that it would have waited. It waits only for files and sockets."""

    def __init__(self, patience_seconds: float) -> None:
        super().__init__()
        self._patience_seconds = patience_seconds
        self.now = 0.0
        self.ignored = 0  # How many files are no reason to wait.

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if found or timeout == 0:
            return found
        if timeout is None or len(self.get_map()) > self.ignored:
            return self._wait(timeout)
        if self._patience_seconds and (found := super().select(self._patience_seconds)):
            return found
        self.now += max(timeout, 0.0)
        return []

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        begun = time.monotonic()
        bound = _STILL_SECONDS_MAX if timeout is None else min(timeout, _STILL_SECONDS_MAX)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(bound)
        self.now += time.monotonic() - begun
        if not found and timeout is None:
            raise TimeoutError(
                f"Nothing happened for {_STILL_SECONDS_MAX:.0f} s: a step or an adapter waits for something that does "
                "not come"
            )
        return found
