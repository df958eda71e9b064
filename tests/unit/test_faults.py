"""The fault wrappers fail exactly at the chosen points."""

import asyncio
from pathlib import Path

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.errors import CommitUnknown, ObjectNotFound, Unreachable
from fastness.kv import Transaction
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, SeededFaults, faulty_objects
from fastness.tiers import Tier


def put(tx: Transaction, key: bytes = b"k", value: bytes = b"1") -> None:
    tx.put(key, value)


def get(database: FaultyDatabase, key: bytes = b"k") -> bytes | None:
    database.faults = ChosenFault()
    found: bytes | None = database.read(lambda tx: tx.get(key))
    return found


def test_the_points_of_a_transaction_are_counted() -> None:
    database = FaultyDatabase(MemoryDatabase())
    database.transact(put)
    assert isinstance(database.faults, ChosenFault)
    assert database.faults.points == ["transact: begin", "transact: commit", "transact: answer"]


@pytest.mark.parametrize(("fail_at", "stored"), [(0, None), (1, None), (2, b"1")])
def test_a_crash_at_each_point_leaves_all_or_nothing(fail_at: int, stored: bytes | None) -> None:
    for asynchronous in (False, True):
        database = FaultyDatabase(MemoryDatabase(), ChosenFault(fail_at))
        with pytest.raises(Crash):
            asyncio.run(database.transact_async(put)) if asynchronous else database.transact(put)
        assert get(database) == stored


def test_seeded_faults_are_the_same_for_the_same_seed() -> None:
    def faults_of(seed: int) -> list[str]:
        faults = SeededFaults(seed, refused=0.2, lost=0.2)
        points = ["transact: begin", "transact: commit", "transact: answer"] * 30
        return [type(faults.at(point)).__name__ for point in points]

    assert faults_of(1) == faults_of(1) != faults_of(2)
    assert set(faults_of(1)) == {"NoneType", "Unreachable", "CommitUnknown"}


def test_a_lost_answer_is_unknown_and_a_refusal_is_not() -> None:
    database = FaultyDatabase(MemoryDatabase(), SeededFaults(1, lost=1.0))
    with pytest.raises(CommitUnknown):
        database.transact(put)
    assert get(database) == b"1"
    database.faults = SeededFaults(1, refused=1.0)
    with pytest.raises(Unreachable):
        database.transact(put, b"other")
    assert get(database, b"other") is None


def test_a_delay_advances_the_clock() -> None:
    clock = ManualClock(0)
    FaultyDatabase(MemoryDatabase(), SeededFaults(1, delayed=1.0, clock=clock)).transact(put)
    assert clock.now_ms() > 0


def test_a_power_loss_reverts_unsynced_commits_in_order() -> None:
    database = FaultyDatabase(MemoryDatabase())
    database.transact(put, b"a", b"critical")
    database.transact(put, b"a", b"important", tier=Tier.IMPORTANT)
    database.transact(put, b"b", b"important", tier=Tier.IMPORTANT)
    database.transact(lambda tx: tx.delete_range(b"a", b"z"), tier=Tier.IMPORTANT)
    assert database.power_loss() == 3
    assert get(database, b"a") == b"critical"
    assert get(database, b"b") is None


@pytest.mark.parametrize("tier_of_reader", [Tier.CRITICAL, Tier.IMPORTANT])
def test_a_critical_read_makes_what_it_read_durable(tier_of_reader: Tier) -> None:
    database = FaultyDatabase(MemoryDatabase())
    database.transact(put, tier=Tier.IMPORTANT)
    database.read(lambda tx: tx.get(b"k"), tier=tier_of_reader)
    assert database.power_loss() == (0 if tier_of_reader is Tier.CRITICAL else 1)


def test_objects_fail_truncate_and_lose_answers_at_chosen_points(tmp_path: Path) -> None:
    inner = open_objects(f"dir:{tmp_path}")
    counting = ChosenFault()
    faulty_objects(inner, counting).put("whole", b"12345678")
    assert counting.points == ["put: begin", "put: tear", "put: answer"]

    for fail_at, stored in ((0, None), (1, b"1234"), (2, b"12345678")):
        with pytest.raises(Crash):
            faulty_objects(inner, ChosenFault(fail_at)).put(f"at {fail_at}", b"12345678")
        if stored is None:
            with pytest.raises(ObjectNotFound):
                inner.get(f"at {fail_at}")
        else:
            assert inner.get(f"at {fail_at}") == stored


async def test_async_object_operations_fail_at_chosen_points() -> None:
    inner = open_objects("memory:")
    with pytest.raises(CommitUnknown):
        await faulty_objects(inner, SeededFaults(1, lost=1.0)).put_async("a", b"1")
    assert await faulty_objects(inner, ChosenFault()).get_async("a") == b"1"
