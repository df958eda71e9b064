"""`/mcp` in revision 2026-07-28 over raw HTTP: what a server without sessions must answer, and what it must refuse.

Each request says by itself which revision it speaks and what its client can do. The requirements are those that the
conformance suite of the protocol checks; its own server has tools for them that this one lacks.
"""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest

from fastness.handles.sync.plane import Plane
from fastness.mcp.exposing import conceal, expose
from fastness.mcp.tasks import InputNeeded, task_of
from tests.support.failures import Failures
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually

MODERN, LEGACY = "2026-07-28", "2025-11-25"
PREFIX = "io.modelcontextprotocol/"
TASKS: dict[str, Any] = {"extensions": {f"{PREFIX}tasks": {}}}
ELICITATION: dict[str, Any] = {"elicitation": {}}
ANY = {"type": "object"}
FORM = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32600, -32601, -32602
HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION = -32020, -32021, -32022


def meta(version: str = MODERN, capabilities: Any = None, **more: Any) -> dict[str, Any]:
    fields = {
        "protocolVersion": version,
        "clientInfo": {"name": "test", "version": "1"},
        "clientCapabilities": capabilities or {},
        **more,
    }
    return {f"{PREFIX}{name}": value for name, value in fields.items()}


def headers_of(method: str, params: dict[str, Any], headers: dict[str, str | None]) -> dict[str, str]:
    """The headers of a request; None leaves one out."""
    sent: dict[str, str | None] = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": method,
        "Mcp-Name": params.get("name") or params.get("uri") or params.get("taskId"),
    }
    return {name: value for name, value in (sent | headers).items() if value is not None}


class Client:
    """Sends single requests, and remembers nothing between them."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, method: str, params: dict[str, Any] | None = None, **headers: str | None) -> httpx2.Response:
        """The answer to a request. Its `_meta` is complete unless the parameters have one."""
        params = {"_meta": meta()} | (params or {})
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        sent = headers_of(method, params, named)
        return httpx2.post(self.url, json=body, headers=sent, timeout=SECONDS_MAX)

    def result(self, method: str, params: dict[str, Any] | None = None, **headers: str | None) -> Any:
        answer = self.post(method, params, **headers)
        assert answer.status_code == 200, answer.text
        [*_, last] = frames_of(answer)
        assert last["id"] == 7
        assert last["result"]["_meta"][f"{PREFIX}serverInfo"]["name"] == "fastness"
        assert "mcp-session-id" not in answer.headers
        return last["result"]

    def refusal(self, method: str, params: dict[str, Any] | None = None, **headers: str | None) -> tuple[int, int]:
        """The HTTP status and the code of a refused request."""
        answer = self.post(method, params, **headers)
        assert answer.json()["id"] == 7
        return answer.status_code, answer.json()["error"]["code"]

    @asynccontextmanager
    async def listening(self, notifications: dict[str, Any]) -> AsyncIterator[AsyncIterator[Any]]:
        """The frames of a `subscriptions/listen`."""
        params = {"notifications": notifications, "_meta": meta()}
        body = {"jsonrpc": "2.0", "id": 9, "method": "subscriptions/listen", "params": params}
        async with (
            httpx2.AsyncClient(timeout=SECONDS_MAX) as client,
            client.stream(
                "POST", self.url, json=body, headers=headers_of("subscriptions/listen", params, {})
            ) as answer,
        ):
            assert answer.status_code == 200
            yield (json.loads(line[5:]) async for line in answer.aiter_lines() if line.startswith("data:"))


def frames_of(answer: httpx2.Response) -> list[Any]:
    """The messages of an answer: one, or those of a stream."""
    if answer.headers["content-type"].startswith("application/json"):
        return [answer.json()]
    return [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the tool `resize`, which is a queue."""
    server = Server(tmp_path_factory.mktemp("stateless"))
    try:
        with server.plane() as plane:
            expose(plane, "resize", ANY)
        yield server
    finally:
        log = server.log()
        server.kill()
    assert "Traceback" not in log, log


@pytest.fixture
def plane(server: Server) -> Iterator[Plane]:
    with server.plane() as plane:
        yield plane


@pytest.fixture
def client(server: Server) -> Client:
    return Client(f"{server.url}/mcp")


# Every request stands alone.


def test_a_request_names_its_revision_and_what_its_client_can_do(client: Client) -> None:
    failures = Failures()
    complete = meta()
    for missing in ("protocolVersion", "clientCapabilities"):
        with failures.of(missing):
            rest = {name: value for name, value in complete.items() if name != PREFIX + missing}
            assert client.refusal("server/discover", {"_meta": rest}) == (400, INVALID_PARAMS)
    with failures.of("no _meta"):
        assert client.refusal("server/discover", {"_meta": None}) == (400, INVALID_PARAMS)
    failures.check()
    client.result("server/discover", {"_meta": {k: v for k, v in complete.items() if k != f"{PREFIX}clientInfo"}})


def test_discovery_names_the_revisions_and_what_the_server_honors(client: Client) -> None:
    found = client.result("server/discover")
    assert found["supportedVersions"] == [MODERN]
    assert f"{PREFIX}tasks" in found["capabilities"]["extensions"]
    failures = Failures()
    for capability in ("tools", "prompts", "resources"):
        with failures.of(capability):
            assert capability in found["capabilities"]
            assert capability in client.result(f"{capability}/list")
    failures.check()


def test_an_unknown_revision_is_refused_with_those_that_are_served(client: Client) -> None:
    answer = client.post("server/discover", {"_meta": meta("v999.0.0")}, MCP_Protocol_Version="v999.0.0")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (answer.json()["id"], error["code"]) == (7, UNSUPPORTED_VERSION)
    assert error["data"] == {"supported": [MODERN], "requested": "v999.0.0"}


def test_methods_that_the_revision_has_not_are_not_found(client: Client) -> None:
    failures = Failures()
    removed = ("initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe")
    for method in (*removed, "tasks/list", "tasks/result", "unknown/method"):
        for capabilities in ({}, TASKS):
            with failures.of((method, capabilities)):
                params = {"_meta": meta(capabilities=capabilities), "taskId": "resize.1"}
                assert client.refusal(method, params, Mcp_Name=None) == (404, METHOD_NOT_FOUND)
    failures.check()


# Headers.


def put_task(client: Client) -> str:
    """A job of the tool `resize`, as a task; its id."""
    params = {"name": "resize", "arguments": {}, "_meta": meta(capabilities=TASKS)}
    task_id: str = client.result("tools/call", params)["taskId"]
    return task_id


def test_a_header_that_differs_from_the_body_is_refused(client: Client, plane: Plane) -> None:
    plane.queue("jobs").put(1)
    named: dict[str, dict[str, Any]] = {
        "tools/call": {"name": "queue_list", "arguments": {}},
        "prompts/get": {"name": "triage_dead_letters", "arguments": {"queue": "jobs"}},
        "resources/read": {"uri": "fastness://main/queues/jobs"},
        **{method: {"taskId": put_task(client)} for method in ("tasks/get", "tasks/cancel")},
        "tasks/update": {"taskId": put_task(client), "inputResponses": {}},
    }
    failures = Failures()
    for method, params in named.items():
        params["_meta"] = meta(capabilities=TASKS)
        [name] = [value for key, value in params.items() if key in ("name", "uri", "taskId")]
        encoded = f"=?base64?{base64.b64encode(name.encode()).decode()}?="
        for wrong in ("other", None, name.upper(), "", f"{name}x", "=?base64?!?="):
            with failures.of((method, wrong)):
                assert client.refusal(method, params, Mcp_Name=wrong) == (400, HEADER_MISMATCH)
        with failures.of((method, "its name")):
            client.result(method, params)
            client.result(method, params, Mcp_Name=encoded)
    for changed in ({"Mcp_Method": "tools/call"}, {"Mcp_Method": None}, {"MCP_Protocol_Version": "v999.0.0"}):
        with failures.of(changed):
            assert client.refusal("tools/list", **changed) == (400, HEADER_MISMATCH)
    failures.check()


def test_the_wrong_header_is_told_before_the_missing_task(client: Client) -> None:
    params = {"taskId": "resize.0", "_meta": meta(capabilities=TASKS)}
    assert client.refusal("tasks/get", params) == (400, INVALID_PARAMS)
    assert client.refusal("tasks/get", params, Mcp_Name="resize.1") == (400, HEADER_MISMATCH)


# What the client has not declared.


def test_tasks_need_a_client_that_has_declared_them(client: Client) -> None:
    task_id = put_task(client)
    failures = Failures()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("tasks/get", {"taskId": task_id}),
        ("tasks/cancel", {"taskId": task_id}),
        ("tasks/update", {"taskId": task_id, "inputResponses": {}}),
        ("subscriptions/listen", {"notifications": {"taskIds": [task_id]}}),
    ]
    for method, params in asked:
        with failures.of(method):
            answer = client.post(method, params)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, MISSING_CAPABILITY)
            assert answer.json()["error"]["data"] == {"requiredCapabilities": TASKS}
    failures.check()


@pytest.fixture
def asking_worker(server: Server) -> Iterator[None]:
    """A worker of `resize` that reports progress and asks a question, which has no answer yet."""

    def work() -> None:
        with server.plane() as plane:
            message = plane.queue("resize").receive(wait_seconds=SECONDS_MAX)
            assert message is not None
            with suppress(InputNeeded), task_of(message) as task:
                task.progress(1, 2, "reading")
                task.ask("size", "Which size?", FORM)

    with server.plane() as plane:
        plane.queue("resize").purge()
    working = threading.Thread(target=work)
    working.start()
    yield
    working.join()


@pytest.mark.parametrize("capabilities", [{}, ELICITATION])
def test_a_client_is_only_asked_if_it_can_be(client: Client, asking_worker: None, capabilities: Any) -> None:
    """A stream has no requests, and no log messages for a client that has asked for none."""
    params = {"name": "resize", "arguments": {}, "_meta": {**meta(capabilities=capabilities), "progressToken": 1}}
    *sent, last = frames_of(client.post("tools/call", params))
    assert {frame["method"] for frame in sent} <= {"notifications/progress"}
    assert "method" not in last
    assert last["result"]["resultType"] == ("input_required" if capabilities else "complete")
    assert ("inputRequests" in last["result"]) == bool(capabilities)


def test_log_messages_are_sent_only_to_those_who_ask(client: Client) -> None:
    params = {"name": "queue_list", "arguments": {}}
    quiet = frames_of(client.post("tools/call", params))
    assert [frame.get("method") for frame in quiet] == [None]
    logged = frames_of(client.post("tools/call", {**params, "_meta": meta(logLevel="debug")}))
    assert [frame.get("method") for frame in logged] == ["notifications/message", None]


# Tasks.


def test_an_answer_to_no_open_question_is_acknowledged_and_changes_nothing(
    client: Client, plane: Plane, asking_worker: None
) -> None:
    """Its form may be of a kind that this server does not know."""
    task_id = put_task(client)
    named = {"taskId": task_id, "_meta": meta(capabilities=TASKS)}
    eventually(lambda: client.result("tasks/get", named)["status"] == "input_required")
    before = client.result("tasks/get", named)
    failures = Failures()
    unknown: list[Any] = [{"ignored": True}, "text", None, []]
    for response in (*unknown, {"action": "accept"}):
        with failures.of(response):
            answered = client.result("tasks/update", {**named, "inputResponses": {"unknown": response}})
            assert {name: value for name, value in answered.items() if name != "_meta"} == {"resultType": "complete"}
    for response in unknown:
        with failures.of(f"size: {response}"):
            refused = client.refusal("tasks/update", {**named, "inputResponses": {"size": response}})
            assert refused == (400, INVALID_PARAMS)
    failures.check()
    assert client.result("tasks/get", named) == before
    client.result("tasks/update", {**named, "inputResponses": {"size": {"action": "decline"}, "more": None}})
    assert client.result("tasks/get", named)["status"] == "working"


# Streams.


async def test_a_stream_has_what_was_asked_for_and_says_of_which_request(client: Client, plane: Plane) -> None:
    queue = plane.queue("watched")
    await asyncio.to_thread(queue.put, 1)
    resource = {"resourceSubscriptions": ["fastness://main/queues/watched"]}
    async with (
        asyncio.timeout(SECONDS_MAX),
        client.listening({"toolsListChanged": True}) as of_tools,
        client.listening({"promptsListChanged": True, **resource}) as of_queue,
    ):
        seen = [await anext(of_tools), await anext(of_queue)]
        assert [each["method"] for each in seen] == ["notifications/subscriptions/acknowledged"] * 2
        await asyncio.to_thread(expose, plane, "another", ANY)
        seen.append(await anext(of_tools))
        assert seen[-1]["method"] == "notifications/tools/list_changed"
        await asyncio.to_thread(queue.put, 2)
        seen.append(await anext(of_queue))
        assert seen[-1]["method"] == "notifications/resources/updated"  # The change of the tools was not sent before.
        assert {each["params"]["_meta"][f"{PREFIX}subscriptionId"] for each in seen} == {9}
    await asyncio.to_thread(conceal, plane, "another")


# What has an id is answered.


def session_headers(client: Client) -> dict[str, str | None]:
    """The headers of a session of the revision before, which has sessions."""
    who = {"name": "test", "version": "1"}
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": who}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    sent = headers_of("initialize", {}, {"MCP-Protocol-Version": LEGACY})
    answer = httpx2.post(client.url, json=body, headers=sent, timeout=SECONDS_MAX)
    return {"MCP-Protocol-Version": LEGACY, "Mcp-Session-Id": answer.headers["mcp-session-id"]}


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_a_request_with_an_id_that_cannot_be_one_is_refused(client: Client, revision: str) -> None:
    headers: dict[str, str | None] = session_headers(client) if revision == LEGACY else {}
    failures = Failures()
    for id in ([1], {"a": 1}, 1.5, True, None):
        for method in ("ping", "tools/call", "initialize", "no/such"):
            with failures.of((id, method)):
                params = {"name": "queue_list", "arguments": {}, "_meta": meta()}
                body = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
                sent = headers_of(method, params, headers)
                answer = httpx2.post(client.url, json=body, headers=sent, timeout=SECONDS_MAX)
                assert (answer.status_code, answer.text[:1]) == (400, "{")
                assert (answer.json()["id"], answer.json()["error"]["code"]) == (None, INVALID_REQUEST)
    failures.check()


# Resources.


def test_a_queue_that_does_not_exist_is_no_resource(client: Client, plane: Plane) -> None:
    failures = Failures()
    for path in ("queues/none", "queues/none/dead-letters", "worlds/none"):
        with failures.of(path):
            uri = f"fastness://main/{path}"
            answer = client.post("resources/read", {"uri": uri})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, INVALID_PARAMS)
            assert error["data"]["code"].endswith("not_found")
            assert error["data"]["uri"] == uri
    failures.check()
    plane.queue("some").put(1)
    assert client.result("resources/read", {"uri": "fastness://main/queues/some"})["contents"] != []
    assert client.result("resources/read", {"uri": "fastness://main/queues/some/dead-letters"})["contents"] != []
