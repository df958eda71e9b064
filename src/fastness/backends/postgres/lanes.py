"""Lanes: connections on which jobs wait for locks that other processes hold, while other jobs go on.

    committer ──► group, tries locks ──► committed
                    └─ lock taken ──► lane of that part: waits for the lock, runs all jobs that need it ──► committed

All waiting jobs of a part share a lane, so they share its next transaction.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable

from fastness import limits
from fastness.backends.postgres.groups import GroupOptions, GroupRunner
from fastness.backends.postgres.jobs import Job, finish
from fastness.backends.postgres.locked_view import Needs, union
from fastness.errors import Busy

_log = logging.getLogger("fastness.committer")


class Lanes:
    """The waiting jobs by part, and the threads that run them. A thread starts when it is first needed."""

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._jobs: dict[bytes, deque[Job]] = {}  # The jobs of each part that is waited for; some may be running.
        self._parts: deque[bytes] = deque()  # Parts that no lane works on yet.
        self._count = 0  # Jobs in `_jobs`.
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    def is_awaited(self, part: bytes) -> bool:
        """Whether jobs wait for a part. A job that needs it joins them instead of passing them."""
        return part in self._jobs

    def submit(self, jobs: Iterable[Job]) -> None:
        """Let jobs wait for their locks."""
        refused = []
        with self._changed:
            for job in jobs:
                if self._count >= limits.COMMIT_QUEUE_MAX:
                    job.error = Busy(f"{self._count} transactions wait for locks; nothing was written, try again later")
                    refused.append(job)
                    continue
                waiting = self._jobs.get(job.waited_for)
                if waiting is None:
                    waiting = self._jobs[job.waited_for] = deque()
                    self._parts.append(job.waited_for)
                waiting.append(job)
                self._count += 1
            while len(self._parts) > self._idle and len(self._threads) < limits.LOCK_LANES_MAX:
                self._start_thread()
            self._changed.notify(len(self._parts))
        finish(refused)

    def withdraw(self, job: Job) -> bool:
        """Take back a job; whether it had not started."""
        with self._changed:
            waiting = self._jobs.get(job.waited_for)
            if waiting is None or job not in waiting:
                return False
            waiting.remove(job)
            self._count -= 1
            return True

    def close(self) -> None:
        """Run the waiting jobs, then end the threads and close their connections."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._serve, args=(number,), name=f"fastness-lane-{number}", daemon=True)
        thread.start()
        self._idle += 1
        self._threads.append(thread)

    def _serve(self, number: int) -> None:
        runner = GroupRunner(self._options, f"{self._options.writer}-{number}")
        try:
            while (part := self._next_part()) is not None:
                while group := self._next_group(part):
                    try:
                        self._run(runner, part, group)
                    except Exception:  # Every job that waits for this part depends on this thread.
                        _log.exception("unexpected error in a thread that waits for locks; continuing")
                with self._changed:
                    self._idle += 1
        finally:
            runner.close()

    def _run(self, runner: GroupRunner, part: bytes, group: list[Job]) -> None:
        ran = runner.run(group, union(job.needs for job in group))
        self._return(part, ran.unstarted)
        self.submit(ran.put_off)
        finish(ran.done)

    def _next_part(self) -> bytes | None:
        with self._changed:
            while not self._parts:
                if self._closing:
                    return None
                self._changed.wait()
            self._idle -= 1
            return self._parts.popleft()

    def _next_group(self, part: bytes) -> list[Job]:
        """The next jobs of a part that need the same locks. Without any, the part is not waited for any more."""
        with self._changed:
            waiting = self._jobs[part]
            if not waiting:
                del self._jobs[part]
                return []
            needs = waiting[0].needs
            group: list[Job] = []
            while waiting and len(group) < limits.COMMIT_GROUP_MAX and _is_covered(waiting[0].needs, needs):
                group.append(waiting.popleft())
            self._count -= len(group)
            return group

    def _return(self, part: bytes, jobs: list[Job]) -> None:
        with self._changed:
            self._jobs[part].extendleft(reversed(jobs))
            self._count += len(jobs)


def _is_covered(needs: Needs, others: Needs) -> bool:
    """Whether `others` has every part of `needs`."""
    return all(part in others for part in needs)
