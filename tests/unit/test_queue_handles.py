"""Queues as users have them: with blocks, waiting in line, large payloads, and what is told of it all."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast import Plane
from holdfast.errors import HoldfastError
from holdfast.handles.sync.messages import Message
from holdfast.testing.clock import ManualClock
from holdfast.wire.queues import NewMessage

PATIENCE_SECONDS = 30.0  # Far more than anything here takes; whoever waits for a condition must end some day.
SOON_SECONDS = 3.0  # The same, where a bug is known to let it run out.


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with holdfast.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for another thread to get somewhere."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def events(plane: Plane) -> list[str]:
    records = plane.activity.read(kind="queues").records
    return [msgspec.json.decode(record.record)["event"] for record in records]


# Bugs.


def test_a_redrive_looks_for_every_message_that_it_is_given(plane: Plane) -> None:
    """BUG: batches are cut by how many were moved, not by how many were tried: 256 unknown ids hide all behind them."""
    jobs = plane.queue("jobs")
    jobs.put("a")
    message = jobs.receive()
    assert message is not None
    message.reject("boom")
    assert jobs.redrive([*(str(uuid.uuid4()) for _ in range(256)), message.id]) == 1
    assert jobs.stats().ready == 1


def test_what_a_waiting_consumer_notices_is_told(plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    """BUG: the dispatcher drops the notes of a look that found nothing, though it was committed: a message that
    expired and became a dead letter while a consumer waited is in no session log.
    """
    jobs = plane.queue("jobs")
    jobs.put("a", max_attempts=1)
    assert jobs.receive(visibility_seconds=1, extend_for_seconds=0) is not None
    waiter = threads.submit(jobs.receive, wait_seconds=600)
    until(lambda: jobs.stats().waiting_consumers == 1)
    clock.advance_ms(1_000)
    until(lambda: jobs.stats().dead == 1)
    clock.advance_ms(600_000)
    assert waiter.result(PATIENCE_SECONDS) is None
    assert events(plane) == ["put", "leased", "expired", "dead-lettered"]


def test_a_plane_that_is_opened_again_attends_to_what_is_due(tmp_path: Path) -> None:
    """BUG: the sweeper begins with the first commit that notes something due, so what was due before (a TTL, a lease, a
    schedule) waits until somebody happens to touch a queue; "it looks at all queues once, when it starts".
    """
    with holdfast.open(f"dir:{tmp_path}", clock=ManualClock()) as plane:  # Whose time is long over.
        plane.queue("jobs").put("a", ttl_seconds=1)
    with holdfast.open(f"dir:{tmp_path}") as plane:
        until(lambda: plane.queue("jobs").stats().ready == 0, SOON_SECONDS)


def test_a_large_payload_is_not_taken_for_null(plane: Plane) -> None:
    """BUG: over 1 MiB the payload does not come along, and `json` answers None as if null had been put."""
    plane.queue("jobs").put("x" * 1_200_000)
    message = plane.queue("jobs").receive(extend_for_seconds=0)
    assert message is not None
    assert message.payload is None
    with pytest.raises(HoldfastError, match="read"):
        message.json()


def test_a_message_whose_blob_is_missing_does_not_take_its_batch_along(plane: Plane) -> None:
    """BUG: `receive_many` raises after all of them were leased. Nobody has them, and each counts as a failure later."""
    jobs = plane.queue("jobs")
    jobs.put_many([b"fine", NewMessage(blob="0" * 64, blob_size=20_000)])
    found: list[Message] = []
    try:
        found += jobs.receive_many(2, extend_for_seconds=0)
    except HoldfastError:
        assert jobs.stats().leased == 0
    else:
        assert b"fine" in [message.payload for message in found]


def test_leaving_a_subscription_burns_no_attempts(plane: Plane) -> None:
    """BUG, Lesson 33: what was received ahead and never handed out stays leased until its time is over, and then
    counts as a failure.
    """
    jobs = plane.queue("jobs")
    jobs.put_many(range(3))
    messages = jobs.subscribe(credit=3, wait_seconds=0)
    next(messages).ack()
    messages.close()
    stats = jobs.stats()
    assert (stats.ready, stats.leased, stats.failed_total) == (2, 0, 0)


def test_a_subscription_gets_the_credit_of_a_lost_message_back(
    plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    """BUG: a message that was not settled, and is not the consumer's any more, takes up its credit for ever: with as
    many of them as there is credit, the subscription never looks at the queue again.
    """
    jobs = plane.queue("jobs")
    jobs.put_many(["first", "second"])
    found: list[Message] = []
    stop = threading.Event()

    def consume() -> None:
        for message in jobs.subscribe(credit=1, wait_seconds=0, visibility_seconds=1, extend_for_seconds=0):
            found.append(message)
            if stop.is_set():
                return

    consumer = threads.submit(consume)
    until(lambda: len(found) == 1)
    clock.advance_ms(1_000)
    try:
        until(lambda: len(found) > 1, SOON_SECONDS)
    finally:
        stop.set()
        for message in found:
            message.settle_elsewhere()
        consumer.result(PATIENCE_SECONDS)


async def test_a_receive_that_is_cancelled_burns_no_attempts(tmp_path: Path, clock: ManualClock) -> None:
    """BUG, Lesson 33: cancelled while its lease is being synced, it leaves the message leased to nobody; when its time
    is over that counts as a failure. So does whoever stops its consumers by cancelling them, or waits with a timeout.
    """
    async with holdfast.open_async(f"dir:{tmp_path}", clock=clock) as plane:
        jobs = plane.queue("jobs")
        for _ in range(5):
            await jobs.put("a")
            receiving = asyncio.create_task(jobs.receive(extend_for_seconds=0))
            await asyncio.sleep(0)
            receiving.cancel()
            (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError):
                assert outcome is not None
                await outcome.nack(intent="defer")
        stats = await jobs.stats()
        assert (stats.ready, stats.leased) == (5, 0)
