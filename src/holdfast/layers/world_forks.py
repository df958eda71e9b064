"""Forks: a new world that shares another one's history up to a height, and nothing that is pending.

begin   the copy exists, paused, and knows where it comes from
…       its records are copied, batch by batch
end     it is active
"""

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers import inboxes, journals, snapshots, worlds
from holdfast.layers.worlds import World, WorldMeta, WorldState


def begin(tx: Transaction, source: World, target: World, height: int) -> None:
    """Make the target, paused until everything is copied; or find that an earlier attempt did."""
    worlds.require_readable(tx, source)
    if not 0 <= height <= journals.head(tx, source):
        raise InvalidArgument(f"Height {height} lies beyond the head of {source.name}; fork at or below it")
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
    """Let the copy live; what is known of it, and its head."""
    return worlds.change_state(tx, target, WorldState.ACTIVE), journals.head(tx, target)
