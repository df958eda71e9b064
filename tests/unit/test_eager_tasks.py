"""Coroutines that are begun at once, and what is left of them."""

import asyncio
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from holdfast.runtime.eager_tasks import EagerCoroutine

said: ContextVar[str] = ContextVar("said", default="nothing")


async def at_once() -> str:
    return "done"


async def later(future: "asyncio.Future[str]") -> str:
    return await future


async def test_what_need_not_wait_is_done_without_a_task() -> None:
    begun = EagerCoroutine(at_once())
    assert begun.is_done
    assert begun.result == "done"


async def test_what_it_raises_before_it_waits_is_raised_at_once() -> None:
    async def fail() -> None:
        raise KeyError("wrong")

    with pytest.raises(KeyError):
        EagerCoroutine(fail())


async def test_the_rest_is_a_task_and_gets_what_was_waited_for() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    begun = EagerCoroutine(later(future))
    assert not begun.is_done
    task = asyncio.get_running_loop().create_task(begun.rest)
    future.set_result("heard")
    assert await task == "heard"


async def test_a_future_that_is_done_before_the_task_runs_is_heard_too() -> None:
    async def twice(futures: list[Any]) -> list[str]:
        return [await each for each in futures]

    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(2)]
    begun = EagerCoroutine(twice(futures))
    for number, future in enumerate(futures):
        future.set_result(str(number))
    assert await loop.create_task(begun.rest) == ["0", "1"]


async def test_a_bare_turn_of_the_loop_is_waited_for() -> None:
    async def turn() -> str:
        await asyncio.sleep(0)
        return "turned"

    begun = EagerCoroutine(turn())
    assert not begun.is_done
    assert await asyncio.get_running_loop().create_task(begun.rest) == "turned"


@pytest.mark.parametrize("turns", [0, 2], ids=["before its first step", "while it waits"])
async def test_whoever_is_cancelled_hears_of_it_inside(turns: int) -> None:
    heard = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    task = asyncio.get_running_loop().create_task(EagerCoroutine(work()).rest)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == ["cancelled"]


async def test_an_error_of_what_was_waited_for_is_raised_inside() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.get_running_loop().create_task(EagerCoroutine(later(future)).rest)
    future.set_exception(KeyError("wrong"))
    with pytest.raises(KeyError):
        await task


async def test_it_runs_in_its_own_context_from_beginning_to_end() -> None:
    async def say() -> str:
        said.set("something")
        await asyncio.sleep(0)
        return said.get()

    context = copy_context()
    begun = EagerCoroutine(say(), context)
    assert said.get() == "nothing"
    assert await asyncio.get_running_loop().create_task(begun.rest, context=context) == "something"
    assert said.get() == "nothing"


async def test_nobody_takes_the_task_of_whoever_begins_it_for_its_own() -> None:
    seen = []

    async def look() -> None:
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(asyncio.current_task())

    own = asyncio.current_task()
    begun = EagerCoroutine(look())
    assert asyncio.current_task() is own
    task = asyncio.get_running_loop().create_task(begun.rest)
    await task
    assert seen == [None, task]
