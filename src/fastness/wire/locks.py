"""Ordered locks of data that several processes share: sessions hold them, under a lease, with fences.

A session is one caller that acquires locks in order, such as a thread. It begins with its first lock and ends with its
last release, or when its lease expires. A claim is what one call acquires; it is released as a whole.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import LOCK_LEASE_SECONDS
from fastness.names import UNIVERSE
from fastness.wire.fields import (
    LeaseWaitSeconds,
    Limit,
    LockClaim,
    LockMode,
    LockPaths,
    LockSessionId,
    Name,
    NameAfter,
    short_text,
)
from fastness.wire.requests import Committed, Operation, Request, Route


class LockSession(msgspec.Struct, frozen=True):
    """Identifies a session. Its id is a secret, like a token: it is what authorizes a caller to act as the session."""

    id: LockSessionId
    universe: Name = UNIVERSE


class GrantedLock(msgspec.Struct, frozen=True):
    """A lock that was granted. Its fence grows with every grant of the same lock."""

    level: str
    name: str
    mode: str
    fence: int


class GrantedLocks(msgspec.Struct, frozen=True):
    """The locks of a claim in lock order, without intents, and when the lease of the session ends."""

    claim: LockClaim
    locks: list[GrantedLock]
    expires_ms: int


class LockProof(msgspec.Struct, frozen=True):
    """What a holder sends with a write: its session, a lock, and the fence of the lock."""

    session: LockSession
    level: str
    name: str
    fence: int


class SessionRenewed(msgspec.Struct, frozen=True):
    """When the lease of a session ends now."""

    expires_ms: int


class LevelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Lock statistics of one level: totals of the process since it opened the plane, and current counts."""

    acquisitions: int  # Requested locks that were acquired.
    intents: int  # Intents that were acquired on ancestors.
    waits: int  # How many of both had to wait.
    unserved: int  # Waits that ended without the lock: timed out or cancelled.
    wait_seconds_total: float
    wait_seconds_max: float
    timeouts: int  # Including attempts with a timeout of 0.
    violations: int
    holders: int  # Including intents.
    waiting: int

    @property
    def contention(self) -> float:
        """The share of requests that had to wait, from 0 to 1."""
        requests = self.acquisitions + self.intents + self.unserved + self.waiting
        return self.waits / requests if requests else 0.0


class LockStatistics(msgspec.Struct, frozen=True):
    """Lock statistics by level: totals of the answering process; holders and waiters of all processes."""

    levels: dict[str, LevelStats]


class LocksReleased(msgspec.Struct, frozen=True):
    """Whether the claim was held until now. False: its session had ended, or it was released before."""

    released: bool


class LockHolding(msgspec.Struct, frozen=True):
    """A lock that a session holds or waits for."""

    level: str
    name: str
    mode: str
    is_intent: bool
    is_waiting: bool


class LockSessionInfo(msgspec.Struct, frozen=True):
    """A session with its locks in lock order. `number` names it without its secret id."""

    number: str
    owner: str
    since_ms: int
    expires_ms: int
    locks: list[LockHolding]


class LockSessions(msgspec.Struct, frozen=True):
    """Sessions that hold locks or wait for one; `next` is where the next page starts, if there is one."""

    sessions: list[LockSessionInfo]
    next: str | None


class AcquireLocks(Request[GrantedLocks], frozen=True, tag="locks.acquire"):
    """Acquire the locks at `paths`, all or none, in lock order, for a session.

    A path is a level and a name, like ["record_id", "task/1"]. The first claim of a session starts it.
    """

    operation = Operation(
        repeatable="a claim that is already held is answered with its locks",
        http=(Route("POST", "/v1/locks/acquire", "Acquire ordered locks, optionally waiting in line."),),
    )

    session: LockSession
    claim: LockClaim  # Chosen by the caller; unique within the session. With other paths or another mode it is refused.
    paths: LockPaths
    mode: LockMode = "X"
    owner: Annotated[str, short_text(limits.OWNER_BYTES_MAX, least=0)] = (
        ""  # For people: names the holder in lists and error messages.
    )
    lease_seconds: Annotated[float, Meta(ge=limits.LOCK_LEASE_SECONDS_MIN, le=limits.LOCK_LEASE_SECONDS_MAX)] = (
        LOCK_LEASE_SECONDS
    )
    wait_seconds: LeaseWaitSeconds = 0.0
    continues: bool = False  # The session holds locks already: refuse the claim if it has ended meanwhile.


class RenewLocks(Request[SessionRenewed], frozen=True, tag="locks.renew"):
    """Renew the lease of a session, and so all of its locks, to at least `lease_seconds` from now."""

    operation = Operation(
        http=(Route("POST", "/v1/locks/renew", "Renew the lease of a session and all of its locks."),),
    )

    session: LockSession
    lease_seconds: Annotated[float, Meta(ge=limits.LOCK_LEASE_SECONDS_MIN, le=limits.LOCK_LEASE_SECONDS_MAX)] = (
        LOCK_LEASE_SECONDS
    )


class ReleaseLocks(Request[LocksReleased], frozen=True, tag="locks.release"):
    """Release the locks of a claim; the session ends with its last claim."""

    operation = Operation(
        http=(Route("POST", "/v1/locks/release", "Release the locks of a claim."),),
    )

    session: LockSession
    claim: LockClaim


class CheckLock(Request[Committed], frozen=True, tag="locks.check"):
    """Succeed only if the session still holds the lock with that fence; guards an atomic list."""

    operation = Operation(reads=True, atomic=True)

    lock: LockProof


class ListLockSessions(Request[LockSessions], frozen=True, tag="locks.list"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/locks", "List the sessions that hold ordered locks or wait for them."),),
    )

    after: NameAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE


class EndLockSession(Request[LocksReleased], frozen=True, tag="locks.end"):
    """End a session by its number, as the list shows it, and release its locks; its holder is fenced off."""

    operation = Operation(
        audited=True,
        http=(Route("POST", "/v1/locks/end", "End a session and release all of its locks."),),
    )

    number: Name
    universe: Name = UNIVERSE


class ShowLockStats(Request[LockStatistics], frozen=True, tag="locks.stats"):
    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/locks/stats", "Return statistics of ordered locks, by level."),),
    )

    universe: Name = UNIVERSE
