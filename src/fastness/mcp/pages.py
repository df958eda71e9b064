"""Opaque cursors: where the next page of a list starts."""

import base64
import binascii
from typing import TypeVar

import msgspec

from fastness.errors import InvalidArgument

Place = TypeVar("Place")


def cursor_of(place: object) -> str:
    """The cursor of a place in a list."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def place_of(cursor: str, kind: type[Place]) -> Place:
    """The place that a cursor stands for.

    Raises:
        InvalidArgument: it is no cursor of this list.
    """
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise InvalidArgument("The cursor is not of this list; list again without a cursor") from None
