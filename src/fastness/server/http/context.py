"""State that the HTTP endpoints of one server share."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastness.errors import RetryAdvice
from fastness.server.context import ServerContext
from fastness.server.http.flow_control import FlowControl
from fastness.server.http.limits import DRAIN_POLL_SECONDS, HttpLimits
from fastness.server.problems import HttpError


class HttpContext:
    """State that all HTTP endpoints of one server share: limits, flow control and background tasks."""

    def __init__(self, server: ServerContext, limits: HttpLimits) -> None:
        self.server = server
        self.transport = server.transport
        self.limits = limits
        self.flow_control = FlowControl()
        self.watches = 0
        self._waiting = 0
        self._drained = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def check_watches(self) -> None:
        """Refuse another watch if as many are open as the limits allow.

        Raises:
            HttpError: the status is 503.
        """
        if self.watches >= self.limits.watches_max:
            detail = f"{self.limits.watches_max} watches are already open; retry later"
            raise HttpError(503, "queue_busy", detail, retry=RetryAdvice.LATER)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` to its end, even if the request that started it is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_for_drain(self) -> None:
        """Return when the server starts to shut down. One task polls for all waiters."""
        self._waiting += 1
        if self._poller is None:
            self._poller = self.spawn(self._poll())
        try:
            await self._drained.wait()
        finally:
            self._waiting -= 1

    async def _poll(self) -> None:
        while self._waiting and not self.server.draining:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._poller = None
        if self.server.draining:
            self._drained.set()
