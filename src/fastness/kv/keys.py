"""Tuples as keys: the byte order of the encoding equals the order of the values.

    ("q", "jobs", 7)  ->  02 71 00 | 02 6a 6f 62 73 00 | 15 07

Each element is a type code and an order-preserving body. Types sort by their code, so mixed types have an order
too: None < bytes < str < tuple < int < bool < UUID. The codes are those of FoundationDB's tuple layer.

    bytes, str   the body with every 00 escaped as 00 FF, closed by 00 (a shorter string sorts first)
    int          a code for sign and length, then the magnitude; negatives as one's complement
    tuple        its elements, None escaped as 00 FF, closed by 00
    UUID         its 16 bytes
"""

import uuid
from collections.abc import Iterator
from typing import Any, Final

from fastness import limits
from fastness.errors import InvalidKey
from fastness.kv.transactions import Pair, Transaction

# bytes | str | int | bool | None | uuid.UUID | tuple[Element, ...]. As a union, callers would have to narrow every
# unpacked element.
Element = Any

_NONE: Final = 0x00
_BYTES: Final = 0x01
_STR: Final = 0x02
_TUPLE: Final = 0x05
_ZERO: Final = 0x14  # Codes below it are negative numbers, above it positive ones, by their length in bytes.
_FALSE: Final = 0x26
_TRUE: Final = 0x27
_UUID: Final = 0x30
_SHORTEST_NEGATIVE: Final = _ZERO - 8
_LONGEST_POSITIVE: Final = _ZERO + 8
_INTEGER_BOUND: Final = 1 << limits.INTEGER_BITS_MAX

_SMALL_INTEGERS: Final = [b"\x14", *(bytes((0x15, number)) for number in range(1, 256))]


def pack(elements: tuple[Element, ...]) -> bytes:
    """The key of a tuple.

    Raises:
        InvalidKey: an element has an unsupported type, or a number needs more than 64 bits.
    """
    if elements.__class__ is not tuple:
        raise InvalidKey(
            f"A key is made from a tuple, not from {type(elements).__name__}; write (value,) for a single one"
        )
    return b"".join([_encode(element, 0) for element in elements])


def unpack(key: bytes) -> tuple[Element, ...]:
    """The tuple that `pack` made `key` from.

    Raises:
        InvalidKey: `key` was not made by `pack`.
    """
    if key.__class__ is not bytes:
        raise InvalidKey(f"A key is bytes, not {type(key).__name__}; pass a key that pack made")
    elements: list[Element] = []
    position = 0
    while position < len(key):
        element, position = _decode(key, position, 0)
        elements.append(element)
    return tuple(elements)


class Subspace:
    """All keys that start with one tuple: a layer's own part of the key space.

    >>> queues = Subspace("q", "jobs")
    >>> queues.unpack(queues.key(7, True))
    (7, True)
    """

    __slots__ = ("prefix",)

    def __init__(self, *elements: Element, parent: "Subspace | None" = None) -> None:
        self.prefix: bytes = (parent.prefix if parent else b"") + pack(elements)

    def at(self, *elements: Element) -> "Subspace":
        """The smaller subspace below these elements."""
        return Subspace(*elements, parent=self)

    def key(self, *elements: Element) -> bytes:
        """The key of these elements inside this subspace."""
        return self.prefix + pack(elements)

    def range(self, *elements: Element) -> tuple[bytes, bytes]:
        """The bounds of every longer key below these elements, for `scan` and `delete_range`."""
        prefix = self.prefix + pack(elements)
        return prefix + b"\x00", prefix + b"\xff"

    def unpack(self, key: bytes) -> tuple[Element, ...]:
        """The elements after this subspace's prefix.

        Raises:
            InvalidKey: `key` is outside this subspace.
        """
        if not key.startswith(self.prefix):
            raise InvalidKey(f"{key!r} is outside the subspace {self.prefix!r}; unpack it with its own subspace")
        return unpack(key[len(self.prefix) :])

    def __contains__(self, key: bytes) -> bool:
        return key.startswith(self.prefix)

    def __repr__(self) -> str:
        return f"Subspace({self.prefix!r})"


def prefix_range(prefix: bytes) -> tuple[bytes, bytes]:
    """The bounds of every key that starts with `prefix`, including `prefix` itself."""
    stem = prefix.rstrip(b"\xff")
    if not stem:
        return prefix, b"\xff" * (limits.KEY_BYTES_MAX + 1)
    return prefix, stem[:-1] + bytes((stem[-1] + 1,))


def pages(
    tx: Transaction, begin: bytes, end: bytes, *, reverse: bool = False, items: int = limits.PAGE_ITEMS
) -> Iterator[list[Pair]]:
    """Every pair with begin <= key < end, in lists of at most `items`. Reads a long range in bounded memory."""
    while page := tx.scan(begin, end, limit=items, reverse=reverse):
        yield page
        if len(page) < items:
            return
        if reverse:
            end = page[-1][0]
        else:
            begin = page[-1][0] + b"\x00"


def _encode(element: Element, depth: int) -> bytes:
    kind = element.__class__
    body: bytes
    if kind is str:
        try:
            body = element.encode()
        except UnicodeEncodeError as error:
            raise InvalidKey(f"{element!r} is not valid text ({error.reason}); use bytes for arbitrary data") from None
        return b"\x02" + (body.replace(b"\x00", b"\x00\xff") if b"\x00" in body else body) + b"\x00"
    if kind is int:
        return _SMALL_INTEGERS[element] if 0 <= element < 256 else _encode_integer(element)
    if kind is bytes:
        body = element.replace(b"\x00", b"\x00\xff")
        return b"\x01" + body + b"\x00"
    if kind is uuid.UUID:
        body = element.bytes
        return b"\x30" + body
    if element is None:
        return b"\x00"
    if element is True:
        return b"\x27"
    if element is False:
        return b"\x26"
    if kind is tuple:
        if depth == limits.TUPLE_DEPTH_MAX:
            raise InvalidKey(f"Tuples in a key nest at most {limits.TUPLE_DEPTH_MAX} deep; flatten this one")
        inner = [b"\x00\xff" if item is None else _encode(item, depth + 1) for item in element]
        return b"\x05" + b"".join(inner) + b"\x00"
    raise InvalidKey(f"A key cannot hold {kind.__name__}; use bytes, str, int, bool, None, UUID or a tuple of these")


def _encode_integer(number: int) -> bytes:
    if not -_INTEGER_BOUND < number < _INTEGER_BOUND:
        bits = number.bit_length()
        raise InvalidKey(f"A number in a key has at most {limits.INTEGER_BITS_MAX} bits, not {bits}; store it as bytes")
    length = (number.bit_length() + 7) // 8
    if number > 0:
        return bytes((_ZERO + length,)) + number.to_bytes(length, "big")
    # One's complement makes the larger magnitude, which is the smaller number, sort first.
    return bytes((_ZERO - length,)) + (number + (1 << 8 * length) - 1).to_bytes(length, "big")


def _decode(key: bytes, position: int, depth: int) -> tuple[Element, int]:
    code = key[position]
    position += 1
    if code in (_STR, _BYTES):
        body, position = _decode_escaped(key, position)
        if code == _BYTES:
            return body, position
        try:
            return body.decode(), position
        except UnicodeDecodeError:
            raise _not_packed_error(key) from None
    if _SHORTEST_NEGATIVE <= code <= _LONGEST_POSITIVE:
        return _decode_integer(key, position, code - _ZERO)
    if code == _UUID and position + 16 <= len(key):
        return uuid.UUID(bytes=key[position : position + 16]), position + 16
    if code == _NONE:
        return None, position
    if code in (_TRUE, _FALSE):
        return code == _TRUE, position
    if code == _TUPLE and depth < limits.TUPLE_DEPTH_MAX:
        return _decode_tuple(key, position, depth)
    raise _not_packed_error(key)


def _decode_escaped(key: bytes, position: int) -> tuple[bytes, int]:
    end = key.find(b"\x00", position)
    while end >= 0 and key[end + 1 : end + 2] == b"\xff":
        end = key.find(b"\x00", end + 2)
    if end < 0:
        raise _not_packed_error(key)
    return key[position:end].replace(b"\x00\xff", b"\x00"), end + 1


def _decode_integer(key: bytes, position: int, signed_length: int) -> tuple[int, int]:
    length = abs(signed_length)
    end = position + length
    if end > len(key):
        raise _not_packed_error(key)
    number = int.from_bytes(key[position:end], "big")
    if signed_length < 0:
        number -= (1 << 8 * length) - 1
    if (number.bit_length() + 7) // 8 != length:
        raise _not_packed_error(key)  # Not the shortest form: two keys for one tuple would not compare as equal.
    return number, end


def _decode_tuple(key: bytes, position: int, depth: int) -> tuple[tuple[Element, ...], int]:
    elements: list[Element] = []
    while position < len(key):
        if key[position] != _NONE:
            element, position = _decode(key, position, depth + 1)
            elements.append(element)
        elif key[position + 1 : position + 2] == b"\xff":
            elements.append(None)
            position += 2
        else:
            return tuple(elements), position + 1
    raise _not_packed_error(key)


def _not_packed_error(key: bytes) -> InvalidKey:
    return InvalidKey(f"{key!r} was not made by pack; it belongs to another program or is damaged")
