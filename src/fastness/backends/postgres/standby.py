"""Reads that may be stale, from a standby.

A standby replays the primary's log a little later than the primary writes it. What it shows is consistent: a snapshot
of the primary as it was a moment ago. A read goes to the primary if no standby answers, or if all connections to it are
in use: staleness is allowed, never required.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Literal

from fastness import limits
from fastness.backends.postgres.locked_view import SnapshotView
from fastness.backends.postgres.retries import Conflicted, Disconnected
from fastness.backends.postgres.sessions import Session
from fastness.clock import Clock, IdSource
from fastness.errors import Unreachable
from fastness.kv import Database, ReplayedPosition, Result, Transaction, Work
from fastness.kv.execution import check_tier, run
from fastness.kv.value_cipher import ValueCipher
from fastness.kv.wrapped_database import WrappedDatabase
from fastness.tiers import Tier

ReadFrom = Literal["primary", "standby"]

_STATUS_SECONDS: Final = 1.0  # How often the replayed position is asked for, after a read.


class StandbyReads(WrappedDatabase):
    """A key space whose reads come from a standby; everything else goes to the primary."""

    def __init__(
        self,
        primary: Database,
        url: str,
        *,
        clock: Clock | None,
        ids: IdSource,
        writer: str,
        cipher: ValueCipher,
        check_usable: Callable[[], None],
    ) -> None:
        """`check_usable` raises if the caller must not use the primary, and so not this either."""
        super().__init__(primary)
        self._check_usable = check_usable
        self._url = url
        self._clock = clock
        self._ids = ids
        self._writer = writer
        self._cipher = cipher
        self._slots = threading.BoundedSemaphore(limits.STANDBY_READERS_MAX)
        self._lock = threading.Lock()
        self._idle: list[_StandbySession] = []
        self._absent_until = 0.0  # No standby has answered: until then, it is not tried again.
        self._position = ReplayedPosition()
        self._asked_at = 0.0
        self._closed = False

    @property
    def replayed_position(self) -> ReplayedPosition:
        """Of the standby, as of a recent read."""
        return self._position

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        check_tier(tier)
        self._check_usable()
        session = self._take()
        if session is not None:
            try:
                return self._read(session, work, args, kwargs)
            except _StandbyFailed:
                pass
            finally:
                self._give_back(session)
        return self._inner.read(work, *args, tier=tier, **kwargs)

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        return await asyncio.to_thread(self.read, work, *args, tier=tier, **kwargs)

    def close(self) -> None:
        """Close the connections to the standby, and not the primary."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _read(
        self, session: "_StandbySession", work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Result:
        session.start(b"read", durable=False)  # What a standby has replayed is on its disk.
        view = SnapshotView(session, may_lag=True)
        tx = Transaction(view, clock=self._clock or view, ids=self._ids, writable=False, writer=self._writer)
        tx.defaults = self._inner.defaults
        try:
            result = run(tx, work, args, kwargs)
        except (Conflicted, Disconnected):
            raise _StandbyFailed from None
        except Exception:
            if session.failure is not None:
                raise _StandbyFailed from None
            raise
        finally:
            session.rollback()
        if session.failure is not None:
            raise _StandbyFailed  # The function may have caught it.
        return result

    def _take(self) -> "_StandbySession | None":
        if not self._slots.acquire(blocking=False):
            return None
        try:
            with self._lock:
                session = self._idle.pop() if self._idle else None
                is_absent = self._closed or time.monotonic() < self._absent_until
            if session is None and not is_absent:
                session = self._open()
        except BaseException:
            self._slots.release()
            raise
        if session is None:
            self._slots.release()
        return session

    def _open(self) -> "_StandbySession | None":
        try:
            return _StandbySession(self._url, self._cipher)
        except (Unreachable, Conflicted, Disconnected):
            self._absent_until = time.monotonic() + limits.STANDBY_PAUSE_SECONDS
            self._position = ReplayedPosition()
            return None

    def _give_back(self, session: "_StandbySession") -> None:
        try:
            self._ask_position(session)
            with self._lock:
                if session.is_usable and session.is_current and not self._closed:
                    self._idle.append(session)
                    return
            session.close()
        finally:
            self._slots.release()

    def _ask_position(self, session: "_StandbySession") -> None:
        now = time.monotonic()
        if now - self._asked_at < _STATUS_SECONDS or not session.is_usable:
            return
        self._asked_at = now
        try:
            self._position = session.replayed_position()
        except (Conflicted, Disconnected):
            return
        if not self._position.is_standby:  # It was promoted: the next connection goes to another one.
            session.close()


class _StandbyFailed(Exception):
    """The standby did not serve a read; the primary can."""


class _StandbySession(Session):
    """A connection to a standby."""

    def __init__(self, url: str, cipher: ValueCipher) -> None:
        super().__init__(url, cipher, reading=True, standby=True)
        self._until = time.monotonic() + limits.STANDBY_SESSION_SECONDS

    @property
    def is_current(self) -> bool:
        """Whether the server need not be chosen again: another one may have become the standby."""
        return time.monotonic() < self._until

    def replayed_position(self) -> ReplayedPosition:
        """How far the server has replayed the log."""
        self.start(b"read", durable=False)
        try:
            (row,) = self.run((b"position", []))
        finally:
            self.rollback()
        lag = row.get_value(0, 2)
        return ReplayedPosition(
            is_standby=row.get_value(0, 0) == b"\x01",
            position=(row.get_value(0, 1) or b"").decode(),
            lag_ms=None if lag is None else int.from_bytes(lag, "big", signed=True),
            measured_ms=int.from_bytes(row.get_value(0, 3) or b"", "big"),
        )
