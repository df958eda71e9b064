"""A key space reads back what was written, in order, also inside the transaction that writes."""

import uuid
from functools import partial
from itertools import pairwise
from typing import Any

from holdfast import limits
from holdfast.errors import (
    ReadOnlyTransaction,
)
from holdfast.kv import Database, Transaction, pages
from holdfast.testing.conformance.subspace import clear_room, contents, get, in_thread, put, put_all, raises
from holdfast.tiers import Tier


def check_a_committed_value_is_read_back(database: Database) -> None:
    room = clear_room(database)
    database.transact(put, room.key("a"), b"1")
    assert database.transact(get, room.key("a")) == b"1"
    assert database.read(get, room.key("a")) == b"1"
    assert database.read(get, room.key("b")) is None


def check_values_of_any_bytes_and_length_come_back_unchanged(database: Database) -> None:
    room = clear_room(database)
    for value in (b"", b"\x00", b"\xff" * 3, bytes(range(256)), b"v" * limits.VALUE_BYTES_MAX):
        database.transact(put, room.key("a"), value)
        assert database.read(get, room.key("a")) == value


def check_the_longest_key_is_accepted(database: Database) -> None:
    room = clear_room(database)
    key = room.prefix + bytes(limits.KEY_BYTES_MAX - len(room.prefix))
    database.transact(put, key, b"1")
    assert database.read(get, key) == b"1"


def check_arguments_and_results_pass_through(database: Database) -> None:
    def work(_: Transaction, *args: int, **kwargs: int) -> tuple[Any, ...]:
        return args, kwargs

    assert database.transact(work, 1, 2, three=3) == ((1, 2), {"three": 3})
    assert database.read(work, 1, 2, three=3) == ((1, 2), {"three": 3})


def check_a_transaction_reads_its_own_writes(database: Database) -> None:
    room = clear_room(database)
    database.transact(put, room.key("old"), b"0")

    def work(tx: Transaction) -> list[bytes | None]:
        tx.put(room.key("new"), b"1")
        tx.delete(room.key("old"))
        seen = [tx.get(room.key("new")), tx.get(room.key("old"))]
        tx.put(room.key("old"), b"2")
        return [*seen, tx.get(room.key("old"))]

    assert database.transact(work) == [b"1", None, b"2"]
    assert contents(database, room) == {("new",): b"1", ("old",): b"2"}


def check_both_tiers_are_acknowledged_and_seen(database: Database) -> None:
    room = clear_room(database)
    for tier in (Tier.CRITICAL, Tier.IMPORTANT):
        database.transact(put, room.key(tier.value), b"1", tier=tier)
        for reading in (Tier.CRITICAL, Tier.IMPORTANT):
            assert database.read(get, room.key(tier.value), tier=reading) == b"1"
            assert database.transact(get, room.key(tier.value), tier=reading) == b"1"
    database.sync()


# Scans.


def check_a_scan_is_ordered_half_open_and_limited(database: Database) -> None:
    room = clear_room(database)
    keys = [
        room.prefix + tail for tail in (b"\x00", b"\x00\x00", b"\x01", b"a", b"aa", b"b", b"\x7f", b"\x80", b"\xff")
    ]
    database.transact(put_all, [(key, key[-1:]) for key in reversed(keys)])
    keys.sort()
    begin, end = room.prefix, room.prefix + b"\xff\xff"

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
    room = clear_room(database)
    stored = [(room.key(number), b"stored") for number in range(0, 20, 2)]
    database.transact(put_all, stored)

    def work(tx: Transaction) -> None:
        model = dict(stored)
        begin, end = room.range()
        for number in (3, 4, 17, 25):
            tx.put(room.key(number), b"new")
            model[room.key(number)] = b"new"
        for number in (0, 6, 7, 18):
            tx.delete(room.key(number))
            model.pop(room.key(number), None)
        tx.delete_range(room.key(9), room.key(13))
        for number in range(9, 13):
            model.pop(room.key(number), None)
        tx.put(room.key(11), b"again")
        model[room.key(11)] = b"again"
        expected = sorted(model.items())
        for limit in range(1, len(expected) + 2):
            assert tx.scan(begin, end, limit=limit) == expected[:limit]
            assert tx.scan(begin, end, limit=limit, reverse=True) == expected[::-1][:limit]
        assert tx.scan(room.key(9), room.key(13), limit=10) == [(room.key(11), b"again")]

    database.transact(work)


def check_a_deleted_range_is_gone_and_what_is_put_after_it_stays(database: Database) -> None:
    room = clear_room(database)
    database.transact(put_all, [(room.key(number), b"old") for number in range(10)])

    def work(tx: Transaction) -> None:
        tx.put(room.key(3), b"lost")
        tx.delete_range(room.key(2), room.key(8))
        tx.put(room.key(5), b"kept")

    database.transact(work)
    assert contents(database, room) == {(0,): b"old", (1,): b"old", (5,): b"kept", (8,): b"old", (9,): b"old"}


def check_overlapping_deleted_ranges_add_up(database: Database) -> None:
    room = clear_room(database)
    database.transact(put_all, [(room.key(number), b"") for number in range(20)])

    def work(tx: Transaction) -> list[Any]:
        for begin, end in ((12, 15), (2, 6), (4, 9), (5, 5)):
            tx.delete_range(room.key(begin), room.key(end))
        return [room.unpack(key)[0] for key, _ in tx.scan(*room.range(), limit=100)]

    expected = [0, 1, 9, 10, 11, 15, 16, 17, 18, 19]
    assert database.transact(work) == expected
    assert [element for (element,) in contents(database, room)] == expected


def check_pages_walk_a_long_range_in_both_directions(database: Database) -> None:
    room = clear_room(database)
    database.transact(put_all, [(room.key(number), b"") for number in range(2_500)])
    for reverse in (False, True):

        def work(tx: Transaction, reverse: bool = reverse) -> list[int]:
            walk = pages(tx, *room.range(), reverse=reverse, items=999)
            return [room.unpack(key)[0] for page in walk for key, _ in page]

        assert database.read(work) == sorted(range(2_500), reverse=reverse)


# Snapshots.


def check_a_read_snapshot_refuses_to_write(database: Database) -> None:
    room = clear_room(database)
    for write in (
        lambda tx: tx.put(room.key("a"), b"1"),
        lambda tx: tx.delete(room.key("a")),
        lambda tx: tx.delete_range(*room.range()),
    ):
        raises(ReadOnlyTransaction, partial(database.read, write))


def check_a_read_snapshot_does_not_move(database: Database) -> None:
    room = clear_room(database)
    database.transact(put_all, [(room.key(number), b"old") for number in range(9)])
    runs = 0

    def change(tx: Transaction) -> None:
        tx.put(room.key(0), b"new in run %d" % runs)
        tx.delete(room.key(runs))
        tx.put(room.key(10 + runs), b"new")

    def work(tx: Transaction) -> None:
        nonlocal runs
        runs += 1  # A backend may have to run a reader again; each run changes what the one before has seen.
        before = tx.scan(*room.range(), limit=100)
        in_thread(lambda: database.transact(change))
        assert tx.get(room.key(0)) == dict(before)[room.key(0)]
        assert tx.get(room.key(10 + runs)) is None
        assert tx.scan(*room.range(), limit=100) == before
        assert tx.scan(*room.range(), limit=100, reverse=True) == before[::-1]
        assert tx.scan(room.key(1), room.key(11), limit=100, reverse=True) == [
            pair for pair in before[::-1] if room.key(1) <= pair[0] < room.key(11)
        ]

    database.read(work)
    assert contents(database, room)[(0,)] == b"new in run %d" % runs


# Time and identity.


def check_time_stands_still_inside_a_transaction(database: Database) -> None:
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
