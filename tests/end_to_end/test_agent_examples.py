"""The examples of agents: each runs as a process without a network, and continues after it was killed."""

import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastness.testing import HostTest, crash_everywhere
from tests.support.forked import start_python

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
LINES_MAX = 95

EXPECTED = {
    "assistant": [
        "model: call 1",
        "tool: search for flights to Lisbon",
        "model: call 2",
        "ada: approves book_flight TP 571",
        "tool: book TP 571 for 189.00 euros",
        "model: call 3",
        "answer: You fly to Lisbon with TP 571.",
    ],
    "crew": [
        "model: writes about tides, remark: None",
        "model: writes about tides, remark: at most 6 words",
        "article: The moon pulls the sea.",
        "reviews: 2",
    ],
    "order_saga": [
        "order-1: reserve a kettle",
        "order-1: charge 2900 cents",
        "order-1: ship the kettle",
        "order-1: shipped",
        "order-2: reserve a piano",
        "order-2: charge 690000 cents",
        "order-2: ship the piano",
        "order-2: ship the piano",
        "order-2: refund the payment of order-2",
        "order-2: release the reservation of order-2",
        "order-2: undone, StepFailed",
    ],
    "scraper": [
        "fetch https://a.test/",
        "fetch https://a.test/1",
        "fetch https://a.test/2",
        "fetch https://b.test/",
        "fetch https://a.test/3",
        "fetch https://b.test/1",
        "fetch https://b.test/2",
        "found 7 pages",
    ],
    "subscription": [
        "ada: charge month 1",
        "ada: remind of month 2",
        "ada: charge month 2",
        "ada: remind of month 3",
        "ada: charge month 3",
        "ada: goodbye",
        "ada: paid 3 months",
    ],
}
KILLED_AT = {  # The first line of what follows a recorded step.
    "assistant": {"ada: approves book_flight TP 571"},
    "crew": {"model: writes about tides, remark: at most 6 words"},
    "order_saga": {"order-2: refund the payment of order-2"},
    "scraper": {"fetch https://a.test/3", "fetch https://b.test/1", "fetch https://b.test/2"},
    "subscription": {"ada: charge month 2"},
}
REPORT = {  # What `main` prints of a result. It is printed by every start; everything else happens once.
    "assistant": ["answer: You fly to Lisbon with TP 571."],
    "crew": ["article: The moon pulls the sea.", "reviews: 2"],
    "order_saga": ["order-1: shipped", "order-2: undone, StepFailed"],
    "scraper": ["found 7 pages"],
    "subscription": ["ada: paid 3 months"],
}


def start(name: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FASTNESS_")}
    environment["PYTHONUNBUFFERED"] = "1"
    command: list[str | Path] = [EXAMPLES / f"{name}.py", *arguments]
    return start_python(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> list[str]:
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return output.splitlines()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED) == set(KILLED_AT)
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < LINES_MAX


@pytest.mark.rotating
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_does(name: str) -> None:
    lines = finish(start(name))
    if name == "scraper":  # Pages of one depth are read in any order.
        assert sorted(lines) == sorted(EXPECTED[name])
    else:
        assert lines == EXPECTED[name]


@pytest.mark.rotating
@pytest.mark.parametrize("name", EXPECTED)
def test_a_killed_example_continues_and_repeats_no_recorded_step(name: str, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    process = start(name, url)
    assert process.stdout is not None
    before: list[str] = []  # What was recorded before the line at which it is killed.
    for line in process.stdout:
        if line.rstrip() in KILLED_AT[name]:
            break
        before.append(line.rstrip())
    process.kill()
    seen = {*before, line.rstrip(), *process.stdout.read().splitlines()}
    process.communicate()
    assert before
    assert seen & KILLED_AT[name]

    after = finish(start(name, url))
    assert set(before) & set(after) <= set(REPORT[name])
    assert {*seen, *after} == set(EXPECTED[name])

    assert finish(start(name, url)) == REPORT[name]  # Now everything is recorded.


def test_the_saga_undoes_an_order_once_wherever_it_crashes(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "order_saga.py"))

    def place_order(test: HostTest) -> Any:
        return test.run_to_end(test.plane.workflows.start(example["place_order"], "piano", 690_000, id="order-2"))

    report = crash_everywhere(example["app"], place_order, stalls=False)
    assert report.result == "undone, StepFailed"
    printed = capsys.readouterr().out.splitlines()
    for function in ("reserve", "charge", "refund", "release"):
        calls = sum(line.startswith(f"order-2: {function}") for line in printed)
        assert calls == report.runs + report.repeated[f"step {function} of run:order-2"]


def test_the_crew_writes_an_article_once_wherever_it_crashes() -> None:
    example = runpy.run_path(str(EXAMPLES / "crew.py"))

    def order_article(test: HostTest) -> Any:
        for name in ("editor", "writer", "critic"):
            test.plane.world(name).create(program=example[name])
            test.plane.agents.register(name, world=name)
        test.plane.world("editor").send("order", {"topic": "tides"})
        test.run_until_idle()
        return [test.state(name) for name in ("editor", "critic")]

    report = crash_everywhere(example["app"], order_article, stalls=False)
    assert report.result == [{"tides": "The moon pulls the sea."}, {"reviews": 2}]
    assert set(report.repeated) == {"adapter model of writer"}
