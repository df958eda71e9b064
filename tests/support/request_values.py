"""Values of the types that requests declare."""

import re
from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from fastness.wire.type_checks import bounds_of

SCALARS: dict[Any, Any] = {str: "a", int: 1, float: 1.5, bool: True, bytes: b"\x01"}  # One, as canonical CBOR.
TEXTS = ("a", "0" * 64, "0" * 16 + "-1")


def options_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def unannotated(kind: Any) -> Any:
    """A type whose items, if it has any, keep their bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def right(kind: Any) -> Any:
    """A value of a type, within its bounds."""
    bounds = bounds_of(kind)
    kind = unannotated(options_of(unannotated(kind))[0])
    origin, args = get_origin(kind), get_args(kind)
    if kind is str:
        texts = [text for text in (*bounds.get("enum", ()), *TEXTS) if re.search(bounds.get("pattern", ""), text)]
        return texts[0]
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return args[0]
    if origin in (list, dict):
        return [right(args[0])] * bounds.get("minItems", 0) if origin is list else {}
    if origin is tuple:
        return (right(args[0]),) * bounds.get("minItems", 0) if args[-1] is ... else tuple(map(right, args))
    if issubclass(kind, Enum):
        return next(iter(kind))
    return filled(kind)


def filled(kind: type[msgspec.Struct]) -> Any:
    """A struct whose required fields have values of their types."""
    return kind(**{each.name: right(each.type) for each in msgspec.structs.fields(kind) if each.required})


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs in a type, with itself."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs_in(field.type)
    for part in get_args(kind):
        yield from structs_in(part)


def is_decodable(value: msgspec.Struct) -> bool:
    """Whether a server can decode it."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return False
    return True
