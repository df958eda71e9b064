"""The watermark: the number of the last commit that is known to be on disk, in a file beside the logs.

A log that was cut short looks like one that ends there, so the log alone does not show what is missing. The watermark
is written after syncs of the log, so it may lag behind and never leads. It is written only every few milliseconds, and
synced every few seconds: after a crash of the process it may lack the commits of the last `WATERMARK_WRITE_SECONDS` of
writing, and after a power loss those of the last `WATERMARK_SYNC_SECONDS`.

    two slots, 512 bytes apart, written in turn:  mark 4 | checksum 4 | commit 8

A slot that a power loss has torn does not have its checksum; the other one then counts.

The file also says whether the directory was closed, with everything synced:

    at byte 256, while it is closed:  mark 4 | checksum 4 | commit 8 | device 8 | inode 8 of this file

Opening a directory erases that and syncs the file. The commit shows that no other program wrote meanwhile; device and
inode, that this is no copy of a directory whose original may have continued. RocksDB's checkpoints do not have the
file, nor has a directory that was never opened: it has no LOCK either, which tells them from one that lost the file.
"""

import math
import os
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from fastness import limits
from fastness.folders import sync_folder

NAME: Final = "WATERMARK"
_SLOT: Final = struct.Struct("<4sIQ")
_COMMIT: Final = struct.Struct("<Q")
_MARK: Final = b"FNW1"
_SLOTS: Final = (0, 512)
_SIZE: Final = 1024
_CLOSED: Final = struct.Struct("<4sI24s")
_CLOSED_CONTENT: Final = struct.Struct("<QQQ")
_CLOSED_MARK: Final = b"FNC1"
_CLOSED_AT: Final = 256
_LOSS: Final = "commits that were cut from the end of the log cannot be noticed"


def read_watermark(directory: Path) -> int | None:
    """The last commit that was on disk; None if it is not known."""
    data = _read(directory) or b""
    return max((commit for slot in _SLOTS if (commit := _commit_at(data, slot)) is not None), default=None)


def watermark_fault(directory: Path) -> str | None:
    """What is wrong with the watermark of a directory that has commits; None if nothing is."""
    data = _read(directory)
    if data is None:
        return f"it is missing: {_LOSS}" if (directory / "LOCK").exists() else None
    if len(data) != _SIZE:
        return f"it has {len(data):,} bytes, not {_SIZE:,}: {_LOSS}"
    missing = [slot for slot in _SLOTS if _commit_at(data, slot) is None]
    if len(missing) == len(_SLOTS):
        return f"neither of its two copies has its checksum: {_LOSS}"
    if any(any(data[slot : slot + _SLOT.size]) for slot in missing):
        return "one of its two copies does not have its checksum: the latest commits may be missing from it"
    mark, checksum, content = _CLOSED.unpack_from(data, _CLOSED_AT)
    if any(data[_CLOSED_AT : _CLOSED_AT + _CLOSED.size]) and (mark, checksum) != (_CLOSED_MARK, zlib.crc32(content)):
        return "its record that the directory was closed does not have its checksum"
    return None


def _read(directory: Path) -> bytes | None:
    """The bytes of the file, with one more than it should have if it is longer; None if it is missing."""
    try:
        with (directory / NAME).open("rb") as file:
            return file.read(_SIZE + 1)
    except FileNotFoundError:
        return None


def _commit_at(data: bytes, slot: int) -> int | None:
    if len(data) < slot + _SLOT.size:
        return None
    mark, checksum, commit = _SLOT.unpack_from(data, slot)
    return commit if mark == _MARK and checksum == zlib.crc32(_COMMIT.pack(commit)) else None


class Watermark:
    """Writes the watermark of one open directory."""

    def __init__(self, directory: Path, commit: int) -> None:
        """Open the watermark of a directory whose last commit is `commit`, and record that the directory is open."""
        self.fault: str | None = None  # What was wrong with the file before.
        path = directory / NAME
        is_new = not path.exists()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._slot = 0
        self._commit = self._written = -1
        self._written_at = self._synced_at = -math.inf
        try:
            if os.fstat(self._file).st_size != _SIZE:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, bytes(_SIZE), 0)  # Later writes need no more space.
            data = os.pread(self._file, _SIZE, 0)
            for slot in _SLOTS:
                if _commit_at(data, slot) is None:  # Otherwise a damaged copy would be found again.
                    os.pwrite(self._file, bytes(_SLOT.size), slot)
            closed = data[_CLOSED_AT : _CLOSED_AT + _CLOSED.size]
            self.was_closed = closed == _closed_record(self._file, commit)  # Nothing was lost since it was open before.
            self.is_copy = not self.was_closed and (is_new or any(closed))  # Its original may have gone on.
            if any(closed):
                os.pwrite(self._file, bytes(_CLOSED.size), _CLOSED_AT)
                os.fdatasync(self._file)
            self.advance(commit)
            if is_new:
                sync_folder(directory)
        except BaseException:
            self.close()
            raise

    def advance(self, commit: int) -> None:
        """Record that `commit` is on disk. An error of the device is ignored: the watermark then lags behind."""
        now = time.monotonic()
        self._commit = commit
        if now - self._written_at >= limits.WATERMARK_WRITE_SECONDS:
            self._write(now)

    def _write(self, now: float) -> None:
        if self._file is None or self._commit == self._written:
            return
        number = _COMMIT.pack(self._commit)
        self._slot ^= 512
        try:
            os.pwrite(self._file, _MARK + zlib.crc32(number).to_bytes(4, "little") + number, self._slot)
            self._written, self._written_at = self._commit, now
            if now - self._synced_at >= limits.WATERMARK_SYNC_SECONDS:
                os.fdatasync(self._file)
                self._synced_at = time.monotonic()
        except OSError:
            self._close_file()

    def close(self, *, all_synced: int | None = None) -> None:
        """Write what is not written yet, and close the file. An error of the device is ignored, as in `advance`.

        `all_synced` is the last commit of a directory that is closed with all commits on disk.
        """
        self._write(time.monotonic())
        if self._file is not None and all_synced is not None:
            with suppress(OSError):
                os.pwrite(self._file, _closed_record(self._file, all_synced), _CLOSED_AT)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.fdatasync(file)
            with suppress(OSError):
                os.close(file)


def _closed_record(file: int, commit: int) -> bytes:
    """What the file has at byte 256 after the directory was closed with this last commit."""
    status = os.fstat(file)
    content = _CLOSED_CONTENT.pack(commit, status.st_dev, status.st_ino)
    return _CLOSED.pack(_CLOSED_MARK, zlib.crc32(content), content)
