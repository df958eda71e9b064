"""The lock table: compatible modes, lock order, reentrancy, FIFO lines and statistics."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastness.errors import LockOrderViolation, LockTimeout
from fastness.layers import locks
from fastness.runtime.locks.counters import LockCounters
from fastness.runtime.locks.table import DATA_LEVELS, CallerLocks, Held, LockTable, Mode
from tests.support.failures import Failures
from tests.support.waiting import eventually
from tests.unit import lock_fixtures
from tests.unit.lock_fixtures import (
    COMPATIBLE,
    COVERS,
    DATABASE,
    MODES,
    NOTES,
    TASKS,
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


# Compatible modes.


def test_compatible_modes_can_be_held_at_once(ada: Actor, bob: Actor) -> None:
    """Intents make a table lock conflict with locked rows."""
    cases: list[tuple[Any, Any, bool]] = [
        *(((TASKS, each), (TASKS, other), other in COMPATIBLE[each].split()) for each in MODES for other in MODES),
        ((row(1), "X"), (TASKS, "S"), False),
        ((row(1), "X"), (TASKS, "X"), False),
        ((row(1), "S"), (TASKS, "S"), True),
        ((row(1), "S"), (TASKS, "X"), False),
        ((row(1), "X"), (NOTES, "X"), True),
        ((row(1), "X"), (DATABASE, "S"), False),
        ((row(1), "S"), (DATABASE, "S"), True),
        ((TASKS, "S"), (row(1), "X"), False),
        ((TASKS, "S"), (row(1), "S"), True),
        ((TASKS, "X"), (row(1), "S"), False),
        ((TASKS, "X"), (row(1, "note"), "X"), True),
        ((TASKS, "IX"), (row(1), "X"), True),
        ((DATABASE, "X"), (row(1), "S"), False),
        ((DATABASE, "S"), (NOTES, "X"), False),
        ((row(1), "X"), (row(2), "X"), True),
        ((row(1), "X"), (row(1, "note"), "X"), True),
        ((row(1), "X"), (row(1), "S"), False),
        ((row(1), "S"), (row(1), "S"), True),
        ((row("1/2"), "X"), (TASKS, "S"), False),  # The first slash ends the type; others belong to the id.
    ]
    failures = Failures()
    for held, wanted, together in cases:
        with failures.of((held, wanted)), done(ada.acquire(*held)):
            attempt = bob.acquire(wanted[0], wanted[1], timeout_seconds=0)
            if together:
                done(attempt).release()
            else:
                with pytest.raises(LockTimeout):
                    done(attempt).release()
    failures.check()


def test_threads_and_tasks_of_one_process_exclude_each_other(table: LockTable, new_actor: Any) -> None:
    actors = [new_actor(f"actor-{number}") for number in range(6)]
    holds = [actor.acquire(row(1)) for actor in actors]
    until_waiting(table, 5)
    for number in range(6):
        eventually(lambda: any(each.done() for each in holds))
        (first,) = (each for each in holds if each.done())
        holds.remove(first)
        assert table.line_length(row(1)) == 6 - number
        done(first).release()
    assert_empty(table)


def test_a_held_lock_is_never_taken_away(table: LockTable, ada: Actor, bob: Actor) -> None:
    """A wait may time out, but never takes the lock from its holder."""
    held = done(ada.acquire(row(1)))
    for _ in range(3):
        with pytest.raises(LockTimeout):
            done(bob.acquire(row(1), timeout_seconds=0.01))
    assert not free(table, row(1))
    held.release()
    assert free(table, row(1))


def test_a_reused_thread_id_does_not_inherit_locks(table: LockTable) -> None:
    """The operating system reuses thread ids."""

    def run(work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    kept: list[Held] = []
    run(lambda: kept.append(table.acquire(row(1))))
    results: list[str] = []

    def attempt() -> None:
        try:
            table.acquire(row(1), timeout_seconds=0)
        except LockTimeout:
            results.append("refused")

    for _ in range(5):
        run(attempt)
    assert results == ["refused"] * 5
    kept[0].release()
    assert_empty(table)


async def test_tasks_of_one_loop_exclude_each_other_with_the_blocking_call(table: LockTable) -> None:
    async def attempt() -> Held:
        return table.acquire(row(1), timeout_seconds=0)

    with table.acquire(row(1)):
        with pytest.raises(LockTimeout):
            await asyncio.create_task(attempt())
        table.acquire(row(1)).release()
        (await table.acquire_async(row(1))).release()
    (await asyncio.create_task(attempt())).release()


# Lock order.


def test_rows_of_one_type_are_locked_in_ascending_order(table: LockTable, ada: Actor) -> None:
    for id in "123":
        done(ada.acquire(row(id)))
    assert [tuple(info.path) for info in table.holders()] == [
        ("database", ""),
        ("entity_type", "task"),
        *(("record_id", f"task/{id}") for id in "123"),
    ]


def test_a_lock_order_violation_is_rejected_and_nothing_is_acquired(table: LockTable, ada: Actor) -> None:
    cases = [
        (row(2), row(1), "Acquire both with acquire_all, or acquire record_id task/1 first"),
        (row(2, "note"), row(1), r"or acquire the intent \(IX\) on entity_type task first"),
        (row(2), row(9, "note"), r"or acquire the intent \(IX\) on entity_type note first"),
        (row(2), NOTES, "or acquire entity_type note first"),
        (TASKS, NOTES, "entity_type note comes before entity_type task in lock order"),
        (row(2), TASKS, "Acquire it in mode X at first"),
        (row(2), DATABASE, "database is held in mode IX"),
    ]
    failures = Failures()
    for held, wanted, advice in cases:
        with failures.of((held, wanted)), done(ada.acquire(held)):
            before = table.holders()
            with pytest.raises(LockOrderViolation, match=advice):
                done(ada.acquire(wanted)).release()
            after = table.holders()
            assert [(each.path, each.owner) for each in after] == [(each.path, each.owner) for each in before]
    failures.check()
    stats = table.stats()
    assert sum(level.violations for level in stats.values()) == len(cases)
    assert sum(level.waits for level in stats.values()) == 0


def test_a_lock_order_violation_is_rejected_without_waiting(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(bob.acquire(row(1)))
    done(ada.acquire(row(2)))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(1)))
    assert table.line_length(row(1)) == 1
    assert table.stats()["record_id"].waits == 0


def test_a_violation_later_in_a_list_prevents_all_acquisitions(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(TASKS, "IX"))
    held = done(ada.acquire(row(5)))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire_all([row(9), row(4)]))
    assert free(table, row(9))
    assert free(table, row(4))
    held.release()
    done(ada.acquire_all([row(9), row(4)]))


def test_intents_acquired_first_allow_rows_of_several_types(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(NOTES, "IX"))
    done(ada.acquire(TASKS, "IX"))
    done(ada.acquire(row(7, "note")))
    done(ada.acquire(row(1)))


def test_released_locks_do_not_count_for_the_lock_order(table: LockTable, ada: Actor) -> None:
    first, second = done(ada.acquire(row(1))), done(ada.acquire(row(3)))
    second.release()
    third = done(ada.acquire(row(2)))
    first.release()
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(1)))
    third.release()
    done(ada.acquire(row(1)))


def test_the_lock_order_applies_per_owner(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(2)))
    done(bob.acquire(row(1)))


def test_acquire_all_accepts_paths_in_any_order(table: LockTable, ada: Actor) -> None:
    held = done(ada.acquire_all([row(2), row(1, "note"), row(1), row(2), NOTES]))
    assert held.paths == [
        ("entity_type", "note"),
        ("record_id", "note/1"),
        ("record_id", "task/1"),
        ("record_id", "task/2"),
    ]
    assert held.mode is Mode.EXCLUSIVE
    assert not free(table, NOTES, "IS")
    held.release()
    assert_empty(table)


def test_acquire_all_acquires_all_or_none(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(2)))
    with pytest.raises(LockTimeout, match="record_id task/2"):
        done(bob.acquire_all([row(3), row(2), row(1)], timeout_seconds=0))
    with pytest.raises(LockTimeout, match="record_id task/2"):
        done(bob.acquire_all([row(3), row(2), row(1)], timeout_seconds=0.01))
    assert free(table, row(1))
    assert free(table, row(3))


def test_a_claim_waits_in_one_line_after_the_other(table: LockTable, ada: Actor, bob: Actor, cyd: Actor) -> None:
    first, second = done(ada.acquire(row(1))), done(cyd.acquire(row(2)))
    both = bob.acquire_all([row(1), row(2)])
    eventually(lambda: table.line_length(row(1)) == 2)
    first.release()
    eventually(lambda: table.line_length(row(2)) == 2)
    assert not both.done()
    second.release()
    done(both).release()
    assert_empty(table)


def test_acquire_all_of_no_paths_acquires_nothing(table: LockTable, ada: Actor) -> None:
    with done(ada.acquire_all([])) as held:
        assert held.paths == []
    assert_empty(table)


# Reentrancy.


def test_a_held_mode_can_be_reacquired_and_an_upgrade_is_rejected(table: LockTable, ada: Actor) -> None:
    """The error names the weakest mode that is sufficient."""
    weakest = {("IS", "IX"): "IX", ("IS", "S"): "S", ("S", "IX"): "X", ("IX", "S"): "X"}
    failures = Failures()
    for held, wanted in itertools.product(MODES, MODES):
        with failures.of((held, wanted)), done(ada.acquire(TASKS, held)) as first:
            if wanted in COVERS[held].split():
                second = done(ada.acquire(TASKS, wanted))
                first.release()
                assert not free(table, TASKS)
                second.release()
                assert_empty(table)
            else:
                advice = f"held in mode {held}.*Acquire it in mode {weakest.get((held, wanted), 'X')} at first"
                with pytest.raises(LockOrderViolation, match=advice):
                    done(ada.acquire(TASKS, wanted)).release()
    failures.check()


def test_a_row_in_a_locked_type_is_covered_by_the_mode_of_the_type(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(TASKS, "S"))
    done(ada.acquire(row(1), "S"))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(2), "X"))


def test_a_reacquisition_does_not_wait_in_line(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = [done(ada.acquire(row(1)))]
    whole = bob.acquire(TASKS)
    until_waiting(table, 1)
    held += [done(ada.acquire(row(1))), done(ada.acquire(row(2)))]
    for each in held:
        assert not whole.done()
        each.release()
    done(whole)


# Lines.


def test_a_new_claim_does_not_overtake_waiters_even_if_compatible(
    table: LockTable, ada: Actor, bob: Actor, cyd: Actor
) -> None:
    reader = done(ada.acquire(row(1), "S"))
    writer = bob.acquire(row(1), "X")
    until_waiting(table, 1)
    with pytest.raises(LockTimeout, match="1 requests wait for it"):
        done(cyd.acquire(row(1), "S", timeout_seconds=0))
    newcomer = cyd.acquire(row(1), "S")
    until_waiting(table, 2)
    reader.release()
    held = done(writer)
    assert not newcomer.done()
    held.release()
    done(newcomer)


def test_compatible_claims_at_the_front_are_granted_together(
    table: LockTable, new_actor: Callable[[str], Actor]
) -> None:
    held = done(new_actor("first").acquire(row(1)))
    waiting = []
    for number, mode in enumerate(("S", "IS", "S", "X", "S")):
        waiting.append(new_actor(f"waiter-{number}").acquire(row(1), mode))
        until_waiting(table, number + 1)
    held.release()
    readers = [done(each) for each in waiting[:3]]
    still_waiting = [info.mode for info in table.holders() if info.waiting_seconds is not None]
    assert still_waiting == ["X", "S"]
    for reader in readers:
        assert not waiting[3].done()
        reader.release()
    writer = done(waiting[3])
    assert not waiting[4].done()
    writer.release()
    done(waiting[4])


def test_a_waiting_table_lock_is_granted_before_later_row_locks(
    table: LockTable, ada: Actor, bob: Actor, cyd: Actor
) -> None:
    held = done(ada.acquire(row(1)))
    whole = bob.acquire(DATABASE, "X")
    until_waiting(table, 1)
    part = cyd.acquire(row(2))
    until_waiting(table, 2)
    assert table.stats()["database"].waiting == 2
    held.release()
    everything = done(whole)
    assert not part.done()
    everything.release()
    done(part)


async def test_locks_are_released_in_reverse_order(table: LockTable) -> None:
    order: list[str] = []

    async def wait_for(id: str) -> None:
        with await table.acquire_async(row(id)):
            order.append(id)

    held = await table.acquire_all_async([row(id) for id in "123"])
    waiting = [asyncio.create_task(wait_for(id)) for id in "123"]
    await asyncio.sleep(0)
    held.release()
    await asyncio.gather(*waiting)
    assert order == ["3", "2", "1"]


# Statistics.


def test_levels_without_nesting_are_locked_in_their_declared_order() -> None:
    table = LockTable(("identity", "contacts", "dedupe", "inbox", "outbox", "readstate"), nested=False)
    with table.acquire(["identity"]), table.acquire(["inbox", "agent-7"]), table.acquire(["inbox", "agent-8"], "S"):
        with pytest.raises(LockOrderViolation, match="contacts comes before inbox agent-8"):
            table.acquire(["contacts"])
        with pytest.raises(LockOrderViolation):
            table.acquire(["inbox"])
        with table.acquire(["readstate"]):
            assert [tuple(info.path) for info in table.holders()] == [
                ("identity", ""),
                ("inbox", "agent-7"),
                ("inbox", "agent-8"),
                ("readstate", ""),
            ]
        for resource in ("contacts", "dedupe", "inbox", "outbox"):
            assert free(table, [resource])
        assert not free(table, ["identity"], "S")
        assert free(table, ["inbox", "agent-8"], "S")
    with table.acquire_all([["outbox"], ["identity"], ["dedupe", "a/b"]]) as held:
        assert held.paths == [("identity", ""), ("dedupe", "a/b"), ("outbox", "")]
    assert_empty(table)


def test_waits_and_contention_are_counted_by_level(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    waiting = bob.acquire(row(1))
    until_waiting(table, 1)
    stats = table.stats()
    assert list(stats) == list(DATA_LEVELS)
    assert (stats["record_id"].holders, stats["record_id"].waiting) == (1, 1)
    assert stats["record_id"].contention == 0.5
    held.release()
    done(waiting).release()
    for _ in range(2):
        done(ada.acquire(row(1))).release()
    rows, types = table.stats()["record_id"], table.stats()["entity_type"]
    assert (rows.acquisitions, rows.intents, rows.waits, rows.timeouts, rows.unserved) == (4, 0, 1, 0, 0)
    assert (rows.holders, rows.waiting, rows.violations) == (0, 0, 0)
    assert rows.contention == 0.25
    assert 0 < rows.wait_seconds_max == rows.wait_seconds_total
    assert (types.acquisitions, types.intents, types.waits, types.contention) == (0, 4, 0, 0)


def test_a_wait_for_an_intent_counts_at_the_level_of_the_intent(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(TASKS, "S"))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    stats = table.stats()
    assert (stats["entity_type"].waits, stats["entity_type"].unserved, stats["entity_type"].timeouts) == (1, 1, 1)
    assert stats["entity_type"].contention == 0.5
    assert (stats["database"].intents, stats["database"].waits, stats["database"].contention) == (2, 0, 0)
    assert (stats["record_id"].acquisitions, stats["record_id"].waits, stats["record_id"].contention) == (0, 0, 0)


def test_holders_lists_holders_and_waiters(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1), "S"))
    waiting = bob.acquire(row(1))
    until_waiting(table, 1)
    *_, holder, waiter = table.holders()
    assert (holder.path, holder.mode, holder.waiting_seconds) == (["record_id", "task/1"], Mode.SHARED, None)
    assert (waiter.path, waiter.mode, waiter.held_seconds) == (["record_id", "task/1"], Mode.EXCLUSIVE, None)
    assert "ada" in holder.owner
    assert "bob" in waiter.owner
    assert holder.held_seconds is not None
    assert holder.held_seconds >= 0
    assert waiter.waiting_seconds is not None
    assert waiter.waiting_seconds >= 0
    assert table.line_length(row(1)) == 2
    assert table.line_length(TASKS) == 2
    assert table.line_length(row(2)) == 0
    held.release()
    done(waiting)


async def test_a_lock_of_a_coroutine_without_a_task_names_no_task(table: LockTable) -> None:
    def call() -> None:
        try:
            table.acquire_async(row(1)).send(None)
        except StopIteration as answer:
            acquired.set_result(answer.value)

    loop = asyncio.get_running_loop()
    acquired: asyncio.Future[Held] = loop.create_future()
    loop.call_soon(call)  # Runs in no task.
    held = await acquired
    with pytest.raises(LockTimeout, match=r"task of a call \(X\)"):
        await table.acquire_async(row(1), timeout_seconds=0)
    held.release()
    assert_empty(table)


@pytest.mark.parametrize(("may_wait", "levels"), [(True, ["record_id"]), (False, [])])
def test_the_duration_of_an_acquire_that_may_wait_is_observed(may_wait: bool, levels: list[str]) -> None:
    counters, observed = LockCounters(), []
    counters.on_wait = lambda level, seconds: observed.append((level, seconds >= 0))
    with counters.acquiring("main", locks.steps_of([row(1)], "X"), may_wait=may_wait):
        pass
    assert observed == [(level, True) for level in levels]


# The locks of a plane's callers.


def test_the_first_lock_of_callers_waits_once_for_earlier_writes(table: LockTable) -> None:
    waits: list[bool] = []
    callers = CallerLocks(table, lambda: waits.append(table.has_callers))
    first = callers.acquire  # A caller may keep it.
    for number in range(2):
        first(row(number)).release()
        callers.acquire(row(number)).release()
    assert waits == [True]


async def test_several_locks_can_be_the_first_of_callers(table: LockTable) -> None:
    waits: list[bool] = []
    callers = CallerLocks(table, lambda: waits.append(table.has_callers))
    async with await callers.acquire_all_async([row(2), row(1)]) as held:
        assert held.paths == [("record_id", "task/1"), ("record_id", "task/2")]
        assert held.fences == {}  # Other processes cannot acquire them.
    assert waits == [True]
    assert_empty(table)
