"""The log of one session and kind: a buffer, and the file that the buffer is written to.

    accepted ──► pending ──► written ──► the file is closed on a new day, when it is large, when the session ends
                    └──────► dropped, oldest first, when the file cannot be written and the buffer is full

Two locks guard it, neither shared with another session: one for the buffer, held for a microsecond, and one for the
file, held while it is written. Records get their numbers when they are written, so what is dropped leaves no gap.

Who creates a file locks it, is the only one to append to it, and never opens it again: two appenders would interleave
and corrupt it (Lesson 19).
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from holdfast import limits
from holdfast.clock import IdSource
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import Header, encoded
from holdfast.runtime.activity.rotation import Failures, Rotation, lock

_DAY_MS: Final = 86_400_000
_COST_BYTES: Final = limits.WRITE_COST_BYTES  # What a record takes in memory beside its bytes.

Labels = tuple[str, str, str]  # Universe, session and kind.
Accepted = tuple[int, bytes]  # When, and what.


class Common(msgspec.Struct):
    """What the sessions of a log share; none of it is locked while they log."""

    folder: Path
    file_bytes_max: int
    now_ms: Callable[[], int]
    session: Callable[[str, str, str], "SessionLog"]
    unwritten: "SimpleQueue[SessionLog | None] | None"  # For the flusher, if there is one.
    rotation: Rotation
    failures: Failures
    ids: IdSource


class SessionLog:
    """Takes the records of one session and kind; made by `ActivityLog.session`."""

    def __init__(self, common: Common, labels: Labels) -> None:
        self.labels = labels
        self.is_ended = False
        self._common = common
        self._now_ms = common.now_ms
        # Reentrant, because a signal handler or a finalizer may log in the middle of `accept`.
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

    def log(self, record: Mapping[str, Any] | msgspec.Struct) -> None:
        """Accept a record, as `ActivityLog.log` does."""
        self.accept((encoded(record),))

    def accept(self, records: Sequence[bytes]) -> None:
        """Accept encoded records, all with the same time."""
        is_full = is_new = False
        with self._lock:
            is_ended = self.is_ended
            if not is_ended:
                at_ms = self._now_ms()
                self._pending.extend([(at_ms, record) for record in records])
                self._pending_bytes += sum(map(len, records)) + _COST_BYTES * len(records)
                if not self._is_queued:
                    is_new = self._is_queued = True
                if self._pending_bytes > limits.ACTIVITY_BUFFER_BYTES_MAX:
                    is_full = not self._is_failing
                    if self._is_failing:
                        self._drop_oldest()
        if is_ended:
            self._common.session(*self.labels).accept(records)
        if is_new and self._common.unwritten is not None:
            self._common.unwritten.put(self)
        if is_full:
            self.write()

    def write(self) -> None:
        """Append everything accepted so far, in one write unless it goes into several files."""
        with self._writing:
            self._write()

    def end(self) -> None:
        """Write what is left and close the file. What cannot be written now never will be."""
        # In this order, whoever sees that it is ended can wait for the end by ending it too.
        with self._writing:
            with self._lock:
                self.is_ended = True
            self._write()
            with self._lock:
                self._drop_oldest(keep_bytes=0)
            self._close_file()
            self._common.failures.over(self, is_given_up=True)

    def is_idle(self, now_ms: int) -> bool:
        """Whether nobody has logged for ACTIVITY_IDLE_SECONDS."""
        return not self._pending and abs(now_ms - self._last_ms) >= limits.ACTIVITY_IDLE_SECONDS * 1_000

    def counts(self) -> dict[str, int]:
        """Its part of an ActivityStats."""
        with self._lock:
            return {
                "accepted": self._taken + len(self._pending),
                "written": self._written,
                "dropped": self._dropped,
                "bytes": self._bytes,
                "files": int(self._file is not None),
            }

    def forget_after_fork(self) -> None:
        """In a child: hold nothing. Closing the file here leaves the parent its lock."""
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
            except Exception as failure:  # Whatever is wrong with this session must not end the flusher of them all.
                error = failure
        if batch:
            self._last_ms = batch[-1][0]
        if error is not None:
            self._is_failing = True
            self._keep(batch[done:])
            self._common.failures.note(self, error)
        elif self._is_failing:
            self._is_failing = False
            self._common.failures.over(self)

    def _append(self, batch: Sequence[Accepted], start: int) -> tuple[int, Exception | None]:
        """Write the records from `start` on that belong into one file: how many were, and why not more of them."""
        day = batch[start][0] // _DAY_MS
        if self._file is not None and self._file.day != day:
            self._close_file()
        if self._file is None:
            self._file = self._new_file(batch[start][0])
        file, lines, size_max, line_of = self._file, list[bytes](), self._common.file_bytes_max, log_format.line
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
        if file.is_damaged or file.size >= self._common.file_bytes_max:
            self._close_file()
        return count, error

    def _keep(self, records: Sequence[Accepted]) -> None:
        """Put back at the front what could not be written, as far as it fits."""
        with self._lock:
            self._pending.extendleft(reversed(records))
            self._pending_bytes += sum(len(record) + _COST_BYTES for _, record in records)
            self._taken -= len(records)
            self._drop_oldest()
            self._is_queued = True
        if self._common.unwritten is not None:
            self._common.unwritten.put(self)

    def _drop_oldest(self, keep_bytes: int | None = None) -> None:
        keep_bytes = limits.ACTIVITY_BUFFER_BYTES_MAX if keep_bytes is None else keep_bytes
        while self._pending and self._pending_bytes > keep_bytes:
            self._pending_bytes -= len(self._pending.popleft()[1]) + _COST_BYTES
            self._taken += 1
            self._dropped += 1

    def _new_file(self, opened_ms: int) -> "Appender":
        universe, session, kind = self.labels
        writer = str(self._common.ids.new_id(opened_ms))
        return Appender(self._common.folder / universe, Header(universe, session, kind, opened_ms, writer))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._common.rotation.add(self._file.path)
            self._file = None


class Appender:
    """A new file that nobody else appends to, from its creation to its closing. For one thread at a time."""

    def __init__(self, folder: Path, header: Header) -> None:
        """Create the file, lock it and write its header; an OSError leaves nothing behind."""
        folder.mkdir(parents=True, exist_ok=True)
        self.day = header.opened_ms // _DAY_MS
        self.is_damaged = False
        self.records = self.size = 0
        self._descriptor, self.path = _created(folder, header)
        error = self.append([log_format.header_line(header)])
        if error is not None:
            with suppress(OSError):
                self.path.unlink()
            self.close()
            raise error
        self.records = 0

    def append(self, lines: Sequence[bytes]) -> OSError | None:
        """Write the lines at once; if that fails, `records` and `size` tell what is there of them, whole."""
        data, error = b"".join(lines), None
        written = whole = 0
        try:
            while written < len(data):  # Once, or twice to learn why the first write was short.
                written += os.write(self._descriptor, data[written:])
            whole = written
        except OSError as failure:
            error = failure
            whole = data.rfind(b"\n", 0, written) + 1
            try:
                # What is there of the next line would become one with whatever is written after it.
                os.ftruncate(self._descriptor, self.size + whole)
            except OSError:
                self.is_damaged = True
        self.records += len(lines) if error is None else data.count(b"\n", 0, whole)
        self.size += whole
        return error

    def close(self) -> None:
        """Let the file go; whoever locks it next may rotate it."""
        # Forgotten first: a child forked in between must not close a number that was given to another file since.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # It is closed all the same, and whatever the disk has lost of it is BEST_EFFORT.
                os.close(descriptor)


def _created(folder: Path, header: Header) -> tuple[int, Path]:
    for copy in range(1, limits.ACTIVITY_COPIES_MAX + 1):
        path = folder / log_format.file_name(header, copy=copy)
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            is_ours = False
            try:
                # Somebody who looks for leftovers may have found it before this, and removed it as empty.
                is_ours = lock(descriptor, path)
            finally:
                if not is_ours:
                    os.close(descriptor)
            if is_ours:
                return descriptor, path
    raise FileExistsError(f"{folder} has ACTIVITY_COPIES_MAX files of {header.session} that began in one second")
