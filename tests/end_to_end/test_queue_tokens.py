"""Tokens for some queues at a real server: no way into it reaches the others."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import fastness
from fastness import QueuePolicy
from fastness.errors import NotAllowed
from tests.support.server_process import SECONDS_MAX, Server


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server with queues of two teams, and the token of one of them."""
    folder = tmp_path_factory.mktemp("shop")
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        made = plane.tokens.create("orders", universes="*", verbs="*", queues="orders,orders.*")
        admin = plane.tokens.create("admin", universes="*", verbs="*")
        for queue in ("orders", "orders.eu", "payments"):
            plane.queue(queue).put(b"secret")
    server = Server(folder, tokens=True)
    try:
        yield {"server": server, "token": made.token, "id": made.info.id, "admin": admin.token}
    finally:
        server.kill()


def test_stream_reaches_only_the_queues_of_the_token(shop: dict[str, Any]) -> None:
    with shop["server"].plane(shop["token"], "main") as plane:
        mine, other = plane.queue("orders"), plane.queue("payments")
        mine.put(b"1")
        assert plane.queue("orders.new").stats().ready == 0
        refused = [
            lambda: other.put(b"1"),
            other.receive,
            other.stats,
            other.peek,
            other.purge,
            other.delete,
            other.redrive,
            other.policy,
            lambda: mine.set_policy(QueuePolicy(dead_letter_queue="payments")),
            lambda: mine.move(["01980000-0000-7000-8000-000000000000"], to="payments"),
        ]
        for call in refused:
            with pytest.raises(NotAllowed, match="queue payments"):
                call()
        assert plane.queues() == ["orders", "orders.eu"]
        assert [each.queue for each in plane.survey_queues().queues] == ["orders", "orders.eu"]
        with pytest.raises(NotAllowed, match="queue payments"):
            plane.atomic().put(mine, b"2").put(other, b"2").commit()
        assert mine.stats().put_total == 2, "the list of operations has put nothing"
        with pytest.raises(NotAllowed, match="more than the token orders has itself"):
            plane.tokens.create("wider", universes="main", verbs="queue:put", queues="payments")
        child = plane.tokens.create("child", universes="main", verbs="queue:*")
        assert child.info.queues == ["orders", "orders.*"]
    with shop["server"].plane(child.token, "main") as plane, pytest.raises(NotAllowed, match="queue payments"):
        plane.queue("payments").put(b"1")
    with shop["server"].plane(shop["admin"], "main") as plane:
        assert plane.queue("payments").stats().put_total == 1


def test_http_reaches_only_the_queues_of_the_token(shop: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {shop['token']}"}
    with httpx2.Client(base_url=shop["server"].url, headers=headers, timeout=SECONDS_MAX) as client:
        assert client.get("/v1/queues/orders").status_code == 200
        refused = [
            client.get("/v1/queues/payments"),
            client.get("/v1/queues/payments/peek"),
            client.post("/v1/queues/payments/purge"),
            client.post("/v1/queue/enqueue", json={"queue": "payments", "payload": "1"}),
            client.post("/v1/queue/dequeue", json={"queue": "payments", "owner": "me"}),
            client.post("/v1/queue/watch", json={"queue": "payments"}),
            client.post("/v1/queues/orders/messages/move", json={"ids": ["1"], "to": "payments"}),
            client.put("/v1/queues/orders/policy", json={"dead_letter_queue": "payments"}),
            client.post("/v1/backups"),
            client.get("/metrics"),
        ]
        assert [answer.status_code for answer in refused] == [403] * len(refused), refused
        assert client.get("/v1/queues").json()["names"] == ["orders", "orders.eu"]
        assert "payments" not in client.get("/v1/queues", params={"only": "pay*"}).json().get("names", [])
        assert b"payments" not in client.get("/v1/surveys/queues").content
        assert client.get("/v1/tokens/self").json()["token"]["queues"] == ["orders", "orders.*"]


def test_mcp_reaches_only_the_queues_of_the_token(shop: dict[str, Any]) -> None:
    headers = {
        "authorization": f"Bearer {shop['token']}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2025-11-25",
    }
    with httpx2.Client(base_url=shop["server"].url, headers=headers, timeout=SECONDS_MAX) as client:

        def call(id: int, method: str, **params: Any) -> Any:
            answer = client.post("/mcp", json={"jsonrpc": "2.0", "id": id, "method": method, "params": params})
            if "mcp-session-id" in answer.headers:
                client.headers["mcp-session-id"] = answer.headers["mcp-session-id"]
            lines = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
            return json.loads(lines[-1] if lines else answer.text)

        client_info = {"name": "test", "version": "1"}
        call(1, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo=client_info)
        client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        found = json.dumps(call(2, "resources/list"))
        assert "orders" in found
        assert "payments" not in found
        refused = json.dumps(call(3, "resources/read", uri="fastness://main/queues/payments"))
        assert "is not for the queue payments" in refused
