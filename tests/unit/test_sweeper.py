"""The sweeper by itself: when it wakes up, what it attends to, and what it survives. Time is moved by the tests."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.backends.memory import MemoryDatabase
from holdfast.clock import SystemClock
from holdfast.errors import Closed, Unreachable
from holdfast.layers import queues
from holdfast.layers.queues import NEVER_MS, QueueKey
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.runtime.maintenance import sweeper as sweeper_module
from holdfast.runtime.maintenance.sweeper import Sweeper
from holdfast.testing.clock import ManualClock
from holdfast.wire.queues import NewMessage, QueuePolicy

DEADLINE_SECONDS = 30.0  # Nothing here takes long; a thread that does not do what it should must fail the test.
JOBS, MAIL = QueueKey("main", "jobs"), QueueKey("other", "mail")


class Bed(threading.Condition):
    """A condition on which a thread sleeps until somebody notifies it; `asleep` has how long it meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep: SimpleQueue[float | None] = SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self.asleep.put(timeout)
        return super().wait(DEADLINE_SECONDS)


class WatchedDatabase(MemoryDatabase):
    """Says what is done with it, and fails when it is told to."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.attended: list[QueueKey] = []
        self.looks = 0  # At all queues there are.
        self.error: Exception | None = None

    def transact(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if work is queues.sweep_and_collect_events:
            if self.error is not None:
                raise self.error
            self.attended.append(args[0])
        return super().transact(work, *args, **kwargs)

    def read(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("after") == "" and not args:
            self.looks += 1
            if self.error is not None:
                raise self.error
        return super().read(work, *args, **kwargs)


class Day:
    """The sweeper, its time, and its database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.monotonic = 1_000.0
        self.bed = Bed()
        self.told: list[tuple[Any, ...]] = []
        self.database = WatchedDatabase(self.clock)
        self.sweeper: Sweeper | None = None
        threads = SimpleNamespace(
            Condition=lambda: self.bed, Thread=threading.Thread, TIMEOUT_MAX=threading.TIMEOUT_MAX
        )
        monkeypatch.setattr(sweeper_module, "threading", threads)
        monkeypatch.setattr(sweeper_module, "time", SimpleNamespace(monotonic=lambda: self.monotonic))
        monkeypatch.setattr(sweeper_module, "SystemClock", lambda: self.clock)

    def start(self, *, shared: bool = False) -> float | None:
        """Start the sweeper; how long it means to sleep when it has looked at everything."""
        waits = ConsumerOptions(poll_seconds=3.0, poll_jitter_seconds=0.0)
        self.sweeper = Sweeper(self.database, waits, self.told.extend, shared=shared)
        return self.until_asleep()

    def until_asleep(self) -> float | None:
        seconds = self.bed.asleep.get(timeout=DEADLINE_SECONDS)
        while not self.bed.asleep.empty():
            seconds = self.bed.asleep.get()
        return seconds

    def advance(self, seconds: float) -> float | None:
        """Let time pass; how long the sweeper means to sleep after it did what there was to do."""
        with self.bed:
            self.monotonic += seconds
            self.clock.advance_ms(round(seconds * 1_000))
            self.bed.notify()
        return self.until_asleep()

    def schedule(self, queue: QueueKey, in_seconds: float) -> None:
        assert self.sweeper is not None
        self.sweeper.schedule(queue, self.clock.now_ms() + round(in_seconds * 1_000))

    def put(self, queue: QueueKey, payload: bytes = b"", **options: Any) -> None:
        self.database.transact(queues.put, queue, [NewMessage(payload, **options)])

    def stats(self, queue: QueueKey) -> Any:
        return self.database.read(queues.stats, queue)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    day = Day(monkeypatch)
    yield day
    if day.sweeper is not None:
        day.sweeper.stop()
    day.database.close()


def is_running() -> bool:
    return any(thread.name == "holdfast-sweeper" for thread in threading.enumerate())


def test_what_is_due_at_the_start_is_attended_to_in_every_queue_of_every_universe(day: Day) -> None:
    """Lesson 13: nothing waits for somebody to look."""
    for queue in (JOBS, MAIL):
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.start()
    assert sorted(day.database.attended) == [JOBS, MAIL]
    for queue in (JOBS, MAIL):
        assert (day.stats(queue).ready, day.stats(queue).delayed) == (1, 0)


def test_more_queues_than_a_page_are_all_found(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_module, "_PAGE", 2)
    every = [QueueKey(universe, f"q{number}") for universe in ("a", "b") for number in range(5)]
    for queue in every:
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.start()
    assert sorted(day.database.attended) == every


def test_it_sleeps_until_the_earliest_moment_and_not_longer(day: Day) -> None:
    day.put(JOBS, delay_seconds=20)
    day.put(MAIL, delay_seconds=5)
    assert day.start() == 5
    assert day.database.attended == []
    assert day.advance(4.9) == pytest.approx(0.1)
    assert day.database.attended == []
    assert day.advance(0.1) == 15
    assert day.database.attended == [MAIL]
    day.advance(15)
    assert day.database.attended == [MAIL, JOBS]
    assert (day.stats(JOBS).ready, day.stats(MAIL).ready) == (1, 1)


def test_with_nothing_due_it_sleeps_for_good(day: Day) -> None:
    day.put(JOBS)
    seconds = day.start()
    assert seconds is not None
    assert seconds > 1_000_000
    assert day.database.attended == []


def test_an_earlier_moment_wakes_it_and_a_later_one_does_not(day: Day) -> None:
    day.put(JOBS, delay_seconds=20)
    assert day.start() == 20
    day.put(MAIL, delay_seconds=30)
    day.schedule(MAIL, 30)
    assert day.bed.asleep.empty()
    day.put(JOBS, delay_seconds=2)
    day.schedule(JOBS, 2)
    assert day.until_asleep() == 2
    assert day.advance(2) == 18
    assert day.database.attended == [JOBS]
    assert (day.stats(JOBS).ready, day.stats(JOBS).delayed) == (1, 1)
    assert day.advance(18) == 10
    assert day.advance(10) is not None
    assert day.database.attended == [JOBS, JOBS, MAIL]


def test_a_moment_that_was_told_twice_is_attended_to_once(day: Day) -> None:
    day.start()
    day.put(JOBS, delay_seconds=2)
    for _ in range(3):
        day.schedule(JOBS, 2)
    day.schedule(JOBS, 3)
    day.until_asleep()
    day.advance(2)
    day.advance(1)
    assert day.database.attended == [JOBS]


def test_a_moment_for_nothing_does_no_harm(day: Day) -> None:
    """What was due may be gone by then."""
    day.put(JOBS)
    day.start()
    day.schedule(JOBS, 2)
    day.until_asleep()
    day.advance(2)
    assert day.database.attended == []
    day.schedule(JOBS, (NEVER_MS - day.clock.now_ms()) / 1_000)
    assert day.bed.asleep.empty()


def test_more_than_one_transaction_can_attend_to_is_attended_to(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.layers.queues.expiry.DUE_BATCH_MAX", 3)
    for _ in range(10):
        day.put(JOBS, delay_seconds=5)
    day.start()
    day.advance(5)
    assert day.stats(JOBS).ready == 10
    assert len(day.database.attended) == 4


def test_a_queue_that_has_very_much_due_does_not_hold_up_the_others(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.layers.queues.expiry.DUE_BATCH_MAX", 1)
    monkeypatch.setattr(sweeper_module, "_TRANSACTIONS_MAX", 2)
    for _ in range(6):
        day.put(JOBS, delay_seconds=4)
    day.put(MAIL, delay_seconds=4.5)
    day.start()
    day.advance(5)
    assert (day.stats(JOBS).ready, day.stats(MAIL).ready) == (6, 1)
    assert day.database.attended.index(MAIL) < 6, "it had its turn in between"


def test_a_consumer_that_crashed_drives_its_message_to_the_dead_letters(day: Day) -> None:
    """Lesson 7: with nobody else looking at the queue."""
    day.database.transact(queues.set_policy, JOBS, QueuePolicy(max_attempts=1, visibility_seconds=10))
    day.put(JOBS, b"deadly")
    day.database.transact(queues.lease, JOBS, owner="crashes")
    day.start()
    day.advance(10)
    assert (day.stats(JOBS).leased, day.stats(JOBS).dead, day.stats(JOBS).expired_total) == (0, 1, 1)
    assert [note[0] for note in day.told if note[0] != queues.DUE] == ["expired", "dead-lettered"]


def test_a_schedule_strikes_again_and_again(day: Day) -> None:
    day.database.transact(
        queues.set_schedule, JOBS, "minutely", cron="* * * * *", timezone="UTC", message=NewMessage(b"tick")
    )
    day.start()
    for _ in range(5):
        day.advance(60)
    assert day.stats(JOBS).ready == 5


def test_errors_of_the_database_are_survived(day: Day, caplog: pytest.LogCaptureFixture) -> None:
    day.put(JOBS, delay_seconds=5)
    day.start()
    day.database.error = Unreachable("PostgreSQL is away")
    with caplog.at_level(logging.WARNING, "holdfast.sweeper"):
        assert day.advance(5) == 1, "it tries again soon"
        assert "PostgreSQL is away" in caplog.text
        day.advance(1)
        day.database.error = None
        day.advance(1)
    assert day.database.attended == [JOBS]
    assert day.stats(JOBS).ready == 1


def test_an_error_at_the_start_is_survived(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.database.error = Unreachable("not yet")
    assert day.start() == 1
    day.database.error = None
    day.advance(1)
    assert day.database.attended == [JOBS]


def test_after_an_error_what_others_wait_for_is_not_put_off(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.put(MAIL, delay_seconds=5.5)
    day.start()
    day.database.error = Unreachable("for a moment")
    day.advance(5)
    day.database.error = None
    day.advance(0.5)
    assert day.database.attended == [MAIL]
    day.advance(0.5)
    assert day.database.attended == [MAIL, JOBS]


def test_a_database_that_was_closed_is_its_end(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.start()
    day.database.error = Closed("closed")
    with day.bed:
        day.clock.advance_ms(5_000)
        day.bed.notify()
    assert day.sweeper is not None
    day.sweeper._thread.join(DEADLINE_SECONDS)
    assert not is_running()


def test_it_stops_out_of_its_sleep(day: Day) -> None:
    day.put(JOBS, delay_seconds=3_600)
    day.start()
    assert is_running()
    assert day.sweeper is not None
    day.sweeper.stop()
    assert not is_running()
    day.sweeper.stop()
    day.schedule(JOBS, 0)
    assert day.database.attended == []


def test_it_stops_between_two_transactions_of_one_queue(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.layers.queues.expiry.DUE_BATCH_MAX", 1)
    for _ in range(50):
        day.put(JOBS, delay_seconds=5)
    day.start()
    assert day.sweeper is not None
    sweeper, entered, leave = day.sweeper, threading.Event(), threading.Event()

    def told(events: list[tuple[Any, ...]]) -> None:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)

    sweeper._publish = told
    with day.bed:
        day.clock.advance_ms(5_000)
        day.bed.notify()
    assert entered.wait(DEADLINE_SECONDS)
    stopping = threading.Thread(target=sweeper.stop)
    stopping.start()
    while not sweeper._stopping:
        time.sleep(0)
    leave.set()
    stopping.join(DEADLINE_SECONDS)
    assert not is_running()
    assert len(day.database.attended) == 1


def test_where_others_write_too_it_looks_at_all_queues_every_few_seconds(day: Day) -> None:
    assert day.start(shared=True) == 3
    assert day.database.looks == 1
    day.put(JOBS, delay_seconds=4)  # By another process, which tells only its own sweeper.
    assert day.advance(3) == 1
    assert day.database.looks == 2
    assert day.advance(1) == 2
    assert day.database.attended == [JOBS]
    assert day.database.looks == 2
    day.advance(2)
    assert day.database.looks == 3


def test_where_nobody_else_writes_it_looks_at_all_queues_once(day: Day) -> None:
    day.start(shared=False)
    for _ in range(5):
        day.put(JOBS, delay_seconds=1)
        day.schedule(JOBS, 1)
        day.until_asleep()
        day.advance(3_600)
    assert day.database.looks == 1
    assert day.stats(JOBS).ready == 5


def test_a_clock_that_runs_ahead_of_the_databases_own_costs_no_thousand_transactions(day: Day) -> None:
    """On PostgreSQL transactions go by another clock: what is due by this one may not be due by that one."""
    day.put(JOBS, delay_seconds=5)
    behind = ManualClock(day.clock.now_ms())
    day.database._clock = behind
    day.start()
    rounds = threading.Event()
    process_due = day.database.transact

    def counted(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = process_due(work, *args, **kwargs)
        if len(day.database.attended) >= 1_000:
            behind.jump_to_ms(day.clock.now_ms())
            rounds.set()
        return result

    day.database.transact = counted  # type: ignore[method-assign]
    day.advance(5)
    assert not rounds.is_set(), "1,000 transactions for one message that was not due yet"


@pytest.mark.parametrize("kind", ["delayed", "outlived", "scheduled"])
def test_a_plane_that_is_opened_again_attends_to_what_its_queues_have_due(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody writing or receiving: the sweeper starts with the plane, not with the first thing that is noted."""
    with holdfast.open(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        if kind == "scheduled":
            jobs.schedule("minutely", "* * * * *", "tick")
        else:
            jobs.put("x", **{"delay_seconds" if kind == "delayed" else "ttl_seconds": 30.0})
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: time.time_ns() // 1_000_000 + 120_000)
    expected = {"delayed": (1, 0), "outlived": (0, 0), "scheduled": (1, 0)}[kind]
    with holdfast.open(f"dir:{tmp_path}") as plane:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            stats = plane.queue("jobs").stats()
            if (stats.ready, stats.delayed) == expected:
                return
            time.sleep(0.02)
    pytest.fail(f"two minutes later it is {stats.ready} ready and {stats.delayed} delayed")


def test_a_queue_that_is_damaged_keeps_none_of_the_others_from_being_swept(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither those that a look at all finds behind it, nor itself once it is well again."""
    for queue in (JOBS, MAIL):
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    due_in, is_damaged = queues.due_in, True

    def read(tx: Any, queue: QueueKey) -> int:
        if is_damaged and queue == JOBS:
            raise ZeroDivisionError("damaged")
        return due_in(tx, queue)

    monkeypatch.setattr(queues, "due_in", read)
    assert day.start() == 1, "it is tried again soon"
    assert day.database.attended == [MAIL]
    assert "unexpected error while sweeping queue main/jobs" in caplog.text
    assert day.advance(1) == 1
    is_damaged = False
    day.advance(1)
    assert day.database.attended == [MAIL, JOBS]


def test_a_look_at_all_queues_that_fails_in_a_way_that_nobody_thought_of_is_made_again(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.database.error = ZeroDivisionError()
    assert day.start() == 1
    day.database.error = None
    day.advance(1)
    assert day.database.attended == [JOBS]
