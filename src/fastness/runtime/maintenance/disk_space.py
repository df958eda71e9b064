"""Watches the free space of a plane's disk, so that new data is refused before the disk is full.

RocksDB fails when it cannot write, and then nothing can be deleted either. A reserve leaves room to consume what is
stored: while less is free, only requests that add data are refused.
"""

import logging
import os
import threading
from pathlib import Path

from fastness import limits
from fastness.kv import Database

_log = logging.getLogger("fastness.disk_space")


class DiskSpaceMonitor:
    """A thread that sets `database.low_space`. The hot path reads that attribute and makes no system call."""

    def __init__(self, database: Database, folder: Path, *, reserve_bytes: int = limits.DISK_RESERVE_BYTES) -> None:
        self._database = database
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._stopping = threading.Event()
        self.free_bytes = 0
        self.reserve_bytes = 0  # What applies to this file system.
        pause_seconds = self.check()
        self._thread = threading.Thread(target=self._run, args=(pause_seconds,), name="fastness-disk", daemon=True)
        self._thread.start()

    def check(self) -> float:
        """Compare the free space with the reserve; return the seconds until the next check."""
        try:
            status = os.statvfs(self._folder)
        except OSError as error:
            _log.warning("the free space of %s is unknown: %s", self._folder, error)
            return limits.DISK_CHECK_SECONDS_MAX
        total_bytes = status.f_blocks * status.f_frsize
        self.free_bytes = status.f_bavail * status.f_frsize
        self.reserve_bytes = min(self._reserve_bytes, int(total_bytes * limits.DISK_RESERVE_SHARE_MAX))
        self._set_low(self.free_bytes < self.reserve_bytes)
        seconds = (self.free_bytes - self.reserve_bytes) / limits.DISK_FILL_BYTES_PER_SECOND
        return min(max(seconds, limits.DISK_CHECK_SECONDS_MIN), limits.DISK_CHECK_SECONDS_MAX)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _set_low(self, low: bool) -> None:
        if low == self._database.low_space:
            return
        self._database.low_space = low
        if low:
            _log.error(
                "the disk of %s is nearly full: %s bytes are free and the reserve is %s; new data is refused until "
                "there is more",
                self._folder,
                self.free_bytes,
                self.reserve_bytes,
            )
        else:
            _log.warning("the disk of %s has space again: %s bytes are free", self._folder, self.free_bytes)

    def _run(self, pause_seconds: float) -> None:
        while not self._stopping.wait(pause_seconds):
            pause_seconds = self.check()
