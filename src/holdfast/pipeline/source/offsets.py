"""Validates stream offsets from a checkpoint, which is a file that may be edited or damaged."""

import json
from typing import Any, Final

from holdfast.errors import Corrupt, InvalidName
from holdfast.names import checked_name

Offset = dict[str, int]

_POSITION_MAX: Final = (1 << 63) - 1  # The range of an int64 column.
_SHOWN_CHARACTERS: Final = 80


def check_offset(table: str, given: object) -> Offset:
    """The offset of a checkpoint, if it is valid for this table.

    Raises:
        Corrupt: it is not.
    """
    if not isinstance(given, dict):
        raise _unusable_checkpoint(f"an offset must be an object, not {_abbreviate(given)}")
    for key, position in given.items():
        if not _is_key(table, key):
            raise _unusable_checkpoint(f"{_abbreviate(key)} is not a valid key for table {table}")
        if type(position) is not int or not 0 <= position <= _POSITION_MAX:  # bool is a subclass of int.
            raise _unusable_checkpoint(
                f"{_abbreviate(key)} is at {_abbreviate(position)}, which is not a number from 0 on"
            )
    return given


def check_order(start: Offset, end: Offset) -> None:
    """Raise Corrupt if a batch ends before its start in any key: offsets never decrease.

    A key that is missing from the end would be read again from its beginning.
    """
    for key, position in start.items():
        if key not in end:
            raise _unusable_checkpoint(f"a batch starts with {_abbreviate(key)} at {position} and ends without it")
        if end[key] < position:
            raise _unusable_checkpoint(
                f"a batch starts with {_abbreviate(key)} at {position} and ends earlier, at {end[key]}"
            )


def _is_key(table: str, key: str) -> bool:
    universe, _, rest = key.partition("/")
    try:
        is_world = table != "journal" or checked_name("world", rest) == rest
        return checked_name("universe", universe) == universe and is_world and rest != ""
    except InvalidName:
        return False


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _unusable_checkpoint(reason: str) -> Corrupt:
    return Corrupt(
        f"The checkpoint of the stream was edited or is damaged, or belongs to another query: {reason}. Restore a copy "
        "of the checkpoint, or start with a new checkpointLocation; the stream then starts at its startingOffsets"
    )
