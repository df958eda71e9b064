"""The background work of a plane: jobs that sweep, tick, or wait for a clock or for the maintenance lease.

    added, or woken ──► step ──► pause ──► step ──► …
                          └─ error ──► logged once ──► started again after 1, 2, 4, 5, 5 … seconds

A job is a generator. It yields in how many seconds its next step is due, and what it holds in `with` blocks is released
when it ends. Commits, watches, and tests that move the clock wake it sooner.

Jobs take turns on a thread, a bounded step at a time. A thread ends while nothing is due, and starts with the next
wake-up. These run apart from the sweeps:

    timers       a sweep may wait seconds for a lock that another process holds, and timers fire in time
    heartbeat    the maintenance lease would expire while another job waits
    ticks        session logs and the check of the disk, which make no transaction and never wait for one
    quotas       a measurement reads all of a universe, and refused callers wait for it
    space        searches, retention and the compaction of worlds read the object store, and take minutes
    tables       RocksDB rewrites up to 1 GiB in a step

Renewals of leases have a thread of their own (`lease_renewal.py`), also in clients: one that is late loses the lease.
Session logs are written by another (`activity/log.py`), which waits for records instead of a time.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from itertools import count
from typing import Final, Literal

from fastness.clock import Clock, on_clock_change
from fastness.errors import Closed, FastnessError
from fastness.kv.fork_safety import invalidate_in_children
from fastness.limits import BACKGROUND_RETRY_SECONDS, BACKGROUND_RETRY_SECONDS_MAX, DUTY_CHECK_SECONDS
from fastness.runtime.duty import Duty

_log: Final = logging.getLogger("fastness.background")

# Seconds until the next step. 0: after the other jobs of the thread. None: once the job is woken.
Steps = Generator[float | None, None, None]
ThreadName = Literal["sweeps", "timers", "heartbeat", "ticks", "quotas", "space", "tables"]


class Job:
    """Work that is repeated until its runner stops. If `run` returns, it is called again once the job is woken."""

    def __init__(
        self,
        name: str,
        run: Callable[[], Steps],
        *,
        thread: ThreadName = "sweeps",
        first_seconds: float = 0.0,
        retry_seconds_max: float = BACKGROUND_RETRY_SECONDS_MAX,
        only_on_duty: bool = False,
        follows_clock: bool = False,
    ) -> None:
        """A job that does its first step after `first_seconds`.

        Args:
            name: what it does, as the log says it.
            only_on_duty: whether it rests while another node has the maintenance lease.
            follows_clock: whether it is woken when a test moves the clock.
        """
        self.name = name
        self.run = run
        self.thread_name: ThreadName = thread
        self.first_seconds = first_seconds
        self.retry_seconds_max = retry_seconds_max
        self.only_on_duty = only_on_duty
        self.follows_clock = follows_clock
        self.passes = 0  # How often it has paused.
        self.failures = 0
        self.failing = 0  # Failures since the last pass.
        self.due_at = math.inf  # Of the runner's timer.
        self.turn = 0
        self.steps: Steps | None = None  # None: not started, or ended.
        self.is_between_passes = True
        self.is_paused = False
        self.is_woken = False
        self.thread: JobThread | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether it has done what it was woken for."""
        is_at_work = self.thread is not None and self.thread.current is self
        return not is_at_work and not self.is_woken and self.is_between_passes

    @property
    def is_running(self) -> bool:
        """Whether it has a thread, because a job of that thread is due at some time."""
        return self.thread is not None and self.thread.thread is not None

    @property
    def is_on_duty(self) -> bool:
        """Whether this process does the periodic work now."""
        return self.thread is None or self.thread.runner.duty.is_ours()

    def wake(self) -> None:
        """Do the next step now, or look again after the current pass. A job that has failed keeps its pause."""
        if self.thread is not None and not (self.is_woken and self.thread.thread is not None):
            self.thread.wake(self)

    def pause(self) -> None:
        """Finish the current step, and do no more until `resume`."""
        if self.thread is not None:
            self.thread.pause(self)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self.thread is not None:
            self.thread.resume(self)

    def rest(self, seconds: float) -> None:
        """Pause within a step.

        Raises:
            Closed: the runner stops.
        """
        if self.thread is not None:
            self.thread.rest(seconds)


class JobThread:
    """A thread that does the steps of its jobs in the order in which they are due."""

    def __init__(self, name: str, runner: "BackgroundRunner") -> None:
        self._name = name
        self.runner = runner
        self._timer = runner.timer
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._turns = count(1)
        self.current: Job | None = None
        self._is_stopping = False
        self._cannot_start = False
        self.thread: threading.Thread | None = None  # Only while a job is due at some time.

    def add(self, job: Job) -> None:
        with self._changed:
            job.thread, job.due_at = self, self._timer() + job.first_seconds
            self._jobs.append(job)
            self._notify()

    def wake(self, job: Job) -> None:
        with self._changed:
            job.is_woken = True
            if not job.failing:
                job.due_at = min(job.due_at, self._timer())
            self._notify()

    def pause(self, job: Job) -> None:
        with self._changed:
            job.is_paused = True
            while self.current is job and self.thread is not threading.current_thread():
                self._changed.wait()

    def resume(self, job: Job) -> None:
        with self._changed:
            job.is_paused = False
            self._notify()

    def rest(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._is_stopping, seconds):
                raise Closed("The plane is closing")

    def stop(self) -> None:
        """Finish the current step, and end the jobs."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            thread = self.thread
        if thread is not None:
            thread.join()
        for job in self._jobs:
            if job.steps is not None:
                job.steps.close()

    def run_due(self) -> None:
        """Do what is due in the thread of the caller."""
        while (job := self._take()) is not None:
            self._finish(job, self._step(job))

    def _notify(self) -> None:
        self._changed.notify_all()
        if not self.runner.starts_threads or self._is_stopping or self.thread is not None:
            return
        thread = threading.Thread(target=self._run, name=f"fastness-{self._name}", daemon=True)
        try:
            thread.start()  # It needs the lock, which the caller has, before it can end.
        except RuntimeError as error:  # Out of threads. The next wake-up tries again.
            if not self._cannot_start:
                _log.warning("the thread fastness-%s cannot start yet; its work waits: %s", self._name, error)
            self._cannot_start = True
        else:
            self.thread, self._cannot_start = thread, False

    def _run(self) -> None:
        while (job := self._take(waits=True)) is not None:
            self._finish(job, self._step(job))

    def _take(self, *, waits: bool = False) -> Job | None:
        """The job whose step is due next; None if there is none, and with `waits`, if the thread is to end."""
        with self._changed:
            while not self._is_stopping:
                job = min(self._jobs, key=_order)
                left_seconds = _order(job)[0] - self._timer()
                if left_seconds <= 0:
                    self.current = job
                    return job
                if not waits:
                    return None
                if left_seconds == math.inf:
                    break
                self._changed.wait(min(left_seconds, threading.TIMEOUT_MAX))
            self.thread = None if waits else self.thread
            return None

    def _finish(self, job: Job, pause_seconds: float | None) -> None:
        with self._changed:
            self.current, job.turn = None, next(self._turns)
            now = self._timer()
            if job.is_woken and not job.failing:
                job.due_at = now
            else:
                job.due_at = math.inf if pause_seconds is None else now + pause_seconds
            self._changed.notify_all()

    def _step(self, job: Job) -> float | None:
        """Do a step of a job; the seconds until its next one."""
        if job.is_between_passes:
            job.is_woken = False  # Before it looks: what comes later wakes it again.
            if job.only_on_duty and not job.is_on_duty:
                return DUTY_CHECK_SECONDS
        if job.steps is None:
            job.steps = job.run()
        try:
            pause_seconds = next(job.steps)
        except StopIteration:
            job.steps = pause_seconds = None
        except Closed:
            job.steps, job.is_paused = None, True
            return None
        except Exception as error:
            return self._fail(job, error)
        job.is_between_passes = pause_seconds != 0
        if job.is_between_passes:
            job.passes += 1
            if job.failing:
                _log.warning("%s works again", job.name)
            job.failing = 0
        return pause_seconds

    def _fail(self, job: Job, error: Exception) -> float:
        pause_seconds = min(math.ldexp(BACKGROUND_RETRY_SECONDS, min(job.failing, 16)), job.retry_seconds_max)
        is_expected = isinstance(error, FastnessError)
        level = logging.DEBUG if job.failing else logging.WARNING if is_expected else logging.ERROR
        text = "%s failed; it is tried again in %g s, and then until it works: %s"
        _log.log(level, text, job.name, pause_seconds, error, exc_info=None if is_expected else error)
        job.steps, job.is_between_passes = None, True
        job.failing += 1
        job.failures += 1
        return pause_seconds


def _order(job: Job) -> tuple[float, int]:
    return math.inf if job.is_paused else job.due_at, job.turn


class BackgroundRunner:
    """Runs the jobs of a plane. A plane without jobs has no thread."""

    def __init__(
        self,
        *,
        duty: Duty | None = None,
        clock: Clock | None = None,
        timer: Callable[[], float] = time.monotonic,
        starts_threads: bool = True,
    ) -> None:
        """Without threads, jobs run in `run_due`, as a simulation needs it."""
        self.duty = duty or Duty()
        self._clock = clock
        self.timer = timer
        self.starts_threads = starts_threads
        self._lock = threading.Lock()
        self._threads: dict[ThreadName, JobThread] = {}
        self._is_stopped = False
        self._unsubscribe: list[Callable[[], object]] = []
        self.jobs: list[Job] = []
        invalidate_in_children(self)

    def add(self, job: Job) -> None:
        """Run a job from now on, unless it runs. One that waits to be woken is woken; a stopped runner does nothing."""
        if job.is_running:
            return
        with self._lock:
            if self._is_stopped:
                return
            if job.thread is not None:
                job.wake()
                return
            self.jobs.append(job)
            if job.follows_clock:
                self._unsubscribe.append(on_clock_change(self._clock, job.wake))
            self._threads.setdefault(job.thread_name, JobThread(job.thread_name, self)).add(job)

    def run_due(self) -> None:
        """Do what is due now, in the thread of the caller."""
        for thread in list(self._threads.values()):  # A job may add others.
            thread.run_due()

    def stop(self) -> None:
        """Finish the current steps, then end all jobs and threads. Idempotent."""
        with self._lock:
            self._is_stopped = True
            threads = self._threads
            unsubscribe, self._unsubscribe = self._unsubscribe, []
        for each in unsubscribe:
            each()
        for name in sorted(threads, key="heartbeat".__eq__):  # It comes last: the duty is kept until the others end.
            threads[name].stop()

    def invalidate_after_fork(self) -> None:
        """In a forked child: drop all jobs. A thread of the parent may hold the locks."""
        self._lock, self._threads, self._is_stopped = threading.Lock(), {}, True
        for job in self.jobs:
            job.thread = None
