"""Runs of workflows: what a plain model does not show (sizes, waits, worlds that were changed by hand, crashes)."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import fastness
from fastness import AsyncHost, HostApp, Plane, WorkflowRun
from fastness.backends.memory import MemoryDatabase
from fastness.cli.exit_codes import DAMAGED
from fastness.errors import (
    BlobNotFound,
    Fenced,
    InvalidArgument,
    InvalidName,
    PayloadTooLarge,
    ResultNotReady,
    RunExists,
    RunNotFound,
    WorldNotFound,
)
from fastness.kv import Transaction
from fastness.layers import hosting, runs, timers
from fastness.layers.worlds import World
from fastness.limits import (
    RUN_ERROR_BYTES_MAX,
    RUN_ID_BYTES_MAX,
    RUN_REASON_BYTES_MAX,
    RUN_SWEEP_SECONDS,
    RUN_VALUE_BYTES_MAX,
)
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.runtime.maintenance import health_checks
from fastness.tasks.planes import async_plane_of
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.wire.blobs import PutBlob
from fastness.wire.canonical import canonical
from fastness.wire.health_checks import Finding
from fastness.wire.hosting import ClaimWorlds, CommitTurn
from fastness.wire.inboxes import Timer
from fastness.wire.runs import CancelRun, GetRun, ListRuns, SignalRun, StartRun, UpdateRun

Cli = Callable[..., Result]
PATIENCE_SECONDS = 30.0


@pytest.fixture
def plane(clock: ManualClock) -> Iterator[Plane]:
    with fastness.open("memory:", clock=clock) as plane:
        yield plane


def fence_of(plane: Plane, id: str, workflow: str = "w") -> int:
    claims = plane._transport.call(ClaimWorlds([f"workflow:{workflow}"], "host", 100)).worlds
    return next(each.fence for each in claims if each.world == f"run:{id}")


def end(plane: Plane, id: str, **outcome: Any) -> fastness.RunInfo:
    return plane._transport.call(UpdateRun(id, fence_of(plane, id), **{"state": "completed", **outcome}))


def make_stuck(plane: Plane, id: str) -> None:
    """A host takes the first item of a new run, and its world becomes idle in a way that no layer has."""
    plane.workflows.start("w", id=id)
    world = World("main", f"run:{id}")
    (claimed,) = plane.hosting.claim(["workflow:w"], owner="h1", limit=1)
    plane.hosting.commit(claimed, owner="h1", expected_head=0, take=0)

    def lose_the_claim(tx: Transaction) -> None:
        record = hosting.find(tx, world)
        assert record is not None
        hosting.write(tx, world, record, hosting.end_claim(record, ready_ms=None))

    plane.transact(lose_the_claim)


def services_of(plane: Plane) -> Services:
    assert isinstance(plane._transport, EmbeddedTransport)
    return plane._transport.services


def found_by_doctor(plane: Plane) -> list[str]:
    database = services_of(plane).database
    return [each.where for each in health_checks.all_worlds(database, None) if isinstance(each, Finding)]


def test_a_run_that_nothing_would_continue_is_found_and_revived(
    plane: Plane, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    make_stuck(plane, "r")
    assert found_by_doctor(plane) == ["run r of main"]
    clock.advance_ms(RUN_SWEEP_SECONDS * 1_000)
    assert [each.world for each in plane.hosting.claim(["workflow:w"], owner="h2")] == ["run:r"]
    assert services_of(plane).revived_runs == {"main": 1}
    assert "run:r of main" in caplog.text
    assert not found_by_doctor(plane)


def test_a_claim_checks_a_bounded_number_of_runs_and_goes_on_where_the_last_one_ended(
    plane: Plane, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.runtime.sync.hosting.RUNS_SWEPT", 2)
    for number in range(5):
        make_stuck(plane, f"r-{number}")
    revived = []
    for _ in range(4):
        clock.advance_ms(RUN_SWEEP_SECONDS * 1_000)
        for _ in range(2):  # The second one is too early to check any.
            found = plane.hosting.claim(["workflow:w"], owner="h2", lease_seconds=3_600)
            revived.append([each.world.removeprefix("run:") for each in found])
    assert [each for each in revived if each] == [["r-0", "r-1"], ["r-2", "r-3"], ["r-4"]]


def test_runs_that_wait_have_a_host_or_are_stopped_are_not_stuck(plane: Plane, clock: ManualClock) -> None:
    app = HostApp()

    @app.workflow
    async def waiter(run: WorkflowRun, what: str) -> None:
        if what == "signal":
            await run.wait_for("go")
        elif what == "child":
            await run.child(waiter, "signal", id="grandchild")
        else:
            await run.sleep(3_600)

    async def run_ready() -> None:
        await AsyncHost(async_plane_of(plane), app).run_ready()

    for what in ("signal", "child", "timer"):
        plane.workflows.start(waiter, what, id=what)
    plane.workflows.start(waiter, "signal", id="paused")
    plane.workflows.start(waiter, "signal", id="ended")
    asyncio.run(run_ready())
    plane.workflows.start(waiter, "signal", id="ready")
    plane.workflows.start("other", id="held")
    plane.hosting.claim(["workflow:other"], owner="h1")
    plane.world("run:paused").pause()
    plane.workflows.cancel("ended", force=True)
    assert not found_by_doctor(plane)
    plane.transact(lambda tx: timers.cancel_all(tx, World("main", "run:timer"), limit=10))
    assert found_by_doctor(plane) == ["run timer of main"]
    clock.advance_ms(RUN_SWEEP_SECONDS * 1_000)
    asyncio.run(run_ready())
    assert services_of(plane).revived_runs == {"main": 1}


def test_doctor_reports_a_run_that_nothing_would_continue(cli: Cli, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        make_stuck(plane, "r")
    result = cli("doctor", str(tmp_path), code=DAMAGED)
    assert "run r of main" in result.output
    assert "start a host" in result.output


def test_large_arguments_signals_and_results_are_blobs_that_are_kept(plane: Plane) -> None:
    large = "x" * RUN_VALUE_BYTES_MAX
    run = plane.workflows.start("w", large, id="r")
    plane.workflows.signal("r", "go", large)
    (_, started), (_, signalled) = plane.world("run:r").inbox.read()
    assert started.payload_blob is not None
    assert signalled.payload_blob is not None
    result, fence = canonical([large]), fence_of(plane, "r")
    with pytest.raises(PayloadTooLarge, match="store it as a blob"):
        plane._transport.call(UpdateRun("r", fence, "completed", result))
    with pytest.raises(BlobNotFound):
        plane._transport.call(UpdateRun("r", fence, "completed", result_blob="0" * 64))
    hash = plane._transport.call(PutBlob(result, pinned=False)).hash
    plane._transport.call(UpdateRun("r", fence, "completed", result_blob=hash))
    for _ in range(3):  # Nothing that a run names is unreferenced, also after the grace period.
        plane.gc(grace_seconds=0)
    assert run.result() == [large]
    assert plane.blobs.get(started.payload_blob)


def test_the_largest_values_fit_into_items(plane: Plane) -> None:
    text = "é" * ((RUN_VALUE_BYTES_MAX - 10) // 2)
    plane.workflows.start("w", text, id="p")
    plane._transport.call(StartRun("c", "p:1", parent="p"))
    plane.workflows.signal("p", "go", text)
    error = "ü" * RUN_ERROR_BYTES_MAX
    update = UpdateRun("p:1", fence_of(plane, "p:1", "c"), "failed", canonical(text), error, published=canonical(text))
    assert plane._transport.call(update).error == "ü" * (RUN_ERROR_BYTES_MAX // 2)
    [claimed] = plane._transport.call(ClaimWorlds(["workflow:w"], "host")).worlds
    turn = CommitTurn("run:p", "host", claimed.fence, 0, 2)
    assert plane._transport.call(turn).head == 3


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (StartRun("w", "x" * (RUN_ID_BYTES_MAX + 1)), InvalidName),
        (StartRun("w", "a/b"), InvalidName),
        (StartRun("w" * 250, "a"), InvalidName),
        (StartRun("w", "a", arguments_blob="nothing"), InvalidArgument),
        (SignalRun("r", "a b"), InvalidName),
        (SignalRun("r", "go", b"\x00" * (RUN_VALUE_BYTES_MAX + 1)), PayloadTooLarge),
        (ListRuns("sleeping"), InvalidArgument),
        (ListRuns(limit=0), InvalidArgument),
        (GetRun("r", 21.0), InvalidArgument),
        (GetRun("r", float("nan")), InvalidArgument),
        (CancelRun("r", "x" * (RUN_REASON_BYTES_MAX + 1)), InvalidArgument),
        (UpdateRun("r", 1, "asleep"), InvalidArgument),
        (UpdateRun("r", 1, "running", result=b"\x01"), InvalidArgument),
        (UpdateRun("r", 9, "completed"), Fenced),
    ],
)
def test_a_bad_request_writes_nothing(plane: Plane, request_: Any, error: type[Exception]) -> None:
    plane.workflows.start("w", id="r")
    before = plane.workflows.describe("r"), plane.world("run:r").inbox.read(), plane.workflows.list()
    with pytest.raises(error):
        plane._transport.call(request_)
    assert (plane.workflows.describe("r"), plane.world("run:r").inbox.read(), plane.workflows.list()) == before


def test_a_run_that_ends_has_no_timers_and_no_host_claims_it_again(plane: Plane, clock: ManualClock) -> None:
    plane.workflows.start("w", id="r")
    [claimed] = plane._transport.call(ClaimWorlds(["workflow:w"], "host")).worlds
    due_ns = (clock.now_ms() + 60_000) * 1_000_000
    timers = [(0, Timer(due_ns + number, b"0.%d" % number)) for number in range(3)]
    plane._transport.call(CommitTurn("run:r", "host", claimed.fence, 0, 0, timers=timers))
    assert [each.timer_id for each in plane.workflows.timers("r")] == ["0.0", "0.1", "0.2"]
    plane.workflows.signal("r", "late")
    plane.workflows.cancel("r", "stop", force=True)
    assert plane.workflows.timers("r") == []
    clock.advance_ms(3_600_000)
    assert plane._transport.call(ClaimWorlds(["workflow:w"], "other")).worlds == []
    with pytest.raises(Fenced):
        plane._transport.call(CommitTurn("run:r", "host", claimed.fence, 1, 1))


def test_a_child_ends_whatever_became_of_its_parent(plane: Plane) -> None:
    for number, change in enumerate(("pause", "archive", "delete")):
        parent, child = f"p{number}", f"p{number}:1"
        plane.workflows.start("w", id=parent)
        plane._transport.call(StartRun("c", child, parent=parent))
        world = plane.world(f"run:{parent}")
        if change == "delete":
            world.archive()
        getattr(world, change)()
        update = UpdateRun(child, fence_of(plane, child, "c"), "completed", canonical(1))
        assert plane._transport.call(update).state == "completed"
        if change != "delete":
            assert len(world.inbox.read()) == 2


def test_a_run_is_not_told_of_the_child_of_an_earlier_run_with_its_id(plane: Plane) -> None:
    plane.workflows.start("w", id="p")
    plane._transport.call(StartRun("c", "p:1", parent="p"))
    plane.workflows.cancel("p", force=True)
    plane.workflows.delete("p")
    plane.workflows.start("w", id="p")
    plane._transport.call(UpdateRun("p:1", fence_of(plane, "p:1", "c"), "completed"))
    assert len(plane.world("run:p").inbox.read()) == 1


def test_a_world_of_a_run_that_is_deleted_by_hand_leaves_no_run(plane: Plane) -> None:
    plane.workflows.start("w", id="r")
    plane.world("run:r").archive()
    plane.world("run:r").delete()
    assert plane.workflows.list().runs == []
    with pytest.raises(RunNotFound):
        plane.workflows.describe("r")
    assert not plane.workflows.start("w", id="r").is_duplicate
    plane.world("run:taken").create()
    with pytest.raises(RunExists, match="world run:taken"):
        plane.workflows.start("w", id="taken")


def test_history_of_a_run_that_was_started_again_is_only_its_own(plane: Plane) -> None:
    plane.workflows.start("w", "first", id="r")
    [claimed] = plane._transport.call(ClaimWorlds(["workflow:w"], "host")).worlds
    plane._transport.call(CommitTurn("run:r", "host", claimed.fence, 0, 0))
    assert [each.details["args"] for each in plane.workflows.history("r")] == [["first"]]
    plane.workflows.cancel("r", force=True)
    plane.workflows.delete("r")
    plane.workflows.start("w", "second", id="r")
    assert plane.workflows.history("r") == []
    with pytest.raises(WorldNotFound):
        plane.world("run:r", incarnation=claimed.incarnation).read()


def test_an_interrupted_deletion_is_finished_by_the_next_one() -> None:
    with MemoryDatabase() as database:
        plane = Plane(EmbeddedTransport(Services(database, clock=ManualClock())))
        for fail_at in range(100):
            plane.workflows.start("w", id="r")
            plane.workflows.cancel("r", force=True)
            faults = ChosenFault(fail_at)
            crashing = Plane(EmbeddedTransport(Services(FaultyDatabase(database, faults), clock=ManualClock())))
            try:
                crashing.workflows.delete("r")
            except Crash:
                is_listed = bool(plane.workflows.list().runs)
                try:
                    assert plane.workflows.describe("r").state == "cancelled"
                    assert is_listed
                except RunNotFound:
                    assert not is_listed
                plane.workflows.delete("r")
            assert plane.workflows.list().runs == []
            if len(faults.points) <= fail_at:
                assert fail_at > 8
                return
    raise AssertionError("a deletion has a hundred points")


def test_a_caller_waits_as_long_as_the_plane_says(plane: Plane, clock: ManualClock) -> None:
    run = plane.workflows.start("w", id="r")
    outcome: list[Any] = []

    def wait(seconds: float) -> None:
        try:
            outcome.append(run.result(wait_seconds=seconds))
        except ResultNotReady as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait, args=(50.0,))
    waiting.start()
    while waiting.is_alive():  # Three calls of at most 20 s each.
        clock.advance_ms(1_000)
        waiting.join(0.001)
    assert isinstance(outcome.pop(), ResultNotReady)
    waiting = threading.Thread(target=wait, args=(PATIENCE_SECONDS,))
    waiting.start()
    end(plane, "r", result=canonical("done"))
    waiting.join(PATIENCE_SECONDS)
    assert outcome == ["done"]


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    async with fastness.open_async("memory:") as plane:
        run = await plane.workflows.start("w", id="r")
        waiting = asyncio.create_task(run.result(wait_seconds=PATIENCE_SECONDS))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await run.describe()).state == "running"


class Research:
    """What `fastness.workflow` makes of a function, as far as callers see it."""

    name = "research"
    result_type = dict[str, int]

    def sent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if len(args) != 1:
            raise InvalidArgument("research takes one argument")
        return [*args], kwargs


def test_a_workflow_checks_its_arguments_and_converts_its_result(plane: Plane) -> None:
    research = Research()
    with pytest.raises(InvalidArgument, match="one argument"):
        plane.workflows.start(research, id="r")
    with pytest.raises(InvalidArgument, match=r"fastness\.workflow"):
        plane.workflows.start(test_the_largest_values_fit_into_items)  # type: ignore[arg-type]
    run = plane.workflows.start(research, "q", id="r")
    update = UpdateRun("r", fence_of(plane, "r", "research"), "completed", canonical({"pages": "three"}))
    plane._transport.call(update)
    with pytest.raises(InvalidArgument, match="does not fit its annotation"):
        run.result()
    assert plane.workflows.result("r") == {"pages": "three"}
    assert [each.id for each in plane.workflows.list(workflow=research).runs] == ["r"]


def test_a_page_of_a_rare_workflow_may_be_empty_and_have_a_next_one(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUNS_SCANNED_MAX", 4)
    for number in range(10):
        plane.workflows.start("often", id=f"r{number}")
    for id in ("r5a", "r98", "r99"):
        plane.workflows.start("rare", id=id)
    for id in ("r98", "r99"):  # They are found before the running ones, and listed after them.
        plane.workflows.cancel(id, force=True)
    pages: list[list[str]] = []
    after: str | None = ""
    while after is not None:
        page = plane.workflows.list(workflow="rare", after=after, limit=2)
        pages.append([each.id for each in page.runs])
        after = page.next
    assert pages == [[], ["r5a"], ["r98", "r99"]]
