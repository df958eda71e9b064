"""Reads RocksDB's list of tables: a log whose records are edits of it.

    edit: tag, fields, tag, fields, …            numbers are varints, strings have their length before them

Only what the check of the logs needs is kept. An edit with a tag that is not known here ends the reading, because the
length of its fields is unknown. Tags from 8,192 on have one string each, so they can be skipped.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from fastness.backends.rocksdb.log_records import LogWalk, body_of

_COMPARATOR, _LOG_NUMBER, _NEXT_FILE, _LAST_SEQUENCE, _COMPACT_CURSOR, _DELETED_FILE = 1, 2, 3, 4, 5, 6
_PREVIOUS_LOG, _MIN_LOG, _NEW_FILE, _COLUMN_FAMILY, _MAX_COLUMN_FAMILY, _ATOMIC_GROUP = 9, 10, 103, 200, 203, 300
_SKIPPED_NUMBERS: Final = frozenset((_NEXT_FILE, _PREVIOUS_LOG, _MAX_COLUMN_FAMILY, _ATOMIC_GROUP))
_IGNORABLE: Final = 1 << 13
_END_OF_FILE_FIELDS: Final = 1


class UnknownEdit(ValueError):
    """An edit that Fastness's RocksDB does not write."""


class Manifest(NamedTuple):
    """What the edits of a list of tables add up to."""

    first_log: int  # The commits of older logs are in tables, and RocksDB ignores those logs.
    flushed: int  # Every commit up to this one is in tables.
    last_commit: int  # Later commits are in the logs. Those after `flushed` may be in either.
    tables: frozenset[int]


def read_manifest(data: bytes) -> Manifest:
    """The state after the complete records of a list of tables.

    Raises:
        UnknownEdit: an edit cannot be read.
    """
    first_log = flushed = last_commit = 0
    tables: set[int] = set()
    for record in LogWalk(data, batches=False):
        fields = _Fields(body_of(data, record))
        is_first_state, commit = True, 0
        for tag in fields.tags():
            # Every later edit has it. Commits go on while such an edit is written, so its last commit may be in a log.
            is_first_state = is_first_state and tag != _NEXT_FILE
            if tag in (_LOG_NUMBER, _MIN_LOG):
                first_log = max(first_log, fields.number())
            elif tag == _LAST_SEQUENCE:
                commit = fields.number()
            elif tag == _NEW_FILE:
                table, last_in_table = fields.new_file()
                tables.add(table)
                flushed = max(flushed, last_in_table)
            elif tag == _DELETED_FILE:
                fields.number()
                tables.discard(fields.number())
            elif tag == _COMPACT_CURSOR:
                fields.number()
                fields.string()
            elif tag == _COMPARATOR or tag & _IGNORABLE:
                fields.string()
            elif tag in _SKIPPED_NUMBERS or (tag == _COLUMN_FAMILY and fields.peek() == 0):
                fields.number()
            else:
                raise UnknownEdit(f"tag {tag}")
        last_commit = max(last_commit, commit)
        flushed = max(flushed, commit if is_first_state else 0)
    return Manifest(first_log, flushed, max(last_commit, flushed), frozenset(tables))


class _Fields:
    """The fields of one edit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def tags(self) -> Iterator[int]:
        while self._position < len(self._data):
            yield self.number()

    def peek(self) -> int:
        """The next byte."""
        if self._position >= len(self._data):
            raise UnknownEdit("it is incomplete")
        return self._data[self._position]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.peek()
            self._position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def string(self) -> bytes:
        size = self.number()
        begin, self._position = self._position, self._position + size
        if self._position > len(self._data):
            raise UnknownEdit("it is incomplete")
        return self._data[begin : self._position]

    def new_file(self) -> tuple[int, int]:
        """The number of an added table, and its last commit.

        Its fields: level, number, size, two keys, two sequence numbers, then tagged strings.
        """
        self.number()
        table = self.number()
        self.number()
        self.string()
        self.string()
        self.number()
        last_commit = self.number()
        while self.number() != _END_OF_FILE_FIELDS:
            self.string()
        return table, last_commit
