"""The OpenAPI document put to the test: requests that it allows and requests that it does not, against a real server.

Whatever is sent, the server answers with a status that the document names and a body that it describes, never with a
5xx; what it does not allow is refused. The suite draws the same cases every time; `make nightly` draws others,
and prints the seed that draws them again.
"""

import json
import os
import random
import runpy
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

from holdfast.server.http.routes import ENDPOINTS
from holdfast.server.openapi import document

Server = runpy.run_path(str(Path(__file__).with_name("processes.py")))["Server"]  # Test files cannot import each other.
DOCUMENT = document(ENDPOINTS)
OPERATIONS = [
    pytest.param(path, method, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
]
SEED = int(os.environ.get("HOLDFAST_SEED", random.SystemRandom().randrange(1 << 32)))
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.missing_required_header,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
# So that nobody waits for what does not come.
BRIEF = {"wait_seconds_max": 0.02, "subscribe_seconds_max": 0.05, "heartbeat_seconds": 0.02, "watch_seconds": 0.02}
WAIT_SECONDS_MAX = 0.02
KNOWN = "known"  # Something of this name is there, of every kind.
SETTLING = [f"/v1/queue/{verb}" for verb in ("ack", "nack", "reject", "extend")]
NAMES = ("world", "queue", "key", "kind", "id", "name", "session")
LEASES: list[dict[str, str]] = []  # Messages that are leased, to settle.
UNIVERSES = ("universe", "namespace", "X-Holdfast-Universe")


@schemathesis.serializer("application/msgpack")
def packed(context: schemathesis.SerializationContext, value: Any) -> Any:
    try:
        return {"data": value if isinstance(value, bytes) else msgspec.msgpack.encode(value)}
    except OverflowError:  # There is no such number in MessagePack.
        return {"data": b"\xc1"}


@schemathesis.deserializer("application/msgpack")
def unpacked(context: schemathesis.DeserializationContext, response: Response) -> Any:
    return msgspec.msgpack.decode(response.content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = Server(tmp_path_factory.mktemp("server"), limits=BRIEF)
    try:
        with server.plane() as plane:
            plane.queue(KNOWN).put_many([{"n": number} for number in range(200)])
            plane.queue(KNOWN).schedule(KNOWN, "0 3 * * *", {"n": 1})
            world = plane.world(KNOWN)
            world.create()
            world.append([{"n": number} for number in range(50)], expected_head=world.head())
            plane.state(KNOWN).update({"n": 1})
            plane.entities.update(KNOWN, KNOWN, lambda _: {"status": "open"})
            plane.activity.log(KNOWN, {"n": 1})
            held = plane.queue(KNOWN).receive_many(50, visibility_seconds=3_600, extend_for_seconds=0)
            LEASES.extend({"message_id": each.id, "lease_id": each.lease.lease_id} for each in held)
        yield server
        assert '"level":"error"' not in server.log()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def api(server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def hastened(value: Any) -> Any:
    """The body, without waits that are as long as they may be."""
    if isinstance(value, dict):
        return {
            name: min(each, WAIT_SECONDS_MAX)
            if name == "wait_seconds" and isinstance(each, float | int)
            else hastened(each)
            for name, each in value.items()
        }
    return [hastened(each) for each in value] if isinstance(value, list) else value


def settled(case: Case) -> None:
    """Let the case be about what is there."""
    for place in (case.path_parameters, case.query, case.headers, case.body):
        if isinstance(place, MutableMapping):
            for name in UNIVERSES:
                place.pop(name, None)
            place.update({name: KNOWN for name in NAMES if isinstance(place.get(name), str)})
    if case.path in SETTLING and isinstance(case.body, dict) and LEASES:
        for name in ("messages", "meta_etag", "fencing_token"):
            case.body.pop(name, None)
        case.body.update(LEASES.pop())


def check(case: Case, session: requests.Session) -> Response:
    body = hastened(case.body)
    if body != case.body:
        case.body = body
    answer = case.call_and_validate(session=session, checks=CHECKS, timeout=60)
    responses = DOCUMENT["paths"][case.operation.path][case.operation.method]["responses"]
    # `default` is for problems only.
    assert answer.status_code >= 400 or str(answer.status_code) in responses
    if answer.headers.get("content-type", [""])[0].startswith("application/x-ndjson"):
        schema = responses["200"]["content"]["application/x-ndjson"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
        for line in answer.content.splitlines():
            validator.validate(json.loads(line))
    return answer


@pytest.mark.parametrize(
    "cases", [pytest.param(3, id="suite"), pytest.param(28, id="nightly", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_server_does_as_the_document_says(
    api: Any, session: requests.Session, path: str, method: str, cases: int
) -> None:
    operation = api[path][method.upper()]
    statuses: list[int] = []
    options = settings(
        max_examples=(cases + 1) // 2,
        derandomize=cases < 10,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    @seed(SEED)
    @options
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), known=st.booleans())
    def allowed(case: Case, known: bool) -> None:
        if known:
            settled(case)
        statuses.append(check(case, session).status_code)

    @seed(SEED)
    @options
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def not_allowed(case: Case) -> None:
        statuses.append(check(case, session).status_code)

    print(f"HOLDFAST_SEED={SEED}")
    allowed()
    not_allowed()
    print(statuses)
    assert len(statuses) >= cases
