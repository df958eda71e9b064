"""Items of a store as rows of a collection.

    partition                       key       value
    users\\0ada (the namespace)      (key,)    StoredItem

Labels of namespaces have no zero bytes, so partitions are in the order of namespaces.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from fastness.errors import InvalidValue
from fastness.plane_access import decoded, json_object

Namespace: TypeAlias = tuple[str, ...]
SEPARATOR: Final = "\0"


class StoredItem(msgspec.Struct, frozen=True, array_like=True):
    """An item: its value as JSON, or the hash of the blob that has it."""

    created_ms: int
    updated_ms: int
    ttl_seconds: float | None
    data: bytes
    blob: str = ""
    vectors: bytes = b""  # A list of vectors, packed, or the hash of the blob that has it.
    vectors_blob: str = ""


encode_item: Final = msgspec.msgpack.Encoder().encode
decode_item: Final = partial(decoded, "A stored item", msgspec.msgpack.Decoder(StoredItem).decode)
_decode_list: Final = msgspec.msgpack.Decoder(list[bytes]).decode


def encode_vectors(vectors: Sequence[Sequence[float]]) -> bytes:
    """Vectors with numbers of 32 bits, which are precise enough to compare them."""
    return encode_item([struct.pack(f"<{len(vector)}f", *vector) for vector in vectors])


def decode_vectors(packed: bytes) -> list[tuple[float, ...]]:
    return decoded("The vectors of an item", _unpack_vectors, packed)


def _unpack_vectors(packed: bytes) -> list[tuple[float, ...]]:
    return [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in _decode_list(packed)]


def partition_of(namespace: Namespace) -> str:
    return SEPARATOR.join(namespace)


def namespace_of(partition: str) -> Namespace:
    return tuple(partition.split(SEPARATOR))


def encode_value(value: Mapping[str, Any]) -> bytes:
    """The JSON of an item's value.

    Raises:
        InvalidValue: it has something that JSON does not have.
    """
    try:
        return json.dumps(dict(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"The value of an item must be JSON: {error}") from error


decode_value: Final = partial(decoded, "The value of an item", json_object)


def time_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1_000, UTC)


def matches(value: Any, wanted: Any) -> bool:
    """Whether a field matches a filter: equal, with the fields of an object, or by the operators `$eq`, `$gt`, …"""
    if isinstance(wanted, Mapping):
        if any(name.startswith("$") for name in wanted):
            return all(_compare(value, operator, operand) for operator, operand in wanted.items())
        return isinstance(value, Mapping) and all(matches(value.get(name), part) for name, part in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) == len(wanted)
            and all(map(matches, value, wanted))
        )
    return bool(value == wanted)


def _compare(value: Any, operator: str, operand: Any) -> bool:
    if operator == "$eq":
        return bool(value == operand)
    if operator == "$ne":
        return bool(value != operand)
    if operator not in _ORDERS:
        raise ValueError(f"Unsupported operator {operator!r}; use $eq, $ne, {', '.join(_ORDERS)}")
    try:
        return _ORDERS[operator](float(value), float(operand))
    except (TypeError, ValueError):
        return False  # What is not a number is neither more nor less.


_ORDERS: Final = {
    "$gt": float.__gt__,
    "$gte": float.__ge__,
    "$lt": float.__lt__,
    "$lte": float.__le__,
}
