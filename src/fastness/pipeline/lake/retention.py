"""Removes rows that are older than a table keeps them, in one commit.

    watermark retained/<universe>   the time in milliseconds before which rows were removed

The watermarks of sources stay, so that an ingest does not bring the rows back; a backfill leaves out what is older than
`retained/<universe>`. Rows without a time stay. Only whole days in UTC are removed: most files are then dropped without
being read.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import InvalidArgument
from fastness.pipeline.lake import removal
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.lake.tables import LakeFile, LakeTable, Move
from fastness.pipeline.schemas import TABLES, Table

_DAY_SECONDS: Final = 86_400
# Why other tables with a time keep all of their rows.
_REASONS: Final = {
    "journal": "a world is restored from all of its records, and its rows have no time",
    "messages": "`rollup` compares it with the counters of queues",
    "mail": "`rollup` computes totals from it",
    "rollup_queue_hours": "`rollup` computes it again from `messages`",
    "rollup_leases": "`rollup` adds to its rows",
}


class Removed(NamedTuple):
    """What was removed from a table, and what was left."""

    rows: int
    held_files: int  # Files with older rows that were left as they are.


def check(retain: Mapping[str, float]) -> None:
    """Check how many seconds each table keeps its rows.

    Raises:
        InvalidArgument: a table does not exist, its rows are not removed by age, or a time is shorter than a day.
    """
    for name, seconds in retain.items():
        table = TABLES.get(name)
        if table is None or table.time is None:
            kept = f"The table {name} keeps all rows ({_REASONS.get(name, 'it has no history by time')})"
            fault = kept if table is not None else f"There is no table {name!r}"
            names = ", ".join(each.name for each in TABLES.values() if each.time is not None)
            raise InvalidArgument(f"{fault}; rows can be removed by age from: {names}")
        if seconds < _DAY_SECONDS:
            raise InvalidArgument(f"Rows of {name} are removed by whole days; keep them for at least 1d")


def cutoff(now: datetime, seconds: float) -> datetime:
    """The start of the day before which rows are removed."""
    oldest = now.astimezone(UTC) - timedelta(seconds=seconds)
    return oldest.replace(hour=0, minute=0, second=0, microsecond=0)


def retained_ms(table: LakeTable, universe: str) -> int:
    """The time before which rows of a universe were removed; 0: none were."""
    return table.watermark(_watermark(universe))


def remove_older(
    table: LakeTable, before: datetime, *, universes: Collection[str] = (), held: Collection[str] = ()
) -> Removed:
    """Remove the rows from before a time; of some universes, if any are given. Files whose paths are `held` stay.

    Raises:
        TransactionConflict: another run committed first; nothing was removed.
    """
    time, old, new, count, held_files = str(table.table.time), list[LakeFile](), list[AddedFile](), 0, 0
    for file in table.entries():
        if (universes and file.universe not in universes) or (time in file.low and file.low[time] >= before):
            continue
        if file.path in held:
            held_files += 1
        elif file.nulls.get(time) == 0 and file.high[time] < before:
            old.append(file)
            count += file.rows
        elif (removed := _older(table.table, table.rows_of(file, [time]), before)) is not None:
            old.append(file)
            new += removal.written(table, table.rows_of(file).filter(pc.invert(removed)))
            count += pc.sum(removed).as_py()
    before_ms = round(before.timestamp() * 1_000)
    known = {file.universe: retained_ms(table, file.universe) for file in old}
    moves = {_watermark(each): Move(value, max(value, before_ms)) for each, value in known.items()}
    table.replace(old, new, moves, is_retention=True)
    return Removed(count, held_files)


def _watermark(universe: str) -> str:
    return f"retained/{universe}"


def _older(table: Table, rows: pa.Table, before: datetime) -> pa.ChunkedArray | None:
    """A mask of the rows from before a time; None if there are none."""
    column = rows.column(str(table.time))
    mask = pc.less(column, pa.scalar(before, column.type)).fill_null(False)
    return mask if pc.any(mask).as_py() else None
