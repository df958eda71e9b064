"""The log of one session and kind: a buffer, and the file that the buffer is written to.

    accepted ──► pending ──► written ──► the file is closed on a new day, when it is large, when the session ends
                    └──────► dropped, oldest first, when the file cannot be written and the buffer is full

It has two locks, neither shared with another session: one for the buffer, held for a microsecond, and one for the file,
held while it is written. Records get their numbers when they are written, so dropped records leave no gap.

The creator of a file locks it, is the only one that appends to it, and never opens it again: the lines of two appenders
would interleave.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import msgspec

from fastness import limits
from fastness.clock import IdSource
from fastness.folders import make_folder
from fastness.private_files import FILE_MODE
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header, encode_record
from fastness.runtime.activity.rotation import FailureTracker, Rotation, lock

_DAY_MS: Final = 86_400_000
_COST_BYTES: Final = limits.WRITE_COST_BYTES  # Memory overhead per record.

Labels = tuple[str, str, str]  # Universe, session and kind.
Accepted = tuple[int, bytes]  # The time, and the encoded record.
Follow = Callable[[str, int, Sequence[bytes]], None]  # Takes a universe, a time, and records that were accepted then.


class LogContext(msgspec.Struct):
    """What the sessions of a log share. Logging takes none of its locks."""

    folder: Path
    file_bytes_max: int
    now_ms: Callable[[], int]
    session: Callable[[str, str, str], "SessionLog"]
    unwritten: "SimpleQueue[SessionLog | None] | None"  # For the flusher, if there is one.
    rotation: Rotation
    failures: FailureTracker
    ids: IdSource
    check_space: Callable[[], None]
    followed_kind: str | None = None  # The records of this kind are passed to `follow` when they are accepted.
    follow: Follow | None = None


class SessionLog:
    """Accepts the records of one session and kind; created by `ActivityLog.session`."""

    def __init__(self, context: LogContext, labels: Labels) -> None:
        self.labels = labels
        self.is_ended = False
        self._context = context
        self._now_ms = context.now_ms
        # Reentrant, because a signal handler or a finalizer may log during `accept`.
        self._lock = threading.RLock()
        self._pending: deque[Accepted] = deque()
        self._pending_bytes = 0
        self._is_queued = False
        self._taken = 0
        self._writing = threading.Lock()
        self._file: Appender | None = None
        self._is_failing = False
        self._written = self._dropped = self._bytes = 0
        self._last_ms = self._now_ms()

    def log(self, record: Mapping[str, object] | msgspec.Struct) -> None:
        """Accept a record, as `ActivityLog.log` does."""
        self.accept((encode_record(record),))

    def accept(self, records: Sequence[bytes]) -> None:
        """Accept encoded records, all with the same time."""
        is_full = is_new = False
        with self._lock:
            is_ended = self.is_ended
            if not is_ended:
                at_ms = self._now_ms()
                self._pending.extend([(at_ms, record) for record in records])
                self._pending_bytes += sum(map(len, records)) + _COST_BYTES * len(records)
                if self._context.followed_kind == self.labels[2] and self._context.follow is not None:
                    self._context.follow(self.labels[0], at_ms, records)
                if not self._is_queued:
                    is_new = self._is_queued = True
                if self._pending_bytes > limits.ACTIVITY_BUFFER_BYTES_MAX:
                    is_full = not self._is_failing
                    if self._is_failing:
                        self._drop_oldest()
        if is_ended:
            self._context.session(*self.labels).accept(records)
        if is_new and self._context.unwritten is not None:
            self._context.unwritten.put(self)
        if is_full:
            self.write()

    def write(self) -> None:
        """Append everything accepted so far, in one write per file."""
        with self._writing:
            self._write()

    def end(self) -> None:
        """Write the pending records and close the file. Records that cannot be written now are dropped."""
        # In this order, a thread that sees `is_ended` can wait for completion by calling `end` too.
        with self._writing:
            with self._lock:
                self.is_ended = True
            self._write()
            with self._lock:
                self._drop_oldest(keep_bytes=0)
            self._close_file()
            self._context.failures.resolve(self, is_abandoned=True)

    def is_idle(self, now_ms: int) -> bool:
        """Whether nothing was logged for ACTIVITY_IDLE_SECONDS."""
        return not self._pending and abs(now_ms - self._last_ms) >= limits.ACTIVITY_IDLE_SECONDS * 1_000

    @property
    def file_stem(self) -> str | None:
        """The name of the open file, without its suffix."""
        file = self._file
        return None if file is None else file.path.stem

    def counts(self) -> dict[str, int]:
        """The counters of this session for ActivityStats."""
        with self._lock:
            return {
                "accepted": self._taken + len(self._pending),
                "written": self._written,
                "dropped": self._dropped,
                "bytes": self._bytes,
                "files": int(self._file is not None),
            }

    def invalidate_after_fork(self) -> None:
        """In a forked child: drop everything. Closing the file here does not release the parent's lock."""
        self.is_ended = True
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._pending, self._pending_bytes = deque(), 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        with self._lock:
            batch, self._pending = list(self._pending), deque()
            self._pending_bytes, self._is_queued = 0, False
            self._taken += len(batch)
        done, error = 0, None
        while done < len(batch) and error is None:
            try:
                count, error = self._append(batch, done)
                done += count
            except Exception as failure:  # An error of one session must not end the flusher of all sessions.
                error = failure
        if batch:
            self._last_ms = batch[-1][0]
        if error is not None:
            self._is_failing = True
            self._requeue(batch[done:])
            self._context.failures.record(self, error)
        elif self._is_failing:
            self._is_failing = False
            self._context.failures.resolve(self)

    def _append(self, batch: Sequence[Accepted], start: int) -> tuple[int, Exception | None]:
        """Write the records from `start` on that belong to one file; how many, and the error that stopped it."""
        self._context.check_space()
        day = batch[start][0] // _DAY_MS
        if self._file is not None and self._file.day != day:
            self._close_file()
        if self._file is None:
            self._file = self._new_file(batch[start][0])
        file, lines, size_max, line_of = self._file, list[bytes](), self._context.file_bytes_max, log_format.line
        begin_ms, end_ms = day * _DAY_MS, (day + 1) * _DAY_MS
        size = file.size
        for n, (at_ms, record) in enumerate(islice(batch, start, None), file.records):
            if not begin_ms <= at_ms < end_ms or (lines and size >= size_max):
                break
            line = line_of(n, at_ms, record)
            lines.append(line)
            size += len(line)
        before_records, before_size = file.records, file.size
        error = file.append(lines)
        count = file.records - before_records
        self._written += count
        self._bytes += file.size - before_size
        if file.is_damaged or file.size >= self._context.file_bytes_max:
            self._close_file()
        return count, error

    def _requeue(self, records: Sequence[Accepted]) -> None:
        """Return unwritten records to the front of the buffer, as far as they fit."""
        with self._lock:
            self._pending.extendleft(reversed(records))
            self._pending_bytes += sum(len(record) + _COST_BYTES for _, record in records)
            self._taken -= len(records)
            self._drop_oldest()
            self._is_queued = True
        if self._context.unwritten is not None:
            self._context.unwritten.put(self)

    def _drop_oldest(self, keep_bytes: int | None = None) -> None:
        keep_bytes = limits.ACTIVITY_BUFFER_BYTES_MAX if keep_bytes is None else keep_bytes
        while self._pending and self._pending_bytes > keep_bytes:
            self._pending_bytes -= len(self._pending.popleft()[1]) + _COST_BYTES
            self._taken += 1
            self._dropped += 1

    def _new_file(self, opened_ms: int) -> "Appender":
        universe, session, kind = self.labels
        writer = str(self._context.ids.new_id(opened_ms))
        return Appender(self._context.folder / universe, Header(universe, session, kind, opened_ms, writer))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._context.rotation.add(self._file.path)
            self._file = None


class Appender:
    """A new file with this object as its only appender, until it is closed. For one thread at a time."""

    def __init__(self, folder: Path, header: Header) -> None:
        """Create the file, lock it and write its header; after an OSError no file remains."""
        make_folder(folder)
        self.day = header.opened_ms // _DAY_MS
        self.is_damaged = False
        self.records = self.size = 0
        self._descriptor, self.path = _create_file(folder, header)
        error = self.append([log_format.header_line(header)])
        if error is not None:
            with suppress(OSError):
                self.path.unlink()
            self.close()
            raise error
        self.records = 0

    def append(self, lines: Sequence[bytes]) -> OSError | None:
        """Write the lines in one call; after an error, `records` and `size` count the complete lines."""
        data, error = b"".join(lines), None
        written = whole = 0
        try:
            while written < len(data):  # Twice after a short write, to get its error.
                written += os.write(self._descriptor, data[written:])
            whole = written
        except OSError as failure:
            error = failure
            whole = data.rfind(b"\n", 0, written) + 1
            try:
                # Remove a partial line: the next write would be appended to it.
                os.ftruncate(self._descriptor, self.size + whole)
            except OSError:
                self.is_damaged = True
        self.records += len(lines) if error is None else data.count(b"\n", 0, whole)
        self.size += whole
        return error

    def close(self) -> None:
        """Close the file, which releases its lock: it may be rotated now."""
        # Cleared first: a child forked in between must not close a descriptor that was reused.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # The descriptor is closed anyway, and lost data is BEST_EFFORT.
                os.close(descriptor)


def _create_file(folder: Path, header: Header) -> tuple[int, Path]:
    for copy in range(1, limits.ACTIVITY_COPIES_MAX + 1):
        path = folder / log_format.file_name(header, copy=copy)
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE_MODE)
            is_ours = False
            try:
                # A scan for leftovers may have found it before this, and removed it as empty.
                is_ours = lock(descriptor, path)
            finally:
                if not is_ours:
                    os.close(descriptor)
            if is_ours:
                return descriptor, path
    raise FileExistsError(f"{folder} has ACTIVITY_COPIES_MAX files of session {header.session} for the same second")
