"""`fastness serve` is killed while agents wait for tasks: every task goes on, and is found again by its id."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

import fastness
from tests.support.forked import run_python, start_python
from tests.support.mcp_task_client import TaskClient, TaskExtension
from tests.support.server_process import SECONDS_MAX, Server

HERE = Path(__file__).parent
REVISIONS = ("2025-11-25", "2026-07-28")
WIDTH = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}


class Plane:
    """A data directory with tokens, and the server process that serves it on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            self.tokens = {
                name: plane.tokens.create(name, universes=["main"], verbs=["*"]).token
                for name in ("ada", "bob", "worker")
            }
            # No lease ends while the server is down, however long its start takes.
            plane.queue("resize").set_policy(fastness.QueuePolicy(visibility_seconds=600))
        self.server = Server(folder, tokens=True)
        self.url: str = self.server.url

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        """Serve again, on the same port, where the worker expects it."""
        self.server = Server(self.folder, tokens=True, port=self.server.address[1])
        assert self.server.url == self.url

    def run(self, *words: str) -> None:
        """Run a command against the server."""
        run_python(["-m", "fastness.cli", "--url", self.url, "--token", self.tokens["worker"], *words], check=True)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """A worker in a process of its own."""
        arguments = [self.url, self.tokens["worker"], str(self.folder)]
        process = start_python([HERE / "mcp_worker_child.py", *arguments], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    @asynccontextmanager
    async def client(self, agent: str, revision: str) -> AsyncIterator[Any]:
        headers = {"Authorization": f"Bearer {self.tokens[agent]}"}
        async with httpx2.AsyncClient(headers=headers, timeout=SECONDS_MAX) as carrier:
            transport = streamable_http_client(f"{self.url}/mcp", http_client=carrier)
            mode: Any = "legacy" if revision == "2025-11-25" else revision
            async with Client(transport, mode=mode, extensions=[TaskExtension()]) as client:
                assert client.protocol_version == revision
                yield TaskClient(client)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    plane = Plane(tmp_path)
    try:
        yield plane
    finally:
        plane.kill()


def test_tasks_complete_under_their_ids_after_the_server_was_killed(plane: Plane) -> None:
    schema = plane.folder / "resize.json"
    schema.write_text(json.dumps(WIDTH))
    plane.run("mcp", "expose", "resize", "--schema", str(schema), "--description", "Resizes an image.")
    with plane.worker():
        tasks = asyncio.run(_start(plane))
        plane.kill()
        plane.restart()
        asyncio.run(_finish(plane, tasks))


class Tasks(NamedTuple):
    """The ids of tasks, by revision."""

    running: dict[str, str]
    waiting: dict[str, str]
    cancelled: dict[str, str]


async def _start(plane: Plane) -> Tasks:
    """Tasks of each revision: one that the worker has begun, and two that wait behind it."""
    tasks = Tasks({}, {}, {})
    async with asyncio.timeout(2 * SECONDS_MAX):
        for revision in REVISIONS:
            async with plane.client("ada", revision) as ada:
                assert "resize" in {tool.name for tool in (await ada.client.list_tools()).tools}
                tasks.running[revision] = await ada.start("resize", width=1)
                while (await ada.get(tasks.running[revision])).get("statusMessage") != "1 of 2: started":
                    await asyncio.sleep(0.02)
        for revision in REVISIONS:
            async with plane.client("ada", revision) as ada:
                tasks.waiting[revision] = await ada.start("resize", width=2)
                tasks.cancelled[revision] = await ada.start("resize", width=3)
    return tasks


async def _finish(plane: Plane, tasks: Tasks) -> None:
    """The tasks are what they were, for their owner only; the worker ends what it has begun, and does the rest."""
    async with asyncio.timeout(2 * SECONDS_MAX):
        for revision in REVISIONS:
            async with plane.client("ada", revision) as ada, plane.client("bob", revision) as bob:
                assert (await ada.get(tasks.running[revision]))["statusMessage"] == "1 of 2: started"
                assert (await ada.get(tasks.waiting[revision]))["status"] == "working"
                await ada.cancel(tasks.cancelled[revision])
                for task_id in (each[revision] for each in tasks):
                    with pytest.raises(MCPError, match="Unknown task"):
                        await bob.get(task_id)
        (plane.folder / "go").touch()
        for revision in REVISIONS:
            async with plane.client("ada", revision) as ada:
                for task_id, width in ((tasks.running[revision], 1), (tasks.waiting[revision], 2)):
                    while (found := await ada.get(task_id))["status"] == "working":
                        await asyncio.sleep(0.05)
                    assert found["status"] == "completed"
                    assert (await ada.result(task_id)).structured_content == {"width": width, "attempts": 1}
                assert (await ada.get(tasks.cancelled[revision]))["status"] == "cancelled"
