"""Runs the jobs of a group one after the other in one transaction, each on top of the writes of those before it.

The writes of a job that raises are discarded, without affecting the others. A job that needs a lock which another
process holds is left out, and runs later in a group that waits for the lock.
"""

import random
from functools import partial
from threading import get_ident
from typing import Final, Literal, NamedTuple

from fastness import limits
from fastness.backends.postgres.jobs import Job
from fastness.backends.postgres.locked_view import (
    IsAwaited,
    LockedView,
    LockTaken,
    Needs,
    SnapshotView,
    nothing_is_awaited,
)
from fastness.backends.postgres.parts import EVERYTHING
from fastness.backends.postgres.retries import Conflicted, Disconnected, retry_transaction
from fastness.backends.postgres.sessions import Session
from fastness.clock import Clock, IdSource
from fastness.errors import CommitUnknown
from fastness.kv import Database, Transaction, Watches
from fastness.kv.contention import Contention
from fastness.kv.contract import UsageCounter
from fastness.kv.execution import run
from fastness.kv.value_cipher import ValueCipher

Isolation = Literal["locks", "serializable"]
_BEGIN: Final = {"locks": b"begin", "serializable": b"serializable"}


class KnownFloor:
    """The fence floor as this process has last read it. Another process may raise it."""

    def __init__(self, value: int) -> None:
        self.value = value


class GroupOptions(NamedTuple):
    """What all groups of a process have in common."""

    url: str
    clock: Clock | None
    ids: IdSource
    watches: Watches
    writer: str
    floor: KnownFloor
    database: Database  # Its `data_format`, `defaults` and `usage` apply.
    isolation: Isolation
    contention: Contention
    cipher: ValueCipher
    running_threads: set[int]  # The threads that run a group now.


class Ran(NamedTuple):
    """What became of the jobs of a group."""

    done: list[Job]  # The caller wakes those that wait for them.
    put_off: list[Job]  # They have to wait for locks.
    unstarted: list[Job]  # They did not fit into the transaction.


class GroupRunner:
    """A connection that runs groups. Used by one thread at a time."""

    def __init__(self, options: GroupOptions, writer: str, is_awaited: IsAwaited = nothing_is_awaited) -> None:
        """`writer` names the connection: transactions that share a part must not have the same `Transaction.writer`."""
        self._options = options
        self._writer = writer
        self._is_awaited = is_awaited
        self._jitter = random.Random()
        self._session: Session | None = None
        self._put_off: list[Job] = []
        self._unstarted: list[Job] = []

    def run(self, group: list[Job], needs: Needs, *, own: Job | None = None) -> Ran:
        """Run and commit the jobs after waiting for the locks of `needs`.

        `own` is the job of the calling thread, which gets signals as they are.
        """
        self._put_off, self._unstarted = [], []
        try:
            retry_transaction(self._jitter, partial(self._attempt, group, needs), self._options.contention)
        except BaseException as error:
            for job in self._done(group):
                job.result, job.error = None, error if job is own else _error_for_others(error)
        return Ran(self._done(group), self._put_off, self._unstarted)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _done(self, group: list[Job]) -> list[Job]:
        waiting = {id(job) for job in (*self._put_off, *self._unstarted)}
        return [job for job in group if id(job) not in waiting]

    def _attempt(self, group: list[Job], needs: Needs) -> None:
        session = self._open_session()
        usage = self._options.database.usage
        ticket = None if usage is None else usage.begin()
        self._options.running_threads.add(get_ident())
        try:
            self._run_once(session, group, needs, usage)
        finally:
            self._options.running_threads.discard(get_ident())
            session.rollback()
            if usage is not None and ticket is not None:
                usage.end(ticket)

    def _run_once(self, session: Session, group: list[Job], needs: Needs, usage: UsageCounter | None) -> None:
        options = self._options
        self._put_off, self._unstarted = [], []
        session.start(_BEGIN[options.isolation], durable=any(job.sync for job in group))
        kind = LockedView if options.isolation == "locks" else SnapshotView
        view = kind(session, self._is_awaited)
        if needs:
            view.wait_for(needs)
        batch_tx = Transaction(view, clock=options.clock or view, ids=options.ids, writer=self._writer)
        batch_tx.fence_floor, batch_tx.data_format = options.floor.value, options.database.data_format
        batch_tx.defaults, batch_tx.usage = options.database.defaults, usage
        ran = 0
        while ran < len(group) and batch_tx.size_bytes < limits.TRANSACTION_BYTES_MAX:
            batch_tx.renew_time()
            job, tx = group[ran], batch_tx.nested()
            ran += 1
            succeeded = _try(job, tx, view, session)
            if view.fence_floor not in (None, batch_tx.fence_floor):
                options.floor.value = view.fence_floor or 0
                raise Conflicted("the fence floor was raised")
            if view.taken is not None:
                self._put_off.append(_put_off(job, view))
                options.contention.lock_waits += 1
            elif succeeded:
                batch_tx.merge(tx)
        self._unstarted = group[ran:]
        if len(self._put_off) == ran:
            return
        if usage is not None:
            usage.add_writes(batch_tx.writes)
        session.commit(batch_tx, view.log_position)
        options.watches.notify(batch_tx.writes, batch_tx.cleared)

    def _open_session(self) -> Session:
        if self._session is None or not self._session.is_usable:
            if self._session is not None:
                self._session.close()
                self._session = None
            self._session = Session(self._options.url, self._options.cipher, writer=self._options.writer)
        return self._session


def _put_off(job: Job, view: LockedView) -> Job:
    """Let a job wait for the locks that it is known to need."""
    job.result = job.error = None
    job.attempts += 1
    for part, exclusive in view.needs.items():
        job.needs[part] = exclusive or job.needs.get(part, False)
    if job.attempts >= limits.LOCK_ATTEMPTS_MAX:
        job.needs[EVERYTHING] = True
    job.waited_for = view.waited_for
    return job


def _try(job: Job, tx: Transaction, view: LockedView, session: Session) -> bool:
    """Run one job. Returns whether it succeeded. Its outcome is final only after the group has committed."""
    job.result = job.error = None
    view.start_work()
    try:
        job.result, job.events = run(tx, job.work, job.args, job.kwargs), tx.events
        view.lock_writes(tx)
    except (Conflicted, Disconnected, KeyboardInterrupt):  # The last is for the thread that runs the group.
        raise
    except LockTaken:
        pass
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
