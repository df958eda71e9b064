"""The handler of requests for timers."""

from fastness.kv import Transaction
from fastness.layers import timers
from fastness.plane.handlers import transaction
from fastness.wire.timers import ListTimers, TimerPage


@transaction
def page(tx: Transaction, request: ListTimers) -> TimerPage:
    return timers.page(tx, request.universe, request.world, after=request.after, limit=request.limit)
