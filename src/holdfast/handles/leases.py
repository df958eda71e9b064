"""Leases: exclusive ownership of a key for a limited time, with a fence."""

import uuid
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from holdfast.limits import LEASE_TTL_SECONDS
from holdfast.names import checked_key
from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.leases import AcquireLease, Described, DescribeLease, Granted, KeepLease, LeaseProof, ReleaseLease


class AsyncLeaseKey:
    """One key, held by at most one owner at a time."""

    def __init__(self, transport: AsyncTransport, universe: str, key: str) -> None:
        self.key = checked_key("lease", key)
        self._transport = transport
        self._universe = universe

    async def acquire(
        self,
        owner: str | None = None,
        *,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        wait_seconds: float = 0.0,
        txn_id: str | None = None,
    ) -> "AsyncLease":
        """The lease, for at least `ttl_seconds`, with a fence higher than every earlier one.

        Waiting callers of one process are served in order. An owner that already holds the lease renews it, and its
        older copies are fenced off. Without `owner`, every call is a different owner.

        Raises:
            LeaseHeld: another owner held it for all of `wait_seconds`.
        """
        owner = uuid.uuid4().hex if owner is None else owner
        request = AcquireLease(self.key, owner, ttl_seconds, wait_seconds, txn_id, self._universe)
        return AsyncLease(self._transport, self._universe, await self._transport.call(request), ttl_seconds)

    def held(
        self, lease_id: str, *, fence: int, txn_id: str | None = None, ttl_seconds: float = LEASE_TTL_SECONDS
    ) -> "AsyncLease":
        """A lease that another process acquired, by its id and fence: to renew it, to release it, or to write under it.

        This makes no call. `expires_ms` is 0 until `keepalive` returns it. `ttl_seconds` is the default of `keepalive`.
        """
        granted = Granted(self.key, lease_id, "", fence, 0, 0, txn_id)
        return AsyncLease(self._transport, self._universe, granted, ttl_seconds)

    async def describe(self) -> Described:
        """The last owner, whether it still holds the lease, and how many callers wait in the plane's process."""
        return await self._transport.call(DescribeLease(self.key, self._universe))


class AsyncLease:
    """A lease that was acquired. It expires unless `keepalive` renews it; leaving a `with` block releases it.

    A write under the lease must check it in the same commit: `state.update(…, lease=lease)`, or
    `holdfast.fenced(lease)` in a transaction. A write without this check is not protected.
    """

    def __init__(self, transport: AsyncTransport, universe: str, granted: Granted, ttl_seconds: float) -> None:
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
        """When it expires, unless it is renewed."""
        return datetime.fromtimestamp(self.expires_ms / 1_000, UTC)

    async def keepalive(self, ttl_seconds: float | None = None, *, tier: Tier = Tier.CRITICAL) -> datetime:
        """Renew it for at least `ttl_seconds` (default: those of the acquire); the new expiry, which is never earlier.

        Raises:
            Fenced: it has expired, or another owner holds it; stop the work that it protects.
        """
        ttl_seconds = self.ttl_seconds if ttl_seconds is None else ttl_seconds
        granted = await self._transport.call(KeepLease(self.proof, ttl_seconds, tier=tier))
        self.expires_ms = granted.expires_ms
        return self.expires_at

    async def release(self, *, tier: Tier = Tier.IMPORTANT) -> bool:
        """Release it; whether it was held until now. Releasing twice is fine.

        A release is safe without a sync: if a power failure undoes it, the lease expires by itself, and an acquire
        before that waits for a sync that covers both.
        """
        return (await self._transport.call(ReleaseLease(self.proof, tier=tier))).released

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def __repr__(self) -> str:
        return f"<lease on {self.key}, fence {self.fence}, until {self.expires_at.isoformat(timespec='milliseconds')}>"
