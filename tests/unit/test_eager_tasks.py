"""Eager coroutines: they start without a task, and fall back to ordinary tasks without asyncio's internals."""

import asyncio
from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest

from fastness.runtime import eager_tasks
from fastness.runtime.eager_tasks import EagerCoroutine

variable: ContextVar[str] = ContextVar("variable", default="initial")


@pytest.fixture(params=["eager", "fallback"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with asyncio's internals, and as if they were missing."""
    if request.param == "fallback":
        monkeypatch.setattr(eager_tasks, "_leave_task", None)
    return str(request.param)


async def finish(work: Any, context: Context | None = None) -> Any:
    """The result of `work`, the way that callers use an EagerCoroutine."""
    started = EagerCoroutine(work, context)
    if started.is_done:
        return started.result
    return await asyncio.get_running_loop().create_task(started.remainder, context=context)


async def return_at_once() -> str:
    return "done"


async def wait_for(future: "asyncio.Future[str]") -> str:
    return await future


async def test_a_coroutine_that_does_not_wait_is_done_without_a_task() -> None:
    started = EagerCoroutine(return_at_once())
    assert started.is_done
    assert started.result == "done"


async def test_the_fallback_leaves_the_whole_coroutine_to_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_tasks, "_enter_task", None)
    work = return_at_once()
    started = EagerCoroutine(work)
    assert not started.is_done
    assert started.remainder is work
    assert await asyncio.get_running_loop().create_task(started.remainder) == "done"


async def test_an_error_before_the_first_wait_is_raised(mode: str) -> None:
    async def fail() -> None:
        raise KeyError("wrong")

    with pytest.raises(KeyError):
        await finish(fail())


async def test_the_result_is_returned(mode: str) -> None:
    assert await finish(return_at_once()) == "done"


async def test_the_remainder_gets_the_result_of_the_awaited_future(mode: str) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    started = EagerCoroutine(wait_for(future))
    assert not started.is_done
    task = asyncio.get_running_loop().create_task(started.remainder)
    future.set_result("result")
    assert await task == "result"


async def test_a_future_that_is_done_before_the_task_runs_is_awaited(mode: str) -> None:
    async def wait_for_all(futures: list[Any]) -> list[str]:
        return [await each for each in futures]

    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(2)]
    started = EagerCoroutine(wait_for_all(futures))
    for number, future in enumerate(futures):
        future.set_result(str(number))
    assert await loop.create_task(started.remainder) == ["0", "1"]


async def test_a_sleep_of_zero_seconds_is_a_wait(mode: str) -> None:
    async def sleep() -> str:
        await asyncio.sleep(0)
        return "slept"

    started = EagerCoroutine(sleep())
    assert not started.is_done
    assert await asyncio.get_running_loop().create_task(started.remainder) == "slept"


async def test_a_task_cancelled_before_its_first_step_cancels_the_started_coroutine() -> None:
    assert await cancelled_inside(steps=0)


async def test_a_task_cancelled_while_it_waits_cancels_the_coroutine(mode: str) -> None:
    assert await cancelled_inside(steps=2)


async def cancelled_inside(*, steps: int) -> bool:
    """Whether a coroutine sees the cancellation of its task after so many steps of the event loop."""
    is_cancelled = False

    async def work() -> None:
        nonlocal is_cancelled
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    task = asyncio.get_running_loop().create_task(EagerCoroutine(work()).remainder)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return is_cancelled


async def test_an_error_of_the_awaited_future_is_raised_inside(mode: str) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.get_running_loop().create_task(EagerCoroutine(wait_for(future)).remainder)
    future.set_exception(KeyError("wrong"))
    with pytest.raises(KeyError):
        await task


async def test_all_steps_run_in_the_given_context(mode: str) -> None:
    async def change() -> str:
        variable.set("changed")
        await asyncio.sleep(0)
        return variable.get()

    assert await finish(change(), copy_context()) == "changed"
    assert variable.get() == "initial"


async def test_the_first_step_runs_without_a_current_task() -> None:
    seen = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(asyncio.current_task())

    own = asyncio.current_task()
    started = EagerCoroutine(work())
    assert asyncio.current_task() is own
    task = asyncio.get_running_loop().create_task(started.remainder)
    await task
    assert seen == [None, task]
