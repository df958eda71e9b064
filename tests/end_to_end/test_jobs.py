"""Jobs on two real servers that share one PostgreSQL, and over the network."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

import fastness
from fastness import AsyncPlane, NewMessage, QueuePolicy
from fastness.errors import MessageCancelled, MessageFailed
from fastness.wire.queues import WaitForCancel
from tests.support.http_server import serving


@contextmanager
def two_servers(url: str) -> Iterator[tuple[str, str]]:
    with serving(url) as one, serving(url) as two:
        yield one.url, two.url


@pytest.fixture
async def nodes(postgres_url: str) -> AsyncIterator[tuple[AsyncPlane, AsyncPlane]]:
    with two_servers(postgres_url) as (one, two):
        async with fastness.connect_async(one) as first, fastness.connect_async(two) as second:
            yield first, second


async def test_a_thousand_unique_puts_on_two_servers_are_one_message(nodes: tuple[AsyncPlane, AsyncPlane]) -> None:
    puts = [node.queue("jobs").put(n, unique_key="k") for n in range(500) for node in nodes]
    receipts = await asyncio.gather(*puts)
    assert len({receipt.id for receipt in receipts}) == 1
    assert sum(not receipt.duplicate for receipt in receipts) == 1
    assert (await nodes[0].queue("jobs").stats()).ready == 1


async def test_a_result_arrives_from_the_other_server(nodes: tuple[AsyncPlane, AsyncPlane]) -> None:
    one, two = (node.queue("jobs") for node in nodes)
    done, failed, cancelled = [await one.put(n, keep_result=True) for n in range(3)]
    waiting = [asyncio.create_task(each.result(wait_seconds=60)) for each in (done, failed, cancelled)]
    for message in await two.receive_many(3, wait_seconds=30):
        if message.json() == 0:
            await message.ack(result={"n": 0})
        elif message.json() == 1:
            await message.reject("no")
    await two.cancel(cancelled.id)
    assert await waiting[0] == {"n": 0}
    with pytest.raises(MessageFailed, match="no"):
        await waiting[1]
    with pytest.raises(MessageCancelled):
        await waiting[2]


async def test_a_cancel_on_one_server_reaches_the_consumer_of_the_other(nodes: tuple[AsyncPlane, AsyncPlane]) -> None:
    one, two = (node.queue("jobs") for node in nodes)
    receipt = await one.put("x")
    message = await two.receive(wait_seconds=30)
    assert message is not None
    waiting = asyncio.create_task(nodes[1]._transport.call(WaitForCancel("jobs", [message.lease], 60.0, "main")))
    assert (await one.cancel(receipt.id)).state == "cancelled"
    assert [each.code for each in (await waiting).outcomes] == [MessageCancelled.code]
    with pytest.raises(MessageCancelled):
        await message.ack()


async def test_two_servers_share_the_limit_of_a_key(nodes: tuple[AsyncPlane, AsyncPlane]) -> None:
    queue = nodes[0].queue("jobs")
    await queue.set_policy(QueuePolicy(concurrency_per_key=2, fair=True))
    for _ in range(2):
        await queue.put_many([NewMessage(b"x", key=key) for key in "abc" for _ in range(20)])
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    left = 120

    async def consume(plane: AsyncPlane) -> None:
        nonlocal left
        while left > 0:
            for message in await plane.queue("jobs").receive_many(4, wait_seconds=0.2):
                key = (await queue.get(message.id)).key or ""
                running[key] += 1
                most[key] = max(most[key], running[key])
                await asyncio.sleep(0)
                running[key] -= 1  # Before the ack: its commit lets the next one pass.
                await message.ack()
                left -= 1

    async with asyncio.timeout(120):
        await asyncio.gather(*[consume(node) for node in nodes for _ in range(4)])
    assert set(most) == {"a", "b", "c"}
    assert max(most.values()) <= 2
    stats = await queue.stats()
    assert (stats.ready, stats.blocked, stats.leased, stats.acked_total) == (0, 0, 0, 120)


def test_the_life_of_a_job_over_the_network() -> None:
    with serving() as server, fastness.connect(server.url) as plane:
        queue = plane.queue("jobs")
        receipt = queue.put({"n": 1}, key="a", unique_key="k", keep_result=True)
        assert queue.put({"n": 2}, unique_key="k").duplicate
        assert queue.get(receipt.id).state == "ready"
        assert queue.update(receipt.id, priority=9).priority == 9
        queue.pause_key("a", 60)
        assert queue.get(receipt.id).state == "blocked"
        queue.resume_key("a")
        message = queue.receive(wait_seconds=10)
        assert message is not None
        message.ack(result=b"\x00\xff")
        assert receipt.result(wait_seconds=10) == b"\x00\xff"
        assert queue.get(receipt.id).state == "done"
