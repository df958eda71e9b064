"""Copies what can be read of a damaged RocksDB directory, which is not changed, to a new one.

The tables are opened in a working folder, without the logs. Then every valid record of the logs is applied in order,
also those behind a damaged place: commits between are lost, later ones are not. Pairs are copied one by one, and a
damaged part of a table is skipped.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocksdict import Rdict, RdictIter, WriteBatch

from fastness.backends.rocksdb.database import RocksDatabase, open_rocks, table_options
from fastness.backends.rocksdb.log_check import check_manifest, log_files
from fastness.backends.rocksdb.log_records import (
    BATCH,
    CheckBudget,
    LogWalk,
    body_of,
    find_batch,
)
from fastness.backends.rocksdb.watermark import NAME, read_watermark
from fastness.errors import Corrupt
from fastness.kv import Pair, Transaction

_SCAN_BUDGET_BYTES: Final = 64 << 30  # About a minute.
_CHUNK_BYTES: Final = 2 << 20
_KEY_BYTES: Final = 64  # The part of a key that the search for the end of a damaged part varies.
_DELETE, _PUT, _LOG_DATA, _SINGLE_DELETE, _DELETE_RANGE = 0x0, 0x1, 0x3, 0x7, 0xF


class Salvaged(NamedTuple):
    """What was copied, and a description of each part that was not."""

    pairs: int
    commits: int
    lost: list[str]


def salvage(source: Path, target: Path) -> Salvaged:
    """Copy the readable pairs of the directory `source` to the new directory `target`."""
    lost: list[str] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".salvage-", dir=target.parent) as folder:
        rocks = _open_tables(source, Path(folder), lost)
        try:
            commits, last = _apply_logs(source, rocks, lost)
            durable = read_watermark(source)
            last = max(last, rocks.latest_sequence_number())
            if durable is not None and last < durable:
                lost.append(f"commits {last + 1} to {durable}: they were on disk, and are in no file")
            with RocksDatabase(target) as database:
                pairs = _copy_pairs(rocks, database, lost)
        finally:
            rocks.close()
    return Salvaged(pairs, commits, lost)


def _open_tables(source: Path, work: Path, lost: list[str]) -> Rdict:
    """A copy of the directory without its logs. If its manifest is damaged, it is built anew from the tables."""
    for file in source.iterdir() if source.is_dir() else ():
        if file.suffix == ".sst":
            try:
                os.link(file, work / file.name)
            except OSError:
                shutil.copyfile(file, work / file.name)
        elif file.is_file() and file.suffix != ".log" and file.name not in ("LOCK", NAME):
            shutil.copyfile(file, work / file.name)
    has_tables = any(work.glob("*.sst"))
    try:
        if not (work / "CURRENT").exists() and has_tables:
            raise Corrupt("CURRENT is missing")
        if has_tables or (work / "CURRENT").exists():
            check_manifest(work)
        return open_rocks(work, table_options())
    except Exception as error:
        lost.append(f"the list of tables ({error}): all tables are read, so pairs that were deleted may be back")
    for file in work.iterdir():
        if file.suffix != ".sst":
            file.unlink()
    if has_tables:
        Rdict.repair(str(work), table_options())
        for unreadable in work.glob("lost/*.sst"):
            lost.append(f"table {unreadable.name}: it cannot be read")
    return open_rocks(work, table_options())


def _apply_logs(source: Path, rocks: Rdict, lost: list[str]) -> tuple[int, int]:
    """Apply the valid records of all logs; returns their number and the last sequence number."""
    commits, expected = 0, None
    for log in log_files(source):
        data = log.read_bytes()
        for offset, body in _valid_batches(data, log.name, lost):
            sequence, count = BATCH.unpack_from(body)
            if expected is not None and sequence > expected:
                lost.append(f"commits {expected} to {sequence - 1}: missing before byte {offset:,} of {log.name}")
            try:
                rocks.write(_decode_batch(body))
            except (ValueError, IndexError) as error:
                lost.append(f"commit {sequence} at byte {offset:,} of {log.name}: {error}")
            else:
                commits += 1
            expected = sequence + count
    return commits, 0 if expected is None else expected - 1


def _valid_batches(data: bytes, name: str, lost: list[str]) -> Iterator[tuple[int, bytes]]:
    budget = CheckBudget(_SCAN_BUDGET_BYTES)
    begin: int | None = 0
    while begin is not None:
        walk = LogWalk(data, begin=begin)
        lowest = 1
        for record in walk:
            lowest = record.sequence + record.writes
            yield record.offset, body_of(data, record)
        bad = walk.bad
        if bad is None:
            return
        begin = find_batch(data, bad + 1, lowest, budget)
        end = len(data) if begin is None else begin
        if any(data[bad:end]):
            lost.append(f"bytes {bad:,} to {end:,} of {name}: no valid record")


def _decode_batch(body: bytes) -> WriteBatch:
    """The writes in the body of a record.

    Raises:
        ValueError, IndexError: it has something that Fastness does not write.
    """
    batch = WriteBatch(raw_mode=True)
    position = BATCH.size
    while position < len(body):
        kind = body[position]
        first, position = _read_bytes(body, position + 1)
        if kind in (_DELETE, _SINGLE_DELETE):
            batch.delete(first)
        elif kind == _PUT:
            second, position = _read_bytes(body, position)
            batch.put(first, second)
        elif kind == _DELETE_RANGE:
            second, position = _read_bytes(body, position)
            batch.delete_range(first, second)
        elif kind != _LOG_DATA:
            raise ValueError(f"it has a write of the unknown kind {kind}")
    return batch


def _read_bytes(body: bytes, position: int) -> tuple[bytes, int]:
    """A string with its length before it, and the position after it."""
    length, shift = 0, 0
    while True:
        byte = body[position]
        position += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if position + length > len(body):
        raise ValueError("it is incomplete")
    return body[position : position + length], position + length


def _copy_pairs(rocks: Rdict, database: RocksDatabase, lost: list[str]) -> int:
    count, size, chunk = 0, 0, list[Pair]()
    for key, value in _readable_pairs(rocks, lost):
        chunk.append((key, value))
        count += 1
        size += len(key) + len(value) + 128
        if size >= _CHUNK_BYTES:
            database.transact(_put_all, chunk)
            size, chunk = 0, []
    database.transact(_put_all, chunk)
    return count


def _put_all(tx: Transaction, pairs: list[Pair]) -> None:
    for key, value in pairs:
        tx.put(key, value)


def _readable_pairs(rocks: Rdict, lost: list[str]) -> Iterator[Pair]:
    """All pairs in order, without those in damaged parts of tables."""
    keys = sorted(key for file in rocks.live_files() for key in _bounds(file))
    begin: bytes | None = b""
    while begin is not None:
        pairs = rocks.iter()
        pairs.seek(begin)
        last = begin
        while pairs.valid():
            last = pairs.key()
            yield last, pairs.value()
            pairs.next()
        try:
            pairs.status()
            return
        except Exception as error:
            begin = next((_first_readable(rocks, last, key) for key in keys if key > last and _reads(rocks, key)), None)
            until = "the end" if begin is None else repr(begin)
            lost.append(f"pairs between {last!r} and {until}: {error}")


def _bounds(file: dict[str, Any]) -> Iterator[bytes]:
    for name in ("start_key", "end_key"):
        if isinstance(file.get(name), bytes):
            yield file[name]


def _first_readable(rocks: Rdict, low: bytes, high: bytes) -> bytes:
    """The lowest key above `low` from which the tables can be read; they can be from `high` on."""
    bad, good = (int.from_bytes(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0")) for key in (low, high))
    found = high
    while good - bad > 1:
        middle = (bad + good) // 2
        key = middle.to_bytes(_KEY_BYTES)
        if _reads(rocks, key):
            good, found = middle, key
        else:
            bad = middle
    return found


def _reads(rocks: Rdict, key: bytes) -> bool:
    pairs: RdictIter = rocks.iter()
    with suppress(Exception):
        pairs.seek(key)
        pairs.status()
        return True
    return False
