"""Ordered locks of a server whose callers are killed, and of callers whose server is stopped.

Run as a program, this file is a caller that waits for a lock, or holds it until it is killed.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane
from fastness.errors import Fenced, LeaseExpired
from tests.support.backends import rotating_backends
from tests.support.forked import start_python
from tests.support.http_server import serving
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
ROW = ["record_id", "task/1"]
DEADLINE_SECONDS = 60.0


# What callers and the server do is the same on every backend.
@pytest.fixture(params=rotating_backends("rocksdb"))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server on every backend, in a process of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = "memory:" if backend == "memory" else f"dir:{tmp_path / 'data'}"
    with serving(url) as server:
        yield server


@contextmanager
def caller(url: str, *, lease_seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["-m", "tests.faults.test_shared_locks", url, str(lease_seconds)]
    process = start_python(arguments, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def waiting(plane: Plane) -> int:
    return sum(lock.is_waiting for session in plane.locks.sessions().sessions for lock in session.locks)


def test_a_caller_that_is_killed_while_it_waits_leaves_no_claim(server: Any) -> None:
    """Its lease is long, so only the end of its connection can have removed it."""
    with fastness.connect(server.url) as plane, caller(server.url, lease_seconds=3_600) as killed:
        held = plane.locks.acquire(ROW)
        eventually(lambda: waiting(plane) == 1)
        killed.kill()
        eventually(lambda: waiting(plane) == 0)
        held.release()
        with ThreadPoolExecutor(1) as other:
            heir = other.submit(plane.locks.acquire, ROW, timeout_seconds=0).result(DEADLINE_SECONDS)
        assert heir.fence == 2
        heir.release()
        assert plane.locks.sessions().sessions == []


def test_the_lock_of_a_killed_holder_passes_on_when_its_lease_ends(server: Any) -> None:
    with fastness.connect(server.url) as plane, caller(server.url, lease_seconds=1) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"held\n"
        killed.kill()
        with plane.locks.acquire(ROW, timeout_seconds=DEADLINE_SECONDS) as heir:
            assert heir.fence == 2


def test_a_server_that_stops_longer_than_a_lease_fences_the_holder(server: Any) -> None:
    with (
        fastness.connect(server.url, patience_seconds=DEADLINE_SECONDS) as plane,
        fastness.connect(server.url, patience_seconds=DEADLINE_SECONDS) as other,
    ):
        held = plane.locks.acquire(ROW, lease_seconds=1)
        other.queues()  # Connects it.
        server.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: held.is_lost)  # It does not need the server to know that.
        finally:
            server.process.send_signal(signal.SIGCONT)
        with ThreadPoolExecutor(1) as thread:
            heir = thread.submit(other.locks.acquire, ROW, timeout_seconds=DEADLINE_SECONDS).result(DEADLINE_SECONDS)
        assert (held.fence, heir.fence) == (1, 2)
        with pytest.raises(LeaseExpired, match="could not be renewed before it expired"):
            held.check()
        with pytest.raises(Fenced):
            plane.atomic().check(held).write("task", "1", {"by": "stale"}).commit()
        with pytest.raises(Fenced), held:
            pass
        assert plane.entities.get("task", "1") is None
        heir.check()
        heir.release()


def test_a_caller_that_closes_its_http_connection_leaves_no_claim(server: Any) -> None:
    session = {"id": "the-secret-of-this-session"}
    body = {"session": session, "claim": "1", "paths": [ROW], "lease_seconds": 3_600, "wait_seconds": 20}
    with fastness.connect(server.url) as plane, plane.locks.acquire(ROW):
        connection = server.connect()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/locks/acquire", msgspec.json.encode(body), headers)
        eventually(lambda: waiting(plane) == 1)
        connection.close()
        eventually(lambda: waiting(plane) == 0)
        assert plane.locks.stats()["record_id"].timeouts == 0  # It did not wait for the end of `wait_seconds`.


async def test_a_cancelled_call_leaves_no_claim_at_the_server(server: Any) -> None:
    async with fastness.connect_async(server.url) as plane:
        held = await plane.locks.acquire(ROW, lease_seconds=60)
        calls = [asyncio.create_task(plane.locks.acquire(ROW, timeout_seconds=600)) for _ in range(5)]
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await plane.locks.stats())["record_id"].waiting < len(calls):
                await asyncio.sleep(0.002)
            for call in calls[:-1]:
                call.cancel()
            await asyncio.wait(calls[:-1])
            await held.release()
            heir = await calls[-1]
            await heir.release()
            while (await plane.locks.sessions()).sessions:
                await asyncio.sleep(0.002)


def main(url: str, lease_seconds: str) -> None:
    with (
        fastness.connect(url) as plane,
        plane.locks.acquire(ROW, timeout_seconds=DEADLINE_SECONDS, lease_seconds=float(lease_seconds)),
    ):
        print("held", flush=True)
        time.sleep(DEADLINE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
