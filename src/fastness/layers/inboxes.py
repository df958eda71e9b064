"""Inboxes: the external input of a world, in one order, until it is drained into the journal.

    inbox/next        ->  the sequence of the next item; it only grows
    inbox/e/<seq>     ->  arrival time, and the item
    inbox/first       ->  the first sequence that was not removed; it only grows
    inbox/cursor      ->  the sequence of the last drained item; it only grows
    notify            ->  how many items ever arrived; a hint for waiting readers, without guarantees

The sequence comes from the transaction and not from a clock, so the order of items is the order of their commits, with
any number of writers. One transaction moves items into the journal and advances the cursor, so each item is appended
once, even after a crash. Items stay until a compactor removes those below the cursor. The effects and timers that an
item asks for exist from the drain on (`effects`, `timers`).
"""

from functools import lru_cache
from typing import Final

import msgspec

from fastness.errors import BatchTooLarge, CursorAdvanced, InvalidArgument, InvalidValue, PayloadTooLarge
from fastness.kv import Transaction
from fastness.layers import blobs, effects, hosting, journal_records, journals, timers
from fastness.layers.worlds import World, describe, require_active, require_reachable, subspace
from fastness.limits import (
    BATCH_BYTES_MAX,
    BATCH_ENTRIES_MAX,
    INBOX_INLINE_BYTES_MAX,
    INBOX_ITEM_BYTES_MAX,
)
from fastness.wire.inboxes import DomainEvent, InboxItem, excess_of

_SEQUENCE_BYTES: Final = 8
_SEQUENCES: Final = 1 << 63
_PAGE: Final = 32  # Items that are read at a time where their bytes are bounded.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, InboxItem]).decode


def enqueue(
    tx: Transaction,
    world: World,
    item: InboxItem,
    *,
    requested: bool = False,
    is_checked: bool = False,
    payload_bytes_max: int = INBOX_INLINE_BYTES_MAX,
) -> int:
    """Append an item; returns its sequence. One that the world asked for (`requested`) it gets while it is archived.

    Checks that the item can be drained later: one that could not would block all items after it. An event names its
    sender only if the caller has checked that (`is_checked`).

    Raises:
        InvalidArgument: it names a sender, or has a payload and a blob.
        PayloadTooLarge: the item is too large.
        WorldNotActive: the world is archived.
        BlobNotFound: its payload is a blob that is not stored.
    """
    encoded = _checked(tx.now_ms, item, payload_bytes_max)
    if isinstance(item, DomainEvent) and item.sender is not None and not is_checked:
        raise InvalidArgument("The item has a sender, which only the plane sets; leave it out")
    require_reachable(tx, world, requested=requested)
    if item.payload_blob is not None:
        blobs.use(tx, world.universe, item.payload_blob)
    sequence = _number(tx, _key(world, "next"))
    tx.put(_items(world) + sequence.to_bytes(_SEQUENCE_BYTES, "big"), encoded)
    tx.put(_key(world, "next"), (sequence + 1).to_bytes(_SEQUENCE_BYTES, "big"))
    tx.put(_notify_key(world), (_number(tx, _notify_key(world)) + 1).to_bytes(_SEQUENCE_BYTES, "big"))
    hosting.note_work(tx, world)
    return sequence


def cursor(tx: Transaction, world: World) -> int | None:
    """The sequence of the last drained item; None if none was drained."""
    found = _cursor(tx, world)
    if found is None:
        describe(tx, world)
    return found


def read(tx: Transaction, world: World, *, after: int | None, limit: int) -> list[tuple[int, InboxItem]]:
    """At most `limit` items after the sequence `after`, in order."""
    if after is not None and not 0 <= after < _SEQUENCES:
        raise InvalidArgument(f"{after} is not an item's sequence; pass one that was returned, or None")
    if not _number(tx, _key(world, "next")):
        describe(tx, world)
    prefix = _items(world)
    begin = max(_number(tx, _key(world, "first")), 0 if after is None else after + 1)
    pairs = tx.scan(prefix + begin.to_bytes(_SEQUENCE_BYTES, "big"), prefix + b"\xff" * 9, limit=limit)
    return [(int.from_bytes(key[-_SEQUENCE_BYTES:], "big"), _decode(stored)[1]) for key, stored in pairs]


def read_batch(
    tx: Transaction, world: World, *, after: int | None, limit: int, bytes_max: int
) -> list[tuple[int, InboxItem]]:
    """At most `limit` items after the sequence `after`, with about `bytes_max` bytes; at least one, if there is one."""
    prefix, end = _items(world), _items(world) + b"\xff" * 9
    begin = prefix + (0 if after is None else after + 1).to_bytes(_SEQUENCE_BYTES, "big")
    found: list[tuple[int, InboxItem]] = []
    size = 0
    while len(found) < limit:
        page = tx.scan(begin, end, limit=min(_PAGE, limit - len(found)))
        for key, stored in page:
            size += len(stored)
            if found and size > bytes_max:
                return found
            found.append((int.from_bytes(key[-_SEQUENCE_BYTES:], "big"), _decode(stored)[1]))
        if len(page) < _PAGE:
            break
        begin = page[-1][0] + b"\x00"
    return found


def read_to(tx: Transaction, world: World, last: int) -> list[tuple[int, InboxItem]]:
    """The items after the cursor up to the sequence `last`.

    Raises:
        InvalidArgument: the cursor is not before `last`, or there is no such item.
        BatchTooLarge: there are more than one batch takes.
    """
    after = _cursor(tx, world)
    first = 0 if after is None else after + 1
    if not first <= last < _SEQUENCES:
        raise InvalidArgument(f"Item {last} was taken before: the cursor of world {world.name} is at {after}")
    prefix = _items(world)
    begin, end = (prefix + sequence.to_bytes(_SEQUENCE_BYTES, "big") for sequence in (first, last + 1))
    pairs = tx.scan(begin, end, limit=BATCH_ENTRIES_MAX + 1)
    if len(pairs) > BATCH_ENTRIES_MAX:
        raise BatchTooLarge(f"Item {last} is more than {BATCH_ENTRIES_MAX} items after the cursor; take fewer")
    found = [(int.from_bytes(key[-_SEQUENCE_BYTES:], "big"), _decode(stored)[1]) for key, stored in pairs]
    if not found or found[-1][0] != last:
        raise InvalidArgument(f"There is no item {last} in the inbox of world {world.name}; take one that was returned")
    return found


def set_cursor(tx: Transaction, world: World, last: int) -> None:
    """Move the cursor to `last`, after the caller has checked that it is an item after the cursor."""
    tx.put(_key(world, "cursor"), last.to_bytes(_SEQUENCE_BYTES, "big"))


def has_undrained(tx: Transaction, world: World) -> bool:
    """Whether there are items after the cursor."""
    after = _cursor(tx, world)
    begin = _items(world) + (0 if after is None else after + 1).to_bytes(_SEQUENCE_BYTES, "big")
    return bool(tx.scan(begin, _items(world) + b"\xff" * 9, limit=1))


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


def _index_requests(tx: Transaction, world: World, height: int, item: InboxItem) -> None:
    for number, effect in enumerate(item.effects):
        effects.request(tx, world, height, number, effect)
    for timer in item.timers:
        timers.set(tx, world, height, timer)


def _checked(now_ms: int, item: InboxItem, payload_bytes_max: int) -> bytes:
    """The encoded item, after checking that it is valid."""
    if item.payload and item.payload_blob is not None:
        raise InvalidArgument("The item is invalid: it has a payload and a blob; give one of them")
    try:
        encoded: bytes = _encode((now_ms, item))
    except UnicodeEncodeError as error:
        raise InvalidValue(f"This {type(item).__name__} has a text that is not valid Unicode ({error})") from error
    if (excess := excess_of(item, payload_bytes_max=payload_bytes_max)) is not None:
        raise PayloadTooLarge(f"The item is too large: {excess}")
    # Its journal record is about as long, and a batch holds several of the longest.
    if len(encoded) > INBOX_ITEM_BYTES_MAX:
        raise PayloadTooLarge(f"The item has more than {INBOX_ITEM_BYTES_MAX} bytes in total; split it")
    return encoded


def _cursor(tx: Transaction, world: World) -> int | None:
    stored = tx.get(_key(world, "cursor"))
    return None if stored is None else int.from_bytes(stored, "big")


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
