"""The JSON form of wire structs, in both directions.

    {"op": "worlds.append", "entries": [{"n": 1}]}   ──decode──►  AppendEntries(entries=[b"\\xa1an\\x01"])
    Record(value=b"\\xa1an\\x01")                      ──encode──►  {"value": {"n": 1}}

Values that the plane stores as canonical CBOR are plain JSON here; other bytes are base64; messages have the schemas of
`message_schemas.py`. Unknown fields are rejected at every level. An object without a universe gets the caller's.
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

from fastness.errors import FastnessError, InvalidValue
from fastness.server.http.message_schemas import (
    VIEWS,
    MessageBody,
    MessageLeaseBody,
    ResultBody,
    lease_of,
    message_body,
    new_message,
    new_result,
)
from fastness.server.http.values import from_cbor
from fastness.server.problems import HttpError
from fastness.wire.activity import LoggedRecord, LogRecords
from fastness.wire.canonical import canonical
from fastness.wire.entities import BestEffortValue, Change, EntityRecord, EntityWrite, PutEntity
from fastness.wire.fields import bare
from fastness.wire.hosting import CommitTurn
from fastness.wire.queues import (
    MessageLease,
    NewMessage,
    NewResult,
    SidecarState,
)
from fastness.wire.runs import RunInfo, SignalRun, StartRun, UpdateRun
from fastness.wire.states import StateDocument, UpdateState
from fastness.wire.type_checks import out_of_bounds, refusal_of
from fastness.wire.worlds import AppendEntries, CommitSnapshot, Record


class Shape(StrEnum):
    """Whether a field holds one encoded value, a list of them, or a map."""

    ONE = "one"
    LIST = "list"
    MAP = "map"


# Fields whose values are canonical CBOR.
CBOR_FIELDS: Final[dict[tuple[type, str], Shape]] = {
    (UpdateState, "value"): Shape.ONE,
    (StateDocument, "value"): Shape.ONE,
    (SidecarState, "value"): Shape.ONE,
    (EntityWrite, "fields"): Shape.MAP,
    (PutEntity, "fields"): Shape.MAP,
    (EntityRecord, "fields"): Shape.MAP,
    (BestEffortValue, "value"): Shape.ONE,
    (Change, "fields"): Shape.MAP,
    (AppendEntries, "entries"): Shape.LIST,
    (CommitTurn, "opening"): Shape.LIST,
    (CommitTurn, "entries"): Shape.LIST,
    (CommitSnapshot, "data"): Shape.ONE,
    (Record, "value"): Shape.ONE,
    (RunInfo, "result"): Shape.ONE,
    (RunInfo, "published"): Shape.ONE,
    (SignalRun, "value"): Shape.ONE,
    (UpdateRun, "result"): Shape.ONE,
    (UpdateRun, "published"): Shape.ONE,
}
# Fields that have another form: the fields that they are in JSON, with their schemas.
ARGUMENT_FIELDS: Final[dict[tuple[type, str], dict[str, dict[str, Any]]]] = {
    (StartRun, "arguments"): {
        "args": {"type": "array", "description": "The positional arguments of the workflow."},
        "kwargs": {"type": "object", "description": "The keyword arguments of the workflow."},
    },
}
# Fields whose values are encoded JSON.
JSON_FIELDS: Final[dict[tuple[type, str], Shape]] = {
    (LogRecords, "records"): Shape.LIST,
    (LoggedRecord, "record"): Shape.ONE,
}
# Wire structs that have another schema in the HTTP API.
BODY_TYPES: Final[dict[type, type]] = {
    NewMessage: MessageBody,
    MessageLease: MessageLeaseBody,
    NewResult: ResultBody,
}

# What other lease-queue servers call fields of the queue endpoints: accepted in requests, and never written.
ALIASES: Final = {"namespace": "universe", "visibility_timeout_seconds": "visibility_seconds", "fencing_token": "fence"}

_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def decode(kind: Any, value: Any, *, universe: str) -> Any:
    """A struct from its JSON form.

    Raises:
        HttpError: the JSON does not fit the struct; the detail names the path.
    """
    return convert(_from_json(kind, value, universe, "$"), kind)


def convert(value: Any, kind: Any) -> Any:
    """A value of type `kind` from decoded JSON.

    Raises:
        HttpError: the JSON does not fit the type.
    """
    try:
        built = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        value = _with_integers(kind, value)
        try:
            built = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            if (refusal := out_of_bounds(kind, value)) is not None:
                raise refusal from None
            raise invalid_body(str(error), refusal_of(kind, value, plain=True)) from None
    _check_numbers(built)
    return built


def convert_named(value: Any, kind: Any) -> Any:
    """`convert` for the queue endpoints: a field may be named by its alias.

    Raises:
        HttpError: the JSON does not fit the type, or has a field and its alias.
    """
    return convert(_with_names(kind, value), kind)


def encode(answer: Any) -> bytes:
    """An answer as encoded JSON."""
    return msgspec.json.encode(to_json(answer))


def invalid_body(reason: str, refusal: FastnessError | None = None) -> HttpError:
    """The error for a body that does not fit its schema; missing fields have codes of their own.

    `refusal` is that of the field that is wrong, if one is.
    """
    missing = _MISSING.search(reason)
    if missing is None:
        if refusal is not None:
            return HttpError(400, "invalid_body", str(refusal))
        return HttpError(400, "invalid_body", f"{reason}; see /docs for the schema")
    name = missing[1]
    code = f"missing_{name}" if name in ("owner", "queue") else "missing_fields"
    return HttpError(400, code, f"Required field {name} is missing")


def to_json(value: Any) -> Any:
    """An answer as JSON types, with encoded values decoded."""
    if (found := VIEWS.get(value.__class__)) is not None:
        return found[1](value)
    if isinstance(value, NewMessage):
        return message_body(value)
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        fields: dict[str, Any] = {}
        config = kind.__struct_config__
        if config.tag is not None and config.tag_field is not None:
            fields[config.tag_field] = config.tag
        for name, field, decoder in _output_fields(kind):
            each = getattr(value, name)
            if each is not UNSET and not (each is None and config.omit_defaults):
                fields[field] = to_json(each) if decoder is None else decoder(each)
        return fields
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, dict):
        return {name: to_json(each) for name, each in value.items()}
    return value


def _from_json(kind: Any, value: Any, universe: str, path: str) -> Any:
    """Decoded JSON in the form that `msgspec.convert` accepts for `kind`."""
    if isinstance(value, dict):
        struct = _struct_for(kind, value, path)
        if struct is not None:
            return _object(struct, value, universe, path)
        origin, args = get_origin(kind), get_args(kind)
        if origin is dict:
            return {name: _from_json(args[1], each, universe, f"{path}.{name}") for name, each in value.items()}
    elif isinstance(value, list):
        part = _item_type(kind)
        if part is not None:
            return [_from_json(part, each, universe, f"{path}[{n}]") for n, each in enumerate(value)]
    return value


def _object(kind: type[msgspec.Struct], value: dict[str, Any], universe: str, path: str) -> dict[str, Any]:
    if kind is NewMessage:
        return _builtins(new_message(convert(value, MessageBody)))
    if kind is MessageLease:
        return _builtins(lease_of(convert(value, MessageLeaseBody)))
    if kind is NewResult:
        result = new_result(convert(value, ResultBody))
        if result is None:
            raise HttpError(400, "missing_fields", f"{path} has no result; send result, result_base64 or result_blob")
        return _builtins(result)
    if kind is StartRun:
        value = _with_arguments(value, path)
    fields = _fields(kind)
    built: dict[str, Any] = {}
    for name, each in value.items():
        if name not in fields:
            if name == kind.__struct_config__.tag_field:
                built[name] = each
                continue
            raise unknown_field(name, list(fields), path)
        type_, encoder = fields[name]
        field_path = f"{path}.{name}"
        built[name] = _from_json(type_, each, universe, field_path) if encoder is None else encoder(each, field_path)
    if "universe" in fields and "universe" not in value:
        built["universe"] = universe
    return built


def _with_arguments(value: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a StartRun, with `args` and `kwargs` encoded as its arguments."""
    if "arguments" in value:
        raise unknown_field("arguments", ["args", "kwargs"], path)
    args, kwargs = value.get("args", []), value.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise HttpError(400, "invalid_body", f"{path}.args must be a list, and {path}.kwargs an object")
    others = {name: each for name, each in value.items() if name not in ("args", "kwargs")}
    return others if value.keys() == others.keys() else {**others, "arguments": canonical([args, kwargs])}


def unknown_field(name: str, known: list[str], path: str) -> HttpError:
    """The error for an unknown field, with the closest known name."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known) or 'none'}"
    return HttpError(400, "invalid_body", f"{path} has no field {name[:80]!r}; {hint}")


def _struct_for(kind: Any, value: dict[str, Any], path: str) -> type[msgspec.Struct] | None:
    """The struct of a union that the object's tag selects."""
    structs = _structs(kind)
    if len(structs) < 2:
        return structs[0] if structs else None
    field = structs[0].__struct_config__.tag_field or ""
    tags = {str(each.__struct_config__.tag): each for each in structs}
    tag = value.get(field)
    if tag is None:
        raise HttpError(400, "missing_fields", f"{path}.{field} is missing; it selects the type of the object")
    found = tags.get(tag) if isinstance(tag, str) else None
    if found is None:
        near = get_close_matches(str(tag), tags, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see /docs for the known ones"
        raise HttpError(400, "invalid_body", f"{path}.{field} is {str(tag)[:80]!r}, which is unknown; {hint}")
    return found


def _with_integers(kind: Any, value: Any) -> Any:
    """Decoded JSON with 3.0 replaced by 3 in integer fields: JSON does not distinguish the two."""
    if isinstance(value, float):
        kinds = (kind, *get_args(kind))
        return int(value) if int in kinds and float not in kinds and value.is_integer() else value
    if isinstance(value, dict):
        structs = _structs(kind)
        fields = _fields(structs[0]) if len(structs) == 1 else {}
        return {name: _with_integers(fields[name][0], each) if name in fields else each for name, each in value.items()}
    if isinstance(value, list) and (part := _item_type(kind)) is not None:
        return [_with_integers(part, each) for each in value]
    return value


def _with_names(kind: Any, value: Any) -> Any:
    """Decoded JSON with aliases replaced by the names of the fields."""
    if isinstance(value, list) and (part := _item_type(kind)) is not None:
        return [_with_names(part, each) for each in value]
    structs = _structs(kind) if isinstance(value, dict) else []
    if len(structs) != 1:
        return value
    fields = _fields(structs[0])
    named: dict[str, Any] = {}
    for given, each in value.items():
        name = ALIASES[given] if ALIASES.get(given) in fields else given
        if name != given and name in value:
            raise HttpError(400, "invalid_body", f"{given} is an alias of {name}, and both are given; send one of them")
        named[name] = _with_names(fields[name][0], each) if name in fields else each
    return named


def _check_numbers(value: Any) -> None:
    """Reject integers of more than 64 bits: MessagePack, which the other endpoints use, cannot carry them."""
    if isinstance(value, msgspec.Struct):
        for name in _typed_fields(type(value)):
            each = getattr(value, name)
            if isinstance(each, int) and not -(1 << 63) <= each < 1 << 63:
                raise HttpError(400, "invalid_body", f"{name} does not fit into 64 bits; use a smaller number")
            _check_numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_numbers(each)


@lru_cache(maxsize=1_024)
def _typed_fields(kind: type[msgspec.Struct]) -> list[str]:
    """The fields that do not hold arbitrary JSON."""
    return [field.name for field in msgspec.structs.fields(kind) if bare(field.type) is not Any]


@lru_cache(maxsize=1_024)
def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    if get_origin(kind) in (Union, UnionType):
        return [struct for each in get_args(kind) for struct in _structs(each)]
    return [kind] if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else []


def _item_type(kind: Any) -> Any:
    """The type of a list's items; None if `kind` is not a typed list."""
    if get_origin(kind) in (Union, UnionType):
        parts = [_item_type(each) for each in get_args(kind) if each is not NoneType]
        return next((part for part in parts if part is not None), None)
    return get_args(kind)[0] if get_origin(kind) in (list, tuple) and get_args(kind) else None


@lru_cache(maxsize=1_024)
def _fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, Callable[[Any, str], Any] | None]]:
    """The fields of a struct by JSON name: their types, and the encoders of their values."""
    return {field.encode_name: (bare(field.type), _encoder(kind, field.name)) for field in msgspec.structs.fields(kind)}


@lru_cache(maxsize=1_024)
def _output_fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, Callable[[Any], Any] | None]]:
    return [(field.name, field.encode_name, _decoder(kind, field.name)) for field in msgspec.structs.fields(kind)]


def _encoder(kind: type, name: str) -> Callable[[Any, str], Any] | None:
    if (kind, name) in CBOR_FIELDS:
        return lambda value, path: _apply(CBOR_FIELDS[kind, name], value, path, canonical)
    if (kind, name) in JSON_FIELDS:
        return lambda value, path: _apply(JSON_FIELDS[kind, name], value, path, _record)
    return None


def _decoder(kind: type, name: str) -> Callable[[Any], Any] | None:
    if (kind, name) in CBOR_FIELDS:
        return lambda value: None if value is None else _apply(CBOR_FIELDS[kind, name], value, name, from_cbor)
    if (kind, name) in JSON_FIELDS:
        return lambda value: _apply(JSON_FIELDS[kind, name], value, name, msgspec.json.decode)
    return None


def _apply(shape: Shape, value: Any, path: str, change: Callable[[Any], Any]) -> Any:
    if shape is Shape.ONE:
        return change(value)
    if shape is Shape.LIST and isinstance(value, list):
        return [change(each) for each in value]
    if shape is Shape.MAP and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    raise HttpError(400, "invalid_body", f"{path} is a {type(value).__name__}; send a {shape}")


def _record(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise InvalidValue(f"A record is a {type(value).__name__}; send a JSON object")
    return msgspec.json.encode(value)


def _builtins(value: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return plain
