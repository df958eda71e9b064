"""Files that only their owner may read: folders have mode 0700, files 0600.

A folder without permissions for others also protects what is in it, whatever its mode. That matters for the files of
RocksDB, which creates them with the umask of the process.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600

_OTHERS: Final = 0o077  # The permissions of the group and of all others.


def open_private(path: str, flags: int) -> int:
    """The `opener` of `open` for new files that only their owner may read."""
    return os.open(path, flags, FILE_MODE)


def readable_by_others(folder: Path, *, depth_max: int | None = None) -> Iterator[Path]:
    """The folder and everything below it that other users may access, down to `depth_max` levels.

    What is in a folder that others cannot access is left out.
    """
    if not _is_open(folder):
        return
    yield folder
    if depth_max == 0:
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from readable_by_others(path, depth_max=None if depth_max is None else depth_max - 1)
        elif _is_open(path):
            yield path


def make_private(folder: Path) -> int:
    """Remove the permissions of other users from the folder and everything below it; how many were changed.

    Symbolic links are not followed.

    Raises:
        OSError: another user owns one of them.
    """
    changed = 0
    for parent, _, files in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in files)):
            if not path.is_symlink() and _is_open(path):
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
                changed += 1
    return changed


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & _OTHERS)
    except FileNotFoundError:
        return False
