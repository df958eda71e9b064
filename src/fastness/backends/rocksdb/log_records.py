"""The format of RocksDB's logs: finds their records, and where they end.

A log is a sequence of blocks of 32 KiB. A record is one or more fragments, each inside one block:

    checksum 4 | length 2 | type 1 | body          type: 1 whole, 2 first, 3 middle, 4 last
    body of a record in a write-ahead log: sequence 8 | count 4 | the writes

The checksum is a masked CRC-32C of type and body. It does not cover the length. A first or middle fragment ends with
its block, and fewer than 7 bytes at the end of a block are filler. Other types exist, for recycled and compressed logs.
Fastness uses neither, and a log that was not written so makes RocksDB loop forever, so they count as damage.

Every checksum is compared here, so that a damaged place is known before RocksDB replays the log.
"""

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import google_crc32c

BLOCK: Final = 32_768
FRAGMENT: Final = struct.Struct("<IHB")
BATCH: Final = struct.Struct("<QI")
_WHOLE_HEAD: Final = struct.Struct("<IHBQI")  # Of a whole record: checksum, length, type, sequence and count.
_WHOLE: Final = 1
_FIRST: Final = 2
_MIDDLE: Final = 3
_LAST: Final = 4
_MASK_DELTA: Final = 0xA282EAD8
_ZEROS: Final = bytes(16)  # Fewer zeros in a row also occur in keys and values.
_ZERO_RUN: Final = re.compile(rb"\x00{16,}")
_KINDS: Final = re.compile(rb"[\x01-\x04]")
_SECTOR: Final = 512


class Record(NamedTuple):
    """One complete record."""

    offset: int
    end: int
    sequence: int
    writes: int


class CheckBudget:
    """Bounds the bytes whose checksums are computed, so that every check ends soon on any content."""

    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, size: int) -> bool:
        """Whether that much was left."""
        self.left -= size
        return self.left >= 0


class LogWalk:
    """Iterates over the valid records of a log.

    Afterwards, `bad` is the offset of the first record that is incomplete, impossible or has a wrong checksum, None if
    the log ends with a valid record. `missing_end` says that it extends over the end of the file.
    """

    def __init__(self, data: bytes, *, begin: int = 0, batches: bool = True) -> None:
        self._data = data
        self._begin = begin
        self._batches = batches
        self.bad: int | None = None
        self.missing_end = False
        self.reason = ""

    def __iter__(self) -> Iterator[Record]:
        data, size, unpack = self._data, len(self._data), FRAGMENT.unpack_from
        position, start, head, in_record = self._begin, self._begin, b"", False
        while position < size:
            block_left = BLOCK - position % BLOCK
            if block_left < 7:
                position += block_left
                continue
            if not in_record:
                start = position
            if position + 7 > size:
                self.stop(start, "its header is incomplete", missing_end=True)
                return
            _, length, kind = unpack(data, position)
            begin = position + 7
            position = begin + length
            if not _WHOLE <= kind <= _LAST:
                self.stop(start, f"it has the record type {kind}")
                return
            if length > block_left - 7:
                self.stop(start, f"its length {length} exceeds its block")
                return
            if in_record == (kind <= _FIRST):
                self.stop(start, "its parts are out of order")
                return
            if kind in (_FIRST, _MIDDLE) and length != block_left - 7:
                self.stop(start, "its first part does not fill its block")
                return
            if position > size:
                self.stop(start, "it extends over the end of the file", missing_end=True)
                return
            if not fragment_is_valid(data, begin - 7, position):
                self.stop(start, "its checksum does not match")
                return
            if len(head) < 12:
                head += data[begin : min(position, begin + 12 - len(head))]
            if kind in (_WHOLE, _LAST):
                if self._batches:
                    if len(head) < 12:
                        self.stop(start, "it is too short")
                        return
                    sequence, count = BATCH.unpack(head)
                    yield Record(start, position, sequence, count)
                else:
                    yield Record(start, position, 0, 0)
                in_record, head = False, b""
            else:
                in_record = True
        if in_record:
            self.stop(start, "its last part is missing", missing_end=True)

    def stop(self, offset: int, reason: str, *, missing_end: bool = False) -> None:
        """Set the bad place."""
        self.bad, self.reason, self.missing_end = offset, reason, missing_end


class Skipped(NamedTuple):
    """Where the records that `skip_records` passed over end, the sequence number after them, and the last of them."""

    end: int
    following: int | None
    last: Record | None


def skip_records(data: bytes, expected: int | None, below: int) -> Skipped:
    """Pass over the valid records at the beginning of a log whose sequence numbers are contiguous and below `below`.

    `expected` is the first number; None: any. It does what `LogWalk` does, faster, for directories with a large log.
    """
    size, unpack = len(data), _WHOLE_HEAD.unpack_from
    position, last = 0, None
    while True:
        # The next record may have several parts, or follow filler.
        record = next(iter(LogWalk(data, begin=position)), None)
        if record is None or expected not in (None, record.sequence) or record.sequence + record.writes > below:
            return Skipped(position, expected, last)
        position, last, expected = record.end, record, record.sequence + record.writes
        block_end = min((position // BLOCK + 1) * BLOCK, size)
        start, sequence = -1, 0
        while position + 19 <= block_end:
            checksum, length, kind, number, count = unpack(data, position)
            end = position + 7 + length
            following = expected + count
            if number != expected or kind != _WHOLE or end > block_end or following > below or length < 12:
                break
            if checksum != masked_checksum(data[position + 6 : end]):
                break
            start, sequence, position, expected = position, expected, end, following
        if start >= 0:
            last = Record(start, position, sequence, expected - sequence)


def read_header(data: bytes, position: int) -> tuple[int, int, int]:
    """Checksum, length and type of a fragment."""
    checksum, length, kind = FRAGMENT.unpack_from(data, position)
    return checksum, length, kind


def fragments(data: bytes, record: Record) -> Iterator[tuple[int, int]]:
    """Begin and end of each fragment of a complete record, headers included."""
    position = record.offset
    while position < record.end:
        block_left = BLOCK - position % BLOCK
        if block_left < 7:
            position += block_left
            continue
        length = FRAGMENT.unpack_from(data, position)[1]
        yield position, position + 7 + length
        position += 7 + length


def body_of(data: bytes, record: Record) -> bytes:
    """The body of a complete record."""
    return b"".join(data[begin + 7 : end] for begin, end in fragments(data, record))


def fragment_is_valid(data: bytes, begin: int, end: int) -> bool:
    """Whether the checksum of one fragment matches."""
    return read_header(data, begin)[0] == masked_checksum(data[begin + 6 : end])


def is_unwritten(data: bytes, begin: int, end: int) -> bool:
    """Whether a power loss can have left these bytes: zeros up to their end, or in the part of a whole disk sector.

    RocksDB only appends to a log, so what did not reach the disk reads as zeros. A write may begin and end inside of a
    sector, so its part in one may have few bytes.
    """
    if not any(data[max(begin, end - len(_ZEROS)) : end]):
        return True
    for run in _ZERO_RUN.finditer(data, begin, end):
        sector = run.end() // _SECTOR * _SECTOR
        if sector - run.start() >= len(_ZEROS) and run.end() - sector < len(_ZEROS):
            return True
    first, last = min((begin // _SECTOR + 1) * _SECTOR, end), max(end // _SECTOR * _SECTOR, begin)
    return not any(data[begin:first]) or (last < end and not any(data[last:end]))


def find_batch(data: bytes, begin: int, sequence: int, budget: CheckBudget) -> int | None:
    """The offset of the first valid record at or after `begin` with at least that sequence number.

    An offset at which the budget is spent counts as one: then it is unknown whether there is a record.
    """
    # A record's type, and its sequence number, of which the upper half is known.
    upper = sequence >> 32
    halves = b"|".join(re.escape(struct.pack("<I", half)) for half in (upper, upper + 1))
    for match in re.compile(rb"(?=[\x01\x02].{4}(?:" + halves + rb"))", re.DOTALL).finditer(data, begin):
        position = match.start() - 6
        if position < begin or position + 19 > len(data):
            continue
        if struct.unpack_from("<Q", data, position + 7)[0] >= sequence and _is_fragment(data, position, budget):
            return position
    return None


def find_fragment(data: bytes, begin: int, budget: CheckBudget) -> int | None:
    """The offset of the first valid fragment at or after `begin`, as in `find_batch`."""
    for match in _KINDS.finditer(data, begin):
        position = match.start() - 6
        if position >= begin and _is_fragment(data, position, budget):
            return position
    return None


def _is_fragment(data: bytes, position: int, budget: CheckBudget) -> bool:
    length = FRAGMENT.unpack_from(data, position)[1]
    end = position + 7 + length
    if end > len(data) or position % BLOCK + 7 + length > BLOCK:
        return False
    return not budget.spend(length + 7) or fragment_is_valid(data, position, end)


def masked_checksum(data: bytes) -> int:
    """The masked CRC-32C that RocksDB stores."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
