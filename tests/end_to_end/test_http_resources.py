"""Queues, leases, states, entities, worlds, activity logs and blobs over HTTP."""

import base64
import hashlib
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import fastness
from fastness.errors import NotEmbedded
from fastness.kv.formats import FORMAT
from fastness.server.http.routes import ENDPOINTS
from tests.end_to_end.http_helpers import server_ms
from tests.support.http_server import Server, serving

MEGABYTE = 1_048_576
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}", heartbeat_seconds=0.5, watch_seconds=0.05) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A unique name."""
    return f"test-{next(_names)}"


def test_the_version_and_identity_of_the_plane_are_shown(server: Server) -> None:
    status = server.get("/v1/plane").json()
    assert (status["version"], status["data_format"], status["cause"]) == (fastness.__version__, FORMAT, "created")
    with fastness.connect(server.url) as plane:
        assert (plane.status().plane, plane.status().lineage) == (status["plane"], status["lineage"])
        with pytest.raises(NotEmbedded):
            plane.mark_restored()


class TestQueues:
    def test_a_queue_is_inspected_and_administered(self, server: Server, name: str) -> None:
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

    def test_leased_messages_are_listed_in_pages(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "messages": [{"payload": n} for n in range(3)]})
        body = {"queue": name, "owner": "ada", "wait_seconds": -1, "page_size": 3, "txn_id": "t"}
        messages = server.post("/v1/queue/dequeue", body).json()["messages"]
        page = server.get(f"/v1/queues/{name}/leased?limit=2").json()
        names = ("message_id", "attempts", "lease_expires_at_unix", "lease_id", "fence", "txn_id")
        assert [[each[field] for field in names] for each in page["messages"]] == [
            [each[field] for field in names] for each in messages[:2]
        ]
        assert page["messages"][0]["owner"] == "ada"
        rest = server.get(f"/v1/queues/{name}/leased?after={page['next']}").json()
        assert ([each["message_id"] for each in rest["messages"]], rest["next"]) == ([messages[2]["message_id"]], None)
        after_second = server.get(f"/v1/queues/{name}/leased?after={messages[1]['lease_id']}").json()
        assert after_second == rest, "a lease id is a position, too"
        assert server.get(f"/v1/queues/{name}/leased?limit=0").code == "invalid_argument"
        assert server.get(f"/v1/queues/{name}/leased?after=nonsense").code == "invalid_argument"

    def test_a_queue_is_deleted(self, server: Server, name: str) -> None:
        server.post("/v1/queue/enqueue", {"queue": name, "messages": [{"payload": n} for n in range(3)]})
        server.post("/v1/queue/dequeue", {"queue": name, "owner": "ada", "wait_seconds": -1})
        refused = server.ask("DELETE", f"/v1/queues/{name}")
        assert (refused.status, refused.code) == (409, "queue_in_use")
        for _ in range(2):
            deleted = server.ask("DELETE", f"/v1/queues/{name}?force=true", Idempotency_Key="once")
            assert (deleted.status, deleted.json()) == (200, {"count": 3})
        assert name not in server.get("/v1/queues?limit=10000").json()["names"]
        assert server.ask("DELETE", f"/v1/queues/{name}").json() == {"count": 0}

    def test_schedules_are_created_listed_and_removed(self, server: Server, name: str) -> None:
        body = {"cron": "0 4 * * *", "message": {"payload": {"job": "backup"}}}
        before_ms = server_ms(server)
        schedule = server.ask("PUT", f"/v1/queues/{name}/schedules/nightly", body).json()
        assert schedule["next_ms"] > before_ms
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
    def test_invalid_requests_have_specific_codes(
        self, server: Server, method: str, path: str, body: Any, code: str
    ) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestLeases:
    def test_a_lease_is_acquired_extended_checked_and_released(self, server: Server, name: str) -> None:
        granted = server.post("/v1/lease/acquire", {"key": name, "owner": "ada", "ttl_seconds": 5}).json()
        held = server.post("/v1/lease/acquire", {"key": name, "owner": "bob"})
        assert (held.status, held.code) == (409, "lease_held")
        proof = {each: granted[each] for each in ("key", "lease_id", "fence")}
        assert (
            server.post("/v1/lease/keepalive", {**proof, "ttl_seconds": 60}).json()["expires_ms"]
            > granted["expires_ms"]
        )
        assert server.post("/v1/lease/check", {"lease": proof}).json() == {"durability": "critical"}
        assert server.post("/v1/lease/describe", {"key": name}).json()["held"] is True
        assert name in [each["key"] for each in server.get("/v1/leases?limit=1000").json()["leases"]]
        stale = server.post("/v1/lease/keepalive", {**proof, "fence": 0})
        assert (stale.status, stale.code) == (403, "fencing_mismatch")
        assert server.post("/v1/lease/release", proof).json() == {"released": True}
        assert server.post("/v1/lease/check", proof).code == "lease_expired"
        assert server.post("/v1/lease/describe", {"key": name}).json()["held"] is False

    @pytest.mark.parametrize(
        ("path", "body", "code"),
        [
            ("acquire", {"key": "k"}, "missing_owner"),
            ("acquire", {"key": "a//b", "owner": "ada"}, "invalid_name"),
            ("acquire", {"key": "k", "owner": "ada", "ttl_seconds": 0}, "invalid_argument"),
            ("acquire", {"key": "k", "owner": "ada", "ttl": 3}, "invalid_body"),
            ("keepalive", {"key": "k"}, "missing_fields"),
            ("release", {"lease": {"key": "k", "lease_id": "x", "token": 3}}, "invalid_body"),
            ("describe", {}, "missing_fields"),
        ],
    )
    def test_invalid_requests_have_specific_codes(self, server: Server, path: str, body: Any, code: str) -> None:
        answer = server.post(f"/v1/lease/{path}", body)
        assert (answer.status, answer.code) == (400, code)


class TestStates:
    def test_a_document_is_written_read_and_removed(self, server: Server, name: str) -> None:
        etag = server.post("/v1/state/update", {"key": name, "value": {"a": [1, None]}}).json()["etag"]
        found = server.post("/v1/state/get", {"key": name}).json()["state"]
        assert (found["value"], found["etag"], found["version"]) == ({"a": [1, None]}, etag, 1)
        lost = server.post("/v1/state/update", {"key": name, "value": 2, "if_match": "other"})
        assert (lost.status, lost.code) == (409, "cas_mismatch")
        assert lost.json()["current_etag"] == etag
        assert server.post("/v1/state/remove", {"key": name, "if_match": etag}).json() == {"removed": True}
        assert server.post("/v1/state/get", {"key": name}).json() == {"state": None}

    def test_a_document_is_a_resource_with_an_etag(self, server: Server, name: str) -> None:
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

    def test_a_document_keeps_its_correlation_id_unless_one_is_sent(self, server: Server, name: str) -> None:
        def correlation_id() -> Any:
            return server.post("/v1/state/get", {"key": name}).json()["state"]["correlation_id"]

        server.post("/v1/state/update", {"key": name, "value": 1, "correlation_id": "inherited"})
        assert server.ask("PUT", f"/v1/state/{name}", 2).headers["x-correlation-id"] != "inherited"
        assert correlation_id() == "inherited"
        server.ask("PUT", f"/v1/state/{name}", 3, X_Correlation_Id="sent")
        assert correlation_id() == "sent"
        server.ask("PUT", f"/v1/state/{name}", 4, X_Correlation_Id="")
        assert correlation_id() == "sent"

    def test_numbers_that_json_lacks_are_text(self, server: Server, name: str) -> None:
        """Other clients can store them, because CBOR has them. JSON would show them as null."""
        with fastness.connect(server.url) as plane:
            plane.state(name).update({"high": [float("inf"), float("-inf")], "none": float("nan")})
            plane.entities.write("measure", name, {"value": float("nan")})
        assert server.get(f"/v1/state/{name}").json() == {"high": ["Infinity", "-Infinity"], "none": "NaN"}
        assert server.get(f"/v1/entities/measure/{name}").json()["fields"] == {"value": "NaN"}
        assert server.ask("PUT", f"/v1/state/{name}", b"NaN", content_type="application/json").code == "invalid_body"

    def test_a_leased_key_rejects_writes_of_others(self, server: Server, name: str) -> None:
        granted = server.post("/v1/lease/acquire", {"key": name, "owner": "ada"}).json()
        refused = server.ask("PUT", f"/v1/state/{name}", 1)
        assert (refused.status, refused.code) == (403, "lease_required")
        proof = {"X-Lease-Id": granted["lease_id"], "X-Fence": str(granted["fence"])}
        assert server.ask("PUT", f"/v1/state/{name}", 1, **proof).status == 201
        assert server.ask("DELETE", f"/v1/state/{name}", **(proof | {"X-Fence": "0"})).code == "fencing_mismatch"
        assert server.ask("PUT", f"/v1/state/{name}", 1, X_Lease_Id="x").code == "invalid_argument"

    def test_the_holder_of_a_key_with_capitals_writes_its_state(self, server: Server, name: str) -> None:
        key = f"{name}/LockB:1@x+y=z"
        granted = server.post("/v1/lease/acquire", {"key": key, "owner": "ada"}).json()
        proof = {"X-Lease-Id": granted["lease_id"], "X-Fence": str(granted["fence"])}
        assert server.ask("PUT", f"/v1/state/{key}", 1, **proof).status == 201
        assert server.get(f"/v1/state/{key}").json() == 1
        assert server.get(f"/v1/state/{key.lower()}").status == 404

    def test_universes_are_isolated_whether_named_by_header_query_or_body(self, server: Server, name: str) -> None:
        server.ask("PUT", f"/v1/state/{name}", "there", X_Fastness_Universe="elsewhere")
        assert server.get(f"/v1/state/{name}").status == 404
        assert server.get(f"/v1/state/{name}?universe=elsewhere").json() == "there"
        found = server.post("/v1/state/get", {"key": name, "universe": "elsewhere"}).json()
        assert found["state"]["value"] == "there"

    @pytest.mark.parametrize("key", ["a%20b", "a%2F%2Fb", "%00", "a/%0A", "%E2%98%83", "a" * 300, "a%3Fb%3D%27"])
    def test_an_invalid_key_is_refused(self, server: Server, key: str) -> None:
        assert server.get(f"/v1/state/{key}").code == "invalid_name"
        assert server.ask("PUT", f"/v1/state/{key}", 1).code == "invalid_name"

    def test_relative_paths_are_not_names(self, server: Server) -> None:
        assert server.ask("PUT", "/v1/state/..%2f..%2fetc/passwd", 1).code == "invalid_name"
        assert server.get("/v1/state/../../etc/passwd").code == "invalid_name"
        assert server.get("/v1/blobs/..%2f..%2fetc%2fpasswd").status == 404
        assert server.get("/v1/blobs/..").code == "invalid_argument"

    def test_a_malformed_etag_is_refused(self, server: Server, name: str) -> None:
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_Match="bare").code == "invalid_etag"
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_Match='W/"weak"').code == "invalid_etag"
        assert server.ask("PUT", f"/v1/state/{name}", 1, If_None_Match='"x"').code == "invalid_etag"


class TestEntities:
    def test_an_entity_is_created_changed_and_deleted(self, server: Server, name: str) -> None:
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

    def test_best_effort_values_are_read_on_request(self, server: Server, name: str) -> None:
        path = f"/v1/entities/task/{name}"
        assert server.ask("PATCH", path, {"fields": {"ml_score": 0.5}}).json()["versions"] == [None]
        assert server.get(path).status == 404
        found = server.get(f"{path}?best_effort=true").json()
        assert (found["version"], found["fields"], found["best_effort"]["ml_score"]["value"]) == (0, {}, 0.5)
        made = server.ask("PUT", path, {**found, "fields": {"status": "new"}}).json()
        assert made["versions"] == [1]
        got = server.get(f"{path}?best_effort=true", If_None_Match='"1"')
        assert (got.status, got.headers["etag"]) == (200, '"1"')  # The version does not count BEST_EFFORT values.
        assert got.json()["best_effort"]["ml_score"] == {"value": 0.5, "at_ms": found["updated_ms"]}
        assert server.get(path).json()["best_effort"] == {}
        page = server.get("/v1/entities/task?limit=1000&best_effort=true").json()["entities"]
        assert [each["fields"] for each in page if each["id"] == name and each["best_effort"]] == [{"status": "new"}]

    def test_a_transaction_changes_all_entities_or_none(self, server: Server, name: str) -> None:
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
    def test_invalid_requests_have_specific_codes(
        self, server: Server, method: str, path: str, body: Any, code: str
    ) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestEffects:
    def test_an_effect_is_claimed_failed_and_completed(self, server: Server, name: str) -> None:
        server.ask("PUT", f"/v1/worlds/{name}")
        hash = base64.b64encode(b"intent").decode()
        effect = {"kind": name, "intent_hash": hash, "params": base64.b64encode(b"{}").decode()}
        timer = {"deliver_at_ns": 1 << 62, "intent_hash": hash}
        item = {"type": "control", "command": "go", "effects": [effect], "timers": [timer]}
        assert server.post(f"/v1/worlds/{name}/inbox", {"item": item}).status == 201
        server.post(f"/v1/worlds/{name}/drain")
        (listed,) = server.get(f"/v1/worlds/{name}/effects").json()["effects"]
        assert (listed["kind"], listed["state"], listed["attempts"]) == (name, "pending", 0)
        assert server.get(f"/v1/worlds/{name}/timers").json()["timers"][0]["timer_id"] == "intent"
        assert server.get("/v1/timers?limit=1").status == server.get("/v1/effects").status == 200
        claim = {"kinds": [name], "owner": "ada", "wait_seconds": 5}
        (claimed,) = server.post("/v1/effects/claim", claim).json()["effects"]
        path, fence = f"/v1/worlds/{name}/effects/0/0", claimed["fence"]
        assert (fence, claimed["intent_hash"]) == (1, hash)
        assert server.post("/v1/effects/claim", {**claim, "wait_seconds": 0}).json()["effects"] == []
        assert server.post(f"{path}/extend", {"fence": fence, "lease_seconds": 60}).status == 200
        stale = server.post(f"{path}/complete", {"fence": 9})
        assert (stale.status, stale.code) == (403, "fencing_mismatch")
        failed = server.post(f"{path}/fail", {"fence": fence, "error": "busy", "delay_seconds": 0}).json()
        assert failed["is_dead"] is False
        (again,) = server.post("/v1/effects/claim", claim).json()["effects"]
        given = {key: again[key] for key in ("world", "height", "number", "fence")}
        assert server.post("/v1/effects/release", {"effects": [given]}).status == 200
        (again,) = server.post("/v1/effects/claim", claim).json()["effects"]
        done = {"fence": again["fence"], "payload": base64.b64encode(b"ok").decode()}
        assert server.post(f"{path}/complete", done).status == 200
        gone = server.post(f"{path}/complete", done)
        assert (gone.status, gone.code) == (404, "effect_not_found")
        (receipt,) = [item for _, item in server.get(f"/v1/worlds/{name}/inbox").json()["items"][1:]]
        assert (receipt["type"], receipt["payload"]) == ("receipt", done["payload"])


class TestWorlds:
    def test_a_world_goes_through_its_lifecycle(self, server: Server, name: str) -> None:
        path = f"/v1/worlds/{name}"
        assert server.get(path).code == "world_not_found"
        assert server.ask("PUT", path).status == 201
        assert server.post("/v1/worlds", {"world": name}).code == "world_exists"
        assert name in server.get("/v1/worlds?limit=1000").json()["names"]
        entries = [{"n": n, "deep": [None, 1.5, "é"]} for n in range(3)]
        assert server.post(f"{path}/entries", {"entries": entries, "expected_head": 0}).json()["height"] == 0
        late = server.post(f"{path}/entries", {"entries": [1], "expected_head": 0})
        assert (late.status, late.code, late.json()["current_head"]) == (409, "head_advanced", 3)
        assert [each["value"] for each in server.get(f"{path}/entries?start=1").json()["records"]] == entries[1:]
        item = {"type": "domain_event", "schema": "s", "payload": base64.b64encode(b"hi").decode()}
        assert server.post(f"{path}/inbox", {"item": item}).status == 201
        assert server.get(f"{path}/inbox").json()["items"][0][1]["type"] == "domain_event"
        assert server.post(f"{path}/drain", {"limit": 5}).json() == {"heights": [3], "incarnation": 1}
        assert server.get(f"{path}/inbox/cursor").json()["sequence"] is not None
        assert server.get(path).json()["head"] == 4
        snapshot = server.post(f"{path}/snapshots", {"data": {"sum": 3}, "height": 3}).json()
        assert len(server.get(f"{path}/snapshots").json()["snapshots"]) == 2
        assert server.get(f"/v1/blobs/{snapshot['snapshot_ref']}").status == 200
        assert (snapshot["is_baseline"], server.get(f"{path}/baseline").json()["height"]) == (True, 3)
        stored = server.post(f"{path}/snapshots", {"data": 1, "height": 4, "promote": False}).json()
        assert not stored["is_baseline"]
        assert server.post(f"{path}/snapshots/4/promote").json() == {**stored, "is_baseline": True}
        assert server.post(f"{path}/snapshots/3/promote").code == "baseline_regressed"
        assert server.post(f"{path}/snapshots/5/promote").code == "snapshot_not_found"
        point = server.get(f"{path}/restore").json()
        assert (point["baseline"]["height"], point["head"]) == (4, server.get(path).json()["head"])
        assert server.get(f"{path}/segments").json() == {"segments": [], "incarnation": 1}
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
        for read in ("", "/entries", "/inbox", "/inbox/cursor", "/snapshots", "/segments", "/baseline", "/check"):
            gone = server.get(f"{path}{read}")
            assert (gone.status, gone.code) == (404, "world_not_found"), read
        assert name not in server.get("/v1/worlds?limit=1000").json()["names"]
        assert server.ask("PUT", path).json()["incarnation"] == 2
        late = server.post(f"{path}/entries", {"entries": [1], "expected_head": 0, "incarnation": 1})
        assert (late.status, late.code) == (404, "world_not_found")
        assert server.get(f"{path}/entries?incarnation=1").code == "world_not_found"
        assert server.get(f"{path}/entries?incarnation=2").json() == {"records": [], "incarnation": 2}

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
            ("POST", "/v1/worlds/w/snapshots/top/promote", None, "invalid_argument"),
            ("GET", "/v1/worlds/w/entries?incarnation=first", None, "invalid_query"),
            ("POST", "/v1/worlds/w/fork", {"target": "t"}, "missing_fields"),
            ("GET", "/v1/worlds/w/entries?start=x", None, "invalid_query"),
        ],
    )
    def test_invalid_requests_have_specific_codes(
        self, server: Server, method: str, path: str, body: Any, code: str
    ) -> None:
        answer = server.ask(method, path, body)
        assert (answer.status, answer.code) == (400, code)


class TestActivity:
    def test_records_are_logged_and_read(self, server: Server, name: str) -> None:
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
    def test_invalid_requests_have_specific_codes(self, server: Server, body: Any, code: str) -> None:
        answer = server.post("/v1/activity", body)
        assert (answer.status, answer.code) == (400, code)

    def test_an_invalid_position_is_refused(self, server: Server) -> None:
        assert server.get("/v1/activity?after=nowhere").code == "invalid_argument"


class TestBlobs:
    DATA = hashlib.shake_256(b"blob").digest(3 * MEGABYTE + 17)

    @pytest.fixture
    def path(self, server: Server) -> str:
        answer = server.post("/v1/blobs", self.DATA)
        assert answer.status == 201
        assert answer.json() == {"hash": hashlib.sha256(self.DATA).hexdigest(), "size": len(self.DATA)}
        return str(answer.headers["location"])

    def test_a_blob_is_read_in_full(self, server: Server, path: str) -> None:
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
    def test_a_byte_range_is_read(self, server: Server, path: str, wanted: str, begin: int, end: int) -> None:
        answer = server.get(path, Range=wanted)
        assert answer.status == 206
        assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(self.DATA)}"
        assert answer.body == self.DATA[begin:end]

    @pytest.mark.parametrize("wanted", ["bytes=9-3", "lines=1-2", "bytes=0-1,5-6", "bytes=-", "bytes=a-b"])
    def test_an_invalid_range_is_ignored(self, server: Server, path: str, wanted: str) -> None:
        assert server.get(path, Range=wanted).status == 200

    def test_a_range_after_the_end_is_refused(self, server: Server, path: str) -> None:
        answer = server.get(path, Range=f"bytes={len(self.DATA)}-")
        assert (answer.status, answer.code) == (416, "range_not_satisfiable")
        assert answer.headers["content-range"] == f"bytes */{len(self.DATA)}"

    def test_a_range_with_another_etag_returns_the_whole_blob(self, server: Server, path: str) -> None:
        assert server.get(path, Range="bytes=0-1", If_Range='"other"').status == 200
        assert server.get(path, Range="bytes=0-1", If_Range=f'"{path.rpartition("/")[2]}"').status == 206

    def test_a_cached_blob_is_304_even_with_a_range(self, server: Server, path: str) -> None:
        etag = f'"{path.rpartition("/")[2]}"'
        answer = server.get(path, Range="bytes=0-1", If_None_Match=etag)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)

    def test_only_the_requested_range_is_read_from_disk(self, server: Server) -> None:
        size = 64 * MEGABYTE
        path = server.post("/v1/blobs", bytes(size)).headers["location"]
        before = server.read_bytes()
        assert server.get(path, Range=f"bytes={size - 5}-").body == bytes(5)
        assert server.get(path, Range="bytes=0-4").body == bytes(5)
        assert server.read_bytes() - before < 8 * MEGABYTE
        assert len(server.get(path).body) == size
        assert server.read_bytes() - before > size  # Checks the measurement itself.

    def test_a_chunked_upload_is_accepted(self, server: Server) -> None:
        connection = server.connect()
        connection.request("PUT", "/v1/blobs", iter([b"ab", b"cd"]), encode_chunked=True)
        response = connection.getresponse()
        assert json.loads(response.read())["hash"] == hashlib.sha256(b"abcd").hexdigest()
        connection.close()

    def test_an_unknown_blob_is_not_found(self, server: Server) -> None:
        assert server.get(f"/v1/blobs/{'0' * 64}").code == "blob_not_found"
        assert server.get("/v1/blobs/short").code == "invalid_argument"
        assert server.ask("HEAD", f"/v1/blobs/{'0' * 64}").status == 404


ROUND_TRIPS = {
    "/v1/queues/{queue}/policy": "/v1/queues/r/policy",
    "/v1/queues/{queue}/schedules/{name}": "/v1/queues/r/schedules/nightly",
    "/v1/mail/policy": "/v1/mail/policy",
    "/v1/universes/{universe}/quota": "/v1/universes/round-trip/quota",
    "/v1/hosting/policy": "/v1/hosting/policy",
    "/v1/agents/{name}": "/v1/agents/round-trip",
    "/v1/worlds/{world}/program": "/v1/worlds/round-trip/program",
    "/v1/state/{key:path}": "/v1/state/round/trip",
    "/v1/entities/{kind}/{id}": "/v1/entities/task/round-trip",
}
# PUT adds something; it does not replace what GET returns.
CREATE_ONLY = {"/v1/worlds/{world}", "/v1/blobs", "/v1/blobs/{hash}/pin", "/v1/runs/{id}"}


@pytest.fixture(scope="module")
def resources(server: Server) -> None:
    server.post("/v1/worlds", {"world": "round-trip"})
    key = base64.b64encode(b"k" * 32).decode()
    for path, body in {
        "/v1/queues/r/policy": {"max_attempts": 7, "rate_per_second": 2.5},
        "/v1/queues/r/schedules/nightly": {
            "cron": "0 4 * * *",
            "timezone": "Europe/Berlin",
            "message": {"payload": {"n": 1}, "priority": 3, "attributes": {"a": "b"}},
        },
        "/v1/mail/policy": {"pending_max": 900, "ttl_seconds": 3_600},
        "/v1/universes/round-trip/quota": {"messages": 900, "rate_per_second": 2.5},
        "/v1/hosting/policy": {"sends_to": ["other"], "accepts_from": ["*"]},
        "/v1/worlds/round-trip/program": {"program": "counter"},
        "/v1/agents/round-trip": {"public_key": key, "world": "round-trip"},
        "/v1/state/round/trip": {"etag": "a field of the value", "n": [1, None]},
        "/v1/entities/task/round-trip": {"fields": {"status": "open", "n": 1}, "expected_version": 0},
    }.items():
        assert server.ask("PUT", path, body).status in (200, 201), path


class TestHosting:
    def test_a_world_is_run_by_a_host(self, server: Server, name: str) -> None:
        path = f"/v1/worlds/{name}"
        assert server.post("/v1/worlds", {"world": name, "program": name}).status == 201
        for number in range(2):
            item = {"type": "domain_event", "schema": f"s-{number}", "payload": base64.b64encode(b"{}").decode()}
            server.post(f"{path}/inbox", {"item": item})
        claim = {"programs": [name], "owner": "h1", "wait_seconds": 5, "lease_seconds": 600}
        (claimed,) = server.post("/v1/hosting/claim", claim).json()["worlds"]
        assert [sequence for sequence, _ in claimed["items"]] == [0, 1]
        turn = {
            "owner": "h1",
            "fence": claimed["fence"],
            "expected_head": 0,
            "take": 1,
            "opening": [{"turn": 1}],
            "entries": [{"state": None}],
            "aside": [[1, "Traceback"]],
            "effects": [[1, {"kind": "mail", "intent_hash": base64.b64encode(b"h").decode()}]],
        }
        done = server.post(f"{path}/turns", turn)
        assert (done.status, done.json()["head"], done.json()["has_more"]) == (201, 4, False)
        late = server.post(f"{path}/turns", {**turn, "fence": claimed["fence"] + 1})
        assert (late.status, late.code) == (409, "lease_conflict")
        held = server.post(f"{path}/entries", {"entries": [1], "expected_head": 4})
        assert (held.status, held.code) == (409, "world_held")
        values = [each["value"] for each in server.get(f"{path}/entries").json()["records"]]
        assert (values[0], values[2:]) == ({"turn": 1}, [{"aside": 1}, {"state": None}])
        assert [each["height"] for each in server.get(f"{path}/effects").json()["effects"]] == [1]
        (aside,) = server.get(f"{path}/aside").json()["items"]
        assert (aside["sequence"], aside["error"], aside["item"]["schema"]) == (1, "Traceback", "s-1")
        assert server.post(f"{path}/aside/1/retry").status == 200
        assert server.ask("DELETE", f"{path}/aside/1").code == "item_not_found"
        worlds = [[name, claimed["fence"]]]
        (renewed,) = server.post("/v1/hosting/renew", {"worlds": worlds, "owner": "h1"}).json()["worlds"]
        assert renewed["world"] == name
        failed = {"owner": "h1", "fence": claimed["fence"], "error": "bad", "is_stopped": True}
        assert server.post(f"{path}/turns/fail", failed).status == 200
        info = server.get(f"{path}/program").json()
        assert (info["program"], info["is_stopped"], info["attempts"], info["error"]) == (name, True, 1, "bad")
        assert not server.post(f"{path}/program/resume").json()["is_stopped"]
        given = [{"world": name, "fence": claimed["fence"], "head": done.json()["head"]}]
        assert server.post("/v1/hosting/release", {"worlds": given, "owner": "h1"}).status == 200
        assert server.ask("PUT", f"{path}/program", {"program": None}).json()["program"] is None
        assert server.post("/v1/hosting/claim", {"programs": [name], "owner": "h1"}).json() == {"worlds": []}


class TestRoundTrips:
    """What a GET returns can be sent back with PUT."""

    def read(self, server: Server, path: str) -> Any:
        listed, _, name = path.partition("/schedules/")
        if not name:
            return server.get(path).json()
        found = server.get(f"{listed}/schedules").json()["schedules"]
        return next(each for each in found if each["name"] == name)

    def test_every_put_is_covered(self) -> None:
        puts = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "PUT"}
        assert puts == ROUND_TRIPS.keys() | CREATE_ONLY

    @pytest.mark.usefixtures("resources")
    @pytest.mark.parametrize("path", ROUND_TRIPS.values())
    def test_what_was_read_can_be_written_back_unchanged(self, server: Server, path: str) -> None:
        before = self.read(server, path)
        written = server.ask("PUT", path, before)
        assert written.status == 200, written
        after = self.read(server, path)
        if path.startswith("/v1/entities/"):
            assert after.pop("version") == before.pop("version") + 1, "the version counts writes"
            assert after.pop("updated_ms") >= before.pop("updated_ms")
        assert after == before

    @pytest.mark.usefixtures("resources")
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/queues/r/policy", {"queue": "other"}),
            ("/v1/agents/round-trip", {"agent": {"name": "other"}}),
            ("/v1/agents/round-trip", {"agent": None}),
            ("/v1/entities/task/round-trip", {"kind": "other", "fields": {}, "expected_version": 1}),
            ("/v1/entities/task/round-trip", {"fields": {}, "version": "1", "expected_version": 1}),
            ("/v1/entities/task/round-trip", {"fields": {}, "version": 1, "expected_version": 2}),
        ],
    )
    def test_a_body_of_another_resource_is_refused(self, server: Server, path: str, body: Any) -> None:
        assert server.ask("PUT", path, body).status == 400

    def test_a_mail_policy_may_be_wrapped(self, server: Server) -> None:
        written = server.ask("PUT", "/v1/mail/policy", {"policy": {"pending_max": 800}})
        assert (written.status, written.json()["pending_max"]) == (200, 800)
