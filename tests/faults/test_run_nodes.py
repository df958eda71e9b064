"""Runs of workflows on two nodes that share a PostgreSQL database."""

import asyncio

import fastness
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimWorlds
from fastness.wire.runs import UpdateRun

SECONDS_MAX = 60.0


async def test_200_concurrent_starts_of_one_id_give_one_run(postgres_url: str) -> None:
    async with fastness.open_async(postgres_url) as one, fastness.open_async(postgres_url) as two:
        await one.queue("q").put(1)  # Both nodes have the plane open before the first start.
        await two.queue("q").put(2)
        starts = [node.workflows.start("research", "q", id="r-17") for node in (one, two) for _ in range(100)]
        runs = await asyncio.gather(*starts)
        assert {run.id for run in runs} == {"r-17"}
        assert [run.is_duplicate for run in runs].count(False) == 1
        assert [each.id for each in (await two.workflows.list()).runs] == ["r-17"]
        items = await one.world("run:r-17").inbox.read()
        assert len(items) == 1


async def test_a_node_waits_for_a_run_that_ends_on_another(postgres_url: str) -> None:
    async with fastness.open_async(postgres_url) as one, fastness.open_async(postgres_url) as two:
        run = await one.workflows.start("research", "q", id="r-1")
        waiting = asyncio.create_task(two.workflows.result("r-1", wait_seconds=SECONDS_MAX))
        [claimed] = (await one._transport.call(ClaimWorlds(["workflow:research"], "host"))).worlds
        update = UpdateRun("r-1", claimed.fence, "completed", canonical({"pages": 3}))
        assert (await one._transport.call(update)).state == "completed"
        assert await waiting == {"pages": 3}
        assert await run.result() == {"pages": 3}
