"""A transaction: a view of the committed pairs, overlaid with the transaction's own writes.

Writes stay in memory until the commit, so a function that raises has written nothing. Every backend gets
read-your-writes for `get` and `scan` from this module:

    cleared   ranges deleted, each before any write that is still in `writes`
    writes    key -> value, or None where the key is deleted

A backend commits by first deleting the cleared ranges, then applying the writes in any order.
"""

import uuid
from typing import TYPE_CHECKING, NoReturn, cast

from fastness.clock import Clock, IdSource
from fastness.errors import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyTooLarge,
    ReadOnlyTransaction,
    TransactionEnded,
    TransactionTooLarge,
    ValueTooLarge,
)
from fastness.kv.events import Event
from fastness.limits import KEY_BYTES_MAX, SCAN_ITEMS_MAX, TRANSACTION_BYTES_MAX, VALUE_BYTES_MAX, WRITE_COST_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastness.kv.contract import CallerUsage, LockingView, View

Pair = tuple[bytes, bytes]


class Transaction:
    """The first argument of a layer function. Usable only by that function, until it returns."""

    __slots__ = (
        "_clock",
        "_ids",
        "_now_ms",
        "_open",
        "_writable",
        "cleared",
        "data_format",
        "defaults",
        "events",
        "fence_floor",
        "is_exposed",
        "is_kept",
        "low_space",
        "size_bytes",
        "usage",
        "view",
        "writer",
        "writes",
    )

    def __init__(self, view: "View", *, clock: Clock, ids: IdSource, writable: bool = True, writer: str = "") -> None:
        self._clock = clock
        self._ids = ids
        self._now_ms: int | None = None
        self._writable = writable
        self._open = True
        # What a backend needs to commit.
        self.view = view  # The committed pairs, without what this transaction wrote.
        self.cleared: tuple[tuple[bytes, bytes], ...] = ()  # Ranges to delete before `writes` are applied.
        self.writes: dict[bytes, bytes | None] = {}  # Key to value, or to None where the key is deleted.
        self.size_bytes = 0  # Bytes of keys and values, plus `limits.WRITE_COST_BYTES` for each write.
        self.writer = writer  # Names the process among several that write; empty where there is only one.
        self.events: list[Event] = []  # Published after the commit.
        self.low_space = False  # Only work that frees space should write: the disk is nearly full.
        self.data_format = 0  # The format to write, if it is not this version's newest. See `kv.formats`.
        self.defaults: Mapping[type, object] = {}  # See `Database.defaults`.
        self.usage: CallerUsage | None = None  # See `Database.usage`.
        self.fence_floor = 0  # Every fence that is issued must be above it.
        self.is_exposed = False  # Transactions that may be lost must not show its writes before they are durable.
        self.is_kept = False  # A power failure must not undo it once it has returned.

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, or None."""
        if key.__class__ is not bytes:
            raise _not_bytes_error("A key", key)
        if not self._open:
            raise _ended_error()
        writes = self.writes
        if key in writes:
            return writes[key]
        if self.cleared:
            for begin, end in self.cleared:
                if begin <= key < end:
                    return None
        return self.view.get(key)

    def scan(self, begin: bytes, end: bytes, *, limit: int, reverse: bool = False) -> list[Pair]:
        """At most `limit` pairs with begin <= key < end, in key order; `reverse` returns the last ones, backwards."""
        self._check_range(begin, end)
        if limit.__class__ is not int or not 0 < limit <= SCAN_ITEMS_MAX:
            raise InvalidArgument(
                f"limit is {limit}; a scan returns 1 to {SCAN_ITEMS_MAX} pairs, read more with kv.pages"
            )
        return [] if begin == end else self.visible_pairs(begin, end, limit, reverse)

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`."""
        if not self._writable or key.__class__ is not bytes or value.__class__ is not bytes:
            self._raise_invalid_write(key, value)
        length, size = len(key), len(value)
        if not 0 < length <= KEY_BYTES_MAX or size > VALUE_BYTES_MAX:
            self._raise_invalid_write(key, value)
        size += self.size_bytes + length + WRITE_COST_BYTES
        if size > TRANSACTION_BYTES_MAX:
            raise _too_large_error()
        self.size_bytes = size
        self.writes[key] = value

    def delete(self, key: bytes) -> None:
        """Remove `key`. Removing a missing key has no effect."""
        if not self._writable or key.__class__ is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
            self._raise_invalid_write(key, b"")
        size = self.size_bytes + len(key) + WRITE_COST_BYTES
        if size > TRANSACTION_BYTES_MAX:
            raise _too_large_error()
        self.size_bytes = size
        self.writes[key] = None

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove every key with begin <= key < end."""
        self._check_range(begin, end)
        if not self._writable:
            self._raise_invalid_write(begin, b"")
        if begin == end:
            return
        size = self.size_bytes + len(begin) + len(end) + WRITE_COST_BYTES
        if size > TRANSACTION_BYTES_MAX:
            raise _too_large_error()
        self.size_bytes = size
        self._drop_writes(begin, end)
        self.cleared += ((begin, end),)

    @property
    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, the same throughout this transaction."""
        if self._now_ms is None:
            if not self._open:
                raise _ended_error()
            self._now_ms = self._clock.now_ms()
        return self._now_ms

    def keep(self) -> None:
        """Let the caller wait until the writes are durable, although it passed `may_lose`."""
        self.is_kept = True

    def expose(self) -> None:
        """Let later transactions with `may_lose` wait until these writes are durable, because they may show them."""
        self.is_exposed = True

    def share(self, prefix: bytes) -> None:
        """Let other transactions that call this change the part of the key space at `prefix` at the same time.

        Call it before the first read or write there. The transaction must write only keys that no other one writes: new
        ones, or those of its `writer`. What it reads there must not depend on the keys that others write meanwhile.
        """
        if self.writer:
            cast("LockingView", self.view).share(prefix)

    def unshare(self, prefix: bytes) -> None:
        """Have the part of the key space at `prefix` alone from now on, although `share` was called for it.

        What was read there before, and only transactions that do not share the part write, has not changed meanwhile.
        """
        if self.writer:
            cast("LockingView", self.view).unshare(prefix)

    def prefetch(self, *keys: bytes) -> None:
        """Read keys of one part of the key space together, where a read is a round trip: `get` then has them.

        Elsewhere it does nothing. It changes no answer, only how long they take.
        """
        if self.writer:
            cast("LockingView", self.view).prefetch(*keys)

    def emit(self, event: Event) -> None:
        """Record an event to publish after the commit, where the caller of the transaction publishes events."""
        self.events.append(event)

    def new_id(self) -> uuid.UUID:
        """A fresh UUIDv7, larger than every earlier one of this process."""
        if not self._open:
            raise _ended_error()
        return self._ids.new_id(self.now_ms)

    def new_id_bytes(self) -> bytes:
        """`new_id` as 16 bytes, at half the cost."""
        if not self._open:
            raise _ended_error()
        return self._ids.new_number(self.now_ms).to_bytes(16, "big")

    def new_numbers(self, count: int) -> list[int]:
        """`count` fresh UUIDv7s as integers, each larger than the one before it."""
        if not self._open:
            raise _ended_error()
        return self._ids.new_numbers(self.now_ms, count)

    # What a backend needs to commit.

    def end(self) -> None:
        """Reject every further use."""
        self._open = self._writable = False

    @property
    def has_writes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.writes or self.cleared)

    def visible_pairs(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        """`scan` without its checks, for nested transactions."""
        if not self.writes and not self.cleared:
            return self.view.scan(begin, end, limit, reverse)
        own = {key: value for key, value in self.writes.items() if begin <= key < end}
        # Each own write hides at most one stored pair, so this many stored pairs leave at least `limit`.
        wanted = limit + len(own)
        stored: list[Pair] = []
        for left, right in self._uncleared(begin, end, reverse):
            stored += self.view.scan(left, right, wanted - len(stored), reverse)
            if len(stored) >= wanted:
                break
        merged = [pair for pair in stored if pair[0] not in own]
        merged += [(key, value) for key, value in own.items() if value is not None]
        merged.sort(reverse=reverse)
        return merged[:limit]

    def renew_time(self) -> None:
        """Let the next nested transaction read the time again."""
        self._now_ms = None

    def nested(self) -> "Transaction":
        """A transaction that sees this one's writes. `merge` adds its own writes to this one.

        Skipping `merge` discards the nested writes, so functions that share a commit fail independently.
        """
        view = _NestedView(self)
        nested = Transaction(view, clock=view, ids=self._ids, writable=self._writable, writer=self.writer)
        nested.low_space, nested.fence_floor = self.low_space, self.fence_floor
        nested.data_format, nested.defaults, nested.usage = self.data_format, self.defaults, self.usage
        return nested

    def unmerged_bytes(self, prefix: bytes | None = None) -> int:
        """The bytes that this transaction and those that it is nested in have written, and not yet committed.

        With `prefix`, exactly those of the keys that start with it. Otherwise at least those of all keys.
        """
        if prefix is None:
            size = self.size_bytes
        else:
            size = sum(
                len(key) + len(value)
                for key, value in self.writes.items()
                if value is not None and key.startswith(prefix)
            )
        return size + self.view.parent.unmerged_bytes(prefix) if isinstance(self.view, _NestedView) else size

    def discard_writes(self) -> None:
        """Discard all writes and events."""
        self.writes.clear()
        self.events.clear()
        self.cleared, self.size_bytes, self.is_exposed, self.is_kept = (), 0, False, False

    def merge(self, other: "Transaction") -> None:
        """Add the writes and events of `other`, a nested transaction."""
        self.events += other.events
        for begin, end in other.cleared:
            self._drop_writes(begin, end)
            self.cleared += ((begin, end),)
        self.writes |= other.writes
        self.size_bytes += other.size_bytes
        self.is_exposed = self.is_exposed or other.is_exposed
        self.is_kept = self.is_kept or other.is_kept

    def _uncleared(self, begin: bytes, end: bytes, reverse: bool) -> list[tuple[bytes, bytes]]:
        """The parts of begin..end that no `delete_range` covers, in scan order."""
        parts = []
        for left, right in sorted(self.cleared):
            if right <= begin:
                continue
            if left >= end:
                break
            if begin < left:
                parts.append((begin, left))
            begin = right
        if begin < end:
            parts.append((begin, end))
        return parts[::-1] if reverse else parts

    def _drop_writes(self, begin: bytes, end: bytes) -> None:
        for key in [key for key in self.writes if begin <= key < end]:
            del self.writes[key]

    def _check_range(self, begin: bytes, end: bytes) -> None:
        if begin.__class__ is not bytes or end.__class__ is not bytes:
            raise _not_bytes_error("A range's bound", end if begin.__class__ is bytes else begin)
        if begin > end:
            raise InvalidArgument(
                "The range ends before it begins; swap the bounds, or pass reverse=True to scan backwards"
            )
        if not self._open:
            raise _ended_error()

    def _raise_invalid_write(self, key: bytes, value: bytes) -> NoReturn:
        """Raise the error for a rejected write."""
        if not self._open:
            raise _ended_error()
        if not self._writable:
            raise ReadOnlyTransaction("This is a read snapshot; write inside transact instead")
        if key.__class__ is not bytes:
            raise _not_bytes_error("A key", key)
        if not key:
            raise InvalidKey("A key must not be empty; put it below a subspace")
        if len(key) > KEY_BYTES_MAX:
            raise KeyTooLarge(f"The key has {len(key)} bytes and may have {KEY_BYTES_MAX}; hash its long parts")
        if value.__class__ is not bytes:
            raise InvalidValue(f"A value must be bytes, not {type(value).__name__}; encode it first")
        raise ValueTooLarge(f"The value has {len(value)} bytes and may have {VALUE_BYTES_MAX}; store it as a blob")


class _NestedView:
    """The view and clock of a nested transaction: its parent's."""

    __slots__ = ("get", "parent", "prefetch", "scan", "share", "unshare")

    def __init__(self, tx: Transaction) -> None:
        self.parent = tx
        self.get = tx.get
        self.prefetch = tx.prefetch
        self.share = tx.share
        self.unshare = tx.unshare
        self.scan = tx.visible_pairs

    def now_ms(self) -> int:
        return self.parent.now_ms


def _not_bytes_error(subject: str, value: object) -> InvalidKey:
    return InvalidKey(f"{subject} must be bytes, not {type(value).__name__}; encode it with kv.pack")


def _ended_error() -> TransactionEnded:
    return TransactionEnded("The transaction has ended; use it only inside the function that transact runs")


def _too_large_error() -> TransactionTooLarge:
    return TransactionTooLarge(
        f"The transaction writes more than {TRANSACTION_BYTES_MAX} bytes, counting {WRITE_COST_BYTES} extra bytes for "
        "each write; split it into several"
    )
