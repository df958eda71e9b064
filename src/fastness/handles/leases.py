"""Leases: exclusive ownership of a key for a limited time, with a fence."""

import logging
import time
import uuid
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from fastness.errors import Fenced, LeaseExpired
from fastness.limits import LEASE_TTL_SECONDS
from fastness.names import checked_key
from fastness.tiers import Tier
from fastness.wire import AsyncTransport
from fastness.wire.leases import (
    AcquireLease,
    BreakLease,
    Described,
    DescribeLease,
    Granted,
    KeepLease,
    LeaseProof,
    ReleaseLease,
)
from fastness.wire.transport import HeldLeaseRenewal

_log = logging.getLogger("fastness.leases")


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
        requested_at = time.monotonic()
        granted = await self._transport.call(request)
        return AsyncLease(self._transport, self._universe, granted, ttl_seconds, renewed_at=requested_at)

    def held(
        self, lease_id: str, *, fence: int, txn_id: str | None = None, ttl_seconds: float = LEASE_TTL_SECONDS
    ) -> "AsyncLease":
        """A lease that another process acquired, by its id and fence: to renew it, to release it, or to write under it.

        This makes no call. `expires_ms` is 0 until `keepalive` returns it. `ttl_seconds` is the default of `keepalive`.
        """
        granted = Granted(self.key, lease_id, "", fence, 0, 0, txn_id)
        return AsyncLease(self._transport, self._universe, granted, ttl_seconds)

    async def break_lease(self, *, fence: int) -> bool:
        """End the lease of any owner, for operators; whether it was held until now.

        Its holder is fenced off, and the next caller in line gets the lease. `fence` is that of the lease to end, as
        `describe` returns it.

        Raises:
            LeaseConflict: the lease was granted again since, with a higher fence.
        """
        return (await self._transport.call(BreakLease(self.key, fence, self._universe))).released

    async def describe(self) -> Described:
        """The last owner, whether it still holds the lease, and how many callers wait in the plane's process."""
        return await self._transport.call(DescribeLease(self.key, self._universe))


class AsyncLease:
    """A lease that was acquired. A `with` block renews it in the background until the block ends, and releases it then.

    Outside of a `with` block it expires unless `keepalive` renews it.

    A write under the lease must check it in the same commit: `state.update(…, lease=lease)`, or
    `fastness.fenced(lease)` in a transaction. A write without this check is not protected.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        universe: str,
        granted: Granted,
        ttl_seconds: float,
        *,
        renewed_at: float | None = None,
    ) -> None:
        self.key = granted.key
        self.id = granted.lease_id
        self.owner = granted.owner
        self.fence = granted.fence
        self.expires_ms = granted.expires_ms
        self.ttl_seconds = ttl_seconds
        self.proof = LeaseProof(granted.key, granted.lease_id, granted.fence, granted.txn_id, universe)
        self._transport = transport
        self._renewed_at = renewed_at  # When its grant or last renewal was requested, of the monotonic clock.
        self._renewal: HeldLeaseRenewal | None = None
        self._loss: Fenced | None = None
        self._released = False

    @property
    def expires_at(self) -> datetime:
        """When it expires, unless it is renewed."""
        return datetime.fromtimestamp(self.expires_ms / 1_000, UTC)

    @property
    def lost(self) -> bool:
        """Whether it has ended before it was released, so that another owner may hold it: stop the work.

        True once a renewal was refused. In a `with` block also once it has expired without a renewal, even if the
        server cannot be reached.
        """
        return self._find_loss() is not None

    async def keepalive(self, ttl_seconds: float | None = None, *, tier: Tier = Tier.CRITICAL) -> datetime:
        """Renew it for at least `ttl_seconds` (default: those of the acquire); the new expiry, which is never earlier.

        Raises:
            Fenced: it has expired, or another owner holds it; stop the work that it protects.
        """
        ttl_seconds = self.ttl_seconds if ttl_seconds is None else ttl_seconds
        requested_at = time.monotonic()
        try:
            granted = await self._transport.call(KeepLease(self.proof, ttl_seconds, tier=tier))
        except Fenced as error:
            self._loss = None if self._released else error
            raise
        self.expires_ms = granted.expires_ms
        if ttl_seconds >= self.ttl_seconds:
            self._renewed_at = requested_at
        if self._renewal is not None:
            self._renewal.extend_until(requested_at + ttl_seconds)
        return self.expires_at

    async def release(self, *, tier: Tier = Tier.IMPORTANT) -> bool:
        """Release it; whether it was held until now. Releasing twice is fine.

        A release is safe without a sync: if a power failure undoes it, the lease expires by itself, and an acquire
        before that waits for a sync that covers both.
        """
        self._stop_renewal()
        released = (await self._transport.call(ReleaseLease(self.proof, tier=tier))).released
        self._released = self._released or released
        return released

    async def __aenter__(self) -> Self:
        """Start renewing it.

        Raises:
            Fenced: it was acquired a while ago, and has ended since.
        """
        renewed_at = self._renewed_at
        if renewed_at is None or time.monotonic() - renewed_at >= self.ttl_seconds / 3:
            renewed_at = time.monotonic()
            await self.keepalive()
        self._renewal = self._transport.lease_renewer.hold(
            self, self.proof, seconds=self.ttl_seconds, renewed_at=renewed_at
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing it, and release it.

        Raises:
            Fenced: it was lost before the block ended, and the block raised nothing.
        """
        self._stop_renewal()
        self._renewed_at = None
        if error is None:
            await self._release_held()
        elif self._loss is None:
            try:
                await self.release()
            except Exception as failure:  # The block's own error matters more, and the lease expires by itself.
                _log.warning("the lease on %s was not released, and expires by itself: %s", self.key, failure)

    async def _release_held(self) -> None:
        """Release it.

        Raises:
            Fenced: it was lost before.
        """
        if self._loss is not None:
            raise self._loss
        if self._released or await self.release():
            return
        self._loss = LeaseExpired(
            f"The lease on {self.key} ended before its block did, and another owner may have held it meanwhile; "
            "acquire it again, then read its state"
        )
        raise self._loss

    def _find_loss(self) -> Fenced | None:
        if self._loss is None and self._renewal is not None:
            self._loss = self._renewal.loss
        return self._loss

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._find_loss()
            self._renewal.stop()
            self._renewal = None

    def __repr__(self) -> str:
        return f"<lease on {self.key}, fence {self.fence}, until {self.expires_at.isoformat(timespec='milliseconds')}>"
