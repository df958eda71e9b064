"""Twenty agents over MCP drain one queue: each message is acknowledged once."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import fastness
from tests.support.server_process import Server

AGENTS: Final = 20
REVISIONS: Final = ("legacy", "2026-07-28")


class Agent:
    """A client of the SDK that takes messages until none is left."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.acked: list[str] = []

    async def call(self, tool: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
        """The answer of a tool, and whether it is a refusal."""
        found = await self._client.call_tool(tool, {"queue": "jobs", **arguments})
        assert found.structured_content is not None
        return found.structured_content, found.is_error

    async def drain(self) -> None:
        while True:
            received, _ = await self.call("queue_receive", max_messages=10, wait_seconds=1)
            if not received["messages"]:
                return
            for message in received["messages"]:
                await self._settle(message)

    async def _settle(self, message: dict[str, Any]) -> None:
        """Acknowledge a message. Some fail at first, and a late ack of them is refused; some are acked twice."""
        number, proof = message["body"]["value"], {name: message[name] for name in ("id", "lease_id", "fence")}
        if number % 10 == 0 and message["attempts"] == 1:
            await self.call("queue_nack", **proof, error="not yet", delay_seconds=0)
            answer, is_refused = await self.call("queue_ack", **proof)
            assert is_refused
            assert answer["code"] == "queue_message_lease_mismatch"
            return
        for _ in range(2 if number % 10 == 1 else 1):
            answer, is_refused = await self.call("queue_ack", **proof)
            assert not is_refused, answer
        self.acked.append(message["id"])


async def _drain(url: str, tokens: list[str]) -> list[str]:
    """The messages that the agents have acknowledged."""

    async def run(number: int, token: str) -> list[str]:
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
            transport = streamable_http_client(f"{url}/mcp", http_client=http)
            async with Client(transport, mode=REVISIONS[number % 2]) as client:
                agent = Agent(client)
                await agent.drain()
                return agent.acked

    found = await asyncio.gather(*[run(number, token) for number, token in enumerate(tokens)])
    return [id for acked in found for id in acked]


@pytest.mark.parametrize("messages", [200, pytest.param(1_000, marks=pytest.mark.thorough)])
def test_twenty_clients_drain_a_queue_and_each_message_is_acked_once(tmp_path: Path, messages: int) -> None:
    data = f"dir:{tmp_path / 'data'}"
    with fastness.open(data) as plane:
        jobs = plane.queue("jobs")
        jobs.set_policy(fastness.QueuePolicy(history="durable"))
        receipts = [each for start in range(0, messages, 100) for each in jobs.put_many(range(start, start + 100))]
        verbs = ["queue:receive", "queue:ack", "queue:nack", "queue:reject"]
        names = [f"agent-{number}" for number in range(AGENTS)]
        tokens = [plane.tokens.create(name, universes=["main"], verbs=verbs).token for name in names]
    server = Server(tmp_path, tokens=True)
    try:
        acked = asyncio.run(_drain(server.url, tokens))
        log = server.log()
    finally:
        server.kill()
    assert "Traceback" not in log, log
    ids = {receipt.id for receipt in receipts}
    assert Counter(acked) == dict.fromkeys(ids, 1)
    with fastness.open(data) as plane:
        stats, events, after = plane.queue("jobs").stats(), Counter[tuple[str, str]](), ""
        while True:
            page = plane.queue("jobs").history(200, after=after)
            events.update((event.event, event.id) for event in page.events)
            if page.next is None:
                break
            after = page.next
    assert (stats.acked_total, stats.ready, stats.leased, stats.dead) == (messages, 0, 0, 0)
    assert stats.delivered_total == messages + messages // 10
    assert {key: count for key, count in events.items() if key[0] == "acked"} == {("acked", id): 1 for id in ids}
