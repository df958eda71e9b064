"""Selects the rows that a read wants, by its options `worlds`, `kinds`, `fromHeight` and `since`.

The selection belongs to the options of one `load()`, so it is the same in every query of a DataFrame. Spark's filter
pushdown is not used: Spark keeps the filters of one query in an object that all queries of the DataFrame share.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import InvalidArgument
from fastness.names import checked_name
from fastness.pipeline.codec import KINDS

# The column that each option selects by.
COLUMNS: Final[dict[str, dict[str, str]]] = {
    "journal": {"worlds": "world", "kinds": "kind", "fromHeight": "height"},
    "activity": {"kinds": "kind", "since": "logged_at"},
    "segments": {"worlds": "world", "fromHeight": "last"},
    "queues": {"since": "created_at"},
    "mail": {"since": "sent_at"},
    "entities": {"kinds": "kind", "since": "updated_at"},
}
OPTIONS: Final = ("worlds", "kinds", "fromHeight", "since")
_HEIGHT_MAX: Final = (1 << 63) - 1  # The range of an int64 column.
_MICROSECONDS: Final = pa.timestamp("us", tz="UTC")


class Selection(msgspec.Struct, frozen=True):
    """Which rows of a table are read; by default all."""

    table: str
    worlds: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    from_height: int = 0
    since: datetime | None = None

    def has_world(self, name: str) -> bool:
        return not self.worlds or name in self.worlds

    def has_kind(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted rows of a batch."""
        columns = COLUMNS[self.table]
        if self.worlds:
            batch = batch.filter(pc.is_in(batch[columns["worlds"]], pa.array(self.worlds)))
        if self.kinds:
            batch = batch.filter(pc.is_in(batch[columns["kinds"]], pa.array(self.kinds)))
        if self.from_height:
            batch = batch.filter(pc.greater_equal(batch[columns["fromHeight"]], self.from_height))
        if self.since is not None:
            times = batch[columns["since"]].cast(_MICROSECONDS)  # `since` may be between two milliseconds.
            batch = batch.filter(pc.greater_equal(times, pa.scalar(self.since, _MICROSECONDS)))
        return batch


def parse_selection(table: str, given: Mapping[str, str]) -> Selection:
    """The selection of a read, from its options by lower-case name.

    Raises:
        InvalidArgument: an option is invalid, or does not apply to the table.
        InvalidName: a world or kind is not a valid name.
    """
    for option in OPTIONS:
        if option.lower() in given and option not in COLUMNS.get(table, {}):
            allowed = ", ".join(COLUMNS.get(table, {})) or "none of these options"
            raise InvalidArgument(f"The option {option} does not apply to the table {table}, which takes {allowed}")
    return Selection(
        table,
        _names(given, "worlds", "world"),
        _kinds(table, given),
        _height(given),
        _since(given),
    )


def _names(given: Mapping[str, str], option: str, kind: str) -> tuple[str, ...]:
    if option not in given:
        return ()
    names = [name.strip() for name in given[option].split(",")]
    if not all(names):
        raise InvalidArgument(
            f"The option {option} is {given[option]!r}; use names separated by commas, or leave it out to read all"
        )
    return tuple(checked_name(kind, name) for name in names)


def _kinds(table: str, given: Mapping[str, str]) -> tuple[str, ...]:
    kinds = _names(given, "kinds", "kind")
    unknown = [kind for kind in kinds if kind not in KINDS.values()]
    if table == "journal" and unknown:
        raise InvalidArgument(
            f"The option kinds names {', '.join(unknown)}; the kinds of journal records are {', '.join(KINDS.values())}"
        )
    return kinds


def _height(given: Mapping[str, str]) -> int:
    value = given.get("fromheight", "0")
    if not (value.isascii() and value.isdecimal() and int(value) <= _HEIGHT_MAX):
        raise InvalidArgument(f"The option fromHeight is {value!r}; use a number from 0 on")
    return int(value)


def _since(given: Mapping[str, str]) -> datetime | None:
    value = given.get("since")
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
        # Without a zone it is UTC, the session time zone of every job.
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"The option since is {value!r}; use a date or a time such as 2026-11-15 or 2026-11-15T12:00:00Z"
        ) from error
