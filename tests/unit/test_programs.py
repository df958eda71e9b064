"""Programs: what they see, what they may emit, and that a replay sees the same."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import cbor2
import pytest

from fastness import Event, HostApp, InboundMessage, InboxItem, Program, TurnContext
from fastness.errors import (
    BatchTooLarge,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    PayloadTooLarge,
    TransactionEnded,
)
from fastness.hosts.programs import call_id_of, event_of, ingress_of, intent_hash, opened, opening
from fastness.layers import journal_records
from fastness.limits import EFFECT_PARAMS_BYTES_MAX, EMITTED_BYTES_MAX, EMITTED_MAX, INBOX_REQUESTS_MAX
from fastness.wire.inboxes import Control, DomainEvent, EffectReceipt, TimerFired
from fastness.wire.restores import Entry

NOW_MS = 1_700_000_000_123
ITEMS: list[InboxItem] = [
    DomainEvent(schema="order", payload=b'{"n":1}', key=b"k"),
    EffectReceipt(intent_hash=intent_hash(b"w" * 16, 17, 2), effect_kind="charge", adapter_id="a", signature=b""),
    EffectReceipt(intent_hash=b"other", effect_kind="charge", adapter_id="a", signature=b"", error="it is dead"),
    InboundMessage(inbox_name="mail", headers={"id": "7", "from": "ada@main"}, payload=b"1"),
    TimerFired(timer_id="reminder"),
    Control(command="go"),
]


def record(state: Any, event: Event, context: TurnContext) -> Any:
    """A program that returns everything that it was given, in the order in which it was given it."""
    called = context.call("charge")
    seen = [event.kind, event.name, event.payload, event.key, event.error, list(event.headers.items())]
    return [*(state or []), [*seen, event.call_id, event.height, event.sequence, context.now.isoformat(), called]]


def test_a_replay_of_the_journal_sees_what_the_program_saw() -> None:
    """The journal sorts the fields of a record; what a program sees must not depend on that."""
    reducer = Program("record", record).reducer
    live = opened(None, NOW_MS)
    journal = [Entry(10, "entry", cbor2.loads(opening(NOW_MS)))]
    for height, item in enumerate(ITEMS, 11):
        live, _ = reducer.fold(live, event_of(height, ingress_of(height * 2, item, item.payload)))
        kind, value = journal_records.split(journal_records.ingress(height * 2, item))
        journal.append(Entry(height, kind, cbor2.loads(value)))
    journal += [Entry(20, "entry", {"aside": 5}), Entry(21, "entry", "of a user"), Entry(22, "snapshot", {"height": 1})]
    replayed = None
    for entry in journal:
        replayed = reducer(replayed, entry)
    assert replayed == live
    assert [seen[:7] for seen in live["state"]] == [
        ["domain_event", "order", b'{"n":1}', b"k", None, [], None],
        ["receipt", "charge", b"", None, None, [], "17.2"],
        ["receipt", "charge", b"", None, "it is dead", [], None],
        ["inbox", "mail", b"1", None, None, [("from", "ada@main"), ("id", "7")], None],
        ["timer_fired", "reminder", b"", None, None, [], None],
        ["control", "go", b"", None, None, [], None],
    ]
    assert live["state"][0][7:] == [11, 22, "2023-11-14T22:13:20.123000+00:00", "11.0"]


def test_events_are_recognised_by_their_kind_and_name() -> None:
    receipt, timer = Event(kind="receipt", name="charge"), Event(kind="timer_fired", name="tick")
    assert [receipt.is_receipt(kind) for kind in (None, "charge", "mail")] == [True, True, False]
    assert [timer.is_timer(name) for name in (None, "tick", "tock")] == [True, True, False]
    assert (receipt.is_timer(), timer.is_receipt()) == (False, False)


@pytest.mark.parametrize(
    ("emit", "error"),
    [
        (lambda context: context.call(""), InvalidArgument),
        (lambda context: context.call("k" * 257), InvalidArgument),
        (lambda context: context.call("\ud800"), InvalidArgument),
        (lambda context: context.call("charge", object()), InvalidValue),
        (lambda context: context.call("charge", float("nan")), InvalidValue),
        (lambda context: context.call("charge", max_attempts=0), InvalidArgument),
        (lambda context: context.call("charge", b"x" * (EFFECT_PARAMS_BYTES_MAX + 1)), PayloadTooLarge),
        (lambda context: context.timer("tick"), InvalidArgument),
        (lambda context: context.timer("tick", seconds=1, at=context.now), InvalidArgument),
        (lambda context: context.timer("tick", seconds=-1), InvalidArgument),
        (lambda context: context.timer("tick", seconds=float("inf")), InvalidArgument),
        (lambda context: context.timer("tick", at=datetime(2030, 1, 1)), InvalidArgument),  # noqa: DTZ001
        (lambda context: context.timer("tick", at=datetime(2300, 1, 1, tzinfo=UTC)), InvalidArgument),
        (lambda context: context.timer("t" * 129, seconds=1), InvalidArgument),
        (lambda context: context.timer("tick", seconds=1, payload=b"x" * 4_097), InvalidArgument),
        (lambda context: context.cancel_timer(7), InvalidArgument),
        (lambda context: context.send("a/b", 1), InvalidName),
        (lambda context: context.send("other", 1, schema=""), InvalidArgument),
        (lambda context: context.send("other", 1, key=7), InvalidArgument),
        (lambda context: context.put("no queue", 1), InvalidName),
        (lambda context: context.put("jobs", 1, colour="red"), InvalidArgument),
        (lambda context: context.mail("", 1), InvalidName),
        (lambda context: context.mail("ada", {1, 2, object()}), InvalidValue),
        (lambda context: context.publish(object()), InvalidValue),
        (lambda context: context.publish(1, key="a//b"), InvalidName),
        (lambda context: context.put("jobs", b"x" * (EMITTED_BYTES_MAX + 1)), PayloadTooLarge),
    ],
)
def test_a_wrong_argument_is_refused_at_once_and_nothing_is_emitted(
    emit: Callable[[TurnContext], object], error: type[Exception]
) -> None:
    context = TurnContext(NOW_MS, 1)
    with pytest.raises(error):
        emit(context)
    emitted = context.end()
    assert (emitted.calls, emitted.timers, emitted.operations) == ([], {}, [])


@pytest.mark.parametrize(
    ("emit", "most"),
    [
        (lambda context, n: context.call("charge", n), INBOX_REQUESTS_MAX),
        (lambda context, n: context.timer(f"timer-{n}", seconds=n), INBOX_REQUESTS_MAX),
        (lambda context, n: (context.send, context.put, context.mail)[n % 3]("other", n), EMITTED_MAX),
    ],
)
def test_what_one_event_emits_is_bounded(emit: Callable[[TurnContext, int], object], most: int) -> None:
    context = TurnContext(NOW_MS, 1)
    for n in range(most):
        emit(context, n)
    with pytest.raises(BatchTooLarge, match=str(most)):
        emit(context, most)


def test_the_bytes_of_one_event_are_bounded_together() -> None:
    context = TurnContext(NOW_MS, 1)
    context.put("jobs", b"x" * EMITTED_BYTES_MAX)
    with pytest.raises(PayloadTooLarge):
        context.call("charge", b"x")


def test_a_context_is_not_usable_after_its_event() -> None:
    kept: list[TurnContext] = []
    reducer = Program("keep", lambda state, event, context: kept.append(context)).reducer
    reducer.fold(None, Event(kind="control", name="go"))
    with pytest.raises(TransactionEnded):
        kept[0].send("other", 1)


def test_a_timer_is_relative_to_the_recorded_time() -> None:
    context = TurnContext(NOW_MS, 1)
    context.timer("after", seconds=1.5)
    context.timer("delta", seconds=timedelta(days=30))
    context.timer("at", at=context.now + timedelta(milliseconds=1))
    context.timer("gone", seconds=1)
    context.cancel_timer("gone")
    timers = context.end().timers
    at_ms = {name: timer and timer.deliver_at_ns / 1_000_000 - NOW_MS for name, timer in timers.items()}
    assert at_ms == {"after": 1_500, "delta": 30 * 86_400_000, "at": 1, "gone": None}


def test_the_id_of_a_call_is_in_its_intent_hash() -> None:
    context = TurnContext(NOW_MS, 1 << 40)
    assert [context.call("charge"), context.call("charge")] == [f"{1 << 40}.0", f"{1 << 40}.1"]
    assert call_id_of(intent_hash(b"\xff" * 16, 1 << 40, 1)) == f"{1 << 40}.1"


async def waits(state: Any, event: Event, context: TurnContext) -> Any:
    del event, context
    return state


def test_a_program_is_a_plain_function() -> None:
    app = HostApp()
    with pytest.raises(InvalidArgument, match="plain function"):
        app.program(waits)
    with pytest.raises(InvalidName):
        app.program("no name")(record)
    returning = Program("late", lambda *arguments: waits(*arguments)).reducer  # noqa: PLW0108
    with pytest.raises(InvalidValue, match="awaitable"):
        returning.fold(None, Event(kind="control", name="go"))


def test_names_of_programs_and_adapters_are_unique() -> None:
    app = HostApp()
    named = app.program("counter")(record)
    assert (named.name, named(None, Event(kind="control", name="go"), TurnContext(0, 0))[0][0]) == (
        "counter",
        "control",
    )
    app.program("counter")(record)  # A module that is loaded again.
    with pytest.raises(InvalidArgument, match="Two functions are the program counter"):
        app.program("counter")(lambda state, event, context: state)
    app.adapter("charge")(lambda call: None)
    with pytest.raises(InvalidArgument, match="Two functions are the adapter charge"):
        app.adapter("charge")(record)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs a kind"):
        app.adapter(record)  # type: ignore[arg-type]
    assert (list(app.programs), list(app.runners), list(app.adapters)) == (["counter"], ["counter"], ["charge"])
