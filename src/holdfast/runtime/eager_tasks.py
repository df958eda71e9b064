"""Coroutines that are begun at once, without a task: most have nothing to wait for, and are done by then.

A task costs a turn of the event loop before its first step, which is more than many a call takes. What a coroutine
does before it waits for the first time must not ask for the task that it runs in, as `asyncio.timeout` does: there is
none, not even that of whoever begins it, because another one will run the rest.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class EagerCoroutine(Generic[Result]):
    """A coroutine that is done, or waits for something."""

    __slots__ = ("is_done", "rest", "result")

    def __init__(self, work: Coroutine[Any, Any, Result], context: Context | None = None) -> None:
        """Runs `work`, in `context` if there is one, as far as it comes; raises what it raises."""
        self.result: Result
        self.rest: Coroutine[Any, Any, Result]  # What is left, for a task of its own.
        send: Callable[[None], Any] = work.send
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is not None:
            asyncio._leave_task(loop, task)
        try:
            awaited = send(None) if context is None else context.run(send, None)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        else:
            self.is_done, self.rest = False, _Rest(work, awaited)
        finally:
            if task is not None:
                asyncio._enter_task(loop, task)


class _Rest(Coroutine[Any, Any, Result]):
    """A coroutine from its second step on. Its first one waits for `awaited`, and whoever runs it learns that first.

    No generator, because one that is cancelled before its first step does not hear of it.
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
        raise TypeError("Make a task of it: it may be cancelled before it is waited for")
