"""Session logs: BEST_EFFORT records, acknowledged in memory and appended to a file of their session soon after.

    log ──► the session's buffer ──► one write, at most 200 ms later ──► rotated: on a new day, when large, when ended

What is lost with the process is what was not written yet, and nothing that was written is damaged by it. No lock is
shared between sessions, neither for logging nor for writing. A session whose buffer is full writes it itself, which
slows its callers down and bounds memory. Records that cannot be written wait up to the same bound; then the oldest are
dropped and counted. `log` never raises for a disk.

Two threads work behind a log: one writes buffers, and sleeps while there are none; the other rotates closed files.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from holdfast import limits
from holdfast.backends.objects import ObjectStore
from holdfast.clock import Clock, IdSource, SystemClock
from holdfast.errors import Busy, Closed, InvalidArgument, ObjectNotFound
from holdfast.kv.fork_safety import forget_in_children
from holdfast.layers.idempotency import KeyedCall, reused
from holdfast.limits import ONCE_RECENT_MAX
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity import rotation
from holdfast.runtime.activity.format import LogFile, LoggedRecord, Position
from holdfast.runtime.activity.rotation import Failures, Rotation
from holdfast.runtime.activity.writer import Common, Labels, SessionLog

__all__ = ["ActivityLog", "ActivityStats", "LogFile", "LoggedRecord", "Position", "SessionLog"]

_log = logging.getLogger("holdfast.activity")
_READ_ATTEMPTS_MAX: Final = 10
_START: Final = Position("", -1)


class ActivityStats(msgspec.Struct, frozen=True):
    """Counts since the log was opened. What was accepted and neither written nor dropped is in memory."""

    accepted: int
    written: int
    dropped: int
    skipped: int  # Bad lines and missing files that reads passed over; a torn end counts whenever it is reached.
    files: int  # Open at the moment.
    rotated: int
    bytes: int
    failures: int
    last_error: str | None


class ActivityLog:
    """The session logs of a folder. For threads and event loops alike: only `log` and `session` do no I/O."""

    def __init__(
        self,
        folder: Path,
        objects: ObjectStore | None,
        *,
        clock: Clock | None = None,
        flush_seconds: float = limits.ACTIVITY_FLUSH_SECONDS,
        file_bytes_max: int = limits.ACTIVITY_FILE_BYTES_MAX,
        start_flusher: bool = True,
    ) -> None:
        """Without a flusher, records are written by `flush` and by callers whose session's buffer is full."""
        self._folder, self._objects = folder, objects
        self._flush_seconds = flush_seconds
        self._unwritten: SimpleQueue[SessionLog | None] = SimpleQueue()
        self._common = Common(
            folder=folder,
            file_bytes_max=file_bytes_max,
            now_ms=(clock or SystemClock()).now_ms,
            session=self.session,
            unwritten=self._unwritten if start_flusher else None,
            rotation=Rotation(folder, objects),
            failures=Failures("Writing session logs"),
            ids=IdSource(),
        )
        self._rotation = self._common.rotation
        self._sessions: dict[Labels, SessionLog] = {}
        self.recent = RecentKeys()  # So that what is sent twice is logged once.
        self._past: Counter[str] = Counter()  # The counts of sessions that have ended.
        self._skipped = 0
        self._swept_ms = self._common.now_ms()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        self._stopping = threading.Event()
        works = (self._write_often, self._rotate_often) if start_flusher else ()
        self._threads = [threading.Thread(target=work, name="holdfast-activity", daemon=True) for work in works]
        forget_in_children(self)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # The process may have no more: the one that was started ends.
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def log(
        self, universe: str, session: str, record: Mapping[str, Any] | msgspec.Struct, *, kind: str = "activity"
    ) -> None:
        """Accept a record; the caller may change it afterwards.

        Raises:
            InvalidValue: it is no mapping and no struct, or has no JSON form.
            InvalidArgument: it is larger than ACTIVITY_RECORD_BYTES_MAX.
            Busy: ACTIVITY_SESSIONS_MAX sessions are open.
        """
        found = self._sessions.get((universe, session, kind)) or self.session(universe, session, kind)
        found.log(record)

    def log_encoded(self, universe: str, session: str, kind: str, encoded: Sequence[bytes]) -> None:
        """Accept JSON objects that are encoded already, all or none; `read` skips one that turns out to be no JSON."""
        found = self._sessions.get((universe, session, kind)) or self.session(universe, session, kind)
        found.accept([log_format.checked_object(data) for data in encoded])

    def session(self, universe: str, session: str, kind: str) -> SessionLog:
        """The log of one session and kind. It may be kept: after the session's end, its next record begins it anew."""
        labels = log_format.checked_labels(universe, session, kind)
        while True:
            with self._lock:
                self._check_open()
                found = self._sessions.get(labels)
                if found is None:
                    if len(self._sessions) >= limits.ACTIVITY_SESSIONS_MAX:
                        raise Busy(f"{len(self._sessions)} session logs are open (ACTIVITY_SESSIONS_MAX); end some")
                    found = self._sessions[labels] = SessionLog(self._common, labels)
            if not found.is_ended:
                return found
            self._end(found)  # Somebody is at it: their records come before ours.

    def end_session(self, universe: str, session: str, kind: str | None = None) -> None:
        """Write what the session has, close its files and rotate them."""
        self._check_open()
        asked = _checked(universe, session, kind)
        for found in list(self._sessions.values()):
            if all(wanted in (None, label) for wanted, label in zip(asked, found.labels, strict=True)):
                self._end(found)
        self._rotation.run()

    def flush(self) -> None:
        """Bring everything accepted so far into the files, though not onto the disk below them."""
        self._check_open()
        for session in list(self._sessions.values()):
            session.write()
        if not self._threads:
            self._sweep()
            self._rotation.run()

    def files(self, universe: str) -> list[LogFile]:
        """The files of a universe, here and in the object store, in the order in which they were begun."""
        self._check_open()
        return list(rotation.files_in_order(self._folder, self._objects, _checked(universe)[0]))

    def read(
        self,
        universe: str,
        *,
        session: str | None = None,
        kind: str | None = None,
        after: Position | None = None,
        limit: int = 1_000,
    ) -> list[LoggedRecord]:
        """At most `limit` records behind the position, file by file, with everything that was accepted so far.

        To follow a log, name its session and kind: of several, one with an earlier file may log behind the position.

        Raises:
            Backend: the object store does not answer.
        """
        if not 1 <= limit <= limits.READ_ENTRIES_MAX:
            raise InvalidArgument(f"The limit is {limit}; choose 1 to READ_ENTRIES_MAX, {limits.READ_ENTRIES_MAX}")
        asked = _checked(universe, session, kind)
        self.flush()
        for _ in range(_READ_ATTEMPTS_MAX):
            try:
                return self._read(*asked, after or _START, limit)
            except FileNotFoundError:
                continue  # It was rotated since we looked, and is in the manifest now.
        raise Busy(f"The files of {universe} are rotated faster than they can be read; read again")

    def stats(self) -> ActivityStats:
        """What happened to the records so far."""
        with self._lock:
            counts = self._past.copy()
            for session in self._sessions.values():
                counts.update(session.counts())
        failures, moves = self._common.failures, self._rotation.failures
        return ActivityStats(
            accepted=counts["accepted"],
            written=counts["written"],
            dropped=counts["dropped"],
            skipped=self._skipped,
            files=counts["files"],
            rotated=self._rotation.rotated,
            bytes=counts["bytes"],
            failures=failures.count + moves.count,
            last_error=failures.last_error or moves.last_error,
        )

    def close(self) -> None:
        """Write, close and rotate everything; fine when it is closed. A later `log` raises Closed."""
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

    def forget_after_fork(self) -> None:
        """In a child: hold nothing and refuse everything, without a lock that a thread of the parent may have had."""
        self._is_closed = True
        self._lock, self._closing = threading.Lock(), threading.Lock()
        for session in self._sessions.values():
            session.forget_after_fork()
        self._sessions = {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("The session logs were closed, or belong to the process that forked this one; open them again")

    def _end(self, session: SessionLog) -> None:
        session.end()
        with self._lock:
            if self._sessions.get(session.labels) is session:
                del self._sessions[session.labels]
                self._past.update(session.counts())

    def _write_often(self) -> None:
        while not self._stopping.is_set():
            turn = list[SessionLog | None]()
            with suppress(Empty):
                turn.append(self._unwritten.get(timeout=limits.ACTIVITY_IDLE_SECONDS / 10))
                # Others join meanwhile, and half the time is left to write them all.
                self._stopping.wait(self._flush_seconds / 2)
            turn += [self._unwritten.get() for _ in range(self._unwritten.qsize())]
            for session in turn:
                if session is not None:
                    self._attend(session, session.write)
            self._sweep()

    def _sweep(self) -> None:
        """End what nobody has logged to for a while, so that its file reaches the object store."""
        now_ms = self._common.now_ms()
        if abs(now_ms - self._swept_ms) >= limits.ACTIVITY_IDLE_SECONDS * 100:
            self._swept_ms = now_ms
            for session in list(self._sessions.values()):
                if session.is_idle(now_ms):
                    self._attend(session, partial(self._end, session))

    def _attend(self, session: SessionLog, work: Callable[[], None]) -> None:
        """Do something for a session. Whatever is wrong with it must not end the thread that serves them all."""
        try:
            work()
        except Exception as error:
            _log.exception("the log of session %s failed in a way that nobody thought of", session.labels)
            self._common.failures.note(session, error)

    def _rotate_often(self) -> None:
        while True:
            self._rotation.due.clear()
            if self._stopping.is_set():  # Looked at after the clearing, so that neither is missed.
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
        return self._objects.get(file.path) if file.is_rotated and self._objects else Path(file.path).read_bytes()


def _checked(universe: str, session: str | None = None, kind: str | None = None) -> tuple[str, str | None, str | None]:
    """Names to look for, where None is any."""
    checked = log_format.checked_labels(universe, "x" if session is None else session, "x" if kind is None else kind)
    return checked[0], None if session is None else checked[1], None if kind is None else checked[2]


class RecentKeys:
    """The keys of the latest calls. It is as lasting as what it guards: both are lost with the process."""

    def __init__(self, most: int = ONCE_RECENT_MAX) -> None:
        self._most = most
        self._digests: dict[bytes, bytes] = {}  # By key, the oldest first.
        self._lock = threading.Lock()

    def knows(self, call: KeyedCall) -> bool:
        """Whether a call was carried out before.

        Raises:
            IdempotencyKeyReused: what was carried out under its key is another call.
        """
        before = self._digests.get(call.name)
        if before is not None and before != call.digest:
            raise reused()
        return before is not None

    def add(self, call: KeyedCall) -> None:
        """A call was carried out. Not before: one that failed may be sent again."""
        with self._lock:
            self._digests[call.name] = call.digest
            if len(self._digests) > self._most:
                del self._digests[next(iter(self._digests))]
