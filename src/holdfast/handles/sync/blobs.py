"""Generated from handles/blobs.py by tools/make_twins.py; change that file instead."""

from collections.abc import Iterable, Iterator

from holdfast.tiers import Tier
from holdfast.wire import Transport
from holdfast.wire.blobs import FindBlob, GetBlob, OpenBlob, PutBlob, WriteBlob


class Blobs:
    """The blobs of a universe. Immutable: the same bytes have the same name, and are stored once."""

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    def put(self, data: bytes) -> str:
        """Store `data`; its hash, which names it."""
        return (self._transport.call(PutBlob(data, self._universe))).hash

    def write(self, chunks: Iterable[bytes]) -> str:
        """Store a stream that may be larger than memory; its hash."""
        return (self._transport.send(WriteBlob(self._universe), chunks)).hash

    def get(self, hash: str) -> bytes:
        """The bytes of a blob, in memory at once.

        Raises:
            BlobNotFound: nobody stored it.
            Corrupt: it was stored and cannot be read back whole.
        """
        return (self._transport.call(GetBlob(hash, self._universe))).data

    def open(self, hash: str, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes of a blob in pieces; damage is raised in place of the end.

        With `start` and `length`, those that `get(hash)[start : start + length]` would be, without reading the others;
        such a part cannot be compared with the hash of the whole.

        Raises:
            BlobNotFound: nobody stored it.
        """
        return self._transport.receive(OpenBlob(hash, self._universe, start, length))

    def has(self, hash: str, *, tier: Tier = Tier.CRITICAL) -> bool:
        """Whether the blob is stored."""
        return (self._transport.call(FindBlob(hash, self._universe, tier=tier))).size is not None
