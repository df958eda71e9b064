"""Group commit: one sync of the log makes everything before it durable and releases every caller that waits for it.

Commits are appended to the log unsynced and in order, so "durable up to" is a single number. A caller that waits for a
higher number becomes the leader and syncs. Callers that arrive meanwhile wait as followers, and the first one that the
sync did not cover leads next. Each follower waits on its own lock, so there are no spurious wake-ups.

    thread      leads, or waits for the leader to wake it
    event loop  collects the callers of one tick of the loop, then waits once for all of them: inline while syncs are
                fast and few callers wait, otherwise on the syncer thread, so that work and sync overlap. After several
                ticks with a single caller, a caller syncs at once instead of waiting for the end of the tick

After a failed sync it is unknown what the device stored, and a retry may report success wrongly (the kernel forgets the
error). So the first failure is final: every current and later wait raises CommitUnknown or DatabaseFailed.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fastness import limits
from fastness.adaptive_batching import AdaptiveBatching
from fastness.errors import CommitUnknown, DatabaseFailed

_log = logging.getLogger("fastness.log_sync")


class LogSync:
    """Tracks up to which commit the log is durable, and syncs it."""

    def __init__(
        self, *, last_commit: Callable[[], int], sync: Callable[[], None], on_durable: Callable[[int], None]
    ) -> None:
        self._last_commit = last_commit
        self._sync = sync
        self._on_durable = on_durable  # Called by the leader with the last commit that a sync has made durable.
        self._mutex = threading.Lock()
        self._has_leader = False
        self._followers: deque[tuple[int, threading.Lock]] = deque()
        self.durable = last_commit()  # Every commit up to this number survives power loss.
        self.failed = False
        self._failure: Exception | None = None
        self._closed = False
        self.sync_seconds = 0.0  # Duration of the last sync.
        self.on_sync: Callable[[float], None] | None = None  # Called by the leader with each sync's duration.

    def wait(self, commit: int) -> None:
        """Return once `commit` is durable; lead the sync if there is no leader.

        Raises:
            CommitUnknown: the sync failed, or the database was closed first; the commit may or may not survive.
        """
        if commit <= self.durable:
            return
        with self._mutex:
            self._check(commit)
            if commit <= self.durable:
                return
            gate = None
            if self._has_leader:
                gate = threading.Lock()
                gate.acquire()
                self._followers.append((commit, gate))
            self._has_leader = True
        if gate is not None:
            try:
                woken = gate.acquire(timeout=limits.SYNC_WAIT_SECONDS_MAX)
            except BaseException:
                # Interrupted by a signal. If the lead was just passed to this thread, it must still sync.
                if not self._leave_queue(commit, gate) and commit > self.durable and self._failure is None:
                    self._lead()
                raise
            if not woken and self._leave_queue(commit, gate):
                raise CommitUnknown(f"The log was not synced within {limits.SYNC_WAIT_SECONDS_MAX} s; check the device")
            if commit <= self.durable:
                return
            self._check(commit)
        self._lead()
        if commit > self.durable:
            self._check(commit)

    def close(self) -> None:
        """Sync the rest after the current leader has finished, and reject every later wait."""
        try:
            if self._failure is None:
                self.wait(self._last_commit())
        finally:
            self._closed = True

    def _lead(self) -> None:
        """Sync once, wake the followers that this covers, and pass the lead to the first that it does not cover."""
        durable = self.durable
        started = time.perf_counter()
        try:
            target = self._last_commit()
            self._sync()
            durable = target
            self._on_durable(target)
        except Exception as error:
            self._failure, self.failed = error, True
        finally:  # Also after Ctrl-C, which most likely arrives during a sync: pass the lead on.
            seconds = time.perf_counter() - started
            self._finish_sync(durable)
        if self._failure is None:
            self.sync_seconds = seconds
            if self.on_sync is not None:
                self._report(self.on_sync, seconds)

    def _report(self, on_sync: Callable[[float], None], seconds: float) -> None:
        """Call `on_sync`. After an error it is removed: its failure must not fail the callers that wait."""
        try:
            on_sync(seconds)
        except Exception:
            self.on_sync = None
            _log.exception("unexpected error in the sync callback; it is not called again")

    def _finish_sync(self, durable: int) -> None:
        with self._mutex:
            self.durable = durable
            woken = []
            # Followers are nearly in commit order. A race may delay one until the next sync, but never wakes one early.
            while self._followers:
                commit, gate = self._followers.popleft()
                woken.append(gate)
                if commit > durable and self._failure is None:
                    break  # This one leads the next sync.
            else:
                self._has_leader = False
        for gate in woken:
            gate.release()

    def _leave_queue(self, commit: int, gate: threading.Lock) -> bool:
        """Remove this follower from the queue. If False, it was already woken and may have the lead."""
        with self._mutex:
            if (commit, gate) not in self._followers:
                return False
            self._followers.remove((commit, gate))
            return True

    def _check(self, commit: int) -> None:
        if commit <= self.durable:  # Regardless of a later failure or close.
            return
        if self._failure is not None:
            raise CommitUnknown(
                f"The log could not be synced ({self._failure}); this write may not survive. "
                "Check the device, then open the database again"
            ) from self._failure
        if self._closed:
            raise CommitUnknown("The database was closed before the log was synced; check whether the write was stored")

    @property
    def failure(self) -> DatabaseFailed | None:
        """The error of every later commit, if a sync has failed."""
        if self._failure is None:
            return None
        error = DatabaseFailed(
            f"An earlier sync failed ({self._failure}); nothing was written. "
            "Check the device, then open the database again"
        )
        error.__cause__ = self._failure
        return error

    def check_healthy(self) -> None:
        """Raise DatabaseFailed if a sync has failed before."""
        if (failure := self.failure) is not None:
            raise failure


class LoopSync:
    """Waits for syncs on behalf of the callers on one event loop. Used on that loop's thread only."""

    def __init__(self, log: LogSync, loop: asyncio.AbstractEventLoop, submit: Callable[[Callable[[], None]], None]):
        self.loop = loop
        self._log = log
        self._submit = submit
        self._callers: list[asyncio.Future[None]] = []
        self._commit = 0  # The newest commit that a caller waits for.
        self._busy = False
        self._batching = AdaptiveBatching(loop)
        # Batches left for the syncer thread before the loop syncs inline again. Sync durations on that thread say
        # little: after a sync it waits for the GIL, and seems slow for as long as the loop is busy.
        self._thread_batches = (
            limits.INLINE_SYNC_PAUSE_BATCHES if log.sync_seconds >= limits.INLINE_SYNC_SECONDS_MAX else 0
        )

    def wait(self, commit: int, *, single: bool = True) -> "asyncio.Future[None] | None":
        """A future that is done once `commit` is durable, in one sync with all callers of this tick; None if it is now.

        Pass `single=False` if other callers will commit in this tick.

        Raises:
            CommitUnknown: the inline sync of a single caller failed.
        """
        if single and not self._busy and not self._thread_batches and self._batching.may_skip():
            started = time.perf_counter()
            self._log.wait(commit)
            self._record_duration(time.perf_counter() - started)
            return None
        caller = self.loop.create_future()
        self._callers.append(caller)
        self._commit = max(self._commit, commit)
        if not self._busy:
            self._busy = True
            # The callback runs after every caller that is ready now has committed.
            self.loop.call_soon(self._start)
        return caller

    def _start(self) -> None:
        log, commit, callers, self._callers = self._log, self._commit, self._callers, []
        self._batching.record_batch(len(callers))
        if len(callers) <= limits.INLINE_SYNC_WAITERS_MAX and not self._thread_batches:
            started = time.perf_counter()
            failure = _try_wait(log, commit)
            self._record_duration(time.perf_counter() - started)
            self._finish(callers, failure)
        else:
            self._thread_batches = max(self._thread_batches - 1, 0)
            self._submit(lambda: self._finish_threadsafe(callers, _try_wait(log, commit)))

    def _record_duration(self, seconds: float) -> None:
        if seconds >= limits.INLINE_SYNC_SECONDS_MAX:
            self._thread_batches = limits.INLINE_SYNC_PAUSE_BATCHES

    def _finish_threadsafe(self, callers: list["asyncio.Future[None]"], failure: Exception | None) -> None:
        with suppress(RuntimeError):  # The loop is closed, and its callers with it.
            self.loop.call_soon_threadsafe(self._finish, callers, failure)

    def _finish(self, callers: list["asyncio.Future[None]"], failure: Exception | None) -> None:
        for caller in callers:
            if caller.done():
                continue  # Cancelled while waiting.
            if failure is None:
                caller.set_result(None)
            else:
                caller.set_exception(failure)
        if self._callers:
            self.loop.call_soon(self._start)
        else:
            self._busy = False


class Syncer:
    """A database's background thread: syncs for event loops, and syncs IMPORTANT commits in time."""

    def __init__(self, log: LogSync, last_commit: Callable[[], int]) -> None:
        self._log = log
        self._last_commit = last_commit
        self._wake = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._due: float | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the syncer thread, or at once if the thread cannot start."""
        with self._wake:
            if self._has_thread():
                self._jobs.append(job)
                self._wake.notify()
                return
        job()

    def sync_soon(self) -> None:
        """Sync within `limits.IMPORTANT_SYNC_SECONDS_MAX`, unless another sync comes first."""
        if self._due is not None:
            return
        with self._wake:
            if self._has_thread():
                # Half of the bound; the other half is for a slow sync.
                self._due = time.monotonic() + limits.IMPORTANT_SYNC_SECONDS_MAX / 2
                self._wake.notify()
                return
        if not self._stopping:  # close() has already synced everything.
            self._sync_overdue()

    def stop(self) -> None:
        """Finish the submitted jobs, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _has_thread(self) -> bool:
        """Start the thread if needed. Returns False after `stop`, or if the process cannot start another thread."""
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name="fastness-syncer", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None and not self._stopping

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._stopping and not self._is_overdue():
                    self._wake.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                if self._is_overdue():
                    self._due = None
                    job = self._sync_overdue
                elif self._jobs:
                    job = self._jobs.popleft()
                else:
                    return
            try:
                job()
            except Exception:  # Every event loop depends on this thread, so it must not end.
                _log.exception("unexpected error in the syncer thread; continuing")

    def _sync_overdue(self) -> None:
        _try_wait(self._log, self._last_commit())  # The log keeps a failure, and the next commit raises it.

    def _is_overdue(self) -> bool:
        return self._due is not None and self._due <= time.monotonic()


def _try_wait(log: LogSync, commit: int) -> Exception | None:
    """Wait for `commit`. Returns the error, of any type, for the callers that wait."""
    try:
        log.wait(commit)
    except Exception as error:
        return error
    return None
