"""The files that were added to a table since one of its versions, from its Delta log.

_delta_log/…42.json   {"add":{"path":"universe=main/…","dataChange":true, …}}      new rows
_delta_log/…43.json   {"remove":{…,"dataChange":false}}, {"add":{…,"dataChange":false}}   compacted: the same rows
_delta_log/…44.json   {"remove":{…,"dataChange":true}}, …                          rows were removed
_delta_log/…45.json   {"commitInfo":{"fastness.retention":"true", …}}, {"remove":{…}}, …   the same, by their age
"""

from typing import Final, NamedTuple

import msgspec

from fastness.errors import ObjectNotFound
from fastness.pipeline.lake.tables import RETENTION, LakeTable

_PREFIXES: Final = (b'{"add":', b'{"remove":', b'{"commitInfo":')


class _File(msgspec.Struct, rename="camel"):
    path: str
    partition_values: dict[str, str | None] | None = None
    data_change: bool = True
    stats: str | None = None


class _Stats(msgspec.Struct, rename="camel"):
    num_records: int = 0


class _Information(msgspec.Struct):
    is_retention: str = msgspec.field(default="", name=RETENTION)


class _Line(msgspec.Struct):
    add: _File | None = None
    remove: _File | None = None
    info: _Information | None = msgspec.field(default=None, name="commitInfo")


class NewFile(NamedTuple):
    """A file with new rows. A later compaction may have replaced it; it is kept for some days."""

    path: str
    rows: int


class Changes(NamedTuple):
    """What happened to the files of a universe since a version."""

    old_paths: list[str]  # The files at that version, sorted.
    new_files: list[NewFile]
    has_removals: bool  # Rows were removed, other than by their age.


class ChangeLog:
    """The changes of one table up to a snapshot. Each commit is read once."""

    def __init__(self, table: LakeTable) -> None:
        self._table = table
        self._paths: dict[str, set[str]] = {}
        for file in table.entries():
            self._paths.setdefault(file.universe, set()).add(file.path)
        self._commits: dict[int, list[_Line] | None] = {}

    def since(self, version: int, universe: str) -> Changes | None:
        """The changes after a version; None if Delta has removed a part of its log, or has no such version."""
        if version > self._table.version:
            return None
        paths = set(self._paths.get(universe, ()))
        new_files: list[NewFile] = []
        has_removals = False
        for number in range(self._table.version, version, -1):  # Undoes the commits, the latest one first.
            lines = self._commit(number)
            if lines is None:
                return None
            own = [line for line in lines if _universe(line) == universe]
            paths.difference_update(line.add.path for line in own if line.add is not None)
            paths.update(line.remove.path for line in own if line.remove is not None)
            if not _is_retention(lines):
                new_files += [_new_file(line.add) for line in own if line.add is not None and line.add.data_change]
                has_removals |= any(line.remove is not None and line.remove.data_change for line in own)
        return Changes(sorted(paths), new_files, has_removals)

    def paths_with_new_rows(self, version: int, universe: str) -> set[str]:
        """The current files that may have rows which were added after a version; all files if that is unknown."""
        every = set(self._paths.get(universe, ()))
        if not 0 <= version <= self._table.version:
            return every
        found: set[str] = set()
        for number in range(version + 1, self._table.version + 1):
            lines = self._commit(number)
            if lines is None:
                return every
            own = [line for line in lines if _universe(line) == universe]
            removed = {line.remove.path for line in own if line.remove is not None}
            is_new = not _is_retention(lines)
            has_new = not found.isdisjoint(removed)  # New rows were compacted, perhaps with others.
            added = [line.add for line in own if line.add is not None]
            found -= removed
            found.update(file.path for file in added if has_new or (is_new and file.data_change))
        return found & every

    def _commit(self, number: int) -> list[_Line] | None:
        if number not in self._commits:
            self._commits[number] = self._read(number)
        return self._commits[number]

    def _read(self, number: int) -> list[_Line] | None:
        try:
            data = bytes(self._table.location.read(f"_delta_log/{number:020}.json"))
            return [_decode(line) for line in data.splitlines() if line.startswith(_PREFIXES)]
        except (ObjectNotFound, msgspec.MsgspecError, UnicodeDecodeError):
            return None  # The audit reports a damaged log.


def _is_retention(lines: list[_Line]) -> bool:
    return any(line.info is not None and bool(line.info.is_retention) for line in lines)


def _universe(line: _Line) -> str:
    file = line.add or line.remove
    return (file.partition_values or {}).get("universe") or "" if file is not None else ""


def _new_file(file: _File) -> NewFile:
    return NewFile(file.path, msgspec.json.decode(file.stats, type=_Stats).num_records if file.stats else 0)


_decode: Final = msgspec.json.Decoder(_Line).decode
