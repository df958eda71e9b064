"""The timeline of a run, from the records of its journal."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

import cbor2
import msgspec
import pytest

from fastness.errors import InvalidArgument, InvalidValue
from fastness.layers import journal_records
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control, DomainEvent, InboxItem, TimerFired
from fastness.wire.run_timeline import Timeline, timeline
from fastness.wire.run_values import decode_value, encode_value
from fastness.wire.runs import CANCEL, CHILD, SIGNAL, START


class Record(NamedTuple):
    kind: str
    value: bytes


def entry(value: Any) -> Record:
    return Record("entry", canonical(value))


def ingress(item: InboxItem) -> Record:
    return Record(*journal_records.split(journal_records.ingress(7, item)))


JOURNAL = [
    entry({"turn": 1_000}),
    ingress(DomainEvent(schema=START, payload=canonical([["q"], {"depth": 2}]))),
    entry(["begin", 1_000, b"seed"]),
    entry(["step", 1_400, 0, "plan", 1_100, ["a"]]),
    entry(["retry", 1_500, 1, "search", 1_450, ["TimeoutError", "slow"], 2_500]),
    entry(["queued", 1_500, 2, "render", "pages", "m-1"]),
    entry(["wait", 1_600, 3, "approval", 9_000]),
    entry(["wait", 1_600, 4, "approval", None]),
    entry(["sleep", 1_600, 5, None, 5_000]),
    entry(["child", 1_600, 6, "audit", "r-1:6"]),
    entry(["put", 1_600, 7, "emails"]),
    entry(["signal", 1_600, 8, "r-2"]),
    entry({"turn": 2_600}),
    ingress(DomainEvent(schema=SIGNAL, key=b"approval", payload=canonical({"by": "ada"}))),
    entry({"turn": 5_000}),
    ingress(TimerFired(timer_id="0.5")),
    entry(["step", 5_200, 2, "render", 5_100, None]),
    entry({"turn": 6_000}),
    ingress(DomainEvent(schema=CHILD, key=b"r-1:6", payload=canonical({"state": "completed", "result": 3}))),
    entry(["failed", 6_100, 1, "search", 6_050, ["ValueError", "no"], 5]),
    ingress(Control(command=CANCEL, payload=b"enough")),
]


def test_what_lasts_has_a_duration_and_what_has_not_ended_is_pending() -> None:
    events = timeline(JOURNAL)
    seen = [(each.at_ms, each.kind, each.name, each.duration_ms, each.is_pending) for each in events]
    assert seen == [
        (1_000, "started", "", None, False),
        (1_100, "step", "plan", 300, False),
        (1_450, "retry", "search", 50, False),
        (1_500, "queued", "render", 3_700, False),
        (1_600, "wait", "approval", 1_000, False),  # The first of two waits gets the only signal.
        (1_600, "wait", "approval", 4_400, False),  # The cancellation ends the second one.
        (1_600, "sleep", "", 3_400, False),
        (1_600, "child", "r-1:6", 4_400, False),
        (1_600, "put", "emails", None, False),
        (1_600, "signal_sent", "r-2", None, False),
        (2_600, "signal", "approval", None, False),
        (5_100, "step", "render", 100, False),
        (6_000, "child_ended", "r-1:6", None, False),
        (6_050, "failed", "search", 50, False),
        (6_000, "cancel", "", None, False),
    ]
    assert events[0].details == {"args": ["q"], "kwargs": {"depth": 2}}
    assert events[2].details == {"error": "TimeoutError: slow", "due_ms": 2_500}
    assert events[10].details == {"value": {"by": "ada"}}
    assert events[12].details == {"state": "completed", "result": 3}
    assert events[-1].details == {"reason": "enough"}


def test_a_signal_ends_a_wait_that_is_recorded_after_it() -> None:
    def signal(value: int) -> Record:
        return ingress(DomainEvent(schema=SIGNAL, key=b"go", payload=canonical(value)))

    found = timeline(
        [
            entry({"turn": 100}),
            signal(1),  # It was consumed at once, so there is no record of a wait for it.
            entry({"turn": 205}),
            signal(2),
            entry(["wait", 200, 1, "go", None]),
            entry(["wait", 210, 2, "go", None]),
        ]
    )
    assert [(each.kind, each.duration_ms, each.is_pending) for each in found] == [
        ("signal", None, False),
        ("signal", None, False),
        ("wait", 5, False),
        ("wait", None, True),
    ]


def test_the_end_of_a_run_leaves_nothing_pending() -> None:
    ended = timeline([*JOURNAL, entry(["end", 7_000, "failed", None, ["ValueError", "no"]])])
    assert not any(each.is_pending for each in ended)
    assert (ended[-1].kind, ended[-1].name, ended[-1].details) == ("ended", "failed", {"error": "ValueError: no"})


def test_a_continued_run_counts_its_timers_again() -> None:
    found = Timeline()
    found.add([entry(["sleep", 10, 1, None, 90]), entry(["continue", 20, b"seed", [[1], {}], []])])
    found.add([entry(["sleep", 30, 1, None, 90]), entry({"turn": 95}), ingress(TimerFired(timer_id="1.1"))])
    assert [(each.kind, each.duration_ms, each.is_pending) for each in found.events] == [
        ("sleep", None, False),
        ("continued", None, False),
        ("sleep", 65, False),
    ]


def test_records_that_are_not_known_are_shown_as_they_are() -> None:
    unknown: list[Any] = [["later", 1], {"else": 1}, 5, ["step"]]
    found = timeline([*map(entry, unknown), Record("snapshot", canonical({"height": 1}))])
    assert [each.details["entry"] for each in found] == unknown


class Colour(StrEnum):
    RED = "red"


@dataclass
class Order:
    id: int
    due: datetime
    parts: list[bytes]


class Report(msgspec.Struct):
    order: Order
    colour: Colour


def test_values_keep_their_types_where_they_are_annotated() -> None:
    report = Report(Order(1, datetime(2026, 1, 2, tzinfo=UTC), [b"\x00\xff"]), Colour.RED)
    data = encode_value(report)
    assert decode_value(data, Report) == report
    assert decode_value(data)["order"]["parts"] == [b"\x00\xff"]
    assert canonical(cbor2.loads(data)) == data
    with pytest.raises(InvalidArgument, match=r"fit its annotation.*colour"):
        decode_value(encode_value({"order": report.order, "colour": "blue"}), Report)
    with pytest.raises(InvalidValue, match="The result cannot be stored"):
        encode_value(object(), "The result")
