"""What a step knows of itself, and the plane of its host: in coroutines and on threads, embedded and over a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import fastness
from fastness import AsyncHost, Host, HostApp, Plane, Retry, StepContext, WorkflowRun, current_step
from fastness.errors import RunFailed, WorkflowChanged, WorkflowMisuse
from fastness.testing import HostTest
from fastness.testing.clock import ManualClock

PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than any test needs.


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}", universe="acme") as plane:
        yield plane


app = HostApp()


def put_on_thread(number: int) -> list[str]:
    step = current_step()
    step.plane.queue("jobs").put({"n": number}, idempotency_key=step.id)
    with pytest.raises(WorkflowMisuse, match="use `plane`"):
        _ = step.async_plane
    return [step.id, step.run_id, step.name]


async def put_in_coroutine(number: int) -> list[str]:
    step = current_step()
    await step.async_plane.queue("jobs").put({"n": number}, idempotency_key=step.id)
    with pytest.raises(WorkflowMisuse, match="use `async_plane`"):
        _ = step.plane
    if step.attempt < 3:  # What was put is not put again.
        raise ConnectionError
    return [step.id, step.run_id, step.name]


@app.workflow
async def put_twice(run: WorkflowRun) -> list[list[str]]:
    first = await run.step(put_on_thread, 1)
    second = await run.step(put_in_coroutine, 2, name="second", retry=Retry(3, delay_seconds=0))
    return [first, second]


def check_put_twice(plane: Plane) -> None:
    run = plane.workflows.start(put_twice, id="r")
    assert run.result(wait_seconds=PATIENCE_SECONDS) == [["r.1.0.0", "r", "put_on_thread"], ["r.1.0.1", "r", "second"]]
    assert [message.json()["n"] for message in plane.queue("jobs").receive_many(10)] == [1, 2]


def test_functions_and_coroutines_reach_the_plane_of_their_host(plane: Plane) -> None:
    with Host(plane, app):
        check_put_twice(plane)


async def test_an_async_host_has_a_plane_for_functions_on_threads() -> None:
    async with fastness.open_async("memory:") as plane:
        async with AsyncHost(plane, app):
            run = await plane.workflows.start(put_twice)
            await run.result(wait_seconds=PATIENCE_SECONDS)
        assert len(await plane.queue("jobs").peek(10)) == 2


def test_a_run_that_was_deleted_and_started_again_has_other_steps() -> None:
    seen: list[StepContext] = []
    again = HostApp()

    @again.workflow
    async def note(run: WorkflowRun) -> None:
        await run.step(lambda: seen.append(current_step()), name="first")
        if len(seen) < 4:
            run.continue_as_new()

    with HostTest(again) as test:
        for _ in range(2):
            test.run_to_end(test.plane.workflows.start(note, id="r"))
            test.plane.workflows.delete("r")
    assert [step.id for step in seen] == ["r.1.0.0", "r.1.1.0", "r.1.2.0", "r.1.3.0", "r.2.0.0"]
    assert seen[-1].fence > seen[0].fence


def test_outside_of_a_step_there_is_no_current_step() -> None:
    with pytest.raises(WorkflowMisuse, match="current_job"):
        current_step()


def test_a_step_that_does_not_fit_its_own_records_stops_the_run_until_the_code_fits(clock: ManualClock) -> None:
    fits = False
    changing = HostApp()

    async def replay() -> str:
        if not fits:
            raise WorkflowChanged("The step has other records; deploy the code that fits")
        return "done"

    @changing.workflow
    async def work(run: WorkflowRun) -> str:
        return await run.step(replay)

    with HostTest(changing, max_attempts=2) as test:
        run = test.plane.workflows.start(work, id="r")
        test.run_until_idle()
        test.advance(hours=1)
        assert run.describe().state == "stopped"
        hosting = test.plane.world("run:r").hosting()
        assert hosting.is_stopped
        assert "deploy the code that fits" in (hosting.error or "")
        fits = True
        test.plane.world("run:r").resume_program()
        assert test.run_to_end(run) == "done"
        assert not [event for event in run.history() if event.kind == "retry"]


def test_a_failed_step_still_fails_its_run() -> None:
    failing = HostApp()

    @failing.workflow
    async def work(run: WorkflowRun) -> None:
        await run.step(lambda: 1 // 0, name="divide")

    with HostTest(failing) as test, pytest.raises(RunFailed, match="ZeroDivisionError"):
        test.run_to_end(test.plane.workflows.start(work))


def test_steps_of_a_host_test_reach_its_plane() -> None:
    with HostTest(app) as test:
        test.run_to_end(test.plane.workflows.start(put_twice))
        assert len(test.plane.queue("jobs").peek(10)) == 2
