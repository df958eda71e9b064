"""Keeps other processes from opening a RocksDB directory while its files are checked."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fastness.folders import close_synced

FLOCK: Final = "hhqqi"  # C's struct flock: type, whence, start, length, pid.

_open_here: set[tuple[int, int]] = set()  # Device and inode of each lock file that RocksDB has locked in this process.


@contextmanager
def directory_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on RocksDB's lock file; yields False if the directory is open already."""
    lock = path / "LOCK"
    if _is_open_here(lock):
        yield False
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    # An open file description lock: unlike a process lock, it also conflicts with a lock of this process.
    wanted = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError:
        holder = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[4]
        if holder != os.getpid():  # Closing any descriptor of a file releases this process's locks on it.
            close_synced(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        close_synced(descriptor)


def mark_open(path: Path) -> tuple[int, int]:
    """Remember that RocksDB has locked a directory in this process; returns what `mark_closed` needs."""
    status = (path / "LOCK").stat()
    identity = status.st_dev, status.st_ino
    _open_here.add(identity)
    return identity


def mark_closed(identity: tuple[int, int]) -> None:
    """Forget what `mark_open` remembered, once RocksDB has closed the directory."""
    _open_here.discard(identity)


def _is_open_here(lock: Path) -> bool:
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) in _open_here
