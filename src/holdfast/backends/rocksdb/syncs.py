"""Group commit: one sync of the log makes everything before it durable and releases every caller that waits for it.

Commits go into the log unsynced and in order, so "durable up to" is a single number. Whoever needs more than that
number becomes the leader and syncs; callers that come meanwhile wait, and one of those that the sync did not
cover leads next. Each waiter is woken by its own lock, so nobody wakes for nothing.

    thread      waits here itself: it leads, or it is woken by the leader
    event loop  collects the callers of one turn of the loop, then waits once for all of them: itself while syncs
                are fast and few callers wait, on the syncer thread otherwise, so that work and sync overlap;
                a caller that has been the only one of its turn for a while syncs at once, and waits for no turn

A sync that fails leaves it open what the device kept, and asking again may lie (the kernel forgets the error). So
the first failure is final: every waiter, now and later, gets CommitUnknown or DatabaseFailed.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from holdfast import limits
from holdfast.adaptive_batching import AdaptiveBatching
from holdfast.errors import CommitUnknown, DatabaseFailed

_log = logging.getLogger("holdfast.syncs")


class LogSync:
    """Knows up to which commit the log is durable, and makes it so."""

    def __init__(self, *, last_commit: Callable[[], int], sync: Callable[[], None]) -> None:
        self._last_commit = last_commit
        self._sync = sync
        self._mutex = threading.Lock()
        self._led = False
        self._followers: deque[tuple[int, threading.Lock]] = deque()
        self.durable = last_commit()  # Every commit up to this number survives power loss.
        self.failed = False
        self._failure: Exception | None = None
        self._closed = False
        self.sync_seconds = 0.0  # How long the last sync took.
        self.on_sync: Callable[[float], None] | None = None  # Told how long each one took, by whoever led it.

    def wait(self, commit: int) -> None:
        """Return once `commit` is durable; lead the sync if nobody does.

        Raises:
            CommitUnknown: the sync failed, or was cut off by closing; the commit may or may not survive.
        """
        if commit <= self.durable:
            return
        with self._mutex:
            self._check(commit)
            if commit <= self.durable:
                return
            gate = None
            if self._led:
                gate = threading.Lock()
                gate.acquire()
                self._followers.append((commit, gate))
            self._led = True
        if gate is not None:
            try:
                woken = gate.acquire(timeout=limits.SYNC_WAIT_SECONDS_MAX)
            except BaseException:  # A signal does not wait: the lead, if it came to us just now, is not taken along.
                if not self._leave(commit, gate) and commit > self.durable and self._failure is None:
                    self._lead()
                raise
            if not woken and self._leave(commit, gate):
                raise CommitUnknown(f"The log was not synced within {limits.SYNC_WAIT_SECONDS_MAX} s; check the device")
            if commit <= self.durable:
                return
            self._check(commit)
        self._lead()
        self._check(commit)

    def close(self) -> None:
        """Sync what is left, once whoever leads has finished, and refuse every later wait."""
        try:
            if self._failure is None:
                self.wait(self._last_commit())
        finally:
            self._closed = True

    def _lead(self) -> None:
        """Sync once, wake the followers that this covers, and hand the lead to the first that it does not."""
        durable = self.durable
        started = time.perf_counter()
        try:
            target = self._last_commit()
            self._sync()
            durable = target
        except Exception as error:
            self._failure, self.failed = error, True
        finally:  # After Ctrl-C too, which most likely comes during a sync: somebody else leads then.
            seconds = time.perf_counter() - started
            self._hand_on(durable)
        if self._failure is None:
            self.sync_seconds = seconds
            self._tell(seconds)

    def _tell(self, seconds: float) -> None:
        """Whoever fails to hear of a sync is told of none any more: it is no failure of those who waited for it."""
        if self.on_sync is None:
            return
        try:
            self.on_sync(seconds)
        except Exception:
            self.on_sync = None
            _log.exception("syncs are not told of any more")

    def _hand_on(self, durable: int) -> None:
        with self._mutex:
            self.durable = durable
            woken = []
            # Followers queue in the order of their commits but for races of a few; nobody is woken early for that.
            while self._followers:
                commit, gate = self._followers.popleft()
                woken.append(gate)
                if commit > durable and self._failure is None:
                    break  # This one leads the next sync.
            else:
                self._led = False
        for gate in woken:
            gate.release()

    def _leave(self, commit: int, gate: threading.Lock) -> bool:
        """Whether this follower could leave the queue; once taken out of it, it may have been given the lead."""
        with self._mutex:
            if (commit, gate) not in self._followers:
                return False
            self._followers.remove((commit, gate))
            return True

    def _check(self, commit: int) -> None:
        if commit <= self.durable:  # Whatever happened since, to others or by closing.
            return
        if self._failure is not None:
            raise CommitUnknown(
                f"The log could not be synced ({self._failure}); this write may not survive. "
                "Check the device, then open the database again"
            ) from self._failure
        if self._closed:
            raise CommitUnknown("The database was closed before the log was synced; look whether the write is there")

    def check_healthy(self) -> None:
        """Raise DatabaseFailed if a sync has failed before."""
        if self._failure is not None:
            raise DatabaseFailed(
                f"An earlier sync failed ({self._failure}); nothing was written. "
                "Check the device, then open the database again"
            ) from self._failure


class LoopSync:
    """Waits for syncs on behalf of the callers of one event loop. Used on that loop's thread only."""

    def __init__(self, log: LogSync, loop: asyncio.AbstractEventLoop, hand_over: Callable[[Callable[[], None]], None]):
        self.loop = loop
        self._log = log
        self._hand_over = hand_over
        self._callers: list[asyncio.Future[None]] = []
        self._commit = 0  # What the newest of them waits for; a thread's commits only grow.
        self._busy = False
        self._turns = AdaptiveBatching(loop)
        # So many groups go to the syncer before the loop tries it itself again. How long syncs take there says little:
        # a thread that comes back from one waits for the interpreter, and seems slow for as long as the loop is busy.
        self._aside = limits.INLINE_SYNC_PAUSE if log.sync_seconds >= limits.INLINE_SYNC_SECONDS_MAX else 0

    def wait(self, commit: int, *, alone: bool = True) -> "asyncio.Future[None] | None":
        """Done once `commit` is durable, together with everybody else who asks in this turn; None: it is durable now.

        Whoever knows that others will commit in this turn is not `alone`.

        Raises:
            CommitUnknown: the sync of a caller that is alone failed.
        """
        if alone and not self._busy and not self._aside and self._turns.take():
            started = time.perf_counter()
            self._log.wait(commit)
            self._note(time.perf_counter() - started)
            return None
        caller = self.loop.create_future()
        self._callers.append(caller)
        self._commit = commit
        if not self._busy:
            self._busy = True
            # The callback runs after every caller that is ready now has made its commit.
            self.loop.call_soon(self._start)
        return caller

    def _start(self) -> None:
        log, commit, callers, self._callers = self._log, self._commit, self._callers, []
        self._turns.shared(len(callers))
        if len(callers) <= limits.INLINE_SYNC_WAITERS_MAX and not self._aside:
            started = time.perf_counter()
            failure = _failure(log, commit)
            self._note(time.perf_counter() - started)
            self._finish(callers, failure)
        else:
            self._aside = max(self._aside - 1, 0)
            self._hand_over(lambda: self._post(callers, _failure(log, commit)))

    def _note(self, seconds: float) -> None:
        if seconds >= limits.INLINE_SYNC_SECONDS_MAX:
            self._aside = limits.INLINE_SYNC_PAUSE

    def _post(self, callers: list["asyncio.Future[None]"], failure: Exception | None) -> None:
        with suppress(RuntimeError):  # The loop was closed, and its callers are gone with it.
            self.loop.call_soon_threadsafe(self._finish, callers, failure)

    def _finish(self, callers: list["asyncio.Future[None]"], failure: Exception | None) -> None:
        for caller in callers:
            if caller.done():
                continue  # It was cancelled while it waited.
            if failure is None:
                caller.set_result(None)
            else:
                caller.set_exception(failure)
        if self._callers:
            self.loop.call_soon(self._start)
        else:
            self._busy = False


class Syncer:
    """The one thread that a database keeps: it syncs for event loops, and what stays unsynced for too long."""

    def __init__(self, log: LogSync, last_commit: Callable[[], int]) -> None:
        self._log = log
        self._last_commit = last_commit
        self._wake = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._due: float | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def hand_over(self, job: Callable[[], None]) -> None:
        """Run `job` on this thread, or here if there is none: callers wait for it."""
        with self._wake:
            if self._has_thread():
                self._jobs.append(job)
                self._wake.notify()
                return
        job()

    def sync_soon(self) -> None:
        """Sync within `limits.IMPORTANT_SYNC_SECONDS_MAX`, unless somebody else does before."""
        if self._due is not None:
            return
        with self._wake:
            if self._has_thread():
                # Half of the bound leaves the other half for a sync that is slow itself.
                self._due = time.monotonic() + limits.IMPORTANT_SYNC_SECONDS_MAX / 2
                self._wake.notify()
                return
        if not self._stopping:  # Closing has synced everything before.
            self._sync_overdue()

    def stop(self) -> None:
        """Finish what was handed over, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _has_thread(self) -> bool:
        """Whether there is one, once somebody needs it: not after its end, nor where the process may have no more."""
        if self._thread is None and not self._stopping:
            thread = threading.Thread(target=self._run, name="holdfast-syncer", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None and not self._stopping

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._stopping and not self._overdue():
                    self._wake.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                if self._overdue():
                    self._due = None
                    job = self._sync_overdue
                elif self._jobs:
                    job = self._jobs.popleft()
                else:
                    return
            try:
                job()
            except Exception:  # Every event loop waits for this thread.
                _log.exception("the syncer failed in a way that nobody thought of, and goes on")

    def _sync_overdue(self) -> None:
        _failure(self._log, self._last_commit())  # A failure is kept by the log and raised at the next commit.

    def _overdue(self) -> bool:
        return self._due is not None and self._due <= time.monotonic()


def _failure(log: LogSync, commit: int) -> Exception | None:
    """Wait for `commit`; what went wrong, if anything did. Whatever that is, somebody waits to hear of it."""
    try:
        log.wait(commit)
    except Exception as error:
        return error
    return None
