"""Folders that survive a power loss, and that only their owner may read.

A new name is durable only once its folder is synced.
"""

import errno
import itertools
import os
from pathlib import Path
from typing import Final

FOLDER_MODE: Final = 0o700


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, each made durable before the next is created.

    Only their owner may read them. An existing folder keeps its mode.

    Raises:
        OSError: it cannot be created, or a file has its path.
    """
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    for each in reversed(missing):
        try:
            each.mkdir(FOLDER_MODE)
        except FileExistsError:
            if not each.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file has the path of a folder", str(each)) from None
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in the folder durable: of files that were created, renamed or removed.

    A folder that this user may write but not read cannot be synced alone; then everything is synced.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        os.sync()
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
