"""Lifecycles: folds the events of a message or a mail into one row. No Spark here.

    put ──► leased ──► acked                         stored ──► delivered ──► confirmed
              │ ▲                                       └───────────┴───────► expired
              ▼ │                                 (a waiting message may also be outlived or purged)
            nacked, deferred, expired ──► dead-lettered ──► redriven ──► leased …

Session logs are BEST_EFFORT: a crash may lose events, they come from several files in any order, and a line may be
duplicated. So a fold depends on the set of events, never on their order. A message event names its delivery, which
orders events independently of clocks, and shows the deliveries of which nothing else is known. Unknown values stay
None: a row may state less than what happened, never more.

A row has the events that it was folded from, so that later events can be added without reading the logs again.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from fastness.limits import RESTORE_CLOCK_SKEW_MS
from fastness.pipeline.schemas import MAIL, MESSAGES

AT_MS_MAX: Final = 253_402_300_800_000  # The year 10000, where Python timestamps end.


class Event(NamedTuple):
    """An event of a message or a mail. Equal events are duplicates."""

    event: str
    at_ms: int
    attempt: int = 0  # The deliveries of a message so far.
    error: str | None = None


class Message(NamedTuple):
    """A row of `messages`, without its key columns."""

    put_ms: int | None
    first_leased_ms: int | None
    ended_ms: int | None
    attempts: int
    nacks: int
    expiries: int
    redrives: int
    outcome: str
    error: str | None
    wait_ms: int | None
    service_ms: int | None
    logged: bool = True  # False: only the plane knows it.
    settled: bool = False  # Only new events can change it; a state of the plane cannot.


class Mail(NamedTuple):
    """A row of `mail`, without its key columns."""

    stored_ms: int | None
    delivered_ms: int | None
    ended_ms: int | None
    outcome: str
    wait_ms: int | None


class PresentMessage(NamedTuple):
    """A message that the plane has."""

    universe: str
    queue: str
    id: str
    state: str  # dead, leased, ready, delayed or blocked
    created_ms: int
    attempts: int
    died_ms: int = 0
    error: str | None = None  # The last error of a dead letter.
    is_letter: bool = False  # A dead letter in its dead letter queue, where no log has its put.


class Measured(NamedTuple):
    """When the plane was measured, and the universes of which all messages are known."""

    at_ms: int
    universes: frozenset[str]


class MessageGroup(NamedTuple):
    """All events of a message in one queue."""

    universe: str
    queue: str
    id: str
    correlation_id: str | None
    events: Collection[Event]
    present: PresentMessage | None = None  # The message in the plane.


class MailGroup(NamedTuple):
    """All events of the mails from one sender to one recipient under one id."""

    universe: str
    recipient: str
    sender: str
    id: str
    events: Collection[Event]


def message(events: Collection[Event]) -> Message:
    """Fold the events of a message in one queue."""
    known_events = _sort_events(
        {event for event in events if event.event in _EVENT_ORDER and 0 <= event.at_ms < AT_MS_MAX}
    )
    last = known_events[-1] if known_events else None
    outcome = "unknown" if last is None else _OUTCOMES[last.event]
    put_ms = next((event.at_ms for event in known_events if event.event == "put"), None)
    leases = {event.attempt: event.at_ms for event in reversed(known_events) if event.event == "leased"}
    deliveries = {event.attempt for event in known_events if event.event in _DELIVERY_EVENTS}
    # An enqueued message is first delivered by attempt 1; a dead letter keeps its attempts.
    first = 1 if put_ms is not None else min(leases, default=0)
    ended_ms = last.at_ms if last is not None and outcome in _ENDED else None
    names = [event.event for event in known_events]
    return Message(
        put_ms=put_ms,
        first_leased_ms=leases.get(first),
        ended_ms=ended_ms,
        attempts=len(deliveries),
        nacks=names.count("nacked"),
        expiries=names.count("expired"),
        redrives=names.count("redriven"),
        outcome=outcome,
        error=last.error if last is not None and outcome == "dead" else None,
        wait_ms=_duration_ms(put_ms, leases.get(1)),
        service_ms=_duration_ms(leases.get(last.attempt), ended_ms)
        if last is not None and outcome in _SERVED
        else None,
    )


def mails(events: Collection[Event]) -> list[Mail]:
    """Fold the events of the mails from one sender to one recipient under one id, in order.

    Usually that is one mail. Once it has ended, its id may be used again.
    """
    return [_mail(lifetime) for lifetime in _lifetimes(events)]


def _lifetimes(events: Collection[Event]) -> list[list[Event]]:
    """The known events of each mail."""
    known_events = {event for event in events if event.event in _MAIL_EVENT_ORDER and 0 <= event.at_ms < AT_MS_MAX}
    begins = sorted({event.at_ms for event in known_events if event.event == "stored"})
    lifetimes: list[list[Event]] = [[] for _ in begins] or [[]]
    for event in known_events:
        later = sum(begin <= event.at_ms for begin in begins)
        lifetimes[max(later, 1) - 1].append(event)
    return [lifetime for lifetime in lifetimes if lifetime]


def message_rows(groups: Sequence[MessageGroup], measured: Measured | None = None) -> pa.RecordBatch:
    """One row of `messages` per group; with a measurement, compared with the plane."""
    rows = [_settle(message(group.events), group, measured) for group in groups]
    return _batch(MESSAGES.schema, MessageGroup, groups, Message, rows, events=[group.events for group in groups])


def mail_rows(groups: Sequence[MailGroup]) -> pa.RecordBatch:
    """One or more rows of `mail` per group, each with its own events."""
    lifetimes = [(group, lifetime) for group in groups for lifetime in _lifetimes(group.events)]
    own = [group for group, _ in lifetimes]
    events = [lifetime for _, lifetime in lifetimes]
    return _batch(MAIL.schema, MailGroup, own, Mail, [_mail(lifetime) for lifetime in events], events=events)


def decode_events(stored: bytes) -> list[Event]:
    """The events of a stored row."""
    return _decode(stored)


def events_before(stored: bytes, before_ms: int) -> list[Event]:
    """The events of a stored row from before a time, and of the following minutes: clocks of nodes differ."""
    return [event for event in _decode(stored) if event.at_ms < before_ms + RESTORE_CLOCK_SKEW_MS]


def _settle(folded: Message, group: MessageGroup, measured: Measured | None) -> Message:
    is_ended = folded.outcome in _FINAL_OUTCOMES
    is_settled = is_ended or (folded.outcome not in _OPEN and group.present is None)
    return _reconcile(folded, group, measured)._replace(settled=is_settled)


def _reconcile(folded: Message, group: MessageGroup, measured: Measured | None) -> Message:
    """What the events say, unless the plane shows that some are missing.

    Events after the measurement count. What has ended in the logs has ended.
    """
    present = group.present
    if present is not None and present.state == "dead" and folded.outcome == "dead":
        return folded._replace(error=folded.error or present.error)
    if measured is None or folded.outcome in _FINAL_OUTCOMES:
        return folded
    if any(event.at_ms >= measured.at_ms for event in group.events if event.at_ms < AT_MS_MAX):
        return folded
    if present is not None:
        return _as_present(folded, present, is_logged=bool(group.events))
    if folded.outcome in _OPEN and group.universe in measured.universes:
        return folded._replace(outcome="unknown")
    return folded


def _as_present(folded: Message, present: PresentMessage, *, is_logged: bool) -> Message:
    is_dead = present.state == "dead"
    return folded._replace(
        put_ms=folded.put_ms if is_logged else present.created_ms,
        ended_ms=present.died_ms or None if is_dead else None,
        attempts=max(folded.attempts, present.attempts),
        outcome="dead" if is_dead else "leased" if present.state == "leased" else "waiting",
        error=present.error if is_dead else None,
        service_ms=None,
        logged=is_logged,
    )


def _sort_events(events: set[Event]) -> list[Event]:
    """The events in the order in which they happened, each with its delivery."""
    if any(not event.attempt for event in events if event.event in _DELIVERY_EVENTS or event.event == "redriven"):
        return _number_deliveries(events)
    return sorted(events, key=lambda event: (event.event in _FINAL, event.attempt, *_tie_breaker(event)))


def _number_deliveries(events: set[Event]) -> list[Event]:
    """The same if a redrive lets the deliveries begin anew, ordered by time: each lease starts the next delivery."""
    ordered, attempt = list[Event](), 0
    for event in sorted(events, key=lambda event: (event.event in _FINAL, event.at_ms, *_tie_breaker(event))):
        attempt = max(attempt + (event.event == "leased"), event.event in _DELIVERY_EVENTS)
        ordered.append(event._replace(attempt=attempt))
    return ordered


def _tie_breaker(event: Event) -> tuple[Any, ...]:
    return _EVENT_ORDER[event.event], event.event, event.at_ms, event.attempt, event.error or ""


def _mail(events: Collection[Event]) -> Mail:
    at_ms = {
        event_name: min(times)
        for event_name in _MAIL_EVENT_ORDER
        if (times := [e.at_ms for e in events if e.event == event_name])
    }
    # A later step implies that the earlier ones happened, whether they were logged or not.
    last = max(at_ms, key=lambda event_name: _MAIL_EVENT_ORDER[event_name])
    stored_ms, delivered_ms = at_ms.get("stored"), at_ms.get("delivered")
    return Mail(
        stored_ms=stored_ms,
        delivered_ms=delivered_ms,
        ended_ms=at_ms[last] if last in _MAIL_FINAL else None,
        outcome="waiting" if last == "stored" else last,
        wait_ms=_duration_ms(stored_ms, delivered_ms),
    )


def _stored_order(event: Event) -> tuple[Any, ...]:
    """An order of all events, so that equal sets are stored as equal bytes."""
    return (*event[:3], event.error is not None, event.error or "")


def _duration_ms(begin_ms: int | None, end_ms: int | None) -> int | None:
    """The duration; None if unknown, or if a clock was set back."""
    return None if begin_ms is None or end_ms is None or end_ms < begin_ms else end_ms - begin_ms


def _batch(
    schema: pa.Schema,
    group: type[NamedTuple],
    groups: Sequence[tuple[Any, ...]],
    fold: type[NamedTuple],
    folds: Sequence[tuple[Any, ...]],
    *,
    events: Sequence[Collection[Event]],
) -> pa.RecordBatch:
    """Columns in the order of the schema. A time that a fold names `…_ms` is the column `…_at`."""
    named = dict(zip(group._fields, _columns(groups, group), strict=True))
    named |= zip(fold._fields, _columns(folds, fold), strict=True)
    named["events"] = [_encode(sorted(set(each), key=_stored_order)) for each in events]
    columns = []
    for field in schema:
        if field.name in named:
            columns.append(pa.array(named[field.name], field.type))
        else:
            columns.append(pa.array(named[field.name.removesuffix("_at") + "_ms"], pa.int64()).cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _columns(rows: Sequence[tuple[Any, ...]], row: type[NamedTuple]) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * len(row._fields)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Event]).decode

# Within one delivery, later events have higher numbers.
_EVENT_ORDER: Final = {
    "put": 0,
    "leased": 1,
    "deferred": 2,
    "nacked": 2,
    "expired": 2,
    "dead-lettered": 3,
    "redriven": 4,
    "acked": 5,
    "outlived": 5,
    "purged": 5,
    "cancelled": 5,
    "moved": 5,
}
MESSAGE_EVENTS: Final = tuple(_EVENT_ORDER)  # The events that a fold knows.
_DELIVERY_EVENTS: Final = frozenset(("leased", "deferred", "nacked", "expired", "dead-lettered", "acked"))
_FINAL: Final = frozenset(("acked", "outlived", "purged", "cancelled", "moved"))  # A dead letter may be redriven.
_OUTCOMES: Final = {
    **dict.fromkeys(("put", "deferred", "nacked", "expired", "redriven"), "waiting"),
    "leased": "leased",
    "acked": "acked",
    "dead-lettered": "dead",
    "outlived": "outlived",
    "purged": "purged",
    "cancelled": "purged",
    "moved": "purged",
}
_OPEN: Final = frozenset(("waiting", "leased"))
_FINAL_OUTCOMES: Final = frozenset(("acked", "outlived", "purged"))
_ENDED: Final = frozenset(("acked", "dead", "outlived", "purged"))
_SERVED: Final = frozenset(("acked", "dead"))  # It was leased when it ended.
_MAIL_EVENT_ORDER: Final = {"rejected": 0, "stored": 1, "delivered": 2, "expired": 3, "confirmed": 4}
_MAIL_FINAL: Final = frozenset(("rejected", "expired", "confirmed"))
