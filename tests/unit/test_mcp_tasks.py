"""Exposed queues and workflows as tools, and their jobs as tasks of both protocol revisions, in process."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import mcp_types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

import fastness
from fastness import AsyncPlane
from fastness.errors import InvalidArgument, InvalidName, MessageCancelled, NotFound, ShutdownDraining
from fastness.mcp import Caller, exposed_tools, make_server, task_protocols
from fastness.mcp.durable_tasks import TaskView
from fastness.mcp.exposing import conceal, expose, expose_async, exposed
from fastness.mcp.schema_validator import errors_of
from fastness.mcp.task_rows import Question
from fastness.mcp.tasks import InputNeeded, task_of
from tests.support.failures import Failures
from tests.support.mcp_task_client import EXTENSION, TaskClient, TaskExtension

REVISIONS: Final = ("2025-11-25", "2026-07-28")
WIDTH: Final = {
    "type": "object",
    "properties": {"width": {"type": "integer", "minimum": 1}, "name": {"$ref": "#/$defs/name"}},
    "required": ["width"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 10}},
}
SIZE_FORM: Final = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}

both_revisions = pytest.mark.parametrize("revision", REVISIONS)


@pytest.fixture
async def plane() -> AsyncIterator[AsyncPlane]:
    async with fastness.open_async("memory:") as plane:
        await expose_async(plane, "resize", WIDTH, description="Resizes an image.")
        yield plane


@asynccontextmanager
async def connected(
    plane: AsyncPlane, revision: str, agent: str = "ada", *, has_tasks: bool = True, **options: Any
) -> AsyncIterator[TaskClient]:
    server = make_server(lambda context: Caller(plane=plane, agent=agent))
    mode: Any = "legacy" if revision == "2025-11-25" else "auto"
    extensions = [TaskExtension()] if has_tasks else []
    async with asyncio.timeout(60), Client(server, mode=mode, extensions=extensions, **options) as client:
        assert client.protocol_version == revision
        yield TaskClient(client)


async def received(plane: AsyncPlane, queue: str = "resize") -> fastness.AsyncMessage:
    message = await plane.queue(queue).receive(wait_seconds=20)
    assert message is not None
    return message


@both_revisions
async def test_a_task_runs_to_its_result(plane: AsyncPlane, revision: str) -> None:
    async with connected(plane, revision) as client:
        listed = {tool.name: tool for tool in (await client.client.list_tools()).tools}
        assert listed["resize"].description == "Resizes an image."
        assert listed["resize"].input_schema == WIDTH
        if client.is_modern:
            assert EXTENSION in (client.client.server_capabilities.extensions or {})
        else:
            assert listed["resize"].execution == mcp_types.ToolExecution(task_support="optional")
            assert client.client.server_capabilities.tasks is not None
        task_id = await client.start("resize", width=3, name="cat")
        message = await received(plane)
        assert message.json() == {"width": 3, "name": "cat"}
        async with task_of(message) as task:
            assert task.id == task_id
            await task.progress(2, 4, "half")
            found = await client.get(task_id)
            assert (found["status"], found["statusMessage"]) == ("working", "2 of 4: half")
            await message.ack(result={"path": "/cat.png"})
    async with connected(plane, revision) as client:  # Another connection finds it by its id.
        found = await client.get(task_id)
        assert found["status"] == "completed"
        assert found["ttlMs" if client.is_modern else "ttl"] >= 3_600_000
        result = await client.result(task_id)
        assert result.structured_content == {"path": "/cat.png"}
        assert json.loads(result.content[0].text) == {"path": "/cat.png"}
        if not client.is_modern:
            assert result.meta == {"io.modelcontextprotocol/related-task": {"taskId": task_id}}


@both_revisions
async def test_a_cancelled_task_is_not_delivered_again(plane: AsyncPlane, revision: str) -> None:
    async with connected(plane, revision) as client:
        waiting, leased = await client.start("resize", width=1), await client.start("resize", width=2)
        message = await received(plane)
        assert message.json() == {"width": 1}
        held = await received(plane)
        await message.nack(intent="defer")
        for task_id in (waiting, leased):
            answer = await client.cancel(task_id)
            assert client.is_modern or answer["status"] == "cancelled"
            assert (await client.get(task_id))["status"] == "cancelled"
        with pytest.raises(MessageCancelled):
            await held.ack(result="too late")
        assert await plane.queue("resize").receive() is None
        if client.is_modern:
            await client.cancel(waiting)  # Again: acknowledged, without an effect.
        else:
            with pytest.raises(MCPError, match="it is cancelled"):
                await client.cancel(waiting)
            with pytest.raises(MCPError, match="was cancelled"):
                await client.result(waiting)


@both_revisions
async def test_a_dead_letter_is_a_failed_task(plane: AsyncPlane, revision: str) -> None:
    async with connected(plane, revision) as client:
        task_id = await client.start("resize", width=1)
        await (await received(plane)).reject(ValueError("no such image"))
        found = await client.get(task_id)
        assert found["status"] == "failed"
        assert "no such image" in found["statusMessage"]
        assert "Traceback" not in str(found)
        if client.is_modern:
            assert found["error"]["code"] == mcp_types.INTERNAL_ERROR
        else:
            with pytest.raises(MCPError, match="no such image"):
                await client.result(task_id)


@both_revisions
async def test_a_task_asks_and_continues_with_the_answer(plane: AsyncPlane, revision: str) -> None:
    asked: list[Any] = []

    async def elicit(context: Any, params: Any) -> mcp_types.ElicitResult:
        asked.append(params)
        return mcp_types.ElicitResult(action="accept", content={"size": 9})

    async def work() -> Any:
        message = await received(plane)
        async with task_of(message) as task:
            answer = await task.ask("size", "Which size?", SIZE_FORM)
            await message.ack(result={"answer": answer.content, "attempts": message.attempts})
        return message

    async with connected(plane, revision, elicitation_callback=elicit) as client:
        task_id = await client.start("resize", width=1)
        await work()
        found = await client.get(task_id)
        assert (found["status"], found["statusMessage"]) == ("input_required", "Which size?")
        if client.is_modern:
            request = found["inputRequests"]["size"]
            assert request["method"] == "elicitation/create"
            assert request["params"]["requestedSchema"] == SIZE_FORM
            with pytest.raises(MCPError, match="does not fit the question"):
                await client.answer(task_id, size={"action": "accept", "content": {"size": "large"}})
            assert (await client.get(task_id))["status"] == "input_required"
            await client.answer(
                task_id, size={"action": "accept", "content": {"size": 9}}, unknown={"action": "decline"}
            )
            await client.answer(task_id, size={"action": "decline"})  # The first answer counts.
            assert (await client.get(task_id))["status"] == "working"
            await work()
        else:
            finished = asyncio.create_task(work())
            await client.result(task_id)
            await finished
            assert [(each.message, each.requested_schema) for each in asked] == [("Which size?", SIZE_FORM)]
            assert asked[0].meta["io.modelcontextprotocol/related-task"] == {"taskId": task_id}
        assert (await client.result(task_id)).structured_content == {"answer": {"size": 9}, "attempts": 2}
        assert (await plane.queue("resize").get(task_id.rpartition(".")[2])).failure_attempts == 0


async def test_an_answer_that_meets_a_leased_job_is_delivered_with_the_next_look(plane: AsyncPlane) -> None:
    """A job whose delay ended without an answer is with a worker while the answer arrives."""
    async with connected(plane, "2026-07-28") as client:
        task_id = await client.start("resize", width=1)
        with pytest.raises(InputNeeded):
            await task_of(await received(plane)).ask("size", "Which size?", SIZE_FORM)
        await plane.queue("resize").update(task_id.rpartition(".")[2], delay_seconds=0)
        held = await received(plane)
        await client.answer(task_id, size={"action": "accept", "content": {"size": 9}})
        await held.nack(intent="defer", delay_seconds=600)
        assert await plane.queue("resize").receive() is None
        assert (await client.get(task_id))["status"] == "working"
        answer = await task_of(await received(plane)).ask("size", "Which size?", SIZE_FORM)
        assert answer.content == {"size": 9}


async def _leave_working(plane: AsyncPlane, client: TaskClient, task_id: str) -> None:
    pass


async def _complete(plane: AsyncPlane, client: TaskClient, task_id: str) -> None:
    await (await received(plane)).ack(result={"secret": 1})


async def _fail(plane: AsyncPlane, client: TaskClient, task_id: str) -> None:
    await (await received(plane)).reject("secret")


async def _cancel(plane: AsyncPlane, client: TaskClient, task_id: str) -> None:
    await client.cancel(task_id)


async def _ask(plane: AsyncPlane, client: TaskClient, task_id: str) -> None:
    with pytest.raises(InputNeeded):
        await task_of(await received(plane)).ask("size", "secret?", SIZE_FORM)


@both_revisions
@pytest.mark.parametrize(
    ("status", "bring"),
    [
        ("working", _leave_working),
        ("completed", _complete),
        ("failed", _fail),
        ("cancelled", _cancel),
        ("input_required", _ask),
    ],
)
async def test_a_task_of_another_agent_is_unknown(
    plane: AsyncPlane, revision: str, status: str, bring: Callable[[AsyncPlane, TaskClient, str], Awaitable[None]]
) -> None:
    async with connected(plane, revision) as owner, connected(plane, revision, "bob") as other:
        task_id = await owner.start("resize", width=1)
        await bring(plane, owner, task_id)
        absent = task_id[:-1] + ("0" if task_id[-1] != "0" else "1")
        calls: list[Callable[[str], Awaitable[Any]]] = [other.get, other.cancel]
        calls.append(other.answer if other.is_modern else other.result)
        for call in calls:
            foreign, unknown = [await _error(call(each)) for each in (task_id, absent)]
            assert foreign.code == mcp_types.INVALID_PARAMS
            assert foreign.message.startswith("Unknown task")
            assert foreign.message.replace(task_id, "ID") == unknown.message.replace(absent, "ID")
            assert str(foreign.data).replace(task_id, "ID") == str(unknown.data).replace(absent, "ID")
        for tool, more in (("task_status", {}), ("task_cancel", {}), ("task_answer", {"key": "size"})):
            refused = await other.client.call_tool(tool, {"task_id": task_id, **more})
            assert refused.is_error
            assert "Unknown task" in refused.content[0].text
        assert (await owner.get(task_id))["status"] == status


async def _error(call: Awaitable[Any]) -> Any:
    with pytest.raises(MCPError) as caught:
        await call
    return caught.value.error


@both_revisions
async def test_messages_that_no_tool_has_put_are_no_tasks(plane: AsyncPlane, revision: str) -> None:
    receipt = await plane.queue("resize").put({"width": 1}, keep_result=True)
    async with connected(plane, revision) as client:
        for text in (f"resize.{receipt.id}", receipt.id, "", "run:", "run:none", "resize.", "a" * 600, "é.1", "../x.1"):
            assert (await _error(client.get(text))).code == mcp_types.INVALID_PARAMS


@both_revisions
async def test_a_client_without_tasks_waits_or_gets_the_task_id(
    plane: AsyncPlane, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total, message))

    async def work() -> None:
        message = await received(plane)
        async with task_of(message) as task:
            await task.progress(1, 2, "reading")
            while not reports:
                await asyncio.sleep(0.01)
            await message.ack(result={"path": "/cat.png"})

    async with connected(plane, revision, has_tasks=False) as client:
        working = asyncio.create_task(work())
        done = await client.client.call_tool("resize", {"width": 3}, progress_callback=on_progress)
        await working
        assert (done.is_error, done.structured_content) == (False, {"path": "/cat.png"})
        assert reports == [(1, 2, "reading")]

        monkeypatch.setattr(task_protocols, "MCP_TASK_WAIT_SECONDS", 0.0)
        pending = await client.client.call_tool("resize", {"width": 3})
        task_id = pending.structured_content["task_id"]
        assert pending.structured_content["status"] == "working"
        assert "task_status" in pending.content[0].text
        with pytest.raises(InputNeeded):
            await task_of(await received(plane)).ask("size", "Which size?", SIZE_FORM)
        status = (await client.client.call_tool("task_status", {"task_id": task_id})).structured_content
        assert status["questions"] == {"size": {"message": "Which size?", "schema": SIZE_FORM}}
        wrong = await client.client.call_tool("task_answer", {"task_id": task_id, "key": "size"})
        assert wrong.is_error
        given = {"task_id": task_id, "key": "size", "content": {"size": 4}}
        assert (await client.client.call_tool("task_answer", given)).structured_content["status"] == "working"
        message = await received(plane)
        await message.ack(result=(await task_of(message).ask("size", "Which size?")).content)
        status = (await client.client.call_tool("task_status", {"task_id": task_id})).structured_content
        assert (status["status"], status["result"]["structuredContent"]) == ("completed", {"size": 4})
        other = (await client.client.call_tool("resize", {"width": 3})).structured_content["task_id"]
        cancelled = await client.client.call_tool("task_cancel", {"task_id": other})
        assert cancelled.structured_content["status"] == "cancelled"


@both_revisions
async def test_a_call_that_cannot_wait_any_more_has_the_task_id(
    plane: AsyncPlane, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of a server that stops would say: call again, and that would start another job."""

    async def refuse(queue: fastness.AsyncQueue, id: str, *, wait_seconds: float = 0.0) -> Any:
        raise ShutdownDraining("The server is shutting down; call again in a few seconds")

    async with connected(plane, revision, has_tasks=False) as client:
        with monkeypatch.context() as patched:
            patched.setattr(fastness.AsyncQueue, "result", refuse)
            pending = await client.client.call_tool("resize", {"width": 3})
        assert "Do not call the tool again" in pending.content[0].text
        task_id = pending.structured_content["task_id"]
        await (await received(plane)).ack(result={"path": "/cat.png"})
        status = await client.client.call_tool("task_status", {"task_id": task_id})
        assert status.structured_content["status"] == "completed"


@both_revisions
async def test_a_waiting_call_asks_the_person_behind_the_client(plane: AsyncPlane, revision: str) -> None:
    async def elicit(context: Any, params: Any) -> mcp_types.ElicitResult:
        return mcp_types.ElicitResult(action="accept", content={"size": len(params.message)})

    async def work() -> None:
        for _ in range(2):
            message = await received(plane)
            async with task_of(message) as task:
                await message.ack(result=(await task.ask("size", "Which size?", SIZE_FORM)).content)

    async with connected(plane, revision, has_tasks=False, elicitation_callback=elicit) as client:
        working = asyncio.create_task(work())
        done = await client.client.call_tool("resize", {"width": 3})
        await working
        assert done.structured_content == {"size": 11}


async def test_the_questions_of_a_task_share_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Session:
        async def send_request(self, request: Any, kind: Any, *, request_read_timeout_seconds: float, **_: Any) -> Any:
            now[0] += min(request_read_timeout_seconds, 20.0)
            if request.params.message == "0":
                return mcp_types.ElicitResult(action="accept", content={})
            raise MCPError(code=mcp_types.REQUEST_TIMEOUT, message="no answer")

    monkeypatch.setattr(task_protocols, "monotonic", lambda: now[0])
    questions = {str(number): Question(str(number), SIZE_FORM) for number in range(32)}
    view = TaskView(id="resize.1", status="input_required", created_ms=0, updated_ms=0, questions=questions)
    context: Any = SimpleNamespace(session=Session(), request_id=1)
    assert set(await task_protocols._ask(context, view, 50.0)) == {"0"}
    assert now[0] == 50.0


async def test_a_client_that_has_not_declared_tasks_gets_none(plane: AsyncPlane) -> None:
    async with connected(plane, "2026-07-28") as client:
        task_id = await client.start("resize", width=1)
        assert (await _error(client.payload(task_id))).code == mcp_types.METHOD_NOT_FOUND
    async with connected(plane, "2026-07-28", has_tasks=False) as client:
        for call in (client.get(task_id), client.cancel(task_id), client.answer(task_id)):
            refused = await _error(call)
            assert refused.code == mcp_types.MISSING_REQUIRED_CLIENT_CAPABILITY
            assert refused.data == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
    async with connected(plane, "2025-11-25") as client:
        with pytest.raises(MCPError, match="does not run as a task"):
            await client.start("queue_status", queue="resize", id="1")
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.start("nothing")
        with pytest.raises(MCPError, match="width"):
            await client.start("resize", width="wide")


async def test_wrong_arguments_start_nothing(plane: AsyncPlane) -> None:
    failures = Failures()
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "'width' is a required property"),
        ({"width": "3"}, "width: '3' is not of type 'integer'"),
        ({"width": 0}, "width: 0 is less than the minimum of 1"),
        ({"width": 1, "name": "a name that is too long"}, "name: 'a name that is too long' is too long"),
        ({"width": 1, "more": None}, "Additional properties are not allowed"),
    ]
    for arguments, said in cases:
        for revision in REVISIONS:
            with failures.of((arguments, said, revision)):
                async with connected(plane, revision) as client:
                    refused = await client.client.call_tool("resize", arguments)
                    assert refused.is_error
                    assert refused.structured_content["code"] == "invalid_argument"
                    assert said in refused.content[0].text
                assert (await plane.queue("resize").stats()).ready == 0
    failures.check()


async def test_values_are_compared_with_schemas_in_threads(plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return errors_of(*args)

    await expose_async(plane, "resize", WIDTH, output_schema={"type": "object"})
    monkeypatch.setattr(exposed_tools, "errors_of", recorded)
    async with connected(plane, "2026-07-28") as client:
        task_id = await client.start("resize", width=1)
        assert threads
        async with task_of(await received(plane)) as task:
            started = len(threads)
            await task.ask("size", "Which size?", SIZE_FORM)
        del threads[started:]  # Of the worker, which compares its question's schema with that of schemas.
        await client.answer(task_id, size={"action": "accept", "content": {"size": 4}})
        assert len(threads) > started
        answered = len(threads)
        await (await received(plane)).ack(result={"size": 4})
        await client.result(task_id)
        assert len(threads) > answered
    assert threading.main_thread() not in threads


@both_revisions
async def test_a_result_that_does_not_fit_the_output_schema_is_an_error(plane: AsyncPlane, revision: str) -> None:
    output = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    await expose_async(plane, "resize", WIDTH, output_schema=output)
    async with connected(plane, revision) as client:
        for value, fits in (({"path": "/a"}, True), ({"path": 1}, False), ("text", False)):
            task_id = await client.start("resize", width=1)
            await (await received(plane)).ack(result=value)
            result = await client.result(task_id)
            assert bool(result.is_error) is not fits
    await expose_async(plane, "resize", WIDTH)
    async with connected(plane, revision) as client:
        task_id = await client.start("resize", width=1)
        await (await received(plane)).ack(result={"content": [{"type": "text", "text": "no"}], "isError": True})
        result = await client.result(task_id)
        assert (result.is_error, result.content[0].text) == (True, "no")
        for answer, text in (("plain", "plain"), ([1], "[1]"), (None, "null")):
            task_id = await client.start("resize", width=1)
            await (await received(plane)).ack(result=answer)
            assert (await client.result(task_id)).content[0].text == text
        task_id = await client.start("resize", width=1)
        await (await received(plane)).ack(result=b"\xff")
        assert (await client.result(task_id)).content[0].resource.blob == "/w=="


@both_revisions
async def test_a_workflow_is_a_tool_in_the_same_way(plane: AsyncPlane, revision: str) -> None:
    app = fastness.HostApp()

    @app.workflow
    async def order(run: fastness.WorkflowRun, item: str) -> dict[str, Any]:
        task = task_of(run)
        await task.progress(1, 2, f"packing {item}")
        answer = await task.ask("size", "Which size?", SIZE_FORM)
        await task.progress(2, 2, "sent")
        return {"item": item, **answer.content}

    async def elicit(context: Any, params: Any) -> mcp_types.ElicitResult:
        return mcp_types.ElicitResult(action="accept", content={"size": 5})

    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    await expose_async(plane, order.name, schema, name="order", is_workflow=True)
    async with (
        fastness.AsyncHost(plane, app),
        connected(plane, revision, elicitation_callback=elicit) as client,
        connected(plane, revision, "bob") as other,
    ):
        task_id, second = await client.start("order", item="cup"), await client.start("order", item="plate")
        assert task_id.startswith("run:")
        assert (await _error(other.get(task_id))).message.startswith("Unknown task")
        found = await client.get(task_id)
        while found["status"] == "working":
            await asyncio.sleep(0.02)
            found = await client.get(task_id)
        assert (found["status"], found["statusMessage"]) == ("input_required", "Which size?")
        if client.is_modern:
            await client.answer(task_id, size={"action": "accept", "content": {"size": 5}})
            while (await client.get(task_id))["status"] == "working":
                await asyncio.sleep(0.02)
        assert (await client.result(task_id)).structured_content == {"item": "cup", "size": 5}
        await client.cancel(second)
        assert (await client.get(second))["status"] == "cancelled"
        assert (await _error(other.get(task_id))).message.startswith("Unknown task")
        assert (await _error(other.get(second))).message.startswith("Unknown task")


def test_workers_and_task_functions_report_and_ask(database_url: str) -> None:
    """The helper in a handler, and in a function of a task app, both without asyncio."""
    app = fastness.TaskApp(timezone="UTC")

    @app.task(name="measure", queue="measures")
    def measure(width: int) -> dict[str, Any]:
        task = task_of()
        task.progress(1, 2)
        return {"width": width, "size": task.ask("size", "Which size?", SIZE_FORM).content["size"]}

    def resize(message: fastness.Message) -> None:
        with task_of(message) as task:
            task.progress(1, 2)
            message.ack(result={"size": task.ask("size", "Which size?", SIZE_FORM).content["size"]})

    async def start(tool: str) -> str:
        async with fastness.open_async(database_url) as plane, connected(plane, "2026-07-28") as client:
            return await client.start(tool, width=1)

    async def answer(task_id: str) -> None:
        async with fastness.open_async(database_url) as plane, connected(plane, "2026-07-28") as client:
            found = await client.get(task_id)
            assert (found["status"], found["statusMessage"]) == ("input_required", "Which size?")
            await client.answer(task_id, size={"action": "accept", "content": {"size": 7}})

    async def result(task_id: str) -> Any:
        async with fastness.open_async(database_url) as plane, connected(plane, "2026-07-28") as client:
            return (await client.result(task_id)).structured_content

    def run(expected: int) -> None:
        with fastness.open(database_url) as plane:
            app.use(plane)
            assert app.run_ready() == expected
            message = plane.queue("resizes").receive()
            assert message is not None
            resize(message)

    with fastness.open(database_url) as plane:
        expose(plane, "measures", WIDTH, name="measure", task="measure")
        expose(plane, "resizes", WIDTH)
    measured, resized = asyncio.run(start("measure")), asyncio.run(start("resizes"))
    run(1)
    asyncio.run(answer(measured))
    asyncio.run(answer(resized))
    run(1)
    assert asyncio.run(result(measured)) == {"width": 1, "size": 7}
    assert asyncio.run(result(resized)) == {"size": 7}


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'plane'}"


def test_questions_need_a_tool_and_a_form() -> None:
    with pytest.raises(InvalidArgument, match="pass the message"):
        task_of()
    with pytest.raises(InvalidArgument, match="neither a received message"):
        task_of("message")  # type: ignore[call-overload]
    with fastness.open("memory:") as plane:
        plane.queue("resize").put({})
        message = plane.queue("resize").receive()
        assert message is not None
        task = task_of(message)
        task.progress(1)  # No client follows it.
        assert plane.collection("mcp-tasks").scan(task.id).rows == []
        with pytest.raises(InvalidArgument, match="not put by a tool"):
            task.ask("size", "Which size?", SIZE_FORM)
        nested = {"type": "object", "properties": {"a": {"type": "object"}}}
        for key, text, schema in (
            ("a b", "?", None),
            ("a", "", None),
            ("a", "?", nested),
            ("a", "?", {"type": "array"}),
        ):
            with pytest.raises(InvalidArgument):
                task.ask(key, text, schema)
        assert not message.settled


# Each refers twice to the next one: 2**40 schemas for any value.
MULTIPLYING: Final = {str(number): {"allOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(40)} | {
    "40": True
}


def test_a_schema_that_cannot_be_used_is_refused() -> None:
    failures = Failures()
    for schema, said in [
        ([], "must be a JSON object"),
        ({}, '"type": "object"'),
        ({"type": "array"}, '"type": "object"'),
        ({"type": "object", "properties": 1}, "not valid JSON Schema"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "not valid JSON Schema"),
        (
            {"type": "object", "properties": {"a": {"pattern": "("}}},
            "pattern that cannot be used: '\\(': unclosed group",
        ),
        ({"type": "object", "properties": {"a": {"pattern": "(?=a)"}}}, "look-around"),
        ({"type": "object", "patternProperties": {r"(a)\1": {}}}, "backreferences"),
        (
            {"type": "object", "patternProperties": {"a": {}}, "unevaluatedProperties": False},
            "use additionalProperties",
        ),
        ({"type": "object", "$schema": 5}, "another dialect"),
        ({"type": "object", "required": [{}] * 2}, "not valid JSON Schema"),
        ({"type": "object", "$ref": "#/$defs/0", "$defs": MULTIPLYING}, "takes too long for any value"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}, "into \\$defs"),
        ({"type": "object", "$id": "https://example.com/", "properties": {"a": {"$ref": "b"}}}, "into \\$defs"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}, "which it does not have"),
        ({"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}}}, "x-mcp-header"),
        ({"type": "object", "allOf": [{"$ref": "#"}]}, "leads back to itself"),
        ({"type": "object", "description": "x" * 40_000}, "bytes; at most"),
        ({"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}, "another dialect"),
        ({"type": "object", "default": json.loads("[" * 80 + "]" * 80)}, "nested deeper"),
    ]:
        with failures.of((schema, said)), fastness.open("memory:") as plane:
            with pytest.raises(InvalidArgument, match=said):
                expose(plane, "resize", schema)
            with pytest.raises(InvalidArgument, match=said):
                expose(plane, "resize", {"type": "object"}, output_schema=schema)
            assert exposed(plane) == []
    failures.check()


def test_tools_are_exposed_listed_and_concealed() -> None:
    schema = {"type": "object"}
    with fastness.open("memory:") as plane:
        assert expose(plane, "images.resize", schema).name == "images_resize"
        assert expose(plane, "images.resize", schema, name="resize").name == "resize"
        expose(plane, "images.resize", schema, name="resize", description="Again.")
        assert [(tool.name, tool.target) for tool in exposed(plane)] == [
            ("images_resize", "images.resize"),
            ("resize", "images.resize"),
        ]
        assert exposed(plane)[1].description == "Again."
        conceal(plane, "images_resize")
        with pytest.raises(NotFound, match="fastness mcp list"):
            conceal(plane, "images_resize")
        for refused in ("a b", "", "x" * 65, "é", "queue_status", "task_status"):
            with pytest.raises(InvalidArgument):
                expose(plane, "resize", schema, name=refused)
        with pytest.raises(InvalidName):
            expose(plane, "no such\n", schema)
        with pytest.raises(InvalidArgument, match="'run:'"):
            expose(plane, "run:a", schema)
        with pytest.raises(InvalidArgument, match="property 'id'"):
            expose(plane, "order", {"type": "object", "properties": {"id": {}}}, is_workflow=True)
        for number in range(99):
            expose(plane, "resize", schema, name=f"tool{number}")
        with pytest.raises(InvalidArgument, match="fastness mcp conceal"):
            expose(plane, "resize", schema, name="one-more")
        expose(plane, "resize", schema, name="resize")  # It exists.
