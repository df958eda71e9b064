"""Temporary folders of views: each is locked by its process, so that what a dead one left is known, and goes."""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from holdfast.errors import Busy, PathUnusable
from holdfast.limits import VIEW_TURN_SECONDS_MAX

PREFIX: Final = ".view-"
_LOCK: Final = "lock"
_TURN: Final = ".views"
_LOOK_SECONDS: Final = 0.01


@contextmanager
def temporary(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` that is removed in the end; those that dead processes left are removed now.

    Raises:
        PathUnusable: `parent` cannot be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        folder = parent / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        folder.mkdir(mode=0o700)
        descriptor = _locked(folder)
    except OSError as error:
        raise PathUnusable(
            f"{parent} cannot hold a view of the plane ({error.strerror}); make room, or let it be written"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def turn(parent: Path) -> Iterator[None]:
    """Have a turn at `parent` among all views, of other processes too.

    Raises:
        Busy: others have taken it for too long.
    """
    descriptor = os.open(parent / _TURN, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + VIEW_TURN_SECONDS_MAX
        while not _has(descriptor):
            if time.monotonic() > until:
                raise Busy(f"Other views of {parent} are being opened for too long; try again")
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _has(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(parent: Path) -> None:
    """Remove the folders that nobody has locked."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # It is gone, somebody has it, or it is another user's.
            if not (folder / _LOCK).exists():
                # It is being made by somebody, or was by somebody who died right then.
                if folder.stat().st_mtime < time.time() - VIEW_TURN_SECONDS_MAX:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked(folder: Path) -> int:
    """The lock of a new folder; it gets its name when it is held, so that nobody sees it free."""
    descriptor = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return descriptor
