"""The sweeper: when it wakes up, what it processes, and which errors it survives. The tests move the time."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.clock import SystemClock
from fastness.errors import Unreachable
from fastness.kv import Database, Event
from fastness.layers import queues
from fastness.layers.queues import NEVER_MS, MessageEvent, QueueKey
from fastness.limits import COUNTERS_UNFOLDED_MAX, DUTY_CHECK_SECONDS
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.duty import Duty, LeasedDuty
from fastness.runtime.maintenance import scan
from fastness.runtime.maintenance import sweeper as sweeper_module
from fastness.runtime.maintenance.sweeper import Sweeper
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage, QueuePolicy
from tests.support.background import DrivenRunner

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.
JOBS, MAIL = QueueKey("main", "jobs"), QueueKey("other", "mail")


class WatchedDatabase(MemoryDatabase):
    """Records its calls, and can be made to fail."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.processed: list[QueueKey] = []
        self.scans = 0  # Scans of all queues.
        self.error: Exception | None = None

    def transact(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if work is queues.sweep:
            if self.error is not None:
                raise self.error
            self.processed.append(args[0])
        return super().transact(work, *args, **kwargs)

    def read(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("after") == "" and not args:
            self.scans += 1
            if self.error is not None:
                raise self.error
        return super().read(work, *args, **kwargs)


class Day:
    """The sweeper with its clock and database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.runner = DrivenRunner()
        self.published: list[Event] = []
        self.database = WatchedDatabase(self.clock)
        self.database.publish = self.published.extend
        monkeypatch.setattr(sweeper_module, "time", SimpleNamespace(monotonic=lambda: self.runner.now))
        monkeypatch.setattr(sweeper_module, "SystemClock", lambda: self.clock)

    def start(self, *, shared: bool = False, duty: LeasedDuty | None = None, database: Database | None = None) -> float:
        """Start the sweeper; its pause after the first scan."""
        waits = ConsumerOptions(poll_seconds=3.0, poll_jitter_seconds=0.0)
        self.sweeper = Sweeper(database or self.database, waits, shared=shared)
        self.runner.duty = duty or Duty()
        return self.runner.start(self.sweeper.job)

    def run(self) -> float:
        """Do what is due; the next pause of the sweeper."""
        return self.runner.run(self.sweeper.job)

    def advance(self, seconds: float) -> float:
        """Advance the time; the next pause of the sweeper."""
        self.clock.advance_ms(round(seconds * 1_000))
        return self.runner.advance(seconds, self.sweeper.job)

    def schedule(self, queue: QueueKey, in_seconds: float) -> None:
        self.sweeper.schedule(queue, self.clock.now_ms() + round(in_seconds * 1_000))

    def put(self, queue: QueueKey, payload: bytes = b"", **options: Any) -> None:
        self.database.transact(queues.put, queue, [NewMessage(payload, **options)])

    def stats(self, queue: QueueKey) -> Any:
        return self.database.read(queues.stats, queue)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    day = Day(monkeypatch)
    yield day
    day.runner.stop()
    day.database.close()


def test_the_start_processes_due_entries_of_all_queues_and_universes(day: Day) -> None:
    """No consumer is needed to process due entries."""
    for queue in (JOBS, MAIL):
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.start()
    assert sorted(day.database.processed) == [JOBS, MAIL]
    for queue in (JOBS, MAIL):
        assert (day.stats(queue).ready, day.stats(queue).delayed) == (1, 0)


def test_more_queues_than_a_page_are_all_found(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PAGE", 2)
    expected = [QueueKey(universe, f"q{number}") for universe in ("a", "b") for number in range(5)]
    for queue in expected:
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.start()
    assert sorted(day.database.processed) == expected


def test_the_sweeper_sleeps_until_the_earliest_due_time(day: Day) -> None:
    day.put(JOBS, delay_seconds=20)
    day.put(MAIL, delay_seconds=5)
    assert day.start() == 5
    assert day.database.processed == []
    assert day.advance(4.9) == pytest.approx(0.1)
    assert day.database.processed == []
    assert day.advance(0.1) == 15
    assert day.database.processed == [MAIL]
    day.advance(15)
    assert day.database.processed == [MAIL, JOBS]
    assert (day.stats(JOBS).ready, day.stats(MAIL).ready) == (1, 1)


def test_the_sweeper_sleeps_while_nothing_is_due(day: Day) -> None:
    day.put(JOBS)
    assert day.start() > 1_000_000
    assert day.database.processed == []


def test_an_earlier_due_time_wakes_the_sweeper_and_a_later_one_does_not(day: Day) -> None:
    day.put(JOBS, delay_seconds=20)
    assert day.start() == 20
    day.put(MAIL, delay_seconds=30)
    day.schedule(MAIL, 30)
    assert not day.sweeper.job.is_woken
    day.put(JOBS, delay_seconds=2)
    day.schedule(JOBS, 2)
    assert day.run() == 2
    assert day.advance(2) == 18
    assert day.database.processed == [JOBS]
    assert (day.stats(JOBS).ready, day.stats(JOBS).delayed) == (1, 1)
    assert day.advance(18) == 10
    assert day.advance(10) is not None
    assert day.database.processed == [JOBS, JOBS, MAIL]


def test_the_counters_of_many_processes_are_folded_once_a_minute(day: Day, postgres_url: str) -> None:
    nodes = [PostgresDatabase(postgres_url, clock=day.clock) for _ in range(COUNTERS_UNFOLDED_MAX + 1)]
    try:
        day.start(shared=True, database=nodes[0])
        for _ in range(2):
            for node in nodes:
                node.transact(queues.put, JOBS, [NewMessage()])
            assert nodes[0].read(queues.needs_upkeep, JOBS)
            day.advance(60)
            assert not nodes[0].read(queues.needs_upkeep, JOBS)
        assert nodes[0].read(queues.stats, JOBS).ready == 2 * len(nodes)
        day.runner.stop()
    finally:
        for node in nodes:
            node.close()


def test_a_due_time_scheduled_twice_is_processed_once(day: Day) -> None:
    day.start()
    day.put(JOBS, delay_seconds=2)
    for _ in range(3):
        day.schedule(JOBS, 2)
    day.schedule(JOBS, 3)
    day.run()
    day.advance(2)
    day.advance(1)
    assert day.database.processed == [JOBS]


def test_a_due_time_without_due_entries_is_harmless(day: Day) -> None:
    """The due entry may already be processed."""
    day.put(JOBS)
    day.start()
    day.schedule(JOBS, 2)
    day.run()
    day.advance(2)
    assert day.database.processed == []
    day.sweeper.schedule(JOBS, NEVER_MS)
    assert not day.sweeper.job.is_woken


def test_more_due_entries_than_one_transaction_handles_are_all_processed(
    day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.layers.queues.expiry.DUE_BATCH_MAX", 3)
    for _ in range(10):
        day.put(JOBS, delay_seconds=5)
    day.start()
    day.advance(5)
    assert day.stats(JOBS).ready == 10
    assert len(day.database.processed) == 4


def test_a_queue_with_many_due_entries_does_not_block_the_others(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.queues.expiry.DUE_BATCH_MAX", 1)
    monkeypatch.setattr(sweeper_module, "_TRANSACTIONS_MAX", 2)
    for _ in range(6):
        day.put(JOBS, delay_seconds=4)
    day.put(MAIL, delay_seconds=4.5)
    day.start()
    day.advance(5)
    assert (day.stats(JOBS).ready, day.stats(MAIL).ready) == (6, 1)
    assert day.database.processed.index(MAIL) < 6, "it was processed in between"


def test_repeated_consumer_crashes_make_a_message_a_dead_letter(day: Day) -> None:
    """Without any other consumer of the queue."""
    day.database.transact(queues.set_policy, JOBS, QueuePolicy(max_attempts=1, visibility_seconds=10))
    day.put(JOBS, b"deadly")
    day.database.transact(queues.lease, JOBS, owner="crashes")
    day.start()
    day.advance(10)
    assert (day.stats(JOBS).leased, day.stats(JOBS).dead, day.stats(JOBS).expired_total) == (0, 1, 1)
    messages = [event for event in day.published if isinstance(event, MessageEvent)]
    assert [each.event for each in messages] == ["put", "leased", "expired", "dead-lettered"]


def test_a_schedule_fires_repeatedly(day: Day) -> None:
    day.database.transact(
        queues.set_schedule, JOBS, "minutely", cron="* * * * *", timezone="UTC", message=NewMessage(b"tick")
    )
    day.start()
    for _ in range(5):
        day.advance(60)
    assert day.stats(JOBS).ready == 5


def test_the_sweeper_survives_database_errors(day: Day, caplog: pytest.LogCaptureFixture) -> None:
    day.put(JOBS, delay_seconds=5)
    day.start()
    day.database.error = Unreachable("PostgreSQL is away")
    assert day.advance(5) == 1, "it retries soon"
    assert "PostgreSQL is away" in caplog.text
    assert day.advance(1) == 2
    day.database.error = None
    day.advance(2)
    assert day.database.processed == [JOBS]
    assert day.stats(JOBS).ready == 1


def test_the_sweeper_survives_an_error_at_the_start(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.database.error = Unreachable("not yet")
    assert day.start() == 1
    day.database.error = None
    day.advance(1)
    assert day.database.processed == [JOBS]


def test_what_becomes_due_after_an_error_is_processed_with_the_retry(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.put(MAIL, delay_seconds=5.5)
    day.start()
    day.database.error = Unreachable("temporarily")
    day.advance(5)
    day.database.error = None
    assert day.advance(0.5) == 0.5
    day.advance(0.5)
    assert day.database.processed == [JOBS, MAIL]


def test_each_transaction_of_a_queue_is_a_step(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs take their turns in between, and a plane that closes waits for one transaction only."""
    monkeypatch.setattr("fastness.layers.queues.expiry.DUE_BATCH_MAX", 1)
    for _ in range(50):
        day.put(JOBS, delay_seconds=5)
    day.start()
    day.clock.advance_ms(5_000)
    steps = day.sweeper.job.run()
    for count in range(1, 4):
        assert next(steps) == 0
        assert len(day.database.processed) == count


def test_a_shared_database_is_scanned_every_few_seconds(day: Day) -> None:
    assert day.start(shared=True) == 3
    assert day.database.scans == 1
    day.put(JOBS, delay_seconds=4)  # By another process, which notifies only its own sweeper.
    assert day.advance(3) == 1
    assert day.database.scans == 2
    assert day.advance(1) == 2
    assert day.database.processed == [JOBS]
    assert day.database.scans == 2
    day.advance(2)
    assert day.database.scans == 3


def test_an_exclusive_database_is_scanned_once(day: Day) -> None:
    day.start(shared=False)
    for _ in range(5):
        day.put(JOBS, delay_seconds=1)
        day.schedule(JOBS, 1)
        day.run()
        day.advance(3_600)
    assert day.database.scans == 1
    assert day.stats(JOBS).ready == 5


def test_a_clock_ahead_of_the_database_clock_causes_no_busy_loop(day: Day) -> None:
    """PostgreSQL transactions use the clock of the database: an entry may be due by one clock and not by the other."""
    day.put(JOBS, delay_seconds=5)
    behind = ManualClock(day.clock.now_ms())
    day.database._clock = behind
    day.start()
    rounds = threading.Event()
    process_due = day.database.transact

    def counted(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = process_due(work, *args, **kwargs)
        if len(day.database.processed) >= 1_000:
            behind.jump_to_ms(day.clock.now_ms())
            rounds.set()
        return result

    day.database.transact = counted  # type: ignore[method-assign]
    day.advance(5)
    assert not rounds.is_set(), "1,000 transactions for one message that was not due yet"


@pytest.mark.parametrize("kind", ["delayed", "outlived", "scheduled"])
def test_a_reopened_plane_processes_due_entries(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any call: the sweeper starts with the plane, not with the first event."""
    with fastness.open(f"dir:{tmp_path}") as plane:
        jobs = plane.queue("jobs")
        if kind == "scheduled":
            jobs.schedule("minutely", "* * * * *", "tick")
        elif kind == "delayed":
            jobs.put("x", delay_seconds=30.0)
        else:
            jobs.put("x", ttl_seconds=30.0)
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: time.time_ns() // 1_000_000 + 120_000)
    expected = {"delayed": (1, 0), "outlived": (0, 0), "scheduled": (1, 0)}[kind]
    with fastness.open(f"dir:{tmp_path}") as plane:
        stats, deadline = plane.queue("jobs").stats(), time.monotonic() + DEADLINE_SECONDS
        while (stats.ready, stats.delayed) != expected and time.monotonic() < deadline:
            time.sleep(0.02)
            stats = plane.queue("jobs").stats()
    assert (stats.ready, stats.delayed) == expected, "two minutes later"


def test_a_damaged_queue_does_not_stop_the_sweep_of_others(
    day: Day, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later queues of the scan are swept, and so is the damaged one once it is repaired."""
    for queue in (JOBS, MAIL):
        day.put(queue, delay_seconds=5)
    day.clock.advance_ms(5_000)
    due_in, is_damaged = queues.due_in, True

    def read(tx: Any, queue: QueueKey) -> int:
        if is_damaged and queue == JOBS:
            raise ZeroDivisionError("damaged")
        return due_in(tx, queue)

    monkeypatch.setattr(queues, "due_in", read)
    assert day.start() == 1, "it is retried soon"
    assert day.database.processed == [MAIL]
    assert "unexpected error while sweeping queue main/jobs" in caplog.text
    assert day.advance(1) == 1
    is_damaged = False
    day.advance(1)
    assert day.database.processed == [MAIL, JOBS]


def test_an_unexpected_error_in_a_full_scan_is_retried(day: Day) -> None:
    day.put(JOBS, delay_seconds=5)
    day.clock.advance_ms(5_000)
    day.database.error = ZeroDivisionError()
    assert day.start() == 1
    day.database.error = None
    day.advance(1)
    assert day.database.processed == [JOBS]


def test_a_node_that_is_not_on_duty_scans_no_queue_until_it_is(day: Day) -> None:
    day.put(JOBS, delay_seconds=1)
    duty = LeasedDuty(day.clock)
    assert day.start(shared=True, duty=duty) == DUTY_CHECK_SECONDS
    for _ in range(5):
        day.advance(DUTY_CHECK_SECONDS)
    assert (day.database.scans, day.database.processed) == (0, [])
    duty.hold_until(day.clock.now_ms() + 12_000)
    assert day.advance(DUTY_CHECK_SECONDS) == 3.0
    assert day.database.processed == [JOBS]


def test_a_node_that_loses_the_duty_stops_scanning(day: Day) -> None:
    duty = LeasedDuty(day.clock)
    duty.hold_until(day.clock.now_ms() + 4_000)
    assert day.start(shared=True, duty=duty) == 3.0
    day.put(JOBS, delay_seconds=3.5)
    day.advance(3.0)
    assert day.database.scans == 2
    day.advance(3.0)
    assert day.database.scans == 2
    assert day.database.processed == [JOBS]  # It was scheduled while this node was on duty.
    day.put(MAIL, delay_seconds=1)
    for _ in range(3):
        day.advance(1.0)
    assert day.database.processed == [JOBS]


def test_a_node_that_is_not_on_duty_processes_what_the_next_scan_of_another_would_miss(day: Day) -> None:
    duty = LeasedDuty(day.clock)
    day.start(shared=True, duty=duty)
    for queue, seconds in ((JOBS, 2.0), (MAIL, 3.5)):
        day.put(queue, delay_seconds=seconds)
        day.schedule(queue, seconds)
    for _ in range(8):
        day.advance(0.5)
    assert day.database.processed == [JOBS]
    assert (day.stats(JOBS).ready, day.stats(JOBS).delayed) == (1, 0)
