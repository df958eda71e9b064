"""Worlds: event-sourced agents. A world has a journal, an inbox and snapshots; this module is its existence.

    (u, universe, "w", world, "meta")  ->  state, and when it was created

    active ──► pausing ──► paused ──► active
       └─────────────────────┴──► archiving ──► archived ──► deleting ──► deleted

Only an active world takes appends and drains; its inbox takes items while it is paused, too, so that nothing is lost.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast.errors import WorldExists, WorldNotActive, WorldNotFound
from holdfast.kv import Subspace, Transaction


class World(NamedTuple):
    """The name of a world."""

    universe: str
    name: str


class WorldState(StrEnum):
    ACTIVE = "active"
    PAUSING = "pausing"
    PAUSED = "paused"
    ARCHIVING = "archiving"
    ARCHIVED = "archived"
    DELETING = "deleting"
    DELETED = "deleted"


class WorldMeta(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a world as a whole."""

    state: WorldState
    created_ms: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorldMeta).decode
_TAKES_ITEMS = frozenset({WorldState.ACTIVE, WorldState.PAUSING, WorldState.PAUSED})


def create(tx: Transaction, world: World) -> WorldMeta:
    """Make a world, active and empty.

    Raises:
        WorldExists: there is one of that name.
    """
    if tx.get(_meta_key(world)) is not None:
        raise WorldExists(f"World {world.name} exists already; open it, or choose another name")
    return _write(tx, world, WorldMeta(WorldState.ACTIVE, tx.now_ms))


def describe(tx: Transaction, world: World) -> WorldMeta:
    """What is known of a world.

    Raises:
        WorldNotFound: nobody created it.
    """
    stored = tx.get(_meta_key(world))
    if stored is None:
        raise WorldNotFound(f"There is no world {world.name} in {world.universe}; create it first")
    return _decode(stored)


def require_active(tx: Transaction, world: World) -> None:
    """Raise WorldNotActive unless the world takes appends."""
    meta = describe(tx, world)
    if meta.state is not WorldState.ACTIVE:
        raise WorldNotActive(f"World {world.name} is {meta.state}; resume it before appending to it")


def require_reachable(tx: Transaction, world: World) -> None:
    """Raise WorldNotActive unless the world's inbox takes items."""
    meta = describe(tx, world)
    if meta.state not in _TAKES_ITEMS:
        raise WorldNotActive(f"World {world.name} is {meta.state}, and takes no items any more")


def names(tx: Transaction, universe: str, *, after: str = "", limit: int) -> list[str]:
    """At most `limit` names of worlds, in order, the first one behind `after`.

    A world has many keys. Each step jumps over all of one world's, so a page costs as many looks as it has names.
    """
    rooms = Subspace("u", universe, "w")
    begin, end = rooms.range()
    if after:
        begin = rooms.key(after) + b"\xff"
    found: list[str] = []
    while len(found) < limit and (pairs := tx.scan(begin, end, limit=1)):
        name = rooms.unpack(pairs[0][0])[0]
        found.append(name)
        begin = rooms.key(name) + b"\xff"
    return found


@lru_cache(maxsize=4_096)
def room(world: World) -> Subspace:
    """Where everything of a world lives."""
    return Subspace("u", world.universe, "w", world.name)


def _write(tx: Transaction, world: World, meta: WorldMeta) -> WorldMeta:
    tx.put(_meta_key(world), _encode(meta))
    return meta


def _meta_key(world: World) -> bytes:
    return room(world).key("meta")
