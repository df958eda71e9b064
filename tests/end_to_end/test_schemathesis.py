"""Schemathesis: valid and invalid requests, generated from the OpenAPI document, against a real server.

Every response has a documented status and body, and never a 5xx status; invalid requests are refused. The suite
generates the same cases every time; `make nightly` generates others and prints the seed that repeats them.
"""

import json
import os
import random
from collections.abc import Iterator, MutableMapping
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

from fastness import PutRow
from fastness.server.http.routes import ENDPOINTS
from fastness.server.openapi import document
from tests.support.server_process import Server

DOCUMENT = document(ENDPOINTS)
OPERATIONS = [
    pytest.param(path, method, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
]
# The suite repeats the same cases; nightly runs look for new ones.
SUITE_SEED = 27
NIGHTLY_SEED = int(os.environ.get("FASTNESS_SEED", random.SystemRandom().randrange(1 << 32)))
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
# Short waits, because most requests wait for events that never happen.
BRIEF = {"wait_seconds_max": 0.02, "subscribe_seconds_max": 0.05, "heartbeat_seconds": 0.02, "watch_seconds": 0.02}
WAIT_SECONDS_MAX = 0.02
KNOWN = "known"  # An object of every kind exists with this name.
SETTLE_PATHS = [f"/v1/queue/{verb}" for verb in ("ack", "nack", "reject", "extend")]
NAMES = ("universe", "world", "queue", "key", "kind", "id", "name", "session", "collection")
LEASES: list[dict[str, str]] = []  # Leases of messages, to settle.
IDS: list[str] = []  # Of messages that are done, ready and leased, in turn.
UNIVERSES = ("universe", "namespace", "X-Fastness-Universe")


@schemathesis.serializer("application/msgpack")
def encode_msgpack(context: schemathesis.SerializationContext, value: Any) -> Any:
    try:
        return {"data": value if isinstance(value, bytes) else msgspec.msgpack.encode(value)}
    except OverflowError:  # MessagePack cannot encode the number.
        return {"data": b"\xc1"}


@schemathesis.deserializer("application/msgpack")
def decode_msgpack(context: schemathesis.DeserializationContext, response: Response) -> Any:
    return msgspec.msgpack.decode(response.content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), limits=BRIEF)
    try:
        with server.plane() as plane:
            receipts = plane.queue(KNOWN).put_many([{"n": number} for number in range(200)])
            done = plane.queue(KNOWN).put({"n": 1}, priority=9, key=KNOWN)
            plane.queue(KNOWN).receive(extend_for_seconds=0).ack(result={"n": 1})
            for leased, ready in zip(receipts[:50], receipts[150:], strict=True):
                IDS.extend([done.id, ready.id, leased.id])
            plane.queue(KNOWN).schedule(KNOWN, "0 3 * * *", {"n": 1})
            plane.workflows.start(KNOWN, id=KNOWN)
            world = plane.world(KNOWN)
            world.create()
            world.append([{"n": number} for number in range(50)], expected_head=world.head())
            plane.state(KNOWN).update({"n": 1})
            plane.entities.update(KNOWN, KNOWN, lambda _: {"status": "open"})
            plane.collection(KNOWN).commit([PutRow(KNOWN, (KNOWN, n), b"row", ttl_seconds=n or None) for n in range(9)])
            plane.activity.log(KNOWN, {"n": 1})
            held = plane.queue(KNOWN).receive_many(50, visibility_seconds=3_600, extend_for_seconds=0)
            LEASES.extend({"message_id": each.id, "lease_id": each.lease.lease_id} for each in held)
        yield server
        assert '"level":"error"' not in server.log()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def shorten_waits(value: Any) -> Any:
    """The body with all waits shortened."""
    if isinstance(value, dict):
        return {
            name: min(each, WAIT_SECONDS_MAX)
            if name == "wait_seconds" and isinstance(each, float | int)
            else shorten_waits(each)
            for name, each in value.items()
        }
    return [shorten_waits(each) for each in value] if isinstance(value, list) else value


def use_existing_names(case: Case[Any]) -> None:
    """Make the case refer to existing objects."""
    for mapping in (case.path_parameters, case.query, case.headers, case.body):
        if isinstance(mapping, MutableMapping):
            for name in UNIVERSES if mapping is not case.path_parameters else ():
                mapping.pop(name, None)
            mapping.update({name: KNOWN for name in NAMES if isinstance(mapping.get(name), str)})
    if case.path_parameters and "/messages/{id}" in case.path:
        IDS.append(IDS.pop(0))
        case.path_parameters["id"] = IDS[-1]
    if case.path in SETTLE_PATHS and isinstance(case.body, dict) and LEASES:
        for name in ("messages", "meta_etag", "fence"):
            case.body.pop(name, None)
        case.body.update(LEASES.pop())


def check(case: Case[Any], session: requests.Session) -> Response:
    body = shorten_waits(case.body)
    if body != case.body:
        case.body = body
    answer = case.call_and_validate(session=session, checks=CHECKS, timeout=60)
    responses = DOCUMENT["paths"][case.operation.path][case.operation.method]["responses"]
    # `default` describes errors only.
    assert answer.status_code >= 400 or str(answer.status_code) in responses
    if answer.headers.get("content-type", [""])[0].startswith("application/x-ndjson"):
        schema = responses["200"]["content"]["application/x-ndjson"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
        for line in answer.content.splitlines():
            validator.validate(json.loads(line))
    return answer


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(3, id="suite", marks=pytest.mark.rotating),
        pytest.param(28, id="nightly", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_responses_conform_to_the_openapi_document(
    api: Any, session: requests.Session, path: str, method: str, cases: int
) -> None:
    operation = api[path][method.upper()]
    statuses: list[int] = []
    chosen = SUITE_SEED if cases < 10 else NIGHTLY_SEED
    options = settings(
        max_examples=(cases + 1) // 2,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    @seed(chosen)
    @options
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), known=st.booleans())
    def valid(case: Case[Any], known: bool) -> None:
        if known:
            use_existing_names(case)
        statuses.append(check(case, session).status_code)

    @seed(chosen)
    @options
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def invalid(case: Case[Any]) -> None:
        statuses.append(check(case, session).status_code)

    print(f"FASTNESS_SEED={chosen}")
    valid()
    invalid()
    print(statuses)
    assert len(statuses) >= cases
