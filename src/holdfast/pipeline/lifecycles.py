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

from collections.abc import Collection, Iterator, Sequence
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
    counts = [sum(event.event == what for event in told) for what in ("nacked", "expired", "redriven")]
    return Message(
        put_ms=put_ms,
        first_leased_ms=leases.get(first),
        ended_ms=ended_ms,
        attempts=len(deliveries),
        nacks=counts[0],
        expiries=counts[1],
        redrives=counts[2],
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


def message_rows(groups: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of `messages` from a batch of (universe, queue, id, correlation_id, events, known).

    `known` is the error of a dead letter that is still there; logs of older versions do not tell it.
    """
    known = groups.column("known").to_pylist()
    rows = [
        folded._replace(error=folded.error or error) if folded.outcome == "dead" else folded
        for folded, error in zip(map(message, _events(groups.column("events"))), known, strict=True)
    ]
    folded = Message(*zip(*rows, strict=True)) if rows else Message(*[()] * len(Message._fields))  # type: ignore[arg-type]
    named = {name: groups.column(name) for name in ("universe", "queue", "id", "correlation_id")}
    return _batch(MESSAGES.schema, named, folded._asdict())


def mail_rows(groups: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of `mail` from a batch of (universe, recipient, sender, id, events)."""
    rows = [(n, mail) for n, events in enumerate(_events(groups.column("events"))) for mail in mails(events)]
    folded = Mail(*zip(*(mail for _, mail in rows), strict=True)) if rows else Mail(*[()] * len(Mail._fields))  # type: ignore[arg-type]
    places = pa.array([n for n, _ in rows], pa.int64())
    named = {name: groups.column(name).take(places) for name in ("universe", "recipient", "sender", "id")}
    return _batch(MAIL.schema, named, folded._asdict())


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


def _events(column: pa.ListArray) -> Iterator[list[Event]]:
    """The events of each row. A column at a time, because objects of Arrow are slow to make one by one."""
    structs = column.flatten()
    names = structs.type.names if hasattr(structs.type, "names") else [field.name for field in structs.type]
    parts = {name: structs.field(name).to_pylist() for name in names}
    nothing: list[None] = [None] * len(structs)
    events = list(
        map(Event, parts["event"], parts["at_ms"], parts.get("attempt", nothing), parts.get("error", nothing))
    )
    end = 0
    for length in column.value_lengths().to_pylist():
        begin, end = end, end + (length or 0)
        yield events[begin:end]


def _batch(schema: pa.Schema, named: dict[str, Any], folded: dict[str, Sequence[Any]]) -> pa.RecordBatch:
    """Columns in the order of the schema, where a moment that a fold calls `…_ms` is called `…_at`."""
    columns = []
    for field in schema:
        if field.name in named:
            columns.append(named[field.name])
        elif field.name in folded:
            columns.append(pa.array(folded[field.name], field.type))
        else:
            moments = pa.array(folded[field.name.removesuffix("_at") + "_ms"], pa.int64())
            columns.append(moments.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


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
