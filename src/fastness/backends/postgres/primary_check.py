"""Tells whether PostgreSQL answers as a primary now, without waiting for a failover to end."""

import select
import threading
import time
from typing import Final

import psycopg
from psycopg import pq

from fastness.backends.postgres.connections import connect_once
from fastness.errors import Unreachable

_SECONDS_MAX: Final = 3
_IS_READ_ONLY: Final = b"SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean"


class PrimaryCheck:
    """A connection of its own, which is opened with the first check. Used by many threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def check(self) -> None:
        """Return if PostgreSQL accepts writes.

        Raises:
            Unreachable: it does not answer, or only as a standby; or an earlier check still waits for its answer.
        """
        if not self._lock.acquire(timeout=_SECONDS_MAX):
            raise Unreachable("PostgreSQL does not answer: an earlier check still waits; try again later")
        try:
            if self._connection is not None:
                try:
                    self._ask(self._connection)
                    return
                except (psycopg.Error, Unreachable):
                    self._close()  # The connection may be of the former primary.
            self._connection = connect_once(self._url, seconds=_SECONDS_MAX)
            try:
                self._ask(self._connection)
            except psycopg.Error as error:
                raise Unreachable(f"PostgreSQL does not answer ({error}); try again later") from error
        except Unreachable:
            self._close()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _ask(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        raw = connection.pgconn
        raw.send_query(_IS_READ_ONLY)
        poller = select.poll()
        poller.register(raw.socket, select.POLLIN)
        deadline = time.monotonic() + _SECONDS_MAX
        while raw.is_busy():
            if not poller.poll(max(deadline - time.monotonic(), 0) * 1_000):
                raise Unreachable(f"PostgreSQL does not answer within {_SECONDS_MAX} s; try again later")
            raw.consume_input()
        answer = raw.get_result()
        if answer is None or answer.status != pq.ExecStatus.TUPLES_OK:
            raise Unreachable(f"PostgreSQL does not answer ({raw.get_error_message().strip()}); try again later")
        if answer.get_value(0, 0) != b"f":
            raise Unreachable("PostgreSQL answers as a standby, or its transactions are read-only; promote a standby")
        while raw.get_result() is not None:
            pass

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
