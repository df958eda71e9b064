"""Values of the types that requests declare."""

from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

SCALARS: dict[Any, Any] = {str: "a", int: 1, float: 1.5, bool: True, bytes: b"\x01"}  # One, as canonical CBOR.


def options_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def right(kind: Any) -> Any:
    """A value of a type."""
    kind = options_of(kind)[0]
    origin, args = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return args[0]
    if origin in (list, dict):
        return origin()
    if origin is tuple:
        return () if args[-1] is ... else tuple(map(right, args))
    if issubclass(kind, Enum):
        return next(iter(kind))
    return filled(kind)


def filled(kind: type[msgspec.Struct]) -> Any:
    """A struct whose required fields have values of their types."""
    return kind(**{each.name: right(each.type) for each in msgspec.structs.fields(kind) if each.required})


def is_decodable(value: msgspec.Struct) -> bool:
    """Whether a server can decode it."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return False
    return True
