"""Messages over HTTP: enqueue, dequeue, settle, payloads, subscriptions and watches."""

import base64
import hashlib
import importlib.util
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    """A helper module of this folder; pytest's importlib mode does not put it on the path."""
    spec = importlib.util.spec_from_file_location(f"holdfast_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


serving = _load("serving").serving
_helpers = _load("http_helpers")
receive, lease, multipart, parts_of, EventLines = (
    _helpers.receive,
    _helpers.lease,
    _helpers.multipart,
    _helpers.parts_of,
    _helpers.EventLines,
)

MEGABYTE = 1_048_576
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}", heartbeat_seconds=0.5, watch_seconds=0.05) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A unique name."""
    return f"test-{next(_names)}"


class TestMessages:
    def test_a_message_is_delivered_and_can_be_acknowledged_twice(self, server: Any, name: str) -> None:
        put = {"queue": name, "payload": {"n": 1}, "attributes": {"kind": "test"}, "visibility_timeout_seconds": 60}
        receipt = server.post("/v1/queue/enqueue", put).json()
        message = receive(server, name)
        assert message["message_id"] == receipt["message_id"]
        assert message["payload"] == {"n": 1}
        assert message["attributes"] == {"kind": "test"}
        assert message["attempts"] == 1
        assert message["failure_attempts"] == 0
        assert message["visibility_timeout_seconds"] == 60
        assert message["namespace"] == "main"
        assert message["meta_etag"] == message["lease_id"]
        assert 0 < message["lease_expires_at_unix"] - time.time() < 61
        for _ in range(2):
            assert server.post("/v1/queue/ack", lease(message)).json()["settled"] is True
        assert server.post("/v1/queue/stats", {"queue": name}).json()["acked_total"] == 1

    def test_binary_payloads_are_base64(self, server: Any, name: str) -> None:
        put = {"queue": name, "payload_base64": base64.b64encode(b"\x00\xff").decode()}
        assert server.post("/v1/queue/enqueue", put).json()["payload_bytes"] == 2
        assert base64.b64decode(receive(server, name)["payload_base64"]) == b"\x00\xff"

    def test_a_batch_has_a_result_for_each_message(self, server: Any, name: str) -> None:
        put = {"queue": name, "messages": [{"payload": n, "priority": 9 - n} for n in range(3)]}
        assert len(server.post("/v1/queue/enqueue", put).json()["messages"]) == 3
        body = {"queue": name, "owner": "ada", "page_size": 64}
        messages = server.post("/v1/queue/dequeue", body).json()["messages"]
        assert [message["payload"] for message in messages] == [0, 1, 2]
        shown = [{"message_id": each["message_id"], "lease_id": each["lease_id"]} for each in messages]
        shown[1] = {**shown[1], "fencing_token": 77}
        settled = server.post("/v1/queue/ack", {"queue": name, "messages": shown}).json()["messages"]
        assert [each["settled"] for each in settled] == [True, False, True]
        assert settled[1]["code"] == "queue_message_lease_mismatch"

    def test_a_nack_counts_as_a_failure_unless_it_defers(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1, "max_attempts": 2})
        message = receive(server, name)
        assert server.post("/v1/queue/nack", {**lease(message), "intent": "defer"}).status == 200
        message = receive(server, name)
        assert message["failure_attempts"] == 0
        nack = {**lease(message), "last_error": "no", "meta_etag": message["meta_etag"], "delay_seconds": 0}
        assert server.post("/v1/queue/nack", nack).status == 200
        message = receive(server, name)
        assert (message["failure_attempts"], message["last_error"]) == (1, "no")
        assert server.post("/v1/queue/reject", {**lease(message), "last_error": "never"}).status == 200
        [letter] = server.get(f"/v1/queues/{name}/dead-letters").json()["messages"]
        assert (letter["last_error"], letter["origin"]) == ("never", name)
        assert server.post(f"/v1/queues/{name}/redrive", {}).json() == {"count": 1}
        assert receive(server, name)["message_id"] == letter["message_id"]

    def test_failures_are_kept_and_retried_after_the_back_off(self, server: Any, name: str) -> None:
        server.ask("PUT", f"/v1/queues/{name}/policy", {"retry_delay_seconds": 600, "retry_delay_max_seconds": 600})
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        error = {"last_error": "boom", "error_type": "ValueError", "traceback": "Traceback …"}
        message = receive(server, name)
        assert message["failures"] == []
        assert (
            server.post("/v1/queue/nack", {**lease(message), **error, "intent": "defer"}).code == "invalid_nack_intent"
        )
        assert server.post("/v1/queue/nack", {**lease(message), **error, "delay_seconds": 0}).status == 200
        [peeked] = server.get(f"/v1/queues/{name}/peek").json()["messages"]
        [failure] = peeked["failures"]
        assert failure == {
            "attempt": 1,
            "owner": "ada",
            "outcome": "failed",
            "leased_at_unix": failure["leased_at_unix"],
            "failed_at_unix": failure["failed_at_unix"],
            "error_type": "ValueError",
            "message": "boom",
            "traceback": "Traceback …",
        }
        assert 0 < failure["leased_at_unix"] <= failure["failed_at_unix"]
        message = receive(server, name)
        assert message["failures"] == [{**failure, "traceback": None}]
        assert server.post("/v1/queue/nack", lease(message)).status == 200
        assert server.get(f"/v1/queues/{name}").json()["delayed"] == 1
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 2, "retry_delay_seconds": 0})
        server.post("/v1/queue/nack", lease(receive(server, name)))
        message = receive(server, name)
        assert message["payload"] == 2
        assert server.post("/v1/queue/reject", {**lease(message), **error}).status == 200
        [letter] = server.get(f"/v1/queues/{name}/dead-letters").json()["messages"]
        assert letter["last_error"] == "ValueError: boom"
        assert [each["outcome"] for each in letter["failures"]] == ["failed", "rejected"]
        assert letter["failures"][1]["traceback"] == "Traceback …"

    def test_an_extension_needs_a_positive_duration(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        message = receive(server, name)
        extended = server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 300}).json()
        assert extended["lease_expires_at_unix"] > message["lease_expires_at_unix"] + 200
        assert server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 0}).code == "invalid_argument"
        assert server.post("/v1/queue/extend", lease(message)).code == "missing_fields"

    def test_an_expired_lease_cannot_settle_a_message(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        first = receive(server, name)
        server.post("/v1/queue/nack", {**lease(first), "delay_seconds": 0})
        receive(server, name)
        for path, more in (("ack", {}), ("nack", {}), ("extend", {"extend_by_seconds": 1}), ("reject", {})):
            answer = server.post(f"/v1/queue/{path}", {**lease(first), **more})
            assert (answer.status, answer.code) == (409, "queue_message_lease_mismatch")
        assert server.post("/v1/queue/nack", {**lease(first), "meta_etag": "older"}).code == "cas_mismatch"

    @pytest.mark.parametrize(
        ("path", "body", "code"),
        [
            ("dequeue", {"queue": "q"}, "missing_owner"),
            ("dequeue", {"queue": "q", "owner": ""}, "missing_owner"),
            ("dequeue", {"owner": "ada"}, "missing_queue"),
            ("dequeue", {"queue": "q", "owner": "ada", "page_size": 65}, "invalid_argument"),
            ("dequeue", {"queue": "q", "owner": "ada", "visibility": 3}, "invalid_body"),
            ("dequeue", {"queue": "../q", "owner": "ada", "wait_seconds": -1}, "invalid_name"),
            ("enqueue", {"payload": 1}, "missing_queue"),
            ("enqueue", {"queue": "q", "payload": 1, "payload_base64": "YQ=="}, "invalid_argument"),
            ("enqueue", {"queue": "q", "delay": 3}, "invalid_body"),
            ("enqueue", {"queue": "q", "messages": [], "priority": 3}, "invalid_body"),
            ("enqueue", {"queue": "q", "messages": []}, "empty_batch"),
            ("enqueue", {"queue": "q", "payload": 1, "priority": 10}, "invalid_argument"),
            ("enqueue", {"queue": "q", "payload_blob": "0" * 64}, "blob_not_found"),
            ("enqueue", {"queue": "q", "payload": 1, "payload_content_type": "a\r\nb: c"}, "invalid_argument"),
            ("enqueue", {"queue": "q", "payload": 1, "universe": "a", "namespace": "b"}, "invalid_body"),
            ("ack", {"queue": "q"}, "missing_fields"),
            ("ack", {"queue": "q", "message_id": "1", "lease_id": "1"}, "invalid_argument"),
            ("nack", {"queue": "q", "message_id": "1", "lease_id": "1", "intent": "shrug"}, "invalid_nack_intent"),
            ("stats", {}, "missing_queue"),
            ("subscribe", {"queue": "q"}, "missing_owner"),
            ("subscribe", {"queue": "q", "owner": "ada", "credit": 0}, "invalid_argument"),
        ],
    )
    def test_invalid_requests_have_specific_codes(self, server: Any, path: str, body: Any, code: str) -> None:
        answer = server.post(f"/v1/queue/{path}", body)
        assert answer.status in (400, 404)
        assert answer.code == code

    def test_a_waiting_dequeue_returns_when_a_message_is_put(self, server: Any, name: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            body = {"queue": name, "owner": "ada", "wait_seconds": 20}
            waiting = pool.submit(server.post, "/v1/queue/dequeue", body)
            while server.post("/v1/queue/stats", {"queue": name}).json()["waiting_consumers"] == 0:
                time.sleep(0.01)
            server.post("/v1/queue/enqueue", {"queue": name, "payload": "here"})
            assert waiting.result(18).json()["messages"][0]["payload"] == "here"

    def test_a_dequeue_of_an_empty_queue_returns_no_messages(self, server: Any, name: str) -> None:
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        assert server.post("/v1/queue/dequeue", body).json() == {"messages": []}
        assert server.post("/v1/queue/dequeue", body, accept="multipart/related").status == 204

    def test_a_consumer_that_disconnects_receives_no_message(self, server: Any, name: str) -> None:
        connection = server.connect()
        body = json.dumps({"queue": name, "owner": "gone"})
        connection.request("POST", "/v1/queue/dequeue", body, {"Content-Type": "application/json"})
        while server.post("/v1/queue/stats", {"queue": name}).json()["waiting_consumers"] == 0:
            time.sleep(0.01)
        connection.close()
        while server.post("/v1/queue/stats", {"queue": name}).json()["waiting_consumers"] == 1:
            time.sleep(0.01)
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        assert receive(server, name)["attempts"] == 1

    def test_workflow_state_is_delivered_and_removed_with_its_message(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] is None
        proof = {"X-Lease-Id": message["state_lease_id"], "X-Fencing-Token": str(message["state_fencing_token"])}
        put = server.ask("PUT", f"/v1/state/{message['state_key']}", {"step": 2}, **proof)
        assert put.status == 200
        server.post("/v1/queue/nack", {**lease(message), "delay_seconds": 0})
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] == {"step": 2}
        server.post("/v1/queue/ack", lease(message))
        assert server.get(f"/v1/state/{message['state_key']}").status == 404


class TestPayloads:
    def test_a_large_multipart_payload_is_streamed_both_ways(self, server: Any, name: str) -> None:
        payload = hashlib.shake_256(b"seed").digest(20 * MEGABYTE)
        before = server.peak_bytes()
        body, kind = multipart({"queue": name, "payload_content_type": "video/raw"}, payload)
        receipt = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert receipt.json()["payload_bytes"] == len(payload)
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        answer = server.post("/v1/queue/dequeue", body, accept="multipart/related")
        assert answer.headers["content-type"].startswith("multipart/related")
        (first, meta), (second, received) = parts_of(answer)
        assert (first, second) == ("meta", "payload")
        assert received == payload
        message = json.loads(meta)
        assert message["payload_content_type"] == "video/raw"
        assert message["payload_bytes"] == len(payload)
        assert server.post("/v1/queue/ack", lease(message)).status == 200
        assert server.peak_bytes() - before < 16 * MEGABYTE, "the payload was held in memory"

    def test_a_large_payload_is_a_blob_reference_in_json(self, server: Any, name: str) -> None:
        payload = bytes(2 * MEGABYTE)
        body, kind = multipart({"queue": name}, payload)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        message = receive(server, name)
        assert "payload_base64" not in message
        assert server.get(f"/v1/blobs/{message['payload_blob']}").body == payload

    def test_a_multipart_dequeue_returns_several_messages(self, server: Any, name: str) -> None:
        for text in (b'{"n":1}', b""):
            body, kind = multipart({"queue": name}, text, kind="application/json")
            assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        body, kind = multipart({"queue": name, "payload": [1]}, None)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        body = {"queue": name, "owner": "ada", "page_size": 3}
        answer = server.post("/v1/queue/dequeue", body, accept="multipart/related, application/json;q=0.5")
        assert [body for part, body in parts_of(answer) if part == "payload"] == [b'{"n":1}', b"", b"[1]"]

    def test_a_json_payload_over_the_inline_size_is_stored_as_a_blob(self, server: Any, name: str) -> None:
        text = "x" * 50_000
        assert server.post("/v1/queue/enqueue", {"queue": name, "payload": text}).status == 200
        assert receive(server, name)["payload"] == text

    @pytest.mark.parametrize(
        ("body", "kind"),
        [
            (b"--b0\r\n", "multipart/form-data"),
            (multipart({"queue": "q"}, b"x")[0][:-12], "multipart/form-data; boundary=b0"),
            (multipart({"queue": "q"}, b"x" * 50_000)[0][:-12], "multipart/form-data; boundary=b0"),
            (multipart({"queue": "q"}, b"x")[0].replace(b"meta", b"mett"), "multipart/form-data; boundary=b0"),
            (multipart({"queue": "q"}, b"x")[0].replace(b'"payload"', b'"other"'), "multipart/form-data; boundary=b0"),
            (multipart({"queue": "q", "payload": 1}, b"x")[0], "multipart/form-data; boundary=b0"),
            (multipart({"queue": "q", "what": 1}, b"x")[0], "multipart/form-data; boundary=b0"),
            (b"nothing of the kind", "multipart/form-data; boundary=b0"),
            (b"--b0\r\nbroken", "multipart/form-data; boundary=b0"),
        ],
    )
    def test_a_malformed_multipart_body_enqueues_nothing(self, server: Any, body: bytes, kind: str) -> None:
        before = server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"]
        answer = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert answer.status == 400
        assert answer.code in ("invalid_body", "invalid_content_type")
        assert server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"] == before

    def test_an_oversized_meta_part_is_refused(self, server: Any) -> None:
        body, kind = multipart({"queue": "q", "attributes": {"a": "x" * 100_000}}, b"")
        assert server.post("/v1/queue/enqueue", body, content_type=kind).code == "body_too_large"


class TestSubscriptions:
    def test_a_subscription_delivers_within_its_credit(self, server: Any, name: str) -> None:
        for n in range(3):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": n})
        lines = EventLines(server, "POST", "/v1/queue/subscribe", {"queue": name, "owner": "ada", "credit": 2})
        first, second = lines.next("message"), lines.next("message")
        assert (first["payload"], second["payload"]) == (0, 1)
        lines.next("heartbeat")
        assert server.post("/v1/queue/stats", {"queue": name}).json()["ready"] == 1
        server.post("/v1/queue/ack", lease(first))
        assert lines.next("message")["payload"] == 2
        server.post("/v1/queue/ack", lease(second))
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 3})
        assert lines.next("message")["payload"] == 3
        lines.close()

    def test_a_subscription_ends_when_it_is_idle(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.2, "credit": 2}
        lines = EventLines(server, "POST", "/v1/queue/subscribeWithState", body)
        assert lines.next("message")["state"] is None
        assert lines.next("end") == {"reason": "idle"}
        assert lines.response.read() == b""
        lines.close()

    def test_a_subscription_sends_server_sent_events(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": {"a": "line\nbreak"}})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        answer = server.post("/v1/queue/subscribe", body, accept="text/event-stream")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.body.decode().split("\n\n")]
        [event] = [lines for lines in events if "event: message" in lines]
        assert event[0].startswith("id: ")
        assert json.loads(event[2].removeprefix("data: "))["payload"] == {"a": "line\nbreak"}

    def test_a_watch_sends_changed_stats(self, server: Any, name: str) -> None:
        lines = EventLines(server, "GET", f"/v1/queue/watch?queue={name}", accept="application/x-ndjson")
        assert lines.next("stats")["available"] is False
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        stats = lines.next("stats")
        assert (stats["available"], stats["pending_candidates"], stats["has_active_watcher"]) == (True, 1, True)
        lines.close()
        lines = EventLines(server, "POST", "/v1/queue/watch", {"queue": name})
        assert lines.response.getheader("content-type", "").startswith("text/event-stream")
        assert lines.response.readline() == b"event: stats\n"
        lines.close()
        assert server.ask("HEAD", f"/v1/queue/watch?queue={name}").status == 200
        assert server.get("/v1/queue/watch").code == "missing_queue"
        assert server.get("/v1/queue/watch?queue=%2e%2e%2fx").code == "invalid_name"


def test_draining_ends_waiting_requests_and_streams() -> None:
    with serving(heartbeat_seconds=0.2, watch_seconds=0.05) as server, ThreadPoolExecutor(2) as pool:
        lines = EventLines(server, "POST", "/v1/queue/subscribe", {"queue": "q", "owner": "ada"})
        watch = EventLines(server, "GET", "/v1/queue/watch?queue=q", accept="application/x-ndjson")
        polled = pool.submit(server.post, "/v1/queue/dequeue", {"queue": "p", "owner": "ada"})
        while server.post("/v1/queue/stats", {"queue": "p"}).json()["waiting_consumers"] == 0:
            time.sleep(0.01)
        server.drain()
        answer = polled.result(60)
        assert (answer.status, answer.code) == (503, "shutdown_draining")
        assert lines.next("end") == {"reason": "shutdown_draining"}
        assert watch.next("end") == {"reason": "shutdown_draining"}
        assert server.post("/v1/queue/enqueue", {"queue": "q", "payload": 1}).code == "shutdown_draining"
        assert server.get("/openapi.json").status == 200
        lines.close()
        watch.close()
