"""Raw keys and values, below every layer."""

import msgspec

from fastness.wire.fields import Limit
from fastness.wire.requests import Committed, Operation, Request


class Value(msgspec.Struct, frozen=True):
    """The value of a key, or None."""

    value: bytes | None


class Pairs(msgspec.Struct, frozen=True):
    """Pairs in scan order."""

    pairs: list[tuple[bytes, bytes]]


class GetPair(Request[Value], frozen=True, tag="pairs.get"):
    operation = Operation(reads=True, all_queues=True)

    key: bytes


class ScanPairs(Request[Pairs], frozen=True, tag="pairs.scan"):
    operation = Operation(reads=True, all_queues=True)

    begin: bytes
    end: bytes
    limit: Limit = 1_000
    reverse: bool = False


class PutPair(Request[Committed], frozen=True, tag="pairs.put"):
    operation = Operation(stores=True, network=False)

    key: bytes
    value: bytes


class DeletePair(Request[Committed], frozen=True, tag="pairs.delete"):
    operation = Operation(network=False)

    key: bytes
