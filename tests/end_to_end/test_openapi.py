"""The OpenAPI document describes every route, and real responses conform to it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import openapi_spec_validator
import pytest
from starlette.routing import Route

import make_api_examples
import vendor
from fastness.plane.open import Options, open_plane_async
from fastness.remedies import REMEDIES
from fastness.server import openapi_examples
from fastness.server.app import make_app
from fastness.server.context import ServerContext
from fastness.server.http.routes import ENDPOINTS
from fastness.server.openapi import document
from tests.support.failures import Failures
from tests.support.http_server import Server, serving

ROOT = Path(__file__).parents[2]
DOCUMENT = document(ENDPOINTS)
OPERATIONS: dict[str, dict[str, Any]] = {
    f"{method.upper()} {path}": operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
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


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from objects_in(each)


def properties_in(document: Any) -> Iterator[str]:
    for each in objects_in(document):
        yield from each["properties"] if isinstance(each.get("properties"), dict) else ()


def parameters_in(document: Any) -> Iterator[dict[str, Any]]:
    return (each for each in objects_in(document) if "in" in each and "name" in each and "schema" in each)


def resolve(reference: str) -> Any:
    found: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


async def test_the_document_has_exactly_the_routes_of_the_server() -> None:
    transport = await open_plane_async("memory:", Options())
    served = {
        (re.sub(r"{(\w+):\w+}", r"{\1}", route.path), method.lower())
        for route in make_app(ServerContext(transport)).routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    await transport.close()
    api = {(path, method) for path, method in served if path.startswith("/v1/") and method != "head"}
    assert api == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_the_document_and_its_schemas_have_their_form() -> None:
    resources = Path(openapi_spec_validator.__file__).parent / "resources" / "schemas" / "v3.1"
    jsonschema_rs.validate(json.loads((resources / "schema.json").read_text()), DOCUMENT)
    found = [each["schema"] for each in objects_in(DOCUMENT) if isinstance(each.get("schema"), dict)]
    assert len(found) > 500
    assert [schema for schema in found if not jsonschema_rs.meta.is_valid(schema)] == []
    schemas = DOCUMENT["components"]["schemas"]
    assert [name for name, schema in schemas.items() if not jsonschema_rs.meta.is_valid(schema)] == []


@pytest.mark.thorough
def test_the_document_is_valid() -> None:
    openapi_spec_validator.validate(DOCUMENT)


def test_fields_and_parameters_have_one_name_each() -> None:
    """The aliases that requests may use are in one description."""
    old = {"namespace", "visibility_timeout_seconds", "fencing_token", "state_fencing_token", "X-Fencing-Token"}
    assert not old & (set(properties_in(DOCUMENT)) | {each["name"] for each in parameters_in(DOCUMENT)})
    [described] = [tag["description"] for tag in DOCUMENT["tags"] if "`namespace` for `universe`" in tag["description"]]
    assert str(DOCUMENT).count("`fencing_token`") == described.count("`fencing_token`") == 1


def test_every_reference_resolves() -> None:
    for reference in references(DOCUMENT):
        assert resolve(reference) is not None


def test_idempotency_keys_are_documented_where_they_are_supported() -> None:
    """Reads, naturally idempotent writes and subscriptions do not support a key."""
    key = {"$ref": "#/components/parameters/idempotency_key"}
    without = {name for name, operation in OPERATIONS.items() if key not in operation["parameters"]}
    assert {
        "POST /v1/queue/subscribe",
        "POST /v1/queue/stats",
        "POST /v1/lease/check",
        "POST /v1/state/get",
        "PUT /v1/blobs",
        "POST /v1/worlds/{world}/compact",
    } <= without
    with_key = OPERATIONS.keys() - without
    assert not any(name.startswith("GET ") for name in with_key)
    assert {
        "POST /v1/queue/enqueue",
        "POST /v1/queue/dequeue",
        "POST /v1/queue/ack",
        "POST /v1/lease/acquire",
        "POST /v1/call",
        "POST /v1/atomic",
        "PUT /v1/state/{key}",
        "PATCH /v1/entities/{kind}/{id}",
        "POST /v1/queues/{queue}/redrive",
    } <= with_key


def test_operation_ids_are_unique() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def check_description(name: str, operation: dict[str, Any]) -> None:
    documented = {each["name"] for each in operation["parameters"] if each.get("in") == "path"}
    assert documented == set(re.findall(r"{(\w+)}", name))
    for content in operation.get("requestBody", {"content": {}})["content"].values():
        schema = content["schema"]
        assert schema
        while "$ref" in schema:
            schema = resolve(schema["$ref"])
        assert "properties" not in schema or schema["additionalProperties"] is False
    assert operation["summary"]
    problem = resolve(operation["responses"]["default"]["$ref"])["content"]["application/problem+json"]
    assert problem["schema"] == {"$ref": "#/components/schemas/Problem"}
    assert {"invalid_argument", "not_allowed", "rate_limited"} <= problem["examples"].keys()
    for status, answer in operation["responses"].items():
        if status not in ("default", "204", "304"):
            assert answer["description"]
            assert answer["content"]
            assert all(content["schema"] for content in answer["content"].values())


def test_errors_are_problems() -> None:
    answer = DOCUMENT["components"]["responses"]["Problem"]["content"]["application/problem+json"]
    assert {"code", "title", "status", "detail", "retry"} <= set(resolve(answer["schema"]["$ref"])["properties"])


def all_examples(operation: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], Any]]:
    """The examples of an operation: where they are, their name, their schema and their value."""
    contents = {"body": operation.get("requestBody", {}), **operation["responses"]}
    for where, holder in contents.items():
        for media, content in holder.get("content", {}).items():
            for name, example in content.get("examples", {}).items():
                yield f"{where} {media}", name, content["schema"], example["value"]
    for parameter in operation["parameters"]:
        if "example" in parameter:
            yield f"parameter {parameter['name']}", "example", parameter["schema"], parameter["example"]


def check_examples(operation: dict[str, Any]) -> None:
    hint = "add a call of it to tools/api_examples.py, then run: python tools/make_api_examples.py"
    found = list(all_examples(operation))
    places = {where.split()[0] for where, *_ in found}
    if "requestBody" in operation and operation["requestBody"]["required"]:
        assert "body" in places, f"it has no example of a body; {hint}"
    assert any(place.startswith("2") for place in places), f"it has no example; {hint}"
    required = {each["name"] for each in operation["parameters"] if each.get("required")}
    assert required <= {where.removeprefix("parameter ") for where, *_ in found if where.startswith("parameter ")}
    for where, name, schema, value in found:
        whole = {**schema, "components": DOCUMENT["components"]}
        problems = [each.message for each in jsonschema.Draft202012Validator(whole).iter_errors(value)]
        assert problems == [], f"{name} of {where}: {problems[:3]}"


def test_every_operation_has_a_description_and_valid_examples() -> None:
    failures = Failures()
    for name, operation in OPERATIONS.items():
        with failures.of(name):
            check_description(name, operation)
        with failures.of(f"examples of {name}"):
            check_examples(operation)
    failures.check()


def test_every_error_code_has_an_example() -> None:
    examples = DOCUMENT["components"]["examples"]
    assert REMEDIES.keys() == examples.keys()
    whole = {"$ref": "#/components/schemas/Problem", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    for code, example in examples.items():
        validator.validate(example["value"])
        assert example["value"]["code"] == code
        assert example["value"]["type"] == f"urn:fastness:error:{code}"
    shown = {
        reference.rpartition("/")[2]
        for reference in references(DOCUMENT["components"]["responses"])
        if reference.startswith("#/components/examples/")
    }
    assert shown == examples.keys() - openapi_examples.NOT_OVER_HTTP


def test_the_recorder_names_an_endpoint_without_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    recorded: dict[str, list[Any]] = {operation["operationId"]: [] for operation in OPERATIONS.values()}
    assert make_api_examples.missing(recorded) == []
    del recorded["get_plane"]
    [problem] = make_api_examples.missing(recorded)
    assert problem.startswith("GET /v1/plane has no example. Call it in the function planes() of tools/api_examples.py")
    assert make_api_examples.same({"n": 1, "id": "a"}, {"n": 2, "id": "b"})
    assert not make_api_examples.same({"n": 1}, {"n": 1, "more": None})


def test_the_server_serves_the_document(server: Server) -> None:
    assert server.get("/openapi.json").json() == DOCUMENT


def test_the_api_page_loads_files_of_this_server_only(server: Server) -> None:
    answer = server.get("/docs")
    text = answer.body.decode()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert answer.headers["content-type"].startswith("text/html")
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert not any(re.match(r"[a-z]+:|/", each) for each in loaded)  # Relative, so that a proxy may add a path.
    for path in loaded:
        if path.startswith("docs/"):
            file = server.get(f"/{path}")
            assert file.status == 200
            assert file.headers["content-security-policy"] == answer.headers["content-security-policy"]
            assert server.ask("GET", f"/{path}", None, **{"If-None-Match": file.headers["etag"]}).status == 304
    assert "<script>" not in text
    assert "style=" not in text


def test_vendored_files_match_their_hashes_and_have_licences(tmp_path: Path) -> None:
    packages = vendor.recorded()
    assert vendor.check(packages, vendor.ROOT) == []
    for package in packages.values():
        assert any(each.endswith("license.txt") for each in package["files"])
    paths = [tmp_path / path for package in packages.values() for path in package["files"]]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"changed")
    assert len(vendor.check(packages, tmp_path)) == len(paths)
    paths[0].unlink()
    assert any("is missing" in problem for problem in vendor.check(packages, tmp_path))


def test_responses_conform_to_the_document(server: Server) -> None:

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
    check("POST", "/v1/queue/visibility", "/v1/queue/visibility", {**mine, "visibility_seconds": 9})
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
    check("POST", "/v1/lease/acquire", "/v1/lease/acquire", {"key": "k", "owner": "ada"})
    check("POST", "/v1/lease/acquire", "/v1/lease/acquire", {"key": "k", "owner": "bob"})
    check("POST", "/v1/lease/describe", "/v1/lease/describe", {"key": "k"})
    check("PUT", "/v1/state/a/b", "/v1/state/{key}", {"x": 1})
    check("POST", "/v1/state/get", "/v1/state/get", {"key": "a/b"})
    check("PATCH", "/v1/entities/task/t", "/v1/entities/{kind}/{id}", {"fields": {"status": {"a": 1}}})
    check("GET", "/v1/entities/task/t", "/v1/entities/{kind}/{id}")
    check("GET", "/v1/entities/task/t/history", "/v1/entities/{kind}/{id}/history")
    put_row = {
        "change": "put",
        "partition": "p/1",
        "key": ["a", 7],
        "value": "YQ==",
        "if_version": 0,
        "ttl_seconds": 60,
    }
    changes = {"changes": [put_row, {"change": "delete_all", "partition": "q", "prefix": ["a"]}]}
    for _ in range(2):  # The second one is a conflict.
        check("POST", "/v1/collections/c/commit", "/v1/collections/{collection}/commit", changes)
    rows = {"partition": "p/1", "keys": [["a", 7], ["b"]]}
    check("POST", "/v1/collections/c/get", "/v1/collections/{collection}/get", rows)
    scanned = {"partition": "p/1", "after": ["a"], "limit": 1}
    page = check("POST", "/v1/collections/c/scan", "/v1/collections/{collection}/scan", scanned)
    assert (page["rows"][0]["value"], page["next"]) == ("YQ==", ["a", 7])
    found = check("GET", "/v1/collections/c/partitions?prefix=p", "/v1/collections/{collection}/partitions")
    assert found["partitions"] == ["p/1"]
    assert check("GET", "/v1/collections", "/v1/collections")["names"] == ["c"]
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
