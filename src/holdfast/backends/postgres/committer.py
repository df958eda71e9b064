"""Group commit on PostgreSQL: the holder of the connection runs the work of all waiting callers in one transaction.

    callers ──► queue ──► work 1, work 2, … on one SERIALIZABLE database transaction ──► COMMIT ──► callers

The functions of a group run one after the other, each on top of the writes before it. So callers in one process never
conflict with each other, and a group costs one commit however many callers it serves. The writes of a function that
raises are discarded, without affecting the others. A conflict with another process repeats the whole group.
"""

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast import limits
from holdfast.backends.postgres.retries import Conflicted, Disconnected, retry_transaction
from holdfast.backends.postgres.sessions import Session
from holdfast.clock import Clock, IdSource
from holdfast.errors import Busy, Closed, CommitUnknown
from holdfast.kv import Transaction, Watches, Work
from holdfast.kv.execution import run

_log = logging.getLogger("holdfast.committer")


class Job:
    """A function to run in a transaction, and the thread or event loop that waits for its outcome."""

    __slots__ = ("args", "done", "error", "kwargs", "loop", "result", "sync", "waiter", "work")

    def __init__(
        self,
        work: Work[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        durable: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.work = work
        self.args = args
        self.kwargs = kwargs
        self.sync = durable
        self.result: Any = None
        self.error: BaseException | None = None
        self.loop = loop
        self.done = threading.Lock() if loop is None else None
        self.waiter: asyncio.Future[None] | None = None if loop is None else loop.create_future()
        if self.done is not None:
            self.done.acquire()

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Committer:
    """One connection, the lock to use it, and the queue of jobs for it.

    A thread that finds the lock free commits its own job together with the queued ones. Other callers queue, and the
    committer's thread commits next. So a single caller needs no thread switch, and many callers share a commit.
    """

    def __init__(
        self, url: str, *, clock: Clock | None, ids: IdSource, watches: Watches, writer: str, floor: int
    ) -> None:
        self._url = url
        self._fence_floor = floor
        self._writer = writer
        self._clock = clock
        self._ids = ids
        self._watches = watches
        self._session: Session | None = None
        self._jitter = random.Random()
        self._connection_lock = threading.Lock()
        self._running_thread = 0  # The thread that holds the connection and runs its jobs.
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="holdfast-committer", daemon=True)
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is inside a transaction of this committer."""
        return self._running_thread == threading.get_ident()

    def run(self, job: Job) -> Any:
        """The outcome of a job that a thread waits for."""
        if not self._closing and self._connection_lock.acquire(blocking=False):
            self._commit_queued(job)
            return job.outcome()
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
            with self._wake:
                waiting = job in self._jobs
                if waiting:
                    self._jobs.remove(job)
            if waiting:
                raise Busy(f"Not started within {limits.SYNC_WAIT_SECONDS_MAX} s; nothing was written, try again later")
            raise CommitUnknown(f"No answer within {limits.SYNC_WAIT_SECONDS_MAX} s; check whether it was stored")
        return job.outcome()

    def close(self) -> None:
        """Run the queued jobs, then end the thread and close the connection."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._connection_lock:
            if self._session is not None:
                self._session.close()

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

    def _commit_queued(self, *own: Job) -> None:
        """Commit `own` and the queued jobs as one group, release the connection lock, and wake the callers."""
        self._running_thread = threading.get_ident()
        with self._wake:
            space = limits.COMMIT_GROUP_MAX - len(own)
            group = [*own, *(self._jobs.popleft() for _ in range(min(len(self._jobs), space)))]
        try:
            unfinished = self._commit(group)
        except BaseException as error:
            for job in group:
                job.result, job.error = None, error if job in own else _error_for_others(error)
            unfinished = []
        finally:
            self._running_thread = 0
            self._connection_lock.release()
        if unfinished:
            with self._wake:
                self._jobs.extendleft(reversed(unfinished))
                self._wake.notify()
        _finish(group[: len(group) - len(unfinished)])

    def _commit(self, group: list[Job]) -> list[Job]:
        """Run and commit jobs until the transaction is full. Returns the jobs that did not fit."""
        return retry_transaction(self._jitter, partial(self._run_once, group))

    def _run_once(self, group: list[Job]) -> list[Job]:
        session = self._open_session()
        try:
            return self._attempt(session, group)
        finally:
            session.rollback()

    def _attempt(self, session: Session, group: list[Job]) -> list[Job]:
        session.start(durable=any(job.sync for job in group))
        clock = self._clock or session
        batch_tx = Transaction(session, clock=clock, ids=self._ids, writer=self._writer)
        batch_tx.fence_floor = self._fence_floor
        ran = 0
        while ran < len(group) and batch_tx.size_bytes < limits.TRANSACTION_BYTES_MAX:
            tx = batch_tx.nested()
            if _try(group[ran], tx, session):
                batch_tx.merge(tx)
            ran += 1
        session.commit(batch_tx)
        self._watches.notify(batch_tx.writes, batch_tx.cleared)
        return group[ran:]

    def _open_session(self) -> Session:
        if self._session is None or not self._session.is_usable:
            if self._session is not None:
                self._session.close()
                self._session = None
            self._session = Session(self._url)
        return self._session


def _try(job: Job, tx: Transaction, session: Session) -> bool:
    """Run one job. Returns whether it succeeded. Its outcome is final only after the group has committed."""
    job.result = job.error = None
    try:
        job.result = run(tx, job.work, job.args, job.kwargs)
    except (Conflicted, Disconnected, KeyboardInterrupt):  # The last is for the thread that runs the group.
        raise
    except BaseException as error:
        job.error = error
    if session.failure is not None:
        raise session.failure  # The function may have caught it, but the transaction has failed.
    return job.error is None


def _error_for_others(error: BaseException) -> Exception:
    """The error for the other callers of a group: a signal was not meant for them."""
    if isinstance(error, Exception):
        return error
    return CommitUnknown(
        f"The committing thread was interrupted ({type(error).__name__}); check whether the write was stored"
    )


def _finish(jobs: list[Job]) -> None:
    """Wake all waiting callers, with one callback per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.done is not None:
            job.done.release()
        elif job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, loop_jobs in by_loop.items():
        with suppress(RuntimeError):  # The loop is closed, and its callers with it.
            loop.call_soon_threadsafe(_finish_on_loop, loop_jobs)


def _finish_on_loop(jobs: list[Job]) -> None:
    for job in jobs:
        if job.waiter is not None and not job.waiter.done():
            job.waiter.set_result(None)
