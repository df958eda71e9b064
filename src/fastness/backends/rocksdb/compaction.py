"""Frees the disk space of deleted pairs, and keeps merges from using space that a flush needs.

RocksDB drops a deleted pair when it merges the table that has the pair with a later one that has the deletion. It does
so when there are enough tables, so after the last of many deletions the space would stay taken until more is written.
This merges such tables earlier. It rewrites a bounded number of pairs for each deletion, so that consuming a deep
backlog does not rewrite the rest of it again and again. While the disk is nearly full, more is rewritten, and sooner.

A merge frees the old tables after it has written the new ones. `Compactions.room` is what it may write. Before one
starts, its new tables are known to fit: the old ones do, or the pairs in them that are still there do. A merge of
tables whose pairs are all deleted writes nothing. RocksDB does not ask before it starts a merge by itself, so its own
merges are paused while the largest one would not fit.

rocksdict has no call that drops whole tables (`DeleteFilesInRange`), and no limit for the space of RocksDB's merges
(`SstFileManager`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

from rocksdict import CompactOptions, Rdict

from fastness.backends.rocksdb.disk_needs import DiskSpace
from fastness.limits import (
    COMPACT_BYTES_MAX,
    COMPACT_DELETIONS_MIN,
    COMPACT_REWRITES_MAX,
    COMPACT_TIGHT_REWRITES_MAX,
)

_DELETES: Final = "rocksdb.num-deletes-active-mem-table"
_PAIRS: Final = "rocksdb.estimate-num-keys"
_MEMORY: Final = "rocksdb.cur-size-all-mem-tables"
_BASE_LEVEL: Final = "rocksdb.base-level"  # Where tables of level 0 are merged into.
_VERSION: Final = "rocksdb.current-super-version-number"
_DELETION_BYTES: Final = 128  # Of a deletion that stays, with its key.
_LEVELS_MAX: Final = 7
_L0_MERGED_MIN: Final = 4  # As many tables in level 0 are merged also without deletions, as RocksDB would.

Table = dict[str, Any]


class TableRange(NamedTuple):
    """One table, or all of level 0, which are merged together, and the key range that they have."""

    level: int
    first: bytes
    last: bytes
    deletions: int


class Compactions:
    """Finds and merges the tables of one RocksDB that have many deletions, and pauses its own merges."""

    def __init__(self, rocks: Rdict, space: DiskSpace, *, are_automatic: bool) -> None:
        self._rocks = rocks
        self._memtable_bytes = space.memtable_bytes
        self._flush_bytes = space.flush_bytes
        self._merge_bytes_max = space.merge_bytes_max + space.memtable_bytes
        self.are_automatic = are_automatic  # Whether RocksDB merges by itself.
        self._step = (-1, 0)  # The version of the tables, and the most that a merge of them writes at a time.
        self._unfit = (-1, 0)  # The version of the tables, and a room in which none of their merges fits.
        self._last_deletes = 0
        self._options = CompactOptions()
        self._options.set_exclusive_manual_compaction(False)  # RocksDB's own compactions go on meanwhile.

    def room(self, free_bytes: int, reserve_bytes: int) -> int:
        """How many bytes a merge may write.

        It may use the reserve, but not what a flush needs. Above the reserve it may use half, because new data may use
        the other half.
        """
        return max(min(free_bytes, reserve_bytes) - self._flush_bytes, (free_bytes - reserve_bytes) // 2)

    def last_room(self, free_bytes: int) -> int:
        """How many bytes a merge may write if nothing fits in `room`: as much as lets other writes continue.

        While they are refused, it is all but what the flush of the memtable needs.
        """
        kept_bytes = self._memtable_bytes // 4 if self.is_full(free_bytes) else self._memtable_bytes
        return free_bytes - self.memory_bytes - kept_bytes

    @property
    def memory_bytes(self) -> int:
        """What is in memory and not in a table yet."""
        return self._rocks.property_int_value(_MEMORY) or 0

    def is_full(self, free_bytes: int) -> bool:
        """Whether another write might make the next flush fail."""
        return free_bytes < self.memory_bytes + self._memtable_bytes

    def pause_if_too_large(self, room: int) -> None:
        """Pause RocksDB's own merges if one could write more than `room`."""
        if self.are_automatic and self._largest_step() > room:
            self._set_automatic(False)

    def resume_if_they_fit(self, room: int) -> None:
        """Let RocksDB merge by itself again if no merge would write more than `room`."""
        if not self.are_automatic and self._largest_step() <= room:
            self._set_automatic(True)

    def _set_automatic(self, automatic: bool) -> None:
        self._rocks.set_options({"disable_auto_compactions": "false" if automatic else "true"})
        self.are_automatic = automatic

    def _largest_step(self) -> int:
        version = self._rocks.property_int_value(_VERSION) or 0
        if self._step[0] != version:
            tables = self._rocks.live_files()
            levels = {table["level"] for table in tables}
            self._step = (version, max((self._step_of(level, tables, tables) for level in levels), default=0))
        return self._step[1]

    def _step_of(self, level: int, inputs: list[Table], tables: list[Table]) -> int:
        """The most bytes that a merge of these tables of a level with the next one writes before it frees any.

        All tables of level 0 are merged at a time, and of another level each is. RocksDB cuts tables so that they do
        not overlap more of the next level.
        """
        inputs = [table for table in inputs if table["level"] == level]
        if level == 0:
            base = self._rocks.property_int_value(_BASE_LEVEL) or 0
            return _size(inputs) + _size(_overlapping(inputs, [table for table in tables if table["level"] == base]))
        below = min((table["level"] for table in tables if table["level"] > level), default=0)
        if not below:
            return 0
        lower = sorted((table for table in tables if table["level"] == below), key=itemgetter("start_key"))
        first_keys, last_keys = [each["start_key"] for each in lower], [each["end_key"] for each in lower]
        sums = [0, *accumulate(each["size"] for each in lower)]
        largest = 0
        for each in inputs:  # The tables of a level do not overlap each other, so they are in order.
            begin, end = bisect_left(last_keys, each["start_key"]), bisect_right(first_keys, each["end_key"])
            largest = max(largest, each["size"] + sums[max(begin, end)] - sums[begin])
        return largest

    def are_in_memory(self, *, is_tight: bool) -> bool:
        """Whether the memtable has many deletions, and none since the last call: then it is time to write it.

        While the disk is nearly full, it is time as soon as they are worth a merge.
        """
        deletes = self._rocks.property_int_value(_DELETES) or 0
        if is_tight:
            pairs = self._rocks.property_int_value(_PAIRS) or 0
            return deletes > 0 and pairs <= deletes * COMPACT_TIGHT_REWRITES_MAX
        is_quiet, self._last_deletes = deletes == self._last_deletes, deletes
        return is_quiet and deletes >= COMPACT_DELETIONS_MIN

    def compact(self, room: int, *, is_tight: bool) -> bool:
        """Merge one range of tables where many pairs are deleted; returns whether there was one."""
        version = self._rocks.property_int_value(_VERSION) or 0
        if self._unfit[0] == version and room <= self._unfit[1]:
            return False
        tables = self._rocks.live_files()
        ranges = _ranges(tables, 1 if is_tight else COMPACT_DELETIONS_MIN)
        for found in chain(ranges, self._ranges_in_the_way(tables)) if is_tight else ranges:
            if self._is_worthwhile(found, tables, room, is_tight=is_tight):
                # With a single key, RocksDB merges all of level 0 that has it, and then one table of each level.
                last = found.first if is_tight else found.last
                self._rocks.compact_range(found.first, last, self._options)
                # It reports no error. After one, the same tables are there.
                return {table["name"] for table in tables} != {table["name"] for table in self._rocks.live_files()}
        if is_tight:
            self._unfit = (version, room)
        return False

    def _ranges_in_the_way(self, tables: list[Table]) -> Iterator[TableRange]:
        """What RocksDB would merge if its merges were not paused: with it, later merges would not fit."""
        by_level = {level: [each for each in tables if each["level"] == level] for level in range(_LEVELS_MAX)}
        if len(by_level[0]) >= _L0_MERGED_MIN:
            yield _range_of(by_level[0], 0)
        for level, found in by_level.items():
            if level > 0 and _size(found) > self._merge_bytes_max // 2:
                yield from (_range_of([table], 0) for table in found)

    def _is_worthwhile(self, found: TableRange, tables: list[Table], room: int, *, is_tight: bool) -> bool:
        merged = [
            table
            for table in tables
            if table["start_key"] <= found.last and table["end_key"] >= found.first and table["level"] >= found.level
        ]
        pairs: int = sum(table["num_entries"] - table["num_deletions"] for table in merged)
        if found.level > 0 and not any(table["level"] > found.level for table in merged):
            return False  # Nothing is below it that it deletes.
        if not is_tight:
            is_worth_it = pairs <= found.deletions * COMPACT_REWRITES_MAX
            return is_worth_it and _size(merged) <= min(room, COMPACT_BYTES_MAX)
        newest = [table for table in tables if table["level"] == 0]
        if found.deletions and pairs > found.deletions * COMPACT_TIGHT_REWRITES_MAX:
            return False
        if found.level > 0 and any(_overlapping(merged[:1], newest)):
            return False  # Level 0 would be merged first; its own range is before this one, and did not fit.
        inputs = [table for table in merged if table["level"] == found.level]
        step = self._step_of(found.level, inputs, tables)
        if found.level == 0:
            step = max(step, self._merge_bytes_max)  # Of a table that this merge writes, with what it overlaps.
        return step <= room or self._has_less(merged, room)

    def _has_less(self, merged: list[Table], room: int) -> bool:
        """Whether the pairs of these tables that are still there, and the deletions, have less than `room` bytes."""
        room -= _DELETION_BYTES * sum(table["num_deletions"] for table in merged)
        pairs = self._rocks.iter()
        last = max(table["end_key"] for table in merged)
        pairs.seek(min(table["start_key"] for table in merged))
        while room >= 0 and pairs.valid() and pairs.key() <= last:
            room -= len(pairs.key()) + len(pairs.value())
            pairs.next()
        pairs.status()
        return room >= 0


def _ranges(tables: list[Table], deletions_min: int) -> Iterator[TableRange]:
    """The key ranges of tables with many deletions, from the top level on."""
    newest = [table for table in tables if table["level"] == 0]
    deletions = sum(table["num_deletions"] for table in newest)
    if deletions >= deletions_min:
        yield _range_of(newest, deletions)
    for table in sorted(tables, key=lambda each: each["level"]):
        if table["level"] > 0 and table["num_deletions"] >= deletions_min:
            yield _range_of([table], table["num_deletions"])


def _range_of(tables: list[Table], deletions: int) -> TableRange:
    first, last = min(each["start_key"] for each in tables), max(each["end_key"] for each in tables)
    return TableRange(tables[0]["level"], first, last, deletions)


def _overlapping(inputs: list[Table], lower: list[Table]) -> list[Table]:
    """The tables of `lower` that have keys between the first and the last one of `inputs`."""
    first = min((each["start_key"] for each in inputs), default=b"")
    last = max((each["end_key"] for each in inputs), default=b"")
    return [each for each in lower if each["start_key"] <= last and each["end_key"] >= first]


def _size(tables: Iterable[Table]) -> int:
    return sum(table["size"] for table in tables)
