"""Messages over HTTP: enqueue, dequeue, settle, payloads, subscriptions and watches."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.end_to_end.http_helpers import EventLines, lease, multipart, parts_of, receive, server_ms
from tests.support.http_server import Server, serving
from tests.support.waiting import eventually

MEGABYTE = 1_048_576
LEASE = f"{'0' * 32}-1-{'0' * 34}"
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}", heartbeat_seconds=0.5, watch_seconds=0.05) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A unique name."""
    return f"test-{next(_names)}"


OLD_NAMES = {"namespace", "visibility_timeout_seconds", "fencing_token"}


def names_in(value: Any) -> set[str]:
    """The names of all fields in an answer."""
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def until_waiting(server: Server, queue: str, count: int) -> None:
    """Wait until the queue has this many waiting consumers."""
    eventually(lambda: server.post("/v1/queue/stats", {"queue": queue}).json()["waiting_consumers"] == count)


class TestMessages:
    def test_a_message_is_delivered_and_can_be_acknowledged_twice(self, server: Server, name: str) -> None:
        put = {"queue": name, "payload": {"n": 1}, "attributes": {"kind": "test"}, "visibility_seconds": 60}
        receipt = server.post("/v1/queue/enqueue", put).json()
        before_ms = server_ms(server)
        message = receive(server, name)
        after_ms = server_ms(server)
        assert message["message_id"] == receipt["message_id"]
        assert message["payload"] == {"n": 1}
        assert message["attributes"] == {"kind": "test"}
        assert message["attempts"] == 1
        assert message["failure_attempts"] == 0
        assert message["visibility_seconds"] == 60
        assert message["universe"] == "main"
        assert message["meta_etag"] == message["lease_id"]
        assert before_ms <= round(message["lease_expires_at_unix"] * 1_000) - 60_000 <= after_ms
        for _ in range(2):
            assert server.post("/v1/queue/ack", lease(message)).json()["settled"] is True
        assert server.post("/v1/queue/stats", {"queue": name}).json()["acked_total"] == 1

    def test_binary_payloads_are_base64(self, server: Server, name: str) -> None:
        put = {"queue": name, "payload_base64": base64.b64encode(b"\x00\xff").decode()}
        assert server.post("/v1/queue/enqueue", put).json()["payload_bytes"] == 2
        assert base64.b64decode(receive(server, name)["payload_base64"]) == b"\x00\xff"

    def test_a_batch_has_a_result_for_each_message(self, server: Server, name: str) -> None:
        put = {"queue": name, "messages": [{"payload": n, "priority": 9 - n} for n in range(3)]}
        assert len(server.post("/v1/queue/enqueue", put).json()["messages"]) == 3
        body = {"queue": name, "owner": "ada", "page_size": 64}
        messages = server.post("/v1/queue/dequeue", body).json()["messages"]
        assert [message["payload"] for message in messages] == [0, 1, 2]
        shown = [{"message_id": each["message_id"], "lease_id": each["lease_id"]} for each in messages]
        shown[1] = {**shown[1], "fence": 77}
        settled = server.post("/v1/queue/ack", {"queue": name, "messages": shown}).json()["messages"]
        assert [each["settled"] for each in settled] == [True, False, True]
        assert settled[1]["code"] == "queue_message_lease_mismatch"

    def test_a_nack_counts_as_a_failure_unless_it_defers(self, server: Server, name: str) -> None:
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

    def test_failures_are_kept_and_retried_after_the_back_off(self, server: Server, name: str) -> None:
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

    def test_an_extension_needs_a_positive_duration(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        message = receive(server, name)
        extended = server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 300}).json()
        assert extended["lease_expires_at_unix"] > message["lease_expires_at_unix"] + 200
        assert server.post("/v1/queue/extend", {**lease(message), "extend_by_seconds": 0}).code == "invalid_argument"
        assert server.post("/v1/queue/extend", lease(message)).code == "missing_fields"

    def test_a_lease_ends_sooner_or_now(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "messages": [{"payload": 1}, {"payload": 2}]})
        first, second = receive(server, name), receive(server, name)
        path = "/v1/queue/visibility"
        sooner = server.post(path, {**lease(first), "visibility_seconds": 10}).json()
        assert sooner["lease_expires_at_unix"] < first["lease_expires_at_unix"] - 15
        assert server.post(path, lease(first)).code == "missing_fields"
        assert server.post(path, {**lease(first), "visibility_seconds": -1}).code == "invalid_argument"
        leases = [{key: each[key] for key in ("message_id", "lease_id")} for each in (first, second)]
        leases[0]["visibility_seconds"] = 60
        results = server.post(path, {"queue": name, "visibility_seconds": 0, "messages": leases}).json()["messages"]
        assert [each.get("lease_expires_at_unix") is None for each in results] == [False, True]
        again = receive(server, name)
        assert (again["payload"], again["attempts"]) == (2, 2)
        assert server.post(path, {**lease(second), "visibility_seconds": 5}).code == "queue_message_lease_mismatch"

    def test_an_expired_lease_cannot_settle_a_message(self, server: Server, name: str) -> None:
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
            ("enqueue", {"queue": "q", "payload": 1, "universe": "a", "namespace": "a"}, "invalid_body"),
            ("ack", {"queue": "q"}, "missing_fields"),
            ("ack", {"queue": "q", "message_id": "1", "lease_id": "1"}, "invalid_argument"),
            ("ack", {"queue": "q", "message_id": "1", "lease_id": LEASE, "result_blob": "0" * 64}, "blob_not_found"),
            (
                "ack",
                {"queue": "q", "message_id": "1", "lease_id": LEASE, "result": 1, "result_base64": ""},
                "invalid_argument",
            ),
            (
                "ack",
                {"queue": "q", "message_id": "1", "lease_id": LEASE, "result_content_type": "a/b"},
                "invalid_argument",
            ),
            ("enqueue", {"queue": "q", "unique_key": "u", "unique_until": "never"}, "invalid_body"),
            ("enqueue", {"queue": "q", "debounce_key": "d"}, "invalid_argument"),
            ("nack", {"queue": "q", "message_id": "1", "lease_id": "1", "intent": "shrug"}, "invalid_nack_intent"),
            ("stats", {}, "missing_queue"),
            ("subscribe", {"queue": "q"}, "missing_owner"),
            ("subscribe", {"queue": "q", "owner": "ada", "credit": 0}, "invalid_argument"),
        ],
    )
    def test_invalid_requests_have_specific_codes(self, server: Server, path: str, body: Any, code: str) -> None:
        answer = server.post(f"/v1/queue/{path}", body)
        assert answer.status in (400, 404)
        assert answer.code == code

    def test_a_waiting_dequeue_returns_when_a_message_is_put(self, server: Server, name: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            body = {"queue": name, "owner": "ada", "wait_seconds": 20}
            waiting = pool.submit(server.post, "/v1/queue/dequeue", body)
            until_waiting(server, name, 1)
            server.post("/v1/queue/enqueue", {"queue": name, "payload": "here"})
            assert waiting.result().json()["messages"][0]["payload"] == "here"

    def test_a_dequeue_of_an_empty_queue_returns_no_messages(self, server: Server, name: str) -> None:
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        assert server.post("/v1/queue/dequeue", body).json() == {"messages": []}
        assert server.post("/v1/queue/dequeue", body, accept="multipart/related").status == 204

    def test_a_consumer_that_disconnects_receives_no_message(self, server: Server, name: str) -> None:
        connection = server.connect()
        body = json.dumps({"queue": name, "owner": "gone"})
        connection.request("POST", "/v1/queue/dequeue", body, {"Content-Type": "application/json"})
        until_waiting(server, name, 1)
        connection.close()
        until_waiting(server, name, 0)
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        assert receive(server, name)["attempts"] == 1

    def test_workflow_state_is_delivered_and_removed_with_its_message(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] is None
        proof = {"X-Lease-Id": message["state_lease_id"], "X-Fence": str(message["state_fence"])}
        put = server.ask("PUT", f"/v1/state/{message['state_key']}", {"step": 2}, **proof)
        assert put.status == 200
        server.post("/v1/queue/nack", {**lease(message), "delay_seconds": 0})
        [message] = server.post("/v1/queue/dequeueWithState", body).json()["messages"]
        assert message["state"] == {"step": 2}
        server.post("/v1/queue/ack", lease(message))
        assert server.get(f"/v1/state/{message['state_key']}").status == 404


class TestRefusals:
    """A refused value is named, with its field and what to send instead."""

    @pytest.mark.parametrize(
        ("method", "path", "body", "detail"),
        [
            ("POST", "queue/enqueue", {"priority": "high"}, "priority is 'high'; give a whole number from 0 to 9"),
            ("POST", "queue/enqueue", {"attributes": {"a": 1}}, "attributes['a'] is 1; give a text"),
            ("POST", "queue/enqueue", {"payload_base64": "?"}, "payload_base64 is '?'; give a text in base64"),
            ("POST", "queue/enqueue", {"keep_result": 1}, "keep_result is 1; give true or false"),
            (
                "POST",
                "queue/enqueue",
                {"messages": [{"payload": 1}, {"ttl_seconds": "60"}]},
                "ttl_seconds of messages[1] is '60'; give a number from 0.001 to 315,360,000, or null",
            ),
            (
                "POST",
                "queue/dequeue",
                {"owner": "ada", "page_size": "4"},
                "page_size is '4'; give a whole number from 1 to 64",
            ),
            (
                "POST",
                "call",
                {"op": "queues.policy.set", "policy": {"max_attempts": "5"}},
                "max_attempts is '5'; give a whole number from 1 to 1,000",
            ),
            (
                "POST",
                "atomic",
                {"operations": [{"op": "queues.put", "queue": "q", "messages": [{"priority": 1.5}]}]},
                "priority is 1.5; give a whole number from 0 to 9",
            ),
            ("GET", "queues/q/peek?limit=x", None, "limit is 'x'; give a whole number from 1 to 10,000"),
            ("POST", "worlds/w/snapshots/x/promote", {}, "height is 'x'; give a whole number"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_the_detail_names_field_value_and_rule(
        self, server: Server, method: str, path: str, body: Any, detail: str
    ) -> None:
        given = {"queue": "q", **body} if path.startswith(("queue/", "call")) else body
        answer = server.ask(method, f"/v1/{path}", given)
        assert (answer.status, answer.json()["detail"]) == (400, detail)


class TestAliases:
    """Names of other lease-queue servers: accepted in requests of the queue endpoints, and never written."""

    def ask(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        answer = server.post(f"/v1/queue/{path}", {"queue": "aliases", "namespace": "elsewhere", **body})
        assert answer.status == 200, answer.json()
        assert not names_in(answer.json()) & OLD_NAMES
        return answer.json()

    def test_every_endpoint_accepts_them(self, server: Server) -> None:
        self.ask(server, "enqueue", {"payload": 1, "visibility_timeout_seconds": 50})
        batch = [{"payload": 2, "visibility_timeout_seconds": 51}, {"payload": 3}, {"payload": 4}, {"payload": 5}]
        self.ask(server, "enqueue", {"messages": batch})
        stats = self.ask(server, "stats", {})
        assert (stats["universe"], stats["ready"]) == ("elsewhere", 5)

        [first] = self.ask(server, "dequeue", {"owner": "ada"})["messages"]
        assert (first["universe"], first["visibility_seconds"]) == ("elsewhere", 50)
        [second] = self.ask(server, "dequeueWithState", {"owner": "ada", "visibility_timeout_seconds": 70})["messages"]
        assert second["lease_expires_at_unix"] > first["lease_expires_at_unix"] + 15
        others = self.ask(server, "dequeue", {"owner": "ada", "page_size": 3})["messages"]

        def lease_of(message: dict[str, Any]) -> dict[str, Any]:
            return {
                "message_id": message["message_id"],
                "lease_id": message["lease_id"],
                "fencing_token": message["fence"],
            }

        assert self.ask(server, "extend", {**lease_of(first), "extend_by_seconds": 90})["settled"]
        assert self.ask(server, "visibility", {**lease_of(first), "visibility_timeout_seconds": 5})["settled"]
        changes = [{**lease_of(each), "visibility_timeout_seconds": 60} for each in others]
        assert all(each["settled"] for each in self.ask(server, "visibility", {"messages": changes})["messages"])
        assert self.ask(server, "nack", lease_of(first))["settled"]
        assert self.ask(server, "reject", lease_of(second))["settled"]
        assert self.ask(server, "ack", {"messages": [lease_of(others[0])]})["messages"][0]["settled"]
        assert self.ask(server, "ack", lease_of(others[1]))["settled"]
        where = {"queue": "aliases", "namespace": "elsewhere"}
        wrong = server.post("/v1/queue/ack", {**where, **lease_of(others[2]), "fencing_token": 77})
        assert wrong.code == "queue_message_lease_mismatch"

    def test_streams_and_multipart_bodies_accept_them(self, server: Server, name: str) -> None:
        meta = {"queue": name, "namespace": "elsewhere", "visibility_timeout_seconds": 52}
        body, kind = multipart(meta, b"payload")
        receipt = server.ask("POST", "/v1/queue/enqueue", body, content_type=kind).json()
        assert (receipt["universe"], names_in(receipt) & OLD_NAMES) == ("elsewhere", set())

        watched = {"queue": name, "namespace": "elsewhere"}
        for lines in (
            EventLines(
                server, "GET", f"/v1/queue/watch?queue={name}&namespace=elsewhere", accept="application/x-ndjson"
            ),
            EventLines(server, "POST", "/v1/queue/watch", watched, accept="application/x-ndjson"),
        ):
            stats = lines.next("stats")
            assert (stats["universe"], stats["ready"]) == ("elsewhere", 1)
            lines.close()

        consumer = {"owner": "ada", "visibility_timeout_seconds": 40, "wait_seconds": -1}
        for path in ("subscribe", "subscribeWithState"):
            before_ms = server_ms(server)
            lines = EventLines(server, "POST", f"/v1/queue/{path}", watched | consumer)
            message = lines.next("message")
            assert (message["universe"], message["visibility_seconds"]) == ("elsewhere", 52)
            assert before_ms <= round(message["lease_expires_at_unix"] * 1_000) - 40_000 <= server_ms(server)
            nack = {**lease(message), "universe": "elsewhere", "intent": "defer"}
            lines.close()  # It would get the message again.
            assert server.post("/v1/queue/nack", nack).status == 200

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("stats", {"namespace": "main", "universe": "main"}),
            ("dequeue", {"owner": "ada", "visibility_timeout_seconds": 5, "visibility_seconds": 5}),
            ("enqueue", {"messages": [{"visibility_seconds": 5, "visibility_timeout_seconds": 5}]}),
            ("ack", {"message_id": "0" * 32, "lease_id": LEASE, "fencing_token": 1, "fence": 1}),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_a_field_and_its_alias_are_refused_together(self, server: Server, path: str, body: dict[str, Any]) -> None:
        answer = server.post(f"/v1/queue/{path}", {"queue": "q", **body})
        assert (answer.status, answer.code) == (400, "invalid_body")
        assert "alias" in answer.json()["detail"]

    def test_other_endpoints_do_not_know_them(self, server: Server) -> None:
        for path, body in (
            ("/v1/lease/acquire", {"key": "a", "owner": "ada", "namespace": "main"}),
            ("/v1/lease/check", {"key": "a", "lease_id": "b", "fencing_token": 1}),
        ):
            assert server.post(path, body).code in ("invalid_body", "missing_fields")


class TestPayloads:
    def test_a_large_multipart_payload_is_streamed_both_ways(self, server: Server, name: str) -> None:
        payload = hashlib.shake_256(b"seed").digest(20 * MEGABYTE)
        before = server.peak_bytes()
        body, kind = multipart({"queue": name, "payload_content_type": "video/raw"}, payload)
        receipt = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert receipt.json()["payload_bytes"] == len(payload)
        wanted = {"queue": name, "owner": "ada", "wait_seconds": -1}
        answer = server.post("/v1/queue/dequeue", wanted, accept="multipart/related")
        assert answer.headers["content-type"].startswith("multipart/related")
        (first, meta), (second, received) = parts_of(answer)
        assert (first, second) == ("meta", "payload")
        assert received == payload
        message = json.loads(meta)
        assert message["payload_content_type"] == "video/raw"
        assert message["payload_bytes"] == len(payload)
        assert server.post("/v1/queue/ack", lease(message)).status == 200
        assert server.peak_bytes() - before < 16 * MEGABYTE, "the payload was held in memory"

    def test_a_large_payload_is_a_blob_reference_in_json(self, server: Server, name: str) -> None:
        payload = bytes(2 * MEGABYTE)
        body, kind = multipart({"queue": name}, payload)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        message = receive(server, name)
        assert "payload_base64" not in message
        assert server.get(f"/v1/blobs/{message['payload_blob']}").body == payload

    def test_a_multipart_dequeue_returns_several_messages(self, server: Server, name: str) -> None:
        for text in (b'{"n":1}', b""):
            body, kind = multipart({"queue": name}, text, kind="application/json")
            assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        body, kind = multipart({"queue": name, "payload": [1]}, None)
        assert server.post("/v1/queue/enqueue", body, content_type=kind).status == 200
        wanted = {"queue": name, "owner": "ada", "page_size": 3}
        answer = server.post("/v1/queue/dequeue", wanted, accept="multipart/related, application/json;q=0.5")
        assert [body for part, body in parts_of(answer) if part == "payload"] == [b'{"n":1}', b"", b"[1]"]

    def test_a_json_payload_over_the_inline_size_is_stored_as_a_blob(self, server: Server, name: str) -> None:
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
    def test_a_malformed_multipart_body_enqueues_nothing(self, server: Server, body: bytes, kind: str) -> None:
        before = server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"]
        answer = server.post("/v1/queue/enqueue", body, content_type=kind)
        assert answer.status == 400
        assert answer.code in ("invalid_body", "invalid_content_type")
        assert server.post("/v1/queue/stats", {"queue": "q"}).json()["put_total"] == before

    def test_an_oversized_meta_part_is_refused(self, server: Server) -> None:
        body, kind = multipart({"queue": "q", "attributes": {"a": "x" * 100_000}}, b"")
        assert server.post("/v1/queue/enqueue", body, content_type=kind).code == "body_too_large"


class TestJobs:
    def test_a_message_is_found_in_every_state(self, server: Server, name: str) -> None:
        put = {"queue": name, "payload": {"n": 1}, "key": "tenant/7", "unique_key": "n-1", "keep_result": True}
        receipt = server.post("/v1/queue/enqueue", {**put, "attributes": {"kind": "test"}}).json()
        duplicate = server.post("/v1/queue/enqueue", {**put, "payload": {"n": 2}}).json()
        assert (duplicate["duplicate"], duplicate["message_id"]) == (True, receipt["message_id"])
        path = f"/v1/queues/{name}/messages/{receipt['message_id']}"
        found = server.get(path).json()
        assert (found["state"], found["payload"], found["attributes"]) == ("ready", {"n": 1}, {"kind": "test"})
        assert (found["key"], found["unique_key"], found["keep_result"]) == ("tenant/7", "n-1", True)
        before_ms = server_ms(server)
        delayed = server.ask("PATCH", path, {"priority": 9, "delay_seconds": 600}).json()
        assert (delayed["state"], delayed["priority"]) == ("delayed", 9)
        assert before_ms <= round(delayed["due_at_unix"] * 1_000) - 600_000 <= server_ms(server)
        server.ask("PATCH", path, {"delay_seconds": 0})
        message = receive(server, name)
        found = server.get(path).json()
        assert (found["state"], found["owner"], found["lease_id"]) == ("leased", "ada", message["lease_id"])
        assert found["lease_expires_at_unix"] == message["lease_expires_at_unix"]
        refused = server.ask("PATCH", path, {"priority": 1})
        assert (refused.status, refused.code) == (409, "message_leased")
        error = {"last_error": "boom", "error_type": "ValueError", "traceback": "Traceback …"}
        server.post("/v1/queue/reject", {**lease(message), **error})
        found = server.get(path).json()
        assert (found["state"], found["failures"][0]["traceback"]) == ("dead", "Traceback …")
        assert found["died_at_unix"] > 0
        refused = server.get(f"{path}/result")
        assert (refused.status, refused.code) == (409, "message_failed")
        assert "ValueError: boom" in refused.json()["detail"]
        server.post(f"/v1/queues/{name}/redrive", {"ids": [receipt["message_id"]]})
        server.post("/v1/queue/ack", {**lease(receive(server, name)), "result": {"total": 3}})
        found = server.get(path).json()
        assert (found["state"], found["has_result"]) == ("done", True)
        assert "payload" not in found
        assert (found["attempts"], found["owner"], len(found["failures"])) == (2, "ada", 1)
        assert (failure := found["failures"][0])["traceback"] == "Traceback …"
        assert (failure["attempt"], failure["outcome"], failure["error_type"]) == (1, "rejected", "ValueError")
        result = server.get(f"{path}/result").json()
        assert (result["result"], result["result_content_type"]) == ({"total": 3}, "application/json")
        assert result["finished_at_unix"] == found["finished_at_unix"]

    def test_an_awaited_result_arrives_with_its_ack(self, server: Server, name: str) -> None:
        receipt = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1, "keep_result": True}).json()
        path = f"/v1/queues/{name}/messages/{receipt['message_id']}/result"
        early = server.get(path)
        assert (early.status, early.code) == (429, "result_not_ready")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.get, f"{path}?wait_seconds=20")
            message = receive(server, name)
            assert server.post("/v1/queue/ack", {**lease(message), "result": None}).json()["settled"] is True
            assert waiting.result(18).json()["result"] is None
        assert server.get(path).json()["result_content_type"] == "application/json"

    def test_results_of_a_batch_are_bytes_blobs_or_missing(self, server: Server, name: str) -> None:
        put = {"queue": name, "messages": [{"payload": n, "keep_result": True} for n in range(4)]}
        ids = [each["message_id"] for each in server.post("/v1/queue/enqueue", put).json()["messages"]]
        body = {"queue": name, "owner": "ada", "page_size": 64, "wait_seconds": -1}
        messages = server.post("/v1/queue/dequeue", body).json()["messages"]
        shown = [{"message_id": each["message_id"], "lease_id": each["lease_id"]} for each in messages]
        blob = server.ask("POST", "/v1/blobs", b"x" * 100, content_type="text/plain").json()["hash"]
        results: list[dict[str, Any]] = [
            {"result_base64": base64.b64encode(b"\x00\xff").decode(), "result_content_type": "image/png"},
            {"result": "y" * 20_000},
            {"result_blob": blob, "result_content_type": "text/plain"},
            {},
        ]
        acks = [{**lease, **result} for lease, result in zip(shown, results, strict=True)]
        refused = server.post("/v1/queue/ack", {"queue": name, "messages": acks, "result": 1})
        assert refused.code == "invalid_body"
        settled = server.post("/v1/queue/ack", {"queue": name, "messages": acks}).json()["messages"]
        assert [each["settled"] for each in settled] == [True] * 4
        found = [server.get(f"/v1/queues/{name}/messages/{id}/result").json() for id in ids]
        assert base64.b64decode(found[0]["result_base64"]) == b"\x00\xff"
        assert found[0]["result_content_type"] == "image/png"
        assert found[1]["result_bytes"] == 20_002
        assert server.get(f"/v1/blobs/{found[1]['result_blob']}").body == b'"' + b"y" * 20_000 + b'"'
        assert (found[2]["result_blob"], found[2]["result_bytes"]) == (blob, 100)
        assert (found[3]["result"], found[3]["result_content_type"]) == (None, "")

    def test_a_cancelled_message_cannot_be_acknowledged(self, server: Server, name: str) -> None:
        receipt = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}).json()
        message = receive(server, name)
        path = f"/v1/queues/{name}/messages/{receipt['message_id']}"
        for _ in range(2):
            assert server.post(f"{path}/cancel").json()["state"] == "cancelled"
        answer = server.post("/v1/queue/ack", lease(message))
        assert (answer.status, answer.code, answer.json()["retry"]) == (409, "message_cancelled", "never")
        shown = {"message_id": message["message_id"], "lease_id": message["lease_id"]}
        [settled] = server.post("/v1/queue/ack", {"queue": name, "messages": [shown]}).json()["messages"]
        assert (settled["settled"], settled["code"]) == (False, "message_cancelled")
        assert server.get(f"{path}/result").code == "message_cancelled"

    def test_messages_are_searched_moved_cancelled_and_deleted(self, server: Server, name: str) -> None:
        put = {"queue": name, "messages": [{"payload": n, "key": f"k{n}"} for n in range(4)]}
        ids = [each["message_id"] for each in server.post("/v1/queue/enqueue", put).json()["messages"]]
        receive(server, name)
        path = f"/v1/queues/{name}/messages"
        found = server.get(f"{path}?states=leased,delayed&owner=ada").json()
        assert [(each["message_id"], each["key"]) for each in found["messages"]] == [(ids[0], "k0")]
        assert (found["next"], found["scanned"]) == (None, 1)
        page = server.get(f"{path}?limit=2").json()
        rest = server.get(f"{path}?after={page['next']}").json()
        assert [each["message_id"] for each in page["messages"] + rest["messages"]] == [*ids[1:], ids[0]]
        moved = server.post(f"{path}/move", {"ids": [ids[0], ids[1]], "to": f"{name}-slow"}).json()["outcomes"]
        assert [each["code"] for each in moved] == ["message_leased", None]
        assert server.get(f"/v1/queues/{name}-slow/messages/{ids[1]}").json()["state"] == "ready"
        for action in ("cancel", "delete"):
            [outcome] = server.post(f"{path}/{action}", {"ids": [ids[2 if action == "cancel" else 3]]}).json()[
                "outcomes"
            ]
            assert outcome["code"] is None
        assert server.get(f"{path}/{ids[2]}").json()["state"] == "cancelled"
        assert server.get(f"{path}/{ids[3]}").code == "message_not_found"
        for query, code in (
            ("states=gone", "invalid_query"),
            ("limit=0", "invalid_argument"),
            ("error=", "invalid_argument"),
        ):
            assert server.get(f"{path}?{query}").code == code
        assert server.post(f"{path}/move", {"ids": [ids[0]], "to": name}).code == "invalid_argument"
        assert server.post(f"{path}/delete", {"ids": []}).code == "empty_batch"

    def test_a_debounced_message_is_replaced(self, server: Server, name: str) -> None:
        put = {"queue": name, "debounce_key": "doc-1", "debounce_seconds": 600, "debounce_max_seconds": 900}
        ids = {server.post("/v1/queue/enqueue", {**put, "payload": n}).json()["message_id"] for n in range(3)}
        [id] = ids
        found = server.get(f"/v1/queues/{name}/messages/{id}").json()
        assert (found["state"], found["payload"]) == ("delayed", 2)
        assert server.get(f"/v1/queues/{name}").json()["delayed"] == 1

    def test_a_key_with_slashes_is_paused_and_resumed(self, server: Server, name: str) -> None:
        put = {"queue": name, "messages": [{"payload": n, "key": "eu/tenant 7"} for n in range(2)]}
        server.post("/v1/queue/enqueue", put)
        path = f"/v1/queues/{name}/keys/eu%2Ftenant%207"
        assert server.get(path).json() == {
            "key": "eu/tenant 7",
            "ready": 1,
            "blocked": 1,
            "leased": 0,
            "paused_until_ms": None,
        }
        before_ms = server_ms(server)
        paused = server.post(f"{path}/pause", {"seconds": 600}).json()
        assert before_ms <= paused["paused_until_ms"] - 600_000 <= server_ms(server)
        body = {"queue": name, "owner": "ada", "wait_seconds": -1}
        assert server.post("/v1/queue/dequeue", body).json()["messages"] == []
        assert server.post(f"{path}/resume").json()["paused_until_ms"] is None
        assert receive(server, name)["payload"] == 0

    @pytest.mark.parametrize(
        ("call", "body", "status", "code"),
        [
            ("GET messages/no-id", None, 400, "invalid_argument"),
            ("GET messages/{id}", None, 404, "message_not_found"),
            ("POST messages/{id}/cancel", {}, 404, "message_not_found"),
            ("PATCH messages/{id}", {"priority": 1}, 404, "message_not_found"),
            ("PATCH messages/{id}", {}, 400, "invalid_argument"),
            ("GET messages/{id}/result", None, 404, "result_not_kept"),
            ("GET messages/{id}/result?wait_seconds=-1", None, 400, "invalid_argument"),
            ("POST keys/k/pause", {"seconds": 1, "until_ms": 1}, 400, "invalid_argument"),
            (f"GET keys/{'k' * 257}", None, 400, "invalid_argument"),
        ],
    )
    def test_unknown_jobs_are_refused(
        self, server: Server, name: str, *, call: str, body: Any, status: int, code: str
    ) -> None:
        method, _, path = call.format(id="01980000-0000-7000-8000-000000000000").partition(" ")
        answer = server.ask(method, f"/v1/queues/{name}/{path}", body)
        assert (answer.status, answer.code) == (status, code)
        assert re.search(r"[;:] |\. ", answer.json()["detail"]), "it says what to do"

    def test_any_request_carries_results_as_json(self, server: Server, name: str) -> None:
        receipt = server.post("/v1/queue/enqueue", {"queue": name, "payload": 1}).json()
        message = receive(server, name)
        leases = [{"message_id": message["message_id"], "lease_id": message["lease_id"]}]
        ack = {"op": "queues.ack", "queue": name, "leases": leases}
        assert server.post("/v1/call", {**ack, "results": [{}]}).code == "missing_fields"
        assert server.post("/v1/call", {**ack, "results": [{"result": [1, 2]}]}).status == 200
        asked = {"op": "queues.result", "queue": name, "id": receipt["message_id"]}
        assert server.post("/v1/call", asked).json()["result"] == [1, 2]


class TestSubscriptions:
    def test_a_subscription_delivers_within_its_credit(self, server: Server, name: str) -> None:
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

    def test_a_subscription_ends_when_it_is_idle(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": 1})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.2, "credit": 2}
        lines = EventLines(server, "POST", "/v1/queue/subscribeWithState", body)
        assert lines.next("message")["state"] is None
        assert lines.next("end") == {"reason": "idle"}
        assert lines.response.read() == b""
        lines.close()

    def test_a_subscription_sends_server_sent_events(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "payload": {"a": "line\nbreak"}})
        body = {"queue": name, "owner": "ada", "wait_seconds": 0.1}
        answer = server.post("/v1/queue/subscribe", body, accept="text/event-stream")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in answer.body.decode().split("\n\n")]
        [event] = [lines for lines in events if "event: message" in lines]
        assert event[0].startswith("id: ")
        assert json.loads(event[2].removeprefix("data: "))["payload"] == {"a": "line\nbreak"}

    def test_a_watch_sends_changed_stats(self, server: Server, name: str) -> None:
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


def test_a_wait_for_a_result_is_bounded_by_the_server() -> None:
    with serving(wait_seconds_max=0.05) as server:
        receipt = server.post("/v1/queue/enqueue", {"queue": "q", "payload": 1, "keep_result": True}).json()
        answer = server.get(f"/v1/queues/q/messages/{receipt['message_id']}/result?wait_seconds=3600")
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "result_not_ready", "1")


def test_draining_ends_waiting_requests_and_streams() -> None:
    with serving(heartbeat_seconds=0.2, watch_seconds=0.05) as server, ThreadPoolExecutor(3) as pool:
        receipt = server.post("/v1/queue/enqueue", {"queue": "jobs", "payload": 1, "keep_result": True}).json()
        path = f"/v1/queues/jobs/messages/{receipt['message_id']}/result?wait_seconds=20"
        awaited = pool.submit(server.get, path)
        mail = pool.submit(server.get, "/v1/mailboxes/ada/receipts?wait_seconds=20")
        lines = EventLines(server, "POST", "/v1/queue/subscribe", {"queue": "q", "owner": "ada"})
        watch = EventLines(server, "GET", "/v1/queue/watch?queue=q", accept="application/x-ndjson")
        polled = pool.submit(server.post, "/v1/queue/dequeue", {"queue": "p", "owner": "ada"})
        until_waiting(server, "p", 1)
        server.drain()
        answer = polled.result(60)
        assert (answer.status, answer.code) == (503, "shutdown_draining")
        assert [awaited.result(60).code, mail.result(60).code] == ["shutdown_draining"] * 2
        assert lines.next("end") == {"reason": "shutdown_draining"}
        assert watch.next("end") == {"reason": "shutdown_draining"}
        assert server.post("/v1/queue/enqueue", {"queue": "q", "payload": 1}).code == "shutdown_draining"
        assert server.get("/openapi.json").status == 200
        lines.close()
        watch.close()
