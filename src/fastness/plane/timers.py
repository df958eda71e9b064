"""The handler of requests for timers."""

from fastness.kv import Transaction
from fastness.layers import timers
from fastness.names import checked_name
from fastness.plane.handlers import transaction
from fastness.wire.timers import ListTimers, TimerPage


@transaction
def page(tx: Transaction, request: ListTimers) -> TimerPage:
    universe = checked_name("universe", request.universe)
    world = None if request.world is None else checked_name("world", request.world)
    return timers.page(tx, universe, world, after=request.after, limit=request.limit)
