"""Workers of tasks: functions run on threads, coroutines on an event loop.

A queue that has both is consumed on the event loop, which runs its functions on threads of their own.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fastness.handles import task_runs
from fastness.handles.sync import task_runs as sync_runs
from fastness.handles.task_flow import FindTask
from fastness.handles.workers import AsyncWorker, Worker, WorkerStats
from fastness.stop_signals import stop_on_signals
from fastness.tasks.hooks import Hooks, OnError
from fastness.tasks.planes import AppPlanes, close_handle

_log = logging.getLogger("fastness.tasks")
_CHECK_SECONDS: Final = 0.5  # How often a running worker looks whether it has ended by an error.
_SETTLE_SECONDS: Final = 10.0  # How long the event loop may take to return messages, after the drain.


class TaskWorker:
    """Runs the calls of tasks until it is stopped."""

    def __init__(
        self,
        planes: AppPlanes,
        thread_queues: Sequence[str],
        loop_queues: Sequence[str],
        find_task: FindTask,
        *,
        hooks: Hooks,
        concurrency: int,
        drain_seconds: float,
        delay_on_close_seconds: float | None,
        on_error: OnError | None,
    ) -> None:
        self.stopped_by: int | None = None  # The signal that has stopped it.
        self._planes = planes
        self._find_task = find_task
        self._drain_seconds = drain_seconds
        self._stopping = threading.Event()
        self._is_running = False
        self._options: dict[str, Any] = {
            "concurrency": concurrency,
            "drain_seconds": drain_seconds,
            "delay_on_close_seconds": delay_on_close_seconds,
            "on_message": hooks.together("on_message"),
            "on_settled": hooks.together("on_settled"),
            "on_error": hooks.together("on_error", on_error),
        }
        self._on_start, self._on_stop = hooks.together("on_start"), hooks.together("on_stop")
        self._thread_queues = list(thread_queues)
        self._loop_queues = list(loop_queues)
        self._threads: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_worker: AsyncWorker | None = None
        self._loop_thread: threading.Thread | None = None
        self._loop_ready = threading.Event()
        self._loop_error: Exception | None = None

    @property
    def queues(self) -> list[str]:
        """The queues whose calls it runs."""
        return sorted((*self._thread_queues, *self._loop_queues))

    @property
    def stats(self) -> WorkerStats:
        """Counts since it was started."""
        total = WorkerStats()
        for worker in (self._threads, self._loop_worker):
            for name in WorkerStats.__struct_fields__ if worker is not None else ():
                setattr(total, name, getattr(total, name) + getattr(worker.stats, name))  # type: ignore[union-attr]
        return total

    @property
    def error(self) -> Exception | None:
        """What has ended it, if a retry cannot succeed."""
        of_threads = None if self._threads is None else self._threads.error
        return of_threads or self._loop_error

    def start(self) -> None:
        """Start to run calls, on threads of its own.

        Raises:
            Closed: the app was closed.
        """
        plane = self._planes.get()
        if self._on_start is not None:
            self._on_start()
        self._is_running = True
        if self._thread_queues:
            handler = partial(sync_runs.run_message, plane, find_task=self._find_task)
            self._threads = Worker(plane, dict.fromkeys(self._thread_queues, handler), **self._options)
            self._threads.start()
        if self._loop_queues:
            self._loop_thread = threading.Thread(target=self._run_loop, name="fastness-tasks", daemon=True)
            self._loop_thread.start()
            self._loop_ready.wait()

    def run(self) -> None:
        """Run calls until `request_stop`, SIGTERM or SIGINT (in the main thread); then drain. A second signal ends it.

        Raises:
            FastnessError: messages cannot be received, and a retry cannot succeed (its `retry` is `never`).
        """
        with stop_on_signals(self._stop_on_signal, second_ends=True):
            self.start()
            while not self._stopping.wait(_CHECK_SECONDS) and self.error is None:
                pass
            _log.info("stopping: waiting up to %g s for running calls", self._drain_seconds)
            self.stop()
        if self.error is not None:
            raise self.error

    def request_stop(self) -> None:
        """Make `run` drain and return. Signal handlers may call it."""
        self._stopping.set()

    def stop(self) -> None:
        """Receive no more calls, wait `drain_seconds` for running ones, and return the rest uncounted."""
        self._stopping.set()
        if self._loop is not None and self._loop_worker is not None:
            with suppress(RuntimeError):  # It has ended meanwhile.
                self._loop.call_soon_threadsafe(self._loop_worker.stop)
        if self._threads is not None:
            self._threads.stop()
        if self._loop_thread is not None:
            self._loop_thread.join(self._drain_seconds + _SETTLE_SECONDS)
        was_running, self._is_running = self._is_running, False
        if was_running and self._on_stop is not None:
            self._on_stop()

    def _stop_on_signal(self, number: int) -> None:
        self.stopped_by = number
        self._stopping.set()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._consume())
        except Exception as error:
            self._loop_error = error
        finally:
            self._loop_ready.set()

    async def _consume(self) -> None:
        plane = await self._planes.new_async()
        self._planes.set_async(plane)
        try:
            handler = partial(task_runs.run_message, plane, find_task=self._find_task)
            self._loop_worker = AsyncWorker(plane, dict.fromkeys(self._loop_queues, handler), **self._options)
            self._loop = asyncio.get_running_loop()
            self._loop_ready.set()
            await self._loop_worker.run()
        finally:
            await close_handle(plane)
