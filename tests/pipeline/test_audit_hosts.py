"""The audit replays the worlds of programs and the runs of workflows with the code of their app."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import fastness
from fastness.hosts.host import AsyncHost
from fastness.hosts.workflows.records import fold
from fastness.pipeline import replays
from fastness.pipeline.config import Config
from fastness.pipeline.jobs import audit
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import WORLD_STATE
from fastness.wire.canonical import canonical

AGENTS = """
from fastness.hosts.apps import HostApp

app = HostApp()

@app.program
def counter(state, event, context):
    if event.name == "order":
        context.call("echo", event.payload)
    return {"bytes": (state or {"bytes": 0})["bytes"] + len(event.payload) * FACTOR, "last": event.name}

@app.adapter("echo")
def echo(call):
    return call.payload

@app.workflow
async def double(run, number: int) -> int:
    for _ in range(8):
        number = await run.step(add, number, number)
    return number

def add(first, second):
    return first + second
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plane with a hosted world, a run that has ended, and a world without a program."""
    (tmp_path / "agents_of_mine.py").write_text(f"FACTOR = 1\n{AGENTS}")
    (tmp_path / "changed_agents.py").write_text(f"FACTOR = 2\n{AGENTS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    app = importlib.import_module("agents_of_mine").app

    async def build() -> None:
        async with fastness.open_async(f"dir:{tmp_path / 'data'}") as plane:
            await plane.world("plain").create()
            await plane.world("plain").append(["by hand"], expected_head=0)
            await plane.world("orders").create(program="counter")
            for size in (10, 10_000, 300, 40_000):  # Some are blobs.
                await plane.world("orders").send("order", {"text": "x" * size})
            await plane.workflows.start("double", 1, id="d-1")
            await AsyncHost(plane, app, snapshot_every=4).run_ready()
            assert await plane.workflows.result("d-1") == 256
            verdict = await plane.world("orders").verify(app.programs["counter"].reducer)
            assert verdict.agrees
            assert verdict.snapshots_checked > 1

    asyncio.run(build())
    return tmp_path / "data"


def states(config: Config) -> dict[str, dict[str, Any]]:
    return {row["world"]: row for row in Lake(config.lake).table(WORLD_STATE).rows().to_pylist()}


def test_the_app_of_a_host_replays_its_worlds_on_executors(spark: SparkSession, data: Path) -> None:
    spark.sparkContext.addPyFile(str(data.parent / "agents_of_mine.py"))
    config = Config(data=f"dir:{data}", lake=str(data.parent / "lake"), reducer="agents_of_mine:app")
    result = audit.run(spark, config)
    assert result.findings == []
    rows = states(config)
    with fastness.open(f"dir:{data}") as plane:
        counter = importlib.import_module("agents_of_mine").counter
        for name, reducer in (("orders", counter.reducer), ("run:d-1", fold)):
            assert rows[name]["state"] == canonical(plane.world(name).replay(reducer).state)
    assert {row["verdict"] for row in rows.values()} == {"ok"}


def test_other_code_than_that_of_the_host_is_found(data: Path) -> None:
    config = Config(data=f"dir:{data}", lake=str(data.parent / "lake"), reducer="changed_agents:app")
    found = {(each["world"], each["reason"]) for each in audit.run(None, config).findings}
    assert found == {("orders", "contradicts")}


def test_a_program_is_a_reducer_by_its_name(data: Path) -> None:
    counter = importlib.import_module("agents_of_mine").counter
    assert replays.reducer_of("agents_of_mine:counter") is counter.reducer
    assert replays.reducer_of("agents_of_mine:app", "orders", "counter") is counter.reducer
    assert replays.reducer_of("agents_of_mine:app", "plain", None) is None
