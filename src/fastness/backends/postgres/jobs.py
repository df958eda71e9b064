"""A function to run in a transaction, and the caller that waits for it."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

from fastness.backends.postgres.locked_view import Needs
from fastness.backends.postgres.parts import EVERYTHING
from fastness.kv import Event, Work


class Job:
    """A function to run in a transaction, and the thread or event loop that waits for its outcome."""

    __slots__ = (
        "args",
        "attempts",
        "done",
        "error",
        "events",
        "kwargs",
        "loop",
        "needs",
        "result",
        "sync",
        "waited_for",
        "waiter",
        "work",
    )

    def __init__(
        self,
        work: Work[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        durable: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.work = work
        self.args = args
        self.kwargs = kwargs
        self.sync = durable
        self.needs: Needs = {}  # The locks that earlier attempts have asked for,
        self.waited_for: bytes = EVERYTHING  # the part whose lock was taken,
        self.attempts = 0  # and how often one was taken.
        self.result: Any = None
        self.error: BaseException | None = None
        self.events: list[Event] = []  # To publish once it is committed.
        self.loop = loop
        self.done = threading.Lock() if loop is None else None
        self.waiter: asyncio.Future[None] | None = None if loop is None else loop.create_future()
        if self.done is not None:
            self.done.acquire()

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def finish(jobs: list[Job]) -> None:
    """Wake all waiting callers, with one callback per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.done is not None:
            job.done.release()
        elif job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, loop_jobs in by_loop.items():
        with suppress(RuntimeError):  # The loop is closed, and its callers with it.
            loop.call_soon_threadsafe(_finish_on_loop, loop_jobs)


def _finish_on_loop(jobs: list[Job]) -> None:
    for job in jobs:
        if job.waiter is not None and not job.waiter.done():
            job.waiter.set_result(None)
