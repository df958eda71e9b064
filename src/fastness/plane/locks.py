"""Handlers of ordered locks that processes share."""

from collections.abc import Sequence

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import locks
from fastness.layers.lock_records import LEVELS, SessionKey
from fastness.limits import LEASE_WAIT_SECONDS_MAX, LOCK_LEASE_SECONDS_MAX, LOCK_LEASE_SECONDS_MIN
from fastness.lock_rules import DATA_LEVELS
from fastness.names import checked_name
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
    checked_name("universe", request.session.universe)
    return stores.shared_locks.acquire(
        request.session,
        request.claim,
        [_full_path(path, stores.services.policy) for path in request.paths],
        request.mode,
        owner=request.owner or "an unnamed caller",
        lease_ms=_lease_ms(request.lease_seconds),
        wait_ms=_wait_ms(request.wait_seconds),
        continues=request.continues,
    )


@transaction
def renew(tx: Transaction, request: RenewLocks) -> SessionRenewed:
    checked_name("universe", request.session.universe)
    return SessionRenewed(locks.renew(tx, request.session, lease_ms=_lease_ms(request.lease_seconds)))


@transaction
def release(tx: Transaction, request: ReleaseLocks) -> LocksReleased:
    checked_name("universe", request.session.universe)
    return LocksReleased(locks.release(tx, request.session, request.claim))


@transaction
def check(tx: Transaction, request: CheckLock) -> Committed:
    checked_name("universe", request.lock.session.universe)
    locks.check(tx, request.lock)
    return Committed(request.tier)


@transaction
def page(tx: Transaction, request: ListLockSessions) -> LockSessions:
    universe = checked_name("universe", request.universe)
    after = checked_name("number", request.after) if request.after else ""
    found = locks.page(tx, universe, after=after, limit=request.limit)
    live = [locks.describe(number, session) for number, session in found if not session.is_expired(tx.now_ms)]
    return LockSessions(live, found[-1][0] if len(found) == request.limit else None)


@transaction
def end(tx: Transaction, request: EndLockSession) -> LocksReleased:
    universe = checked_name("universe", request.universe)
    return LocksReleased(locks.end(tx, SessionKey(universe, checked_name("number", request.number))))


@service
def stats(stores: AnyStores, request: ShowLockStats) -> Served[LockStatistics]:
    return stores.shared_locks.stats(checked_name("universe", request.universe))


def _full_path(path: Sequence[str], policy: TierPolicy) -> Sequence[str]:
    """The path; of a record that is named by its id alone, with the type that the policy gives it."""
    level, name = LEVELS.parse(path)
    if level == len(DATA_LEVELS) - 1 and "/" not in name:
        return DATA_LEVELS[level], policy.record_name(name) or name
    return path


def _lease_ms(seconds: float) -> int:
    if not LOCK_LEASE_SECONDS_MIN <= seconds <= LOCK_LEASE_SECONDS_MAX:  # NaN fails this too.
        raise InvalidArgument(
            f"lease_seconds is {seconds}; give {LOCK_LEASE_SECONDS_MIN:g} to {LOCK_LEASE_SECONDS_MAX:g}"
        )
    return round(seconds * 1_000)


def _wait_ms(seconds: float) -> int:
    if not 0 <= seconds <= LEASE_WAIT_SECONDS_MAX:
        raise InvalidArgument(f"wait_seconds is {seconds}; give 0 (do not wait) to {LEASE_WAIT_SECONDS_MAX:.0f}")
    return round(seconds * 1_000)
