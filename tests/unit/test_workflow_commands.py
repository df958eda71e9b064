"""`fastness workflow show` says in one line why a run does not go on, and prints tracebacks below."""

import json
from pathlib import Path

import pytest

from fastness import HostApp, WorkflowRun
from fastness.errors import RunFailed
from fastness.testing import HostTest
from tests.unit.conftest import Cli

first, second, failing = HostApp(), HostApp(), HostApp()


@first.workflow(name="pay")
async def pay(run: WorkflowRun) -> None:
    await run.wait_for("go")


@second.workflow(name="pay")
async def pay_later(run: WorkflowRun) -> None:
    await run.sleep(60)


def charge(card: str) -> None:
    raise ValueError(f"{card} \x1b[2J is declined")


@failing.workflow(name="pay")
async def pay_by_card(run: WorkflowRun) -> None:
    await run.step(charge, "card")


@pytest.mark.parametrize("max_attempts", [1, 5])
def test_the_error_of_a_turn_is_one_line_and_its_traceback_follows(cli: Cli, tmp_path: Path, max_attempts: int) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with HostTest(first, url=url) as test:
        test.plane.workflows.start("pay", id="q")
        test.run_until_idle()
        test.plane.workflows.signal("q", "go")
    with HostTest(second, url=url, max_attempts=max_attempts) as test:
        test.run_until_idle()
    shown = cli("workflow", "show", "q").stdout
    fields, _, traceback = shown.partition("\n\n")
    name = "error" if max_attempts == 1 else "turn error"
    [line] = [line for line in fields.splitlines() if "WorkflowChanged" in line]
    assert line.split(":")[0].split("  ")[0].strip() == name
    assert "Run q has recorded wait go as call 0, and the code makes the call sleep there." in line
    assert "Traceback" not in fields
    assert "the last turn, which failed:\nTraceback (most recent call last):\n" in traceback
    found = json.loads(cli("workflow", "show", "q", "--json").stdout)
    assert found["state"] == ("stopped" if max_attempts == 1 else "running")
    assert found["turn_traceback"].startswith("Traceback")
    stopped = json.loads(cli("workflow", "list", "--state", "stopped", "--json").stdout)
    assert [each["id"] for each in stopped] == (["q"] if max_attempts == 1 else [])


def test_a_failed_step_is_shown_with_its_traceback_and_inputs(cli: Cli, tmp_path: Path) -> None:
    with HostTest(failing, url=f"dir:{tmp_path / 'data'}") as test, pytest.raises(RunFailed):
        test.run_to_end(test.plane.workflows.start("pay", id="p"))
    shown = cli("workflow", "show", "p").stdout
    assert '"inputs":{"args":["card"],"kwargs":{}}' in shown
    assert "\nfailed charge, at 20" in shown
    assert '    raise ValueError(f"{card}' in shown
    assert "\x1b" not in shown
