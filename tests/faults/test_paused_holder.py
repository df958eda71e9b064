"""A holder that was paused past the end of its lease cannot write with its old fence.

Run as a program, this file is such a holder: a process that is stopped while it holds the lease.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import Plane, Transaction
from fastness.errors import Fenced, FencingMismatch, LeaseConflict, LeaseExpired
from fastness.testing.clock import ManualClock
from tests.support.forked import start_python

MARK = b"written under the lease"
WAIT_SECONDS = 60.0  # A generous deadline for conditions that the tests wait for.


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    url = "memory:" if request.param == "memory" else f"dir:{tmp_path}"
    with fastness.open(url, clock=clock) as plane:
        yield plane


def mark(tx: Transaction, fence: Callable[[Transaction], int], by: bytes) -> None:
    tx.put(MARK, by)
    fence(tx)


def attempts(plane: Plane, lease: Any) -> dict[str, Callable[[], object]]:
    """All operations that a holder may try under its lease."""
    fence = fastness.fenced(lease)
    return {
        "update": lambda: plane.state("deploy").update("stale", lease=lease),
        "update another": lambda: plane.state("elsewhere").update("stale", lease=lease),
        "remove": lambda: plane.state("deploy").remove(lease=lease),
        "transact": lambda: plane.transact(mark, fence, b"stale"),
        "keepalive": lease.keepalive,
    }


def marked(plane: Plane) -> bytes | None:
    return plane.transact(Transaction.get, MARK)


# (a) In one process, with a manual clock.


def test_a_paused_holder_is_refused_after_another_owner_acquired(plane: Plane, clock: ManualClock) -> None:
    paused_child = plane.lease("deploy").acquire("sleeper", ttl_seconds=10)
    plane.state("deploy").update("before", lease=paused_child)
    clock.advance_ms(10_000)
    heir = plane.lease("deploy").acquire("heir", ttl_seconds=10)
    assert heir.fence > paused_child.fence
    kept = plane.state("deploy").update("heir", lease=heir)
    plane.transact(mark, fastness.fenced(heir), b"heir")

    for name, attempt in attempts(plane, paused_child).items():
        with pytest.raises(LeaseConflict):
            attempt()
        document = plane.state("deploy").get()
        assert document is not None, name
        assert (document.value, document.etag) == ("heir", kept.etag), name
    assert not paused_child.release()
    assert marked(plane) == b"heir"
    assert plane.state("elsewhere").get() is None
    assert plane.lease("deploy").describe().lease.expires_ms == heir.expires_ms


def test_a_paused_holder_is_refused_even_without_a_new_owner(plane: Plane, clock: ManualClock) -> None:
    """Another owner may have held the lease in between, so it must acquire again and read the state."""
    paused_child = plane.lease("deploy").acquire("sleeper", ttl_seconds=10)
    plane.state("deploy").update("before", lease=paused_child)
    clock.advance_ms(10_000)
    for attempt in attempts(plane, paused_child).values():
        with pytest.raises(LeaseExpired):
            attempt()
    assert plane.state("deploy").get().value == "before"
    assert marked(plane) is None


def test_a_paused_holder_is_refused_after_its_own_restart_acquired(plane: Plane, clock: ManualClock) -> None:
    """The restarted owner holds the same lease with a higher fence."""
    paused_child = plane.lease("deploy").acquire("worker-7", ttl_seconds=10)
    restarted = plane.lease("deploy").acquire("worker-7", ttl_seconds=10)
    assert (restarted.id, restarted.fence) == (paused_child.id, paused_child.fence + 1)
    plane.state("deploy").update("restarted", lease=restarted)
    for attempt in attempts(plane, paused_child).values():
        with pytest.raises(FencingMismatch):
            attempt()
    assert not paused_child.release()
    assert plane.state("deploy").get().value == "restarted"
    assert plane.lease("deploy").describe().held


def test_a_paused_holder_is_refused_after_many_other_grants(plane: Plane, clock: ManualClock) -> None:
    paused_child = plane.lease("deploy").acquire("sleeper", ttl_seconds=10)
    clock.advance_ms(10_000)
    for number in range(5):
        with plane.lease("deploy").acquire(f"other-{number}") as lease:
            plane.state("deploy").update(number, lease=lease)
    for attempt in attempts(plane, paused_child).values():
        with pytest.raises(LeaseConflict):
            attempt()
    assert plane.state("deploy").get().value == 4


# (b) In two processes that share a PostgreSQL, with real time.


def write_line(**words: Any) -> None:
    os.write(1, msgspec.json.encode(words) + b"\n")


def wait_for_parent() -> None:
    if not sys.stdin.readline():
        sys.exit("the parent is gone")


def child(url: str, folder: str, where: str) -> None:
    """Hold the lease, be stopped, and then continue writing."""
    with fastness.open(url, activity=folder) as plane:
        lease = plane.lease("deploy").acquire("sleeper", ttl_seconds=5)
        plane.state("deploy").update("before", lease=lease)
        if where == "between calls":
            write_line(fence=lease.fence)
            wait_for_parent()
            tries = attempts(plane, lease)
        else:
            tries = {"transact": lambda: plane.transact(pause_inside, lease)}
        outcomes = {}
        for name, attempt in tries.items():
            try:
                outcomes[name] = f"succeeded: {attempt()!r}"
            except Fenced as error:
                outcomes[name] = error.code
        write_line(outcomes=outcomes, released=lease.release())


def pause_inside(tx: Transaction, lease: Any, paused: list[bool] = []) -> None:  # noqa: B006
    """Check the fence, sleep, then write: the check must still be true when the write is committed."""
    fastness.fenced(lease)(tx)
    if not paused:
        paused.append(True)
        write_line(fence=lease.fence)
        wait_for_parent()
    tx.put(MARK, b"stale")


@contextmanager
def paused_child(url: str, folder: Path, where: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start_python([__file__, url, folder, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the child ended with {process.wait(WAIT_SECONDS)}"
    return dict(msgspec.json.decode(line))


@pytest.mark.parametrize(
    ("where", "refused"),
    [
        ("between calls", ["update", "update another", "remove", "transact", "keepalive"]),
        ("inside a transaction", ["transact"]),
    ],
)
def test_a_process_stopped_past_its_lease_cannot_write(
    where: str, refused: list[str], postgres_url: str, tmp_path: Path
) -> None:
    """The lease expires while its holder is stopped, between calls or during a commit."""
    with (
        paused_child(postgres_url, tmp_path / "child", where) as process,
        fastness.open(postgres_url, activity=str(tmp_path / "parent")) as plane,
    ):
        fence = read_line(process)["fence"]
        process.send_signal(signal.SIGSTOP)
        heir = plane.lease("deploy").acquire("heir", ttl_seconds=600, wait_seconds=WAIT_SECONDS)
        assert heir.fence > fence
        kept = plane.state("deploy").update("heir", lease=heir)

        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        answer = read_line(process)
        assert answer == {"outcomes": dict.fromkeys(refused, "lease_conflict"), "released": False}

        document = plane.state("deploy").get()
        assert document is not None
        assert (document.value, document.etag) == ("heir", kept.etag)
        assert plane.state("elsewhere").get() is None
        assert marked(plane) is None
        heir.keepalive()
        assert heir.release()


if __name__ == "__main__":
    child(*sys.argv[1:])
