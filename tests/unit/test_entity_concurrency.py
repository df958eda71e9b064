"""Concurrent writes to entities: compare-and-swap, retried updates, and row locks."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane, Tier, TierPolicy
from fastness.backends.memory import MemoryDatabase
from fastness.errors import (
    InvalidArgument,
    LockTimeout,
    VersionConflict,
)
from fastness.kv import Database, Transaction
from fastness.layers import entities, field_tiers
from fastness.layers.field_tiers import CriticalFieldRemoved
from fastness.limits import (
    ENTITY_ATTEMPTS,
)
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.clock import START_MS, ManualClock
from fastness.testing.faults import FaultyDatabase
from tests.support.waiting import eventually
from tests.unit import entity_fixtures
from tests.unit.entity_fixtures import PATIENCE_SECONDS, TASK, logged, row_locks, rows_locked
from tests.unit.stored_pairs import everything

url = entity_fixtures.url
plane = entity_fixtures.plane
threads = entity_fixtures.threads


# Compare and swap.


def test_a_put_replaces_an_entity_with_the_expected_version(plane: Plane, clock: ManualClock) -> None:
    assert plane.entities.put_if_version("task", "1", {"status": 1, "a": 1}, expected_version=0).versions == [1]
    clock.advance_ms(5)
    assert plane.entities.put_if_version("task", "1", {"status": 2, "b": 1}, expected_version=1).versions == [2]
    entity = plane.entities.get("task", "1")
    assert entity is not None
    assert (entity.fields, entity.version) == ({"status": 2, "b": 1}, 2)
    assert (entity.created_ms, entity.updated_ms) == (START_MS, START_MS + 5)
    assert (entity["status"], entity.get("b"), entity.get("a"), entity.get("a", 7)) == (2, 1, None, 7)
    change = plane.entities.history("task", "1")[-1]
    assert (change.fields, change.removed) == ({"status": 2, "b": 1}, ["a"])


@pytest.mark.parametrize("expected_version", [0, 1, 3, -1])
@pytest.mark.parametrize("field", ["status", "note", "debug_trace"])
def test_a_put_for_another_version_writes_nothing(plane: Plane, expected_version: int, field: str) -> None:
    for number in range(2):
        plane.entities.write("task", "1", {"note": number})
    before = everything(plane)
    with pytest.raises(VersionConflict) as conflict:
        plane.entities.put_if_version("task", "1", {field: 1, "metrics": 1}, expected_version=expected_version)
    assert (conflict.value.expected, conflict.value.actual) == (expected_version, 2)
    assert everything(plane) == before
    assert logged(plane) == []


def test_a_put_that_drops_a_critical_field_is_critical(plane: Plane) -> None:
    plane.entities.write("task", "1", {"status": "open", "note": 1})
    locked = rows_locked(plane)
    written = plane.entities.put_if_version("task", "1", {"note": 2}, expected_version=1)
    assert (written.versions, written.durability) == ([2], Tier.CRITICAL)
    assert rows_locked(plane) == locked + row_locks(plane, 1)
    assert plane.entities.history("task", "1")[-1].durability is Tier.CRITICAL
    assert plane.entities.put_if_version("task", "1", {"note": 3}, expected_version=2).durability is Tier.IMPORTANT


def test_the_layer_raises_when_a_put_needs_a_stronger_tier(database: Database) -> None:
    policy = TierPolicy()
    part = field_tiers.tiered_write(policy, TASK, {"note": b"\x01"})

    def put(tx: Transaction, expected: int, tier: Tier) -> int:
        return field_tiers.put(tx, part, policy, expected_version=expected, tier=tier)

    database.transact(lambda tx: entities.put(tx, TASK, {"status": b"\x01"}, expected_version=0, tier=Tier.CRITICAL))
    with pytest.raises(CriticalFieldRemoved):
        database.transact(put, 1, Tier.IMPORTANT)
    with pytest.raises(VersionConflict):
        database.transact(put, 2, Tier.IMPORTANT)
    assert database.read(entities.get, TASK).version == 1
    assert database.transact(put, 1, Tier.CRITICAL) == 2
    assert database.transact(put, 2, Tier.IMPORTANT) == 3


@pytest.mark.parametrize("field", ["status", "note"])
def test_compare_and_swap_loses_no_increment(plane: Plane, threads: ThreadPoolExecutor, field: str) -> None:
    barrier = threading.Barrier(8)

    def increment() -> int:
        barrier.wait(PATIENCE_SECONDS)
        conflicts = 0
        for _ in range(25):
            while True:
                entity = plane.entities.get("task", "1", tier=Tier.IMPORTANT)
                version, number = (0, 0) if entity is None else (entity.version, entity[field])
                try:
                    plane.entities.put_if_version("task", "1", {field: number + 1}, expected_version=version)
                    break
                except VersionConflict:
                    conflicts += 1
        return conflicts

    conflicts = sum(each.result(PATIENCE_SECONDS) for each in [threads.submit(increment) for _ in range(8)])
    print(f"{conflicts} conflicts")
    entity = plane.entities.get("task", "1")
    assert (entity.fields[field], entity.version) == (200, 200)
    history = plane.entities.history("task", "1", limit=1_000)
    assert [each.fields[field] for each in history] == list(range(1, 201))


async def test_compare_and_swap_of_tasks_loses_no_increment(url: str) -> None:
    async with fastness.open_async(url) as plane:

        async def increment() -> None:
            for _ in range(10):
                done = False
                while not done:
                    entity = await plane.entities.get("task", "1", tier=Tier.IMPORTANT)
                    version, number = (0, 0) if entity is None else (entity.version, entity["status"])
                    try:
                        await plane.entities.put_if_version(
                            "task", "1", {"status": number + 1}, expected_version=version
                        )
                        done = True
                    except VersionConflict:
                        await asyncio.sleep(0)

        await asyncio.gather(*(increment() for _ in range(8)))
        entity = await plane.entities.get("task", "1")
        assert (entity.fields["status"], entity.version) == (80, 80)


@pytest.mark.parametrize("field", ["status", "note"])
def test_transactions_that_read_and_write_lose_no_increment(
    plane: Plane, threads: ThreadPoolExecutor, field: str
) -> None:
    def increment() -> None:
        for _ in range(10):
            while True:
                try:
                    with plane.entities.transaction() as transaction:
                        found = transaction.get("task", "1")
                        transaction.write("task", "1", field, 1 if found is None else found[field] + 1)
                    break
                except VersionConflict:
                    continue

    for each in [threads.submit(increment) for _ in range(8)]:
        each.result(PATIENCE_SECONDS)
    assert plane.entities.get("task", "1").fields[field] == 80


@pytest.mark.parametrize("how", ["transaction", "update"])
def test_a_version_lost_in_a_power_failure_does_not_match_another_state(tmp_path: Path, how: str) -> None:
    """A power loss may undo an unsynced version that a client in another process has read. Its number is then used for
    another state, and the stamp distinguishes the two.
    """
    database = FaultyDatabase(MemoryDatabase())
    with Plane(EmbeddedTransport(Services(database, logs=tmp_path))) as plane:
        plane.entities.write("task", "1", {"status": 0})
        plane.entities.write("task", "1", {"n": 10})

        def power_fails_and_others_write() -> None:
            database.power_loss()
            plane.entities.write("task", "1", {"n": 1, "status": 1})

        if how == "transaction":
            transaction = plane.entities.transaction()
            number = transaction.get("task", "1").get("n", 0)
            power_fails_and_others_write()
            transaction.write("task", "1", "status", 2)
            transaction.write("task", "1", "n", number + 1)
            with pytest.raises(VersionConflict):
                transaction.commit()
        else:
            accidents = [power_fails_and_others_write]

            def change(entity: Any) -> dict[str, int]:
                while accidents:
                    accidents.pop()()
                return {"n": entity.get("n", 0) + 1, "status": 2}

            plane.entities.update("task", "1", change)
            assert plane.entities.get("task", "1").fields["n"] == 2


# Updates with retries.


def test_an_update_writes_what_its_function_returns(plane: Plane) -> None:
    assert plane.entities.update("task", "1", lambda entity: {"n": 1 if entity is None else 0}).versions == [1]
    assert plane.entities.update("task", "1", lambda entity: {"m": entity.fields["n"] + 1}).versions == [2]
    assert plane.entities.get("task", "1").fields == {"n": 1, "m": 2}


def test_an_update_retries_after_a_concurrent_write(plane: Plane) -> None:
    seen: list[int] = []

    def change(entity: Any) -> dict[str, int]:
        seen.append(0 if entity is None else entity["n"])
        if len(seen) < 3:
            plane.entities.write("task", "1", {"n": len(seen) * 100})
        return {"n": seen[-1] + 1}

    assert plane.entities.update("task", "1", change).versions == [3]
    assert seen == [0, 100, 200]
    assert plane.entities.get("task", "1").fields["n"] == 201


@pytest.mark.parametrize("attempts", [1, 3, None])
def test_an_update_stops_after_its_attempts(plane: Plane, attempts: int | None) -> None:
    calls = 0

    def change(entity: Any) -> dict[str, int]:
        nonlocal calls
        calls += 1
        plane.entities.write("task", "1", {"n": calls})
        return {"n": -1}

    options = {} if attempts is None else {"attempts": attempts}
    with pytest.raises(VersionConflict):
        plane.entities.update("task", "1", change, **options)
    assert calls == (attempts or ENTITY_ATTEMPTS)
    assert plane.entities.get("task", "1").fields["n"] == calls


@pytest.mark.parametrize("attempts", [0, -1])
def test_an_update_needs_at_least_one_attempt(plane: Plane, attempts: int) -> None:
    with pytest.raises(InvalidArgument, match="attempts"):
        plane.entities.update("task", "1", lambda entity: {"n": 1}, attempts=attempts)


# Locks.


def test_a_holder_of_a_kind_lock_writes_its_rows(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread holds the lock on the whole kind. Other threads wait for the row and time out."""
    monkeypatch.setattr("fastness.limits.LOCK_WAIT_SECONDS", 0)
    with ThreadPoolExecutor(1) as other:
        write, status = plane.entities.write, {"status": "theirs"}
        with plane.locks.acquire(["entity_type", "task"]):
            write("task", "1", {"status": "ours"})
            with plane.entities.transaction() as transaction:
                transaction.write("task", "1", "status", "ours")
                transaction.write("task", "2", "status", "ours")
            for call in (
                lambda: write("task", "1", status),
                lambda: plane.entities.put_if_version("task", "1", status, expected_version=2),
                lambda: plane.entities.put_if_version("task", "1", {}, expected_version=2),
                lambda: plane.entities.delete("task", "1"),
                lambda: write("task", "1", {"note": "theirs"}),
            ):
                with pytest.raises(LockTimeout, match="entity_type task was not granted"):
                    other.submit(call).result(PATIENCE_SECONDS)
            assert plane.entities.get("task", "1").fields["status"] == "ours"
            other.submit(write, "edge", "1", {"type": "theirs"}).result(PATIENCE_SECONDS)
        other.submit(write, "task", "1", status).result(PATIENCE_SECONDS)
    assert plane.entities.get("task", "1").fields == {"status": "theirs"}
    assert plane.locks.stats()["entity_type"].timeouts == 5


def test_a_writer_waits_for_a_locked_row(plane: Plane, threads: ThreadPoolExecutor) -> None:
    with plane.locks.acquire(["record_id", "task/1"]):
        waiter = threads.submit(plane.entities.write, "task", "1", {"status": "theirs"})
        threads.submit(plane.entities.write, "task", "2", {"status": "theirs"}).result(PATIENCE_SECONDS)
        eventually(lambda: plane.locks.stats()["record_id"].waiting == 1)
        plane.entities.write("task", "1", {"status": "ours"})
    assert waiter.result(PATIENCE_SECONDS).versions == [2]
    assert plane.entities.get("task", "1").fields["status"] == "theirs"


def test_a_transaction_waits_for_the_row_of_each_durable_field_and_no_other(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.limits.LOCK_WAIT_SECONDS", 0)
    with ThreadPoolExecutor(1) as other:
        for locked, fields in (("1", ("status", "note")), ("1", ("note", "status")), ("2", ("status", "status"))):
            transaction = plane.entities.transaction()
            for id, field in zip("12", fields, strict=True):
                transaction.write("task", id, field, 1)
            with (
                plane.locks.acquire(["record_id", f"task/{locked}"]),
                pytest.raises(LockTimeout, match=f"task/{locked} was not granted"),
            ):
                other.submit(transaction.commit).result(PATIENCE_SECONDS)
        transaction = plane.entities.transaction()
        transaction.write("task", "1", "metrics", 1)
        transaction.write("task", "2", "status", 1)
        with plane.locks.acquire(["record_id", "task/1"]):
            other.submit(transaction.commit).result(PATIENCE_SECONDS)


def test_transactions_over_the_same_rows_in_any_order_never_deadlock(plane: Plane, threads: ThreadPoolExecutor) -> None:
    """Rows are locked in sorted order, independent of the order in the transaction."""

    def write(number: int) -> None:
        ids = ["1", "2", "3"] if number % 2 else ["3", "2", "1"]
        for _ in range(20):
            with plane.entities.transaction() as transaction:
                for id in ids:
                    transaction.write("task", id, "status", number)

    for each in [threads.submit(write, number) for number in range(8)]:
        each.result(PATIENCE_SECONDS)
    assert {plane.entities.get("task", id).fields["status"] for id in "123"} <= {*range(8)}
    assert len({plane.entities.get("task", id).fields["status"] for id in "123"}) == 1
    assert [plane.entities.get("task", id).version for id in "123"] == [160] * 3
