"""Writes the events of messages, mail and leases to session logs, in the background.

A caller appends its events to a queue, which costs a fraction of a microsecond; a job encodes and logs the queue ten
times a second. Like all session logs this is BEST_EFFORT: a crash loses events in memory, and events that the log
rejects are dropped with a warning. The callers have already committed, and do not see these errors.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from fastness.layers.leases import LEASE_EVENTS
from fastness.layers.mailboxes.keys import MAIL_EVENTS
from fastness.layers.queues import format_id
from fastness.limits import EVENTS_FLUSH_SECONDS, EVENTS_MAX
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.activity.rotation import FailureTracker
from fastness.runtime.background import BackgroundRunner, Job, Steps
from fastness.runtime.publishing import Event

_logger = logging.getLogger("fastness.activity")

LOG_KIND = "queues"  # The kind of the session logs of queues.
MAIL_KIND = "mail"
LEASE_KIND = "leases"
_encode_lines = msgspec.json.Encoder().encode_lines


class QueueEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a message.

    The attempt identifies the delivery that an event belongs to, so that a reader can order events, and can
    distinguish two events from one that was logged twice.
    """

    event: str
    queue: str
    id: str
    correlation_id: str
    at_ms: int
    attempt: int = 0  # The number of deliveries so far.
    error: str | None = None  # The last error of a dead letter.


class MailEvent(msgspec.Struct, frozen=True):
    """An event of a mail."""

    event: str
    to: str
    id: str
    sender: str
    at_ms: int


class LeaseEvent(msgspec.Struct, frozen=True):
    """The outcome of a request for a lease that another owner held. Immediate grants are not logged."""

    event: str  # granted, refused, or gone (the caller stopped waiting)
    key: str
    owner: str
    waited_ms: int
    at_ms: int


class EventLogger:
    """Logs events in a job, which starts with the first event and ends with the plane."""

    def __init__(self, log: Callable[[], ActivityLog], session: str, background: BackgroundRunner) -> None:
        self._log = log
        self._session = session
        self._waiting: deque[Event] = deque()  # The kind, what it happened to, its id, and details.
        self._lock = threading.Lock()
        self._failures = FailureTracker("Writing events to session logs")
        self._background = background
        self._job = Job("the writing of events to session logs", self._run, thread="ticks")

    def add(self, events: Sequence[Event]) -> None:
        """Queue the events of a committed transaction or of a `LeaseWaiter`."""
        self._waiting.extend(events)
        if not self._job.passes:  # It has not run yet.
            self._background.add(self._job)
        if len(self._waiting) > EVENTS_MAX:
            self.write()  # Back-pressure: a caller that is faster than the job writes the queue itself.

    def write(self) -> None:
        """Write the queued events to the session logs."""
        by_log: defaultdict[tuple[str, str], list[msgspec.Struct]] = defaultdict(list)
        with self._lock:  # One writer at a time keeps the order.
            for event in [self._waiting.popleft() for _ in range(len(self._waiting))]:
                try:
                    kind, (universe, name), id = event[:3]
                    if id.__class__ is bytes:
                        by_log[universe, LOG_KIND].append(QueueEvent(kind, name, format_id(id), *event[3:]))
                    elif kind.startswith(MAIL_EVENTS):
                        kind, to = kind.removeprefix(MAIL_EVENTS), f"{name}@{universe}"
                        by_log[universe, MAIL_KIND].append(MailEvent(kind, to, id, *event[3:]))
                    else:
                        kind = kind.removeprefix(LEASE_EVENTS)
                        by_log[universe, LEASE_KIND].append(LeaseEvent(kind, name, id, *event[3:]))
                except Exception:  # The other events are still written.
                    _logger.exception("a malformed event was dropped: %r", event[:3])
            for (universe, log_kind), events in by_log.items():
                try:
                    # Encoded in one call; a JSON line contains no line break.
                    records = _encode_lines(events).splitlines()
                    self._log().session(universe, self._session, log_kind).accept(records)
                except Exception as error:
                    self._failures.record((universe, log_kind), error)
                else:
                    self._failures.resolve((universe, log_kind))

    def _run(self) -> Steps:
        while True:
            yield EVENTS_FLUSH_SECONDS
            if self._waiting:
                self.write()
