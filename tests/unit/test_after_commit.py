"""Errors after a commit do not fail the call: the caller would repeat what is already committed."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane, Tier, limits
from fastness.errors import Busy
from fastness.runtime.activity import events
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.repeat_detector import RepeatDetector


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}") as plane:
        yield plane


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The process cannot start threads until the returned function is called."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch.undo


def test_puts_succeed_when_no_thread_can_start(
    plane: Plane, no_threads: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    jobs, ada = plane.queue("jobs"), plane.mailbox("ada")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jobs.put(b"x")
            jobs.put(b"x", tier=Tier.IMPORTANT)
            jobs.put(b"x", delay_seconds=3_600)
            ada.send("bob", b"x")
        plane.atomic().put(jobs, b"x").write("task", "t1", {"state": "done", "metrics": {"cpu": 0.5}}).commit()
        message = jobs.receive()
        assert message is not None
    assert (jobs.stats().ready, jobs.stats().delayed, jobs.stats().leased) == (4, 2, 1)
    assert plane.mailbox("bob").count() == 2
    assert plane.entities.get("task", "t1").fields == {"state": "done"}
    assert caplog.text.count("leases are not renewed") == 1
    assert caplog.text.count("the thread fastness-sweeps cannot start yet") <= 1, (
        "logged once at the start; a folder is swept from its opening"
    )
    no_threads()
    message.ack()
    jobs.put(b"x")
    logged = [json.loads(record.record)["event"] for record in plane.activity.read(kind=events.LOG_KIND).records]
    assert logged.count("put") == 8, "earlier events are logged once a thread can start"


def test_events_that_cannot_be_written_are_bounded(
    plane: Plane, no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EVENTS_MAX", 8)
    jobs = plane.queue("jobs")
    for _ in range(20):
        jobs.put(b"x")
    assert len(plane._transport.services.events._waiting) <= 8  # type: ignore[attr-defined]
    assert jobs.stats().ready == 20
    no_threads()


def test_calls_are_accepted_when_no_thread_can_remove_expired_keys(
    plane: Plane, no_threads: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    runner = BackgroundRunner()
    database = plane._transport.services.database  # type: ignore[attr-defined]
    detector = RepeatDetector(database, lambda: 0, shared=False, background=runner)
    assert detector.received(again=False)()
    assert detector.received(again=False)()
    assert len(caplog.records) == 1
    runner.stop()


def test_a_failing_commit_listener_does_not_fail_the_commit(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    key_counts: list[int] = []

    def fail(keys: Collection[bytes], ranges: Collection[Any]) -> None:
        raise ValueError("on purpose")

    database = plane._transport.services.database  # type: ignore[attr-defined]
    stops = [database.subscribe(fail), database.subscribe(lambda keys, ranges: key_counts.append(len(keys)))]
    with database.watch(b"") as watch, caplog.at_level(logging.ERROR, "fastness.watches"):
        plane.queue("jobs").put(b"x")
        assert watch.wait(0), "waiters are woken nonetheless"
    for stop in stops:
        stop()
    assert plane.queue("jobs").stats().ready == 1
    assert len(key_counts) == 1
    assert "on purpose" in caplog.text


def test_an_entity_is_written_although_its_session_log_ended_meanwhile(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = plane._transport.services  # type: ignore[attr-defined]
    commit = parts.database._commit

    def end_session_and_commit(tx: Any) -> None:
        parts.log().end_session("main", "s1")
        monkeypatch.setattr(limits, "ACTIVITY_SESSIONS_MAX", 0)
        commit(tx)

    monkeypatch.setattr(parts.database, "_commit", end_session_and_commit)
    with caplog.at_level(logging.WARNING, "fastness.activity"), plane.entities.transaction(session="s1") as tx:
        tx.write("task", "t1", "state", "done")
        tx.write("task", "t1", "metrics", {"cpu": 0.5})
    assert plane.entities.get("task", "t1").fields == {"state": "done"}
    assert "ACTIVITY_SESSIONS_MAX" in caplog.text
    with pytest.raises(Busy):  # Without a commit, the caller gets the error.
        plane.activity.log("s2", {"step": 1})
