"""Hosting: which program runs a world, which host holds it, and which worlds have work.

    w/<world>/hosting                                          ->  the record; only worlds with a program have one
    (u, universe, "hosting", "ready", program, at_ms, world)   ->  nothing; a host may claim the world from this time on
    (u, universe, "hosting", "wake", owner, world)             ->  nothing; items arrived for a world that `owner` holds

    idle ── an item arrives ──► ready ── claim ──► held ── release, or a failed turn ──► idle or ready
                                  ▲                  │                └── is_stopped ──► stopped ── resume ──► ready
                                  └─ its claim ends ─┘

A world is in the ready index at most once: if it is ready, at the time from which a host may claim it, and if it is
held, at the time when the claim ends. So a world whose host died is claimed as any other one. An idle or stopped world
has no key there, and costs nothing. Only an active world has a claim or is ready: pausing it ends the claim.

A world becomes idle only if the host that gives it back has seen its whole journal, and has taken all items. The
record keeps what that host saw, so that a world that became idle in another way can be found.

Every claim has a higher fence than all earlier ones of the world. The record stays when the program is removed, and the
world keeps the highest fence of a deleted incarnation, so that no fence is given twice.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from fastness.errors import LeaseConflict, LeaseExpired, WorldHeld
from fastness.kv import Subspace, Transaction
from fastness.layers import worlds
from fastness.layers.worlds import World, WorldState, subspace


class Idle(msgspec.Struct, frozen=True, array_like=True):
    """What the host had seen that gave a world back without work."""

    head: int  # Of the journal.
    waits: bool  # The world waits for more than its own timers.


class Hosting(msgspec.Struct, frozen=True, array_like=True):
    """The hosting record of a world."""

    program: str | None
    owner: str | None = None  # Of the last claim that was neither given back nor ended by another call.
    fence: int = 0  # Of the last claim.
    expires_ms: int = 0  # When the claim of `owner` ends.
    ready_ms: int | None = None  # Its time in the ready index; None: it has no key there.
    attempts: int = 0  # How often the next turn has failed.
    error: str | None = None  # Of the last failed turn.
    is_stopped: bool = False
    set_aside: int = 0  # Items that are set aside.
    idle: Idle | None = None  # Until the next claim.

    def is_held_at(self, now_ms: int) -> bool:
        """Whether a host may commit turns."""
        return self.owner is not None and now_ms < self.expires_ms


class Ready(NamedTuple):
    """A key of the ready index."""

    at_ms: int
    world: str
    program: str


class Candidates(NamedTuple):
    """What a host may claim: held worlds with new items, and ready ones, the one that has waited longest first."""

    woken: list[str]
    ready: list[Ready]
    next_ms: int | None  # When the next world becomes ready that is not yet.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hosting).decode


def find(tx: Transaction, world: World) -> Hosting | None:
    """The hosting record; None if the world never had a program."""
    stored = tx.get(record_key(world))
    return None if stored is None else _decode(stored)


def note_work(tx: Transaction, world: World) -> None:
    """Tell hosts that an item arrived: the world is ready, or its host is woken. Does nothing without a program."""
    record = find(tx, world)
    if record is None or record.program is None or record.is_stopped:
        return
    if record.owner is not None:
        # A claim that has ended is in the ready index already, and the next one returns all items.
        wake = _wakes(world.universe).key(record.owner, world.name)
        if record.is_held_at(tx.now_ms) and tx.get(wake) is None:
            tx.put(wake, b"")
    elif record.ready_ms is None and worlds.describe(tx, world).state is WorldState.ACTIVE:
        write(tx, world, record, msgspec.structs.replace(record, ready_ms=tx.now_ms))


def note_ready(tx: Transaction, world: World) -> None:
    """Have a host claim an idle world, also without items."""
    record = find(tx, world)
    if record is not None:
        write(tx, world, record, end_claim(record, ready_ms=tx.now_ms))


def candidates(tx: Transaction, universe: str, *, programs: Iterable[str], owner: str | None, limit: int) -> Candidates:
    """What a host may claim now. Reads the indexes only, so idle worlds cost nothing, however many there are."""
    woken: list[str] = []
    if owner is not None:
        wakes = _wakes(universe)
        woken = [wakes.unpack(key)[1] for key, _ in tx.scan(*wakes.range(owner), limit=limit)]
    found: list[Ready] = []
    ready = _ready(universe)
    for program in programs:
        for key, _ in tx.scan(*ready.range(program), limit=limit + 1):
            _, at_ms, name = ready.unpack(key)
            found.append(Ready(at_ms, name, program))
    found.sort()
    due = [each for each in found if each.at_ms <= tx.now_ms]
    next_ms = found[len(due)].at_ms if len(due) < len(found) else None
    return Candidates(woken, due[: max(limit - len(woken), 0)], next_ms)


def require_claim(tx: Transaction, world: World, *, owner: str, fence: int) -> Hosting:
    """The record of a world that this host holds.

    An active world need not be checked for: only such worlds have a claim.

    Raises:
        WorldNotActive, WorldNotFound: the world is paused, archived or deleted.
        LeaseConflict: the host gave it back, or lost it.
        LeaseExpired: the claim has ended.
    """
    record = find(tx, world)
    if record is None or (record.owner, record.fence) != (owner, fence):
        worlds.require_active(tx, world)
        raise LeaseConflict(
            f"{owner} does not hold world {world.name} with fence {fence} any more; stop, and claim it again"
        )
    if not record.is_held_at(tx.now_ms):
        raise LeaseExpired(f"The claim of {owner} on world {world.name} has ended; stop, and claim it again")
    return record


def require_unheld(tx: Transaction, world: World) -> None:
    """Check that no host holds the world: at most one process writes its journal.

    Raises:
        WorldHeld: a host holds it.
    """
    record = find(tx, world)
    if record is not None and record.is_held_at(tx.now_ms):
        raise WorldHeld(
            f"{record.owner} holds world {world.name} until {record.expires_ms}, and only that host writes its "
            "journal; put an item into the inbox instead, or remove the program first"
        )


def end_claim(record: Hosting, *, ready_ms: int | None, idle: Idle | None = None) -> Hosting:
    """The record without its claim, to be `write`n; `ready_ms` is when another host may claim the world, if at all."""
    return msgspec.structs.replace(record, owner=None, expires_ms=0, ready_ms=ready_ms, idle=idle)


def write(tx: Transaction, world: World, before: Hosting | None, after: Hosting) -> None:
    """Replace the record, and update the indexes."""
    if before is not None:
        if before.ready_ms is not None and _ready_of(before) != _ready_of(after):
            tx.delete(_ready(world.universe).key(before.program, before.ready_ms, world.name))
        if before.owner is not None and (before.owner, before.fence) != (after.owner, after.fence):
            clear_wake(tx, world, before.owner)
    if after.ready_ms is not None and (before is None or _ready_of(before) != _ready_of(after)):
        tx.put(_ready(world.universe).key(after.program, after.ready_ms, world.name), b"")
    tx.put(record_key(world), _encode(after))


def clear_wake(tx: Transaction, world: World, owner: str) -> bool:
    """Remove the wake key of a world; whether it had one."""
    wake = _wakes(world.universe).key(owner, world.name)
    if tx.get(wake) is None:
        return False
    tx.delete(wake)
    return True


def clear_stale(tx: Transaction, world: World, ready: Ready) -> None:
    """Remove a key of the ready index that does not match the record: hosts would find it again and again."""
    key = _ready(world.universe).key(ready.program, ready.at_ms, world.name)
    if tx.get(key) is not None:
        tx.delete(key)


def clear(tx: Transaction, world: World, incarnation: int, limit: int) -> bool:
    """Remove the record of a deleting world, and its keys in the indexes; whether none are left."""
    del limit  # There are three keys at most.
    record = find(tx, world)
    if record is not None and worlds.is_deleting(tx, world, incarnation):
        write(tx, world, record, end_claim(record, ready_ms=None))
        worlds.keep_fence(tx, world, record.fence)
        tx.delete(record_key(world))
    return True


def watch_prefixes(universe: str, programs: Iterable[str], owner: str) -> list[bytes]:
    """The key prefixes to watch for worlds that a host may claim."""
    return [_wakes(universe).key(owner), *(_ready(universe).key(program) for program in programs)]


def _ready_of(record: Hosting) -> tuple[str | None, int | None]:
    return record.program, record.ready_ms


@lru_cache(maxsize=4_096)
def record_key(world: World) -> bytes:
    """Where the hosting record is stored."""
    return subspace(world).key("hosting")


@lru_cache(maxsize=256)
def _ready(universe: str) -> Subspace:
    return Subspace("u", universe, "hosting", "ready")


@lru_cache(maxsize=256)
def _wakes(universe: str) -> Subspace:
    return Subspace("u", universe, "hosting", "wake")
