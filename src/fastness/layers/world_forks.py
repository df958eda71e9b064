"""Forks: a new world with another world's history up to a height, without pending effects or inbox items.

begin   the target exists, paused, and records its origin
…       the caller copies the journal records, batch by batch
end     the target is active
"""

from typing import NamedTuple

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import inboxes, journals, snapshots, worlds
from fastness.layers.worlds import Origin, World, WorldState


class Incarnations(NamedTuple):
    """The incarnations that a fork copies from and to."""

    source: int
    target: int


def begin(tx: Transaction, source: World, target: World, height: int, incarnation: int | None = None) -> Incarnations:
    """Create the paused target, unless an earlier attempt did; `incarnation` is the one to fork, if given."""
    found = worlds.require_readable(tx, source, incarnation)
    if not 0 <= height <= journals.head(tx, source):
        raise InvalidArgument(f"Height {height} is beyond the head of {source.name}; fork at or below its head")
    origin = Origin(source.name, height, found)
    if worlds.origin(tx, target) == origin:
        return Incarnations(found, worlds.require_readable(tx, target))
    created = worlds.create(tx, target)
    worlds.set_origin(tx, target, origin)
    worlds.change_state(tx, target, WorldState.PAUSED)
    snapshots.copy_below(tx, source, target, height)
    inboxes.start_at(tx, target, inboxes.next_sequence(tx, source))
    return Incarnations(found, created.incarnation)


def copy(tx: Transaction, target: World, incarnation: int, records: list[bytes], height: int) -> None:
    """Write the source's records from `height` on into the target. Repeating it changes nothing."""
    worlds.require_readable(tx, target, incarnation)
    journals.write_at(tx, target, records, height)


def end(tx: Transaction, target: World, incarnation: int) -> None:
    """Activate the target."""
    worlds.require_readable(tx, target, incarnation)
    worlds.change_state(tx, target, WorldState.ACTIVE)
