"""Effects through handles: claimed with a fence, completed once, failed with a back-off, dead at last."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, DomainEvent, Effect, EffectClaim, EffectReceipt, Plane
from fastness.errors import EffectNotFound, FencingMismatch, InvalidArgument, InvalidName, PayloadTooLarge
from fastness.limits import EFFECT_ARCHIVED_SECONDS, EFFECT_CLAIMS_MAX, EFFECT_KIND_BYTES_MAX
from fastness.testing.clock import ManualClock
from fastness.wire.inboxes import Timer, check_requests

PATIENCE_SECONDS = 30.0  # A waiter that is not woken fails the test.
LARGE = bytes(5_000)


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(url, clock=clock) as plane:
        plane.world("ada").create()
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(8)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # What still waits is woken when the plane is closed.


def asking(*kinds: str, max_attempts: int = 5) -> DomainEvent:
    effects = tuple(
        Effect(kind, f"{number}".encode(), b'{"n":%d}' % number, max_attempts) for number, kind in enumerate(kinds)
    )
    return DomainEvent(schema="ask", effects=effects)


def ask(plane: Plane, *kinds: str, world: str = "ada", max_attempts: int = 5) -> None:
    plane.world(world).inbox.put(asking(*kinds, max_attempts=max_attempts))
    plane.world(world).drain()


def receipts(plane: Plane, world: str = "ada") -> list[EffectReceipt]:
    return [item for _, item in plane.world(world).inbox.read() if isinstance(item, EffectReceipt)]


def claim_one(plane: Plane, *kinds: str, lease_seconds: float = 30.0, owner: str = "ada") -> EffectClaim:
    (claimed,) = plane.effects.claim(list(kinds) or ["mail"], owner=owner, lease_seconds=lease_seconds)
    return claimed


def test_an_effect_is_claimed_and_completed_with_one_receipt(plane: Plane) -> None:
    ask(plane, "call", "mail")
    assert [(each.kind, each.state) for each in plane.effects.list("ada").effects] == [
        ("call", "pending"),
        ("mail", "pending"),
    ]
    claim = claim_one(plane)
    assert (claim.world, claim.height, claim.number, claim.kind, claim.attempt) == ("ada", 0, 1, "mail", 1)
    assert (claim.json(), claim.idempotency_key) == ({"n": 1}, b"1".hex())
    assert plane.effects.claim(["mail"]) == []
    claim.complete({"id": 7}, adapter_id="smtp", signature=b"s")
    with pytest.raises(EffectNotFound, match="complete or dead"):
        claim.complete({"id": 7})
    assert receipts(plane) == [
        EffectReceipt(intent_hash=b"1", effect_kind="mail", adapter_id="smtp", signature=b"s", payload=b'{"id":7}')
    ]
    assert [each.kind for each in plane.effects.list().effects] == ["call"]


def test_a_large_result_is_a_blob(plane: Plane) -> None:
    ask(plane, "mail")
    claim_one(plane).complete(LARGE)
    (receipt,) = receipts(plane)
    assert receipt.payload_blob is not None
    assert plane.blobs.get(receipt.payload_blob) == LARGE


def test_a_failed_effect_is_due_again_after_a_back_off_and_dead_after_its_last_attempt(
    plane: Plane, clock: ManualClock
) -> None:
    ask(plane, "mail", max_attempts=3)
    for delay_ms in (1_000, 2_000):
        failed = claim_one(plane).fail(OSError("no answer"))
        assert (failed.is_dead, failed.due_ms) == (False, clock.now_ms() + delay_ms)
        clock.advance_ms(delay_ms - 1)
        assert plane.effects.claim(["mail"]) == []
        clock.advance_ms(1)
    (listed,) = plane.effects.list().effects
    assert (listed.state, listed.attempts, listed.error) == ("pending", 2, "OSError: no answer")
    claim = claim_one(plane)
    assert claim.attempt == 3
    assert claim.fail("é" * 1_000).is_dead
    (receipt,) = receipts(plane)
    assert receipt.error == "é" * 512  # Cut to 1 KiB.
    assert plane.effects.list().effects == []


def test_an_effect_can_be_given_up_before_its_last_attempt(plane: Plane) -> None:
    ask(plane, "mail")
    assert claim_one(plane).fail("refused", final=True).is_dead
    assert [receipt.error for receipt in receipts(plane)] == ["refused"]


def test_a_lease_that_ends_passes_the_effect_on_with_a_higher_fence(plane: Plane, clock: ManualClock) -> None:
    ask(plane, "mail", max_attempts=2)
    first = claim_one(plane, lease_seconds=10.0)
    first.extend(20.0)
    clock.advance_ms(19_999)
    assert plane.effects.claim(["mail"]) == []
    clock.advance_ms(1)
    second = claim_one(plane, lease_seconds=10.0, owner="bob")
    assert (second.fence > first.fence, second.attempt) == (True, 2)
    for stale in (first.complete, first.extend, lambda: first.fail("late")):
        with pytest.raises(FencingMismatch, match="its lease ended"):
            stale()
    clock.advance_ms(10_000)  # It was its last attempt.
    assert plane.effects.claim(["mail"]) == []
    assert [receipt.error for receipt in receipts(plane)] == ["Attempt 2 of bob did not end in time"]
    with pytest.raises(EffectNotFound):
        second.complete()


def test_an_effect_that_is_given_back_is_due_at_once_and_no_attempt_is_counted(plane: Plane) -> None:
    ask(plane, "mail", max_attempts=1)
    first = claim_one(plane)
    first.release()
    first.release()  # It is not held any more.
    second = claim_one(plane)
    assert (second.fence > first.fence, second.attempt) == (True, 1)
    first.release()
    second.complete()
    assert [receipt.error for receipt in receipts(plane)] == [None]


def test_a_late_holder_completes_an_effect_that_no_other_has_claimed(plane: Plane, clock: ManualClock) -> None:
    ask(plane, "mail")
    claim = claim_one(plane, lease_seconds=1.0)
    clock.advance_ms(60_000)
    claim.complete()
    assert len(receipts(plane)) == 1


def test_a_paused_world_gets_its_receipts_and_an_archived_one_is_not_claimed(plane: Plane, clock: ManualClock) -> None:
    ask(plane, "mail", "mail", "mail")
    world = plane.world("ada")
    inflight = claim_one(plane)
    world.pause()
    claim_one(plane).complete()
    world.archive()
    assert plane.effects.claim(["mail"]) == []
    inflight.complete()
    assert len(receipts(plane)) == 2
    world.resume()
    clock.advance_ms(EFFECT_ARCHIVED_SECONDS * 1_000)
    claim_one(plane).complete()
    assert len(receipts(plane)) == 3


def test_a_claim_on_a_deleted_world_completes_nothing_in_its_next_incarnation(plane: Plane) -> None:
    ask(plane, "mail")
    old = claim_one(plane)
    world = plane.world("ada")
    world.archive()
    world.delete()
    with pytest.raises(EffectNotFound):
        old.complete()
    plane.world("ada").create()
    ask(plane, "mail")
    new = claim_one(plane)
    assert (new.height, new.number) == (old.height, old.number)
    with pytest.raises(FencingMismatch):
        old.complete()
    new.complete()
    assert len(receipts(plane)) == 1


def test_a_fork_has_no_effects_and_no_timers(plane: Plane) -> None:
    item = DomainEvent(schema="s", effects=(Effect("mail", b"1"),), timers=(Timer(1 << 62, b"t"),))
    plane.world("ada").inbox.put(item)
    plane.world("ada").drain()
    plane.world("ada").fork("eve", height=1)
    assert plane.effects.list("eve").effects == []
    assert plane.timers.list("eve").timers == []
    assert [each.world for each in plane.timers.list().timers] == ["ada"]


def test_lists_have_pages(plane: Plane) -> None:
    plane.world("bob").create()
    timers = tuple(Timer((1 << 62) - number, b"%d" % number) for number in range(3))
    for name in ("bob", "ada"):
        plane.world(name).inbox.put(
            DomainEvent(schema="s", effects=tuple(Effect("mail", b"%d" % n) for n in range(3)), timers=timers)
        )
        plane.world(name).drain()

    def all_pages(page: Callable[..., Any], field: str, world: str | None) -> list[str]:
        after, found = "", []
        while True:
            got = page(world, after=after, limit=2)
            found += [each.world for each in getattr(got, field)]
            if (after := got.next or "") == "":
                return found

    for page, field in ((plane.effects.list, "effects"), (plane.timers.list, "timers")):
        assert Counter(all_pages(page, field, None)) == {"ada": 3, "bob": 3}
        assert all_pages(page, field, "bob") == ["bob"] * 3
        with pytest.raises(InvalidArgument, match="no page returned"):
            page(after="not a token")
        with pytest.raises(InvalidArgument, match="limit is 0"):
            page(limit=0)
    times = [each.deliver_at_ms for each in plane.timers.list().timers]
    assert times == sorted(times)


# Waiting.


def test_a_waiting_claim_is_woken_by_an_effect_and_by_a_back_off(
    plane: Plane, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(plane.effects.claim, ["mail", "call"], wait_seconds=20.0)
    ask(plane, "call")
    (claim,) = waiting.result(PATIENCE_SECONDS)
    claim.fail("busy", delay_seconds=5.0)
    waiting = threads.submit(plane.effects.claim, ["call"], wait_seconds=20.0)
    clock.advance_ms(5_000)
    (again,) = waiting.result(PATIENCE_SECONDS)
    assert again.attempt == 2
    waiting = threads.submit(plane.effects.claim, ["other"], wait_seconds=1.0)
    for _ in range(1_000):  # It may begin to wait after the clock has moved.
        clock.advance_ms(1_000)
        if wait([waiting], timeout=0.01).done:
            break
    assert waiting.result(timeout=0) == []


async def test_a_cancelled_claim_holds_nothing(url: str, clock: ManualClock) -> None:
    """Wherever it is cancelled, what it has claimed is given back, and no attempt is counted."""
    async with fastness.open_async(url, clock=clock) as plane:
        await plane.world("ada").create()
        await plane.world("ada").inbox.put(asking("mail"))
        await plane.world("ada").drain()
        for steps in (*range(30), 100, 1_000, 10_000, 100_000):  # A server's answer takes many.
            claiming = asyncio.create_task(plane.effects.claim(["mail"]))
            for _ in range(steps):
                await asyncio.sleep(0)
            claiming.cancel()
            (outcome,) = await asyncio.gather(claiming, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                assert [claim.attempt for claim in outcome] == [1], f"cancelled after {steps} steps"
                return
            assert isinstance(outcome, asyncio.CancelledError)
            await _given_back(plane)
        pytest.fail("it was always cancelled")


async def _given_back(plane: AsyncPlane) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await plane.effects.list()).effects[0].state != "pending":
            await asyncio.sleep(0.001)


def test_callers_of_two_nodes_complete_each_effect_once(
    postgres_url: str, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """They wait for notifications of each other, and claim the same effects at the same time."""
    with (
        fastness.open(postgres_url, activity=str(tmp_path / "one")) as one,
        fastness.open(postgres_url, activity=str(tmp_path / "other")) as other,
    ):
        names = [f"world-{number}" for number in range(4)]
        for name in names:
            one.world(name).create()

        completed: list[str] = []
        deadline = time.monotonic() + PATIENCE_SECONDS * 2

        def work(plane: Plane) -> None:
            while len(completed) < 100 and time.monotonic() < deadline:
                for claim in plane.effects.claim(["mail"], limit=5, wait_seconds=0.5):
                    claim.complete(claim.idempotency_key)
                    completed.append(claim.idempotency_key)

        workers = [threads.submit(work, plane) for plane in (one, other, one, other)]
        for _ in range(5):
            for name in names:
                ask(one, *["mail"] * 5, world=name)
        for worker in workers:
            worker.result()
        assert len(completed) == 100
        assert [len(receipts(other, name)) for name in names] == [25] * 4
        assert one.effects.list().effects == []


# Invalid arguments.


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": []},
        {"kinds": ["k" * (EFFECT_KIND_BYTES_MAX + 1)]},
        {"kinds": ["k"] * 1_000},
        {"limit": 0},
        {"limit": EFFECT_CLAIMS_MAX + 1},
        {"lease_seconds": 0.0},
        {"lease_seconds": float("nan")},
        {"wait_seconds": -1.0},
        {"wait_seconds": 21.0},
        {"owner": ""},
        {"kinds": "mail"},
    ],
    ids=str,
)
def test_an_invalid_claim_is_refused(plane: Plane, options: dict[str, Any]) -> None:
    ask(plane, "mail")
    with pytest.raises(InvalidArgument):
        plane.effects.claim(**{"kinds": ["mail"], **options})
    assert [each.state for each in plane.effects.list().effects] == ["pending"]


def test_an_invalid_outcome_is_refused_and_changes_nothing(plane: Plane) -> None:
    ask(plane, "mail")
    claim = claim_one(plane)
    for invalid in (
        lambda: claim.fail("x", delay_seconds=-1.0),
        lambda: claim.fail("x", delay_seconds=float("inf")),
        lambda: claim.extend(0.0),
        lambda: plane.effects.claimed("ada", -1, 0, fence=1).complete(),
    ):
        with pytest.raises(InvalidArgument):
            invalid()
    with pytest.raises(PayloadTooLarge):
        claim.complete(adapter_id="a" * 2_000)
    with pytest.raises(InvalidName):
        plane.effects.list("no/world")
    with pytest.raises(EffectNotFound):
        plane.effects.claimed("ada", 0, 9, fence=1).complete()
    claim.complete()
    assert len(receipts(plane)) == 1


@pytest.mark.parametrize(
    ("effect", "timer", "error"),
    [
        (Effect("k", b"h", bytes(70_000)), Timer(1, b"h"), PayloadTooLarge),
        (Effect("k" * 300, b"h"), Timer(1, b"h"), PayloadTooLarge),
        (Effect("k", b"h"), Timer(1, bytes(200)), PayloadTooLarge),
        (Effect("k", b"h"), Timer(1, b"h", LARGE), PayloadTooLarge),
    ],
)
def test_requests_that_could_not_be_stored_are_refused(effect: Effect, timer: Timer, error: type[Exception]) -> None:
    check_requests([Effect("k", b"h")], [Timer(1, b"h")])
    with pytest.raises(error):
        check_requests([effect], [timer])
