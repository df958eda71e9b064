"""Transactions of threads and coroutines behave as if they ran one at a time."""

import asyncio
from functools import partial
from typing import Any

from fastness.kv import Database, Transaction
from fastness.testing.conformance.workloads import clear_subspace, contents, in_threads, increment, put_all, raises


def check_8_threads_lose_no_increment(database: Database) -> None:
    subspace = clear_subspace(database)

    def increment_many(start: int) -> None:
        for step in range(40):
            database.transact(increment, subspace.key((start + step) % 3))

    in_threads(8, increment_many)
    assert sum(int(value) for value in contents(database, subspace).values()) == 320


def check_64_coroutines_lose_no_increment(database: Database) -> None:
    subspace = clear_subspace(database)

    async def increment_many(start: int) -> None:
        for step in range(10):
            await database.transact_async(increment, subspace.key((start + step) % 3))

    async def run_all() -> None:
        await asyncio.gather(*(increment_many(start) for start in range(64)))

    asyncio.run(run_all())
    assert sum(int(value) for value in contents(database, subspace).values()) == 640


def check_threads_and_coroutines_share_a_database(database: Database) -> None:
    subspace = clear_subspace(database)

    async def increment_many() -> None:
        for _ in range(20):
            await database.transact_async(increment, subspace.key("n"))

    async def run_eight() -> None:
        await asyncio.gather(*(increment_many() for _ in range(8)))

    def run_one(number: int) -> None:
        if number % 2:
            asyncio.run(run_eight())
        else:
            for _ in range(20):
                database.transact(increment, subspace.key("n"))

    in_threads(4, run_one)
    assert contents(database, subspace) == {("n",): b"360"}


def check_write_skew_cannot_happen(database: Database) -> None:
    """Of two people on call, each may leave only while the other stays. Snapshot isolation would let both leave."""
    subspace = clear_subspace(database)

    def leave(tx: Transaction, me: int) -> bool:
        on_call = [key for key, _ in tx.scan(*subspace.range(), limit=10)]
        if len(on_call) < 2:
            return False
        tx.delete(subspace.key(me))
        return True

    for _ in range(10):
        database.transact(put_all, [(subspace.key(number), b"") for number in range(2)])
        in_threads(2, lambda me: database.transact(leave, me))
        assert len(contents(database, subspace)) == 1


def check_readers_never_see_half_a_transaction(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put_all, [(subspace.key(number), b"0") for number in range(4)])

    def move(tx: Transaction, amount: int) -> None:
        for number, change in ((0, -amount), (3, amount)):
            tx.put(subspace.key(number), b"%d" % (int(tx.get(subspace.key(number)) or b"0") + change))

    def total(tx: Transaction) -> int:
        return sum(int(value) for _, value in tx.scan(*subspace.range(), limit=10))

    def run_one(number: int) -> None:
        for amount in range(25):
            if number % 2:
                database.transact(move, amount)
            else:
                assert database.read(total) == 0
                assert database.transact(total) == 0

    in_threads(4, run_one)


def check_a_caller_that_fails_does_not_disturb_the_others(database: Database) -> None:
    subspace = clear_subspace(database)

    def work(tx: Transaction, number: int) -> int:
        tx.put(subspace.key(number), b"")
        if number % 3 == 0:
            raise LookupError(number)
        return number

    async def run_all() -> list[Any]:
        calls = (database.transact_async(work, number) for number in range(60))
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run_all())
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, LookupError) if number % 3 == 0 else outcome == number
    assert sorted(element for (element,) in contents(database, subspace)) == [n for n in range(60) if n % 3]


def check_a_thread_that_fails_does_not_disturb_the_others(database: Database) -> None:
    subspace = clear_subspace(database)

    def work(tx: Transaction, thread: int, step: int) -> None:
        increment(tx, subspace.key(thread))
        if (thread + step) % 3 == 0:
            raise LookupError(thread)

    def increment_many(thread: int) -> None:
        for step in range(30):
            if (thread + step) % 3 == 0:
                raises(LookupError, partial(database.transact, work, thread, step))
            else:
                database.transact(work, thread, step)

    in_threads(8, increment_many)
    assert contents(database, subspace) == {(thread,): b"20" for thread in range(8)}


def check_a_cancelled_caller_does_not_disturb_the_others(database: Database) -> None:
    subspace = clear_subspace(database)

    async def run_all() -> None:
        calls = [asyncio.ensure_future(database.transact_async(increment, subspace.key("n"))) for _ in range(40)]
        await asyncio.sleep(0)
        for call in calls[::4]:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        kept = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert len(kept) >= 30
        assert len(set(kept)) == len(kept)

    asyncio.run(run_all())
    assert 30 <= int(contents(database, subspace)[("n",)]) <= 40
