"""Temporary folders of views. Each is locked by its process, so that those of dead processes can be deleted."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fastness.errors import Busy, PathUnusable
from fastness.limits import VIEW_LOCK_WAIT_SECONDS_MAX

PREFIX: Final = ".view-"
_LOCK: Final = "lock"
_SHARED_LOCK: Final = ".views"
_POLL_SECONDS: Final = 0.01


@contextmanager
def temporary(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, deleted at the end; also deletes those of dead processes.

    Raises:
        PathUnusable: `parent` is not writable.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        delete_stale(parent)
        folder = parent / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        folder.mkdir(mode=0o700)
        descriptor = _create_lock(folder)
    except OSError as error:
        raise PathUnusable(
            f"{parent} cannot hold a view of the plane ({error.strerror}); free disk space, or make it writable"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def exclusive(parent: Path) -> Iterator[None]:
    """Hold the lock that views of `parent` share, across processes.

    Raises:
        Busy: other views hold it for too long.
    """
    descriptor = os.open(parent / _SHARED_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + VIEW_LOCK_WAIT_SECONDS_MAX
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise Busy(f"Timed out waiting for other views of {parent} to open; try again")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def delete_stale(parent: Path) -> None:
    """Delete the folders that no process has locked."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # It is deleted, locked, or another user's.
            if not (folder / _LOCK).exists():
                # It is being created, or its creator died before it took the lock.
                if folder.stat().st_mtime < time.time() - VIEW_LOCK_WAIT_SECONDS_MAX:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _create_lock(folder: Path) -> int:
    """Create the lock of a new folder; it is renamed once it is held, so that it is never seen unlocked."""
    descriptor = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return descriptor
