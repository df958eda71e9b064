"""What is committed is no failure, whatever goes wrong afterwards: whoever were told of one would do it again."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Plane, Tier, limits
from holdfast.errors import Busy
from holdfast.plane.idempotency import RepeatDetector
from holdfast.runtime.activity import events


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    with holdfast.open("memory:" if request.param == "memory" else f"dir:{tmp_path}") as plane:
        yield plane


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The process may have no more threads, until the function that this is was called."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch.undo


def test_what_is_put_where_no_thread_can_be_had_is_put(
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
    assert caplog.text.count("leases are not extended") == 1
    assert caplog.text.count("Starting to sweep fails") <= 1, "once, when it begins; a folder is swept from its opening"
    no_threads()
    message.ack()
    jobs.put(b"x")
    told = [json.loads(record.record)["event"] for record in plane.activity.read(kind=events.LOG_KIND).records]
    assert told.count("put") == 8, "what happened meanwhile is told when somebody can"


def test_events_that_nobody_can_write_do_not_gather_for_ever(
    plane: Plane, no_threads: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EVENTS_MAX", 8)
    jobs = plane.queue("jobs")
    for _ in range(20):
        jobs.put(b"x")
    assert len(plane._transport.services.events._waiting) <= 8
    assert jobs.stats().ready == 20
    no_threads()


def test_calls_are_heard_although_no_thread_can_forget_the_keys_of_old_ones(
    plane: Plane, no_threads: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    sendings = RepeatDetector(plane._transport.services.database, lambda: 0, shared=False)
    with caplog.at_level(logging.WARNING, "holdfast.sendings"):
        assert sendings.heard(again=False)()
        assert sendings.heard(again=False)()
    assert len(caplog.records) == 1
    sendings.stop()


def test_a_commit_is_no_failure_because_somebody_who_hears_of_it_fails(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def fail(keys: Collection[bytes], ranges: Collection[Any]) -> None:
        raise ValueError("no ear")

    database = plane._transport.services.database
    stops = [database.subscribe(fail), database.subscribe(lambda keys, ranges: heard.append(len(keys)))]
    with database.watch(b"") as watch, caplog.at_level(logging.ERROR, "holdfast.watches"):
        plane.queue("jobs").put(b"x")
        assert watch.wait(0), "whoever waits is woken all the same"
    for stop in stops:
        stop()
    assert plane.queue("jobs").stats().ready == 1
    assert len(heard) == 1
    assert "no ear" in caplog.text


def test_an_entity_is_written_although_its_session_ended_meanwhile_and_no_other_can_be_had(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = plane._transport.services
    commit = parts.database._commit

    def end_session_and_commit(tx: Any) -> None:
        parts.log().end_session("main", "s1")
        monkeypatch.setattr(limits, "ACTIVITY_SESSIONS_MAX", 0)
        commit(tx)

    monkeypatch.setattr(parts.database, "_commit", end_session_and_commit)
    with caplog.at_level(logging.WARNING, "holdfast.activity"), plane.entities.transaction(session="s1") as tx:
        tx.write("task", "t1", "state", "done")
        tx.write("task", "t1", "metrics", {"cpu": 0.5})
    assert plane.entities.get("task", "t1").fields == {"state": "done"}
    assert "ACTIVITY_SESSIONS_MAX" in caplog.text
    with pytest.raises(Busy):  # Where nothing is committed, whoever logs hears of it.
        plane.activity.log("s2", {"step": 1})
