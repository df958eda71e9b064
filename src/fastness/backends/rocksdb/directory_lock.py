"""Keeps other processes from opening a RocksDB directory while its files are checked."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fastness.errors import DirectoryInUse
from fastness.folders import close_synced

_FLOCK: Final = "hhqqi"  # C's struct flock: type, whence, start, length, pid.

_open_here: set[tuple[int, int]] = set()  # Device and inode of each lock file that RocksDB has locked in this process.


@contextmanager
def directory_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on RocksDB's lock file; yields False if the directory is open already."""
    if _is_open_here(path / "LOCK"):
        yield False
        return
    try:
        descriptor = take_lock(path, os.O_RDWR | os.O_CREAT, fcntl.F_WRLCK)
    except DirectoryInUse:
        yield False
        return
    try:
        yield True
    finally:
        close_synced(descriptor)


def take_lock(path: Path, flags: int, kind: int) -> int:
    """A descriptor, opened with `flags`, that holds a lock on RocksDB's lock file.

    Raises:
        DirectoryInUse: it is locked.
    """
    descriptor = os.open(path / "LOCK", flags, 0o600)
    # An open file description lock: unlike a process lock, it also conflicts with a lock of this process.
    wanted = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        holder = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[4]
        if holder != os.getpid():  # Closing any descriptor of a file releases this process's locks on it.
            close_synced(descriptor)
        owner = f"process {holder}" if holder > 0 else "another process"
        raise DirectoryInUse(f"{path} is already open in {owner}; stop it, then run this again") from error
    return descriptor


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
