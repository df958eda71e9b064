"""Reads return what was written, in order, also inside the writing transaction."""

import uuid
from functools import partial
from itertools import pairwise
from typing import Any

from fastness import limits
from fastness.errors import (
    ReadOnlyTransaction,
)
from fastness.kv import Database, Transaction, pages
from fastness.testing.conformance.workloads import clear_subspace, contents, get, in_thread, put, put_all, raises
from fastness.tiers import Tier


def check_a_committed_value_is_read_back(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put, subspace.key("a"), b"1")
    assert database.transact(get, subspace.key("a")) == b"1"
    assert database.read(get, subspace.key("a")) == b"1"
    assert database.read(get, subspace.key("b")) is None


def check_values_of_any_bytes_and_length_come_back_unchanged(database: Database) -> None:
    subspace = clear_subspace(database)
    for value in (b"", b"\x00", b"\xff" * 3, bytes(range(256)), b"v" * limits.VALUE_BYTES_MAX):
        database.transact(put, subspace.key("a"), value)
        assert database.read(get, subspace.key("a")) == value


def check_the_longest_key_is_accepted(database: Database) -> None:
    subspace = clear_subspace(database)
    key = subspace.prefix + bytes(limits.KEY_BYTES_MAX - len(subspace.prefix))
    database.transact(put, key, b"1")
    assert database.read(get, key) == b"1"


def check_arguments_and_results_pass_through(database: Database) -> None:
    def work(_: Transaction, *args: int, **kwargs: int) -> tuple[Any, ...]:
        return args, kwargs

    assert database.transact(work, 1, 2, three=3) == ((1, 2), {"three": 3})
    assert database.read(work, 1, 2, three=3) == ((1, 2), {"three": 3})


def check_a_transaction_reads_its_own_writes(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put, subspace.key("old"), b"0")

    def work(tx: Transaction) -> list[bytes | None]:
        tx.put(subspace.key("new"), b"1")
        tx.delete(subspace.key("old"))
        seen = [tx.get(subspace.key("new")), tx.get(subspace.key("old"))]
        tx.put(subspace.key("old"), b"2")
        return [*seen, tx.get(subspace.key("old"))]

    assert database.transact(work) == [b"1", None, b"2"]
    assert contents(database, subspace) == {("new",): b"1", ("old",): b"2"}


def check_both_tiers_are_acknowledged_and_seen(database: Database) -> None:
    subspace = clear_subspace(database)
    for tier in (Tier.CRITICAL, Tier.IMPORTANT):
        database.transact(put, subspace.key(tier.value), b"1", tier=tier)
        for reading in (Tier.CRITICAL, Tier.IMPORTANT):
            assert database.read(get, subspace.key(tier.value), tier=reading) == b"1"
            assert database.transact(get, subspace.key(tier.value), tier=reading) == b"1"
    database.sync()


# Scans.


def check_a_scan_is_ordered_half_open_and_limited(database: Database) -> None:
    subspace = clear_subspace(database)
    keys = [
        subspace.prefix + tail for tail in (b"\x00", b"\x00\x00", b"\x01", b"a", b"aa", b"b", b"\x7f", b"\x80", b"\xff")
    ]
    database.transact(put_all, [(key, key[-1:]) for key in reversed(keys)])
    keys.sort()
    begin, end = subspace.prefix, subspace.prefix + b"\xff\xff"

    def scan(begin: bytes, end: bytes, limit: int, reverse: bool = False) -> list[bytes]:
        found = database.read(lambda tx: tx.scan(begin, end, limit=limit, reverse=reverse))
        assert all(value == key[-1:] for key, value in found)
        return [key for key, _ in found]

    assert scan(begin, end, 100) == keys
    assert scan(begin, end, 100, reverse=True) == keys[::-1]
    assert scan(begin, end, 4) == keys[:4]
    assert scan(begin, end, 4, reverse=True) == keys[:-5:-1]
    assert scan(keys[2], keys[5], 100) == keys[2:5]
    assert scan(keys[2], keys[5], 100, reverse=True) == keys[4:1:-1]
    assert scan(keys[2], keys[2], 100) == []
    assert scan(keys[2] + b"\x00", keys[3], 100) == []


def check_a_scan_sees_uncommitted_writes(database: Database) -> None:
    subspace = clear_subspace(database)
    stored = [(subspace.key(number), b"stored") for number in range(0, 20, 2)]
    database.transact(put_all, stored)

    def work(tx: Transaction) -> None:
        model = dict(stored)
        begin, end = subspace.range()
        for number in (3, 4, 17, 25):
            tx.put(subspace.key(number), b"new")
            model[subspace.key(number)] = b"new"
        for number in (0, 6, 7, 18):
            tx.delete(subspace.key(number))
            model.pop(subspace.key(number), None)
        tx.delete_range(subspace.key(9), subspace.key(13))
        for number in range(9, 13):
            model.pop(subspace.key(number), None)
        tx.put(subspace.key(11), b"again")
        model[subspace.key(11)] = b"again"
        expected = sorted(model.items())
        for limit in range(1, len(expected) + 2):
            assert tx.scan(begin, end, limit=limit) == expected[:limit]
            assert tx.scan(begin, end, limit=limit, reverse=True) == expected[::-1][:limit]
        assert tx.scan(subspace.key(9), subspace.key(13), limit=10) == [(subspace.key(11), b"again")]

    database.transact(work)


def check_a_deleted_range_is_gone_and_what_is_put_after_it_stays(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put_all, [(subspace.key(number), b"old") for number in range(10)])

    def work(tx: Transaction) -> None:
        tx.put(subspace.key(3), b"lost")
        tx.delete_range(subspace.key(2), subspace.key(8))
        tx.put(subspace.key(5), b"kept")

    database.transact(work)
    assert contents(database, subspace) == {(0,): b"old", (1,): b"old", (5,): b"kept", (8,): b"old", (9,): b"old"}


def check_overlapping_deleted_ranges_add_up(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put_all, [(subspace.key(number), b"") for number in range(20)])

    def work(tx: Transaction) -> list[Any]:
        for begin, end in ((12, 15), (2, 6), (4, 9), (5, 5)):
            tx.delete_range(subspace.key(begin), subspace.key(end))
        return [subspace.unpack(key)[0] for key, _ in tx.scan(*subspace.range(), limit=100)]

    expected = [0, 1, 9, 10, 11, 15, 16, 17, 18, 19]
    assert database.transact(work) == expected
    assert [element for (element,) in contents(database, subspace)] == expected


def check_pages_walk_a_long_range_in_both_directions(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put_all, [(subspace.key(number), b"") for number in range(2_500)])
    for reverse in (False, True):

        def work(tx: Transaction, reverse: bool = reverse) -> list[int]:
            page_iterator = pages(tx, *subspace.range(), reverse=reverse, items=999)
            return [subspace.unpack(key)[0] for page in page_iterator for key, _ in page]

        assert database.read(work) == sorted(range(2_500), reverse=reverse)


# Snapshots.


def check_a_read_snapshot_refuses_to_write(database: Database) -> None:
    subspace = clear_subspace(database)
    for write in (
        lambda tx: tx.put(subspace.key("a"), b"1"),
        lambda tx: tx.delete(subspace.key("a")),
        lambda tx: tx.delete_range(*subspace.range()),
    ):
        raises(ReadOnlyTransaction, partial(database.read, write))


def check_a_read_snapshot_does_not_change(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put_all, [(subspace.key(number), b"old") for number in range(9)])
    runs = 0

    def change(tx: Transaction) -> None:
        tx.put(subspace.key(0), b"new in run %d" % runs)
        tx.delete(subspace.key(runs))
        tx.put(subspace.key(10 + runs), b"new")

    def work(tx: Transaction) -> None:
        nonlocal runs
        runs += 1  # A backend may run a reader again; each run changes what the previous run read.
        before = tx.scan(*subspace.range(), limit=100)
        in_thread(lambda: database.transact(change))
        assert tx.get(subspace.key(0)) == dict(before)[subspace.key(0)]
        assert tx.get(subspace.key(10 + runs)) is None
        assert tx.scan(*subspace.range(), limit=100) == before
        assert tx.scan(*subspace.range(), limit=100, reverse=True) == before[::-1]
        assert tx.scan(subspace.key(1), subspace.key(11), limit=100, reverse=True) == [
            pair for pair in before[::-1] if subspace.key(1) <= pair[0] < subspace.key(11)
        ]

    database.read(work)
    assert contents(database, subspace)[(0,)] == b"new in run %d" % runs


# Time and identity.


def check_time_does_not_change_inside_a_transaction(database: Database) -> None:
    def work(tx: Transaction) -> tuple[int, int]:
        return tx.now_ms, tx.now_ms

    first = database.transact(work)
    second = database.read(work)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] > 1_500_000_000_000


def check_new_ids_are_time_ordered_and_grow(database: Database) -> None:
    def work(tx: Transaction) -> tuple[int, list[uuid.UUID]]:
        return tx.now_ms, [tx.new_id() for _ in range(100)]

    now_ms, ids = database.transact(work)
    more = database.transact(work)[1]
    assert all(left < right for left, right in pairwise([*ids, *more]))
    assert {made.version for made in ids} == {7}
    assert {made.variant for made in ids} == {uuid.RFC_4122}
    assert ids[0].int >> 80 >= now_ms
