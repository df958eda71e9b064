"""Looks for a hole between the records of RocksDB's logs, before RocksDB replays them.

RocksDB checks every record, but in the mode that tolerates a cut end it tolerates one in every log: if an older log
lost its end, or is gone, the commits in it vanish while later ones are replayed. Every record carries the number of its
first write and how many there are, so the logs together must count without a gap.

A log is a sequence of blocks of 32 KiB. A record is one fragment, or several, each inside one block:

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
    """Where the logs skip a commit, in words; None if they count without a gap."""
    # Another process may be writing at this moment. A gap that is real stays where it is.
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
                return f"{log.name} goes on with write {sequence} where {expected} should follow"
            expected = sequence + count
    return None


def _batches(data: bytes) -> Iterator[tuple[int, int]]:
    """Sequence and count of every whole record; ends where the log is cut or does not make sense."""
    position, body, inside = 0, b"", False
    while position + _FRAGMENT.size <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _FRAGMENT.size:
            position += room
            continue
        _, length, kind = _FRAGMENT.unpack_from(data, position)
        begin = position + _FRAGMENT.size
        position = begin + length
        if kind == 0 and length == 0:  # Space that was reserved and never written, up to the end of the block.
            position += room - _FRAGMENT.size
            continue
        if not _WHOLE <= kind <= _LAST or length > room - _FRAGMENT.size or position > len(data):
            return
        if kind in (_WHOLE, _FIRST):
            body, inside = b"", True
        if not inside:
            return
        body += data[begin : min(position, begin + _BATCH.size - len(body))]
        if kind in (_WHOLE, _LAST):
            if len(body) < _BATCH.size:
                return
            yield _BATCH.unpack(body)
            inside = False
