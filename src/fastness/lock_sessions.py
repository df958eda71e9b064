"""The sessions of ordered locks that this process holds: one for each thread or task that holds locks, and universe.

    first lock granted ──► registered and renewed ──► last lock released: forgotten
                              └──► lost: all of its locks are fenced off, until the caller has released them

A session is registered weakly: its held locks keep it. If a caller drops them without releasing them, the session is no
longer renewed, and ends with its lease.
"""

import asyncio
import os
import socket
import threading
from asyncio.events import _get_running_loop
from functools import cache
from secrets import token_hex
from typing import Any, Final
from weakref import WeakValueDictionary

from fastness.errors import Fenced
from fastness.lease_renewal import HeldLeaseRenewal, LeaseRenewer
from fastness.limits import OWNER_BYTES_MAX
from fastness.wire.locks import LockSession

_ID_BYTES: Final = 16  # As hard to guess as a token.

_Caller = object  # A thread, a task, or a coroutine that runs without a task.


class HeldSession:
    """The session of one caller, which holds at least one claim while it is registered."""

    def __init__(self, sessions: "LockSessions", caller: _Caller, universe: str) -> None:
        self.identity = LockSession(token_hex(_ID_BYTES), universe)
        self.owner = _label(caller)
        self.seconds = 0.0  # The longest lease that its claims have asked for.
        self.expires_ms = 0
        self.unreleased: set[str] = set()  # Claims whose release was not confirmed.
        self._claims: set[str] = set()
        self._sessions = sessions
        self._key = (caller, universe)
        self._renewal: HeldLeaseRenewal | None = None

    @property
    def has_claims(self) -> bool:
        return bool(self._claims)

    @property
    def loss(self) -> Fenced | None:
        """Why its locks are lost; None while they are certainly held. A lost session stays lost."""
        return None if self._renewal is None else self._renewal.loss

    def add(self, claim: str, *, seconds: float, renewed_at: float) -> None:
        """Register a claim that was granted. The lease was requested for `seconds` at `renewed_at`, monotonic."""
        self._claims.add(claim)
        self.seconds = max(self.seconds, seconds)
        if self._renewal is None:
            self._renewal = self._sessions.start(self, self._key, renewed_at)
        else:
            self._renewal.seconds = self.seconds

    def remove(self, claim: str) -> None:
        """Forget a claim, which is to be released. The session ends with its last claim."""
        self._claims.discard(claim)
        if not self._claims and self._renewal is not None:
            self._sessions.end(self, self._key)
            self._renewal.stop()


class LockSessions:
    """The sessions that the callers of one transport hold."""

    def __init__(self, renewer: LeaseRenewer) -> None:
        self._renewer = renewer
        self._sessions: WeakValueDictionary[tuple[_Caller, str], HeldSession] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def find(self, universe: str) -> HeldSession | None:
        """The session of the calling task, or outside of tasks of the thread; None if it holds no locks."""
        return self._find(_task() or threading.current_thread(), universe)

    def find_async(self, universe: str) -> HeldSession | None:
        """The session of the calling task; None if it holds no locks."""
        return self._find(_task() or _NoTask(), universe)

    def find_id(self, universe: str) -> str | None:
        """The id of the caller's session, for the writes that its locks must not exclude.

        Raises:
            Fenced: its locks are lost, so others may have changed what the caller has read under them.
        """
        if not self._sessions:  # Every write of an entity asks.
            return None
        session = self.find(universe)
        if session is None:
            return None
        if session.loss is not None:
            raise session.loss
        return session.identity.id

    def begin(self, universe: str) -> HeldSession:
        """A new session of the calling task or thread, which is registered with its first claim."""
        return HeldSession(self, _task() or threading.current_thread(), universe)

    def begin_async(self, universe: str) -> HeldSession:
        """A new session of the calling task. A coroutine that runs without a task is a caller of its own."""
        return HeldSession(self, _task() or _NoTask(), universe)

    def _find(self, caller: _Caller, universe: str) -> HeldSession | None:
        if self._process != os.getpid():  # A forked child has the parent's threads and sessions only as copies.
            self._sessions, self._lock, self._process = WeakValueDictionary(), threading.Lock(), os.getpid()
        return self._sessions.get((caller, universe))

    def start(self, session: HeldSession, key: tuple[_Caller, str], renewed_at: float) -> HeldLeaseRenewal:
        """Register a session, and renew it from now on."""
        with self._lock:
            self._sessions[key] = session
        return self._renewer.hold(session, session.identity, seconds=session.seconds, renewed_at=renewed_at)

    def end(self, session: HeldSession, key: tuple[_Caller, str]) -> None:
        """Forget a session."""
        with self._lock:
            if self._sessions.get(key) is session:
                del self._sessions[key]


class _NoTask:
    """A coroutine that acquires locks before it runs in a task."""


def _task() -> "asyncio.Task[Any] | None":
    loop = _get_running_loop()
    return None if loop is None else asyncio.current_task(loop)


def _label(caller: _Caller) -> str:
    """The caller as text for lists and error messages."""
    name: Any
    if isinstance(caller, threading.Thread):
        name = f"thread {caller.name}"
    else:
        name = f"task {caller.get_name()}" if isinstance(caller, asyncio.Task) else "a call"
    return f"{name} of process {os.getpid()} on {_host()}".encode(errors="replace")[:OWNER_BYTES_MAX].decode(
        errors="ignore"
    )


@cache
def _host() -> str:
    return socket.gethostname()
