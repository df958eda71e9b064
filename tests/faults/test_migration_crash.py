"""kill -9 during `fastness migrate`: the next run resumes, and the target equals the source."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import fastness
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.rocksdb import RocksReader
from fastness.errors import MigrationUnfinished
from fastness.kv import Database
from fastness.layers.migrations import BEGIN, END
from fastness.runtime.maintenance.migrations import _pairs_of
from fastness.testing.clock import ManualClock
from tests.support.depth import Depth
from tests.support.forked import run_python
from tests.support.populated import everything, populate

# The command with small batches. It prints each step and kills itself after one of them, which is more exact than a
# kill from outside.
CHILD = """
import contextlib, os, signal, sys
from fastness.cli import printing
from fastness.runtime.maintenance import migrations
migrations.MIGRATION_BATCH_PAIRS, migrations.MIGRATION_RANGE_PAIRS = 16, 24
left = int(os.environ["STEPS"])
@contextlib.contextmanager
def progress(what, total=None):
    def advance(steps):
        global left
        os.write(2, f"{what} {steps}\\n".encode())
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    yield advance
printing.progress = progress
from fastness.cli.main import main
main()
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a bucket in a local S3, with credentials in the environment for child processes."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # For the links of killed children.
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="crash")
    yield "s3://crash/plane"
    server.stop()


def migrate(*words: str, kill_after: int = 0) -> tuple[int, str, list[str]]:
    """Run the command and kill it after so many steps; returns its exit code, output and steps."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    environment["STEPS"] = str(kill_after)
    done = run_python(["-c", CHILD, "migrate", *words, "--json"], env=environment)
    steps = done.stderr.splitlines()
    assert not [line for line in steps if line.startswith("{")], done.stderr
    return done.returncode, done.stdout, steps


def pairs(database: Database) -> dict[bytes, bytes]:
    return dict(_pairs_of(database, BEGIN, END))


@pytest.mark.rotating
def test_a_killed_migration_resumes_where_it_stopped(
    environment: str, postgres_url: str, tmp_path: Path, clock: ManualClock, depth: Depth
) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    with fastness.open(f"dir:{data}", clock=clock) as plane:
        populate(plane, clock, messages=150)
        seen = everything(plane)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    _, _, whole = migrate(f"dir:{data}", f"dir:{tmp_path / 'whole'}")  # All steps of a run.
    assert len(whole) > 30
    # Objects and comparisons start over, so every resumed run takes at least those steps.
    fewest = sum(not step.startswith("Keys") for step in whole)
    digests = set()
    cases: list[tuple[tuple[str, str], str, dict[str, Any]]] = [
        ((f"dir:{data}", postgres_url), postgres_url, {"objects": environment, "activity": str(tmp_path / "logs")}),
        ((postgres_url, f"dir:{back}"), f"dir:{back}", {}),
    ]
    for words, target, options in cases:
        for _ in range(max(1, depth.kills // 6)):
            code, _, taken = migrate(*words, "--objects", environment, kill_after=chance.randrange(1, fewest))
            print(f"killed behind {taken[-1]}, step {len(taken)} of {len(whole)}")
            assert code == -9
            with pytest.raises(MigrationUnfinished):
                fastness.open(target)
        code, said, _ = migrate(*words, "--objects", environment)
        assert code == 0
        moved = json.loads(said)
        assert (moved["verified"], moved["again"]) == (True, 0)
        digests.add(moved["digest"])
        with fastness.open(target, clock=clock, **options) as plane:
            assert everything(plane) == seen
    assert len(digests) == 1
    with RocksReader(data / "kv") as first, RocksReader(back / "kv") as last, PostgresDatabase(postgres_url) as middle:
        assert pairs(first) == pairs(last) == pairs(middle)
