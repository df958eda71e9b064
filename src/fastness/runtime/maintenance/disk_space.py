"""Watches the free space of a plane's disk, so that new data is refused before the disk is full.

RocksDB fails when it cannot write, and then nothing can be deleted either. A reserve leaves room to consume what is
stored: while less is free, only requests that add data are refused.
"""

import logging
from pathlib import Path

from fastness import limits
from fastness.backends.rocksdb.disk_needs import DiskSpace, disk_space
from fastness.errors import InvalidArgument
from fastness.kv import Database
from fastness.runtime.background import Job, Steps

_log = logging.getLogger("fastness.disk_space")


def reserve_on(space: DiskSpace, reserve_bytes: int | None) -> int:
    """The reserve on this file system for the setting `reserve_bytes`; None: the default."""
    return space.reserve_bytes_default if reserve_bytes is None else min(reserve_bytes, space.reserve_bytes_max)


def check_reserve(folder: Path, reserve_bytes: int) -> None:
    """Raise InvalidArgument if RocksDB could not free space on the file system of `folder` with this reserve."""
    smallest = disk_space(folder).reserve_bytes_min
    if 0 < reserve_bytes < smallest:
        raise InvalidArgument(
            f"disk_reserve_bytes is {reserve_bytes}; on a disk of this size deleting needs at least {smallest}. Give "
            "that or more, leave it out for the default, or give 0 for no reserve"
        )


def log_bytes_max(folder: Path) -> int:
    """How large a session log becomes before it is moved to the object store, for which it is copied."""
    while not folder.exists():
        folder = folder.parent
    return min(2 * disk_space(folder).memtable_bytes, limits.ACTIVITY_FILE_BYTES_MAX)


class DiskSpaceMonitor:
    """A job that limits what `database` writes. The hot path reads its attributes and makes no system call."""

    def __init__(
        self, database: Database, folder: Path, *, reserve_bytes: int | None = None, objects: Path | None = None
    ) -> None:
        """`objects` is the folder of the object store, if it has one."""
        self._database = database
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._has_objects = objects is not None and self.has(objects)
        self.free_bytes = 0
        self.reserve_bytes = 0  # What applies to this file system.
        self.job = Job("the check of the free disk space", self._run, thread="ticks", first_seconds=self.check())

    def check(self) -> float:
        """Compare the free space with the reserve; return the seconds until the next check."""
        try:
            space = disk_space(self._folder)
        except OSError as error:
            _log.warning("the free space of %s is unknown: %s", self._folder, error)
            return limits.DISK_CHECK_SECONDS_MAX
        self.free_bytes = space.free_bytes
        self.reserve_bytes = reserve_on(space, self._reserve_bytes)
        was_low = self._database.low_space
        self._database.limit_disk_use(free_bytes=self.free_bytes, reserve_bytes=self.reserve_bytes)
        if self._has_objects:
            self._database.object_bytes_max = max(self.free_bytes - self.reserve_bytes, 0)
        if self._database.low_space != was_low:
            self._log_change()
        seconds = (self.free_bytes - self.reserve_bytes) / limits.DISK_FILL_BYTES_PER_SECOND
        return min(max(seconds, limits.DISK_CHECK_SECONDS_MIN), limits.DISK_CHECK_SECONDS_MAX)

    def has(self, folder: Path) -> bool:
        """Whether `folder` is on the watched file system."""
        try:
            return folder.stat().st_dev == self._folder.stat().st_dev
        except OSError:  # It does not exist yet.
            return folder.is_relative_to(self._folder)

    def _log_change(self) -> None:
        if self._database.low_space:
            _log.error(
                "the disk of %s is nearly full: %s bytes are free and the reserve is %s; new data is refused until "
                "there is more",
                self._folder,
                self.free_bytes,
                self.reserve_bytes,
            )
        else:
            _log.warning("the disk of %s has space again: %s bytes are free", self._folder, self.free_bytes)

    def _run(self) -> Steps:
        while True:
            yield self.check()
