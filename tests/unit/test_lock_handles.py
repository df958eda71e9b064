"""`plane.locks` behaves the same in one process and where processes share the locks, for threads and for tasks.

`test_through_client` runs these tests against a server, too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, Plane
from fastness.errors import Closed, Fenced, InvalidArgument, LeaseExpired, LockOrderViolation, LockTimeout
from fastness.testing.clock import ManualClock
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than any test needs.
DATABASE, TASKS, NOTES = ["database"], ["entity_type", "task"], ["entity_type", "note"]


shared = pytest.mark.parametrize("kind", ["served", "postgres"])


def row(id: int | str, kind: str = "task") -> list[str]:
    return ["record_id", f"{kind}/{id}"]


@pytest.fixture(params=["memory", "dir", "served", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # Session logs are stored here with PostgreSQL.
    if kind == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"dir:{tmp_path / 'data'}" if kind == "dir" else "memory:"


@pytest.fixture
def plane(kind: str, url: str, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(url, clock=clock) as plane:
        share(plane, kind)
        yield plane


@asynccontextmanager
async def open_async(kind: str, url: str, clock: ManualClock) -> AsyncIterator[AsyncPlane]:
    async with fastness.open_async(url, clock=clock) as plane:
        share(plane, kind)
        yield plane


def share(plane: Any, kind: str) -> None:
    """Share the locks of a plane in memory, as a server does."""
    if kind == "served":
        plane._transport.services.shared_locks = True


class Caller:
    """A thread that acquires locks."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.plane = plane
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def acquire(self, path: Any, mode: str = "X", **options: Any) -> "Future[Any]":
        return self._thread.submit(self.plane.locks.acquire, path, mode, **options)

    def tries(self, path: Any, mode: str = "X") -> Any:
        """The lock, without waiting; None if it is not granted."""
        try:
            return self.acquire(path, mode, timeout_seconds=0).result(PATIENCE_SECONDS)
        except LockTimeout:
            return None

    def run(self, work: Callable[[], Any]) -> "Future[Any]":
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


@pytest.fixture
def callers(plane: Plane) -> Iterator[Callable[[str], Caller]]:
    made: list[Caller] = []

    def make(name: str) -> Caller:
        made.append(Caller(plane, name))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


def fields(plane: Plane) -> Any:
    """The fields of the task 1."""
    found = plane.entities.get("task", "1")
    return None if found is None else found.fields


def until_waiting(plane: Plane, number: int) -> None:
    eventually(lambda: sum(level.waiting for level in plane.locks.stats().values()) == number)


def advance_until_done(clock: ManualClock, future: "Future[Any]") -> None:
    """Move the plane's clock, which the locks of one process do not use, until a caller has waited long enough."""

    def is_done() -> bool:
        clock.advance_ms(1)
        return future.done()

    eventually(is_done)


def assert_free(plane: Plane, caller: Caller) -> None:
    """Nothing is held: the whole database can be locked."""
    held = caller.tries(DATABASE)
    assert held is not None
    held.release()
    assert [level.holders for level in plane.locks.stats().values()] == [0, 0, 0]
    assert plane.locks.sessions().sessions == []


# What excludes what.

EXCLUSION = [  # A lock that one caller holds, a lock that another tries, and whether it is granted.
    (row(1), "X", row(1), "X", False),
    (row(1), "X", row(1), "S", False),
    (row(1), "S", row(1), "S", True),
    (row(1), "S", row(1), "X", False),
    (row(1), "X", row(2), "X", True),
    (row(1), "X", row(1, "note"), "X", True),
    (TASKS, "X", row(1), "S", False),
    (TASKS, "X", row(1, "note"), "X", True),
    (TASKS, "X", NOTES, "X", True),
    (TASKS, "S", row(1), "S", True),
    (TASKS, "S", row(1), "X", False),
    (TASKS, "IX", row(1), "X", True),
    (TASKS, "IX", TASKS, "S", False),
    (TASKS, "IS", TASKS, "S", True),
    (row(1), "X", TASKS, "S", False),
    (row(1), "S", TASKS, "S", True),
    (row(1), "S", TASKS, "X", False),
    (row(1), "X", DATABASE, "S", False),
    (DATABASE, "S", row(1), "X", False),
    (DATABASE, "S", row(1), "S", True),
    (DATABASE, "X", row(1, "note"), "S", False),
    (DATABASE, "IX", TASKS, "X", True),
]


def test_modes_exclude_each_other_across_levels(plane: Plane, callers: Callable[[str], Caller]) -> None:
    ada, bob = callers("ada"), callers("bob")
    for first, first_mode, second, second_mode, granted in EXCLUSION:
        held = ada.tries(first, first_mode)
        other = bob.tries(second, second_mode)
        assert (other is not None) is granted, (first, first_mode, second, second_mode)
        for each in (held, other):
            if each is not None:
                each.release()
    assert_free(plane, ada)


def test_a_caller_waits_until_the_lock_is_released(plane: Plane, callers: Callable[[str], Caller]) -> None:
    ada = callers("ada")
    with plane.locks.acquire(TASKS) as held:
        waiting = ada.acquire(row(1), timeout_seconds=PATIENCE_SECONDS)
        until_waiting(plane, 1)
        assert not waiting.done()
        assert held.paths == [("entity_type", "task")]
    assert waiting.result(PATIENCE_SECONDS).paths == [("record_id", "task/1")]
    stats = plane.locks.stats()["entity_type"]
    assert (stats.waits, stats.timeouts, stats.acquisitions) == (1, 0, 1)
    assert stats.wait_seconds_max > 0
    waiting.result().release()
    assert_free(plane, ada)


def test_a_line_is_served_in_order_and_a_newcomer_does_not_pass_it(
    plane: Plane, callers: Callable[[str], Caller]
) -> None:
    ada, bob, cyd = callers("ada"), callers("bob"), callers("cyd")
    held = plane.locks.acquire(row(1), "S")
    first = ada.acquire(row(1), "X", timeout_seconds=PATIENCE_SECONDS)
    until_waiting(plane, 1)
    second = bob.acquire(row(1), "S", timeout_seconds=PATIENCE_SECONDS)  # Shares with `held`, but `first` was before.
    until_waiting(plane, 2)
    assert cyd.tries(row(1), "S") is None
    held.release()
    granted = first.result(PATIENCE_SECONDS)
    assert not second.done()
    granted.release()
    second.result(PATIENCE_SECONDS).release()
    assert_free(plane, ada)


def test_a_lock_that_is_not_released_in_time_is_refused_with_its_holder(
    plane: Plane, callers: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada = callers("ada")
    with plane.locks.acquire(row(1)):
        refused = ada.acquire(row(1), timeout_seconds=0)
        words = r"record_id task/1 was not granted within 0 s: it is held by thread MainThread.* \(X\), and 0 requests"
        with pytest.raises(LockTimeout, match=words):
            refused.result(PATIENCE_SECONDS)
        late = ada.acquire(row(1), timeout_seconds=0.01)
        with pytest.raises(LockTimeout, match=r"within 0\.01 s.*Try again later, or raise timeout_seconds"):
            advance_until_done(clock, late)
            late.result(PATIENCE_SECONDS)
    assert plane.locks.stats()["record_id"].timeouts == 2
    assert_free(plane, ada)


# The order.


def test_locks_against_the_order_are_refused(plane: Plane, callers: Callable[[str], Caller]) -> None:
    with plane.locks.acquire(row(2)):
        with pytest.raises(LockOrderViolation) as earlier:
            plane.locks.acquire(row(1))
        with pytest.raises(LockOrderViolation) as upgrade:
            plane.locks.acquire(TASKS)
        with pytest.raises(LockOrderViolation) as intent:
            plane.locks.acquire(row(1, "note"))
        plane.locks.acquire(row(3)).release()
    assert str(earlier.value) == (
        "record_id task/1 comes before record_id task/2 in lock order, which is already held: waiting for it could "
        "deadlock. Acquire both with acquire_all, or acquire record_id task/1 first"
    )
    assert str(upgrade.value) == (
        "entity_type task is held in mode IX; waiting to upgrade it to X could deadlock. Acquire it in mode X at first"
    )
    assert str(intent.value) == (
        "entity_type note comes before record_id task/2 in lock order, which is already held: waiting for it could "
        "deadlock. Acquire both with acquire_all, or acquire the intent (IX) on entity_type note first"
    )
    assert_free(plane, callers("ada"))


def test_a_caller_that_holds_a_lock_acquires_it_again_without_waiting(
    plane: Plane, callers: Callable[[str], Caller]
) -> None:
    ada, bob = callers("ada"), callers("bob")
    outer = plane.locks.acquire(row(1))
    waiting = ada.acquire(row(1), timeout_seconds=PATIENCE_SECONDS)
    until_waiting(plane, 1)
    with plane.locks.acquire(row(1), "S"), plane.locks.acquire_all([row(1), TASKS], "IS"):
        pass
    assert bob.tries(row(1), "S") is None
    assert not waiting.done()
    outer.release()
    waiting.result(PATIENCE_SECONDS).release()
    assert_free(plane, ada)


def test_several_locks_are_acquired_all_or_none(plane: Plane, callers: Callable[[str], Caller]) -> None:
    ada, bob = callers("ada"), callers("bob")
    paths = [row(3), row(1, "note"), row(1), row(3)]
    with ada.acquire(row(3)).result(PATIENCE_SECONDS):
        with pytest.raises(LockTimeout):
            plane.locks.acquire_all(paths, timeout_seconds=0)
        for path in (row(1), row(1, "note")):
            bob.tries(path).release()
    with plane.locks.acquire_all(paths) as held:
        assert held.paths == [("record_id", "note/1"), ("record_id", "task/1"), ("record_id", "task/3")]
        assert [bob.tries(path) for path in paths] == [None] * 4
    with plane.locks.acquire_all([]) as nothing:
        assert nothing.paths == []
    assert_free(plane, ada)


def test_callers_that_lock_in_any_order_do_not_deadlock(plane: Plane, callers: Callable[[str], Caller]) -> None:
    """Each adds to a number that only the locks protect."""
    numbers, rounds, orders = [0, 0], 5, ([row(1), row(2)], [row(2), row(1)], [TASKS])

    def add(paths: list[list[str]]) -> None:
        for _ in range(rounds):
            with plane.locks.acquire_all(paths, timeout_seconds=PATIENCE_SECONDS):
                before = list(numbers)
                time.sleep(0)  # Let other threads run.
                numbers[:] = [each + 1 for each in before]

    running = [callers(f"caller-{index}").run(partial(add, paths)) for index, paths in enumerate(orders)]
    for each in running:
        each.result(PATIENCE_SECONDS)
    assert numbers == [len(orders) * rounds] * 2
    assert_free(plane, callers("ada"))


# The end of a lock.


def test_a_block_that_raises_releases_its_locks(plane: Plane, callers: Callable[[str], Caller]) -> None:
    with pytest.raises(ZeroDivisionError), plane.locks.acquire(row(1)):
        raise ZeroDivisionError
    assert_free(plane, callers("ada"))


def test_released_locks_are_not_held(plane: Plane, callers: Callable[[str], Caller]) -> None:
    held = plane.locks.acquire(row(1))
    held.check()
    held.release()
    held.release()
    assert not held.is_lost
    with pytest.raises(LeaseExpired, match="These locks were released"):
        held.check()
    with pytest.raises(LeaseExpired, match="These locks were released"):
        plane.atomic().check(held).write("task", "1", {"done": True}).commit()
    assert plane.entities.get("task", "1") is None
    with pytest.raises(Closed, match="already released"):
        held.__enter__()
    assert_free(plane, callers("ada"))


def test_a_thread_may_release_what_another_acquired(plane: Plane, callers: Callable[[str], Caller]) -> None:
    ada = callers("ada")
    held = ada.acquire(row(2)).result(PATIENCE_SECONDS)
    held.release()
    ada.acquire(row(1)).result(PATIENCE_SECONDS).release()  # Nothing that comes after it is held.
    assert_free(plane, ada)


def test_an_atomic_list_checks_its_locks(plane: Plane) -> None:
    with plane.locks.acquire(row(1)) as held:
        answers = plane.atomic().check(held).write("task", "1", {"done": True}).check(held).commit()
        assert [type(answer).__name__ for answer in answers] == ["Committed", "Written", "Committed"]
        assert len(plane.atomic().check(held).commit()) == 1
    assert fields(plane) == {"done": True}


def test_a_transaction_checks_its_locks(plane: Plane) -> None:
    def write(tx: fastness.Transaction) -> int | None:
        tx.put(b"written", b"")
        return fence(tx)

    with plane.locks.acquire(row(1)) as held:
        fence = fastness.fenced(held)
        assert plane.transact(write) == held.fence
    plane.transact(lambda tx: tx.delete(b"written"))
    with pytest.raises(Fenced):
        plane.transact(write)
    assert plane.transact(lambda tx: tx.get(b"written")) is None


INVALID: list[tuple[Callable[[Any], Any], str]] = [
    (lambda locks: locks.acquire("task"), "A path must be a list of a level and a name, not 'task'"),
    (lambda locks: locks.acquire(["table", "task"]), "Unknown lock level 'table'; use one of database, entity_type"),
    (lambda locks: locks.acquire(["record_id", "task/1", "x"]), "has 3 parts"),
    (lambda locks: locks.acquire(["record_id", 7]), "must be strings"),
    (lambda locks: locks.acquire(["database", "main"]), "remove the name 'main'"),
    (lambda locks: locks.acquire(["entity_type", "a/b"]), "write a name without a slash"),
    (lambda locks: locks.acquire(["record_id", "task/"]), "with no empty part"),
    (lambda locks: locks.acquire(["record_id", f"task/{'x' * 513}"]), "at most 512 characters"),
    (lambda locks: locks.acquire(row(1), "Z"), "Unknown lock mode 'Z'; use one of IS, IX, S, X"),
    (lambda locks: locks.acquire(row(1), timeout_seconds=-1), "timeout_seconds must be a number of at least 0"),
    (lambda locks: locks.acquire(row(1), timeout_seconds="1"), "timeout_seconds must be a number of at least 0"),
    (lambda locks: locks.acquire(row(1), lease_seconds=0.5), "lease_seconds is 0.5; give 1 to 3600"),
    (lambda locks: locks.acquire(row(1), lease_seconds=True), "lease_seconds is True; give 1 to 3600"),
    (lambda locks: locks.acquire_all("task"), "acquire_all takes a list of paths"),
    (lambda locks: locks.acquire_all([row(1), "task"]), "A path must be a list"),
]


def test_invalid_arguments_are_refused_with_the_same_words(plane: Plane, callers: Callable[[str], Caller]) -> None:
    for call, words in INVALID:
        with pytest.raises(InvalidArgument) as error:
            call(plane.locks)
        assert words in str(error.value)
    assert_free(plane, callers("ada"))


# Tasks.


async def until_waiting_async(plane: AsyncPlane, number: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum(level.waiting for level in (await plane.locks.stats()).values()) != number:
            await asyncio.sleep(0.001)


async def test_tasks_exclude_each_other_and_each_has_its_own_order(kind: str, url: str, clock: ManualClock) -> None:
    async with open_async(kind, url, clock) as plane:
        order: list[str] = []

        async def hold(name: str, path: list[str]) -> None:
            async with await plane.locks.acquire(path, timeout_seconds=PATIENCE_SECONDS) as held:
                held.check()
                order.append(name)

        outer = await plane.locks.acquire(row(2))
        with pytest.raises(LockOrderViolation):
            await plane.locks.acquire(row(1))
        waiting = []
        for number, name in enumerate(("ada", "bob", "cyd")):
            waiting.append(asyncio.create_task(hold(name, row(2))))
            await until_waiting_async(plane, number + 1)
        await asyncio.create_task(hold("dan", row(1)))  # Another task is another caller, with an order of its own.
        await outer.release()
        await asyncio.gather(*waiting)
        assert order == ["dan", "ada", "bob", "cyd"]
        assert [level.holders for level in (await plane.locks.stats()).values()] == [0, 0, 0]


async def test_a_cancelled_task_leaves_nothing_behind(kind: str, url: str, clock: ManualClock) -> None:
    async with open_async(kind, url, clock) as plane:

        async def wait() -> None:
            await plane.locks.acquire_all([row(1), row(2)], timeout_seconds=PATIENCE_SECONDS)

        async with await plane.locks.acquire(row(2)):
            waiting = asyncio.create_task(wait())
            await until_waiting_async(plane, 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until_waiting_async(plane, 0)

            async def is_free() -> bool:
                try:
                    held = await plane.locks.acquire(row(1), timeout_seconds=0)
                except LockTimeout:
                    return False
                await held.release()
                return True

            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await asyncio.create_task(is_free()):
                    await asyncio.sleep(0.001)
        async with await plane.locks.acquire(DATABASE, timeout_seconds=0) as held:
            with pytest.raises(ZeroDivisionError):
                async with await plane.locks.acquire(DATABASE):
                    raise ZeroDivisionError
            assert len(await plane.atomic().check(held).commit()) == 1
        with pytest.raises(LeaseExpired):
            held.check()
        assert (await plane.locks.sessions()).sessions == []


@pytest.mark.parametrize("kind", ["memory"])
def test_a_lock_of_one_process_has_no_fence(plane: Plane) -> None:
    with plane.locks.acquire(row(1), lease_seconds=60) as held:
        assert (held.fence, held.fences, held.proof, held.is_lost) == (None, {}, None, False)


# Locks that processes share: leases and fences.


@shared
def test_a_fence_grows_with_every_grant(plane: Plane) -> None:
    fences = []
    for mode in ("X", "S", "X"):
        with plane.locks.acquire_all([row(2), row(1)], mode) as held:
            assert held.fence == held.fences["record_id", "task/1"]
            assert held.proof is not None
            assert (held.proof.level, held.proof.name, held.proof.fence) == ("record_id", "task/1", held.fence)
            with plane.locks.acquire(row(2)) if mode == "X" else held as again:
                assert again.fences.items() <= held.fences.items()
            fences.append(list(held.fences.values()))
    assert fences == [[1, 1], [2, 2], [3, 3]]


@shared
def test_a_session_is_listed_with_what_it_holds_and_waits_for(plane: Plane, callers: Callable[[str], Caller]) -> None:
    ada = callers("ada")
    with plane.locks.acquire(row(1), lease_seconds=60):
        waiting = ada.acquire(TASKS, "S", timeout_seconds=PATIENCE_SECONDS)
        until_waiting(plane, 1)
        listed = {each.owner.split(" of process ")[0]: each for each in plane.locks.sessions().sessions}
        assert sorted(listed) == ["thread MainThread", "thread ada_0"]
        session = listed["thread MainThread"]
        assert session.expires_ms - session.since_ms == 60_000
        assert [(each.level, each.name, each.mode) for each in session.locks] == [
            ("database", "", "IX"),
            ("entity_type", "task", "IX"),
            ("record_id", "task/1", "X"),
        ]
        assert [(each.mode, each.is_intent, each.is_waiting) for each in listed["thread ada_0"].locks] == [
            ("IS", True, False),
            ("S", False, True),
        ]
        page = plane.locks.sessions(limit=1)
        rest = plane.locks.sessions(after=page.next or "", limit=10)
        assert {each.number for each in (*page.sessions, *rest.sessions)} == {each.number for each in listed.values()}
    waiting.result(PATIENCE_SECONDS).release()
    assert_free(plane, ada)


@shared
@pytest.mark.parametrize("how", ["expired", "ended"])
def test_a_lost_lock_fences_its_holder(
    plane: Plane, callers: Callable[[str], Caller], clock: ManualClock, how: str
) -> None:
    """The plane's clock moves only here; a renewal is due after a third of a second of real time."""
    ada = callers("ada")
    held = plane.locks.acquire(row(1), lease_seconds=1)
    also = plane.locks.acquire(row(2))
    if how == "expired":
        clock.advance_ms(10_000)
        heir = ada.tries(row(1))
    else:
        waiting = ada.acquire(row(1), timeout_seconds=PATIENCE_SECONDS)
        until_waiting(plane, 1)
        numbers = [each.number for each in plane.locks.sessions().sessions if "MainThread" in each.owner]
        assert [plane.locks.end_session(number) for number in numbers * 2] == [True, False]
        heir = waiting.result(PATIENCE_SECONDS)
    assert heir.fence > held.fence
    ada.run(lambda: plane.atomic().check(heir).write("task", "1", {"by": "heir"}).commit()).result(PATIENCE_SECONDS)

    stale = plane.atomic().check(held).write("task", "1", {"by": "stale"})
    with pytest.raises(Fenced):  # Whether or not the holder has noticed it.
        stale.commit()
    eventually(lambda: held.is_lost)
    assert also.is_lost
    for refused in (
        held.check,
        also.check,
        stale.commit,
        lambda: plane.locks.acquire(row(3)),
        lambda: plane.entities.write("task", "1", {"by": "stale"}),
    ):
        with pytest.raises(Fenced):
            refused()
    with pytest.raises(Fenced), held:
        pass
    with pytest.raises(ZeroDivisionError), also:
        raise ZeroDivisionError  # The error of the block matters more.
    assert fields(plane) == {"by": "heir"}
    plane.locks.acquire(row(3)).release()  # All that was lost is released, so a new session starts.
    heir.release()
    assert_free(plane, ada)


@shared
def test_a_holder_that_lost_its_lock_before_the_end_of_its_block_is_told(plane: Plane, clock: ManualClock) -> None:
    with pytest.raises(LeaseExpired, match=r"record_id task/1 ended before its block did"):  # noqa: SIM117
        with plane.locks.acquire(row(1), lease_seconds=600):
            clock.advance_ms(600_000)


@shared
def test_a_transaction_under_a_lost_lock_writes_nothing(plane: Plane, clock: ManualClock) -> None:
    held = plane.locks.acquire(row(1), lease_seconds=600)
    fence = fastness.fenced(held)
    clock.advance_ms(600_000)

    def write(tx: fastness.Transaction) -> None:
        tx.put(b"written", b"")
        fence(tx)

    with pytest.raises(LeaseExpired):
        plane.transact(write)
    assert plane.transact(lambda tx: tx.get(b"written")) is None


@shared
def test_a_held_lock_is_renewed_while_its_holder_works(plane: Plane, clock: ManualClock) -> None:
    def expires_ms() -> int:
        return plane.locks.sessions().sessions[0].expires_ms

    with plane.locks.acquire(row(1), lease_seconds=1.5) as held:
        before = expires_ms()
        clock.advance_ms(1_000)
        eventually(lambda: expires_ms() == before + 1_000)
        clock.advance_ms(1_000)
        assert not held.is_lost
        assert len(plane.atomic().check(held).commit()) == 1


@shared
def test_a_waiting_caller_is_renewed_and_gets_the_lock_of_a_crashed_holder(
    plane: Plane, callers: Callable[[str], Caller], clock: ManualClock
) -> None:
    """The crashed holder is a session that no one renews."""
    ada = callers("ada")
    crashed = callers("crashed")
    lost = crashed.acquire(row(1), lease_seconds=30).result(PATIENCE_SECONDS)
    lost._session._renewal.stop()
    waiting = ada.acquire(row(1), timeout_seconds=3_600, lease_seconds=10)
    until_waiting(plane, 1)

    def expires_ms(name: str) -> int:
        return next((each.expires_ms for each in plane.locks.sessions().sessions if name in each.owner), 0)

    for _ in range(5):
        clock.advance_ms(5_000)  # More than its lease in all, so that its session has to be renewed.
        eventually(lambda: expires_ms("ada") == clock.now_ms() + 10_000)
    assert not waiting.done()
    clock.advance_ms(5_000)
    heir = waiting.result(PATIENCE_SECONDS)
    assert heir.fence == 2
    heir.release()
    assert_free(plane, ada)


@shared
def test_locks_that_are_dropped_without_a_release_end_with_their_lease(
    plane: Plane, callers: Callable[[str], Caller], clock: ManualClock
) -> None:
    ada = callers("ada")
    plane.locks.acquire(row(1), lease_seconds=1)
    assert plane._transport.lock_sessions.find("main") is None
    assert ada.tries(row(1)) is None
    clock.advance_ms(1_000)
    heir = ada.tries(row(1))
    assert heir is not None
    heir.release()
