"""Collections: rows by partition and key, commits of several rows, times to live, pages and limits."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import (
    AsyncPlane,
    DeleteRow,
    DeleteRows,
    PartitionPage,
    Plane,
    PutRow,
    Row,
    RowChange,
    RowKey,
    RowPage,
    limits,
)
from fastness.errors import (
    AnswerTooLarge,
    BatchTooLarge,
    BlobNotFound,
    DiskFull,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidKey,
    InvalidName,
    KeyTooLarge,
    ValueTooLarge,
    VersionConflict,
)
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import collections
from fastness.limits import (
    COLLECTION_CHANGES_MAX,
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
    COLLECTION_SWEPT_MAX,
    COLLECTION_TTL_SECONDS_MAX,
    COLLECTION_VALUE_BYTES_MAX,
    NAME_BYTES_MAX,
)
from fastness.runtime.maintenance import retention
from fastness.testing.clock import ManualClock

LONG_NAME = "n" * NAME_BYTES_MAX


@pytest.fixture(params=["memory", "dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(url, clock=clock) as plane:
        yield plane


def keys(page: RowPage) -> list[RowKey]:
    return [row.key for row in page.rows]


# Through handles, embedded and through a server.


def test_a_commit_writes_reads_and_deletes_rows(plane: Plane) -> None:
    rows = plane.collection("notes")
    changes: list[RowChange] = [
        PutRow("ada", ("a", 1), b"one"),
        PutRow("ada", ("a", 2), b"two"),
        PutRow("bob", (7,), b""),
    ]
    assert rows.commit(changes) == [1, 1, 1]
    assert rows.get("ada", ("a", 1)) == Row(("a", 1), b"one", 1)
    assert rows.get("bob", ("a", 1)) is None
    assert rows.get_many("ada", [("a", 2), ("a", 3)]) == [Row(("a", 2), b"two", 1), None]
    assert rows.get_many("ada", []) == []
    assert rows.commit([PutRow("ada", ("a", 1), b"1"), DeleteRow("ada", ("a", 2)), DeleteRows("bob")]) == [
        2,
        None,
        None,
    ]
    assert rows.scan("ada") == RowPage([Row(("a", 1), b"1", 2)])
    assert rows.scan("bob") == RowPage([])
    assert plane.collection("other").scan("ada") == RowPage([])


def test_a_commit_with_a_conflict_writes_nothing(plane: Plane) -> None:
    rows = plane.collection("notes")
    rows.commit([PutRow("p", ("a",), b"1", if_version=0)])
    conflicts: list[tuple[RowChange, int, int]] = [
        (PutRow("p", ("a",), b"2", if_version=0), 0, 1),
        (PutRow("p", ("a",), b"2", if_version=2), 2, 1),
        (PutRow("p", ("b",), b"2", if_version=1), 1, 0),
        (DeleteRow("p", ("a",), if_version=2), 2, 1),
        (DeleteRow("p", ("b",), if_version=1), 1, 0),
    ]
    for change, expected, actual in conflicts:
        with pytest.raises(VersionConflict, match=f"has version {actual}, not {expected}; get it again"):
            rows.commit([PutRow("p", ("other",), b""), change])
        with pytest.raises(VersionConflict):
            plane.atomic().rows(rows, [PutRow("p", ("other",), b"")]).rows(rows, [change]).commit()
    assert rows.scan("p") == RowPage([Row(("a",), b"1", 1)])
    kept = PutRow("p", ("a",), b"2", keep_existing=True)
    assert rows.commit([kept, PutRow("p", ("b",), b"2", keep_existing=True)]) == [1, 1]
    assert rows.commit([PutRow("p", ("a",), b"2", if_version=1), DeleteRow("p", ("b",), if_version=1)]) == [2, None]
    assert rows.scan("p") == RowPage([Row(("a",), b"2", 2)])


def test_changes_of_one_commit_see_each_other(plane: Plane) -> None:
    rows = plane.collection("notes")
    rows.commit([PutRow("p", ("old", 1), b"")])
    versions = rows.commit(
        [
            DeleteRows("p", ("old",)),
            PutRow("p", ("old", 1), b"new", if_version=0),
            PutRow("p", ("a",), b"1"),
            PutRow("p", ("a",), b"2", if_version=1),
            PutRow("p", ("b",), b""),
            DeleteRow("p", ("b",), if_version=1),
        ]
    )
    assert versions == [None, 1, 1, 2, 1, None]
    assert rows.scan("p") == RowPage([Row(("a",), b"2", 2), Row(("old", 1), b"new", 1)])


def test_an_atomic_list_changes_rows_with_other_data(plane: Plane) -> None:
    rows, state = plane.collection("notes"), plane.state("head")
    answers = plane.atomic().rows(rows, [PutRow("p", ("a",), b"1")]).update(state, 1, if_absent=True).commit()
    assert answers[0].versions == [1]
    with pytest.raises(FastnessError, match="now has ETag"):
        plane.atomic().rows(rows, [PutRow("p", ("b",), b"1")]).update(state, 2, if_absent=True).commit()
    assert keys(rows.scan("p")) == [("a",)]


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_are_ordered_paged_and_bounded_by_keys(plane: Plane, reverse: bool) -> None:
    rows = plane.collection("notes")
    ordered: list[RowKey] = [
        ("",),
        ("", -1),
        ("a",),
        ("a", "x\0y"),
        ("a", -(2**63)),
        ("a", -300),
        ("a", -1),
        ("a", 0),
        ("a", 255),
        ("a", 256),
        ("a", 2**63 - 1),
        ("a\0",),
        ("aa",),
        ("é", 1, 2, 3, 4, 5, 6, "last"),
        (-5, "a"),
        (0,),
        (0, "a"),
    ]
    rows.commit([PutRow("p", key, b"", if_version=0) for key in reversed(ordered)])
    rows.commit([PutRow("p\0", ("a",), b""), PutRow("o", ("a",), b""), PutRow("pp", ("a",), b"")])
    expected = ordered[::-1] if reverse else ordered

    def pages(partition: str, prefix: RowKey = (), **options: Any) -> list[RowKey]:
        found, at = [], None
        while True:
            where: dict[str, Any] = {"before": at} if reverse and at else {"after": at} if at else {}
            page = rows.scan(partition, prefix, limit=3, reverse=reverse, **{**options, **where})
            assert len(page.rows) == 3 or page.next is None
            found += keys(page)
            at = page.next
            if at is None:
                return found

    assert pages("p") == expected
    assert pages("p", ("a",)) == [key for key in expected if key[0] == "a"]
    assert pages("p", ("a", "x")) == []
    assert keys(rows.scan("p", after=("a",), before=("aa",), reverse=reverse)) == [
        key for key in expected if key == ("a", "x\0y") or (key[0] == "a" and len(key) == 2) or key == ("a\0",)
    ]
    assert keys(rows.scan("p", ("a",), after=(0,), reverse=reverse)) == []
    assert keys(rows.scan("p", after=("b",), before=("a",), reverse=reverse)) == []


def test_a_prefix_is_deleted_and_nothing_else(plane: Plane) -> None:
    rows = plane.collection("notes")
    all_keys: list[RowKey] = [("a",), ("a", 1), ("a", 1, "x"), ("a", 2), ("aa",), ("a\0",), (1,)]
    rows.commit([PutRow(partition, key, b"") for partition in ("p", "p\0q") for key in all_keys])
    rows.commit([DeleteRows("p", ("a", 1))])
    assert keys(rows.scan("p")) == [("a",), ("a", 2), ("a\0",), ("aa",), (1,)]
    rows.commit([DeleteRows("p", ("a",))])
    assert keys(rows.scan("p")) == [("a\0",), ("aa",), (1,)]
    rows.commit([DeleteRows("p")])
    assert keys(rows.scan("p")) == []
    assert sorted(map(repr, keys(rows.scan("p\0q")))) == sorted(map(repr, all_keys))


def test_partitions_and_collections_are_listed_in_order(plane: Plane) -> None:
    names = ["a", "a\0b", "a/1", "a/2", "é", "\0", "zz"]
    for name in ("notes", "note", "notes-2"):
        rows = plane.collection(name)
        rows.commit([PutRow(partition, (index, 1), b"") for partition in names for index in range(3)])
    ordered = sorted(names, key=str.encode)
    rows = plane.collection("notes")
    assert rows.partitions() == PartitionPage(ordered)
    assert rows.partitions("a/") == PartitionPage(["a/1", "a/2"])
    assert rows.partitions("a\0") == PartitionPage(["a\0b"])
    assert rows.partitions("a", after="a/1") == PartitionPage(["a/2"])
    assert rows.partitions("x") == PartitionPage([])
    assert rows.partitions("a", after="zz") == PartitionPage([])
    found, after = [], ""
    while page := rows.partitions(after=after, limit=2).partitions:
        found += page
        after = page[-1]
    assert found == ordered
    assert rows.partitions(limit=7).next == "é"
    assert plane.collections() == ["note", "notes", "notes-2"]
    assert plane.collections(limit=1) == ["note"]
    assert plane.collections(after="note") == ["notes", "notes-2"]
    assert plane.collections(after="note", limit=1) == ["notes"]
    rows.commit([DeleteRows(partition) for partition in names])
    assert rows.partitions() == PartitionPage([])
    assert plane.collections() == ["note", "notes-2"]


def test_an_expired_row_is_absent(plane: Plane, clock: ManualClock) -> None:
    rows = plane.collection("notes")
    rows.commit(
        [PutRow("p", ("a",), b"1", ttl_seconds=1.5), PutRow("p", ("b",), b"1"), PutRow("q", ("a",), b"", ttl_seconds=9)]
    )
    rows.commit([PutRow("p", ("a",), b"2", ttl_seconds=2)])
    clock.advance_ms(1_999)
    found = rows.get("p", ("a",))
    assert found is not None
    assert (found.value, found.version, found.expires_ms) == (b"2", 2, clock.now_ms() + 1)
    clock.advance_ms(1)
    assert rows.get("p", ("a",)) is None
    assert keys(rows.scan("p", limit=1)) == [("b",)]
    assert keys(rows.scan("p", reverse=True)) == [("b",)]
    with pytest.raises(VersionConflict, match="has version 0, not 2"):
        rows.commit([DeleteRow("p", ("a",), if_version=2)])
    assert rows.commit([PutRow("p", ("a",), b"3", keep_existing=True)]) == [1]
    clock.advance_ms(60_000)
    assert rows.get("p", ("a",)) == Row(("a",), b"3", 1)  # Its time to live was that of the row before it.
    assert rows.partitions().partitions == ["p", "q"]  # The row is expired, and not removed yet.


def test_expired_rows_are_removed_by_commits_and_by_the_sweep(plane: Plane, clock: ManualClock) -> None:
    database = plane._transport.services.database  # type: ignore[attr-defined]
    many = COLLECTION_EXPIRED_BATCH + 5
    rows = plane.collection("notes")
    rows.commit([PutRow("p", (n,), b"", ttl_seconds=1) for n in range(many)])
    rows.commit([PutRow("q", (n,), b"", ttl_seconds=1 + n % 2) for n in range(2 * many)])
    rows.commit(
        [PutRow("p", ("kept",), b""), PutRow("q", (0,), b"rewritten"), DeleteRow("q", (2,)), DeleteRows("q", (4,))]
    )
    clock.advance_ms(1_000)
    rows.commit([PutRow("p", ("new",), b"", ttl_seconds=1)])
    assert len(stored(database, "p")) == many - COLLECTION_EXPIRED_BATCH + 2
    retention.delete_expired_rows(database)
    assert [key for key, _ in stored(database, "p")] == [("kept",), ("new",)]
    assert [key for key, _ in stored(database, "q")] == [(0,), *[(n,) for n in range(1, 2 * many, 2)]]
    clock.advance_ms(1_000)
    retention.delete_expired_rows(database)
    assert rows.partitions().partitions == ["p", "q"]
    rows.commit([PutRow("r", ("a",), b"", ttl_seconds=5)])
    rows.commit([DeleteRows(name) for name in ("p", "q", "r")])
    assert [pair for pair in everything_of(database) if b"collections" in pair[0]] == []


def test_the_time_of_expiry_of_a_row_that_was_deleted_with_others_removes_no_later_row(
    plane: Plane, clock: ManualClock
) -> None:
    rows = plane.collection("notes")
    rows.commit([PutRow("p", ("a", 1), b"first", ttl_seconds=1)])
    rows.commit([DeleteRows("p", ("a",)), PutRow("p", ("a", 1), b"second")])
    clock.advance_ms(1_000)
    retention.delete_expired_rows(plane._transport.services.database)  # type: ignore[attr-defined]
    assert rows.get("p", ("a", 1)) == Row(("a", 1), b"second", 1)


def test_a_row_that_is_rewritten_or_deleted_leaves_no_time_of_expiry(database: Database) -> None:
    due = Subspace("u", "main", collections.DUE)

    def times(*changes: RowChange) -> int:
        database.transact(collections.commit, "main", "notes", changes)
        return len(database.read(Transaction.scan, *due.range(), limit=100))

    assert times(*[PutRow("p", (n,), b"", ttl_seconds=60) for n in range(4)]) == 4
    assert times(PutRow("p", (0,), b"", ttl_seconds=90), PutRow("p", (1,), b"")) == 3
    assert times(DeleteRow("p", (2,)), DeleteRow("p", (1,))) == 2
    assert times(DeleteRows("p")) == 0


def test_a_sweep_goes_through_many_partitions(clock: ManualClock) -> None:
    with fastness.open("memory:", clock=clock) as plane:
        database = plane._transport.services.database  # type: ignore[attr-defined]
        rows = plane.collection("notes")
        count = 2 * COLLECTION_SWEPT_MAX + 1
        for n in range(count):
            rows.commit([PutRow(f"{n:04}", ("a",), b"", ttl_seconds=1 if n % 2 else 5)])
        clock.advance_ms(2_000)
        retention.delete_expired_rows(database)
        assert rows.partitions(limit=1_000).partitions == [f"{n:04}" for n in range(0, count, 2)]


def stored(database: Database, partition: str) -> list[tuple[RowKey, bytes]]:
    """The stored rows of a partition, with those that have expired."""
    space = Subspace("u", "main", "collections", f"notes\0{partition}")
    return [(space.unpack(key), value) for key, value in database.read(Transaction.scan, *space.range(), limit=10_000)]


def everything_of(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(Transaction.scan, b"", b"\xff" * 8, limit=10_000)


def test_a_blob_is_kept_while_a_row_names_it(plane: Plane, clock: ManualClock) -> None:
    rows = plane.collection("notes")
    hash = plane.blobs.put(b"body", pinned=False)
    rows.commit([PutRow("p", ("a",), f'{{"body": "{hash}"}}'.encode()), PutRow("p", ("b",), b"", ttl_seconds=1)])
    for _ in range(3):
        clock.advance_ms(7_200_000)
        plane.gc(grace_seconds=3_600)
    assert plane.blobs.get(hash) == b"body"
    rows.commit([DeleteRow("p", ("a",))])
    for _ in range(3):
        clock.advance_ms(7_200_000)
        plane.gc(grace_seconds=3_600)
    with pytest.raises(BlobNotFound):
        plane.blobs.get(hash)


INVALID: dict[str, tuple[type[FastnessError], Callable[[Any], object]]] = {
    "no changes": (EmptyBatch, lambda rows: rows.commit([])),
    "too many changes": (
        BatchTooLarge,
        lambda rows: rows.commit([DeleteRow("p", (n,)) for n in range(COLLECTION_CHANGES_MAX + 1)]),
    ),
    "too many bytes": (
        BatchTooLarge,
        lambda rows: rows.commit([PutRow("p", (n,), bytes(COLLECTION_COMMIT_BYTES_MAX // 4)) for n in range(4)]),
    ),
    "a value that is too long": (
        ValueTooLarge,
        lambda rows: rows.commit([PutRow("p", ("a",), bytes(COLLECTION_VALUE_BYTES_MAX + 1))]),
    ),
    "a value that is text": (
        FastnessError,
        lambda rows: rows.commit([PutRow("p", ("a",), "text")]),  # type: ignore[arg-type]
    ),
    "no partition": (InvalidKey, lambda rows: rows.commit([PutRow("", ("a",), b"")])),
    "a partition that is no text": (FastnessError, lambda rows: rows.get(7, ("a",))),
    "a long partition": (KeyTooLarge, lambda rows: rows.get("p" * (COLLECTION_PARTITION_BYTES_MAX + 1), ("a",))),
    "zero bytes count twice": (
        KeyTooLarge,
        lambda rows: rows.get("\0" * (COLLECTION_PARTITION_BYTES_MAX // 2 + 1), (1,)),
    ),
    "an empty key": (InvalidKey, lambda rows: rows.commit([DeleteRow("p", ())])),
    "a key that is text": (FastnessError, lambda rows: rows.get("p", "key")),
    "a key of too many": (InvalidKey, lambda rows: rows.get("p", (1,) * (COLLECTION_KEY_ELEMENTS_MAX + 1))),
    "a float": (FastnessError, lambda rows: rows.get("p", (1.5,))),
    "a truth value": (FastnessError, lambda rows: rows.get("p", (True,))),
    "65 bits": (FastnessError, lambda rows: rows.get("p", (2**63,))),
    "65 bits below zero": (FastnessError, lambda rows: rows.get("p", (-(2**63) - 1,))),
    "a surrogate": (FastnessError, lambda rows: rows.get("p", ("\ud800",))),
    "a long key": (KeyTooLarge, lambda rows: rows.get("p", ("k" * (COLLECTION_KEY_BYTES_MAX - 1),))),
    "a long key in a long partition": (KeyTooLarge, lambda rows: rows.get("p" * 1_024, ("k" * 500,))),
    "a negative version": (InvalidArgument, lambda rows: rows.commit([DeleteRow("p", (1,), if_version=-1)])),
    "no time to live": (InvalidArgument, lambda rows: rows.commit([PutRow("p", (1,), b"", ttl_seconds=0)])),
    "a time that is no number": (
        FastnessError,
        lambda rows: rows.commit([PutRow("p", (1,), b"", ttl_seconds=math.nan)]),
    ),
    "a time that is too long": (
        InvalidArgument,
        lambda rows: rows.commit([PutRow("p", (1,), b"", ttl_seconds=COLLECTION_TTL_SECONDS_MAX + 1)]),
    ),
    "too many keys": (BatchTooLarge, lambda rows: rows.get_many("p", [(n,) for n in range(COLLECTION_ROWS_MAX + 1)])),
    "an empty page": (InvalidArgument, lambda rows: rows.scan("p", limit=0)),
    "a page that is too long": (InvalidArgument, lambda rows: rows.scan("p", limit=COLLECTION_ROWS_MAX + 1)),
    "an empty page of partitions": (InvalidArgument, lambda rows: rows.partitions(limit=0)),
    "a long prefix": (InvalidKey, lambda rows: rows.partitions("p" * (COLLECTION_PARTITION_BYTES_MAX + 1))),
    "an invalid after": (InvalidKey, lambda rows: rows.scan("p", after=())),
    "one change instead of a list": (InvalidArgument, lambda rows: rows.commit(b"x")),
}


def test_invalid_calls_are_refused_and_write_nothing(plane: Plane) -> None:
    rows = plane.collection("notes")
    for name, (error, call) in INVALID.items():
        with pytest.raises(error) as refused:
            call(rows)
        assert str(refused.value), name
    with pytest.raises(InvalidName):
        plane.collection("no name!")
    with pytest.raises(InvalidArgument):
        plane.collections(limit=0)
    assert plane.collections() == []


def test_the_longest_names_and_keys_fit(clock: ManualClock, url: str) -> None:
    with fastness.open(url, clock=clock, universe=LONG_NAME) as plane:
        rows = plane.collection(LONG_NAME)
        partition = "p" * COLLECTION_PARTITION_BYTES_MAX
        key: RowKey = ("k" * (COLLECTION_PATH_BYTES_MAX - COLLECTION_PARTITION_BYTES_MAX - 2),)
        rows.commit([PutRow(partition, key, bytes(COLLECTION_VALUE_BYTES_MAX), ttl_seconds=COLLECTION_TTL_SECONDS_MAX)])
        assert keys(rows.scan(partition)) == [key]
        assert rows.partitions().partitions == [partition]


def test_pages_end_when_their_values_are_large(plane: Plane) -> None:
    rows = plane.collection("notes")
    large, count = COLLECTION_VALUE_BYTES_MAX // 2, 3 * COLLECTION_SCAN_FIRST
    for at in range(0, count, 6):
        rows.commit([PutRow("p", (n,), bytes(large)) for n in range(at, at + 6)])
    found, after = 0, None
    while True:
        page = rows.scan("p", after=after)
        assert sum(len(row.value) for row in page.rows) < COLLECTION_PAGE_BYTES + COLLECTION_VALUE_BYTES_MAX
        found += len(page.rows)
        after = page.next
        if after is None:
            break
    assert found == count
    with pytest.raises(AnswerTooLarge, match="read fewer"):
        rows.get_many("p", [(n,) for n in range(COLLECTION_READ_BYTES_MAX // large + 1)])


async def test_collections_work_asynchronously(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        assert isinstance(plane, AsyncPlane)
        rows = plane.collection("notes")
        assert await rows.commit([PutRow("p", ("a", n), b"%d" % n) for n in range(3)]) == [1, 1, 1]
        assert (await rows.scan("p", ("a",), reverse=True, limit=1)).rows == [Row(("a", 2), b"2", 1)]
        assert await rows.get("p", ("a", 0)) == Row(("a", 0), b"0", 1)
        assert await rows.get_many("p", [("a", 1), ("b",)]) == [Row(("a", 1), b"1", 1), None]
        assert (await rows.partitions()).partitions == ["p"]
        assert await plane.collections() == ["notes"]
        answers = await plane.atomic().rows(rows, [DeleteRows("p")]).commit()
        assert answers[0].versions == [None]
        with pytest.raises(VersionConflict):
            await rows.commit([DeleteRow("p", ("a", 0), if_version=1)])


# As functions over a transaction.


def test_a_put_reads_one_key_and_writes_one(database: Database) -> None:
    def count(tx: Transaction, changes: list[RowChange]) -> tuple[list[bytes], int]:
        read: list[bytes] = []
        view = tx.view
        tx.view = Counted(view, read)
        try:
            collections.commit(tx, "main", "notes", changes)
        finally:
            tx.view = view
        return read, len(tx.writes)

    change: RowChange
    for change in (PutRow("p", ("a",), b"1"), PutRow("p", ("a",), b"2"), PutRow("p", ("a",), b"3", if_version=2)):
        read, writes = database.transact(count, [change])
        assert (len(read), writes) == (1, 1)
    for change in (PutRow("p", ("a",), b"4", keep_existing=True), DeleteRow("p", ("missing",))):
        read, writes = database.transact(count, [change])
        assert (len(read), writes) == (1, 0)


class Counted:
    """A view that records which keys are read."""

    def __init__(self, view: Any, read: list[bytes]) -> None:
        self._view, self._read = view, read

    def get(self, key: bytes) -> bytes | None:
        self._read.append(key)
        found: bytes | None = self._view.get(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def test_a_scan_over_expired_rows_is_bounded(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections, "COLLECTION_SCANNED_MAX", COLLECTION_SCAN_FIRST)
    with fastness.open("memory:", clock=clock) as plane:
        rows = plane.collection("notes")
        rows.commit([PutRow("p", (n,), b"", ttl_seconds=1) for n in range(COLLECTION_SCAN_FIRST)])
        rows.commit([PutRow("p", ("last",), b""), PutRow("p", (999,), b"")])
        clock.advance_ms(1_000)
        page = rows.scan("p", (), after=("last",))
        assert page == RowPage([], (COLLECTION_SCAN_FIRST - 1,))
        assert keys(rows.scan("p", after=page.next)) == [(999,)]


def test_only_deletions_are_accepted_when_the_disk_is_nearly_full(clock: ManualClock) -> None:
    with fastness.open("memory:", clock=clock) as plane:
        rows = plane.collection("notes")
        rows.commit([PutRow("p", ("a",), b"")])
        plane._transport.services.database.low_space = True  # type: ignore[attr-defined]
        with pytest.raises(DiskFull):
            rows.commit([DeleteRows("p"), PutRow("p", ("b",), b"")])
        assert rows.commit([DeleteRow("p", ("a",))]) == [None]


def test_the_limits_agree() -> None:
    """A row with the longest names fits a key, and its value a value of the key space."""
    longest = Subspace("u", LONG_NAME, collections.DUE, f"{LONG_NAME}\0").key(COLLECTION_TTL_SECONDS_MAX * 10_000)
    assert len(longest) + COLLECTION_PATH_BYTES_MAX <= limits.KEY_BYTES_MAX
    assert COLLECTION_COMMIT_BYTES_MAX < limits.FRAME_BYTES_MAX
