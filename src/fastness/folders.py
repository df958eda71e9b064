"""Folders that survive a power loss, and that only their owner may read.

A new name is durable only once its folder is synced.
"""

import errno
import itertools
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from fastness.limits import FOLDERS_REMEMBERED_MAX

FOLDER_MODE: Final = 0o700


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, each made durable before the next is created.

    Only their owner may read them. An existing folder keeps its mode.

    Raises:
        OSError: it cannot be created, or a file has its path.
    """
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    for each in reversed(missing):
        _make_durable(each)


class DurableFolders:
    """Makes folders below `root`, and remembers which of them are durable.

    A process may end between creating a folder and syncing its parent. The folder is there for the next process, and a
    power loss can still remove it with everything in it. So this process syncs the parent of every folder once before
    it relies on the folder, whether it has created it or found it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable = {root}
        self._lock = threading.Lock()

    def make(self, folder: Path) -> None:
        """Create the folder and its missing parents below `root`, and make their names durable.

        Raises:
            OSError: it cannot be created or synced, or a file has its path.
        """
        if folder in self._durable and folder.is_dir():
            return
        with self._lock:
            for each in reversed((folder, *folder.parents)):
                if each.is_relative_to(self._root) and not (each in self._durable and each.is_dir()):
                    _make_durable(each)
                    self._remember(each)

    def _remember(self, folder: Path) -> None:
        if len(self._durable) >= FOLDERS_REMEMBERED_MAX:
            self._durable = {self._root}
        self._durable.add(folder)


def _make_durable(folder: Path) -> None:
    """Create the folder, unless it exists, and make its name durable."""
    try:
        folder.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file has the path of a folder", str(folder)) from None
    sync_folder(folder.parent)


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
        close_synced(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything in the folder durable, but not its own name."""
    for parent, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                close_synced(descriptor)
        sync_folder(Path(parent))


def close_synced(descriptor: int) -> None:
    """Close a file with nothing left to write. An error says nothing then: Linux closes it also if that fails."""
    with suppress(OSError):
        os.close(descriptor)
