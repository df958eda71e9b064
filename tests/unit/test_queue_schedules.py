"""Schedules of queues: cron expressions that enqueue messages, on every backend."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from fastness.backends.postgres import PostgresDatabase
from fastness.errors import (
    Busy,
    InvalidArgument,
)
from fastness.kv import Database
from fastness.layers import queues
from fastness.layers.queues import enqueue
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage
from tests.support.failures import Failures
from tests.unit.queue_calls import (
    JOBS,
    ack,
    counts,
    everything,
    lease,
    lease_one,
    payloads,
    process_due,
    remaining_keys,
    stats,
)


@pytest.fixture
def nodes(postgres_url: str, clock: ManualClock) -> Iterator[tuple[Database, Database]]:
    with PostgresDatabase(postgres_url, clock=clock) as one, PostgresDatabase(postgres_url, clock=clock) as other:
        yield one, other


def schedule(database: Database, cron: str, name: str = "report", timezone: str = "UTC", **options: Any) -> int:
    message = NewMessage(payload=name.encode(), **options)
    set_schedule = queues.set_schedule
    return database.transact(set_schedule, JOBS, name, cron=cron, timezone=timezone, message=message).next_ms


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def test_a_schedule_fires_once_at_each_of_its_times(database: Database, clock: ManualClock) -> None:
    assert schedule(database, "*/5 * * * *", priority=7, delay_seconds=1, correlation_id="c") == ms("2023-11-14T22:15")
    clock.jump_to_ms(ms("2023-11-14T22:15") - 1)
    assert process_due(database) == ms("2023-11-14T22:15")
    assert counts(database) == {}
    for minute in (15, 20, 25):
        clock.jump_to_ms(ms(f"2023-11-14T22:{minute}"))
        for _ in range(3):
            assert lease(database) == []
        assert counts(database) == {"delayed": 1}
        clock.advance_ms(1_000)
        message = lease_one(database)
        assert (message.payload, message.priority, message.correlation_id) == (b"report", 7, "c")
        ack(database, message)
    (found,) = database.read(queues.schedules_of, JOBS)
    assert (found.name, found.cron, found.next_ms) == ("report", "*/5 * * * *", ms("2023-11-14T22:30"))
    assert stats(database).put_total == 3


def test_missed_times_of_a_schedule_fire_once(database: Database, clock: ManualClock) -> None:
    schedule(database, "0 * * * *")
    clock.jump_to_ms(ms("2023-11-15T09:30"))
    assert payloads(lease(database, 10)) == [b"report"]
    assert [each.next_ms for each in database.read(queues.schedules_of, JOBS)] == [ms("2023-11-15T10:00")]


def test_a_scheduled_message_names_its_schedule_and_its_due_time(database: Database, clock: ManualClock) -> None:
    """Of several missed times, it is the first. Attributes of the caller are kept, except under these two names."""
    attributes = {"kind": "report", "fastness-due": "never"}
    schedule(database, "*/5 * * * *", "nightly", attributes=attributes)
    clock.jump_to_ms(ms("2023-11-14T22:22") + 7)
    message = lease_one(database)
    ack(database, message)
    assert message.attributes == {
        "kind": "report",
        "fastness-schedule": "nightly",
        "fastness-due": "2023-11-14T22:15:00.000Z",
    }
    clock.jump_to_ms(ms("2023-11-14T22:25"))
    assert lease_one(database).attributes["fastness-due"] == "2023-11-14T22:25:00.000Z"
    (stored,) = database.read(queues.schedules_of, JOBS)
    assert stored.message.attributes == attributes


def test_a_schedule_follows_daylight_saving_of_its_time_zone(database: Database, clock: ManualClock) -> None:
    """Half past nine in Berlin is an hour earlier in UTC in summer."""
    clock.jump_to_ms(ms("2024-03-29T12:00"))
    assert schedule(database, "30 9 * * *", timezone="Europe/Berlin") == ms("2024-03-30T08:30")
    clock.jump_to_ms(ms("2024-03-30T08:30"))
    process_due(database)
    assert [each.next_ms for each in database.read(queues.schedules_of, JOBS)] == [ms("2024-03-31T07:30")]
    assert schedule(database, "30 9 * * *", timezone="America/New_York") == ms("2024-03-30T13:30")


def test_an_invalid_schedule_is_refused(database: Database) -> None:
    failures = Failures()
    crons = ("", "nonsense", "* * * *", "61 * * * *", "* * * * * * *", "0 0 30 2 *")
    zones = ("", "Mars/Base", "../etc/passwd", "/etc/passwd", "\x00", "Europe")
    for cron, timezone in [*((cron, "UTC") for cron in crons), *(("* * * * *", zone) for zone in zones)]:
        before = everything(database)
        with failures.of((cron, timezone)):
            with pytest.raises(InvalidArgument):
                schedule(database, cron, timezone=timezone)
            assert everything(database) == before
    failures.check()


def test_a_removed_schedule_never_fires(database: Database, clock: ManualClock) -> None:
    schedule(database, "* * * * *")
    schedule(database, "* * * * *", name="other")
    remove = queues.remove_schedule
    assert (database.transact(remove, JOBS, "report"), database.transact(remove, JOBS, "report")) == (True, False)
    clock.advance_ms(600_000)
    assert payloads(lease(database, 10)) == [b"other"]
    database.transact(remove, JOBS, "other")
    clock.advance_ms(600_000)
    ack(database, lease_one(database))
    assert remaining_keys(database) == []


def test_a_schedule_replaces_one_of_the_same_name(database: Database, clock: ManualClock) -> None:
    schedule(database, "* * * * *")
    assert schedule(database, "0 23 * * *") == ms("2023-11-14T23:00")
    clock.jump_to_ms(ms("2023-11-14T22:59"))
    assert lease(database) == []
    clock.jump_to_ms(ms("2023-11-14T23:00"))
    assert len(lease(database, 10)) == 1


def test_the_number_of_schedules_is_limited(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "SCHEDULES_MAX", 2)
    schedule(database, "* * * * *", name="b")
    schedule(database, "* * * * *", name="a")
    with pytest.raises(Busy, match="2 schedules"):
        schedule(database, "* * * * *", name="c")
    schedule(database, "0 * * * *", name="b")
    assert [each.name for each in database.read(queues.schedules_of, JOBS)] == ["a", "b"]


def test_a_schedule_fires_once_with_several_processes(nodes: tuple[Database, Database], clock: ManualClock) -> None:
    one, other = nodes
    schedule(one, "* * * * *")
    clock.advance_ms(60_000)
    assert payloads(lease(other, 10) + lease(one, 10) + lease(other, 10)) == [b"report"]
