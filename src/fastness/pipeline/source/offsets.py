"""Stream offsets: how far a query has read, and of which history.

    {"main/ada": 512, "main/bob": 7, "$history": {"plane": …, "lineage": …, "tips": {"main/ada": hash of record 511}}}

An offset comes from a checkpoint, which is a file that may be edited or damaged, or be older than the plane's last
restore. A query that has read of another history must not continue: its rows would be of two histories.
"""

import json
from typing import Any, Final, TypeAlias

import msgspec

from fastness.errors import AnotherHistory, Corrupt, InvalidName
from fastness.names import checked_name
from fastness.pipeline.views import View

Offset: TypeAlias = dict[str, Any]  # As Spark stores it.
Positions: TypeAlias = dict[str, int]

HISTORY: Final = "$history"  # A key of positions has a slash.

_POSITION_MAX: Final = (1 << 63) - 1  # The range of an int64 column.
_SHOWN_CHARACTERS: Final = 80


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The history that an offset belongs to."""

    plane: str
    lineage: str
    tips: dict[str, str] = {}  # The hash of the last record below a position, where it is known.


class Position(msgspec.Struct, frozen=True):
    """A checked offset."""

    positions: Positions
    history: History | None = None  # None: nothing was read.

    @property
    def offset(self) -> Offset:
        """The form that Spark stores."""
        if self.history is None or not self.positions:
            return dict(self.positions)
        return {**self.positions, HISTORY: msgspec.to_builtins(self.history)}


def check_offset(table: str, given: object) -> Position:
    """The position of a checkpoint's offset, if it is valid for this table.

    Raises:
        Corrupt: it is not.
    """
    if not isinstance(given, dict):
        raise _unusable_checkpoint(f"an offset must be an object, not {_abbreviate(given)}")
    positions = {key: position for key, position in given.items() if key != HISTORY}
    for key, position in positions.items():
        if not _is_key(table, key):
            raise _unusable_checkpoint(f"{_abbreviate(key)} is not a valid key for table {table}")
        if type(position) is not int or not 0 <= position <= _POSITION_MAX:  # bool is a subclass of int.
            raise _unusable_checkpoint(
                f"{_abbreviate(key)} is at {_abbreviate(position)}, which is not a number from 0 on"
            )
    if positions and HISTORY not in given:
        raise _unusable_checkpoint(f"it has no {HISTORY}")
    return Position(positions, _check_history(given[HISTORY], positions) if HISTORY in given else None)


def check_follows(view: View, table: str, known: Position) -> None:
    """Raise AnotherHistory if the plane's history is not the one that was read up to this position."""
    history = known.history
    if history is None:
        return
    identity = view.identity()
    if identity.lineage != history.lineage:
        raise _another_history(
            f"it has read plane {history.plane}, lineage {history.lineage}, and the plane at this URL is plane "
            f"{identity.plane}, lineage {identity.lineage}"
        )
    for key, tip in history.tips.items() if table == "journal" else ():
        universe, _, name = key.partition("/")
        height = known.positions[key]
        if view.head(universe, name) > height:
            found = view.record_hash(universe, name, height - 1)
            if found is not None and found != tip:
                raise _another_history(f"record {height - 1} of {key} is not the one that it has read")


def history_at(view: View, table: str, positions: Positions, known: Position) -> History:
    """The view's history at these positions."""
    identity = view.identity()
    tips: dict[str, str] = {}
    before = known.history.tips if known.history is not None and known.history.lineage == identity.lineage else {}
    for key, height in positions.items() if table == "journal" else ():
        if known.positions.get(key) == height and key in before:
            tips[key] = before[key]
        elif height:
            universe, _, name = key.partition("/")
            if (hash := view.hot_record_hash(universe, name, height - 1)) is not None:
                tips[key] = hash
    return History(identity.plane, identity.lineage, tips)


def check_order(start: Positions, end: Positions) -> None:
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


def _check_history(given: object, positions: Positions) -> History:
    try:
        history = msgspec.convert(given, History)
    except msgspec.ValidationError as error:
        raise _unusable_checkpoint(f"{HISTORY} is invalid ({error})") from None
    return msgspec.structs.replace(history, tips={key: tip for key, tip in history.tips.items() if positions.get(key)})


def _another_history(reason: str) -> AnotherHistory:
    return AnotherHistory(
        f"The stream cannot continue: {reason}. The plane was restored, or the world was created again, so new rows "
        "would not follow those that were read. Start with a new checkpointLocation and a new target, or set "
        'option("damage", "skip") to read on from the same heights'
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
