"""Timers: times at which worlds want an item in their inbox.

    (u, universe, "timers", "due", deliver_at_ns, intent_hash, world)  ->  height of the record that asks, payload
    (u, universe, "w", world, "timer", intent_hash)                    ->  deliver_at_ns

A world has at most one timer of each intent hash: setting it again replaces it. `timer_firing` moves the timers that
are due into the inboxes of their worlds.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.kv import Event, Subspace, Transaction
from fastness.layers.page_tokens import key_after, token_of
from fastness.layers.worlds import World, is_deleting, subspace
from fastness.wire.inboxes import Timer
from fastness.wire.timers import TimerInfo, TimerPage

_NS_PER_MS: Final = 1_000_000


class TimerSet(Event, frozen=True, gc=False):
    """A timer was set."""

    universe: str


class DueTimer(NamedTuple):
    """A timer, as the due index has it."""

    deliver_at_ns: int
    intent_hash: bytes
    world: str


class StoredTimer(msgspec.Struct, frozen=True, array_like=True):
    """The value of a timer."""

    height: int
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredTimer).decode
_decode_time = msgspec.msgpack.Decoder(int).decode


def set(tx: Transaction, world: World, height: int, timer: Timer) -> None:
    """Set a timer that the record at `height` asks for; it replaces the world's timer with the same intent hash.

    The timer must be valid (`wire.inboxes.check_requests`).
    """
    cancel(tx, world, timer.intent_hash)
    due = DueTimer(timer.deliver_at_ns, timer.intent_hash, world.name)
    tx.put(_due_key(world.universe, due), _encode(StoredTimer(height, timer.payload)))
    tx.put(_world_key(world, timer.intent_hash), _encode(timer.deliver_at_ns))
    tx.emit(TimerSet(world.universe))


def cancel(tx: Transaction, world: World, intent_hash: bytes) -> bool:
    """Remove the world's timer with this intent hash; whether there was one."""
    key = _world_key(world, intent_hash)
    stored = tx.get(key)
    if stored is None:
        return False
    tx.delete(_due_key(world.universe, DueTimer(_decode_time(stored), intent_hash, world.name)))
    tx.delete(key)
    return True


def take(tx: Transaction, universe: str, due: DueTimer) -> StoredTimer | None:
    """Remove a timer and return it; None if it is gone, because it fired, was replaced or was cancelled."""
    key = _due_key(universe, due)
    stored = tx.get(key)
    if stored is None:
        return None
    tx.delete(key)
    tx.delete(_world_key(World(universe, due.world), due.intent_hash))
    return _decode(stored)


def due(tx: Transaction, universe: str, *, until_ns: int, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
    """At most `limit` timers after `after` that are due at `until_ns`, the earliest first. Read them in a snapshot."""
    index = _due(universe)
    begin = index.range()[0] if after is None else _due_key(universe, after) + b"\x00"
    end = max(begin, index.key(until_ns + 1))
    return [DueTimer(*index.unpack(key)) for key, _ in tx.scan(begin, end, limit=limit)]


def next_due_ns(tx: Transaction, universe: str) -> int | None:
    """When the next timer of a universe is due; None if there is none."""
    index = _due(universe)
    first = tx.scan(*index.range(), limit=1)
    return index.unpack(first[0][0])[0] if first else None


def page(tx: Transaction, universe: str, world: str | None, *, after: str, limit: int) -> TimerPage:
    """At most `limit` timers after the token `after` of the page before.

    Those of all worlds are in the order of their times, those of one world in the order of their intent hashes.
    """
    if world is not None:
        return _page_of_world(tx, World(universe, world), after, limit)
    index = _due(universe)
    begin, end = index.range()
    pairs = tx.scan(key_after(index.prefix, after, begin, end), end, limit=limit)
    found = [_info(DueTimer(*index.unpack(key)), _decode(value)) for key, value in pairs]
    return TimerPage(found, token_of(index.prefix, pairs[-1][0]) if len(pairs) == limit else None)


def has_any(tx: Transaction, world: World) -> bool:
    """Whether a world has a timer."""
    return bool(tx.scan(*_own(world).range(), limit=1))


def timer_id(intent_hash: bytes) -> str:
    """The intent hash as text, if it is UTF-8; otherwise as hex digits."""
    try:
        return intent_hash.decode()
    except UnicodeDecodeError:
        return intent_hash.hex()


def clear(tx: Transaction, world: World, incarnation: int, limit: int) -> bool:
    """Remove at most `limit` timers of a deleting world; whether none are left."""
    return not is_deleting(tx, world, incarnation) or cancel_all(tx, world, limit=limit)


def cancel_all(tx: Transaction, world: World, *, limit: int) -> bool:
    """Remove at most `limit` timers of a world; whether none are left."""
    own = _own(world)
    pairs = tx.scan(*own.range(), limit=limit)
    for key, _ in pairs:
        cancel(tx, world, own.unpack(key)[0])
    return len(pairs) < limit


def watch_prefix(universe: str) -> bytes:
    """The key prefix to watch for timers that are set."""
    return _due(universe).prefix


def _page_of_world(tx: Transaction, world: World, after: str, limit: int) -> TimerPage:
    own = _own(world)
    begin, end = own.range()
    pairs = tx.scan(key_after(own.prefix, after, begin, end), end, limit=limit)
    found: list[TimerInfo] = []
    for key, value in pairs:
        due = DueTimer(_decode_time(value), own.unpack(key)[0], world.name)
        if (stored := tx.get(_due_key(world.universe, due))) is not None:
            found.append(_info(due, _decode(stored)))
    return TimerPage(found, token_of(own.prefix, pairs[-1][0]) if len(pairs) == limit else None)


def _info(due: DueTimer, stored: StoredTimer) -> TimerInfo:
    at_ms = -(-due.deliver_at_ns // _NS_PER_MS)
    return TimerInfo(due.world, timer_id(due.intent_hash), at_ms, stored.height, stored.payload)


@lru_cache(maxsize=1_024)
def _due(universe: str) -> Subspace:
    return Subspace("u", universe, "timers", "due")


def _due_key(universe: str, due: DueTimer) -> bytes:
    return _due(universe).key(*due)


def _own(world: World) -> Subspace:
    return subspace(world).at("timer")


def _world_key(world: World, intent_hash: bytes) -> bytes:
    return subspace(world).key("timer", intent_hash)
