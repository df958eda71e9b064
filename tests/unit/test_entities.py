"""Entities: transactions, versions, histories, scans and limits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import Plane, Tier
from fastness.errors import (
    BatchTooLarge,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidName,
    LockTimeout,
    ValueTooLarge,
    VersionConflict,
)
from fastness.kv import Database, Transaction
from fastness.layers import entities
from fastness.layers.entities import EntityKey
from fastness.limits import (
    ENTITY_BYTES_MAX,
    ENTITY_FIELDS_MAX,
    ENTITY_HISTORY_VERSIONS,
    ENTITY_WRITES_MAX,
    READ_ENTRIES_MAX,
)
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.entities import EntityWrite, SeenEntity, WriteEntities
from tests.unit import entity_fixtures
from tests.unit.entity_fixtures import PATIENCE_SECONDS, TASK, logged, row_locks, rows_locked
from tests.unit.stored_pairs import everything

url = entity_fixtures.url
plane = entity_fixtures.plane
threads = entity_fixtures.threads


# Transactions.


def test_a_transaction_mixes_entities_and_tiers_in_one_commit(plane: Plane) -> None:
    with plane.entities.transaction(session="s") as transaction:
        transaction.write("task", "1", "status", "open")
        transaction.write("task", "2", "note", "x")
        transaction.write("task", "3", "debug_trace", 1)
        transaction.write("task", "2", "metrics", {"ms": 3})
        assert everything(plane) == []
    assert plane.entities.get("task", "1").fields == {"status": "open"}
    assert plane.entities.get("task", "2").fields == {"note": "x"}
    assert plane.entities.get("task", "3") is None
    assert [(each["id"], each["fields"]) for each in logged(plane, session="s")] == [
        ("2", {"metrics": {"ms": 3}}),
        ("3", {"debug_trace": 1}),
    ]
    assert plane.entities.history("task", "2")[0].durability is Tier.CRITICAL
    assert rows_locked(plane) == row_locks(plane, 1)


def test_a_transaction_returns_the_version_of_each_write(plane: Plane) -> None:
    plane.entities.write("task", "2", {"note": 1})
    transaction = plane.entities.transaction()
    for id, field in (("1", "status"), ("2", "note"), ("3", "metrics")):
        transaction.write("task", id, field, 1)
    written = transaction.commit()
    assert (written.versions, written.durability) == ([1, 2, None], Tier.CRITICAL)


@pytest.mark.parametrize("field", ["status", "note", "debug_trace"])
def test_a_transaction_fails_if_an_entity_it_read_has_changed(plane: Plane, field: str) -> None:
    """Nothing is written, and nothing is logged."""
    plane.entities.write("task", "1", {"note": 1})
    transaction = plane.entities.transaction(session="s")
    assert transaction.get("task", "1").fields["note"] == 1
    plane.entities.write("task", "1", {"note": 2})
    before = everything(plane)
    transaction.get("task", "1")  # Reading it again keeps the first version as seen.
    transaction.write("task", "2", field, "x")
    transaction.write("task", "2", "metrics", "x")
    with pytest.raises(VersionConflict, match="task 1 has version 2, not 1") as conflict:
        transaction.commit()
    assert (conflict.value.expected, conflict.value.actual) == (1, 2)
    assert everything(plane) == before
    assert logged(plane) == []
    with pytest.raises(InvalidArgument, match="ended"):
        transaction.commit()
    assert plane.locks.stats()["record_id"].holders == 0


@pytest.mark.parametrize("changed", ["1", "2", "3"])
def test_a_transaction_detects_a_change_of_any_entity_it_read(plane: Plane, changed: str) -> None:
    plane.entities.write("task", "2", {"note": 1})
    transaction = plane.entities.transaction()
    for id in ("1", "2", "3"):
        transaction.get("task", id)
    plane.entities.write("task", changed, {"note": 2})
    transaction.write("task", "4", "status", 1)
    with pytest.raises(VersionConflict, match=f"task {changed}"):
        transaction.commit()
    assert plane.entities.get("task", "4") is None


def test_a_transaction_that_read_a_missing_entity_detects_its_creation(plane: Plane) -> None:
    transaction = plane.entities.transaction()
    assert transaction.get("task", "1") is None
    transaction.write("task", "1", "status", "mine")
    plane.entities.write("task", "1", {"status": "theirs"})
    with pytest.raises(VersionConflict):
        transaction.commit()
    assert plane.entities.get("task", "1").fields["status"] == "theirs"


def test_a_transaction_whose_block_fails_writes_nothing(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.entities.transaction() as transaction:
        transaction.write("task", "1", "status", "open")
        transaction.write("task", "1", "debug_trace", "open")
        raise ZeroDivisionError
    assert everything(plane) == []
    assert logged(plane) == []


def test_a_transaction_without_writes_is_allowed(plane: Plane) -> None:
    with plane.entities.transaction() as transaction:
        transaction.get("task", "1")
    assert plane.entities.transaction().commit() is None
    assert everything(plane) == []


def test_the_last_write_of_a_field_wins(plane: Plane) -> None:
    plane.entities.write("task", "1", {"a": 1, "b": 1})
    with plane.entities.transaction() as transaction:
        transaction.write("task", "1", "a", 2)
        transaction.remove("task", "1", "a")
        transaction.remove("task", "1", "b")
        transaction.write("task", "1", "b", 2)
        transaction.write("task", "1", "b", 3)
    assert plane.entities.get("task", "1").fields == {"b": 3}
    change = plane.entities.history("task", "1")[-1]
    assert (change.version, change.fields, change.removed) == (2, {"b": 3}, ["a"])


def test_removing_a_critical_field_is_critical(plane: Plane) -> None:
    plane.entities.write("task", "1", {"status": 1, "note": 1})
    locked = rows_locked(plane)
    transaction = plane.entities.transaction()
    transaction.remove("task", "1", "status")
    assert transaction.commit().durability is Tier.CRITICAL
    assert rows_locked(plane) == locked + row_locks(plane, 1)
    assert plane.entities.get("task", "1").fields == {"note": 1}


# Histories, deletions and scans.


def test_a_history_lists_every_change(plane: Plane, clock: ManualClock) -> None:
    plane.entities.write("task", "1", {"status": "open", "note": "x"})
    clock.advance_ms(5)
    plane.entities.write("task", "1", {"note": "y"})
    with plane.entities.transaction() as transaction:
        transaction.remove("task", "1", "note")
    plane.entities.delete("task", "1")
    changes = [
        (each.version, each.at_ms, each.durability, each.fields, each.removed, each.deleted)
        for each in plane.entities.history("task", "1")
    ]
    assert changes == [
        (1, START_MS, Tier.CRITICAL, {"status": "open", "note": "x"}, [], False),
        (2, START_MS + 5, Tier.IMPORTANT, {"note": "y"}, [], False),
        (3, START_MS + 5, Tier.IMPORTANT, {}, ["note"], False),
        (4, START_MS + 5, Tier.CRITICAL, {}, ["status"], True),
    ]
    assert [each.version for each in plane.entities.history("task", "1", after=1, limit=2)] == [2, 3]
    assert plane.entities.history("task", "1", after=4) == []
    assert plane.entities.history("task", "2") == []


def test_a_history_keeps_the_latest_versions_and_no_more(database: Database) -> None:
    def write(tx: Transaction) -> None:
        for number in range(ENTITY_HISTORY_VERSIONS + 5):
            entities.write(tx, TASK, {"n": cbor2.dumps(number)}, [], tier=Tier.IMPORTANT)

    database.transact(write)
    history = database.read(entities.history, TASK, after=0, limit=READ_ENTRIES_MAX)
    assert [each.version for each in history] == list(range(6, ENTITY_HISTORY_VERSIONS + 6))
    assert history[-1].fields == database.read(entities.get, TASK).fields


def test_versions_keep_growing_across_a_deletion(plane: Plane, clock: ManualClock) -> None:
    """So a version read before the deletion never matches the new entity."""
    plane.entities.write("task", "1", {"status": 1})
    assert plane.entities.delete("task", "1")
    assert plane.entities.get("task", "1") is None
    assert not plane.entities.delete("task", "1")
    for stale in (0, 1):
        with pytest.raises(VersionConflict) as conflict:
            plane.entities.put_if_version("task", "1", {"status": 2}, expected_version=stale)
        assert conflict.value.actual == 2
    clock.advance_ms(5)
    assert plane.entities.write("task", "1", {"note": 1}).versions == [3]
    entity = plane.entities.get("task", "1")
    assert (entity.fields, entity.created_ms, entity.version) == ({"note": 1}, START_MS + 5, 3)
    assert [each.version for each in plane.entities.history("task", "1")] == [1, 2, 3]


def test_only_the_expected_version_is_deleted(plane: Plane) -> None:
    plane.entities.write("task", "1", {"note": 1})
    for wrong in (0, 2):
        with pytest.raises(VersionConflict):
            plane.entities.delete("task", "1", expected_version=wrong)
    assert plane.entities.delete("task", "1", expected_version=1)
    assert not plane.entities.delete("task", "1", expected_version=2)
    with pytest.raises(VersionConflict):
        plane.entities.delete("task", "1", expected_version=1)


def test_a_scan_pages_through_existing_entities(plane: Plane) -> None:
    for number in range(10):
        plane.entities.write("task", f"t{number}", {"n": number})
        plane.entities.write("edge", f"t{number}", {"n": number})
    for number in (0, 3, 4, 5, 9):
        plane.entities.delete("task", f"t{number}")
    assert [each.id for each in plane.entities.scan("task")] == ["t1", "t2", "t6", "t7", "t8"]
    found, after = list[str](), ""
    while page := plane.entities.scan("task", after=after, limit=2):
        assert len(page) <= 2
        found += [each.id for each in page]
        after = page[-1].id
    assert found == ["t1", "t2", "t6", "t7", "t8"]
    assert [each.id for each in plane.entities.scan("task", after="t3", limit=1)] == ["t6"]
    assert plane.entities.scan("nothing") == []


def test_names_and_fields_keep_their_case(plane: Plane) -> None:
    plane.entities.write("Task", "ABC", {"Note": 1, "note": 2})
    assert plane.entities.get("Task", "ABC").fields == {"Note": 1, "note": 2}
    assert plane.entities.get("task", "abc") is None
    for kind, id in (("no name", "1"), ("task", "no/name"), ("", "1"), ("task", "")):
        for call in (
            lambda: plane.entities.write(kind, id, {"note": 1}),  # noqa: B023
            lambda: plane.entities.get(kind, id),  # noqa: B023
            lambda: plane.entities.delete(kind, id),  # noqa: B023
            lambda: plane.entities.transaction().write(kind, id, "note", 1),  # noqa: B023
        ):
            with pytest.raises(InvalidName):
                call()


def test_universes_have_separate_entities(plane: Plane) -> None:
    other = Plane(plane._transport, "other")
    plane.entities.write("task", "1", {"status": 1, "metrics": 1})
    assert other.entities.get("task", "1") is None
    assert other.entities.scan("task") == []
    assert other.entities.write("task", "1", {"status": 2}).versions == [1]
    assert logged(other) == []
    assert rows_locked(plane) == rows_locked(other) == row_locks(plane, 1)


# Limits.


def refused_and_unwritten(plane: Plane, error: type[FastnessError], call: Callable[[], object]) -> None:
    before = everything(plane)
    with pytest.raises(error):
        call()
    assert everything(plane) == before
    assert logged(plane) == []
    assert plane.locks.stats()["record_id"].holders == 0


@pytest.mark.parametrize("first", [{}, {"status": 1}], ids=["important", "critical"])
def test_the_number_of_fields_of_an_entity_is_limited(plane: Plane, first: dict[str, int]) -> None:
    fields = first | {f"f{number}": number for number in range(ENTITY_FIELDS_MAX - len(first))}
    plane.entities.write("task", "1", fields)
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"one-more": 1}))
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "2", {**fields, "one-more": 1}))
    refused_and_unwritten(
        plane,
        ValueTooLarge,
        lambda: plane.entities.put_if_version("task", "1", {**fields, "one-more": 1}, expected_version=1),
    )


def test_the_size_of_an_entity_is_limited(plane: Plane) -> None:
    overhead = len(cbor2.dumps(b"x" * 100_000)) - 100_000
    half = ENTITY_BYTES_MAX // 2 - overhead - 1
    plane.entities.write("task", "1", {"a": b"x" * half})
    plane.entities.write("task", "1", {"b": b"x" * half})
    assert plane.entities.get("task", "1").version == 2
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"b": b"x" * (half + 1)}))
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"status": 1}))


def test_the_number_of_writes_of_a_transaction_is_limited(plane: Plane) -> None:
    def fill(transaction: Any, count: int) -> Any:
        for number in range(count):
            transaction.write("task", str(number), "status", 1)
        return transaction

    written = fill(plane.entities.transaction(), ENTITY_WRITES_MAX).commit()
    assert written.versions == [1] * ENTITY_WRITES_MAX
    too_many = fill(plane.entities.transaction(), ENTITY_WRITES_MAX + 1)
    refused_and_unwritten(plane, BatchTooLarge, too_many.commit)
    saw_too_much = plane.entities.transaction()
    for number in range(ENTITY_WRITES_MAX + 1):
        saw_too_much.get("task", str(number))
    saw_too_much.write("task", "1", "status", 2)
    refused_and_unwritten(plane, BatchTooLarge, saw_too_much.commit)


def test_a_request_that_writes_nothing_is_refused(plane: Plane) -> None:
    refused_and_unwritten(
        plane, EmptyBatch, lambda: plane._transport.call(WriteEntities([], [SeenEntity("task", "1", 0)]))
    )


@pytest.mark.parametrize("field", ["", "two words", "ü", "x" * 129, "a/b", "line\n"])
def test_an_invalid_field_name_is_refused(plane: Plane, field: str) -> None:
    refused_and_unwritten(plane, InvalidName, lambda: plane.entities.write("task", "1", {field: 1, "status": 1}))
    refused_and_unwritten(
        plane, InvalidName, lambda: plane.entities.put_if_version("task", "1", {field: 1}, expected_version=0)
    )


def test_an_invalid_best_effort_field_name_is_refused(plane: Plane) -> None:
    """Field names are checked before the session log is written."""
    refused_and_unwritten(plane, InvalidName, lambda: plane.entities.write("task", "1", {"debug_ two words": 1}))


def test_a_transaction_that_fails_late_writes_nothing(plane: Plane) -> None:
    transaction = plane.entities.transaction()
    transaction.write("task", "1", "status", 1)
    transaction.write("task", "2", "metrics", 1)
    transaction.write("task", "3", "note", b"x" * (ENTITY_BYTES_MAX + 1))
    refused_and_unwritten(plane, ValueTooLarge, transaction.commit)


def test_an_entity_may_be_written_twice_in_one_commit(plane: Plane) -> None:
    writes = [EntityWrite("task", "1", {"a": cbor2.dumps(number)}) for number in range(2)]
    assert plane._transport.call(WriteEntities(writes)).versions == [1, 2]
    assert [each.fields for each in plane.entities.history("task", "1")] == [{"a": 0}, {"a": 1}]


# The asynchronous handle.


async def test_tasks_write_entities(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        written = await plane.entities.write("task", "1", {"status": 1, "metrics": 2}, session="s")
        assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
        async with plane.entities.transaction(session="s") as transaction:
            entity = await transaction.get("task", "1")
            transaction.write("task", "1", "status", entity.fields["status"] + 1)
            transaction.write("task", "1", "debug_x", 3)
        transaction = plane.entities.transaction()
        await transaction.get("task", "1")
        await plane.entities.update("task", "1", lambda entity: {"status": entity.fields["status"] + 1})
        transaction.write("task", "1", "status", 0)
        with pytest.raises(VersionConflict):
            await transaction.commit()
        assert [each.fields["status"] for each in await plane.entities.history("task", "1")] == [1, 2, 3]
        assert [each.id for each in await plane.entities.scan("task")] == ["1"]
        records = (await plane.activity.read(session="s")).records
        assert [msgspec.json.decode(each.record)["fields"] for each in records] == [{"metrics": 2}, {"debug_x": 3}]
        async with await plane.locks.acquire(["entity_type", "task"]):
            await plane.entities.write("task", "1", {"status": 4})
            with pytest.raises(LockTimeout):
                await asyncio.create_task(plane.locks.acquire(["record_id", "task/1"], timeout_seconds=0))
        assert (await plane.locks.stats())["record_id"].acquisitions == 5
        assert await plane.entities.delete("task", "1", expected_version=4)


# The layer on every backend.


def test_the_layer_keeps_versions_and_histories(database: Database, clock: ManualClock) -> None:
    absent = database.read(entities.get, TASK)
    assert (absent.version, absent.deleted, absent.fields) == (0, True, {})
    assert database.transact(entities.delete, TASK) is None
    one, two = cbor2.dumps(1), cbor2.dumps(2)

    def write(tx: Transaction, fields: dict[str, bytes], removed: list[str]) -> int:
        return entities.write(tx, TASK, fields, removed, tier=Tier.CRITICAL)

    assert database.transact(write, {"a": one, "b": one}, []) == 1
    clock.advance_ms(5)
    assert database.transact(write, {"a": two}, ["b", "c"]) == 2
    found = database.read(entities.get, TASK)
    assert (found.version, found.fields, found.deleted) == (2, {"a": two}, False)
    assert (found.created_ms, found.updated_ms) == (START_MS, START_MS + 5)
    with pytest.raises(VersionConflict):
        database.transact(entities.require_version, TASK, 1)
    assert database.transact(entities.delete, TASK, expected_version=2) == 3
    assert database.transact(entities.delete, TASK) is None
    assert database.read(entities.require_version, TASK, 3).deleted
    assert [each.removed for each in database.read(entities.history, TASK, after=0, limit=10)] == [
        [],
        ["b", "c"],
        ["a"],
    ]


def test_the_layer_scans_past_any_number_of_deleted_ones(database: Database) -> None:
    def write(tx: Transaction) -> None:
        for number in range(300):
            key = EntityKey("main", "task", f"{number:03}")
            entities.write(tx, key, {"n": cbor2.dumps(number)}, [], tier=Tier.IMPORTANT)
            if number % 100:
                entities.delete(tx, key)

    database.transact(write)
    for limit in (1, 2, 3, 10):
        found = database.read(entities.scan, "main", "task", after="", limit=limit)
        assert [each.id for each in found] == ["000", "100", "200"][:limit]
    assert [each.id for each in database.read(entities.scan, "main", "task", after="100", limit=1)] == ["200"]


def test_two_nodes_on_one_postgres_lose_no_increment(
    postgres_url: str, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """Row locks work within one process; between processes, transaction conflicts protect versions."""
    with (
        fastness.open(postgres_url, activity=str(tmp_path / "one")) as one,
        fastness.open(postgres_url, activity=str(tmp_path / "other")) as other,
    ):

        def increment(plane: Plane) -> None:
            for _ in range(10):
                plane.entities.update(
                    "task", "1", lambda entity: {"status": (entity["status"] if entity else 0) + 1}, attempts=1_000
                )

        for each in [threads.submit(increment, plane) for plane in (one, other, one, other)]:
            each.result(PATIENCE_SECONDS)
        assert one.entities.get("task", "1").fields["status"] == 40
        assert other.entities.get("task", "1").version == 40
