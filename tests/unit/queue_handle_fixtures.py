"""Fixtures of the queue handle tests."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, Transaction
from fastness.handles.sync.messages import Message
from fastness.handles.sync.queues import MessageOptions, Queue
from fastness.testing.clock import ManualClock
from fastness.wire.inboxes import DomainEvent
from fastness.wire.queues import QueueStats
from tests.support.waiting import eventually

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
    with fastness.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def running(url: str) -> Iterator[Plane]:
    """A plane with the system clock."""
    with fastness.open(url) as plane:
        yield plane


@pytest.fixture
def jobs(plane: Plane) -> Queue:
    return plane.queue("jobs")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(16)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # What still waits is woken when the plane is closed.


def received(queue: Queue, **options: Any) -> Message:
    """The next message, which must exist; its lease is not extended."""
    message = queue.receive(**{"extend_for_seconds": 0, **options})
    assert message is not None
    return message


def waiting(threads: ThreadPoolExecutor, queue: Queue, line: int = 1, **options: Any) -> "Future[Message | None]":
    """A waiting consumer, the last of `line`."""
    waiter = threads.submit(queue.receive, **{"wait_seconds": LONG, "extend_for_seconds": 0, **options})
    eventually(lambda: queue.stats().waiting_consumers == line)
    return waiter


def served(waiter: "Future[Message | None]") -> Any:
    message = waiter.result(PATIENCE_SECONDS)
    return None if message is None else message.json()


def counts(stats: QueueStats) -> dict[str, int]:
    """The states that have messages, with their numbers."""
    places = ("ready", "delayed", "leased", "blocked", "dead")
    return {place: getattr(stats, place) for place in places if getattr(stats, place)}


def records(plane: Plane) -> list[dict[str, str]]:
    return [msgspec.json.decode(each.record) for each in plane.activity.read(kind="queues").records]


def events(plane: Plane) -> list[str]:
    return [record["event"] for record in records(plane)]


def mark(tx: Transaction, key: bytes, fails: bool = False) -> str:
    tx.put(key, b"done")
    if fails:
        raise LookupError("on purpose")
    return "result"


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
        options: MessageOptions = {"priority": 10} if wrong == "put" else {}
        atomic.put(self.done, {"n": 1}, **options)
        atomic.append(self.world, ["entry"], expected_head=self.head + (wrong == "append"))
        atomic.update(self.state, {"n": 1}, if_match="nonsense" if wrong == "update" else self.etag)
        atomic.deliver(self.world, DomainEvent(schema="x", payload=bytes(5_000 if wrong == "deliver" else 5)))
        atomic.nack(self.given_back, error="boom", delay_seconds=0)
        atomic.reject(self.rejected, "bang")
        atomic.write("task", "1", {"title": "a"})
        return atomic.check(self.lease).commit()


def extended_twice(message: Message) -> None:
    """Wait until a lease was extended twice."""
    for _ in range(2):
        before = message.expires_ms
        eventually(lambda: message.expires_ms > before)  # noqa: B023
