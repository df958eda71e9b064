"""Events: what happened to messages, mail and leases, told to the session log in bulk, off the path of whoever made
it happen.

A caller leaves the note of what it did, which costs a fraction of a microsecond; a thread encodes what has gathered
every tenth of a second. Like everything in session logs this is BEST_EFFORT: what a crash finds in memory is lost, and
what no log takes is dropped with a warning. Whoever made it happen has committed it, and hears nothing of that.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.layers.leases import LEASE_EVENTS
from holdfast.layers.mailboxes.keys import MAIL_EVENTS
from holdfast.layers.queues import text_of
from holdfast.limits import EVENTS_EVERY_SECONDS, EVENTS_MAX
from holdfast.runtime.activity.log import ActivityLog
from holdfast.runtime.activity.rotation import Failures

_logger = logging.getLogger("holdfast.activity")

LOG_KIND = "queues"  # What the session logs of queues are called.
MAIL_KIND = "mail"
LEASE_KIND = "leases"
_encode_lines = msgspec.json.Encoder().encode_lines


class QueueEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What session logs say of a message.

    The attempt names the delivery that an event belongs to, so that a reader can put events in order, and tell two that
    happened from one that is told twice.
    """

    event: str
    queue: str
    id: str
    correlation_id: str
    at_ms: int
    attempt: int = 0  # How often it was delivered so far.
    error: str | None = None  # What a dead letter died of.


class MailEvent(msgspec.Struct, frozen=True):
    """What session logs say of a mail."""

    event: str
    to: str
    id: str
    sender: str
    at_ms: int


class LeaseEvent(msgspec.Struct, frozen=True):
    """What session logs say of somebody who asked for a lease that others had. Nothing is said of the others."""

    event: str  # granted, refused, or gone: whoever asked stopped waiting
    key: str
    owner: str
    waited_ms: int
    at_ms: int


class Events:
    """A thread that begins with the first event and ends with the plane."""

    def __init__(self, log: Callable[[], ActivityLog], session: str) -> None:
        self._log = log
        self._session = session
        self._waiting: deque[tuple[Any, ...]] = deque()  # What happened, where, to what, and when.
        self._lock = threading.Lock()
        self._failures = Failures("Telling session logs what happened")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Something happened: what the notes of a transaction tell, or a `LeaseWaiter`."""
        self._waiting.extend(events)
        if self._thread is None:
            self._start()
        if len(self._waiting) > EVENTS_MAX:
            self.write()  # Whoever makes things happen faster than they can be told of helps to tell.

    def write(self) -> None:
        """Bring what has gathered into the session logs."""
        by_log: defaultdict[tuple[str, str], list[msgspec.Struct]] = defaultdict(list)
        take = self._waiting.popleft
        with self._lock:  # One at a time, so that the order is kept.
            for note in [take() for _ in range(len(self._waiting))]:
                try:
                    event, (universe, name), id = note[:3]
                    if id.__class__ is bytes:
                        by_log[universe, LOG_KIND].append(QueueEvent(event, name, text_of(id), *note[3:]))
                    elif event.startswith(MAIL_EVENTS):
                        what, to = event.removeprefix(MAIL_EVENTS), f"{name}@{universe}"
                        by_log[universe, MAIL_KIND].append(MailEvent(what, to, id, *note[3:]))
                    else:
                        what = event.removeprefix(LEASE_EVENTS)
                        by_log[universe, LEASE_KIND].append(LeaseEvent(what, name, id, *note[3:]))
                except Exception:  # It takes none of the others along.
                    _logger.exception("a note of what happened makes no event, and is dropped")
            for (universe, kind), events in by_log.items():
                try:
                    # In one call; a line of JSON has no break inside.
                    records = _encode_lines(events).splitlines()
                    self._log().session(universe, self._session, kind).accept(records)
                except Exception as error:
                    self._failures.note((universe, kind), error)
                else:
                    self._failures.over((universe, kind))

    def close(self) -> None:
        """Write what is left, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.write()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                thread = threading.Thread(target=self._run, name="holdfast-events", daemon=True)
                with suppress(RuntimeError):  # The process may have no more: they wait for the next one's attempt.
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while not self._stopping.wait(EVENTS_EVERY_SECONDS):
            if self._waiting:
                try:
                    self.write()
                except Exception:
                    _logger.exception("events could not be told; the next ones will be")
