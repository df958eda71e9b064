"""Translates RocksDB's errors to Fastness errors."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fastness.backends.rocksdb.lock_holder import describe_holder
from fastness.errors import (
    Backend,
    Corrupt,
    DamagedDatabase,
    DatabaseFailed,
    DirectoryInUse,
    DiskFull,
    FastnessError,
    PathUnusable,
)

_FILE_LIMITS: Final = (errno.EMFILE, errno.ENFILE)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The path itself can be used. Python repeats most interrupted calls, but neither `close` nor `mkdir`.
_NOT_OF_THE_PATH: Final = (*_FILE_LIMITS, *_NO_SPACE, errno.EIO, errno.EINTR, None)  # rocksdict gives no number.


@contextmanager
def typed_errors(path: Path, advice: str) -> Iterator[None]:
    """Translate what the block raises; `advice` says what to do if the path cannot be used."""
    try:
        yield
    except FastnessError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in _NOT_OF_THE_PATH:
            raise PathUnusable(f"{path} cannot be used ({error.strerror}); {advice}") from error
        raise translate_error(error, path) from error


def translate_error(error: Exception, path: Path) -> Backend | Corrupt:
    """The Fastness error for an exception that `rocksdict` raised for the database in `path`."""
    text = str(error)
    if "lock hold by current process" in text:
        return DirectoryInUse(f"{path} is already open in this process; use that handle, or close it first")
    if "/LOCK: Resource temporarily unavailable" in text:
        return DirectoryInUse(
            f"{path} is already open in {describe_holder(path)}; stop that process, or connect to its server"
        )
    if any(cause in text for cause in ("No space left on device", "Disk quota exceeded", "File too large")):
        return DiskFull(f"The device of {path} is full; nothing was written. Free some space and open it again")
    if "Too many open files" in text:
        return DatabaseFailed(
            f"{path} cannot be used: this process has too many open files. Raise the limit (ulimit -n), then open it "
            "again"
        )
    if text.startswith("Corruption"):
        return DamagedDatabase(f"The database in {path} is damaged ({text}); restore it from a backup")
    if any(
        cause in text for cause in ("Permission denied", "Read-only file system", "Not a directory", "Is a directory")
    ):
        return PathUnusable(f"{path} cannot be used ({text}); choose a folder that this user can write")
    return DatabaseFailed(f"RocksDB failed in {path} ({text}); open it again")


def full_error() -> DiskFull:
    """The error of a write that might leave too little space for what is in memory."""
    return DiskFull(
        "The disk is full; nothing was written. Reads still work. The space of deleted data is being freed: try again "
        "in a second. If this lasts, free space on the disk; `fastness space` shows what is stored"
    )
