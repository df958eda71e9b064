"""Calls that an event loop makes at the same time share a transaction, and nothing else."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import CasMismatch, InvalidArgument, Unreachable
from holdfast.handles import AsyncPlane
from holdfast.kv import Transaction
from holdfast.kv.batch import run_batch, run_isolated
from holdfast.plane.batching import CallBatcher
from holdfast.plane.embedded import AsyncEmbeddedTransport
from holdfast.plane.services import Services
from holdfast.testing.faults import FaultyDatabase


class Slow(MemoryDatabase):
    """Each commit takes a turn of the loop, as a sync would, and is counted."""

    commits = 0

    async def transact_async(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        result = await super().transact_async(work, *args, **options)
        self.commits += 1
        await asyncio.sleep(0)
        return result


def put(tx: Transaction, number: int) -> int:
    if number % 7 == 3:
        raise ValueError(f"{number} is not wanted")
    tx.put(b"%d" % number, b"")
    return number


async def test_calls_of_one_turn_are_one_transaction_and_each_has_its_own_outcome() -> None:
    with Slow() as database:
        gathering = CallBatcher(database, lambda events: None)
        outcomes = await asyncio.gather(*(gathering.call(put, number) for number in range(50)), return_exceptions=True)
        assert [number for number, outcome in enumerate(outcomes) if outcome == number] == [
            number for number in range(50) if number % 7 != 3
        ]
        assert all(isinstance(outcomes[number], ValueError) for number in range(3, 50, 7))
        assert database.commits == 2, "the first one was alone, and the others came while it waited"
        assert len(database.read(lambda tx: tx.scan(b"0", b"z", limit=100))) == 43


def test_an_error_that_nobody_foresaw_ends_a_group_unless_it_is_to_be_caught() -> None:
    """Where it is a caller's own mistake it is told to that caller; where it is ours, nothing may be committed."""
    works = [(put, number) for number in (1, 3, 5)]
    with Slow() as database:
        with pytest.raises(ValueError, match="not wanted"):
            database.transact(run_batch, works)
        assert database.read(lambda tx: tx.scan(b"0", b"z", limit=10)) == []
        first, wrong, last = database.transact(run_batch, works, Exception)
        assert (first, type(wrong), last) == (1, ValueError, 5)
        assert len(database.read(lambda tx: tx.scan(b"0", b"z", limit=10))) == 2


async def test_a_call_that_is_alone_waits_for_nobody() -> None:
    with Slow() as database:
        gathering = CallBatcher(database, lambda events: None)
        for number in (0, 1, 2):
            assert await gathering.call(put, number) == number
        assert database.commits == 3


async def test_a_call_sees_what_those_before_it_in_its_group_wrote() -> None:
    async with holdfast.open_async("memory:") as plane:
        state = plane.state("s")
        outcomes = await asyncio.gather(
            *(state.update(number, if_absent=True) for number in range(10)), return_exceptions=True
        )
        assert [isinstance(outcome, CasMismatch) for outcome in outcomes].count(False) == 1


async def test_what_a_group_notes_is_told_once() -> None:
    async with holdfast.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await asyncio.gather(*(jobs.put(number) for number in range(20)))
        assert len((await plane.activity.read(kind="queues")).records) == 20
        assert (await jobs.stats()).put_total == 20


class RefusesToBegin:
    def at(self, point: str) -> BaseException | None:
        return Unreachable("on purpose") if point == "transact: begin" else None


async def test_a_commit_that_fails_is_told_to_everybody_in_its_group() -> None:
    database = FaultyDatabase(Slow())
    transport = AsyncEmbeddedTransport(Services(database))
    jobs = AsyncPlane(transport).queue("jobs")
    first = asyncio.create_task(jobs.put(0))
    await asyncio.sleep(0)
    database.faults = RefusesToBegin()
    outcomes = await asyncio.gather(*(jobs.put(number) for number in range(1, 5)), return_exceptions=True)
    await first
    assert [type(outcome) for outcome in outcomes] == [Unreachable] * 4
    assert (await jobs.stats()).ready == 1
    await transport.close()


async def test_a_caller_that_is_cancelled_leaves_the_others_alone() -> None:
    with Slow() as database:
        gathering = CallBatcher(database, lambda events: None)
        tasks = [asyncio.create_task(gathering.call(put, number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert (outcomes[0], outcomes[2]) == (0, 2)
        assert isinstance(outcomes[1], asyncio.CancelledError)


async def test_a_group_that_is_too_large_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.kv.batch.GROUP_BYTES", 1_000)
    with Slow() as database:
        gathering = CallBatcher(database, lambda events: None)
        numbers = [number for number in range(60) if number % 7 != 3]
        assert await asyncio.gather(*(gathering.call(put, number) for number in numbers)) == numbers
        assert database.commits > 3


def test_a_work_that_raises_after_it_wrote_leaves_nothing_and_the_others_are_told_once() -> None:
    """Works write to one transaction; whoever raises in the middle has the group run again, each by itself."""
    runs: list[int] = []

    def work(tx: Transaction, number: int) -> int:
        runs.append(number)
        tx.put(b"%d" % number, b"new")
        tx.emit("wrote", number)
        if number == 2:
            raise InvalidArgument("not this one")
        return number

    with holdfast.open("memory:") as plane:
        database = plane._transport.services.database
        works = [(work, number) for number in (1, 2, 3)]
        outcomes, events = database.transact(lambda tx: (run_batch(tx, works), tx.events))
        assert [type(outcome) for outcome in outcomes] == [int, InvalidArgument, int]
        assert events == [("wrote", 1), ("wrote", 3)]
        assert [key for key, _ in database.read(lambda tx: tx.scan(b"0", b"z", limit=9))] == [b"1", b"3"]
        assert runs == [1, 2, 1, 2, 3]


def test_a_work_that_is_refused_before_it_wrote_does_not_have_the_group_run_again() -> None:
    runs: list[int] = []

    def work(tx: Transaction, number: int) -> int:
        runs.append(number)
        if number == 2:
            raise InvalidArgument("not this one")
        tx.put(b"%d" % number, b"new")
        return number

    with holdfast.open("memory:") as plane:
        outcomes = plane._transport.services.database.transact(run_batch, [(work, number) for number in (1, 2, 3)])
        assert [type(outcome) for outcome in outcomes] == [int, InvalidArgument, int]
        assert runs == [1, 2, 3]


def test_one_list_of_operations_that_is_refused_half_way_does_not_have_the_others_run_again() -> None:
    """So that whoever sends such lists does not make everybody else's calls cost twice as much."""
    runs: list[str] = []

    def half(tx: Transaction, request: str) -> None:
        runs.append(request)
        tx.put(b"half", b"")
        raise InvalidArgument("the second half fails")

    def other(tx: Transaction, request: str) -> None:
        runs.append(request)
        tx.put(b"other", b"")

    with holdfast.open("memory:") as plane:
        database = plane._transport.services.database
        apart = (lambda tx, request: run_isolated(tx, half, request)), "list"
        outcomes = database.transact(run_batch, [(other, "first"), apart, (other, "last")])
        assert [type(outcome) for outcome in outcomes] == [type(None), InvalidArgument, type(None)]
        assert runs == ["first", "list", "last"]
        assert database.read(lambda tx: tx.get(b"half")) is None
