"""Events of messages and mail are folded into rows, even if events are lost, duplicated or out of order."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastness
from fastness.pipeline import lifecycles
from fastness.pipeline.lifecycles import Event, Mail, MailGroup, Measured, Message, MessageGroup, PresentMessage
from fastness.pipeline.schemas import MAIL, MESSAGES
from fastness.testing.clock import START_MS, ManualClock


class MessageModel:
    """A model of a message that records its events and its true outcome, independently of the fold."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.state = "waiting"
        self.attempt = 0
        self.counts = {"nacked": 0, "expired": 0, "redriven": 0}
        self.leased_at: int | None = None
        self.first_leased_at: int | None = None
        self.ended_at: int | None = None
        self.service_ms: int | None = None
        self.error: str | None = None
        self.events = [Event("put", 0)]

    def choices(self) -> list[str]:
        return {
            "waiting": ["leased", "outlived", "purged", "cancelled"],
            "leased": ["acked", "nacked", "deferred", "expired", "dead-lettered", "cancelled"],
            "dead": ["redriven"],
        }.get(self.state, [])

    def apply(self, event_name: str, pause_ms: int) -> None:
        self.now_ms += pause_ms
        error = f"error {self.attempt}" if event_name == "dead-lettered" else None
        if event_name == "leased":
            self.attempt += 1
            self.leased_at = self.now_ms
            self.first_leased_at = self.now_ms if self.first_leased_at is None else self.first_leased_at
        if event_name in self.counts:
            self.counts[event_name] += 1
        self.events.append(Event(event_name, self.now_ms, self.attempt, error))
        ends = {
            "acked": "acked",
            "dead-lettered": "dead",
            "outlived": "outlived",
            "purged": "purged",
            "cancelled": "purged",
        }
        self.state = ends.get(event_name, "leased" if event_name == "leased" else "waiting")
        self.ended_at = self.now_ms if event_name in ends else None
        self.error = error
        self.service_ms = self.now_ms - (self.leased_at or 0) if event_name in ("acked", "dead-lettered") else None

    def truth(self) -> Message:
        return Message(
            put_ms=0,
            first_leased_ms=self.first_leased_at,
            ended_ms=self.ended_at,
            attempts=self.attempt,
            nacks=self.counts["nacked"],
            expiries=self.counts["expired"],
            redrives=self.counts["redriven"],
            outcome=self.state,
            error=self.error,
            wait_ms=self.first_leased_at,
            service_ms=self.service_ms,
        )


@st.composite
def message_models(draw: st.DrawFn, *, pause_ms_min: int = 0) -> MessageModel:
    model = MessageModel()
    for _ in range(draw(st.integers(0, 12))):
        if not model.choices():
            break
        model.apply(draw(st.sampled_from(model.choices())), draw(st.integers(pause_ms_min, 5)))
    return model


@given(st.data(), message_models())
def test_fold_ignores_order_and_duplicates(data: st.DataObject, model: MessageModel) -> None:
    doubled = [*model.events, *data.draw(st.lists(st.sampled_from(model.events)))]
    assert lifecycles.message(data.draw(st.permutations(doubled))) == model.truth()


@given(st.data(), message_models(pause_ms_min=1))
def test_events_without_delivery_numbers_are_ordered_by_time(data: st.DataObject, model: MessageModel) -> None:
    unnumbered = [event._replace(attempt=0) for event in model.events]
    assert lifecycles.message(data.draw(st.permutations([*unnumbered, *unnumbered]))) == model.truth()


def test_deliveries_that_begin_anew_with_a_redrive_count_too() -> None:
    first = [Event("put", 0), Event("leased", 1, 1), Event("dead-lettered", 2, 1)]
    second = [Event("redriven", 3), Event("leased", 4, 1), Event("acked", 5, 1)]
    folded = lifecycles.message([*second, *first])
    assert (folded.attempts, folded.redrives, folded.outcome) == (2, 1, "acked")


@given(st.data(), message_models())
def test_clock_skew_changes_only_durations(data: st.DataObject, model: MessageModel) -> None:
    moved = [event._replace(at_ms=data.draw(st.integers(0, 50))) for event in model.events]
    folded, truth = lifecycles.message(moved), model.truth()
    for field in ("attempts", "nacks", "expiries", "redrives", "outcome", "error"):
        assert getattr(folded, field) == getattr(truth, field)
    assert all(took is None or took >= 0 for took in (folded.wait_ms, folded.service_ms))


@given(st.data(), message_models())
def test_lost_events_never_make_a_row_claim_too_much(data: st.DataObject, model: MessageModel) -> None:
    kept = data.draw(st.lists(st.sampled_from(model.events), unique=True))
    folded, truth = lifecycles.message(kept), model.truth()
    for field in ("attempts", "nacks", "expiries", "redrives"):
        assert getattr(folded, field) <= getattr(truth, field)
    assert folded.put_ms in (None, 0)
    assert folded.wait_ms in (None, truth.wait_ms)
    if model.events[-1] in kept:  # If the last event is known, so is the outcome.
        assert (folded.outcome, folded.ended_ms, folded.error) == (truth.outcome, truth.ended_ms, truth.error)
        assert folded.service_ms in (None, truth.service_ms)
    if Event("put", 0) in kept:
        assert folded.first_leased_ms in (None, truth.first_leased_ms)


def test_delivery_with_only_its_end_logged_counts() -> None:
    folded = lifecycles.message([Event("put", 0), Event("nacked", 5, 1), Event("acked", 9, 3)])
    assert (folded.attempts, folded.outcome, folded.nacks) == (2, "acked", 1)
    assert (folded.first_leased_ms, folded.wait_ms, folded.service_ms) == (None, None, None)


def test_two_deliveries_within_one_millisecond_count_twice() -> None:
    deliveries = [Event("leased", 0, 1), Event("nacked", 0, 1), Event("leased", 0, 2), Event("acked", 0, 2)]
    assert lifecycles.message([Event("put", 0), *deliveries]).attempts == 2


def test_later_delivery_does_not_count_as_the_first() -> None:
    folded = lifecycles.message([Event("put", 0), Event("leased", 500, 2), Event("acked", 510, 2)])
    assert (folded.first_leased_ms, folded.wait_ms, folded.service_ms) == (None, None, 10)


def test_leased_dead_letter_has_its_own_row_without_a_wait() -> None:
    """It was enqueued into another queue, and nothing logs when it came into this one."""
    folded = lifecycles.message([Event("leased", 50, 4), Event("acked", 60, 4)])
    assert (folded.first_leased_ms, folded.attempts, folded.outcome) == (50, 1, "acked")
    assert (folded.put_ms, folded.wait_ms, folded.service_ms) == (None, None, 10)


@pytest.mark.parametrize("event", [Event("sung", 5), Event("put", -1), Event("put", lifecycles.AT_MS_MAX)])
def test_unknown_event_changes_nothing(event: Event) -> None:
    assert lifecycles.message([event]).outcome == "unknown"
    assert lifecycles.message([event, Event("leased", 5, 1)]) == lifecycles.message([Event("leased", 5, 1)])


# Mail.


class MailModel:
    """A model of an id under which mail is sent several times, with the outcome of each."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.rows: list[Mail] = []
        self.events: list[Event] = []

    def choices(self) -> list[str]:
        state = self.rows[-1].outcome if self.rows else "rejected"
        return {"waiting": ["delivered", "expired", "confirmed"], "delivered": ["expired", "confirmed"]}.get(
            state, ["stored"] if self.rows else ["stored", "rejected"]
        )

    def apply(self, event_name: str, pause_ms: int) -> None:
        self.now_ms += pause_ms
        self.events.append(Event(event_name, self.now_ms))
        if event_name == "stored":
            self.rows.append(Mail(self.now_ms, None, None, "waiting", None))
        elif event_name == "delivered":
            stored_ms = self.rows[-1].stored_ms or 0
            self.rows[-1] = Mail(stored_ms, self.now_ms, None, "delivered", self.now_ms - stored_ms)
        elif event_name != "rejected":
            self.rows[-1] = self.rows[-1]._replace(ended_ms=self.now_ms, outcome=event_name)


@st.composite
def mail_models(draw: st.DrawFn) -> MailModel:
    model = MailModel()
    for _ in range(draw(st.integers(1, 12))):
        model.apply(draw(st.sampled_from(model.choices())), draw(st.integers(1, 5)))
    return model


@given(st.data(), mail_models())
def test_mail_has_one_row_per_time_it_is_stored(data: st.DataObject, model: MailModel) -> None:
    doubled = [*model.events, *data.draw(st.lists(st.sampled_from(model.events)))]
    folded = lifecycles.mails(data.draw(st.permutations(doubled)))
    if model.rows:
        assert folded == model.rows
    else:
        assert folded == [Mail(None, None, model.events[0].at_ms, "rejected", None)]


@given(st.data(), mail_models())
def test_lost_mail_events_never_make_a_row_claim_too_much(data: st.DataObject, model: MailModel) -> None:
    kept = data.draw(st.lists(st.sampled_from(model.events), unique=True))
    logged = {event.at_ms: event.event for event in kept}
    for row in lifecycles.mails(kept):
        assert row.stored_ms is None or logged[row.stored_ms] == "stored"
        assert row.delivered_ms is None or logged[row.delivered_ms] == "delivered"
        assert row.ended_ms is None or logged[row.ended_ms] == row.outcome
        assert row.outcome in ("waiting", "delivered", "expired", "confirmed", "rejected")


def test_mail_events_in_one_millisecond_are_one_mail() -> None:
    events = [Event("stored", 5), Event("delivered", 5), Event("confirmed", 5)]
    assert lifecycles.mails(events) == [Mail(5, 5, 5, "confirmed", 0)]


def test_mail_delivered_into_a_world_is_confirmed() -> None:
    assert lifecycles.mails([Event("confirmed", 5)]) == [Mail(None, None, 5, "confirmed", None)]


# Rows.


def test_groups_of_events_become_rows_of_messages() -> None:
    put, leased = Event("put", START_MS), Event("leased", START_MS + 40, 1)
    dead = Event("dead-lettered", START_MS + 50, 1, "no host")
    groups = [
        MessageGroup("main", "jobs", "a", "a", [put]),
        MessageGroup("main", "jobs", "b", None, []),
        MessageGroup("main", "jobs", "c", "x", [dead, leased, put]),
    ]
    rows = lifecycles.message_rows(groups)
    assert rows.schema == MESSAGES.schema
    assert [row["outcome"] for row in rows.to_pylist()] == ["waiting", "unknown", "dead"]
    last = rows.to_pylist()[2]
    assert (last["id"], last["error"], last["wait_ms"], last["service_ms"]) == ("c", "no host", 40, 10)
    assert last["put_at"].timestamp() * 1_000 == START_MS
    assert lifecycles.message_rows([]).num_rows == 0


def test_missing_error_comes_from_the_plane() -> None:
    dead, logged = Event("dead-lettered", 5), Event("dead-lettered", 5, 1, "told")
    present = PresentMessage("main", "jobs", "x", "dead", 1, 1, 5, "known")
    groups = [MessageGroup("main", "jobs", "x", "x", [event], present) for event in (dead, logged, Event("acked", 5))]
    assert lifecycles.message_rows(groups).column("error").to_pylist() == ["known", "told", None]


MEASURED = Measured(1_000, frozenset(["main"]))


@pytest.mark.parametrize(
    ("logged", "present", "expected"),
    [
        ([], "ready", "waiting"),
        ([], "dead", "dead"),
        (["put"], "ready", "waiting"),
        (["put"], "leased", "leased"),
        (["put", "leased"], "delayed", "waiting"),
        (["put", "leased"], "dead", "dead"),
        (["put", "leased", "dead-lettered"], "ready", "waiting"),  # Its redrive is not in the logs.
        (["put", "leased", "acked"], "ready", "acked"),
        (["put"], None, "unknown"),
        (["put", "leased"], None, "unknown"),
        (["put", "leased", "acked"], None, "acked"),
        (["put", "leased", "dead-lettered"], None, "dead"),  # Its letter was consumed, or has expired.
        (["put", "outlived"], None, "outlived"),
    ],
)
def test_open_messages_are_compared_with_the_plane(logged: list[str], present: str | None, expected: str) -> None:
    events = [Event(name, 10 + n, 1 if n else 0) for n, name in enumerate(logged)]
    found = None if present is None else PresentMessage("main", "jobs", "x", present, 7, 1, 9, "no host")
    group = MessageGroup("main", "jobs", "x", "x", events, found)
    (row,) = lifecycles.message_rows([group], MEASURED).to_pylist()
    assert (row["outcome"], row["logged"]) == (expected, bool(logged))
    assert row["put_at"].timestamp() * 1_000 == (10 if logged else 7)
    # A plane that was not measured, or not completely, decides nothing about messages that it lacks.
    (as_logged,) = lifecycles.message_rows([group._replace(present=None)], None).to_pylist()
    partly = Measured(1_000, frozenset())
    assert lifecycles.message_rows([group._replace(present=None)], partly).to_pylist() == [as_logged]
    # Nor about messages with later events.
    if logged:
        later = group._replace(events=[event._replace(at_ms=2_000) for event in events])
        assert lifecycles.message_rows([later], MEASURED).to_pylist()[0]["outcome"] == as_logged["outcome"]


def test_groups_of_events_become_rows_of_mail() -> None:
    groups = [
        MailGroup("main", "bob@main", "ada@main", "a", [Event("stored", 1), Event("stored", 9)]),
        MailGroup("main", "bob@main", "eve@main", "b", []),
        MailGroup("main", "bob@main", "eve@main", "c", [Event("x", 1)]),
    ]
    rows = lifecycles.mail_rows(groups)
    assert rows.schema == MAIL.schema
    assert [(row["id"], row["sender"], row["outcome"]) for row in rows.to_pylist()] == [
        ("a", "ada@main", "waiting"),
        ("a", "ada@main", "waiting"),
    ]
    assert lifecycles.mail_rows(groups[1:]).num_rows == 0


def test_session_log_of_a_plane_is_folded_into_the_outcome(tmp_path: Path) -> None:
    clock = ManualClock()
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put("a", max_attempts=3)
        clock.advance_ms(100)
        for _ in range(2):  # Within one millisecond.
            first = jobs.receive(extend_for_seconds=0)
            assert first is not None
            first.nack(delay_seconds=0)
        last = jobs.receive(extend_for_seconds=0)
        assert last is not None
        clock.advance_ms(250)
        last.nack(error="no host", delay_seconds=0)
        logged = [msgspec.json.decode(each.record) for each in plane.activity.read(kind="queues").records]
    events = [Event(each["event"], each["at_ms"], each.get("attempt", 0), each.get("error")) for each in logged]
    assert lifecycles.message(events) == Message(
        put_ms=START_MS,
        first_leased_ms=START_MS + 100,
        ended_ms=START_MS + 350,
        attempts=3,
        nacks=3,
        expiries=0,
        redrives=0,
        outcome="dead",
        error="no host",
        wait_ms=100,
        service_ms=250,
    )
