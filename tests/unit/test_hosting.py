"""Hosting: claims, turns, wake-ups, items that are set aside, and what ends a claim."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest
from click.testing import Result

import fastness
from fastness import DomainEvent, Plane
from fastness.errors import (
    BatchTooLarge,
    Fenced,
    HeadAdvanced,
    InvalidArgument,
    InvalidName,
    ItemNotFound,
    LeaseConflict,
    LeaseExpired,
    WorldHeld,
    WorldNotActive,
    WorldNotFound,
)
from fastness.layers import worlds
from fastness.layers.worlds import World, WorldState
from fastness.limits import (
    ASIDE_ERROR_BYTES_MAX,
    BATCH_ENTRIES_MAX,
    HOST_LEASE_SECONDS,
    HOST_PROGRAMS_MAX,
    HOSTED_WORLDS_MAX,
)
from fastness.testing.clock import ManualClock
from fastness.wire.hosting import ClaimedWorld, HostingInfo
from tests.unit.stored_pairs import everything

Cli = Callable[..., Result]
PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.
LEASE_MS = HOST_LEASE_SECONDS * 1_000


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}", clock=clock) as plane:
        yield plane


def test_a_turn_moves_items_to_the_journal_with_its_entries(plane: Plane) -> None:
    world = created(plane, "ada", items=3)
    claimed = claim(plane)
    assert [sequence for sequence, _ in claimed.items] == [0, 1, 2]
    assert (claimed.world, claimed.program, claimed.head, claimed.cursor, claimed.is_new) == ("ada", "p", 0, None, True)
    done = plane.hosting.commit(claimed, owner="h1", expected_head=0, take=1, opening=[{"turn": 1}], entries=["a", "b"])
    assert (done.head, done.has_more) == (5, True)
    done = plane.hosting.commit(claimed, owner="h1", expected_head=5, take=2)
    assert (done.head, done.has_more, done.expires_ms) == (6, False, claimed.expires_ms)
    assert records(plane, "ada") == [{"turn": 1}, 0, 1, "a", "b", 2]
    assert world.inbox.cursor() == 2
    plane.hosting.release([msgspec.structs.replace(claimed, head=done.head)], owner="h1")
    assert not plane.hosting.claim(["p"], owner="h2")
    assert world.hosting() == info("ada", fence=claimed.fence)


def test_a_release_that_is_late_does_not_make_a_world_idle_that_its_host_has_taken_again(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    first = claim(plane, "h1")
    done = plane.hosting.commit(first, owner="h1", expected_head=0, take=0)
    late = msgspec.structs.replace(first, head=done.head)  # The host gives the world back, and its request is slow.
    world.send("order", {"n": 1})
    again = claim(plane, "h1")
    assert (again.fence, again.is_new) == (first.fence, False)
    plane.hosting.commit(again, owner="h1", expected_head=done.head, take=1)
    for _ in range(2):  # It may also arrive twice.
        plane.hosting.release([late], owner="h1")
        assert world.hosting().owner is None
        assert world.hosting().ready_ms is not None
    assert claim(plane, "h2").fence > first.fence


def test_a_world_with_records_that_its_host_has_not_seen_is_ready_when_it_is_given_back(plane: Plane) -> None:
    """A host that stops may have a commit under way, and not learn what became of it."""
    world = created(plane, "ada", items=1)
    claimed = claim(plane, "h1")
    plane.hosting.commit(claimed, owner="h1", expected_head=0, take=0)
    plane.hosting.release([claimed], owner="h1")
    assert world.hosting().ready_ms is not None


def test_a_world_whose_program_is_set_again_is_ready_because_a_host_may_have_been_at_work(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    plane.hosting.commit(claim(plane, "h1"), owner="h1", expected_head=0, take=0)
    world.set_program(None)
    world.set_program("p")
    assert claim(plane, "h2").items == []


def test_a_world_without_work_or_without_program_is_not_claimed(plane: Plane) -> None:
    created(plane, "idle", items=0)
    plane.world("plain").create()
    plane.world("plain").send("order", {"n": 1})
    created(plane, "other", program="q", items=1)
    assert not plane.hosting.claim(["p"], owner="h1")
    assert plane.world("plain").hosting() == info("plain", program=None)
    plane.world("plain").set_program("p")
    assert [each.world for each in plane.hosting.claim(["p"], owner="h1")] == ["plain"]


def test_the_world_that_waited_longest_is_claimed_first(plane: Plane, clock: ManualClock) -> None:
    for name, program in (("c", "p"), ("a", "q"), ("b", "p")):
        created(plane, name, program=program, items=1)
        clock.advance_ms(1)
    assert [each.world for each in plane.hosting.claim(["q", "p"], owner="h1", limit=2)] == ["c", "a"]
    assert [each.world for each in plane.hosting.claim(["q", "p"], owner="h1", limit=2)] == ["b"]


def test_a_host_that_lost_its_claim_is_refused_and_another_continues(plane: Plane, clock: ManualClock) -> None:
    created(plane, "ada", items=2)
    first = claim(plane, "h1")
    clock.advance_ms(LEASE_MS - 1)
    assert not plane.hosting.claim(["p"], owner="h2")
    clock.advance_ms(1)
    with pytest.raises(LeaseExpired):
        plane.hosting.commit(first, owner="h1", expected_head=0, take=0)
    second = claim(plane, "h2")
    assert second.fence > first.fence
    for stale in (first, second):
        with pytest.raises(LeaseConflict):
            plane.hosting.commit(stale, owner="h1", expected_head=0, take=0)
    with pytest.raises(Fenced):
        plane.hosting.fail(first, owner="h1", error="late")
    assert plane.hosting.renew([first], owner="h1") == []
    plane.hosting.release([first], owner="h1")
    assert plane.hosting.commit(second, owner="h2", expected_head=0, take=1).head == 2
    assert records(plane, "ada") == [0, 1]


def test_an_older_fence_of_the_same_host_is_refused(plane: Plane, clock: ManualClock) -> None:
    created(plane, "ada", items=1)
    first = claim(plane, "h1")
    clock.advance_ms(LEASE_MS)
    second = claim(plane, "h1")
    with pytest.raises(LeaseConflict, match=f"fence {first.fence}"):
        plane.hosting.commit(first, owner="h1", expected_head=0, take=0)
    assert [each.fence for each in plane.hosting.renew([first, second], owner="h1")] == [second.fence]
    plane.hosting.release([first], owner="h1")
    assert plane.hosting.commit(second, owner="h1", expected_head=0, take=0).head == 1


def test_a_claim_that_ended_is_handed_out_without_items_too(plane: Plane, clock: ManualClock) -> None:
    created(plane, "ada", items=1)
    plane.hosting.commit(claim(plane, "h1"), owner="h1", expected_head=0, take=0)
    clock.advance_ms(LEASE_MS)
    taken_over = claim(plane, "h2")
    assert (taken_over.items, taken_over.head, taken_over.cursor) == ([], 1, 0)
    plane.hosting.release([taken_over], owner="h2", has_work=True)
    assert claim(plane, "h3").items == []


def test_turns_renew_a_claim_when_half_of_it_is_over(plane: Plane, clock: ManualClock) -> None:
    created(plane, "ada", items=0)
    plane.world("ada").send("go")
    claimed = claim(plane)
    clock.advance_ms(LEASE_MS // 2 - 1)
    done = plane.hosting.commit(claimed, owner="h1", expected_head=0, entries=[1])
    assert done.expires_ms == claimed.expires_ms
    clock.advance_ms(1)
    done = plane.hosting.commit(claimed, owner="h1", expected_head=1, entries=[2])
    assert done.expires_ms == clock.now_ms() + LEASE_MS
    clock.advance_ms(LEASE_MS - 1)
    assert not plane.hosting.claim(["p"], owner="h2")
    (renewed,) = plane.hosting.renew([claimed], owner="h1", lease_seconds=2)
    assert renewed.expires_ms == clock.now_ms() + 2_000
    clock.advance_ms(2_000)
    assert claim(plane, "h2").fence > claimed.fence


def test_items_for_a_held_world_wake_its_host_only(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    first = claim(plane, "h1")
    assert not plane.hosting.claim(["p"], owner="h1")
    world.send("second")
    assert not plane.hosting.claim(["p"], owner="h2")
    (woken,) = plane.hosting.claim([], owner="h1")  # A host that wants no more worlds is still told of its own.
    assert (woken.is_new, woken.fence, [sequence for sequence, _ in woken.items]) == (False, first.fence, [0, 1])
    assert not plane.hosting.claim(["p"], owner="h1")
    world.send("third")
    plane.hosting.commit(first, owner="h1", expected_head=0, take=2)
    assert not plane.hosting.claim(["p"], owner="h1")  # Nothing is left that it was not given.


def test_a_failed_turn_is_due_again_after_its_delay(plane: Plane, clock: ManualClock) -> None:
    world = created(plane, "ada", items=1)
    plane.hosting.fail(claim(plane), owner="h1", error="boom", delay_seconds=2)
    world.send("more")  # Does not shorten the delay.
    assert not plane.hosting.claim(["p"], owner="h1")
    assert world.hosting() == info("ada", fence=1, ready_ms=clock.now_ms() + 2_000, attempts=1, error="boom")
    clock.advance_ms(2_000)
    claimed = claim(plane)
    assert claimed.attempts == 1
    plane.hosting.fail(claimed, owner="h1", error="x" * (ASIDE_ERROR_BYTES_MAX + 1) + "end", is_stopped=True)
    found = world.hosting()
    assert (found.is_stopped, found.attempts, found.ready_ms) == (True, 2, None)
    assert found.error is not None
    assert len(found.error) == ASIDE_ERROR_BYTES_MAX
    assert found.error.endswith("xend")
    world.send("more")
    assert not plane.hosting.claim(["p"], owner="h1")
    assert not world.resume_program().is_stopped
    claimed = claim(plane)
    assert claimed.attempts == 0
    assert len(claimed.items) == 3


def test_a_committed_turn_forgets_failed_attempts(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    plane.hosting.fail(claim(plane), owner="h1", error="boom")
    claimed = claim(plane)
    plane.hosting.commit(claimed, owner="h1", expected_head=0, take=0)
    assert (world.hosting().attempts, world.hosting().error) == (0, None)


def test_an_item_that_is_set_aside_can_be_retried_or_dropped(plane: Plane) -> None:
    world = created(plane, "ada", items=3)
    claimed = claim(plane)
    done = plane.hosting.commit(
        claimed, owner="h1", expected_head=0, take=2, opening=["o"], aside=[(0, "first"), (2, "third")]
    )
    assert records(plane, "ada") == ["o", {"aside": 0}, 1, {"aside": 2}]
    assert [(each.sequence, each.error, each.item) for each in world.aside()] == [
        (0, "first", item(0)),
        (2, "third", item(2)),
    ]
    assert [each.sequence for each in world.aside(after=0)] == [2]
    assert world.hosting().set_aside == 2
    world.retry_aside(0)
    world.drop_aside(2)
    for sequence in (0, 2, 99):
        with pytest.raises(ItemNotFound):
            world.retry_aside(sequence)
    assert (world.aside(), world.hosting().set_aside) == ([], 0)
    assert claim(plane).items == [(3, item(0))]
    plane.hosting.commit(claimed, owner="h1", expected_head=done.head, take=3)
    assert records(plane, "ada")[-1] == 3


def test_only_the_host_writes_the_journal_of_a_held_world(plane: Plane, clock: ManualClock) -> None:
    world = created(plane, "ada", items=1)
    assert world.drain() == [0]  # No host holds it yet.
    world.send("more")
    claim(plane, "host-7")
    with pytest.raises(WorldHeld, match="host-7"):
        world.drain()
    with pytest.raises(WorldHeld, match="host-7"):
        world.append(["x"], expected_head=1)
    with pytest.raises(WorldHeld, match="host-7"):
        world.set_manifest("m", expected_head=1)
    clock.advance_ms(LEASE_MS)
    world.append(["x"], expected_head=1)


def test_a_paused_world_is_taken_from_its_host_and_ready_again_when_it_is_resumed(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    held = claim(plane)
    world.pause()
    world.send("more")
    with pytest.raises(WorldNotActive):
        plane.hosting.commit(held, owner="h1", expected_head=0, take=0)
    assert not plane.hosting.claim(["p"], owner="h2")
    world.resume()
    with pytest.raises(LeaseConflict):
        plane.hosting.commit(held, owner="h1", expected_head=0, take=0)
    assert len(claim(plane, "h2").items) == 2


def test_a_world_that_a_transaction_paused_is_not_claimed(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    plane.transact(worlds.change_state, World("main", "ada"), WorldState.PAUSED)
    assert not plane.hosting.claim(["p"], owner="h1")
    assert world.hosting().ready_ms is None
    world.resume()
    assert claim(plane).items == [(0, item(0))]


def test_a_deleted_world_leaves_no_key_and_its_fences_do_not_return(plane: Plane) -> None:
    world = created(plane, "ada", items=2)
    old = claim(plane)
    plane.hosting.commit(old, owner="h1", expected_head=0, take=0, aside=[(0, "bad")])
    world.send("wakes its host")
    world.archive()
    world.delete()
    assert not [key for key, _ in everything(plane) if b"hosting" in key or b"aside" in key]
    created(plane, "ada", items=1)
    new = claim(plane)
    assert new.fence > old.fence
    with pytest.raises(LeaseConflict):
        plane.hosting.commit(old, owner="h1", expected_head=0, take=0)


def test_another_program_ends_the_claim_and_fences_keep_growing(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    fences = [claim(plane).fence]
    for program in ("q", None, "p"):
        world.set_program(program)
        found = [each for each in plane.hosting.claim(["p", "q"], owner="h2") if program]
        assert [each.program for each in found] == [program] * bool(program)
        fences += [each.fence for each in found]
    assert fences == sorted(set(fences))


def test_a_fork_has_no_program(plane: Plane) -> None:
    world = created(plane, "ada", items=1)
    plane.hosting.commit(claim(plane), owner="h1", expected_head=0, take=0)
    fork = world.fork("eve", height=1)
    fork.send("order")
    assert fork.hosting() == info("eve", program=None)
    assert not plane.hosting.claim(["p"], owner="h2")


def test_a_refused_turn_writes_nothing(plane: Plane) -> None:
    created(plane, "ada", items=2)
    claimed = claim(plane)
    before = everything(plane)
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (HeadAdvanced, {"expected_head": 1}),
        (InvalidArgument, {"take": 2}),
        (InvalidArgument, {"take": -1}),
        (InvalidArgument, {"take": 0, "aside": [(1, "not taken")]}),
        (InvalidArgument, {"entries": [1], "effects": [(1, fastness.Effect(kind="k", intent_hash=b"h"))]}),
        (InvalidArgument, {"timers": [(0, fastness.Timer(deliver_at_ns=1, intent_hash=b"h"))]}),
        (BatchTooLarge, {"take": 1, "entries": [0] * (BATCH_ENTRIES_MAX - 1)}),
        (BatchTooLarge, {"take": 1, "entries": ["x" * 300_000]}),
        (InvalidArgument, {"lease_seconds": 0.0}),
    ]
    for error, options in refused:
        with pytest.raises(error):
            plane.hosting.commit(claimed, owner="h1", **{"expected_head": 0, **options})
        assert everything(plane) == before
    with pytest.raises(WorldNotFound):
        plane.hosting.commit(ClaimedWorld("eve", "p", 1, 1, 0, 0, None), owner="h1", expected_head=0)


def test_invalid_arguments_of_a_claim_are_refused(plane: Plane) -> None:
    invalid: list[tuple[type[Exception], dict[str, Any]]] = [
        (InvalidArgument, {"programs": [str(number) for number in range(HOST_PROGRAMS_MAX + 1)]}),
        (InvalidName, {"programs": ["a/b"]}),
        (InvalidArgument, {"owner": ""}),
        (InvalidArgument, {"limit": 0}),
        (InvalidArgument, {"limit": HOSTED_WORLDS_MAX + 1}),
        (InvalidArgument, {"lease_seconds": 0}),
        (InvalidArgument, {"wait_seconds": 21}),
    ]
    for error, options in invalid:
        with pytest.raises(error):
            plane.hosting.claim(**{"programs": ["p"], "owner": "h1", **options})
    with pytest.raises(InvalidName):
        plane.world("ada").create(program="a/b")
    with pytest.raises(WorldNotFound):
        plane.world("ada").hosting()


def test_a_waiting_host_is_woken_by_work_and_by_the_end_of_a_claim(plane: Plane, clock: ManualClock) -> None:
    world = created(plane, "ada", items=0)
    claims: list[ClaimedWorld] = []

    def wait(owner: str) -> threading.Thread:
        def run() -> None:
            claims.extend(plane.hosting.claim(["p"], owner=owner, wait_seconds=20))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    waiting = wait("h1")
    world.send("first")
    waiting.join(PATIENCE_SECONDS)
    assert [each.items for each in claims] == [[(0, sent("first"))]]
    waiting = wait("h1")
    world.send("second")
    waiting.join(PATIENCE_SECONDS)
    assert [(each.is_new, len(each.items)) for each in claims] == [(True, 1), (False, 2)]
    waiting = wait("h2")
    clock.advance_ms(LEASE_MS)
    waiting.join(PATIENCE_SECONDS)
    assert [each.fence for each in claims] == [1, 1, 2]
    waiting = wait("h2")
    clock.advance_ms(20_000)  # Nothing but the end of its own claim, then of its wait.
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()


async def test_a_cancelled_claim_gives_its_worlds_back(clock: ManualClock) -> None:
    async with await fastness.open_async("memory:", clock=clock) as plane:
        await plane.world("ada").create(program="p")
        waiting = asyncio.create_task(plane.hosting.claim(["p"], owner="h1", wait_seconds=20))
        await asyncio.sleep(0)
        await plane.world("ada").send("order")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (claimed,) = await plane.hosting.claim(["p"], owner="h2", wait_seconds=20)
        assert len(claimed.items) == 1


def test_commands_show_and_change_how_a_world_is_run(cli: Cli, tmp_path: Path) -> None:
    cli("world", "create", "ada", "--program", "p")
    cli("world", "inbox", "put", "ada", "order", "1")
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        claimed = claim(plane)
        plane.hosting.commit(claimed, owner="h1", expected_head=0, take=0, aside=[(0, "Traceback")])
        plane.hosting.fail(claimed, owner="h1", error="bad", is_stopped=True)
    shown = json.loads(cli("--json", "world", "program", "ada").stdout)
    assert (shown["program"], shown["is_stopped"], shown["set_aside"], shown["error"]) == ("p", True, 1, "bad")
    assert not json.loads(cli("--json", "world", "resume-program", "ada").stdout)["is_stopped"]
    (aside,) = json.loads(cli("--json", "world", "aside", "list", "ada").stdout)
    assert (aside["sequence"], aside["error"], aside["item"]["schema"]) == (0, "Traceback", "order")
    assert "Put item 0 back" in cli("world", "aside", "retry", "ada", "0").stdout
    assert "item_not_found" in cli("--json", "world", "aside", "delete", "ada", "0", "--yes", code=4).stderr
    assert json.loads(cli("--json", "world", "program", "ada", "q").stdout)["program"] == "q"
    assert json.loads(cli("--json", "world", "program", "ada", "--remove").stdout)["program"] is None
    cli("world", "program", "ada", "q", "--remove", code=2)


def created(plane: Plane, name: str, *, program: str = "p", items: int) -> fastness.World:
    """A world with a program and so many items."""
    world = plane.world(name)
    world.create(program=program)
    for number in range(items):
        assert world.inbox.put(item(number)) == number
    return world


def item(number: int) -> DomainEvent:
    return DomainEvent(schema=f"item-{number}", payload=b"{}")


def sent(schema: str) -> DomainEvent:
    return DomainEvent(schema=schema, payload=b"null")


def claim(plane: Plane, owner: str = "h1") -> ClaimedWorld:
    """The only world that a host can claim."""
    (claimed,) = plane.hosting.claim(["p"], owner=owner)
    return claimed


def info(world: str, *, program: str | None = "p", fence: int = 0, **others: Any) -> HostingInfo:
    defaults = {"owner": None, "expires_ms": None, "ready_ms": None, "attempts": 0, "error": None}
    fields = {"fence": fence, **defaults, "is_stopped": False, "set_aside": 0, **others}
    return HostingInfo(world, program, **fields)


def records(plane: Plane, world: str) -> list[Any]:
    """The values of a journal; of an item, its sequence."""
    decoded = [(record.kind, cbor2.loads(record.value)) for record in plane.world(world).read()]
    return [value["seq"] if kind == "ingress" else value for kind, value in decoded]
