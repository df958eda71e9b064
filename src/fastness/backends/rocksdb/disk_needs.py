"""How much free space RocksDB needs, and which sizes of its files a file system can hold.

    free ├── new data may use it ──┤ reserve ├── a merge may use it ──┤ flush ├── memtable, log, manifest ──┤ full

A flush writes the memtable to a table while its log still exists. A merge writes new tables while the old ones still
exist, so space is needed to free space. The memtable, and with it every table and merge, is smaller on a small file
system, so that both fit in its reserve.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

from fastness import limits

_FILES_BYTES: Final = 2 << 20  # Manifests, options, information logs and the watermark, old and new at once.


class DiskSpace(NamedTuple):
    """The size of a file system, and what of it is free."""

    total_bytes: int
    free_bytes: int

    @property
    def memtable_bytes(self) -> int:
        """How large a memtable becomes before it is flushed."""
        share = self.total_bytes // limits.MEMTABLES_PER_DISK
        return min(max(share, limits.MEMTABLE_BYTES_MIN), limits.MEMTABLE_BYTES_MAX)

    @property
    def merge_bytes_max(self) -> int:
        """How much RocksDB merges at a time, unless one table overlaps more. It fits in the default reserve."""
        return 8 * self.memtable_bytes

    @property
    def flush_bytes(self) -> int:
        """What must be free so that a flush succeeds: its table, and the log of the next memtable."""
        return 2 * self.memtable_bytes + _FILES_BYTES

    @property
    def reserve_bytes_min(self) -> int:
        """The smallest reserve that works: a flush, and as much for deletions and the merges that free their space."""
        return min(2 * self.flush_bytes, self.reserve_bytes_max)

    @property
    def reserve_bytes_default(self) -> int:
        """Room for a flush and for the largest merge."""
        share = max(self.total_bytes // 10, limits.DISK_RESERVE_BYTES_MIN)
        return min(share, limits.DISK_RESERVE_BYTES_MAX, self.reserve_bytes_max)

    @property
    def reserve_bytes_max(self) -> int:
        """The largest share that a reserve takes of a small file system."""
        return int(self.total_bytes * limits.DISK_RESERVE_SHARE_MAX)


LARGE_DISK: Final = DiskSpace(1 << 50, 1 << 50)


def disk_space(folder: Path) -> DiskSpace:
    """The space of the file system that has `folder`."""
    status = os.statvfs(folder)
    return DiskSpace(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)
