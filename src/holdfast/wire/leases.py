"""Leases: who may write, until when, and the proof of it."""

import msgspec

from holdfast.limits import LEASE_TTL_SECONDS
from holdfast.names import UNIVERSE
from holdfast.wire.requests import Committed, Operation, Request

_FENCE = {"fence": "fencing_token"}


class LeaseProof(msgspec.Struct, frozen=True, rename=_FENCE):
    """What a holder shows with a write: which lease, and which fence it was given with it."""

    key: str
    lease_id: str
    fence: int
    txn_id: str | None = None
    universe: str = UNIVERSE


class Granted(msgspec.Struct, frozen=True, rename=_FENCE):
    """A lease as it stands: who has it, until when, and its fence, which grew when it was acquired."""

    key: str
    lease_id: str
    owner: str
    fence: int
    acquired_ms: int
    expires_ms: int
    txn_id: str | None


class Described(msgspec.Struct, frozen=True):
    """The last grant of a lease, if there ever was one, whether it still holds, and how many wait for it here."""

    lease: Granted | None
    held: bool
    waiting: int


class Leases(msgspec.Struct, frozen=True):
    """Leases that are held, in the order of their keys; `next` is where the next page starts, if there is one."""

    leases: list[Granted]
    next: str | None


class LeaseLine(msgspec.Struct, frozen=True):
    """A lease that is waited for in this process: by how many, and how long the first of them has waited."""

    key: str
    waiting: int
    waited_seconds: float


class LockPlace(msgspec.Struct, frozen=True):
    """Who holds a lock of this process, or waits for it."""

    path: list[str]
    mode: str
    owner: str
    held_seconds: float | None
    waiting_seconds: float | None


class Waits(msgspec.Struct, frozen=True):
    """Lines for leases, the longest first, and locks in the order of locking, as far as the limit allows."""

    lines: list[LeaseLine]
    locks: list[LockPlace]


class Released(msgspec.Struct, frozen=True):
    """Whether the lease was held until now. False means that it had run out before, or was given back already."""

    released: bool


class AcquireLease(Request[Granted], frozen=True, tag="leases.acquire"):
    """Grant `key` to `owner`, waiting in line for it if asked to."""

    key: str
    owner: str
    ttl_seconds: float = LEASE_TTL_SECONDS
    wait_seconds: float = 0.0
    txn_id: str | None = None
    universe: str = UNIVERSE


class KeepLease(Request[Granted], frozen=True, tag="leases.keepalive"):
    """Let the lease last at least `ttl_seconds` from now; it never gets shorter."""

    operation = Operation(atomic=True)

    lease: LeaseProof
    ttl_seconds: float = LEASE_TTL_SECONDS


class ReleaseLease(Request[Released], frozen=True, tag="leases.release"):
    operation = Operation(atomic=True)

    lease: LeaseProof


class DescribeLease(Request[Described], frozen=True, tag="leases.describe"):
    operation = Operation(reads=True)

    key: str
    universe: str = UNIVERSE


class ListLeases(Request[Leases], frozen=True, tag="leases.list"):
    """At most `limit` keys are looked at; those of them that are held are answered."""

    operation = Operation(reads=True)

    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class ListWaits(Request[Waits], frozen=True, tag="leases.waits"):
    """Who waits for whom in the process that answers."""

    operation = Operation(reads=True)

    limit: int = 100
    universe: str = UNIVERSE


class CheckLease(Request[Committed], frozen=True, tag="leases.check"):
    """Succeeds if the lease still holds: what an atomic list is guarded by."""

    operation = Operation(reads=True, atomic=True)

    lease: LeaseProof
