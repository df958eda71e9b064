"""The step of a workflow that runs in the current thread or asyncio task."""

import asyncio
import threading
from contextvars import ContextVar

from fastness.errors import WorkflowMisuse
from fastness.handles.plane import AsyncPlane
from fastness.handles.sync.plane import Plane
from fastness.tasks.planes import close_blocking_handle, plane_of
from fastness.wire import AsyncTransport

_current: ContextVar["StepContext | None"] = ContextVar("fastness_step", default=None)


class StepPlanes:
    """The plane of a host, as its steps use it: coroutines on the host's event loop, and functions on threads."""

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self._blocking: Plane | None = None
        self._lock = threading.Lock()

    def for_coroutines(self) -> AsyncPlane:
        """A handle that shares the connection of the host."""
        return AsyncPlane(self._transport, self._universe)

    def for_threads(self) -> Plane:
        """A handle that all threads share, opened when it is first used."""
        with self._lock:
            if self._blocking is None:
                self._blocking = plane_of(self.for_coroutines())
            return self._blocking

    def close(self) -> None:
        """Close what was opened here. It is opened again if it is used again."""
        with self._lock:
            blocking, self._blocking = self._blocking, None
        if blocking is not None:
            close_blocking_handle(blocking)


class StepContext:
    """One attempt to run a step: which step it is, and the plane of its host."""

    __slots__ = ("_planes", "attempt", "fence", "id", "name", "run_id")

    def __init__(self, planes: StepPlanes, *, run_id: str, id: str, name: str, attempt: int, fence: int) -> None:
        self._planes = planes
        self.run_id = run_id
        self.id = id  # No other step of the universe has it, and every attempt has the same: an idempotency key.
        self.name = name
        self.attempt = attempt  # From 1.
        self.fence = fence  # Of the host's claim on the run: a host that takes the run over has a higher one.

    @property
    def plane(self) -> Plane:
        """The plane of the host, for a function on a thread.

        Raises:
            WorkflowMisuse: it would block the event loop of a coroutine.
        """
        if asyncio._get_running_loop() is not None:
            raise WorkflowMisuse("`plane` would block the event loop of the host; use `async_plane` in a coroutine")
        return self._planes.for_threads()

    @property
    def async_plane(self) -> AsyncPlane:
        """The plane of the host, for a coroutine.

        Raises:
            WorkflowMisuse: a function on a thread cannot await it.
        """
        if asyncio._get_running_loop() is None:
            raise WorkflowMisuse("`async_plane` belongs to the event loop of the host; use `plane` in a function")
        return self._planes.for_coroutines()

    def __repr__(self) -> str:
        return f"<step {self.name} of run {self.run_id}>"


def current_step() -> StepContext:
    """The step that runs the calling function.

    Raises:
        WorkflowMisuse: it is not called by a step. A step on a queue runs on a worker: use `current_job` there.
    """
    found = _current.get()
    if found is None:
        raise WorkflowMisuse(
            "No step of a workflow runs here; call current_step() in a function that a host runs with run.step(…). A "
            "step on a queue has current_job() instead"
        )
    return found


def set_current_step(step: StepContext) -> None:
    """Make `step` the current one, until the end of the asyncio task."""
    _current.set(step)
