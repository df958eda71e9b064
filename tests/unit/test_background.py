"""The runner of background jobs: when they run, what wakes them, what follows an error, and how they end."""

import logging
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Closed, Unreachable
from fastness.kv import Transaction
from fastness.limits import DUTY_CHECK_SECONDS
from fastness.runtime.background import BackgroundRunner, Job, Steps
from fastness.runtime.duty import Duty
from fastness.testing.clock import ManualClock
from tests.support.background import DrivenRunner
from tests.support.waiting import eventually

DEADLINE_SECONDS = 30.0  # A thread that hangs fails the test.


@pytest.fixture
def runner() -> Iterator[BackgroundRunner]:
    runner = BackgroundRunner()
    yield runner
    runner.stop()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("fastness-")}


def repeated(work: Callable[[], object], pause_seconds: float | None) -> Callable[[], Steps]:
    def run() -> Steps:
        while True:
            work()
            yield pause_seconds

    return run


class SwitchedDuty(Duty):
    """A duty that the test gives and takes."""

    ours = False

    def is_ours(self) -> bool:
        return self.ours


# When a job runs.


def test_a_job_runs_at_its_start_and_after_each_pause() -> None:
    runner, ran = DrivenRunner(), list[float]()
    job = Job("a tick", repeated(lambda: ran.append(runner.now), 3.0))
    assert runner.start(job) == 3
    assert runner.advance(2.5, job) == 0.5
    assert runner.advance(0.5, job) == 3
    assert ran == [1_000.0, 1_003.0]
    assert job.passes == 2


def test_a_job_may_start_later() -> None:
    runner, ran = DrivenRunner(), list[float]()
    job = Job("a tick", repeated(lambda: ran.append(runner.now), 3.0), first_seconds=60.0)
    assert runner.start(job) == 60
    runner.advance(60, job)
    assert ran == [1_060.0]


def test_jobs_take_turns_between_their_steps() -> None:
    runner, turns = DrivenRunner(), list[str]()

    def steps(name: str) -> Callable[[], Steps]:
        def run() -> Steps:
            for _ in range(3):
                turns.append(name)
                yield 0.0
            yield None

        return run

    for name in ("a", "b"):
        runner.add(Job(name, steps(name)))
    runner.run_due()
    assert turns == ["a", "b"] * 3


def test_a_job_that_is_woken_runs_at_once_and_one_that_is_at_work_looks_again() -> None:
    runner, ran = DrivenRunner(), list[float]()

    def run() -> Steps:
        while True:
            ran.append(runner.now)
            if len(ran) == 2:
                job.wake()
                yield 0.0
                assert len(ran) == 2, "it goes on with its pass first"
            yield None

    job = Job("a sweep", run)
    runner.start(job)
    assert len(ran) == 1
    job.wake()
    runner.run_due()
    assert len(ran) == 3
    runner.run_due()
    assert len(ran) == 3


def test_a_job_that_ends_starts_again_when_it_is_woken() -> None:
    runner, runs = DrivenRunner(), list[int]()

    def run() -> Steps:
        runs.append(1)
        yield 0.0

    job = Job("an expiry", run)
    runner.start(job)
    runner.run_due()
    assert len(runs) == 1
    runner.add(job)
    runner.run_due()
    assert len(runs) == 2


def test_a_job_follows_the_clock_of_a_test_until_the_runner_stops(clock: ManualClock) -> None:
    runner, ran = DrivenRunner(clock=clock), list[int]()
    follows = Job("a timer", repeated(lambda: ran.append(clock.now_ms()), None), follows_clock=True)
    other = Job("a tick", repeated(lambda: ran.append(0), None))
    for job in (follows, other):
        runner.start(job)
    ran.clear()
    clock.advance_ms(5)
    runner.run_due()
    assert ran == [clock.now_ms()]
    runner.stop()
    clock.advance_ms(5)
    runner.run_due()
    assert len(ran) == 1


def test_a_watch_wakes_a_job(runner: BackgroundRunner) -> None:
    looks = threading.Semaphore(0)

    def run() -> Steps:
        with database.watch(b"a") as watch:
            watch.on_fire = job.wake
            while True:
                watch.wait(0)
                looks.release()
                yield None

    with MemoryDatabase() as database:
        job = Job("a look", run)
        runner.add(job)
        for _ in range(3):
            assert looks.acquire(timeout=DEADLINE_SECONDS)
            database.transact(Transaction.put, b"a", b"")
        assert looks.acquire(timeout=DEADLINE_SECONDS)
        runner.stop()
        assert database._watches.count == 0, "what the job holds is released"


def test_a_job_with_a_duty_rests_while_another_node_has_it() -> None:
    duty, ran = SwitchedDuty(), list[float]()
    runner = DrivenRunner(duty=duty)
    job = Job("a sweep", repeated(lambda: ran.append(runner.now), 300.0), only_on_duty=True)
    assert runner.start(job) == DUTY_CHECK_SECONDS
    assert ran == []
    duty.ours = True
    assert runner.advance(DUTY_CHECK_SECONDS, job) == 300
    duty.ours = False
    assert runner.advance(300, job) == DUTY_CHECK_SECONDS
    assert len(ran) == 1


def test_a_job_that_is_paused_does_nothing_until_it_is_resumed() -> None:
    runner, ran = DrivenRunner(), list[float]()
    job = Job("a tick", repeated(lambda: ran.append(runner.now), 1.0))
    runner.start(job)
    job.pause()
    job.wake()
    runner.advance(10, job)
    assert len(ran) == 1
    job.resume()
    runner.run_due()
    assert len(ran) == 2


def test_a_pause_waits_for_the_step_that_runs(runner: BackgroundRunner) -> None:
    entered, leave = threading.Event(), threading.Event()

    def run() -> Steps:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)
        yield None

    job = Job("a step", run)
    runner.add(job)
    assert entered.wait(DEADLINE_SECONDS)
    pausing = threading.Thread(target=job.pause)
    pausing.start()
    eventually(lambda: job.is_paused)
    assert pausing.is_alive()
    leave.set()
    pausing.join(DEADLINE_SECONDS)
    assert job.passes == 1


# Errors.


@pytest.mark.parametrize(("error", "level"), [(Unreachable("away"), "WARNING"), (ZeroDivisionError("odd"), "ERROR")])
def test_a_failure_is_logged_once_and_repeated_with_longer_pauses(
    caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    runner, failing, starts = DrivenRunner(), [True], list[float]()

    def run() -> Steps:
        starts.append(runner.now)
        while True:
            if failing[0]:
                raise error
            yield 60.0

    job = Job("the work", run)
    pauses = [runner.start(job)]
    for _ in range(4):
        job.wake()  # It keeps its pause.
        pauses.append(runner.advance(pauses[-1], job))
    assert pauses == [1, 2, 4, 5, 5]
    assert [record.levelname for record in caplog.records] == [level]
    assert "the work failed" in caplog.text
    assert str(error) in caplog.text
    failing[0] = False
    assert runner.advance(5, job) == 60
    assert "the work works again" in caplog.text
    assert (len(starts), job.failures, job.failing) == (6, 5, 0)
    runner.advance(60, job)
    assert len(starts) == 6, "it goes on"
    failing[0] = True
    assert runner.advance(60, job) == 1


def test_an_error_of_a_job_stops_no_other() -> None:
    runner, ran = DrivenRunner(), list[float]()

    def fail() -> Steps:
        yield 0.0
        raise ZeroDivisionError

    runner.add(Job("a failure", fail))
    runner.start(Job("a tick", repeated(lambda: ran.append(runner.now), 1.0)))
    runner.now += 1
    runner.run_due()
    assert len(ran) == 2


def test_a_closed_key_space_ends_a_job(caplog: pytest.LogCaptureFixture) -> None:
    runner = DrivenRunner()

    def run() -> Steps:
        yield 1.0
        raise Closed("closed")

    job = Job("a sweep", run)
    runner.start(job)
    runner.advance(1, job)
    job.wake()
    runner.advance(3_600, job)
    assert (job.passes, job.failures, caplog.text) == (1, 0, "")


# Threads.


def test_a_thread_runs_only_while_a_job_of_it_is_due_at_some_time(runner: BackgroundRunner) -> None:
    before = threads()
    ran = threading.Semaphore(0)
    job = Job("an expiry", repeated(ran.release, None))
    assert threads() == before
    for _ in range(3):
        runner.add(job)
        assert ran.acquire(timeout=DEADLINE_SECONDS)
        eventually(lambda: not job.is_running)
    eventually(lambda: threads() == before)


def test_jobs_of_other_threads_run_while_a_job_blocks(runner: BackgroundRunner) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> Steps:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)
        yield None

    ran = threading.Event()
    runner.add(Job("a search", block, thread="space"))
    assert entered.wait(DEADLINE_SECONDS)
    runner.add(Job("a sweep", repeated(ran.set, None)))
    assert ran.wait(DEADLINE_SECONDS)
    leave.set()


def test_stop_finishes_the_step_that_runs_and_joins(runner: BackgroundRunner) -> None:
    entered, leave, ended = threading.Event(), threading.Event(), list[str]()

    def run() -> Steps:
        try:
            entered.set()
            assert leave.wait(DEADLINE_SECONDS)
            ended.append("step")
            yield 0.0
            ended.append("next step")
        finally:
            ended.append("closed")

    runner.add(Job("a sweep", run))
    assert entered.wait(DEADLINE_SECONDS)
    stopping = threading.Thread(target=runner.stop)
    stopping.start()
    assert stopping.is_alive()
    eventually(lambda: runner._threads["sweeps"]._is_stopping)
    leave.set()
    stopping.join(DEADLINE_SECONDS)
    assert "fastness-sweeps" not in threads()
    assert ended == ["step", "closed"]


def test_stop_interrupts_a_pause_and_a_rest(runner: BackgroundRunner) -> None:
    resting = threading.Event()

    def rest() -> Steps:
        resting.set()
        job.rest(3_600)
        yield None

    job = Job("a search", rest, thread="space")
    runner.add(job)
    runner.add(Job("a tick", repeated(lambda: None, 3_600.0)))
    assert resting.wait(DEADLINE_SECONDS)
    runner.stop()
    assert not {"fastness-space", "fastness-sweeps"} & threads()
    runner.stop()
    runner.add(Job("late", repeated(lambda: None, 1.0)))
    job.wake()
    assert not {"fastness-space", "fastness-sweeps"} & threads()


def test_the_heartbeat_ends_last(runner: BackgroundRunner) -> None:
    ended = list[str]()

    def run(name: str) -> Callable[[], Steps]:
        def steps() -> Steps:
            try:
                while True:
                    yield 3_600.0
            finally:
                ended.append(name)

        return steps

    jobs = [
        Job("beat", run("beat"), thread="heartbeat"),
        Job("sweep", run("sweep")),
        Job("t", run("t"), thread="timers"),
    ]
    for job in jobs:
        runner.add(job)
    eventually(lambda: all(job.passes for job in jobs))
    runner.stop()
    assert ended[-1] == "beat"


def test_threads_of_jobs_do_not_keep_a_program_alive(runner: BackgroundRunner) -> None:
    runner.add(Job("a tick", repeated(lambda: None, 3_600.0)))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "fastness-sweeps")


def test_a_job_starts_later_if_no_thread_can_be_started(
    runner: BackgroundRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    job = Job("a sweep", repeated(ran.set, None))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            runner.add(job)
            job.wake()
    assert len(caplog.records) == 1
    job.wake()
    assert ran.wait(DEADLINE_SECONDS)


def test_a_forked_child_runs_no_jobs_and_waits_for_no_lock(runner: BackgroundRunner) -> None:
    job = Job("a tick", repeated(lambda: None, 3_600.0))
    runner.add(job)
    eventually(lambda: job.passes)
    with runner._lock, runner._threads["sweeps"]._changed:  # As a thread of the parent may have them.
        if (child := os.fork()) == 0:
            job.wake()
            runner.add(job)
            runner.stop()
            os._exit(int(job.thread is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
