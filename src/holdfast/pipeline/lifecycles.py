"""Lifecycles: what session logs tell of a message or a mail, event by event, folded into one row. No Spark in it.

    put ──► leased ──► acked                         stored ──► delivered ──► confirmed
              │ ▲                                       └───────────┴───────► expired
              ▼ │                                 (whoever waits may be outlived, or purged)
            nacked, deferred, expired ──► dead-lettered ──► redriven ──► leased …

Session logs are BEST_EFFORT: events may be lost with a crash, come from several files in any order, and a line may be
there twice. So a fold looks at the set of events, never at their order. An event of a message names the delivery that
it belongs to, which puts events in order whatever clocks say, and shows of which deliveries nothing else is known. What
was not told stays None: a row claims less than what happened, and never more.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from holdfast.pipeline.schemas import MAIL, MESSAGES

AT_MS_MAX: Final = 253_402_300_800_000  # The year 10000, where timestamps of Python end: later ones are nonsense.


class Event(NamedTuple):
    """Something that happened to a message or a mail. Two that are equal are one that is told twice."""

    event: str
    at_ms: int
    attempt: int | None = None  # Which delivery of a message; None in old logs, and where there was none yet.
    error: str | None = None


class Message(NamedTuple):
    """A row of `messages`, without what names the message."""

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


class Mail(NamedTuple):
    """A row of `mail`, without what names the mail."""

    stored_ms: int | None
    delivered_ms: int | None
    ended_ms: int | None
    outcome: str
    wait_ms: int | None


class MessageGroup(NamedTuple):
    """All that is told of a message of one queue."""

    universe: str
    queue: str
    id: str
    correlation_id: str | None
    events: Collection[Event]
    known: str | None = None  # The error of a dead letter that is still there; logs of older versions do not tell it.


class MailGroup(NamedTuple):
    """All that is told of the mails that one sender sent to one recipient under one id."""

    universe: str
    recipient: str
    sender: str
    id: str
    events: Collection[Event]


def message(events: Collection[Event]) -> Message:
    """What became of a message of one queue."""
    told = _in_order({event for event in events if event.event in _STEPS and 0 <= event.at_ms < AT_MS_MAX})
    last = told[-1] if told else None
    outcome = "unknown" if last is None else _OUTCOMES[last.event]
    put_ms = next((event.at_ms for event in told if event.event == "put"), None)
    leases = {event.attempt: event.at_ms for event in reversed(told) if event.event == "leased"}
    deliveries = {event.attempt for event in told if event.event in _OF_A_DELIVERY}
    # A message that was put is delivered for the first time by attempt 1; a dead letter comes with those that it had.
    first = 1 if put_ms is not None else min(leases, key=lambda attempt: attempt or 0, default=None)
    ended_ms = last.at_ms if last is not None and outcome in _ENDED else None
    names = [event.event for event in told]
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
        wait_ms=_between(put_ms, leases.get(1)),
        service_ms=_between(leases.get(last.attempt), ended_ms) if last is not None and outcome in _SERVED else None,
    )


def mails(events: Collection[Event]) -> list[Mail]:
    """What became of the mails that one sender sent to one recipient under one id, in order.

    That is one mail, as a rule. Once it is gone its id is free, and whoever sends it again sends another one.
    """
    told = {event for event in events if event.event in _MAIL_STEPS and 0 <= event.at_ms < AT_MS_MAX}
    begins = sorted({event.at_ms for event in told if event.event == "stored"})
    lives: list[list[Event]] = [[] for _ in begins] or [[]]
    for event in told:
        later = sum(begin <= event.at_ms for begin in begins)
        lives[max(later, 1) - 1].append(event)
    return [_mail(life) for life in lives if life]


def message_rows(groups: Sequence[MessageGroup]) -> pa.RecordBatch:
    """Rows of `messages`."""
    rows = [_completed(message(group.events), group.known) for group in groups]
    return _batch(MESSAGES.schema, MessageGroup, groups, Message, rows)


def mail_rows(groups: Sequence[MailGroup]) -> pa.RecordBatch:
    """Rows of `mail`."""
    lives = [(group, mail) for group in groups for mail in mails(group.events)]
    return _batch(MAIL.schema, MailGroup, [group for group, _ in lives], Mail, [mail for _, mail in lives])


def _completed(folded: Message, known: str | None) -> Message:
    return folded._replace(error=folded.error or known) if folded.outcome == "dead" else folded


def _in_order(events: set[Event]) -> list[Event]:
    """The events in the order in which they happened; each that belongs to a delivery says to which."""
    if any(not event.attempt for event in events if event.event in _OF_A_DELIVERY or event.event == "redriven"):
        return _numbered(events)
    return sorted(events, key=lambda event: (event.event in _FINAL, event.attempt or 0, *_tie(event)))


def _numbered(events: set[Event]) -> list[Event]:
    """The same for logs that do not name deliveries, by the clock: each lease is the next delivery."""
    ordered, attempt = list[Event](), 0
    for event in sorted(events, key=lambda event: (event.event in _FINAL, event.at_ms, *_tie(event))):
        attempt = max(attempt + (event.event == "leased"), event.event in _OF_A_DELIVERY)
        ordered.append(event._replace(attempt=attempt))
    return ordered


def _tie(event: Event) -> tuple[Any, ...]:
    return _STEPS[event.event], event.event, event.at_ms, event.attempt or 0, event.error or ""


def _mail(events: Collection[Event]) -> Mail:
    at_ms = {what: min(times) for what in _MAIL_STEPS if (times := [e.at_ms for e in events if e.event == what])}
    # Whatever comes later in this order can only have happened after what comes before it, whatever was told of that.
    last = max(at_ms, key=lambda what: _MAIL_STEPS[what])
    stored_ms, delivered_ms = at_ms.get("stored"), at_ms.get("delivered")
    return Mail(
        stored_ms=stored_ms,
        delivered_ms=delivered_ms,
        ended_ms=at_ms[last] if last in _MAIL_FINAL else None,
        outcome="waiting" if last == "stored" else last,
        wait_ms=_between(stored_ms, delivered_ms),
    )


def _between(begin_ms: int | None, end_ms: int | None) -> int | None:
    """How long something took; None if nobody knows, or a clock was set back meanwhile."""
    return None if begin_ms is None or end_ms is None or end_ms < begin_ms else end_ms - begin_ms


def _batch(
    schema: pa.Schema,
    group: type[NamedTuple],
    groups: Sequence[tuple[Any, ...]],
    fold: type[NamedTuple],
    folds: Sequence[tuple[Any, ...]],
) -> pa.RecordBatch:
    """Columns in the order of the schema, where a moment that a fold calls `…_ms` is called `…_at`."""
    named = dict(zip(group._fields, _columns(groups, group), strict=True))
    named |= zip(fold._fields, _columns(folds, fold), strict=True)
    columns = []
    for field in schema:
        if field.name in named:
            columns.append(pa.array(named[field.name], field.type))
        else:
            columns.append(pa.array(named[field.name.removesuffix("_at") + "_ms"], pa.int64()).cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _columns(rows: Sequence[tuple[Any, ...]], row: type[NamedTuple]) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * len(row._fields)


# Within one delivery, what happens later has the higher number.
_STEPS: Final = {
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
}
_OF_A_DELIVERY: Final = frozenset(("leased", "deferred", "nacked", "expired", "dead-lettered", "acked"))
_FINAL: Final = frozenset(("acked", "outlived", "purged"))  # No message comes back from these; dead letters may.
_OUTCOMES: Final = {
    **dict.fromkeys(("put", "deferred", "nacked", "expired", "redriven"), "waiting"),
    "leased": "leased",
    "acked": "acked",
    "dead-lettered": "dead",
    "outlived": "outlived",
    "purged": "purged",
}
_ENDED: Final = frozenset(("acked", "dead", "outlived", "purged"))
_SERVED: Final = frozenset(("acked", "dead"))  # Somebody had it when it ended.
_MAIL_STEPS: Final = {"rejected": 0, "stored": 1, "delivered": 2, "expired": 3, "confirmed": 4}
_MAIL_FINAL: Final = frozenset(("rejected", "expired", "confirmed"))
