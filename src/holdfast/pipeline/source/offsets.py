"""Offsets of streams as a checkpoint gives them back. It is a file that anybody can edit, and disks lose bytes."""

import json
from typing import Any, Final

from holdfast.errors import Corrupt, InvalidName
from holdfast.names import checked_name

Offset = dict[str, int]

_PLACE_MAX: Final = (1 << 63) - 1  # What a column of heights, or of bytes, holds.
_SHOWN_CHARACTERS: Final = 80


def checked(table: str, given: object) -> Offset:
    """The offset that a checkpoint has, if it can be one of this table.

    Raises:
        Corrupt: it cannot.
    """
    if not isinstance(given, dict):
        raise _unusable(f"an offset is an object, not {_shown(given)}")
    for key, place in given.items():
        if not _is_key(table, key):
            raise _unusable(f"{_shown(key)} is none of the names that table {table} has")
        if type(place) is not int or not 0 <= place <= _PLACE_MAX:  # JSON's true is an int, too.
            raise _unusable(f"{_shown(key)} is at {_shown(place)}, and not at a number from 0 on")
    return given


def check_order(start: Offset, end: Offset) -> None:
    """Raise Corrupt unless a batch ends behind its start: in everything that it starts from, as offsets never go back.

    What the end does not have would be read a second time, from its beginning on.
    """
    for key, place in start.items():
        if key not in end:
            raise _unusable(f"a batch starts with {_shown(key)} at {place} and ends without it")
        if end[key] < place:
            raise _unusable(f"a batch starts with {_shown(key)} at {place} and ends before, at {end[key]}")


def _is_key(table: str, key: str) -> bool:
    universe, _, rest = key.partition("/")
    try:
        is_world = table != "journal" or checked_name("world", rest) == rest
        return checked_name("universe", universe) == universe and is_world and rest != ""
    except InvalidName:
        return False


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _unusable(what: str) -> Corrupt:
    return Corrupt(
        f"The checkpoint of the stream was edited or is damaged, or belongs to another query: {what}. Put back a copy "
        "of the checkpoint, or begin with a new checkpointLocation; then the stream begins at its startingOffsets"
    )
