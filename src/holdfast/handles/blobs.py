"""Bytes named by their SHA-256."""

from collections.abc import AsyncIterable, AsyncIterator

from holdfast.tiers import Tier
from holdfast.wire import AsyncTransport
from holdfast.wire.blobs import FindBlob, GetBlob, OpenBlob, PutBlob, WriteBlob


class AsyncBlobs:
    """The blobs of a universe. Immutable: the same bytes have the same name, and are stored once."""

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    async def put(self, data: bytes) -> str:
        """Store `data`; its hash, which names it."""
        return (await self._transport.call(PutBlob(data, self._universe))).hash

    async def write(self, chunks: AsyncIterable[bytes]) -> str:
        """Store a stream that may be larger than memory; its hash."""
        return (await self._transport.send(WriteBlob(self._universe), chunks)).hash

    async def get(self, hash: str) -> bytes:
        """The bytes of a blob, in memory at once.

        Raises:
            BlobNotFound: nobody stored it.
            Corrupt: it was stored and cannot be read back whole.
        """
        return (await self._transport.call(GetBlob(hash, self._universe))).data

    async def open(self, hash: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a blob in pieces; damage is raised in place of the end.

        With `start` and `length`, those that `get(hash)[start : start + length]` would be, without reading the others;
        such a part cannot be compared with the hash of the whole.

        Raises:
            BlobNotFound: nobody stored it.
        """
        return await self._transport.receive(OpenBlob(hash, self._universe, start, length))

    async def has(self, hash: str, *, tier: Tier = Tier.CRITICAL) -> bool:
        """Whether the blob is stored."""
        return (await self._transport.call(FindBlob(hash, self._universe, tier=tier))).size is not None
