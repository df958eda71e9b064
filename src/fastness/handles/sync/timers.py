"""Generated from handles/timers.py by tools/make_twins.py; change that file instead."""

from fastness.wire import Transport
from fastness.wire.timers import ListTimers, TimerPage


class Timers:
    """The timers of worlds that have not fired."""

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    def list(self, world: str | None = None, *, after: str = "", limit: int = 100) -> TimerPage:
        """Timers of all worlds in the order of their times, or of one world; `next` is where the next page starts."""
        return self._transport.call(ListTimers(world, after, limit, self._universe))
