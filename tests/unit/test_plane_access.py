"""Coroutines over a Plane, run in threads for an event loop."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import fastness
from fastness import PutRow
from fastness.plane_access import access_to


async def test_work_that_is_cancelled_before_a_thread_takes_it_is_closed_and_never_runs() -> None:
    with fastness.open("memory:") as plane, ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        access = access_to(plane, "c")
        release = threading.Event()
        executor.submit(release.wait, 60)
        work = access.commit([PutRow("p", ("k",), b"v")])
        waiting = asyncio.ensure_future(access.run_async(work))
        await asyncio.sleep(0)  # It is queued.
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
        release.set()
        assert await access.run_async(access.get_many("p", [("k",)])) == [None]


def test_an_access_that_was_made_outside_of_an_event_loop_belongs_to_the_first_one_that_awaits_it() -> None:
    async def opened() -> fastness.AsyncPlane:
        return await fastness.open_async("memory:")

    with asyncio.Runner() as runner:
        plane = runner.run(opened())
        access = access_to(plane, "c")
        with pytest.raises(asyncio.InvalidStateError, match="is not known"):
            access.run(access.get_many("p", [("k",)]))
        runner.run(access.run_async(access.commit([PutRow("p", ("k",), b"v")])))

        async def read_in_a_thread() -> list[fastness.Row | None]:
            return await asyncio.to_thread(lambda: access.run(access.get_many("p", [("k",)])))

        (row,) = runner.run(read_in_a_thread())
        assert row is not None
        assert row.value == b"v"
        runner.run(plane.close())


async def test_an_iteration_that_ends_early_closes_its_pages() -> None:
    with fastness.open("memory:") as plane:
        access = access_to(plane, "c")
        await access.run_async(access.commit([PutRow("p", (number,), b"") for number in range(250)]))
        pages = access.pages("p", limit=220, reverse=True)
        rows = access.iterate_async(pages)
        assert [(await anext(rows)).key for _ in range(120)] == [(number,) for number in range(249, 129, -1)]
        await rows.aclose()
        assert await anext(pages, None) is None
        assert len([row async for row in access.iterate_async(access.pages("p", limit=220))]) == 220
