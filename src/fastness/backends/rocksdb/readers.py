"""Reads a RocksDB directory without changing it: no bytes and no file times.

Opening a RocksDB normally writes: it replays the log into tables, and rocksdict rewrites its settings. So this opens a
temporary folder of links to the files, read-only, which replays the log in memory. RocksDB takes no lock in read-only
mode; this takes a shared lock, so that no process can write while several may read.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from rocksdict import AccessType, Rdict

from fastness.backends.rocksdb.database import open_rocks, table_options
from fastness.backends.rocksdb.directory_lock import take_lock
from fastness.backends.rocksdb.failures import typed_errors
from fastness.backends.rocksdb.log_check import Repairs, check_durable, check_files
from fastness.backends.rocksdb.views import CurrentPairs
from fastness.clock import IdSource, SystemClock
from fastness.errors import ReadOnlyTransaction
from fastness.folders import close_synced
from fastness.kv import Transaction
from fastness.kv.serial_database import SerialDatabase
from fastness.kv.value_cipher import RECORDS, RECORDS_MAX, ValueCipher, default_cipher
from fastness.panics import panics_as_errors
from fastness.tiers import Tier

_SETTINGS: Final = "rocksdict-config.json"
_PREFIX: Final = "fastness-reader-"
_STALE_SECONDS: Final = 60.0


class RocksReader(SerialDatabase):
    """The key space of a directory that no other process has open for writing, for as long as this is open."""

    def __init__(self, path: Path, *, lock: bool = True, cipher: ValueCipher | None = None) -> None:
        """Lock the directory and open it read-only.

        Without `lock`, the directory may be open in another process, which is not disturbed. Its latest writes may be
        missing, and opening fails if it removes a file at that moment.

        Raises:
            DirectoryInUse: another process has it open.
            PathUnusable: it cannot be read.
            DamagedDatabase: its contents are damaged.
            EncryptionKeyMissing: it has encrypted universes, and `cipher` cannot unwrap their keys.
        """
        super().__init__(SystemClock(), IdSource())
        self.cipher: ValueCipher = cipher or default_cipher()
        self._files = ExitStack()
        with self._files:
            with typed_errors(path, "choose a data directory that this user can read"):
                if lock:
                    self._files.callback(close_synced, take_lock(path, os.O_RDONLY, fcntl.F_RDLCK))
            with typed_errors(Path(tempfile.gettempdir()), "set TMPDIR to a folder that this user can write"):
                _remove_stale_links()
                links = tempfile.TemporaryDirectory(prefix=_PREFIX)
                self._files.callback(_remove, links)
                links_lock = os.open(links.name, os.O_RDONLY)
                self._files.callback(close_synced, links_lock)
                fcntl.flock(links_lock, fcntl.LOCK_SH)
            with typed_errors(path, "choose a data directory that this user can read"):
                self._rocks = _open(path, Path(links.name), check_files(path) if lock else Repairs())
                if lock:
                    check_durable(path, self._rocks.latest_sequence_number())
            self._files = self._files.pop_all()
        self._current: CurrentPairs = CurrentPairs(self._rocks, path, self.cipher)
        try:
            self.cipher.load(self._current.scan(*RECORDS, RECORDS_MAX, False))
        except BaseException:
            self.close()
            raise

    def estimated_pairs(self) -> int:
        """The approximate number of pairs."""
        return self._rocks.property_int_value("rocksdb.estimate-num-keys") or 0

    def _snapshot(self) -> CurrentPairs:
        return self._current  # The lock prevents changes.

    def _commit(self, tx: Transaction) -> None:
        del tx
        raise ReadOnlyTransaction("This directory is open read-only; open it as a plane to write")

    def _last_commit(self) -> int:
        return 0

    def _wait_durable(self, commit: int, tier: Tier) -> None:
        """Nothing is written, so there is nothing to wait for."""

    def _wait_durable_async(self, commit: int, tier: Tier) -> None:
        """Nothing is written, so there is nothing to wait for."""

    def _release(self) -> None:
        with self._files:
            self._rocks.close()


def _remove(links: "tempfile.TemporaryDirectory[str]") -> None:
    """Remove the folder; if that fails, a later reader does it, as for killed readers."""
    with suppress(OSError):
        links.cleanup()


def _remove_stale_links() -> None:
    """Remove the link folders of killed readers: those are no longer locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_mtime > time.time() - _STALE_SECONDS:
                continue  # A reader that just created it may not have locked it yet.
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _open(path: Path, links: Path, repairs: Repairs) -> Rdict:
    kept = {cut.log.name: cut.offset for cut in repairs.cuts}
    for file in path.iterdir():
        if file.name == _SETTINGS:
            shutil.copyfile(file, links / file.name)
        elif file.name in kept:
            with file.open("rb") as log:
                (links / file.name).write_bytes(log.read(kept[file.name]))
        elif file.name == "CURRENT" and repairs.current is not None:
            (links / file.name).write_text(f"{repairs.current}\n")
        elif file.name != "LOCK":
            (links / file.name).symlink_to(file.absolute())
    with panics_as_errors():
        return open_rocks(links, table_options(), AccessType.read_only(False))
