"""Finds the process that has a RocksDB directory open, in the kernel's table of file locks.

The lock file itself is not opened: closing any descriptor of a file releases this process's POSIX locks on it, so a
probe could release the lock of a database that another thread has just opened.
"""

import os
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")  # Linux only.


def describe_holder(path: Path) -> str:
    """The process that has the database in `path` open, in words; "another process" if it is not known which."""
    holder = _holder_of(path / "LOCK")
    return "another process" if holder is None else f"process {holder}"


def _holder_of(lock: Path) -> int | None:
    """The id of the process that holds a POSIX lock on a file."""
    try:
        status = os.stat(lock)
        table = _LOCKS.read_text()
    except OSError:
        return None
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in table.splitlines():
        # "1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF". A waiting process has an arrow in the second place, and a
        # process of another container the id 0.
        words = line.split()
        if len(words) == 8 and words[1] == "POSIX" and words[5] == file and words[4].isdigit() and int(words[4]) > 0:
            return int(words[4])
    return None
