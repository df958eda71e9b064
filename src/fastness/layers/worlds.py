"""Worlds: event-sourced agents. A world has a journal, an inbox and snapshots; this module manages its lifecycle.

    (u, universe, "w", world, "meta")  ->  state, when it was created, its incarnation, and when it was archived
    (u, universe, "w-deleted", world)  ->  the same of a deleted world

    active ──► pausing ──► paused ──► active
       └─────────────────────┴──► archiving ──► archived ──► deleting ──► deleted ──► active, the next incarnation

Only an active world accepts appends and drains. Its inbox also accepts items while it is paused, so that none are lost.
What it asked for itself, the receipts of its effects and its timers, it gets while it is archived, too.

A deleted world is not found, but its record stays, apart from the others so that lists do not read it. A world that
is created under the same name is its next incarnation. Callers pass the incarnation that they know, and are refused in
any other one, so that a reader or writer of a deleted world never continues in the world that replaced it.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.errors import DecryptionFailed, WorldExists, WorldNotActive, WorldNotFound
from fastness.kv import Subspace, Transaction, pack, prefix_range
from fastness.wire.runs import RUN_PREFIX, STATES


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
    incarnation: int
    archived_ms: int = 0  # When it was archived; 0: it is not.
    fences_from: int = 0  # Fences of this incarnation are above it, and so above those of earlier ones.
    last_fence: int = 0  # The highest fence of what was removed: effects, and hosting with the incarnation.


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The world that a fork was made from: its name, the height and its incarnation."""

    name: str
    height: int
    incarnation: int


_META: Final = pack(("meta",))
_UNIVERSES: Final = Subspace("u")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorldMeta).decode
_decode_origin = msgspec.msgpack.Decoder(Origin).decode
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
_ACCEPTS_REQUESTED = _ACCEPTS_ITEMS | {WorldState.ARCHIVING, WorldState.ARCHIVED}


def create(tx: Transaction, world: World) -> WorldMeta:
    """Create an active, empty world: the next incarnation, if a deleted world had this name.

    Raises:
        WorldExists: a world has this name already, or it is not deleted completely.
    """
    before = find(tx, world)
    if before is not None and before.state is WorldState.DELETING:
        raise WorldExists(f"World {world.name} is being deleted; finish that by deleting it again, then create it")
    if before is not None and before.state is not WorldState.DELETED:
        raise WorldExists(f"World {world.name} exists already; open it, or choose another name")
    if before is None:
        return _write(tx, world, WorldMeta(WorldState.ACTIVE, tx.now_ms, 1))
    tx.delete(_deleted_key(world))
    last = before.last_fence
    made = WorldMeta(WorldState.ACTIVE, tx.now_ms, before.incarnation + 1, fences_from=last, last_fence=last)
    return _write(tx, world, made)


def describe(tx: Transaction, world: World, incarnation: int | None = None) -> WorldMeta:
    """The lifecycle record of a world; with `incarnation`, only of that one.

    Raises:
        WorldNotFound: the world was never created, or was deleted, or it has another incarnation.
    """
    meta = last_meta(tx, world)
    if meta.state is WorldState.DELETED:
        raise WorldNotFound(f"World {world.name} was deleted; create it to use the name for a new world")
    if incarnation is not None and incarnation != meta.incarnation:
        raise WorldNotFound(
            f"Incarnation {incarnation} of world {world.name} does not exist: the current one is {meta.incarnation}. "
            "The world was deleted and created again; open it with a new handle, and read it from the start"
        )
    return meta


def find(tx: Transaction, world: World) -> WorldMeta | None:
    """The lifecycle record of a world, even if it is deleted; None if it was never created."""
    stored = tx.get(_meta_key(world)) or tx.get(_deleted_key(world))
    return None if stored is None else _decode(stored)


def last_meta(tx: Transaction, world: World) -> WorldMeta:
    """The lifecycle record of a world, even if it is deleted.

    Raises:
        WorldNotFound: the world was never created.
    """
    stored = find(tx, world)
    if stored is None:
        raise WorldNotFound(f"There is no world {world.name} in {world.universe}; create it first")
    return stored


def require_active(tx: Transaction, world: World, incarnation: int | None = None) -> int:
    """The incarnation of a world that accepts appends; with `incarnation`, only that one.

    Raises:
        WorldNotActive: the world does not accept appends.
        WorldNotFound: the world does not exist, or has another incarnation.
    """
    meta = describe(tx, world, incarnation)
    if meta.state is not WorldState.ACTIVE:
        raise WorldNotActive(f"World {world.name} is {meta.state}; resume it before appending to it")
    return meta.incarnation


def require_reachable(tx: Transaction, world: World, *, requested: bool = False) -> None:
    """Raise WorldNotActive unless the world's inbox accepts items; `requested` ones also while it is archived."""
    meta = describe(tx, world)
    if meta.state not in (_ACCEPTS_REQUESTED if requested else _ACCEPTS_ITEMS):
        raise WorldNotActive(f"World {world.name} is {meta.state}; its inbox accepts no items")


def require_readable(tx: Transaction, world: World, incarnation: int | None = None) -> int:
    """The incarnation of a world whose history can be read; with `incarnation`, only that one.

    Raises:
        WorldNotActive: the world is being deleted.
        WorldNotFound: the world does not exist, or has another incarnation.
    """
    meta = describe(tx, world, incarnation)
    if meta.state is WorldState.DELETING:
        raise WorldNotActive(f"World {world.name} is being deleted, and cannot be read; delete it again to finish that")
    return meta.incarnation


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
    archived_ms = tx.now_ms if target is WorldState.ARCHIVED else 0
    return _write(tx, world, msgspec.structs.replace(meta, state=target, archived_ms=archived_ms))


def begin_delete(
    tx: Transaction, world: World, incarnation: int | None = None, archived_ms: int | None = None
) -> WorldMeta:
    """Mark a world as being deleted; its record, which is unchanged if it is deleted already.

    Raises:
        WorldNotActive: it is not archived, or not since `archived_ms`.
    """
    meta = last_meta(tx, world)
    if meta.state is WorldState.DELETED and incarnation in (None, meta.incarnation):
        return meta
    describe(tx, world, incarnation)
    if meta.state is WorldState.ARCHIVED and archived_ms not in (None, meta.archived_ms):
        raise WorldNotActive(f"World {world.name} was resumed and archived again; it is deleted later")
    return change_state(tx, world, WorldState.DELETING)


def keep_fence(tx: Transaction, world: World, fence: int) -> None:
    """Remember a fence of the world whose record is removed, so that the next incarnation does not issue it again."""
    meta = last_meta(tx, world)
    if fence > meta.last_fence:
        _write(tx, world, msgspec.structs.replace(meta, last_fence=fence))


def is_deleting(tx: Transaction, world: World, incarnation: int) -> bool:
    """Whether this incarnation is being deleted. If not, another caller has finished that."""
    meta = last_meta(tx, world)
    return meta.incarnation == incarnation and meta.state is WorldState.DELETING


def clear(tx: Transaction, world: World, incarnation: int, limit: int) -> bool:
    """Remove at most `limit` keys of a deleting world, except its lifecycle record; whether none are left.

    Clear what is outside of its subspace before: effects and timers.
    """
    if not is_deleting(tx, world, incarnation):
        return True
    begin, end = subspace(world).range()
    kept = _meta_key(world)
    keys = [
        key for key, _ in tx.scan(begin, end, limit=limit + 2) if key != kept
    ]  # The kept record, and one to see if more are left.
    for key in keys[:limit]:
        tx.delete(key)
    for state in STATES if world.name.startswith(RUN_PREFIX) else ():
        tx.delete(Subspace("u", world.universe, "runs", state).key(world.name))
    return len(keys) <= limit


def end_delete(tx: Transaction, world: World, incarnation: int) -> None:
    """Mark a world as deleted once everything else of it is removed."""
    if is_deleting(tx, world, incarnation):
        meta = last_meta(tx, world)
        tx.delete(_meta_key(world))
        tx.put(_deleted_key(world), _encode(msgspec.structs.replace(meta, state=WorldState.DELETED)))


def names(tx: Transaction, universe: str, *, after: str = "", limit: int) -> list[str]:
    """At most `limit` names of worlds after `after`, in order, without deleted ones."""
    return first_elements(tx, Subspace("u", universe, "w"), after, limit)


def universes(tx: Transaction, *, after: str = "", limit: int) -> list[str]:
    """At most `limit` names of universes after `after`, in order.

    One that has only an audit log does not count: calls with a mistyped name leave entries, too.
    """
    found: list[str] = []
    while len(found) < limit and (names := first_elements(tx, _UNIVERSES, after, limit - len(found))):
        found += [name for name in names if _has_data(tx, name)]
        after = names[-1]
    return found


def _has_data(tx: Transaction, universe: str) -> bool:
    log = _UNIVERSES.at(universe, "audit")
    begin, end = prefix_range(_UNIVERSES.key(universe))  # With damaged keys, which `doctor` must find.
    first = _first_key(tx, begin, end)
    if first is None or first not in log:
        return first is not None
    return _first_key(tx, prefix_range(log.prefix)[1], end) is not None


def first_elements(tx: Transaction, parent: Subspace, after: str, limit: int, *, prefix: str = "") -> list[str]:
    """The distinct first elements of the keys in a subspace, of those that start with `prefix`.

    Each element has many keys. One scan skips all of them, so a page costs one scan per name. Elements that are not
    texts are keys of a caller's own.
    """
    begin, end = prefix_range(parent.prefix + b"\x02")
    if prefix:
        begin, end = prefix_range(parent.key(prefix)[:-1])  # Without the byte that ends a text.
    if after:
        begin = min(max(begin, prefix_range(parent.key(after))[1]), end)
    found: list[str] = []
    while len(found) < limit and (key := _first_key(tx, begin, end)) is not None:
        name = _first(parent, key)
        found.append(name)
        begin = prefix_range(parent.key(name))[1]
    return found


def matching_elements(
    tx: Transaction, parent: Subspace, patterns: Sequence[str], after: str, limit: int, *, prefix: str = ""
) -> list[str]:
    """`first_elements` that match one of the patterns: texts, or beginnings of texts with a star.

    The patterns are in order, and no two have a text in common. Only keys that match one of them are read.
    """
    found: list[str] = []
    for pattern in patterns:
        start = pattern.removesuffix("*")
        if len(found) == limit:
            break
        if pattern == start:
            # The first text that begins with it is the text itself, if it is there.
            some = first_elements(tx, parent, after, 1, prefix=start) if start.startswith(prefix) else []
            found += [name for name in some if name == start]
        elif start.startswith(prefix) or prefix.startswith(start):
            longer = max(start, prefix, key=len)
            found += first_elements(tx, parent, after, limit - len(found), prefix=longer)
    return found


def _first_key(tx: Transaction, begin: bytes, end: bytes) -> bytes | None:
    """The first key of a range. A value that cannot be decrypted does not hide the names after it."""
    try:
        return next((key for key, _ in tx.scan(begin, end, limit=1)), None)
    except DecryptionFailed as error:
        if error.key is None:
            raise
        return error.key


def incarnation_at(tx: Transaction, prefix: bytes) -> int | None:
    """The incarnation of the world whose keys start with `prefix`; None if its record is missing or unknown."""
    stored = tx.get(prefix + _META)
    try:
        return None if stored is None else _decode(stored).incarnation
    except msgspec.MsgspecError:
        return None


def _first(parent: Subspace, key: bytes) -> str:
    """The element after a subspace's prefix. The rest of the key need not be a tuple: heights are eight plain bytes."""
    start = len(parent.prefix) + 1
    return key[start : key.index(b"\x00", start)].decode()


def set_origin(tx: Transaction, world: World, origin: Origin) -> None:
    """Record what this world was forked from."""
    tx.put(subspace(world).key("origin"), _encode(origin))


def origin(tx: Transaction, world: World) -> Origin | None:
    """What this world was forked from; None if it is not a fork."""
    stored = tx.get(subspace(world).key("origin"))
    return None if stored is None else _decode_origin(stored)


@lru_cache(maxsize=4_096)
def subspace(world: World) -> Subspace:
    """The subspace of a world."""
    return Subspace("u", world.universe, "w", world.name)


def _write(tx: Transaction, world: World, meta: WorldMeta) -> WorldMeta:
    tx.put(_meta_key(world), _encode(meta))
    return meta


@lru_cache(maxsize=4_096)
def _meta_key(world: World) -> bytes:
    return subspace(world).key("meta")


def _deleted_key(world: World) -> bytes:
    return Subspace("u", world.universe, "w-deleted").key(world.name)
