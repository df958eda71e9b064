"""Queue handles: automatic extension of leases, background processing, and events."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fastness
from fastness import Plane
from fastness.errors import (
    InvalidArgument,
    QueueMessageLeaseMismatch,
)
from fastness.handles.sync.queues import Queue
from fastness.testing.clock import ManualClock
from tests.support.waiting import eventually
from tests.unit import queue_handle_fixtures
from tests.unit.queue_handle_fixtures import (
    ON_ONE_BACKEND,
    counts,
    events,
    extended_twice,
    mark,
    received,
    records,
    served,
    waiting,
)

url = queue_handle_fixtures.url
plane = queue_handle_fixtures.plane
running = queue_handle_fixtures.running
jobs = queue_handle_fixtures.jobs
threads = queue_handle_fixtures.threads


# Automatic extension. Leases are extended while real time passes, so these wait for it. An extension comes after a
# third of a lease: one of nine seconds is not lost by a machine that is busy for six.


@ON_ONE_BACKEND
def test_the_lease_of_a_running_message_is_extended(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive()
    assert message is not None
    first = message.expires_ms
    eventually(lambda: message.expires_ms > first + 1_500)
    assert jobs.receive() is None
    message.ack()
    assert (jobs.stats().acked_total, jobs.stats().expired_total, message.lost) == (1, 0, False)


@ON_ONE_BACKEND
async def test_a_lease_is_extended_while_the_event_loop_is_blocked(url: str) -> None:
    """The renewal runs in its own thread."""
    async with fastness.open_async(url) as plane:
        jobs = plane.queue("jobs")
        await jobs.put("a", visibility_seconds=9)
        message = await jobs.receive()
        assert message is not None
        extended_twice(message)  # type: ignore[arg-type]
        await message.ack()
        assert (await jobs.stats()).expired_total == 0


@ON_ONE_BACKEND
def test_a_settled_message_is_not_extended(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    first = jobs.receive()
    assert first is not None
    first.nack(delay_seconds=0)
    ended = first.expires_ms
    second = jobs.receive()
    assert second is not None
    extended_twice(second)
    assert (first.lost, first.expires_ms) == (False, ended)
    running.atomic().ack(second).commit()
    assert second.settled


@pytest.mark.rotating
@ON_ONE_BACKEND
def test_a_garbage_collected_message_is_not_extended(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive()
    assert message is not None
    extended_twice(message)
    del message
    gc.collect()
    eventually(lambda: jobs.stats().expired_total == 1)
    again = jobs.receive(extend_for_seconds=0)
    assert again is not None
    assert again.attempts == 2


@pytest.mark.rotating
@ON_ONE_BACKEND
def test_a_lease_is_extended_up_to_the_cap(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive(extend_for_seconds=7.5)
    assert message is not None
    first = message.expires_ms
    eventually(lambda: jobs.stats().expired_total == 1)
    assert message.expires_ms > first
    with pytest.raises(QueueMessageLeaseMismatch):
        message.ack()


def test_a_message_whose_lease_was_taken_is_marked_lost(
    plane: Plane, jobs: Queue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.put("a")
    message = jobs.receive(visibility_seconds=0.9)
    assert message is not None

    def somebody_else_takes_it() -> bool:
        clock.advance_ms(10_000)
        return jobs.receive(visibility_seconds=600, extend_for_seconds=0) is not None

    eventually(somebody_else_takes_it)
    eventually(lambda: message.lost)
    eventually(lambda: f"the lease on message {message.id} of jobs was lost" in caplog.text)
    with pytest.raises(QueueMessageLeaseMismatch):
        message.ack()


# Background processing.


def test_due_entries_of_an_unused_queue_are_processed(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", max_attempts=1)
    jobs.put("b", delay_seconds=0.05)
    jobs.put("c", delay_seconds=0.05, ttl_seconds=0.1, priority=0)
    received(jobs, visibility_seconds=0.05)
    eventually(lambda: counts(jobs.stats()) == {"ready": 1, "dead": 1})
    assert received(jobs).json() == "b"


def test_a_reopened_plane_processes_due_entries(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}", clock=ManualClock()) as plane:  # Whose time is long over.
        plane.queue("jobs").put("a", ttl_seconds=1)
    with fastness.open(f"dir:{tmp_path}") as plane:
        eventually(lambda: plane.queue("jobs").stats().ready == 0)


# Events.


def test_everything_that_happens_to_a_message_is_in_the_session_log(
    plane: Plane, jobs: Queue, clock: ManualClock
) -> None:
    receipt = jobs.put("a", max_attempts=2, correlation_id="because")
    received(jobs).nack(intent="defer")
    received(jobs).nack(delay_seconds=0)
    received(jobs)
    clock.advance_ms(30_000)
    assert jobs.receive() is None
    jobs.redrive()
    received(jobs).ack()
    assert events(plane) == [
        *("put", "leased", "deferred", "leased", "nacked", "leased", "expired", "dead-lettered"),
        *("redriven", "leased", "acked"),
    ]
    said = {(record["queue"], record["id"], record["correlation_id"]) for record in records(plane)}
    assert said == {("jobs", receipt.id, "because")}
    assert [record.get("attempt", 0) for record in records(plane)] == [0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4]


def test_the_session_log_has_the_last_error_of_a_dead_letter(plane: Plane, jobs: Queue) -> None:
    jobs.put("a", max_attempts=2)
    received(jobs).nack(error="no route", delay_seconds=0)
    received(jobs).nack(error="no host", delay_seconds=0)
    jobs.put("b")
    received(jobs).reject(error="no use")
    told = [(record["event"], record["error"]) for record in records(plane) if "error" in record]
    assert told == [("dead-lettered", "no host"), ("dead-lettered", "no use")]


def test_purged_messages_are_in_the_session_log(plane: Plane, jobs: Queue) -> None:
    jobs.put("ready")
    jobs.put("delayed", delay_seconds=60)
    for body in ("leads", "waits behind"):
        jobs.put(body, group="g")
    assert jobs.purge() == 4
    assert [record["event"] for record in records(plane)] == ["put"] * 4 + ["purged"] * 4
    assert len({record["id"] for record in records(plane) if record["event"] == "purged"}) == 4


def test_a_failed_commit_publishes_no_events(plane: Plane, jobs: Queue) -> None:
    jobs.put("a", idempotency_key="k")
    jobs.put("a", idempotency_key="k")
    with pytest.raises(InvalidArgument):
        jobs.put("a", priority=10)
    message = received(jobs)
    with pytest.raises(LookupError):
        message.complete(mark, b"work", True)
    message.ack()
    message.ack()
    assert events(plane) == ["put", "leased", "acked"]


def test_an_atomic_commit_publishes_its_events(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    plane.atomic().reject(received(jobs)).put(jobs, "b", ttl_seconds=1).commit()
    clock.advance_ms(1_000)
    assert jobs.receive() is None
    assert events(plane) == ["put", "leased", "dead-lettered", "put", "outlived"]


def test_a_waiting_consumer_publishes_what_it_processed(
    plane: Plane, jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    jobs.put("a", max_attempts=1)
    received(jobs, visibility_seconds=1)
    waiter = waiting(threads, jobs)
    clock.advance_ms(1_000)
    eventually(lambda: jobs.stats().dead == 1)
    clock.advance_ms(600_000)
    assert served(waiter) is None
    assert events(plane) == ["put", "leased", "expired", "dead-lettered"]
