"""Tasks through the TypeScript client of MCP and its task package, on both protocol revisions.

The packages come from the npm registry, in the versions of `mcp_node/package-lock.json`.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.mcp.exposing import expose
from fastness.mcp.tasks import task_of
from tests.support.node_packages import installed_program
from tests.support.server_process import SECONDS_MAX, Server

HERE = Path(__file__).parent
WIDTH = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
SIZE_FORM = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@pytest.fixture(scope="session")
def script() -> Path:
    """The program, with its packages installed."""
    return installed_program(HERE / "mcp_node", "tasks.mjs")


class Plane:
    """A server with the tokens of two agents, and a program that works for its tools."""

    def __init__(self, folder: Path, script: Path) -> None:
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            names = ("ada", "bob", "worker")
            self.tokens = {name: plane.tokens.create(name, universes=["main"], verbs=["*"]).token for name in names}
            expose(plane, "resize", WIDTH)
        self.server = Server(folder, tokens=True)
        self.worker = fastness.connect(self.server.url, token=self.tokens["worker"], patience_seconds=SECONDS_MAX)
        self._script = script

    def start(self, agent: str, *words: str) -> "subprocess.Popen[str]":
        """Start the program as an agent."""
        command = ["node", str(self._script), f"{self.server.url}/mcp", self.tokens[agent], *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, agent: str, *words: str) -> Any:
        """What the program prints."""
        return answer_of(self.start(agent, *words))

    def receive(self) -> fastness.Message:
        for _ in range(6):
            message = self.worker.queue("resize").receive(wait_seconds=20)
            if message is not None:
                return message
        raise AssertionError("no message has arrived")


def answer_of(process: "subprocess.Popen[str]") -> Any:
    out, error = process.communicate(timeout=2 * SECONDS_MAX)
    assert process.returncode == 0, error
    return json.loads(out)


@pytest.fixture
def plane(tmp_path: Path, script: Path) -> Iterator[Plane]:
    plane = Plane(tmp_path, script)
    try:
        with plane.worker:
            yield plane
    finally:
        plane.server.kill()


def work(plane: Plane) -> None:
    message = plane.receive()
    with task_of(message) as task:
        task.progress(1, 2, "measuring")
        answer = task.ask("size", "Which size?", SIZE_FORM)
        message.ack(result={"size": answer.content["size"], "width": message.json()["width"]})


@pytest.mark.rotating
def test_the_typescript_client_runs_a_task_to_its_result(plane: Plane) -> None:
    for era in ("legacy", "modern"):
        started = plane.run("ada", era, "start")
        assert (started["era"], started["kind"]) == (era, "task")
        assert started["tools"] > 20
        assert all(is_valid for _, is_valid in started["seen"])
        work(plane)  # It asks.
        assert plane.run("ada", era, "status", started["taskId"])["status"] == "input_required"
        assert "Unknown task" in plane.run("bob", era, "status", started["taskId"])["error"]
        finishing = plane.start("ada", era, "finish", json.dumps(started["reference"]))
        try:
            work(plane)  # It continues with the answer.
            finished = answer_of(finishing)
        finally:
            finishing.kill()
            finishing.communicate()
        assert finished["result"]["structuredContent"] == {"size": 9, "width": 3}
        assert [each for each in finished["seen"] if each[0] == "asked"] == [["asked", "Which size?"]]
        assert all(is_valid for _, is_valid in finished["seen"])
