"""Ordered locks and entities: a lock excludes durable writes of others, in one process and where processes share locks.

`test_through_client` runs these tests against a server, too.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane, TierPolicy
from fastness.errors import InvalidArgument, LeaseExpired, LockOrderViolation, LockTimeout
from fastness.layers import field_tiers
from fastness.testing.clock import ManualClock
from fastness.wire.locks import AcquireLocks, LockSession
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than any test needs.
DATABASE, TASKS, ROW = ["database"], ["entity_type", "task"], ["record_id", "task/1"]
POLICY = TierPolicy(records={"task_*": "task"})

in_one_process = pytest.mark.parametrize("kind", ["memory", "dir"])
shared = pytest.mark.parametrize("kind", ["served", "postgres"])


@pytest.fixture(params=["memory", "dir", "served", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plane(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Plane]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # Session logs are stored here with PostgreSQL.
    url = f"dir:{tmp_path / 'data'}" if kind == "dir" else "memory:"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    with fastness.open(url, clock=clock, tiers=POLICY) as plane:
        if kind == "served":
            plane._transport.services.shared_locks = True  # type: ignore[attr-defined]  # As a server does.
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(8)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)


def result(future: "Future[Any]") -> Any:
    return future.result(PATIENCE_SECONDS)


def waiting(plane: Plane) -> int:
    return sum(level.waiting for level in plane.locks.stats().values())


def held(plane: Plane) -> int:
    return sum(level.holders for level in plane.locks.stats().values())


@pytest.mark.parametrize(
    ("path", "mode"), [(DATABASE, "X"), (TASKS, "X"), (TASKS, "S"), (ROW, "X"), (["record_id", "task/1"], "S")]
)
def test_a_lock_excludes_durable_writes_of_others_until_its_release(
    plane: Plane, threads: ThreadPoolExecutor, path: list[str], mode: str
) -> None:
    plane.entities.write("task", "1", {"status": "open", "note": 0})
    transaction = plane.entities.transaction()
    transaction.write("task", "0", "metrics", 1)  # Needs no lock itself.
    transaction.write("task", "1", "note", 1)
    with plane.locks.acquire(path, mode):
        writes: list[Future[Any]] = [
            threads.submit(plane.entities.write, "task", "1", {"status": "done"}),
            threads.submit(plane.entities.write, "task", "1", {"note": 2}),
            threads.submit(plane.entities.update, "task", "1", lambda _: {"seen": True}),
            threads.submit(transaction.commit),
        ]
        eventually(lambda: waiting(plane) == len(writes))
        result(threads.submit(plane.entities.write, "task", "1", {"ml_score": 1}))  # BEST_EFFORT excludes no one.
        assert result(threads.submit(plane.entities.get, "task", "1")).version == 1
        assert [each for each in writes if each.done()] == []
    assert sorted(result(each).versions[-1] for each in writes) == [2, 3, 4, 5]
    assert plane.entities.get("task", "1").fields["status"] == "done"
    with plane.locks.acquire(path, mode):
        put = threads.submit(plane.entities.put_if_version, "task", "1", {"note": 3}, expected_version=5)
        eventually(lambda: waiting(plane) == 1)
    assert result(put).versions == [6]
    with plane.locks.acquire(path, mode):
        deleted = threads.submit(plane.entities.delete, "task", "1")
        eventually(lambda: waiting(plane) == 1)
    assert result(deleted) is True
    assert held(plane) == 0


def test_locks_of_other_rows_and_intents_exclude_no_write(plane: Plane, threads: ThreadPoolExecutor) -> None:
    with plane.locks.acquire_all([["record_id", "task/2"], ["entity_type", "note"]]):
        result(threads.submit(plane.entities.write, "task", "1", {"status": "done", "note": 1}))
    with plane.locks.acquire(TASKS, "IX"):
        result(threads.submit(plane.entities.write, "task", "1", {"status": "done", "note": 1}))
    assert plane.entities.get("task", "1").version == 2


@pytest.mark.parametrize("path", [DATABASE, TASKS, ROW])
def test_a_holder_writes_what_it_has_locked(plane: Plane, path: list[str]) -> None:
    entities = plane.entities
    with plane.locks.acquire(path):
        entities.write("task", "1", {"status": "open"})
        entities.write("task", "1", {"note": 1})
        with entities.transaction() as transaction:
            transaction.write("task", "1", "note", 2)
        plane.atomic().write("task", "1", {"note": 3}).commit()
        entities.update("task", "1", lambda entity: {"note": entity.fields["note"] + 1})
        entities.put_if_version("task", "1", {"note": 5}, expected_version=5)
        assert entities.get("task", "1").version == 6
        assert entities.delete("task", "1")
    assert held(plane) == 0


def test_a_write_that_times_out_writes_nothing_and_leaves_no_lock(
    plane: Plane, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.entities.write("task", "1", {"status": "open"})
    monkeypatch.setattr("fastness.limits.LOCK_WAIT_SECONDS", 0)
    with plane.locks.acquire(TASKS):
        before = held(plane)
        for write in (
            partial(plane.entities.write, "task", "1", {"note": 1}),
            partial(plane.entities.put_if_version, "task", "1", {"status": "x"}, expected_version=1),
            partial(plane.entities.delete, "task", "1"),
        ):
            with pytest.raises(
                LockTimeout, match=r"entity_type task was not granted within 0 s: it is held by .*thread"
            ):
                result(threads.submit(write))
        assert held(plane) == before
    found = plane.entities.get("task", "1")
    assert (found.version, found.fields, held(plane)) == (1, {"status": "open"}, 0)


def test_a_write_that_could_deadlock_is_refused_at_once(plane: Plane, threads: ThreadPoolExecutor) -> None:
    """The caller waits only for locks after its own, also when a write waits for it."""
    held_by_other = result(threads.submit(plane.locks.acquire, ROW))
    with plane.locks.acquire(["record_id", "task/2"]):
        for write in (
            partial(plane.entities.write, "task", "1", {"note": 1}),
            partial(plane.entities.delete, "task", "1"),
        ):
            with pytest.raises(LockOrderViolation, match="comes before record_id task/2"):
                write()
    held_by_other.release()
    assert plane.entities.get("task", "1") is None


def test_an_atomic_list_does_not_wait_and_writes_nothing(plane: Plane, threads: ThreadPoolExecutor) -> None:
    jobs = plane.queue("jobs")

    def commit() -> Any:
        return plane.atomic().put(jobs, 1).write("task", "1", {"note": 1, "ml_x": 2}).commit()

    with plane.locks.acquire(TASKS, "S"):
        with pytest.raises(LockTimeout, match="task"):
            result(threads.submit(commit))
        only_best_effort = plane.atomic().put(jobs, 2).write("task", "1", {"ml_x": 1})
        result(threads.submit(only_best_effort.commit))
        assert (plane.entities.get("task", "1"), jobs.stats().ready) == (None, 1)
    result(threads.submit(commit))
    assert (plane.entities.get("task", "1").version, jobs.stats().ready, held(plane)) == (1, 2, 0)


def test_a_write_in_the_callers_own_transaction_does_not_wait(postgres_url: str, threads: ThreadPoolExecutor) -> None:
    import psycopg

    with fastness.open(postgres_url) as plane, psycopg.connect(postgres_url) as connection:
        within = plane.within(connection)
        taken = result(threads.submit(plane.locks.acquire, TASKS))
        with pytest.raises(LockTimeout, match="a commit of several operations does not wait"):
            within.entities.write("task", "1", {"note": 1})
        connection.rollback()
        taken.release()
        with plane.locks.acquire(TASKS):
            within.entities.write("task", "1", {"note": 2})
            connection.commit()
        with pytest.raises(LeaseExpired), plane.locks.acquire(TASKS):
            plane.locks.end_session(plane.locks.sessions().sessions[0].number)
            with pytest.raises(LeaseExpired, match="has ended"):
                within.entities.write("task", "1", {"note": 3})
            connection.rollback()
        assert plane.entities.get("task", "1").fields["note"] == 2


@shared
def test_a_lock_whose_lease_has_ended_excludes_no_write(plane: Plane, clock: ManualClock) -> None:
    """A crashed holder delays writers by its lease at most."""
    crashed = LockSession("0123456789abcdef0123456789abcdef")
    plane._transport.call(AcquireLocks(crashed, "claim", [TASKS], lease_seconds=5, owner="crashed"))
    with pytest.raises(LockTimeout, match="crashed"):
        plane.atomic().write("task", "1", {"note": 1}).commit()
    clock.advance_ms(5_000)
    assert plane.atomic().write("task", "1", {"note": 1}).commit()[0].versions == [1]
    assert plane.entities.write("task", "1", {"status": "done"}).versions == [2]


@shared
@pytest.mark.parametrize("path", [DATABASE, TASKS, ROW, ["record_id", "task/2"]])
def test_a_holder_whose_session_has_ended_does_not_overwrite(
    plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor, path: list[str]
) -> None:
    """It was suspended, and has not noticed the end of its lease: what it has read may have changed since."""
    plane.entities.write("task", "1", {"note": 1})
    held = plane.locks.acquire(path, lease_seconds=600)
    clock.advance_ms(600_000)

    def write_as_heir() -> None:
        with plane.locks.acquire(path):
            plane.entities.write("task", "1", {"note": 100})

    result(threads.submit(write_as_heir))
    transaction = plane.entities.transaction()
    transaction.write("task", "1", "note", 2)
    for write in (
        lambda: plane.entities.write("task", "1", {"note": 2}),
        lambda: plane.entities.write("task", "1", {"status": "done"}),
        lambda: plane.entities.update("task", "1", lambda _: {"note": 2}),
        lambda: plane.entities.put_if_version("task", "1", {"note": 2}, expected_version=2),
        transaction.commit,
        plane.atomic().write("task", "1", {"note": 2}).commit,
        lambda: plane.entities.delete("task", "1"),
    ):
        with pytest.raises(LeaseExpired, match="has ended"):
            write()
    assert plane.entities.get("task", "1").fields == {"note": 100}
    plane.queue("jobs").put(1)
    plane.entities.write("task", "1", {"ml_score": 1})  # BEST_EFFORT: no lock excludes it.
    with pytest.raises(LeaseExpired), held:
        pass
    assert plane.entities.write("task", "1", {"note": 3}).versions == [3]


@shared
def test_a_holder_that_knows_of_its_loss_does_not_ask_the_plane(plane: Plane) -> None:
    held = plane.locks.acquire(["entity_type", "note"], lease_seconds=600)
    held._session._renewal._lose(LeaseExpired("no renewal was answered in time"))  # type: ignore[attr-defined]
    for write in (
        partial(plane.entities.write, "task", "1", {"note": 2}),
        plane.atomic().write("task", "1", {"note": 2}).commit,
    ):
        with pytest.raises(LeaseExpired, match="no renewal was answered in time"):
            write()
    plane.atomic().put(plane.queue("jobs"), 1).commit()  # It writes no entity.
    with pytest.raises(LeaseExpired), held:
        pass
    assert plane.entities.write("task", "1", {"note": 2}).versions == [1]


@in_one_process
def test_the_first_lock_waits_for_writes_that_take_none(
    plane: Plane, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IMPORTANT writes lock nothing before a caller uses locks, and the first caller waits for those that run."""
    began, may_end, write = threading.Event(), threading.Event(), field_tiers.write

    def slow(*args: Any, **kwargs: Any) -> Any:
        began.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return write(*args, **kwargs)

    monkeypatch.setattr(field_tiers, "write", slow)
    writing = threads.submit(plane.entities.write, "task", "1", {"note": 1})
    assert began.wait(PATIENCE_SECONDS)
    table = plane._transport.services.locks("main")  # type: ignore[attr-defined]
    acquiring = threads.submit(plane.locks.acquire, TASKS)
    eventually(lambda: table.has_callers)
    assert not acquiring.done()
    may_end.set()
    with result(acquiring):
        assert writing.done() or result(writing)
        assert plane.entities.get("task", "1").version == 1


def test_what_is_locked_does_not_change(plane: Plane, threads: ThreadPoolExecutor) -> None:
    """Callers lock and write at random: a holder sees its own changes only."""

    def run(seed: int) -> int:
        choose, writes = random.Random(seed), 0
        for _ in range(12):
            id = choose.choice("12")
            fields = choose.choice(({"status": seed}, {"note": seed}))
            if choose.random() < 0.5:
                plane.entities.write("task", id, fields)
                writes += 1
                continue
            path = choose.choice((DATABASE, TASKS, ["record_id", f"task/{id}"]))
            with plane.locks.acquire(path, timeout_seconds=PATIENCE_SECONDS):
                before = getattr(plane.entities.get("task", id), "version", 0)
                plane.entities.write("task", id, fields)
                writes += 1
                assert plane.entities.get("task", id).version == before + 1
        return writes

    writes = sum(result(each) for each in [threads.submit(run, seed) for seed in range(4)])
    assert sum(each.version for each in plane.entities.scan("task")) == writes
    assert held(plane) == 0


# Records that are named by their id alone.


def test_the_policy_gives_the_type_of_a_record(plane: Plane, threads: ThreadPoolExecutor) -> None:
    with plane.locks.acquire(["record_id", "task_123"]) as locked:
        assert locked.paths == [("record_id", "task/task_123")]
        with pytest.raises(LockTimeout):
            result(threads.submit(plane.atomic().write("task", "task_123", {"note": 1}).commit))
        with pytest.raises(LockTimeout):
            result(threads.submit(plane.locks.acquire, ["record_id", "task/task_123"], timeout_seconds=0))
    with plane.locks.acquire_all([["record_id", "task_2"], ["record_id", "task/task_1"]]) as locked:
        assert locked.paths == [("record_id", "task/task_1"), ("record_id", "task/task_2")]


@pytest.mark.parametrize("id", ["order_7", "7", "_7"])
def test_a_record_without_a_type_is_refused_with_names_that_work(plane: Plane, id: str) -> None:
    with pytest.raises(InvalidArgument, match="for the level record_id; write type/id") as refused:
        plane.locks.acquire(["record_id", id])
    text = str(refused.value)
    name = text.partition('like "')[2].partition('"')[0]
    with plane.locks.acquire(["record_id", name]) as locked:
        assert locked.paths == [("record_id", name)]
    policy = eval("TierPolicy" + text.partition("TierPolicy")[2])
    assert policy.record_name(id) == name
