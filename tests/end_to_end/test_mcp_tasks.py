"""Tasks over the transports of MCP: `/mcp` of a server with tokens, and `fastness mcp` over standard streams."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import mcp_types
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

import fastness
from fastness.mcp.exposing import expose
from fastness.mcp.tasks import InputNeeded, task_of
from tests.support.forked import python_command
from tests.support.mcp_task_client import TaskClient, TaskExtension
from tests.support.server_process import SECONDS_MAX, Server

REVISIONS = ("2025-11-25", "2026-07-28")
WIDTH = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
SIZE_FORM = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
LEAST = ["queue:put"]  # What an agent needs for tasks of queues.


class Served:
    """A server with tokens: of ada and bob in one universe, of eve in another, and of a worker."""

    def __init__(self, folder: Path) -> None:
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            make = plane.tokens.create
            self.tokens = {
                "ada": make("ada", universes=["main"], verbs=LEAST).token,
                "bob": make("bob", universes=["main"], verbs=["*"]).token,
                "eve": make("ada", universes=["other"], verbs=["*"]).token,  # The same name, in another universe.
                "worker": make("worker", universes=["*"], verbs=["*"]).token,
            }
            expose(plane, "resize", WIDTH)
        self.process = Server(folder, tokens=True)
        self.worker = fastness.connect(self.process.url, token=self.tokens["worker"], patience_seconds=SECONDS_MAX)

    @asynccontextmanager
    async def client(self, name: str, revision: str, **options: Any) -> AsyncIterator[Any]:
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        async with httpx2.AsyncClient(headers=headers, timeout=SECONDS_MAX) as carrier:
            transport = streamable_http_client(f"{self.process.url}/mcp", http_client=carrier)
            async with connected(transport, revision, **options) as client:
                yield client

    def receive(self) -> fastness.Message:
        message = self.worker.queue("resize").receive(wait_seconds=20)
        assert message is not None
        return message


@asynccontextmanager
async def connected(transport: Any, revision: str, **options: Any) -> AsyncIterator[Any]:
    mode: Any = "legacy" if revision == "2025-11-25" else revision
    async with (
        asyncio.timeout(2 * SECONDS_MAX),
        Client(transport, mode=mode, extensions=[TaskExtension()], **options) as client,
    ):
        assert client.protocol_version == revision
        yield TaskClient(client)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("mcp_tasks"))
    try:
        with served.worker:
            yield served
    finally:
        log = served.process.log()
        served.process.kill()
    assert "Traceback" not in log, log


async def _keep(served: Served, owner: Any, task_id: str) -> None:
    pass


async def _complete(served: Served, owner: Any, task_id: str) -> None:
    message = await asyncio.to_thread(served.receive)
    await asyncio.to_thread(message.ack, result={"secret": 1})


async def _fail(served: Served, owner: Any, task_id: str) -> None:
    message = await asyncio.to_thread(served.receive)
    await asyncio.to_thread(message.reject, "secret")


async def _cancel(served: Served, owner: Any, task_id: str) -> None:
    await owner.cancel(task_id)


async def _ask(served: Served, owner: Any, task_id: str) -> None:
    message = await asyncio.to_thread(served.receive)
    with pytest.raises(InputNeeded):
        await asyncio.to_thread(task_of(message).ask, "size", "secret?", SIZE_FORM)


STATES: dict[str, Callable[[Served, Any, str], Awaitable[None]]] = {
    "completed": _complete,
    "failed": _fail,
    "cancelled": _cancel,
    "input_required": _ask,
    "working": _keep,  # Last: its message stays in the queue.
}


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_cannot_see_a_task_of_another(served: Served, revision: str) -> None:
    async with (
        served.client("ada", revision) as owner,
        served.client("bob", revision) as bob,
        served.client("eve", revision) as eve,
    ):
        for status, bring in STATES.items():
            task_id = await owner.start("resize", width=1)
            await bring(served, owner, task_id)
            for other in (bob, eve):
                calls = [other.get, other.cancel, other.answer if other.is_modern else other.payload]
                for call in calls:
                    with pytest.raises(MCPError, match="Unknown task") as refused:
                        await call(task_id)
                    assert "secret" not in str(refused.value.error)
                answer = await other.client.call_tool("task_status", {"task_id": task_id})
                assert answer.is_error
                assert "secret" not in str(answer)
            assert (await owner.get(task_id))["status"] == status
            await owner.cancel(task_id) if status in ("working", "input_required") else None
        assert "resize" not in {tool.name for tool in (await eve.client.list_tools()).tools}


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_token_that_may_put_is_enough_for_tasks(served: Served, revision: str) -> None:
    """It follows, answers and cancels what it has started, and cannot read the messages of others."""

    async def elicit(context: Any, params: Any) -> Any:
        return mcp_types.ElicitResult(action="accept", content={"size": 4})

    def work() -> None:
        message = served.receive()
        with task_of(message) as task:
            task.progress(1, 2, "measuring")
            message.ack(result={"size": task.ask("size", "Which size?", SIZE_FORM).content["size"]})

    async with served.client("ada", revision, elicitation_callback=elicit) as ada:
        listed = {tool.name for tool in (await ada.client.list_tools()).tools}
        assert {"resize", "task_status", "task_cancel", "task_answer", "queue_put"} <= listed
        assert not {"state_set", "queue_result", "queue_receive"} & listed
        task_id = await ada.start("resize", width=1)
        await asyncio.to_thread(work)
        assert (await ada.get(task_id))["statusMessage"] == "Which size?"
        working = asyncio.create_task(asyncio.to_thread(work))
        if ada.is_modern:
            await ada.answer(task_id, size={"action": "accept", "content": {"size": 4}})
            await working
        assert (await ada.result(task_id)).structured_content == {"size": 4}
        await working
        await ada.cancel(await ada.start("resize", width=2))


async def test_a_task_is_found_again_by_another_process_and_revision(served: Served) -> None:
    """`fastness mcp` starts it; the process ends, and another one with the other revision finds it by its id."""
    words = ["mcp", "--url", served.process.url, "--token", served.tokens["worker"]]
    command, arguments = python_command("-m", "fastness.cli", *words)
    process = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    async with connected(process, "2025-11-25") as client:
        task_id = await client.start("resize", width=5)
    message = await asyncio.to_thread(served.receive)
    await asyncio.to_thread(task_of(message).progress, 1, 2, "half")
    async with connected(process, "2026-07-28") as client:
        assert (await client.get(task_id))["statusMessage"] == "1 of 2: half"
        await asyncio.to_thread(message.ack, result={"width": 5})
        assert (await client.result(task_id)).structured_content == {"width": 5}
