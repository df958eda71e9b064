"""`/mcp` of a server: the SDK's own client, tokens and sessions, isolation, subscriptions, and shutdown."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import mcp_types
import pytest
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourcesListChanged, ResourceUpdated, ToolsListChanged

import fastness
from fastness.errors import InvalidArgument
from fastness.limits import MCP_BODY_BYTES_MAX
from fastness.mcp.exposing import expose
from fastness.mcp.tools import TOOLS
from fastness.plane import Options, open_plane_async
from fastness.server.app import make_app
from fastness.server.authorization import AllowAll, Authenticator, NoAuthentication
from fastness.server.context import ServerContext
from fastness.server.http.limits import HttpLimits
from fastness.server.mcp import endpoint, mounting
from fastness.server.mcp.mounting import Mcp, open_mcp
from fastness.server.mcp.options import McpOptions
from fastness.wire.requests import Request
from tests.support.forked import python_command
from tests.support.server_process import SECONDS_MAX, Server

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


LEGACY, MODERN = "legacy", "2026-07-28"
REVISIONS = (LEGACY, MODERN)
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


class Served:
    """A server with the tokens of ada and bob in `main`, of eve in `other`, and of a reader of queues."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            made = {
                "ada": plane.tokens.create("ada", universes=["main"], verbs=["*"]),
                "bob": plane.tokens.create("bob", universes=["main"], verbs=["*"]),
                "eve": plane.tokens.create("eve", universes=["other"], verbs=["*"]),
                "reader": plane.tokens.create("reader", universes=["main"], verbs=["queue:get", "queue:stats"]),
                "admin": plane.tokens.create("admin", universes=["*"], verbs=["*"]),
                "limited": plane.tokens.create("limited", universes=["main"], verbs=["*"], queues=["own", "own-*"]),
            }
        self.ids = {name: token.info.id for name, token in made.items()}
        self.tokens = {name: token.token for name, token in made.items()}
        self.process = Server(folder, tokens=True, **flags)
        self.url: str = self.process.url

    @asynccontextmanager
    async def client(self, name: str, revision: str, *, query: str = "", **options: Any) -> AsyncIterator[Client]:
        """A client of the SDK with one of the tokens."""
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        async with httpx2.AsyncClient(headers=headers, timeout=SECONDS_MAX) as carrier:
            transport = streamable_http_client(f"{self.url}/mcp{query}", http_client=carrier)
            async with Client(transport, mode=revision, **options) as client:
                yield client

    def post(self, name: str | None, message: Any, **headers: str) -> httpx2.Response:
        """One POST of a message, or of bytes."""
        sent = {**ACCEPT, **({} if name is None else {"Authorization": f"Bearer {self.tokens[name]}"}), **headers}
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return httpx2.post(f"{self.url}/mcp", content=body, headers=sent, timeout=SECONDS_MAX)

    def metric(self, name: str) -> float:
        text = self.process.get("/metrics", token=self.tokens["admin"])[2].decode()
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("mcp"))
    yield served
    log = served.process.log()
    served.process.kill()
    assert "Traceback" not in log, log


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a server for one test, which may stop it."""
    with ExitStack() as running:

        def start_one(**flags: Any) -> Served:
            served = Served(tmp_path, **flags)
            running.callback(served.process.kill)
            return served

        yield start_one


# Every feature, over both transports.


@asynccontextmanager
async def connected(
    served: Served, transport: str, revision: str, *, name: str = "ada", **options: Any
) -> AsyncIterator[Client]:
    """A client with a token, over HTTP or over a child process that uses the same server."""
    if transport == "http":
        async with served.client(name, revision, **options) as client:
            yield client
        return
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    command, args = python_command("-m", "fastness.cli", "--url", served.url, "mcp")
    child = StdioServerParameters(
        command=command,
        args=args,
        env={**kept, "FASTNESS_TOKEN": served.tokens[name]},
    )
    async with Client(child, mode=revision, **options) as client:
        yield client


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_the_sdk_client_uses_every_feature(served: Served, transport: str, revision: str) -> None:
    name = f"{transport}-{revision}"
    seen: asyncio.Queue[str] = asyncio.Queue()
    logged: list[Any] = []

    async def collect(message: Any) -> None:
        seen.put_nowait(_name_of(message))

    async def collect_log(params: mcp_types.LoggingMessageNotificationParams) -> None:
        logged.append(params.data)

    async with (
        asyncio.timeout(10 * SECONDS_MAX),
        connected(
            served,
            transport,
            revision,
            message_handler=collect,
            logging_callback=collect_log,
            **({"log_level": "debug"} if revision == MODERN else {}),
        ) as client,
    ):
        assert client.protocol_version == (MODERN if revision == MODERN else "2025-11-25")
        assert client.server_capabilities.completions is not None or revision == MODERN

        async def call(tool: str, **arguments: Any) -> Any:
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer
            return answer.structured_content

        # Tools, with the schemas of their answers, which the client checks.
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["queue_put"].output_schema is not None
        assert tools["queue_list"].annotations is not None
        assert tools["queue_list"].annotations.read_only_hint
        if revision == LEGACY:
            await client.set_logging_level("debug")
        put = await call("queue_put", queue=name, body={"n": 1})
        [message] = (await call("queue_receive", queue=name))["messages"]
        assert message["id"] == put["id"]
        lease = {"id": message["id"], "lease_id": message["lease_id"], "fence": message["fence"]}
        assert (await call("queue_ack", queue=name, **lease))["settled"]
        refused = await client.call_tool("queue_put", {"queue": name, "body": 1, "priority": 99})
        assert refused.is_error
        assert refused.structured_content["code"] == "invalid_argument"
        await call("mail_send", to="ada", body=f"note of {name}", thread=name)
        assert f"note of {name}" in json.dumps(await call("mail_read"))

        # Resources in pages, templates, prompts and completion.
        with served.process.plane(served.tokens["admin"]) as plane:
            for number in range(60):
                await asyncio.to_thread(plane.queue(f"{name}-{number:03}").put, number)
        listed: list[str] = []
        page = await client.list_resources()
        while True:
            listed += [str(each.uri) for each in page.resources]
            if page.next_cursor is None:
                break
            page = await client.list_resources(cursor=page.next_cursor)
        wanted = {f"fastness://main/queues/{name}-{number:03}" for number in range(60)}
        assert wanted | {f"fastness://main/mail/{name}"} <= set(listed)
        assert len(listed) == len(set(listed))
        templates = [each.uri_template for each in (await client.list_resource_templates()).resource_templates]
        assert "fastness://main/queues/{queue}" in templates
        [content] = (await client.read_resource(f"fastness://main/mail/{name}")).contents
        assert f"note of {name}" in content.text
        prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
        assert prompts == ["hand_over", "triage_dead_letters"]
        prompt = await client.get_prompt("hand_over", {"to": "bob", "queue": name})
        assert "bob" in prompt.messages[0].content.text
        reference = mcp_types.ResourceTemplateReference(uri="fastness://main/queues/{queue}")
        found = await client.complete(reference, {"name": "queue", "value": f"{name}-01"})
        assert found.completion.values == [f"{name}-01{last}" for last in range(10)]

        # Notifications, over a server that another client writes to.
        uri = f"fastness://main/queues/{name}"
        async with AsyncExitStack() as stack:
            if revision == LEGACY:
                await client.subscribe_resource(uri)
            else:
                events = await stack.enter_async_context(client.listen(resource_subscriptions=[uri]))
                stack.callback(asyncio.create_task(_forward(events, seen)).cancel)
            async with served.client("bob", MODERN) as bob:
                await bob.call_tool("queue_put", {"queue": name, "body": 2})
            while await seen.get() != f"updated {uri}":
                pass

        # A call that its client gives up; the next one works.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.call_tool("queue_receive", {"queue": f"{name}-empty", "wait_seconds": 20})
        assert (await call("queue_list", limit=1))["queues"]
        assert any("queue_put" in str(entry) for entry in logged)


# Who may call.


def test_a_call_without_a_token_is_told_where_the_metadata_is(served: Served) -> None:
    for token in (None, "fnt_0_0"):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = served.post(None, HELLO, **headers)
        assert answer.status_code == 401
        assert answer.json()["code"] == "not_allowed"
        where = f'resource_metadata="{served.url}/.well-known/oauth-protected-resource/mcp"'
        assert answer.headers["www-authenticate"] == f'Bearer realm="fastness", {where}'
    for path in ("", "/mcp"):
        document = httpx2.get(f"{served.url}/.well-known/oauth-protected-resource{path}").json()
        assert document["resource"] == f"{served.url}/mcp"
        assert document["bearer_methods_supported"] == ["header"]
        assert "queue:put" in document["scopes_supported"]
        assert "token:create" not in document["scopes_supported"]
        assert "authorization_servers" not in document


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_has_the_tools_that_its_verbs_allow(served: Served, revision: str) -> None:
    async with served.client("reader", revision) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert "queue_status" in names
        assert not names & {"queue_put", "mail_read", "state_set"}
        with pytest.raises(MCPError, match="queue_put needs a token that allows queue:put"):
            await client.call_tool("queue_put", {"queue": "jobs", "body": 1})


def test_a_tool_that_the_token_does_not_allow_names_the_scope_it_needs(served: Served) -> None:
    params = {"name": "queue_put", "arguments": {"queue": "jobs", "body": 1}}
    answer = served.post("reader", {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})
    assert answer.status_code == 403
    assert 'error="insufficient_scope", scope="queue:put"' in answer.headers["www-authenticate"]
    assert (answer.json()["id"], answer.json()["error"]["data"]["scope"]) == (7, "queue:put")


async def test_the_universe_comes_from_the_token_or_the_url(served: Served) -> None:
    for name, query, universe in (("eve", "", "other"), ("admin", "", "main"), ("admin", "?universe=third", "third")):
        async with served.client(name, MODERN, query=query) as client:
            put = await client.call_tool("queue_put", {"queue": f"of-{name}", "body": 1})
            assert not put.is_error, put
        with served.process.plane(served.tokens["admin"], universe) as plane:
            assert plane.queue(f"of-{name}").stats().ready == 1
    answer = httpx2.post(
        f"{served.url}/mcp?universe=main",
        json=HELLO,
        headers={**ACCEPT, "Authorization": f"Bearer {served.tokens['eve']}"},
    )
    assert answer.status_code == 403
    assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


# Isolation.


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_cannot_read_the_mailbox_of_another(served: Served, revision: str) -> None:
    async with AsyncExitStack() as stack:
        ada, bob, eve = [
            await stack.enter_async_context(served.client(name, revision)) for name in ("ada", "bob", "eve")
        ]
        sent = await ada.call_tool("mail_send", {"to": "bob", "body": f"for bob only, {revision}"})
        assert not sent.is_error, sent
        thread = f"thread-{revision}"
        await ada.call_tool("mail_send", {"to": "bob", "body": "in a thread", "thread": thread})
        read = await bob.call_tool("mail_read", {})
        assert f"for bob only, {revision}" in json.dumps(read.structured_content)
        assert (await bob.read_resource(f"fastness://main/mail/{thread}")).contents
        for other in (ada, eve):
            read = await other.call_tool("mail_read", {})
            assert "for bob only" not in json.dumps(read.structured_content)
            for uri in (f"fastness://main/mail/{thread}", "fastness://main/mail/bob"):
                with pytest.raises(MCPError) as refused:
                    await other.read_resource(uri)
                assert "in a thread" not in str(refused.value)
        # No argument names another mailbox.
        tried = await ada.call_tool("mail_read", {"agent": "bob"})
        assert tried.is_error


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_cannot_use_a_queue_of_another_universe(served: Served, revision: str) -> None:
    async with served.client("ada", revision) as ada, served.client("eve", revision) as eve:
        queue = f"secrets-{revision}"
        put = await ada.call_tool("queue_put", {"queue": queue, "body": "of main"})
        id = put.structured_content["id"]
        assert (await eve.call_tool("queue_status", {"queue": queue, "id": id})).is_error
        received = await eve.call_tool("queue_receive", {"queue": queue})
        assert "of main" not in json.dumps(received.structured_content)
        listed = await eve.call_tool("queue_list", {})
        assert queue not in json.dumps(listed.structured_content)
        with pytest.raises(MCPError):
            await eve.read_resource(f"fastness://main/queues/{queue}")
        assert (await ada.read_resource(f"fastness://main/queues/{queue}")).contents


@pytest.mark.rotating
@pytest.mark.parametrize("transport", ["http", "stdio"])
@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_for_some_queues_reaches_no_other(served: Served, transport: str, revision: str) -> None:
    queue = f"hidden-{transport}-{revision}"
    with fastness.connect(served.url, token=served.tokens["ada"]) as plane:
        jobs = plane.queue(queue)
        jobs.set_policy(fastness.QueuePolicy(max_attempts=1))
        ids = [jobs.put("secret", keep_result=True).id for _ in range(3)]
        received = jobs.receive_many(3, visibility_seconds=3_600, extend_for_seconds=0)
        for message, settle in zip(received, ("ack", "nack", ""), strict=True):
            if settle:
                getattr(message, settle)()
        plane.queue("own-1").put("not secret")
        for target, tool in ((queue, "hidden"), ("own-1", "shown")):
            expose(plane, target, {"type": "object"}, name=tool)
        before = jobs.stats()

        lease = {"id": ids[2], "lease_id": message.lease.lease_id, "fence": message.lease.fence}
        calls: dict[str, list[dict[str, Any]]] = {
            "queue_put": [{"body": 1}],
            "queue_receive": [{}],
            "queue_ack": [lease],
            "queue_nack": [{**lease, "error": "no"}],
            "queue_extend": [lease],
            "queue_status": [{"id": id} for id in ids],
            "queue_result": [{"id": id} for id in ids],
            "dead_letters_search": [{}],
            "dead_letters_redrive": [{"ids": [ids[1]]}],
        }
        assert set(calls) == {tool.name for tool in TOOLS if "queue" in tool.listed.input_schema["properties"]}
        async with connected(served, transport, revision, name="limited") as client:
            for name, each in calls.items():
                for arguments in each:
                    found = await client.call_tool(name, {"queue": queue, **arguments})
                    assert found.is_error, name
                    assert found.structured_content["code"] == "not_allowed", (name, found)
                    assert "secret" not in str(found)
            listed = (await client.call_tool("queue_list", {})).structured_content
            assert "own-1" in str(listed)
            assert queue not in str(listed)
            assert (await client.call_tool("queue_receive", {"queue": "own-1"})).structured_content["messages"]

            names = {tool.name for tool in (await client.list_tools()).tools}
            assert "shown" in names
            assert "hidden" not in names
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("hidden", {})
            task = await client.call_tool("task_status", {"task_id": f"{queue}.{ids[0]}"})
            assert task.structured_content["code"] == ("not_found" if transport == "http" else "not_allowed")

            assert queue not in str((await client.list_resources()).resources)
            for uri in (f"fastness://main/queues/{queue}", f"fastness://main/queues/{queue}/dead-letters"):
                with pytest.raises(MCPError):
                    await client.read_resource(uri)
                with pytest.raises(MCPError):
                    if revision == LEGACY:
                        await client.subscribe_resource(uri)
                    else:
                        async with client.listen(resource_subscriptions=[uri]):
                            pass
            reference = mcp_types.ResourceTemplateReference(uri="fastness://main/queues/{queue}")
            completed = await client.complete(reference, {"name": "queue", "value": "hidden"})
            assert completed.completion.values == []
        assert jobs.stats() == before


def test_a_session_of_another_token_is_not_found(served: Served) -> None:
    session = served.post("ada", HELLO).headers["mcp-session-id"]
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert served.post("ada", ping, **{"mcp-session-id": session}).status_code == 200
    assert served.post("bob", ping, **{"mcp-session-id": session}).status_code == 404
    headers = {"mcp-session-id": session}
    delete = [
        httpx2.delete(f"{served.url}/mcp", headers={**headers, "Authorization": f"Bearer {served.tokens[name]}"})
        for name in ("bob", "ada", "ada")
    ]
    assert [answer.status_code for answer in delete] == [404, 200, 404]


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_subscription_to_a_foreign_resource_is_refused(served: Served, revision: str) -> None:
    async with served.client("ada", MODERN) as ada, served.client("eve", revision) as eve:
        await ada.call_tool("queue_put", {"queue": "watched", "body": 1})
        await ada.call_tool("mail_send", {"to": "bob", "body": 1, "thread": "private"})
        for uri in ("fastness://main/queues/watched", "fastness://other/mail/private", "file:///etc/passwd"):
            with pytest.raises(MCPError):
                if revision == LEGACY:
                    await eve.subscribe_resource(uri)
                else:
                    async with eve.listen(resource_subscriptions=[uri]):
                        pass


# Notifications.


@pytest.mark.parametrize("revision", REVISIONS)
async def test_subscribers_are_notified_of_changes(served: Served, revision: str) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    queue = f"orders-{revision}"
    uri = f"fastness://main/queues/{queue}"

    async def collect(message: Any) -> None:
        seen.put_nowait(_name_of(message))

    async def expect(*names: str) -> None:
        """Wait until each of the notifications has arrived."""
        missing = set(names)
        async with asyncio.timeout(SECONDS_MAX):
            while missing:
                missing.discard(await seen.get())

    with served.process.plane(served.tokens["admin"]) as plane:
        async with served.client("ada", revision, message_handler=collect) as client:
            await client.list_tools()
            await client.list_resources()
            async with AsyncExitStack() as stack:
                if revision == LEGACY:
                    await client.subscribe_resource(uri)
                else:
                    events = await stack.enter_async_context(
                        client.listen(
                            resource_subscriptions=[uri], tools_list_changed=True, resources_list_changed=True
                        )
                    )
                    forwarding = asyncio.create_task(_forward(events, seen))
                    stack.callback(forwarding.cancel)
                await asyncio.to_thread(plane.queue(queue).put, 1)
                await expect(f"updated {uri}", "resources")
                await asyncio.to_thread(plane.queue(queue).put, 2)
                await expect(f"updated {uri}")
                await asyncio.to_thread(_expose, plane, f"tool-{revision}")
                await expect("tools")
                if revision == LEGACY:
                    await client.unsubscribe_resource(uri)
                    while not seen.empty():
                        seen.get_nowait()
                    await asyncio.to_thread(plane.queue(queue).put, 3)
                    await asyncio.to_thread(plane.queue(f"{queue}-2").put, 1)
                    async with asyncio.timeout(SECONDS_MAX):
                        assert await seen.get() == "resources"  # And not the queue, which changed before.


async def test_subscribers_of_a_report_are_notified_and_other_tokens_have_no_reports(served: Served) -> None:
    uri = "fastness://main/reports/daily"
    seen: asyncio.Queue[str] = asyncio.Queue()

    def publish(name: str, value: bytes) -> None:
        with served.process.plane(served.tokens["admin"]) as plane:
            plane.collection("reports").commit([fastness.PutRow("reports", (name,), value)])

    await asyncio.to_thread(publish, "daily", b'{"open": 3}')
    async with (
        asyncio.timeout(10 * SECONDS_MAX),
        served.client("ada", MODERN) as ada,
        ada.listen(resource_subscriptions=[uri], resources_list_changed=True) as events,
    ):
        forwarding = asyncio.create_task(_forward(events, seen))
        await asyncio.to_thread(publish, "weekly", b"1")
        assert await seen.get() == "resources"  # And not the other report.
        await asyncio.to_thread(publish, "daily", b'{"open": 4}')
        while await seen.get() != f"updated {uri}":  # The list may change for other reasons.
            pass
        forwarding.cancel()
        assert '"open":4' in (await ada.read_resource(uri)).contents[0].text
    for name in ("reader", "eve"):  # A token without the verbs, and one of another universe.
        async with served.client(name, MODERN) as client:
            listed = [resource.uri for resource in (await client.list_resources()).resources]
            assert not [each for each in listed if "/reports/" in each]
            with pytest.raises(MCPError) as refused:
                await client.read_resource(uri)
            assert "open" not in str(refused.value)
            with pytest.raises(MCPError):
                async with client.listen(resource_subscriptions=[uri]):
                    pass


async def _forward(events: Any, seen: "asyncio.Queue[str]") -> None:
    async for event in events:
        match event:
            case ResourceUpdated(uri=uri):
                seen.put_nowait(f"updated {uri}")
            case ToolsListChanged():
                seen.put_nowait("tools")
            case ResourcesListChanged():
                seen.put_nowait("resources")


def _name_of(message: Any) -> str:
    match message:
        case mcp_types.ResourceUpdatedNotification():
            return f"updated {message.params.uri}"
        case mcp_types.ToolListChangedNotification():
            return "tools"
        case mcp_types.ResourceListChangedNotification():
            return "resources"
    return type(message).__name__


def _expose(plane: fastness.Plane, name: str) -> None:
    expose(plane, "reports", {"type": "object"}, name=name, description="Makes a report.")


# The end of sessions, streams and servers.


async def test_a_revoked_token_ends_its_sessions_and_streams(start: Callable[..., Served]) -> None:
    served = start()
    ended = asyncio.Event()
    async with served.client("bob", LEGACY) as bob:
        await bob.list_tools()
        ada = await asyncio.to_thread(served.post, "ada", HELLO)
        session = {"mcp-session-id": ada.headers["mcp-session-id"]}
        reading = asyncio.create_task(_read_stream(served, "ada", session))
        listening = asyncio.create_task(_listen_until_it_ends(served, "ada", ended))
        async with asyncio.timeout(SECONDS_MAX):
            while await asyncio.to_thread(served.metric, "fastness_mcp_streams") < 3:  # Bob has one, too.
                await asyncio.sleep(0.02)
        with served.process.plane(served.tokens["admin"]) as plane:
            await asyncio.to_thread(plane.tokens.revoke, served.ids["ada"])
        async with asyncio.timeout(SECONDS_MAX):
            await reading
            await listening
        assert (await asyncio.to_thread(served.post, "ada", HELLO, **session)).status_code == 401
        assert not (await bob.call_tool("queue_list", {})).is_error
        assert served.metric("fastness_mcp_sessions") == 1


async def _read_stream(served: Served, name: str, session: dict[str, str]) -> None:
    """Read the stream of notifications of a session until the server ends it."""
    headers = {**ACCEPT, **session, "Authorization": f"Bearer {served.tokens[name]}"}
    async with (
        httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier,
        carrier.stream("GET", f"{served.url}/mcp", headers=headers) as stream,
    ):
        assert stream.status_code == 200
        async for _ in stream.aiter_bytes():
            pass


async def _listen_until_it_ends(served: Served, name: str, ended: asyncio.Event) -> None:
    async with served.client(name, MODERN) as client, client.listen(tools_list_changed=True) as events:
        async for _ in events:
            pass
    ended.set()


async def test_open_streams_and_waiting_calls_do_not_delay_a_stop(start: Callable[..., Served]) -> None:
    served = start(drain_seconds=600)
    answers: dict[str, Any] = {}
    ended = asyncio.Event()

    async def receive(revision: str) -> None:
        async with served.client("ada", revision) as client:
            answers[revision] = await client.call_tool("queue_receive", {"queue": "empty", "wait_seconds": 20})

    async with asyncio.timeout(SECONDS_MAX):
        session = {"mcp-session-id": (await asyncio.to_thread(served.post, "ada", HELLO)).headers["mcp-session-id"]}
        streams = [
            asyncio.create_task(_read_stream(served, "ada", session)),
            asyncio.create_task(_listen_until_it_ends(served, "bob", ended)),
        ]
        calls = [asyncio.create_task(receive(revision)) for revision in REVISIONS]
        while (
            await asyncio.to_thread(served.metric, "fastness_mcp_streams") < 3
            or await asyncio.to_thread(served.metric, "fastness_calls_waiting") < 2
        ):
            await asyncio.sleep(0.02)
        assert await asyncio.to_thread(served.process.stop) == 0
        await asyncio.gather(*streams)
        with suppress(Exception):  # The client cannot end its session: the server is gone.
            await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers.values():
        assert answer.is_error
        assert answer.structured_content["code"] == "shutdown_draining"
        assert answer.structured_content["retry"] == "later"
    assert set(answers) == set(REVISIONS)
    assert "still in flight" not in served.process.log()


def test_a_server_that_stops_refuses_new_calls(tmp_path: Path) -> None:
    server = Server(tmp_path, drain_seconds=600)  # Without tokens, so that an upload needs none.
    try:
        with server.unfinished_upload() as finish:
            server.process.terminate()
            assert server.logged("stopping: waiting")
            answer = httpx2.post(f"{server.url}/mcp", json=HELLO, headers=ACCEPT)
            assert (answer.status_code, answer.json()["code"]) == (503, "shutdown_draining")
            assert finish() == 201
        assert server.process.wait(SECONDS_MAX) == 0
    finally:
        server.kill()


# A server without tokens.


async def test_every_client_of_a_server_without_tokens_is_the_same_agent(tmp_path: Path) -> None:
    server = Server(tmp_path, mcp_agent="desk")
    try:
        for revision in REVISIONS:
            async with Client(f"{server.url}/mcp", mode=revision) as client:
                assert not (await client.call_tool("mail_send", {"to": "desk", "body": revision})).is_error
                read = await client.call_tool("mail_read", {})
                assert revision in json.dumps(read.structured_content)
        foreign = {**ACCEPT, "Origin": "https://evil.example"}
        answer = httpx2.post(f"{server.url}/mcp", json=HELLO, headers=foreign)
        assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")
        rebound = {**ACCEPT, "Host": "evil.example"}
        assert httpx2.post(f"{server.url}/mcp", json=HELLO, headers=rebound).status_code == 401
    finally:
        server.kill()
    assert "Traceback" not in server.log()


# Bad requests.


def test_bad_requests_are_refused(served: Served) -> None:
    modern = {"mcp-protocol-version": MODERN}
    unknown = {"jsonrpc": "2.0", "id": 1, "method": "no/such"}
    statuses = {
        "no JSON": served.post("ada", b"{").status_code,
        "a list": served.post("ada", [1]).status_code,
        "no method": served.post("ada", {"jsonrpc": "2.0", "id": 1}).status_code,
        "deep": served.post("ada", b"[" * 100_000).status_code,
        "no session": served.post("ada", unknown).status_code,
        "a session that does not exist": served.post("ada", unknown, **{"mcp-session-id": "0"}).status_code,
        "2026 without its fields": served.post("ada", unknown, **modern).status_code,
        "an unknown revision": served.post("ada", unknown, **{"mcp-protocol-version": "1999-01-01"}).status_code,
        "no accept": served.post("ada", HELLO, Accept="text/html").status_code,
        "an empty universe": served.post("ada", HELLO, **{"x-fastness-universe": ""}).status_code,
    }
    assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
    large = served.post("ada", b" " * (MCP_BODY_BYTES_MAX + 1))
    assert (large.status_code, large.json()["code"]) == (413, "body_too_large")
    foreign = served.post("ada", HELLO, Origin="https://evil.example")
    assert (foreign.status_code, foreign.json()["code"]) == (403, "foreign_origin")


async def test_a_client_that_disconnects_ends_its_call(served: Served) -> None:
    async with served.client("ada", MODERN) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.call_tool("queue_receive", {"queue": "quiet", "wait_seconds": 20})
        name = 'fastness_requests_total{code="cancelled",op="queues.receive"}'
        async with asyncio.timeout(SECONDS_MAX):
            while await asyncio.to_thread(served.process.get, "/metrics", token=served.tokens["admin"]):
                text = (await asyncio.to_thread(served.process.get, "/metrics", token=served.tokens["admin"]))[2]
                if name in text.decode():
                    break
                await asyncio.sleep(0.02)


# Servers in this process, whose parts a test can change.


class FailingTransport:
    """A transport that raises an unexpected error for the queue `boom`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Any], call: Any = None) -> Any:
        if getattr(request, "queue", None) == "boom":
            raise RuntimeError("secret: /etc/passwd")
        return await self._transport.call(request, call)


@asynccontextmanager
async def in_process(
    options: McpOptions, authenticator: Authenticator | None = None
) -> AsyncIterator[tuple[str, Mcp | None]]:
    """The URL of a server on this event loop, and its `/mcp`."""
    transport = await open_plane_async("memory:", Options())
    context = ServerContext(FailingTransport(transport), authenticator)
    mcp = open_mcp(context, HttpLimits(), options)
    server = uvicorn.Server(
        uvicorn.Config(make_app(context, mcp=mcp), port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while not server.started:
                await asyncio.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}", mcp
    finally:
        if mcp is not None:
            await mcp.close()
        server.should_exit = True
        await serving
        if mcp is not None:
            await mcp.stop()
        await transport.close()


@pytest.mark.parametrize("revision", REVISIONS)
async def test_an_unexpected_error_shows_a_correlation_id_and_nothing_else(
    revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_process(McpOptions()) as (url, _), httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:
        carrier.headers["X-Correlation-Id"] = "the-id-of-the-caller"
        transport = streamable_http_client(f"{url}/mcp", http_client=carrier)
        async with Client(transport, mode=revision) as client:
            for failing in (
                client.call_tool("queue_put", {"queue": "boom", "body": 1}),
                client.read_resource("fastness://main/queues/boom"),
            ):
                with pytest.raises(MCPError) as refused:
                    await failing
                assert "secret" not in str(refused.value.error)
                assert "the-id-of-the-caller" in str(refused.value.error)
            assert not (await client.call_tool("queue_put", {"queue": "jobs", "body": 1})).is_error
    assert "secret: /etc/passwd" in caplog.text


async def test_the_metadata_names_the_public_url_and_the_authorization_servers() -> None:
    servers = ("https://login.example", "https://other.example")
    options = McpOptions(url="https://plane.example/agents/mcp", authorization_servers=servers)
    async with in_process(options) as (url, _), httpx2.AsyncClient() as carrier:
        document = (await carrier.get(f"{url}/.well-known/oauth-protected-resource")).json()
        assert document["resource"] == "https://plane.example/agents/mcp"
        assert document["authorization_servers"] == list(servers)
        rebound = await carrier.get(f"{url}/.well-known/oauth-protected-resource/mcp", headers={"Host": 'a"b'})
        assert rebound.status_code < 500


async def test_sessions_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MCP_SESSIONS_PER_TOKEN_MAX", 2)
    async with in_process(McpOptions()) as (url, _), httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:

        async def open_session() -> httpx2.Response:
            return await carrier.post(f"{url}/mcp", json=HELLO, headers=ACCEPT)

        first, second, third = [await open_session() for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 503)
        assert third.json()["retry"] == "later"
        async with Client(f"{url}/mcp", mode=MODERN) as client:  # It needs no session.
            assert not (await client.call_tool("queue_list", {})).is_error
        await carrier.delete(f"{url}/mcp", headers={"mcp-session-id": first.headers["mcp-session-id"]})
        assert [(await open_session()).status_code for _ in range(2)] == [200, 503]


class Tenant(AllowAll):
    """A caller whose token is for one universe."""

    @property
    def only_universe(self) -> str:
        return "main"


class Tenants(NoAuthentication):
    """Admits every caller as a tenant."""

    def authenticate(self, headers: Mapping[str, str], client: str) -> Tenant:
        del headers
        return Tenant(None, client)


@pytest.mark.parametrize("method", ["initialize", "subscriptions/listen"])
async def test_idle_sessions_and_closed_streams_are_no_connections(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(endpoint, "MCP_SESSION_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "_END_SECONDS", 0.01)
    async with in_process(McpOptions(), Tenants()) as (url, _), httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:

        async def until_connections(expected: int) -> None:
            async with asyncio.timeout(SECONDS_MAX):
                while (await carrier.get(f"{url}/v1/universes/main/usage")).json()["connections"] != expected:
                    await asyncio.sleep(0.01)

        if method == "initialize":
            assert (await carrier.post(f"{url}/mcp", json=HELLO, headers=ACCEPT)).status_code == 200
        else:
            async with Client(f"{url}/mcp", mode=MODERN) as client:
                assert not (await client.call_tool("queue_list", {})).is_error
                await until_connections(0)
                async with client.listen(tools_list_changed=True):
                    await until_connections(1)
        await until_connections(0)


async def test_idle_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MCP_SESSION_IDLE_SECONDS", 0.1)
    async with in_process(McpOptions()) as (url, mcp), httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:
        assert mcp is not None
        opened = await carrier.post(f"{url}/mcp", json=HELLO, headers=ACCEPT)
        assert opened.status_code == 200
        async with asyncio.timeout(SECONDS_MAX):
            while mcp.sessions:
                await asyncio.sleep(0.02)
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        session = {**ACCEPT, "mcp-session-id": opened.headers["mcp-session-id"]}
        assert (await carrier.post(f"{url}/mcp", json=ping, headers=session)).status_code == 404


async def test_an_expired_session_has_ended_before_the_sdk_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process(McpOptions()) as (url, mcp), httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:
        assert mcp is not None
        opened = await carrier.post(f"{url}/mcp", json=HELLO, headers=ACCEPT)
        assert mcp.sessions == 1
        monkeypatch.setattr(endpoint, "MCP_SESSION_IDLE_SECONDS", -1)
        assert mcp.sessions == 0
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        session = {**ACCEPT, "mcp-session-id": opened.headers["mcp-session-id"]}
        assert (await carrier.post(f"{url}/mcp", json=ping, headers=session)).status_code == 404


async def test_a_server_without_mcp_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_installed, detail in ((True, "serve with --mcp"), (False, "pip install '.[mcp]'")):
        monkeypatch.setattr(mounting, "find_spec", {"mcp": object() if is_installed else None}.get)
        async with in_process(McpOptions(enabled=False if is_installed else None)) as (url, mcp):
            assert mcp is None
            async with httpx2.AsyncClient() as carrier:
                answer = await carrier.post(f"{url}/mcp", json=HELLO, headers=ACCEPT)
                assert answer.status_code == 404
                assert detail in answer.json()["detail"]
    with pytest.raises(InvalidArgument, match=r"pip install '\.\[mcp\]'"):
        async with in_process(McpOptions(enabled=True)):
            pass
