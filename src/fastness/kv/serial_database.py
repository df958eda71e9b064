"""Runs one writing transaction at a time: the concurrency control of an embedded key space.

A transaction acquires the write lock, runs `work` against the committed pairs, commits its writes and releases the
lock, all in microseconds. Only then does it wait until its tier's guarantee holds, so one sync covers every transaction
that committed meanwhile. Transactions never conflict and are never retried.

    lock ──► work(tx) ──► commit ──► unlock ──► wait for the sync that covers the commit ──► result
                                            └── may_lose: for the one that covers what it may have shown

Read snapshots do not take the lock.
"""

import threading
from abc import abstractmethod
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from fastness import limits
from fastness.clock import Clock, IdSource
from fastness.errors import Backend, Busy, Closed
from fastness.kv import fence_floor
from fastness.kv.contract import Database, Result, View, Work
from fastness.kv.events import Event
from fastness.kv.execution import check_tier, nested_transaction_error, run
from fastness.kv.fork_safety import invalidate_in_children
from fastness.kv.keys import pages
from fastness.kv.transactions import Transaction
from fastness.kv.watches import OnCommit, Watch, Watches
from fastness.threads import run_in_thread
from fastness.tiers import Tier

_CRITICAL: Final = Tier.CRITICAL  # Looking up an enum member costs as much as the rest of a check.


class SerialDatabase(Database):
    """A Database whose backend supplies a view, a snapshot, a commit and the wait for durability.

    The backend numbers its commits. `_wait_durable(commit, tier)` returns once the guarantee of `tier` holds for
    everything up to that number.
    """

    _current: View  # The latest committed pairs; read only with the write lock held.

    def __init__(self, clock: Clock, ids: IdSource) -> None:
        self._clock = clock
        self._ids = ids
        self._watches = Watches()
        self._write_lock = threading.Lock()
        self._running_thread = 0  # The thread that holds the write lock and runs its work.
        self._woke_waiter = False  # Whether the last commit woke a waiter on its own loop, which may share its sync.
        self._critical_commit = 0  # The last commit whose caller waits for its sync,
        self._exposed_commit = 0  # and the last one of those that `may_lose` transactions may show.
        self._fence_floor = 0
        self._closed = False
        invalidate_in_children(self)

    def invalidate_after_fork(self) -> None:  # pragma: no cover - Forked children are not measured.
        self._closed = True
        self._write_lock, self._running_thread = threading.Lock(), 0  # Another thread of the parent may hold the lock.

    @abstractmethod
    def _snapshot(self) -> View:
        """The committed pairs as of now, unaffected by later commits."""

    @abstractmethod
    def _commit(self, tx: Transaction) -> None:
        """Apply the writes of `tx`, all or nothing."""

    @abstractmethod
    def _last_commit(self) -> int:
        """The number of the newest commit that a view or a snapshot taken before this call can have seen."""

    @abstractmethod
    def _wait_durable(self, commit: int, tier: Tier) -> None:
        """Return once the guarantee of `tier` holds up to `commit`."""

    @abstractmethod
    def _wait_durable_async(self, commit: int, tier: Tier) -> Awaitable[None] | None:
        """`_wait_durable` for an event loop: an awaitable, or None if the guarantee already holds."""

    @abstractmethod
    def _release(self) -> None:
        """Sync and release all resources; called once, with the write lock held."""

    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        if tier is not _CRITICAL:
            check_tier(tier)
        if not self._write_lock.acquire(blocking=False):
            self._acquire_write_lock()
        try:
            result, commit, events = self._run_and_release(work, args, kwargs, tier, may_lose)
        except Exception:
            self._wait_seen_durable(tier)
            raise
        if may_lose:
            self._wait_durable(self._last_commit(), Tier.IMPORTANT)  # It is synced soon, if no other sync comes first.
        self._wait_durable(commit, tier)
        if events:
            self.publish(events)
        return result

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        if tier is not _CRITICAL:
            check_tier(tier)
        if not self._write_lock.acquire(blocking=False):
            if self._running_thread == threading.get_ident():
                raise nested_transaction_error()
            # Another thread holds the lock, most likely for microseconds, so block the event loop briefly. Move to a
            # thread only if it takes longer: the lock held there would send the loop's next calls to threads too.
            if not self._write_lock.acquire(timeout=limits.TRANSACTION_LOOP_WAIT_SECONDS_MAX):
                return await run_in_thread(self.transact, work, *args, tier=tier, may_lose=may_lose, **kwargs)
        try:
            result, commit, events = self._run_and_release(work, args, kwargs, tier, may_lose)
        except Exception:
            await self._wait_seen_durable_async(tier)
            raise
        if may_lose:
            self._wait_durable_async(self._last_commit(), Tier.IMPORTANT)
        durable = self._wait_durable_async(commit, tier)
        if durable is not None:
            try:
                await durable
            except CancelledError:  # The caller no longer waits for the sync, but its writes are committed.
                self.publish(events)
                raise
        if events:
            self.publish(events)
        return result

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        try:
            result, commit = self._read(work, args, kwargs)
        except Exception:
            self._wait_seen_durable(tier)
            raise
        self._wait_durable(commit, tier)
        return result

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        try:
            result, commit = self._read(work, args, kwargs)
        except Exception:
            await self._wait_seen_durable_async(tier)
            raise
        durable = self._wait_durable_async(commit, tier)
        if durable is not None:
            await durable
        return result

    def size_of(self, begin: bytes, end: bytes, *, pairs_max: int | None = None) -> int | None:
        return self.read(_size_of, begin, end, pairs_max, tier=Tier.IMPORTANT)

    def watch(self, prefix: bytes, *others: bytes, additions: bool = False) -> Watch:
        if self._closed:
            raise _closed_error()
        return self._watches.open(prefix, *others, additions=additions)

    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        if self._closed:
            raise _closed_error()
        return self._watches.subscribe(on_commit)

    def sync(self) -> None:
        if self._closed:
            raise _closed_error()
        self._wait_durable(self._last_commit(), Tier.CRITICAL)

    def close(self) -> None:
        self._acquire_write_lock()
        try:
            if not self._closed:
                self._closed = True
                self._watches.close()
                self._release()
        finally:
            self._write_lock.release()

    def _acquire_write_lock(self) -> None:
        if self._write_lock.acquire(blocking=False):
            return
        if self._running_thread == threading.get_ident():
            raise nested_transaction_error()
        if not self._write_lock.acquire(timeout=limits.TRANSACTION_WAIT_SECONDS_MAX):
            raise Busy(
                f"Another transaction has been running for {limits.TRANSACTION_WAIT_SECONDS_MAX} s; nothing was "
                "written. Keep slow work out of transact, then try again"
            )

    def _run_and_release(
        self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier, may_lose: bool
    ) -> tuple[Result, int, list[Event]]:
        """Run `work`, commit its writes, and release the write lock that the caller acquired.

        Returns the result, the commit that has to be durable before the caller gets it, and the events to publish then.
        """
        usage = self.usage
        ticket = None if usage is None else usage.begin()
        try:
            if self._closed:
                raise _closed_error()
            self._running_thread = threading.get_ident()
            tx = Transaction(self._current, clock=self._clock, ids=self._ids)
            tx.low_space, tx.fence_floor = self.low_space, self._fence_floor
            tx.defaults, tx.usage = self.defaults, usage
            result = run(tx, work, args, kwargs)
            writes = tx.writes or tx.cleared
            if writes:
                if usage is not None:
                    usage.add_writes(tx.writes)
                self._commit(tx)
                if fence_floor.KEY in tx.writes:
                    self._fence_floor = fence_floor.decode(tx.writes[fence_floor.KEY])
                self._woke_waiter = bool(self._watches.count) and self._watches.notify(tx.writes, tx.cleared)
            if tier is not _CRITICAL:
                return result, self._last_commit(), tx.events
            if not may_lose or tx.is_kept:
                commit = self._last_commit()
                if writes:
                    self._critical_commit = commit
                    if tx.is_exposed:
                        self._exposed_commit = commit
                return result, commit, tx.events
            # Without writes, it may show that something is not there any more.
            return result, self._exposed_commit if writes else self._critical_commit, tx.events
        finally:
            self._running_thread = 0
            if usage is not None and ticket is not None:
                usage.end(ticket)
            self._write_lock.release()

    def _wait_seen_durable(self, tier: Tier) -> None:
        """Wait for what a failed `work` may have read: a caller may act on an error as on a result."""
        if not self._closed:
            with suppress(Backend, Closed):  # The error of `work` is more useful.
                self._wait_durable(self._last_commit(), tier)

    async def _wait_seen_durable_async(self, tier: Tier) -> None:
        if not self._closed:
            with suppress(Backend, Closed):
                durable = self._wait_durable_async(self._last_commit(), tier)
                if durable is not None:
                    await durable

    def _read(self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Result, int]:
        if self._closed:
            raise _closed_error()
        if self._running_thread == threading.get_ident():
            raise nested_transaction_error()
        tx = Transaction(self._snapshot(), clock=self._clock, ids=self._ids, writable=False)
        tx.fence_floor, tx.defaults = self._fence_floor, self.defaults
        commit = self._last_commit()
        return run(tx, work, args, kwargs), commit


def _closed_error() -> Closed:
    return Closed("The database was closed, or this process was forked after it was opened; open it again")


def _size_of(tx: Transaction, begin: bytes, end: bytes, pairs_max: int | None) -> int | None:
    count = size = 0
    for page in pages(tx, begin, end):
        count += len(page)
        if pairs_max is not None and count > pairs_max:
            return None
        size += sum([len(key) + len(value) for key, value in page])
    return size
