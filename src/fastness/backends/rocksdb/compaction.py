"""Frees the disk space of deleted pairs.

RocksDB drops a deleted pair when it merges the table that has the pair with a later one that has the deletion. It does
so when there are enough tables, so after the last of many deletions the space would stay taken until more is written.
This merges such tables earlier. It rewrites a bounded number of pairs for each deletion, so that consuming a deep
backlog does not rewrite the rest of it again and again.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocksdict import CompactOptions, Rdict

from fastness.limits import COMPACT_BYTES_MAX, COMPACT_DELETIONS_MIN, COMPACT_REWRITES_MAX

_DELETES: Final = "rocksdb.num-deletes-active-mem-table"


class TableRange(NamedTuple):
    """The key range of one table, or of several in level 0, which are merged together."""

    level: int
    first: bytes
    last: bytes
    deletions: int


class DeletedPairs:
    """Finds and merges the tables of one RocksDB that have many deletions."""

    def __init__(self, rocks: Rdict, path: Path) -> None:
        self._rocks = rocks
        self._path = path
        self._last_deletes = 0
        self._options = CompactOptions()
        self._options.set_exclusive_manual_compaction(False)  # RocksDB's own compactions go on meanwhile.

    def are_in_memory(self) -> bool:
        """Whether the memtable has many deletions, and none since the last call: then it is time to write it."""
        deletes = self._rocks.property_int_value(_DELETES) or 0
        is_quiet, self._last_deletes = deletes == self._last_deletes, deletes
        return is_quiet and deletes >= COMPACT_DELETIONS_MIN

    def compact(self) -> bool:
        """Merge one range of tables where many pairs are deleted; returns whether there was one."""
        tables = self._rocks.live_files()
        for found in _ranges(tables):
            if self._is_worthwhile(found, tables):
                self._rocks.compact_range(found.first, found.last, self._options)
                return True
        return False

    def _is_worthwhile(self, found: TableRange, tables: list[dict[str, Any]]) -> bool:
        merged = [
            table
            for table in tables
            if table["start_key"] <= found.last and table["end_key"] >= found.first and table["level"] >= found.level
        ]
        pairs: int = sum(table["num_entries"] - table["num_deletions"] for table in merged)
        if found.level > 0 and not any(table["level"] > found.level for table in merged):
            return False  # Nothing is below it that it deletes.
        disk = os.statvfs(self._path)
        rewritten_bytes: int = sum(table["size"] for table in merged)
        has_room = rewritten_bytes <= min(disk.f_bavail * disk.f_frsize // 2, COMPACT_BYTES_MAX)
        return has_room and pairs <= found.deletions * COMPACT_REWRITES_MAX


def _ranges(tables: list[dict[str, Any]]) -> Iterator[TableRange]:
    """The key ranges of tables with many deletions, from the top level on."""
    newest = [table for table in tables if table["level"] == 0]
    deletions = sum(table["num_deletions"] for table in newest)
    if deletions >= COMPACT_DELETIONS_MIN:
        yield TableRange(
            0, min(each["start_key"] for each in newest), max(each["end_key"] for each in newest), deletions
        )
    for table in sorted(tables, key=lambda each: each["level"]):
        if table["level"] > 0 and table["num_deletions"] >= COMPACT_DELETIONS_MIN:
            yield TableRange(table["level"], table["start_key"], table["end_key"], table["num_deletions"])
