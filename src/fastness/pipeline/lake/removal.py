"""Removes the rows of some sources from a table: files with such rows are written again without them."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from fastness.pipeline.lake import files
from fastness.pipeline.lake.files import AddedFile
from fastness.pipeline.lake.tables import LakeFile, LakeTable, Move

SOURCES: Final = {  # How each table names a source, and numbers its rows.
    "journal": (("world",), "height"),
    "segments": (("world",), "last"),
    "activity": (("file",), "n"),
    "queue_events": (("queue",), "changed_at"),  # In milliseconds.
    "entity_changes": (("kind", "id"), "version"),
    "world_state": (("world",), "height"),
    "quarantine": (("source",), "start"),
    "superseded": (("source",), "number"),
}

Matches = Callable[[pa.Table], pa.Array]  # A mask of the rows that are removed, without nulls.
Cut = Callable[[str], int | None]  # The number from which on the rows of a source are removed; None: none are.


def rows_from(table: LakeTable, universe: str, cut: Cut) -> Iterator[tuple[LakeFile, pa.Table, pa.Table]]:
    """For each file with rows to remove: the file, the rows that stay, and those that are removed."""
    for file in table.entries():
        if file.universe == universe:
            rows = table.rows_of(file)
            mask = pa.array(
                [(low := cut(name)) is not None and number >= low for name, number in _named(table, rows)], pa.bool_()
            )
            if pc.any(mask).as_py():
                yield file, rows.filter(pc.invert(mask)), rows.filter(mask)


def remove(table: LakeTable, universe: str, cut: Cut, moves: Mapping[str, Move]) -> int:
    """Remove rows and move watermarks, in one commit; returns the number of removed rows.

    Raises:
        TransactionConflict: another run committed first; nothing was removed.
    """
    old: list[LakeFile] = []
    new: list[AddedFile] = []
    count = 0
    for file, kept, removed in rows_from(table, universe, cut):
        old.append(file)
        new += written(table, kept)
        count += removed.num_rows
    table.replace(old, new, moves)
    return count


def remove_where(
    table: LakeTable, matches: Matches, moves: Mapping[str, Move] | None = None, *, universe: str | None = None
) -> int:
    """Remove the rows that match, of one universe or of all, and move watermarks, in one commit; returns their number.

    Raises:
        TransactionConflict: another run committed first; nothing was removed.
    """
    old: list[LakeFile] = []
    new: list[AddedFile] = []
    count = 0
    for file in table.entries():
        if universe in (None, file.universe):
            rows = table.rows_of(file)
            mask = matches(rows)
            if removed := pc.sum(mask).as_py():
                old.append(file)
                kept = rows.filter(pc.invert(mask))
                new += written(table, kept)
                count += removed
    table.replace(old, new, moves)
    return count


def written(table: LakeTable, rows: pa.Table) -> list[AddedFile]:
    """Rows in new files of a table, which are not committed."""
    return files.write(table.table, table.location, files.sorted_batches(table.table, rows))


def source_of(table: str, row: Mapping[str, Any]) -> tuple[str, int]:
    """The name of a row's source, and the row's number."""
    names, number = SOURCES[table]
    return "/".join(row[name] for name in names), _number(row[number])


def _named(table: LakeTable, rows: pa.Table) -> Iterator[tuple[str, int]]:
    names, number = SOURCES[table.table.name]
    columns = [rows.column(name).to_pylist() for name in names]
    return zip(map("/".join, zip(*columns, strict=True)), map(_number, rows.column(number).to_pylist()), strict=True)


def _number(value: int | datetime) -> int:
    return round(value.timestamp() * 1_000) if isinstance(value, datetime) else value
