"""Checks the files of a RocksDB directory before RocksDB opens them.

RocksDB by itself drops records silently where a damaged length looks like a truncated end, refuses logs in which only
unsynced writes are missing, and loops forever on some record types. So this finds the first bad place of the logs and
decides what it is:

    torn     Nothing up to the watermark is missing, and the place looks unwritten: the file ends there, or it has
             zeros. That is what a crash or a power loss leaves. The log is cut there.
    damage   Anything else. Above all a valid record of a later commit behind the place: commits between are missing.

Every record carries the sequence number of its first write and its number of writes, so the sequence numbers of all
logs must be contiguous, and continue those of the tables. Logs that the MANIFEST does not need are ignored: a power
loss may have kept any of them.

RocksDB lets CURRENT name a new MANIFEST before it syncs the folder of both. So a power loss may keep the new CURRENT
and lose the new MANIFEST. The earlier MANIFEST is still there, because it is removed after that sync, and it is taken
if it is complete: with all of its tables, and with all commits up to the watermark in them and in the logs.
"""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from fastness.backends.rocksdb.log_records import (
    BLOCK,
    FRAGMENT,
    CheckBudget,
    LogWalk,
    Record,
    Skipped,
    find_batch,
    find_fragment,
    is_unwritten,
    masked_checksum,
    read_header,
    skip_records,
)
from fastness.backends.rocksdb.manifest import Manifest, UnknownEdit, read_manifest
from fastness.backends.rocksdb.watermark import read_watermark
from fastness.errors import DamagedDatabase
from fastness.folders import sync_folder
from fastness.private_files import open_private

_BUDGET_BYTES: Final = 2 << 30  # About one second.
_SEQUENCES: Final = 1 << 64  # Above every sequence number.
_CURRENT: Final = re.compile(rb"MANIFEST-[0-9]{6,20}\n")
_FIRST_MANIFEST: Final = "MANIFEST-000001"  # RocksDB replaces it before the first opening ends.
_ADVICE: Final = "restore it from a backup, or copy what can be read with `fastness doctor --salvage NEW_FOLDER`"


class Cut(NamedTuple):
    """A log whose bytes from an offset on are torn."""

    log: Path
    offset: int


class Repairs(NamedTuple):
    """What a power loss has left, and must be changed before RocksDB opens a directory."""

    cuts: tuple[Cut, ...] = ()
    current: str | None = None  # The MANIFEST that CURRENT must name; empty: CURRENT must be removed.


def check_files(directory: Path) -> Repairs:
    """What to repair before RocksDB opens the directory; no process may write to it meanwhile.

    Raises:
        DamagedDatabase: commits that were durable are missing or damaged.
    """
    durable = read_watermark(directory)
    if not (directory / "CURRENT").exists():
        if durable or any(directory.glob("*.sst")):
            raise damaged(directory / "CURRENT", "it is missing, but the directory has been used")
        return Repairs()
    named = _named_manifest(directory)
    if not named.exists():
        return _check_without_manifest(directory, named, durable)
    logs = _LogCheck(directory, durable, check_manifest(directory))
    return Repairs(tuple(logs.run()))


def repair_files(directory: Path, repairs: Repairs) -> None:
    """Carry out repairs, durably."""
    for cut in repairs.cuts:
        with cut.log.open("rb+") as file:
            file.truncate(cut.offset)
            os.fsync(file.fileno())
    if repairs.current is None:
        return
    current, draft = directory / "CURRENT", directory / "000000.dbtmp"
    if repairs.current:
        with open(draft, "wb", opener=open_private) as file:
            file.write(f"{repairs.current}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(current)
    else:
        current.unlink()
    sync_folder(directory)


def _check_without_manifest(directory: Path, named: Path, durable: int | None) -> Repairs:
    """The repairs of a directory whose CURRENT names a MANIFEST that is missing."""
    missing = damaged(named, "it is missing")
    earlier = [each for each in directory.glob("MANIFEST-*") if _number(each) < _number(named)]
    if not earlier:
        if named.name == _FIRST_MANIFEST and durable is None and not log_files(directory):
            return Repairs(current="")
        raise missing
    newest = max(earlier, key=_number)
    data = newest.read_bytes()
    manifest = _check_manifest_file(newest, data)
    if manifest is None or not all((directory / f"{table:06}.sst").exists() for table in manifest.tables):
        raise missing
    logs = _LogCheck(directory, durable, manifest)
    cuts = logs.run()
    is_new = durable is None and logs.last_commit == 0
    if not is_new and (durable is None or logs.last_commit < durable):
        raise missing
    return Repairs(tuple(cuts), newest.name)


def damaged(file: Path, what: str) -> DamagedDatabase:
    """The error for a damaged file of a database."""
    return DamagedDatabase(f"{file} is damaged: {what}; {_ADVICE}")


def log_files(directory: Path) -> list[Path]:
    """The logs of a directory, oldest first."""
    return sorted((log for log in directory.glob("*.log") if log.stem.isdigit()), key=lambda log: int(log.stem))


def check_durable(directory: Path, last: int) -> None:
    """Raise DamagedDatabase if the commits of an opened database end before its watermark."""
    durable = read_watermark(directory)
    if durable is not None and last < durable:
        raise damaged(directory, f"its last commit is {last}, but {durable} was on disk")


def check_manifest(directory: Path) -> Manifest | None:
    """Check the list of tables. Returns what it says; None if it has edits that are unknown here.

    Raises:
        DamagedDatabase: it is damaged.
    """
    named = _named_manifest(directory)
    try:
        return _check_manifest_file(named, named.read_bytes())
    except FileNotFoundError as error:
        raise damaged(named, "it is missing") from error


def _named_manifest(directory: Path) -> Path:
    current = (directory / "CURRENT").read_bytes()
    if not _CURRENT.fullmatch(current):
        raise damaged(directory / "CURRENT", "it does not name a manifest")
    return directory / current.decode().strip()


def _number(manifest: Path) -> int:
    digits = manifest.name.removeprefix("MANIFEST-")
    return int(digits) if digits.isdecimal() else 0


def _check_manifest_file(manifest: Path, data: bytes) -> Manifest | None:
    walk = LogWalk(data, batches=False)
    for _ in walk:
        pass
    if walk.bad is not None:
        behind = find_fragment(data, walk.bad + 1, CheckBudget(_BUDGET_BYTES))
        if behind is not None or not _looks_torn(data, walk, len(data)):
            raise damaged(manifest, f"the record at byte {walk.bad:,} cannot be read ({walk.reason})")
    try:
        return read_manifest(data)
    except UnknownEdit:
        return None


def _looks_torn(data: bytes, walk: LogWalk, end: int) -> bool:
    """Whether the bad place that ends at `end` is what a crash leaves."""
    assert walk.bad is not None
    if is_unwritten(data, walk.bad, end):
        return True
    if not walk.missing_end or end < len(data):
        return False
    # A complete record whose length was changed also seems to extend over the end.
    begin = walk.bad + FRAGMENT.size
    if begin > len(data) or len(data) - begin > BLOCK:
        return True
    checksum, length, _ = read_header(data, walk.bad)
    return begin + length <= len(data) or checksum != masked_checksum(data[begin - 1 :])


class _LogCheck:
    """The check of all logs of a directory."""

    def __init__(self, directory: Path, durable: int | None, manifest: Manifest | None) -> None:
        first_log = 0 if manifest is None else manifest.first_log
        self._logs = [log for log in log_files(directory) if int(log.stem) >= first_log]
        self._durable = durable
        self._flushed = 0 if manifest is None else manifest.flushed
        self._first_max = None if manifest is None else manifest.last_commit + 1  # Of the first record.
        self._expected: int | None = None  # The sequence number that the next record must have.
        self._budget = CheckBudget(_BUDGET_BYTES)

    @property
    def last_commit(self) -> int:
        """Every commit up to this one is in the tables or the logs, as far as they were checked."""
        return max(self._flushed, 0 if self._expected is None else self._expected - 1)

    def run(self) -> list[Cut]:
        """Where to cut the logs.

        Raises:
            DamagedDatabase: commits that were durable are missing or damaged.
        """
        cuts: list[Cut] = []
        torn: Cut | None = None  # The last log that ends in a torn record.
        has_records = False
        for index, log in enumerate(self._logs):
            data = log.read_bytes()
            skipped = self._skip_synced(data)
            self._expected = skipped.following
            walk = LogWalk(data, begin=skipped.end)
            has_records = skipped.last is not None
            for record in walk:
                if self._is_unexpected(record):
                    if has_records or record.sequence <= self.last_commit:
                        raise damaged(log, self._unexpected(record))
                    if not self._has_all_synced():
                        place = f" ({torn.log.name} ends at byte {torn.offset:,})" if torn else ""
                        raise damaged(log, f"the log is missing commits: {self._unexpected(record)}{place}")
                    return [*cuts, *(Cut(later, 0) for later in self._logs[index:])]
                has_records = True
                self._expected = record.sequence + record.writes
            if walk.bad is not None:
                torn = self._judge(log, data, walk)
                cuts.append(torn)
                has_records = has_records and torn.offset > 0
        if has_records:
            self._check_end()
        return cuts

    def _skip_synced(self, data: bytes) -> Skipped:
        """Pass over the records that need no closer look: their commits follow those before, and are on disk."""
        first = next(iter(LogWalk(data)), None)
        if first is None or self._is_unexpected(first):
            return Skipped(0, self._expected, None)
        return skip_records(data, self._expected, _SEQUENCES if self._durable is None else self._durable + 1)

    def _is_unexpected(self, record: Record) -> bool:
        if self._expected is not None:
            return record.sequence != self._expected
        return self._first_max is not None and record.sequence > self._first_max

    def _unexpected(self, record: Record) -> str:
        expected = self._first_max if self._expected is None else self._expected
        return f"byte {record.offset:,} continues with write {record.sequence}, expected {expected}"

    def _has_all_synced(self) -> bool:
        """Whether everything that was known to be on disk is there."""
        return self._durable is not None and self.last_commit >= self._durable

    def _judge(self, log: Path, data: bytes, walk: LogWalk) -> Cut:
        """The cut at a bad place, if it is torn."""
        assert walk.bad is not None
        lowest = 1 if self._expected is None else self._expected
        behind = find_batch(data, walk.bad + 1, lowest, self._budget)
        place = f"the record at byte {walk.bad:,} cannot be read ({walk.reason})"
        end = len(data) if behind is None else behind
        is_torn = _looks_torn(data, walk, end)
        if behind is not None and not (is_torn and self._has_all_synced()):
            raise damaged(log, f"{place}, and a valid record of a later commit follows at byte {behind:,}")
        if not is_torn:
            raise damaged(log, place)
        if log == self._logs[-1] and self._durable is not None and self.last_commit < self._durable:
            missing = f"{self.last_commit + 1} to {self._durable}"
            raise damaged(log, f"{place}, and the commits from {missing} were on disk")
        return Cut(log, walk.bad)

    def _check_end(self) -> None:
        """The newest log has the newest commits, so they must reach the watermark."""
        if self._durable is not None and self.last_commit < self._durable:
            raise damaged(self._logs[-1], f"its last commit is {self.last_commit}, but {self._durable} was on disk")
