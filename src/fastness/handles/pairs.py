"""The raw key space, below the layers."""

from fastness.tiers import Tier
from fastness.wire import AsyncTransport
from fastness.wire.pairs import DeletePair, GetPair, PutPair, ScanPairs


class AsyncPairs:
    """Reads and writes single keys. The layers store their data here too: write only to keys of your own."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def get(self, key: bytes, *, tier: Tier = Tier.CRITICAL) -> bytes | None:
        """The value of `key`, or None."""
        return (await self._transport.call(GetPair(key, tier=tier))).value

    async def scan(
        self, begin: bytes, end: bytes, *, limit: int = 1_000, reverse: bool = False, tier: Tier = Tier.CRITICAL
    ) -> list[tuple[bytes, bytes]]:
        """At most `limit` pairs with begin <= key < end, in key order, or in reverse."""
        return (await self._transport.call(ScanPairs(begin, end, limit, reverse, tier=tier))).pairs

    async def put(self, key: bytes, value: bytes, *, tier: Tier = Tier.CRITICAL) -> Tier:
        """Set `key` to `value`; the durability of the acknowledgement."""
        return (await self._transport.call(PutPair(key, value, tier=tier))).durability

    async def delete(self, key: bytes, *, tier: Tier = Tier.CRITICAL) -> Tier:
        """Remove `key`; the durability of the acknowledgement."""
        return (await self._transport.call(DeletePair(key, tier=tier))).durability
