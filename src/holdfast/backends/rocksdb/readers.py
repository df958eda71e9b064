"""A RocksDB directory that is read and left exactly as it is: not a byte of it changes, nor the time of a file.

Opening a RocksDB writes: it replays its log into tables, and rocksdict writes its settings again. So this opens a
folder of links to the files, read-only, which replays the log in memory. RocksDB takes no lock when it only reads;
this takes a shared one, so that nobody changes under a reader what it reads, and several may read.
"""

import fcntl
import os
import shutil
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rocksdict import AccessType, Rdict

from holdfast.backends.rocksdb.database import table_options
from holdfast.backends.rocksdb.failures import translated
from holdfast.backends.rocksdb.logs import find_gap
from holdfast.backends.rocksdb.views import CurrentPairs
from holdfast.clock import IdSource, SystemClock
from holdfast.errors import DamagedDatabase, DirectoryInUse, PathUnusable, ReadOnlyTransaction
from holdfast.kv import Transaction
from holdfast.kv.serial_database import SerialDatabase
from holdfast.tiers import Tier

_SETTINGS: Final = "rocksdict-config.json"
_PREFIX: Final = "holdfast-reader-"
_LEFT_SECONDS: Final = 60.0
_FLOCK: Final = "hhqqi"  # C's struct flock: type, whence, start, length, pid.


class RocksReader(SerialDatabase):
    """The key space of a directory that nobody has open, for as long as this is."""

    def __init__(self, path: Path) -> None:
        """Lock the directory, and open it.

        Raises:
            DirectoryInUse: another process has it open.
            PathUnusable: it cannot be read.
            DamagedDatabase: what it holds is damaged.
        """
        super().__init__(SystemClock(), IdSource())
        self._lock = _locked(path)
        _sweep()
        self._links = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self._mine = os.open(self._links.name, os.O_RDONLY)
        try:
            fcntl.flock(self._mine, fcntl.LOCK_SH)
            if gap := find_gap(path):
                raise DamagedDatabase(f"The log in {path} lost commits in its middle ({gap}); restore it from a backup")
            self._rocks = _open(path, Path(self._links.name))
        except BaseException:
            self._let_go()
            raise
        self._current: CurrentPairs = CurrentPairs(self._rocks, path)

    def estimated_pairs(self) -> int:
        """About how many pairs there are."""
        return self._rocks.property_int_value("rocksdb.estimate-num-keys") or 0

    def _snapshot(self) -> CurrentPairs:
        return self._current  # Nobody can change it.

    def _commit(self, tx: Transaction) -> None:
        del tx
        raise ReadOnlyTransaction("This directory is open for reading; open it as a plane to write")

    def _last_commit(self) -> int:
        return 0

    def _settle(self, commit: int, tier: Tier) -> None:
        """Nothing is written, so there is nothing to wait for."""

    def _settling(self, commit: int, tier: Tier) -> None:
        """Nothing is written, so there is nothing to wait for."""

    def _release(self) -> None:
        self._rocks.close()
        self._let_go()

    def _let_go(self) -> None:
        self._links.cleanup()
        os.close(self._mine)
        os.close(self._lock)


def _locked(path: Path) -> int:
    """A lock that RocksDB's own excludes, and the other way round, held by a descriptor."""
    try:
        descriptor = os.open(path / "LOCK", os.O_RDONLY)
    except OSError as error:
        raise PathUnusable(f"{path} cannot be locked ({error.strerror}); name a data directory of yours") from error
    # A lock of the descriptor, not of the process: it is refused also where this very process has the directory open.
    wanted = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        holder = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[4]
        if holder != os.getpid():  # Closing any descriptor of a file gives up the locks that its process has on it.
            os.close(descriptor)
        who = f"process {holder}" if holder > 0 else "another process"
        raise DirectoryInUse(f"{path} is open in {who}; stop it, then run this again") from error
    return descriptor


def _sweep() -> None:
    """Remove the links of readers that were killed: nobody has them locked."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left.stat().st_mtime > time.time() - _LEFT_SECONDS:
                continue  # Whoever makes one may not have come to locking it.
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)


def _open(path: Path, links: Path) -> Rdict:
    try:
        for file in path.iterdir():
            if file.name == _SETTINGS:
                shutil.copyfile(file, links / file.name)
            elif file.name != "LOCK":
                (links / file.name).symlink_to(file.absolute())
        return Rdict(str(links), table_options(), access_type=AccessType.read_only(False))
    except OSError as error:
        raise PathUnusable(f"{path} cannot be read ({error.strerror}); let this user read it") from error
    except Exception as error:
        raise translated(error, path) from error
