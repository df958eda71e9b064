"""The races of benches/ run, with few messages. They measure nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = ("embedded", "network", "latency", "workers", "blocking", "postgres", "rows", "depth", "space")


@pytest.mark.nightly
def test_every_line_of_the_races_of_deliveries_compares_both_codes(tmp_path: Path) -> None:
    found = tmp_path / "results.json"
    options = ["--before", "HEAD", "--scale", "0.01", "--rounds", "1", "--json", str(found)]
    subprocess.run(
        [sys.executable, "-m", "benches.bench_deliveries", *LINES, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
    )
    lines = json.loads(found.read_bytes())["lines"]
    assert list(lines) == list(LINES)
    for name, results in lines.items():
        text = json.dumps(results)
        assert "HEAD" in text, name
        assert "this code" in text, name
        standings = [standing for result in results for standing in result.get("standings", ())]
        assert all(each["per_second"] > 0 and each["client_cpu_us"] > 0 for each in standings), name
    drained = {row[0]: row[-1] for row in lines["space"][0]["rows"]}
    assert drained == {"HEAD": "yes", "this code": "yes"}


@pytest.mark.nightly
def test_every_line_of_the_nodes_compares_all_candidates(tmp_path: Path) -> None:
    found = tmp_path / "results.json"
    subprocess.run(
        [sys.executable, "-m", "benches.bench_nodes", "--scale", "0.02", "--rounds", "1", "--json", str(found)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
    )
    lines = json.loads(found.read_bytes())
    assert list(lines) == ["puts", "batches", "singles", "plain-puts", "plain-batches"]
    for name, candidates in lines.items():
        assert [each["candidate"] for each in candidates] == (
            ["a plain table, asyncpg", "one node"]
            if name.startswith("plain")
            else ["one node", "two nodes, one queue", "two nodes, two queues"]
        )
        assert all(each["per_second"] > 0 for each in candidates), name
        assert all(each[count] >= 0 for each in candidates for count in ("conflicts", "retries", "lock_waits")), name


@pytest.mark.nightly
def test_workflows_are_measured_on_both_storages(tmp_path: Path) -> None:
    found = tmp_path / "results.json"
    subprocess.run(
        [sys.executable, "-m", "benches.bench_workflows", "--quick", "--json", str(found)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
    )
    storages = json.loads(found.read_bytes())
    assert list(storages) == ["postgres", "embedded"]
    for contestants in storages.values():
        assert set(contestants) == {"dbos", "fastness"}
        for figures in contestants.values():
            assert figures["row_steps_per_second"] > 0
            assert figures["concurrent_steps_per_second"] > 0
            assert figures["first_step_p50_ms"] > 0
            assert figures["restore_seconds"] > 0
            assert figures["resident_mib_asleep"] > 0
    assert storages["embedded"]["dbos"]["versions"] | {"synchronous": "2"} == storages["embedded"]["dbos"]["versions"]


@pytest.mark.nightly
@pytest.mark.parametrize("on", ["server", "postgres", "nodes"])
def test_locks_of_processes_are_profiled(on: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benches.profile_locks", "--processes", "4", "--on", on, "--duration", "2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "acquisitions/s by 4 agents" in found.stdout
    assert "Deadlocks: 0. Failures: none." in found.stdout
