"""Canonical CBOR: one value, one sequence of bytes, for everybody and for ever."""

from typing import Any

import cbor2

from holdfast.errors import InvalidValue


def canonical(value: Any) -> bytes:
    """A value (text, numbers, bytes, lists, maps) as canonical CBOR.

    Raises:
        InvalidValue: CBOR has no form for it.
    """
    try:
        encoded: bytes = cbor2.dumps(value, canonical=True)
    except (cbor2.CBOREncodeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"This has no CBOR form ({error}); use text, numbers, bytes, lists and maps") from error
    return encoded
