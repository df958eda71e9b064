"""Quotas at real servers: rates, connections, tokens, metrics, restarts, and two servers on one PostgreSQL."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import fastness
from fastness import Plane, Quota
from fastness.errors import NotAllowed, QuotaExceeded
from tests.support.relay_client import Agent, Refused
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A server with tokens: of an operator, and of two tenants that may do everything in their universes."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        tokens = {
            name: plane.tokens.create(name, universes=universe, verbs="*").token
            for name, universe in (("operator", "*"), ("shop", "shop"), ("other", "other"))
        }
    server = Server(tmp_path, tokens=True)
    try:
        yield {"server": server, "folder": tmp_path, **tokens}
    finally:
        server.kill()


def metrics_of(server: Server, token: str) -> dict[str, float]:
    status, _, text = server.get("/metrics", token=token)
    assert status == 200
    lines = re.findall(r"^(fastness_quota\w*(?:\{.*\})?) (\S+)$", text.decode(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def test_rates_connections_tokens_metrics_and_a_restart(tenants: dict[str, Any]) -> None:
    server, operator = tenants["server"], tenants["operator"]
    with server.plane(operator, "shop") as plane:
        plane.quotas.set("shop", Quota(messages=5, connections=1, rate_per_second=0.001))
        assert plane.quotas.get() == Quota(messages=5, connections=1, rate_per_second=0.001)
        plane.queue("jobs").put(b"")  # The burst is one call.
        with pytest.raises(QuotaExceeded, match=r"limited to 0\.001 calls per second") as caught:
            plane.queue("jobs").put(b"")
        assert (caught.value.kind, caught.value.limit) == ("rate", 0.001)
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds > 1
        plane.quotas.set("shop", Quota(messages=5, connections=1))  # It can be seen and changed all the same.

    with ExitStack() as stack:
        first = stack.enter_context(server.plane(tenants["shop"], "shop"))
        first.queue("jobs").put(b"")
        with server.plane(tenants["shop"], "shop") as second:
            with pytest.raises(QuotaExceeded, match="1 connections of 1") as caught:
                second.queue("jobs").put(b"")
            assert (caught.value.universe, caught.value.kind, caught.value.used) == ("shop", "connections", 1)
            with pytest.raises(NotAllowed):
                first.quotas.set("shop", Quota())  # A tenant cannot raise its own quota,
            assert first.quotas.usage().connections == 1  # but see what it uses.
            with server.plane(tenants["other"], "other") as other:
                other.queue("jobs").put(b"")
                with pytest.raises(NotAllowed):
                    other.quotas.usage("shop")
            stack.close()
            eventually(lambda: is_accepted(second), "a closed connection makes room")

    with server.plane(operator, "shop") as plane:
        for _ in range(2):
            plane.queue("jobs").put(b"")
        with pytest.raises(QuotaExceeded):
            plane.queue("jobs").put(b"")
    found = metrics_of(server, operator)
    assert found["fastness_quotas"] == 1
    assert found['fastness_quota_limit{kind="messages",universe="shop"}'] == 5
    assert found['fastness_quota_used{kind="messages",universe="shop"}'] == 5
    assert 'fastness_quota_limit{kind="bytes",universe="shop"}' not in found
    for kind, least in (("messages", 1), ("connections", 1), ("rate", 1)):
        assert found[f'fastness_quota_refusals_total{{kind="{kind}",universe="shop"}}'] >= least

    assert server.stop() == 0
    again = Server(tenants["folder"], tokens=True)
    try:
        with again.plane(operator, "shop") as plane, pytest.raises(QuotaExceeded) as caught:
            plane.queue("jobs").put(b"")
        assert (caught.value.used, caught.value.limit) == (5, 5)
    finally:
        again.kill()


def initialize(server: Server, token: str) -> httpx2.Response:
    """Open a session of MCP."""
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    headers = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {token}"}
    return httpx2.post(f"{server.url}/mcp", json=message, headers=headers, timeout=SECONDS_MAX)


def test_sessions_of_mcp_count_as_connections(tenants: dict[str, Any]) -> None:
    server, shop = tenants["server"], tenants["shop"]
    with server.plane(tenants["operator"], "shop") as plane, server.plane(shop, "shop") as stream:
        plane.quotas.set("shop", Quota(connections=2))
        opened = [initialize(server, shop) for _ in range(3)]
        assert [answer.status_code for answer in opened] == [200, 200, 429]
        assert opened[2].json()["code"] == "quota_exceeded"
        assert "retry-after" in opened[2].headers
        assert (plane.quotas.usage().connections, is_accepted(stream)) == (2, False), "a stream counts with them"
        for token in (tenants["other"], tenants["operator"]):  # They are not of this universe alone.
            assert initialize(server, token).status_code == 200
        session = {"Authorization": f"Bearer {shop}", "mcp-session-id": opened[0].headers["mcp-session-id"]}
        for _ in range(2):  # The second time, there is nothing to end.
            httpx2.delete(f"{server.url}/mcp", headers=session, timeout=SECONDS_MAX)
        assert plane.quotas.usage().connections == 1
        assert is_accepted(stream)
        assert initialize(server, shop).status_code == 429
        plane.tokens.revoke(shop)
        eventually(lambda: plane.quotas.usage().connections == 0, "the sessions of a revoked token end")


async def test_agents_of_the_relay_count_as_connections(tenants: dict[str, Any]) -> None:
    server, shop = tenants["server"], tenants["shop"]
    with server.plane(tenants["operator"], "shop") as plane:
        await asyncio.to_thread(plane.quotas.set, "shop", Quota(connections=1))
        async with Agent(server.url, "ada@shop", token=shop) as ada:
            with pytest.raises(Refused) as refused:
                async with Agent(server.url, "bob@shop", token=shop):
                    pass
            assert (refused.value.error, "1 connections of 1" in refused.value.detail) == ("quota_exceeded", True)
            assert (await asyncio.to_thread(plane.quotas.usage)).connections == 1
            assert (await ada.send("bob@shop", b"x"))["type"] == "sent"
            async with Agent(server.url, "ada@shop", key=ada.key, token=shop):  # It replaces the first one.
                await ada.until_closed()
                await asyncio.to_thread(
                    eventually, lambda: plane.quotas.usage().connections == 1, "the first one is gone"
                )
            async with Agent(server.url, "eve@other", token=tenants["other"]):
                pass
        usage = plane.quotas.usage
        await asyncio.to_thread(eventually, lambda: usage().connections == 0, "a closed connection makes room")
        async with Agent(server.url, "bob@shop", token=shop) as bob:
            assert len(await bob.get(1)) == 1


def is_accepted(plane: Plane) -> bool:
    try:
        plane.queue("jobs").put(b"")
    except QuotaExceeded:
        return False
    return True


def test_two_servers_exceed_by_a_bounded_amount(postgres_url: str, tmp_path: Path) -> None:
    """Each server counts what it accepts itself, and what the other one has accepted by the next measurement."""
    limit, accepted, by_one = 200, [0, 0], []
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            folder = tmp_path / f"node-{number}"
            folder.mkdir()
            servers.append(Server(folder, data=postgres_url, activity=str(folder / "activity")))
            stack.callback(servers[-1].kill)
        planes = [stack.enter_context(server.plane(None, "shop")) for server in servers]
        planes[0].quotas.set("shop", Quota(messages=limit))
        eventually(lambda: planes[1].quotas.usage().quota.messages == limit, "the other server knows the quota")

        def fill(number: int) -> None:
            queue = planes[number].queue(f"jobs-{number}")
            while is_put(queue):
                accepted[number] += 1

        threads = [threading.Thread(target=fill, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = sum(plane.queue(f"jobs-{number}").stats().ready for number, plane in enumerate(planes))
        assert stored == sum(accepted)
        assert limit <= stored <= 2 * limit, "each server accepts at most the quota by itself"
        for plane in planes:  # Both see all of it, and refuse more.
            eventually(lambda plane=plane: plane.quotas.usage().messages == stored, "what both have stored")  # type: ignore[misc]
            by_one.append(is_put(plane.queue("jobs")))
        assert by_one == [False, False]


def is_put(queue: Any) -> bool:
    try:
        queue.put(b"")
    except QuotaExceeded:
        return False
    return True
