"""Hosts that crash at every boundary do everything once, on every backend that stores data."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fastness.hosts.apps import HostApp
from fastness.hosts.programs import Event, TurnContext
from fastness.hosts.workflows.run import WorkflowRun
from fastness.testing import HostTest, crash_everywhere
from tests.unit.host_test_apps import pay, rolled_out

app = HostApp()


@app.program
def parcel(state: Any, event: Event, context: TurnContext) -> Any:
    """Asks for a label, and sends it on when a timer fires."""
    if event.name == "packed":
        context.call("label", event.json())
        context.timer("pickup", seconds=60)
    elif event.is_timer("pickup"):
        context.send("depot", {"label": state})
        context.put("mails", {"sent": state})
    return event.json() if event.is_receipt("label") else state


@app.program
def depot(state: Any, event: Event, context: TurnContext) -> Any:
    return [*(state or []), event.json()["label"]]


@app.adapter("label")
def label(call: Any) -> str:
    return f"label of {call.json()}"


@app.workflow
async def greet(run: WorkflowRun, name: str) -> str:
    greeting = await run.step(str.upper, name)
    await run.put("mails", {"greeting": greeting})
    await run.sleep(30)
    return greeting


def scenario(test: HostTest) -> Any:
    for name in ("parcel", "depot"):
        test.plane.world(name).create(program=name)
    test.plane.world("parcel").send("packed", 17)
    run = test.plane.workflows.start(greet, "ada", id="g-1")
    greeting = test.run_to_end(run)
    test.advance(minutes=2)
    return [greeting, test.state("depot")]


@pytest.fixture
def new_directory(tmp_path: Path) -> Callable[[], str]:
    """Returns the URL of a directory that does not exist."""
    numbers = itertools.count()
    return lambda: f"dir:{tmp_path / str(next(numbers))}"


@pytest.fixture
def emptied_database(postgres_url: str) -> Callable[[], str]:
    """Empties the database of the test, and returns its URL."""

    def empty() -> str:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return postgres_url

    return empty


def test_a_host_on_rocksdb_does_everything_once(new_directory: Callable[[], str]) -> None:
    report = crash_everywhere(app, scenario, open_url=new_directory, stalls=False, snapshot_every=16)
    assert report.result == ["ADA", ["label of 17"]]
    assert set(report.repeated) == {"adapter label of parcel", "step upper of run:g-1"}


def test_a_step_keeps_its_id_on_rocksdb_when_changed_code_goes_on(new_directory: Callable[[], str]) -> None:
    report = crash_everywhere(rolled_out, pay, open_url=new_directory, stalls=False)
    assert report.result == "paid"
    assert set(report.repeated) == {"step charge_by_card of run:p-1"}


@pytest.mark.rotating  # The boundaries are those of the host, not of the backend.
def test_a_host_on_postgresql_does_everything_once(emptied_database: Callable[[], str]) -> None:
    report = crash_everywhere(app, scenario, open_url=emptied_database, stalls=False, snapshot_every=16)
    assert report.result == ["ADA", ["label of 17"]]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["new_directory", "emptied_database"])
def test_a_host_that_is_delayed_does_everything_once(backend: str, request: pytest.FixtureRequest) -> None:
    report = crash_everywhere(app, scenario, open_url=request.getfixturevalue(backend), snapshot_every=4)
    assert report.runs == 2 * len(report.boundaries) + 1
