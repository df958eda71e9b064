"""Blobs: bytes addressed by their SHA-256."""

from collections.abc import AsyncIterable, AsyncIterator

from fastness.errors import BlobNotFound
from fastness.handles.arguments import checked_items
from fastness.handles.handle import AsyncHandle
from fastness.tiers import Tier
from fastness.wire.blobs import FindBlob, GetBlob, OpenBlob, PinBlob, PutBlob, WriteBlob


class AsyncBlobs(AsyncHandle):
    """The blobs of a universe. Immutable: the same bytes have the same hash and are stored once."""

    async def put(self, data: bytes, *, pinned: bool = True) -> str:
        """Store `data`; its hash.

        With `pinned=False` it is deleted some time after no message, world, state or other data names its hash.
        """
        return (await self._transport.call(PutBlob(data, self._universe, pinned))).hash

    async def write(self, chunks: AsyncIterable[bytes], *, pinned: bool = True) -> str:
        """Store a stream that may be larger than memory; its hash."""
        found = checked_items(chunks, "call put(data), or give an iterator of bytes")
        return (await self._transport.send(WriteBlob(self._universe, pinned), found)).hash

    async def get(self, hash: str) -> bytes:
        """All bytes of a blob, in memory.

        Raises:
            BlobNotFound: it is not stored.
            Corrupt: it is damaged.
        """
        return (await self._transport.call(GetBlob(hash, self._universe))).data

    async def open(self, hash: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a blob as a stream; if they are damaged, it ends with an error.

        With `start` and `length`, only the bytes `get(hash)[start : start + length]`. Such a range cannot be verified
        against the hash.

        Raises:
            BlobNotFound: it is not stored.
        """
        return await self._transport.receive(OpenBlob(hash, self._universe, start, length))

    async def pin(self, hash: str) -> None:
        """Keep a blob although nothing names it.

        Raises:
            BlobNotFound: it is not stored.
        """
        await self._transport.call(PinBlob(hash, self._universe))

    async def unpin(self, hash: str) -> None:
        """Keep a blob only as long as something names it, and for the grace period.

        Raises:
            BlobNotFound: it is not stored.
        """
        await self._transport.call(PinBlob(hash, self._universe, pinned=False))

    async def has(self, hash: str, *, tier: Tier = Tier.CRITICAL) -> bool:
        """Whether the blob is stored."""
        return (await self._transport.call(FindBlob(hash, self._universe, tier=tier))).size is not None

    async def size(self, hash: str, *, tier: Tier = Tier.CRITICAL) -> int:
        """How many bytes a blob has.

        Raises:
            BlobNotFound: it is not stored.
        """
        size = (await self._transport.call(FindBlob(hash, self._universe, tier=tier))).size
        if size is None:
            raise BlobNotFound(f"No blob {hash} is stored in universe {self._universe}; check the hash")
        return size
