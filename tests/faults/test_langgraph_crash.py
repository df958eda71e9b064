"""A graph whose process is killed again and again ends in the state of one that ran undisturbed, by the same steps."""

import json
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from tests.faults import langgraph_child
from tests.support.depth import Depth
from tests.support.forked import start_python
from tests.support.server_process import Server

CHILD = Path(__file__).with_name("langgraph_child.py")


@pytest.fixture(scope="module")
def child() -> Iterator["subprocess.Popen[str]"]:
    with start_python([CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    server = Server(tmp_path)
    try:
        yield server
    finally:
        server.kill()


def undisturbed() -> Any:
    """How the graph ends without a crash."""
    graph = langgraph_child.make_graph(InMemorySaver())
    graph.invoke(langgraph_child.INPUT, {"configurable": {"thread_id": "model"}})
    return json.loads(json.dumps(langgraph_child.outcome(graph, "model")))


def check(child: "subprocess.Popen[str]", url: str, folder: Path, kills: int) -> None:
    expected = undisturbed()
    assert len(expected["values"]["log"]) == 1 + 4 * langgraph_child.TURNS
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    killed = finished = 0
    result = folder / "result.json"
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        asked = {
            "url": url,
            "thread": f"thread {finished}",
            "seed": numbers.randrange(1 << 32) if killed < kills else None,
            "result": str(result),
        }
        child.stdin.write(json.dumps(asked) + "\n")
        child.stdin.flush()
        status = int(child.stdout.readline())
        assert status in (0, signal.SIGKILL), f"the graph failed with status {status}"
        if status == 0:
            assert json.loads(result.read_text()) == expected
            finished += 1
            if killed == kills:
                break
        else:
            killed += 1
    print(f"{killed} kills in {finished} graphs, which all have the same final state and steps")


@pytest.mark.rotating
def test_a_killed_graph_ends_like_an_undisturbed_one(
    child: "subprocess.Popen[str]", tmp_path: Path, depth: Depth
) -> None:
    check(child, f"dir:{tmp_path / 'data'}", tmp_path, depth.kills)


def test_a_killed_graph_of_a_server_ends_like_an_undisturbed_one(
    child: "subprocess.Popen[str]", server: Any, tmp_path: Path, depth: Depth
) -> None:
    check(child, server.url, tmp_path, max(3, depth.kills // 4))
