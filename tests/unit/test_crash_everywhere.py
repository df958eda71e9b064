"""Hosts that crash at every boundary do everything once, and broken ones are found."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastness.hosts.apps import HostApp
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.programs import Event, TurnContext
from fastness.hosts.workflows.retry import Retry
from fastness.hosts.workflows.run import WorkflowRun
from fastness.kv import Transaction
from fastness.layers import effect_leases, effects, hosting
from fastness.layers.hosting import Hosting
from fastness.layers.worlds import World
from fastness.limits import RUN_RESULT_BYTES_MAX
from fastness.testing import AsyncHostTest, CrashFailure, HostTest, crash_everywhere
from fastness.wire import run_records
from fastness.wire.atomic import CommitAtomic
from fastness.wire.hosting import TurnCommitted
from fastness.wire.restores import Restored
from tests.unit.host_test_apps import app, buy_book, charged_by, pay, place_order, rolled_out

Break = Callable[[pytest.MonkeyPatch], None]


def test_a_program_does_everything_once_wherever_its_host_crashes() -> None:
    report = crash_everywhere(app, place_order, snapshot_every=4)
    assert report.result == "paid"
    assert set(report.repeated) == {"adapter charge_card of order-1"}
    named = set(report.boundaries)
    assert {"before adapter charge_card of order-1", "after adapter charge_card of order-1"} < named
    paid = "hosting.commit of order-1, worlds.inbox.put of warehouse, queues.put of emails, mail.send, states.update"
    assert any(name.startswith(f"after commit: {paid}") for name in named), sorted(named)
    assert report.runs == 2 * len(report.boundaries) + 1
    assert str(report).splitlines()[0].endswith("all with the same outcome")


def test_a_workflow_does_everything_once_wherever_its_host_crashes() -> None:
    report = crash_everywhere(app, buy_book, snapshot_every=16)
    assert report.result == ["BOOK", 86_400.0, "shipped BOOK"]
    assert set(report.repeated) == {"step look_up of run:b-1", "step wait_long of run:b-1"}


def test_a_large_result_is_there_wherever_its_host_crashes() -> None:
    storing = HostApp()

    def make() -> str:
        return "x" * RUN_RESULT_BYTES_MAX

    @storing.workflow
    async def store(run: WorkflowRun) -> int:
        found = await run.step(make)
        await run.sleep(60)
        return len(found)

    def scenario(test: HostTest) -> Any:
        return test.run_to_end(test.plane.workflows.start(store, id="s-1"))

    report = crash_everywhere(storing, scenario)
    assert report.result == RUN_RESULT_BYTES_MAX
    assert set(report.repeated) == {"step make of run:s-1"}


def test_a_failed_attempt_that_was_not_recorded_is_reported_too() -> None:
    failing = HostApp()

    def fail() -> None:
        raise OSError("no")

    @failing.workflow
    async def tries(run: WorkflowRun) -> str:
        try:
            await run.step(fail, retry=Retry(2, delay_seconds=60.0))
        except Exception as error:
            return type(error).__name__
        return "done"

    async def scenario(test: AsyncHostTest) -> Any:
        return await test.run_to_end(await test.plane.workflows.start(tries, id="t-1"))

    report = crash_everywhere(failing, scenario)
    assert report.result == "StepFailed"
    assert report.repeated["step fail of run:t-1"] >= 4  # Two attempts, each killed before and after it was recorded.


def test_what_depends_on_the_time_can_be_left_out() -> None:
    timed = HostApp()

    @timed.program
    def clock(state: Any, event: Event, context: TurnContext) -> Any:
        return {"at": context.now.isoformat()}

    def scenario(test: HostTest) -> Any:
        test.plane.world("c").create(program=clock)
        test.plane.world("c").send("go", {})
        test.run_until_idle()
        return None

    with pytest.raises(CrashFailure, match="the state of world c differs"):
        crash_everywhere(timed, scenario)
    crash_everywhere(timed, scenario, normalize=lambda value: sorted(value) if isinstance(value, dict) else value)


def test_a_step_keeps_its_id_when_another_host_goes_on_with_changed_code() -> None:
    report = crash_everywhere(rolled_out, pay)
    assert report.result == "paid"
    assert set(report.repeated) == {"step charge_by_card of run:p-1"}  # The host with the second version knows it, too.
    assert charged_by == {"charge_by_card", "charge_by_bank"}  # A run that had not started it yet takes the patch.


def test_a_program_that_is_not_pure_is_found() -> None:
    impure = HostApp()
    numbers = itertools.count()

    @impure.program
    def counter(state: Any, event: Event, context: TurnContext) -> Any:
        return next(numbers)

    def scenario(test: HostTest) -> None:
        test.plane.world("c").create(program=counter)
        for _ in range(12):
            test.plane.world("c").send("go", {})
            test.run_until_idle()

    with pytest.raises(CrashFailure, match="the journal of world c does not give the state of its host"):
        crash_everywhere(impure, scenario)


def test_a_scenario_that_fails_after_a_crash_names_the_boundary() -> None:
    def scenario(test: HostTest) -> None:
        place_order(test)
        assert test.clock.now_ms() % 10_000 == 0, "a crash moves the clock"

    with pytest.raises(CrashFailure, match=r"killed at boundary 1 of \d+, before commit: .*a crash moves the clock"):
        crash_everywhere(app, scenario)


# Broken variants, each with what it breaks in the message.


def sends_are_committed_by_themselves_before_the_turn(patch: pytest.MonkeyPatch) -> None:
    commit = HostedWorld.commit

    async def twice(world: HostedWorld, *, operations: Sequence[Any] = (), **turn: Any) -> TurnCommitted:
        if operations:
            await world.transport.call(CommitAtomic(list(operations)))
        return await commit(world, **turn)

    patch.setattr(HostedWorld, "commit", twice)


def sends_are_committed_by_themselves_after_the_turn(patch: pytest.MonkeyPatch) -> None:
    commit = HostedWorld.commit

    async def twice(world: HostedWorld, *, operations: Sequence[Any] = (), **turn: Any) -> TurnCommitted:
        committed = await commit(world, **turn)
        if operations:
            await world.transport.call(CommitAtomic(list(operations)))
        return committed

    patch.setattr(HostedWorld, "commit", twice)


def items_are_taken_by_a_commit_before_their_effects(patch: pytest.MonkeyPatch) -> None:
    commit = HostedWorld.commit

    async def twice(
        world: HostedWorld, *, effects: Sequence[Any] = (), timers: Sequence[Any] = (), **turn: Any
    ) -> TurnCommitted:
        committed = await commit(world, **turn)
        if effects or timers:
            asked: Any = {"effects": [(0, each) for _, each in effects], "timers": [(0, each) for _, each in timers]}
            committed = await commit(world, entries=[b"\xf6"], **asked)
        return committed

    patch.setattr(HostedWorld, "commit", twice)


def fences_of_turns_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    def trusting(tx: Transaction, world: World, *, owner: str, fence: int) -> Hosting:
        found = hosting.find(tx, world)
        assert found is not None
        return found

    patch.setattr(hosting, "require_claim", trusting)


def fences_of_effects_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    def trusting(tx: Transaction, universe: str, key: Any, fence: int) -> Any:
        return effects.find(tx, universe, key)

    patch.setattr(effect_leases, "_held", trusting)


def the_result_of_the_last_step_is_lost_on_restore(patch: pytest.MonkeyPatch) -> None:
    restore = HostedWorld.restore

    async def forgetful(world: HostedWorld, reducer: Any) -> Restored:
        restored = await restore(world, reducer)
        history = (restored.state or {}).get("history", [])
        while history and history[-1][0] == run_records.STEP:
            history.pop()
        return restored

    patch.setattr(HostedWorld, "restore", forgetful)


def starts_of_steps_are_lost_on_restore(patch: pytest.MonkeyPatch) -> None:
    restore = HostedWorld.restore

    async def forgetful(world: HostedWorld, reducer: Any) -> Restored:
        restored = await restore(world, reducer)
        history = (restored.state or {}).get("history", [])
        history[:] = [record for record in history if record[0] != run_records.STARTED]
        return restored

    patch.setattr(HostedWorld, "restore", forgetful)


def a_snapshot_has_another_state(patch: pytest.MonkeyPatch) -> None:
    snapshot = HostedWorld.snapshot

    async def wrong(world: HostedWorld, state: Any) -> None:
        await snapshot(world, {**state, "now": 1})

    patch.setattr(HostedWorld, "snapshot", wrong)


def test_a_host_that_forgets_which_steps_have_started_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    starts_of_steps_are_lost_on_restore(monkeypatch)
    found = "have the same id 0.0: its idempotency key lets only one happen"
    with pytest.raises(CrashFailure, match=found):
        crash_everywhere(rolled_out, pay)


@pytest.mark.parametrize(
    ("break_it", "scenario", "found"),
    [
        (sends_are_committed_by_themselves_before_the_turn, place_order, "was done twice or more: it is there 2 times"),
        (sends_are_committed_by_themselves_after_the_turn, place_order, "was lost: it is there not, and once"),
        (sends_are_committed_by_themselves_before_the_turn, buy_book, "in queue emails was done twice or more"),
        (items_are_taken_by_a_commit_before_their_effects, place_order, "item receipt charge_card .* was lost"),
        (fences_of_turns_are_not_checked, place_order, "host-1 has committed hosting.commit of .* with an old fence"),
        (
            fences_of_effects_are_not_checked,
            place_order,
            "host-1 has committed effects.complete of .* with an old fence",
        ),
        (
            the_result_of_the_last_step_is_lost_on_restore,
            buy_book,
            "step look_up of run:b-1 was called again after its result",
        ),
        (a_snapshot_has_another_state, place_order, "does not give the state of its host"),
    ],
)
def test_a_broken_host_is_found(
    break_it: Break, scenario: Callable[[HostTest], Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    snapshot_every = 2 if break_it is a_snapshot_has_another_state else 64
    with pytest.raises(CrashFailure, match=found):
        crash_everywhere(app, scenario, snapshot_every=snapshot_every)
