"""Concurrent calls of an event loop share a transaction and stay isolated."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.errors import CasMismatch, InvalidArgument, Unreachable
from fastness.handles.plane import AsyncPlane
from fastness.kv import Event, Transaction
from fastness.kv.batch import run_batch, run_isolated
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.executor import Batcher, Work
from fastness.plane.handlers import Handler
from fastness.plane.services import Services
from fastness.testing.faults import FaultyDatabase


class Wrote(Event, frozen=True, gc=False):
    number: int


class Slow(MemoryDatabase):
    """A database whose commits take one tick of the loop, as a sync does, and are counted."""

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


def work(run: Any, request: Any) -> Work:
    return Work(Handler(run=run), request)


async def test_calls_of_one_tick_share_a_transaction() -> None:
    with Slow() as database:
        gathering: Any = Batcher(database)
        outcomes = await asyncio.gather(
            *(gathering.call(work(put, number)) for number in range(50)), return_exceptions=True
        )
        assert [number for number, outcome in enumerate(outcomes) if outcome == number] == [
            number for number in range(50) if number % 7 != 3
        ]
        assert all(isinstance(outcomes[number], ValueError) for number in range(3, 50, 7))
        assert database.commits == 2, "the first one was alone, and the others came while it waited"
        assert len(database.read(lambda tx: tx.scan(b"0", b"z", limit=100))) == 43


async def test_the_events_of_a_cancelled_caller_are_published() -> None:
    """A timer that such a call has set would not fire otherwise."""
    published: list[Event] = []

    def emit(tx: Transaction, number: int) -> None:
        put(tx, number)
        tx.emit(Wrote(number))

    with Slow() as database:
        database.publish = published.extend
        gathering: Any = Batcher(database)
        caller = asyncio.create_task(gathering.call(work(emit, 1)))
        while not database.commits:
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert published == [Wrote(1)]


def test_an_unexpected_error_ends_a_batch_unless_it_is_caught() -> None:
    """If it is caught, its caller gets it; otherwise nothing is committed."""
    works = [(put, number) for number in (1, 3, 5)]
    with Slow() as database:
        with pytest.raises(ValueError, match="not wanted"):
            database.transact(run_batch, works)
        assert database.read(lambda tx: tx.scan(b"0", b"z", limit=10)) == []
        first, wrong, last = database.transact(run_batch, works, Exception)
        assert (first, type(wrong), last) == (1, ValueError, 5)
        assert len(database.read(lambda tx: tx.scan(b"0", b"z", limit=10))) == 2


async def test_a_single_call_does_not_wait() -> None:
    with Slow() as database:
        gathering: Any = Batcher(database)
        for number in (0, 1, 2):
            assert await gathering.call(work(put, number)) == number
        assert database.commits == 3


async def test_a_call_sees_the_writes_of_earlier_calls_in_its_batch() -> None:
    async with fastness.open_async("memory:") as plane:
        state = plane.state("s")
        outcomes = await asyncio.gather(
            *(state.update(number, if_absent=True) for number in range(10)), return_exceptions=True
        )
        assert [isinstance(outcome, CasMismatch) for outcome in outcomes].count(False) == 1


async def test_the_events_of_a_batch_are_published_once() -> None:
    async with fastness.open_async("memory:") as plane:
        jobs = plane.queue("jobs")
        await asyncio.gather(*(jobs.put(number) for number in range(20)))
        assert len((await plane.activity.read(kind="queues")).records) == 20
        assert (await jobs.stats()).put_total == 20


class RefusesToBegin:
    def at(self, point: str) -> BaseException | None:
        return Unreachable("on purpose") if point == "transact: begin" else None


async def test_a_failed_commit_raises_for_every_call_of_its_batch() -> None:
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


async def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    with Slow() as database:
        gathering: Any = Batcher(database)
        tasks = [asyncio.create_task(gathering.call(work(put, number))) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert (outcomes[0], outcomes[2]) == (0, 2)
        assert isinstance(outcomes[1], asyncio.CancelledError)


async def test_a_large_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.kv.batch.BATCH_WRITE_BYTES_MAX", 1_000)
    with Slow() as database:
        gathering: Any = Batcher(database)
        numbers = [number for number in range(60) if number % 7 != 3]
        assert await asyncio.gather(*(gathering.call(work(put, number)) for number in numbers)) == numbers
        assert database.commits > 3


@pytest.mark.parametrize("emits", [True, False])
def test_a_function_that_raises_after_a_write_leaves_nothing(emits: bool) -> None:
    """Functions share a transaction; if one raises after a write, the batch runs again with nested transactions."""
    runs: list[int] = []

    def work(tx: Transaction, number: int) -> int:
        runs.append(number)
        tx.put(b"%d" % number, b"new")
        if emits:
            tx.emit(Wrote(number))
        if number == 2:
            raise InvalidArgument("not this one")
        return number

    with fastness.open("memory:") as plane:
        database = plane._transport.services.database  # type: ignore[attr-defined]
        works = [(work, number) for number in (1, 2, 3)]
        outcomes, events = database.transact(lambda tx: (run_batch(tx, works), tx.events))
        assert [type(outcome) for outcome in outcomes] == [int, InvalidArgument, int]
        assert events == ([Wrote(1), Wrote(3)] if emits else [])
        assert [key for key, _ in database.read(lambda tx: tx.scan(b"0", b"z", limit=9))] == [b"1", b"3"]
        assert runs == [1, 2, 1, 2, 3]


def test_a_function_that_raises_before_writing_does_not_rerun_the_batch() -> None:
    runs: list[int] = []

    def work(tx: Transaction, number: int) -> int:
        runs.append(number)
        if number == 2:
            raise InvalidArgument("not this one")
        tx.put(b"%d" % number, b"new")
        return number

    with fastness.open("memory:") as plane:
        database = plane._transport.services.database  # type: ignore[attr-defined]
        outcomes = database.transact(run_batch, [(work, number) for number in (1, 2, 3)])
        assert [type(outcome) for outcome in outcomes] == [int, InvalidArgument, int]
        assert runs == [1, 2, 3]


def test_an_atomic_list_that_fails_does_not_rerun_the_batch() -> None:
    """Such a list does not double the cost of other calls."""
    runs: list[str] = []

    def half(tx: Transaction, request: str) -> None:
        runs.append(request)
        tx.put(b"half", b"")
        raise InvalidArgument("the second half fails")

    def other(tx: Transaction, request: str) -> None:
        runs.append(request)
        tx.put(b"other", b"")

    with fastness.open("memory:") as plane:
        database = plane._transport.services.database  # type: ignore[attr-defined]
        apart = (lambda tx, request: run_isolated(tx, half, request)), "list"
        outcomes = database.transact(run_batch, [(other, "first"), apart, (other, "last")])
        assert [type(outcome) for outcome in outcomes] == [type(None), InvalidArgument, type(None)]
        assert runs == ["first", "list", "last"]
        assert database.read(lambda tx: tx.get(b"half")) is None
