"""Lease and state handles: waiting, with blocks, keys, invalid arguments, and fences."""

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastness
from fastness import AsyncPlane, Plane, Transaction
from fastness.errors import (
    CasMismatch,
    Fenced,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    LeaseExpired,
    LeaseHeld,
    LeaseRequired,
    TxnMismatch,
)
from fastness.limits import LEASE_TTL_SECONDS_MAX, LEASE_WAIT_SECONDS_MAX
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.leases import LeaseProof
from tests.support.failures import Failures
from tests.support.waiting import eventually, eventually_async
from tests.unit.stored_pairs import everything

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(16)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # Remaining waiters are woken when the plane is closed.


def in_line(plane: Plane, waiting: int, key: str = "deploy") -> None:
    eventually(lambda: plane.lease(key).describe().waiting == waiting)


async def in_line_async(plane: AsyncPlane, waiting: int, key: str = "deploy") -> None:
    async def are_there() -> bool:
        return (await plane.lease(key).describe()).waiting == waiting

    await eventually_async(are_there)


# Granting.


def test_a_lease_has_its_properties(plane: Plane) -> None:
    lease = plane.lease("orders/1234").acquire("ada", ttl_seconds=1.5, txn_id="t-1")
    assert (lease.key, lease.owner, lease.fence, lease.ttl_seconds) == ("orders/1234", "ada", 1, 1.5)
    assert lease.expires_ms == START_MS + 1_500
    assert lease.expires_at == datetime.fromtimestamp(lease.expires_ms / 1_000, UTC)
    assert (lease.proof.key, lease.proof.lease_id, lease.proof.fence) == (lease.key, lease.id, lease.fence)
    assert (lease.proof.txn_id, lease.proof.universe) == ("t-1", "main")
    assert repr(lease) == "<lease on orders/1234, fence 1, until 2023-11-14T22:13:21.500+00:00>"


def test_an_acquire_without_owner_is_a_new_owner(plane: Plane) -> None:
    plane.lease("deploy").acquire()
    with pytest.raises(LeaseHeld):
        plane.lease("deploy").acquire()


def test_an_acquire_without_wait_is_refused_with_the_holder(plane: Plane) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=5)
    with pytest.raises(LeaseHeld, match=r"ada holds deploy for another 5\.000 s") as held:
        plane.lease("deploy").acquire("bob")
    assert (held.value.key, held.value.owner, held.value.expires_ms) == ("deploy", "ada", lease.expires_ms)
    assert plane.lease("deploy").describe().waiting == 0


def test_a_with_block_releases_its_lease(plane: Plane) -> None:
    with plane.lease("deploy").acquire("ada") as lease:
        assert plane.lease("deploy").describe().held
    assert not plane.lease("deploy").describe().held
    assert not lease.release()
    with pytest.raises(LeaseExpired):
        lease.keepalive()


def test_a_with_block_that_raises_releases_its_lease(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.lease("deploy").acquire("ada"):
        raise ZeroDivisionError
    assert plane.lease("deploy").acquire("bob").fence == 2


def test_a_with_block_renews_its_lease(plane: Plane, clock: ManualClock) -> None:
    """The plane's clock moves only here; a renewal is due after half a second of real time."""
    with plane.lease("deploy").acquire("ada", ttl_seconds=1.5) as lease:
        clock.advance_ms(1_000)
        eventually(lambda: lease.expires_ms == START_MS + 2_500)
        clock.advance_ms(1_000)
        with pytest.raises(LeaseHeld):
            plane.lease("deploy").acquire("bob")
        assert not lease.lost
    assert plane.lease("deploy").acquire("bob").fence == 2


async def test_an_async_with_block_renews_its_lease_while_the_event_loop_is_blocked(clock: ManualClock) -> None:
    async with fastness.open_async("memory:", clock=clock) as plane:
        async with await plane.lease("deploy").acquire("ada", ttl_seconds=1.5) as lease:
            clock.advance_ms(1_000)
            eventually(lambda: lease.expires_ms == START_MS + 2_500)  # There is no `await`.
            clock.advance_ms(1_000)
            with pytest.raises(LeaseHeld):
                await plane.lease("deploy").acquire("bob")
        with pytest.raises(LeaseExpired, match="ended before its block did"):
            async with await plane.lease("deploy").acquire("ada", ttl_seconds=600):
                clock.advance_ms(600_000)
        with pytest.raises(ZeroDivisionError):
            async with await plane.lease("deploy").acquire("ada", ttl_seconds=600) as lease:
                clock.advance_ms(600_000)
                raise ZeroDivisionError


def test_a_with_block_whose_lease_was_lost_raises_at_its_end(plane: Plane, clock: ManualClock) -> None:
    with (
        pytest.raises(LeaseExpired, match=r"deploy ended before its block did.*acquire it again"),
        plane.lease("deploy").acquire("ada", ttl_seconds=600) as lease,
    ):
        clock.advance_ms(600_000)
        plane.lease("deploy").acquire("bob", ttl_seconds=600)
    assert lease.lost
    assert plane.lease("deploy").describe().held, "the next holder's lease was not released"


def test_a_refused_renewal_in_a_with_block_is_seen_and_raised(plane: Plane, clock: ManualClock) -> None:
    with (
        pytest.raises(Fenced, match=r"another owner.*; stop, acquire it again"),
        plane.lease("deploy").acquire("ada", ttl_seconds=1.5) as lease,
    ):
        clock.advance_ms(1_500)
        plane.lease("deploy").acquire("bob", ttl_seconds=600)
        eventually(lambda: lease.lost)


def test_the_error_of_a_with_block_is_not_hidden(plane: Plane, clock: ManualClock) -> None:
    for lost in ("at-the-end", "in-the-block"):
        with pytest.raises(ZeroDivisionError), plane.lease(lost).acquire("ada", ttl_seconds=600) as lease:
            clock.advance_ms(600_000)
            if lost == "in-the-block":
                with pytest.raises(LeaseExpired):
                    lease.keepalive()
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), plane.lease("closed").acquire("ada"):
        plane.close()
        raise ZeroDivisionError


def test_a_lease_that_was_released_in_its_block_is_not_lost(plane: Plane) -> None:
    with plane.lease("deploy").acquire("ada") as lease:
        assert lease.release()
        plane.lease("deploy").acquire("bob")
    assert not lease.lost
    with pytest.raises(Fenced), lease:
        raise AssertionError("its block was entered")
    assert plane.lease("deploy").describe().lease.owner == "bob"


def test_a_with_block_of_an_older_lease_starts_with_a_renewal(plane: Plane, clock: ManualClock) -> None:
    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    clock.advance_ms(599_000)
    with plane.lease("deploy").held(first.id, fence=first.fence, ttl_seconds=600) as lease:
        assert lease.expires_ms == START_MS + 1_199_000
    with pytest.raises(LeaseExpired), plane.lease("deploy").held(first.id, fence=first.fence):
        raise AssertionError("its block was entered")


def test_a_lease_outside_of_a_with_block_is_not_renewed(plane: Plane) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=0.03)
    with plane.lease("other").acquire("ada", ttl_seconds=1.5) as other:
        first = other.expires_ms
        plane.lease("other").held(other.id, fence=other.fence).keepalive(3)
        eventually(lambda: other.expires_ms > first)  # The renewer had the time to renew both.
    assert (lease.expires_ms, lease.lost) == (START_MS + 30, False)


def test_a_keepalive_lasts_as_long_as_the_acquire_and_never_shortens(plane: Plane, clock: ManualClock) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=10)
    clock.advance_ms(4_000)
    assert lease.keepalive() == lease.expires_at
    assert lease.expires_ms == START_MS + 14_000
    assert lease.keepalive(0.001).timestamp() * 1_000 == START_MS + 14_000
    assert lease.keepalive(60).timestamp() * 1_000 == START_MS + 64_000
    assert plane.lease("deploy").describe().lease.expires_ms == START_MS + 64_000


def test_a_lease_of_another_process_is_used_by_its_id(plane: Plane, clock: ManualClock) -> None:
    first = plane.lease("deploy").acquire("ada", ttl_seconds=10, txn_id="t-1")
    held = plane.lease("deploy").held(first.id, fence=first.fence, txn_id="t-1")
    assert (held.key, held.proof, held.expires_ms) == ("deploy", first.proof, 0)
    plane.state("deploy").update(1, lease=held)
    held.keepalive()
    assert held.expires_ms == clock.now_ms() + 30_000
    assert held.release() is True
    assert first.release() is False
    second = plane.lease("deploy").acquire("bob")
    with pytest.raises(Fenced):
        held.keepalive()
    for wrong in (("x", second.fence), (second.id, first.fence)):
        with pytest.raises(Fenced):
            plane.lease("deploy").held(wrong[0], fence=wrong[1]).keepalive()
    assert plane.lease("deploy").describe().held


async def test_a_lease_of_another_process_is_used_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        first = await plane.lease("deploy").acquire("ada")
        assert await plane.lease("deploy").held(first.id, fence=first.fence).release() is True


def test_a_keepalive_of_zero_seconds_is_refused(plane: Plane) -> None:
    """Zero is not the default, and a lease cannot be extended by nothing."""
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=10)
    with pytest.raises(InvalidArgument, match="ttl_seconds"):
        lease.keepalive(0)


def test_a_proof_of_another_transaction_is_refused(plane: Plane) -> None:
    lease = plane.lease("deploy").acquire("ada", txn_id="t-1")
    plane.state("deploy").update(1, lease=lease)
    again = plane.lease("deploy").acquire("ada", txn_id="t-2")
    for other in ("t-1", None):
        again.proof = LeaseProof(again.key, again.id, again.fence, other)
        with pytest.raises(TxnMismatch, match="t-2"):
            plane.state("deploy").update(2, lease=again)
    free = plane.lease("free").acquire("ada")
    free.proof = LeaseProof(free.key, free.id, free.fence, "any")
    plane.state("free").update(1, lease=free)


# Waiting, in threads.


def test_a_waiter_gets_a_released_lease(plane: Plane, threads: ThreadPoolExecutor) -> None:
    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=600)
    in_line(plane, 1)
    assert first.release()
    second = waiter.result(PATIENCE_SECONDS)
    assert (second.owner, second.fence) == ("bob", 2)
    assert plane.lease("deploy").describe().waiting == 0


def test_a_waiter_gets_an_expired_lease(plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", ttl_seconds=7, wait_seconds=3_600)
    in_line(plane, 1)
    clock.advance_ms(599_999)
    assert plane.lease("deploy").describe().lease.owner == "ada"
    clock.advance_ms(1)
    lease = waiter.result(PATIENCE_SECONDS)
    assert (lease.owner, lease.expires_ms) == ("bob", START_MS + 607_000)


def test_a_waiter_wakes_when_a_lease_expires(url: str) -> None:
    """With the system clock, which cannot notify waiters."""
    threads = ThreadPoolExecutor(1)
    with fastness.open(url) as plane:
        plane.lease("deploy").acquire("ada", ttl_seconds=0.05)
        waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=LEASE_WAIT_SECONDS_MAX)
        assert waiter.result(PATIENCE_SECONDS).fence == 2


def test_a_lease_of_a_dead_holder_passes_on_after_the_clock_was_set_back(plane: Plane, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    clock.advance_ms(7_200_000)
    plane.lease("k").acquire(owner="ada", ttl_seconds=30)
    clock.jump_to_ms(now_ms)
    for left in ("30.000", "20.000", "10.000"):  # The first refusal stores when it ends.
        with pytest.raises(LeaseHeld, match=f"another {left} s"):
            plane.lease("k").acquire(owner="bob")
        clock.advance_ms(10_000)
    assert plane.lease("k").acquire(owner="bob").fence == 2


def test_waiting_threads_are_served_in_order(plane: Plane, threads: ThreadPoolExecutor) -> None:
    """First come, first served."""
    served: list[int] = []

    def wait(number: int) -> None:
        with plane.lease("deploy").acquire(f"waiter-{number}", wait_seconds=600) as lease:
            served.append(number)
            assert lease.fence == number + 2

    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiters: list[Future[None]] = []
    for number in range(8):
        waiters.append(threads.submit(wait, number))
        in_line(plane, number + 1)
    first.release()
    for waiter in waiters:
        waiter.result(PATIENCE_SECONDS)
    assert served == list(range(8))


def test_a_waiter_that_times_out_does_not_block_the_others(
    plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    """A waiter with a shorter wait leaves without the lease."""
    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    acquire = plane.lease("deploy").acquire
    impatient = threads.submit(acquire, "bob", wait_seconds=300)
    in_line(plane, 1)
    waiter = threads.submit(acquire, "eve", wait_seconds=600)
    in_line(plane, 2)
    clock.advance_ms(300_000)
    with pytest.raises(LeaseHeld, match="ada"):
        impatient.result(PATIENCE_SECONDS)
    in_line(plane, 1)
    first.release()
    assert waiter.result(PATIENCE_SECONDS).fence == 2


def test_a_wait_that_times_out_names_the_holder(plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    before = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=5)
    in_line(plane, 1)
    clock.advance_ms(4_999)
    in_line(plane, 1)
    clock.advance_ms(1)
    with pytest.raises(LeaseHeld, match="ada") as held:
        waiter.result(PATIENCE_SECONDS)
    assert held.value.expires_ms == before.expires_ms
    assert plane.lease("deploy").describe().waiting == 0


def test_a_wait_behind_others_that_times_out_names_the_holder(plane: Plane, threads: ThreadPoolExecutor) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=600)
    in_line(plane, 1)
    for wait_seconds in (0, 0.01):
        with pytest.raises(LeaseHeld, match="ada"):
            plane.lease("deploy").acquire("eve", wait_seconds=wait_seconds)
    in_line(plane, 1)
    lease.release()
    assert waiter.result(PATIENCE_SECONDS).owner == "bob"


def test_a_holder_renews_while_others_wait(plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    """It does not wait in line."""
    plane.lease("deploy").acquire("ada", ttl_seconds=10)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=600)
    in_line(plane, 1)
    clock.advance_ms(9_000)
    renewed = plane.lease("deploy").acquire("ada", ttl_seconds=10, wait_seconds=PATIENCE_SECONDS)
    assert (renewed.fence, renewed.expires_ms) == (2, START_MS + 19_000)
    clock.advance_ms(9_999)
    in_line(plane, 1)
    renewed.keepalive(1)
    in_line(plane, 1)
    clock.advance_ms(1_000)
    assert waiter.result(PATIENCE_SECONDS).fence == 3


def test_waiting_for_one_lease_does_not_block_another(plane: Plane, threads: ThreadPoolExecutor) -> None:
    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", wait_seconds=600)
    in_line(plane, 1)
    for key in ("deploy2", "deploy/2", "deplo"):
        assert plane.lease(key).acquire("bob", wait_seconds=600).fence == 1
    first.release()
    waiter.result(PATIENCE_SECONDS)


def test_a_holder_that_loses_its_lease_while_renewing_waits(
    plane: Plane, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the holder when the call started, and is not when it renews."""
    first = plane.lease("deploy").acquire("ada", ttl_seconds=600)
    waiter = threads.submit(plane.lease("deploy").acquire, "bob", ttl_seconds=600, wait_seconds=600)
    in_line(plane, 1)
    database = plane._transport.services.database  # type: ignore[attr-defined]
    read = database.read

    def read_and_lose(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        monkeypatch.setattr(database, "read", read)
        first.release()
        waiter.result(PATIENCE_SECONDS)
        return found

    monkeypatch.setattr(database, "read", read_and_lose)
    renewing = threads.submit(plane.lease("deploy").acquire, "ada", wait_seconds=600)
    second = waiter.result(PATIENCE_SECONDS)
    eventually(lambda: renewing.done() or plane.lease("deploy").describe().waiting == 1)
    second.release()
    assert renewing.result(PATIENCE_SECONDS).fence == 3


# Waiting, in tasks.


async def test_waiting_tasks_are_served_in_order(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        served: list[int] = []

        async def wait(number: int) -> None:
            async with await plane.lease("deploy").acquire(f"waiter-{number}", wait_seconds=600):
                served.append(number)

        first = await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(wait(number))
                await in_line_async(plane, number + 1)
            assert await first.release()
        assert served == list(range(8))
        assert not (await plane.lease("deploy").describe()).held


async def test_a_waiting_task_gets_an_expired_lease(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiter = asyncio.create_task(plane.lease("deploy").acquire("bob", wait_seconds=3_600))
        await in_line_async(plane, 1)
        clock.advance_ms(600_000)
        assert (await asyncio.wait_for(waiter, PATIENCE_SECONDS)).fence == 2


async def test_a_task_whose_wait_times_out_gets_the_holder(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiter = asyncio.create_task(plane.lease("deploy").acquire("bob", wait_seconds=5))
        await in_line_async(plane, 1)
        clock.advance_ms(5_000)
        with pytest.raises(LeaseHeld, match="ada"):
            await asyncio.wait_for(waiter, PATIENCE_SECONDS)
        with pytest.raises(LeaseHeld, match="ada"):
            await plane.lease("deploy").acquire("bob", wait_seconds=0)


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_cancelled_waiter_leaves_the_line(url: str, clock: ManualClock, place: int) -> None:
    """The others are served in order, wherever it stood."""
    async with fastness.open_async(url, clock=clock) as plane:
        first = await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiters = []
        for number in range(3):
            acquiring = plane.lease("deploy").acquire(f"waiter-{number}", ttl_seconds=600, wait_seconds=600)
            waiters.append(asyncio.create_task(acquiring))
            await in_line_async(plane, number + 1)
        waiters[place].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[place]
        await in_line_async(plane, 2)
        lease = first
        for number in {0, 1, 2} - {place}:
            await lease.release()
            lease = await asyncio.wait_for(waiters[number], PATIENCE_SECONDS)
            assert lease.owner == f"waiter-{number}"
        assert (await plane.lease("deploy").describe()).waiting == 0


async def test_a_task_renews_its_lease_while_others_wait(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiter = asyncio.create_task(plane.lease("deploy").acquire("bob", wait_seconds=600))
        await in_line_async(plane, 1)
        renewed = await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        assert renewed.fence == 2
        await in_line_async(plane, 1)
        await renewed.release()
        assert (await asyncio.wait_for(waiter, PATIENCE_SECONDS)).fence == 3


async def test_a_former_holder_waits_behind_others(url: str, clock: ManualClock) -> None:
    """Otherwise an owner that acquires and releases repeatedly would starve the others."""
    async with fastness.open_async(url, clock=clock) as plane:
        first = await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiter = asyncio.create_task(plane.lease("deploy").acquire("bob", ttl_seconds=600, wait_seconds=600))
        await in_line_async(plane, 1)
        await first.release()
        again = asyncio.create_task(plane.lease("deploy").acquire("ada", ttl_seconds=600, wait_seconds=600))
        done, _ = await asyncio.wait([waiter, again], timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        served = [task.result().owner for task in done]
        for task in (waiter, again):
            task.cancel()
        await asyncio.gather(waiter, again, return_exceptions=True)
        assert served == ["bob"]


async def test_a_cancelled_acquire_holds_nothing(url: str, clock: ManualClock) -> None:
    """Wherever it is cancelled, a granted lease is released."""
    async with fastness.open_async(url, clock=clock) as plane:
        for steps in range(30):
            acquiring = asyncio.create_task(plane.lease("deploy").acquire("ada", ttl_seconds=600))
            for _ in range(steps):
                await asyncio.sleep(0)
            acquiring.cancel()
            (outcome,) = await asyncio.gather(acquiring, return_exceptions=True)
            if not isinstance(outcome, asyncio.CancelledError):
                await outcome.release()
            assert not (await plane.lease("deploy").describe()).held, f"cancelled after {steps} steps"


# Events.


def told(plane: Plane) -> list[tuple[str, str, str, int]]:
    """The lease events in the session log."""
    records = [msgspec.json.decode(each.record) for each in plane.activity.read(kind="leases").records]
    return [(each["event"], each["key"], each["owner"], each["waited_ms"]) for each in records]


def test_only_waits_and_refusals_are_in_the_session_log(
    plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    acquire = plane.lease("deploy").acquire
    acquire("ada", ttl_seconds=600)
    acquire("ada", ttl_seconds=600)  # A renewal does not wait.
    with pytest.raises(LeaseHeld):
        acquire("bob")
    waiter = threads.submit(acquire, "eve", ttl_seconds=600, wait_seconds=3_600)
    in_line(plane, 1)
    impatient = threads.submit(acquire, "bob", wait_seconds=0.01)  # Behind others, by the clock on the wall.
    with pytest.raises(LeaseHeld):
        impatient.result(PATIENCE_SECONDS)
    clock.advance_ms(600_000)
    waiter.result(PATIENCE_SECONDS)
    clock.advance_ms(600_000)
    acquire("bob").release()
    assert told(plane) == [
        ("refused", "deploy", "bob", 0),
        ("refused", "deploy", "bob", 0),
        ("granted", "deploy", "eve", 600_000),
    ]


async def test_a_cancelled_waiter_is_in_the_session_log(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiter = asyncio.create_task(plane.lease("deploy").acquire("bob", wait_seconds=600))
        await in_line_async(plane, 1)
        clock.advance_ms(5_000)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        (record,) = (await plane.activity.read(kind="leases")).records
        assert msgspec.json.decode(record.record) == {
            "event": "gone",
            "key": "deploy",
            "owner": "bob",
            "waited_ms": 5_000,
            "at_ms": START_MS + 5_000,
        }


# Listing.


def test_a_lease_that_was_never_acquired_has_no_grant(plane: Plane) -> None:
    described = plane.lease("deploy").describe()
    assert (described.lease, described.held, described.waiting) == (None, False, 0)
    assert everything(plane) == []


def test_a_lease_is_described_during_and_after_its_time(plane: Plane, clock: ManualClock) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=1, txn_id="t-1")
    described = plane.lease("deploy").describe()
    assert described.held
    granted = described.lease
    assert (granted.key, granted.lease_id, granted.owner, granted.fence) == ("deploy", lease.id, "ada", 1)
    assert (granted.acquired_ms, granted.expires_ms, granted.txn_id) == (START_MS, START_MS + 1_000, "t-1")
    clock.advance_ms(1_000)
    described = plane.lease("deploy").describe()
    assert (described.lease, described.held) == (granted, False)


def test_held_leases_are_listed_by_page(plane: Plane, clock: ManualClock) -> None:
    for number in range(5):
        plane.lease(f"jobs/{number}").acquire("ada", ttl_seconds=1 if number == 2 else 60)
    plane.lease("jobs/3").acquire("ada").release()
    clock.advance_ms(1_000)
    assert [each.key for each in plane.leases().leases] == ["jobs/0", "jobs/1", "jobs/4"]
    assert plane.leases().next is None

    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = plane.leases(after=after, limit=2)
        found += [each.key for each in page.leases]
        after = page.next
    assert found == ["jobs/0", "jobs/1", "jobs/4"]


def test_universes_have_separate_leases_and_states(plane: Plane) -> None:
    other = Plane(plane._transport, "Other")
    lease = plane.lease("deploy").acquire("ada")
    assert other.lease("deploy").acquire("bob").fence == 1
    plane.state("deploy").update("ours", lease=lease)
    assert other.state("deploy").get() is None
    with pytest.raises(LeaseRequired):
        other.state("deploy").update("theirs", lease=lease)
    assert [each.owner for each in other.leases().leases] == ["bob"]


# Names and arguments.


def test_keys_keep_their_case(plane: Plane) -> None:
    lease = plane.lease("Deploy/EU").acquire("ada")
    assert plane.lease("deploy/eu").describe().lease is None
    assert plane.lease("Deploy/EU").describe().lease.lease_id == lease.id
    plane.state("Deploy/EU").update("x", lease=lease)
    assert plane.state("Deploy/EU").get().value == "x"
    assert plane.state("deploy/eu").get() is None


def test_an_invalid_key_is_refused(plane: Plane) -> None:
    failures = Failures()
    key: Any
    for key in ["", "a b", "a//b", "/a", "a/", "ü", "a" * 256, "a/" * 128 + "a", "a/../b", None, 7, b"a"]:
        with failures.of(key):
            with pytest.raises(InvalidName):
                plane.lease(key)
            with pytest.raises(InvalidName):
                plane.state(key)
    failures.check()


def test_an_invalid_argument_writes_nothing(plane: Plane) -> None:
    failures = Failures()
    wrong: Any
    for wrong in [
        {"ttl_seconds": 0},
        {"ttl_seconds": -1},
        {"ttl_seconds": 0.0009},
        {"ttl_seconds": math.nan},
        {"ttl_seconds": math.inf},
        {"ttl_seconds": LEASE_TTL_SECONDS_MAX + 1},
        {"wait_seconds": -0.001},
        {"wait_seconds": math.nan},
        {"wait_seconds": math.inf},
        {"wait_seconds": LEASE_WAIT_SECONDS_MAX + 1},
        {"owner": "x" * 257},
        {"txn_id": ""},
        {"txn_id": "x" * 257},
    ]:
        with failures.of(wrong):
            with pytest.raises(InvalidArgument) as refused:
                plane.lease("deploy").acquire(**{"owner": "ada"} | wrong)
            assert next(iter(wrong)) in str(refused.value)
            assert everything(plane) == []
            assert plane.lease("deploy").describe().waiting == 0
    failures.check()


def test_an_invalid_keepalive_changes_nothing(plane: Plane) -> None:
    failures = Failures()
    for ttl_seconds in [-1, 0.0009, math.nan, math.inf, LEASE_TTL_SECONDS_MAX + 1]:
        with failures.of(ttl_seconds):
            lease = plane.lease("deploy").acquire("ada")
            before = everything(plane)
            with pytest.raises(InvalidArgument, match="ttl_seconds"):
                lease.keepalive(ttl_seconds)
            assert everything(plane) == before
    failures.check()


def test_the_longest_time_is_allowed(plane: Plane) -> None:
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=LEASE_TTL_SECONDS_MAX, wait_seconds=LEASE_WAIT_SECONDS_MAX)
    assert lease.expires_ms == START_MS + LEASE_TTL_SECONDS_MAX * 1_000


# States.


@pytest.mark.parametrize(
    "value",
    [
        "text ☃",
        "",
        0,
        -(2**70),
        1.5,
        True,
        None,
        b"\x00bytes",
        [1, "two", [b"3"]],
        {"a": {"b": [None, False]}, "c": 1},
        {1: "one"},
    ],
    ids=repr,
)
def test_a_value_is_read_back(plane: Plane, value: Any) -> None:
    written = plane.state("deploy").update(value, correlation_id="trace-7")
    found = plane.state("deploy").get()
    assert found is not None
    assert found.value == value
    assert type(found.value) is type(value)
    assert (found.etag, found.version) == (written.etag, written.version)
    assert (found.updated_ms, found.correlation_id) == (START_MS, "trace-7")


def test_a_value_that_cannot_be_cbor_is_refused(plane: Plane) -> None:
    with pytest.raises(InvalidValue):
        plane.state("deploy").update(object())
    assert everything(plane) == []


def test_a_mismatch_has_the_current_etag(plane: Plane) -> None:
    state = plane.state("deploy")
    with pytest.raises(CasMismatch, match="no longer exists") as mismatch:
        state.update(1, if_match="*")
    assert mismatch.value.current_etag is None
    first = state.update(1, if_absent=True)
    second = state.update(2, if_match=first.etag)
    for wrong in (
        lambda: state.update(3, if_match=first.etag),
        lambda: state.update(3, if_absent=True),
        lambda: state.remove(if_match=first.etag),
    ):
        with pytest.raises(CasMismatch, match=second.etag) as mismatch:
            wrong()
        assert mismatch.value.current_etag == second.etag
    assert state.remove(if_match=mismatch.value.current_etag)
    assert not state.remove()
    assert state.get() is None


def test_a_compare_and_swap_loses_no_increment(plane: Plane, threads: ThreadPoolExecutor) -> None:
    state = plane.state("counter")
    state.update(0)

    def increment() -> None:
        for _ in range(10):
            while True:
                found = state.get()
                try:
                    state.update(found.value + 1, if_match=found.etag)
                    break
                except CasMismatch:
                    continue

    for each in [threads.submit(increment) for _ in range(8)]:
        each.result(PATIENCE_SECONDS)
    assert state.get().value == 80
    assert state.get().version == 81


def test_only_the_holder_changes_a_state(plane: Plane, clock: ManualClock) -> None:
    state = plane.state("deploy")
    state.update("free")
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=1)
    for wrong in (lambda: state.update("no"), state.remove, lambda: state.update("no", if_match="*")):
        with pytest.raises(LeaseRequired, match="ada"):
            wrong()
    state.update("held", lease=lease)
    clock.advance_ms(1_000)
    with pytest.raises(LeaseExpired):
        state.remove(lease=lease)
    assert state.get().value == "held"
    assert state.remove()


async def test_leases_and_states_work_asynchronously(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        async with await plane.lease("deploy").acquire("ada") as lease:
            first = await plane.state("deploy").update({"n": 1}, lease=lease)
            assert (await plane.state("deploy").get()).value == {"n": 1}
            assert await lease.keepalive(60) == lease.expires_at
            assert [each.owner for each in (await plane.leases()).leases] == ["ada"]
            with pytest.raises(CasMismatch) as mismatch:
                await plane.state("deploy").remove(lease=lease, if_match="other")
            assert mismatch.value.current_etag == first.etag
        with pytest.raises(Fenced):
            await plane.state("deploy").update(2, lease=lease)
        with pytest.raises(InvalidArgument):
            await plane.lease("deploy").acquire("ada", ttl_seconds=0)
        with pytest.raises(ZeroDivisionError):
            async with await plane.lease("deploy").acquire("ada"):
                raise ZeroDivisionError
        assert await plane.state("deploy").remove()


# Fences in user transactions.


def test_a_transaction_commits_only_while_its_lease_holds(plane: Plane, clock: ManualClock) -> None:
    """The fence is checked in the transaction that writes."""
    lease = plane.lease("deploy").acquire("ada", ttl_seconds=1)
    fence = fastness.fenced(lease)

    def work(tx: Transaction, value: bytes) -> int:
        tx.put(b"anything", value)
        return fence(tx)

    assert plane.transact(work, b"1") == lease.fence
    clock.advance_ms(1_000)
    with pytest.raises(LeaseExpired):
        plane.transact(work, b"2")
    plane.lease("deploy").acquire("bob")
    with pytest.raises(Fenced):
        plane.transact(work, b"3")
    assert plane.transact(lambda tx: tx.get(b"anything")) == b"1"


async def test_an_async_transaction_commits_only_while_its_lease_holds(url: str, clock: ManualClock) -> None:
    async with fastness.open_async(url, clock=clock) as plane:
        lease = await plane.lease("deploy").acquire("ada", ttl_seconds=1)
        fence = fastness.fenced(lease)
        assert await plane.transact(lambda tx: (fence(tx), tx.put(b"k", b"1"))) == (lease.fence, None)
        await lease.release()
        with pytest.raises(LeaseExpired):
            await plane.transact(lambda tx: (fence(tx), tx.put(b"k", b"2")))
        assert await plane.transact(lambda tx: tx.get(b"k")) == b"1"


# Planes that share a PostgreSQL.


@pytest.fixture
def planes(postgres_url: str, tmp_path: Path) -> Iterator[tuple[Plane, Plane]]:
    """Two nodes, with the server's clock."""
    with (
        fastness.open(postgres_url, activity=str(tmp_path / "one")) as one,
        fastness.open(postgres_url, activity=str(tmp_path / "other")) as other,
    ):
        yield one, other


def test_a_waiter_is_woken_by_a_release_on_another_node(
    planes: tuple[Plane, Plane], threads: ThreadPoolExecutor
) -> None:
    """By a notification: without one it would sleep longer than it waits."""
    one, other = planes
    lease = one.lease("deploy").acquire("ada", ttl_seconds=3_600)
    waiter = threads.submit(other.lease("deploy").acquire, "bob", wait_seconds=PATIENCE_SECONDS * 2)
    in_line(other, 1)
    assert one.lease("deploy").describe().waiting == 0
    assert lease.release()
    second = waiter.result(PATIENCE_SECONDS)
    assert (second.owner, second.fence) == ("bob", 2)
    with pytest.raises(Fenced):
        one.state("deploy").update("stale", lease=lease)
    other.state("deploy").update("fresh", lease=second)
    assert one.state("deploy").get().value == "fresh"


def test_a_waiter_on_a_shared_database_gets_an_expired_lease(
    planes: tuple[Plane, Plane], threads: ThreadPoolExecutor
) -> None:
    one, other = planes
    one.lease("deploy").acquire("ada", ttl_seconds=0.2)
    waiter = threads.submit(other.lease("deploy").acquire, "bob", wait_seconds=LEASE_WAIT_SECONDS_MAX)
    assert waiter.result(PATIENCE_SECONDS).fence == 2


def test_all_waiters_on_two_nodes_get_the_lease(planes: tuple[Plane, Plane], threads: ThreadPoolExecutor) -> None:
    fences: list[int] = []
    lock = threading.Lock()

    def wait(plane: Plane, number: int) -> None:
        with plane.lease("deploy").acquire(f"waiter-{number}", wait_seconds=PATIENCE_SECONDS) as lease:
            assert lock.acquire(blocking=False), "two hold it at once"
            fences.append(lease.fence)
            lock.release()

    first = planes[0].lease("deploy").acquire("ada", ttl_seconds=3_600)
    waiters = [threads.submit(wait, planes[number % 2], number) for number in range(8)]
    for plane in planes:
        in_line(plane, 4)
    first.release()
    for waiter in waiters:
        waiter.result(PATIENCE_SECONDS)
    assert fences == list(range(2, 10))


async def test_tasks_on_a_shared_database_wait_in_order(postgres_url: str, tmp_path: Path) -> None:
    async with fastness.open_async(postgres_url, activity=str(tmp_path)) as plane:
        served: list[int] = []

        async def wait(number: int) -> None:
            async with await plane.lease("deploy").acquire(f"waiter-{number}", wait_seconds=PATIENCE_SECONDS):
                served.append(number)

        first = await plane.lease("deploy").acquire("ada", ttl_seconds=3_600)
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(wait(number))
                await in_line_async(plane, number + 1)
            await first.release()
        assert served == list(range(4))
