"""The examples of agent frameworks: each runs as a process without a network, and again on the same data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
LINES_MAX = 95

# What an example prints with an empty plane, and what it prints when it is run again.
EXPECTED = {
    "langgraph_graph": (
        ["model: asked for a draft", "next: approve; 3 checkpoints"],
        [
            "approving: Tides follow the moon.",
            "published: Tides follow the moon.",
            "next: nothing; 5 checkpoints",
            "stored: tides of ada",
        ],
    ),
    "adk_sessions": (
        [
            "tool: visit 1",
            "clerk: Welcome, visit 1!",
            "sessions: visit-1; state: {'app:last_visitor': 'ada', 'user:visits': 1}",
        ],
        [
            "tool: visit 2",
            "clerk: Welcome, visit 2!",
            "sessions: visit-1, visit-2; state: {'app:last_visitor': 'ada', 'user:visits': 2}",
        ],
    ),
    "openai_agents_session": (
        [
            "tool: forecast of Kiel",
            "ada: What do I need in Kiel?",
            "guide: Take sunglasses to Kiel.",
            "the model has read 3 items, and 4 are stored",
        ],
        [
            "tool: forecast of Lisbon",
            "ada: What do I need in Lisbon?",
            "guide: Take sunglasses to Lisbon.",
            "the model has read 7 items, and 8 are stored",
        ],
    ),
    "pydantic_ai_agent": (
        [
            "model: request 1",
            "tool: find a flight to Lisbon",
            "model: request 2",
            "tool: book TP 571 for trip-1.1.0.0",
            "model: request 3",
            "answer: You fly to Lisbon with TP 571.",
        ],
        ["answer: You fly to Lisbon with TP 571."],
    ),
}


def run(name: str, url: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FASTNESS_")}
    done = subprocess.run(
        [sys.executable, "-u", str(EXAMPLES / f"{name}.py"), url],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < LINES_MAX


@pytest.mark.rotating
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_does_and_continues_on_the_same_data(name: str, tmp_path: Path) -> None:
    first, second = EXPECTED[name]
    assert run(name, f"dir:{tmp_path / 'data'}") == first
    assert run(name, f"dir:{tmp_path / 'data'}") == second
