"""Effects: the external calls that worlds ask for, until they are complete or dead.

    (u, universe, "effects", "pending", world, height, number)         ->  its EffectInfo
    (u, universe, "effects", "due", kind, at_ms, world, height, number) ->  nothing; when it can be claimed

    pending ── claim ──► inflight ── complete ──► removed, with a receipt in the inbox
       ▲                    │  └─── failed for the last time ──► removed, with a receipt that has the error
       └─ failed, back-off ─┘
                    └─ the lease ends: it can be claimed again

An effect has one record in all its states, so that everything that looks for unfinished effects of a world finds it.
While it is in flight, it is due when its lease ends. `effect_leases` has the operations on it; this module has what a
world asks for, and what is removed with the world.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.kv import Subspace, Transaction
from fastness.layers.page_tokens import key_after, token_of
from fastness.layers.worlds import World, is_deleting, keep_fence
from fastness.wire.effects import ClaimedEffect, EffectInfo, EffectPage
from fastness.wire.inboxes import Effect

PENDING: Final = "pending"
INFLIGHT: Final = "inflight"


class EffectKey(NamedTuple):
    """Identifies an effect of a universe."""

    world: str
    height: int
    number: int


class DueEffect(NamedTuple):
    """An entry of the due index."""

    at_ms: int
    kind: str
    effect: EffectKey


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EffectInfo).decode


def request(tx: Transaction, world: World, height: int, number: int, effect: Effect) -> None:
    """Store an effect that the record at `height` asks for; it can be claimed from now on.

    The effect must be valid (`wire.inboxes.check_requests`).
    """
    due_ms, kind, intent_hash, most = tx.now_ms, effect.kind, effect.intent_hash, effect.max_attempts
    asked = EffectInfo(world.name, height, number, kind, intent_hash, effect.params, PENDING, due_ms, 0, most)
    write(tx, world.universe, asked, due_ms=due_ms)


def find(tx: Transaction, universe: str, key: EffectKey) -> EffectInfo | None:
    """An effect; None if it was never asked for, or is complete, dead or removed."""
    stored = tx.get(_pending(universe).key(*key))
    return None if stored is None else _decode(stored)


def write(tx: Transaction, universe: str, effect: EffectInfo, *, due_ms: int) -> EffectInfo:
    """Store an effect that is due at `due_ms`, and move its entry in the due index. One with an owner is in flight."""
    if effect.due_ms != due_ms:
        tx.delete(_due_key(universe, effect))
    state = PENDING if effect.owner is None else INFLIGHT
    effect = msgspec.structs.replace(effect, state=state, due_ms=due_ms)
    tx.put(_due_key(universe, effect), b"")
    tx.put(_pending(universe).key(*key_of(effect)), _encode(effect))
    return effect


def remove(tx: Transaction, universe: str, effect: EffectInfo) -> None:
    """Remove an effect."""
    keep_fence(tx, World(universe, effect.world), effect.fence)
    tx.delete(_pending(universe).key(*key_of(effect)))
    tx.delete(_due_key(universe, effect))


def due(tx: Transaction, universe: str, kinds: list[str], *, until_ms: int, limit: int) -> list[DueEffect]:
    """At most `limit` entries of these kinds that are due at `until_ms`, the oldest first. Read them in a snapshot."""
    found: list[DueEffect] = []
    for kind in kinds:
        of_kind = _due(universe, kind)
        begin, _ = of_kind.range()
        for key, _ in tx.scan(begin, of_kind.key(until_ms + 1), limit=limit):
            at_ms, *effect = of_kind.unpack(key)
            found.append(DueEffect(at_ms, kind, EffectKey(*effect)))
    return sorted(found)[:limit]


def next_due_ms(tx: Transaction, universe: str, kinds: list[str]) -> int | None:
    """When the next effect of these kinds is due; None if there is none."""
    firsts = [
        of_kind.unpack(key)[0]
        for of_kind in (_due(universe, kind) for kind in kinds)
        for key, _ in tx.scan(*of_kind.range(), limit=1)
    ]
    return min(firsts, default=None)


def has_unfinished(tx: Transaction, world: World, below: int) -> bool:
    """Whether an effect that a record below the height `below` asks for is neither complete nor dead."""
    pending = _pending(world.universe)
    begin, _ = pending.range(world.name)
    return bool(tx.scan(begin, pending.key(world.name, below), limit=1))


def page(tx: Transaction, universe: str, world: str | None, *, after: str, limit: int) -> EffectPage:
    """At most `limit` effects of a world, or of all worlds, after the token `after` of the page before."""
    pending = _pending(universe)
    begin, end = pending.range() if world is None else pending.range(world)
    pairs = tx.scan(key_after(pending.prefix, after, begin, end), end, limit=limit)
    return EffectPage(
        [_decode(value) for _, value in pairs], token_of(pending.prefix, pairs[-1][0]) if len(pairs) == limit else None
    )


def key_of(effect: EffectInfo | ClaimedEffect) -> EffectKey:
    """What identifies the effect."""
    return EffectKey(effect.world, effect.height, effect.number)


def clear(tx: Transaction, world: World, incarnation: int, limit: int) -> bool:
    """Remove at most `limit` effects of a deleting world; whether none are left."""
    if not is_deleting(tx, world, incarnation):
        return True
    pending = _pending(world.universe)
    pairs = tx.scan(*pending.range(world.name), limit=limit)
    for _, value in pairs:
        remove(tx, world.universe, _decode(value))
    return len(pairs) < limit


def watch_prefixes(universe: str, kinds: list[str]) -> list[bytes]:
    """The key prefixes to watch for effects of these kinds that become due."""
    return [_due(universe, kind).prefix for kind in kinds]


@lru_cache(maxsize=1_024)
def _pending(universe: str) -> Subspace:
    return Subspace("u", universe, "effects", "pending")


@lru_cache(maxsize=1_024)
def _due(universe: str, kind: str) -> Subspace:
    return Subspace("u", universe, "effects", "due", kind)


def _due_key(universe: str, effect: EffectInfo) -> bytes:
    return _due(universe, effect.kind).key(effect.due_ms, *key_of(effect))
