"""The key space in one PostgreSQL table, shared by any number of processes.

`committer.py` runs writing transactions in groups, `locked_view.py` locks the parts of the key space that they touch,
and `listener.py` notifies watches of other processes' commits. Snapshots for reading take no locks. The clock is the
database's own, so that all nodes agree on what has expired.
"""

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, cast

from fastness import limits
from fastness.backends.postgres.committer import Committer
from fastness.backends.postgres.format_lock import raise_format
from fastness.backends.postgres.groups import GroupOptions, Isolation, KnownFloor
from fastness.backends.postgres.jobs import Job
from fastness.backends.postgres.listener import Listener
from fastness.backends.postgres.locked_view import SnapshotView
from fastness.backends.postgres.primary_check import PrimaryCheck
from fastness.backends.postgres.retries import retry_transaction
from fastness.backends.postgres.schema import prepare_schema
from fastness.backends.postgres.sessions import Session
from fastness.backends.postgres.standby import ReadFrom, StandbyReads
from fastness.backends.postgres.user_transactions import PlaceFinder, UserTransaction
from fastness.clock import Clock, IdSource
from fastness.errors import Busy, Closed, Unsupported
from fastness.kv import Database, OnCommit, ReplayedPosition, Result, Transaction, Watch, Watches, Work
from fastness.kv.contention import Contention
from fastness.kv.execution import check_tier, nested_transaction_error, run
from fastness.kv.fork_safety import invalidate_in_children
from fastness.kv.value_cipher import GENERATION, ValueCipher, default_cipher
from fastness.tiers import Tier


class PostgresDatabase(Database):
    """A key space in the PostgreSQL database that `url` names."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        create: bool = True,
        isolation: Isolation = "locks",
        read_from: ReadFrom = "primary",
        cipher: ValueCipher | None = None,
    ) -> None:
        """Connect, and create missing tables. `clock` replaces the database's clock in tests.

        With `read_from="standby"`, the reads of `stale` come from a standby among the hosts of the URL.

        `isolation="serializable"` uses PostgreSQL's SERIALIZABLE instead of locks, to compare them. All processes of a
        plane must use the same.

        Raises:
            Unreachable: the server does not answer.
            NotFound: the tables are missing, and `create` is False.
            SchemaMismatch: another version of Fastness created the tables.
            EncryptionKeyMissing: it has encrypted universes, and `cipher` cannot unwrap their keys.
        """
        floor = KnownFloor(prepare_schema(url, create=create))
        self.cipher = cipher or default_cipher()
        self._url = url
        self._clock = clock
        self._ids = ids or IdSource()
        self._watches = Watches()
        self._writer = uuid.uuid4().hex[:12]
        self.contention: Contention = Contention()
        self._running_threads: set[int] = set()
        self._options = GroupOptions(
            url=url,
            clock=clock,
            ids=self._ids,
            watches=self._watches,
            writer=self._writer,
            floor=floor,
            database=self,
            isolation=isolation,
            contention=self.contention,
            cipher=self.cipher,
            running_threads=self._running_threads,
        )
        self._committer = Committer(self._options)
        self._listener = Listener(url, self._watches, self._writer)
        self._primary_check = PrimaryCheck(url)
        self._stale: StandbyReads | None = None
        if read_from == "standby":
            self._stale = StandbyReads(
                self,
                url,
                clock=clock,
                ids=self._ids,
                writer=self._writer,
                cipher=self.cipher,
                check_usable=self._check_usable,
            )
        self._reader_slots = threading.BoundedSemaphore(limits.READERS_MAX)
        self._idle_readers: list[Session] = []
        self._jitter = Random()
        self._isolation = isolation
        self._place = PlaceFinder(url)
        self._thread_local = threading.local()
        self._closed = False
        invalidate_in_children(self)
        try:
            self.read(_load_keys)
        except BaseException:
            self.close()
            raise

    def invalidate_after_fork(self) -> None:
        self._closed = True  # psycopg never closes a connection in a process that did not open it.

    @property
    def stale(self) -> Database:
        return self._stale or self

    @property
    def replayed_position(self) -> ReplayedPosition | None:
        return None if self._stale is None else self._stale.replayed_position

    def check_reachable(self) -> None:
        self._check_usable()
        self._primary_check.check()

    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        del may_lose  # A commit waits for its sync, with all callers of the group.
        check_tier(tier)
        self._check_usable()
        job = Job(work, args, kwargs, durable=tier is Tier.CRITICAL)
        result: Result = self._committer.run(job)
        if job.events:
            self.publish(job.events)
        return result

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        del may_lose
        check_tier(tier)
        self._check_usable()
        job = Job(work, args, kwargs, durable=tier is Tier.CRITICAL, loop=asyncio.get_running_loop())
        self._submit_with_tick(job)
        assert job.waiter is not None
        await job.waiter
        result: Result = job.outcome()
        if job.events:
            self.publish(job.events)
        return result

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        self._check_usable()
        with self._reader_slot():
            attempt = partial(self._read, work, args, kwargs, tier is Tier.CRITICAL)
            return retry_transaction(self._jitter, attempt, self.contention)

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._check_usable()
        return await asyncio.to_thread(self.read, work, *args, tier=tier, **kwargs)

    def watch(self, prefix: bytes, *others: bytes, additions: bool = False) -> Watch:
        self._check_usable()
        watch = self._watches.open(prefix, *others, additions=additions)
        try:
            self._listener.ensure_listening()
        except BaseException:
            watch.close()
            raise
        return watch

    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        self._check_usable()
        stop = self._watches.subscribe(on_commit)
        try:
            self._listener.ensure_listening()
        except BaseException:
            stop()
            raise
        return stop

    def size_of(self, begin: bytes, end: bytes, *, pairs_max: int | None = None) -> int | None:
        return self.read(_size_of, begin, end, pairs_max, tier=Tier.IMPORTANT)

    def within(self, connection: object) -> UserTransaction:
        self._check_usable()
        if self._isolation != "locks":
            raise Unsupported("A plane with isolation='serializable' takes no locks; open it without that option")
        return UserTransaction(
            connection,
            self._place,
            self._check_usable,
            options=self._options,
            load_keys=lambda: self.read(_load_keys),
        )

    def sync(self) -> None:
        # A synced commit syncs every earlier commit, of any process.
        self.read(_now_ms)

    def raise_format(self, to: int) -> None:
        """Raise the format of the plane from `to - 1` to `to`; see `format_lock.raise_format`."""
        self._check_usable()
        raise_format(self._url, to)

    def close(self) -> None:
        if threading.get_ident() in self._running_threads:
            raise nested_transaction_error()
        if self._closed:
            return
        self._closed = True
        self._committer.close()
        self._listener.close()
        self._primary_check.close()
        if self._stale is not None:
            self._stale.close()
        self._watches.close()
        for _ in range(limits.READERS_MAX):  # Holding every slot means that no reader is active.
            self._reader_slots.acquire(timeout=limits.TRANSACTION_WAIT_SECONDS_MAX)
        for session in self._idle_readers:
            session.close()

    def _submit_with_tick(self, job: Job) -> None:
        """Queue the job together with all others of this event loop tick."""
        tick_jobs: list[Job] | None = getattr(self._thread_local, "jobs", None)
        if tick_jobs is None:
            tick_jobs = self._thread_local.jobs = []
        tick_jobs.append(job)
        if len(tick_jobs) == 1 and job.loop is not None:
            job.loop.call_soon(self._submit_tick)

    def _submit_tick(self) -> None:
        jobs, self._thread_local.jobs = self._thread_local.jobs, []
        try:
            self._committer.submit(jobs)
        except (Busy, Closed) as error:
            for job in jobs:
                job.error = error
                if job.waiter is not None and not job.waiter.done():
                    job.waiter.set_result(None)

    def _read(self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any], durable: bool) -> Result:
        session = self._idle_readers.pop() if self._idle_readers else Session(self._url, self.cipher, reading=True)
        try:
            session.start(b"read", durable=durable)
            view = SnapshotView(session)
            tx = Transaction(view, clock=self._clock or view, ids=self._ids, writable=False, writer=self._writer)
            tx.data_format, tx.defaults = self.data_format, self.defaults
            try:
                return run(tx, work, args, kwargs)
            finally:
                # An error of `work` is an answer too: what it read must be durable as well.
                session.commit(tx, view.log_position)
        finally:
            session.rollback()
            if session.is_usable:
                self._idle_readers.append(session)
            else:
                session.close()

    @contextmanager
    def _reader_slot(self) -> Iterator[None]:
        if not self._reader_slots.acquire(timeout=limits.TRANSACTION_WAIT_SECONDS_MAX):
            raise Busy(f"{limits.READERS_MAX} snapshot reads are running; try again when one of them has ended")
        try:
            yield
        finally:
            self._reader_slots.release()

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("The database was closed, or this process was forked after it was opened; open it again")
        if threading.get_ident() in self._running_threads:
            raise nested_transaction_error()


def _load_keys(tx: Transaction) -> None:
    tx.get(GENERATION)


def _now_ms(tx: Transaction) -> int:
    return tx.now_ms


def _size_of(tx: Transaction, begin: bytes, end: bytes, pairs_max: int | None) -> int | None:
    """The server adds up the sizes, so the values need not be sent. One statement must not take too long."""
    view, count, size = cast("SnapshotView", tx.view), 0, 0
    first: bytes | None = begin
    while first is not None:
        if pairs_max is not None and count > pairs_max:
            return None
        found, found_bytes, first = view.size(first, end, limits.SIZE_PAIRS)
        count, size = count + found, size + found_bytes
    return None if pairs_max is not None and count > pairs_max else size
