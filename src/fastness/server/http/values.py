"""Conversion of stored CBOR values to JSON."""

from base64 import b64encode
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final
from uuid import UUID

import cbor2

from fastness.wire.json_values import non_finite_text

_UNCHANGED_TYPES: Final = (str, int, float, bool, type(None), datetime, date, UUID, Decimal)


def from_cbor(data: bytes) -> Any:
    """A CBOR value as JSON types: bytes become base64, map keys and numbers that are not finite become text."""
    return jsonable(cbor2.loads(data))


def jsonable(value: Any) -> Any:
    """A decoded CBOR value as the nearest JSON type."""
    if isinstance(value, float) and not isfinite(value):
        return non_finite_text(value)
    if isinstance(value, _UNCHANGED_TYPES):
        return value
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Mapping):
        return {_key(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(each) for each in value]
    return str(value)


def _key(key: Any) -> str:
    plain = jsonable(key)
    return plain if isinstance(plain, str) else str(plain)
