"""Waiting for ordered locks that processes share.

A claim that cannot be granted at once is stored in the line of a lock. The transaction that frees the lock grants it
to the line, in any process, and so rewrites the record of the session that waits. The waiting caller watches this
record. It wakes earlier to end an expired session that is in its way, and to renew its own.

    tried ──► granted
      └─────► in line ──► its session's record changes, or time passes ──► tried again ──► granted, or in line
                 └──► timed out, cancelled: the claim is withdrawn with everything that it has taken
"""

from collections.abc import Sequence
from functools import partial
from secrets import token_hex
from typing import Final, NamedTuple

from fastness.clock import Clock
from fastness.errors import LockTimeout
from fastness.kv import Database, Transaction
from fastness.layers import locks
from fastness.layers.lock_records import LEVELS
from fastness.layers.lock_transaction import Waiting
from fastness.layers.locks import AcquireCall
from fastness.limits import LOCK_LINE_MAX, READ_ENTRIES_MAX
from fastness.lock_rules import DATA_LEVELS, Path, parse_mode, timeout_error
from fastness.runtime.cancellation import finish_or_undo_async, undo_async
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.locks.counters import Acquisition, LockCounters
from fastness.tiers import Tier
from fastness.wire.locks import GrantedLocks, LockSession, LockStatistics

_ATTEMPT_BYTES: Final = 8
_RENEWALS_PER_LEASE: Final = 3


class AsyncSharedLockWaiter:
    """Grants locks to sessions, immediately or after a wait."""

    def __init__(
        self, database: Database, clock: Clock | None, options: ConsumerOptions, counters: LockCounters
    ) -> None:
        self._database = database
        self._waits = AsyncCommitWaits(database, clock, options)
        self._counters = counters

    async def acquire(
        self,
        session: LockSession,
        claim: str,
        paths: Sequence[Path],
        mode: str,
        *,
        owner: str,
        lease_ms: int,
        wait_ms: int,
        continues: bool = False,
    ) -> GrantedLocks:
        """The locks at `paths`, all or none, granted within `wait_ms`.

        Always CRITICAL: a fence must be durable before its holder learns it. A repeated claim gets the answer that it
        got before. A caller that is cancelled holds none of them.

        Raises:
            LockTimeout: other sessions held one of them for all of `wait_ms`.
            LockOrderViolation: the session holds a lock that comes after one of them, or holds it in a weaker mode.
            LeaseExpired: the session `continues`, and has ended.
            IdempotencyKeyReused: the session has this claim for other locks, or in another mode.
            Busy: too many claims wait for one of them.
        """
        steps = locks.steps_of(paths, parse_mode(mode))
        call = AcquireCall(session, claim, steps, owner, lease_ms, continues, token_hex(_ATTEMPT_BYTES))
        with self._counters.acquiring(session.universe, steps, may_wait=wait_ms > 0) as acquisition:
            began_ms = self._waits.now_ms()
            tried = await self._try_acquire(call, may_wait=wait_ms > 0)
            if isinstance(tried.outcome, GrantedLocks):
                return tried.outcome
            if not wait_ms:
                raise _timeout(tried.outcome, wait_ms, acquisition)
            try:
                return await self._wait(call, tried, began_ms, wait_ms, acquisition)
            except (LockTimeout, GeneratorExit):  # Its event loop is gone, and the claim ends with its lease.
                raise
            except BaseException:
                await undo_async(partial(self._withdraw, call))
                raise

    async def stats(self, universe: str) -> LockStatistics:
        """Statistics by level: totals of this process, and the holders in all processes."""
        holders = await self._database.read_async(_count_holders, universe, tier=Tier.IMPORTANT)
        return LockStatistics(self._counters.stats(universe, holders))

    async def _wait(
        self, call: AcquireCall, tried: "_Tried", began_ms: int, wait_ms: int, acquisition: Acquisition
    ) -> GrantedLocks:
        until_ms, tried_ms = began_ms + wait_ms, began_ms
        with self._waits.open(locks.watch_prefix(call.session), until_ms=until_ms) as wait:
            while not isinstance(tried.outcome, GrantedLocks):
                acquisition.wait(tried.outcome.key[0])
                pause_ms = min(tried.wake_in_ms, call.lease_ms // _RENEWALS_PER_LEASE)
                due_ms = min(until_ms, tried_ms + pause_ms)
                while (left_ms := due_ms - self._waits.now_ms()) > 0 and not await self._has_changed(call, tried):
                    await wait.pause(left_ms)
                tried_ms = self._waits.now_ms()
                may_wait = tried_ms < until_ms
                tried = await self._try_acquire(call, may_wait=may_wait)
                if not may_wait and isinstance(tried.outcome, Waiting):
                    raise _timeout(tried.outcome, wait_ms, acquisition)
        return tried.outcome

    async def _has_changed(self, call: AcquireCall, tried: "_Tried") -> bool:
        """Whether the session's record was written since: a step was granted, or the session was renewed or ended."""
        key = locks.watch_prefix(call.session)
        return await self._database.read_async(Transaction.get, key, tier=Tier.IMPORTANT) != tried.record

    async def _try_acquire(self, call: AcquireCall, *, may_wait: bool) -> "_Tried":
        return await finish_or_undo_async(
            self._database.transact_async(_acquire, call, may_wait=may_wait), lambda _: self._withdraw(call)
        )

    def _withdraw(self, call: AcquireCall) -> None:
        """Release the claim, unless its caller has repeated the call on another connection."""
        self._database.transact(locks.release, call.session, call.claim, attempt=call.attempt, tier=Tier.IMPORTANT)


class _Tried(NamedTuple):
    """The outcome of one transaction; of a claim that waits, the record to watch and when to try again."""

    outcome: GrantedLocks | Waiting
    record: bytes | None
    wake_in_ms: int


def _acquire(tx: Transaction, call: AcquireCall, *, may_wait: bool) -> _Tried:
    outcome = locks.acquire(tx, call, may_wait=may_wait)
    if isinstance(outcome, GrantedLocks):
        return _Tried(outcome, None, 0)
    record = tx.get(locks.watch_prefix(call.session))
    return _Tried(outcome, record, max(outcome.wake_ms - tx.now_ms, 1))


def _count_holders(tx: Transaction, universe: str) -> list[int]:
    """How many locks of each level are held, by the first sessions."""
    holders = [0 for _ in DATA_LEVELS]
    after = ""
    for _ in range(LOCK_LINE_MAX // READ_ENTRIES_MAX):
        page = locks.page(tx, universe, after=after, limit=READ_ENTRIES_MAX)
        for _, session in page:
            for level, _ in () if session.is_expired(tx.now_ms) else session.grants():
                holders[level] += 1
        if len(page) < READ_ENTRIES_MAX:
            break
        after = page[-1][0]
    return holders


def _timeout(waiting: Waiting, wait_ms: int, acquisition: Acquisition) -> LockTimeout:
    acquisition.refuse(waiting.key[0])
    holders = [f"{owner} ({mode})" for owner, mode in waiting.holders]
    return timeout_error(LEVELS.describe(waiting.key), wait_ms / 1_000, holders, waiting.in_line)
