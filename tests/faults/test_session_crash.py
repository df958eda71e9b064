"""SIGKILL during conversations of agent frameworks: restarted, each ends with the history of an undisturbed one."""

import json
import random
from pathlib import Path

import pytest

from tests.support.depth import Depth
from tests.support.forked import run_python

CHILD = Path(__file__).parent / "session_child.py"


def run_child(*arguments: str) -> list[str]:
    done = run_python([CHILD, *arguments])
    assert done.returncode == 0, done.stderr[-5_000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("framework", ["openai-agents", pytest.param("adk", marks=pytest.mark.rotating)])
def test_killed_runs_end_in_the_same_state(framework: str, tmp_path: Path, depth: Depth) -> None:
    kills = depth.kills
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    *conversations, report = run_child("run", framework, str(tmp_path), str(seed), str(kills))
    for conversation in conversations:
        found, expected = json.loads(conversation)
        assert found == expected
    print(f"{len(conversations)} conversations, {report}")
    assert json.loads(report)["killed"] == kills
    assert len(conversations) > kills // 20


@pytest.mark.rotating
def test_processes_that_add_to_one_session_lose_nothing_and_keep_items_together(postgres_url: str) -> None:
    [line] = run_child("write", postgres_url)
    found = [item["content"].split() for item in json.loads(line)]
    calls = [tuple(first[:2]) for first in found[::3]]
    assert sorted(calls) == sorted((str(writer), str(call)) for writer in range(2) for call in range(20))
    assert found == [[*call, str(part)] for call in calls for part in range(3)]
