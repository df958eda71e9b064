"""Group commit on PostgreSQL: the holder of the connection runs the work of all waiting callers in one transaction.

    callers ──► queue ──► work 1, work 2, … in one database transaction ──► COMMIT ──► callers

The functions of a group run one after the other, each on top of the writes before it. So callers in one process never
conflict with each other, and a group costs one commit however many callers it serves. `locked_view.py` keeps it apart
from the groups of other processes. Functions that have to wait for one of those continue in `lanes.py`.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from fastness import limits
from fastness.backends.postgres.groups import GroupOptions, GroupRunner
from fastness.backends.postgres.jobs import Job, finish
from fastness.backends.postgres.lanes import Lanes
from fastness.errors import Busy, Closed, CommitUnknown

_log = logging.getLogger("fastness.committer")


class Committer:
    """One connection, the lock to use it, and the queue of jobs for it.

    A thread that finds the lock free commits its own job together with the queued ones. Other callers queue, and the
    committer's thread commits next. So a single caller needs no thread switch, and many callers share a commit.
    """

    def __init__(self, options: GroupOptions) -> None:
        self._lanes = Lanes(options)
        self._runner = GroupRunner(options, options.writer, self._lanes.is_awaited)
        self._connection_lock = threading.Lock()
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="fastness-committer", daemon=True)
        self._thread.start()

    def run(self, job: Job) -> Any:
        """The outcome of a job that a thread waits for."""
        if not self._closing and self._connection_lock.acquire(blocking=False):
            self._commit_queued(job)
        else:
            self.submit([job])
        return self.wait(job)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue the jobs for the next group."""
        with self._wake:
            if self._closing:
                raise Closed("The database was closed; open it again")
            if len(self._jobs) >= limits.COMMIT_QUEUE_MAX:
                raise Busy(f"{len(self._jobs)} transactions wait for PostgreSQL; nothing was written, try again later")
            self._jobs.extend(jobs)
            self._wake.notify()

    def wait(self, job: Job) -> Any:
        """The outcome of a job that a thread submitted."""
        assert job.done is not None
        if not job.done.acquire(timeout=limits.SYNC_WAIT_SECONDS_MAX):
            if self._withdraw(job):
                raise Busy(f"Not started within {limits.SYNC_WAIT_SECONDS_MAX} s; nothing was written, try again later")
            raise CommitUnknown(f"No answer within {limits.SYNC_WAIT_SECONDS_MAX} s; check whether it was stored")
        return job.outcome()

    def close(self) -> None:
        """Run the queued jobs, then end the threads and close the connections."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._connection_lock:
            self._lanes.close()
            self._runner.close()

    def _withdraw(self, job: Job) -> bool:
        """Take back a job; whether it had not started."""
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)
                return True
        return self._lanes.withdraw(job)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if not self._jobs:
                    return
            self._connection_lock.acquire()
            try:
                self._commit_queued()
            except Exception:  # Every queued caller depends on this thread, so it must not end.
                _log.exception("unexpected error in the committer thread; continuing")

    def _commit_queued(self, own: Job | None = None) -> None:
        """Commit the job of this thread and the queued ones as one group, and release the connection lock."""
        group = [] if own is None else [own]
        try:
            with self._wake:
                space = limits.COMMIT_GROUP_MAX - len(group)
                group += [self._jobs.popleft() for _ in range(min(len(self._jobs), space))]
            ran = self._runner.run(group, {}, own=own)
        finally:
            self._connection_lock.release()
        if ran.unstarted:
            with self._wake:
                self._jobs.extendleft(reversed(ran.unstarted))
                self._wake.notify()
        if ran.put_off:
            self._lanes.submit(ran.put_off)
        finish(ran.done)
