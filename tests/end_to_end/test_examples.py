"""The examples of jobs, operations, pushes and MCP: each runs as a process with a real server, ends, and runs again."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import run_python
from tests.support.server_process import Server

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
LINES_MAX = 80

EXPECTED = {
    "webhooks": ["10 events delivered; refused requests: 1"],
    "thumbnails": [
        *["a thumbnail of 80 by 60 pixels, 14413 bytes"] * 3,
        "failed: Reject: the image is not a PPM. Correct the cause, then redrive it",
    ],
    "reports": ["finished small-0.html to small-4.html; fewer than 50 reports of the large tenant came first: True"],
    "saga": [
        "flight: booked",
        "hotel: booked",
        "bookings: RuntimeError",
        "bookings: RuntimeError",
        "hotel: cancelled",
        "flight: cancelled",
    ],
    "cleanup": ["the next clean-up is in less than a day: True", "removed 3 files, 7 are left"],
    "indexer": ["indexed 250 documents in 3 batches; 252 words"],
}
OPERATIONS = {
    "encrypted": [
        "plain: readable in the files: True",
        "shop: readable in the files: False",
        "encryption_key_missing",
        "with the key: account DE89 3704 0044",
    ],
    "quota": [
        *(f"put {number}" for number in range(3)),
        *(f"{number} is refused: 3 of 3 messages" for number in (3, 4)),
        "after the acks: 0 of 3 messages",
        "put 5",
    ],
    "search_and_retry": [
        "retried: 2",
        "moved: 1",
        "delivered to ada@example.com",
        "delivered to bob@example.com",
        "by hand: True",
    ],
}
# The test that runs the programs of a folder, or one program.
RUN_BY = {
    "agents": "end_to_end/test_agent_examples.py",
    "airflow": "pipeline/test_orchestrators.py",
    "dagster": "pipeline/test_orchestrators.py",
    "celery_orders.py": "end_to_end/test_celery_sqs.py",
    "declarative": "pipeline/test_declarative.py",
    "frameworks": "end_to_end/test_framework_examples.py",
    "jobs": "end_to_end/test_examples.py",
    "operations": "end_to_end/test_examples.py",
    "transactions": "end_to_end/test_within.py",
    "mcp_agent.py": "end_to_end/test_examples.py",
    "mcp_tasks.py": "end_to_end/test_examples.py",
    "push.py": "end_to_end/test_examples.py",
}
MCP_AGENT = ["reserved src/app.py", "asked reviewer", "acknowledged", "result: {'edited': ['src/app.py']}"]
MCP_TASKS = ["status: working", "result: {'words': 3}"]
PUSH = ["oven: 95 degrees", "4 samples are stored"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < LINES_MAX


def test_every_example_is_run_and_linked() -> None:
    root = EXAMPLES.parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    links = {(page.parent / link).resolve() for page in pages for link in re.findall(r"\]\(([^)#]+)", page.read_text())}
    programs = sorted((root / "examples").rglob("*.py"))
    assert len(programs) >= 25
    assert [str(path) for path in programs if path not in links] == []
    folders = {path.relative_to(root / "examples").parts[0] for path in programs}
    assert folders == set(RUN_BY)
    for name, test in RUN_BY.items():
        assert re.search(rf"\b{re.escape(name)}\b", (root / "tests" / test).read_text()), f"{test} does not name {name}"


def test_an_example_without_its_variable_says_what_to_set() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    program = EXAMPLES.parent / "transactions" / "orders.py"
    done = run_python([program], env=environment)
    assert done.returncode == 1
    assert re.fullmatch(r"Set DATABASE_URL to .+\.\n", done.stderr)
    texts = {path: path.read_text() for path in EXAMPLES.parent.rglob("*.py")}
    assert [path for path, text in texts.items() if "os.environ[" in text] == []  # A bare KeyError.


def test_every_example_of_operations_is_tested() -> None:
    assert {path.stem for path in (EXAMPLES.parent / "operations").glob("*.py")} == set(OPERATIONS)


@pytest.mark.rotating
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_example_of_operations_runs_twice(name: str, server: Server) -> None:
    run_twice(EXAMPLES.parent / "operations" / f"{name}.py", server, OPERATIONS[name])


@pytest.mark.rotating
def test_the_example_of_pushes_runs_twice(server: Server) -> None:
    run_twice(EXAMPLES.parent / "push.py", server, PUSH)


@pytest.mark.rotating
def test_the_example_of_an_mcp_agent_runs_twice(server: Server) -> None:
    run_twice(EXAMPLES.parent / "mcp_agent.py", server, MCP_AGENT)


@pytest.mark.rotating
def test_the_example_of_tasks_of_mcp_runs_twice(server: Server) -> None:
    run_twice(EXAMPLES.parent / "mcp_tasks.py", server, MCP_TASKS)


@pytest.mark.rotating
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_twice(name: str, server: Server) -> None:
    run_twice(EXAMPLES / f"{name}.py", server, EXPECTED[name])


def run_twice(path: Path, server: Server, expected: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FASTNESS_")}
    environment |= {"FASTNESS_URL": server.url}
    for _ in range(2):
        done = run_python([path], env=environment)
        assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
