"""Coroutines that start immediately, without a task: most finish without waiting, and never need one.

Measured on CPython 3.11 (interleaved runs, medians): a coroutine that finishes without waiting costs 1.4 µs, as a task
9.2 µs. A put through the server's stream, one at a time, costs 202 µs of processor time instead of 222 µs (9 % less),
and is answered in 0.34 ms instead of 0.46 ms. With 32 concurrent puts, which share batches, the gain is 3 %.

The first step runs while no task is current, which needs asyncio's internal `_leave_task` and `_enter_task`. Without
them nothing runs eagerly: the caller makes an ordinary task of the whole coroutine.

A coroutine must not use its task before it first waits, as `asyncio.timeout` does: there is none at that time, not even
the caller's, because another task runs the remainder.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Final, Generic, TypeVar

Result = TypeVar("Result")
SwitchTask = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], None]

_leave_task: Final[SwitchTask | None] = getattr(asyncio, "_leave_task", None)
_enter_task: Final[SwitchTask | None] = getattr(asyncio, "_enter_task", None)


class EagerCoroutine(Generic[Result]):
    """A started coroutine: either done with a `result`, or waiting, with a `remainder` for a task."""

    __slots__ = ("is_done", "remainder", "result")

    def __init__(self, work: Coroutine[Any, Any, Result], context: Context | None = None) -> None:
        """Run `work` until it first waits, in `context` if given; raises what it raises."""
        self.result: Result
        self.remainder: Coroutine[Any, Any, Result]  # The caller must make a task of it.
        if _leave_task is None or _enter_task is None:
            self.is_done, self.remainder = False, work
            return
        send: Callable[[None], Any] = work.send
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is not None:
            _leave_task(loop, task)
        try:
            awaited = send(None) if context is None else context.run(send, None)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        else:
            self.is_done, self.remainder = False, _Remainder(work, awaited)
        finally:
            if task is not None:
                _enter_task(loop, task)


class _Remainder(Coroutine[Any, Any, Result]):
    """A coroutine after its first step. Its own first step yields `awaited`, so that the task waits for it.

    Not a generator: one that is cancelled before its first step would never pass the cancellation on to `work`.
    """

    __slots__ = ("_awaited", "_work")

    def __init__(self, work: Coroutine[Any, Any, Result], awaited: Any) -> None:
        self._work = work
        self._awaited = [awaited]

    def send(self, value: Any) -> Any:
        return self._awaited.pop() if self._awaited else self._work.send(value)

    def throw(self, *error: Any) -> Any:
        self._awaited.clear()
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Result]:
        raise TypeError("Make a task of it; it may be cancelled before it is awaited")
