"""The dialect of HTTP callers: wire structs as plain JSON, in both directions.

    {"op": "worlds.append", "entries": [{"n": 1}]}   ──incoming──►  AppendEntries(entries=[b"\\xa1an\\x01"])
    Record(value=b"\\xa1an\\x01")                      ──outgoing──►  {"value": {"n": 1}}

Values that the plane keeps as canonical CBOR are plain JSON here; other bytes are base64; messages have the forms of
`forms.py`. Fields that nobody knows are refused wherever they stand, and an object that names no universe is of the
caller's.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import UNSET

from holdfast.errors import InvalidValue
from holdfast.server.http.message_schemas import (
    LeaseForm,
    MessageForm,
    lease_of,
    message_form,
    message_view,
    new_message,
)
from holdfast.server.http.problems import Refusal
from holdfast.server.http.values import from_cbor
from holdfast.wire.activity import LoggedRecord, LogRecords
from holdfast.wire.canonical import canonical
from holdfast.wire.entities import Change, EntityRecord, EntityWrite, PutEntity
from holdfast.wire.queues import Delivery, MessageLease, NewMessage, SidecarState
from holdfast.wire.states import StateDocument, UpdateState
from holdfast.wire.worlds import AppendEntries, CommitSnapshot, Record


class Shape(StrEnum):
    """How a field holds values that are encoded."""

    ONE = "one"
    LIST = "list"
    MAP = "map"


# Fields that hold canonical CBOR.
VALUES: Final[dict[tuple[type, str], Shape]] = {
    (UpdateState, "value"): Shape.ONE,
    (StateDocument, "value"): Shape.ONE,
    (SidecarState, "value"): Shape.ONE,
    (EntityWrite, "fields"): Shape.MAP,
    (PutEntity, "fields"): Shape.MAP,
    (EntityRecord, "fields"): Shape.MAP,
    (Change, "fields"): Shape.MAP,
    (AppendEntries, "entries"): Shape.LIST,
    (CommitSnapshot, "data"): Shape.ONE,
    (Record, "value"): Shape.ONE,
}
# Fields that hold encoded JSON.
RECORDS: Final[dict[tuple[type, str], Shape]] = {
    (LogRecords, "records"): Shape.LIST,
    (LoggedRecord, "record"): Shape.ONE,
}
# Structs that look different here.
FORMS: Final[dict[type, type]] = {NewMessage: MessageForm, MessageLease: LeaseForm}

_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def decoded(kind: Any, value: Any, *, universe: str) -> Any:
    """The struct that JSON describes.

    Raises:
        Refusal: it does not describe one; the detail says where.
    """
    return checked(_incoming(kind, value, universe, "$"), kind)


def checked(value: Any, kind: Any) -> Any:
    """A value of that type, made from what JSON gave."""
    try:
        made = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        try:
            made = msgspec.convert(_whole(kind, value), kind)
        except msgspec.ValidationError as error:
            raise invalid_body(str(error)) from None
    _check_numbers(made)
    return made


def encoded(answer: Any) -> bytes:
    """An answer as JSON."""
    return msgspec.json.encode(outgoing(answer))


def invalid_body(reason: str) -> Refusal:
    """The refusal of a body whose form is wrong, with the original's codes for what is missing."""
    missing = _MISSING.search(reason)
    if missing is None:
        return Refusal(400, "invalid_body", f"{reason}; /docs shows what this endpoint takes")
    name = missing[1]
    code = f"missing_{name}" if name in ("owner", "queue") else "missing_fields"
    return Refusal(400, code, f"{name} is missing; give it")


def outgoing(value: Any) -> Any:
    """An answer in plain types, values decoded."""
    if isinstance(value, Delivery):
        return message_view(value)
    if isinstance(value, NewMessage):
        return message_form(value)
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        shown: dict[str, Any] = {}
        config = kind.__struct_config__
        if config.tag is not None and config.tag_field is not None:
            shown[config.tag_field] = config.tag
        for name, field, decode in _leaving(kind):
            each = getattr(value, name)
            if each is not UNSET and not (each is None and config.omit_defaults):
                shown[field] = outgoing(each) if decode is None else decode(each)
        return shown
    if isinstance(value, list | tuple):
        return [outgoing(each) for each in value]
    if isinstance(value, dict):
        return {name: outgoing(each) for name, each in value.items()}
    return value


def _incoming(kind: Any, value: Any, universe: str, path: str) -> Any:
    """What JSON gave, in the form that `msgspec.convert` makes a `kind` of."""
    if isinstance(value, dict):
        struct = _struct_for(kind, value, path)
        if struct is not None:
            return _object(struct, value, universe, path)
        origin, args = get_origin(kind), get_args(kind)
        if origin is dict:
            return {name: _incoming(args[1], each, universe, f"{path}.{name}") for name, each in value.items()}
    elif isinstance(value, list):
        part = _part_of(kind)
        if part is not None:
            return [_incoming(part, each, universe, f"{path}[{n}]") for n, each in enumerate(value)]
    return value


def _object(kind: type[msgspec.Struct], value: dict[str, Any], universe: str, path: str) -> dict[str, Any]:
    if kind is NewMessage:
        return _plain(new_message(checked(value, MessageForm)))
    if kind is MessageLease:
        return _plain(lease_of(checked(value, LeaseForm)))
    fields = _fields(kind)
    made: dict[str, Any] = {}
    for name, each in value.items():
        if name not in fields:
            if name == kind.__struct_config__.tag_field:
                made[name] = each
                continue
            raise unknown_field(name, list(fields), path)
        type_, encode = fields[name]
        here = f"{path}.{name}"
        made[name] = _incoming(type_, each, universe, here) if encode is None else encode(each, here)
    if "universe" in fields and "universe" not in value:
        made["universe"] = universe
    return made


def unknown_field(name: str, known: list[str], path: str) -> Refusal:
    """The refusal of a field that nobody knows, with the one that may have been meant."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
    return Refusal(400, "invalid_body", f"{path} has no field {name[:80]!r}; {hint}")


def _struct_for(kind: Any, value: dict[str, Any], path: str) -> type[msgspec.Struct] | None:
    """Which struct an object is, among those that it may be."""
    structs = _structs(kind)
    if len(structs) < 2:
        return structs[0] if structs else None
    field = structs[0].__struct_config__.tag_field or ""
    tags = {str(each.__struct_config__.tag): each for each in structs}
    tag = value.get(field)
    if tag is None:
        raise Refusal(400, "missing_fields", f"{path}.{field} is missing; it says which operation or item this is")
    found = tags.get(tag) if isinstance(tag, str) else None
    if found is None:
        near = get_close_matches(str(tag), tags, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "/docs lists those that there are"
        raise Refusal(400, "invalid_body", f"{path}.{field} is {str(tag)[:80]!r}, which is none; {hint}")
    return found


def _whole(kind: Any, value: Any) -> Any:
    """What JSON gave, with 3.0 as 3 where a whole number is wanted: JSON has one kind of numbers only."""
    if isinstance(value, float):
        kinds = (kind, *get_args(kind))
        return int(value) if int in kinds and float not in kinds and value.is_integer() else value
    if isinstance(value, dict):
        structs = _structs(kind)
        fields = _fields(structs[0]) if len(structs) == 1 else {}
        return {name: _whole(fields[name][0], each) if name in fields else each for name, each in value.items()}
    if isinstance(value, list) and (part := _part_of(kind)) is not None:
        return [_whole(part, each) for each in value]
    return value


def _check_numbers(value: Any) -> None:
    """Refuse integers of more than 64 bits: no other door takes them, and no answer could carry them."""
    if isinstance(value, msgspec.Struct):
        for name in _typed(type(value)):
            each = getattr(value, name)
            if isinstance(each, int) and not -(1 << 63) <= each < 1 << 63:
                raise Refusal(400, "invalid_body", f"{name} has more than 64 bits; give a smaller number")
            _check_numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_numbers(each)


@lru_cache(maxsize=1_024)
def _typed(kind: type[msgspec.Struct]) -> list[str]:
    """The fields that are not any JSON."""
    return [field.name for field in msgspec.structs.fields(kind) if field.type is not Any]


@lru_cache(maxsize=1_024)
def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    if get_origin(kind) in (Union, UnionType):
        return [struct for each in get_args(kind) for struct in _structs(each)]
    return [kind] if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else []


def _part_of(kind: Any) -> Any:
    """What the members of a list are; None if it is no list of anything special."""
    if get_origin(kind) in (Union, UnionType):
        parts = [_part_of(each) for each in get_args(kind) if each is not NoneType]
        return next((part for part in parts if part is not None), None)
    return get_args(kind)[0] if get_origin(kind) in (list, tuple) and get_args(kind) else None


@lru_cache(maxsize=1_024)
def _fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, Callable[[Any, str], Any] | None]]:
    """The fields of a struct by their names in JSON: their types, and how their values are encoded."""
    return {field.encode_name: (field.type, _encoder(kind, field.name)) for field in msgspec.structs.fields(kind)}


@lru_cache(maxsize=1_024)
def _leaving(kind: type[msgspec.Struct]) -> list[tuple[str, str, Callable[[Any], Any] | None]]:
    return [(field.name, field.encode_name, _decoder(kind, field.name)) for field in msgspec.structs.fields(kind)]


def _encoder(kind: type, name: str) -> Callable[[Any, str], Any] | None:
    if (kind, name) in VALUES:
        return lambda value, path: _each(VALUES[kind, name], value, path, canonical)
    if (kind, name) in RECORDS:
        return lambda value, path: _each(RECORDS[kind, name], value, path, _record)
    return None


def _decoder(kind: type, name: str) -> Callable[[Any], Any] | None:
    if (kind, name) in VALUES:
        return lambda value: _each(VALUES[kind, name], value, name, from_cbor)
    if (kind, name) in RECORDS:
        return lambda value: _each(RECORDS[kind, name], value, name, msgspec.json.decode)
    return None


def _each(shape: Shape, value: Any, path: str, change: Callable[[Any], Any]) -> Any:
    if shape is Shape.ONE:
        return change(value)
    if shape is Shape.LIST and isinstance(value, list):
        return [change(each) for each in value]
    if shape is Shape.MAP and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    raise Refusal(400, "invalid_body", f"{path} is {type(value).__name__}; give a {shape}")


def _record(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise InvalidValue(f"A record is a map, not {type(value).__name__}; give its parts names")
    return msgspec.json.encode(value)


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return plain
