"""Ends statements that PostgreSQL does not answer.

PostgreSQL ends its own statements after `statement_timeout`, and the kernel notices a machine that is gone. Neither
helps if the server hangs: a stopped process, a disk that does not answer. So a thread looks at the open sessions once a
second and ends the connection of a statement that takes too long. Its caller then gets what a lost connection means:
`CommitUnknown` for a commit, another attempt for anything else.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Final

from holdfast import limits

_CHECK_SECONDS: Final = 1.0


class StatementTimer:
    """Knows when the current statement of one connection was sent."""

    __slots__ = ("_socket", "sent_at")

    def __init__(self, descriptor: int) -> None:
        """Watch the connection of the socket `descriptor` until `close`."""
        # A duplicate: the number of a closed descriptor may belong to another file by the time it is used.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.sent_at: float | None = None  # None while no statement is under way.
        _watchdog.add(self)

    def close(self) -> None:
        _watchdog.remove(self)
        self._socket.close()

    def end_connection(self) -> None:
        """Make the statement that is under way fail."""
        with suppress(OSError):  # The connection has ended already.
            self._socket.shutdown(socket.SHUT_RDWR)


class Watchdog:
    """The timers of all connections of this process, and a thread while there are any."""

    def __init__(self) -> None:
        self.release_after_fork()

    def release_after_fork(self) -> None:
        """Forget the parent's connections, which this process must not end; its thread does not run here."""
        self._lock = threading.Lock()
        self._timers: set[StatementTimer] = set()
        self._thread: threading.Thread | None = None

    def add(self, timer: StatementTimer) -> None:
        with self._lock:
            self._timers.add(timer)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-watchdog", daemon=True)
                thread.start()
                self._thread = thread

    def remove(self, timer: StatementTimer) -> None:
        with self._lock:
            self._timers.discard(timer)

    def end_overdue(self, now: float) -> None:
        """End the connections whose statement was sent too long before `now`."""
        with self._lock:
            for timer in self._timers:
                sent_at = timer.sent_at
                if sent_at is not None and now - sent_at > limits.ANSWER_SECONDS_MAX:
                    timer.end_connection()

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_SECONDS)
            self.end_overdue(time.monotonic())
            with self._lock:
                if not self._timers:
                    self._thread = None
                    return


_watchdog: Final = Watchdog()
os.register_at_fork(after_in_child=_watchdog.release_after_fork)
