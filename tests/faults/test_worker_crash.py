"""Worker processes that are killed while they handle a batch: what they had not settled is delivered again."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, QueuePolicy
from tests.support.forked import start_python
from tests.support.http_server import serving
from tests.support.waiting import eventually

HERE = Path(__file__).parent
DEADLINE_SECONDS = 60.0  # Bounds every wait; far longer than any step takes.

pytestmark = pytest.mark.parametrize("kind", ["threads", "tasks"])


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(f"dir:{tmp_path}") as server:
        yield server.url


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.connect(url) as plane:
        yield plane


@contextmanager
def child(url: str, kind: str, batch: int) -> Iterator[subprocess.Popen[bytes]]:
    process = start_python([HERE / "worker_child.py", url, kind, str(batch)], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def lines(process: subprocess.Popen[bytes]) -> Iterator[Any]:
    """What the worker prints, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        yield msgspec.json.decode(line)


def test_a_killed_worker_leaves_exactly_its_unsettled_messages(url: str, plane: Plane, kind: str) -> None:
    """The first batch is acknowledged when the second one is received, and four messages of that by its handler."""
    jobs = plane.queue("jobs")
    words = [""] * 10 + ["ack"] * 4 + ["block"] + [""] * 5
    jobs.put_many([{"n": n, "do": word} for n, word in enumerate(words)])
    with child(url, kind, 10) as worker:
        printed = []
        for line in lines(worker):
            printed.append(line)
            if line == "blocked":
                break
        assert printed == [list(range(10)), list(range(10, 20)), "blocked"]
        assert (jobs.stats().acked_total, jobs.stats().leased) == (14, 6)
    again: list[Any] = []
    while len(again) < 6:
        again += jobs.receive_many(20, wait_seconds=DEADLINE_SECONDS)
    assert [message.json()["n"] for message in again] == list(range(14, 20))
    assert {(message.attempts, message.failure_attempts) for message in again} == {(2, 1)}
    assert {failure.outcome for message in again for failure in message.failures} == {"expired"}
    assert jobs.receive_many(20) == []


def test_a_message_that_kills_its_process_becomes_a_dead_letter_alone(url: str, plane: Plane, kind: str) -> None:
    jobs = plane.queue("jobs")
    jobs.set_policy(QueuePolicy(max_attempts=3))
    jobs.put_many([{"n": n, "do": "kill" if n == 4 else ""} for n in range(10)])
    batches: list[list[int]] = []
    for _ in range(3):
        with child(url, kind, 10) as worker:
            batches += lines(worker)
        eventually(lambda: not jobs.stats().leased, "the leases of the killed process have expired")
    assert jobs.stats().dead == 1
    with child(url, kind, 10) as worker:
        eventually(lambda: jobs.stats().acked_total == 9, "every other message was handled")
    assert batches[0] == list(range(10))
    assert {len(batch) for batch in batches[1:]} == {1}
    assert [letter.failure_attempts for letter in jobs.dead_letters()] == [3]
    assert jobs.stats().expired_total == 12  # All ten once, and the one that kills twice more.
