"""The hall: what all endpoints of one server share."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from holdfast.server.doors import Doors
from holdfast.server.http.flow_control import Credits
from holdfast.server.http.limits import DRAIN_LOOK_SECONDS, HttpLimits


class Hall:
    """The doors, the limits, and what is under way."""

    def __init__(self, doors: Doors, limits: HttpLimits) -> None:
        self.doors = doors
        self.transport: Any = doors.transport
        self.limits = limits
        self.credits = Credits()
        self.watches = 0
        self._waiting = 0
        self._drained = asyncio.Event()
        self._looker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something to its end, whatever becomes of the request that began it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def draining(self) -> None:
        """Return when the server is about to stop. However many wait for that, one looks."""
        self._waiting += 1
        if self._looker is None:
            self._looker = self.spawn(self._look())
        try:
            await self._drained.wait()
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        while self._waiting and not self.doors.draining:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        self._looker = None
        if self.doors.draining:
            self._drained.set()
