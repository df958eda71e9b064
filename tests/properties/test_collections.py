"""Random histories of collections match a plain Python model, on every backend."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import VersionConflict
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import collections
from fastness.layers.collections import StoredRow
from fastness.runtime.maintenance import retention
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier
from fastness.wire.collections import DeleteRow, DeleteRows, PutRow, Row, RowChange, RowKey, ScanRows

PARTITIONS = ("a", "a\0", "a\0b", "ab", "é")
NAMES = ("rows", "rows-2")

# Few, so that most changes meet rows of earlier ones; neighbours in the order, and some that begin others.
KEYS: tuple[RowKey, ...] = (("",), ("a",), ("a", -300), ("a", 256), ("a", "x"), ("a\0",), (-(2**63),), (0, "a"))

keys = st.sampled_from(KEYS)
prefixes = st.sampled_from(((), ("a",), ("a", 256), ("a", -300), (0,), ("b",)))
partitions = st.sampled_from((*PARTITIONS, *["a"] * 5))
versions = st.sampled_from((*[None] * 9, 0, 1, 2))  # A condition that fails undoes the whole commit.
puts = st.builds(
    PutRow,
    partitions,
    keys,
    st.binary(max_size=3),
    if_version=versions,
    keep_existing=st.sampled_from((False, False, True)),
    ttl_seconds=st.sampled_from((None, 0.001, 0.5, 1)),
)
deletions = st.builds(DeleteRow, partitions, keys, if_version=versions) | st.builds(DeleteRows, partitions, prefixes)
changes = st.one_of(puts, puts, puts, deletions)


class Kept(NamedTuple):
    """A row in the model."""

    value: bytes
    version: int
    expires_ms: int | None


Rows = dict[str, dict[RowKey, Kept]]


def order(key: RowKey) -> list[tuple[int, Any]]:
    """Texts by their bytes, then integers by their value; a key that begins another one is before it."""
    return [(0, each.encode()) if isinstance(each, str) else (1, each) for each in key]


class Collections(RuleBasedStateMachine):
    """Two collections with five partitions, whose names begin each other."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    universes: Iterator[int]  # Examples may share a database, so each has its own universe.
    lasting: bool  # Whether data survives reopening the database.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.open = partial(next(self.openers), clock=self.clock)
        self.database = self.open()
        self.universe = str(next(self.universes))
        self.rows: dict[str, Rows] = {name: {} for name in NAMES}

    @rule(
        name=st.sampled_from(NAMES),
        changed=st.lists(changes, min_size=1, max_size=8),
        tier=st.sampled_from((Tier.CRITICAL, Tier.IMPORTANT)),
    )
    def changes_are_committed(self, name: str, changed: list[RowChange], tier: Tier) -> None:
        self.commit(name, changed, tier)

    @rule(name=st.sampled_from(NAMES), partition=partitions, key=keys)
    def a_row_is_put_again_after_it_has_expired(self, name: str, partition: str, key: RowKey) -> None:
        self.commit(name, [PutRow(partition, key, b"1", ttl_seconds=0.5)], Tier.CRITICAL)
        self.clock.advance_ms(500)
        self.commit(name, [PutRow(partition, key, b"2")], Tier.CRITICAL)

    def commit(self, name: str, changed: list[RowChange], tier: Tier) -> None:
        """Commit changes, and compare what happens with the model."""
        after = {partition: dict(rows) for partition, rows in self.live(name).items()}
        commit = partial(self.database.transact, collections.commit, self.universe, name, changed, tier=tier)
        expected: list[int | None] = []
        for change in changed:
            rows = after.setdefault(change.partition, {})
            if isinstance(change, DeleteRows):
                after[change.partition] = {key: row for key, row in rows.items() if not starts(key, change.prefix)}
                expected.append(None)
                continue
            row = rows.get(change.key)
            version = 0 if row is None else row.version
            if change.if_version is not None and change.if_version != version:
                with pytest.raises(VersionConflict) as refused:
                    commit()
                assert (refused.value.expected, refused.value.actual) == (change.if_version, version)
                return
            if isinstance(change, DeleteRow):
                rows.pop(change.key, None)
                expected.append(None)
            elif change.keep_existing and version:
                expected.append(version)
            else:
                ttl = change.ttl_seconds
                expires_ms = None if ttl is None else self.clock.now_ms() + round(ttl * 1_000)
                rows[change.key] = Kept(change.value, version + 1, expires_ms)
                expected.append(version + 1)
        assert commit() == expected
        self.rows[name] = after

    @rule(
        name=st.sampled_from(NAMES),
        partition=partitions,
        prefix=prefixes,
        after=st.none() | keys,
        before=st.none() | keys,
        limit=st.integers(1, 4),
        reverse=st.booleans(),
    )
    def pages_are_scanned(
        self,
        *,
        name: str,
        partition: str,
        prefix: RowKey,
        after: RowKey | None,
        before: RowKey | None,
        limit: int,
        reverse: bool,
    ) -> None:
        expected = [
            row
            for row in self.sorted_rows(name, partition)
            if starts(row.key, prefix)
            and (after is None or order(row.key) > order(after))
            and (before is None or order(row.key) < order(before))
        ]
        found: list[Row] = []
        while True:
            request = ScanRows(name, partition, prefix, after, before, limit, reverse, self.universe)
            page = self.database.read(collections.scan, request)
            found += page.rows
            if page.next is None:
                break
            assert len(page.rows) == limit
            after, before = (after, page.next) if reverse else (page.next, before)
        assert found == (expected[::-1] if reverse else expected)

    @rule(milliseconds=st.sampled_from((1, 499, 500, 1_000, 60_000)))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @rule()
    def expired_rows_are_removed(self) -> None:
        retention.delete_expired_rows(self.database)
        for name in NAMES:
            assert self.listed(name) == self.partitions(name)

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()

    @invariant()
    def stored_rows_equal_the_model(self) -> None:
        for name in NAMES:
            live = self.live(name)
            for partition in PARTITIONS:
                expected = self.sorted_rows(name, partition)
                read = partial(self.database.read, collections.get, self.universe, name, partition)
                assert read([row.key for row in expected]) == expected
                request = ScanRows(name, partition, universe=self.universe)
                assert self.database.read(collections.scan, request).rows == expected
            assert set(self.partitions(name)) <= set(self.listed(name)) <= set(PARTITIONS)
            assert live.keys() <= set(PARTITIONS)

    @invariant()
    def every_row_that_expires_is_in_the_index(self) -> None:
        rows, due = (Subspace("u", self.universe, area) for area in (collections.AREA, collections.DUE))

        def check(tx: Transaction) -> None:
            for key, value in tx.scan(*rows.range(), limit=10_000):
                element, *rest = rows.unpack(key)
                stored = msgspec.msgpack.decode(value, type=StoredRow)
                if stored.expires_ms:
                    assert tx.get(due.key(element, stored.expires_ms, *rest)) is not None

        self.database.read(check)

    def live(self, name: str) -> Rows:
        """The rows that have not expired."""
        now_ms = self.clock.now_ms()
        return {
            partition: {key: row for key, row in rows.items() if row.expires_ms is None or now_ms < row.expires_ms}
            for partition, rows in self.rows[name].items()
        }

    def sorted_rows(self, name: str, partition: str) -> list[Row]:
        rows = self.live(name).get(partition, {})
        return [Row(key, *rows[key]) for key in sorted(rows, key=order)]

    def partitions(self, name: str) -> list[str]:
        """The partitions that have rows."""
        return sorted((partition for partition, rows in self.live(name).items() if rows), key=str.encode)

    def listed(self, name: str) -> list[str]:
        """The partitions that are listed, in pages."""
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = self.database.read(collections.partitions, self.universe, name, after=after, limit=2)
            found, after = found + page.partitions, page.next
        return found

    def teardown(self) -> None:
        for name in NAMES:
            everything: list[RowChange] = [DeleteRows(partition) for partition in PARTITIONS]
            self.database.transact(collections.commit, self.universe, name, everything)
        begin, end = Subspace("u", self.universe).range()
        assert self.database.read(Transaction.scan, begin, end, limit=10) == []
        self.database.close()


def starts(key: RowKey, prefix: RowKey) -> bool:
    return key[: len(prefix)] == prefix


@pytest.mark.examples(100)
def test_collections_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Collections, steps=30, openers=repeat(MemoryDatabase), universes=count(), lasting=False)


@pytest.mark.examples(10)
def test_collections_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Collections, steps=30, openers=fresh, universes=count(), lasting=True)


@pytest.mark.examples(6)
def test_collections_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Collections, steps=30, openers=repeat(open_postgres), universes=count(), lasting=True)
