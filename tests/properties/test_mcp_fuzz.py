"""Arguments that are generated from the schema of each tool, and changed, against a real server on both revisions.

No request gets a 5xx status or an internal error, and the log has no traceback. Each refusal has a code, and says what
to do next. Each answer is what the output schema of its tool promises.
"""

import json
import string
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastness
from fastness.limits import MCP_WAIT_SECONDS_MAX
from fastness.mcp.exposed_tools import ExposedTool, row_of
from fastness.mcp.exposing import expose
from fastness.mcp.task_protocols import EXTENSION
from fastness.mcp.tools import TOOLS
from tests.support.server_process import SECONDS_MAX, Server

Json = Any
LEGACY, MODERN = "2025-11-25", "2026-07-28"
REVISIONS: Final = (LEGACY, MODERN)
BY_NAME: Final = {tool.name: tool.listed for tool in TOOLS}
ACCEPT: Final = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
CLIENT: Final = {"name": "fuzz", "version": "1"}
_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
META: Final = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": CLIENT,
    _CAPABILITIES: {},
}
REFUSED: Final = (-32700, -32600, -32601, -32602, -32020)  # Not JSON, or no valid request, method or parameters.


class Peer:
    """Posts JSON-RPC messages to a server, as two clients of different revisions."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(timeout=SECONDS_MAX)
        self._url = f"{url}/mcp"
        self._session: dict[str, str] = {}
        hello = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": CLIENT}
        started = self.post(LEGACY, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello})
        self._session = {"Mcp-Session-Id": started.headers["mcp-session-id"], "Mcp-Protocol-Version": LEGACY}
        self.post(LEGACY, {"jsonrpc": "2.0", "method": "notifications/initialized"})

    def post(self, revision: str, message: Json, *, method: str = "tools/call", name: str = "x") -> httpx2.Response:
        """The response to a message, or to bytes."""
        more = {"Mcp-Protocol-Version": MODERN, "Mcp-Method": method, "Mcp-Name": name}
        headers = ACCEPT | (self._session if revision == LEGACY else more)
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self._http.post(self._url, content=body, headers=headers)

    def call(self, revision: str, tool: str, arguments: Json) -> dict[str, Any]:
        """The JSON-RPC answer to a call of a tool."""
        params = {"name": tool, "arguments": arguments} | ({"_meta": META} if revision == MODERN else {})
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        return answer_of(self.post(revision, message, name=tool))

    def start(self, revision: str, tool: str, arguments: Json) -> dict[str, Any]:
        """The JSON-RPC answer to a call of an exposed tool as a task. The text "1e999" is sent as that number."""
        capabilities: dict[str, Any] = {"extensions": {EXTENSION: {}}}
        as_task = {"task": {}} if revision == LEGACY else {"_meta": META | {_CAPABILITIES: capabilities}}
        params = {"name": tool, "arguments": arguments} | as_task
        message = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        return answer_of(self.post(revision, message.replace('"1e999"', "1e999").encode(), name=tool))

    def close(self) -> None:
        self._http.close()


def answer_of(response: httpx2.Response) -> dict[str, Any]:
    """The JSON-RPC answer; of a stream, the last message."""
    assert response.status_code < 500, response.text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return json.loads(data[-1])  # type: ignore[no-any-return]
    return response.json() if response.text else {}


def check_answer(answer: dict[str, Any], tool: str) -> None:
    if "error" in answer:
        assert answer["error"]["code"] in REFUSED, answer
        assert len(answer["error"]["message"]) > 10, answer
        return
    result = answer["result"]
    found = result["structuredContent"]
    if not result.get("isError"):
        jsonschema.validate(found, BY_NAME[tool].output_schema)
        return
    [text] = [each["text"] for each in result["content"]]
    assert found["code"] not in ("error", "corrupt", "backend"), answer
    assert found["code"] in text
    assert found["detail"].rstrip(".") in text
    assert len(found["advice"]) > 20, "what to do next"
    assert found["advice"] in text


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    folder = tmp_path_factory.mktemp("mcp")
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        _fill(plane)
    server = Server(folder)
    try:
        peer = Peer(server.url)
        yield peer
        peer.close()
        log = server.log()
    finally:
        server.kill()
    assert "Traceback" not in log, log
    assert "Unexpected error" not in log, log


# Schemas with which a naive validator takes very long, or fails.
EXPOSED: Final[dict[str, Json]] = {
    "unique": {"uniqueItems": True},
    "pattern": {"pattern": "^(a+)+$"},
    "names": {"patternProperties": {"^(a|a)*$": {"type": "integer"}}, "additionalProperties": False},
    "multiple": {"multipleOf": 0.5},
    "bounds": {"minimum": 0, "maximum": 1e308, "type": "integer"},
    "tree": {"anyOf": [{"type": "integer"}, *[{"properties": {"v": {"$ref": "#"}}, "required": ["v"]}] * 3]},
    "unevaluated": {"contains": {"type": "integer"}, "unevaluatedItems": False},
    "any": {},
}


def _fill(plane: fastness.Plane) -> None:
    """Something of everything, under the names that `NAMES` has."""
    jobs = plane.queue("jobs")
    jobs.set_policy(fastness.QueuePolicy(max_attempts=1, retry_delay_seconds=0.0))
    for body in ({"n": 1}, "text", b"\xff\x00", b"x" * 100_000, [None] * 3):
        jobs.put(body, keep_result=True)
    for message in jobs.receive_many(2, extend_for_seconds=0):
        message.nack(error="no")
    plane.mailbox("jobs").send("local", {"hello": "local"})
    plane.mailbox("jobs").send("local", b"\xff" * 60_000)
    plane.world("jobs").create()
    plane.world("jobs").append([1, {"n": float("inf")}, b"\xff", "x" * 100_000], expected_head=0)
    plane.state("jobs").update({"n": b"\xff"})
    plane.entities.write("jobs", "jobs", {"n": 1})
    plane.lease("jobs").acquire("another", ttl_seconds=3_600)
    plane.workflows.start("jobs", id="jobs")
    for name, schema in EXPOSED.items():
        expose(plane, "exposed", {"type": "object", "properties": {"v": schema}}, name=name)
    # A program with access to the rows can store what `expose` refuses.
    broken: Json = {"type": "object", "properties": {"v": {"pattern": "(?=(a+)+$)", "minLength": "1"}}}
    row = row_of(ExposedTool("broken", "queue", "exposed", "", broken))
    plane.collection("mcp-tools").commit([row])


NAMES: Final = st.sampled_from(
    ["jobs", "local", "src/app.py", "another", "0" * 32, "0" * 64, "", ".", "a/../b", "é", "\x00"]
)
NUMBERS: Final = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40])
TEXTS: Final = NAMES | st.text(max_size=20) | st.text(string.printable, max_size=300) | st.just("x" * 5_000)
SCALARS: Final = st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
ANY: Final = st.recursive(
    SCALARS | st.just("\ud800") | st.builds(json.loads, st.just("[" * 300 + "]" * 300)),  # A new one: it is changed.
    lambda each: st.lists(each, max_size=4) | st.dictionaries(TEXTS, each, max_size=4),
    max_leaves=8,
)


def values_of(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Json]:
    """Values that a schema allows, with names and numbers that mean something to the plane."""
    if "$ref" in schema:
        return values_of(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return st.one_of([values_of(each, root) for each in schema["anyOf"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {name: values_of(each, root) for name, each in schema["properties"].items()}
            required = set(schema["required"])
            return st.fixed_dictionaries(
                {name: each for name, each in fields.items() if name in required},
                optional={name: each for name, each in fields.items() if name not in required},
            )
        case "object":
            return st.dictionaries(TEXTS, ANY, min_size=schema.get("minProperties", 0), max_size=3)
        case "array":
            return st.lists(values_of(schema.get("items", {}), root), min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            longest = schema.get("maxLength", 100)
            return TEXTS.filter(lambda text: schema.get("minLength", 0) <= len(text) <= longest)
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"]) | st.integers(
                schema["minimum"], schema["minimum"] + 3
            )
        case "number":
            return st.floats(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return ANY


@st.composite
def arguments_of(draw: st.DrawFn, tool: str) -> Json:
    """Arguments that the schema allows, or with one or two changes."""
    schema = BY_NAME[tool].input_schema
    found = draw(values_of(schema, schema))
    for _ in range(draw(st.integers(0, 2))):
        place, name = found, draw(st.sampled_from([*found, "agent", "x"]) if found else st.just("x"))
        while isinstance(place.get(name), dict | list) and place[name] and draw(st.booleans()):
            inner = place[name]
            if isinstance(inner, list):
                inner[0] = draw(ANY)
                break
            place, name = inner, draw(st.sampled_from(list(inner)))
        if draw(st.booleans()):
            place.pop(name, None)
        else:
            place[name] = draw(ANY)
    waits = found.get("wait_seconds")
    if isinstance(waits, int | float) and 0 < waits <= MCP_WAIT_SECONDS_MAX:
        found["wait_seconds"] = 0
    return found


@pytest.mark.rotating
@pytest.mark.examples(12)
@pytest.mark.parametrize("tool", BY_NAME)
def test_no_arguments_cause_a_5xx_or_a_traceback(peer: Peer, tool: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(arguments_of(tool))
    def check(arguments: Json) -> None:
        for revision in REVISIONS:
            check_answer(peer.call(revision, tool, arguments), tool)

    check()


@pytest.mark.examples(40)
@pytest.mark.parametrize("revision", REVISIONS)
def test_no_json_causes_a_5xx_or_a_traceback(peer: Peer, revision: str, examples: int) -> None:
    methods = (
        "tools/call",
        "tools/list",
        "resources/read",
        "resources/subscribe",
        "prompts/get",
        "completion/complete",
    )
    texts = st.sampled_from([*methods, "tasks/get", "tasks/update", "tasks/cancel", "queue_put", "2.0", "arguments"])
    anything = ANY | texts
    params = anything | st.fixed_dictionaries(
        {"name": st.sampled_from([*BY_NAME, "nope"]) | anything, "arguments": anything}, optional={"task": anything}
    ).map(lambda each: each | ({"_meta": META} if revision == MODERN else {}))
    message = st.fixed_dictionaries(
        {"jsonrpc": st.just("2.0") | anything, "id": st.integers(0, 9) | anything, "method": texts | anything},
        optional={"params": params},
    )

    @settings(max_examples=examples)
    @given(st.one_of(message, message, anything, st.binary(max_size=40), st.lists(message, max_size=2)))
    def check(sent: Json) -> None:
        if isinstance(sent, dict) and isinstance(sent.get("params"), dict):
            given_arguments = sent["params"].get("arguments")
            if isinstance(given_arguments, dict):
                given_arguments.pop("wait_seconds", None)
        answer = answer_of(peer.post(revision, sent))
        if "error" in answer:
            assert answer["error"]["code"] in REFUSED, answer
            assert answer["error"]["message"]

    check()


HOSTILE: Final = st.one_of(
    st.sampled_from(["1e999", 10**400, -(10**400), 10**40, 0.1, 1e300, "a" * 40 + "!", "a" * 100_000]),
    st.sampled_from([1_500, 20_000]).map(lambda count: [{"n": number} for number in range(count)]),
    st.just([1] * 100_000),
    st.integers(1, 60).map(lambda depth: json.loads('{"v":' * depth + "null" + "}" * depth)),
    st.just({"a" * 40 + "!": 1}),
)


@pytest.mark.rotating
@pytest.mark.examples(8)
@pytest.mark.parametrize("tool", [*EXPOSED, "broken"])
def test_no_arguments_of_an_exposed_tool_cause_a_5xx_or_a_hang(peer: Peer, tool: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.fixed_dictionaries({"v": HOSTILE | ANY}, optional={"x": HOSTILE}))
    def check(arguments: Json) -> None:
        for revision in REVISIONS:
            answer = peer.start(revision, tool, arguments)
            if "error" in answer:
                assert answer["error"]["code"] in REFUSED, answer
                assert len(answer["error"]["message"]) > 10, answer
            elif answer["result"].get("isError"):
                found = answer["result"]["structuredContent"]
                assert found["code"] not in ("error", "corrupt", "backend"), answer
            else:
                assert "task" in answer["result"] or "taskId" in answer["result"], answer

    check()
