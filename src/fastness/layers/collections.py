"""Collections: rows in the order of their keys, in partitions.

    (u, universe, "collections", collection \\0 partition, key…)            ->  version, value, expires_ms
    (u, universe, "collections-due", collection \\0 partition, at, key…)    ->  empty: the row may expire then

The name of a collection and a partition are one element, so that a partition is one part of the key space, which
transactions lock where several processes write. Neither reads nor writes look at other partitions.

A row that has expired is absent for every function here. It is removed by commits that give rows of its partition a
time to live, and by `sweep`. An entry of "collections-due" can outlive its row, and is removed when it is due.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.errors import (
    AnswerTooLarge,
    BatchTooLarge,
    InvalidKey,
    KeyTooLarge,
    ValueTooLarge,
    VersionConflict,
)
from fastness.kv import Subspace, Transaction
from fastness.kv.keys import pack, prefix_range, unpack
from fastness.limits import (
    COLLECTION_COMMIT_BYTES_MAX,
    COLLECTION_EXPIRED_BATCH,
    COLLECTION_KEY_BYTES_MAX,
    COLLECTION_KEY_ELEMENTS_MAX,
    COLLECTION_PAGE_BYTES,
    COLLECTION_PARTITION_BYTES_MAX,
    COLLECTION_PATH_BYTES_MAX,
    COLLECTION_READ_BYTES_MAX,
    COLLECTION_ROWS_MAX,
    COLLECTION_SCAN_FIRST,
    COLLECTION_SCANNED_MAX,
    COLLECTION_SWEPT_MAX,
    COLLECTION_VALUE_BYTES_MAX,
    WRITE_COST_BYTES,
)
from fastness.wire.collections import (
    ChangedRow,
    ChangedRows,
    DeleteRow,
    DeleteRows,
    KnownRow,
    PartitionPage,
    PutRow,
    Row,
    RowChange,
    RowKey,
    RowPage,
    ScanRows,
)

AREA: Final = "collections"
DUE: Final = "collections-due"
_INTEGER_BOUND: Final = 1 << 63


class StoredRow(msgspec.Struct, frozen=True, array_like=True):
    """The value of a row's key."""

    version: int
    value: bytes
    expires_ms: int = 0  # 0: never.

    def is_live(self, tx: Transaction) -> bool:
        """Whether the row has not expired. Without a time to live the clock is not read."""
        return not self.expires_ms or tx.now_ms < self.expires_ms


class Partition(NamedTuple):
    """The prefixes of a partition's rows and of their times of expiry."""

    rows: bytes
    due: bytes
    size: int  # Bytes of the partition in a key.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredRow).decode


def commit(tx: Transaction, universe: str, collection: str, changes: Sequence[RowChange]) -> list[int | None]:
    """Apply changes in their order; the version of the row that each put left, None for deletions.

    Raises:
        VersionConflict: a row does not have the version that a change requires.
        InvalidKey, InvalidValue, InvalidArgument, KeyTooLarge, ValueTooLarge: a change is not valid.
        EmptyBatch, BatchTooLarge: there are no changes, or more than one commit may have.
    """
    found = [_checked(universe, collection, change) for change in changes]
    size = sum([len(key) + WRITE_COST_BYTES + _value_bytes(change) for change, _, key in found])
    if size > COLLECTION_COMMIT_BYTES_MAX:
        raise BatchTooLarge(
            f"A commit has at most {COLLECTION_COMMIT_BYTES_MAX} bytes, with {WRITE_COST_BYTES} for each change, not "
            f"{size}; split it, or store large values as blobs"
        )
    if tx.writer and len(found) > 1:
        _prefetch(tx, [(partition, key) for change, partition, key in found if not isinstance(change, DeleteRows)])
    versions = [_apply(tx, change, partition, key) for change, partition, key in found]
    expiring = {place for change, place, _ in found if isinstance(change, PutRow) and change.ttl_seconds is not None}
    for partition in expiring:
        _remove_expired(tx, partition)
    return versions


def get(tx: Transaction, universe: str, collection: str, partition: str, keys: Sequence[RowKey]) -> list[Row | None]:
    """The row of each key, or None.

    Raises:
        InvalidKey, KeyTooLarge, BatchTooLarge: a key is not valid, or there are too many.
        AnswerTooLarge: the rows have too many bytes for one answer.
    """
    prefixes = partition_of(universe, collection, partition)
    packed = [prefixes.rows + _packed(prefixes, key) for key in keys]
    if tx.writer and len(packed) > 1:
        tx.prefetch(*packed)
    rows: list[Row | None] = []
    size = 0
    for key in packed:
        stored = tx.get(key)
        if stored is not None and (size := size + len(stored)) > COLLECTION_READ_BYTES_MAX:
            raise AnswerTooLarge(f"These rows have more than {COLLECTION_READ_BYTES_MAX} bytes; read fewer at a time")
        rows.append(None if stored is None else _row(tx, prefixes, key, stored))
    return rows


def changed(tx: Transaction, universe: str, collection: str, known: Sequence[KnownRow]) -> ChangedRows:
    """Those of the known rows that have another version now. The answer ends early when it has many bytes.

    Raises:
        InvalidKey, KeyTooLarge, BatchTooLarge: a key is not valid, or there are too many.
    """
    keys = watched_keys(universe, collection, known)
    rows: list[ChangedRow] = []
    size = 0
    for each, key in zip(known, keys, strict=True):
        stored = tx.get(key)
        partition = partition_of(universe, collection, each.partition)
        row = None if stored is None else _row(tx, partition, key, stored)
        if each.version == (0 if row is None else row.version):
            continue
        size += 0 if row is None else len(row.value)
        if rows and size > COLLECTION_PAGE_BYTES:
            return ChangedRows(rows, more=True)
        rows.append(ChangedRow(each.partition, each.key, row))
    return ChangedRows(rows)


def watched_keys(universe: str, collection: str, known: Sequence[KnownRow]) -> list[bytes]:
    """The key of each row; nothing is read.

    Raises:
        InvalidKey, KeyTooLarge, EmptyBatch, BatchTooLarge: a key is not valid, or there are none or too many.
    """
    keys: list[bytes] = []
    for each in known:
        partition = partition_of(universe, collection, each.partition)
        keys.append(partition.rows + _packed(partition, each.key))
    return keys


def scan(tx: Transaction, request: ScanRows) -> RowPage:
    """Rows whose keys start with `prefix`, in order; the page ends early when it has many bytes.

    Raises:
        InvalidKey, KeyTooLarge, InvalidArgument: a key or the limit is not valid.
    """
    after, before, limit, reverse = request.after, request.before, request.limit, request.reverse
    prefixes = partition_of(request.universe, request.collection, request.partition)
    begin = prefixes.rows + _packed(prefixes, request.prefix, shortest=0)
    end = begin + b"\xff"
    if after is not None:
        begin = max(begin, prefixes.rows + _packed(prefixes, after) + b"\x00")
    if before is not None:
        end = min(end, prefixes.rows + _packed(prefixes, before))
    rows: list[Row] = []
    size = examined = examined_bytes = 0
    wanted = min(limit, COLLECTION_SCAN_FIRST)
    while begin < end:
        pairs = tx.scan(begin, end, limit=wanted, reverse=reverse)
        for key, stored in pairs:
            examined_bytes += len(stored)
            row = _row(tx, prefixes, key, stored)
            if row is not None:
                rows.append(row)
                size += len(row.value)
                if len(rows) == limit or size >= COLLECTION_PAGE_BYTES:
                    return RowPage(rows, row.key)
        examined += len(pairs)
        if len(pairs) < wanted:
            break
        last = pairs[-1][0]
        if examined >= COLLECTION_SCANNED_MAX:  # Nearly all of them had expired.
            return RowPage(rows, unpack(last[len(prefixes.rows) :]))
        begin, end = (begin, last) if reverse else (last + b"\x00", end)
        # As many as fit the page, if the next rows are as large as those before.
        fitting = (COLLECTION_PAGE_BYTES - size) * examined // max(examined_bytes, 1) + 1
        wanted = min(limit - len(rows), fitting, COLLECTION_ROWS_MAX)
    return RowPage(rows)


def partitions(
    tx: Transaction, universe: str, collection: str, *, prefix: str = "", after: str = "", limit: int = 100
) -> PartitionPage:
    """Partitions that start with `prefix`, in order. One whose rows have all expired is listed until they are removed.

    Raises:
        InvalidKey, InvalidArgument: the prefix or the limit is not valid.
    """
    area = Subspace("u", universe, AREA)
    begin, end = prefix_range(area.key(f"{collection}\0{_checked_text('prefix', prefix)}")[:-1])
    if after:
        begin = max(begin, partition_of(universe, collection, after).rows + b"\xff")
    names: list[str] = []
    while begin < end and (page := tx.scan(begin, end, limit=1)):
        name = area.unpack(page[0][0])[0]
        names.append(name.partition("\0")[2])
        if len(names) == limit:
            return PartitionPage(names, names[-1])
        begin = area.key(name) + b"\xff"
    return PartitionPage(names)


def names(tx: Transaction, universe: str, *, after: str = "", limit: int = 100) -> list[str]:
    """At most `limit` names of collections that have rows, in order, starting after `after`.

    Raises:
        InvalidArgument: the limit is not valid.
    """
    area = Subspace("u", universe, AREA)
    begin, end = area.range()
    if after:
        begin = area.key(after)[:-1] + b"\x01"  # After all of its partitions: each starts with a zero byte here.
    found: list[str] = []
    while len(found) < limit and (page := tx.scan(begin, end, limit=1)):
        found.append(area.unpack(page[0][0])[0].partition("\0")[0])
        begin = area.key(found[-1])[:-1] + b"\x01"
    return found


def due_partitions(tx: Transaction, universe: str, *, after: str = "") -> tuple[list[str], str]:
    """Partitions, with the names of their collections, that `sweep` has work for, and where to look for more.

    Looks at a bounded number of partitions after `after`. The second value is empty at the end.
    """
    area = Subspace("u", universe, DUE)
    begin, end = area.range()
    if after:
        begin = area.key(after) + b"\xff"
    found: list[str] = []
    for _ in range(COLLECTION_SWEPT_MAX):
        page = tx.scan(begin, end, limit=1)
        if not page:
            return found, ""
        after, at_ms, *_ = area.unpack(page[0][0])
        if at_ms <= tx.now_ms:
            found.append(after)
        begin = area.key(after) + b"\xff"
    return found, after


def sweep(tx: Transaction, universe: str, element: str) -> bool:
    """Remove rows that have expired from a partition, as `due_partitions` names it; whether there may be more."""
    rows, due = Subspace("u", universe, AREA).key(element), Subspace("u", universe, DUE).key(element)
    return _remove_expired(tx, Partition(rows, due, 0)) == COLLECTION_EXPIRED_BATCH


def partition_of(universe: str, collection: str, partition: str) -> Partition:
    """The prefixes of a partition.

    Raises:
        InvalidKey, KeyTooLarge: it is not valid.
    """
    if partition.__class__ is not str or not partition:
        raise InvalidKey(f"A partition is text of 1 to {COLLECTION_PARTITION_BYTES_MAX} bytes, not {partition!r:.100}")
    return _partition(universe, collection, partition)


@lru_cache(maxsize=4_096)
def _partition(universe: str, collection: str, partition: str) -> Partition:
    size = len(pack((partition,))) - 2
    if size > COLLECTION_PARTITION_BYTES_MAX:
        raise KeyTooLarge(
            f"The partition has {size} bytes and may have {COLLECTION_PARTITION_BYTES_MAX}; a zero byte counts twice. "
            "Use a shorter name, such as a hash"
        )
    element = f"{collection}\0{partition}"
    return Partition(Subspace("u", universe, AREA).key(element), Subspace("u", universe, DUE).key(element), size)


def _checked(universe: str, collection: str, change: RowChange) -> tuple[RowChange, Partition, bytes]:
    """The change, its partition, and its key or prefix in the partition; nothing is read."""
    partition = partition_of(universe, collection, change.partition)
    if isinstance(change, DeleteRows):
        return change, partition, _packed(partition, change.prefix, shortest=0)
    if isinstance(change, PutRow) and len(change.value) > COLLECTION_VALUE_BYTES_MAX:
        raise ValueTooLarge(
            f"A row has at most {COLLECTION_VALUE_BYTES_MAX} bytes, not {len(change.value)}; store the rest as a "
            "blob, and its hash in the row"
        )
    return change, partition, _packed(partition, change.key)


def _packed(partition: Partition, key: RowKey, *, shortest: int = 1) -> bytes:
    """The bytes of a key, or of a prefix of keys, in its partition."""
    if not isinstance(key, tuple | list):  # A list of the caller, where no decoder has made it a tuple.
        raise InvalidKey(f"The key of a row is a tuple, not {type(key).__name__}; write (value,) for a single one")
    if not shortest <= len(key) <= COLLECTION_KEY_ELEMENTS_MAX:
        raise InvalidKey(f"The key of a row has 1 to {COLLECTION_KEY_ELEMENTS_MAX} elements, not {len(key)}")
    for element in key:
        if element.__class__ is not str and (
            element.__class__ is not int or not -_INTEGER_BOUND <= int(element) < _INTEGER_BOUND
        ):
            raise InvalidKey(f"{element!r:.100} cannot be in the key of a row; use text, or an integer of 64 bits")
    packed = pack(tuple(key))
    if len(packed) > COLLECTION_KEY_BYTES_MAX:
        raise KeyTooLarge(
            f"The key of a row has {len(packed)} bytes and may have {COLLECTION_KEY_BYTES_MAX}, with 2 for each text; "
            "hash its long parts"
        )
    if partition.size + len(packed) > COLLECTION_PATH_BYTES_MAX:
        raise KeyTooLarge(
            f"The partition and the key have {partition.size + len(packed)} bytes together and may have "
            f"{COLLECTION_PATH_BYTES_MAX}; hash their long parts"
        )
    return packed


def _checked_text(name: str, text: str) -> str:
    if text.__class__ is not str or len(text) > COLLECTION_PARTITION_BYTES_MAX:
        raise InvalidKey(f"{name} is text of at most {COLLECTION_PARTITION_BYTES_MAX} bytes, not {text!r:.100}")
    return text


def _value_bytes(change: RowChange) -> int:
    return len(change.value) if isinstance(change, PutRow) else 0


def _prefetch(tx: Transaction, rows: Sequence[tuple[Partition, bytes]]) -> None:
    """Read the rows of each partition together, where a read is a round trip."""
    keys: dict[bytes, list[bytes]] = {}
    for partition, key in rows:
        keys.setdefault(partition.rows, []).append(partition.rows + key)
    for found in keys.values():
        tx.prefetch(*found)


def _apply(tx: Transaction, change: RowChange, partition: Partition, packed: bytes) -> int | None:
    """Apply a change that was checked; the version of the row that a put leaves."""
    key = partition.rows + packed
    if isinstance(change, DeleteRows):
        tx.delete_range(key, key + b"\xff")
        if not packed:
            tx.delete_range(partition.due, partition.due + b"\xff")
        return None
    stored = tx.get(key)
    before = None if stored is None else _decode(stored)
    version = before.version if before is not None and before.is_live(tx) else 0
    if change.if_version is not None and change.if_version != version:
        raise VersionConflict(
            "Row", f"{change.key!r} of {change.partition!r}", expected=change.if_version, actual=version
        )
    if isinstance(change, PutRow) and change.keep_existing and version:
        return version
    if before is not None and before.expires_ms:
        tx.delete(_due_key(partition, before.expires_ms, packed))
    if isinstance(change, DeleteRow):
        if before is not None:
            tx.delete(key)
        return None
    expires_ms = 0
    if change.ttl_seconds is not None:
        expires_ms = tx.now_ms + max(1, round(change.ttl_seconds * 1_000))
        tx.put(_due_key(partition, expires_ms, packed), b"")
    tx.put(key, _encode(StoredRow(version + 1, change.value, expires_ms)))
    return version + 1


def _remove_expired(tx: Transaction, partition: Partition) -> int:
    """Remove some rows that have expired, with the entries that are due; how many entries."""
    end = _due_key(partition, tx.now_ms + 1, b"")
    due = [key for key, _ in tx.scan(partition.due, end, limit=COLLECTION_EXPIRED_BATCH)]
    keys = [partition.rows + pack(unpack(key[len(partition.due) :])[1:]) for key in due]
    if tx.writer and keys:
        tx.prefetch(*keys)
    for entry, key in zip(due, keys, strict=True):
        tx.delete(entry)
        stored = tx.get(key)
        if stored is not None and not _decode(stored).is_live(tx):
            tx.delete(key)
    return len(due)


def _due_key(partition: Partition, at_ms: int, packed: bytes) -> bytes:
    return partition.due + pack((at_ms,)) + packed


def _row(tx: Transaction, partition: Partition, key: bytes, stored: bytes) -> Row | None:
    """The row of a pair; None if it has expired."""
    found = _decode(stored)
    if not found.is_live(tx):
        return None
    return Row(unpack(key[len(partition.rows) :]), found.value, found.version, found.expires_ms or None)
