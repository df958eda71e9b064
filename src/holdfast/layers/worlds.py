"""Worlds: event-sourced agents. A world has a journal, an inbox and snapshots; this module manages its lifecycle.

    (u, universe, "w", world, "meta")  ->  state, and when it was created

    active ──► pausing ──► paused ──► active
       └─────────────────────┴──► archiving ──► archived ──► deleting ──► deleted

Only an active world accepts appends and drains. Its inbox also accepts items while it is paused, so that none are lost.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast.errors import InvalidArgument, WorldExists, WorldNotActive, WorldNotFound
from holdfast.kv import Subspace, Transaction
from holdfast.limits import READ_ENTRIES_MAX


class World(NamedTuple):
    """Identifies a world."""

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
    """The lifecycle record of a world."""

    state: WorldState
    created_ms: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorldMeta).decode
_NEXT: dict[WorldState, frozenset[WorldState]] = {
    WorldState.ACTIVE: frozenset({WorldState.PAUSING, WorldState.PAUSED, WorldState.ARCHIVING, WorldState.ARCHIVED}),
    WorldState.PAUSING: frozenset({WorldState.PAUSED, WorldState.ACTIVE}),
    WorldState.PAUSED: frozenset({WorldState.ACTIVE, WorldState.ARCHIVING, WorldState.ARCHIVED}),
    WorldState.ARCHIVING: frozenset({WorldState.ARCHIVED}),
    WorldState.ARCHIVED: frozenset({WorldState.ACTIVE, WorldState.DELETING}),
    WorldState.DELETING: frozenset({WorldState.DELETED}),
    WorldState.DELETED: frozenset(),
}
_ACCEPTS_ITEMS = frozenset({WorldState.ACTIVE, WorldState.PAUSING, WorldState.PAUSED})


def create(tx: Transaction, world: World) -> WorldMeta:
    """Create an active, empty world.

    Raises:
        WorldExists: a world has this name already.
    """
    if tx.get(_meta_key(world)) is not None:
        raise WorldExists(f"World {world.name} exists already; open it, or choose another name")
    return _write(tx, world, WorldMeta(WorldState.ACTIVE, tx.now_ms))


def describe(tx: Transaction, world: World) -> WorldMeta:
    """The lifecycle record of a world.

    Raises:
        WorldNotFound: the world was never created.
    """
    stored = tx.get(_meta_key(world))
    if stored is None:
        raise WorldNotFound(f"There is no world {world.name} in {world.universe}; create it first")
    return _decode(stored)


def require_active(tx: Transaction, world: World) -> None:
    """Raise WorldNotActive unless the world accepts appends."""
    meta = describe(tx, world)
    if meta.state is not WorldState.ACTIVE:
        raise WorldNotActive(f"World {world.name} is {meta.state}; resume it before appending to it")


def require_reachable(tx: Transaction, world: World) -> None:
    """Raise WorldNotActive unless the world's inbox accepts items."""
    meta = describe(tx, world)
    if meta.state not in _ACCEPTS_ITEMS:
        raise WorldNotActive(f"World {world.name} is {meta.state}; its inbox accepts no items")


def require_readable(tx: Transaction, world: World) -> None:
    """Raise WorldNotActive if the world is deleted or being deleted."""
    meta = describe(tx, world)
    if meta.state in (WorldState.DELETING, WorldState.DELETED):
        raise WorldNotActive(f"World {world.name} is {meta.state}; its history cannot be read")


def change_state(tx: Transaction, world: World, target: WorldState) -> WorldMeta:
    """Change the state of a world. Changing to the current state does nothing.

    Raises:
        WorldNotActive: the current state does not allow it.
    """
    meta = describe(tx, world)
    if meta.state is target:
        return meta
    if target not in _NEXT[meta.state]:
        allowed = ", ".join(sorted(_NEXT[meta.state])) or "nothing else"
        raise WorldNotActive(f"World {world.name} is {meta.state} and cannot become {target}; it can become {allowed}")
    return _write(tx, world, WorldMeta(target, meta.created_ms))


def begin_delete(tx: Transaction, world: World) -> bool:
    """Mark a world as being deleted; whether there is anything left to delete."""
    if describe(tx, world).state is WorldState.DELETED:
        return False
    change_state(tx, world, WorldState.DELETING)
    return True


def clear(tx: Transaction, world: World, limit: int) -> bool:
    """Remove at most `limit` keys of a deleting world, except its lifecycle record; whether none are left."""
    begin, end = subspace(world).range()
    kept = _meta_key(world)
    keys = [
        key for key, _ in tx.scan(begin, end, limit=limit + 2) if key != kept
    ]  # The kept record, and one to see if more are left.
    for key in keys[:limit]:
        tx.delete(key)
    tx.delete_range(*Subspace("u", world.universe, "effects", "pending").range(world.name))
    return len(keys) <= limit


def names(tx: Transaction, universe: str, *, after: str = "", limit: int) -> list[str]:
    """At most `limit` names of worlds after `after`, in order."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; one page has 1 to {READ_ENTRIES_MAX} names")
    return first_elements(tx, Subspace("u", universe, "w"), after, limit)


def universes(tx: Transaction, *, after: str = "", limit: int) -> list[str]:
    """At most `limit` names of universes after `after`, in order."""
    return first_elements(tx, Subspace("u"), after, limit)


def first_elements(tx: Transaction, parent: Subspace, after: str, limit: int) -> list[str]:
    """The distinct first elements of the keys in a subspace.

    Each element has many keys. One scan skips all of them, so a page costs one scan per name.
    """
    begin, end = parent.range()
    if after:
        begin = parent.key(after) + b"\xff"
    found: list[str] = []
    while len(found) < limit and (pairs := tx.scan(begin, end, limit=1)):
        name = _first(parent, pairs[0][0])
        found.append(name)
        begin = parent.key(name) + b"\xff"
    return found


def _first(parent: Subspace, key: bytes) -> str:
    """The element after a subspace's prefix. The rest of the key need not be a tuple: heights are eight plain bytes."""
    start = len(parent.prefix) + 1
    return key[start : key.index(b"\x00", start)].decode()


def set_origin(tx: Transaction, world: World, origin: tuple[str, int]) -> None:
    """Record the world and the height that this world was forked from."""
    tx.put(subspace(world).key("origin"), msgspec.msgpack.encode(origin))


def origin(tx: Transaction, world: World) -> tuple[str, int] | None:
    """The world and the height that this world was forked from; None if it is not a fork."""
    stored = tx.get(subspace(world).key("origin"))
    return None if stored is None else msgspec.msgpack.decode(stored, type=tuple[str, int])


@lru_cache(maxsize=4_096)
def subspace(world: World) -> Subspace:
    """The subspace of a world."""
    return Subspace("u", world.universe, "w", world.name)


def _write(tx: Transaction, world: World, meta: WorldMeta) -> WorldMeta:
    tx.put(_meta_key(world), _encode(meta))
    return meta


def _meta_key(world: World) -> bytes:
    return subspace(world).key("meta")
