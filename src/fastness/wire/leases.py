"""Leases: exclusive ownership of a key for a limited time, with a fence."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness.limits import LEASE_TTL_SECONDS
from fastness.names import UNIVERSE
from fastness.wire.fields import Key, KeyAfter, LeaseTtlSeconds, LeaseWaitSeconds, Limit, Name, Owner, SummaryLimit
from fastness.wire.requests import Committed, Operation, Request, Route


class LeaseProof(msgspec.Struct, frozen=True):
    """What a holder sends with a write: the id and fence of its lease."""

    key: Key
    lease_id: str
    fence: int
    txn_id: Owner | None = None
    universe: Name = UNIVERSE


class Granted(msgspec.Struct, frozen=True):
    """A lease: its owner, its expiry, and its fence, which grows with every acquire."""

    key: str
    lease_id: str
    owner: str
    fence: int
    acquired_ms: int
    expires_ms: int
    txn_id: str | None


class Described(msgspec.Struct, frozen=True):
    """The last grant of a lease, if any, whether it still holds, and how many callers wait in this process."""

    lease: Granted | None
    held: bool
    waiting: int


class Leases(msgspec.Struct, frozen=True):
    """Leases that are held, in the order of their keys; `next` is where the next page starts, if there is one."""

    leases: list[Granted]
    next: str | None


class LeaseCaller(msgspec.Struct, frozen=True):
    """A caller that waits for a lease."""

    owner: str
    waited_seconds: float


class LeaseLine(msgspec.Struct, frozen=True):
    """The callers of this process that wait for a lease: their number, and how long the first has waited."""

    key: str
    waiting: int
    waited_seconds: float
    callers: list[LeaseCaller] = []  # The first `LEASE_CALLERS_SHOWN`, in the order of their line.


class LockPlace(msgspec.Struct, frozen=True):
    """An owner that holds a lock of this process, or waits for it."""

    path: list[str]
    mode: str
    owner: str
    held_seconds: float | None
    waiting_seconds: float | None


class Waits(msgspec.Struct, frozen=True):
    """Callers that wait for leases, the longest wait first, and locks in lock order, up to the limit."""

    lines: list[LeaseLine]
    locks: list[LockPlace]


class Released(msgspec.Struct, frozen=True):
    """Whether the lease was held until now. False: it had expired, or was released before."""

    released: bool


class AcquireLease(Request[Granted], frozen=True, tag="leases.acquire"):
    """Grant `key` to `owner`, waiting up to `wait_seconds`."""

    operation = Operation(http=(Route("POST", "/v1/lease/acquire", "Acquire a lease, optionally waiting in line."),))

    key: Key
    owner: Owner
    ttl_seconds: LeaseTtlSeconds = LEASE_TTL_SECONDS
    wait_seconds: LeaseWaitSeconds = 0.0
    txn_id: Owner | None = None
    universe: Name = UNIVERSE


class KeepLease(Request[Granted], frozen=True, tag="leases.keepalive"):
    """Renew the lease for at least `ttl_seconds` from now; never shortens it."""

    operation = Operation(atomic=True)

    lease: LeaseProof
    ttl_seconds: LeaseTtlSeconds = LEASE_TTL_SECONDS


class ReleaseLease(Request[Released], frozen=True, tag="leases.release"):
    operation = Operation(atomic=True)

    lease: LeaseProof


class BreakLease(Request[Released], frozen=True, tag="leases.break"):
    """End the lease of any owner. Its holder is fenced off, and the next caller in line gets the lease.

    `fence` is that of the lease that the caller has seen: a lease that was granted since is not ended.
    """

    operation = Operation(
        audited=True,
        http=(Route("POST", "/v1/lease/break", "End the lease of any owner, whose fence the caller has seen."),),
    )

    key: Key
    fence: Annotated[int, Meta(description="The fence of the lease to end, which a description of the lease shows.")]
    universe: Name = UNIVERSE


class DescribeLease(Request[Described], frozen=True, tag="leases.describe"):
    operation = Operation(
        reads=True,
        http=(Route("POST", "/v1/lease/describe", "Describe a lease: its holder, and the number of waiters."),),
    )

    key: Key
    universe: Name = UNIVERSE


class ListLeases(Request[Leases], frozen=True, tag="leases.list"):
    """Of the next `limit` keys, those whose leases are held."""

    operation = Operation(reads=True, stale=True, http=(Route("GET", "/v1/leases", "List the leases that are held."),))

    after: KeyAfter = ""
    limit: Limit = 100
    universe: Name = UNIVERSE


class ListWaits(Request[Waits], frozen=True, tag="leases.waits"):
    """The callers that wait for leases and locks in the answering process."""

    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/surveys/waits", "List the callers that wait for leases and locks at this server."),),
    )

    limit: SummaryLimit = 100
    universe: Name = UNIVERSE


class CheckLease(Request[Committed], frozen=True, tag="leases.check"):
    """Succeed only if the lease still holds; guards an atomic list."""

    operation = Operation(reads=True, atomic=True)

    lease: LeaseProof
