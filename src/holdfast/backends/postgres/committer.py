"""Group commit on PostgreSQL: whoever has the turn runs the work of every caller that waits, as one transaction.

    callers ──► queue ──► work 1, work 2, … on one SERIALIZABLE database transaction ──► COMMIT ──► callers

Works of one group run one after the other, each on top of what those before it wrote, so callers of one process never
conflict with each other, and a group costs one commit however many callers it serves. A work that raises leaves nothing
behind and does not disturb the others. A conflict with another process repeats the whole group.
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
from holdfast.backends.postgres.sessions import Conflicted, Disconnected, Session, insist
from holdfast.clock import Clock, IdSource
from holdfast.errors import Busy, Closed, CommitUnknown
from holdfast.kv import Transaction, Watches, Work
from holdfast.kv.execution import run

_log = logging.getLogger("holdfast.committer")


class Job:
    """A work, and whoever waits for its outcome."""

    __slots__ = ("args", "done", "error", "kwargs", "loop", "result", "sync", "waiter", "work")

    def __init__(
        self, work: Work[Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, durable: bool, loop: Any = None
    ) -> None:
        self.work = work
        self.args = args
        self.kwargs = kwargs
        self.sync = durable
        self.result: Any = None
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = loop
        self.done = threading.Lock() if loop is None else None
        self.waiter: asyncio.Future[None] | None = None if loop is None else loop.create_future()
        if self.done is not None:
            self.done.acquire()

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Committer:
    """One connection, the turn to use it, and the queue in front of it.

    A thread that finds the turn free commits by itself, and takes along what is queued; everybody else queues, and the
    committer's own thread takes the next turn. So a lone caller pays no hop between threads, and many share a commit.
    """

    def __init__(self, url: str, *, clock: Clock | None, ids: IdSource, watches: Watches, writer: str) -> None:
        self._url = url
        self._writer = writer
        self._clock = clock
        self._ids = ids
        self._watches = watches
        self._session: Session | None = None
        self._jitter = random.Random()
        self._turn = threading.Lock()
        self._running = 0  # The thread whose turn it is.
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="holdfast-committer", daemon=True)
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is itself a work that this committer runs."""
        return self._running == threading.get_ident()

    def run(self, job: Job) -> Any:
        """The outcome of a job that a thread waits for."""
        if not self._closing and self._turn.acquire(blocking=False):
            self._take_turn(job)
            return job.outcome()
        self.submit([job])
        return self.wait(job)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue the jobs; each is finished by whoever takes the next turn."""
        with self._wake:
            if self._closing:
                raise Closed("The database was closed; open it again")
            if len(self._jobs) >= limits.GROUP_QUEUE_MAX:
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
                raise Busy(f"No turn within {limits.SYNC_WAIT_SECONDS_MAX} s; nothing was written, try again later")
            raise CommitUnknown(f"No answer within {limits.SYNC_WAIT_SECONDS_MAX} s; look whether the write is there")
        return job.outcome()

    def close(self) -> None:
        """Run what is queued, then end the thread and the connection."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._turn:
            if self._session is not None:
                self._session.close()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if not self._jobs:
                    return
            self._turn.acquire()
            try:
                self._take_turn()
            except Exception:  # Everybody who finds no turn waits for this thread.
                _log.exception("the committer failed in a way that nobody thought of, and goes on")

    def _take_turn(self, *own: Job) -> None:
        """Commit `own` and what is queued as one group, with the turn held; give the turn back and tell everybody."""
        self._running = threading.get_ident()
        with self._wake:
            room = limits.GROUP_CALLERS_MAX - len(own)
            group = [*own, *(self._jobs.popleft() for _ in range(min(len(self._jobs), room)))]
        try:
            unrun = self._commit(group)
        except BaseException as error:
            for job in group:
                job.result, job.error = None, error if job in own else _told_to_others(error)
            unrun = []
        finally:
            self._running = 0
            self._turn.release()
        if unrun:
            with self._wake:
                self._jobs.extendleft(reversed(unrun))
                self._wake.notify()
        _finish(group[: len(group) - len(unrun)])

    def _commit(self, group: list[Job]) -> list[Job]:
        """Run and commit the jobs until the transaction is full; those that did not fit."""
        return insist(self._jitter, partial(self._once, group))

    def _once(self, group: list[Job]) -> list[Job]:
        session = self._connected()
        try:
            return self._attempt(session, group)
        finally:
            session.rollback()

    def _attempt(self, session: Session, group: list[Job]) -> list[Job]:
        session.start(durable=any(job.sync for job in group))
        clock = self._clock or session
        together = Transaction(session, clock=clock, ids=self._ids, writer=self._writer)
        ran = 0
        while ran < len(group) and together.size_bytes < limits.TRANSACTION_BYTES_MAX:
            tx = together.nested()
            if _try(group[ran], tx, session):
                together.merge(tx)
            ran += 1
        session.commit(together)
        self._watches.notify(together.writes, together.cleared)
        return group[ran:]

    def _connected(self) -> Session:
        if self._session is None or not self._session.usable:
            if self._session is not None:
                self._session.close()
                self._session = None
            self._session = Session(self._url)
        return self._session


def _try(job: Job, tx: Transaction, session: Session) -> bool:
    """Run the job's work; whether it went well. Its outcome counts only once the group has committed."""
    job.result = job.error = None
    try:
        job.result = run(tx, job.work, job.args, job.kwargs)
    except (Conflicted, Disconnected, KeyboardInterrupt):  # The last is for whoever has the turn, whose work it was.
        raise
    except BaseException as error:
        job.error = error
    if session.failure is not None:
        raise session.failure  # The work may have caught it; the transaction is lost all the same.
    return job.error is None


def _told_to_others(error: BaseException) -> Exception:
    """What is wrong with works of a group that somebody else ran: a signal was not for them."""
    if isinstance(error, Exception):
        return error
    return CommitUnknown(f"Whoever committed this was interrupted ({type(error).__name__}); look whether it is there")


def _finish(jobs: list[Job]) -> None:
    """Tell everybody who waits, each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.done is not None:
            job.done.release()
        elif job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, mine in by_loop.items():
        with suppress(RuntimeError):  # The loop was closed, and its callers are gone with it.
            loop.call_soon_threadsafe(_finish_on_loop, mine)


def _finish_on_loop(jobs: list[Job]) -> None:
    for job in jobs:
        if job.waiter is not None and not job.waiter.done():
            job.waiter.set_result(None)
