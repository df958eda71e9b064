"""One transaction at a time: the whole concurrency control of an embedded key space.

A transaction takes its turn, runs `work` against the committed pairs, commits its writes in memory order and passes
the turn on, all in microseconds. Only then does it wait for its tier's promise, so that one sync covers every
transaction that committed meanwhile. Nothing ever conflicts and nothing is ever retried.

    turn ──► work(tx) ──► commit ──► turn passed on ──► wait for the sync that covers the commit ──► result

Read snapshots take no turn at all.
"""

import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from holdfast import limits
from holdfast.clock import Clock, IdSource
from holdfast.errors import Backend, Busy, Closed
from holdfast.kv.contract import Database, Result, View, Work
from holdfast.kv.execution import check_tier, nested, run
from holdfast.kv.fork_safety import forget_in_children
from holdfast.kv.transactions import Transaction
from holdfast.kv.watches import OnCommit, Watch, Watches
from holdfast.threads import run_in_thread
from holdfast.tiers import Tier


class SerialDatabase(Database):
    """A Database whose backend supplies a view, a snapshot, a commit and the wait for a promise.

    Commits are numbered by the backend; `_settle(commit, tier)` returns once the promise of `tier` holds for
    everything up to that number.
    """

    _current: View  # The committed pairs as they are now; read only by whoever has the turn.

    def __init__(self, clock: Clock, ids: IdSource) -> None:
        self._clock = clock
        self._ids = ids
        self._watches = Watches()
        self._turn = threading.Lock()
        self._running = 0  # The thread whose turn it is.
        self._woke = False  # Whether the last commit woke somebody on its event loop, who may share its sync.
        self._closed = False
        forget_in_children(self)

    def forget_after_fork(self) -> None:
        self._closed = True
        self._turn, self._running = threading.Lock(), 0  # Another thread of the parent may have had the turn.

    @abstractmethod
    def _snapshot(self) -> View:
        """The committed pairs at this moment, unchanged by later commits."""

    @abstractmethod
    def _commit(self, tx: Transaction) -> None:
        """Apply the writes of `tx`, all or nothing."""

    @abstractmethod
    def _last_commit(self) -> int:
        """The number of the newest commit that a view or a snapshot taken before this call can have seen."""

    @abstractmethod
    def _settle(self, commit: int, tier: Tier) -> None:
        """Return once the promise of `tier` holds up to `commit`."""

    @abstractmethod
    def _settling(self, commit: int, tier: Tier) -> Awaitable[None] | None:
        """`_settle` for an event loop: what to await, or None if the promise holds already."""

    @abstractmethod
    def _release(self) -> None:
        """Sync and give everything back; called once, with the turn held."""

    def transact(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        self._take_turn()
        try:
            result, commit = self._run_and_pass_on(work, args, kwargs)
        except Exception:
            self._settle_seen(tier)
            raise
        self._settle(commit, tier)
        return result

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any
    ) -> Result:
        check_tier(tier)
        if not self._turn.acquire(blocking=False):
            if self._running == threading.get_ident():
                raise nested()
            # Another thread has the turn, most likely for some microseconds. Only if it takes long, the event loop goes
            # on: whoever goes to a thread keeps the turn from the loop's next calls, which then follow it there.
            if not self._turn.acquire(timeout=limits.TURN_LOOP_SECONDS_MAX):
                return await run_in_thread(self.transact, work, *args, tier=tier, **kwargs)
        try:
            result, commit = self._run_and_pass_on(work, args, kwargs)
        except Exception:
            await self._settle_seen_async(tier)
            raise
        settling = self._settling(commit, tier)
        if settling is not None:
            await settling
        return result

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        try:
            result, commit = self._read(work, args, kwargs)
        except Exception:
            self._settle_seen(tier)
            raise
        self._settle(commit, tier)
        return result

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        try:
            result, commit = self._read(work, args, kwargs)
        except Exception:
            await self._settle_seen_async(tier)
            raise
        settling = self._settling(commit, tier)
        if settling is not None:
            await settling
        return result

    def watch(self, prefix: bytes) -> Watch:
        if self._closed:
            raise _closed()
        return self._watches.open(prefix)

    def subscribe(self, told: OnCommit) -> Callable[[], None]:
        if self._closed:
            raise _closed()
        return self._watches.subscribe(told)

    def sync(self) -> None:
        if self._closed:
            raise _closed()
        self._settle(self._last_commit(), Tier.CRITICAL)

    def close(self) -> None:
        self._take_turn()
        try:
            if not self._closed:
                self._closed = True
                self._watches.close()
                self._release()
        finally:
            self._turn.release()

    def _take_turn(self) -> None:
        if self._turn.acquire(blocking=False):
            return
        if self._running == threading.get_ident():
            raise nested()
        if not self._turn.acquire(timeout=limits.TURN_WAIT_SECONDS_MAX):
            raise Busy(
                f"Another transaction has been running for {limits.TURN_WAIT_SECONDS_MAX} s; nothing was written. "
                "Keep slow work out of transact, then try again"
            )

    def _run_and_pass_on(self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Result, int]:
        """Run `work` and commit what it wrote, with the turn that the caller took, and pass the turn on."""
        try:
            if self._closed:
                raise _closed()
            self._running = threading.get_ident()
            tx = Transaction(self._current, clock=self._clock, ids=self._ids)
            result = run(tx, work, args, kwargs)
            if tx.wrote:
                self._commit(tx)
                self._woke = bool(self._watches.count) and self._watches.notify(tx.writes, tx.cleared)
            return result, self._last_commit()
        finally:
            self._running = 0
            self._turn.release()

    def _settle_seen(self, tier: Tier) -> None:
        """Make good what a work that raised may have seen: an error is an answer too, and must not be taken back."""
        if not self._closed:
            with suppress(Backend, Closed):  # The work's own error says more.
                self._settle(self._last_commit(), tier)

    async def _settle_seen_async(self, tier: Tier) -> None:
        if not self._closed:
            with suppress(Backend, Closed):
                settling = self._settling(self._last_commit(), tier)
                if settling is not None:
                    await settling

    def _read(self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Result, int]:
        if self._closed:
            raise _closed()
        if self._running == threading.get_ident():
            raise nested()
        tx = Transaction(self._snapshot(), clock=self._clock, ids=self._ids, writable=False)
        commit = self._last_commit()
        return run(tx, work, args, kwargs), commit


def _closed() -> Closed:
    return Closed("The database was closed, or this process was forked after it was opened; open it again")
