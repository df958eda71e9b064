"""Journals: ordered appends with an expected head, and canonical bytes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest

import fastness
from fastness import Plane, Tier, limits
from fastness.errors import BatchTooLarge, EmptyBatch, HeadAdvanced, InvalidArgument, InvalidValue, MissingEntry
from fastness.kv import Database, Transaction
from fastness.layers import inboxes, journal_records, journals, worlds
from fastness.layers.journal_records import Kind
from fastness.layers.worlds import World
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control
from fastness.wire.worlds import AppendEntries

ADA = World("main", "ada")


def entry(value: Any) -> bytes:
    return journal_records.entry(canonical(value))


def journal(database: Database) -> list[tuple[int, bytes]]:
    return database.read(journals.read_hot, ADA, 0, limits.READ_ENTRIES_MAX)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.fixture
def world(database: Database) -> World:
    database.transact(worlds.create, ADA)
    return ADA


def test_heights_count_from_zero_and_the_head_is_the_next(database: Database, world: World) -> None:
    assert database.read(journals.head, world) == 0
    assert database.transact(journals.append, world, [entry("a")], expected_head=0) == 0
    assert database.transact(journals.append, world, [entry("b"), entry("c")], expected_head=1) == 1
    assert database.read(journals.head, world) == 3
    assert journal(database) == [(0, entry("a")), (1, entry("b")), (2, entry("c"))]


@pytest.mark.parametrize("expected", [0, 1, 3, -1, 2**64])
def test_an_append_at_another_head_is_refused_with_both_heads(database: Database, world: World, expected: int) -> None:
    database.transact(journals.append, world, [entry("a"), entry("b")], expected_head=0)
    with pytest.raises(HeadAdvanced, match=f"is 2, not {expected}") as refused:
        database.transact(journals.append, world, [entry("late")], expected_head=expected)
    assert (refused.value.expected, refused.value.actual) == (expected, 2)
    assert journal(database) == [(0, entry("a")), (1, entry("b"))]


def test_an_empty_batch_is_refused(database: Database, world: World) -> None:
    with pytest.raises(EmptyBatch, match="The batch is empty"):
        database.transact(journals.append, world, [], expected_head=0)


def test_a_batch_has_at_most_256_records(database: Database, world: World) -> None:
    with pytest.raises(BatchTooLarge, match="257 records"):
        database.transact(journals.append, world, [entry(0)] * 257, expected_head=0)
    assert journal(database) == []
    assert database.transact(journals.append, world, [entry(0)] * 256, expected_head=0) == 0
    assert database.read(journals.head, world) == 256


def test_a_batch_has_at_most_256_kib(database: Database, world: World) -> None:
    half = bytes(limits.BATCH_BYTES_MAX // 2)
    with pytest.raises(BatchTooLarge, match="262145 bytes"):
        database.transact(journals.append, world, [half, half, b"\x00"], expected_head=0)
    assert journal(database) == []
    database.transact(journals.append, world, [half, half], expected_head=0)
    database.transact(journals.append, world, [bytes(limits.BATCH_BYTES_MAX)], expected_head=2)
    assert database.read(journals.head, world) == 3


def test_a_read_returns_existing_records(database: Database, world: World) -> None:
    database.transact(journals.append, world, [entry(number) for number in range(256)], expected_head=0)
    read = journals.read_hot
    assert [height for height, _ in database.read(read, world, 250, 10)] == [250, 251, 252, 253, 254, 255]
    assert database.read(read, world, 7, 2) == [(7, entry(7)), (8, entry(8))]
    for start in (256, 257, 2**64, 2**70):
        assert database.read(read, world, start, 10) == []


def test_a_transaction_reads_what_it_appended(database: Database, world: World) -> None:
    def work(tx: Transaction) -> list[tuple[int, bytes]]:
        first = journals.append(tx, world, [entry("a")], expected_head=0)
        second = journals.append(tx, world, [entry("b")], expected_head=first + 1)
        assert (first, second, journals.head(tx, world)) == (0, 1, 2)
        return journals.read_hot(tx, world, 0, 10)

    assert database.transact(work) == journal(database) == [(0, entry("a")), (1, entry("b"))]


def test_a_failed_transaction_appends_nothing(database: Database, world: World) -> None:
    def work(tx: Transaction) -> None:
        journals.append(tx, world, [entry("a")], expected_head=0)
        raise LookupError("on purpose")

    with pytest.raises(LookupError):
        database.transact(work)
    assert database.read(journals.head, world) == 0
    assert journal(database) == []


def test_a_gap_is_reported_with_its_height(database: Database, world: World) -> None:
    database.transact(journals.append, world, [entry(number) for number in range(5)], expected_head=0)
    database.transact(Transaction.delete, worlds.subspace(world).key("journal", "e") + (3).to_bytes(8, "big"))
    with pytest.raises(MissingEntry, match="ada has no record 3, which is below its head 5; restore a backup"):
        journal(database)
    assert len(database.read(journals.read_hot, world, 0, 3)) == 3
    assert database.transact(journals.append, world, [entry(5)], expected_head=5) == 5
    with pytest.raises(MissingEntry):
        database.read(journals.read_hot, world, 3, 1)


# Canonical CBOR.


def test_the_order_of_keys_does_not_matter_for_the_bytes() -> None:
    one = {"b": 1, "aa": [{"z": 1, "y": {"q": 1, "p": 2}}], 7: b"", "c": None}
    other = {"c": None, 7: b"", "aa": [{"y": {"p": 2, "q": 1}, "z": 1}], "b": 1}
    assert canonical(one) == canonical(other)
    assert cbor2.loads(canonical(one)) == one


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ({"b": 1, "aa": 2, 1: 3}, "a3 01 03 61 62 01 62 61 61 02"),
        ([1.0, 1.5, 1e300, -0.0], "84 f9 3c 00 f9 3e 00 fb 7e 37 e4 3c 88 00 75 9c f9 80 00"),
        ([float("nan"), float("inf")], "82 f9 7e 00 f9 7c 00"),
        ([0, 23, 24, 255, 256, -1, 2**64], "87 00 17 18 18 18 ff 19 01 00 20 c2 49 01 00 00 00 00 00 00 00 00"),
        ((True, None, "ü", b"\x00"), "84 f5 f6 62 c3 bc 41 00"),
    ],
)
def test_a_value_has_one_canonical_form(value: Any, form: str) -> None:
    assert canonical(value) == bytes.fromhex(form)


@pytest.mark.parametrize("value", [object(), {"a": [object()]}, lambda: 1, "\ud800", {"\ud800": 1}, ..., iter([1])])
def test_a_value_without_a_canonical_form_is_refused(plane: Plane, value: Any) -> None:
    ada = plane.world("ada")
    head = ada.create().head
    with pytest.raises(InvalidValue, match="cannot be CBOR"):
        ada.append(["fine", value], expected_head=head)
    assert ada.head() == head


def test_a_recursive_value_is_refused(plane: Plane) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    plane.world("ada").create()
    with pytest.raises(InvalidValue, match="at most 100 deep"):
        plane.world("ada").append([cycle], expected_head=0)


def test_a_value_too_deep_to_read_is_refused(plane: Plane) -> None:
    """cbor2 writes any depth and reads at most 400 levels, so deeper values are refused."""
    ada = plane.world("ada")
    head = ada.create().head
    with pytest.raises(InvalidValue):
        ada.append([nested(450)], expected_head=head)
    assert ada.head() == head


def test_a_deeply_nested_value_does_not_crash_the_process() -> None:
    """cbor2 overflows the C stack above about 5,000 levels, which no exception handler can catch."""
    code = "from fastness.wire.canonical import canonical\nv = []\nfor _ in range(50_000): v = [v]\n"
    code += "try: canonical(v)\nexcept Exception: pass\nimport os; os._exit(7)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 7


# Kinds of records.


def test_a_record_has_a_kind_and_a_value() -> None:
    assert journal_records.split(journal_records.entry(canonical({"a": 1}))) == ("entry", canonical({"a": 1}))
    record = journal_records.ingress(7, Control(command="go"))
    assert journal_records.split(record) == ("ingress", record[2:])
    assert cbor2.loads(record) == [1, {"seq": 7, "type": "control", "command": "go"}]
    assert cbor2.loads(journal_records.entry(canonical("a"))) == [0, "a"]
    assert [kind.value for kind in (Kind.ENTRY, Kind.INGRESS, Kind.SNAPSHOT, Kind.BASELINE)] == [0, 1, 2, 3]


# The handle.


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}") as plane:
        yield plane


def test_the_handle_appends_values_and_reads_records(plane: Plane) -> None:
    ada = plane.world("ada")
    head = ada.create().head
    values = ["text", {"a": [1, 2.5, None]}, b"bytes", 2**70]
    assert ada.append(values, expected_head=head, tier=Tier.IMPORTANT) == head
    assert ada.append(["more"], expected_head=head + 4) == head + 4
    ada.inbox.put(Control(command="go"))
    ada.drain()
    found = ada.read(head)
    assert [record.height for record in found] == list(range(head, head + 6))
    assert [record.kind for record in found] == ["entry"] * 5 + ["ingress"]
    assert [cbor2.loads(record.value) for record in found[:5]] == [*values, "more"]
    assert ada.read(head + 2, limit=2) == found[2:4]
    assert ada.read(head + 6) == []


def test_the_handle_raises_the_layers_errors(plane: Plane) -> None:
    ada = plane.world("ada")
    head = ada.create().head
    with pytest.raises(EmptyBatch):
        ada.append([], expected_head=head)
    with pytest.raises(BatchTooLarge):
        ada.append(range(257), expected_head=head)
    with pytest.raises(BatchTooLarge):
        ada.append([bytes(limits.BATCH_BYTES_MAX)], expected_head=head)
    with pytest.raises(HeadAdvanced):
        ada.append(["x"], expected_head=head + 1)
    with pytest.raises(InvalidArgument):
        ada.read(-1)
    with pytest.raises(InvalidArgument):
        ada.read(limit=10_001)
    assert ada.head() == head


@pytest.mark.parametrize("value", [b"", b"\xff", b"\x61", b"aaaa", b"\x18\x01", b"\xa2\x61b\x01\x61a\x02"])
def test_entries_that_are_not_canonical_cbor_are_refused(value: bytes) -> None:
    """A client may send any bytes: none, half a value, two values, a number in a long form, unsorted keys."""
    with fastness.open("memory:") as plane:
        head = plane.world("ada").create().head
        with pytest.raises(InvalidValue, match="canonical CBOR"):
            AppendEntries("ada", [value], head).check()
        AppendEntries("ada", [canonical({"b": [1, 2.5, None], "a": b"x"})], head).check()


def test_an_item_and_an_entry_share_one_order(database: Database, world: World) -> None:
    database.transact(journals.append, world, [entry("a")], expected_head=0)
    database.transact(inboxes.enqueue, world, Control(command="go"))
    assert database.transact(inboxes.drain, world) == [1]
    with pytest.raises(HeadAdvanced):
        database.transact(journals.append, world, [entry("b")], expected_head=1)
    database.transact(journals.append, world, [entry("b")], expected_head=2)
    assert [journal_records.split(record)[0] for _, record in journal(database)] == ["entry", "ingress", "entry"]
