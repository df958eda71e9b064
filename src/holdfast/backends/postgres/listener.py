"""Brings the commits of other processes to this process's watches, by LISTEN and NOTIFY.

The thread and its connection start with the first watch. After a broken connection it listens anew and then fires
every watch once: whatever was notified in between is unknown.
"""

import threading

import psycopg

from holdfast import limits
from holdfast.backends.postgres.sessions import CHANNEL, connect, notified_ranges
from holdfast.errors import HoldfastError, Unreachable
from holdfast.kv import Watches

_CHECK_SECONDS = 0.5  # How long closing may have to wait for the thread.


class Listener:
    """One connection that listens for everybody in this process."""

    def __init__(self, url: str, watches: Watches) -> None:
        self._url = url
        self._watches = watches
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._listening = threading.Event()
        self._closing = threading.Event()

    def ensure_listening(self) -> None:
        """Return once notifications arrive; a write from now on cannot be missed.

        Raises:
            Unreachable: the server does not answer.
        """
        if self._listening.is_set():
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-listener", daemon=True)
                self._thread.start()
        if not self._listening.wait(limits.TURN_WAIT_SECONDS_MAX):
            raise Unreachable("PostgreSQL does not answer, so nothing can be watched; try again later")

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with connect(self._url) as connection:
                    self._listen(connection)
            except (psycopg.Error, HoldfastError):
                self._listening.clear()
                self._closing.wait(_CHECK_SECONDS)

    def _listen(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        connection.execute(f"LISTEN {CHANNEL}")
        self._listening.set()
        self._watches.fire_all()
        while not self._closing.is_set():
            for notice in connection.notifies(timeout=_CHECK_SECONDS):
                ranges = notified_ranges(notice.payload)
                if ranges is None:
                    self._watches.fire_all()
                else:
                    self._watches.notify((), ranges)
