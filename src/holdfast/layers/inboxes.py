"""Inboxes: the external input of a world, in one order, until it is drained into the journal.

    inbox/next        ->  the sequence of the next item; it only grows
    inbox/e/<seq>     ->  arrival time, and the item
    inbox/first       ->  the first sequence that was not removed; it only grows
    inbox/cursor      ->  the sequence of the last drained item; it only grows
    notify            ->  how many items ever arrived; a hint for waiting readers, without guarantees

    effects/pending/<world>/<height>/<n>               effects and timers that drained items request,
    timers/due/<deliver_at_ns>/<intent_hash>/<world>   until an orchestrator takes them

The sequence comes from the transaction and not from a clock, so the order of items is the order of their commits, with
any number of writers. One transaction moves items into the journal and advances the cursor, so each item is appended
once, even after a crash. Items stay until a compactor removes those below the cursor.
"""

from functools import lru_cache
from typing import Final

import msgspec

from holdfast.errors import CursorAdvanced, InvalidArgument, InvalidValue, PayloadTooLarge
from holdfast.kv import Subspace, Transaction
from holdfast.layers import blobs, journal_records, journals
from holdfast.layers.worlds import World, describe, is_deleting, require_active, require_reachable, subspace
from holdfast.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, INBOX_ITEM_BYTES_MAX, READ_ENTRIES_MAX
from holdfast.wire.inboxes import KINDS, InboxItem, excess_of, fault_of

_SEQUENCE_BYTES: Final = 8
_SEQUENCES: Final = 1 << 63
_KIND_NAMES: Final = ", ".join(kind.__name__ for kind in KINDS)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, InboxItem]).decode


def enqueue(tx: Transaction, world: World, item: InboxItem) -> int:
    """Append an item; returns its sequence.

    Checks that the item can be drained later: one that could not would block all items after it.

    Raises:
        InvalidValue: it is not an inbox item, or one of its fields has the wrong type.
        PayloadTooLarge: the item is too large.
        WorldNotActive: the world is archived.
        BlobNotFound: its payload is a blob that is not stored.
    """
    encoded = _checked(tx.now_ms, item)
    require_reachable(tx, world)
    if item.payload_blob is not None:
        blobs.use(tx, world.universe, item.payload_blob)
    sequence = _number(tx, _key(world, "next"))
    tx.put(_items(world) + sequence.to_bytes(_SEQUENCE_BYTES, "big"), encoded)
    tx.put(_key(world, "next"), (sequence + 1).to_bytes(_SEQUENCE_BYTES, "big"))
    tx.put(_notify_key(world), (_number(tx, _notify_key(world)) + 1).to_bytes(_SEQUENCE_BYTES, "big"))
    return sequence


def cursor(tx: Transaction, world: World) -> int | None:
    """The sequence of the last drained item; None if none was drained."""
    stored = tx.get(_key(world, "cursor"))
    if stored is None:
        describe(tx, world)
        return None
    return int.from_bytes(stored, "big")


def read(tx: Transaction, world: World, *, after: int | None, limit: int) -> list[tuple[int, InboxItem]]:
    """At most `limit` items after the sequence `after`, in order."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; one read takes 1 to {READ_ENTRIES_MAX} items")
    if after is not None and not 0 <= after < _SEQUENCES:
        raise InvalidArgument(f"{after} is not an item's sequence; pass one that was returned, or None")
    if not _number(tx, _key(world, "next")):
        describe(tx, world)
    prefix = _items(world)
    begin = max(_number(tx, _key(world, "first")), 0 if after is None else after + 1)
    pairs = tx.scan(prefix + begin.to_bytes(_SEQUENCE_BYTES, "big"), prefix + b"\xff" * 9, limit=limit)
    return [(int.from_bytes(key[-_SEQUENCE_BYTES:], "big"), _decode(stored)[1]) for key, stored in pairs]


def commit_cursor(tx: Transaction, world: World, *, expected: int | None, new: int) -> None:
    """Move the cursor from `expected` to `new`.

    Raises:
        CursorAdvanced: the cursor is not at `expected`.
        InvalidArgument: `new` is not after the cursor, or is not an item.
    """
    if not 0 <= new < _SEQUENCES:
        raise InvalidArgument(f"{new} is not an item's sequence; the cursor points at an item that was drained")
    require_active(tx, world)
    actual = cursor(tx, world)
    if actual != expected:
        raise CursorAdvanced(expected, actual)
    if actual is not None and new <= actual:
        raise InvalidArgument(f"The cursor is {actual} and only grows; {new} is refused")
    if tx.get(_items(world) + new.to_bytes(_SEQUENCE_BYTES, "big")) is None:
        raise InvalidArgument(f"There is no item {new}; the cursor points at an item that was drained")
    tx.put(_key(world, "cursor"), new.to_bytes(_SEQUENCE_BYTES, "big"))


def drain(tx: Transaction, world: World, *, limit: int = BATCH_ENTRIES_MAX) -> list[int]:
    """Move the next items into the journal, at most one batch; returns their heights.

    Reads and checks everything before it writes anything.
    """
    if not 0 < limit <= BATCH_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; one drain takes 1 to {BATCH_ENTRIES_MAX} items")
    require_active(tx, world)
    after = cursor(tx, world)
    height = journals.head(tx, world)
    batch: list[bytes] = []
    taken: list[tuple[int, InboxItem]] = []
    size = 0
    for sequence, item in read(tx, world, after=after, limit=limit):
        record = journal_records.ingress(sequence, item)
        size += len(record)
        if size > BATCH_BYTES_MAX:
            break
        batch.append(record)
        taken.append((sequence, item))
    if not taken:
        return []
    journals.write(tx, world, batch, height)
    commit_cursor(tx, world, expected=after, new=taken[-1][0])
    for offset, (_, item) in enumerate(taken, height):
        _index_requests(tx, world, offset, item)
    return list(range(height, height + len(taken)))


def remove_drained(tx: Transaction, world: World, *, grace_ms: int, limit: int) -> int:
    """Remove at most `limit` items below the cursor that arrived at least `grace_ms` ago; returns how many."""
    last = cursor(tx, world)
    first = _number(tx, _key(world, "first"))
    if last is None or first >= last:
        return 0
    prefix = _items(world)
    removed = 0
    for key, stored in tx.scan(prefix + first.to_bytes(8, "big"), prefix + last.to_bytes(8, "big"), limit=limit):
        if _decode(stored)[0] > tx.now_ms - grace_ms:
            break
        tx.delete(key)
        removed += 1
    if removed:
        tx.put(_key(world, "first"), (first + removed).to_bytes(_SEQUENCE_BYTES, "big"))
    return removed


def clear_timers(tx: Transaction, world: World, incarnation: int, begin: bytes, limit: int) -> bytes | None:
    """Remove the due timers of a deleting world among the next `limit` ones from the key `begin` on.

    The index is ordered by time, so it holds the timers of all worlds. Returns where to continue; None at the end.
    """
    if not is_deleting(tx, world, incarnation):
        return None
    due = Subspace("u", world.universe, "timers", "due")
    first, end = due.range()
    pairs = tx.scan(max(begin, first), end, limit=limit)
    for key, _ in pairs:
        if due.unpack(key)[-1] == world.name:
            tx.delete(key)
    return pairs[-1][0] + b"\x00" if len(pairs) == limit else None


def start_at(tx: Transaction, world: World, sequence: int) -> None:
    """Number the items of a new world from `sequence` on."""
    tx.put(_key(world, "next"), sequence.to_bytes(_SEQUENCE_BYTES, "big"))
    tx.put(_key(world, "first"), sequence.to_bytes(_SEQUENCE_BYTES, "big"))


def next_sequence(tx: Transaction, world: World) -> int:
    """The sequence of the next item."""
    return _number(tx, _key(world, "next"))


def arrivals(tx: Transaction, world: World) -> int:
    """How many items ever arrived: a hint that something may have changed."""
    return _number(tx, _notify_key(world))


def has_pending_effects(tx: Transaction, world: World, below: int) -> bool:
    """Whether an effect that a record below the height `below` requests is still pending."""
    pending = Subspace("u", world.universe, "effects", "pending")
    begin, _ = pending.range(world.name)
    return bool(tx.scan(begin, pending.key(world.name, below), limit=1))


def _index_requests(tx: Transaction, world: World, height: int, item: InboxItem) -> None:
    for number, effect in enumerate(item.effects):
        pending = Subspace("u", world.universe, "effects", "pending")
        tx.put(pending.key(world.name, height, number), _encode(effect))
    for timer in item.timers:
        due = Subspace("u", world.universe, "timers", "due")
        tx.put(due.key(timer.deliver_at_ns, timer.intent_hash, world.name), _encode((height, timer.payload)))


def _checked(now_ms: int, item: InboxItem) -> bytes:
    """The encoded item, after checking that it is valid and can be decoded."""
    if not isinstance(item, KINDS):
        raise InvalidValue(f"{type(item).__name__} is not an inbox item; pass one of {_KIND_NAMES}")
    try:
        encoded: bytes = _encode((now_ms, item))
        _decode(encoded)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidValue(f"This {type(item).__name__} has a field of the wrong type ({error})") from error
    if (fault := fault_of(item)) is not None:
        raise InvalidArgument(f"The item is invalid: {fault}")
    if (excess := excess_of(item)) is not None:
        raise PayloadTooLarge(f"The item is too large: {excess}")
    # Its journal record is about as long, and a batch holds several of the longest.
    if len(encoded) > INBOX_ITEM_BYTES_MAX:
        raise PayloadTooLarge(f"The item has more than {INBOX_ITEM_BYTES_MAX} bytes in total; split it")
    return encoded


def _number(tx: Transaction, key: bytes) -> int:
    return int.from_bytes(tx.get(key) or b"", "big")


@lru_cache(maxsize=4_096)
def _items(world: World) -> bytes:
    """The key prefix of items. The sequence follows as eight bytes, which sort like numbers."""
    return subspace(world).key("inbox", "e")


def _key(world: World, name: str) -> bytes:
    return subspace(world).key("inbox", name)


def _notify_key(world: World) -> bytes:
    return subspace(world).key("notify")
