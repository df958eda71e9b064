"""The lock table: who may hold what together, who waits for whom, and that nothing is ever left behind.

Most rules are tried three times: among threads, among asyncio tasks, and among both on one table.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import pytest

from holdfast import limits
from holdfast.errors import Busy, Closed, InvalidArgument, LockOrderViolation, LockTimeout
from holdfast.runtime.locks.table import DATA_LEVELS, RESOURCE_LEVELS, Held, LockTable, Mode

DATABASE = ["database"]
TASKS = ["entity_type", "task"]
NOTES = ["entity_type", "note"]
MODES = ("IS", "IX", "S", "X")
TOGETHER = {"IS": "IS IX S", "IX": "IS IX", "S": "IS S", "X": ""}
COVERS = {"IS": "IS", "IX": "IS IX", "S": "IS S", "X": "IS IX S X"}
SECONDS_MAX = 60.0  # Far more than anything here takes; a test that fails ends all the same.
PATIENCE_SECONDS = 2 * SECONDS_MAX  # Whoever is woken only by the end of patience is woken too late.


def row(id: int | str, kind: str = "task") -> list[str]:
    return ["record_id", f"{kind}/{id}"]


class Actor(Protocol):
    """Somebody who can hold locks, and does one thing after the other."""

    def acquire(
        self, path: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS
    ) -> "Future[Held]": ...

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS
    ) -> "Future[Held]": ...


class ThreadActor:
    def __init__(self, table: LockTable, name: str) -> None:
        self.table = table
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def acquire(self, path: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS) -> "Future[Held]":
        return self.pool.submit(self.table.acquire, path, mode, timeout_seconds=timeout_seconds)

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS
    ) -> "Future[Held]":
        return self.pool.submit(self.table.acquire_all, paths, mode, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        self.pool.shutdown()


class TaskActor:
    def __init__(self, table: LockTable, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.table = table
        self.loop = loop
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.life = asyncio.run_coroutine_threadsafe(self.live(name), loop)

    async def live(self, name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        while (job := await self.jobs.get()) is not None:
            coroutine, future = job
            try:
                future.set_result(await coroutine)
            except Exception as error:
                future.set_exception(error)

    def acquire(self, path: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS) -> "Future[Held]":
        return self.submit(self.table.acquire_async(path, mode, timeout_seconds=timeout_seconds))

    def acquire_all(
        self, paths: Any, mode: str = "X", timeout_seconds: float | None = PATIENCE_SECONDS
    ) -> "Future[Held]":
        return self.submit(self.table.acquire_all_async(paths, mode, timeout_seconds=timeout_seconds))

    def submit(self, coroutine: Any) -> "Future[Held]":
        future: Future[Held] = Future()
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, (coroutine, future))
        return future

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, None)
        self.life.result(SECONDS_MAX)


@pytest.fixture
def table() -> LockTable:
    return LockTable()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["threads", "tasks", "both"])
def new_actor(
    request: pytest.FixtureRequest, table: LockTable, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[[str], Actor]]:
    actors: list[Any] = []

    def new_actor(name: str) -> Actor:
        is_thread = request.param == "threads" or (request.param == "both" and len(actors) % 2 == 0)
        actors.append(ThreadActor(table, name) if is_thread else TaskActor(table, name, loop))
        return actors[-1]

    yield new_actor
    for actor in actors:
        actor.close()


@pytest.fixture
def ada(new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("ada")


@pytest.fixture
def bob(ada: Actor, new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("bob")


@pytest.fixture
def cyd(bob: Actor, new_actor: Callable[[str], Actor]) -> Actor:
    return new_actor("cyd")


def done(future: "Future[Held]") -> Held:
    return future.result(SECONDS_MAX)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.0005)


def until_waiting(table: LockTable, number: int) -> None:
    until(lambda: sum(level.waiting for level in table.stats().values()) == number)


def free(table: LockTable, path: list[str], mode: str = "X") -> bool:
    """Whether somebody who holds nothing could have `path` at once."""

    def attempt() -> bool:
        try:
            table.acquire(path, mode, timeout_seconds=0).release()
        except LockTimeout:
            return False
        return True

    with ThreadPoolExecutor(1) as stranger:
        return stranger.submit(attempt).result()


def assert_empty(table: LockTable) -> None:
    """Nothing is held or waited for, and nothing is remembered about names and owners that were."""
    assert table.holders() == []
    registry = table._registry
    assert not any((registry.held, registry.lines, registry.owners, registry.completed, registry.unnoticed, registry.waiting, table._pending_releases))


# Who may hold what together.


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_two_hold_the_same_in_modes_that_go_together(
    table: LockTable, ada: Actor, bob: Actor, first: str, second: str
) -> None:
    done(ada.acquire(TASKS, first))
    attempt = bob.acquire(TASKS, second, timeout_seconds=0)
    if second in TOGETHER[first].split():
        done(attempt)
    else:
        with pytest.raises(LockTimeout):
            done(attempt)


@pytest.mark.parametrize(
    ("held", "wanted", "together"),
    [
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
    ],
)
def test_row_locks_and_table_locks_conflict_as_they_should(
    ada: Actor, bob: Actor, held: Any, wanted: Any, together: bool
) -> None:
    """Lesson 16: without intents a table lock did not see the rows that others had locked."""
    done(ada.acquire(*held))
    attempt = bob.acquire(*wanted, timeout_seconds=0)
    if together:
        done(attempt)
    else:
        with pytest.raises(LockTimeout):
            done(attempt)


def test_threads_and_tasks_of_one_process_exclude_each_other(table: LockTable, new_actor: Any) -> None:
    """Lesson 18: seed 002's file lock let every thread of its own process in."""
    actors = [new_actor(f"actor-{number}") for number in range(6)]
    holds = [actor.acquire(row(1)) for actor in actors]
    until_waiting(table, 5)
    for number in range(6):
        until(lambda: any(each.done() for each in holds))
        (first,) = (each for each in holds if each.done())
        holds.remove(first)
        assert table.line_length(row(1)) == 6 - number
        done(first).release()
    assert_empty(table)


def test_a_live_holder_is_never_robbed(table: LockTable, ada: Actor, bob: Actor) -> None:
    """Lesson 18: seed 002's recovery could take a lock from somebody who was alive. Here waiting only ever ends."""
    held = done(ada.acquire(row(1)))
    for _ in range(3):
        with pytest.raises(LockTimeout):
            done(bob.acquire(row(1), timeout_seconds=0.01))
    assert not free(table, row(1))
    held.release()
    assert free(table, row(1))


def test_a_thread_that_has_the_number_of_an_ended_one_does_not_have_its_locks(table: LockTable) -> None:
    """Lesson 18: an identity that the system gives out again is nobody's identity."""

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


async def test_tasks_of_one_loop_exclude_each_other_even_by_the_blocking_call(table: LockTable) -> None:
    async def attempt() -> Held:
        return table.acquire(row(1), timeout_seconds=0)

    with table.acquire(row(1)):
        with pytest.raises(LockTimeout):
            await asyncio.create_task(attempt())
        table.acquire(row(1)).release()
        (await table.acquire_async(row(1))).release()
    (await asyncio.create_task(attempt())).release()


# The order.


def test_rows_of_one_type_are_taken_in_ascending_order(table: LockTable, ada: Actor) -> None:
    """Lesson 16: seed 002's check of the order forbade to hold two rows at all."""
    for id in "123":
        done(ada.acquire(row(id)))
    assert [info.path for info in table.holders()] == [
        ("database", ""),
        ("entity_type", "task"),
        *(("record_id", f"task/{id}") for id in "123"),
    ]


@pytest.mark.parametrize(
    ("held", "wanted", "advice"),
    [
        (row(2), row(1), "Acquire both with acquire_all, or acquire record_id task/1 first"),
        (row(2, "note"), row(1), r"or acquire the intent \(IX\) on entity_type task first"),
        (row(2), row(9, "note"), r"or acquire the intent \(IX\) on entity_type note first"),
        (row(2), NOTES, "or acquire entity_type note first"),
        (TASKS, NOTES, "entity_type note comes before entity_type task in lock order"),
        (row(2), TASKS, "Acquire it in mode X at first"),
        (row(2), DATABASE, "database is held in mode IX"),
    ],
)
def test_asking_against_the_order_is_refused_and_nothing_is_taken(
    table: LockTable, ada: Actor, held: Any, wanted: Any, advice: str
) -> None:
    done(ada.acquire(held))
    before = table.holders()
    with pytest.raises(LockOrderViolation, match=advice):
        done(ada.acquire(wanted))
    assert [(each.path, each.owner) for each in table.holders()] == [(each.path, each.owner) for each in before]
    stats = table.stats()
    assert sum(level.violations for level in stats.values()) == 1
    assert sum(level.waits for level in stats.values()) == 0


def test_asking_against_the_order_is_refused_at_once_even_if_others_have_it(
    table: LockTable, ada: Actor, bob: Actor
) -> None:
    done(bob.acquire(row(1)))
    done(ada.acquire(row(2)))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(1)))
    assert table.line_length(row(1)) == 1
    assert table.stats()["record_id"].waits == 0


def test_what_comes_later_in_the_list_is_refused_before_the_first_of_it_is_taken(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(TASKS, "IX"))
    held = done(ada.acquire(row(5)))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire_all([row(9), row(4)]))
    assert free(table, row(9))
    assert free(table, row(4))
    held.release()
    done(ada.acquire_all([row(9), row(4)]))


def test_the_intents_on_types_taken_first_allow_rows_of_several(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(NOTES, "IX"))
    done(ada.acquire(TASKS, "IX"))
    done(ada.acquire(row(7, "note")))
    done(ada.acquire(row(1)))


def test_what_was_released_does_not_count_for_the_order(table: LockTable, ada: Actor) -> None:
    first, second = done(ada.acquire(row(1))), done(ada.acquire(row(3)))
    second.release()
    third = done(ada.acquire(row(2)))
    first.release()
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(1)))
    third.release()
    done(ada.acquire(row(1)))


def test_the_order_binds_each_owner_alone(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(2)))
    done(bob.acquire(row(1)))


def test_several_are_taken_together_in_whatever_order_they_are_named(table: LockTable, ada: Actor) -> None:
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


def test_several_are_taken_all_or_none(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(2)))
    with pytest.raises(LockTimeout, match="record_id task/2"):
        done(bob.acquire_all([row(3), row(2), row(1)], timeout_seconds=0))
    with pytest.raises(LockTimeout, match="record_id task/2"):
        done(bob.acquire_all([row(3), row(2), row(1)], timeout_seconds=0.01))
    assert free(table, row(1))
    assert free(table, row(3))


def test_a_claim_goes_on_from_one_line_to_the_next(table: LockTable, ada: Actor, bob: Actor, cyd: Actor) -> None:
    first, second = done(ada.acquire(row(1))), done(cyd.acquire(row(2)))
    both = bob.acquire_all([row(1), row(2)])
    until(lambda: table.line_length(row(1)) == 2)
    first.release()
    until(lambda: table.line_length(row(2)) == 2)
    assert not both.done()
    second.release()
    done(both).release()
    assert_empty(table)


def test_nothing_is_a_lock_on_nothing(table: LockTable, ada: Actor) -> None:
    with done(ada.acquire_all([])) as held:
        assert held.paths == []
    assert_empty(table)


# Taking what one has.


@pytest.mark.parametrize("wanted", MODES)
@pytest.mark.parametrize("held", MODES)
def test_what_a_held_mode_covers_is_taken_again_and_an_upgrade_is_refused(
    table: LockTable, ada: Actor, held: str, wanted: str
) -> None:
    first = done(ada.acquire(TASKS, held))
    if wanted in COVERS[held].split():
        second = done(ada.acquire(TASKS, wanted))
        first.release()
        assert not free(table, TASKS)
        second.release()
        assert_empty(table)
    else:
        with pytest.raises(LockOrderViolation, match=f"held in mode {held}.*Acquire it in mode .* at first"):
            done(ada.acquire(TASKS, wanted))


@pytest.mark.parametrize(
    ("held", "wanted", "advice"), [("IS", "IX", "IX"), ("IS", "S", "S"), ("S", "IX", "X"), ("IX", "S", "X")]
)
def test_the_refusal_of_an_upgrade_names_the_weakest_mode_that_would_do(
    table: LockTable, held: str, wanted: str, advice: str
) -> None:
    with table.acquire(TASKS, held), pytest.raises(LockOrderViolation, match=f"in mode {advice} at first"):
        table.acquire(TASKS, wanted)


def test_a_row_inside_a_locked_type_needs_what_the_type_does_not_give(table: LockTable, ada: Actor) -> None:
    done(ada.acquire(TASKS, "S"))
    done(ada.acquire(row(1), "S"))
    with pytest.raises(LockOrderViolation):
        done(ada.acquire(row(2), "X"))


def test_taking_again_does_not_stand_in_line(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = [done(ada.acquire(row(1)))]
    whole = bob.acquire(TASKS)
    until_waiting(table, 1)
    held += [done(ada.acquire(row(1))), done(ada.acquire(row(2)))]
    for each in held:
        assert not whole.done()
        each.release()
    done(whole)


# Lines.


def test_a_newcomer_does_not_overtake_even_if_it_could_share(
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


def test_those_in_front_go_together_as_far_as_they_can(table: LockTable, new_actor: Callable[[str], Actor]) -> None:
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


def test_whoever_waits_for_the_whole_gets_it_before_later_parts(
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


async def test_what_was_taken_last_is_released_first(table: LockTable) -> None:
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


# The end of patience.


def test_a_timeout_names_who_is_in_the_way(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(row(1)))
    with pytest.raises(LockTimeout, match=r"record_id task/1 was .* held by (thread|task) ada\S* \(X\), and 1 requests wait"):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    assert table.stats()["record_id"].timeouts == 1


def test_a_timeout_gives_back_what_was_taken_on_the_way(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0))
    held.release()
    assert_empty(table)


def test_those_behind_one_who_gives_up_go_on(table: LockTable, ada: Actor, bob: Actor, cyd: Actor) -> None:
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
def test_a_wait_without_a_timeout_has_the_bound_of_its_level(
    ada: Actor, bob: Actor, monkeypatch: pytest.MonkeyPatch, path: list[str], limit: str
) -> None:
    for name in ("LOCK_WAIT_SECONDS", "LOCK_BULK_WAIT_SECONDS"):
        monkeypatch.setattr(limits, name, 0.01 if name == limit else SECONDS_MAX)
    done(ada.acquire(path))
    with pytest.raises(LockTimeout, match=r"within 0\.01 s"):
        done(bob.acquire(path, timeout_seconds=None))


def test_rows_and_a_type_together_are_waited_for_as_long_as_the_type(
    table: LockTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOCK_WAIT_SECONDS", SECONDS_MAX)
    monkeypatch.setattr(limits, "LOCK_BULK_WAIT_SECONDS", 0)
    with ThreadPoolExecutor(1) as ada, ada.submit(table.acquire, row(1)).result(), pytest.raises(LockTimeout):
        table.acquire_all([row(1), NOTES])


def test_more_than_may_wait_are_refused(new_actor: Callable[[str], Actor], table: LockTable) -> None:
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


def test_a_table_may_let_nobody_wait() -> None:
    table = LockTable(waiters_max=0)
    with ThreadPoolExecutor(1) as ada, ada.submit(table.acquire, row(1)).result(), pytest.raises(Busy):
        table.acquire(row(1))


# Cancellation, and loops that are gone.


async def waiting_task(table: LockTable, path: list[str], mode: str = "X") -> "asyncio.Task[Held]":
    task = asyncio.create_task(table.acquire_async(path, mode, timeout_seconds=PATIENCE_SECONDS))
    waiting = sum(level.waiting for level in table.stats().values())
    await asyncio.sleep(0)
    assert sum(level.waiting for level in table.stats().values()) == waiting + 1
    return task


async def assert_cancelled(task: "asyncio.Task[Held]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_waiter_leaves_its_place_to_those_behind(table: LockTable) -> None:
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
    ids=["before the loop hears of it", "before the task does", "released on the same loop"],
)
async def test_one_who_is_cancelled_in_the_moment_of_the_grant_passes_it_on(
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


async def test_a_cancelled_claim_gives_back_the_part_that_it_had(table: LockTable) -> None:
    held = await table.acquire_async(row(2))
    claim = asyncio.create_task(table.acquire_all_async([row(1), row(2), row(3)]))
    await asyncio.sleep(0)
    assert not free(table, row(1))
    claim.cancel()
    await assert_cancelled(claim)
    assert free(table, row(1))
    held.release()
    assert_empty(table)


async def test_a_timeout_around_a_wait_leaves_nothing_behind(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada:
        held = ada.submit(table.acquire, row(1)).result()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await table.acquire_async(row(1))
        held.release()
    assert_empty(table)


def abandon(table: LockTable, path: list[str], number: int = 1) -> tuple[asyncio.AbstractEventLoop, list[Any]]:
    """An event loop that stands still while some of its tasks wait for `path`."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(table.acquire_async(path, timeout_seconds=PATIENCE_SECONDS)) for _ in range(number)]
    loop.run_until_complete(asyncio.sleep(0))
    for task in tasks:
        task._log_destroy_pending = False  # They can never finish, which is what these tests are about.
    return loop, tasks


def test_waiters_of_a_closed_loop_are_passed_over(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    loop, tasks = abandon(table, row(1), 2_000)
    loop.close()
    waiting = bob.acquire(row(1))
    until_waiting(table, 2_001)
    held.release()
    done(waiting).release()
    assert_empty(table)
    del tasks


@pytest.mark.parametrize("timeout_seconds", [0, PATIENCE_SECONDS], ids=["one who tries", "one who waits"])
def test_a_loop_that_closes_after_the_grant_does_not_keep_it(
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


def test_a_loop_that_closes_while_others_wait_behind_its_grant_does_not_keep_it_for_ever(
    table: LockTable, ada: Actor, bob: Actor
) -> None:
    held = done(ada.acquire(row(1)))
    loop, tasks = abandon(table, row(1))
    held.release()
    waiting = bob.acquire(row(1), timeout_seconds=2)
    until_waiting(table, 1)
    loop.close()
    done(waiting).release()
    assert_empty(table)
    del tasks


def test_what_a_task_got_by_waiting_outlives_its_loop(table: LockTable, ada: Actor, bob: Actor) -> None:
    """Lesson 18: whoever has noticed that they hold a lock keeps it until they release it."""
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


def test_a_coroutine_that_nobody_runs_any_more_gives_back_what_it_had(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada:
        held = ada.submit(table.acquire, row(1)).result()

        async def drop() -> None:
            claim = table.acquire_all_async([row(0), row(1)])
            claim.send(None)
            claim.close()

        asyncio.run(drop())
        held.release()
    assert_empty(table)


# Releasing.


def test_a_release_is_idempotent_and_may_come_from_anybody(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1)))
    held.release()
    other = done(bob.acquire(row(1)))
    held.release()
    assert not free(table, row(1))
    other.release()
    assert_empty(table)


async def test_a_block_releases_however_it_ends(table: LockTable) -> None:
    with table.acquire(row(1)) as held:
        assert held.paths == [("record_id", "task/1")]
    with pytest.raises(ZeroDivisionError):
        async with await table.acquire_async(TASKS, "S") as held:
            assert held.mode is Mode.SHARED
            raise ZeroDivisionError
    assert_empty(table)


async def test_locks_that_were_released_protect_no_block(table: LockTable) -> None:
    held = table.acquire(row(1))
    held.release()
    with pytest.raises(Closed):
        held.__enter__()
    with pytest.raises(Closed):
        await held.__aenter__()


def test_a_finalizer_may_release_in_the_midst_of_anything(table: LockTable) -> None:
    """The garbage collector runs where it likes, also inside the table's own mutex."""
    held = table.acquire(row(1))
    with table._mutex:
        held.release()
    table.acquire(row(0)).release()  # Against the order, if the release had been lost.
    assert_empty(table)


def test_a_release_in_the_midst_of_an_acquisition_wakes_those_who_wait_for_it(
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


def test_a_release_that_met_a_taken_mutex_is_carried_out_by_whoever_has_it(table: LockTable, ada: Actor) -> None:
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


def test_memory_does_not_grow_with_the_names_and_owners_ever_seen(table: LockTable) -> None:
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


# Figures.


def test_seed_000s_locks_are_split_by_resource_and_keep_their_order() -> None:
    """Lesson 6: the split was planned and never built."""
    assert RESOURCE_LEVELS == ("identity", "contacts", "dedupe", "inbox", "outbox", "readstate")
    table = LockTable(RESOURCE_LEVELS, nested=False)
    with table.acquire(["identity"]), table.acquire(["inbox", "agent-7"]), table.acquire(["inbox", "agent-8"], "S"):
        with pytest.raises(LockOrderViolation, match="contacts comes before inbox agent-8"):
            table.acquire(["contacts"])
        with pytest.raises(LockOrderViolation):
            table.acquire(["inbox"])
        with table.acquire(["readstate"]):
            assert [info.path for info in table.holders()] == [
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
    """Lesson 6: the figures were planned and never built."""
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


def test_a_wait_for_an_intent_counts_where_it_is(table: LockTable, ada: Actor, bob: Actor) -> None:
    done(ada.acquire(TASKS, "S"))
    with pytest.raises(LockTimeout):
        done(bob.acquire(row(1), timeout_seconds=0.01))
    stats = table.stats()
    assert (stats["entity_type"].waits, stats["entity_type"].unserved, stats["entity_type"].timeouts) == (1, 1, 1)
    assert stats["entity_type"].contention == 0.5
    assert (stats["database"].intents, stats["database"].waits, stats["database"].contention) == (2, 0, 0)
    assert (stats["record_id"].acquisitions, stats["record_id"].waits, stats["record_id"].contention) == (0, 0, 0)


def test_the_console_sees_who_holds_and_who_waits(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1), "S"))
    waiting = bob.acquire(row(1))
    until_waiting(table, 1)
    *_, holder, waiter = table.holders()
    assert (holder.path, holder.mode, holder.waiting_seconds) == (("record_id", "task/1"), Mode.SHARED, None)
    assert (waiter.path, waiter.mode, waiter.held_seconds) == (("record_id", "task/1"), Mode.EXCLUSIVE, None)
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


# Forks.


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a forked child that does `work`."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS_MAX))  # A child that hangs is a child that failed.
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_starts_with_an_empty_table(table: LockTable) -> None:
    with ThreadPoolExecutor(1) as ada, ThreadPoolExecutor(1) as bob:
        theirs = ada.submit(table.acquire, row(1)).result()
        waiting = bob.submit(table.acquire, row(1), timeout_seconds=PATIENCE_SECONDS)
        until_waiting(table, 1)
        mine = table.acquire(row(2))

        def work() -> None:
            assert_empty(table)
            assert table.stats()["record_id"].acquisitions == 0
            first, second = table.acquire(row(1)), table.acquire(row(2))
            mine.release()  # It is the parent's, and gives back nothing of the child's.
            assert [info.path[1] for info in table.holders()] == ["", "task", "task/1", "task/2"]
            second.release()
            first.release()
            assert_empty(table)

        with table._mutex:  # As if another thread had been inside at that moment.
            assert in_child(work) == 0
        assert table.line_length(row(1)) == 2
        mine.release()
        theirs.release()
        waiting.result().release()
    assert_empty(table)


def test_a_coroutine_that_waited_in_the_parent_leaves_the_child_alone(table: LockTable) -> None:
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


# What is refused.


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (["table", "task"], "database, entity_type, record_id"),
        (["record_id", "123"], "type/id"),
        (["record_id", "task/"], "type/id"),
        (["record_id", "/1"], "type/id"),
        (["record_id"], "type/id"),
        (["record_id", ""], "type/id"),
        (["entity_type"], "a name without a slash"),
        (["entity_type", ""], "a name without a slash"),
        (["entity_type", "task/1"], "a name without a slash"),
        (["database", "main"], "without a name"),
        (["record_id", "task/" + "x" * limits.LOCK_NAME_CHARACTERS_MAX], f"{limits.LOCK_NAME_CHARACTERS_MAX}"),
        (["record_id", 7], "strings"),
        ([7, "task/1"], "strings"),
        (["record_id", None], "strings"),
        (["record_id", b"task/1"], "strings"),
        ([["record_id"], "task/1"], "strings"),
        ([], "0 parts"),
        (["record_id", "task/1", "x"], "3 parts"),
        ("record_id", "a list of a level and a name"),
        (None, "a list of a level and a name"),
        (7, "a list of a level and a name"),
        ({"record_id": "task/1"}, "a list of a level and a name"),
    ],
    ids=repr,
)
async def test_a_path_that_means_nothing_is_refused(table: LockTable, path: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        table.acquire(path)
    with pytest.raises(InvalidArgument, match=message):
        await table.acquire_async(path)
    with pytest.raises(InvalidArgument, match=message):
        table.acquire_all([row(1), path])
    with pytest.raises(InvalidArgument, match=message):
        await table.acquire_all_async([row(1), path])
    assert_empty(table)


@pytest.mark.parametrize("paths", ["record_id", ["record_id", "task/1"], None, 7, [None]], ids=repr)
def test_several_paths_are_a_list_of_paths(table: LockTable, paths: Any) -> None:
    with pytest.raises(InvalidArgument):
        table.acquire_all(paths)


@pytest.mark.parametrize("mode", ["", "SIX", "x", "EXCLUSIVE", None, 3, [], {}], ids=repr)
def test_an_unknown_mode_is_refused_with_the_known_ones(table: LockTable, mode: Any) -> None:
    with pytest.raises(InvalidArgument, match="IS, IX, S, X"):
        table.acquire(row(1), mode)


@pytest.mark.parametrize(
    "seconds", [-1, -0.001, float("nan"), float("inf"), float("-inf"), "1", True, [], 1j], ids=repr
)
async def test_a_timeout_is_a_number_of_seconds(table: LockTable, seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_seconds"):
        table.acquire(row(1), timeout_seconds=seconds)
    with pytest.raises(InvalidArgument, match="timeout_seconds"):
        await table.acquire_async(row(1), timeout_seconds=seconds)
    assert_empty(table)


def test_a_very_long_timeout_is_as_good_as_none(table: LockTable, ada: Actor, bob: Actor) -> None:
    held = done(ada.acquire(row(1), timeout_seconds=1e300))
    waiting = bob.acquire(row(1), timeout_seconds=1e300)
    until_waiting(table, 1)
    held.release()
    done(waiting)


@pytest.mark.parametrize("levels", [(), "database", ("a", ""), ("a", 7), ("a", "A"), 7, None], ids=repr)
def test_levels_have_names_of_their_own(levels: Any) -> None:
    with pytest.raises(InvalidArgument):
        LockTable(levels)


@pytest.mark.parametrize("number", [-1, 1.5, "1", None, True], ids=repr)
def test_the_most_who_may_wait_is_a_whole_number(number: Any) -> None:
    with pytest.raises(InvalidArgument, match="waiters_max"):
        LockTable(waiters_max=number)


def test_levels_are_written_in_capitals_or_not(table: LockTable) -> None:
    with table.acquire(("RECORD_ID", "task/1")) as held:
        assert held.paths == [("record_id", "task/1")]
        assert not free(table, row(1))
        assert not free(table, ["Database", ""])
    assert LockTable(("Outer", "inner")).acquire(["OUTER"]).paths == [("Outer", "")]


def test_levels_nest_as_deep_as_they_are_declared() -> None:
    table = LockTable(("cluster", "database", "table", "row"))
    with table.acquire(["row", "main/task/1"]):
        assert [(info.path, info.mode) for info in table.holders()] == [
            (("cluster", ""), "IX"),
            (("database", "main"), "IX"),
            (("table", "main/task"), "IX"),
            (("row", "main/task/1"), "X"),
        ]
        assert not free(table, ["table", "main/task"], "S")
        assert free(table, ["table", "other/task"])
    with pytest.raises(InvalidArgument, match="database/table/row"):
        table.acquire(["row", "task/1"])
    with pytest.raises(InvalidArgument, match="type/id"):
        table.acquire(["table", "main/task/1"])
