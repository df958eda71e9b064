"""Arguments, signals and results of runs: Python values, and their form as canonical CBOR.

Structs, dataclasses, dates, UUIDs and enums are stored as what JSON has; bytes stay bytes. A value is converted back to
the type of the annotation where that is known.
"""

from typing import Any

import cbor2
import msgspec

from fastness.errors import InvalidArgument, InvalidValue
from fastness.wire.canonical import canonical

_KEPT = (bytes,)  # CBOR has them.


def encode_value(value: Any, what: str = "The value") -> bytes:
    """A value as canonical CBOR.

    Raises:
        InvalidValue: neither CBOR nor msgspec has a form for it.
    """
    return canonical(plain_value(value, what))


def plain_value(value: Any, what: str = "The value") -> Any:
    """A value as text, numbers, bytes, lists and maps.

    Raises:
        InvalidValue: msgspec has no form for it.
    """
    try:
        return msgspec.to_builtins(value, builtin_types=_KEPT)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{what} cannot be stored ({error}); use what JSON has, bytes, structs or dates") from None


def decode_value(data: bytes, type: Any = Any, what: str = "The value") -> Any:
    """The value of canonical CBOR, as that type.

    Raises:
        InvalidArgument: it does not fit the type.
    """
    value = cbor2.loads(data)
    if type is Any:
        return value
    try:
        return msgspec.convert(value, type, builtin_types=_KEPT)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(f"{what} does not fit its annotation: {error}") from None
