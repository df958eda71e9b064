"""Effects: the external calls that worlds ask for, until they are complete or dead.

    (u, universe, "effects", "pending", world, height, number)         ->  a StoredEffect
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
from fastness.limits import EFFECT_ATTEMPTS
from fastness.wire.effects import EffectInfo, EffectPage
from fastness.wire.inboxes import Effect

PENDING: Final = "pending"
INFLIGHT: Final = "inflight"


class StoredEffect(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of an effect."""

    kind: str
    intent_hash: bytes
    due_ms: int  # Where it is in the due index.
    params: bytes = b""
    max_attempts: int = EFFECT_ATTEMPTS
    attempts: int = 0  # How many have begun.
    fence: int = 0
    owner: str | None = None  # Who carries it out, until `due_ms`. None: it is pending.
    error: str | None = None  # Of the last attempt that failed.


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
_decode = msgspec.msgpack.Decoder(StoredEffect).decode


def request(tx: Transaction, world: World, height: int, number: int, effect: Effect) -> None:
    """Store an effect that the record at `height` asks for; it can be claimed from now on.

    The effect must be valid (`wire.inboxes.check_requests`).
    """
    record = StoredEffect(effect.kind, effect.intent_hash, tx.now_ms, effect.params, effect.max_attempts)
    write(tx, world.universe, EffectKey(world.name, height, number), record, due_ms=tx.now_ms)


def find(tx: Transaction, universe: str, key: EffectKey) -> StoredEffect | None:
    """The record of an effect; None if it was never asked for, or is complete, dead or removed."""
    stored = tx.get(_pending(universe).key(*key))
    return None if stored is None else _decode(stored)


def write(tx: Transaction, universe: str, key: EffectKey, record: StoredEffect, *, due_ms: int) -> StoredEffect:
    """Store a record that is due at `due_ms`, and move its entry in the due index."""
    if record.due_ms != due_ms:
        tx.delete(_due_key(universe, DueEffect(record.due_ms, record.kind, key)))
    record = msgspec.structs.replace(record, due_ms=due_ms)
    tx.put(_due_key(universe, DueEffect(due_ms, record.kind, key)), b"")
    tx.put(_pending(universe).key(*key), _encode(record))
    return record


def remove(tx: Transaction, universe: str, key: EffectKey, record: StoredEffect) -> None:
    """Remove an effect."""
    keep_fence(tx, World(universe, key.world), record.fence)
    tx.delete(_pending(universe).key(*key))
    tx.delete(_due_key(universe, DueEffect(record.due_ms, record.kind, key)))


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
    found = [info(EffectKey(*pending.unpack(key)), _decode(value)) for key, value in pairs]
    return EffectPage(found, token_of(pending.prefix, pairs[-1][0]) if len(pairs) == limit else None)


def info(key: EffectKey, record: StoredEffect) -> EffectInfo:
    """An effect as it is shown to callers."""
    return EffectInfo(
        *key,
        record.kind,
        record.intent_hash,
        record.params,
        PENDING if record.owner is None else INFLIGHT,
        record.due_ms,
        record.attempts,
        record.max_attempts,
        record.fence,
        record.owner,
        record.error,
    )


def clear(tx: Transaction, world: World, incarnation: int, limit: int) -> bool:
    """Remove at most `limit` effects of a deleting world; whether none are left."""
    if not is_deleting(tx, world, incarnation):
        return True
    pending = _pending(world.universe)
    pairs = tx.scan(*pending.range(world.name), limit=limit)
    for key, value in pairs:
        remove(tx, world.universe, EffectKey(*pending.unpack(key)), _decode(value))
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


def _due_key(universe: str, entry: DueEffect) -> bytes:
    return _due(universe, entry.kind).key(entry.at_ms, *entry.effect)
