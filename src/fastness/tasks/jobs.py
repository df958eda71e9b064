"""The job that a worker runs in the current thread or asyncio task."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

from fastness.handles.task_flow import RunningMessage

_current: ContextVar["Job | None"] = ContextVar("fastness_job", default=None)


class Job:
    """One attempt to run a task. Outside of a worker, it has an empty id and is never cancelled."""

    def __init__(self, task: str = "", message: RunningMessage | None = None) -> None:
        self.task = task
        self._message: Any = message

    @property
    def message(self) -> Any:
        """Its message, an AsyncMessage on an event loop and a Message otherwise; None outside of a worker."""
        return self._message

    @property
    def id(self) -> str:
        """The id of its message, which the receipt of `send` has."""
        return "" if self._message is None else str(self._message.id)

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return "" if self._message is None else str(self._message.queue)

    @property
    def attempt(self) -> int:
        """The number of this delivery of its message, from 1."""
        return 1 if self._message is None else int(self._message.attempts)

    @property
    def cancelled(self) -> bool:
        """Whether its message was cancelled. Then stop: its result is not kept, and nothing that follows is started."""
        return self._message is not None and bool(self._message.cancelled)

    def extend(self, seconds: float | None = None) -> None:
        """Extend its lease to at least `seconds` from now. A worker does that by itself for up to an hour.

        Raises:
            QueueMessageLeaseMismatch: the lease has ended, and another worker may run the task.
        """
        if self._message is not None:
            self._message.extend(seconds)

    async def extend_async(self, seconds: float | None = None) -> None:
        """`extend` for tasks that are coroutines."""
        if self._message is not None:
            await self._message.extend(seconds)


_NO_JOB: Final = Job()


def current_job() -> Job:
    """The job that runs the calling function."""
    return _current.get() or _NO_JOB


@contextlib.contextmanager
def running(job: Job) -> Iterator[None]:
    """Make `job` the current one in a block."""
    token = _current.set(job)
    try:
        yield
    finally:
        _current.reset(token)
