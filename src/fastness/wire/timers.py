"""Timers: times at which worlds want an item. A timer that is due goes into the inbox of its world."""

import msgspec

from fastness.names import UNIVERSE
from fastness.wire.fields import Limit, Name
from fastness.wire.requests import Operation, Request, Route


class TimerInfo(msgspec.Struct, frozen=True):
    """A timer that has not fired."""

    world: str
    timer_id: str
    deliver_at_ms: int
    height: int
    payload: bytes = b""


class TimerPage(msgspec.Struct, frozen=True):
    """Timers in the order of their times, or of their ids for one world; `next` is where the next page starts."""

    timers: list[TimerInfo]
    next: str | None = None


class ListTimers(Request[TimerPage], frozen=True, tag="timers.list"):
    """The timers of a world, or of all worlds of the universe."""

    operation = Operation(
        reads=True,
        http=(
            Route("GET", "/v1/timers", "List timers that have not fired."),
            Route("GET", "/v1/worlds/{world}/timers", "List the timers of a world that have not fired."),
        ),
    )

    world: Name | None = None
    after: str = ""
    limit: Limit = 100
    universe: Name = UNIVERSE
