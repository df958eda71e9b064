"""The lock table leaves nothing locked: timeouts, cancellation, closed loops, releases and forks."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from fastness import limits
from fastness.errors import Busy, Closed, LockTimeout
from fastness.runtime.locks.table import Held, LockTable, Mode
from tests.unit import lock_fixtures
from tests.unit.lock_fixtures import (
    DATABASE,
    NOTES,
    SECONDS_MAX,
    TASKS,
    TIMEOUT_SECONDS,
    Actor,
    assert_empty,
    done,
    free,
    row,
    until_waiting,
)

table = lock_fixtures.table
loop = lock_fixtures.loop
new_actor = lock_fixtures.new_actor
ada = lock_fixtures.ada
bob = lock_fixtures.bob
cyd = lock_fixtures.cyd


# Timeouts.


def test_a_timeout_names_the_holders(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(1)))
    with pytest.raises(
        LockTimeout, match=r"record_id task/1 .* held by (thread|task) ada\S* \(X\), and 1 requests wait"
    ):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    assert table.stats()["record_id"].timeouts == 1


def test_a_timeout_releases_partial_acquisitions(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0))
    held.release()
    assert_empty(table)


def test_waiters_behind_a_timed_out_claim_are_granted(table: LockTable, ada: Actor, bob: Actor, cyd: Actor) -> None:
    done(ada.acquire(row(1), "S"))
    writer = bob.acquire(row(1), "X", timeout_seconds=2)
    until_waiting(table, 1)
    reader = cyd.acquire(row(1), "S")
    with pytest.raises(LockTimeout):
        done(writer)
    done(reader)


@pytest.mark.parametrize(
    ("path", "limit"),
    [(row(1), "LOCK_WAIT_SECONDS"), (TASKS, "LOCK_BULK_WAIT_SECONDS"), (DATABASE, "LOCK_BULK_WAIT_SECONDS")],
    ids=["row", "type", "database"],
)
def test_the_default_timeout_depends_on_the_level(
    ada: Actor, bob: Actor, monkeypatch: pytest.MonkeyPatch, path: list[str], limit: str
) -> None:
    for name in ("LOCK_WAIT_SECONDS", "LOCK_BULK_WAIT_SECONDS"):
        monkeypatch.setattr(limits, name, 0.01 if name == limit else SECONDS_MAX)
    done(ada.acquire(path))
    with pytest.raises(LockTimeout, match=r"within 0\.01 s"):
        done(bob.acquire(path, timeout_seconds=None))


def test_rows_and_a_type_together_use_the_timeout_of_the_type(
    table: LockTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOCK_WAIT_SECONDS", SECONDS_MAX)
    monkeypatch.setattr(limits, "LOCK_BULK_WAIT_SECONDS", 0)
    with ThreadPoolExecutor(1) as ada, ada.submit(table.acquire, row(1)).result(), pytest.raises(LockTimeout):
        table.acquire_all([row(1), NOTES])


def test_more_waiters_than_allowed_are_rejected(new_actor: Callable[[str], Actor], table: LockTable) -> None:
    table._waiters_max = 1
    held = done(new_actor("ada").acquire(row(1)))
    waiting = new_actor("bob").acquire(row(1))
    until_waiting(table, 1)
    with pytest.raises(Busy, match="1 lock requests are already waiting") as refused:
        done(new_actor("cyd").acquire_all([row(0), row(1)]))
    assert not isinstance(refused.value, LockTimeout)
    assert free(table, row(0))
    held.release()
    done(waiting).release()
    assert_empty(table)


def test_a_table_may_allow_no_waiters() -> None:
    table = LockTable(waiters_max=0)
    with ThreadPoolExecutor(1) as ada, ada.submit(table.acquire, row(1)).result(), pytest.raises(Busy):
        table.acquire(row(1))


# Cancellation and closed event loops.


async def waiting_task(table: LockTable, path: list[str], mode: str = "X") -> "asyncio.Task[Held]":
    task = asyncio.create_task(table.acquire_async(path, mode, timeout_seconds=TIMEOUT_SECONDS))
    waiting = sum(level.waiting for level in table.stats().values())
    await asyncio.sleep(0)
    assert sum(level.waiting for level in table.stats().values()) == waiting + 1
    return task


async def assert_cancelled(task: "asyncio.Task[Held]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_waiter_leaves_the_line(table: LockTable) -> None:
    held = await table.acquire_async(row(1), "S")
    writer = await waiting_task(table, row(1), "X")
    reader = await waiting_task(table, row(1), "S")
    writer.cancel()
    await assert_cancelled(writer)
    (await reader).release()
    held.release()
    assert_empty(table)


@pytest.mark.parametrize(
    ("elsewhere", "turns"),
    [(True, 0), (True, 1), (False, 0)],
    ids=["before the loop is notified", "before the task resumes", "released on the same loop"],
)
async def test_a_waiter_cancelled_during_the_grant_releases_the_lock(
    table: LockTable, elsewhere: bool, turns: int
) -> None:
    held = await table.acquire_async(row(1))
    first, second = await waiting_task(table, row(1)), await waiting_task(table, row(1))
    if elsewhere:
        thread = threading.Thread(target=held.release)
        thread.start()
        thread.join()
    else:
        held.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    first.cancel()
    await assert_cancelled(first)
    (await second).release()
    assert_empty(table)


async def test_a_cancelled_claim_releases_partial_acquisitions(table: LockTable) -> None:
    held = await table.acquire_async(row(2))
    claim = asyncio.create_task(table.acquire_all_async([row(1), row(2), row(3)]))
    await asyncio.sleep(0)
    assert not free(table, row(1))
    claim.cancel()
    await assert_cancelled(claim)
    assert free(table, row(1))
    held.release()
    assert_empty(table)


async def test_an_asyncio_timeout_around_a_wait_releases_everything(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada:
        held = ada.submit(table.acquire, row(1)).result()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await table.acquire_async(row(1))
        held.release()
    assert_empty(table)


def abandon(table: LockTable, path: list[str], number: int = 1) -> tuple[asyncio.AbstractEventLoop, list[Any]]:
    """A stopped event loop with tasks that wait for `path`."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(table.acquire_async(path, timeout_seconds=TIMEOUT_SECONDS)) for _ in range(number)]
    loop.run_until_complete(asyncio.sleep(0))
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # They never finish by design.
    return loop, tasks


def test_waiters_of_a_closed_loop_are_skipped(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    loop, tasks = abandon(table, row(1), 2_000)
    loop.close()
    waiting = bob.acquire(row(1))
    until_waiting(table, 2_001)
    held.release()
    done(waiting).release()
    assert_empty(table)
    del tasks


@pytest.mark.parametrize("timeout_seconds", [0, TIMEOUT_SECONDS], ids=["try", "wait"])
def test_a_grant_to_a_loop_closed_before_it_resumed_is_reclaimed(
    table: LockTable, ada: Actor, bob: Actor, timeout_seconds: float
) -> None:
    held = done(ada.acquire(row(1)))
    loop, tasks = abandon(table, row(1))
    held.release()
    assert not free(table, row(1))
    loop.close()
    done(bob.acquire(row(1), timeout_seconds=timeout_seconds)).release()
    assert_empty(table)
    del tasks


def test_a_grant_to_a_closed_loop_is_reclaimed_for_existing_waiters(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    loop, tasks = abandon(table, row(1))
    held.release()
    waiting = bob.acquire(row(1), timeout_seconds=2)
    until_waiting(table, 1)
    loop.close()
    done(waiting).release()
    assert_empty(table)
    del tasks


def test_a_lock_granted_after_a_wait_survives_its_loop(table: LockTable, ada: Actor, bob: Actor) -> None:
    """A task that has resumed with its lock keeps it until it releases it."""
    before = done(ada.acquire(row(1)))

    async def wait() -> Held:
        waiting = await waiting_task(table, row(1))
        before.release()
        return await waiting

    held = asyncio.run(wait())
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    held.release()
    assert_empty(table)


def test_an_abandoned_coroutine_releases_its_locks(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada:
        held = ada.submit(table.acquire, row(1)).result()

        async def drop() -> None:
            claim = table.acquire_all_async([row(0), row(1)])
            claim.send(None)
            claim.close()

        asyncio.run(drop())
        held.release()
    assert_empty(table)


# Releases.


def test_a_release_is_idempotent_and_may_come_from_another_owner(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    held.release()
    other = done(bob.acquire(row(1)))
    held.release()
    assert not free(table, row(1))
    other.release()
    assert_empty(table)


async def test_a_with_block_releases_on_errors(table: LockTable) -> None:
    with table.acquire(row(1)) as held:
        assert held.paths == [("record_id", "task/1")]
    with pytest.raises(ZeroDivisionError):
        async with await table.acquire_async(TASKS, "S") as held:
            assert held.mode is Mode.SHARED
            raise ZeroDivisionError
    assert_empty(table)


async def test_released_locks_cannot_be_entered(table: LockTable) -> None:
    held = table.acquire(row(1))
    held.release()
    with pytest.raises(Closed):
        held.__enter__()
    with pytest.raises(Closed):
        await held.__aenter__()


def test_a_finalizer_may_release_at_any_time(table: LockTable) -> None:
    """The garbage collector may run at any time, also while the table's mutex is held."""
    held = table.acquire(row(1))
    with table._mutex:
        held.release()
    table.acquire(row(0)).release()  # A lock order violation if the release were lost.
    assert_empty(table)


def test_a_release_during_an_acquisition_wakes_its_waiters(
    table: LockTable, ada: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = table.acquire(row(1))
    waiting = ada.acquire(row(1))
    until_waiting(table, 1)
    advance = table._registry.advance

    def finalize_and_advance(claim: Any, **options: Any) -> bool:
        held.release()
        return advance(claim, **options)

    with monkeypatch.context() as patch:
        patch.setattr(table._registry, "advance", finalize_and_advance)
        other = table.acquire(row(2))
    done(waiting)
    other.release()


def test_a_release_while_the_mutex_is_held_is_applied_by_its_holder(table: LockTable, ada: Actor) -> None:
    held = table.acquire(row(1))
    waiting = ada.acquire(row(1))
    until_waiting(table, 1)
    taken, go_on = threading.Event(), threading.Event()

    def inspect(registry: object) -> None:
        taken.set()
        assert go_on.wait(SECONDS_MAX)

    with ThreadPoolExecutor(1) as reader:
        looking = reader.submit(table._inspect, inspect)
        assert taken.wait(SECONDS_MAX)
        held.release()
        assert not waiting.done()
        go_on.set()
        looking.result()
    done(waiting)


def test_memory_does_not_grow_with_past_names_and_owners(table: LockTable) -> None:
    for number in range(200):
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(table.acquire, row(number, f"type-{number}")).result()
            with suppress(LockTimeout):
                table.acquire(row(number, f"type-{number}"), timeout_seconds=0)
            held.release()

    async def tasks() -> None:
        for number in range(200):
            held = await table.acquire_async(row(number))
            waiter = await waiting_task(table, row(number))
            waiter.cancel()
            await assert_cancelled(waiter)
            held.release()

    asyncio.run(tasks())
    assert_empty(table)


# Forks.


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a forked child that runs `work`."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS_MAX))  # Kills a child that hangs.
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_starts_with_an_empty_table(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada, ThreadPoolExecutor(1) as bob:
        theirs = ada.submit(table.acquire, row(1)).result()
        waiting = bob.submit(table.acquire, row(1), timeout_seconds=TIMEOUT_SECONDS)
        until_waiting(table, 1)
        mine = table.acquire(row(2))

        def work() -> None:
            assert_empty(table)
            assert table.stats()["record_id"].acquisitions == 0
            first, second = table.acquire(row(1)), table.acquire(row(2))
            mine.release()  # It belongs to the parent, and releases nothing in the child.
            assert [info.path[1] for info in table.holders()] == ["", "task", "task/1", "task/2"]
            second.release()
            first.release()
            assert_empty(table)

        with table._mutex:  # As if another thread held it during the fork.
            assert in_child(work) == 0
        assert table.line_length(row(1)) == 2
        mine.release()
        theirs.release()
        waiting.result().release()
    assert_empty(table)


def test_a_coroutine_that_waited_in_the_parent_does_not_affect_the_child(table: LockTable) -> None:
    async def fork_while_one_waits() -> None:
        waiter = table.acquire_async(row(1))
        waiter.send(None)

        def work() -> None:
            with table.acquire(row(1)):
                waiter.close()
                assert table.line_length(row(1)) == 1
            assert_empty(table)

        assert in_child(work) == 0
        assert table.line_length(row(1)) == 2
        waiter.close()

    with ThreadPoolExecutor(1) as ada, ada.submit(table.acquire, row(1)).result():
        asyncio.run(fork_while_one_waits())
    assert_empty(table)
