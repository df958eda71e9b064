"""Timers: times at which worlds want an item."""

from fastness.handles.handle import AsyncHandle
from fastness.wire.timers import ListTimers, TimerPage


class AsyncTimers(AsyncHandle):
    """The timers of worlds that have not fired."""

    async def list(self, world: str | None = None, *, after: str = "", limit: int = 100) -> TimerPage:
        """Timers of all worlds in the order of their times, or of one world; `next` is where the next page starts."""
        return await self._transport.call(ListTimers(world, after, limit, self._universe))
