"""Notifies this process's watches of other processes' commits, with LISTEN and NOTIFY.

The thread and its connection start with the first watch. After a broken connection it listens again and fires every
watch once, because it may have missed notifications. It also does so every few seconds: the connection of another
process may break between its commit and its notification.
"""

import logging
import select
import socket
import threading
import time
from typing import Final

import psycopg

from fastness import limits
from fastness.backends.postgres.connections import connect
from fastness.backends.postgres.notifications import CHANNEL, is_own, notified_ranges
from fastness.errors import FastnessError, Unreachable
from fastness.kv import Watches

_log = logging.getLogger("fastness.listener")
_RECONNECT_SECONDS: Final = 0.5


class Listener:
    """One connection that listens on behalf of the whole process."""

    def __init__(self, url: str, watches: Watches, writer: str) -> None:
        self._url = url
        self._writer = writer
        self._watches = watches
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._listening = threading.Event()
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()  # close() uses it to wake the thread.

    def ensure_listening(self) -> None:
        """Return once the connection listens; no later write is missed.

        Raises:
            Unreachable: the server does not answer.
        """
        if self._listening.is_set():
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fastness-listener", daemon=True)
                thread.start()
                self._thread = thread  # Set after start(), so that a failed start is retried.
        if not self._listening.wait(limits.TRANSACTION_WAIT_SECONDS_MAX):
            raise Unreachable("PostgreSQL does not answer, so watches do not work; try again later")

    def close(self) -> None:
        self._closing.set()
        self._wake.close()
        if self._thread is not None:
            self._thread.join()
        self._woken.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with connect(self._url) as connection:
                    self._listen(connection)
            except Exception as error:  # Of any kind: without the listener, watches would never fire.
                self._listening.clear()
                if not isinstance(error, psycopg.Error | FastnessError):
                    _log.exception("unexpected error while listening to PostgreSQL; reconnecting")
                self._closing.wait(_RECONNECT_SECONDS)

    def _listen(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        connection.execute(f"LISTEN {CHANNEL}")
        self._listening.set()
        self._watches.fire_all()
        poller = select.poll()  # `select.select` supports no descriptors over 1,023, which a busy server has.
        poller.register(connection.fileno(), select.POLLIN)
        poller.register(self._woken.fileno(), select.POLLIN)
        recheck_at = time.monotonic() + limits.WATCH_RECHECK_SECONDS
        while not self._closing.is_set():
            poller.poll(max(recheck_at - time.monotonic(), 0) * 1_000)
            if time.monotonic() >= recheck_at:
                recheck_at = time.monotonic() + limits.WATCH_RECHECK_SECONDS
                self._watches.fire_all()
            for notice in connection.notifies(timeout=0):
                if is_own(notice.payload, self._writer):
                    continue
                ranges = notified_ranges(notice.payload)
                if ranges is None:
                    self._watches.fire_all()
                else:
                    changed, deleted = ranges
                    self._watches.notify((), deleted, changed)
