"""Canonical CBOR: every value has exactly one encoding."""

from typing import Any

import cbor2

from fastness.errors import InvalidValue
from fastness.limits import VALUE_DEPTH_MAX

_FLAT = frozenset({int, float, str, bytes, bool, type(None)})


def canonical(value: Any) -> bytes:
    """A value (text, numbers, bytes, lists, maps) as canonical CBOR.

    Raises:
        InvalidValue: CBOR has no form for it, or it is nested too deep to be read again.
    """
    if value.__class__ not in _FLAT:
        _check_depth(value, VALUE_DEPTH_MAX)
    try:
        encoded: bytes = cbor2.dumps(value, canonical=True)
    except (cbor2.CBOREncodeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"This value cannot be CBOR ({error}); use text, numbers, bytes, lists and maps") from error
    return encoded


def check_canonical(data: bytes) -> None:
    """Raise unless bytes from outside are one value in canonical form.

    Raises:
        InvalidValue: they are not. A journal must not contain unreadable bytes, or equal values that differ.
    """
    try:
        if canonical(cbor2.loads(data)) == data:
            return
    except (cbor2.CBORDecodeError, InvalidValue, TypeError, ValueError, RecursionError):
        pass
    raise InvalidValue(f"{data[:32]!r} is not one value in canonical CBOR; encode it with canonical=True")


def _check_depth(value: Any, left: int) -> None:
    kind = value.__class__
    if kind is dict:
        parts = value.values()
    elif kind is list or kind is tuple:
        parts = value
    else:
        return
    if not left:
        raise InvalidValue(f"A value nests at most {VALUE_DEPTH_MAX} deep; flatten it, or store it as a blob")
    for part in parts:
        _check_depth(part, left - 1)
