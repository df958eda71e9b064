"""The key space in a RocksDB directory.

A commit is one WriteBatch, written to the log and the memtable on the caller's thread without a sync. RocksDB's
sequence number is the commit number. `log_sync.py` makes commits durable in groups. What a crash leaves incomplete at
the end of the log is cut off before RocksDB opens it; any other damage is reported, never skipped (`log_check.py`).
Unless the directory was closed with everything synced, opening it raises the fence floor, and syncs that.
"""

import asyncio
import ctypes
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    BottommostLevelCompaction,
    Cache,
    Checkpoint,
    CompactOptions,
    DbClosedError,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
)

from fastness.backends.rocksdb.compaction import Compactions
from fastness.backends.rocksdb.directory_lock import directory_lock, mark_closed, mark_open
from fastness.backends.rocksdb.disk_needs import LARGE_DISK, DiskSpace, disk_space
from fastness.backends.rocksdb.failures import full_error, translate_error, typed_errors
from fastness.backends.rocksdb.log_check import check_durable, check_files, repair_files
from fastness.backends.rocksdb.log_sync import LogSync, LoopSync, Syncer
from fastness.backends.rocksdb.views import (
    CachedPairs,
    ConcurrentCommit,
    CurrentPairs,
    FailedPairs,
    OptimisticPairs,
    PinnedPairs,
    failed_error,
)
from fastness.backends.rocksdb.watermark import NAME, Watermark, watermark_fault
from fastness.clock import Clock, IdSource, SystemClock
from fastness.errors import Closed, CommitUnknown, DatabaseFailed, FastnessError, PathUnusable
from fastness.folders import FOLDER_MODE, make_folder, sync_folder
from fastness.kv import Result, Transaction, Work, fence_floor
from fastness.kv.closing_at_exit import close_at_exit
from fastness.kv.execution import run
from fastness.kv.serial_database import SerialDatabase
from fastness.kv.value_cipher import GENERATION, MARK, RECORDS, RECORDS_MAX, ValueCipher, default_cipher
from fastness.panics import panics_as_errors
from fastness.tiers import Tier

_log = logging.getLogger("fastness.rocksdb")
_MIB: Final = 1 << 20
_CRITICAL: Final = Tier.CRITICAL


class RocksDatabase(SerialDatabase):
    """A key space in one directory, open in one process."""

    cipher: ValueCipher

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        cipher: ValueCipher | None = None,
    ) -> None:
        """Open the directory; create it if it is missing. `cipher` has the keys of encrypted universes.

        Raises:
            DirectoryInUse: another process has it open.
            PathUnusable: it cannot be created, read or written.
            DamagedDatabase: its contents are damaged.
            EncryptionKeyMissing: it has encrypted universes, and `cipher` cannot unwrap their keys.
        """
        super().__init__(clock or SystemClock(), ids or IdSource())
        self.cipher = cipher or default_cipher()
        self._path = path
        self.watermark_fault: str | None = None  # What was wrong with the watermark when the directory was opened.
        self._on_sync: Callable[[float], None] | None = None
        self._failure: FastnessError | None = None
        self._is_attached = False
        self._loops_lock = threading.Lock()
        self._tables_lock = threading.Lock()  # RocksDB is not closed during a compaction.
        self._reserve_bytes: int | None = None  # What new data leaves free; None: nothing watches that, so the default.
        self._is_full = False  # Whether another write might make a flush fail. Set only while `low_space` is.
        self._frees_space = False  # From when space is low until it is not, and nothing more can be freed.
        self._first_commit = 0  # Added to RocksDB's numbers, so that they increase across `reopen`.
        self._doubtful = (0, 0)  # Commits after the first and up to the second may have been lost in a failure.
        self._attach(*_open(path, self._clock))
        try:
            self._load_keys()
        except BaseException:
            self.close()
            raise
        close_at_exit(self)

    def _attach(self, rocks: Rdict, compactions: Compactions, watermark: Watermark, floor: int) -> None:
        self._rocks = rocks
        self._compactions = compactions
        self._watermark = watermark
        self.watermark_fault = self.watermark_fault or watermark.fault
        self._identity = mark_open(self._path)
        self._sequence: Callable[[], int] = rocks.latest_sequence_number
        self._pairs: CurrentPairs | FailedPairs = CurrentPairs(rocks, self._path, self.cipher)
        self._current: CachedPairs = CachedPairs(self._pairs)
        self._fence_floor = floor
        # Those before it are synced, or lost in a failure.
        self._critical_commit = self._exposed_commit = self._last_commit()
        first = self._first_commit
        self._log = LogSync(
            last_commit=self._last_commit,
            sync=lambda: rocks.flush_wal(True),
            on_durable=lambda commit: watermark.advance(commit - first),
        )
        self._log.on_sync = self._on_sync
        self._syncer = Syncer(self._log, self._last_commit)
        with self._loops_lock:
            self._loop_syncs: dict[asyncio.AbstractEventLoop, LoopSync] = {}
            self._recent_loop_sync: LoopSync | None = None  # A fast path: there is rarely more than one event loop.
        self._is_attached = True

    @property
    def failure(self) -> FastnessError | None:
        return self._failure or self._log.failure

    def reopen(self) -> None:
        self._acquire_write_lock()
        try:
            if self._closed:
                raise Closed("The database was closed; open it again")
            failure = self.failure
            if failure is None:
                return
            self._failure = failure
            if self._is_attached:
                self._detach(failure)
            last = self._first_commit
            rocks, compactions, watermark, floor = _open(self._path, self._clock)
            self._first_commit = last + 1 - rocks.latest_sequence_number()
            self._attach(rocks, compactions, watermark, floor)
            self._load_keys(forget=True)
            self._failure = None
        finally:
            self._write_lock.release()
        self._watches.fire_all()  # Commits that were never acknowledged may be gone.

    def _load_keys(self, *, forget: bool = False) -> None:
        self.cipher.load(self._pairs.scan(*RECORDS, RECORDS_MAX, False), forget=forget)

    def _detach(self, failure: FastnessError) -> None:
        """Close the failed RocksDB. Until another is attached, every read and write raises DatabaseFailed."""
        last = self._last_commit()
        self._pairs = FailedPairs(failure)
        self._current = CachedPairs(self._pairs)
        with suppress(FastnessError):
            self._log.close()
        self._syncer.stop()
        if self._log.durable < last:
            earlier, _ = self._doubtful if self._doubtful[1] else (last, 0)
            self._doubtful = (min(earlier, self._log.durable), last)
        self._is_attached = False
        self._first_commit, self._sequence = last, lambda: 0
        self._watermark.close()
        with self._tables_lock, suppress(Exception):  # It is closed nonetheless, and its failure is known.
            self._rocks.close()
        mark_closed(self._identity)

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy to the new folder `path`, with hard links where the file system supports them."""
        self.sync()
        with typed_errors(path, "choose a new folder for the checkpoint that this user can write"):
            make_folder(path.parent)
            if path.exists():
                raise PathUnusable(f"{path} already exists; choose a new folder for the checkpoint")
            Checkpoint(self._rocks).create_checkpoint(str(path))
            path.chmod(FOLDER_MODE)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def on_sync(self) -> Callable[[float], None] | None:
        """Called with the duration of each log sync in seconds."""
        return self._log.on_sync

    @on_sync.setter
    def on_sync(self, on_sync: Callable[[float], None] | None) -> None:
        self._on_sync = self._log.on_sync = on_sync

    @property
    def has_unsynced(self) -> bool:
        """Whether a power loss could still revert a commit."""
        return self._last_commit() > self._log.durable

    def flush_tables(self) -> None:
        """Write the memtable to table files, so that the next open has no log to replay."""
        try:
            self._rocks.flush(wait=True)
        except Exception as error:
            self._failure = translate_error(error, self._path)  # RocksDB refuses all writes from then on.
            raise self._failure from error

    def limit_disk_use(self, *, free_bytes: int, reserve_bytes: int) -> None:
        """Refuse writes, and pause RocksDB's own merges, for which there is too little space."""
        self._reserve_bytes = reserve_bytes
        super().limit_disk_use(free_bytes=free_bytes, reserve_bytes=reserve_bytes)
        self._frees_space |= self.low_space
        with suppress(DbClosedError):  # It is being closed, or reopened after a failure.
            self._is_full = self.low_space and self._compactions.is_full(free_bytes)
            if self._tables_lock.acquire(blocking=False):  # Otherwise a compaction is running, and no other one starts.
                try:
                    if self.failure is None:
                        self._compactions.pause_if_too_large(self._compactions.room(free_bytes, reserve_bytes))
                finally:
                    self._tables_lock.release()

    @property
    def refuses_writes(self) -> bool:
        return self.low_space and self._is_full

    @property
    def is_tight(self) -> bool:
        """Whether the disk has, or just had, too little space for new data, or has too little for RocksDB's merges."""
        return self._frees_space or not self._compactions.are_automatic

    def compact_deleted(self) -> bool:
        """Free the space of deleted pairs in one range of keys; returns whether there may be more.

        Deletions in memory are written first, once no more follow: a call that finds many remembers their number, and
        the next call writes them if it is the same. While the disk is nearly full they are written at once. Nothing
        happens while the database has failed.

        Raises:
            Closed: the database was closed.
        """
        with self._tables_lock:
            if self._closed:
                raise Closed("The database was closed; open it again")
            if self.failure is not None:
                return False
            compactions, is_tight = self._compactions, self._frees_space
            room, last_room = self._merge_rooms()
            if compactions.are_in_memory(is_tight=is_tight) and last_room > 0:
                self.flush_tables()
            try:
                found = compactions.compact(room, is_tight=is_tight)
                if not found and self.low_space:
                    found = compactions.compact(last_room, is_tight=is_tight)
                self._frees_space = found or self.low_space
                compactions.resume_if_they_fit(self._merge_rooms()[0])
                return found
            except Exception as error:
                raise translate_error(error, self._path) from error

    def _merge_rooms(self) -> tuple[int, int]:
        space = disk_space(self._path)
        reserve_bytes = space.reserve_bytes_default if self._reserve_bytes is None else self._reserve_bytes
        return self._compactions.room(space.free_bytes, reserve_bytes), self._compactions.last_room(space.free_bytes)

    def erase_replaced(self, begin: bytes, end: bytes) -> None:
        with self._tables_lock:
            if self._closed:
                raise Closed("The database was closed; open it again")
            if self.failure is not None:
                return
            self.flush_tables()
            options = CompactOptions()
            options.set_bottommost_level_compaction(BottommostLevelCompaction.force())
            try:
                self._rocks.compact_range(begin, end, options)
            except Exception as error:
                raise translate_error(error, self._path) from error

    def _snapshot(self) -> "OptimisticPairs":
        return OptimisticPairs(self._pairs, self._sequence)

    def _read(self, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Result, int]:
        try:
            try:
                return super()._read(work, args, kwargs)
            except ConcurrentCommit:
                tx = Transaction(
                    PinnedPairs(self._rocks, self._path, self.cipher), clock=self._clock, ids=self._ids, writable=False
                )
                tx.fence_floor, tx.defaults = self._fence_floor, self.defaults
                commit = self._last_commit()
                return run(tx, work, args, kwargs), commit
        except Closed:
            if self._closed:
                raise
            raise DatabaseFailed("The database was reopened during this read; try again") from self._failure

    def _commit(self, tx: Transaction) -> None:
        if self._failure is not None:
            raise failed_error(self._failure)
        if self._log.failed:
            self._log.check_healthy()
        if self.low_space and self._is_full:
            raise full_error()
        cipher = self.cipher
        if GENERATION in tx.writes:  # Before the write, so that readers can open what follows it.
            cipher.load(tx.visible_pairs(*RECORDS, RECORDS_MAX, False))
        batch = WriteBatch(raw_mode=True)
        for begin, end in tx.cleared:
            batch.delete_range(begin, end)
        for key, value in tx.writes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, cipher.seal(key, value) if cipher.is_on or value.startswith(MARK) else value)
        try:
            self._rocks.write(batch)
            self._current.apply(tx)
        except Exception as error:
            self._current.clear()
            # RocksDB may have written a part of the record: only reopening finds where the log ends.
            self._failure = translate_error(error, self._path)
            raise self._failure from error

    def _last_commit(self) -> int:
        return self._first_commit + self._sequence()

    def _check_kept(self, commit: int) -> None:
        """Raise CommitUnknown if `commit`, which is from before the last failure, was not durable then."""
        if commit > self._doubtful[0]:
            raise CommitUnknown(
                "The database failed before the log was synced, and was reopened; check whether the write was stored"
            )

    def _wait_durable(self, commit: int, tier: Tier) -> None:
        if commit <= self._log.durable:
            if commit <= self._doubtful[1]:
                self._check_kept(commit)
            return
        if tier is _CRITICAL:
            self._log.wait(commit)
        else:
            self._syncer.sync_soon()

    def _wait_durable_async(self, commit: int, tier: Tier) -> Awaitable[None] | None:
        if commit <= self._log.durable:
            if commit <= self._doubtful[1]:
                self._check_kept(commit)
            return None
        if tier is _CRITICAL:
            return self._loop_sync().wait(commit, single=not self._woke_waiter)
        self._syncer.sync_soon()
        return None

    def _loop_sync(self) -> LoopSync:
        """The LoopSync of the event loop that runs on this thread."""
        loop = asyncio.get_running_loop()
        recent = self._recent_loop_sync
        if recent is not None and recent.loop is loop:
            return recent
        with self._loops_lock:
            for closed in [each for each in self._loop_syncs if each.is_closed()]:
                del self._loop_syncs[closed]
            recent = self._loop_syncs.setdefault(loop, LoopSync(self._log, loop, self._syncer.submit))
        self._recent_loop_sync = recent
        return recent

    def invalidate_after_fork(self) -> None:
        super().invalidate_after_fork()
        # Never free it here: that would write to the parent's files, or wait for threads that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._rocks))
        # RocksDB also joins those threads at exit and crashes; exit before it does.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):
            libc.on_exit(libc._exit, None)

    def close_at_exit(self) -> None:
        """Close, unless it was closed."""
        if not self._closed:
            self.close()

    def _release(self) -> None:
        if not self._is_attached:
            return
        all_synced: int | None = None
        try:
            self._log.close()
            if self.failure is None:
                all_synced = self._sequence()
        finally:
            self._syncer.stop()
            self._watermark.close(all_synced=all_synced)  # While RocksDB still locks the directory.
            try:
                with self._tables_lock:
                    self._rocks.close()
            except Exception as error:
                # It is closed nonetheless. A write failure was already reported when it first happened.
                if self._failure is None:
                    raise translate_error(error, self._path) from error
            finally:
                mark_closed(self._identity)


def _open(path: Path, clock: Clock) -> tuple[Rdict, Compactions, Watermark, int]:
    """Open a directory; returns RocksDB, its compactions, the watermark and the fence floor."""
    with typed_errors(path, "choose a folder that this user can write"):
        make_folder(path)
        fault = watermark_fault(path)
        sync_folder(path.parent)  # An earlier process may have ended before it did; RocksDB syncs only its own names.
        space = disk_space(path)
        are_automatic = True
        with directory_lock(path) as is_free:
            if is_free:  # Otherwise RocksDB will say who has it open.
                repair_files(path, check_files(path))
                tables_bytes = sum(file.stat().st_size for file in path.glob("*.sst"))
                are_automatic = tables_bytes <= (space.free_bytes - space.reserve_bytes_default) // 2
        options = table_options(space)
        options.set_disable_auto_compactions(not are_automatic)  # RocksDB would start one before it is known to fit.
        with panics_as_errors():
            rocks = open_rocks(path, options)
        try:
            compactions = Compactions(rocks, space, are_automatic=are_automatic)
            compactions.resume_if_they_fit(compactions.room(space.free_bytes, space.reserve_bytes_default))
            check_durable(path, rocks.latest_sequence_number())
            watermark = Watermark(path, rocks.latest_sequence_number())
            if fault is not None and rocks.latest_sequence_number():  # Otherwise a crash has ended the first opening.
                watermark.fault = fault
                _log.warning("%s is damaged: %s. It is replaced now", path / NAME, fault)
        except BaseException:
            rocks.close()
            raise
        try:
            floor = fence_floor.decode(rocks.get(fence_floor.KEY))
            if not watermark.was_closed and rocks.latest_sequence_number():
                is_copy = watermark.is_copy
                floor = fence_floor.floor_of_copy(floor, clock.now_ms()) if is_copy else floor + fence_floor.STEP
                rocks.put(fence_floor.KEY, fence_floor.encode(floor))
                rocks.flush_wal(True)
                watermark.advance(rocks.latest_sequence_number())
            return rocks, compactions, watermark, floor
        except BaseException:
            watermark.close()
            rocks.close()
            raise


def open_rocks(path: Path, options: Options, access: AccessType | None = None) -> Rdict:
    """Open RocksDB with exactly these options.

    Without `column_families`, rocksdict takes most of them from the directory's file OPTIONS, which has those of the
    last time and no checksum.
    """
    access = access or AccessType.read_write()
    return Rdict(str(path), options, column_families={"default": options}, access_type=access)


def table_options(space: DiskSpace = LARGE_DISK) -> Options:
    """The options for opening a directory on a file system of this size, for writers and readers."""
    tables = BlockBasedOptions()
    tables.set_block_cache(Cache(64 * _MIB))
    tables.set_bloom_filter(10, False)  # A get of a missing key then rarely reads from disk.
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # The default mode silently drops everything after damage in the log. This one accepts only a truncated end, which
    # a reader may see while another process writes.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_block_based_table_factory(tables)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(space.memtable_bytes)
    options.set_max_write_buffer_number(3)
    options.set_max_total_wal_size(4 * space.memtable_bytes)  # Bounds the replay at the next open.
    # A table, and what it overlaps in the next level, is merged at a time, so these bound the space that a merge needs.
    options.set_target_file_size_base(space.memtable_bytes)
    options.set_max_bytes_for_level_base(4 * space.memtable_bytes)
    options.set_max_compaction_bytes(space.merge_bytes_max)
    options.set_max_background_jobs(2)
    options.set_manifest_preallocation_size(_MIB // 4)
    options.set_max_log_file_size(_MIB)
    options.set_keep_log_file_num(4)
    return options
