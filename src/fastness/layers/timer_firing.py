"""Firing timers: a timer that is due moves into the inbox of its world, in one commit.

Any node may fire a timer that is due: the first commit removes it, and a later one finds nothing. A timer whose world
is gone is removed. A world that is paused or archived gets the item, and handles it once it is active.
"""

from collections.abc import Sequence

from fastness.kv import Transaction
from fastness.layers import inboxes, timers, worlds
from fastness.layers.timers import DueTimer
from fastness.layers.worlds import World, WorldState
from fastness.wire.inboxes import TimerFired


def fire(tx: Transaction, universe: str, due: Sequence[DueTimer]) -> int:
    """Put an item into the inbox of the world of each of these timers; how many there were.

    Timers that have fired, or were replaced or cancelled since they were read, are skipped.
    """
    return sum(_fire(tx, universe, each) for each in due)


def _fire(tx: Transaction, universe: str, due: DueTimer) -> bool:
    stored = timers.take(tx, universe, due)
    if stored is None:
        return False
    world = World(universe, due.world)
    meta = worlds.find(tx, world)
    if meta is None or meta.state in (WorldState.DELETING, WorldState.DELETED):
        return False
    item = TimerFired(timer_id=timers.timer_id(due.intent_hash), payload=stored.payload)
    inboxes.enqueue(tx, world, item, requested=True)
    return True
