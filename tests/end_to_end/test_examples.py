"""The examples of jobs: each runs as a process with a real server, ends by itself, and can be run again."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_shared = runpy.run_path(str(Path(__file__).with_name("processes.py")))  # Test files cannot import each other.
EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
SECONDS_MAX = 60.0
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = _shared["Server"](tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < LINES_MAX


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_twice(name: str, server: Any) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    environment |= {"HOLDFAST_URL": server.url}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert (done.returncode, done.stdout.splitlines()) == (0, EXPECTED[name]), done.stderr
