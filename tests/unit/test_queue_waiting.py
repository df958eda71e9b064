"""Queue handles: waiting consumers, subscriptions, and nodes that share a PostgreSQL."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, Plane
from fastness.backends.postgres import PostgresDatabase
from fastness.errors import (
    FastnessError,
    HeadAdvanced,
    QueueBusy,
)
from fastness.handles.sync.messages import Message
from fastness.handles.sync.queues import Queue
from fastness.kv import Database
from fastness.plane import Options, open_plane
from fastness.runtime.consumer_options import ConsumerOptions, Polling
from fastness.testing.clock import ManualClock
from fastness.wire.queues import QueuePolicy
from tests.support.waiting import eventually, eventually_async
from tests.unit import queue_handle_fixtures
from tests.unit.queue_handle_fixtures import (
    BLOB,
    LONG,
    PATIENCE_SECONDS,
    Bench,
    counts,
    extended_twice,
    received,
    served,
    waiting,
)
from tests.unit.stored_pairs import everything

url = queue_handle_fixtures.url
plane = queue_handle_fixtures.plane
jobs = queue_handle_fixtures.jobs
threads = queue_handle_fixtures.threads


# Waiting.


def test_a_waiting_consumer_is_woken_by_a_put(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    waiter = waiting(threads, jobs)
    jobs.put("a")
    assert served(waiter) == "a"
    assert jobs.stats().waiting_consumers == 0


def test_a_waiting_consumer_is_woken_by_a_nack(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    jobs.put("a")
    message = received(jobs)
    waiter = waiting(threads, jobs)
    message.nack(delay_seconds=0)
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_the_end_of_a_delay(
    jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    """A delay wakes its consumer at once, not at a poll."""
    jobs.put("a", delay_seconds=60)
    waiter = waiting(threads, jobs)
    clock.advance_ms(59_999)
    eventually(lambda: jobs.stats().waiting_consumers == 1)
    assert not waiter.done()
    clock.advance_ms(1)
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_the_end_of_a_lease(
    jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    jobs.put("a")
    received(jobs)
    waiter = waiting(threads, jobs)
    clock.advance_ms(30_000)
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_resume(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    jobs.pause()
    jobs.put("a")
    waiter = waiting(threads, jobs)
    assert (jobs.stats().paused, counts(jobs.stats())) == (True, {"ready": 1})
    jobs.resume()
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_a_redrive_and_by_the_next_of_a_group(
    jobs: Queue, threads: ThreadPoolExecutor
) -> None:
    jobs.put("a", group="g")
    jobs.put("b", group="g")
    first = received(jobs)
    waiter = waiting(threads, jobs)
    first.reject()
    assert served(waiter) == "b"
    waiter.result().ack()
    waiter = waiting(threads, jobs)
    jobs.redrive()
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_a_schedule_and_by_the_rate(
    jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    jobs.schedule("report", "*/5 * * * *", "a")
    waiter = waiting(threads, jobs)
    clock.advance_ms(100_000)
    assert served(waiter) == "a"
    jobs.set_policy(QueuePolicy(rate_per_second=0.1))
    jobs.put_many(["b", "c"])
    assert received(jobs).json() == "b"
    waiter = waiting(threads, jobs)
    clock.advance_ms(10_000)
    assert served(waiter) == "c"


def test_a_wait_that_times_out_returns_none(jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    waiter = waiting(threads, jobs, wait_seconds=5)
    clock.advance_ms(4_999)
    eventually(lambda: jobs.stats().waiting_consumers == 1)
    assert not waiter.done()
    clock.advance_ms(1)
    assert served(waiter) is None
    assert jobs.stats().waiting_consumers == 0


def test_a_wait_behind_others_that_times_out_returns_none(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    first = waiting(threads, jobs)
    assert jobs.receive(wait_seconds=0.01) is None
    jobs.put("a")
    assert served(first) == "a"


def test_waiting_consumers_are_served_in_order(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    waiters = [waiting(threads, jobs, number + 1) for number in range(8)]
    for number, waiter in enumerate(waiters):
        jobs.put(number)
        assert served(waiter) == number
        assert jobs.stats().waiting_consumers == 7 - number


def test_put_many_serves_all_waiting_consumers(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    waiters = [waiting(threads, jobs, number + 1) for number in range(8)]
    jobs.put_many(range(8))
    assert [served(waiter) for waiter in waiters] == list(range(8))


def test_waiting_for_one_queue_does_not_block_another(plane: Plane, threads: ThreadPoolExecutor) -> None:
    waiter = waiting(threads, plane.queue("jobs"))
    plane.queue("jobs2").put("b")
    assert received(plane.queue("jobs2"), wait_seconds=LONG).json() == "b"
    plane.queue("jobs").put("a")
    assert served(waiter) == "a"


@pytest.mark.parametrize("names", [["jobs"] * 3, ["jobs", "mail", "logs"]], ids=["one queue", "three queues"])
def test_too_many_waiting_consumers_are_refused(
    url: str, clock: ManualClock, threads: ThreadPoolExecutor, names: list[str]
) -> None:
    """The limit is that of all queues together, and the first in line counts too."""
    transport = open_plane(url, Options(clock=clock, consumers=ConsumerOptions(consumers_max=2)))
    waiting_consumers = transport.services.waiting_consumers
    with Plane(transport) as plane:
        waiters = []
        for number, name in enumerate(names[:2]):
            waiters.append(threads.submit(plane.queue(name).receive, wait_seconds=LONG, extend_for_seconds=0))
            eventually(lambda: waiting_consumers.count == number + 1)  # noqa: B023
        with pytest.raises(QueueBusy, match="2 consumers of all queues already wait") as busy:
            plane.queue(names[2]).receive(wait_seconds=LONG)
        assert (busy.value.retry, waiting_consumers.refused) == ("later", 1)
        plane.queue("other").put("ready")
        assert received(plane.queue("other"), wait_seconds=LONG).json() == "ready", "it need not wait"
        assert plane.queue(names[2]).receive() is None, "it does not wait"
        for number, (name, waiter) in enumerate(zip(names, waiters, strict=False)):
            eventually(lambda: plane.queue(name).stats().waiting_consumers > 0)  # noqa: B023
            plane.queue(name).put(number)
            assert served(waiter) == number
        assert waiting_consumers.count == 0
        waiting(threads, plane.queue(names[2]))
        plane.queue(names[2]).put("again")


def test_closing_a_plane_ends_waits(url: str, threads: ThreadPoolExecutor) -> None:
    plane = fastness.open(url)
    waiter = waiting(threads, plane.queue("jobs"))
    plane.close()
    with pytest.raises(FastnessError):
        waiter.result(PATIENCE_SECONDS)


# Waiting on an event loop.


async def standing(plane: AsyncPlane, line: int) -> None:
    async def are_there() -> bool:
        return (await plane.queue("jobs").stats()).waiting_consumers == line

    await eventually_async(are_there)


async def test_waiting_tasks_are_served_in_order(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(jobs.receive(wait_seconds=LONG, extend_for_seconds=0)))
            await standing(plane, number + 1)
        await jobs.put_many(range(4))
        for number in range(4, 8):
            await jobs.put(number)
        found = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
        assert [message.json() for message in found if message is not None] == list(range(8))


async def test_a_waiting_task_is_woken_when_a_message_becomes_ready(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")

        async def wait_for(happens: Callable[[], Awaitable[Any]]) -> Any:
            task = asyncio.create_task(jobs.receive(wait_seconds=LONG, extend_for_seconds=0))
            await standing(plane, 1)
            await happens()
            return await asyncio.wait_for(task, PATIENCE_SECONDS)

        async def later(ms: int) -> None:
            clock.advance_ms(ms)

        message = await wait_for(lambda: jobs.put("a"))
        message = await wait_for(partial(message.nack, delay_seconds=0))
        await message.nack(delay_seconds=5)
        message = await wait_for(lambda: later(5_000))
        message = await wait_for(lambda: later(30_000))
        await jobs.pause()
        await message.nack(intent="defer")
        message = await wait_for(jobs.resume)
        assert (message.json(), message.attempts, message.failure_attempts) == ("a", 5, 3)
        await message.reject()
        message = await wait_for(jobs.redrive)
        await message.ack()
        assert await wait_for(lambda: later(600_000)) is None


async def test_a_cancelled_waiter_does_not_block_the_others(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(jobs.receive(wait_seconds=LONG, extend_for_seconds=0)))
            await standing(plane, number + 1)
        for task in tasks[:2]:
            task.cancel()
        await standing(plane, 1)
        await jobs.put("a")
        message = await asyncio.wait_for(tasks[2], PATIENCE_SECONDS)
        assert message is not None
        assert (message.json(), message.attempts) == ("a", 1)


async def cancel_receives(plane: AsyncPlane) -> None:
    """Receive the only message repeatedly, cancelled a little later each time."""
    jobs = plane.queue("jobs")
    for steps in range(30):
        receiving = asyncio.create_task(jobs.receive(extend_for_seconds=0))
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving.cancel()
        (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
        if not isinstance(outcome, asyncio.CancelledError):
            assert outcome is not None
            await outcome.nack(intent="defer")
        stats = await jobs.stats()
        assert (counts(stats), stats.failed_total) == ({"ready": 1}, 0), f"cancelled after {steps} steps"


async def test_a_cancelled_receive_does_not_count_a_failure(url: str, clock: ManualClock) -> None:
    """Wherever it is cancelled, messages that it leased are returned without counting a failure."""
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.queue("jobs").put("a")
        await cancel_receives(plane)


async def test_a_receive_cancelled_during_a_blob_fetch_does_not_count_a_failure(url: str, clock: ManualClock) -> None:
    """The message is released although its lease was committed before the fetch."""
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.queue("jobs").put(bytes(BLOB))
        await cancel_receives(plane)


# Subscriptions.


def test_a_subscription_ends_after_wait_seconds_without_messages(jobs: Queue) -> None:
    jobs.put_many(range(20))
    found = []
    for message in jobs.subscribe(wait_seconds=0, extend_for_seconds=0):
        with message:
            found.append(message.json())
    assert (found, jobs.stats().acked_total) == (list(range(20)), 20)


def test_a_subscription_respects_its_credit(jobs: Queue, threads: ThreadPoolExecutor) -> None:
    jobs.put_many(range(5))
    found: list[Message] = []

    def consume() -> None:
        for message in jobs.subscribe(credit=2, wait_seconds=0, extend_for_seconds=0):
            found.append(message)

    consumer = threads.submit(consume)
    settled = 0
    while settled < 5:
        eventually(lambda: len(found) == min(settled + 2, 5))  # noqa: B023
        for _ in range(20):
            assert jobs.stats().leased == min(2, 5 - settled)
        assert len(found) == min(settled + 2, 5)
        (found[settled].ack if settled % 2 else found[settled].reject)()
        settled += 1
    consumer.result(PATIENCE_SECONDS)
    assert [message.json() for message in found] == list(range(5))


def test_leaving_a_subscription_does_not_count_failures(jobs: Queue) -> None:
    """Messages that were received but not yielded are returned."""
    jobs.put_many(range(3))
    messages = jobs.subscribe(credit=3, wait_seconds=0, extend_for_seconds=0)
    next(messages).ack()
    messages.close()  # type: ignore[attr-defined]
    stats = jobs.stats()
    assert (counts(stats), stats.failed_total) == ({"ready": 2}, 0)
    assert [message.json() for message in islice(jobs.subscribe(extend_for_seconds=0), 2)] == [1, 2]


def test_leaving_a_subscription_returns_messages_although_one_is_lost(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("seen")
    jobs.put("lost", visibility_seconds=1, max_attempts=1)
    jobs.put_many(["kept", "kept too"])
    messages = jobs.subscribe(credit=4, wait_seconds=0, extend_for_seconds=0)
    next(messages).ack()
    clock.advance_ms(1_000)
    assert jobs.receive() is None, "it processes the expiry"
    messages.close()  # type: ignore[attr-defined]
    assert counts(jobs.stats()) == {"ready": 2, "dead": 1}


def test_a_lost_message_returns_its_credit(jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    jobs.put_many(["first", "second"])
    found: list[Message] = []

    def consume() -> None:
        for message in jobs.subscribe(credit=1, wait_seconds=0, visibility_seconds=1, extend_for_seconds=0):
            found.append(message)
            if len(found) == 2:
                return

    consumer = threads.submit(consume)
    eventually(lambda: len(found) == 1)
    clock.advance_ms(1_000)
    consumer.result(PATIENCE_SECONDS)
    assert (found[0].lost, len(found)) == (True, 2)


async def test_an_asynchronous_subscription_waits_for_messages(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        found = []

        async def consume() -> None:
            async for message in jobs.subscribe(credit=2, with_state=True, extend_for_seconds=0):
                async with message:
                    found.append((message.json(), message.state))
                if len(found) == 3:
                    return

        consumer = asyncio.create_task(consume())
        for number in range(3):
            await standing(plane, 1)
            await jobs.put(number)
            await eventually_async(lambda: len(found) == number + 1)  # noqa: B023
        await asyncio.wait_for(consumer, PATIENCE_SECONDS)
        assert found == [(0, None), (1, None), (2, None)]


# Several planes on one PostgreSQL.


@pytest.fixture
def nodes(postgres_url: str, clock: ManualClock, tmp_path: Path) -> Iterator[tuple[Plane, Plane]]:
    objects, activity = f"dir:{tmp_path / 'objects'}", str(tmp_path / "activity")
    open_node = partial(fastness.open, postgres_url, clock=clock, objects=objects, activity=activity)
    with open_node() as one, open_node() as other:
        yield one, other


def test_a_consumer_is_woken_by_a_commit_of_another_node(
    nodes: tuple[Plane, Plane], clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    here, there = nodes[0].queue("jobs"), nodes[1].queue("jobs")
    waiter = waiting(threads, here)
    there.put("a")
    assert served(waiter) == "a"
    message = waiter.result()
    assert message is not None
    waiter = waiting(threads, there)
    message.nack(delay_seconds=0)
    assert served(waiter) == "a"
    waiter = waiting(threads, here)
    clock.advance_ms(30_000)
    assert served(waiter) == "a"
    there.pause()
    message = waiter.result()
    assert message is not None
    message.nack(intent="defer")
    waiter = waiting(threads, here)
    there.resume()
    assert served(waiter) == "a"
    assert (there.stats().waiting_consumers, counts(there.stats())) == (0, {"leased": 1})


@pytest.fixture
def without_notifications(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Plane, Plane]]:
    """Two nodes that lose each other's notifications, and poll often."""
    monkeypatch.setattr("fastness.backends.postgres.listener.notified_ranges", lambda payload: ([], []))
    consumers = ConsumerOptions(poll_seconds=0.02, poll_jitter_seconds=0.01)
    options = Options(consumers=consumers, activity=str(tmp_path / "activity"))
    with Plane(open_plane(postgres_url, options)) as one, Plane(open_plane(postgres_url, options)) as other:
        yield one, other


def test_a_lost_notification_delays_a_waiting_caller_by_the_poll_interval(
    without_notifications: tuple[Plane, Plane], threads: ThreadPoolExecutor
) -> None:
    here, there = without_notifications
    consumer = waiting(threads, here.queue("jobs"))
    there.queue("jobs").put("a")
    assert served(consumer) == "a"

    reader = threads.submit(here.mailbox("ada").read, wait_seconds=20)
    eventually(lambda: here._transport.services.database._watches.count)  # type: ignore[attr-defined]
    there.mailbox("bob").send("ada", "hello")
    assert [mail.body for mail in reader.result(PATIENCE_SECONDS)] == [b'"hello"']

    held = there.lease("deploy").acquire("bob", ttl_seconds=LONG)
    acquirer = threads.submit(here.lease("deploy").acquire, "ada", ttl_seconds=LONG, wait_seconds=LONG)
    eventually(lambda: here.lease("deploy").describe().waiting == 1)
    held.release()
    acquirer.result(PATIENCE_SECONDS).release()


def test_only_a_shared_store_is_polled(database: Database) -> None:
    pauses = {
        Polling(database, ConsumerOptions(poll_jitter_seconds=0, **options)).pause_ms(600_000)
        for options in ({}, {"resilient_poll_seconds": 0}, {"poll_seconds": 5, "resilient_poll_seconds": 3})
    }
    assert pauses == ({3_000} if isinstance(database, PostgresDatabase) else {600_000})
    assert Polling(database, ConsumerOptions()).pause_ms(10) == 10


def test_a_large_payload_is_readable_on_another_node(nodes: tuple[Plane, Plane]) -> None:
    nodes[0].queue("jobs").put(bytes(BLOB))
    with received(nodes[1].queue("jobs")) as message:
        assert message.payload == bytes(BLOB)
    assert counts(nodes[0].queue("jobs").stats()) == {}


def test_an_atomic_list_on_postgres_is_atomic(nodes: tuple[Plane, Plane], clock: ManualClock) -> None:
    bench = Bench(nodes[0], clock)
    before = everything(nodes[1])
    with pytest.raises(HeadAdvanced):
        bench.commit(wrong="append")
    assert everything(nodes[1]) == before
    bench.commit()
    assert counts(nodes[1].queue("jobs").stats()) == {"ready": 1, "dead": 1}


@pytest.mark.rotating
def test_postgres_planes_extend_leases_and_sweep(postgres_url: str, tmp_path: Path) -> None:
    with fastness.open(postgres_url, activity=str(tmp_path)) as plane:
        jobs = plane.queue("jobs")
        jobs.put("a", visibility_seconds=9, max_attempts=1)
        message = jobs.receive()
        assert message is not None
        extended_twice(message)
        del message
        gc.collect()
        eventually(lambda: jobs.stats().dead == 1)


async def test_a_waiting_task_on_postgres_is_woken(postgres_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with fastness.open_async(postgres_url, activity=str(tmp_path), clock=clock) as plane:
        jobs = plane.queue("jobs")
        task = asyncio.create_task(jobs.receive(wait_seconds=LONG, extend_for_seconds=0))
        await standing(plane, 1)
        await jobs.put("a", delay_seconds=5)
        clock.advance_ms(5_000)
        message = await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert message is not None
        async with message:
            assert message.json() == "a"
        assert counts(await jobs.stats()) == {}
