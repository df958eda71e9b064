"""Forks: a new world with another world's history up to a height, without pending effects or inbox items.

begin   the target exists, paused, and records its origin
…       the caller copies the journal records, batch by batch
end     the target is active
"""

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers import inboxes, journals, snapshots, worlds
from holdfast.layers.worlds import World, WorldMeta, WorldState


def begin(tx: Transaction, source: World, target: World, height: int) -> None:
    """Create the paused target, unless an earlier attempt did."""
    worlds.require_readable(tx, source)
    if not 0 <= height <= journals.head(tx, source):
        raise InvalidArgument(f"Height {height} is beyond the head of {source.name}; fork at or below its head")
    origin = (source.name, height)
    known = worlds.origin(tx, target)
    if known == origin:
        return
    worlds.create(tx, target)
    worlds.set_origin(tx, target, origin)
    worlds.change_state(tx, target, WorldState.PAUSED)
    snapshots.copy_below(tx, source, target, height)
    inboxes.start_at(tx, target, inboxes.next_sequence(tx, source))


def end(tx: Transaction, target: World) -> tuple[WorldMeta, int]:
    """Activate the target; returns its lifecycle record and its head."""
    return worlds.change_state(tx, target, WorldState.ACTIVE), journals.head(tx, target)
