"""JSON-RPC over HTTP against a real server: pushes, senders, limits and restarts."""

import json
import threading
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import fastness
from tests.support.server_process import Server
from tests.support.waiting import eventually

UNLIMITED: dict[str, Any] = {"ingress_pushes_per_minute": 0, "ingress_agent": "bob"}
BURST = 20_000
SECONDS_MAX = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, **UNLIMITED)
    yield server
    server.kill()


def push(key: str, id: Any = 1, **more: Any) -> dict[str, Any]:
    params = {
        "topic": "t",
        "content_type": "text/plain",
        "payload_base64": urlsafe_b64encode(key.encode()).decode().rstrip("="),
        "idempotency_key": key,
    }
    return {"jsonrpc": "2.0", "id": id, "method": "agent.data.push", "params": params | more}


def call(server: Server, body: Any, *, token: str | None = None) -> Any:
    status, _, response = server.get("/v1/rpc", body=json.dumps(body).encode(), token=token)
    assert status == 200, response
    return json.loads(response)


def keys_in(plane: fastness.Plane, agent: str) -> list[str]:
    mailbox, keys, after = plane.mailbox(agent), [], -1
    while mails := mailbox.read(after=after, limit=256):
        keys += [mail.json()["idempotency_key"] for mail in mails]
        after = mails[-1].sequence
    return keys


def test_push_is_stored_soon_and_before_the_answer_if_synced(server: Server) -> None:
    answer = call(server, push("1", durability="synced", **{"from": "ada"}))
    assert answer["result"]["durability"] == "synced"
    with server.plane() as plane:
        (mail,) = plane.mailbox("bob").read(limit=10)
        assert (mail.id, mail.sender, mail.json()["topic"]) == (answer["result"]["id"], "ada@main", "t")
        assert call(server, push("2", to="eve"))["result"]["durability"] == "accepted"
        eventually(lambda: keys_in(plane, "eve") == ["2"])


def test_json_rpc_errors_are_http_200(server: Server) -> None:
    notification = push("1")
    del notification["id"]
    status, headers, body = server.get("/v1/rpc", body=json.dumps(notification).encode())
    assert (status, body) == (204, b"")
    assert "x-correlation-id" in headers
    calls = [{"jsonrpc": "2.0", "id": id, "method": method} for id, method in ((1, "agent.ping"), (2, "agent.pong"))]
    answers = call(server, calls)
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[1]["error"]["message"] == "ERR_METHOD_NOT_FOUND"
    assert call(server, "nothing")["error"]["code"] == -32600
    status, _, body = server.get("/v1/rpc", body=b"{")
    assert (status, json.loads(body)["error"]["code"]) == (200, -32700)
    status, _, body = server.get("/v1/rpc", body=b" " * 300_000)
    assert (status, json.loads(body)["error"]["message"]) == (200, "ERR_PAYLOAD_TOO_LARGE")
    connection = HTTPConnection(*server.address, timeout=SECONDS_MAX)
    connection.request("POST", "/v1/rpc", b"{}", {"content-type": "text/plain"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["code"]) == (415, "invalid_content_type")
    connection.close()


def test_large_payload_is_stored_as_a_blob(server: Server) -> None:
    payload = bytes(range(256)) * 512
    text = urlsafe_b64encode(payload).decode().rstrip("=")
    assert "result" in call(server, push("1", payload_base64=text, durability="synced"))
    with server.plane() as plane:
        pushed = plane.mailbox("bob").read(limit=1)[0].json()
        assert plane.blobs.get(pushed["blob"]) == payload


def test_peer_above_its_rate_gets_a_retry_after(tmp_path: Path) -> None:
    server = Server(tmp_path, ingress_pushes_per_minute=2, ingress_agent="bob")
    try:
        assert [("error" in call(server, push(key, **{"from": "ada"}))) for key in "123"] == [False, False, True]
        data = json.dumps(push("3", **{"from": "ada"})).encode()
        status, headers, body = server.get("/v1/rpc", body=data)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (200, -32006)
        assert 1 < error["data"]["retry_after_seconds"] <= int(headers["retry-after"]) <= 30
        assert "result" in call(server, push("3", **{"from": "eve"}))
    finally:
        server.kill()


def test_token_pushes_by_its_name(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        ada = plane.tokens.create("ada", universes=["main"], verbs=["mail:*"]).token
        eve = plane.tokens.create("eve", universes=["main"], verbs=["queue:*"]).token
    server = Server(tmp_path, tokens=True, **UNLIMITED)
    try:
        status, _, body = server.get("/v1/rpc", body=json.dumps(push("1")).encode())
        assert (status, json.loads(body)["code"]) == (401, "not_allowed")
        assert "result" in call(server, push("1", durability="synced"), token=ada)
        assert call(server, push("2", **{"from": "eve"}), token=ada)["error"]["message"] == "ERR_PEER_ID_MISMATCH"
        assert call(server, push("2", to="bob@beta"), token=ada)["error"]["message"] == "ERR_METHOD_NOT_ALLOWED"
        assert call(server, push("2"), token=eve)["error"]["message"] == "ERR_METHOD_NOT_ALLOWED"
        assert "result" in call(server, {"jsonrpc": "2.0", "id": 1, "method": "agent.ping"}, token=eve)
        with server.plane(token=ada) as plane:
            assert [mail.sender for mail in plane.mailbox("bob").read(limit=10)] == ["ada@main"]
    finally:
        server.kill()


def test_accepted_pushes_and_their_keys_survive_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path, **UNLIMITED)
    answers = call(server, [push(str(key), key) for key in range(50)])
    assert all(answer["result"]["accepted"] for answer in answers)
    code = server.stop()
    assert code == 0, server.log()
    server.kill()
    server = Server(tmp_path, **UNLIMITED)
    try:
        with server.plane() as plane:
            assert keys_in(plane, "bob") == [str(key) for key in range(50)]
            plane.mailbox("bob").confirm([mail.id for mail in plane.mailbox("bob").read(limit=100)])
            answer = call(server, push("7"))["result"]
            assert (answer["deduped"], answer["durability"]) == (True, "synced")
            assert plane.mailbox("bob").count() == 0
    finally:
        server.kill()


def test_burst_of_20000_parallel_pushes_is_deduplicated(server: Server) -> None:
    """16 connections push 10,000 keys twice each, in batches. Each key is stored once."""
    answers: Counter[str] = Counter()
    lock = threading.Lock()

    def one_connection(number: int) -> None:
        connection = HTTPConnection(*server.address, timeout=SECONDS_MAX)
        keys = [str(key) for key in range(number % 8, BURST // 2, 8)]
        while keys:
            batch, keys = keys[:50], keys[50:]
            calls = [push(key, key, to=f"r{int(key) % 20}", **{"from": "ada"}) for key in batch]
            connection.request("POST", "/v1/rpc", json.dumps(calls), {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            for answer in json.loads(response.read()):
                if "error" in answer:
                    assert answer["error"]["message"] == "ERR_BUSY", answer
                    keys.append(answer["id"])
                    outcome = "busy"
                else:
                    outcome = "deduped" if answer["result"]["deduped"] else "accepted"
                with lock:
                    answers[outcome] += 1
        connection.close()

    with server.plane() as plane:
        threads = [threading.Thread(target=one_connection, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS_MAX)
        assert not any(thread.is_alive() for thread in threads)
        assert answers["accepted"] == answers["deduped"] == BURST // 2
        eventually(lambda: sum(plane.mailbox(f"r{number}").count() for number in range(20)) == BURST // 2)
        found = Counter(key for number in range(20) for key in keys_in(plane, f"r{number}"))
        assert found == Counter(str(key) for key in range(BURST // 2))
    _, _, body = server.get("/metrics")
    samples = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert float(samples['fastness_ingress_pushes_total{outcome="accepted"}']) == BURST // 2
    assert float(samples["fastness_ingress_depth"]) == 0
    assert float(samples["fastness_ingress_batch_size_sum"]) == BURST // 2
