"""The test environment for programs and workflows: time is skipped, and what cannot end says why."""

import asyncio
import inspect
import textwrap
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastness.errors import InvalidArgument, RunCancelled, RunFailed
from fastness.hosts.apps import HostApp
from fastness.hosts.programs import Event, TurnContext
from fastness.hosts.workflows.retry import Retry
from fastness.hosts.workflows.run import WorkflowRun
from fastness.testing import AsyncHostTest, HostTest, StuckRun, crash_everywhere
from fastness.testing.hosts import crashes, host_test, processes
from fastness.testing.hosts.virtual_loop import VirtualLoop
from tests.unit.host_test_apps import app, buy_book, order, place_order, shipping, start_to_buy, warehouse

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_program_runs_until_idle_and_its_timer_fires_when_the_clock_moves() -> None:
    with HostTest(app, start=NOON) as test:
        assert place_order(test) == "paid"
        assert test.state("order-1")["log"] == ["domain_event order", "receipt charge_card", "timer_fired reminder"]
        assert test.state("warehouse") == {"shipped": [1_700]}
        assert [each.payload for each in test.plane.queue("emails").peek()] == [b'{"paid":1700}']
        assert [each.body for each in test.plane.mailbox("ada").read()] == [b'{"paid":1700}']
        assert test.now == NOON + timedelta(hours=2)
        assert not test.skip()


def test_advance_fires_each_timer_at_its_own_time() -> None:
    ticks = HostApp()

    @ticks.program
    def ticker(state: Any, event: Event, context: TurnContext) -> Any:
        context.timer("tick", seconds=3_600)
        return [*(state or []), context.now.hour]

    with HostTest(ticks, start=NOON) as test:
        test.plane.world("t").create(program=ticker)
        test.plane.world("t").send("start", {})
        test.advance(hours=3, minutes=30)
        assert test.state("t") == [12, 13, 14, 15]
        assert test.skip()
        assert test.now == NOON + timedelta(hours=4)


def test_a_month_of_a_workflow_takes_no_time_and_a_sleeping_step_neither() -> None:
    with HostTest(app, start=NOON) as test:
        run = start_to_buy(test)
        assert run.query() == {"found": "BOOK"}
        assert test.run_to_end(run) == ["BOOK", 86_400.0, None]
        assert test.now == NOON + timedelta(days=30)
    with HostTest(app, start=NOON) as test:
        assert buy_book(test) == ["BOOK", 86_400.0, "shipped BOOK"]
        assert test.now == NOON + timedelta(days=1)


def test_retries_of_steps_effects_and_turns_are_skipped_to() -> None:
    flaky = HostApp()
    attempts: dict[str, int] = {}

    def fail_twice(what: str) -> int:
        attempts[what] = attempts.get(what, 0) + 1
        if attempts[what] < 3:
            raise OSError(f"{what} is not there")
        return attempts[what]

    @flaky.workflow
    async def steps(run: WorkflowRun) -> list[int]:
        again = Retry(3, delay_seconds=60.0)
        here = await run.step(fail_twice, "step", retry=again)
        return [here, await run.step(fail_twice, "task", queue="tasks", retry=again)]

    @flaky.program
    def turns(state: Any, event: Event, context: TurnContext) -> Any:
        if event.name == "call":
            context.call("effect", {})
        if event.name == "turn":
            fail_twice("turn")
        return [*(state or []), event.name]

    @flaky.adapter("effect")
    def effect(call: Any) -> int:
        return fail_twice("effect")

    with HostTest(flaky) as test:
        assert test.run_to_end(test.plane.workflows.start(steps)) == [3, 3]
        test.plane.world("w").create(program=turns)
        test.plane.world("w").send("turn", {})
        test.plane.world("w").send("call", {})
        while test.skip():
            pass
        assert test.state("w") == ["turn", "call", "effect"]


def test_a_run_that_cannot_end_says_what_it_waits_for() -> None:
    waits = HostApp()

    @waits.workflow
    async def patient(run: WorkflowRun) -> Any:
        return await run.wait_for("approval")

    with HostTest(waits) as test:
        run = test.plane.workflows.start(patient, id="p-1")
        with pytest.raises(StuckRun, match="p-1 waits for the signal approval"):
            test.run_to_end(run)
        run.signal("approval", "yes")
        assert test.run_to_end("p-1") == "yes"


def test_a_run_that_failed_or_was_cancelled_raises() -> None:
    bad = HostApp()

    @bad.workflow
    async def fails(run: WorkflowRun) -> None:
        raise ValueError("no such item")

    with HostTest(bad) as test, pytest.raises(RunFailed, match="no such item"):
        test.run_to_end(test.plane.workflows.start(fails))
    with HostTest(app) as test:
        run = test.plane.workflows.start(shipping, "book")
        test.run_until_idle()
        run.cancel("sold out")
        with pytest.raises(RunCancelled, match="sold out"):
            test.run_to_end(run)


def test_a_run_whose_code_changed_is_stuck_with_its_error() -> None:
    def version(name: str) -> HostApp:
        made = HostApp()

        @made.workflow(name="flow")
        async def flow(run: WorkflowRun) -> None:
            await run.step(int, name=name)
            await run.wait_for("go")

        return made

    changing = version("first")
    with HostTest(changing) as test:
        run = test.plane.workflows.start("flow", id="f-1")
        test.run_until_idle()
        changing.add_runner("workflow:flow", version("second").runners["workflow:flow"])
        test.restart()
        run.signal("go")
        with pytest.raises(StuckRun, match="step first"):
            test.run_to_end(run)


def test_a_restarted_host_continues_from_what_is_committed() -> None:
    with HostTest(app) as test:
        run = start_to_buy(test)
        test.restart()
        run.signal("approval", True)
        assert test.run_to_end(run) == ["BOOK", 86_400.0, "shipped BOOK"]


async def test_the_environment_runs_on_the_event_loop_of_a_test() -> None:
    async with AsyncHostTest(app) as test:
        for name, program in (("order-1", order), ("warehouse", warehouse)):
            await test.plane.world(name).create(program=program)
        await test.plane.world("order-1").send("order", {"id": 1})
        await test.run_until_idle()
        await test.restart()
        await test.advance(hours=1)
        assert (await test.state("order-1"))["log"][-1] == "timer_fired reminder"
        run = await test.plane.workflows.start(shipping, "book")
        assert await test.run_to_end(run) == "shipped book"


async def test_the_synchronous_environment_is_refused_on_an_event_loop() -> None:
    with pytest.raises(InvalidArgument, match="AsyncHostTest"), HostTest(app) as test:
        test.run_until_idle()


def test_programs_that_send_to_each_other_for_ever_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = HostApp()

    @endless.program
    def ping(state: Any, event: Event, context: TurnContext) -> Any:
        context.send("ping", {})
        return None

    monkeypatch.setattr(processes, "COMMITS_MAX", 20)
    with HostTest(endless) as test:
        test.plane.world("ping").create(program=ping)
        test.plane.world("ping").send("go", {})
        with pytest.raises(AssertionError, match="for ever"):
            test.run_until_idle()


def test_a_world_without_a_program_of_the_app_has_no_state() -> None:
    with HostTest(app) as test:
        test.plane.world("plain").create()
        with pytest.raises(InvalidArgument, match="plain has no program"):
            test.state("plain")


def test_the_virtual_loop_moves_its_time_and_runs_functions_for_threads_in_order() -> None:
    loop = VirtualLoop()
    order_of_calls: list[int] = []

    async def main() -> float:
        await asyncio.gather(*(asyncio.to_thread(order_of_calls.append, number) for number in range(3)))
        await asyncio.wait_for(asyncio.sleep(86_400), timeout=100_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), timeout=30)
        return loop.time()

    try:
        assert loop.run_until_complete(main()) == pytest.approx(86_430)
    finally:
        loop.close()
    assert order_of_calls == [0, 1, 2]


def test_the_examples_of_the_docstrings_run() -> None:
    examples = HostApp()

    @examples.workflow
    async def subscription(run: WorkflowRun, who: str) -> str:
        while not await run.wait_for("cancel", timeout=timedelta(days=30)):
            pass
        return "cancelled"

    @examples.workflow(name="order")
    async def order(run: WorkflowRun, details: dict[str, str]) -> bool:
        return bool(await run.wait_for("approval"))

    for module in (host_test, crashes):
        blocks = [each for each in (inspect.getdoc(module) or "").split("\n\n") if each.startswith("    ")]
        code = textwrap.dedent("\n\n".join(each for each in blocks if "import" in each or "test" in each))
        names: dict[str, Any] = {"app": examples, "subscription": subscription, "order": order}
        names["crash_everywhere"] = crash_everywhere
        exec(compile(code, str(module.__file__), "exec"), names)
