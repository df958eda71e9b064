"""Blobs: bytes addressed by their SHA-256."""

import msgspec

from fastness.names import UNIVERSE
from fastness.wire.fields import Count, Hash, Name
from fastness.wire.requests import Committed, Operation, Request, Route


class Stored(msgspec.Struct, frozen=True):
    """A stored blob: its SHA-256 in hex, and its size."""

    hash: str
    size: int


class Body(msgspec.Struct, frozen=True):
    """The bytes of a blob."""

    data: bytes


class Known(msgspec.Struct, frozen=True):
    """The size of a blob; None if it is not stored."""

    size: int | None


class PutBlob(Request[Stored], frozen=True, tag="blobs.put"):
    """Store these bytes; the server computes their hash."""

    operation = Operation(stores=True, repeatable="the same bytes are stored once, under the same hash")

    data: bytes
    universe: Name = UNIVERSE
    pinned: bool = True  # False: deleted some time after nothing names it any more.


class GetBlob(Request[Body], frozen=True, tag="blobs.get"):
    operation = Operation(reads=True)

    hash: Hash
    universe: Name = UNIVERSE


class FindBlob(Request[Known], frozen=True, tag="blobs.find"):
    operation = Operation(reads=True)

    hash: Hash
    universe: Name = UNIVERSE


class WriteBlob(Request[Stored], frozen=True, tag="blobs.write"):
    """Store the bytes that are streamed with this request."""

    operation = Operation(stores=True, repeatable="the same bytes are stored once, under the same hash", network=False)

    universe: Name = UNIVERSE
    pinned: bool = True  # False: deleted some time after nothing names it any more.


class PinBlob(Request[Committed], frozen=True, tag="blobs.pin"):
    """Keep a blob although nothing names it; with `pinned` False, until nothing names it any more."""

    operation = Operation(
        http=(
            Route("PUT", "/v1/blobs/{hash}/pin", "Keep a blob although nothing names it.", fixed={"pinned": True}),
            Route(
                "DELETE",
                "/v1/blobs/{hash}/pin",
                "Keep a blob only until nothing names it any more.",
                fixed={"pinned": False},
            ),
        ),
    )

    hash: Hash
    universe: Name = UNIVERSE
    pinned: bool = True


class OpenBlob(Request[Stored], frozen=True, tag="blobs.open"):
    """Stream the bytes of a blob, or at most `length` of them from `start` on."""

    operation = Operation(reads=True, network=False)

    hash: Hash
    universe: Name = UNIVERSE
    start: Count = 0
    length: Count | None = None  # None: up to the end.
