"""Generated from handles/timers.py by tools/make_twins.py; change that file instead."""

from fastness.handles.sync.handle import Handle
from fastness.wire.timers import ListTimers, TimerPage


class Timers(Handle):
    """The timers of worlds that have not fired."""

    def list(self, world: str | None = None, *, after: str = "", limit: int = 100) -> TimerPage:
        """Timers of all worlds in the order of their times, or of one world; `next` is where the next page starts."""
        return self._transport.call(ListTimers(world, after, limit, self._universe))
