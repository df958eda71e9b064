"""Session logs: BEST_EFFORT records, acknowledged in memory and appended to a file of their session soon after.

    log ──► the session's buffer ──► one write, at most 200 ms later ──► rotated: on a new day, when large, when ended

A crash loses the records that are not written yet, and damages none that are. Sessions share no lock, neither for
logging nor for writing. When the buffer of a session is full, its caller writes it, which slows that caller down and
bounds memory. Records that cannot be written are kept up to the same bound; then the oldest are dropped and counted.
`log` never raises disk errors.

A log has two threads: one writes buffers, and sleeps while they are empty; the other rotates closed files.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from fastness import limits
from fastness.backends.objects import ObjectStore
from fastness.clock import Clock, IdSource, SystemClock
from fastness.errors import Busy, Closed, ObjectNotFound
from fastness.kv.fork_safety import invalidate_in_children
from fastness.layers.idempotency import KeyedCall, key_reused
from fastness.limits import RECENT_CALL_KEYS_MAX
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.activity.format import LogFile, LoggedRecord, Position
from fastness.runtime.activity.rotation import FailureTracker, Rotation
from fastness.runtime.activity.writer import Follow, Labels, LogContext, SessionLog

__all__ = ["ActivityLog", "ActivityStats", "LogFile", "LoggedRecord", "Position", "SessionLog"]

_log = logging.getLogger("fastness.activity")
_READ_ATTEMPTS_MAX: Final = 10
_START: Final = Position("", -1)


class ActivityStats(msgspec.Struct, frozen=True):
    """Counters since the log was opened. Records that are neither written nor dropped are in memory."""

    accepted: int
    written: int
    dropped: int
    skipped: int  # Bad lines and missing files that reads skipped; a truncated end counts at every read.
    damaged: int  # Rotated files whose bytes do not have the SHA-256 in their name. Their valid lines are read.
    files: int  # Currently open.
    rotated: int
    bytes: int
    failures: int
    last_error: str | None


class ActivityLog:
    """The session logs of a folder. Thread-safe. Only `log` and `session` do no I/O, so event loops may call them."""

    def __init__(
        self,
        folder: Path,
        objects: ObjectStore | None,
        *,
        clock: Clock | None = None,
        flush_seconds: float = limits.ACTIVITY_FLUSH_SECONDS,
        file_bytes_max: int = limits.ACTIVITY_FILE_BYTES_MAX,
        check_space: Callable[[], None] = lambda: None,
        start_flusher: bool = True,
    ) -> None:
        """Without a flusher, records are written by `flush` and by callers when a buffer is full.

        `check_space` raises DiskFull while nothing may be written: that counts as a disk that is full.
        """
        self._folder, self._objects = folder, objects
        self._flush_seconds = flush_seconds
        self._unwritten: SimpleQueue[SessionLog | None] = SimpleQueue()
        self._context = LogContext(
            folder=folder,
            file_bytes_max=file_bytes_max,
            now_ms=(clock or SystemClock()).now_ms,
            session=self.session,
            unwritten=self._unwritten if start_flusher else None,
            rotation=Rotation(folder, objects, check_space),
            check_space=check_space,
            failures=FailureTracker("Writing session logs"),
            ids=IdSource(),
        )
        self._rotation = self._context.rotation
        self._sessions: dict[Labels, SessionLog] = {}
        self.recent_keys = RecentKeys()  # Deduplicates repeated calls.
        self._ended_counts: Counter[str] = Counter()  # The counters of ended sessions.
        self._skipped = 0
        self._damaged: set[str] = set()
        self._last_intact = ""  # A reader pages through a file, which is hashed once.
        self._swept_ms = self._context.now_ms()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        self._stopping = threading.Event()
        loops = (self._flush_loop, self._rotation_loop) if start_flusher else ()
        self._threads = [threading.Thread(target=loop, name="fastness-activity", daemon=True) for loop in loops]
        invalidate_in_children(self)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # No more threads can be started: end the one that was.
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def log(
        self, universe: str, session: str, record: Mapping[str, object] | msgspec.Struct, *, kind: str = "activity"
    ) -> None:
        """Accept a record; the caller may change it afterwards.

        Raises:
            InvalidValue: it is not a mapping or struct, or cannot be encoded as JSON.
            InvalidArgument: it is larger than ACTIVITY_RECORD_BYTES_MAX.
            Busy: ACTIVITY_SESSIONS_MAX sessions are open.
        """
        found = self._sessions.get((universe, session, kind)) or self.session(universe, session, kind)
        found.log(record)

    def log_encoded(self, universe: str, session: str, kind: str, records: Sequence[bytes]) -> None:
        """Accept encoded JSON objects, all or none; `read` skips records that turn out to be invalid JSON."""
        found = self._sessions.get((universe, session, kind)) or self.session(universe, session, kind)
        found.accept([log_format.checked_object(data) for data in records])

    def session(self, universe: str, session: str, kind: str) -> SessionLog:
        """The log of one session and kind. It may be kept: a record after the session's end starts a new one."""
        labels = log_format.checked_labels(universe, session, kind)
        while True:
            with self._lock:
                self._check_open()
                found = self._sessions.get(labels)
                if found is None:
                    if len(self._sessions) >= limits.ACTIVITY_SESSIONS_MAX:
                        raise Busy(
                            f"{len(self._sessions)} session logs are open (ACTIVITY_SESSIONS_MAX); end a session first"
                        )
                    found = self._sessions[labels] = SessionLog(self._context, labels)
            if not found.is_ended:
                return found
            self._end(found)  # Another thread ends it: wait, so that its records come first.

    def end_session(self, universe: str, session: str, kind: str | None = None) -> None:
        """Write the buffered records of a session, close its files and rotate them."""
        self._check_open()
        filters = _checked_filter(universe, session, kind)
        for found in list(self._sessions.values()):
            if all(wanted in (None, label) for wanted, label in zip(filters, found.labels, strict=True)):
                self._end(found)
        self._rotation.run()

    def flush(self) -> None:
        """Write everything accepted so far to the files, without a disk sync."""
        self._check_open()
        for session in list(self._sessions.values()):
            session.write()
        if not self._threads:
            self._sweep()
            self._rotation.run()

    def follow(self, kind: str, follow: Follow) -> None:
        """Call `follow` with all records of a kind that are accepted from now on. It must not block."""
        self._context.followed_kind, self._context.follow = kind, follow

    def file_stems(self) -> frozenset[str]:
        """The names of the files of this process, without suffixes: the open ones and the last that were closed."""
        stems = [session.file_stem for session in list(self._sessions.values())]
        return frozenset(stem for stem in (*stems, *list(self._rotation.closed)) if stem is not None)

    def files(self, universe: str) -> list[LogFile]:
        """The files of a universe, local and in the object store, in the order in which they were opened."""
        self._check_open()
        return list(rotation.files_in_order(self._folder, self._objects, _checked_filter(universe)[0]))

    def read(
        self,
        universe: str,
        *,
        session: str | None = None,
        kind: str | None = None,
        after: Position | None = None,
        limit: int = 1_000,
    ) -> list[LoggedRecord]:
        """At most `limit` records after the position, file by file, including everything accepted so far.

        To follow a log, give its session and kind: with several, one with an earlier file may append before the
        position.

        Raises:
            Backend: the object store does not answer.
        """
        filters = _checked_filter(universe, session, kind)
        self.flush()
        for _ in range(_READ_ATTEMPTS_MAX):
            try:
                return self._read(*filters, after or _START, limit)
            except FileNotFoundError:
                continue  # It was rotated after it was listed, and is in the manifest now.
        raise Busy(f"The session logs of {universe} are rotated faster than they can be read; try again")

    def stats(self) -> ActivityStats:
        """The counters since the log was opened."""
        with self._lock:
            counts = self._ended_counts.copy()
            for session in self._sessions.values():
                counts.update(session.counts())
        failures, moves = self._context.failures, self._rotation.failures
        return ActivityStats(
            accepted=counts["accepted"],
            written=counts["written"],
            dropped=counts["dropped"],
            skipped=self._skipped,
            damaged=len(self._damaged),
            files=counts["files"],
            rotated=self._rotation.rotated,
            bytes=counts["bytes"],
            failures=failures.count + moves.count,
            last_error=failures.last_error or moves.last_error,
        )

    def close(self) -> None:
        """Write, close and rotate everything. Idempotent. A later `log` raises Closed."""
        with self._closing:
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            for session in list(self._sessions.values()):
                self._end(session)
            self._stopping.set()
            self._unwritten.put(None)
            self._rotation.due.set()
            for thread in self._threads:
                thread.join()
            self._rotation.run()

    def invalidate_after_fork(self) -> None:
        """In a forked child: drop everything and reject calls. A thread of the parent may hold the old locks."""
        self._is_closed = True
        self._lock, self._closing = threading.Lock(), threading.Lock()
        for session in self._sessions.values():
            session.invalidate_after_fork()
        self._sessions = {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("The session logs are closed, or belong to the parent process; open them again")

    def _end(self, session: SessionLog) -> None:
        session.end()
        with self._lock:
            if self._sessions.get(session.labels) is session:
                del self._sessions[session.labels]
                self._ended_counts.update(session.counts())

    def _flush_loop(self) -> None:
        while not self._stopping.is_set():
            sessions = list[SessionLog | None]()
            with suppress(Empty):
                sessions.append(self._unwritten.get(timeout=limits.ACTIVITY_IDLE_SECONDS / 10))
                # Other sessions are queued meanwhile; half of the flush interval is left to write them all.
                self._stopping.wait(self._flush_seconds / 2)
            sessions += [self._unwritten.get() for _ in range(self._unwritten.qsize())]
            for session in sessions:
                if session is not None:
                    self._run_guarded(session, session.write)
            self._sweep()

    def _sweep(self) -> None:
        """End idle sessions, so that their files reach the object store."""
        now_ms = self._context.now_ms()
        if abs(now_ms - self._swept_ms) >= limits.ACTIVITY_IDLE_SECONDS * 100:
            self._swept_ms = now_ms
            for session in list(self._sessions.values()):
                if session.is_idle(now_ms):
                    self._run_guarded(session, partial(self._end, session))

    def _run_guarded(self, session: SessionLog, work: Callable[[], None]) -> None:
        """Run `work` for a session. An error must not end the thread that serves all sessions."""
        try:
            work()
        except Exception as error:
            _log.exception("unexpected error in the log of session %s", session.labels)
            self._context.failures.record(session, error)

    def _rotation_loop(self) -> None:
        while True:
            self._rotation.due.clear()
            if self._stopping.is_set():  # Checked after the event is cleared, so that neither is missed.
                return
            self._rotation.run()
            self._rotation.due.wait(limits.ACTIVITY_RETRY_SECONDS if self._rotation.is_waiting else None)

    def _read(
        self, universe: str, session: str | None, kind: str | None, after: Position, limit: int
    ) -> list[LoggedRecord]:
        records, skipped = list[LoggedRecord](), 0
        second = after.file[: log_format.SECOND_CHARACTERS]
        for file in rotation.files_in_order(
            self._folder, self._objects, universe, second=second, session=session, kind=kind
        ):
            if file.id < after.file or session not in (None, file.session) or kind not in (None, file.kind):
                continue
            try:
                data = self._body(file)
            except ObjectNotFound:
                skipped += 1
                continue
            for bad, line in log_format.lines_after(data, after.n if file.id == after.file else -1):
                skipped += bad
                if line is not None:
                    position = Position(file.id, line.n)
                    records.append(LoggedRecord(file.session, file.kind, line.at_ms, bytes(line.record), position))
                if len(records) == limit:
                    break
            if len(records) == limit:
                break
        with self._lock:
            self._skipped += skipped
        return records

    def _body(self, file: LogFile) -> bytes:
        if not file.is_rotated or self._objects is None:
            return Path(file.path).read_bytes()
        data = self._objects.get(file.path)
        if file.path != self._last_intact and file.path not in self._damaged:
            if rotation.is_intact(file.path, data):
                self._last_intact = file.path
            else:
                self._damaged.add(file.path)
                _log.error(
                    "the session log %s is damaged: its bytes do not have the SHA-256 in its name. Its valid lines are "
                    "read; restore it from a backup",
                    file.path,
                )
        return data


def _checked_filter(
    universe: str, session: str | None = None, kind: str | None = None
) -> tuple[str, str | None, str | None]:
    """Validated names to filter by; None matches any."""
    checked = log_format.checked_labels(universe, "x" if session is None else session, "x" if kind is None else kind)
    return checked[0], None if session is None else checked[1], None if kind is None else checked[2]


class RecentKeys:
    """The keys of the latest calls, in memory, like the records that they deduplicate."""

    def __init__(self, keys_max: int = RECENT_CALL_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._digests: dict[bytes, bytes] = {}  # By key, the oldest first.
        self._lock = threading.Lock()

    def contains(self, call: KeyedCall) -> bool:
        """Whether a call was already executed.

        Raises:
            IdempotencyKeyReused: another call was executed with its key.
        """
        before = self._digests.get(call.name)
        if before is not None and before != call.digest:
            raise key_reused()
        return before is not None

    def add(self, call: KeyedCall) -> None:
        """Record an executed call. Not before its execution: a failed call may be repeated."""
        with self._lock:
            self._digests[call.name] = call.digest
            if len(self._digests) > self._keys_max:
                del self._digests[next(iter(self._digests))]
