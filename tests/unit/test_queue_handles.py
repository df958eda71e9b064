"""Queue handles: with blocks, waiting, large payloads, atomic lists, lease extension, and events."""

import asyncio
import gc
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import AsyncPlane, Plane, Tier, Transaction
from holdfast.errors import (
    BatchTooLarge,
    CasMismatch,
    EmptyBatch,
    Fenced,
    HeadAdvanced,
    HoldfastError,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    PayloadTooLarge,
    QueueBusy,
    QueueMessageLeaseMismatch,
)
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.queues import Queue
from holdfast.plane import Options, open_plane
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.testing.clock import START_MS, ManualClock
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.queues import NewMessage, QueuePolicy, QueueStats

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.
LONG = 600.0  # Seconds that never pass: the test moves the clock, or another event ends the wait.
BLOB = 16_385  # Bytes: the shortest payload that is stored as a blob.
STREAMED = 1_048_577  # Bytes: the shortest payload that is not sent with a delivery.


# Renewal is independent of the backend, and takes seconds of real time.
ON_ONE_BACKEND = pytest.mark.parametrize("url", ["memory"], indirect=True)


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path / 'plane'}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with holdfast.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def running(url: str) -> Iterator[Plane]:
    """A plane with the system clock."""
    with holdfast.open(url) as plane:
        yield plane


@pytest.fixture
def jobs(plane: Plane) -> Queue:
    return plane.queue("jobs")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


async def until_async(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.001)


def received(queue: Queue, **options: Any) -> Message:
    """The next message, which must exist; its lease is not extended."""
    message = queue.receive(**{"extend_for_seconds": 0, **options})
    assert message is not None
    return message


def waiting(threads: ThreadPoolExecutor, queue: Queue, line: int = 1, **options: Any) -> "Future[Message | None]":
    """A waiting consumer, the last of `line`."""
    waiter = threads.submit(queue.receive, **{"wait_seconds": LONG, "extend_for_seconds": 0, **options})
    until(lambda: queue.stats().waiting_consumers == line)
    return waiter


def served(waiter: "Future[Message | None]") -> Any:
    message = waiter.result(PATIENCE_SECONDS)
    return None if message is None else message.json()


def counts(stats: QueueStats) -> dict[str, int]:
    """The states that have messages, with their numbers."""
    places = ("ready", "delayed", "leased", "blocked", "dead")
    return {place: getattr(stats, place) for place in places if getattr(stats, place)}


def everything(plane: Plane) -> list[tuple[bytes, bytes]]:
    return plane.transact(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def records(plane: Plane) -> list[dict[str, str]]:
    return [msgspec.json.decode(each.record) for each in plane.activity.read(kind="queues").records]


def events(plane: Plane) -> list[str]:
    return [record["event"] for record in records(plane)]


# Putting and receiving.


@pytest.mark.parametrize("body", [{"n": 1, "text": "ü"}, [1, 2.5, None], "text", 5, None, True])
def test_a_body_is_json_unless_it_is_bytes(jobs: Queue, body: Any) -> None:
    jobs.put(body)
    message = received(jobs)
    assert (message.json(), message.delivery.content_type) == (body, "application/json")


@pytest.mark.parametrize("body", [b"", b"\x00\xff", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_received_unchanged(jobs: Queue, body: Any) -> None:
    jobs.put(body)
    message = received(jobs)
    assert (message.payload, message.delivery.content_type) == (bytes(body), "application/octet-stream")


@pytest.mark.parametrize(
    "body",
    [object(), {"a": object()}, "\ud800", float],
    ids=["an object", "an object inside", "half a character", "a class"],
)
def test_a_body_that_cannot_be_json_is_refused(plane: Plane, jobs: Queue, body: Any) -> None:
    with pytest.raises(InvalidValue, match="cannot be JSON"):
        jobs.put(body)
    assert everything(plane) == []


def test_a_message_has_its_properties(jobs: Queue) -> None:
    receipt = jobs.put(
        {"n": 1},
        priority=7,
        group="g",
        attributes={"kind": "x"},
        correlation_id="because",
        max_attempts=2,
        visibility_seconds=7,
        content_type="text/x",
        tier=Tier.IMPORTANT,
    )
    assert (receipt.durability, receipt.duplicate, receipt.correlation_id) == (Tier.IMPORTANT, False, "because")
    message = received(jobs, owner="ada")
    assert (message.id, message.queue, message.attributes) == (receipt.id, "jobs", {"kind": "x"})
    assert (message.attempts, message.failure_attempts, message.fence) == (1, 0, 1)
    assert (message.correlation_id, message.state, message.settled, message.lost) == ("because", None, False, False)
    assert message.expires_ms == START_MS + 7_000
    delivery = message.delivery
    assert (delivery.priority, delivery.group, delivery.max_attempts) == (7, "g", 2)
    assert (delivery.content_type, delivery.created_ms) == ("text/x", START_MS)
    assert repr(message) == f"<message {receipt.id} of jobs, attempt 1, fence 1>"


def test_options_of_a_put_take_effect(jobs: Queue, clock: ManualClock) -> None:
    first = jobs.put("later", delay_seconds=5, idempotency_key="k")
    assert jobs.put("again", idempotency_key="k") == msgspec.structs.replace(first, duplicate=True)
    jobs.put("short", ttl_seconds=1)
    assert counts(jobs.stats()) == {"ready": 1, "delayed": 1}
    clock.advance_ms(1_000)
    assert jobs.receive() is None
    clock.advance_ms(4_000)
    assert received(jobs).json() == "later"


def test_put_many_is_one_commit(plane: Plane, jobs: Queue) -> None:
    receipts = jobs.put_many(["a", b"b", NewMessage(payload=b"c", priority=9)])
    assert [message.payload for message in jobs.receive_many(10, extend_for_seconds=0)] == [b"c", b'"a"', b"b"]
    assert len({receipt.id for receipt in receipts}) == 3
    before = everything(plane)
    with pytest.raises(InvalidArgument):
        jobs.put_many(["fine", NewMessage(priority=10)])
    with pytest.raises(EmptyBatch):
        jobs.put_many([])
    with pytest.raises(BatchTooLarge):
        jobs.put_many(range(257))
    assert everything(plane) == before


def test_receive_many_returns_at_most_max_messages(jobs: Queue) -> None:
    jobs.put_many(range(30))
    batches = [jobs.receive_many(extend_for_seconds=0), jobs.receive_many(256, wait_seconds=LONG, extend_for_seconds=0)]
    assert [[message.json() for message in batch] for batch in batches] == [list(range(10)), list(range(10, 30))]
    assert jobs.receive_many() == []
    for wrong in (0, -1, 257):
        with pytest.raises(InvalidArgument):
            jobs.receive_many(wrong)


def test_names_keep_their_case_and_are_checked(plane: Plane) -> None:
    plane.queue("Jobs").put("a")
    assert plane.queue("jobs").receive() is None
    assert received(plane.queue("Jobs")).json() == "a"
    assert plane.queues() == ["Jobs"]
    for wrong in ("", "a b", "x" * 256, "..", "a/b"):
        with pytest.raises(InvalidName):
            plane.queue(wrong)
    with pytest.raises(InvalidArgument, match="251 characters"):
        plane.queue("x" * 252).put("a")


def test_universes_have_separate_queues(url: str) -> None:
    with holdfast.open(url, universe="one") as one:
        one.queue("jobs").put("a")
        other = Plane(one._transport, "other")
        assert other.queue("jobs").receive() is None
        assert (one.queues(), other.queues()) == (["jobs"], [])
        assert received(one.queue("jobs")).json() == "a"


def test_messages_survive_reopening_a_directory(tmp_path: Path, clock: ManualClock) -> None:
    with holdfast.open(f"dir:{tmp_path}", clock=clock) as plane:
        plane.queue("jobs").put_many(["held", "ready"])
        held = received(plane.queue("jobs"))
    with holdfast.open(f"dir:{tmp_path}", clock=clock) as plane:
        assert received(plane.queue("jobs")).json() == "ready"
        clock.advance_ms(30_000)
        again = received(plane.queue("jobs"))
        assert (again.id, again.fence) == (held.id, 2)


@pytest.mark.parametrize(
    "wrong",
    [{"wait_seconds": -1}, {"wait_seconds": 3_601}, {"wait_seconds": float("nan")}]
    + [{"visibility_seconds": seconds} for seconds in (-1, 43_201, 0.0001, float("nan"))]
    + [{"owner": "x" * 257}],
    ids=str,
)
def test_a_receive_with_invalid_arguments_is_refused(jobs: Queue, wrong: dict[str, Any]) -> None:
    jobs.put("a")
    with pytest.raises(InvalidArgument):
        jobs.receive(**wrong)
    assert counts(jobs.stats()) == {"ready": 1}


# With blocks.


def test_a_with_block_acknowledges_at_its_end(jobs: Queue) -> None:
    jobs.put("a")
    with received(jobs) as message:
        assert counts(jobs.stats()) == {"leased": 1}
    assert message.settled
    assert (counts(jobs.stats()), jobs.stats().acked_total) == ({}, 1)


def test_a_with_block_that_raises_nacks_with_the_error(jobs: Queue) -> None:
    jobs.put("a")
    with pytest.raises(ZeroDivisionError), received(jobs):
        raise ZeroDivisionError("by nothing")
    message = received(jobs)
    assert (message.attempts, message.failure_attempts) == (2, 1)
    assert message.delivery.last_error == "ZeroDivisionError: by nothing"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_shutdown_does_not_count_a_failure(jobs: Queue, stop: type[BaseException]) -> None:
    jobs.put("a", max_attempts=1)
    with pytest.raises(stop), received(jobs):
        raise stop
    message = received(jobs)
    assert (message.attempts, message.failure_attempts, message.delivery.last_error) == (2, 0, None)
    assert jobs.stats().failed_total == 0


async def test_a_cancelled_task_does_not_count_a_failure(url: str, clock: ManualClock) -> None:
    async with holdfast.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")
        await jobs.put("a", max_attempts=1)
        working = asyncio.Event()

        async def work() -> None:
            message = await jobs.receive(extend_for_seconds=0)
            assert message is not None
            async with message:
                working.set()
                await asyncio.sleep(LONG)

        worker = asyncio.create_task(work())
        await working.wait()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker
        message = await jobs.receive(extend_for_seconds=0)
        assert message is not None
        assert (message.attempts, message.failure_attempts) == (2, 0)


def test_a_with_block_does_not_settle_twice(jobs: Queue) -> None:
    jobs.put_many(["acked", "given back", "rejected"])
    with received(jobs) as message:
        message.ack()
    with received(jobs) as message:
        message.nack(delay_seconds=60, error="not now")
    with pytest.raises(LookupError), received(jobs) as message:
        message.reject("hopeless")
        raise LookupError
    assert counts(jobs.stats()) == {"delayed": 1, "dead": 1}
    assert [letter.last_error for letter in jobs.dead_letters()] == ["hopeless"]


def test_a_with_block_whose_lease_ended_raises(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    with pytest.raises(QueueMessageLeaseMismatch), received(jobs):
        clock.advance_ms(30_000)
        second = received(jobs)
    second.ack()


def test_only_an_ack_may_be_repeated(jobs: Queue) -> None:
    jobs.put_many(["a", "b"])
    acked, given_back = jobs.receive_many(2, extend_for_seconds=0)
    acked.ack()
    acked.ack()
    given_back.nack()
    for settle in (given_back.nack, given_back.ack, given_back.reject, acked.nack):
        with pytest.raises(QueueMessageLeaseMismatch):
            settle()
    with pytest.raises(InvalidArgument, match="a nack is a failure or a defer"):
        acked.nack(intent="nonsense")


@pytest.mark.parametrize("how", ["ack", "nack", "reject", "atomic"])
def test_a_message_of_another_process_is_settled_by_its_lease(plane: Plane, jobs: Queue, how: str) -> None:
    jobs.put(1)
    received = jobs.receive(extend_for_seconds=0)
    held = plane.queue("jobs").held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert (held.id, held.fence, held.lease, held.queue) == (received.id, received.fence, received.lease, "jobs")
    if how == "atomic":
        plane.atomic().ack(held).commit()
    else:
        getattr(held, how)()
    stats = jobs.stats()
    settled = {"ack": (0, 0), "nack": (1, 0), "reject": (0, 1), "atomic": (0, 0)}[how]
    assert (stats.ready, stats.dead, stats.leased) == (*settled, 0)


def test_a_message_of_another_process_is_extended(jobs: Queue, clock: ManualClock) -> None:
    jobs.put(1)
    received = jobs.receive(visibility_seconds=5, extend_for_seconds=0)
    held = jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert held.extend() == clock.now_ms() + 30_000
    assert held.extend(60) == held.expires_ms == clock.now_ms() + 60_000
    clock.advance_ms(59_999)
    assert jobs.receive() is None
    clock.advance_ms(1)
    with jobs.receive(), pytest.raises(QueueMessageLeaseMismatch):
        held.ack()


def test_a_message_of_another_process_has_no_payload(jobs: Queue) -> None:
    jobs.put(1)
    received = jobs.receive(extend_for_seconds=0)
    held = jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence)
    assert held.payload is None
    for look in (held.json, held.read, held.open):
        with pytest.raises(InvalidArgument, match="another process"):
            look()
    for wrong in ({"lease_id": "x", "fence": 1}, {"lease_id": received.lease.lease_id, "fence": 9}):
        with pytest.raises(QueueMessageLeaseMismatch):
            jobs.held(received.id, **wrong).ack()


async def test_a_message_of_another_process_is_settled_asynchronously(url: str) -> None:
    async with holdfast.open_async(url) as plane:
        jobs = plane.queue("jobs")
        await jobs.put(1)
        received = await jobs.receive(extend_for_seconds=0)
        await jobs.held(received.id, lease_id=received.lease.lease_id, fence=received.fence).ack()
        assert (await jobs.stats()).leased == 0


def test_a_lease_is_extended_by_more_than_zero(jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a", visibility_seconds=7)
    message = received(jobs)
    clock.advance_ms(1_000)
    for wrong in (0, -1, 0.0001, 43_201, float("nan")):
        with pytest.raises(InvalidArgument):
            message.extend(wrong)
    assert message.extend(10) == message.expires_ms == START_MS + 11_000
    clock.advance_ms(9_000)
    assert message.extend() == START_MS + 17_000
    assert message.extend(1) == START_MS + 17_000


# Large payloads.


@pytest.mark.parametrize("size", [BLOB - 1, BLOB, STREAMED - 1])
def test_payloads_up_to_1_mib_come_with_the_delivery(jobs: Queue, size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    jobs.put_many([payload, b"small"])
    message = received(jobs)
    assert (message.payload, message.delivery.size) == (payload, size)
    assert (message.delivery.blob is not None) == (size >= BLOB)
    assert (message.read(), b"".join(message.open())) == (payload, payload)


def test_a_large_payload_is_read_or_streamed(jobs: Queue) -> None:
    payload = b'"' + b"x" * (STREAMED - 2) + b'"'
    jobs.put("x" * (STREAMED - 2))
    message = received(jobs)
    assert (message.payload, message.delivery.size) == (None, STREAMED)
    with pytest.raises(HoldfastError, match="read"):
        message.json()
    assert message.read() == payload
    chunks = list(message.open())
    assert (b"".join(chunks), len(chunks) > 0) == (payload, True)
    message.reject()
    assert [(letter.payload, letter.blob) for letter in jobs.dead_letters()] == [(None, message.delivery.blob)]
    jobs.redrive()
    assert received(jobs).read() == payload


def test_a_missing_blob_does_not_affect_other_messages(jobs: Queue) -> None:
    jobs.put_many([b"fine", NewMessage(blob="0" * 64, blob_size=20_000)])
    fine, missing = jobs.receive_many(2, extend_for_seconds=0)
    assert (fine.payload, missing.payload) == (b"fine", None)
    with pytest.raises(HoldfastError, match="No blob"):
        missing.read()
    missing.reject("its blob is gone")
    fine.ack()


async def test_large_payloads_are_read_and_streamed_asynchronously(url: str) -> None:
    async with holdfast.open_async(url) as plane:
        jobs = plane.queue("jobs")
        for size in (0, 5, BLOB, STREAMED):
            await jobs.put(bytes(size))
            message = await jobs.receive(extend_for_seconds=0)
            assert message is not None
            assert len(await message.read()) == size
            assert sum([len(chunk) async for chunk in await message.open()]) == size
            await message.ack()


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
    message.nack()
    assert served(waiter) == "a"


def test_a_waiting_consumer_is_woken_by_the_end_of_a_delay(
    jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    """A delay wakes its consumer at once, not at a poll."""
    jobs.put("a", delay_seconds=60)
    waiter = waiting(threads, jobs)
    clock.advance_ms(59_999)
    until(lambda: jobs.stats().waiting_consumers == 1)
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
    until(lambda: jobs.stats().waiting_consumers == 1)
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


def test_too_many_waiting_consumers_are_refused(url: str, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    with Plane(open_plane(url, Options(clock=clock, consumers=ConsumerOptions(consumers_max=2)))) as plane:
        jobs, waiters = plane.queue("jobs"), list[Future[Message | None]]()
        with pytest.raises(QueueBusy, match="2 consumers already wait") as busy:
            while True:  # The first in line may or may not count as waiting.
                assert len(waiters) <= 3
                ahead = len(waiters)
                waiter = threads.submit(jobs.receive, wait_seconds=LONG, extend_for_seconds=0)
                until(lambda ahead=ahead, waiter=waiter: waiter.done() or jobs.stats().waiting_consumers > ahead)
                if waiter.done():
                    waiter.result()
                waiters.append(waiter)
        assert busy.value.retry == "later"
        assert 2 <= len(waiters) <= 3
        jobs.put_many(range(len(waiters)))
        assert [served(waiter) for waiter in waiters] == list(range(len(waiters)))
        assert jobs.receive() is None


def test_closing_a_plane_ends_waits(url: str, threads: ThreadPoolExecutor) -> None:
    plane = holdfast.open(url)
    waiter = waiting(threads, plane.queue("jobs"))
    plane.close()
    with pytest.raises(HoldfastError):
        waiter.result(PATIENCE_SECONDS)


# Waiting on an event loop.


async def standing(plane: AsyncPlane, line: int) -> None:
    async def are_there() -> bool:
        return (await plane.queue("jobs").stats()).waiting_consumers == line

    await until_async(are_there)


async def test_waiting_tasks_are_served_in_order(url: str, clock: ManualClock) -> None:
    async with holdfast.open_async(url, clock=clock) as plane:
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
    async with holdfast.open_async(url, clock=clock) as plane:
        jobs = plane.queue("jobs")

        async def wait_for(happens: Callable[[], Awaitable[Any]]) -> Any:
            task = asyncio.create_task(jobs.receive(wait_seconds=LONG, extend_for_seconds=0))
            await standing(plane, 1)
            await happens()
            return await asyncio.wait_for(task, PATIENCE_SECONDS)

        async def later(ms: int) -> None:
            clock.advance_ms(ms)

        message = await wait_for(lambda: jobs.put("a"))
        message = await wait_for(message.nack)
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
    async with holdfast.open_async(url, clock=clock) as plane:
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
    async with holdfast.open_async(url, clock=clock) as plane:
        await plane.queue("jobs").put("a")
        await cancel_receives(plane)


async def test_a_receive_cancelled_during_a_blob_fetch_does_not_count_a_failure(url: str, clock: ManualClock) -> None:
    """The message is released although its lease was committed before the fetch."""
    async with holdfast.open_async(url, clock=clock) as plane:
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
        until(lambda settled=settled: len(found) == min(settled + 2, 5))
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
    messages.close()
    stats = jobs.stats()
    assert (counts(stats), stats.failed_total) == ({"ready": 2}, 0)
    assert [message.json() for message in islice(jobs.subscribe(extend_for_seconds=0), 2)] == [1, 2]


def test_a_lost_message_returns_its_credit(jobs: Queue, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    jobs.put_many(["first", "second"])
    found: list[Message] = []

    def consume() -> None:
        for message in jobs.subscribe(credit=1, wait_seconds=0, visibility_seconds=1, extend_for_seconds=0):
            found.append(message)
            if len(found) == 2:
                return

    consumer = threads.submit(consume)
    until(lambda: len(found) == 1)
    clock.advance_ms(1_000)
    consumer.result(PATIENCE_SECONDS)
    assert (found[0].lost, len(found)) == (True, 2)


async def test_an_asynchronous_subscription_waits_for_messages(url: str, clock: ManualClock) -> None:
    async with holdfast.open_async(url, clock=clock) as plane:
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
            await until_async(lambda number=number: first_of(found, number + 1))
        await asyncio.wait_for(consumer, PATIENCE_SECONDS)
        assert found == [(0, None), (1, None), (2, None)]


async def first_of(found: list[Any], count: int) -> bool:
    return len(found) == count


# Administration.


def test_peek_consumes_nothing(jobs: Queue) -> None:
    jobs.put_many(["a", b"x" * 2_000])
    for _ in range(2):
        found = jobs.peek()
        assert [each.payload for each in found] == [b'"a"', b"x" * 2_000]
        assert [(each.lease_id, each.expires_ms, each.attempts) for each in found] == [("", 0, 0)] * 2
    assert len(jobs.peek(1)) == 1
    with pytest.raises(InvalidArgument):
        jobs.peek(0)


def test_purge_removes_all_but_leased_messages(jobs: Queue) -> None:
    jobs.put("held")
    held = received(jobs)
    for _ in range(3):
        jobs.put_many(range(200))
    jobs.put("later", delay_seconds=60)
    assert (jobs.purge(), jobs.purge()) == (601, 0)
    assert counts(jobs.stats()) == {"leased": 1}
    held.ack()


def test_a_policy_sets_defaults_of_messages(jobs: Queue) -> None:
    assert jobs.policy() == QueuePolicy()
    policy = jobs.set_policy(QueuePolicy(visibility_seconds=7, max_attempts=1, dead_letter_queue="Graveyard"))
    assert jobs.policy() == policy
    jobs.pause()
    assert jobs.policy() == msgspec.structs.replace(policy, paused=True)
    jobs.resume()
    jobs.put("a")
    message = received(jobs)
    assert message.expires_ms == START_MS + 7_000
    message.nack(error="boom")
    assert [(letter.last_error, letter.origin) for letter in jobs.dead_letters()] == [("boom", "jobs")]
    assert jobs.redrive() == 1
    with pytest.raises(InvalidArgument):
        jobs.set_policy(QueuePolicy(max_attempts=0))


def test_dead_letters_are_listed_and_redriven(plane: Plane, jobs: Queue) -> None:
    jobs.put_many(range(5), tier=Tier.IMPORTANT)
    for message in jobs.receive_many(5, extend_for_seconds=0):
        message.reject(f"error {message.json()}")
    letters = jobs.dead_letters()
    assert [(letter.last_error, letter.origin) for letter in letters] == [(f"error {n}", "jobs") for n in range(5)]
    assert len(jobs.dead_letters(2)) == 2
    assert received(plane.queue("jobs.dlq")).json() == 0
    assert jobs.redrive([letters[0].id, letters[3].id]) == 1
    assert (jobs.redrive(limit=1), jobs.redrive(), jobs.redrive()) == (1, 2, 0)
    assert counts(jobs.stats()) == {"ready": 4, "dead": 1}
    for wrong in ({"ids": ["nonsense"]}, {"limit": 0}):
        with pytest.raises(InvalidArgument):
            jobs.redrive(**wrong)


def test_redrive_moves_several_batches_and_given_ids(jobs: Queue) -> None:
    for _ in range(2):
        jobs.put_many(range(200))
    for _ in range(2):
        for message in jobs.receive_many(200, extend_for_seconds=0):
            message.reject()
    ids = [letter.id for letter in jobs.dead_letters(400)]
    unknown = [str(uuid.uuid4()) for _ in range(256)]
    assert jobs.redrive([*unknown, ids[0], *unknown, ids[1]]) == 2
    assert jobs.redrive(limit=300) == 300
    assert jobs.redrive() == 98
    assert counts(jobs.stats()) == {"ready": 400}


def test_a_schedule_is_set_listed_triggered_and_removed(jobs: Queue, clock: ManualClock) -> None:
    report = jobs.schedule("report", "*/5 * * * *", {"n": 1}, priority=9)
    assert (report.name, report.next_ms, report.timezone) == ("report", START_MS + 100_000, "UTC")
    assert jobs.schedule("other", "0 9 * * *", b"b", timezone="Europe/Berlin").message.payload == b"b"
    assert [each.name for each in jobs.schedules()] == ["other", "report"]
    clock.advance_ms(100_000)
    message = received(jobs)
    assert (message.json(), message.delivery.priority) == ({"n": 1}, 9)
    assert (jobs.unschedule("report"), jobs.unschedule("report")) == (True, False)
    clock.advance_ms(3_600_000)
    message.ack()
    assert jobs.receive() is None
    for wrong in ({"cron": "nonsense"}, {"cron": "* * * * *", "timezone": "Mars/Base"}):
        with pytest.raises(InvalidArgument):
            jobs.schedule("report", body=1, **wrong)
    with pytest.raises(InvalidName):
        jobs.schedule("a b", "* * * * *", 1)
    with pytest.raises(PayloadTooLarge):
        jobs.schedule("report", "* * * * *", bytes(BLOB))


# Workflow state.


def test_workflow_state_passes_to_the_next_consumer(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a", correlation_id="because")
    first = received(jobs, with_state=True)
    assert first.state is None
    first.save_state({"step": 1})
    assert first.state == {"step": 1}
    clock.advance_ms(30_000)
    second = received(jobs, with_state=True)
    assert second.state == {"step": 1}
    with pytest.raises(Fenced):
        first.save_state({"step": 0})
    second.save_state({"step": 2})
    document = plane.state(f"q/jobs/state/{second.id}").get()
    assert document is not None
    assert (document.value, document.correlation_id) == ({"step": 2}, "because")
    second.ack()
    assert plane.state(f"q/jobs/state/{second.id}").get() is None


def test_saving_state_needs_with_state(jobs: Queue) -> None:
    jobs.put("a")
    with pytest.raises(InvalidArgument, match="with_state=True"):
        received(jobs).save_state(1)


# One commit.


def mark(tx: Transaction, key: bytes, fails: bool = False) -> str:
    tx.put(key, b"done")
    if fails:
        raise LookupError("on purpose")
    return "result"


def test_complete_commits_the_work_and_the_ack_together(plane: Plane, jobs: Queue, clock: ManualClock) -> None:
    jobs.put("a")
    message = received(jobs)
    before = everything(plane)
    with pytest.raises(LookupError):
        message.complete(mark, b"work", True)
    assert (everything(plane), message.settled) == (before, False)
    clock.advance_ms(30_000)
    second = received(jobs)
    before = everything(plane)
    with pytest.raises(QueueMessageLeaseMismatch):
        message.complete(mark, b"work")
    assert (everything(plane), message.settled) == (before, False)
    assert second.complete(mark, b"work") == "result"
    assert (second.settled, plane.pairs.get(b"work"), counts(jobs.stats())) == (True, b"done", {})


async def test_complete_works_asynchronously(url: str) -> None:
    async with holdfast.open_async(url) as plane:
        jobs = plane.queue("jobs")
        await jobs.put("a")
        message = await jobs.receive()
        assert message is not None
        with pytest.raises(LookupError):
            await message.complete(mark, b"work", True)
        assert await plane.pairs.get(b"work") is None
        assert await message.complete(mark, b"work") == "result"
        assert counts(await jobs.stats()) == {}


class Bench:
    """The objects of an atomic list: messages, another queue, a world, a state and a lease; and its operations."""

    def __init__(self, plane: Plane, clock: ManualClock) -> None:
        self.plane = plane
        self.jobs, self.done = plane.queue("jobs"), plane.queue("done")
        self.jobs.put_many(["acked", "given back", "rejected"])
        self.acked, self.given_back, self.rejected = self.jobs.receive_many(3, extend_for_seconds=0)
        self.world, self.state = plane.world("ada"), plane.state("progress")
        self.head = self.world.create().head
        self.etag = self.state.update({"n": 0}).etag
        self.lease = plane.lease("deploy").acquire("ada")

    def commit(self, *, wrong: str = "") -> list[Any]:
        atomic = self.plane.atomic().ack(self.acked)
        atomic.put(self.done, {"n": 1}, **({"priority": 10} if wrong == "put" else {}))
        atomic.append(self.world, ["entry"], expected_head=self.head + (wrong == "append"))
        atomic.update(self.state, {"n": 1}, if_match="nonsense" if wrong == "update" else self.etag)
        atomic.deliver(self.world, DomainEvent(schema="x", payload=bytes(5_000 if wrong == "deliver" else 5)))
        atomic.nack(self.given_back, error="boom")
        atomic.reject(self.rejected, "bang")
        atomic.write("task", "1", {"title": "a"})
        return atomic.check(self.lease).commit()


def test_an_atomic_list_commits_all_operations(plane: Plane, clock: ManualClock) -> None:
    bench = Bench(plane, clock)
    answers = bench.commit()
    assert len(answers) == 9
    assert answers[1].receipts[0].id == received(bench.done).id
    assert (bench.acked.settled, bench.given_back.settled, bench.rejected.settled) == (True, True, True)
    assert counts(bench.jobs.stats()) == {"ready": 1, "dead": 1}
    assert (bench.world.head(), len(bench.world.inbox.read())) == (bench.head + 1, 1)
    document = bench.state.get()
    assert document is not None
    assert document.value == {"n": 1}


FAILURES: dict[str, type[HoldfastError]] = {
    "ack": QueueMessageLeaseMismatch,
    "put": InvalidArgument,
    "append": HeadAdvanced,
    "update": CasMismatch,
    "nack": QueueMessageLeaseMismatch,
    "reject": QueueMessageLeaseMismatch,
    "deliver": HoldfastError,
    "check": Fenced,
}


@pytest.mark.parametrize("wrong", FAILURES)
def test_an_atomic_list_with_a_failing_operation_writes_nothing(plane: Plane, clock: ManualClock, wrong: str) -> None:
    bench = Bench(plane, clock)
    if wrong in ("ack", "nack", "reject"):
        message = {"ack": bench.acked, "nack": bench.given_back, "reject": bench.rejected}[wrong]
        message.nack(intent="defer")
        message.settled = False
    elif wrong == "check":
        bench.lease.release()
    before = everything(plane)
    with pytest.raises(FAILURES[wrong]):
        bench.commit(wrong=wrong)
    assert everything(plane) == before
    assert [each.settled for each in (bench.acked, bench.given_back, bench.rejected)] == [False] * 3


def test_an_atomic_list_has_1_to_256_operations(plane: Plane, jobs: Queue) -> None:
    with pytest.raises(InvalidArgument, match="has no operations"):
        plane.atomic().commit()
    atomic = plane.atomic()
    for _ in range(257):
        atomic.put(jobs, "a")
    with pytest.raises(BatchTooLarge, match="at most 256"):
        atomic.commit()
    with pytest.raises(PayloadTooLarge):
        plane.atomic().put(jobs, bytes(BLOB)).commit()
    assert everything(plane) == []


async def test_an_atomic_list_commits_asynchronously(url: str) -> None:
    async with holdfast.open_async(url) as plane:
        jobs, done = plane.queue("jobs"), plane.queue("done")
        await jobs.put("a")
        message = await jobs.receive()
        assert message is not None
        with pytest.raises(InvalidArgument):
            await plane.atomic().ack(message).put(done, "b", priority=10).commit()
        assert counts(await jobs.stats()) == {"leased": 1}
        await plane.atomic().ack(message).put(done, "b").commit(tier=Tier.IMPORTANT)
        assert (counts(await jobs.stats()), counts(await done.stats())) == ({}, {"ready": 1})


# Automatic extension. Leases are extended while real time passes, so these wait for it. An extension comes after a
# third of a lease: one of nine seconds is not lost by a machine that is busy for six.


def extended_twice(message: Message) -> None:
    """Wait until a lease was extended twice."""
    for _ in range(2):
        before = message.expires_ms
        until(lambda before=before: message.expires_ms > before)


@ON_ONE_BACKEND
def test_the_lease_of_a_running_message_is_extended(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive()
    assert message is not None
    first = message.expires_ms
    until(lambda: message.expires_ms > first + 1_500)
    assert jobs.receive() is None
    message.ack()
    assert (jobs.stats().acked_total, jobs.stats().expired_total, message.lost) == (1, 0, False)


@ON_ONE_BACKEND
async def test_a_lease_is_extended_while_the_event_loop_is_blocked(url: str) -> None:
    """The renewal runs in its own thread."""
    async with holdfast.open_async(url) as plane:
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
    first.nack()
    ended = first.expires_ms
    second = jobs.receive()
    assert second is not None
    extended_twice(second)
    assert (first.lost, first.expires_ms) == (False, ended)
    running.atomic().ack(second).commit()
    assert second.settled


@ON_ONE_BACKEND
def test_a_garbage_collected_message_is_not_extended(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive()
    assert message is not None
    extended_twice(message)
    del message
    gc.collect()
    until(lambda: jobs.stats().expired_total == 1)
    again = jobs.receive(extend_for_seconds=0)
    assert again is not None
    assert again.attempts == 2


@ON_ONE_BACKEND
def test_a_lease_is_extended_up_to_the_cap(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", visibility_seconds=9)
    message = jobs.receive(extend_for_seconds=7.5)
    assert message is not None
    first = message.expires_ms
    until(lambda: jobs.stats().expired_total == 1)
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

    until(somebody_else_takes_it)
    until(lambda: message.lost)
    until(lambda: f"the lease on message {message.id} of jobs was lost" in caplog.text)
    with pytest.raises(QueueMessageLeaseMismatch):
        message.ack()


# Background processing.


def test_due_entries_of_an_unused_queue_are_processed(running: Plane) -> None:
    jobs = running.queue("jobs")
    jobs.put("a", max_attempts=1)
    jobs.put("b", delay_seconds=0.05)
    jobs.put("c", delay_seconds=0.05, ttl_seconds=0.1, priority=0)
    received(jobs, visibility_seconds=0.05)
    until(lambda: counts(jobs.stats()) == {"ready": 1, "dead": 1})
    assert received(jobs).json() == "b"


def test_a_reopened_plane_processes_due_entries(tmp_path: Path) -> None:
    with holdfast.open(f"dir:{tmp_path}", clock=ManualClock()) as plane:  # Whose time is long over.
        plane.queue("jobs").put("a", ttl_seconds=1)
    with holdfast.open(f"dir:{tmp_path}") as plane:
        until(lambda: plane.queue("jobs").stats().ready == 0)


# Events.


def test_everything_that_happens_to_a_message_is_in_the_session_log(
    plane: Plane, jobs: Queue, clock: ManualClock
) -> None:
    receipt = jobs.put("a", max_attempts=2, correlation_id="because")
    received(jobs).nack(intent="defer")
    received(jobs).nack()
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
    received(jobs).nack(error="no route")
    received(jobs).nack(error="no host")
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
    until(lambda: jobs.stats().dead == 1)
    clock.advance_ms(600_000)
    assert served(waiter) is None
    assert events(plane) == ["put", "leased", "expired", "dead-lettered"]


# Several planes on one PostgreSQL.


@pytest.fixture
def nodes(postgres_url: str, clock: ManualClock, tmp_path: Path) -> Iterator[tuple[Plane, Plane]]:
    options = {"clock": clock, "objects": f"dir:{tmp_path / 'objects'}", "activity": str(tmp_path / "activity")}
    with holdfast.open(postgres_url, **options) as one, holdfast.open(postgres_url, **options) as other:
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
    message.nack()
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


def test_postgres_planes_extend_leases_and_sweep(postgres_url: str, tmp_path: Path) -> None:
    with holdfast.open(postgres_url, activity=str(tmp_path)) as plane:
        jobs = plane.queue("jobs")
        jobs.put("a", visibility_seconds=9, max_attempts=1)
        message = jobs.receive()
        assert message is not None
        extended_twice(message)
        del message
        gc.collect()
        until(lambda: jobs.stats().dead == 1)


async def test_a_waiting_task_on_postgres_is_woken(postgres_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with holdfast.open_async(postgres_url, activity=str(tmp_path), clock=clock) as plane:
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
