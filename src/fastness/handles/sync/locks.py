"""Generated from handles/locks.py by tools/make_twins.py; change that file instead."""

import logging
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from types import TracebackType
from typing import Final, Self, cast

from fastness.errors import Closed, Fenced, InvalidArgument, LeaseExpired, LockOrderViolation, LockTimeout
from fastness.handles.sync.handle import Handle
from fastness.limits import (
    LEASE_WAIT_SECONDS_MAX,
    LOCK_CLAIM_PATHS_MAX,
    LOCK_LEASE_SECONDS,
    LOCK_LEASE_SECONDS_MAX,
    LOCK_LEASE_SECONDS_MIN,
)
from fastness.lock_rules import DATA_LEVELS, Levels, parse_mode, released_error
from fastness.wire import Transport
from fastness.wire.locks import (
    AcquireLocks,
    EndLockSession,
    GrantedLocks,
    ListLockSessions,
    LockProof,
    LockSessions,
    ReleaseLocks,
    RenewLocks,
    ShowLockStats,
)
from fastness.wire.transport import HeldLock, HeldLockSession, LockStats

_log = logging.getLogger("fastness.locks")

_LEVELS: Final = Levels(DATA_LEVELS, nested=True)
_CLAIM_BYTES: Final = 8  # Unique within a session.


class Locks(Handle):
    """The locks of the plane's data, in this order: the database, entity types, records.

    On an embedded plane in memory or in a directory they exclude the threads and tasks of the process. On PostgreSQL
    and on a server they exclude each other in all processes; then they have a lease, which is renewed in the
    background, and fences.
    """

    def acquire(
        self,
        path: Sequence[str],
        mode: str = "X",
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float | None = None,
    ) -> HeldLock:
        """The lock at `[level, name]`, like `["entity_type", "task"]` or `["record_id", "task/1"]`.

        A context manager, which releases it at its end. Modes are S and X, and the intents IS and IX, which are
        acquired automatically on the levels above. The caller is the task, or outside of tasks the thread.

        Args:
            timeout_seconds: how long to wait; by default 5 for a record, 10 above. 0 does not wait.
            lease_seconds: how long the locks of the caller stay if its process crashes; by default 10. Locks within one
                process end with it.

        Raises:
            LockOrderViolation: it comes before a lock that the caller holds; waiting could deadlock.
            LockTimeout: it was not released within `timeout_seconds`.
            Fenced: the caller's locks were lost; release them first.
        """
        if lease_seconds is not None:
            _check_lease(lease_seconds)
        locks = self._transport.locks
        if locks is not None:
            return locks(self._universe).acquire(path, mode, timeout_seconds=timeout_seconds)
        return self._acquire_shared((path,), mode, timeout_seconds, lease_seconds)

    def acquire_all(
        self,
        paths: Sequence[Sequence[str]],
        mode: str = "X",
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float | None = None,
    ) -> HeldLock:
        """Several locks, all or none, acquired in the order that cannot deadlock."""
        if lease_seconds is not None:
            _check_lease(lease_seconds)
        locks = self._transport.locks
        if locks is not None:
            return locks(self._universe).acquire_all(paths, mode, timeout_seconds=timeout_seconds)
        return self._acquire_shared(paths, mode, timeout_seconds, lease_seconds)

    def stats(self) -> Mapping[str, LockStats]:
        """For each level, how often its locks were acquired and waited for in the plane's process, and for how long."""
        locks = self._transport.locks
        if locks is not None:
            return locks(self._universe).stats()
        return (self._transport.call(ShowLockStats(self._universe))).levels

    def sessions(self, *, after: str = "", limit: int = 100) -> LockSessions:
        """The callers in all processes that hold locks or wait for one; none if the locks are within one process.

        `next` is where the next page starts, if there is one.
        """
        return self._transport.call(ListLockSessions(after, limit, self._universe))

    def end_session(self, number: str) -> bool:
        """End a session by its number, as `sessions` returns it; whether there was one. Its locks are released.

        Its holder is fenced off: it finds out with its next renewal or check.
        """
        return (self._transport.call(EndLockSession(number, self._universe))).released

    def _acquire_shared(
        self, paths: Sequence[Sequence[str]], mode: str, timeout_seconds: float | None, lease_seconds: float | None
    ) -> "SharedLock":
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            raise InvalidArgument(f"acquire_all takes a list of paths, not {paths!r}")
        if len(paths) > LOCK_CLAIM_PATHS_MAX:
            raise InvalidArgument(f"{len(paths):,} paths were given; one call acquires {LOCK_CLAIM_PATHS_MAX} at most")
        keys, checked_mode = [_LEVELS.parse(path) for path in paths], parse_mode(mode)
        wait_seconds = _LEVELS.timeout_for(timeout_seconds, [(key, checked_mode, True) for key in keys])
        session = self._session()
        if not keys:
            return SharedLock(self._transport, session, GrantedLocks("", [], 0))
        seconds = max(LOCK_LEASE_SECONDS if lease_seconds is None else lease_seconds, session.seconds)
        request = AcquireLocks(
            session.identity,
            token_hex(_CLAIM_BYTES),
            [list(_LEVELS.path(key)) for key in keys],
            checked_mode.value,
            session.owner,
            seconds,
            min(wait_seconds, LEASE_WAIT_SECONDS_MAX),
            session.has_claims,
        )
        granted, renewed_at = self._granted(session, request)
        session.add(granted.claim, seconds=seconds, renewed_at=renewed_at)
        return SharedLock(self._transport, session, granted)

    def _session(self) -> HeldLockSession:
        """The caller's session, or a new one."""
        session = self._transport.lock_sessions.find(self._universe)
        if session is None:
            return self._transport.lock_sessions.begin(self._universe)
        if session.loss is not None:
            raise session.loss
        _release_claims(self._transport, session)
        return session

    def _granted(self, session: HeldLockSession, request: AcquireLocks) -> tuple[GrantedLocks, float]:
        """The granted locks, and when their lease was requested, of the monotonic clock."""
        requested_at = time.monotonic()
        try:
            granted = self._transport.call(request)
            if not session.has_claims and time.monotonic() - requested_at >= request.lease_seconds / 3:
                requested_at = time.monotonic()  # It waited, and the lease may have been renewed long ago.
                self._transport.call(RenewLocks(session.identity, request.lease_seconds))
        except (LockTimeout, LockOrderViolation, InvalidArgument):
            raise
        except BaseException:
            # The locks may have been granted. If the session goes on, its renewals would keep them.
            session.unreleased.add(request.claim)
            raise
        return granted, requested_at


class SharedLock:
    """Locks that processes share, held by this caller. All locks of a caller have one lease, and are lost together."""

    def __init__(self, transport: Transport, session: HeldLockSession, granted: GrantedLocks) -> None:
        self._transport = transport
        self._session = session
        self._claim = granted.claim
        self._locks = granted.locks
        self._loss: Fenced | None = None
        self._is_released = False

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The level and name of each lock, in lock order."""
        return [(lock.level, lock.name) for lock in self._locks]

    @property
    def fence(self) -> int | None:
        """The fence of the first lock, which grows with every grant of it."""
        return self._locks[0].fence if self._locks else None

    @property
    def fences(self) -> Mapping[tuple[str, str], int]:
        """The fence of each lock, by its path."""
        return {(lock.level, lock.name): lock.fence for lock in self._locks}

    @property
    def proof(self) -> LockProof | None:
        """What proves to the plane that the locks are held: the fence of the first, as all end together."""
        if not self._locks:
            return None
        return LockProof(self._session.identity, self._locks[0].level, self._locks[0].name, self._locks[0].fence)

    @property
    def is_lost(self) -> bool:
        """Whether the locks ended before they were released, so that others may hold them: stop the work.

        True once a renewal was refused, or once the lease has passed without one, even if the server cannot be reached.
        """
        return self._find_loss() is not None

    def check(self) -> None:
        """Return if the locks are held, as far as this process knows.

        A write is protected only by a check in its own commit: `atomic().check(held)`, or `fastness.fenced(held)`.

        Raises:
            Fenced: they are lost, or were released.
        """
        loss = self._find_loss()
        if loss is not None:
            raise loss
        if self._is_released:
            raise released_error()

    def release(self) -> None:
        """Release the locks. Releasing twice is fine; after a failure, it tries again."""
        self._release()

    def __enter__(self) -> Self:
        if self._is_released:
            raise Closed("These locks were already released; acquire them again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the locks.

        Raises:
            Fenced: they were lost before the block ended, and the block raised nothing.
        """
        if error is not None:
            try:
                self._release()
            except Exception as failure:  # The block's own error matters more, and the locks end with their lease.
                _log.warning("locks were not released, and end with their lease: %s", failure)
            return
        was_released = self._is_released or not self._locks
        is_held = self._release()
        if self._loss is None and not (is_held or was_released):
            self._loss = LeaseExpired(
                f"The lease of {_text(self.paths)} ended before its block did, and other callers may have held it "
                "meanwhile; acquire it again, then read what it protects"
            )
        if self._loss is not None:
            raise self._loss

    def _release(self) -> bool:
        """Release the locks; whether they were held until now."""
        if not self._is_released:
            self._find_loss()
            self._is_released = True
            self._session.remove(self._claim)
            if self._loss is None and self._locks:
                self._session.unreleased.add(self._claim)
        if not self._session.unreleased:
            return False
        return self._claim in _release_claims(self._transport, self._session)

    def _find_loss(self) -> Fenced | None:
        if self._loss is None and not self._is_released:
            self._loss = self._session.loss
        return self._loss

    def __repr__(self) -> str:
        return f"<locks on {_text(self.paths)}, fence {self.fence}>"


def _release_claims(transport: Transport, session: HeldLockSession) -> set[str]:
    """Release the claims whose release was not confirmed yet; those that were held until now."""
    held: set[str] = set()
    for claim in sorted(session.unreleased):
        if (transport.call(ReleaseLocks(session.identity, claim))).released:
            held.add(claim)
        session.unreleased.discard(claim)
    return held


def _check_lease(seconds: object) -> None:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not LOCK_LEASE_SECONDS_MIN <= cast("float", seconds) <= LOCK_LEASE_SECONDS_MAX:
        raise InvalidArgument(
            f"lease_seconds is {seconds!r}; give {LOCK_LEASE_SECONDS_MIN:g} to {LOCK_LEASE_SECONDS_MAX:g}"
        )


def _text(paths: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{level} {name}".rstrip() for level, name in paths)
