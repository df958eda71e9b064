"""The handler of requests for timers."""

from holdfast.kv import Transaction
from holdfast.layers import timers
from holdfast.names import checked_name
from holdfast.plane.handlers import transaction
from holdfast.wire.timers import ListTimers, TimerPage


@transaction
def page(tx: Transaction, request: ListTimers) -> TimerPage:
    universe = checked_name("universe", request.universe)
    world = None if request.world is None else checked_name("world", request.world)
    return timers.page(tx, universe, world, after=request.after, limit=request.limit)
