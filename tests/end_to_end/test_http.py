"""Every HTTP endpoint against a real server process: once as it is meant, and once as it is not."""

import base64
import hashlib
import http.client
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.parser import BytesParser
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from holdfast.wire.problems import Problem
from holdfast.wire.queues import AckMessages, MessageLease, NewMessage, Outcomes, PutMessages, Receipts

_spec = importlib.util.spec_from_file_location("holdfast_serving", Path(__file__).with_name("serving.py"))
assert _spec is not None
assert _spec.loader is not None
_serving = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_serving)
Server, Answer, serving = _serving.Server, _serving.Answer, _serving.serving

MEGABYTE = 1_048_576
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}", heartbeat_seconds=0.5, watch_seconds=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Any]:
    """A server that has little patience, and whose tokens are two."""
    with serving(
        tokens=True, body_bytes_max=65_536, stream_bytes_max=MEGABYTE, body_seconds_max=1.5, pause_seconds_max=1.5
    ) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"thing-{next(_names)}"


def receive(server: Any, queue: str, **options: Any) -> dict[str, Any]:
    answer = server.post("/v1/queue/dequeue", {"queue": queue, "owner": "ada", "wait_seconds": -1, **options})
    assert answer.status == 200, answer
    [message] = answer.json()["messages"]
    return dict(message)


def lease(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("queue", "message_id", "lease_id")}


def multipart(meta: Any, payload: bytes | None, *, kind: str = "application/octet-stream") -> tuple[bytes, str]:
    parts = [b'--b0\r\nContent-Disposition: form-data; name="meta"\r\n\r\n' + json.dumps(meta).encode()]
    if payload is not None:
        head = f'--b0\r\nContent-Disposition: form-data; name="payload"\r\nContent-Type: {kind}\r\n\r\n'
        parts.append(head.encode() + payload)
    return b"\r\n".join([*parts, b"--b0--\r\n"]), "multipart/form-data; boundary=b0"


def parts_of(answer: Any) -> list[tuple[str, bytes]]:
    """The names and bodies of a multipart answer's parts."""
    head = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode()
    message = BytesParser().parsebytes(head + answer.body)
    return [
        (str(part.get_param("name", header="content-disposition")), part.get_payload(decode=True))
        for part in message.get_payload()
    ]


def read_all(connection: socket.socket) -> bytes:
    """Everything that comes before the server closes the connection."""
    held = b""
    while True:
        try:
            piece = connection.recv(65_536)
        except ConnectionError:  # It closed while something was still on its way to it.
            return held
        if not piece:
            return held
        held += piece


class TestCall:
    def test_messagepack_is_answered_in_messagepack(self, server: Any, name: str) -> None:
        body = msgspec.msgpack.encode(PutMessages(name, [NewMessage(b"hi")]))
        kinds = {"content_type": "application/msgpack", "accept": "application/msgpack"}
        answer = server.post("/v1/call", body, **kinds)
        assert answer.headers["content-type"] == "application/msgpack"
        receipt = msgspec.msgpack.decode(answer.body, type=Receipts).receipts[0]
        wrong = AckMessages(name, [MessageLease(receipt.id, "x", 1)])
        answer = server.post("/v1/call", msgspec.msgpack.encode(wrong), **kinds)
        outcomes = msgspec.msgpack.decode(answer.body, type=Outcomes).outcomes
        assert outcomes[0].code == "queue_message_lease_mismatch"

    def test_a_problem_of_messagepack_is_messagepack(self, server: Any) -> None:
        answer = server.post("/v1/call", b"\xc1", content_type="application/msgpack", accept="application/msgpack")
        assert answer.status == 400
        assert msgspec.msgpack.decode(answer.body, type=Problem).code == "invalid_body"

    def test_json_speaks_the_dialect_in_both_directions(self, server: Any, name: str) -> None:
        put = {"op": "queues.put", "queue": name, "messages": [{"payload": {"n": 1}}]}
        assert server.post("/v1/call", put).json()["receipts"][0]["durability"] == "critical"
        took = server.post("/v1/call", {"op": "queues.receive", "queue": name, "owner": "ada"}).json()
        assert took["messages"][0]["payload"] == {"n": 1}
        mine = {"message_id": took["messages"][0]["message_id"], "lease_id": took["messages"][0]["lease_id"]}
        acked = server.post("/v1/call", {"op": "queues.ack", "queue": name, "leases": [mine]})
        assert acked.json()["outcomes"][0].get("code") is None

    @pytest.mark.parametrize("body", [{"op": "pairs.put", "key": "YQ==", "value": "YQ=="}, {"op": "nothing"}, {}, []])
    def test_what_is_no_request_is_refused(self, server: Any, body: Any) -> None:
        assert server.post("/v1/call", body).status == 400

    def test_a_surprise_is_a_problem_without_a_trace_of_the_inside(self, server: Any) -> None:
        answer = server.post("/v1/call", {"op": "pairs.get", "key": base64.b64encode(b"boom").decode()})
        assert (answer.status, answer.code) == (500, "internal_error")
        assert b"secret" not in answer.body
        assert b"Traceback" not in answer.body


class TestMessages:
    def test_a_message_lives_and_is_acknowledged_twice(self, server: Any, name: str) -> None:
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

    def test_bytes_come_back_as_base64(self, server: Any, name: str) -> None:
        put = {"queue": name, "payload_base64": base64.b64encode(b"\x00\xff").decode()}
        assert server.post("/v1/queue/enqueue", put).json()["payload_bytes"] == 2
        assert base64.b64decode(receive(server, name)["payload_base64"]) == b"\x00\xff"

    def test_a_batch_is_answered_item_by_item(self, server: Any, name: str) -> None:
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

    def test_a_nack_gives_back_and_counts_unless_it_defers(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1, "max_attempts": 2})
        message = receive(server, name)
        assert server.post("/v1/queue/nack", {**lease(message), "intent": "defer"}).status == 200
        message = receive(server, name)
        assert message["failure_attempts"] == 0
        nack = {**lease(message), "last_error": "no", "meta_etag": message["meta_etag"]}
        assert server.post("/v1/queue/nack", nack).status == 200
        message = receive(server, name)
        assert (message["failure_attempts"], message["last_error"]) == (1, "no")
        assert server.post("/v1/queue/reject", {**lease(message), "last_error": "never"}).status == 200
        [letter] = server.get(f"/v1/queues/{name}/dead-letters").json()["messages"]
        assert (letter["last_error"], letter["origin"]) == ("never", name)
        assert server.post(f"/v1/queues/{name}/redrive", {}).json() == {"count": 1}
        assert receive(server, name)["message_id"] == letter["message_id"]

    def test_an_extension_is_never_shorter_and_never_nothing(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        message = receive(server, name)
        extended = server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 300}).json()
        assert extended["lease_expires_at_unix"] > message["lease_expires_at_unix"] + 200
        assert server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 0}).code == "invalid_argument"
        assert server.post("/v1/queue/extend", lease(message)).code == "missing_fields"

    def test_an_old_lease_is_told_apart(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        first = receive(server, name)
        server.post("/v1/queue/nack", lease(first))
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
    def test_what_is_wrong_has_its_code(self, server: Any, path: str, body: Any, code: str) -> None:
        answer = server.post(f"/v1/queue/{path}", body)
        assert answer.status in (400, 404)
        assert answer.code == code

    def test_a_poll_wakes_when_a_message_is_put(self, server: Any, name: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            body = {"queue": name, "owner": "ada", "wait_seconds": 20}
            waiting = pool.submit(server.post, "/v1/queue/dequeue", body)
            while server.post("/v1/queue/stats", {"queue": name}).json()["waiting_consumers"] == 0:
                time.sleep(0.01)
            server.post("/v1/queue/enqueue", {"queue": name, "payload": "here"})
            assert waiting.result(18).json()["messages"][0]["payload"] == "here"

    def test_a_poll_ends_with_nothing(self, server: Any, name: str) -> None:
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        assert server.post("/v1/queue/dequeue", body).json() == {"messages": []}
        assert server.post("/v1/queue/dequeue", body, accept="multipart/related").status == 204

    def test_a_consumer_that_hangs_up_takes_nothing_with_it(self, server: Any, name: str) -> None:
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

    def test_state_comes_with_a_message_and_goes_with_it(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] is None
        proof = {"X-Lease-Id": message["state_lease_id"], "X-Fencing-Token": str(message["state_fencing_token"])}
        put = server.ask("PUT", f"/v1/state/{message['state_key']}", {"step": 2}, **proof)
        assert put.status == 200
        server.post("/v1/queue/nack", lease(message))
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] == {"step": 2}
        server.post("/v1/queue/ack", lease(message))
        assert server.get(f"/v1/state/{message['state_key']}").status == 404


class TestPayloads:
    def test_twenty_megabytes_go_in_and_out_as_multipart(self, server: Any, name: str) -> None:
        payload = hashlib.shake_256(b"seed").digest(20 * MEGABYTE)
        before = server.peak_bytes()
        body, kind = multipart({"queue": name, "payload_content_type": "video/raw"}, payload)
        receipt = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert receipt.json()["payload_bytes"] == len(payload)
        asked = {"queue": name, "owner": "ada", "wait_seconds": -1}
        answer = server.post("/v1/queue/dequeue", asked, accept="multipart/related")
        assert answer.headers["content-type"].startswith("multipart/related")
        (first, meta), (second, came) = parts_of(answer)
        assert (first, second) == ("meta", "payload")
        assert came == payload
        told = json.loads(meta)
        assert told["payload_content_type"] == "video/raw"
        assert told["payload_bytes"] == len(payload)
        assert server.post("/v1/queue/ack", lease(told)).status == 200
        assert server.peak_bytes() - before < 16 * MEGABYTE, "it was held in memory"

    def test_a_large_payload_comes_by_reference_in_json(self, server: Any, name: str) -> None:
        payload = bytes(2 * MEGABYTE)
        body, kind = multipart({"queue": name}, payload)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        message = receive(server, name)
        assert "payload_base64" not in message
        assert server.get(f"/v1/blobs/{message['payload_blob']}").body == payload

    def test_small_parts_and_several_messages(self, server: Any, name: str) -> None:
        for text in (b'{"n":1}', b""):
            body, kind = multipart({"queue": name}, text, kind="application/json")
            assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        body, kind = multipart({"queue": name, "payload": [1]}, None)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        asked = {"queue": name, "owner": "ada", "page_size": 3}
        answer = server.post("/v1/queue/dequeue", asked, accept="multipart/related, application/json;q=0.5")
        assert [body for part, body in parts_of(answer) if part == "payload"] == [b'{"n":1}', b"", b"[1]"]

    def test_json_over_the_inline_size_becomes_a_blob(self, server: Any, name: str) -> None:
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
    def test_a_malformed_multipart_puts_nothing(self, server: Any, body: bytes, kind: str) -> None:
        before = server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"]
        answer = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert answer.status == 400
        assert answer.code in ("invalid_body", "invalid_content_type")
        assert server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"] == before

    def test_a_meta_that_never_ends_is_refused(self, server: Any) -> None:
        body, kind = multipart({"queue": "q", "attributes": {"a": "x" * 100_000}}, b"")
        assert server.post("/v1/queue/enqueue", body, content_type=kind).code == "body_too_large"


class Lines:
    """The lines of an answer that goes on, read on a thread."""

    def __init__(self, server: Any, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.connection = server.connect()
        said = {"Content-Type": "application/json", **headers} if body is not None else headers
        self.connection.request(method, path, None if body is None else json.dumps(body), said)
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def next(self, event: str) -> Any:
        """The data of the next event of that name."""
        while line := self.response.readline():
            said = json.loads(line)
            if said["event"] == event:
                return said["data"]
        raise AssertionError(f"the stream ended before a {event}")

    def close(self) -> None:
        self.response.close()
        self.connection.close()


class TestStreams:
    def test_a_subscription_delivers_within_its_credit(self, server: Any, name: str) -> None:
        for n in range(3):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": n})
        lines = Lines(server, "POST", "/v1/queue/subscribe", {"queue": name, "owner": "ada", "credit": 2})
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

    def test_a_subscription_ends_when_it_is_told_to(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.2, "credit": 2}
        lines = Lines(server, "POST", "/v1/queue/subscribeWithState", body)
        assert lines.next("message")["state"] is None
        assert lines.next("end") == {"reason": "idle"}
        assert lines.response.read() == b""
        lines.close()

    def test_a_subscription_speaks_server_sent_events(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": {"a": "line\nbreak"}})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        answer = server.post("/v1/queue/subscribe", body, accept="text/event-stream")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.body.decode().split("\n\n")]
        [said] = [lines for lines in events if "event: message" in lines]
        assert said[0].startswith("id: ")
        assert json.loads(said[2].removeprefix("data: "))["payload"] == {"a": "line\nbreak"}

    def test_a_watch_tells_of_changes(self, server: Any, name: str) -> None:
        lines = Lines(server, "GET", f"/v1/queue/watch?queue={name}", accept="application/x-ndjson")
        assert lines.next("stats")["available"] is False
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        stats = lines.next("stats")
        assert (stats["available"], stats["pending_candidates"], stats["has_active_watcher"]) == (True, 1, True)
        lines.close()
        lines = Lines(server, "POST", "/v1/queue/watch", {"queue": name})
        assert lines.response.getheader("content-type", "").startswith("text/event-stream")
        assert lines.response.readline() == b"event: stats\n"
        lines.close()
        assert server.ask("HEAD", f"/v1/queue/watch?queue={name}").status == 200
        assert server.get("/v1/queue/watch").code == "missing_queue"
        assert server.get("/v1/queue/watch?queue=%2e%2e%2fx").code == "invalid_name"


class TestQueues:
    def test_a_queue_is_looked_at_and_run(self, server: Any, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": {"n": 1}})
        assert name in server.get("/v1/queues?limit=10000").json()["names"]
        assert server.get(f"/v1/queues/{name}").json()["ready"] == 1
        assert server.get(f"/v1/queues/{name}/peek").json()["messages"][0]["payload"] == {"n": 1}
        assert server.post(f"/v1/queues/{name}/pause").json()["paused"] is True
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        assert server.post("/v1/queue/dequeue", body).json() == {"messages": []}
        assert server.post(f"/v1/queues/{name}/resume").json()["paused"] is False
        policy = server.ask("PUT", f"/v1/queues/{name}/policy", {"max_attempts": 7}).json()
        assert policy["max_attempts"] == 7
        assert server.get(f"/v1/queues/{name}/policy").json() == policy
        assert server.post(f"/v1/queues/{name}/purge").json() == {"count": 1}

    def test_schedules_come_and_go(self, server: Any, name: str) -> None:
        body = {"cron": "0 4 * * *", "message": {"payload": {"job": "backup"}}}
        schedule = server.ask("PUT", f"/v1/queues/{name}/schedules/nightly", body).json()
        assert schedule["next_ms"] > time.time() * 1_000
        [found] = server.get(f"/v1/queues/{name}/schedules").json()["schedules"]
        assert found["message"]["payload"] == {"job": "backup"}
        assert server.ask("DELETE", f"/v1/queues/{name}/schedules/nightly").json() == {"count": 1}

    @pytest.mark.parametrize(
        ("method", "path", "body", "code"),
        [
            ("GET", "/v1/queues?limit=none", None, "invalid_query"),
            ("GET", "/v1/queues?limt=3", None, "invalid_query"),
            ("GET", "/v1/queues?limit=0", None, "invalid_argument"),
            ("GET", "/v1/queues/q/dead-letters?limit=x", None, "invalid_query"),
            ("PUT", "/v1/queues/q/policy", {"max_attempts": 0}, "invalid_argument"),
            ("PUT", "/v1/queues/q/policy", {"attempts": 3}, "invalid_body"),
            ("PUT", "/v1/queues/q/schedules/s", {"cron": "never", "message": {"payload": 1}}, "invalid_argument"),
            ("PUT", "/v1/queues/q/schedules/s", {"message": {"payload": 1}}, "missing_fields"),
            ("POST", "/v1/queues/q/redrive", {"limit": 0}, "invalid_argument"),
            ("POST", "/v1/queues/q/pause", {"paused": False}, "invalid_body"),
            ("POST", "/v1/queues/q/purge", [], "invalid_body"),
        ],
    )
    def test_what_is_wrong_has_its_code(self, server: Any, method: str, path: str, body: Any, code: str) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestLeases:
    def test_a_lease_lives(self, server: Any, name: str) -> None:
        granted = server.post("/v1/lock/acquire", {"key": name, "owner": "ada", "ttl_seconds": 5}).json()
        held = server.post("/v1/lock/acquire", {"key": name, "owner": "bob"})
        assert (held.status, held.code) == (409, "lease_held")
        proof = {each: granted[each] for each in ("key", "lease_id", "fencing_token")}
        assert (
            server.post("/v1/lock/keepalive", {**proof, "ttl_seconds": 60}).json()["expires_ms"] > granted["expires_ms"]
        )
        assert server.post("/v1/lock/check", {"lease": proof}).json() == {"durability": "critical"}
        assert server.post("/v1/lock/describe", {"key": name}).json()["held"] is True
        assert name in [each["key"] for each in server.get("/v1/locks?limit=1000").json()["leases"]]
        stale = server.post("/v1/lock/keepalive", {**proof, "fencing_token": 0})
        assert (stale.status, stale.code) == (403, "fencing_mismatch")
        assert server.post("/v1/lock/release", proof).json() == {"released": True}
        assert server.post("/v1/lock/check", proof).code == "lease_expired"
        assert server.post("/v1/lock/describe", {"key": name}).json()["held"] is False

    @pytest.mark.parametrize(
        ("path", "body", "code"),
        [
            ("acquire", {"key": "k"}, "missing_owner"),
            ("acquire", {"key": "a//b", "owner": "ada"}, "invalid_name"),
            ("acquire", {"key": "k", "owner": "ada", "ttl_seconds": 0}, "invalid_argument"),
            ("acquire", {"key": "k", "owner": "ada", "ttl": 3}, "invalid_body"),
            ("keepalive", {"key": "k"}, "missing_fields"),
            ("release", {"lease": {"key": "k", "lease_id": "x", "fence": 3}}, "invalid_body"),
            ("describe", {}, "missing_fields"),
        ],
    )
    def test_what_is_wrong_has_its_code(self, server: Any, path: str, body: Any, code: str) -> None:
        answer = server.post(f"/v1/lock/{path}", body)
        assert (answer.status, answer.code) == (400, code)


class TestStates:
    def test_a_document_is_written_by_requests(self, server: Any, name: str) -> None:
        etag = server.post("/v1/state/update", {"key": name, "value": {"a": [1, None]}}).json()["etag"]
        found = server.post("/v1/state/get", {"key": name}).json()["state"]
        assert (found["value"], found["etag"], found["version"]) == ({"a": [1, None]}, etag, 1)
        lost = server.post("/v1/state/update", {"key": name, "value": 2, "if_match": "other"})
        assert (lost.status, lost.code) == (409, "cas_mismatch")
        assert lost.json()["current_etag"] == etag
        assert server.post("/v1/state/remove", {"key": name, "if_match": etag}).json() == {"removed": True}
        assert server.post("/v1/state/get", {"key": name}).json() == {"state": None}

    def test_a_document_is_a_resource_with_an_etag(self, server: Any, name: str) -> None:
        path = f"/v1/state/{name}/with/slashes"
        assert server.get(path).status == 404
        made = server.ask("PUT", path, {"n": 1}, If_None_Match="*")
        assert made.status == 201
        again = server.ask("PUT", path, {"n": 1}, If_None_Match="*")
        assert (again.status, again.code) == (412, "cas_mismatch")
        got = server.get(path)
        assert (got.json(), got.headers["etag"]) == ({"n": 1}, made.headers["etag"])
        assert server.get(path, If_None_Match=got.headers["etag"]).status == 304
        assert server.ask("HEAD", path).headers["etag"] == got.headers["etag"]
        changed = server.ask("PUT", path, [2], If_Match=got.headers["etag"])
        assert changed.status == 200
        assert server.ask("PUT", path, [3], If_Match=got.headers["etag"]).status == 412
        assert server.ask("DELETE", path, If_Match=got.headers["etag"]).status == 412
        assert server.ask("DELETE", path, If_Match=changed.headers["etag"]).json() == {"removed": True}

    def test_a_lease_keeps_others_from_writing(self, server: Any, name: str) -> None:
        granted = server.post("/v1/lock/acquire", {"key": name, "owner": "ada"}).json()
        refused = server.ask("PUT", f"/v1/state/{name}", 1)
        assert (refused.status, refused.code) == (403, "lease_required")
        proof = {"X-Lease-Id": granted["lease_id"], "X-Fencing-Token": str(granted["fencing_token"])}
        assert server.ask("PUT", f"/v1/state/{name}", 1, **proof).status == 201
        assert (
            server.ask("DELETE", f"/v1/state/{name}", **(proof | {"X-Fencing-Token": "0"})).code == "fencing_mismatch"
        )
        assert server.ask("PUT", f"/v1/state/{name}", 1, X_Lease_Id="x").code == "invalid_argument"

    def test_universes_are_apart_however_they_are_named(self, server: Any, name: str) -> None:
        server.ask("PUT", f"/v1/state/{name}", "there", X_Holdfast_Universe="Elsewhere")
        assert server.get(f"/v1/state/{name}").status == 404
        assert server.get(f"/v1/state/{name}?universe=elsewhere").json() == "there"
        found = server.post("/v1/state/get", {"key": name, "universe": "elsewhere"}).json()
        assert found["state"]["value"] == "there"

    @pytest.mark.parametrize("key", ["a%20b", "a%2F%2Fb", "%00", "a/%0A", "%E2%98%83", "a" * 300, "a%3Fb%3D%27"])
    def test_a_key_is_a_key_whatever_it_tries(self, server: Any, key: str) -> None:
        assert server.get(f"/v1/state/{key}").code == "invalid_name"
        assert server.ask("PUT", f"/v1/state/{key}", 1).code == "invalid_name"

    def test_dots_are_part_of_a_name_and_lead_nowhere(self, server: Any) -> None:
        assert server.ask("PUT", "/v1/state/..%2f..%2fetc/passwd", 1).status == 201
        assert server.get("/v1/state/../../etc/passwd").json() == 1
        assert server.get("/v1/state/etc/passwd").status == 404
        assert server.get("/v1/blobs/..%2f..%2fetc%2fpasswd").status == 404
        assert server.get("/v1/blobs/..").code == "invalid_argument"

    def test_etags_have_a_form(self, server: Any, name: str) -> None:
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_Match="bare").code == "invalid_etag"
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_Match='W/"weak"').code == "invalid_etag"
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_None_Match='"x"').code == "invalid_etag"


class TestEntities:
    def test_an_entity_lives(self, server: Any, name: str) -> None:
        path = f"/v1/entities/task/{name}"
        assert server.get(path).status == 404
        assert server.ask("PUT", path, {"fields": {"status": "new"}}).status == 428
        made = server.ask("PUT", path, {"fields": {"status": "new"}}, If_None_Match="*")
        assert (made.status, made.headers["etag"]) == (200, '"1"')
        patched = server.ask("PATCH", path, {"fields": {"title": {"en": "x"}}}, If_Match='"1"')
        assert patched.json()["versions"] == [2]
        lost = server.ask("PATCH", path, {"fields": {"title": "y"}}, If_Match='"1"')
        assert (lost.status, lost.code) == (412, "version_conflict")
        assert lost.json()["current_version"] == 2
        got = server.get(path)
        assert got.json()["fields"] == {"status": "new", "title": {"en": "x"}}
        assert server.get(path, If_None_Match='"2"').status == 304
        assert server.ask("PATCH", path, {"removed": ["title"]}).json()["versions"] == [3]
        assert [each["version"] for each in server.get(f"{path}/history?after=1").json()["changes"]] == [2, 3]
        assert name in [each["id"] for each in server.get("/v1/entities/task?limit=1000").json()["entities"]]
        assert server.ask("DELETE", path, If_Match='"9"').status == 412
        assert server.ask("DELETE", path).status == 200
        assert server.get(path).status == 404

    def test_a_transaction_changes_several_or_none(self, server: Any, name: str) -> None:
        writes = [{"kind": "task", "id": f"{name}-{n}", "fields": {"status": n}} for n in range(2)]
        assert server.post("/v1/entities/transaction", {"writes": writes}).json()["versions"] == [1, 1]
        seen = [{"kind": "task", "id": f"{name}-0", "version": 5}]
        refused = server.post("/v1/entities/transaction", {"writes": writes, "seen": seen})
        assert (refused.status, refused.code) == (409, "version_conflict")

    @pytest.mark.parametrize(
        ("method", "path", "body", "code"),
        [
            ("PUT", "/v1/entities/task/x", {"fields": [1], "expected_version": 0}, "invalid_body"),
            ("PUT", "/v1/entities/task/x", {"expected_version": 0}, "missing_fields"),
            ("PATCH", "/v1/entities/task/x", {"feilds": {}}, "invalid_body"),
            ("PATCH", "/v1/entities/task/x%20y", {"fields": {"a": 1}}, "invalid_name"),
            ("POST", "/v1/entities/transaction", {"writes": [{"kind": "a", "id": "b", "field": {}}]}, "invalid_body"),
            ("GET", "/v1/entities/task?limit=-1", None, "invalid_argument"),
        ],
    )
    def test_what_is_wrong_has_its_code(self, server: Any, method: str, path: str, body: Any, code: str) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestWorlds:
    def test_a_world_lives(self, server: Any, name: str) -> None:
        path = f"/v1/worlds/{name}"
        assert server.get(path).code == "world_not_found"
        assert server.ask("PUT", path).status == 201
        assert server.post("/v1/worlds", {"world": name}).code == "world_exists"
        assert name in server.get("/v1/worlds?limit=1000").json()["names"]
        entries = [{"n": n, "deep": [None, 1.5, "é"]} for n in range(3)]
        assert server.post(f"{path}/entries", {"entries": entries, "expected_head": 0}).json() == {"height": 0}
        late = server.post(f"{path}/entries", {"entries": [1], "expected_head": 0})
        assert (late.status, late.code, late.json()["current_head"]) == (409, "head_advanced", 3)
        assert [each["value"] for each in server.get(f"{path}/entries?start=1").json()["records"]] == entries[1:]
        item = {"type": "domain_event", "schema": "s", "payload": base64.b64encode(b"hi").decode()}
        assert server.post(f"{path}/inbox", {"item": item}).status == 201
        assert server.get(f"{path}/inbox").json()["items"][0][1]["type"] == "domain_event"
        assert server.post(f"{path}/drain", {"limit": 5}).json() == {"heights": [3]}
        assert server.get(f"{path}/inbox/cursor").json()["sequence"] is not None
        assert server.get(path).json()["head"] == 4
        snapshot = server.post(f"{path}/snapshots", {"data": {"sum": 3}, "height": 3}).json()
        assert len(server.get(f"{path}/snapshots").json()["snapshots"]) == 2
        assert server.get(f"/v1/blobs/{snapshot['snapshot_ref']}").status == 200
        assert server.get(f"{path}/baseline").json()["height"] == 0
        assert server.get(f"{path}/segments").json() == {"segments": []}
        assert server.post(f"{path}/compact").json() == {"segments": 0, "records": 0}
        head = server.get(path).json()["head"]
        manifest = server.post(f"{path}/manifest", {"manifest_hash": "0" * 64, "expected_head": head})
        assert manifest.status in (201, 404), manifest
        assert server.post(f"{path}/fork", {"target": f"{name}-fork", "height": 2}).json()["head"] >= 2
        assert server.post(f"{path}/pause").json()["state"] == "paused"
        assert server.post(f"{path}/entries", {"entries": [1], "expected_head": 5}).code == "world_not_active"
        assert server.post(f"{path}/resume").json()["state"] == "active"
        assert server.ask("DELETE", path).status == 409
        assert server.post(f"{path}/archive").json()["state"] == "archived"
        assert server.ask("DELETE", path).json()["state"] == "deleted"

    @pytest.mark.parametrize(
        ("method", "path", "body", "code"),
        [
            ("POST", "/v1/worlds", {"world": "../up"}, "invalid_name"),
            ("POST", "/v1/worlds", {"name": "w"}, "invalid_body"),
            ("POST", "/v1/worlds/w/entries", {"entries": {"a": 1}, "expected_head": 0}, "invalid_body"),
            ("POST", "/v1/worlds/w/entries", {"entries": [1]}, "missing_fields"),
            ("POST", "/v1/worlds/w/entries", {"entries": [1], "expected_head": 0, "world": "w"}, "invalid_body"),
            ("POST", "/v1/worlds/w/inbox", {"item": {"type": "rumour"}}, "invalid_body"),
            ("POST", "/v1/worlds/w/inbox", {"item": {"schema": "s"}}, "missing_fields"),
            ("POST", "/v1/worlds/w/inbox", {"item": {"type": "control", "command": "c", "x": 1}}, "invalid_body"),
            ("POST", "/v1/worlds/w/snapshots", {"height": 0}, "missing_fields"),
            ("POST", "/v1/worlds/w/fork", {"target": "t"}, "missing_fields"),
            ("GET", "/v1/worlds/w/entries?start=x", None, "invalid_query"),
        ],
    )
    def test_what_is_wrong_has_its_code(self, server: Any, method: str, path: str, body: Any, code: str) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestActivity:
    def test_records_are_logged_and_read(self, server: Any, name: str) -> None:
        body = {"session": name, "records": [{"n": 1}, {"n": 2}]}
        logged = server.post("/v1/activity", body)
        assert (logged.status, logged.json()) == (202, {"durability": "best_effort"})
        assert server.post("/v1/activity/end", {"session": name}).status == 200
        records = server.get(f"/v1/activity?session={name}").json()["records"]
        assert [each["record"]["n"] for each in records] == [1, 2]
        assert server.get("/v1/activity/files").json()["files"]

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ({"session": "s", "records": [1]}, "invalid_value"),
            ({"session": "s", "records": {"a": 1}}, "invalid_body"),
            ({"session": "../s", "records": [{}]}, "invalid_name"),
            ({"records": [{}]}, "missing_fields"),
        ],
    )
    def test_what_is_wrong_has_its_code(self, server: Any, body: Any, code: str) -> None:
        answer = server.post("/v1/activity", body)
        assert (answer.status, answer.code) == (400, code)

    def test_a_place_that_is_none_is_refused(self, server: Any) -> None:
        assert server.get("/v1/activity?after=nowhere").code == "invalid_argument"


class TestAtomic:
    def test_a_list_is_committed_as_one(self, server: Any, name: str) -> None:
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
    def test_what_is_wrong_has_its_code(self, server: Any, body: Any, code: str) -> None:
        answer = server.post("/v1/atomic", body)
        assert (answer.status, answer.code) == (400, code)


class TestBlobs:
    DATA = hashlib.shake_256(b"blob").digest(3 * MEGABYTE + 17)

    @pytest.fixture
    def path(self, server: Any) -> str:
        answer = server.post("/v1/blobs", self.DATA)
        assert answer.status == 201
        assert answer.json() == {"hash": hashlib.sha256(self.DATA).hexdigest(), "size": len(self.DATA)}
        return str(answer.headers["location"])

    def test_a_blob_comes_back_whole(self, server: Any, path: str) -> None:
        answer = server.get(path)
        assert answer.body == self.DATA
        assert answer.headers["etag"] == f'"{path.rpartition("/")[2]}"'
        assert server.get(path, If_None_Match=answer.headers["etag"]).status == 304
        head = server.ask("HEAD", path)
        assert (head.status, head.headers["content-length"], head.body) == (200, str(len(self.DATA)), b"")

    @pytest.mark.parametrize(
        ("wanted", "begin", "end"),
        [
            ("bytes=0-0", 0, 1),
            ("bytes=10-19", 10, 20),
            (f"bytes={MEGABYTE - 1}-{MEGABYTE}", MEGABYTE - 1, MEGABYTE + 1),
            (f"bytes={2 * MEGABYTE}-", 2 * MEGABYTE, len(DATA)),
            ("bytes=-7", len(DATA) - 7, len(DATA)),
            (f"bytes=5-{10**12}", 5, len(DATA)),
        ],
    )
    def test_a_range_comes_back_alone(self, server: Any, path: str, wanted: str, begin: int, end: int) -> None:
        answer = server.get(path, Range=wanted)
        assert answer.status == 206
        assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(self.DATA)}"
        assert answer.body == self.DATA[begin:end]

    @pytest.mark.parametrize("wanted", ["bytes=9-3", "lines=1-2", "bytes=0-1,5-6", "bytes=-", "bytes=a-b"])
    def test_a_range_that_says_nothing_means_everything(self, server: Any, path: str, wanted: str) -> None:
        assert server.get(path, Range=wanted).status == 200

    def test_a_range_behind_the_end_is_refused(self, server: Any, path: str) -> None:
        answer = server.get(path, Range=f"bytes={len(self.DATA)}-")
        assert (answer.status, answer.code) == (416, "range_not_satisfiable")
        assert answer.headers["content-range"] == f"bytes */{len(self.DATA)}"

    def test_a_range_of_another_version_is_everything(self, server: Any, path: str) -> None:
        assert server.get(path, Range="bytes=0-1", If_Range='"other"').status == 200
        assert server.get(path, Range="bytes=0-1", If_Range=f'"{path.rpartition("/")[2]}"').status == 206

    def test_whoever_has_it_gets_no_range_either(self, server: Any, path: str) -> None:
        etag = f'"{path.rpartition("/")[2]}"'
        answer = server.get(path, Range="bytes=0-1", If_None_Match=etag)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)

    def test_of_a_large_blob_only_the_range_is_read(self, server: Any) -> None:
        size = 64 * MEGABYTE
        path = server.post("/v1/blobs", bytes(size)).headers["location"]
        before = server.read_bytes()
        assert server.get(path, Range=f"bytes={size - 5}-").body == bytes(5)
        assert server.get(path, Range="bytes=0-4").body == bytes(5)
        assert server.read_bytes() - before < 8 * MEGABYTE
        assert len(server.get(path).body) == size
        assert server.read_bytes() - before > size  # The measure measures.

    def test_chunks_of_unknown_number_are_taken(self, server: Any) -> None:
        connection = server.connect()
        connection.request("PUT", "/v1/blobs", iter([b"ab", b"cd"]), encode_chunked=True)
        response = connection.getresponse()
        assert json.loads(response.read())["hash"] == hashlib.sha256(b"abcd").hexdigest()
        connection.close()

    def test_what_is_not_there_is_not_found(self, server: Any) -> None:
        assert server.get(f"/v1/blobs/{'0' * 64}").code == "blob_not_found"
        assert server.get("/v1/blobs/short").code == "invalid_argument"
        assert server.ask("HEAD", f"/v1/blobs/{'0' * 64}").status == 404


class TestIdempotency:
    @pytest.mark.parametrize("as_header", [True, False])
    def test_the_same_key_twice_is_one_message(self, server: Any, name: str, as_header: bool) -> None:
        body: dict[str, Any] = {"queue": name, "payload": 1}
        said = {"Idempotency-Key": "k-1"} if as_header else {}
        if not as_header:
            body["idempotency_key"] = "k-1"
        first, second = (server.post("/v1/queue/enqueue", body, **said).json() for _ in range(2))
        assert first["message_id"] == second["message_id"]
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 1

    def test_a_write_is_answered_alike(self, server: Any, name: str) -> None:
        said = {"Idempotency-Key": "once"}
        server.post("/v1/worlds", {"world": name})
        body = {"entries": [1], "expected_head": 0}
        for _ in range(2):
            assert server.post(f"/v1/worlds/{name}/entries", body, **said).json() == {"height": 0}
        assert server.post(f"/v1/worlds/{name}/entries", body).code == "head_advanced"
        first, second = (server.post("/v1/state/update", {"key": name, "value": 1}, **said).json() for _ in range(2))
        assert first == second

    def test_another_body_with_the_same_key_is_refused(self, server: Any, name: str) -> None:
        """A draft of the IETF says 422 to this: to answer alike would tell of a write that never was."""
        said = {"Idempotency-Key": "once"}
        first = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, **said).json()
        other = server.post("/v1/queue/enqueue", {"queue": name, "payload": 2}, **said)
        assert (other.status, other.code) == (422, "idempotency_key_reused")
        again = server.post("/v1/queue/enqueue", {"payload": 1, "queue": name}, X_Correlation_Id="another", **said)
        assert again.json() == first
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 1
        for value, code in ((1, 201), (1, 201), (2, 422)):
            assert server.ask("PUT", f"/v1/state/{name}", value, **said).status == code

    def test_one_key_for_two_queues_is_two_messages(self, server: Any, name: str) -> None:
        for queue in (name, f"{name}-b"):
            server.post("/v1/queue/enqueue", {"queue": queue, "payload": 1}, Idempotency_Key="same")
            assert server.get(f"/v1/queues/{queue}").json()["put_total"] == 1

    def test_many_at_once_are_one(self, server: Any, name: str) -> None:
        body = {"queue": name, "payload": 1}
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(server.post, "/v1/queue/enqueue", body, Idempotency_Key="race") for _ in range(16)]
            assert len({each.result().json()["message_id"] for each in sent}) == 1

    def test_a_dequeue_is_told_its_leases_again(self, server: Any, name: str) -> None:
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

    def test_a_dequeue_that_waits_is_told_its_leases_again(self, server: Any, name: str) -> None:
        body = {"queue": name, "owner": "ada", "wait_seconds": 20}
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(server.post, "/v1/queue/dequeue", body, Idempotency_Key="d") for _ in range(2)]
            deadline = time.monotonic() + 60
            while server.get(f"/v1/queues/{name}").json()["waiting_consumers"] < 2:
                assert time.monotonic() < deadline, "they never waited"
            server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
            first, second = (each.result(30).json()["messages"] for each in waiting)
        assert first == second
        assert server.post("/v1/queue/ack", lease(first[0])).status == 200

    def test_a_subscription_has_no_key(self, server: Any, name: str) -> None:
        """It leases again and again: under one key it would get its first messages for ever."""
        for payload in range(3):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": payload})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1, "credit": 4}
        lines = server.post("/v1/queue/subscribe", body, Idempotency_Key="s").body.splitlines()
        found = [json.loads(line) for line in lines]
        assert [each["data"]["payload"] for each in found if each["event"] == "message"] == [0, 1, 2]

    def test_a_lock_that_was_acquired_is_the_same_lock(self, server: Any, name: str) -> None:
        body = {"key": name, "owner": "ada", "ttl_seconds": 60}
        first, second = (server.post("/v1/lock/acquire", body, Idempotency_Key="l").json() for _ in range(2))
        assert first == second
        assert server.post("/v1/lock/acquire", body).json()["fencing_token"] == 2
        assert server.post("/v1/lock/acquire", body, Idempotency_Key="l").code == "lease_expired"

    def test_entities_are_written_once(self, server: Any, name: str) -> None:
        path, said = f"/v1/entities/task/{name}", {"Idempotency-Key": "e"}
        for _ in range(2):
            put = server.ask("PUT", path, {"fields": {"n": 1}}, If_None_Match="*", **said)
            assert put.json()["versions"] == [1]
        for _ in range(2):
            assert server.ask("PATCH", path, {"fields": {"n": 2}}, **said).json()["versions"] == [2]
        body = {"writes": [{"kind": "task", "id": name, "fields": {"n": 3}}]}
        for _ in range(2):
            assert server.post("/v1/entities/transaction", body, Idempotency_Key=f"t-{name}").json()["versions"] == [3]
        for _ in range(2):
            assert server.ask("DELETE", path, **said).json()["versions"] == [4]
        assert len(server.get(path + "/history").json()["changes"]) == 4
        assert server.ask("PATCH", path, {"fields": {"n": 5}}, **said).code == "idempotency_key_reused"

    def test_a_list_is_committed_once_and_answered_alike(self, server: Any, name: str) -> None:
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

    def test_what_is_many_commits_is_done_once(self, server: Any, name: str) -> None:
        for _ in range(2):
            server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
            message = server.post("/v1/queue/dequeue", {"queue": name, "owner": "ada"}).json()["messages"][0]
            server.post("/v1/queue/reject", lease(message))
        said = {"Idempotency-Key": "m"}
        for _ in range(2):
            assert server.post(f"/v1/queues/{name}/redrive", {"limit": 1}, **said).json() == {"count": 1}
        for _ in range(2):
            assert server.post(f"/v1/queues/{name}/purge", **said).json() == {"count": 1}
        assert server.get(f"/v1/queues/{name}").json()["dead"] == 1
        server.post("/v1/worlds", {"world": name})
        server.post(f"/v1/worlds/{name}/entries", {"entries": [1], "expected_head": 0})
        fork, snapshot = {"target": f"{name}-copy", "height": 1}, {"data": {"n": 1}, "height": 1}
        for path, body in (("fork", fork), ("snapshots", snapshot)):
            first, second = (server.post(f"/v1/worlds/{name}/{path}", body, **said) for _ in range(2))
            assert (first.status, first.json()) == (201, second.json())
        server.post(f"/v1/worlds/{name}/archive")
        assert server.post(f"/v1/worlds/{name}/snapshots", snapshot, **said).json() == first.json()

    @pytest.mark.parametrize("op", ["queues.receive", "leases.acquire", "queues.put"])
    def test_any_request_has_a_key(self, server: Any, name: str, op: str) -> None:
        body = {
            "queues.receive": {"queue": name, "owner": "ada"},
            "leases.acquire": {"key": name, "owner": "ada"},
            "queues.put": {"queue": name, "messages": [{"payload": 1}]},
        }[op]
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        first, second = (server.post("/v1/call", {"op": op, **body}, Idempotency_Key="c").json() for _ in range(2))
        assert first == second

    def test_a_key_that_is_none_is_refused(self, server: Any, name: str) -> None:
        body = {"queue": name, "payload": 1}
        assert server.post("/v1/queue/enqueue", body, Idempotency_Key="").code == "invalid_idempotency_key"
        assert server.post("/v1/queue/enqueue", body, Idempotency_Key="x" * 256).code == "invalid_idempotency_key"


class TestEdge:
    def test_a_correlation_id_travels_with_the_message(self, server: Any, name: str) -> None:
        put = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, X_Correlation_Id="req 7/é"[:5])
        assert put.headers["x-correlation-id"] == "req 7"
        answer = server.post("/v1/queue/dequeue", {"queue": name, "owner": "ada"}, X_Correlation_Id="another")
        assert answer.headers["x-correlation-id"] == "req 7"
        message = answer.json()["messages"][0]
        assert message["correlation_id"] == "req 7"
        assert server.post("/v1/queue/ack", lease(message)).json()["correlation_id"] == "req 7"

    @pytest.mark.parametrize("given", ["", "x" * 129, "tab\there", "\xe9"])
    def test_a_correlation_id_that_cannot_travel_is_replaced(self, server: Any, given: str) -> None:
        answer = server.get("/v1/queues", X_Correlation_Id=given)
        assert answer.headers["x-correlation-id"] not in ("", given)

    def test_an_errors_correlation_id_is_the_callers(self, server: Any) -> None:
        answer = server.get("/v1/worlds/none", X_Correlation_Id="mine")
        assert (answer.code, answer.json()["correlation_id"]) == ("world_not_found", "mine")

    def test_a_trace_is_given_back(self, server: Any) -> None:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        assert server.get("/v1/queues", traceparent=trace).headers["traceparent"] == trace
        assert server.get("/v1/queues", traceparent="00-no").headers["traceparent"] is None

    def test_paths_and_methods_that_are_none(self, server: Any) -> None:
        assert server.get("/v1/nothing").code == "not_found"
        assert server.get("/v1/worlds/").status == 404
        answer = server.ask("PATCH", "/v1/worlds")
        assert (answer.status, answer.code) == (405, "method_not_allowed")
        assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", ""])
    def test_other_media_types_are_refused(self, server: Any, kind: str) -> None:
        said = {"content_type": kind} if kind else {}
        for path in ("/v1/queue/enqueue", "/v1/worlds", "/v1/call", "/v1/state/update"):
            answer = server.post(path, b'{"queue":"q"}', **said)
            assert (answer.status, answer.code) == (415, "invalid_content_type")

    def test_answers_that_nobody_wants_are_not_made(self, server: Any, name: str) -> None:
        answer = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}, accept="text/html, image/*")
        assert (answer.status, answer.code) == (406, "not_acceptable")
        assert server.get(f"/v1/queues/{name}").json()["put_total"] == 0
        assert server.get("/v1/queues", accept="text/html, application/*;q=0.1").status == 200
        assert server.get("/v1/queues", accept="application/json;q=0").status == 406

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"3", b'{"queue": 1e999}'])
    def test_bodies_that_are_no_json_are_refused(self, server: Any, body: bytes) -> None:
        answer = server.post("/v1/queue/enqueue", body, content_type="application/json")
        assert answer.status == 400

    def test_pages_of_other_sites_may_not_call(self, server: Any) -> None:
        assert server.post("/v1/queues/q/purge", Origin="https://evil.example").code == "foreign_origin"
        assert server.post("/v1/queues/q/purge", Origin=server.url).status == 200

    def test_oversized_bodies_are_refused_before_they_are_read(self, server: Any) -> None:
        with server.raw() as connection:
            connection.sendall(
                b"POST /v1/queue/enqueue HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9000000\r\n\r\n{"
            )
            head = read_all(connection)
        assert head.startswith(b"HTTP/1.1 413")
        assert b"body_too_large" in head
        assert b"connection: close" in head.lower()


class TestStreamDoor:
    """`/v1/stream`, as docs/protocol.md tells it to somebody who has only that page and a MessagePack library."""

    @contextmanager
    def open(self, server: Any, **headers: str) -> Iterator[Any]:
        with connect(f"ws://127.0.0.1:{server.port}/v1/stream", additional_headers=headers, proxy=None) as socket:
            socket.send(msgspec.msgpack.encode([1, "session"]))
            assert msgspec.msgpack.decode(socket.recv())[:2] == [1, "session"]
            yield socket

    def call(self, socket: Any, *calls: Any) -> list[Any]:
        socket.send(msgspec.msgpack.encode(calls))
        replies: list[Any] = []
        while len(replies) < len(calls):
            replies += msgspec.msgpack.decode(socket.recv(5))
        return sorted(replies)

    def test_calls_are_answered_by_number(self, server: Any, name: str) -> None:
        with self.open(server) as socket:
            put = {"op": "queues.put", "queue": name, "messages": [{"payload": b"hi"}]}
            wrong = {"op": "worlds.describe", "world": "nobody"}
            took = {"op": "queues.receive", "queue": name, "owner": "ada", "wait_seconds": 5}
            replies = self.call(socket, [0, put], [1, wrong], [2, took])
            assert replies[0][1]["receipts"][0]["durability"] == "critical"
            assert replies[1][2]["code"] == "world_not_found"
            assert replies[2][1]["messages"][0]["payload"] == b"hi"

    def test_a_call_that_is_sent_again_happens_once(self, server: Any, name: str) -> None:
        put = {"op": "queues.put", "queue": name, "messages": [{"payload": b"hi"}]}
        with self.open(server) as socket:
            [first] = self.call(socket, [0, put, f"key-{name}", False])
        with self.open(server) as socket:
            [second] = self.call(socket, [0, put, f"key-{name}", True])
        assert first[1] == second[1]

    @pytest.mark.parametrize(
        "frame", [[[0, {"op": "nothing"}]], [[0, {"op": "queues.list", "x": 1}]], ["0"], {"a": 1}, "text"], ids=range(5)
    )
    def test_a_frame_that_is_none_ends_the_connection(self, server: Any, frame: Any) -> None:
        with self.open(server) as socket, pytest.raises(ConnectionClosed) as closed:
            socket.send(frame if isinstance(frame, str) else msgspec.msgpack.encode(frame))
            socket.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1002

    def test_pages_of_other_sites_may_not_open_one(self, server: Any, strict: Any) -> None:
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
    ("POST", "/v1/queue/ack", {"queue": "h", "message_id": "0" * 32, "lease_id": "a", "fencing_token": -5}),
    ("POST", "/v1/queue/ack", {"queue": "h", "message_id": "0" * 32, "lease_id": "a", "fencing_token": 1 << 64}),
    ("POST", "/v1/queue/dequeue", {"queue": "h", "owner": "x" * 1_000, "wait_seconds": -1}),
    ("POST", "/v1/queue/dequeue", {"queue": "h", "owner": "x", "visibility_timeout_seconds": 0}),
    ("POST", "/v1/lock/acquire", {"key": "h", "owner": "x", "ttl_seconds": 1e308}),
    ("POST", "/v1/lock/keepalive", {"key": "h", "lease_id": "x", "fencing_token": 1 << 70}),
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
def test_hostile_input_is_the_callers_fault(server: Any, method: str, path: str, body: Any) -> None:
    answer = server.ask(method, path, body)
    assert 400 <= answer.status < 500, answer
    assert answer.code


class TestStrict:
    def test_without_a_token_one_is_asked_for(self, strict: Any) -> None:
        answer = strict.get("/v1/queues")
        assert (answer.status, answer.code) == (401, "not_allowed")
        assert answer.headers["www-authenticate"].startswith("Bearer")

    def test_a_token_that_does_not_allow_it(self, strict: Any) -> None:
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

    def test_tokens_do_not_share_idempotency_keys(self, strict: Any, name: str) -> None:
        said = {"Idempotency-Key": "k", "Authorization": "Bearer all"}
        assert strict.post("/v1/state/update", {"key": name, "value": 1}, **said).status == 200
        said["Authorization"] = "Bearer reader"
        assert strict.post("/v1/state/update", {"key": name, "value": 1}, **said).status == 403

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/v1/queue/enqueue", "application/json"),
            ("/v1/queue/enqueue", "multipart/form-data; boundary=b0"),
            ("/v1/blobs", "application/octet-stream"),
        ],
    )
    def test_a_slow_body_is_given_up(self, strict: Any, path: str, kind: str) -> None:
        with strict.raw() as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer all\r\nContent-Type: {kind}\r\n"
                "Content-Length: 1000\r\n\r\n--b".encode()
            )
            head = read_all(connection)
        assert head.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in head

    def test_a_body_that_trickles_is_given_up(self, strict: Any) -> None:
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
    def test_a_stream_without_a_length_has_an_end(self, strict: Any, path: str) -> None:
        connection = strict.connect()
        said = {"Authorization": "Bearer all", "Content-Type": "application/json"}
        try:
            connection.request("POST", path, (bytes(65_536) for _ in range(64)), said, encode_chunked=True)
            response = connection.getresponse()
            assert response.status == 413
            assert json.loads(response.read())["code"] == "body_too_large"
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            pass  # The server hung up while the body was on its way, which it may.
        finally:
            connection.close()
        assert strict.get("/v1/queues", Authorization="Bearer all").status == 200


def test_a_server_that_drains_lets_those_who_wait_go() -> None:
    with serving(heartbeat_seconds=0.2, watch_seconds=0.05) as server, ThreadPoolExecutor(2) as pool:
        lines = Lines(server, "POST", "/v1/queue/subscribe", {"queue": "q", "owner": "ada"})
        watch = Lines(server, "GET", "/v1/queue/watch?queue=q", accept="application/x-ndjson")
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
