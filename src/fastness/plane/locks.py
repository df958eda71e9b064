"""Handlers of ordered locks that processes share."""

from collections.abc import Sequence

from fastness.kv import Transaction
from fastness.layers import locks
from fastness.layers.lock_records import LEVELS, SessionKey
from fastness.lock_rules import DATA_LEVELS
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.tiers import TierPolicy
from fastness.wire.locks import (
    AcquireLocks,
    CheckLock,
    EndLockSession,
    GrantedLocks,
    ListLockSessions,
    LockSessions,
    LocksReleased,
    LockStatistics,
    ReleaseLocks,
    RenewLocks,
    SessionRenewed,
    ShowLockStats,
)
from fastness.wire.requests import Committed


@service
def acquire(stores: AnyStores, request: AcquireLocks) -> Served[GrantedLocks]:
    return stores.shared_locks.acquire(
        request.session,
        request.claim,
        [_full_path(path, stores.services.policy) for path in request.paths],
        request.mode,
        owner=request.owner or "an unnamed caller",
        lease_ms=round(request.lease_seconds * 1_000),
        wait_ms=round(request.wait_seconds * 1_000),
        continues=request.continues,
    )


@transaction
def renew(tx: Transaction, request: RenewLocks) -> SessionRenewed:
    return SessionRenewed(locks.renew(tx, request.session, lease_ms=round(request.lease_seconds * 1_000)))


@transaction
def release(tx: Transaction, request: ReleaseLocks) -> LocksReleased:
    return LocksReleased(locks.release(tx, request.session, request.claim))


@transaction
def check(tx: Transaction, request: CheckLock) -> Committed:
    locks.check(tx, request.lock)
    return Committed(request.tier)


@transaction
def page(tx: Transaction, request: ListLockSessions) -> LockSessions:
    found = locks.page(tx, request.universe, after=request.after, limit=request.limit)
    live = [locks.describe(number, session) for number, session in found if not session.is_expired(tx.now_ms)]
    return LockSessions(live, found[-1][0] if len(found) == request.limit else None)


@transaction
def end(tx: Transaction, request: EndLockSession) -> LocksReleased:
    return LocksReleased(locks.end(tx, SessionKey(request.universe, request.number)))


@service
def stats(stores: AnyStores, request: ShowLockStats) -> Served[LockStatistics]:
    return stores.shared_locks.stats(request.universe)


def _full_path(path: Sequence[str], policy: TierPolicy) -> Sequence[str]:
    """The path; of a record that is named by its id alone, with the type that the policy gives it."""
    level, name = LEVELS.parse(path)
    if level == len(DATA_LEVELS) - 1 and "/" not in name:
        return DATA_LEVELS[level], policy.record_name(name) or name
    return path
