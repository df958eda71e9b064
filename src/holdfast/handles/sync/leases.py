"""Generated from handles/leases.py by tools/make_twins.py; change that file instead."""

import uuid
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from holdfast.limits import LEASE_TTL_SECONDS
from holdfast.names import checked_key
from holdfast.tiers import Tier
from holdfast.wire import Transport
from holdfast.wire.leases import AcquireLease, Described, DescribeLease, Granted, KeepLease, LeaseProof, ReleaseLease


class LeaseKey:
    """What can be leased: one key, held by one owner at a time."""

    def __init__(self, transport: Transport, universe: str, key: str) -> None:
        self.key = checked_key("lease", key)
        self._transport = transport
        self._universe = universe

    def acquire(
        self,
        owner: str | None = None,
        *,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        wait_seconds: float = 0.0,
        txn_id: str | None = None,
    ) -> "Lease":
        """The lease, for at least `ttl_seconds`, with a fence higher than every one before.

        Callers of this process that wait are served in the order in which they came. An owner that holds the lease
        already renews it, and its older copies are fenced off; without `owner`, every call is an owner of its own.

        Raises:
            LeaseHeld: somebody else had it for all of `wait_seconds`.
        """
        owner = uuid.uuid4().hex if owner is None else owner
        request = AcquireLease(self.key, owner, ttl_seconds, wait_seconds, txn_id, self._universe)
        return Lease(self._transport, self._universe, self._transport.call(request), ttl_seconds)

    def held(
        self, lease_id: str, *, fence: int, txn_id: str | None = None, ttl_seconds: float = LEASE_TTL_SECONDS
    ) -> "Lease":
        """The lease that was acquired elsewhere, by its id and its fence, to keep, to release, or to write under.

        Nothing is asked of the plane before that. When it ends is not known here before `keepalive`; until then
        `expires_ms` is 0. `ttl_seconds` is what `keepalive` asks for.
        """
        granted = Granted(self.key, lease_id, "", fence, 0, 0, txn_id)
        return Lease(self._transport, self._universe, granted, ttl_seconds)

    def describe(self) -> Described:
        """Who had it last, whether they still have it, and how many wait for it in the plane's process."""
        return self._transport.call(DescribeLease(self.key, self._universe))


class Lease:
    """A lease that was granted. It ends by itself; `keepalive` in time, or leave a `with` block to give it back.

    What is written under it must be checked against it in the same commit: `state.update(…, lease=lease)`, or
    `holdfast.fenced(lease)` in a transaction. To hold a lease and write without that protects nothing.
    """

    def __init__(self, transport: Transport, universe: str, granted: Granted, ttl_seconds: float) -> None:
        self.key = granted.key
        self.id = granted.lease_id
        self.owner = granted.owner
        self.fence = granted.fence
        self.expires_ms = granted.expires_ms
        self.ttl_seconds = ttl_seconds
        self.proof = LeaseProof(granted.key, granted.lease_id, granted.fence, granted.txn_id, universe)
        self._transport = transport

    @property
    def expires_at(self) -> datetime:
        """When it ends, unless it is kept alive."""
        return datetime.fromtimestamp(self.expires_ms / 1_000, UTC)

    def keepalive(self, ttl_seconds: float | None = None, *, tier: Tier = Tier.CRITICAL) -> datetime:
        """Let it last at least `ttl_seconds` (those of the acquire) from now; when it ends now. It never gets shorter.

        Raises:
            Fenced: it has ended, or is somebody else's; stop what is done under it.
        """
        ttl_seconds = self.ttl_seconds if ttl_seconds is None else ttl_seconds
        granted = self._transport.call(KeepLease(self.proof, ttl_seconds, tier=tier))
        self.expires_ms = granted.expires_ms
        return self.expires_at

    def release(self, *, tier: Tier = Tier.IMPORTANT) -> bool:
        """Give it back; whether it was held until now. Giving back twice is fine.

        A release need not be synced to be safe: one that a power failure takes back ends by itself when its time is
        over, and whoever acquires the lease before that waits for a sync that covers both.
        """
        return (self._transport.call(ReleaseLease(self.proof, tier=tier))).released

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<lease on {self.key}, fence {self.fence}, until {self.expires_at.isoformat(timespec='milliseconds')}>"
