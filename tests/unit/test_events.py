"""Events are written to session logs; an error there does not fail the operation that caused the event."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

import fastness
from fastness import limits
from fastness.errors import InvalidArgument, LeaseHeld
from fastness.handles.sync.plane import Plane
from fastness.kv import Database, Event, Transaction
from fastness.layers.leases import LeaseEvent
from fastness.layers.queues import MessageEvent, QueueKey
from fastness.runtime.activity import events

BODIES = [b"x"] * 64


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """A plane with the maximum number of open session logs, and a small event queue."""
    monkeypatch.setattr(limits, "ACTIVITY_SESSIONS_MAX", 1)
    monkeypatch.setattr(events, "EVENTS_MAX", len(BODIES) // 2)
    with fastness.open("memory:") as plane:
        plane.activity.log("agent-7", {"step": 1})
        yield plane


def events_of(plane: Plane) -> int:
    return len(plane.activity.read(kind=events.LOG_KIND).records)


def test_a_put_succeeds_when_no_session_log_can_be_opened(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """The put is committed; an error would cause a duplicate."""
    queue = plane.queue("jobs")
    with caplog.at_level(logging.WARNING, "fastness.activity"):
        for _ in range(3):
            assert len(queue.put_many(BODIES)) == len(BODIES)
        assert events_of(plane) == 0
    assert queue.stats().ready == 3 * len(BODIES)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, "one warning, when the failures start"
    assert "ACTIVITY_SESSIONS_MAX" in warnings[0]


def test_events_are_logged_again_once_a_session_log_can_be_opened(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    queue = plane.queue("jobs")
    queue.put_many(BODIES)
    assert events_of(plane) == 0
    plane.activity.end("agent-7")
    with caplog.at_level(logging.WARNING, "fastness.activity"):
        queue.put_many(BODIES)
        assert events_of(plane) == len(BODIES)
    assert "works again" in caplog.text


def test_an_atomic_commit_succeeds_when_best_effort_fields_cannot_be_logged(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = plane.queue("jobs")
    with caplog.at_level(logging.WARNING, "fastness.activity"):
        plane.atomic().put(jobs, b"x").write("task", "t1", {"state": "done", "metrics": {"cpu": 0.5}}).commit()
    assert jobs.stats().ready == 1
    assert plane.entities.get("task", "t1").fields == {"state": "done"}
    assert "missing from its session log" in caplog.text


class Counted(Event, frozen=True, gc=False):
    number: int


def test_only_what_is_committed_is_published(database: Database) -> None:
    published: list[Event] = []
    database.publish = published.extend

    def count(tx: Transaction, number: int) -> None:
        tx.put(b"n", b"%d" % number)
        tx.emit(Counted(number))
        tx.emit(Counted(number + 1))
        if number == 3:
            raise InvalidArgument("not this one")

    database.transact(count, 1)
    with pytest.raises(InvalidArgument):
        database.transact(count, 3)
    asyncio.run(database.transact_async(count, 5))
    assert published == [Counted(1), Counted(2), Counted(5), Counted(6)]


def test_a_malformed_event_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    with fastness.open("memory:") as plane:
        event_logger = plane._transport.services.events  # type: ignore[attr-defined]
        event_logger.add(
            [
                MessageEvent("put", QueueKey("main", "jobs"), None, "", 0, 0, None),  # type: ignore[arg-type]
                LeaseEvent("gone", None, "ada", 0, 0),  # type: ignore[arg-type]
            ]
        )
        plane.queue("jobs").put_many(BODIES)
        assert events_of(plane) == len(BODIES)
    assert "a malformed event was dropped" in caplog.text


def test_the_event_thread_continues_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "EVENTS_FLUSH_SECONDS", 0.001)
    failed = threading.Event()
    with fastness.open("memory:") as plane:
        event_logger = plane._transport.services.events  # type: ignore[attr-defined]
        write, wrote = event_logger.write, threading.Event()

        def fail_once() -> None:
            if not failed.is_set():
                failed.set()
                raise ZeroDivisionError
            write()
            wrote.set()

        monkeypatch.setattr(event_logger, "write", fail_once)
        plane.queue("jobs").put_many(BODIES)
        assert failed.wait(60)
        assert wrote.wait(60), "the thread continues"
        monkeypatch.undo()
        assert events_of(plane) == len(BODIES)
    assert "ZeroDivisionError" in caplog.text


def test_an_owner_that_cannot_be_encoded_is_rejected_and_other_events_are_logged() -> None:
    """A lone surrogate cannot be encoded as JSON; it would make the whole batch of events fail."""
    with fastness.open("memory:") as plane:
        plane.lease("deploy").acquire("ada")
        for owner in ("bob", "b\ud800b"):
            with pytest.raises(LeaseHeld if owner == "bob" else InvalidArgument):
                plane.lease("deploy").acquire(owner)
            with pytest.raises(LeaseHeld if owner == "bob" else InvalidArgument):
                plane.lease("deploy").acquire(owner, wait_seconds=0.001)
        with pytest.raises(InvalidArgument, match="owner"):
            plane.queue("jobs").receive(owner="b\ud800b")
        assert len(plane.activity.read(kind=events.LEASE_KIND).records) == 2
