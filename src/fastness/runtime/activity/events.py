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

from fastness.layers.leases import LeaseEvent
from fastness.layers.mailboxes.keys import MailEvent
from fastness.layers.queues import MessageEvent, format_id
from fastness.limits import EVENTS_FLUSH_SECONDS, EVENTS_MAX
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.activity.rotation import FailureTracker
from fastness.runtime.background import BackgroundRunner, Job, Steps

_logger = logging.getLogger("fastness.activity")

LOG_KIND = "queues"  # The kind of the session logs of queues.
MAIL_KIND = "mail"
LEASE_KIND = "leases"
_encode_lines = msgspec.json.Encoder().encode_lines


LoggedEvent = MessageEvent | MailEvent | LeaseEvent


class MessageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `MessageEvent` in a session log.

    The attempt identifies the delivery that an event belongs to, so that a reader can order events, and can
    distinguish two events from one that was logged twice.
    """

    event: str
    queue: str
    id: str
    correlation_id: str
    at_ms: int
    attempt: int = 0
    error: str | None = None


class MailRecord(msgspec.Struct, frozen=True):
    """A `MailEvent` in a session log."""

    event: str
    to: str
    id: str
    sender: str
    at_ms: int


class LeaseRecord(msgspec.Struct, frozen=True):
    """A `LeaseEvent` in a session log."""

    event: str
    key: str
    owner: str
    waited_ms: int
    at_ms: int


class EventLogger:
    """Logs events in a job, which starts with the first event and ends with the plane."""

    def __init__(self, log: Callable[[], ActivityLog], session: str, background: BackgroundRunner) -> None:
        self._log = log
        self._session = session
        self._waiting: deque[LoggedEvent] = deque()
        self._lock = threading.Lock()
        self._failures = FailureTracker("Writing events to session logs")
        self._background = background
        self._job = Job("the writing of events to session logs", self._run, thread="ticks")

    def add(self, events: Sequence[LoggedEvent]) -> None:
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
                    log, record = _record(event)
                except Exception:  # The other events are still written.
                    _logger.exception("a malformed event was dropped: %r", event)
                else:
                    by_log[log].append(record)
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


def _record(event: LoggedEvent) -> tuple[tuple[str, str], msgspec.Struct]:
    """The universe and the kind of the session log that an event is written to, and its record there."""
    if isinstance(event, MessageEvent):
        universe, queue = event.queue
        id = format_id(event.id)
        message = MessageRecord(event.event, queue, id, event.correlation_id, event.at_ms, event.attempt, event.error)
        return (universe, LOG_KIND), message
    if isinstance(event, MailEvent):
        mail = MailRecord(event.event, str(event.to), event.id, event.sender, event.at_ms)
        return (event.to.universe, MAIL_KIND), mail
    lease = LeaseRecord(event.event, event.lease.key, event.owner, event.waited_ms, event.at_ms)
    return (event.lease.universe, LEASE_KIND), lease
