"""Transaction: how it reads its view, what it leaves for its backend, and its limits."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from fastness import limits
from fastness.backends.memory import Pairs
from fastness.clock import IdSource
from fastness.errors import InvalidArgument, TransactionEnded, TransactionTooLarge
from fastness.kv import Pair, Transaction, pages
from fastness.kv.execution import retry_pauses_seconds
from fastness.testing.clock import ManualClock


class RecordingPairs(Pairs):
    """Pairs that record their scans."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        super().__init__(values)
        self.scans: list[tuple[bytes, bytes, int]] = []

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Pair]:
        self.scans.append((begin, end, limit))
        return super().scan(begin, end, limit, reverse)


@pytest.fixture
def pairs() -> RecordingPairs:
    return RecordingPairs({bytes((letter,)): b"stored" for letter in b"abcdefgh"})


@pytest.fixture
def tx(pairs: RecordingPairs, clock: ManualClock) -> Transaction:
    return begin(pairs, clock)


def begin(view: Any, clock: ManualClock) -> Transaction:
    return Transaction(view, clock=clock, ids=IdSource(seed=1))


def keys(found: list[Pair]) -> bytes:
    return b"".join(key for key, _ in found)


# Reads of the view.


def test_a_scan_without_own_writes_reads_no_more_than_its_limit(tx: Transaction, pairs: RecordingPairs) -> None:
    tx.scan(b"a", b"z", limit=3)
    assert pairs.scans == [(b"a", b"z", 3)]


def test_a_scan_reads_one_more_pair_per_own_write_in_its_range(tx: Transaction, pairs: RecordingPairs) -> None:
    tx.delete(b"a")
    tx.put(b"b", b"own")
    tx.put(b"z", b"outside")
    assert keys(tx.scan(b"a", b"z", limit=3)) == b"bcd"
    assert pairs.scans == [(b"a", b"z", 5)]


@pytest.mark.parametrize(
    ("reverse", "found", "begins"), [(False, b"abgh", [b"a", b"g"]), (True, b"hgba", [b"g", b"a"])]
)
def test_a_scan_never_reads_what_it_has_cleared(
    tx: Transaction, pairs: RecordingPairs, reverse: bool, found: bytes, begins: list[bytes]
) -> None:
    tx.delete_range(b"c", b"f")
    tx.delete_range(b"d", b"e")
    tx.delete_range(b"e", b"g")
    assert keys(tx.scan(b"a", b"z", limit=100, reverse=reverse)) == found
    assert [begin for begin, _, _ in pairs.scans] == begins


def test_a_scan_stops_at_the_part_that_fills_its_limit(tx: Transaction, pairs: RecordingPairs) -> None:
    tx.delete_range(b"c", b"f")
    assert keys(tx.scan(b"a", b"z", limit=2)) == b"ab"
    assert pairs.scans == [(b"a", b"c", 2)]


def test_an_empty_range_reads_nothing_and_writes_nothing(tx: Transaction, pairs: RecordingPairs) -> None:
    assert tx.scan(b"c", b"c", limit=1) == []
    tx.delete_range(b"c", b"c")
    assert pairs.scans == []
    assert not tx.cleared


def test_pages_read_one_page_at_a_time(tx: Transaction, pairs: RecordingPairs) -> None:
    walk = pages(tx, b"a", b"z", items=3)
    assert keys(next(walk)) == b"abc"
    assert len(pairs.scans) == 1
    assert [keys(page) for page in walk] == [b"def", b"gh"]


@pytest.mark.parametrize("items", [0, -1, limits.SCAN_ITEMS_MAX + 1])
def test_pages_have_the_bounds_of_a_scan(tx: Transaction, items: int) -> None:
    with pytest.raises(InvalidArgument, match=str(limits.SCAN_ITEMS_MAX)):
        next(pages(tx, b"a", b"z", items=items))


# Writes for the backend.


def test_a_cleared_range_drops_earlier_writes(tx: Transaction) -> None:
    tx.put(b"c", b"lost")
    tx.put(b"x", b"kept")
    tx.delete_range(b"a", b"d")
    tx.put(b"b", b"kept")
    assert tx.cleared == ((b"a", b"d"),)
    assert tx.writes == {b"x": b"kept", b"b": b"kept"}


def test_size_counts_every_byte_that_was_written(tx: Transaction) -> None:
    tx.put(b"key", b"value")
    tx.delete(b"key")
    tx.delete_range(b"a", b"bc")
    assert tx.size_bytes == 8 + 3 + 3 + 3 * limits.WRITE_COST_BYTES


def test_a_transaction_merges_a_nested_one(tx: Transaction, clock: ManualClock) -> None:
    tx.put(b"b", b"first")
    tx.put(b"x", b"first")

    class Nested:
        get, scan = tx.get, tx.visible_pairs

    second = begin(Nested, clock)
    assert second.get(b"b") == b"first"
    second.delete_range(b"a", b"d")
    second.put(b"c", b"second")
    assert keys(second.scan(b"a", b"z", limit=100)) == b"cdefghx"
    assert tx.get(b"c") == b"stored"

    tx.merge(second)
    assert keys(tx.scan(b"a", b"z", limit=100)) == b"cdefghx"
    assert tx.writes == {b"x": b"first", b"c": b"second"}
    assert tx.size_bytes == 6 + 6 + 2 + 7 + 4 * limits.WRITE_COST_BYTES


def test_writes_do_not_change_the_view(tx: Transaction) -> None:
    tx.put(b"a", b"own")
    assert tx.get(b"a") == b"own"
    assert tx.view.get(b"a") == b"stored"


# Time.


def test_a_transaction_keeps_its_first_time(tx: Transaction, clock: ManualClock) -> None:
    clock.advance_ms(5)
    first = tx.now_ms
    clock.advance_ms(1_000)
    assert tx.now_ms == first == clock.now_ms() - 1_000
    assert tx.new_id().int >> 80 == first


def test_an_ended_transaction_has_no_time(tx: Transaction) -> None:
    tx.end()
    with pytest.raises(TransactionEnded):
        _ = tx.now_ms


# Limits.


FULL = limits.TRANSACTION_BYTES_MAX // limits.VALUE_BYTES_MAX - 1  # Values of the largest size that fit, minus one.


def fill(tx: Transaction) -> None:
    """Leave space for exactly one write of one byte."""
    for number in range(FULL):
        tx.put(b"%d" % number, bytes(limits.VALUE_BYTES_MAX))
    rest = limits.TRANSACTION_BYTES_MAX - tx.size_bytes - 2 * limits.WRITE_COST_BYTES - 2
    tx.put(b"r", bytes(rest))


@pytest.mark.parametrize(
    "write",
    [lambda tx: tx.put(b"x", b"1"), lambda tx: tx.delete(b"xy"), lambda tx: tx.delete_range(b"r", b"s")],
    ids=["put", "delete", "delete_range"],
)
def test_a_refused_write_changes_nothing_even_if_the_function_continues(
    write: Callable[[Transaction], None], clock: ManualClock
) -> None:
    tx = begin(Pairs({b"xy": b"stored"}), clock)
    fill(tx)
    before = dict(tx.writes), tx.cleared, tx.size_bytes
    with pytest.raises(TransactionTooLarge, match=str(limits.TRANSACTION_BYTES_MAX)):
        write(tx)
    assert (tx.writes, tx.cleared, tx.size_bytes) == before
    tx.delete(b"x")
    assert tx.size_bytes == limits.TRANSACTION_BYTES_MAX


def test_retry_pauses_increase_and_are_bounded() -> None:
    class Longest:
        def random(self) -> float:
            return 1.0

    longest = list(retry_pauses_seconds(Longest()))
    assert len(longest) == limits.CONFLICT_RETRIES_MAX
    assert longest[:4] == [0.001, 0.002, 0.004, 0.008]
    assert max(longest) == longest[-1] == limits.CONFLICT_PAUSE_MS_MAX / 1_000
    drawn = list(retry_pauses_seconds(random.Random(1)))
    assert all(0 <= pause <= bound for pause, bound in zip(drawn, longest, strict=True))
