"""What all HTTP endpoints share: generic calls, atomic lists, idempotency, headers, limits, tokens and streams."""

import base64
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from fastness.limits import PAYLOAD_INLINE_BYTES_MAX, RESULT_BYTES_MAX
from fastness.wire.problems import Problem
from fastness.wire.queues import AckMessages, MessageLease, NewMessage, Outcomes, PutMessages, Receipts
from tests.end_to_end.http_helpers import lease, read_all, receive
from tests.support.http_server import Server, serving
from tests.support.waiting import eventually

MEGABYTE = 1_048_576
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}", heartbeat_seconds=0.5, watch_seconds=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Any]:
    """A server with short timeouts, small limits and two tokens."""
    with serving(
        tokens=True, body_bytes_max=65_536, stream_bytes_max=MEGABYTE, body_seconds_max=1.5, pause_seconds_max=1.5
    ) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A unique name."""
    return f"test-{next(_names)}"


class TestCall:
    def test_messagepack_is_answered_in_messagepack(self, server: Server, name: str) -> None:
        body = msgspec.msgpack.encode(PutMessages(name, [NewMessage(b"hi")]))
        kinds = {"content_type": "application/msgpack", "accept": "application/msgpack"}
        answer = server.post("/v1/call", body, **kinds)
        assert answer.headers["content-type"] == "application/msgpack"
        receipt = msgspec.msgpack.decode(answer.body, type=Receipts).receipts[0]
        wrong = AckMessages(name, [MessageLease(receipt.id, "x", 1)])
        answer = server.post("/v1/call", msgspec.msgpack.encode(wrong), **kinds)
        outcomes = msgspec.msgpack.decode(answer.body, type=Outcomes).outcomes
        assert outcomes[0].code == "queue_message_lease_mismatch"

    def test_an_error_response_is_messagepack_for_messagepack_callers(self, server: Server) -> None:
        answer = server.post("/v1/call", b"\xc1", content_type="application/msgpack", accept="application/msgpack")
        assert answer.status == 400
        assert msgspec.msgpack.decode(answer.body, type=Problem).code == "invalid_body"

    def test_a_refused_messagepack_body_names_the_field(self, server: Server) -> None:
        body = msgspec.msgpack.encode({"op": "queues.stats", "queue": 5, "universe": "main"})
        for data, detail in ((body, "queue is 5; give a text"), (body[:-2], "The body is not a wire request")):
            answer = server.post("/v1/call", data, content_type="application/msgpack", accept="application/msgpack")
            problem = msgspec.msgpack.decode(answer.body, type=Problem)
            assert (problem.status, problem.code) == (400, "invalid_body")
            assert problem.detail.startswith(detail)

    def test_an_error_response_links_to_the_page_that_explains_its_code(self, server: Server, name: str) -> None:
        for path, code in ((f"/v1/queues/{name}/messages/{'0' * 32}", "message_not_found"), ("/v1/no", "not_found")):
            answer = server.get(path)
            assert answer.headers["link"] == f'</docs/errors/{code}>; rel="help"'
            page = server.get(f"/docs/errors/{code}")
            assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert f"<title>{code} - Fastness</title>" in page.body.decode()
            assert f'<a href="errors/{code}">' in server.get("/docs/errors").body.decode()
        assert server.get("/docs/errors/no_such_code").json()["code"] == "not_found"

    def test_json_calls_use_the_json_form_of_requests_and_answers(self, server: Server, name: str) -> None:
        put = {"op": "queues.put", "queue": name, "messages": [{"payload": {"n": 1}}]}
        assert server.post("/v1/call", put).json()["receipts"][0]["durability"] == "critical"
        received = server.post("/v1/call", {"op": "queues.receive", "queue": name, "owner": "ada"}).json()
        assert received["messages"][0]["payload"] == {"n": 1}
        mine = {"message_id": received["messages"][0]["message_id"], "lease_id": received["messages"][0]["lease_id"]}
        acked = server.post("/v1/call", {"op": "queues.ack", "queue": name, "leases": [mine]})
        assert acked.json()["outcomes"][0].get("code") is None

    @pytest.mark.parametrize("body", [{"op": "pairs.put", "key": "YQ==", "value": "YQ=="}, {"op": "nothing"}, {}, []])
    def test_an_invalid_request_is_refused(self, server: Server, body: Any) -> None:
        assert server.post("/v1/call", body).status == 400

    def test_an_unexpected_error_reveals_no_internals(self, server: Server) -> None:
        answer = server.post("/v1/call", {"op": "pairs.get", "key": base64.b64encode(b"boom").decode()})
        assert (answer.status, answer.code) == (500, "internal_error")
        assert b"secret" not in answer.body
        assert b"Traceback" not in answer.body


class TestAtomic:
    def test_a_list_of_operations_is_committed_atomically(self, server: Server, name: str) -> None:
        server.post("/v1/worlds", {"world": name})
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        message = receive(server, name)
        shown = {"message_id": message["message_id"], "lease_id": message["lease_id"]}
        operations = [
            {"op": "queues.ack", "queue": name, "leases": [shown]},
            {"op": "queues.put", "queue": f"{name}-next", "messages": [{"payload": {"from": 1}}]},
            {"op": "worlds.append", "world": name, "entries": [{"did": 1}], "expected_head": 0},
            {"op": "states.update", "key": name, "value": {"done": True}},
        ]
        assert len(server.post("/v1/atomic", operations).json()["answers"]) == 4
        assert server.get(f"/v1/state/{name}").json() == {"done": True}
        assert receive(server, f"{name}-next")["payload"] == {"from": 1}

        again = server.post("/v1/atomic", {"operations": [*operations[1:2], *operations[2:]]})
        assert (again.status, again.code) == (409, "head_advanced")
        assert server.get(f"/v1/queues/{name}-next").json()["put_total"] == 1

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ([], "empty_batch"),
            ([{"op": "queues.purge", "queue": "q"}], "invalid_body"),
            ([{"queue": "q"}], "missing_fields"),
            ([{"op": "states.update", "key": "k", "value": 1, "of": 1}], "invalid_body"),
            ("nothing", "invalid_body"),
        ],
    )
    def test_invalid_requests_have_specific_codes(self, server: Server, body: Any, code: str) -> None:
        answer = server.post("/v1/atomic", body)
        assert (answer.status, answer.code) == (400, code)


class TestIdempotency:
    @pytest.mark.parametrize("as_header", [True, False])
    def test_the_same_key_twice_enqueues_one_message(self, server: Server, name: str, as_header: bool) -> None:
        body: dict[str, Any] = {"queue": name, "payload": 1}
        headers = {"Idempotency-Key": "k-1"} if as_header else {}
        if not as_header:
            body["idempotency_key"] = "k-1"
        first, second = (server.post("/v1/queue/enqueue", body, **headers).json() for _ in range(2))
        assert first["message_id"] == second["message_id"]
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 1

    def test_a_repeated_write_gets_the_same_response(self, server: Server, name: str) -> None:
        headers = {"Idempotency-Key": "once"}
        server.post("/v1/worlds", {"world": name})
        body = {"entries": [1], "expected_head": 0}
        for _ in range(2):
            assert server.post(f"/v1/worlds/{name}/entries", body, **headers).json()["height"] == 0
        assert server.post(f"/v1/worlds/{name}/entries", body).code == "head_advanced"
        first, second = (server.post("/v1/state/update", {"key": name, "value": 1}, **headers).json() for _ in range(2))
        assert first == second

    def test_another_body_with_the_same_key_is_refused(self, server: Server, name: str) -> None:
        """As in the IETF draft: returning the first response would report a write that did not happen."""
        headers = {"Idempotency-Key": "once"}
        first = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, **headers).json()
        other = server.post("/v1/queue/enqueue", {"queue": name, "payload": 2}, **headers)
        assert (other.status, other.code) == (422, "idempotency_key_reused")
        again = server.post("/v1/queue/enqueue", {"payload": 1, "queue": name}, X_Correlation_Id="another", **headers)
        assert again.json() == first
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 1
        for value, code in ((1, 201), (1, 201), (2, 422)):
            assert server.ask("PUT", f"/v1/state/{name}", value, **headers).status == code

    def test_one_key_for_two_queues_enqueues_two_messages(self, server: Server, name: str) -> None:
        for queue in (name, f"{name}-b"):
            server.post("/v1/queue/enqueue", {"queue": queue, "payload": 1}, Idempotency_Key="same")
            assert server.get(f"/v1/queues/{queue}").json()["put_total"] == 1

    def test_concurrent_requests_with_one_key_enqueue_one_message(self, server: Server, name: str) -> None:
        body = {"queue": name, "payload": 1}
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(server.post, "/v1/queue/enqueue", body, Idempotency_Key="race") for _ in range(16)]
            assert len({each.result().json()["message_id"] for each in sent}) == 1

    def test_a_repeated_dequeue_gets_the_same_leases(self, server: Server, name: str) -> None:
        for payload in range(3):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": payload})
        body = {"queue": name, "owner": "ada", "wait_seconds": -1, "page_size": 2}
        first, second = (server.post("/v1/queue/dequeue", body, Idempotency_Key="d").json() for _ in range(2))
        assert [message["payload"] for message in first["messages"]] == [0, 1]
        assert first == second
        assert server.post("/v1/queue/ack", lease(first["messages"][0])).status == 200
        third = server.post("/v1/queue/dequeue", body, Idempotency_Key="d").json()["messages"]
        assert [message["payload"] for message in third] == [1]
        assert server.get(f"/v1/queues/{name}").json()["delivered_total"] == 2
        other = server.post("/v1/queue/dequeue", {**body, "page_size": 3}, Idempotency_Key="d")
        assert (other.status, other.code) == (422, "idempotency_key_reused")

    def test_a_repeated_waiting_dequeue_gets_the_same_leases(self, server: Server, name: str) -> None:
        body = {"queue": name, "owner": "ada", "wait_seconds": 20}
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(server.post, "/v1/queue/dequeue", body, Idempotency_Key="d") for _ in range(2)]
            eventually(lambda: server.get(f"/v1/queues/{name}").json()["waiting_consumers"] == 2)
            server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
            first, second = (each.result().json()["messages"] for each in waiting)
        assert first == second
        assert server.post("/v1/queue/ack", lease(first[0])).status == 200

    def test_a_subscription_ignores_the_key(self, server: Server, name: str) -> None:
        """A subscription makes many receive calls, which must not share one key."""
        for payload in range(3):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": payload})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1, "credit": 4}
        lines = server.post("/v1/queue/subscribe", body, Idempotency_Key="s").body.splitlines()
        found = [json.loads(line) for line in lines]
        assert [each["data"]["payload"] for each in found if each["event"] == "message"] == [0, 1, 2]

    def test_a_repeated_acquire_gets_the_same_lease(self, server: Server, name: str) -> None:
        body = {"key": name, "owner": "ada", "ttl_seconds": 60}
        first, second = (server.post("/v1/lease/acquire", body, Idempotency_Key="l").json() for _ in range(2))
        assert first == second
        assert server.post("/v1/lease/acquire", body).json()["fence"] == 2
        assert server.post("/v1/lease/acquire", body, Idempotency_Key="l").code == "lease_expired"

    def test_repeated_entity_writes_are_executed_once(self, server: Server, name: str) -> None:
        path, headers = f"/v1/entities/task/{name}", {"Idempotency-Key": "e"}
        for _ in range(2):
            put = server.ask("PUT", path, {"fields": {"n": 1}}, If_None_Match="*", **headers)
            assert put.json()["versions"] == [1]
        for _ in range(2):
            assert server.ask("PATCH", path, {"fields": {"n": 2}}, **headers).json()["versions"] == [2]
        body = {"writes": [{"kind": "task", "id": name, "fields": {"n": 3}}]}
        for _ in range(2):
            assert server.post("/v1/entities/transaction", body, Idempotency_Key=f"t-{name}").json()["versions"] == [3]
        for _ in range(2):
            assert server.ask("DELETE", path, **headers).json()["versions"] == [4]
        assert len(server.get(path + "/history").json()["changes"]) == 4
        assert server.ask("PATCH", path, {"fields": {"n": 5}}, **headers).code == "idempotency_key_reused"

    def test_a_repeated_atomic_list_is_committed_once(self, server: Server, name: str) -> None:
        server.post("/v1/worlds", {"world": name})
        operations = [
            {"op": "queues.put", "queue": name, "messages": [{"payload": {"n": 1}}]},
            {"op": "worlds.append", "world": name, "entries": [{"n": 1}], "expected_head": 0},
            {"op": "states.update", "key": name, "value": {"n": 1}},
        ]
        first, second = (server.post("/v1/atomic", operations, Idempotency_Key=f"a-{name}") for _ in range(2))
        assert (first.status, first.json()) == (200, second.json())
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 1
        assert server.post("/v1/atomic", operations).code == "head_advanced"

    def test_repeated_multi_commit_operations_are_executed_once(self, server: Server, name: str) -> None:
        for _ in range(2):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
            message = server.post("/v1/queue/dequeue", {"queue": name, "owner": "ada"}).json()["messages"][0]
            server.post("/v1/queue/reject", lease(message))
        headers = {"Idempotency-Key": "m"}
        for _ in range(2):
            assert server.post(f"/v1/queues/{name}/redrive", {"limit": 1}, **headers).json() == {"count": 1}
        for _ in range(2):
            assert server.post(f"/v1/queues/{name}/purge", **headers).json() == {"count": 1}
        assert server.get(f"/v1/queues/{name}").json()["dead"] == 1
        server.post("/v1/worlds", {"world": name})
        server.post(f"/v1/worlds/{name}/entries", {"entries": [1], "expected_head": 0})
        fork, snapshot = {"target": f"{name}-copy", "height": 1}, {"data": {"n": 1}, "height": 1}
        first: Any = None
        for path, body in (("fork", fork), ("snapshots", snapshot)):
            first, second = (server.post(f"/v1/worlds/{name}/{path}", body, **headers) for _ in range(2))
            assert (first.status, first.json()) == (201, second.json())
        server.post(f"/v1/worlds/{name}/archive")
        assert server.post(f"/v1/worlds/{name}/snapshots", snapshot, **headers).json() == first.json()

    @pytest.mark.parametrize("op", ["queues.receive", "leases.acquire", "queues.put"])
    def test_generic_calls_support_idempotency_keys(self, server: Server, name: str, op: str) -> None:
        bodies: dict[str, dict[str, Any]] = {
            "queues.receive": {"queue": name, "owner": "ada"},
            "leases.acquire": {"key": name, "owner": "ada"},
            "queues.put": {"queue": name, "messages": [{"payload": 1}]},
        }
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        first, second = (
            server.post("/v1/call", {"op": op, **bodies[op]}, Idempotency_Key="c").json() for _ in range(2)
        )
        assert first == second

    def test_an_invalid_idempotency_key_is_refused(self, server: Server, name: str) -> None:
        body = {"queue": name, "payload": 1}
        assert server.post("/v1/queue/enqueue", body, Idempotency_Key="").code == "invalid_idempotency_key"
        assert server.post("/v1/queue/enqueue", body, Idempotency_Key="x" * 256).code == "invalid_idempotency_key"


class TestMiddleware:
    def test_a_correlation_id_is_stored_with_the_message(self, server: Server, name: str) -> None:
        put = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, X_Correlation_Id="req 7/é"[:5])
        assert put.headers["x-correlation-id"] == "req 7"
        answer = server.post("/v1/queue/dequeue", {"queue": name, "owner": "ada"}, X_Correlation_Id="another")
        assert answer.headers["x-correlation-id"] == "req 7"
        message = answer.json()["messages"][0]
        assert message["correlation_id"] == "req 7"
        for _ in range(2):  # Repeating an ack is safe, and answered like the first one.
            assert server.post("/v1/queue/ack", lease(message)).json()["correlation_id"] == "req 7"

    @pytest.mark.parametrize("given", ["", "x" * 129, "tab\there", "\xe9"])
    def test_an_invalid_correlation_id_is_replaced(self, server: Server, given: str) -> None:
        answer = server.get("/v1/queues", X_Correlation_Id=given)
        assert answer.headers["x-correlation-id"] not in ("", given)

    def test_an_error_has_the_correlation_id_of_the_request(self, server: Server) -> None:
        answer = server.get("/v1/worlds/none", X_Correlation_Id="mine")
        assert (answer.code, answer.json()["correlation_id"]) == ("world_not_found", "mine")

    def test_a_trace_context_is_returned(self, server: Server) -> None:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        assert server.get("/v1/queues", traceparent=trace).headers["traceparent"] == trace
        assert server.get("/v1/queues", traceparent="00-no").headers["traceparent"] is None

    def test_unknown_paths_are_404_and_unknown_methods_405(self, server: Server) -> None:
        assert server.get("/v1/nothing").code == "not_found"
        assert server.get("/v1/worlds/").status == 404
        answer = server.ask("PATCH", "/v1/worlds")
        assert (answer.status, answer.code) == (405, "method_not_allowed")
        assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", ""])
    def test_other_media_types_are_refused(self, server: Server, kind: str) -> None:
        headers = {"content_type": kind} if kind else {}
        for path in ("/v1/queue/enqueue", "/v1/worlds", "/v1/call", "/v1/state/update"):
            answer = server.post(path, b'{"queue":"q"}', **headers)
            assert (answer.status, answer.code) == (415, "invalid_content_type")

    def test_an_unacceptable_media_type_is_refused_without_effect(self, server: Server, name: str) -> None:
        answer = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, accept="text/html, image/*")
        assert (answer.status, answer.code) == (406, "not_acceptable")
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 0
        assert server.get("/v1/queues", accept="text/html, application/*;q=0.1").status == 200
        assert server.get("/v1/queues", accept="application/json;q=0").status == 406

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"3", b'{"queue": 1e999}'])
    def test_invalid_json_is_refused(self, server: Server, body: bytes) -> None:
        answer = server.post("/v1/queue/enqueue", body, content_type="application/json")
        assert answer.status == 400

    def test_requests_of_other_origins_are_refused(self, server: Server) -> None:
        assert server.post("/v1/queues/q/purge", Origin="https://evil.example").code == "foreign_origin"
        assert server.post("/v1/queues/q/purge", Origin=server.url).status == 200

    def test_an_oversized_body_is_refused_before_it_is_read(self, server: Server) -> None:
        with server.raw() as connection:
            connection.sendall(
                b"POST /v1/queue/enqueue HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9000000\r\n\r\n{"
            )
            head = read_all(connection)
        assert head.startswith(b"HTTP/1.1 413")
        assert b"body_too_large" in head
        assert b"connection: close" in head.lower()


class TestStream:
    """`/v1/stream` as docs/protocol.md describes it, with a MessagePack library only."""

    @contextmanager
    def open(self, server: Server, **headers: str) -> Iterator[Any]:
        with connect(f"ws://127.0.0.1:{server.port}/v1/stream", additional_headers=headers, proxy=None) as socket:
            socket.send(msgspec.msgpack.encode([1, "session"]))
            assert msgspec.msgpack.decode(socket.recv(decode=False))[:2] == [1, "session"]
            yield socket

    def call(self, socket: Any, *calls: Any) -> list[Any]:
        socket.send(msgspec.msgpack.encode(calls))
        replies: list[Any] = []
        while len(replies) < len(calls):
            replies += msgspec.msgpack.decode(socket.recv(5))
        return sorted(replies)

    def test_replies_have_the_numbers_of_their_calls(self, server: Server, name: str) -> None:
        with self.open(server) as socket:
            put = {"op": "queues.put", "queue": name, "messages": [{"payload": b"hi"}]}
            wrong = {"op": "worlds.describe", "world": "unknown"}
            received = {"op": "queues.receive", "queue": name, "owner": "ada", "wait_seconds": 5}
            replies = self.call(socket, [0, put], [1, wrong], [2, received])
            assert replies[0][1]["receipts"][0]["durability"] == "critical"
            assert replies[1][2]["code"] == "world_not_found"
            assert replies[2][1]["messages"][0]["payload"] == b"hi"

    def test_a_repeated_call_is_executed_once(self, server: Server, name: str) -> None:
        put = {"op": "queues.put", "queue": name, "messages": [{"payload": b"hi"}]}
        with self.open(server) as socket:
            [first] = self.call(socket, [0, put, f"key-{name}", False])
        with self.open(server) as socket:
            [second] = self.call(socket, [0, put, f"key-{name}", True])
        assert first[1] == second[1]

    @pytest.mark.parametrize(
        "frame", [[[0, {"op": "nothing"}]], [[0, {"op": "queues.list", "x": 1}]], ["0"], {"a": 1}, "text"], ids=range(5)
    )
    def test_an_invalid_frame_closes_the_connection(self, server: Server, frame: Any) -> None:
        with self.open(server) as socket, pytest.raises(ConnectionClosed) as closed:
            socket.send(frame if isinstance(frame, str) else msgspec.msgpack.encode(frame))
            socket.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1002

    def test_streams_of_other_origins_and_without_tokens_are_refused(self, server: Server, strict: Any) -> None:
        for refused, headers in ((server, {"Origin": "https://evil.example"}), (strict, {})):
            with pytest.raises(InvalidStatus) as status, self.open(refused, **headers):
                pass
            assert status.value.response.status_code == 403


HOSTILE: list[tuple[str, str, Any]] = [
    ("POST", "/v1/blobs?universe=..", bytes(20_000)),
    ("POST", "/v1/blobs?universe=%2e%2e%2fx", b"x"),
    ("POST", "/v1/activity", {"session": "..", "records": [{}], "universe": ".."}),
    ("POST", "/v1/queue/enqueue", {"queue": "h", "payload": 1, "tier": "best_effort"}),
    ("POST", "/v1/queue/enqueue", {"queue": "h", "payload": 1, "correlation_id": "\u00e9"}),
    ("POST", "/v1/queue/enqueue", {"queue": "h", "payload": 1, "group": "\ud800"}),
    ("POST", "/v1/queue/enqueue", {"queue": "h", "payload": 1, "delay_seconds": 1e308}),
    ("POST", "/v1/queue/enqueue", {"queue": "h", "payload": 1, "max_attempts": 1 << 70}),
    ("POST", "/v1/queue/ack", {"queue": "h", "message_id": "0" * 32, "lease_id": "a", "fence": -5}),
    ("POST", "/v1/queue/ack", {"queue": "h", "message_id": "0" * 32, "lease_id": "a", "fence": 1 << 64}),
    ("POST", "/v1/queue/dequeue", {"queue": "h", "owner": "x" * 1_000, "wait_seconds": -1}),
    ("POST", "/v1/queue/dequeue", {"queue": "h", "owner": "x", "visibility_seconds": 0}),
    ("POST", "/v1/lease/acquire", {"key": "h", "owner": "x", "ttl_seconds": 1e308}),
    ("POST", "/v1/lease/keepalive", {"key": "h", "lease_id": "x", "fence": 1 << 70}),
    ("PUT", "/v1/state/deep", json.loads("[" * 200 + "]" * 200)),
    ("PUT", "/v1/state/big", "x" * 300_000),
    ("GET", "/v1/worlds/none/entries?start=-1", None),
    ("GET", "/v1/worlds?limit=99999999999999999999999", None),
    ("GET", "/v1/entities/task?after=%00", None),
    ("GET", "/v1/activity?limit=-5", None),
    ("POST", "/v1/worlds/none/snapshots", {"data": 1, "height": 1 << 65}),
    ("POST", "/v1/worlds/none/drain", {"limit": 0}),
    ("POST", "/v1/queues/h/redrive", {"ids": ["nope"]}),
    ("PUT", "/v1/queues/h/policy", {"rate_per_second": -1}),
    ("POST", "/v1/call", {"op": "pairs.scan", "begin": "", "end": "/w==", "limit": -1}),
]


@pytest.mark.parametrize(("method", "path", "body"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_input_is_a_client_error(server: Server, method: str, path: str, body: Any) -> None:
    answer = server.ask(method, path, body)
    assert 400 <= answer.status < 500, answer
    assert answer.code


class TestTokensAndLimits:
    def test_a_missing_token_is_401(self, strict: Any) -> None:
        answer = strict.get("/v1/queues")
        assert (answer.status, answer.code) == (401, "not_allowed")
        assert answer.headers["www-authenticate"].startswith("Bearer")

    def test_an_insufficient_token_is_403(self, strict: Any) -> None:
        assert strict.get("/v1/queues", Authorization="Bearer reader").status == 200
        for path, body in (
            ("/v1/queue/enqueue", {"queue": "q", "payload": 1}),
            ("/v1/queue/dequeue", {"queue": "q", "owner": "ada"}),
            ("/v1/queue/subscribe", {"queue": "q", "owner": "ada"}),
            ("/v1/blobs", b"x"),
            ("/v1/atomic", [{"op": "states.update", "key": "k", "value": 1}]),
            ("/v1/call", {"op": "worlds.create", "world": "w"}),
        ):
            answer = strict.post(path, body, Authorization="Bearer reader")
            assert (answer.status, answer.code) == (403, "not_allowed"), path
            assert "insufficient_scope" in answer.headers["www-authenticate"]

    def test_a_caller_that_may_not_put_or_acknowledge_stores_no_blob(self, strict: Any) -> None:
        size = max(PAYLOAD_INLINE_BYTES_MAX, RESULT_BYTES_MAX) + 1
        settled = {"message_id": "0" * 32, "lease_id": "x", "fence": 1}
        for letter, path, field, others in (
            (b"a", "/v1/queue/enqueue", "payload_base64", {}),
            (b"b", "/v1/queue/ack", "result_base64", settled),
        ):
            data = letter * size
            body = {"queue": "q", **others, field: base64.b64encode(data).decode()}
            assert strict.post(path, body, Authorization="Bearer reader").status == 403
            stored = strict.get(f"/v1/blobs/{hashlib.sha256(data).hexdigest()}", Authorization="Bearer all")
            assert (stored.status, stored.code) == (404, "blob_not_found"), path

    def test_tokens_do_not_share_idempotency_keys(self, strict: Any, name: str) -> None:
        headers = {"Idempotency-Key": "k", "Authorization": "Bearer all"}
        assert strict.post("/v1/state/update", {"key": name, "value": 1}, **headers).status == 200
        headers["Authorization"] = "Bearer reader"
        assert strict.post("/v1/state/update", {"key": name, "value": 1}, **headers).status == 403

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/v1/queue/enqueue", "application/json"),
            ("/v1/queue/enqueue", "multipart/form-data; boundary=b0"),
            ("/v1/blobs", "application/octet-stream"),
        ],
    )
    def test_a_slow_body_times_out(self, strict: Any, path: str, kind: str) -> None:
        with strict.raw() as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer all\r\nContent-Type: {kind}\r\n"
                "Content-Length: 1000\r\n\r\n--b".encode()
            )
            head = read_all(connection)
        assert head.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in head

    def test_a_body_that_trickles_times_out(self, strict: Any) -> None:
        with strict.raw() as connection:
            connection.sendall(
                b"POST /v1/call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer all\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000\r\n\r\n"
            )
            stop = threading.Event()

            def trickle() -> None:
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

            trickling = threading.Thread(target=trickle)
            trickling.start()
            head = read_all(connection)
            stop.set()
            trickling.join()
        assert head.startswith(b"HTTP/1.1 408")

    @pytest.mark.parametrize("path", ["/v1/blobs", "/v1/call"])
    def test_a_chunked_body_is_bounded(self, strict: Any, path: str) -> None:
        connection = strict.connect()
        headers = {"Authorization": "Bearer all", "Content-Type": "application/json"}
        try:
            connection.request("POST", path, (bytes(65_536) for _ in range(64)), headers, encode_chunked=True)
            response = connection.getresponse()
            assert response.status == 413
            assert json.loads(response.read())["code"] == "body_too_large"
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            pass  # The server may close the connection while the body is being sent.
        finally:
            connection.close()
        assert strict.get("/v1/queues", Authorization="Bearer all").status == 200
