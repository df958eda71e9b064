"""SIGKILL at random moments of durable agents: they end as without it, and repeat no recorded operation."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

import fastness
from tests.faults import pydantic_ai_child
from tests.support.depth import Depth
from tests.support.forked import run_python

CHILD = Path(__file__).parent / "pydantic_ai_child.py"
KILLS_MIN = 20
PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than the test needs.


def uninterrupted() -> list[list[str]]:
    """What a run records without a kill."""
    with (
        open(os.devnull, "wb", buffering=0) as nowhere,
        fastness.open("memory:") as plane,
        fastness.Host(plane, pydantic_ai_child.app),
    ):
        pydantic_ai_child.files.update(log=nowhere.fileno(), events=nowhere.fileno())
        run = plane.workflows.start(pydantic_ai_child.ask, "r-0", id="r-0")
        assert run.result(wait_seconds=PATIENCE_SECONDS) == "r-0 has ended"
        found: list[list[str]] = pydantic_ai_child.recorded(plane, "r-0")
    assert len(found) == pydantic_ai_child.OPERATIONS
    return found


@pytest.mark.rotating
def test_killed_runs_end_as_one_that_was_not_interrupted(tmp_path: Path, depth: Depth) -> None:
    kills = depth.kills
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    run_python([CHILD, tmp_path, str(kills), str(seed)], check=True)
    expected, count = uninterrupted(), pydantic_ai_child.OPERATIONS

    done: Counter[str] = Counter()  # Operations that are recorded, or were when the current child started.
    begun: Counter[tuple[str, int]] = Counter()
    starts = 0
    for line in (tmp_path / "log").read_text().splitlines():
        word, run, number = line.split()
        if word == "start":
            starts += 1
            assert int(number) in (done[run], done[run] - 1), "a child began what was not recorded before"
            done[run] = int(number)
        else:  # Each operation follows the one that was recorded last.
            assert int(number) == done[run], f"{line} repeats or skips an operation; {done[run]} were recorded"
            begun[run, int(number)] += 1
            done[run] += 1
    assert starts == kills + 1

    runs = sorted(done)
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for run in runs:
            assert plane.workflows.result(run) == f"{run} has ended"
            found = [
                [part.replace(f'"{run}', '"r-0') for part in entry] for entry in pydantic_ai_child.recorded(plane, run)
            ]
            assert found == expected
            assert [begun[run, number] >= 1 for number in range(count)] == [True] * count
    assert sum(begun.values()) - len(runs) * count <= kills  # A kill repeats at most the operation that was running.
    print(f"{kills} kills, {len(runs)} runs, {sum(begun.values()) - len(runs) * count} operations repeated")
