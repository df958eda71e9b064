"""State documents: one value per key, replaced as a whole."""

from typing import Any

import cbor2
import msgspec

from fastness.handles.leases import AsyncLease
from fastness.names import checked_key
from fastness.tiers import Tier
from fastness.wire import AsyncTransport
from fastness.wire.canonical import canonical
from fastness.wire.states import GetState, RemoveState, UpdatedState, UpdateState


class Document(msgspec.Struct, frozen=True):
    """A state's value, and the ETag of this version."""

    value: Any
    etag: str
    version: int
    updated_ms: int
    correlation_id: str | None


class AsyncState:
    """One document. While the lease of the same key is held, only its holder may change it."""

    def __init__(self, transport: AsyncTransport, universe: str, key: str) -> None:
        self.key = checked_key("state", key)
        self._transport = transport
        self._universe = universe

    async def get(self, *, tier: Tier = Tier.CRITICAL) -> Document | None:
        """The document, or None."""
        found = (await self._transport.call(GetState(self.key, self._universe, tier=tier))).state
        if found is None:
            return None
        return Document(cbor2.loads(found.value), found.etag, found.version, found.updated_ms, found.correlation_id)

    async def update(
        self,
        value: Any,
        *,
        lease: AsyncLease | None = None,
        if_match: str | None = None,
        if_absent: bool = False,
        correlation_id: str | None = None,
        tier: Tier = Tier.CRITICAL,
    ) -> UpdatedState:
        """Write the document (text, numbers, bytes, lists, maps); its new ETag and version number.

        `if_match` is the ETag that must be current ("*": any version); `if_absent` requires that no document exists.

        Raises:
            CasMismatch: another writer was first; `current_etag` is the ETag now.
            Fenced: `lease` has expired, or the lease of this key is held and none was given.
        """
        proof = None if lease is None else lease.proof
        encoded = canonical(value)
        request = UpdateState(self.key, encoded, proof, if_match, if_absent, correlation_id, self._universe, tier=tier)
        return await self._transport.call(request)

    async def remove(
        self, *, lease: AsyncLease | None = None, if_match: str | None = None, tier: Tier = Tier.CRITICAL
    ) -> bool:
        """Remove the document; whether it existed.

        Raises:
            CasMismatch, Fenced: as `update`.
        """
        proof = None if lease is None else lease.proof
        return (await self._transport.call(RemoveState(self.key, proof, if_match, self._universe, tier=tier))).removed
