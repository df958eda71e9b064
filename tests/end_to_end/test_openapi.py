"""The OpenAPI document describes every route, and real responses conform to it."""

import html
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from holdfast.server.app import make_app
from holdfast.server.context import ServerContext
from holdfast.server.http.routes import ENDPOINTS
from holdfast.server.openapi import document

_spec = importlib.util.spec_from_file_location("holdfast_serving", Path(__file__).with_name("serving.py"))
assert _spec is not None
assert _spec.loader is not None
_serving = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_serving)

DOCUMENT = document(ENDPOINTS)
OPERATIONS = [
    pytest.param(path, method, operation, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
every_operation = pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
WITHOUT_BODY = ("204", "304")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with _serving.serving() as running:
        yield running


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def resolve(reference: str) -> Any:
    found: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def test_the_document_has_exactly_the_routes_of_the_server() -> None:
    served = {
        (re.sub(r"{(\w+):\w+}", r"{\1}", route.path), method.lower())
        for route in make_app(ServerContext(None)).routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    api = {(path, method) for path, method in served if path.startswith("/v1/") and method != "head"}
    assert api == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_the_document_is_valid() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)


def test_every_reference_resolves() -> None:
    for reference in references(DOCUMENT):
        assert resolve(reference) is not None


def test_idempotency_keys_are_documented_where_they_are_supported() -> None:
    """Reads, naturally idempotent writes and subscriptions do not support a key."""
    key = {"$ref": "#/components/parameters/idempotency_key"}
    without = {param.id for param in OPERATIONS if key not in param.values[2]["parameters"]}
    assert {
        "POST /v1/queue/subscribe",
        "POST /v1/queue/stats",
        "POST /v1/lock/check",
        "POST /v1/state/get",
        "PUT /v1/blobs",
        "POST /v1/worlds/{world}/compact",
    } <= without
    with_key = {param.id for param in OPERATIONS} - without
    assert not any(id.startswith("GET ") for id in with_key)
    assert {
        "POST /v1/queue/enqueue",
        "POST /v1/queue/dequeue",
        "POST /v1/queue/ack",
        "POST /v1/lock/acquire",
        "POST /v1/call",
        "POST /v1/atomic",
        "PUT /v1/state/{key}",
        "PATCH /v1/entities/{kind}/{id}",
        "POST /v1/queues/{queue}/redrive",
    } <= with_key


def test_operation_ids_are_unique() -> None:
    names = [param.values[2]["operationId"] for param in OPERATIONS]
    assert len(set(names)) == len(names)


@every_operation
def test_every_response_has_a_schema(path: str, method: str, operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
    for status, answer in operation["responses"].items():
        if status == "default" or status in WITHOUT_BODY:
            continue
        assert answer["description"]
        assert answer["content"]
        for content in answer["content"].values():
            assert content["schema"]


@every_operation
def test_every_body_has_a_schema_and_refuses_unknown_fields(path: str, method: str, operation: dict[str, Any]) -> None:
    for content in operation.get("requestBody", {"content": {}})["content"].values():
        schema = content["schema"]
        assert schema
        while "$ref" in schema:
            schema = resolve(schema["$ref"])
        if "properties" in schema:
            assert schema["additionalProperties"] is False


@every_operation
def test_every_path_parameter_is_documented(path: str, method: str, operation: dict[str, Any]) -> None:
    documented = {each["name"] for each in operation["parameters"] if each.get("in") == "path"}
    assert documented == set(re.findall(r"{(\w+)}", path))


def test_errors_are_problems() -> None:
    answer = DOCUMENT["components"]["responses"]["Problem"]["content"]["application/problem+json"]
    assert {"code", "title", "status", "detail", "retry"} <= set(resolve(answer["schema"]["$ref"])["properties"])


def test_the_server_serves_the_document(server: Any) -> None:
    assert server.get("/openapi.json").json() == DOCUMENT


def test_the_docs_page_is_self_contained(server: Any) -> None:
    answer = server.get("/docs")
    text = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script|<link|<img|<iframe|src=|@import|url\(|https?://", text)
    for param in OPERATIONS:
        assert html.escape(param.values[2]["summary"].split("`")[0]) in text


def test_responses_conform_to_the_document(server: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def check(method: str, path: str, template: str, body: Any = None, **headers: str) -> Any:
        answer = server.ask(method, path, body, **headers)
        responses = DOCUMENT["paths"][template][method.lower()]["responses"]
        if answer.status >= 400:
            schema = {"$ref": "#/components/schemas/Problem"}
        else:
            schema = responses[str(answer.status)]["content"]["application/json"]["schema"]
        whole = {**schema, "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(whole).validate(answer.json())
        return answer.json()

    put = {"queue": "jobs", "payload": {"n": 1}}
    check("POST", "/v1/queue/enqueue", "/v1/queue/enqueue", put)
    check("POST", "/v1/queue/enqueue", "/v1/queue/enqueue", {"queue": "jobs", "messages": [{"payload_base64": "YQ=="}]})
    check("GET", "/v1/queues/jobs/peek", "/v1/queues/{queue}/peek")
    received = check(
        "POST", "/v1/queue/dequeueWithState", "/v1/queue/dequeueWithState", {"queue": "jobs", "owner": "ada"}
    )
    mine = {"queue": "jobs", **{name: received["messages"][0][name] for name in ("message_id", "lease_id")}}
    check("POST", "/v1/queue/extend", "/v1/queue/extend", {**mine, "extend_by_seconds": 9})
    check("POST", "/v1/queue/ack", "/v1/queue/ack", mine)
    check(
        "POST",
        "/v1/queue/ack",
        "/v1/queue/ack",
        {"queue": "jobs", "messages": [{"message_id": mine["message_id"], "lease_id": mine["lease_id"]}]},
    )
    check("POST", "/v1/queue/stats", "/v1/queue/stats", {"queue": "jobs"})
    check("GET", "/v1/queues/jobs", "/v1/queues/{queue}")
    cron = {"cron": "0 3 * * *", "message": {"payload": 1}}
    check("PUT", "/v1/queues/jobs/schedules/s", "/v1/queues/{queue}/schedules/{name}", cron)
    check("GET", "/v1/queues/jobs/schedules", "/v1/queues/{queue}/schedules")
    check("POST", "/v1/lock/acquire", "/v1/lock/acquire", {"key": "k", "owner": "ada"})
    check("POST", "/v1/lock/acquire", "/v1/lock/acquire", {"key": "k", "owner": "bob"})
    check("POST", "/v1/lock/describe", "/v1/lock/describe", {"key": "k"})
    check("PUT", "/v1/state/a/b", "/v1/state/{key}", {"x": 1})
    check("POST", "/v1/state/get", "/v1/state/get", {"key": "a/b"})
    check("PATCH", "/v1/entities/task/t", "/v1/entities/{kind}/{id}", {"fields": {"status": {"a": 1}}})
    check("GET", "/v1/entities/task/t", "/v1/entities/{kind}/{id}")
    check("GET", "/v1/entities/task/t/history", "/v1/entities/{kind}/{id}/history")
    check("POST", "/v1/worlds", "/v1/worlds", {"world": "w"})
    check("POST", "/v1/worlds/w/entries", "/v1/worlds/{world}/entries", {"entries": [1, {}], "expected_head": 0})
    check("GET", "/v1/worlds/w/entries", "/v1/worlds/{world}/entries")
    item = {"type": "control", "command": "go", "effects": [{"kind": "k", "intent_hash": "YQ=="}]}
    check("POST", "/v1/worlds/w/inbox", "/v1/worlds/{world}/inbox", {"item": item})
    check("GET", "/v1/worlds/w/inbox", "/v1/worlds/{world}/inbox")
    check("GET", "/v1/worlds/none", "/v1/worlds/{world}")
    check("POST", "/v1/activity", "/v1/activity", {"session": "s", "records": [{"a": 1}]})
    check("GET", "/v1/activity", "/v1/activity")
    check("POST", "/v1/atomic", "/v1/atomic", [{"op": "states.update", "key": "z", "value": 1}])
    check("POST", "/v1/blobs", "/v1/blobs", b"bytes")
