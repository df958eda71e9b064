"""Finds gaps between the records of RocksDB's logs, before RocksDB replays them.

RocksDB checks every record. But the mode that tolerates a truncated end tolerates one in every log: if an older log is
truncated or missing, its commits are lost while later ones are replayed. Every record carries the sequence number of
its first write and its number of writes, so the sequence numbers of all logs must be contiguous.

A log is a sequence of blocks of 32 KiB. A record is one or more fragments, each inside one block:

    checksum 4 | length 2 | type 1 | body          type: 1 whole, 2 first, 3 middle, 4 last
    body: sequence 8 | count 4 | the writes
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK: Final = 32_768
_FRAGMENT: Final = struct.Struct("<IHB")
_BATCH: Final = struct.Struct("<QI")
_WHOLE: Final = 1
_FIRST: Final = 2
_LAST: Final = 4


def find_gap(directory: Path) -> str | None:
    """A description of the first gap between the logs' commits; None if there is none."""
    # Another process may be writing right now. A real gap stays, so check twice.
    gap = _find_gap(directory)
    return gap if gap is not None and gap == _find_gap(directory) else None


def _find_gap(directory: Path) -> str | None:
    expected: int | None = None
    for log in sorted(directory.glob("*.log")):
        try:
            data = log.read_bytes()
        except FileNotFoundError:  # RocksDB has just removed it.
            expected = None
            continue
        for sequence, count in _batches(data):
            if expected is not None and sequence != expected:
                return f"{log.name} continues with write {sequence}, expected {expected}"
            expected = sequence + count
    return None


def _batches(data: bytes) -> Iterator[tuple[int, int]]:
    """Sequence number and count of every complete record; stops where the log is truncated or invalid."""
    position, body, in_record = 0, b"", False
    while position + _FRAGMENT.size <= len(data):
        block_left = _BLOCK - position % _BLOCK
        if block_left < _FRAGMENT.size:
            position += block_left
            continue
        _, length, kind = _FRAGMENT.unpack_from(data, position)
        begin = position + _FRAGMENT.size
        position = begin + length
        if kind == 0 and length == 0:  # Preallocated, unwritten space up to the end of the block.
            position += block_left - _FRAGMENT.size
            continue
        if not _WHOLE <= kind <= _LAST or length > block_left - _FRAGMENT.size or position > len(data):
            return
        if kind in (_WHOLE, _FIRST):
            body, in_record = b"", True
        if not in_record:
            return
        body += data[begin : min(position, begin + _BATCH.size - len(body))]
        if kind in (_WHOLE, _LAST):
            if len(body) < _BATCH.size:
                return
            yield _BATCH.unpack(body)
            in_record = False
